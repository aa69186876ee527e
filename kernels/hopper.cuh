// The Hopper configuration of verify_attn_flash: wgmma on tiles of 64 keys, up to 72 attention rows a block. For sm_90a alone. Parameters,
// schedule, partial results and combine are those of verify_attn_flash.cu, which includes this and has all of the mathematics.
//
// Three warpgroups, each of which has another part of a tile's way:
//
//   value warpgroups   copy the tile into one of two stages by cp.async: each the 256 columns that it reads as values, and of the rope
//                      columns half of the keys
//   score warpgroup    S^T (64 x rows) = K (64 x 576) Q^T, both in shared memory; softmax; P^T over the rope columns, which nobody needs
//                      any more
//   value warpgroups   O^T (256 x rows each) += V^T P^T: V^T is the tile read MN-major; the accumulators stay in registers
//
//   time    ------------------------------------------------------------------------------->
//   scores  | S(0)  softmax(0) | S(1)  softmax(1) | S(2)  softmax(2) | ...
//   values                     | O(0)   copy(2)   | O(1)   copy(3)   | ...
//
// Three things are said, by mbarriers:
//   full[stage]  the value warpgroups' copies have landed: the score warpgroup may go on
//   handed       the score warpgroup has handed over P, and by what the outputs must be multiplied first if a maximum has risen
//   taken        both value warpgroups are done with what was handed over: P, factors and stage are free again
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

constexpr int kWarpgroup = 128;               // threads
constexpr int kThreads = 3 * kWarpgroup;      // one for scores, two for values
constexpr int kTileKeys = 64;                 // keys in a tile
constexpr int kChunks = kHeadDim / 64;        // of 64 columns, 128 bytes, in which tiles and queries lie in shared memory
constexpr int kRopeChunk = kChunks - 1;       // the last; the others are values, too
constexpr int kValueChunks = kRopeChunk / 2;  // those of one value warpgroup
constexpr int kChunkBytes = kTileKeys * 128;  // one chunk of a tile
constexpr int kSpareBytes = 1024;             // what P needs beyond the rope chunk that it is written over

// Named barriers of one warpgroup each; 0 is __syncthreads.
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
  static constexpr int kOffsetSchedule = kOffsetMbarriers + 4 * 8;
  static constexpr int kOffsetRescale = kOffsetSchedule + sizeof(Schedule);  // [2]: whether the factors are to be used
  static constexpr int kOffsetFactor = kOffsetRescale + 2 * 4;               // [2][rows]: what the outputs are to be multiplied by
  static constexpr int kOffsetHighest = kOffsetFactor + 2 * kRows * 4;       // [rows]: running maxima
  static constexpr int kOffsetTarget = kOffsetHighest + kRows * 4;
  static constexpr int kSharedBytes = kOffsetTarget + 16;
  static constexpr int kPartialFloat4 = kLatent / 16 * ROW_TILES * 32;  // accumulators of one block
  // A block starts with 168 registers a thread; the value warpgroups take what they need for their accumulators from the score warpgroup.
  static constexpr int kValueRegisters = ROW_TILES > 8 ? 184 : 176, kScoreRegisters = 3 * 168 - 2 * kValueRegisters;
  static_assert(kRows * kTileKeys * 2 <= kChunkBytes + kSpareBytes, "P fits");
  static_assert(kSharedBytes <= 232448, "what sm_90 allows a block");

  __device__ __forceinline__ static int stage(int number) { return number ? kOffsetStage1 : kOffsetStage0; }
  __device__ __forceinline__ static int rope(int number) {
    return number ? kOffsetStage1 - kChunkBytes : kOffsetStage0 + kRopeChunk * kChunkBytes;
  }
  __device__ __forceinline__ static int prob(int number) { return number ? kOffsetSpare : kOffsetStage0 + kRopeChunk * kChunkBytes; }
};

// Where the outputs of a piece go.
struct Target {
  int q_start, row_base, rows;  // of a whole item
  int partial_slot;             // or -1
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
  int row_base, rows;  // first row of the row block within the request; valid rows of the block
  int tiles;           // passed so far, over all pieces
  int hand_overs;      // from scores to values, so far: one a tile and one a piece

  __device__ __forceinline__ Warpgroup(const VerifyParams& params, unsigned char* memory, int number)
      : p(params),
        shared(memory),
        thread(threadIdx.x % kWarpgroup),
        warp(thread >> 5),
        lane(thread & 31),
        group(lane >> 2),
        quad(lane & 3),
        barrier(kBarrierOfWarpgroup + number),
        tiles(0),
        hand_overs(0) {}

  __device__ __forceinline__ const Schedule& schedule() const { return *(const Schedule*)(shared + G::kOffsetSchedule); }
  __device__ __forceinline__ unsigned full(int stage) const { return shared_address(shared + G::kOffsetMbarriers + stage * 8); }
  __device__ __forceinline__ unsigned handed() const { return shared_address(shared + G::kOffsetMbarriers + 16); }
  __device__ __forceinline__ unsigned taken() const { return shared_address(shared + G::kOffsetMbarriers + 24); }
  // Of this hand-over, or of the one before.
  __device__ __forceinline__ float* s_factor(int before = 0) const {
    return (float*)(shared + G::kOffsetFactor) + (hand_overs - before & 1) * G::kRows;
  }
  __device__ __forceinline__ float* s_highest() const { return (float*)(shared + G::kOffsetHighest); }
  __device__ __forceinline__ Target& s_target() const { return *(Target*)(shared + G::kOffsetTarget); }
  __device__ __forceinline__ int& s_rescale() const { return ((int*)(shared + G::kOffsetRescale))[hand_overs & 1]; }

  // Waits until both value warpgroups have taken what was handed over last.
  __device__ __forceinline__ void wait_until_taken() const {
    if (hand_overs > 0) mbarrier_wait(taken(), hand_overs - 1 & 1);
  }

  __device__ __forceinline__ void start_item(const Item& item) {
    request = item.request;
    row_base = item.row_block * p.rows_per_block;
    rows = min(p.rows_per_block, request.q_len * p.heads - row_base);
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
  using Base::p, Base::shared, Base::thread, Base::warp, Base::lane, Base::group, Base::quad, Base::barrier, Base::request, Base::row_base,
      Base::rows, Base::tiles, Base::hand_overs;
  using typename Base::G;

  static constexpr int kThreadRows = ROW_TILES * 2;

  int columns;  // prefix + q_len
  long long mask_base;
  float r_highest[kThreadRows];  // running maxima, log2
  float r_sum[kThreadRows];      // this thread's share of the sums

  __device__ __forceinline__ ScoreWarpgroup(const VerifyParams& params, unsigned char* memory) : Base(params, memory, 0) {}

  // The queries of the row block. Rows that do not exist are zero. meanwhile() is called while they are on their way.
  template <class Meanwhile>
  __device__ __forceinline__ void load_queries(Meanwhile meanwhile) const {
    const int unit = thread & 7;
#pragma unroll 1
    for (int row = thread >> 3; row < G::kRows; row += kWarpgroup / 8) {
      const int existing = row_base + (row < rows ? row : 0);
      const unsigned char* source =
          p.q + (long long)(request.q_start + existing / p.heads) * p.q_token_stride + existing % p.heads * p.q_head_stride + unit * 16;
      const unsigned target = shared_address(shared) + chunk_offset(row, unit);
#pragma unroll
      for (int chunk = 0; chunk < kChunks; chunk++)
        cp_async_16(target + chunk * G::kQueryChunkBytes, source + chunk * 128, row < rows ? 16 : 0);
    }
    cp_async_commit();
    meanwhile();
    cp_async_wait<0>();
    fence_proxy_async();
    barrier_sync(barrier, kWarpgroup);
  }

  // Bit i: this thread's row i sees its first key of a tile, or its second. Only tiles that reach beyond the prefix need a look at the
  // mask.
  __device__ __forceinline__ void load_visible(int tile, unsigned (&visible)[2]) const {
    const int column = tile * kTileKeys + warp * 16 + group;
    const unsigned char* const mask = p.custom_mask + mask_base + column;
    int first_row = row_base;
    keep_in_register(first_row);  // the tokens are worked out here, not kept all the time
    visible[0] = visible[1] = 0;
#pragma unroll
    for (int i = 0; i < kThreadRows; i++) {
      const int row = i / 2 * 8 + quad * 2 + i % 2;
      const int token = quotient(first_row + row, p.heads);
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const int draft = column + k * 8 - request.prefix;
        bool sees = column + k * 8 < columns && row < rows;
        if (sees && draft >= 0) sees = p.custom_mask ? mask[token * columns + k * 8] != 0 : draft <= token;
        visible[k] |= (unsigned)sees << i;
      }
    }
  }

  __device__ __forceinline__ void score_product(int stage, float (&r_score)[ROW_TILES][4]) const {
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) r_score[n][0] = r_score[n][1] = r_score[n][2] = r_score[n][3] = 0.f;
    const unsigned long long queries = descriptor(uniform(shared_address(shared)), 0, 1024, true);
    const unsigned long long keys = descriptor(uniform(shared_address(shared + G::stage(stage))), 0, 1024, true);
    const unsigned long long rope = descriptor(uniform(shared_address(shared + G::rope(stage))), 0, 1024, true);
    hold_accumulators(r_score);
    wgmma_fence();
#pragma unroll
    for (int chunk = 0; chunk < kChunks; chunk++)
#pragma unroll
      for (int step = 0; step < 4; step++)
        wgmma_m64k16<Element, ROW_TILES, false>(r_score,
                                                further(chunk == kRopeChunk ? rope : further(keys, chunk * kChunkBytes), step * 32),
                                                further(queries, chunk * G::kQueryChunkBytes + step * 32));
    wgmma_commit();
    wgmma_wait<0>();
    hold_accumulators(r_score);
  }

  // Some score of the tile is above its row's maximum. Maxima, factors and sums become what they have to be. The exchange between warps is
  // in the rope chunk, which nobody reads any more.
  __device__ __forceinline__ void raise_maxima(int stage, const float (&r_score)[ROW_TILES][4]) {
    float* const s_exchange = (float*)(shared + G::rope(stage));  // [4 warps][rows]
    float* const s_highest = Base::s_highest();
    float* const s_factor = Base::s_factor();
    float r_tile[kThreadRows];
#pragma unroll
    for (int i = 0; i < kThreadRows; i++) r_tile[i] = fmaxf(r_score[i / 2][i % 2], r_score[i / 2][2 + i % 2]);
    combine_groups(
        r_tile, lane, kNothingSeen, [](float a, float b) { return fmaxf(a, b); },
        [&](int i, float highest) { s_exchange[warp * G::kRows + i / 2 * 8 + quad * 2 + i % 2] = highest; });
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
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) {
      const float2 highest = *(const float2*)&s_highest[n * 8 + quad * 2], factor = *(const float2*)&s_factor[n * 8 + quad * 2];
      r_highest[n * 2] = highest.x, r_highest[n * 2 + 1] = highest.y;
      r_sum[n * 2] *= factor.x, r_sum[n * 2 + 1] *= factor.y;
    }
  }

  // What this thread wrote is there for the value warpgroups.
  __device__ __forceinline__ void hand_over(bool rescale) {
    if (thread == 0) Base::s_rescale() = rescale;
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(Base::handed());
    hand_overs++;
  }

  __device__ __forceinline__ void attend_tile(int tile) {
    const int stage = tiles & 1, parity = tiles >> 1 & 1;
    const bool masked = (tile + 1) * kTileKeys > request.prefix;
    unsigned visible[2] = {~0u, ~0u};
    if (masked) load_visible(tile, visible);
    mbarrier_wait(Base::full(stage), parity);
    fence_proxy_async();
    float r_score[ROW_TILES][4];
    score_product(stage, r_score);
    bool risen = false;
#pragma unroll
    for (int i = 0; i < kThreadRows; i++)
#pragma unroll
      for (int k = 0; k < 2; k++) {
        float& score = r_score[i / 2][k * 2 + i % 2];
        score *= p.scale_log2e;
        if (masked && !(visible[k] >> i & 1)) score = __int_as_float(0xff800000);
        risen = risen || score > r_highest[i];
      }
    // With the vote, all warps are done with the rope chunk.
    risen = barrier_sync_or(barrier, kWarpgroup, risen);
    if (risen) raise_maxima(stage, r_score);
    unsigned r_prob[ROW_TILES][2];
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++)
#pragma unroll
      for (int k = 0; k < 2; k++) {
        r_prob[n][k] =
            pack2<Element>(exp2_approx(r_score[n][k * 2] - r_highest[n * 2]), exp2_approx(r_score[n][k * 2 + 1] - r_highest[n * 2 + 1]));
        const float2 rounded = unpack2<Element>(r_prob[n][k]);
        r_sum[n * 2] += rounded.x, r_sum[n * 2 + 1] += rounded.y;
      }
    Base::wait_until_taken();
    unsigned char* const s_prob = shared + G::prob(stage) + warp * 256 + group * 16 + quad * 4;
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) {
      *(unsigned*)(s_prob + n * 1024) = r_prob[n][0];
      *(unsigned*)(s_prob + n * 1024 + 128) = r_prob[n][1];
    }
    hand_over(risen);
    tiles++;
  }

  // The last hand-over of a piece has no P, but what the outputs must be multiplied by; or the statistics go to combine.
  __device__ __forceinline__ void finish_piece() {
    const int slot = Base::s_target().partial_slot;
    Base::wait_until_taken();
    float* const s_spare = (float*)(shared + G::kOffsetSpare);
    auto exchange = [&](int w) { return w == 3 ? Base::s_factor(1) : s_spare + w * G::kRows; };
    combine_groups(
        r_sum, lane, 0.f, [](float a, float b) { return a + b; },
        [&](int i, float sum) { exchange(warp)[i / 2 * 8 + quad * 2 + i % 2] = sum; });
    barrier_sync(barrier, kWarpgroup);
    if (thread < G::kRows) {
      const float sum = exchange(0)[thread] + exchange(1)[thread] + (exchange(2)[thread] + exchange(3)[thread]);
      if (slot < 0) {
        Base::s_factor()[thread] = sum == 0.f ? 0.f : 1.f / sum;
      } else {
        p.partial_stats[(long long)slot * G::kRows + thread] = make_float2(Base::s_highest()[thread], sum);
      }
    }
    hand_over(slot < 0);
  }

  __device__ __forceinline__ void run(Pieces<kTileKeys>& pieces) {
    Piece piece;
    bool more = pieces.first(piece);
    if (!more && thread == 0) announce_nothing(p, blockIdx.x);
    for (; more; more = pieces.next(piece, Base::schedule())) {
      Base::start_item(piece.item);
      columns = request.columns();
      mask_base = p.custom_mask ? load_index(p.mask_indptr, piece.item.number, p.wide_indices & kWideMask) : 0;
      if (thread < G::kRows) Base::s_highest()[thread] = kNothingSeen;
#pragma unroll
      for (int i = 0; i < kThreadRows; i++) r_highest[i] = kNothingSeen, r_sum[i] = 0.f;
      load_queries([&] {
        if (thread == 0) announce(p, piece, blockIdx.x, Base::schedule());
      });
      Base::wait_until_taken();
      if (thread == 0)
        Base::s_target() = Target{request.q_start, row_base, rows, piece.whole() ? -1 : partial_slot(blockIdx.x, piece.first == 0)};
      for (int tile = piece.first; tile < piece.last; tile++) attend_tile(tile);
      finish_piece();
    }
  }
};

// ---------------------------------------------------------------------------------------------------------------------------- the values

// Two warpgroups: O^T = V^T P^T, each 256 of the 512 columns; and the copies of tiles.
template <class Element, int ROW_TILES>
struct ValueWarpgroup : Warpgroup<ROW_TILES> {
  using Base = Warpgroup<ROW_TILES>;
  using Base::p, Base::shared, Base::thread, Base::warp, Base::lane, Base::group, Base::quad, Base::barrier, Base::request, Base::row_base,
      Base::rows, Base::tiles, Base::hand_overs;
  using typename Base::G;

  static constexpr int kCopyKeys = kTileKeys / (kWarpgroup / 8);  // keys of a tile that each thread copies 16 bytes of a chunk of

  const int half;         // which of the two
  int r_slot[kCopyKeys];  // slots of the keys that this thread copies next
  float r_out[kValueChunks][ROW_TILES][4];

  __device__ __forceinline__ ValueWarpgroup(const VerifyParams& params, unsigned char* memory, int which)
      : Base(params, memory, 1 + which), half(which) {}

  // The key of a tile that is this thread's i-th, and which 16 bytes of its chunks.
  __device__ __forceinline__ int copied_key(int i) const { return i * (kWarpgroup / 8) + (thread >> 3); }
  __device__ __forceinline__ int copied_unit() const { return thread & 7; }

  // Done a tile ahead of the copy, and turned into addresses only there, so that nothing waits for it.
  __device__ __forceinline__ void load_slots(int tile, int (&slots)[kCopyKeys]) const {
#pragma unroll
    for (int i = 0; i < kCopyKeys; i++) slots[i] = load_slot(p, request, tile * kTileKeys + copied_key(i), 0);
  }

  // Copies CHUNKS chunks from `chunk` on of this thread's i-th key of a tile: prefix columns from the pool, draft columns from k_extend,
  // zeros beyond the last column.
  template <int CHUNKS>
  __device__ __forceinline__ void copy_key(int tile, int slot, int i, int chunk, unsigned target) const {
    const int key = copied_key(i), column = tile * kTileKeys + key, columns = request.columns();
    const unsigned char* source = p.kv_pool + (long long)(unsigned)slot * p.kv_slot_stride;
    if (column >= request.prefix) {
      const int draft = column < columns ? column - request.prefix : 0;
      source = p.k_extend + (long long)(request.q_start + draft) * p.k_extend_stride;
    }
    source += chunk * 128 + copied_unit() * 16;
    keep_in_register(source);  // one address and its offsets
    target += chunk_offset(key, copied_unit());
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) cp_async_16(target + c * kChunkBytes, source + c * 128, column < columns ? 16 : 0);
  }

  // The columns of a tile that this warpgroup alone reads as values.
  __device__ __forceinline__ void copy_values(int tile, const int (&slots)[kCopyKeys], int stage) const {
    const unsigned target = shared_address(shared + G::stage(stage)) + half * kValueChunks * kChunkBytes;
#pragma unroll
    for (int i = 0; i < kCopyKeys; i++) copy_key<kValueChunks>(tile, slots[i], i, half * kValueChunks, target);
  }

  // Half of the keys' rope columns; and the tile may be waited for.
  __device__ __forceinline__ void copy_rope(int tile, const int (&slots)[kCopyKeys], int stage) const {
    const unsigned target = shared_address(shared + G::rope(stage));
#pragma unroll
    for (int i = 0; i < kCopyKeys; i++)
      if (i / (kCopyKeys / 2) == half) copy_key<1>(tile, slots[i], i, kRopeChunk, target);
    cp_async_mbarrier_arrive(Base::full(stage));
  }

  // Multiplies the outputs by the factors that were handed over.
  __device__ __forceinline__ void rescale_output() {
    const float* const s_factor = Base::s_factor();
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) {
      const float2 factor = *(const float2*)&s_factor[n * 8 + quad * 2];
#pragma unroll
      for (int i = 0; i < kValueChunks; i++) {
        r_out[i][n][0] *= factor.x, r_out[i][n][1] *= factor.y;
        r_out[i][n][2] *= factor.x, r_out[i][n][3] *= factor.y;
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
    for (int step = 0; step < kTileKeys / 16; step++)
#pragma unroll
      for (int i = 0; i < kValueChunks; i++)
        wgmma_m64k16<Element, ROW_TILES, true>(r_out[i], further(values, i * kChunkBytes + step * 2048), further(probs, step * 256));
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kValueChunks; i++) hold_accumulators(r_out[i]);
  }

  // Waits for the next hand-over, and does to the outputs what it says. The score warpgroup's fence may be good for this one, too, as the
  // copies' landing reaches this one through it; nothing says so for the async proxy, and on an H200 this fence costs nothing.
  __device__ __forceinline__ void take_over() {
    mbarrier_wait(Base::handed(), hand_overs & 1);
    fence_proxy_async();
    if (Base::s_rescale()) rescale_output();
  }

  // Nobody of this warpgroup needs any more what was handed over.
  __device__ __forceinline__ void taken_over() {
    barrier_sync(barrier, kWarpgroup);
    if (thread == 0) mbarrier_arrive(Base::taken());
    hand_overs++;
  }

  __device__ __forceinline__ void attend_tile(int tile, int last) {
    const int stage = tiles & 1;
    take_over();
    value_product(stage);
    taken_over();
    if (tile + 2 < last) copy_values(tile + 2, r_slot, stage);
    Base::wait_until_taken();  // by the other, too: P is in the rope chunk
    if (tile + 2 < last) copy_rope(tile + 2, r_slot, stage);
    load_slots(tile + 3, r_slot);
    tiles++;
  }

  // Starts the copy of the first tile of a piece. Of an earlier piece nothing is needed any more but the accumulators; as long as there are
  // such, there are no registers for the slots of two tiles, which AT_ONCE loads together.
  template <bool AT_ONCE>
  __device__ __forceinline__ void start_piece(const Piece& piece) {
    Base::start_item(piece.item);
    int r_first[kCopyKeys];
    load_slots(piece.first, r_first);
    if (AT_ONCE) load_slots(piece.first + 1, r_slot);
    copy_values(piece.first, r_first, tiles & 1);
    copy_rope(piece.first, r_first, tiles & 1);
    if (!AT_ONCE) load_slots(piece.first + 1, r_slot);
  }

  __device__ __forceinline__ void start_second_tile(const Piece& piece) {
    if (piece.first + 1 < piece.last) {
      copy_values(piece.first + 1, r_slot, tiles + 1 & 1);
      copy_rope(piece.first + 1, r_slot, tiles + 1 & 1);
    }
    load_slots(piece.first + 2, r_slot);
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kValueChunks; i++)
#pragma unroll
      for (int n = 0; n < ROW_TILES; n++) r_out[i][n][0] = r_out[i][n][1] = r_out[i][n][2] = r_out[i][n][3] = 0.f;
  }

  // The first column of this thread in chunk i; its second is 8 further.
  __device__ __forceinline__ int column(int i) const { return (half * kValueChunks + i) * 64 + warp * 16 + group; }

  // The whole item was in this piece.
  __device__ __forceinline__ void write_output(const Target& t) const {
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int row = n * 8 + quad * 2 + e;
        if (row >= t.rows) continue;
        unsigned short* const target = output_row(p, t.q_start, t.row_base + row);
#pragma unroll
        for (int i = 0; i < kValueChunks; i++) {
          target[column(i)] = to_bits<Element>(r_out[i][n][e]);
          target[column(i) + 8] = to_bits<Element>(r_out[i][n][2 + e]);
        }
      }
  }

  // The item goes on in another piece: leave the accumulators for combine.
  __device__ __forceinline__ void write_partial(int slot) const {
    float4* const target = p.partial_out + (long long)slot * G::kPartialFloat4 + lane;
    const int half = threadIdx.x / kWarpgroup - 1;  // worked out anew: the member would be in the way all the time
#pragma unroll
    for (int i = 0; i < kValueChunks; i++)
#pragma unroll
      for (int n = 0; n < ROW_TILES; n++)
        target[(((half * kValueChunks + i) * 4 + warp) * ROW_TILES + n) * 32] =
            make_float4(r_out[i][n][0], r_out[i][n][1], r_out[i][n][2], r_out[i][n][3]);
  }

  __device__ __forceinline__ void run(Pieces<kTileKeys>& pieces) {
    Piece piece;
    bool more = pieces.first(piece);
    if (more) start_piece<true>(piece);
    while (more) {
      start_second_tile(piece);
      clear();
      for (int tile = piece.first; tile < piece.last; tile++) attend_tile(tile, piece.last);
      // The copies of the next piece are under way while this one is written.
      more = pieces.next(piece, Base::schedule());
      if (more) start_piece<false>(piece);
      take_over();
      const Target target = Base::s_target();
      taken_over();
      if (target.partial_slot < 0) {
        write_output(target);
      } else {
        write_partial(target.partial_slot);
      }
    }
  }
};

// Grid: (workers). Block: 384 threads.
template <class Element, int ROW_TILES>
__device__ __forceinline__ void verify_attention(const VerifyParams& p) {
  using G = Geometry<ROW_TILES>;
  KDTREE_ALIGNED_DYNAMIC_SHARED(hopper_shared, 1024);
  const int worker = blockIdx.x;
  const SizedRequest sized = load_sized_request<kTileKeys>(p, threadIdx.x & 31);
  if (threadIdx.x == 0) {
    const unsigned mbarriers = shared_address(hopper_shared + G::kOffsetMbarriers);
    mbarrier_init(mbarriers, 2 * kWarpgroup), mbarrier_init(mbarriers + 8, 2 * kWarpgroup);
    mbarrier_init(mbarriers + 16, kWarpgroup / 32);
    mbarrier_init(mbarriers + 24, 2);
    mbarrier_fence_init();
  }
  __syncthreads();
  const Schedule schedule = make_schedule<kTileKeys>(p, sized, worker);
  Pieces<kTileKeys> pieces(p, schedule, worker, sized);
  // Read when a first piece is done: barrier_sync and the hand-overs have passed it on by then.
  if (threadIdx.x == 0) *(Schedule*)(hopper_shared + G::kOffsetSchedule) = schedule;
  const int warpgroup = uniform(threadIdx.x / kWarpgroup);
  if (warpgroup == 0) {
    set_max_registers_down<G::kScoreRegisters>();
    ScoreWarpgroup<Element, ROW_TILES>(p, hopper_shared).run(pieces);
  } else {
    set_max_registers_up<G::kValueRegisters>();
    ValueWarpgroup<Element, ROW_TILES>(p, hopper_shared, warpgroup - 1).run(pieces);
  }
}

}  // namespace hopper
