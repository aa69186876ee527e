// The Hopper configuration of verify_attn_flash: wgmma on tiles of 64 keys, up to 72 attention rows, by clusters of two blocks. For sm_90a
// alone. Parameters, schedule, partial results and combine are those of verify_attn_flash.cu, which includes this and has all of the
// mathematics.
//
// A worker is a pair of blocks, that is of multiprocessors, which share every tile by columns: each has half of the latent's and half of
// the rope's, of keys and queries, so that four tiles fit into its shared memory. The scores of a tile are sums over all columns: each
// block works out its part of them, over its own, for all rows; then it sends the other one those of half of the rows, and finishes the
// other half. What comes of that, P and factors, both blocks get, for each multiplies all rows of P with the values of its own columns.
//
// Four warpgroups in each block, which have different parts of a tile's way:
//
//   copy warpgroup     the block's columns of a tile into one of four stages by cp.async; of an fp8 pool, also unpacks it
//   score warpgroups   which take turns: S^T (64 x rows) = K (64 x 288) Q^T, both in shared memory; scores to and from the other block;
//                      softmax; P^T into both blocks
//   value warpgroup    O^T (256 x rows) += V^T P^T: V^T is the tile read MN-major; the accumulators stay in registers
//
//   time      ------------------------------------------------------------------------------->
//   copies    | 0 | 1 | 2 | 3 |        | 4       | 5       | 6       | ...
//   scores 0      | S(0)  softmax(0)   | S(2)  softmax(2)  | S(4)  ...
//   scores 1           | S(1)  softmax(1)   | S(3)  softmax(3)  | ...
//   values                        | O(0)    | O(1)    | O(2)    | ...
//
// A stage is in use from the start of its copy to the end of O, and there are four: a tile takes a quarter of that at least. So nothing
// that lies between a tile's landing and its O may wait for the landing of a later one; a product goes ahead only if its tile is there.
//
// Seven things are said, by mbarriers:
//   full[stage][part]  half of the block's columns of a tile have landed: a score warpgroup may multiply them
//   partial[turn]      the other block's scores of this block's rows are there, for that score warpgroup
//   received[turn]     the other block has read what it was sent: its place may be written again
//   risen[turn]        the maxima have come through that score warpgroup's tile
//   handed[i]          both blocks have handed over P, and by what the outputs must be multiplied first if a maximum has risen
//   taken[i]           the value warpgroups of both blocks are done with what was handed over: P and factors may be written again
//   free[stage][part]  this block's is done with half of the stage: the next but three tile's may be copied into it
// A piece ends with one more hand-over, of no P but of 1 / sum for each row and of where the outputs go. Nothing stops between pieces: the
// copies of the next one are under way while one is written.
//
// What another block is to see goes there by st.async, whose bytes the mbarrier there counts: nobody waits for it, and no fence that would
// wait for all of global memory is needed. Arrivals at another block's mbarrier say only that something was read.

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
// The same, of the phase's bytes as well: it is complete when those have been stored, too.
__device__ __forceinline__ void mbarrier_arrive_expecting(unsigned mbarrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(mbarrier), "r"(bytes) : "memory");
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
// Whether the phase of that parity is complete, now.
__device__ __forceinline__ bool mbarrier_test(unsigned mbarrier, int parity) {
  int complete;
  asm volatile(
      "{\n"
      ".reg .pred complete;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
      "selp.s32 %0, 1, 0, complete;\n"
      "}"
      : "=r"(complete)
      : "r"(mbarrier), "r"(parity)
      : "memory");
  return complete != 0;
}
// The mbarrier counts an arrival when all cp.asyncs that this thread has started so far have landed.
__device__ __forceinline__ void cp_async_mbarrier_arrive(unsigned mbarrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(mbarrier) : "memory");
}
// Blocks of a cluster. An address of another block is that of the same place in one's own memory, mapped.
__device__ __forceinline__ unsigned map_address(unsigned address, int block) {
  unsigned mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(block));
  return mapped;
}
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// At an mbarrier of another block.
__device__ __forceinline__ void mbarrier_arrive_remote(unsigned mbarrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mbarrier) : "memory");
}
// Into another block, whose mbarrier counts the bytes once they are there. Nobody waits for it here.
__device__ __forceinline__ void store_async(unsigned address, unsigned x, unsigned mbarrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address), "r"(x), "r"(mbarrier)
               : "memory");
}
__device__ __forceinline__ void store_async(unsigned address, uint2 x, unsigned mbarrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(address), "r"(x.x), "r"(x.y),
               "r"(mbarrier)
               : "memory");
}
__device__ __forceinline__ void store_async(unsigned address, uint4 x, unsigned mbarrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address), "r"(x.x),
               "r"(x.y), "r"(x.z), "r"(x.w), "r"(mbarrier)
               : "memory");
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

// Of an accumulator, in another register. A plain copy ptxas may make the same register, and then finds none for the next product.
__device__ __forceinline__ float copied(float x) {
  float y;
  asm volatile("add.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
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
  KDTREE_WGMMA(16, "%8", "%9", "%10")
  KDTREE_WGMMA(32, "%16", "%17", "%18")
  KDTREE_WGMMA(40, "%20", "%21", "%22")
  KDTREE_WGMMA(48, "%24", "%25", "%26")
  KDTREE_WGMMA(64, "%32", "%33", "%34")
  KDTREE_WGMMA(72, "%36", "%37", "%38")
}

#endif  // KDTREE_HOST

namespace hopper {

// ---------------------------------------------------------------------------------------------------------------------------- constants

constexpr int kCluster = 2;                                                      // blocks of a worker
constexpr int kWarpgroup = 128;                                                  // threads
constexpr int kThreads = 4 * kWarpgroup;                                         // two for scores, one for values, one for copies
constexpr int kTileKeys = 64;                                                    // keys in a tile
constexpr int kStages = 4;                                                       // tiles in shared memory
constexpr int kBlockLatent = kLatent / kCluster, kBlockRope = kRope / kCluster;  // columns of one block
constexpr int kChunks = kBlockLatent / 64;    // of 64 columns of the latent, 128 bytes, in which tiles and queries lie in shared memory
constexpr int kChunkBytes = kTileKeys * 128;  // one chunk of a tile
constexpr int kParts = 2;  // of a stage, that are copied and waited for each by itself: two chunks, the first also the rope
constexpr int kPartChunks = kChunks / kParts;
// Numbers of mbarriers: see above.
constexpr int kFull = 0, kFree = kFull + kStages * kParts, kHanded = kFree + kStages * kParts, kTaken = kHanded + 2, kPartial = kTaken + 2,
              kReceived = kPartial + 2, kRisen = kReceived + 2, kMbarriers = kRisen + 2;
// A block starts with 128 registers a thread, which are shared out anew.
constexpr int kRegisters = 128, kValueRegisters = 176;
constexpr int kScoreRegisters = Pool::is_fp8 ? 136 : 144, kCopyRegisters = Pool::is_fp8 ? 64 : 48;
constexpr bool kAhead = !Pool::is_fp8;  // whether registers are left for a product that is under way meanwhile
static_assert(kValueRegisters + 2 * kScoreRegisters + kCopyRegisters <= 4 * kRegisters, "all that there are");

// Named barriers: of each score warpgroup, and of both; 0 is __syncthreads.
constexpr int kBarrierOfWarpgroup = 1;
constexpr int kBarrierOfScores = 3;

// --------------------------------------------------------------------------------------------------------------------------- descriptors
//
// PTX ISA, "Matrix descriptor format" of wgmma: address, leading and stride dimension byte offset in units of 16 bytes at bits 0, 16 and
// 32, the swizzle at bits 62 and 63 (1: 128 bytes). Which offset is which: CUTLASS, include/cute/atom/mma_traits_sm90_gmma.hpp, above
// make_gmma_desc:
//   K-major,  128-byte swizzle   stride: from 8 rows to the next 8; leading: not used. The next 16 columns are 32 bytes further.
//   K-major,  no swizzle         stride: from 8 rows to the next 8; leading: from 8 k to the next 8.
//   MN-major, 128-byte swizzle   stride: from 8 k to the next 8; leading: from 64 rows to the next 64, which there are none of.
//   MN-major, no swizzle         stride: from 8 rows to the next 8; leading: from 8 k to the next 8.
// Of a block of a cluster, bits 24 and up of an address are the block's number, for which a descriptor has no place.

__device__ __forceinline__ unsigned long long descriptor(unsigned address, int leading, int stride, bool swizzled) {
  return (unsigned long long)swizzled << 62 | (unsigned long long)(stride >> 4) << 32 | (unsigned long long)(leading >> 4) << 16 |
         (address & 0x3ffff) >> 4;
}

// The same matrix, `bytes` further.
__device__ __forceinline__ unsigned long long further(unsigned long long descriptor, int bytes) { return descriptor + (bytes >> 4); }

// A number that all lanes have, which the compiler does not always see: without this, descriptors go through vector registers.
__device__ __forceinline__ unsigned uniform(unsigned x) { return __shfl_sync(~0u, x, 0); }

// Byte offset of 16-byte unit `unit` of a key or query in its chunk: the 128-byte swizzle.
__device__ __forceinline__ int chunk_offset(int row, int unit) { return row * 128 + ((unit ^ (row & 7)) << 4); }

__device__ __forceinline__ unsigned bits_of(float x) { return (unsigned)__float_as_int(x); }

// Which of the worker's blocks this is, and which worker it is of.
__device__ __forceinline__ int block_rank() { return blockIdx.x % kCluster; }
__device__ __forceinline__ int this_worker() { return blockIdx.x / kCluster; }

// Which rows a piece is of, and where the outputs go.
struct Target {
  int q_start, row_base, rows;
  int partial_slot;   // or -1: of a whole item
  int number, q_len;  // of the request
};

// What the copy warpgroup begins with. In registers it would have to be where that warpgroup has some, which are few.
struct Beginning {
  Request request;
  int first, last;  // tiles of the first piece, none if they are equal
  int position;     // of the next piece
};

// ------------------------------------------------------------------------------------------------------------------- geometry of a block

// Rows. Each block finishes half of them. Those of a thread of a score warpgroup are values n of its arrays: for n < kRun adjacent ones, so
// that they are 16 bytes of P (8, of 32 rows). Number `local` among a block's rows is quad * kRun + n or, of a ninth row tile, which the
// blocks share, 4 * kRun + quad.
template <int ROW_TILES>
struct Geometry {
  static constexpr int kRows = ROW_TILES * 8;
  static constexpr int kOwnRows = kRows / kCluster;  // that a block finishes
  static constexpr int kRun = ROW_TILES < 8 ? ROW_TILES : 8;
  static_assert(ROW_TILES == 4 || ROW_TILES == 8 || ROW_TILES == 9, "the rows of a thread");

  __device__ __forceinline__ static int local_row(int quad, int n) { return n < kRun ? quad * kRun + n : 4 * kRun + quad; }
  // Of the item's row block.
  __device__ __forceinline__ static int row(int block, int local) {
    return local < 4 * kRun ? block * 4 * kRun + local : 8 * kRun + block * 4 + (local - 4 * kRun);
  }
  // Which query is column 8 * n + 2 * quad + e of the score product: even ones are of the rows that the block finishes itself.
  __device__ __forceinline__ static int query_of_column(int block, int column) {
    return row(block ^ (column & 1), local_row(column >> 1 & 3, column >> 3));
  }

  // Queries: latent | stages: latent | stages: rope, two in a chunk | queries: rope | P | partial scores | the rest.
  static constexpr int kQueryChunkBytes = kRows * 128;
  static constexpr int kProbTile = 1024 + 32;  // of eight rows; the 32 bytes let all lanes of a quarter warp write to different banks
  static constexpr int kProbBytes = ROW_TILES * kProbTile;
  static constexpr int kPartialBytes = kWarpgroup * ROW_TILES * 2 * 4;  // [vectors of two or four][threads]
  static constexpr int kOffsetStages = kChunks * kQueryChunkBytes;
  static constexpr int kOffsetRope = kOffsetStages + kStages * kChunks * kChunkBytes;
  static constexpr int kOffsetQueryRope = kOffsetRope + kStages / 2 * kChunkBytes;  // [16-byte unit][row]
  static constexpr int kOffsetProb = kOffsetQueryRope + kRows * kBlockRope * 2;
  static constexpr int kOffsetPartial = kOffsetProb + 2 * kProbBytes;
  static constexpr int kOffsetMbarriers = kOffsetPartial + 2 * kPartialBytes;
  static constexpr int kOffsetFactor = kOffsetMbarriers + kMbarriers * 8;    // [2][rows]: what the outputs are to be multiplied by
  static constexpr int kOffsetHighest = kOffsetFactor + 2 * kRows * 4;       // [2 warpgroups][own rows]: running maxima
  static constexpr int kOffsetExchange = kOffsetHighest + 2 * kOwnRows * 4;  // [2 warpgroups][2][4 warps][own rows]
  static constexpr int kOffsetNote = kOffsetExchange + 16 * kOwnRows * 4;    // [2][block]: see Note
  static constexpr int kOffsetTarget = kOffsetNote + 4 * 4;                  // of the last two hand-overs and of the present piece
  static constexpr int kOffsetSchedule = kOffsetTarget + 3 * sizeof(Target);
  static constexpr int kOffsetBeginning = kOffsetSchedule + sizeof(Schedule);
  static constexpr int kSharedBytes = kOffsetBeginning + sizeof(Beginning);
  static constexpr int kPartialFloat4 = kLatent / 16 * ROW_TILES * 32;  // accumulators of a worker
  static_assert(kSharedBytes <= 232448, "what sm_90 allows a block");
  static_assert(kOffsetMbarriers % 16 == 0 && kOffsetFactor % 16 == 0 && kOffsetHighest % 16 == 0 && kOffsetExchange % 16 == 0 &&
                    kOffsetNote % 8 == 0,
                "read by vectors");

  // What the other block sends of each hand-over, and of one with P.
  static constexpr int kFactorBytes = kOwnRows * 4 + 4;
  static constexpr int kHandedBytes = kFactorBytes + kOwnRows * kTileKeys * 2;

  __device__ __forceinline__ static int stage(int number) { return kOffsetStages + number * (kChunks * kChunkBytes); }
  __device__ __forceinline__ static int rope(int number) { return kOffsetRope + (number >> 1) * kChunkBytes; }
  __device__ __forceinline__ static int prob(int number) { return kOffsetProb + number * kProbBytes; }
  __device__ __forceinline__ static int partial(int number) { return kOffsetPartial + number * kPartialBytes; }
  __device__ __forceinline__ static int highest(int number) { return kOffsetHighest + number * kOwnRows * 4; }
  __device__ __forceinline__ static int exchange(int warpgroup, int number) {
    return kOffsetExchange + (warpgroup * 2 + number) * 4 * kOwnRows * 4;
  }
  __device__ __forceinline__ static int note(int number, int block) { return kOffsetNote + number * 8 + block * 4; }
  __device__ __forceinline__ static int factor(int number) { return kOffsetFactor + number * kRows * 4; }
  __device__ __forceinline__ static int mbarrier(int number) { return kOffsetMbarriers + number * 8; }
};

// A number that is worked out here and not kept all the time: registers are scarce.
__device__ __forceinline__ int fresh(int x) {
  keep_in_register(x);
  return x;
}

// What a hand-over is for: bit n if a maximum of row tile n has risen, so that its outputs must be multiplied by the factors before V^T P^T
// is added; or one of these.
enum Note : int {
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
  int thread, warp, lane;  // within the warpgroup
  int group, quad;         // of the accumulators: lane = group * 4 + quad

  __device__ __forceinline__ Warpgroup(const VerifyParams& params, unsigned char* memory)
      : p(params), shared(memory), thread(threadIdx.x % kWarpgroup) {
    renew();
  }

  // The thread's numbers anew, so that what follows from them is worked out where it is needed and not kept all the time.
  __device__ __forceinline__ void renew() {
    thread = fresh(thread);
    warp = thread >> 5, lane = thread & 31, group = lane >> 2, quad = lane & 3;
  }

  __device__ __forceinline__ const Schedule& schedule() const { return *(const Schedule*)(shared + G::kOffsetSchedule); }
  __device__ __forceinline__ unsigned mbarrier(int number) const { return shared_address(shared + G::mbarrier(number)); }
  // In the worker's other block: where its shared memory begins.
  __device__ __forceinline__ unsigned other_block() const { return map_address(shared_address(shared), block_rank() ^ 1); }
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

// Where something is stored: in this block, or in the other one, whose mbarrier counts it.
struct Here {
  unsigned char* shared;
  template <class Value>
  __device__ __forceinline__ void store(int offset, Value x) const {
    *(Value*)(shared + offset) = x;
  }
};
struct There {
  unsigned shared, mbarrier;
  template <class Value>
  __device__ __forceinline__ void store(int offset, Value x) const {
    store_async(shared + offset, x, mbarrier);
  }
};

// Two warpgroups that take turns at the tiles of a piece: S^T = K Q^T, and P. A thread has ROW_TILES rows, see Geometry, and the keys
// warp * 16 + group and that + 8.
template <class Element, int ROW_TILES>
struct ScoreWarpgroup : Warpgroup<ROW_TILES> {
  using Base = Warpgroup<ROW_TILES>;
  using Base::p, Base::shared, Base::thread, Base::warp, Base::lane, Base::group, Base::quad, Base::mbarrier;
  using typename Base::G;
  using Scores = float[ROW_TILES][2];  // of this thread's rows and keys

  const unsigned other;        // block: where its shared memory begins
  const int turn;              // which of the two: it has the tiles turn, turn + 2, ... of a piece
  int prefix;                  // of the request
  int tiles_before;            // of both warpgroups, in earlier pieces
  int hand_overs;              // to the values: of both warpgroups, one a tile and one a piece; the next one of this warpgroup
  int attended;                // by this warpgroup, over all pieces: tiles whose scores have come from the other block
  int waited;                  // for maxima of the other warpgroup
  float r_highest[ROW_TILES];  // the running maxima, log2, after this warpgroup's last tile
  float r_sum[ROW_TILES];      // this thread's share of the sums, relative to those

  __device__ __forceinline__ ScoreWarpgroup(const VerifyParams& params, unsigned char* memory, int which)
      : Base(params, memory), other(Base::other_block()), turn(which), tiles_before(0), hand_overs(0), attended(0), waited(0) {}

  // What there is to know of the piece, and is not always needed.
  __device__ __forceinline__ Target& s_target() const { return ((Target*)(shared + G::kOffsetTarget))[2]; }

  __device__ __forceinline__ void synchronise() const { barrier_sync(kBarrierOfWarpgroup + turn, kWarpgroup); }
  __device__ __forceinline__ void synchronise_both() const { barrier_sync(kBarrierOfScores, 2 * kWarpgroup); }

  // Both warpgroups copy this block's columns of the queries of the row block. Rows that do not exist are zero.
  __device__ __forceinline__ void start_copying_queries(int q_start, int row_base, int rows) const {
    constexpr int kRound = 2 * kWarpgroup / 8, kThreadQueries = (G::kRows + kRound - 1) / kRound;
    const int number = fresh(thread), unit = number & 7, rank = block_rank(), first = turn * (kWarpgroup / 8) + (number >> 3);
    const unsigned target = shared_address(shared) + chunk_offset(first, unit);
#pragma unroll
    for (int i = 0; i < kThreadQueries; i++) {
      const int column = i * kRound + first;
      if (column >= G::kRows) continue;
      const int row = G::query_of_column(rank, column), existing = row_base + (row < rows ? row : 0), token = quotient(existing, p.heads);
      const int bytes = row < rows ? 16 : 0;
      const unsigned char* const source =
          p.q + (long long)(q_start + token) * p.q_token_stride + (existing - token * p.heads) * p.q_head_stride;
      const unsigned char* const latent = source + rank * (kBlockLatent * 2) + unit * 16;
#pragma unroll
      for (int chunk = 0; chunk < kChunks; chunk++)
        cp_async_16(target + chunk * G::kQueryChunkBytes + i * kRound * 128, latent + chunk * 128, bytes);
      if ((unit >> 2) == (i & 1))
        cp_async_16(shared_address(shared + G::kOffsetQueryRope) + (unit & 3) * (G::kRows * 16) + column * 16,
                    source + kLatent * 2 + rank * (kBlockRope * 2) + (unit & 3) * 16, bytes);
    }
    cp_async_commit();
  }

  __device__ __forceinline__ void wait_for_queries() const {
    cp_async_wait<0>();
    fence_proxy_async();
    synchronise_both();
  }

  // Bit i: this thread's row i sees its first key of a tile, or its second. Only tiles that reach beyond the prefix need a look at the
  // mask. Each lane of a warp reads what one of its 16 keys and every other draft token are; lane j keeps the answers of two tokens, one
  // bit a key.
  __device__ __forceinline__ void load_visible(int tile, unsigned (&visible)[2]) const {
    constexpr int kAtOnce = 5;  // pairs of tokens
    const int heads = fresh(p.heads);
    const Target& t = s_target();
    const int row_base = t.row_base, rows = t.rows, q_len = t.q_len;
    const int columns = prefix + q_len, column = tile * kTileKeys + warp * 16 + (lane & 15), draft = column - prefix;
    const int first_token = quotient(row_base, heads), last_token = quotient(row_base + rows - 1, heads);
    const unsigned char* mask = p.custom_mask;
    if (mask != nullptr) mask += load_index(p.mask_indptr, t.number, p.wide_indices & kWideMask) + max(min(column, columns - 1), prefix);
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
        const bool sees = draft < 0 || (draft < q_len && (mask != nullptr ? byte[i] != 0 : draft <= token));
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
    for (int i = 0; i < ROW_TILES; i++) {
      const int row = G::row(block_rank(), G::local_row(quad, i)), token = quotient(row_base + row, heads) - first_token;
      unsigned word = __shfl_sync(~0u, words[0], token >> 1 & 31);
      if (G::kRows > 64) {
        const unsigned far = __shfl_sync(~0u, words[1], token >> 1 & 31);
        if (token >= 64) word = far;
      }
      word >>= (token & 1) * 16 + group;
      if (row >= rows) word = 0;
      visible[0] |= (word & 1) << i;
      visible[1] |= (word >> 8 & 1) << i;
    }
  }

  // Starts the score product of the n-th tile of the piece. The partial scores are there after wgmma_wait.
  __device__ __forceinline__ void start_score_product(int nth, float (&r_score)[ROW_TILES][4]) const {
    const int tiles = tiles_before + nth, stage = tiles % kStages;
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) r_score[n][0] = r_score[n][1] = r_score[n][2] = r_score[n][3] = 0.f;
    const unsigned memory = uniform(shared_address(shared));
    const unsigned long long queries = descriptor(memory, 0, 1024, true);
    const unsigned long long query_rope = descriptor(memory + G::kOffsetQueryRope, G::kRows * 16, 128, false);
    const unsigned long long keys = descriptor(uniform(shared_address(shared + G::stage(stage))), 0, 1024, true);
    const unsigned long long rope = descriptor(uniform(shared_address(shared + G::rope(stage)) + (stage & 1) * 64), 0, 1024, true);
#pragma unroll
    for (int part = 0; part < kParts; part++) {
      mbarrier_wait(mbarrier(kFull + stage * kParts + part), tiles / kStages & 1);
      fence_proxy_async();
      hold_accumulators(r_score);
      wgmma_fence();
      if (part == 0) {
#pragma unroll
        for (int step = 0; step < kBlockRope / 16; step++)
          wgmma_m64k16<Element, ROW_TILES, false>(r_score, further(rope, step * 32), further(query_rope, step * 2 * (G::kRows * 16)));
      }
#pragma unroll
      for (int chunk = part * kPartChunks; chunk < (part + 1) * kPartChunks; chunk++)
#pragma unroll
        for (int step = 0; step < 4; step++)
          wgmma_m64k16<Element, ROW_TILES, false>(r_score, further(keys, chunk * kChunkBytes + step * 32),
                                                  further(queries, chunk * G::kQueryChunkBytes + step * 32));
      wgmma_commit();
    }
  }

  // Whether the n-th tile of the piece has landed.
  __device__ __forceinline__ bool has_landed(int nth) const {
    const int tiles = tiles_before + nth;
    bool landed = true;
#pragma unroll
    for (int part = 0; part < kParts; part++)
      landed = landed && mbarrier_test(mbarrier(kFull + tiles % kStages * kParts + part), tiles / kStages & 1);
    return landed;
  }

  // When the score product that was started last is there, sends the other block the scores of its rows.
  __device__ __forceinline__ void send_scores(float (&r_score)[ROW_TILES][4], Scores& r_own) {
    if (thread == 0) mbarrier_arrive_expecting(mbarrier(kPartial + turn), G::kPartialBytes);  // as many come from there
    mbarrier_wait(mbarrier(kReceived + turn), attended - 1 & 1);                              // at first there is nothing to wait for
    wgmma_wait<0>();
    hold_accumulators(r_score);
    const unsigned target = other + G::partial(turn), counter = other + G::mbarrier(kPartial + turn);
#pragma unroll
    for (int n = 0; n + 1 < ROW_TILES; n += 2)
      store_async(target + n / 2 * (kWarpgroup * 16) + thread * 16,
                  make_uint4(bits_of(r_score[n][1]), bits_of(r_score[n][3]), bits_of(r_score[n + 1][1]), bits_of(r_score[n + 1][3])),
                  counter);
    if constexpr (ROW_TILES % 2)
      store_async(target + ROW_TILES / 2 * (kWarpgroup * 16) + thread * 8,
                  make_uint2(bits_of(r_score[ROW_TILES - 1][1]), bits_of(r_score[ROW_TILES - 1][3])), counter);
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) r_own[n][0] = copied(r_score[n][0]), r_own[n][1] = copied(r_score[n][2]);
  }

  // Adds the other block's partial scores to this one's.
  __device__ __forceinline__ void receive_scores(Scores& r_own) {
    mbarrier_wait(mbarrier(kPartial + turn), attended & 1);
    const unsigned char* const source = shared + G::partial(turn);
#pragma unroll
    for (int n = 0; n + 1 < ROW_TILES; n += 2) {
      const float4 part = *(const float4*)(source + n / 2 * (kWarpgroup * 16) + thread * 16);
      r_own[n][0] += part.x, r_own[n][1] += part.y, r_own[n + 1][0] += part.z, r_own[n + 1][1] += part.w;
    }
    if constexpr (ROW_TILES % 2) {
      const float2 part = *(const float2*)(source + ROW_TILES / 2 * (kWarpgroup * 16) + thread * 8);
      r_own[ROW_TILES - 1][0] += part.x, r_own[ROW_TILES - 1][1] += part.y;
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive_remote(other + G::mbarrier(kReceived + turn));
    attended++;
  }

  // This thread's of an array of the block's own rows.
  __device__ __forceinline__ void load_own(const float* s_of_rows, float (&value)[ROW_TILES]) const {
#pragma unroll
    for (int n = 0; n < G::kRun; n += 4) {
      const float4 four = *(const float4*)&s_of_rows[quad * G::kRun + n];
      value[n] = four.x, value[n + 1] = four.y, value[n + 2] = four.z, value[n + 3] = four.w;
    }
    if constexpr (ROW_TILES > G::kRun) value[G::kRun] = s_of_rows[4 * G::kRun + quad];
  }

  // Combines each row's value over the eight lanes of a quad and leaves it for the other warps, in [4 warps][own rows]. One half of the
  // place after the other: some warp may still read the last.
  template <class Combine>
  __device__ __forceinline__ float* exchange(int half, float (&value)[ROW_TILES], float neutral, Combine combine) const {
    float* const s_exchange = (float*)(shared + G::exchange(turn, half));
    float* const s_warp = s_exchange + fresh(warp * G::kOwnRows);
    combine_groups(value, lane, neutral, combine, [&](int i, float result) { s_warp[G::local_row(quad, i)] = result; });
    return s_exchange;
  }

  // The running maxima after the other warpgroup's last tile.
  __device__ __forceinline__ void load_maxima_of_other(float (&r_maxima)[ROW_TILES]) {
    mbarrier_wait(mbarrier(kRisen + (turn ^ 1)), waited & 1);
    waited++;
    load_own((const float*)(shared + G::highest(turn ^ 1)), r_maxima);
  }

  // The maxima of the n-th tile become the running ones, which have come through all tiles before it: r_before is what those were.
  __device__ __forceinline__ void raise_maxima(int nth, const float* s_exchange, float (&r_tile)[ROW_TILES], float (&r_before)[ROW_TILES]) {
    load_own(s_exchange, r_tile);
#pragma unroll
    for (int w = 1; w < 4; w++) {
      float r_warp[ROW_TILES];
      load_own(s_exchange + w * G::kOwnRows, r_warp);
#pragma unroll
      for (int n = 0; n < ROW_TILES; n++) r_tile[n] = fmaxf(r_tile[n], r_warp[n]);
    }
    if (nth == 0) {
#pragma unroll
      for (int n = 0; n < ROW_TILES; n++) r_before[n] = kNothingSeen;
    } else {
      load_maxima_of_other(r_before);
    }
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) r_tile[n] = fmaxf(r_tile[n], r_before[n]);
    if (warp == 0 && group == 0) {
      float* const s_highest = (float*)(shared + G::highest(turn));
#pragma unroll
      for (int n = 0; n < G::kRun; n += 4)
        *(float4*)&s_highest[quad * G::kRun + n] = make_float4(r_tile[n], r_tile[n + 1], r_tile[n + 2], r_tile[n + 3]);
      if constexpr (ROW_TILES > G::kRun) s_highest[4 * G::kRun + quad] = r_tile[G::kRun];
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(mbarrier(kRisen + turn));
  }

  // What has been handed over the last but one time is taken, by both blocks.
  __device__ __forceinline__ void wait_until_taken() const {
    mbarrier_wait(mbarrier(kTaken + (hand_overs & 1)), (hand_overs >> 1) - 1 & 1);
  }

  // What is handed over goes first into this block, which must not wait for what is on its way to the other one.
  __device__ __forceinline__ Here here() const { return Here{shared}; }
  __device__ __forceinline__ There there() const { return There{other, other + G::mbarrier(kHanded + (hand_overs & 1))}; }

  // One warp: what the outputs are to be multiplied by, and what of it is not 1: the note.
  __device__ __forceinline__ void store_factors(const float (&r_before)[ROW_TILES], const float (&r_after)[ROW_TILES]) const {
    const int offset = G::factor(hand_overs & 1), rank = block_rank();
    unsigned risen = 0, last_risen = 0;
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) (n < G::kRun ? risen : last_risen) |= r_after[n] > r_before[n];
    const int row_tile = G::row(rank, G::local_row(quad, 0)) / 8;
    const unsigned note = __reduce_or_sync(~0u, risen << row_tile | last_risen << 8);
    if (lane == 0) *(unsigned*)(shared + G::note(hand_overs & 1, rank)) = note;
    if (group != 0) return;
    auto factor = [&](int n) { return exp2_approx(r_before[n] - r_after[n]); };
#pragma unroll
    for (int n = 0; n < G::kRun; n += 4)
      *(float4*)(shared + offset + G::row(rank, quad * G::kRun + n) * 4) =
          make_float4(factor(n), factor(n + 1), factor(n + 2), factor(n + 3));
    if constexpr (ROW_TILES > G::kRun) *(float*)(shared + offset + G::row(rank, 4 * G::kRun + quad) * 4) = factor(G::kRun);
  }

  // The same threads: into the other block.
  __device__ __forceinline__ void send_factors() const {
    const int offset = G::factor(hand_overs & 1), rank = block_rank(), note = G::note(hand_overs & 1, rank);
    if (lane == 0) there().store(note, *(const unsigned*)(shared + note));
    if (group != 0) return;
#pragma unroll
    for (int n = 0; n < G::kRun; n += 4) {
      const int place = offset + G::row(rank, quad * G::kRun + n) * 4;
      there().store(place, *(const uint4*)(shared + place));
    }
    if constexpr (ROW_TILES > G::kRun) {
      const int place = offset + G::row(rank, 4 * G::kRun + quad) * 4;
      there().store(place, *(const unsigned*)(shared + place));
    }
  }

  // What this thread has stored here is there for the value warpgroup; `bytes` come from the other block. No fence for the async proxy: the
  // value warpgroup has one behind its wait, as what comes from the other block needs it.
  __device__ __forceinline__ void hand_over(int bytes) const {
    const unsigned handed = mbarrier(kHanded + (hand_overs & 1));
    __syncwarp();
    if (thread == 0)
      mbarrier_arrive_expecting(handed, bytes);
    else if (lane == 0)
      mbarrier_arrive(handed);
  }

  // A hand-over without P: thread i has the factor of this block's row i.
  __device__ __forceinline__ void hand_over_note(unsigned note, float factor) {
    const int thread = fresh(Base::thread);
    store_note(here(), thread, note, factor);
    hand_over(G::kFactorBytes);
    store_note(there(), thread, note, factor);
  }
  template <class Block>
  __device__ __forceinline__ void store_note(Block block, int thread, unsigned note, float factor) const {
    if (thread < G::kOwnRows) block.store(G::factor(hand_overs & 1) + G::row(block_rank(), thread) * 4, bits_of(factor));
    if (thread == 0) block.store(G::note(hand_overs & 1, block_rank()), note);
  }

  // Whether this thread's first or second key of a tile is none of the prefix.
  __device__ __forceinline__ bool is_draft(int tile, int k) const { return tile * kTileKeys + warp * 16 + group + k * 8 >= prefix; }

  // What of P this thread stores: eight rows of a key are 16 bytes. Of a ninth row tile a thread has one key, of its own row and the next
  // or last.
  template <class Block>
  __device__ __forceinline__ void store_probabilities(Block block, const unsigned (&r_prob)[ROW_TILES], unsigned r_pair) const {
    const int rank = block_rank(), place = G::prob(hand_overs & 1) + warp * 256 + group * 16;
    const int row = G::row(rank, quad * G::kRun), offset = place + row / 8 * G::kProbTile + row % 8 * 2;
#pragma unroll
    for (int k = 0; k < 2; k++) {
      if constexpr (G::kRun == 8)
        block.store(offset + k * 128, make_uint4(r_prob[k * 4], r_prob[k * 4 + 1], r_prob[k * 4 + 2], r_prob[k * 4 + 3]));
      else
        block.store(offset + k * 128, make_uint2(r_prob[k * 2], r_prob[k * 2 + 1]));
    }
    if constexpr (ROW_TILES > G::kRun) block.store(place + 8 * G::kProbTile + rank * 8 + (quad >> 1) * 4 + (quad & 1) * 128, r_pair);
  }
  __device__ __forceinline__ unsigned pair_of_rows(unsigned keys) const {
    const unsigned theirs = __shfl_xor_sync(~0u, keys, 1);
    return quad & 1 ? theirs >> 16 | (keys & 0xffff0000u) : (keys & 0xffffu) | theirs << 16;
  }

  // The scores of the n-th tile, without what the other block has of them, to P. If there are MORE tiles, the next one's product is started
  // and its scores are sent: before P is handed over if the tile is there, and never waited for before that.
  template <bool MORE>
  __device__ __forceinline__ void attend_tile(int tile, int nth, Scores& r_own, float (&r_score)[ROW_TILES][4]) {
    Base::renew();
    const bool masked = (tile + 1) * kTileKeys > prefix;
    unsigned visible[2] = {~0u, ~0u};
    if (masked) load_visible(tile, visible);
    receive_scores(r_own);
    if (masked)
#pragma unroll
      for (int n = 0; n < ROW_TILES; n++)
#pragma unroll
        for (int k = 0; k < 2; k++)
          if (!(visible[k] >> n & 1)) r_own[n][k] = __int_as_float(0xff800000);
    float r_tile[ROW_TILES], r_before[ROW_TILES];
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++)
      r_tile[n] = fmaxf(scaled(p, r_own[n][0], is_draft(tile, 0)), scaled(p, r_own[n][1], is_draft(tile, 1)));
    bool ahead = false;
    float* const s_exchange = exchange(nth >> 1 & 1, r_tile, kNothingSeen, [](float a, float b) { return fmaxf(a, b); });
    if constexpr (MORE && kAhead) {
      ahead = !barrier_sync_or(kBarrierOfWarpgroup + turn, kWarpgroup, !has_landed(nth + 2));
      if (ahead) start_score_product(nth + 2, r_score);
    } else {
      synchronise();
    }
    raise_maxima(nth, s_exchange, r_tile, r_before);
    wait_until_taken();
    if (warp == 1) store_factors(r_before, r_tile);
    // exp2 takes the scores as they were before the multiplication: one instruction.
    auto weight = [&](int n, int k) { return exp2_approx(scaled_above(p, r_own[n][k], is_draft(tile, k), r_tile[n])); };
    unsigned r_prob[ROW_TILES];  // two rows of a key each, but of the ninth row tile two keys of a row
#pragma unroll
    for (int k = 0; k < 2; k++)
#pragma unroll
      for (int i = 0; i < G::kRun / 2; i++) r_prob[k * (G::kRun / 2) + i] = pack2<Element>(weight(i * 2, k), weight(i * 2 + 1, k));
    if constexpr (ROW_TILES > G::kRun) r_prob[G::kRun] = pack2<Element>(weight(G::kRun, 0), weight(G::kRun, 1));
    unsigned r_pair = 0;
    if constexpr (ROW_TILES > G::kRun) r_pair = pair_of_rows(r_prob[G::kRun]);
    store_probabilities(here(), r_prob, r_pair);
    hand_over(G::kHandedBytes);
    store_probabilities(there(), r_prob, r_pair);
    if (warp == 1) send_factors();
    hand_overs += 2;
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) {
      r_sum[n] *= exp2_approx(r_highest[n] - r_tile[n]);
      r_highest[n] = r_tile[n];
    }
    // To the sums: the rounded values, as the product has them.
#pragma unroll
    for (int k = 0; k < 2; k++)
#pragma unroll
      for (int i = 0; i < G::kRun / 2; i++) {
        const float2 rounded = unpack2<Element>(r_prob[k * (G::kRun / 2) + i]);
        r_sum[i * 2] += counted(p, rounded.x, is_draft(tile, k)), r_sum[i * 2 + 1] += counted(p, rounded.y, is_draft(tile, k));
      }
    if constexpr (ROW_TILES > G::kRun) {
      const float2 rounded = unpack2<Element>(r_prob[G::kRun]);
      r_sum[G::kRun] += counted(p, rounded.x, is_draft(tile, 0)) + counted(p, rounded.y, is_draft(tile, 1));
    }
    if constexpr (MORE) {
      if (!ahead) start_score_product(nth + 2, r_score);
      send_scores(r_score, r_own);
    }
  }

  // The sums of both warpgroups come together. The last hand-over of a piece has no P, but what the outputs must be multiplied by; or the
  // statistics go to combine.
  __device__ __forceinline__ void finish_piece(int tiles) {
    float r_last[ROW_TILES];
    if ((tiles - 1 & 1) == turn) {
#pragma unroll
      for (int n = 0; n < ROW_TILES; n++) r_last[n] = r_highest[n];
    } else {
      load_maxima_of_other(r_last);
    }
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) r_sum[n] *= exp2_approx(r_highest[n] - r_last[n]);
    const float* const s_sums = exchange((tiles + 1 - turn) / 2 & 1, r_sum, 0.f, [](float a, float b) { return a + b; });
    const int slot = s_target().partial_slot;  // not later: it becomes the next piece's
    synchronise_both();
    if (turn != 0) return;
    float factor = 1.f;
    const int thread = fresh(Base::thread);
    if (thread < G::kOwnRows) {
      auto sum_of = [&](const float* s_part) {
        return s_part[thread] + s_part[G::kOwnRows + thread] + (s_part[2 * G::kOwnRows + thread] + s_part[3 * G::kOwnRows + thread]);
      };
      const float sum = sum_of(s_sums) + sum_of((const float*)(shared + G::exchange(1, tiles / 2 & 1)));
      if (slot < 0) {
        factor = output_factor(p, sum);
      } else {
        const float highest = ((const float*)(shared + G::highest(tiles - 1 & 1)))[thread];
        p.partial_stats[(long long)slot * G::kRows + G::row(block_rank(), thread)] = make_float2(highest, sum);
      }
    }
    wait_until_taken();
    if (thread == 0) *((Target*)(shared + G::kOffsetTarget) + (hand_overs & 1)) = s_target();
    hand_over_note(slot < 0 ? kFinish : kFinishPartial, factor);
  }

  __device__ __forceinline__ void run(Pieces<kTileKeys>& pieces, Piece piece, bool more) {
    auto announces = [&] { return fresh(thread) + turn + block_rank() == 0; };
    if (!more && announces()) announce_nothing(p, this_worker());
    bool first = true;
    int pieces_before = 0;
    for (; more; more = pieces.next(piece, Base::schedule())) {
      const Request& request = piece.item.request;
      const int row_base = piece.item.row_block * p.rows_per_block, rows = min(p.rows_per_block, request.q_len * p.heads - row_base);
      const int tiles = piece.last - piece.first;
      prefix = request.prefix;
      if (fresh(thread) + turn == 0)
        s_target() = Target{request.q_start,   row_base,     rows, piece.whole() ? -1 : partial_slot(this_worker(), piece.first == 0),
                            piece.item.number, request.q_len};
      hand_overs = tiles_before + pieces_before + turn;
#pragma unroll
      for (int n = 0; n < ROW_TILES; n++) r_sum[n] = 0.f, r_highest[n] = kNothingSeen;
      start_copying_queries(request.q_start, row_base, rows);
      if (announces()) announce(p, piece, this_worker(), Base::schedule());  // while the queries are on their way
      if (first) cluster_wait();
      first = false;
      wait_for_queries();
      float r_score[ROW_TILES][4];
      Scores r_own;
      if (turn < tiles) {
        start_score_product(turn, r_score);
        send_scores(r_score, r_own);
      }
      int nth = turn;
      for (; nth + 2 < tiles; nth += 2) attend_tile<true>(piece.first + nth, nth, r_own, r_score);
      if (nth < tiles) attend_tile<false>(piece.first + nth, nth, r_own, r_score);
      hand_overs = tiles_before + pieces_before + tiles;
      finish_piece(tiles);
      tiles_before += tiles, pieces_before++;
    }
    if (first) cluster_wait();
    hand_overs = tiles_before + pieces_before;
    if (turn != 0) return;
    wait_until_taken();
    hand_over_note(kStop, 1.f);
  }
};

// ---------------------------------------------------------------------------------------------------------------------------- the values

// One warpgroup: O^T = V^T P^T.
template <class Element, int ROW_TILES>
struct ValueWarpgroup : Warpgroup<ROW_TILES> {
  using Base = Warpgroup<ROW_TILES>;
  using Base::p, Base::shared, Base::thread, Base::warp, Base::lane, Base::group, Base::quad, Base::mbarrier;
  using typename Base::G;

  const unsigned other;   // block: where its shared memory begins
  int tiles, hand_overs;  // so far, over all pieces
  float r_out[kChunks][ROW_TILES][4];

  __device__ __forceinline__ ValueWarpgroup(const VerifyParams& params, unsigned char* memory)
      : Base(params, memory), other(Base::other_block()), tiles(0), hand_overs(0) {}

  // Multiplies the outputs of the row tiles in `which` by the factors that were handed over.
  __device__ __forceinline__ void multiply_output(int which) {
    const float* const s_factor = (const float*)(shared + G::factor(hand_overs & 1)) + quad * 2;
    float2 factor[ROW_TILES];
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) factor[n] = *(const float2*)&s_factor[n * 8];
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) {
      if (!(which >> n & 1)) continue;
#pragma unroll
      for (int i = 0; i < kChunks; i++) {
        r_out[i][n][0] *= factor[n].x, r_out[i][n][1] *= factor[n].y;
        r_out[i][n][2] *= factor[n].x, r_out[i][n][3] *= factor[n].y;
      }
    }
  }

  __device__ __forceinline__ void value_product() {
    const unsigned long long values = descriptor(shared_address(shared + G::stage(tiles % kStages)), 0, 1024, true);
    const unsigned long long probs = descriptor(shared_address(shared + G::prob(hand_overs & 1)), 128, G::kProbTile, false);
#pragma unroll
    for (int i = 0; i < kChunks; i++) hold_accumulators(r_out[i]);
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < kParts; part++) {
#pragma unroll
      for (int step = 0; step < kTileKeys / 16; step++)
#pragma unroll
        for (int i = part * kPartChunks; i < (part + 1) * kPartChunks; i++)
          wgmma_m64k16<Element, ROW_TILES, true>(r_out[i], further(values, i * kChunkBytes + step * 2048), further(probs, step * 256));
      wgmma_commit();
    }
    const unsigned free = mbarrier(kFree + tiles % kStages * kParts);
    wgmma_wait<1>();
    if (lane == 0) mbarrier_arrive(free);
    wgmma_wait<0>();
    if (lane == 0) mbarrier_arrive(free + 8);
#pragma unroll
    for (int i = 0; i < kChunks; i++) hold_accumulators(r_out[i]);
  }

  // Waits for the next hand-over, and multiplies the outputs if it says so.
  __device__ __forceinline__ int take_over() {
    mbarrier_wait(mbarrier(kHanded + (hand_overs & 1)), hand_overs >> 1 & 1);
    fence_proxy_async();
    const uint2 notes = *(const uint2*)(shared + G::kOffsetNote + (hand_overs & 1) * 8);
    const int note = (int)(notes.x | notes.y);
    if (note != 0 && note <= kFinish) multiply_output(note == kFinish ? ~0 : note);
    return note;
  }

  // This warp needs no more of what was handed over.
  __device__ __forceinline__ void taken_over() {
    const int taken = G::mbarrier(kTaken + (hand_overs & 1));
    __syncwarp();
    if (lane == 0) {
      mbarrier_arrive(shared_address(shared) + taken);
      mbarrier_arrive_remote(other + taken);
    }
    hand_overs++;
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kChunks; i++)
#pragma unroll
      for (int n = 0; n < ROW_TILES; n++) r_out[i][n][0] = r_out[i][n][1] = r_out[i][n][2] = r_out[i][n][3] = 0.f;
  }

  // The whole item was in this piece. Lanes hold two rows of one column: transposed, they hold two columns of one row, and pairs of lanes
  // exchange halves so that each writes four columns.
  __device__ __forceinline__ void write_output(const Target& t) const {
    const bool odd = quad & 1;
    const int column = block_rank() * kBlockLatent + warp * 16 + (odd ? 8 : 0) + quad / 2 * 4;
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) {
      const int row = n * 8 + group;
      unsigned short* const target = output_row(p, t.q_start, t.row_base + min(row, t.rows - 1)) + column;
#pragma unroll
      for (int i = 0; i < kChunks; i++) {
        const unsigned lo = movmatrix_trans(pack2<Element>(r_out[i][n][0], r_out[i][n][1]));
        const unsigned hi = movmatrix_trans(pack2<Element>(r_out[i][n][2], r_out[i][n][3]));
        const unsigned exchanged = __shfl_xor_sync(~0u, odd ? lo : hi, 1);
        if (row < t.rows) *(uint2*)(target + i * 64) = odd ? make_uint2(exchanged, hi) : make_uint2(lo, exchanged);
      }
    }
  }

  // The item goes on in another piece: leave the accumulators for combine.
  __device__ __forceinline__ void write_partial(int slot) const {
    float4* const target = p.partial_out + (long long)slot * G::kPartialFloat4 + lane;
    const int chunk = block_rank() * kChunks;
#pragma unroll
    for (int i = 0; i < kChunks; i++)
#pragma unroll
      for (int n = 0; n < ROW_TILES; n++)
        target[(((chunk + i) * 4 + warp) * ROW_TILES + n) * 32] =
            make_float4(r_out[i][n][0], r_out[i][n][1], r_out[i][n][2], r_out[i][n][3]);
  }

  // What there is to do it learns from the hand-overs.
  __device__ __forceinline__ void run() {
    cluster_wait();
    clear();
    for (int note; (note = take_over()) != kStop;) {
      if (note < kFinish) {
        value_product();
        tiles++;
        taken_over();
        continue;
      }
      const Target target = ((const Target*)(shared + G::kOffsetTarget))[hand_overs & 1];
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

// One warpgroup: this block's columns of tiles into shared memory.
template <class Element, int ROW_TILES>
struct CopyWarpgroup : Warpgroup<ROW_TILES> {
  using Base = Warpgroup<ROW_TILES>;
  using Base::p, Base::shared, Base::thread, Base::mbarrier;
  using typename Base::G;

  static constexpr int kRound = kWarpgroup / 8;           // keys that the warpgroup copies 16 bytes each of at once
  static constexpr int kThreadKeys = kTileKeys / kRound;  // keys of a tile that each thread copies parts of

  static_assert(kPartChunks == 2, "of a packed key this thread copies 16 fp8 of each part");

  Request request;
  int tiles;                // copied so far, over all pieces
  int r_slot[kThreadKeys];  // of the keys that this thread copies next
  int packed;               // of the last tile: bit i if this thread's i-th key is packed, one more if all keys of the tile are

  __device__ __forceinline__ CopyWarpgroup(const VerifyParams& params, unsigned char* memory) : Base(params, memory), tiles(0), packed(0) {}

  // The key of a tile that is this thread's i-th.
  __device__ __forceinline__ int copied_key(int i) const { return i * kRound + (thread >> 3); }

  // Done a tile ahead of the copy, and turned into addresses only there, so that nothing waits for it.
  __device__ __forceinline__ void load_slots(int tile) {
#pragma unroll
    for (int i = 0; i < kThreadKeys; i++) r_slot[i] = load_slot(p, request, tile * kTileKeys + copied_key(i), 0);
  }

  // Prefix columns from the pool, draft columns from k_extend, zeros beyond the last column. Of the rope columns four of eight threads copy
  // those of every other key.
  __device__ __forceinline__ void copy_tile(int tile) {
    const int stage = tiles % kStages, unit = thread & 7, columns = request.columns(), rank = block_rank();
    const int rope_unit = unit & 3, rope_offset = (kLatent - rank * (kBlockLatent - kBlockRope)) * 2 + (rope_unit - unit) * 16;
    const unsigned keys = shared_address(shared + G::stage(stage)) + chunk_offset(thread >> 3, unit);
    const unsigned rope = shared_address(shared + G::rope(stage)) + chunk_offset(thread >> 3, (stage & 1) * 4 + rope_unit);
    const unsigned char* source[kThreadKeys];
    unsigned existing = 0;
    int next_packed = 0;
#pragma unroll
    for (int i = 0; i < kThreadKeys; i++) {
      const int column = tile * kTileKeys + copied_key(i);
      source[i] = p.kv_pool + (long long)(unsigned)r_slot[i] * p.kv_slot_stride;
      if (Pool::is_fp8) source[i] -= rank * kBlockLatent;
      if (column >= request.prefix) {
        const int draft = column < columns ? column - request.prefix : 0;
        source[i] = p.k_extend + (long long)(request.q_start + draft) * p.k_extend_stride;
      }
      source[i] += rank * (kBlockLatent * 2) + unit * 16;
      keep_in_register(source[i]);  // one address and its offsets
      existing |= (unsigned)(column < columns) << i;
      next_packed |= (int)(column < request.prefix) << i;
    }
    load_slots(tile + 1);
#pragma unroll
    for (int part = 0; part < kParts; part++) {
      mbarrier_wait(mbarrier(kFree + stage * kParts + part), (tiles / kStages) - 1 & 1);  // the first tiles find their stages free
#pragma unroll
      for (int i = 0; i < kThreadKeys; i++) {
        if (Pool::is_fp8 && (next_packed >> i & 1)) {
          copy_packed(part, i, source[i]);
          continue;
        }
        const int bytes = existing >> i & 1 ? 16 : 0;
        if (part == 0 && (unit >> 2) == (i & 1)) cp_async_16(rope + i * kRound * 128, source[i] + rope_offset, bytes);
#pragma unroll
        for (int chunk = part * kPartChunks; chunk < (part + 1) * kPartChunks; chunk++)
          cp_async_16(keys + chunk * kChunkBytes + i * kRound * 128, source[i] + chunk * 128, bytes);
      }
      if constexpr (Pool::is_fp8)
        cp_async_commit();
      else
        cp_async_mbarrier_arrive(mbarrier(kFull + stage * kParts + part));
    }
    if constexpr (Pool::is_fp8) {
      // While these copies are on their way.
      if (tiles != 0) unpack_tile<kParts>(tiles - 1);
      packed = next_packed | (int)((tile + 1) * kTileKeys <= request.prefix) << kThreadKeys;
    }
    tiles++;
  }

  // Packed keys, of an fp8 pool. Where in a stage this thread's first one is in a part, and what it has of the rope columns of key
  // `unit / 2`: 16 of 32 fp8.
  __device__ __forceinline__ int packed_offset(int stage, int part) const {
    const int number = fresh(thread), unit = number & 7;
    return G::stage(stage) + (part * 2 + packed_line(unit)) * kChunkBytes + chunk_offset(number >> 3, packed_unit(unit));
  }
  __device__ __forceinline__ int packed_rope_offset(int stage) const {
    const int number = fresh(thread);
    return G::rope(stage) + chunk_offset(number >> 3, (stage & 1) * 4 + (number & 1) * 2);
  }
  __device__ __forceinline__ bool has_packed_rope(int i) const { return (fresh(thread) & 7) >> 1 == i; }

  // Of this thread's i-th key, from `source` on, where its unit of the first part is.
  __device__ __forceinline__ void copy_packed(int part, int i, const unsigned char* source) const {
    const int stage = tiles % kStages;
    cp_async_16(shared_address(shared) + packed_offset(stage, part) + i * kRound * 128, source + part * 128, 16);
    const int unit = fresh(thread) & 7, rope = kLatent - block_rank() * (kBlockLatent - kBlockRope) + ((unit & 1) - unit) * 16;
    if (part == 0 && has_packed_rope(i))
      cp_async_16(shared_address(shared) + packed_rope_offset(stage) + i * kRound * 128, source + rope, 16);
  }

  // Unpacks what this thread has copied of a tile, behind which it has started PENDING groups of copies, and says that it is there.
  template <int PENDING>
  __device__ __forceinline__ void unpack_tile(int number) const {
    unpack_part<0, PENDING + 1>(number % kStages);
    unpack_part<1, PENDING>(number % kStages);
  }

  template <int PART, int PENDING>
  __device__ __forceinline__ void unpack_part(int stage) const {
    cp_async_wait<PENDING>();
    auto unpack = [&](const uint4& r_packed, int offset, int unit) {
      unpack_in_place<Element>(r_packed, shared + offset, shared + (offset ^ 16), unit);
    };
    const int offset = packed_offset(stage, PART), unit = fresh(thread) & 7;
    if (packed >> kThreadKeys & 1) {
      // Several at once, as a compiler that does not know where the writes go would not.
      constexpr int kAtOnce = 2;
#pragma unroll
      for (int i = 0; i < kThreadKeys; i += kAtOnce) {
        uint4 r_packed[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; k++) r_packed[k] = *(const uint4*)(shared + offset + (i + k) * kRound * 128);
#pragma unroll
        for (int k = 0; k < kAtOnce; k++) unpack(r_packed[k], offset + (i + k) * kRound * 128, unit);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kThreadKeys; i++)
        if (packed >> i & 1) unpack(*(const uint4*)(shared + offset + i * kRound * 128), offset + i * kRound * 128, unit);
    }
    const int key = (fresh(thread) & 7) >> 1;
    if (PART == 0 && (packed >> key & 1)) {
      const int rope = packed_rope_offset(stage) + key * kRound * 128;
      unpack(*(const uint4*)(shared + rope), rope, 0);
    }
    fence_proxy_async();
    mbarrier_arrive(mbarrier(kFull + stage * kParts + PART));
  }

  __device__ __forceinline__ void run() {
    const Beginning beginning = *(const Beginning*)(shared + G::kOffsetBeginning);
    Pieces<kTileKeys> pieces(p, beginning.position);
    Piece piece;
    piece.first = beginning.first, piece.last = beginning.last;
    request = beginning.request;
    for (bool more = piece.first < piece.last; more; more = pieces.next(piece, Base::schedule()), request = piece.item.request) {
      load_slots(piece.first);
      for (int tile = piece.first; tile < piece.last; tile++) copy_tile(tile);
    }
    if constexpr (Pool::is_fp8)
      if (tiles != 0) unpack_tile<0>(tiles - 1);
    cluster_wait();
  }
};

// Grid: (2 * workers), in clusters of two. Block: 512 threads.
template <class Element, int ROW_TILES>
__device__ __forceinline__ void verify_attention(const VerifyParams& p) {
  using G = Geometry<ROW_TILES>;
  KDTREE_ALIGNED_DYNAMIC_SHARED(hopper_shared, 1024);
  launch_dependents();
  const int worker = this_worker();
  const SizedRequest sized = load_sized_request<kTileKeys>(p, threadIdx.x & 31);
  const Schedule schedule = make_schedule<kTileKeys>(p, sized, worker);
  if (threadIdx.x == 0) {
    *(Schedule*)(hopper_shared + G::kOffsetSchedule) = schedule;
    const unsigned mbarriers = shared_address(hopper_shared + G::kOffsetMbarriers);
    constexpr int kWarps = kWarpgroup / 32;
    for (int i = 0; i < kMbarriers; i++)
      mbarrier_init(mbarriers + i * 8, i < kFree                        ? kWarpgroup
                                       : i >= kTaken && i < kPartial    ? kCluster * kWarps
                                       : i >= kPartial && i < kReceived ? 1
                                                                        : kWarps);
    mbarrier_fence_init();
  }
  Pieces<kTileKeys> pieces(p, schedule, worker, sized);
  Piece piece;
  const bool any = pieces.first(piece);
  if (threadIdx.x == 0)
    *(Beginning*)(hopper_shared + G::kOffsetBeginning) =
        Beginning{piece.item.request, any ? piece.first : 0, any ? piece.last : 0, pieces.position};
  __syncthreads();
  cluster_arrive();  // the other block may use this one's mbarriers, which each warpgroup waits for where it needs the other's
  const int warpgroup = uniform(threadIdx.x / kWarpgroup);
  if (warpgroup == 3) {
    set_max_registers_down<kCopyRegisters>();
    CopyWarpgroup<Element, ROW_TILES>(p, hopper_shared).run();
  } else if (warpgroup == 2) {
    set_max_registers_up<kValueRegisters>();
    ValueWarpgroup<Element, ROW_TILES>(p, hopper_shared).run();
  } else {
    set_max_registers_up<kScoreRegisters>();
    ScoreWarpgroup<Element, ROW_TILES>(p, hopper_shared, warpgroup).run(pieces, piece, any);
  }
  // No block is gone while the other may still write to it.
  cluster_arrive();
  cluster_wait();
}

}  // namespace hopper
