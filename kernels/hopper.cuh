// The Hopper configuration of verify_attn_flash: wgmma on tiles of 64 keys, up to 72 attention rows a block. For sm_90a alone. Parameters,
// schedule, partial results and combine are those of verify_attn_flash.cu, which includes this and has all of the mathematics.
//
// Four warpgroups, each of which has another part of a tile's way:
//
//   copy warpgroup     the tile into one of two stages by cp.async, three chunks of 64 columns at a time; of an fp8 pool, also unpacks it
//   score warpgroup    S^T (64 x rows) = K (64 x 576) Q^T, both in shared memory, three chunks at a time as they land; softmax; P^T over
//                      the rope columns, which nobody needs any more
//   value warpgroups   O^T (256 x rows each) += V^T P^T: V^T is the tile read MN-major; the accumulators stay in registers
//
//   time    ------------------------------------------------------------------------------->
//   copies  | 0      | 1               | 2              | 3              | ...
//   scores           | S(0)  softmax(0) | S(1)  softmax(1) | S(2)  softmax(2) | ...
//   values                             | O(0)             | O(1)             | ...
//
// Four things are said, by mbarriers:
//   full[stage][part]  a third of a tile's columns has landed: the score warpgroup may multiply it
//   handed             the score warpgroup has handed over P, and by what the outputs must be multiplied first if a maximum has risen
//   taken              the value warpgroups are done with what was handed over: P and factors are free again
//   free[stage][part]  and so is a third of the stage, as soon as its values were multiplied: the next but one tile's may be copied into it
// A piece ends with one more hand-over, of no P but of 1 / sum for each row and of where the outputs go. Nothing stops between pieces: the
// copies of the next one are under way while one is written.

#ifndef KDTREE_HOST

// ------------------------------------------------------------------------------------------------------------- primitives of Hopper (PTX)

// clang-format off
#define KDTREE_ALIGNED_DYNAMIC_SHARED(name, bytes) extern __shared__ __align__(bytes) unsigned char name[]
// clang-format on

__device__ __forceinline__ void mbarrier_init(unsigned mbarrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(mbarrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void mbarrier_arrive(unsigned mbarrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(mbarrier) : "memory");
}
// Waits until the phase of that parity is complete.
__device__ __forceinline__ void mbarrier_wait(unsigned mbarrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred complete;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 complete, [%0], %1;\n"
      "@!complete bra again;\n"
      "}" ::"r"(mbarrier),
      "r"(parity)
      : "memory");
}
// The mbarrier counts an arrival when all cp.asyncs that this thread has started so far have landed.
__device__ __forceinline__ void cp_async_mbarrier_arrive(unsigned mbarrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(mbarrier) : "memory");
}
// Between writes of threads, or of their cp.asyncs, and their use by wgmma.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// An 8 x 8 matrix of 16-bit numbers, of which a lane has row lane / 4 and columns lane % 4 * 2 and the next: transposed.
__device__ __forceinline__ unsigned movmatrix_trans(unsigned a) {
  unsigned d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}

__device__ __forceinline__ void barrier_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
__device__ __forceinline__ bool barrier_sync_or(int id, int threads, bool value) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred mine, any;\n"
      "setp.ne.s32 mine, %3, 0;\n"
      "bar.red.or.pred any, %1, %2, mine;\n"
      "selp.s32 %0, 1, 0, any;\n"
      "}"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"((int)value)
      : "memory");
  return any != 0;
}

template <int REGISTERS>
__device__ __forceinline__ void set_max_registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void set_max_registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Nothing that has to do with these registers may pass here: a wgmma on its way changes them behind the compiler's back.
template <int ROW_TILES>
__device__ __forceinline__ void hold_accumulators(float (&d)[ROW_TILES][4]) {
#pragma unroll
  for (int n = 0; n < ROW_TILES; n++) asm volatile("" : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])::"memory");
}

// clang-format off
#define KDTREE_R16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define KDTREE_R32 KDTREE_R16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define KDTREE_R40 KDTREE_R32 ", %16, %17, %18, %19"
#define KDTREE_R48 KDTREE_R40 ", %20, %21, %22, %23"
#define KDTREE_R64 KDTREE_R48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define KDTREE_R72 KDTREE_R64 ", %32, %33, %34, %35"
#define KDTREE_D(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define KDTREE_D16 KDTREE_D(0), KDTREE_D(1)
#define KDTREE_D32 KDTREE_D16, KDTREE_D(2), KDTREE_D(3)
#define KDTREE_D40 KDTREE_D32, KDTREE_D(4)
#define KDTREE_D48 KDTREE_D40, KDTREE_D(5)
#define KDTREE_D64 KDTREE_D48, KDTREE_D(6), KDTREE_D(7)
#define KDTREE_D72 KDTREE_D64, KDTREE_D(8)
// clang-format on

#define KDTREE_WGMMA_OF(ROWS, TYPE, A, B, T)                                                                                         \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #ROWS "k16.f32." TYPE "." TYPE " {" KDTREE_R##ROWS "}, " A ", " B ", 1, 1, 1, " T \
                                                                                                      ", " T ";"                     \
               : KDTREE_D##ROWS                                                                                                      \
               : "l"(a), "l"(b), "n"((int)TRANSPOSED)                                                                                \
               : "memory")
#define KDTREE_WGMMA(ROWS, A, B, T)           \
  if constexpr (ROW_TILES * 8 == ROWS) {      \
    if constexpr (Element::is_bf16) {         \
      KDTREE_WGMMA_OF(ROWS, "bf16", A, B, T); \
    } else {                                  \
      KDTREE_WGMMA_OF(ROWS, "f16", A, B, T);  \
    }                                         \
  }

// d (64 x 8 * ROW_TILES) += a (64 x 16) * b (16 x 8 * ROW_TILES), float32 accumulators, of operands in shared memory that descriptors name:
// K-major both, or, TRANSPOSED, MN-major both. With w the warp of the warpgroup, group = lane / 4 and quad = lane % 4, a lane holds
//   d[n][i]  row 16 * w + group + 8 * (i / 2), column 8 * n + 2 * quad + i % 2
template <class Element, int ROW_TILES, bool TRANSPOSED>
__device__ __forceinline__ void wgmma_m64k16(float (&d)[ROW_TILES][4], unsigned long long a, unsigned long long b) {
  KDTREE_WGMMA(16, "%8", "%9", "%10");
  KDTREE_WGMMA(32, "%16", "%17", "%18");
  KDTREE_WGMMA(40, "%20", "%21", "%22");
  KDTREE_WGMMA(48, "%24", "%25", "%26");
  KDTREE_WGMMA(64, "%32", "%33", "%34");
  KDTREE_WGMMA(72, "%36", "%37", "%38");
}

// The same of a (64 x 32) and b (32 x 8 * ROW_TILES) of 8-bit numbers, both K-major: keys as the pool has them, queries in e4m3.
#define KDTREE_WGMMA_FP8_OF(ROWS, TYPE, A, B)                                                                                 \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #ROWS "k32.f32." TYPE ".e4m3 {" KDTREE_R##ROWS "}, " A ", " B ", 1, 1, 1;" \
               : KDTREE_D##ROWS                                                                                               \
               : "l"(a), "l"(b)                                                                                               \
               : "memory")
#define KDTREE_WGMMA_FP8(ROWS, A, B)           \
  if constexpr (ROW_TILES * 8 == ROWS) {       \
    if constexpr (Pool::is_e4m3) {             \
      KDTREE_WGMMA_FP8_OF(ROWS, "e4m3", A, B); \
    } else {                                   \
      KDTREE_WGMMA_FP8_OF(ROWS, "e5m2", A, B); \
    }                                          \
  }
template <int ROW_TILES>
__device__ __forceinline__ void wgmma_fp8_m64k32(float (&d)[ROW_TILES][4], unsigned long long a, unsigned long long b) {
  KDTREE_WGMMA_FP8(32, "%16", "%17");
  KDTREE_WGMMA_FP8(64, "%32", "%33");
  KDTREE_WGMMA_FP8(72, "%36", "%37");
}

// d += a (64 x 16) * b, where a comes from registers, which must stay as they are until the wgmma was waited for, and b is MN-major:
//   a[i]  row 16 * w + group + 8 * (i % 2), columns 2 * quad + 8 * (i / 2) and the next
#define KDTREE_WGMMA_REGISTERS_OF(ROWS, TYPE, A, B)                                                                                    \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #ROWS "k16.f32." TYPE "." TYPE " {" KDTREE_R##ROWS "}, {" A "}, " B ", 1, 1, 1, 1;" \
               : KDTREE_D##ROWS                                                                                                        \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                                                                    \
               : "memory")
#define KDTREE_WGMMA_REGISTERS(ROWS, A, B)           \
  if constexpr (ROW_TILES * 8 == ROWS) {             \
    if constexpr (Element::is_bf16) {                \
      KDTREE_WGMMA_REGISTERS_OF(ROWS, "bf16", A, B); \
    } else {                                         \
      KDTREE_WGMMA_REGISTERS_OF(ROWS, "f16", A, B);  \
    }                                                \
  }
template <class Element, int ROW_TILES>
__device__ __forceinline__ void wgmma_m64k16(float (&d)[ROW_TILES][4], const unsigned (&a)[4], unsigned long long b) {
  KDTREE_WGMMA_REGISTERS(32, "%16, %17, %18, %19", "%20");
  KDTREE_WGMMA_REGISTERS(64, "%32, %33, %34, %35", "%36");
  KDTREE_WGMMA_REGISTERS(72, "%36, %37, %38, %39", "%40");
}
// Until here, registers that a wgmma reads are in use.
__device__ __forceinline__ void hold_operand(unsigned (&a)[4]) {
  asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
}

// Two 8 x 8 matrices of 16-bit numbers, transposed; lanes 0 to 15 have the addresses of their rows.
__device__ __forceinline__ void ldmatrix_x2_trans(unsigned (&r)[2], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(address) : "memory");
}
// Two fp16 to e4m3, rounded; too large ones become the largest.
__device__ __forceinline__ unsigned short fp16x2_to_e4m3x2(unsigned pair) {
  unsigned short converted;
  asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(converted) : "r"(pair));
  return converted;
}
__device__ __forceinline__ unsigned subtract_fp16x2(unsigned a, unsigned b) {
  unsigned difference;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
  return difference;
}
// Two fp16 as they are, but for infinity.
__device__ __forceinline__ unsigned nan_if_infinite(unsigned pair) {
  unsigned number;
  asm("fma.rn.f16x2 %0, %1, %2, %1;" : "=r"(number) : "r"(pair), "r"(0));
  return number;
}
// The larger of two pairs of 16-bit integers, each by itself.
__device__ __forceinline__ unsigned max_u16x2(unsigned a, unsigned b) {
  unsigned larger;
  asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

#endif  // KDTREE_HOST

namespace hopper {

// ---------------------------------------------------------------------------------------------------------------------------- constants

constexpr int kWarpgroup = 128;               // threads
constexpr int kThreads = 4 * kWarpgroup;      // one for scores, two for values, one for copies
constexpr int kTileKeys = 64;                 // keys in a tile
constexpr int kChunks = kHeadDim / 64;        // of 64 columns, 128 bytes, in which tiles and queries lie in shared memory
constexpr int kRopeChunk = kChunks - 1;       // the last; the others are values, too
constexpr int kValueChunks = kRopeChunk / 2;  // those of one value warpgroup
constexpr int kParts = 3;                     // of a tile, that are copied and waited for each by itself
constexpr int kPartChunks = kChunks / kParts;
constexpr int kChunkBytes = kTileKeys * 128;  // one chunk of a tile
// The i-th chunk that is copied and multiplied. The value warpgroups have half of them each and are done with one after the other, so
// theirs take turns, and a part becomes free as early as can be.
__device__ __forceinline__ constexpr int nth_chunk(int i) { return i == kRopeChunk ? i : i / 2 + i % 2 * kValueChunks; }
constexpr int kMbarriers = 4 * kParts + 2;
// Of an fp8 pool: a round is of two chunks, 128 fp8, of which each of eight threads copies 16. The last is the rope chunk alone.
constexpr int kPackedRounds = (kChunks + 1) / 2;
// A block starts with 128 registers a thread; the value warpgroups take what they need for their accumulators from the copy warpgroup.
constexpr int kRegisters = 128, kValueRegisters = 176, kCopyRegisters = 32;
static_assert(2 * kValueRegisters + kRegisters + kCopyRegisters <= 4 * kRegisters, "all that there are");
constexpr int kSpareBytes = 1024;  // what P needs beyond the rope chunk that it is written over

// Named barriers, of one warpgroup each; 0 is __syncthreads.
constexpr int kBarrierOfWarpgroup = 1;

// --------------------------------------------------------------------------------------------------------------------------- descriptors
//
// PTX ISA, "Matrix descriptor format" of wgmma: address, leading and stride dimension byte offset in units of 16 bytes at bits 0, 16 and
// 32, the swizzle at bits 62 and 63 (1: 128 bytes). Which offset is which: CUTLASS, include/cute/atom/mma_traits_sm90_gmma.hpp, above
// make_gmma_desc:
//   K-major,  128-byte swizzle   stride: from 8 rows to the next 8; leading: not used. The next 16 columns are 32 bytes further.
//   MN-major, 128-byte swizzle   stride: from 8 k to the next 8; leading: from 64 rows to the next 64, which there are none of.
//   MN-major, no swizzle         stride: from 8 rows to the next 8; leading: from 8 k to the next 8.

__device__ __forceinline__ unsigned long long descriptor(unsigned address, int leading, int stride, bool swizzled) {
  return (unsigned long long)swizzled << 62 | (unsigned long long)(stride >> 4) << 32 | (unsigned long long)(leading >> 4) << 16 |
         (address >> 4);
}

// The same matrix, `bytes` further.
__device__ __forceinline__ unsigned long long further(unsigned long long descriptor, int bytes) { return descriptor + (bytes >> 4); }

// A number that all lanes have, which the compiler does not always see: without this, descriptors go through vector registers.
__device__ __forceinline__ unsigned uniform(unsigned x) { return __shfl_sync(~0u, x, 0); }

// Byte offset of 16-byte unit `unit` of a key or query in its chunk: the 128-byte swizzle.
__device__ __forceinline__ int chunk_offset(int row, int unit) { return row * 128 + ((unit ^ (row & 7)) << 4); }

// -------------------------------------------------------------------------------------------------------------------- raw tiles of fp8
//
// Tiles that have keys of the prefix alone are multiplied as the pool has them: nothing is unpacked on the way. That makes 128 columns a
// chunk of 128 bytes; they lie where the tile's even chunks of 64 columns would, and the rope's 64 bytes in the rope chunk.
//   S   wgmma of fp8. A query is the sum of two e4m3 numbers, after one power of two for all queries of the block has brought the largest
//       to 128 and above: what is left of it then, after four and four bits of mantissa, is less than what bf16 would have rounded.
//       The two lie where chunks 2 c and 2 c + 1 of the queries do, those of the rope side by side.
//   O   V^T from registers, as fp16, which all fp8 are: ldmatrix, transposed, brings two columns of two keys each, which are rows 2 g and
//       2 g + 1 of V^T. The accumulators' rows g and g + 8 of 16 are therefore columns 2 g and 2 g + 1 of the output.
// Other tiles, with drafts among them, are unpacked by the copy warpgroup and multiplied in the queries' type.
__device__ __forceinline__ bool is_raw(const Request& request, int tile) {
  return Pool::is_fp8 && (tile + 1) * kTileKeys <= request.prefix;
}
constexpr int kSplitExponent = 7;
__device__ __forceinline__ float power_of_2(int exponent) { return __int_as_float(127 + exponent << 23); }
constexpr int kRawChunks = kLatent / 128;  // the rope chunk not counted
// Raw chunk: the part that it is in. Those of the first columns of either value warpgroup come first.
__device__ __forceinline__ constexpr int raw_part(int chunk) { return chunk % (kRawChunks / 2); }

// Eight numbers times a power of two as sums of two e4m3 numbers. Infinity becomes NaN: there is no row that it would leave finite.
template <class Element>
__device__ __forceinline__ void split(const uint4& numbers, float power, uint2& high, uint2& low) {
  const unsigned words[4] = {numbers.x, numbers.y, numbers.z, numbers.w};
  unsigned r_high[4], r_low[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 pair = unpack2<Element>(words[i]);
    const unsigned number = nan_if_infinite(pack2<Fp16>(pair.x * power, pair.y * power));
    const unsigned short first = fp16x2_to_e4m3x2(number);
    r_high[i] = first;
    r_low[i] = fp16x2_to_e4m3x2(subtract_fp16x2(number, e4m3x2_to_fp16x2(first)));
  }
  high = make_uint2(r_high[0] | r_high[1] << 16, r_high[2] | r_high[3] << 16);
  low = make_uint2(r_low[0] | r_low[1] << 16, r_low[2] | r_low[3] << 16);
}

// Which rows a piece is of, and where the outputs go.
struct Target {
  int request, q_start, row_base;
  short rows;
  short query_exponent;  // of the block's queries: they were brought from 2^exponent to 2^kSplitExponent to be split
  int partial_slot;      // or -1: of a whole item
};

// What the copy warpgroup begins with. In registers it would have to be where that warpgroup has some, which are few.
struct Beginning {
  Request request;
  int first, last;  // tiles of the first piece, none if they are equal
  int position;     // of the next piece
};

// ------------------------------------------------------------------------------------------------------------------- geometry of a block

template <int ROW_TILES>
struct Geometry {
  static constexpr int kRows = ROW_TILES * 8;
  static constexpr int kQueryChunkBytes = kRows * 128;
  // Queries | stage 0: chunks 0 to 7, rope | spare | stage 1: rope, chunks 0 to 7 | the rest. P of stage 0 lies from its rope chunk on,
  // that of stage 1 from the spare bytes on: 72 rows need both, so there is one P at a time.
  static constexpr int kOffsetStage0 = kChunks * kQueryChunkBytes;
  static constexpr int kOffsetSpare = kOffsetStage0 + kChunks * kChunkBytes;
  static constexpr int kOffsetStage1 = kOffsetSpare + kSpareBytes + kChunkBytes;
  static constexpr int kOffsetMbarriers = kOffsetStage1 + kRopeChunk * kChunkBytes;
  static constexpr int kOffsetSchedule = kOffsetMbarriers + kMbarriers * 8;
  static constexpr int kOffsetFactor = kOffsetSchedule + sizeof(Schedule);  // [2][rows]: what the outputs are to be multiplied by
  static constexpr int kOffsetHighest = kOffsetFactor + 2 * kRows * 4;      // [rows]: running maxima
  static constexpr int kOffsetTarget = kOffsetHighest + kRows * 4;
  static constexpr int kOffsetNote = kOffsetTarget + sizeof(Target);  // see Note
  static constexpr int kOffsetBeginning = kOffsetStage1;              // before anything is copied there
  static constexpr int kSharedBytes = kOffsetNote + 4;
  static constexpr int kPartialFloat4 = kLatent / 16 * ROW_TILES * 32;  // accumulators of one block
  static_assert(kRows * kTileKeys * 2 <= kChunkBytes + kSpareBytes, "P fits");
  static_assert(kSharedBytes <= 232448, "what sm_90 allows a block");
  static_assert(kOffsetMbarriers % 8 == 0 && kOffsetFactor % 8 == 0 && kOffsetHighest % 8 == 0, "read by pairs");

  __device__ __forceinline__ static int stage(int number) { return number ? kOffsetStage1 : kOffsetStage0; }
  __device__ __forceinline__ static int rope(int number) {
    return number ? kOffsetStage1 - kChunkBytes : kOffsetStage0 + kRopeChunk * kChunkBytes;
  }
  __device__ __forceinline__ static int prob(int number) { return number ? kOffsetSpare : kOffsetStage0 + kRopeChunk * kChunkBytes; }
};

// A number that is worked out here and not kept all the time: registers are scarce.
__device__ __forceinline__ int fresh(int x) {
  keep_in_register(x);
  return x;
}

// What a hand-over is for: bit n if a maximum of row tile n has risen, so that its outputs must be multiplied by the factors before V^T P^T
// is added; or one of these.
enum Note : int {
  kUnpacked = 1 << 12,       // beside those: of an fp8 pool, the tile is none of raw fp8
  kFinish = 1 << 16,         // the item is done: multiply the outputs by the factors and write them
  kFinishPartial = 1 << 17,  // the item goes on in another piece: leave the outputs for combine
  kStop = 1 << 18,           // there is nothing more
};

// What every warpgroup has.
template <int ROW_TILES>
struct Warpgroup {
  using G = Geometry<ROW_TILES>;

  const VerifyParams& p;
  unsigned char* const shared;
  const int thread, warp, lane;  // within the warpgroup
  const int group, quad;         // of the accumulators: lane = group * 4 + quad
  const int barrier;             // this warpgroup's named barrier

  Request request;
  int progress;  // see tiles and hand_overs; one register instead of two

  __device__ __forceinline__ Warpgroup(const VerifyParams& params, unsigned char* memory, int number)
      : p(params),
        shared(memory),
        thread(threadIdx.x % kWarpgroup),
        warp(thread >> 5),
        lane(thread & 31),
        group(lane >> 2),
        quad(lane & 3),
        barrier(kBarrierOfWarpgroup + number),
        progress(0) {}

  // Tiles passed so far, over all pieces, modulo 4; and hand-overs from scores to values so far: one a tile and one a piece.
  __device__ __forceinline__ int tiles() const { return progress & 3; }
  __device__ __forceinline__ int hand_overs() const { return progress >> 2; }
  __device__ __forceinline__ void pass_tile() { progress = progress & ~3 | progress + 1 & 3; }
  __device__ __forceinline__ void pass_hand_over() { progress += 4; }

  __device__ __forceinline__ const Schedule& schedule() const { return *(const Schedule*)(shared + G::kOffsetSchedule); }
  __device__ __forceinline__ unsigned mbarrier(int number) const { return shared_address(shared + G::kOffsetMbarriers) + number * 8; }
  __device__ __forceinline__ unsigned full(int stage, int part) const { return mbarrier(stage * kParts + part); }
  __device__ __forceinline__ unsigned free(int stage, int part) const { return mbarrier(2 * kParts + stage * kParts + part); }
  __device__ __forceinline__ unsigned handed() const { return mbarrier(4 * kParts); }
  __device__ __forceinline__ unsigned taken() const { return mbarrier(4 * kParts + 1); }
  // Of this hand-over, or of the one before.
  __device__ __forceinline__ float* s_factor(int before = 0) const {
    return (float*)(shared + G::kOffsetFactor) + (hand_overs() - before & 1) * G::kRows;
  }
  __device__ __forceinline__ float* s_highest() const { return (float*)(shared + G::kOffsetHighest); }
  __device__ __forceinline__ Target& s_target() const { return *(Target*)(shared + G::kOffsetTarget); }
  __device__ __forceinline__ int& s_note() const { return *(int*)(shared + G::kOffsetNote); }

  // Waits until both value warpgroups have taken what was handed over last.
  __device__ __forceinline__ void wait_until_taken() const {
    mbarrier_wait(taken(), hand_overs() - 1 & 1);  // of an mbarrier that is still in its first phase, the one before counts as complete
  }
};

// ---------------------------------------------------------------------------------------------------------------------------- the scores

// Halves the values that this lane has to do with: it goes on with one half of them, the lane `OFFSET` away with the other.
template <int COUNT, int OFFSET, class Combine>
__device__ __forceinline__ void halve(float* value, int lane, float neutral, Combine combine) {
  constexpr int kHalf = (COUNT + 1) / 2;
  const bool upper = lane & OFFSET;
#pragma unroll
  for (int i = 0; i < kHalf; i++) {
    const float lo = value[i], hi = i + kHalf < COUNT ? value[i + kHalf] : neutral;
    value[i] = combine(upper ? hi : lo, __shfl_xor_sync(~0u, upper ? lo : hi, OFFSET));
  }
}

// Combines each of COUNT values over the eight lanes of one quad, and calls store(i, result) in one of them. Takes about COUNT shuffles.
template <int COUNT, class Combine, class Store>
__device__ __forceinline__ void combine_groups(float (&value)[COUNT], int lane, float neutral, Combine combine, Store store) {
  keep_in_register(lane);  // what follows from it is worked out here, not kept all the time
  constexpr int kHalf = (COUNT + 1) / 2, kQuarter = (kHalf + 1) / 2, kEighth = (kQuarter + 1) / 2;
  halve<COUNT, 16>(value, lane, neutral, combine);
  halve<kHalf, 8>(value, lane, neutral, combine);
  halve<kQuarter, 4>(value, lane, neutral, combine);
#pragma unroll
  for (int i = 0; i < kEighth; i++) {
    const int quarter = i + (lane & 4 ? kEighth : 0), half = quarter + (lane & 8 ? kQuarter : 0), all = half + (lane & 16 ? kHalf : 0);
    if (quarter < kQuarter && half < kHalf && all < COUNT) store(all, value[i]);
  }
}

// One warpgroup: S^T = K Q^T, and P. A thread has the rows n * 8 + quad * 2 + e, value n * 2 + e of arrays by row, and the keys
// warp * 16 + group and that + 8.
template <class Element, int ROW_TILES>
struct ScoreWarpgroup : Warpgroup<ROW_TILES> {
  using Base = Warpgroup<ROW_TILES>;
  using Base::p, Base::shared, Base::thread, Base::warp, Base::lane, Base::group, Base::quad, Base::barrier, Base::request, Base::tiles,
      Base::hand_overs, Base::pass_tile, Base::pass_hand_over;
  using typename Base::G;

  static constexpr int kThreadRows = ROW_TILES * 2;

  int row_base, rows;             // first row of the row block within the request; valid rows of the block
  float r_sum[kThreadRows];       // this thread's share of the sums, without
  unsigned r_prob[ROW_TILES][2];  // P of the last tile: it is added while the next scores are worked out, so that nobody waits for that

  __device__ __forceinline__ ScoreWarpgroup(const VerifyParams& params, unsigned char* memory) : Base(params, memory, 0) {}

  // Starts the copy of the queries of the row block, a part of the columns after the other. Rows that do not exist are zero.
  __device__ __forceinline__ void copy_queries() const {
    constexpr int kThreadQueries = (G::kRows + kWarpgroup / 8 - 1) / (kWarpgroup / 8);
    const int unit = thread & 7;
    const unsigned char* source[kThreadQueries];
#pragma unroll
    for (int i = 0; i < kThreadQueries; i++) {
      const int row = i * (kWarpgroup / 8) + (thread >> 3), existing = row_base + (row < rows ? row : 0),
                token = quotient(existing, p.heads);
      source[i] =
          p.q + (long long)(request.q_start + token) * p.q_token_stride + (existing - token * p.heads) * p.q_head_stride + unit * 16;
    }
    const unsigned target = shared_address(shared) + chunk_offset(thread >> 3, unit);
#pragma unroll
    for (int nth = 0; nth < kChunks; nth++) {
      const int chunk = nth_chunk(nth);
#pragma unroll
      for (int i = 0; i < kThreadQueries; i++) {
        const int row = i * (kWarpgroup / 8) + (thread >> 3);
        if (row < G::kRows)
          cp_async_16(target + chunk * G::kQueryChunkBytes + i * (kWarpgroup / 8) * 128, source[i] + chunk * 128, row < rows ? 16 : 0);
      }
      if (nth % kPartChunks == kPartChunks - 1) cp_async_commit();
    }
  }

  // The largest of the queries in shared memory, without their signs, as bits: of those that this thread has copied.
  template <bool FINITE>
  __device__ __forceinline__ unsigned highest_query() const {
    constexpr unsigned kInfinity = Element::is_bf16 ? 0x7f80 : 0x7c00;
    const unsigned char* const queries = shared + chunk_offset(thread >> 3, thread & 7);
    unsigned highest = 0;
#pragma unroll 1
    for (int row = thread >> 3; row < G::kRows; row += kWarpgroup / 8)
#pragma unroll
      for (int chunk = 0; chunk < kChunks; chunk++) {
        const uint4 numbers = *(const uint4*)(queries + chunk * G::kQueryChunkBytes + (row - (thread >> 3)) * 128);
        const unsigned pairs[4] = {numbers.x, numbers.y, numbers.z, numbers.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
          unsigned sizes = pairs[i] & 0x7fff7fffu;
          if (FINITE) {
            if ((sizes & 0xffffu) >= kInfinity) sizes &= 0xffff0000u;
            if (sizes >> 16 >= kInfinity) sizes &= 0xffffu;
          }
          highest = max_u16x2(highest, sizes);
        }
      }
    int* const s_exchange = (int*)Base::s_factor();
    const int of_warp = __reduce_max_sync(~0u, (int)max(highest & 0xffffu, highest >> 16));
    barrier_sync(barrier, kWarpgroup);  // nobody reads what was exchanged before
    if (lane == 0) s_exchange[warp] = of_warp;
    barrier_sync(barrier, kWarpgroup);
    return max(max(s_exchange[0], s_exchange[1]), max(s_exchange[2], s_exchange[3]));
  }

  // Splits the queries, where they are: a row is read by the eight lanes that write it.
  __device__ __forceinline__ void split_queries() {
    constexpr int kInfinity = Element::is_bf16 ? 0x7f80 : 0x7c00;
    cp_async_wait<0>();
    int highest = highest_query<false>();
    if (highest >= kInfinity) highest = highest_query<true>();
    // The largest is at least 2^e, and below 2^(e + 1).
    const int e = max((highest >> (Element::is_bf16 ? 7 : 10)) - (Element::is_bf16 ? 127 : 15), -100);
    const float power = power_of_2(kSplitExponent - e);
    if (thread == 0) Base::s_target().query_exponent = e;
    const int unit = thread & 7;
#pragma unroll 1
    for (int row = thread >> 3; row < G::kRows; row += kWarpgroup / 8) {
      auto place = [&](int chunk, int unit) { return shared + chunk * G::kQueryChunkBytes + chunk_offset(row, unit); };
#pragma unroll
      for (int chunk = 0; chunk < kChunks; chunk += 2) {
        const bool rope = chunk == kRopeChunk;
        uint2 high[2], low[2];
        split<Element>(*(const uint4*)place(chunk, unit), power, high[0], low[0]);
        if (!rope) split<Element>(*(const uint4*)place(chunk + 1, unit), power, high[1], low[1]);
        __syncwarp();
        const int first = unit >> 1, half = (unit & 1) * 8;
        *(uint2*)(place(chunk, first) + half) = high[0];
        if (rope) {
          *(uint2*)(place(chunk, first + 4) + half) = low[0];
        } else {
          *(uint2*)(place(chunk, first + 4) + half) = high[1];
          *(uint2*)(place(chunk + 1, first) + half) = low[0];
          *(uint2*)(place(chunk + 1, first + 4) + half) = low[1];
        }
      }
    }
  }

  // Waits for a part of the queries.
  template <int PART>
  __device__ __forceinline__ void wait_for_queries() const {
    cp_async_wait<kParts - 1 - PART>();
    fence_proxy_async();
    barrier_sync(barrier, kWarpgroup);
  }

  // Bit i: this thread's row i sees its first key of a tile, or its second. Only tiles that reach beyond the prefix need a look at the
  // mask. Each lane of a warp reads what one of its 16 keys and every other draft token are; lane j keeps the answers of two tokens, one
  // bit a key.
  __device__ __forceinline__ void load_visible(int tile, unsigned (&visible)[2]) const {
    constexpr int kAtOnce = Pool::is_fp8 ? 3 : 5;  // pairs of tokens; an fp8 pool leaves fewer registers for it
    const int heads = fresh(p.heads);
    const Target& t = Base::s_target();
    const int row_base = t.row_base, rows = t.rows;
    const int columns = request.columns(), column = tile * kTileKeys + warp * 16 + (lane & 15), draft = column - request.prefix;
    const int first_token = quotient(row_base, heads), last_token = quotient(row_base + rows - 1, heads);
    const unsigned char* mask = p.custom_mask;
    if (mask != nullptr)
      mask += load_index(p.mask_indptr, t.request, p.wide_indices & kWideMask) + max(min(column, columns - 1), request.prefix);
    unsigned words[2] = {0, 0};
    for (int pair = 0; first_token + 2 * pair <= last_token; pair += kAtOnce) {
      unsigned char byte[kAtOnce];
      if (mask != nullptr)
#pragma unroll
        for (int i = 0; i < kAtOnce; i++) {
          const int token = min(first_token + (pair + i) * 2 + (lane >> 4), last_token);
          byte[i] = __ldg(mask + (long long)token * columns);
        }
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) {
        const int token = first_token + (pair + i) * 2 + (lane >> 4);
        const bool sees = draft < 0 || (draft < request.q_len && (mask != nullptr ? byte[i] != 0 : draft <= token));
        const unsigned word = __ballot_sync(~0u, sees);
        if ((pair + i) % 32 == lane) {
          if (pair + i < 32)
            words[0] = word;
          else
            words[1] = word;
        }
      }
    }
    visible[0] = visible[1] = 0;
#pragma unroll 2
    for (int i = 0; i < kThreadRows; i++) {
      const int row = i / 2 * 8 + quad * 2 + i % 2, token = quotient(row_base + row, heads) - first_token;
      unsigned word = __shfl_sync(~0u, words[0], token >> 1 & 31);
      if (kThreadRows * 4 > 64) {
        const unsigned far = __shfl_sync(~0u, words[1], token >> 1 & 31);
        if (token >= 64) word = far;
      }
      word >>= (token & 1) * 16 + group;
      if (row >= rows) word = 0;
      visible[0] |= (word & 1) << i;
      visible[1] |= (word >> 8 & 1) << i;
    }
  }

  template <int PART, bool RAW>
  __device__ __forceinline__ void score_part(int stage, bool first, float (&r_score)[ROW_TILES][4]) const {
    if (first) wait_for_queries<PART>();
    mbarrier_wait(Base::full(stage, PART), tiles() >> 1 & 1);
    fence_proxy_async();
    const unsigned long long queries = descriptor(uniform(shared_address(shared)), 0, 1024, true);
    const unsigned long long keys = descriptor(uniform(shared_address(shared + G::stage(stage))), 0, 1024, true);
    const unsigned long long rope = descriptor(uniform(shared_address(shared + G::rope(stage))), 0, 1024, true);
    hold_accumulators(r_score);
    wgmma_fence();
    if constexpr (RAW) {
#pragma unroll
      for (int chunk = PART == kParts - 1 ? kRawChunks : 0; chunk <= kRawChunks; chunk++) {
        const bool is_rope = chunk == kRawChunks;
        if (PART != (is_rope ? kParts - 1 : raw_part(chunk))) continue;
#pragma unroll
        for (int step = 0; step < (is_rope ? 4 : 8); step++)  // the first half with the high parts of the queries, then the low ones
          wgmma_fp8_m64k32<ROW_TILES>(r_score,
                                      is_rope ? further(rope, step % 2 * 32) : further(keys, 2 * chunk * kChunkBytes + step % 4 * 32),
                                      further(queries, (2 * chunk + step / 4) * G::kQueryChunkBytes + step % 4 * 32));
      }
    } else
#pragma unroll
      for (int c = 0; c < kPartChunks; c++) {
        const int chunk = nth_chunk(PART * kPartChunks + c);
#pragma unroll
        for (int step = 0; step < 4; step++)
          wgmma_m64k16<Element, ROW_TILES, false>(r_score,
                                                  further(chunk == kRopeChunk ? rope : further(keys, chunk * kChunkBytes), step * 32),
                                                  further(queries, chunk * G::kQueryChunkBytes + step * 32));
      }
    wgmma_commit();
  }

  // The first tile of a piece also waits for the queries. The scores are there after wgmma_wait.
  __device__ __forceinline__ void start_score_product(int tile, bool first, float (&r_score)[ROW_TILES][4]) const {
    const int stage = tiles() & 1;
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) r_score[n][0] = r_score[n][1] = r_score[n][2] = r_score[n][3] = 0.f;
    if (is_raw(request, tile)) {
      score_part<0, true>(stage, first, r_score);
      score_part<1, true>(stage, first, r_score);
      score_part<2, true>(stage, first, r_score);
    } else {
      score_part<0, false>(stage, first, r_score);
      score_part<1, false>(stage, first, r_score);
      score_part<2, false>(stage, first, r_score);
    }
  }

  // Some score of the tile is above its row's maximum. Maxima, factors and sums become what they have to be. The exchange between warps is
  // in the rope chunk, which nobody reads any more. Returns the bits of the note, in the first warp.
  __device__ __forceinline__ int raise_maxima(int stage, float (&r_tile)[kThreadRows], float (&r_highest)[kThreadRows]) {
    const int offset = fresh(warp * G::kRows);
    float* const s_exchange = (float*)(shared + G::rope(stage));  // [4 warps][rows]
    float* const s_highest = Base::s_highest();
    float* const s_factor = Base::s_factor();
    combine_groups(
        r_tile, lane, kNothingSeen, [](float a, float b) { return fmaxf(a, b); },
        [&](int i, float highest) { s_exchange[offset + i / 2 * 8 + quad * 2 + i % 2] = highest; });
    barrier_sync(barrier, kWarpgroup);
    if (thread < G::kRows) {
      const float before = s_highest[thread];
      float highest = before;
#pragma unroll
      for (int w = 0; w < 4; w++) highest = fmaxf(highest, s_exchange[w * G::kRows + thread]);
      s_factor[thread] = exp2_approx(before - highest);
      s_highest[thread] = highest;
    }
    barrier_sync(barrier, kWarpgroup);
    unsigned risen = 0;
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) {
      const float2 highest = *(const float2*)&s_highest[n * 8 + quad * 2], factor = *(const float2*)&s_factor[n * 8 + quad * 2];
      if (highest.x > r_highest[n * 2] || highest.y > r_highest[n * 2 + 1]) risen |= 1u << n;
      r_highest[n * 2] = highest.x, r_highest[n * 2 + 1] = highest.y;
      r_sum[n * 2] *= factor.x, r_sum[n * 2 + 1] *= factor.y;
    }
    return warp == 0 ? (int)__reduce_or_sync(~0u, risen) : 0;
  }

  // What this thread wrote is there for the value warpgroups.
  __device__ __forceinline__ void hand_over(int note) {
    if (thread == 0) Base::s_note() = note;
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(Base::handed());
    pass_hand_over();
  }

  // Whether this thread's first or second key of a tile is none of the prefix.
  __device__ __forceinline__ bool is_draft(int tile, int k) const { return tile * kTileKeys + warp * 16 + group + k * 8 >= request.prefix; }

  // P of a tile to the sums: of the rounded values, as the product is.
  __device__ __forceinline__ void add_probabilities(int tile) {
    const bool raw = is_raw(request, tile);
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++)
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const float2 rounded = raw ? unpack2<Fp16>(r_prob[n][k]) : unpack2<Element>(r_prob[n][k]);
        r_sum[n * 2] += counted(p, rounded.x, is_draft(tile, k)), r_sum[n * 2 + 1] += counted(p, rounded.y, is_draft(tile, k));
      }
  }

  __device__ __forceinline__ void attend_tile(int tile, bool first) {
    const int stage = tiles() & 1;
    const bool masked = (tile + 1) * kTileKeys > request.prefix, raw = is_raw(request, tile);
    unsigned visible[2] = {~0u, ~0u};
    if (masked) load_visible(tile, visible);
    float r_score[ROW_TILES][4];
    start_score_product(tile, first, r_score);
    add_probabilities(tile - 1);
    wgmma_wait<0>();
    hold_accumulators(r_score);
    if (Pool::is_fp8)  // to log2 units: as `scaled` has it
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const bool draft = is_draft(tile, k);
        float scale = draft ? p.scale_log2e : p.prefix_scale_log2e;
        if (raw) scale *= power_of_2(Base::s_target().query_exponent - kSplitExponent);
        const float lift = draft ? p.draft_lift : 0.f;
#pragma unroll
        for (int n = 0; n < ROW_TILES; n++)
          r_score[n][k * 2] = fmaf(r_score[n][k * 2], scale, lift), r_score[n][k * 2 + 1] = fmaf(r_score[n][k * 2 + 1], scale, lift);
      }
    float r_highest[kThreadRows];  // running maxima, log2
    const float* const s_highest = Base::s_highest() + fresh(quad * 2);
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) {
      const float2 highest = *(const float2*)&s_highest[n * 8];
      r_highest[n * 2] = highest.x, r_highest[n * 2 + 1] = highest.y;
    }
    if (masked)
#pragma unroll
      for (int i = 0; i < kThreadRows; i++)
#pragma unroll
        for (int k = 0; k < 2; k++)
          if (!(visible[k] >> i & 1)) r_score[i / 2][k * 2 + i % 2] = __int_as_float(0xff800000);
    float r_tile[kThreadRows];  // maxima of this thread's two keys
    unsigned risen = 0;         // no bool with ||: each comparison would wait for the one before
#pragma unroll
    for (int i = 0; i < kThreadRows; i++) {
      const float first_key = r_score[i / 2][i % 2], second_key = r_score[i / 2][2 + i % 2];
      r_tile[i] = Pool::is_fp8 ? fmaxf(first_key, second_key) : fmaxf(first_key * p.scale_log2e, second_key * p.scale_log2e);
      risen |= r_tile[i] > r_highest[i];
    }
    // With the vote, all warps are done with the rope chunk. exp2 takes the scores as they were before the multiplication: one instruction.
    int note = 0;
    if (barrier_sync_or(barrier, kWarpgroup, risen != 0)) note = raise_maxima(stage, r_tile, r_highest);
    auto weight = [&](int n, int i) {
      const float score = r_score[n][i], highest = r_highest[n * 2 + i % 2];
      return exp2_approx(Pool::is_fp8 ? score - highest : fmaf(score, p.scale_log2e, -highest));
    };
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++)
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const float even = weight(n, k * 2), odd = weight(n, k * 2 + 1);
        r_prob[n][k] = raw ? pack2<Fp16>(even, odd) : pack2<Element>(even, odd);
      }
    Base::wait_until_taken();
    unsigned char* const s_prob = shared + G::prob(stage) + fresh(warp * 256 + group * 16 + quad * 4);
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) {
      *(unsigned*)(s_prob + n * 1024) = r_prob[n][0];
      *(unsigned*)(s_prob + n * 1024 + 128) = r_prob[n][1];
    }
    hand_over(Pool::is_fp8 && !raw ? note | kUnpacked : note);
    pass_tile();
  }

  // The last hand-over of a piece has no P, but what the outputs must be multiplied by; or the statistics go to combine.
  __device__ __forceinline__ void finish_piece(int last_tile) {
    const int slot = Base::s_target().partial_slot;
    add_probabilities(last_tile);
    Base::wait_until_taken();
    barrier_sync(barrier, kWarpgroup);  // all warps know, not through one lane only: racecheck sees no further
    float* const s_spare = (float*)(shared + G::kOffsetSpare);
    auto exchange = [&](int w) { return w == 3 ? Base::s_factor(1) : s_spare + w * G::kRows; };
    combine_groups(
        r_sum, lane, 0.f, [](float a, float b) { return a + b; },
        [&](int i, float sum) { exchange(fresh(warp))[i / 2 * 8 + quad * 2 + i % 2] = sum; });
    barrier_sync(barrier, kWarpgroup);
    if (thread < G::kRows) {
      const float sum = exchange(0)[thread] + exchange(1)[thread] + (exchange(2)[thread] + exchange(3)[thread]);
      if (slot < 0) {
        Base::s_factor()[thread] = output_factor(p, sum);
      } else {
        p.partial_stats[(long long)slot * G::kRows + thread] = make_float2(Base::s_highest()[thread], sum);
      }
    }
    hand_over(slot < 0 ? kFinish : kFinishPartial);
  }

  __device__ __forceinline__ void run() {
    Piece piece = *(const Piece*)(shared + G::kOffsetSpare);
    Pieces<kTileKeys> pieces(p, piece.after);
    if (piece.first == piece.last) {
      if (thread == 0) announce_nothing(p, blockIdx.x);
    } else
      do {
        request = piece.item.request;
        row_base = piece.item.row_block * p.rows_per_block;
        rows = min(p.rows_per_block, request.q_len * p.heads - row_base);
        if (thread < G::kRows) Base::s_highest()[thread] = kNothingSeen;
        copy_queries();
        if (thread == 0) announce(p, piece, blockIdx.x, Base::schedule());  // while the queries are on their way
        Base::wait_until_taken();
        if (thread == 0)
          Base::s_target() = Target{piece.item.number,
                                    request.q_start,
                                    row_base,
                                    (short)rows,
                                    0,
                                    piece.whole() ? -1 : partial_slot(blockIdx.x, piece.first == 0)};
        barrier_sync(barrier, kWarpgroup);
        int first = piece.first;
        if constexpr (Pool::is_fp8)
          if (is_raw(request, first)) {
            split_queries();
          }
#pragma unroll
        for (int i = 0; i < kThreadRows; i++) r_sum[i] = 0.f, r_prob[i / 2][i % 2] = 0;
        for (;;) {
          int tile = first;
          for (; tile < piece.last && (tile == first || is_raw(request, tile) || !is_raw(request, tile - 1)); tile++)
            attend_tile(tile, tile == first);
          if (!Pool::is_fp8 || tile == piece.last) break;
          first = tile;
          const Target& t = Base::s_target();
          row_base = t.row_base, rows = t.rows;
          copy_queries();
        }
        finish_piece(piece.last - 1);
      } while (pieces.next(piece, Base::schedule()));
    Base::wait_until_taken();
    hand_over(kStop);
  }
};

// ---------------------------------------------------------------------------------------------------------------------------- the values

// Two warpgroups: O^T = V^T P^T, each 256 of the 512 columns.
template <class Element, int ROW_TILES>
struct ValueWarpgroup : Warpgroup<ROW_TILES> {
  using Base = Warpgroup<ROW_TILES>;
  using Base::p, Base::shared, Base::thread, Base::warp, Base::lane, Base::group, Base::quad, Base::tiles, Base::hand_overs,
      Base::pass_tile, Base::pass_hand_over;
  using typename Base::G;

  const int half;  // which of the two
  float r_out[kValueChunks][ROW_TILES][4];

  __device__ __forceinline__ ValueWarpgroup(const VerifyParams& params, unsigned char* memory, int which)
      : Base(params, memory, 1 + which), half(which) {}

  // Multiplies the outputs of the row tiles in `which` by the factors that were handed over.
  __device__ __forceinline__ void multiply_output(int which) {
    const float* const s_factor = Base::s_factor() + quad * 2;
    float2 factor[ROW_TILES];
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) factor[n] = *(const float2*)&s_factor[n * 8];
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) {
      if (!(which >> n & 1)) continue;
#pragma unroll
      for (int i = 0; i < kValueChunks; i++) {
        r_out[i][n][0] *= factor[n].x, r_out[i][n][1] *= factor[n].y;
        r_out[i][n][2] *= factor[n].x, r_out[i][n][3] *= factor[n].y;
      }
    }
  }

  __device__ __forceinline__ void value_product(int stage) {
    const unsigned long long values =
        descriptor(shared_address(shared + G::stage(stage) + half * kValueChunks * kChunkBytes), 0, 1024, true);
    const unsigned long long probs = descriptor(shared_address(shared + G::prob(stage)), 128, 1024, false);
#pragma unroll
    for (int i = 0; i < kValueChunks; i++) hold_accumulators(r_out[i]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kValueChunks; i++) {
#pragma unroll
      for (int step = 0; step < kTileKeys / 16; step++)
        wgmma_m64k16<Element, ROW_TILES, true>(r_out[i], further(values, i * kChunkBytes + step * 2048), further(probs, step * 256));
      wgmma_commit();
    }
    wgmma_wait<2>();
    if (lane == 0) mbarrier_arrive(Base::free(stage, 0));
    wgmma_wait<1>();
    if (lane == 0) mbarrier_arrive(Base::free(stage, 1));
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kValueChunks; i++) hold_accumulators(r_out[i]);
  }

  // Of a raw tile: 64 columns of 16 keys after the other. There are registers for no more.
  __device__ __forceinline__ void raw_value_product(int stage) {
    const unsigned long long probs = descriptor(shared_address(shared + G::prob(stage)), 128, 1024, false);
    // Of this lane's key among 16, the unit that has this warp's 16 columns of the first 64; those of the second are four units away.
    const unsigned keys = shared_address(shared + G::stage(stage) + half * kValueChunks * kChunkBytes) + chunk_offset(lane & 15, warp);
    unsigned r_value[4];
#pragma unroll
    for (int i = 0; i < kValueChunks; i++) hold_accumulators(r_out[i]);
#pragma unroll
    for (int i = 0; i < kValueChunks; i++) {
#pragma unroll
      for (int step = 0; step < kTileKeys / 16; step++) {
        unsigned r_packed[2];
        if (i + step > 0) wgmma_wait<0>();
        hold_operand(r_value);
        ldmatrix_x2_trans(r_packed, (keys ^ i % 2 * 64) + i / 2 * 2 * kChunkBytes + step * 16 * 128);
#pragma unroll
        for (int k = 0; k < 2; k++) {
          unsigned columns[2];
          fp8x4_to_fp16(__byte_perm(r_packed[k], 0, 0x3120), columns);
          r_value[k * 2] = columns[0], r_value[k * 2 + 1] = columns[1];
        }
        wgmma_fence();
        wgmma_m64k16<Fp16, ROW_TILES>(r_out[i], r_value, further(probs, step * 256));
        wgmma_commit();
      }
      if (i % 2 == 1) {
        __syncwarp();
        if (lane == 0) mbarrier_arrive(Base::free(stage, i / 2));
      }
    }
    wgmma_wait<0>();
    hold_operand(r_value);
#pragma unroll
    for (int i = 0; i < kValueChunks; i++) hold_accumulators(r_out[i]);
  }

  // Of a tile that was unpacked, with the accumulators' rows as those of raw tiles are: there is at most one such tile or two an item.
  __device__ __forceinline__ void unpacked_value_product(int stage) {
    const unsigned long long probs = descriptor(shared_address(shared + G::prob(stage)), 128, 1024, false);
    const unsigned char* const values = shared + G::stage(stage) + half * kValueChunks * kChunkBytes;
#pragma unroll
    for (int i = 0; i < kValueChunks; i++) {
#pragma unroll 1
      for (int step = 0; step < kTileKeys / 16; step++) {
        // Columns 2 * group and the next of the warp's 16, of one key.
        auto pair = [&](int key) {
          return *(const unsigned*)(values + i * kChunkBytes + chunk_offset(key, warp * 2 + (group >> 2)) + (group & 3) * 4);
        };
        unsigned r_value[4];
#pragma unroll
        for (int k = 0; k < 2; k++) {
          const int key = step * 16 + k * 8 + quad * 2;
          const unsigned even = pair(key), odd = pair(key + 1);
          r_value[k * 2] = __byte_perm(even, odd, 0x5410), r_value[k * 2 + 1] = __byte_perm(even, odd, 0x7632);
        }
        hold_accumulators(r_out[i]);
        wgmma_fence();
        wgmma_m64k16<Element, ROW_TILES>(r_out[i], r_value, further(probs, step * 256));
        wgmma_commit();
        wgmma_wait<0>();
        hold_operand(r_value);
        hold_accumulators(r_out[i]);
      }
      // As the parts of an unpacked tile are: the first has two chunks of either value warpgroup's.
      if (i == 1 || i == 2) {
        __syncwarp();
        if (lane == 0) mbarrier_arrive(Base::free(stage, i - 1));
      }
    }
  }

  // Waits for the next hand-over, and multiplies the outputs if it says so. The score warpgroup's fence may be good for this one, too, as
  // the copies' landing reaches this one through it; nothing says so for the async proxy, and on an H200 this fence costs nothing.
  __device__ __forceinline__ int take_over() {
    mbarrier_wait(Base::handed(), hand_overs() & 1);
    fence_proxy_async();
    const int note = Base::s_note();
    if (note != 0 && note <= kFinish) multiply_output(note == kFinish ? ~0 : note);
    return note;
  }

  // This warp needs no more of what was handed over.
  __device__ __forceinline__ void taken_over() {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(Base::taken());
    pass_hand_over();
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kValueChunks; i++)
#pragma unroll
      for (int n = 0; n < ROW_TILES; n++) r_out[i][n][0] = r_out[i][n][1] = r_out[i][n][2] = r_out[i][n][3] = 0.f;
  }

  // The whole item was in this piece. Lanes hold two rows of one column: transposed, they hold two columns of one row, and pairs of lanes
  // exchange halves so that each writes four columns.
  __device__ __forceinline__ void write_output(const Target& t) const {
    if constexpr (Pool::is_fp8) return write_paired_output(t);
    const bool odd = quad & 1;
    const int column = half * kValueChunks * 64 + warp * 16 + (odd ? 8 : 0) + quad / 2 * 4;
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) {
      const int row = n * 8 + group;
      unsigned short* const target = output_row(p, t.q_start, t.row_base + min(row, t.rows - 1)) + column;
#pragma unroll
      for (int i = 0; i < kValueChunks; i++) {
        const unsigned lo = movmatrix_trans(pack2<Element>(r_out[i][n][0], r_out[i][n][1]));
        const unsigned hi = movmatrix_trans(pack2<Element>(r_out[i][n][2], r_out[i][n][3]));
        const unsigned other = __shfl_xor_sync(~0u, odd ? lo : hi, 1);
        if (row < t.rows) *(uint2*)(target + i * 64) = odd ? make_uint2(other, hi) : make_uint2(lo, other);
      }
    }
  }

  // The same of accumulators with two neighbouring columns in rows g and g + 8.
  __device__ __forceinline__ void write_paired_output(const Target& t) const {
    const int column = half * kValueChunks * 64 + warp * 16 + quad * 4;
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) {
      const int row = n * 8 + group;
      unsigned short* const target = output_row(p, t.q_start, t.row_base + min(row, t.rows - 1)) + column;
#pragma unroll
      for (int i = 0; i < kValueChunks; i++) {
        const unsigned even = movmatrix_trans(pack2<Element>(r_out[i][n][0], r_out[i][n][1]));
        const unsigned odd = movmatrix_trans(pack2<Element>(r_out[i][n][2], r_out[i][n][3]));
        if (row < t.rows) *(uint2*)(target + i * 64) = make_uint2(__byte_perm(even, odd, 0x5410), __byte_perm(even, odd, 0x7632));
      }
    }
  }

  // The item goes on in another piece: leave the accumulators for combine.
  __device__ __forceinline__ void write_partial(int slot) const {
    float4* const target = p.partial_out + (long long)slot * G::kPartialFloat4 + lane;
#pragma unroll
    for (int i = 0; i < kValueChunks; i++)
#pragma unroll
      for (int n = 0; n < ROW_TILES; n++)
        target[(((half * kValueChunks + i) * 4 + warp) * ROW_TILES + n) * 32] =
            make_float4(r_out[i][n][0], r_out[i][n][1], r_out[i][n][2], r_out[i][n][3]);
  }

  // What there is to do it learns from the hand-overs.
  __device__ __forceinline__ void run() {
    clear();
    for (int note; (note = take_over()) != kStop;) {
      if (note < kFinish) {
        const int stage = tiles() & 1;
        pass_tile();
        if constexpr (!Pool::is_fp8)
          value_product(stage);
        else if (note & kUnpacked)
          unpacked_value_product(stage);
        else
          raw_value_product(stage);
        taken_over();
        if (lane == 0) mbarrier_arrive(Base::free(stage, kParts - 1));
        continue;
      }
      const Target target = Base::s_target();
      taken_over();
      if (note == kFinish) {
        write_output(target);
      } else {
        write_partial(target.partial_slot);
      }
      clear();
    }
  }
};

// ---------------------------------------------------------------------------------------------------------------------------- the copies

// One warpgroup: tiles into shared memory.
template <class Element, int ROW_TILES>
struct CopyWarpgroup : Warpgroup<ROW_TILES> {
  using Base = Warpgroup<ROW_TILES>;
  using Base::p, Base::shared, Base::thread, Base::request;
  using typename Base::G;

  static constexpr int kRound = kWarpgroup / 8;           // keys that the warpgroup copies 16 bytes each of at once
  static constexpr int kThreadKeys = kTileKeys / kRound;  // keys of a tile that each thread copies parts of

  int tiles;                // copied so far, over all pieces
  int r_slot[kThreadKeys];  // of the keys that this thread copies next

  __device__ __forceinline__ CopyWarpgroup(const VerifyParams& params, unsigned char* memory) : Base(params, memory, 3), tiles(0) {}

  // The key of a tile that is this thread's i-th.
  __device__ __forceinline__ int copied_key(int i) const { return i * kRound + (thread >> 3); }

  // Done a tile ahead of the copy, and turned into addresses only there, so that nothing waits for it.
  __device__ __forceinline__ void load_slots(int tile) {
#pragma unroll
    for (int i = 0; i < kThreadKeys; i++) r_slot[i] = load_slot(p, request, tile * kTileKeys + copied_key(i), 0);
  }

  // Prefix columns from the pool, draft columns from k_extend, zeros beyond the last column.
  __device__ __forceinline__ void copy_tile(int tile) {
    const int stage = tiles & 1, unit = thread & 7, columns = request.columns();
    const unsigned char* source[kThreadKeys];
    unsigned existing = 0;
#pragma unroll
    for (int i = 0; i < kThreadKeys; i++) {
      const int column = tile * kTileKeys + copied_key(i);
      source[i] = p.kv_pool + (long long)(unsigned)r_slot[i] * p.kv_slot_stride;
      if (column >= request.prefix) {
        const int draft = column < columns ? column - request.prefix : 0;
        source[i] = p.k_extend + (long long)(request.q_start + draft) * p.k_extend_stride;
      }
      source[i] += unit * 16;
      keep_in_register(source[i]);  // one address and its offsets
      existing |= (unsigned)(column < columns) << i;
    }
    const unsigned keys = shared_address(shared + G::stage(stage)) + chunk_offset(thread >> 3, unit);
    const unsigned rope = shared_address(shared + G::rope(stage)) + chunk_offset(thread >> 3, unit);
    if (is_raw(request, tile)) {
#pragma unroll
      for (int part = 0; part < kParts; part++) {
        wait_until_free(stage, part);
#pragma unroll
        for (int chunk = 0; chunk <= kRawChunks; chunk++) {
          const bool is_rope = chunk == kRawChunks;
          if (part != (is_rope ? kParts - 1 : raw_part(chunk)) || is_rope && unit >= kRope / 16) continue;
#pragma unroll
          for (int i = 0; i < kThreadKeys; i++)
            cp_async_16((is_rope ? rope : keys + 2 * chunk * kChunkBytes) + i * kRound * 128, source[i] + chunk * 128, 16);
        }
        cp_async_mbarrier_arrive(Base::full(stage, part));
      }
      load_slots(tile + 1);
      tiles++;
      return;
    }
    auto copy = [&](int chunk, int i) {
      const bool exists = Pool::is_fp8 ? tile * kTileKeys + copied_key(i) < columns : existing >> i & 1;
      cp_async_16((chunk == kRopeChunk ? rope : keys + chunk * kChunkBytes) + i * kRound * 128, source[i] + chunk * 128, exists ? 16 : 0);
    };
    if constexpr (Pool::is_fp8) {
#pragma unroll
      for (int round = 0; round < kPackedRounds; round++) {
        if (round == 0 || part_of(round) != part_of(round - 1)) wait_until_free(stage, part_of(round));
#pragma unroll
        for (int i = 0; i < kThreadKeys; i++) {
          if (!is_packed(tile, i)) {
            copy(nth_chunk(round * 2), i);
            if (round * 2 + 1 < kChunks) copy(nth_chunk(round * 2 + 1), i);
          } else if (has_packed(round)) {
            cp_async_16(shared_address(shared) + packed_offset(stage, round) + i * kRound * 128, source[i] + packed_source(round), 16);
          }
        }
        cp_async_commit();
      }
      unpack_rounds<0>(tile, stage);
    } else {
#pragma unroll
      for (int nth = 0; nth < kChunks; nth++) {
        if (nth % kPartChunks == 0) wait_until_free(stage, nth / kPartChunks);
#pragma unroll
        for (int i = 0; i < kThreadKeys; i++) copy(nth_chunk(nth), i);
        if (nth % kPartChunks == kPartChunks - 1) cp_async_mbarrier_arrive(Base::full(stage, nth / kPartChunks));
      }
    }
    load_slots(tile + 1);  // not before: there are no registers to keep them in meanwhile
    tiles++;
  }

  // The first two tiles find their stages free, as in wait_until_taken.
  __device__ __forceinline__ void wait_until_free(int stage, int part) const {
    mbarrier_wait(Base::free(stage, part), (tiles >> 1) - 1 & 1);
  }

  // Packed keys, of an fp8 pool. A round is of two chunks, of which this thread has 16 numbers of each of its keys; of the rope chunk,
  // which is alone, half of the threads have some.
  __device__ __forceinline__ bool is_packed(int tile, int i) const { return tile * kTileKeys + copied_key(i) < request.prefix; }
  __device__ __forceinline__ bool has_packed(int round) const { return round < kPackedRounds - 1 || packed_line(thread & 7) == 0; }
  // Of the first key's.
  __device__ __forceinline__ int packed_offset(int stage, int round) const {
    const int number = fresh(thread), unit = number & 7, offset = chunk_offset(number >> 3, packed_unit(unit));
    const int chunk = nth_chunk(round * 2) + packed_line(unit) * kValueChunks;  // nth_chunk(round * 2 + packed_line(unit))
    return offset + (round == kPackedRounds - 1 ? G::rope(stage) : G::stage(stage) + chunk * kChunkBytes);
  }
  // From where `source` is, at this thread's unit of the first two chunks.
  __device__ __forceinline__ int packed_source(int round) const {
    return nth_chunk(round * 2) * 64 + packed_line(fresh(thread) & 7) * (kValueChunks - 1) * 64;
  }
  // The part that the last of a round's chunks is of.
  __device__ __forceinline__ static constexpr int part_of(int round) { return min(round * 2 + 1, kChunks - 1) / kPartChunks; }

  // Unpacks what this thread has copied, round after round as they land, and says so when a part is complete.
  template <int ROUND>
  __device__ __forceinline__ void unpack_rounds(int tile, int stage) const {
    cp_async_wait<kPackedRounds - 1 - ROUND>();
    if (has_packed(ROUND)) {
      const int offset = packed_offset(stage, ROUND);
      unsigned char *const place = shared + offset, *const other_place = shared + (offset ^ 16);
      auto load = [&](int i) { return *(const uint4*)(place + i * kRound * 128); };
      auto unpack = [&](int i, const uint4& packed) {
        unpack_in_place<Element>(packed, place + i * kRound * 128, other_place + i * kRound * 128, fresh(thread) & 7);
      };
      if ((tile + 1) * kTileKeys <= request.prefix) {
        // Several at once, as a compiler that does not know where the writes go would not.
        constexpr int kAtOnce = Element::is_bf16 ? 2 : 1;
#pragma unroll
        for (int i = 0; i < kThreadKeys; i += kAtOnce) {
          uint4 r_packed[kAtOnce];
#pragma unroll
          for (int k = 0; k < kAtOnce; k++) r_packed[k] = load(i + k);
#pragma unroll
          for (int k = 0; k < kAtOnce; k++) unpack(i + k, r_packed[k]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < kThreadKeys; i++)
          if (is_packed(tile, i)) unpack(i, load(i));
      }
    }
    constexpr int kPartsBefore = ROUND * 2 / kPartChunks;
    constexpr int kPartsNow = ROUND == kPackedRounds - 1 ? kParts : (ROUND + 1) * 2 / kPartChunks;
    if constexpr (kPartsNow > kPartsBefore) {
      fence_proxy_async();
      mbarrier_arrive(Base::full(stage, kPartsBefore));
    }
    if constexpr (ROUND + 1 < kPackedRounds) unpack_rounds<ROUND + 1>(tile, stage);
  }

  __device__ __forceinline__ void run() {
    const Beginning beginning = *(const Beginning*)(shared + G::kOffsetBeginning);
    Pieces<kTileKeys> pieces(p, beginning.position);
    Piece piece;
    piece.first = beginning.first, piece.last = beginning.last;
    request = beginning.request;
    barrier_sync(Base::barrier, kWarpgroup);  // nobody reads the Beginning any more
    for (bool more = piece.first < piece.last; more; more = pieces.next(piece, Base::schedule()), request = piece.item.request) {
      load_slots(piece.first);
      for (int tile = piece.first; tile < piece.last; tile++) copy_tile(tile);
    }
  }
};

// Grid: (workers). Block: 512 threads.
template <class Element, int ROW_TILES>
__device__ __forceinline__ void verify_attention(const VerifyParams& p) {
  using G = Geometry<ROW_TILES>;
  KDTREE_ALIGNED_DYNAMIC_SHARED(hopper_shared, 1024);
  launch_dependents();
  const int worker = blockIdx.x;
  const SizedRequest sized = load_sized_request<kTileKeys>(p, threadIdx.x & 31);
  const Schedule schedule = make_schedule<kTileKeys>(p, sized, worker);
  if (threadIdx.x == 0) {
    *(Schedule*)(hopper_shared + G::kOffsetSchedule) = schedule;
    const unsigned mbarriers = shared_address(hopper_shared + G::kOffsetMbarriers);
    for (int i = 0; i < kMbarriers; i++)
      mbarrier_init(mbarriers + i * 8, i < 2 * kParts ? kWarpgroup : i == kMbarriers - 2 ? kWarpgroup / 32 : 2 * kWarpgroup / 32);
    mbarrier_fence_init();
  }
  Pieces<kTileKeys> pieces(p, schedule, worker, sized);
  Piece piece;
  const bool any = pieces.first(piece);
  if (threadIdx.x == 0)
    *(Beginning*)(hopper_shared + G::kOffsetBeginning) =
        Beginning{piece.item.request, any ? piece.first : 0, any ? piece.last : 0, pieces.position};
  if (threadIdx.x == 0) {
    if (!any) piece.first = piece.last = 0;
    piece.after = pieces.position;
    *(Piece*)(hopper_shared + G::kOffsetSpare) = piece;
  }
  __syncthreads();
  const int warpgroup = uniform(threadIdx.x / kWarpgroup);
  if (warpgroup == 3) {
    set_max_registers_down<kCopyRegisters>();
    CopyWarpgroup<Element, ROW_TILES>(p, hopper_shared).run();
  } else if (warpgroup == 0) {  // keeps the registers that it has
    ScoreWarpgroup<Element, ROW_TILES>(p, hopper_shared).run();
  } else {
    set_max_registers_up<kValueRegisters>();
    ValueWarpgroup<Element, ROW_TILES>(p, hopper_shared, warpgroup - 1).run();
  }
}

}  // namespace hopper
