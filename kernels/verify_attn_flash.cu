// verify_attn_flash: attention of the draft tokens of speculative decoding over the latent KV cache of an MLA model.
//
// What it computes, for each request b, head h and draft token i (a "row" is a pair (i, h); a "column" is a key):
//
//     columns of request b = [ prefix slots kv_indices[kv_indptr[b] .. kv_indptr[b+1]) | its q_len draft tokens, rows of k_extend ]
//     s[row, j]   = scale * <q[row, 0:576], key_j[0:576]>
//     visible     = j is in the prefix, or the mask byte [i, j] of the request is not zero (no mask: draft j comes no later than draft i)
//     out[row, :] = sum_j softmax_j(s[row, :])[j] * key_j[0:512]        (0 if the row sees nothing)
//
// A key is one row of 576 numbers, [latent 512 | rope 64]; its value is the latent, the first 512 columns of the very same row.
// The mask of request b starts at mask_indptr[b] and has q_len rows of prefix + q_len bytes; only its last q_len columns are read.
//
// How: all heads * q_len rows of a request share one read of each key. The work is cut twice: rows into row blocks (what fits in
// registers), and the columns of a row block into tiles of 32 keys. The tiles of all (request, row block) items form one line, and every
// block of the grid takes an equal stretch of it (see Schedule): no length is ever read by the host, so a captured graph replays for any
// lengths. An item that lies inside one stretch is finished in place; one that is cut leaves partial results, which combine merges in a
// fixed order.
//
// Both products run on the tensor cores with the operands swapped, keys as the 16-row side and attention rows as the 8-column side:
//     S^T (keys x rows) = K (keys x 576) * Q^T          O^T (512 x rows) = V^T (512 x keys) * P^T
// so the rows are padded to a multiple of 8 only, and V^T is read out of the K tile that is already in shared memory.
//
// The same source is compiled by NVRTC for a GPU and by g++ (KDTREE_HOST) for the CPU tests; host/device.h then supplies the primitives
// below.

struct Bf16 {
  static constexpr bool is_bf16 = true;
};
struct Fp16 {
  static constexpr bool is_bf16 = false;
};

// What the KV pool holds, -DKDTREE_POOL=...: numbers of the queries' type, or one of the two types of fp8.
struct AsQueries {
  static constexpr bool is_fp8 = false, is_e4m3 = false;
};
struct E4m3 {
  static constexpr bool is_fp8 = true, is_e4m3 = true;  // 4 bits of exponent, no infinity, NaN is all ones
};
struct E5m2 {
  static constexpr bool is_fp8 = true, is_e4m3 = false;  // the upper half of an fp16
};
#ifndef KDTREE_POOL
#define KDTREE_POOL AsQueries
#endif
using Pool = KDTREE_POOL;

#ifdef KDTREE_HOST
#include "host/device.h"
#else

// ---------------------------------------------------------------------------------------------------------------------- primitives (PTX)

#define KDTREE_DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]

__device__ __forceinline__ unsigned shared_address(const void* pointer) { return (unsigned)__cvta_generic_to_shared(pointer); }

__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// c (16 x 8) += a (16 x 16) * b (16 x 8), float32 accumulators.
template <class Element>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  if constexpr (Element::is_bf16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Copies 16 bytes to shared memory without passing through registers; src_bytes is 16, or 0 to write zeros and read nothing.
__device__ __forceinline__ void cp_async_16(unsigned dst, const void* src, int src_bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(src_bytes) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// The compiler knows nothing of the value from here on, and cannot take it apart.
__device__ __forceinline__ void keep_in_register(const unsigned char*& pointer) { asm volatile("" : "+l"(pointer)); }
__device__ __forceinline__ void keep_in_register(int& number) { asm volatile("" : "+r"(number)); }

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, one unit in the last place off at most.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats rounded to the element type, lo in the low half.
template <class Element>
__device__ __forceinline__ unsigned pack2(float lo, float hi) {
  unsigned packed;
  if constexpr (Element::is_bf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
  }
  return packed;
}
template <class Element>
__device__ __forceinline__ float2 unpack2(unsigned packed) {
  float2 pair;
  if constexpr (Element::is_bf16) {
    pair.x = __uint_as_float(packed << 16);
    pair.y = __uint_as_float(packed & 0xffff0000u);
  } else {
    asm("{.reg .f16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi;}" : "=f"(pair.x), "=f"(pair.y) : "r"(packed));
  }
  return pair;
}
template <class Element>
__device__ __forceinline__ unsigned short to_bits(float x) {
  return (unsigned short)(pack2<Element>(x, 0.f) & 0xffffu);
}

// The products of two pairs of fp16, rounded.
__device__ __forceinline__ unsigned multiply_fp16x2(unsigned a, unsigned b) {
  unsigned product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// From PTX 7.8 on, for sm_89 from 8.1 on (CUDA 12.1).
#if __CUDA_ARCH__ >= 900 || (__CUDA_ARCH__ == 890 && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1201)
#define KDTREE_CONVERTS_FP8
// Two e4m3 to fp16.
__device__ __forceinline__ unsigned e4m3x2_to_fp16x2(unsigned short pair) {
  unsigned converted;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(converted) : "h"(pair));
  return converted;
}
#endif

// The next kernel of the stream may come to the GPU before this one has ended, if it was launched so; it waits there until this one has.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#endif  // KDTREE_HOST

// ---------------------------------------------------------------------------------------------------------------------------- constants

constexpr int kLatent = 512;               // columns of a value
constexpr int kRope = 64;                  // columns that only the scores use
constexpr int kHeadDim = kLatent + kRope;  // columns of a query and of a key
constexpr int kRowBytes = kHeadDim * 2;    // one key in shared memory: 1,152 bytes, nine lines of 128
constexpr int kThreads = 256;              // eight warps
constexpr int kTileKeys = 32;              // keys in a tile
constexpr int kStages = 2;                 // tiles in shared memory: one in use, one arriving
constexpr int kTileBytes = kTileKeys * kRowBytes;
constexpr int kQuarters = 4;                        // parts that the 576 columns of the score product are cut into
constexpr int kKSteps = kHeadDim / 16 / kQuarters;  // 16-column steps in each
constexpr int kLines = kRowBytes / 128;             // 128-byte lines of a key
constexpr int kDimTiles = 4;                        // 16-column tiles of the output that each of eight warps holds
static_assert(kKSteps == kLines && kKSteps % 3 == 0,
              "every third step of the score product starts the copy of three lines of the next tile");
constexpr float kNothingSeen = -3e38f;  // the running maximum before any column; exp2(-inf - kNothingSeen) is 0, not NaN

// ------------------------------------------------------------------------------------------------------------------------- an fp8 pool
//
// A key of the pool has 576 bytes then. They are copied as they are, each 16 of them into a place of the 32 that they become: so the thread
// that has copied them converts them, and no barrier is needed between. The products see keys of the queries' type, as ever. All numbers of
// both fp8 types are numbers of bf16 and of fp16, so nothing is rounded.
//
// The pool's keys are to be multiplied by k_scale and its values by v_scale, those of the draft tokens by nothing. So scores of the prefix
// have a scale of their own; and as everything is multiplied by v_scale in the end, the weights of drafts are to be divided by it: their
// scores are lifted by -log2(v_scale), maxima are of what is lifted, and the sums take it back.

// Where in two lines of a tile a thread puts the 16 fp8 that are its `unit` (0..7): one of the two 16-byte units that they become, so
// chosen that eight threads reach all banks.
__device__ __forceinline__ int packed_line(int unit) { return unit >> 2; }
__device__ __forceinline__ int packed_unit(int unit) { return (unit & 3) * 2 + packed_line(unit); }

// Four fp8 to fp16: the first two, the last two.
__device__ __forceinline__ void fp8x4_to_fp16(unsigned packed, unsigned (&pair)[2]) {
  if constexpr (!Pool::is_e4m3) {
    pair[0] = (packed & 0xffu) << 8 | (packed & 0xff00u) << 16, pair[1] = (packed >> 8 & 0xff00u) | (packed & 0xff000000u);
  } else {
#ifdef KDTREE_CONVERTS_FP8
    pair[0] = e4m3x2_to_fp16x2((unsigned short)packed), pair[1] = e4m3x2_to_fp16x2((unsigned short)(packed >> 16));
#else
    // Exponent and mantissa go to where an fp16 has them, subnormal or not, and 2^8 makes up for the exponents' biases. Of a NaN, all ones,
    // the carry also sets what is the highest bit of the exponent.
    const unsigned sign = packed & 0x80808080u, rest = packed ^ sign, size = rest | ((rest + 0x01010101u) & 0x80808080u);
    pair[0] = multiply_fp16x2((sign & 0x80u) << 8 | (sign & 0x8000u) << 16 | (size & 0xffu) << 7 | (size & 0xff00u) << 15, 0x5c005c00u);
    pair[1] =
        multiply_fp16x2((sign >> 8 & 0x8000u) | (sign & 0x80000000u) | (size >> 9 & 0x7f80u) | (size & 0xff000000u) >> 1, 0x5c005c00u);
#endif
  }
}

// Eight fp8 to the queries' type.
template <class Element>
__device__ __forceinline__ uint4 unpack_fp8(unsigned first, unsigned second) {
  unsigned r[4];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    unsigned pair[2];
    fp8x4_to_fp16(i == 0 ? first : second, pair);
#pragma unroll
    for (int k = 0; k < 2; k++) {
      r[i * 2 + k] = pair[k];
      if constexpr (Element::is_bf16) {
        const float2 exact = unpack2<Fp16>(pair[k]);
        r[i * 2 + k] = pack2<Element>(exact.x, exact.y);
      }
    }
  }
  return make_uint4(r[0], r[1], r[2], r[3]);
}

// What this thread has copied to `place` as its `unit`, and has read again: to the queries' type, over it.
template <class Element>
__device__ __forceinline__ void unpack_in_place(const uint4 packed, unsigned char* place, unsigned char* other_place, int unit) {
  const bool second = packed_line(unit);  // which half of the 32 bytes lies where the packed ones did
  *(uint4*)place = unpack_fp8<Element>(second ? packed.z : packed.x, second ? packed.w : packed.y);
  *(uint4*)other_place = unpack_fp8<Element>(second ? packed.x : packed.z, second ? packed.y : packed.w);
}

// -------------------------------------------------------------------------------------------------------------------------- parameters

// Everything one call needs, passed by value; kdtree_patch/kernel.py has the same layout. Strides are in bytes.
struct VerifyParams {
  const unsigned char* q;            // (tokens, heads, 576)
  const unsigned char* k_extend;     // (tokens, 576): the keys of the draft tokens
  const unsigned char* kv_pool;      // (slots, 576), see Pool
  unsigned char* out;                // (tokens, heads, 512)
  const void* qo_indptr;             // (bs + 1): first draft token of each request
  const void* kv_indptr;             // (bs + 1): where each request's prefix starts in kv_indices
  const void* kv_indices;            // slots of all prefixes, one after the other
  const void* mask_indptr;           // (bs + 1), bytes; unused without a mask
  const unsigned char* custom_mask;  // q_len * (prefix + q_len) bytes a request, or null: a causal chain
  float4* partial_out;               // [2 * workers][8 warps * 4 * ROW_TILES * 32 lanes]: accumulators as the threads hold them
  float2* partial_stats;             // [2 * workers][ROWS]: maximum (log2) and sum of each row
  int4* cut_items;                   // [workers]: items that lie in several stretches: (item, first worker, last worker, unused)
  long long q_token_stride, q_head_stride;
  long long k_extend_stride, kv_slot_stride;
  long long out_token_stride, out_head_stride;
  int bs, heads;
  int row_blocks, rows_per_block;  // row blocks a request has at most, rows in each (a multiple of 8, at most ROWS)
  int workers;                     // blocks of the main kernel
  int wide_indices;                // bit 0: qo_indptr is 64-bit, 1: kv_indptr, 2: kv_indices, 3: mask_indptr; else 32-bit
  float scale_log2e;               // scale * log2(e): scores are kept in log2 units
  int fragment_warps;              // warps of combine that share a fragment: 1 or 8
  float prefix_scale_log2e;        // of an fp8 pool: the same times k_scale, for the prefix
  float v_scale, draft_lift;       // of an fp8 pool: v_scale and -log2(v_scale)
};

enum WideIndex { kWideQo = 1, kWideKvPtr = 2, kWideKvIdx = 4, kWideMask = 8 };

// Where the i-th number is.
__device__ __forceinline__ const unsigned char* index_address(const void* base, int i, bool wide) {
  return (const unsigned char*)base + (unsigned long long)(unsigned)i * (wide ? 8u : 4u);
}

// A number that is not negative. Nothing waits here for the value, as extending a sign would.
__device__ __forceinline__ long long load_index(const void* base, int i, bool wide) {
  const unsigned char* const address = index_address(base, i, wide);
  return wide ? __ldg((const long long*)address) : (long long)__ldg((const unsigned*)address);
}

// One that fits 32 bits: those that count tokens and slots, of which a GPU's memory holds fewer. The low word of either width.
__device__ __forceinline__ int load_small_index(const void* base, int i, bool wide) {
  return __ldg((const int*)index_address(base, i, wide));
}

// a / b for 0 <= a < 2^21 by way of the reciprocal of b, a fraction of what a division costs: a + 0.5 is at least 0.5 away from any
// multiple of b, which is more than the rounding errors.
__device__ __forceinline__ int quotient(int a, int b) { return (int)(((float)a + 0.5f) * reciprocal_approx((float)b)); }

// What a block must know of one request.
struct Request {
  int q_start;   // its first draft token
  int kv_start;  // its first entry of kv_indices
  int q_len, prefix;
  __device__ __forceinline__ int columns() const { return prefix + q_len; }
};

__device__ __forceinline__ Request load_request(const VerifyParams& p, int b) {
  const bool wide_qo = p.wide_indices & kWideQo, wide_kv = p.wide_indices & kWideKvPtr;
  const int q_start = load_small_index(p.qo_indptr, b, wide_qo), q_end = load_small_index(p.qo_indptr, b + 1, wide_qo);
  const int kv_start = load_small_index(p.kv_indptr, b, wide_kv), kv_end = load_small_index(p.kv_indptr, b + 1, wide_kv);
  return Request{q_start, kv_start, q_end - q_start, kv_end - kv_start};
}

// The slot of a column of the request, or of its last prefix column; `none` if it has no prefix.
__device__ __forceinline__ int load_slot(const VerifyParams& p, const Request& request, int column, int none) {
  column = min(column, request.prefix - 1);
  const unsigned char* address = index_address(p.kv_indices, request.kv_start + max(column, 0), p.wide_indices & kWideKvIdx);
  keep_in_register(address);  // else all of this becomes conditional, and slower
  int slot = column >= 0 ? __ldg((const int*)address) : none;
  keep_in_register(slot);  // nor is it made an address of as soon as it is there
  return slot;
}

// ---------------------------------------------------------------------------------------------------------------------------- schedule
//
// If all requests have equally many row blocks, as they do when their q_len is the same, and the workers can be shared out among so many
// without leaving an eighth of them idle, there is a line for each row block: request 0's tiles, then request 1's, and so on. So the cuts
// of all row blocks are the same, and they read the same keys at the same time, all but the first from L2. Otherwise there is one line:
// request 0's row block 0 with its tiles, then row block 1, ..., then request 1's.
//
// The workers of a line share its T tiles evenly: the first T % W of them take one tile more than the others. If the requests on it are
// equally long and there is a worker for each, each request is a line of its own: going from one item to another costs a worker as much as
// two or three tiles. A line never has more workers than tiles: then no stretch is empty and the workers of a cut item are consecutive.
//
// A request whose prefix is shorter than a tile is not on the line: its items are dealt out whole. Graph runners pad a batch with requests
// of prefix 1, and those must not move the cuts of the others: a request's result has the same bits with and without padding.
//
// A call waits for all of this before it can start its first copy, so it is one chain of few instructions, without a branch for up to 32
// requests: a lane loads the pointers of one, a `redux` counts the line, and what each lane makes of its request is shuffled from the one
// that the worker's first tile hits. Everything fits 32 bits: the host declines a call that could have more tiles (MAX_TILES in
// kdtree_patch/tiles.py).

struct Item {
  int number;  // of the request
  Request request;
  int row_block;
  int tiles;  // of the whole item
};

// What one worker must know of its line.
struct Schedule {
  int short_items;                 // of the whole batch
  int stretch_start, stretch_end;  // of this worker, on its line
  int share;                       // tiles of a worker, at least
  int longer;                      // how many workers take one more
  int kind;                        // of lines, and whose this one is: see below

  static constexpr int kLineOfRequest = 1 << 16;  // a bit of the kind; the others: the row block, if each has its own line, plus 1
  __device__ __forceinline__ bool line_each() const { return kind != 0; }
  __device__ __forceinline__ int row_block() const { return (kind & kLineOfRequest - 1) - 1; }

  // How many more workers share an item that this one starts and does not finish. The item begins at `start` of the line.
  __device__ __forceinline__ int more_workers(int start, int last_tile) const {
    const int before = kind & kLineOfRequest ? start : 0;
    return owner(last_tile - before) - owner(stretch_end - 1 - before);
  }

 private:
  // The worker whose stretch a tile is in, counted from the line's first.
  __device__ __forceinline__ int owner(int tile) const {
    const int long_part = longer * (share + 1);
    const bool in_long_part = tile < long_part;
    const unsigned before = in_long_part ? tile : tile - long_part, stretch = in_long_part ? share + 1 : share;
    return (int)(before / stretch) + (in_long_part ? 0 : longer);
  }
};

// A request, its tiles and its row blocks; none of either beyond the batch or without draft tokens.
struct SizedRequest {
  Request request;
  int tiles, blocks;
  bool is_short;
  // What the request adds to a line (tiles) or to the short items.
  __device__ __forceinline__ int units(bool of_short, bool line_each) const {
    return is_short != of_short ? 0 : of_short ? blocks : line_each ? tiles : tiles * blocks;
  }
};

template <int TILE_KEYS>
__device__ __forceinline__ SizedRequest load_sized_request(const VerifyParams& p, int b) {
  SizedRequest sized;
  sized.request = load_request(p, min(b, p.bs - 1));
  const int rows = b < p.bs ? max(sized.request.q_len, 0) * p.heads : 0;
  sized.tiles = rows > 0 ? (int)((unsigned)(sized.request.columns() + TILE_KEYS - 1) / TILE_KEYS) : 0;
  sized.blocks = min(quotient(rows + p.rows_per_block - 1, p.rows_per_block), p.row_blocks);
  sized.is_short = rows > 0 && sized.request.prefix < TILE_KEYS;
  return sized;
}

// The largest of a warp's 32 numbers, for all of them, in one instruction: floats are ordered as integers are, once the negative ones'
// other bits are turned over. A NaN is larger than anything, or smaller.
__device__ __forceinline__ float warp_max(float x) {
  auto turn = [](int bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
  return __int_as_float(turn(__reduce_max_sync(~0u, turn(__float_as_int(x)))));
}

// One warp, all lanes: counts the lines and the short items, and finds the worker's stretch. A lane brings its request of the first 32.
template <int TILE_KEYS>
__device__ __forceinline__ Schedule make_schedule(const VerifyParams& p, SizedRequest sized, int worker) {
  const int lane = threadIdx.x & 31;
  // Tiles of all items on the line, and tiles once for all row blocks of a request; then of the requests on the line.
  int total = 0, tiles = 0, short_items = 0;
  int requests = 0, most_tiles = 0, most_blocks = 0, fewest_blocks = p.row_blocks + 1;
  for (int b0 = 0;;) {
    total += sized.units(false, false);
    tiles += sized.units(false, true);
    short_items += sized.units(true, false);
    const bool on_line = sized.tiles > 0 && !sized.is_short;
    requests += __popc(__ballot_sync(~0u, on_line));
    most_tiles = max(most_tiles, on_line ? sized.tiles : 0);
    most_blocks = max(most_blocks, on_line ? sized.blocks : 0);
    fewest_blocks = min(fewest_blocks, on_line ? sized.blocks : fewest_blocks);
    b0 += 32;
    if (b0 >= p.bs) break;
    sized = load_sized_request<TILE_KEYS>(p, b0 + lane);
  }
  total = __reduce_add_sync(~0u, total);
  tiles = __reduce_add_sync(~0u, tiles);
  const int blocks = max(1, __reduce_max_sync(~0u, most_blocks));
  const bool equal = -__reduce_max_sync(~0u, -fewest_blocks) == blocks;
  const int workers_each = quotient(p.workers, blocks);
  const bool line_each = equal && workers_each * blocks * 8 >= p.workers * 7;
  const int longest = __reduce_max_sync(~0u, most_tiles);
  const bool of_requests = line_each && requests <= workers_each && tiles == requests * longest;
  // Of each row block: lines, workers and tiles of each.
  const int lines = of_requests ? requests : 1, line_tiles = of_requests ? longest : line_each ? tiles : total;
  const int line_workers = max(1, min(quotient(line_each ? workers_each : p.workers, lines), line_tiles));
  const int number = quotient(worker, line_workers), row_block = quotient(number, lines);
  const int line = number - row_block * lines, within = worker - number * line_workers;
  Schedule s;
  s.short_items = __reduce_add_sync(~0u, short_items);
  s.share = (int)((unsigned)line_tiles / (unsigned)line_workers);
  s.longer = line_tiles - s.share * line_workers;
  s.stretch_start = line * line_tiles + within * s.share + min(within, s.longer);
  s.stretch_end = s.stretch_start + (row_block < (line_each ? blocks : 1) ? s.share + (within < s.longer) : 0);
  s.kind = (line_each ? row_block + 1 : 0) | (of_requests ? Schedule::kLineOfRequest : 0);
  return s;
}

// What a worker does of one item: its tiles first to last - 1.
struct Piece {
  Item item;
  int first, last;
  int after;  // the position, see Pieces, of the worker's next piece
  __device__ __forceinline__ bool whole() const { return first == 0 && last == item.tiles; }
  // Of the item, on the line.
  __device__ __forceinline__ int last_tile() const { return after + (item.tiles - last) - 1; }
};

// The pieces of one worker: its short items first, dealt out from the last worker backwards, because the line may leave the last workers
// without a stretch; then those of its stretch. One warp, all lanes.
template <int TILE_KEYS>
struct Pieces {
  const VerifyParams& p;
  int position;  // of the next piece: a tile of the line; below 0, a short item, counted from their end

  // The first piece is looked for right here, in the requests of which the schedule was made: of the first 32 each lane brings its own.
  __device__ __forceinline__ Pieces(const VerifyParams& params, const Schedule& schedule, int worker, const SizedRequest& sized)
      : p(params), position(p.workers - 1 - worker - schedule.short_items) {
    const bool of_short = position < 0;  // known before the stretch is
    if (!of_short) position = schedule.stretch_start;
    any = position < schedule.stretch_end;
    look(schedule, sized, of_short);
  }

  // Those that are left.
  __device__ __forceinline__ Pieces(const VerifyParams& params, int next_position) : p(params), position(next_position) {}

  // False if there is none.
  __device__ __forceinline__ bool first(Piece& piece) {
    if (!any) return false;
    take(piece);
    piece.item.request = Request{from_finder(found.item.request.q_start), from_finder(found.item.request.kv_start),
                                 from_finder(found.item.request.q_len), from_finder(found.item.request.prefix)};
    return true;
  }

  // False if there are no more. Nothing of the requests was kept while the last piece lasted, and the one that is found is loaded again:
  // there may be no registers for what 32 lanes know of theirs.
  __device__ __forceinline__ bool next(Piece& piece, const Schedule& schedule) {
    if (position >= schedule.stretch_end) return false;
    int lane = threadIdx.x & 31;
    keep_in_register(lane);  // what follows from it is worked out here, not kept all the time
    look(schedule, load_sized_request<TILE_KEYS>(p, lane), position < 0);
    take(piece);
    piece.item.request = load_request(p, piece.item.number);
    return true;
  }

 private:
  Piece found;  // by this lane: right in one of them
  int finder;   // that one
  bool any;

  __device__ __forceinline__ int from_finder(int x) const { return __shfl_sync(~0u, x, finder); }

  // Finds the item of the next piece, and what of it is in the piece: each lane as if it were of its request.
  __device__ __forceinline__ void look(const Schedule& schedule, SizedRequest sized, bool of_short) {
    const int lane = threadIdx.x & 31;
    int unit = of_short ? position + schedule.short_items : position;  // counted from the 32 requests in question
    for (int b0 = 0;;) {
      const bool line_each = schedule.line_each();
      const int units = sized.units(of_short, line_each);
      int end = units;  // of this lane's request, once those of all below it are added
#pragma unroll
      for (int offset = 1; offset < 32; offset <<= 1) {
        const int below = __shfl_up_sync(~0u, end, offset);
        if (lane >= offset) end += below;
      }
      const int within = unit - (end - units), tiles = max(sized.tiles, 1);
      // within may be larger than a float holds: this is the quotient, or next to it.
      int row_block = (int)((float)within * reciprocal_approx((float)tiles)), rest = within - row_block * tiles;
      if (rest >= tiles) row_block += 1, rest -= tiles;
      if (rest < 0) row_block -= 1, rest += tiles;
      const unsigned hit = __ballot_sync(~0u, within >= 0 && within < units);
      finder = __ffs((int)(hit | 1u << 31)) - 1;
      // Side by side: the compiler would leave what the vote does not need for afterwards.
      keep_in_register(row_block), keep_in_register(rest), keep_in_register(finder);
      found.item = Item{min(b0 + lane, p.bs - 1), sized.request, of_short ? within : line_each ? schedule.row_block() : row_block, tiles};
      found.first = of_short ? 0 : rest;
      found.last = of_short ? tiles : min(tiles, rest + (schedule.stretch_end - position));
      found.after = position + (of_short ? p.workers : found.last - found.first);
      if (of_short && found.after >= 0) found.after = schedule.stretch_start;
      b0 += 32;
      if (hit || b0 >= p.bs) return;  // it is always found
      unit -= __shfl_sync(~0u, end, 31);
      sized = load_sized_request<TILE_KEYS>(p, b0 + lane);
    }
  }

  // All lanes get what the one has found, but for the request.
  __device__ __forceinline__ void take(Piece& piece) {
    piece.item.number = from_finder(found.item.number);
    piece.item.row_block = from_finder(found.item.row_block);
    piece.item.tiles = from_finder(found.item.tiles);
    piece.first = from_finder(found.first), piece.last = from_finder(found.last);
    position = piece.after = from_finder(found.after);
  }
};

// A worker starts at most one item that it does not finish, and finishes at most one that it did not start: two partial results a worker.
__device__ __forceinline__ int partial_slot(int worker, bool starts_item) { return 2 * worker + (starts_item ? 1 : 0); }

// Row of cut_items that describes an item: by item if there are no more items than workers, else by the worker that starts it.
__device__ __forceinline__ int cut_item_row(const VerifyParams& p, int item, int worker) {
  return p.bs * p.row_blocks <= p.workers ? item : worker;
}

// One thread of a block: the worker has started no item that is cut.
__device__ __forceinline__ void announce_nothing(const VerifyParams& p, int worker) {
  if (p.bs * p.row_blocks > p.workers) p.cut_items[worker] = make_int4(0, 0, -1, 0);
}

// One thread of a block: what combine must know of an item that this piece starts. Nothing in this kernel waits for it.
__device__ __forceinline__ void announce(const VerifyParams& p, const Piece& piece, int worker, const Schedule& schedule) {
  // The last item that a worker starts is the one that may be cut, so what is said last is what counts.
  if (piece.first != 0) return announce_nothing(p, worker);
  const int number = piece.item.number * p.row_blocks + piece.item.row_block;
  const int more_workers = piece.whole() ? 0 : schedule.more_workers(piece.after - piece.last, piece.last_tile());
  p.cut_items[cut_item_row(p, number, worker)] = make_int4(number, worker, worker + more_workers, 0);
}

// A score in log2 units, lifted.
__device__ __forceinline__ float scaled(const VerifyParams& p, float score, bool is_draft) {
  if constexpr (!Pool::is_fp8) return score * p.scale_log2e;
  return is_draft ? score * p.scale_log2e + p.draft_lift : score * p.prefix_scale_log2e;
}

// The same, less the maximum: one instruction, of a pool of the queries' type.
__device__ __forceinline__ float scaled_above(const VerifyParams& p, float score, bool is_draft, float highest) {
  if constexpr (!Pool::is_fp8) return fmaf(score, p.scale_log2e, -highest);
  return scaled(p, score, is_draft) - highest;
}

// A weight as it counts in the sum of its row.
__device__ __forceinline__ float counted(const VerifyParams& p, float weight, bool is_draft) {
  if constexpr (!Pool::is_fp8) return weight;
  return weight * (is_draft ? p.v_scale : 1.f);
}

// What a row of the output is multiplied by in the end.
__device__ __forceinline__ float output_factor(const VerifyParams& p, float sum) {
  return sum == 0.f ? 0.f : (Pool::is_fp8 ? p.v_scale : 1.f) / sum;
}

// Where a row of the output goes.
__device__ __forceinline__ unsigned short* output_row(const VerifyParams& p, long long q_start, int row) {
  const int token = quotient(row, p.heads);
  return (unsigned short*)(p.out + (q_start + token) * p.out_token_stride + (row - token * p.heads) * p.out_head_stride);
}

// ------------------------------------------------------------------------------------------------------------------- geometry of a block

// ROW_TILES groups of 8 attention rows. The eight warps of a block are used in three ways:
//   scores:  warp = key_group (2 groups of 16 keys) x quarter (4 quarters of the 576 columns): partial scores of all rows.
//   softmax: each warp finishes ROW_TILES rows, a lane for each of the 32 keys: it sums the partial scores through shared memory, and a
//   row's
//            maximum and sum never leave the warp.
//   values:  each warp owns 64 of the 512 output columns, all rows and all keys.
template <int ROW_TILES>
struct Geometry {
  static constexpr int kRows = ROW_TILES * 8;
  static constexpr int kWarpRows = kRows / (kThreads / 32);                  // rows whose softmax each warp does
  static constexpr int kProbStride = kTileKeys * 2 + 16;                     // an odd number of 16-byte units: no bank conflicts
  static constexpr int kOffsetProb = kStages * kTileBytes;                   // P: [row][key]
  static constexpr int kOffsetExchange = kOffsetProb + kRows * kProbStride;  // partial scores, see exchange_slot
  static constexpr int kOffsetRows =
      kOffsetExchange + kQuarters * kRows * kTileKeys * 4;     // (what the last tile multiplied by, maximum so far)
  static constexpr int kOffsetSum = kOffsetRows + kRows * 8;   // sum of each row, when the item is done
  static constexpr int kOffsetRisen = kOffsetSum + kRows * 4;  // [8 warps]: a bit for each row tile, see softmax
  static constexpr int kOffsetSchedule = kOffsetRisen + 8;     // in registers it would be in the way all the time
  static constexpr int kSharedBytes = kOffsetSchedule + sizeof(Schedule);
  static constexpr int kOffsetQueries = kTileBytes;                      // before the first tile: the queries, over all but stage 0
  static constexpr int kPartialFloat4 = 8 * kDimTiles * ROW_TILES * 32;  // accumulators of one block
  static_assert(kOffsetQueries + kRows * kRowBytes <= kOffsetRows, "the queries fit where the first tile is not");
  static_assert(kSharedBytes <= 101376, "must fit the parts with 99 KB of shared memory a block: sm_86, sm_89, sm_120");
};

// Byte offset of 16-byte unit `unit` of key `key` in a tile. Rows are 9 * 128 bytes, so without the XOR eight rows would hit the same
// banks. Tiles start at multiples of 128 bytes: bits 4 to 6 of an address are the swizzled unit, and another unit of the same line is an
// XOR away.
__device__ __forceinline__ int tile_offset(int key, int unit) { return key * kRowBytes + (unit >> 3) * 128 + (((unit ^ key) & 7) << 4); }

// -------------------------------------------------------------------------------------------------------------------- the main kernel

template <class Element, int ROW_TILES>
struct VerifyBlock {
  using G = Geometry<ROW_TILES>;

  const VerifyParams& p;
  unsigned char* const shared;
  const int warp, lane;
  const int group, quad;         // of the mma fragments: lane = group * 4 + quad
  const int key_group, quarter;  // this warp's share of the score product
  float2* const s_rows;
  float* const s_sum;

  // The current item.
  Request request;
  int row_base, rows;  // first row of the row block within the request; valid rows of the block
  int columns;         // prefix + q_len
  long long mask_base;
  unsigned r_q[kKSteps][ROW_TILES][2];   // Q^T fragments of this warp's column quarter
  float r_out[kDimTiles][ROW_TILES][4];  // O^T accumulators: 64 columns x rows
  float r_sum[G::kWarpRows];             // this lane's share of the sums of the rows that this warp finishes
  int r_slot;                            // slot of the key that this thread copies next

  __device__ __forceinline__ VerifyBlock(const VerifyParams& params, unsigned char* memory)
      : p(params),
        shared(memory),
        warp(threadIdx.x >> 5),
        lane(threadIdx.x & 31),
        group(lane >> 2),
        quad(lane & 3),
        key_group(warp & 1),
        quarter(warp >> 1),
        s_rows((float2*)(memory + G::kOffsetRows)),
        s_sum((float*)(memory + G::kOffsetSum)),
        r_slot(0) {}

  // The rows whose softmax this warp does: one of each row tile.
  __device__ __forceinline__ int finished_row(int i) const { return i * 8 + warp; }

  // Ready for an item. A barrier must follow, as attend_tile has it.
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < G::kWarpRows; i++) r_sum[i] = 0.f;
    if (threadIdx.x < G::kRows) s_rows[threadIdx.x] = make_float2(1.f, kNothingSeen);
#pragma unroll
    for (int i = 0; i < kDimTiles; i++)
#pragma unroll
      for (int n = 0; n < ROW_TILES; n++) r_out[i][n][0] = r_out[i][n][1] = r_out[i][n][2] = r_out[i][n][3] = 0.f;
  }

  // Reads the slot of the key that this thread copies in a tile: one key for eight threads. Done a tile ahead of the copy, and turned into
  // an address only there, so that nothing waits for it.
  __device__ __forceinline__ void load_slot_of(int tile) {
    r_slot = load_slot(p, request, tile * kTileKeys + (int)(threadIdx.x >> 3), r_slot);
  }

  // A copy of rows into shared memory that each thread takes part in with one 16-byte unit of each of nine lines; or, of a packed row, of
  // every two of them.
  struct RowCopy {
    const unsigned char* source;
    unsigned target;
    int bytes;
    bool packed;
    __device__ __forceinline__ void start_line(int line) const {
      if (!Pool::is_fp8 || !packed) {
        cp_async_16(target + line * 128, source + line * 128, bytes);
      } else if (line % 2 == 0 && has_packed(line)) {
        cp_async_16(target + line * 128, source + line * 64, 16);
      }
    }
  };

  // Whether a thread has a part of a packed row in this line and the next: all but the last have a next one.
  __device__ __forceinline__ static bool has_packed(int line) { return line + 1 < kLines || packed_line(threadIdx.x & 7) == 0; }

  // Whether this thread's key of a tile is a packed one.
  __device__ __forceinline__ bool is_packed(int tile) const {
    return Pool::is_fp8 && tile * kTileKeys + (int)(threadIdx.x >> 3) < request.prefix;
  }

  // The byte in a stage where this thread's part of a packed key is in the first two lines.
  __device__ __forceinline__ static int packed_offset() {
    const int unit = threadIdx.x & 7;
    return tile_offset(threadIdx.x >> 3, packed_line(unit) * 8 + packed_unit(unit));
  }

  // The fp8 of a tile that this thread has copied, to the queries' type.
  __device__ __forceinline__ void unpack_tile(int tile, int stage) const {
    if (!is_packed(tile)) return;
    unsigned char* const packed = shared + stage * kTileBytes + packed_offset();
    unsigned char* const other = shared + stage * kTileBytes + (packed_offset() ^ 16);
#pragma unroll
    for (int line = 0; line < kLines; line += 2) {
      unsigned char* const place = packed + line * 128;
      if (has_packed(line)) unpack_in_place<Element>(*(const uint4*)place, place, other + line * 128, threadIdx.x & 7);
    }
  }

  // A tile of keys into a stage: prefix columns from the pool, draft columns from k_extend, zeros beyond the last column.
  __device__ __forceinline__ RowCopy plan_tile(int tile, int stage) const {
    const int key = threadIdx.x >> 3, unit = threadIdx.x & 7;
    const int column = tile * kTileKeys + key;
    const unsigned char* source = p.kv_pool + (long long)(unsigned)r_slot * p.kv_slot_stride;
    if (column >= request.prefix) {
      const int draft = column < columns ? column - request.prefix : 0;
      source = p.k_extend + (long long)(request.q_start + draft) * p.k_extend_stride;
    }
    source += unit * 16;
    keep_in_register(source);  // one address and nine offsets
    const unsigned target = shared_address(shared + stage * kTileBytes) + (is_packed(tile) ? packed_offset() : tile_offset(key, unit));
    return RowCopy{source, target, column < columns ? 16 : 0, is_packed(tile)};
  }

  // The queries of the row block, as a tile is laid out. Rows that do not exist are zero.
  __device__ __forceinline__ void copy_queries() const {
#pragma unroll 1
    for (int row = threadIdx.x >> 3; row < G::kRows; row += kThreads / 8) {
      const int unit = threadIdx.x & 7, existing = row_base + (row < rows ? row : 0), token = quotient(existing, p.heads);
      const unsigned char* source =
          p.q + (long long)(request.q_start + token) * p.q_token_stride + (existing - token * p.heads) * p.q_head_stride;
      const unsigned target = shared_address(shared + G::kOffsetQueries) + tile_offset(row, unit);
      const RowCopy copy{source + unit * 16, target, row < rows ? 16 : 0, false};
#pragma unroll
      for (int line = 0; line < kLines; line++) copy.start_line(line);
    }
  }

  // Q^T fragments into registers, where they stay for the whole item; the second key group's with the rows 2i and 2i + 1 exchanged, see
  // exchange_slot. Quarter k has the 16-column steps 8k..8k+7, whole lines, and one of
  // the four rope steps.
  __device__ __forceinline__ void load_queries() {
    const unsigned queries = shared_address(shared + G::kOffsetQueries);
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) {
      const int row = n * 8 + ((lane & 7) ^ key_group);
#pragma unroll
      for (int step = 0; step < kKSteps; step += 2) {
        // Two steps at once; the last, of the rope, is alone and read twice.
        const int unit = step < 8 ? quarter * 16 + step * 2 + (lane >> 3) : 64 + quarter * 2 + ((lane >> 3) & 1);
        unsigned r_units[4];
        ldmatrix_x4(r_units, queries + tile_offset(row, unit));
        r_q[step][n][0] = r_units[0], r_q[step][n][1] = r_units[1];
        if (step + 1 < kKSteps) r_q[step + 1][n][0] = r_units[2], r_q[step + 1][n][1] = r_units[3];
      }
    }
  }

  // Bit i: this lane's key of a tile is visible to row i of this warp. Only tiles that reach beyond the prefix need a look at the mask.
  __device__ __forceinline__ unsigned visible_rows(int tile) const {
    if ((tile + 1) * kTileKeys <= request.prefix) return ~0u;
    const int column = tile * kTileKeys + lane, draft = column - request.prefix;
    int first_row = row_base;
    keep_in_register(first_row);  // the tokens are worked out here, not kept all the time
    int token[G::kWarpRows];
    bool sees_draft[G::kWarpRows];
#pragma unroll
    for (int i = 0; i < G::kWarpRows; i++) token[i] = quotient(first_row + min(finished_row(i), rows - 1), p.heads);
    if (p.custom_mask) {
      // All bytes are on their way before one is looked at: a column or row that does not exist reads the last one's.
      const unsigned char* const mask = p.custom_mask + mask_base + min(max(column, request.prefix), columns - 1);
      unsigned char byte[G::kWarpRows];
#pragma unroll
      for (int i = 0; i < G::kWarpRows; i++) byte[i] = mask[(long long)token[i] * columns];
#pragma unroll
      for (int i = 0; i < G::kWarpRows; i++) sees_draft[i] = byte[i] != 0;
    } else {
#pragma unroll
      for (int i = 0; i < G::kWarpRows; i++) sees_draft[i] = draft <= token[i];
    }
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < G::kWarpRows; i++) bits |= (unsigned)(column < columns & finished_row(i) < rows & (draft < 0 | sees_draft[i])) << i;
    return bits;
  }

  // Partial scores of 16 keys x all rows over this warp's quarter of the columns.
  __device__ __forceinline__ void score_product(unsigned tile_address, const RowCopy& next, bool has_next,
                                                float (&r_part)[ROW_TILES][4]) const {
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) r_part[n][0] = r_part[n][1] = r_part[n][2] = r_part[n][3] = 0.f;
    const int key = key_group * 16 + (lane & 15);
    // Two units a step: within a line of 128 bytes the swizzle is an XOR with the step, between lines an addition.
    const unsigned line_address = tile_address + tile_offset(key, lane >> 4);
    const unsigned quarter_address = line_address + quarter * 256, rope_address = (line_address ^ quarter << 5) + 1024;
    auto load_keys = [&](int step, unsigned (&r_keys)[4]) {
      ldmatrix_x4(r_keys, step < 8 ? (quarter_address ^ (step & 3) << 5) + (step >> 2) * 128 : rope_address);
    };
    constexpr int kKeysAhead = 2;  // steps whose keys are in registers before they are needed
    unsigned r_keys[kKeysAhead + 1][4];
#pragma unroll
    for (int step = 0; step < kKeysAhead; step++) load_keys(step, r_keys[step]);
#pragma unroll
    for (int step = 0; step < kKSteps; step++) {
      // The copy of the next tile is started on the way: all at once it would hold up the loads of the product.
      if (has_next && step % 3 == 1)
#pragma unroll
        for (int line = step - 1; line < step + 2; line++) next.start_line(line);
      if (step + kKeysAhead < kKSteps) load_keys(step + kKeysAhead, r_keys[(step + kKeysAhead) % (kKeysAhead + 1)]);
#pragma unroll
      for (int n = 0; n < ROW_TILES; n++)
        mma_m16n8k16<Element>(r_part[n], r_keys[step % (kKeysAhead + 1)], r_q[step][n][0], r_q[step][n][1]);
    }
  }

  // Where a float4 of partial scores lies that the lane (group, quad) of a warp has of row tile n. Eight lanes of a store reach all banks,
  // and so do the eight groups of one quad. The second key group has its pairs of rows the other way round (load_queries): when a row of
  // all 32 keys is read, its banks are those that the first leaves free.
  __device__ __forceinline__ static int exchange_slot(int part, int key_group, int n, int group, int quad) {
    return (((part * 2 + key_group) * ROW_TILES + n) * 4 + quad) * 8 + (group ^ quad * 2);
  }

  // Partial scores into shared memory. Ends with a barrier.
  __device__ __forceinline__ void send_scores(const float (&r_part)[ROW_TILES][4]) const {
    float4* const s_exchange = (float4*)(shared + G::kOffsetExchange) + exchange_slot(quarter, key_group, 0, group, quad);
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) s_exchange[n * 32] = make_float4(r_part[n][0], r_part[n][1], r_part[n][2], r_part[n][3]);
    __syncthreads();
  }

  // Scores, in log2 units, to probabilities, P = exp2(score - running maximum), in shared memory. The maximum is exact at every tile: the
  // largest weight of a row is then 1 and carries no rounding error, which a reference that lags behind would add to every row. The row
  // sums are taken of the rounded values, as the product is. load_values() is called while the scores are on their way. Each warp leaves
  // word of the row tiles in which the maximum of its row has risen. `is_draft`: this lane's key is none of the prefix.
  template <class LoadValues>
  __device__ __forceinline__ void softmax(unsigned visible, bool is_draft, LoadValues load_values) {
    const float* const s_score = (const float*)(shared + G::kOffsetExchange) + exchange_slot(0, lane >> 4, 0, lane & 7, warp >> 1) * 4 +
                                 (lane >> 3 & 1) * 2 + ((warp ^ lane >> 4) & 1);
    float r_score[G::kWarpRows], before[G::kWarpRows], highest[G::kWarpRows];
#pragma unroll
    for (int i = 0; i < G::kWarpRows; i++) {
      float part[kQuarters];
#pragma unroll
      for (int k = 0; k < kQuarters; k++) part[k] = s_score[(k * 2 * ROW_TILES + i) * 128];
      r_score[i] = scaled(p, (part[0] + part[1]) + (part[2] + part[3]), is_draft);
      before[i] = s_rows[finished_row(i)].y;
    }
    load_values();
    if (visible != ~0u) {
#pragma unroll
      for (int i = 0; i < G::kWarpRows; i++)
        if (!(visible >> i & 1)) r_score[i] = __int_as_float(0xff800000);
    }
#pragma unroll
    for (int i = 0; i < G::kWarpRows; i++) highest[i] = warp_max(r_score[i]);
    __syncwarp();  // all lanes have read the old maxima
    unsigned risen = 0;
    unsigned short prob[G::kWarpRows];
#pragma unroll
    for (int i = 0; i < G::kWarpRows; i++) {
      highest[i] = fmaxf(before[i], highest[i]);
      prob[i] = to_bits<Element>(exp2_approx(r_score[i] - highest[i]));
      const float factor = exp2_approx(before[i] - highest[i]);
      risen |= (unsigned)(highest[i] > before[i]) << i;
      r_sum[i] = r_sum[i] * factor + counted(p, unpack2<Element>(prob[i]).x, is_draft);
      if (lane == 0) s_rows[finished_row(i)] = make_float2(factor, highest[i]);
    }
    unsigned char* const s_prob = shared + G::kOffsetProb + finished_row(0) * G::kProbStride + lane * 2;
#pragma unroll
    for (int i = 0; i < G::kWarpRows; i++) *(unsigned short*)(s_prob + i * 8 * G::kProbStride) = prob[i];
    if (lane == 0) shared[G::kOffsetRisen + warp] = (unsigned char)risen;
  }

  // Fits the output accumulators to the new maxima, those of the row tiles that have one.
  __device__ __forceinline__ void rescale_output() {
    const unsigned risen = __reduce_or_sync(~0u, shared[G::kOffsetRisen + (lane & 7)]);
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) {
      if (!(risen >> n & 1)) continue;
      const float2 factor = make_float2(s_rows[n * 8 + quad * 2].x, s_rows[n * 8 + quad * 2 + 1].x);
#pragma unroll
      for (int i = 0; i < kDimTiles; i++) {
        r_out[i][n][0] *= factor.x, r_out[i][n][1] *= factor.y;
        r_out[i][n][2] *= factor.x, r_out[i][n][3] *= factor.y;
      }
    }
  }

  // V^T fragments of 16 keys x 16 columns: the K tile read transposed, columns warp * 64 + i * 16 on.
  __device__ __forceinline__ void load_value(unsigned tile_address, int step, int i, unsigned (&r_value)[4]) const {
    const int key = (lane & 7) + ((lane >> 4) << 3);
    const unsigned address = tile_address + tile_offset(key, warp * 8 + (lane >> 3 & 1));
    ldmatrix_x4_trans(r_value, (address ^ i << 5) + step * 16 * kRowBytes);
  }

  // O^T += V^T P^T. The values of the first 16 keys are already there.
  __device__ __forceinline__ void value_product(unsigned tile_address, unsigned (&r_value)[kDimTiles][4]) {
    static_assert(kTileKeys == 32, "two steps of 16 keys");
    const unsigned probs = shared_address(shared + G::kOffsetProb) + (lane & 7) * G::kProbStride;
    unsigned r_prob[2][ROW_TILES][2];
#pragma unroll
    for (int n = 0; n + 1 < ROW_TILES; n += 2)
#pragma unroll
      for (int step = 0; step < 2; step++) {
        unsigned r_pair[4];
        ldmatrix_x4(r_pair, probs + (n + (lane >> 4)) * 8 * G::kProbStride + (step * 2 + ((lane >> 3) & 1)) * 16);
        r_prob[step][n][0] = r_pair[0], r_prob[step][n][1] = r_pair[1];
        r_prob[step][n + 1][0] = r_pair[2], r_prob[step][n + 1][1] = r_pair[3];
      }
    if constexpr (ROW_TILES % 2 == 1) {
      unsigned r_last[4];
      ldmatrix_x4(r_last, probs + (ROW_TILES - 1) * 8 * G::kProbStride + (lane >> 3) * 16);
      r_prob[0][ROW_TILES - 1][0] = r_last[0], r_prob[0][ROW_TILES - 1][1] = r_last[1];
      r_prob[1][ROW_TILES - 1][0] = r_last[2], r_prob[1][ROW_TILES - 1][1] = r_last[3];
    }
#pragma unroll
    for (int i = 0; i < kDimTiles; i++) {
#pragma unroll
      for (int n = 0; n < ROW_TILES; n++) mma_m16n8k16<Element>(r_out[i][n], r_value[i], r_prob[0][n][0], r_prob[0][n][1]);
      load_value(tile_address, 1, i, r_value[i]);
    }
#pragma unroll
    for (int i = 0; i < kDimTiles; i++)
#pragma unroll
      for (int n = 0; n < ROW_TILES; n++) mma_m16n8k16<Element>(r_out[i][n], r_value[i], r_prob[1][n][0], r_prob[1][n][1]);
  }

  __device__ __forceinline__ void attend_tile(int tile, int last, int stage) {
    const unsigned tile_address = shared_address(shared + stage * kTileBytes);
    const unsigned visible = visible_rows(tile);  // read while the tile is still on its way
    cp_async_wait<0>();
    if constexpr (Pool::is_fp8) unpack_tile(tile, stage);
    // The tile is complete, and nobody reads the other stage, P or the exchange area any more: neither tiles nor the queries.
    __syncthreads();
    const bool has_next = tile + 1 < last;
    {
      float r_part[ROW_TILES][4];
      score_product(tile_address, plan_tile(tile + 1, stage ^ 1), has_next, r_part);
      cp_async_commit();
      load_slot_of(tile + 2);
      send_scores(r_part);
    }
    unsigned r_value[kDimTiles][4];
    softmax(visible, tile * kTileKeys + lane >= request.prefix, [&] {
#pragma unroll
      for (int i = 0; i < kDimTiles; i++) load_value(tile_address, 0, i, r_value[i]);
    });
    __syncthreads();  // P is complete
    rescale_output();
    value_product(tile_address, r_value);
  }

  // Tiles [first, last) of an item, into the accumulators. meanwhile() is called while the first copies are on their way.
  template <class Meanwhile>
  __device__ __forceinline__ void attend(const Item& item, int first, int last, Meanwhile meanwhile) {
    request = item.request;
    columns = request.columns();
    row_base = item.row_block * p.rows_per_block;
    rows = min(p.rows_per_block, request.q_len * p.heads - row_base);
    load_slot_of(first);
    mask_base = p.custom_mask ? load_index(p.mask_indptr, item.number, p.wide_indices & kWideMask) : 0;
    copy_queries();
    const RowCopy copy = plan_tile(first, 0);
#pragma unroll
    for (int line = 0; line < kLines; line++) copy.start_line(line);
    cp_async_commit();
    load_slot_of(first + 1);
    meanwhile();
    cp_async_wait<0>();
    __syncthreads();  // the queries are complete, and nobody reads what the last item left
    load_queries();
    clear();
    for (int tile = first; tile < last; tile++) attend_tile(tile, last, (tile - first) & 1);
  }

  // Sums of the rows, for every thread of the block. Ends with a barrier.
  __device__ __forceinline__ void publish_rows() {
#pragma unroll
    for (int i = 0; i < G::kWarpRows; i++) {
#pragma unroll
      for (int offset = 16; offset; offset >>= 1) r_sum[i] += __shfl_xor_sync(~0u, r_sum[i], offset);
      if (lane == 0) s_sum[finished_row(i)] = r_sum[i];
    }
    __syncthreads();
  }

  // The whole item was in this stretch: divide and write.
  __device__ __forceinline__ void write_output() const {
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int row = n * 8 + quad * 2 + e;
        if (row >= rows) continue;
        const float factor = output_factor(p, s_sum[row]);
        unsigned short* target = output_row(p, request.q_start, row_base + row) + warp * 64 + group;
#pragma unroll
        for (int i = 0; i < kDimTiles; i++) {
          target[i * 16] = to_bits<Element>(r_out[i][n][e] * factor);
          target[i * 16 + 8] = to_bits<Element>(r_out[i][n][2 + e] * factor);
        }
      }
  }

  // The item goes on in another stretch: leave accumulators, maxima and sums for combine.
  __device__ __forceinline__ void write_partial(int slot) const {
    if (threadIdx.x < G::kRows)
      p.partial_stats[(long long)slot * G::kRows + threadIdx.x] = make_float2(s_rows[threadIdx.x].y, s_sum[threadIdx.x]);
    float4* target = p.partial_out + (long long)slot * G::kPartialFloat4 + warp * kDimTiles * ROW_TILES * 32 + lane;
#pragma unroll
    for (int i = 0; i < kDimTiles; i++)
#pragma unroll
      for (int n = 0; n < ROW_TILES; n++)
        target[(i * ROW_TILES + n) * 32] = make_float4(r_out[i][n][0], r_out[i][n][1], r_out[i][n][2], r_out[i][n][3]);
  }
};

// Grid: (workers). Block: 256 threads. Every warp works out the schedule for itself: sharing it would cost two barriers.
template <class Element, int ROW_TILES>
__device__ __forceinline__ void verify_attention(const VerifyParams& p) {
  using G = Geometry<ROW_TILES>;
  KDTREE_DYNAMIC_SHARED(shared);
  launch_dependents();
  const int worker = blockIdx.x;
  const SizedRequest sized = load_sized_request<kTileKeys>(p, threadIdx.x & 31);
  const Schedule schedule = make_schedule<kTileKeys>(p, sized, worker);
  Pieces<kTileKeys> pieces(p, schedule, worker, sized);
  Piece piece;
  if (!pieces.first(piece)) {
    if (threadIdx.x == 0) announce_nothing(p, worker);
    return;
  }
  Schedule* const s_schedule = (Schedule*)(shared + G::kOffsetSchedule);
  if (threadIdx.x == 0) *s_schedule = schedule;

  VerifyBlock<Element, ROW_TILES> block(p, shared);
  do {
    block.attend(piece.item, piece.first, piece.last, [&] {
      if (threadIdx.x == 0) announce(p, piece, worker, *s_schedule);
    });
    block.publish_rows();
    if (piece.whole()) {
      block.write_output();
    } else {
      block.write_partial(partial_slot(worker, piece.first == 0));
    }
  } while (pieces.next(piece, *s_schedule));
}

// ------------------------------------------------------------------------------------------------------------------------------ combine
//
// Merges the partial results of the items that were cut, in the order of the workers, so that the same input gives the same bits:
//     M = max_s m_s,  out = sum_s 2^(m_s - M) * o_s / sum_s 2^(m_s - M) * l_s
// A partial result has a fragment of 32 float4, one a lane, for each 16 columns (major) and 8 rows: the accumulators of mma.m16n8k16.
//
// Split s belongs to group s % 8; the groups are summed each on its own and then in their order, whoever does it. Few items with many
// splits: the eight warps of a block share a fragment, a group each. Many items with few splits: each warp has a fragment to itself. Grid:
// (ROW_TILES * 4 * p.fragment_warps, min(items, workers)). Block: 256 threads; all its fragments are of the same row tile.

constexpr int kCombineWarps = 8;
constexpr int kCombineGroups = 8;
constexpr int kCombineAhead = 4;  // partial results on their way while the weights are worked out, where warps share a fragment

// total += weight * part, the two rows of a fragment's float4.
__device__ __forceinline__ void add_weighted(float4& total, float2 weight, const float4& part) {
  total.x = fmaf(weight.x, part.x, total.x), total.y = fmaf(weight.y, part.y, total.y);
  total.z = fmaf(weight.x, part.z, total.z), total.w = fmaf(weight.y, part.w, total.w);
}

__device__ __forceinline__ void add(float4& total, const float4& part) {
  total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
}

// PAIRED: rows g and g + 8 of a fragment are columns 2 g and 2 g + 1 of the output.
template <class Element, int ROW_TILES, bool PAIRED>
__device__ __forceinline__ void combine_splits(const VerifyParams& p) {
  constexpr int kRows = ROW_TILES * 8, kPartialFloat4 = kLatent / 16 * ROW_TILES * 32;
  KDTREE_DYNAMIC_SHARED(shared);
  float4* const s_reduce = (float4*)shared;                             // [8 warps][32 lanes]
  float* const s_inverse = (float*)(shared + kCombineWarps * 512);      // [8 rows]
  float* const s_weight = (float*)(shared + kCombineWarps * 512 + 32);  // [splits][8 rows]
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, quad = lane & 3;

  wait_for_kernel_before();
  int item = blockIdx.y;
  const bool rows_by_worker = p.bs * p.row_blocks > p.workers;
  if (!rows_by_worker) {
    // Row blocks that a short request does not have were never started: their row of the table is old.
    const Request r = load_request(p, item / p.row_blocks);
    if (item % p.row_blocks * p.rows_per_block >= r.q_len * p.heads) return;
  }
  const int4 cut = p.cut_items[blockIdx.y];
  item = cut.x;
  const int first_worker = cut.y, splits = cut.z - cut.y + 1;
  if (splits <= 1) return;
  auto slot = [&](int split) { return (long long)partial_slot(first_worker + split, split == 0); };

  const bool shared_fragment = p.fragment_warps == kCombineWarps;
  const int row_tile = blockIdx.x % ROW_TILES, part_of_columns = blockIdx.x / ROW_TILES;
  const int column_tile = shared_fragment ? part_of_columns : part_of_columns * kCombineWarps + warp;
  const float4* const source = p.partial_out + (column_tile * ROW_TILES + row_tile) * 32 + lane;
  auto load_part = [&](int split) {
    return split < splits ? __ldcs(source + slot(split) * kPartialFloat4) : make_float4(0.f, 0.f, 0.f, 0.f);
  };

  // The first partial results are under way before anything waits for the weights. Warps that share a fragment take every eighth split.
  float4 r_part[kCombineGroups];
#pragma unroll
  for (int i = 0; i < kCombineGroups; i++)
    if (!shared_fragment || i < kCombineAhead) r_part[i] = load_part(shared_fragment ? warp + i * kCombineGroups : i);

  // Weights: a warp for each of the eight rows.
  {
    const float2* const stats = p.partial_stats + row_tile * 8 + warp;
    const float2 own = lane < splits ? stats[slot(lane) * kRows] : make_float2(kNothingSeen, 0.f);
    float highest = own.x, sum = 0.f;
    for (int s = lane + 32; s < splits; s += 32) highest = fmaxf(highest, stats[slot(s) * kRows].x);
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, offset));
    for (int s = lane; s < splits; s += 32) {
      const float2 of_split = s == lane ? own : stats[slot(s) * kRows];
      const float weight = exp2_approx(of_split.x - highest);
      s_weight[s * 8 + warp] = weight;
      sum += weight * of_split.y;
    }
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) sum += __shfl_xor_sync(~0u, sum, offset);
    if (lane == 0) s_inverse[warp] = output_factor(p, sum);
  }
  __syncthreads();
  auto weight = [&](int split) { return split < splits ? *(const float2*)&s_weight[split * 8 + quad * 2] : make_float2(0.f, 0.f); };

  float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
  if (shared_fragment) {
    for (int first = warp; first < splits; first += kCombineAhead * kCombineGroups) {
      float4 r_next[kCombineAhead];
#pragma unroll
      for (int i = 0; i < kCombineAhead; i++) r_next[i] = load_part(first + (kCombineAhead + i) * kCombineGroups);
#pragma unroll
      for (int i = 0; i < kCombineAhead; i++) add_weighted(total, weight(first + i * kCombineGroups), r_part[i]);
#pragma unroll
      for (int i = 0; i < kCombineAhead; i++) r_part[i] = r_next[i];
    }
    s_reduce[threadIdx.x] = total;
    __syncthreads();
    if (warp != 0) return;
    total = s_reduce[lane];
#pragma unroll
    for (int group = 1; group < kCombineGroups; group++) add(total, s_reduce[group * 32 + lane]);
  } else {
    float4 r_group[kCombineGroups];
#pragma unroll
    for (int group = 0; group < kCombineGroups; group++) {
      r_group[group] = make_float4(0.f, 0.f, 0.f, 0.f);
      add_weighted(r_group[group], weight(group), r_part[group]);
    }
    for (int first = kCombineGroups; first < splits; first += kCombineGroups) {
#pragma unroll
      for (int group = 0; group < kCombineGroups; group++) r_part[group] = load_part(first + group);
#pragma unroll
      for (int group = 0; group < kCombineGroups; group++) add_weighted(r_group[group], weight(first + group), r_part[group]);
    }
    total = r_group[0];
#pragma unroll
    for (int group = 1; group < kCombineGroups; group++) add(total, r_group[group]);
  }

  const Request request = load_request(p, item / p.row_blocks);
  const int row_base = item % p.row_blocks * p.rows_per_block;
  const int rows = min(p.rows_per_block, request.q_len * p.heads - row_base);
  const int row = row_tile * 8 + quad * 2, column = column_tile * 16 + (lane >> 2) * (PAIRED ? 2 : 1), other = PAIRED ? 1 : 8;
  const float2 inverse = *(const float2*)&s_inverse[quad * 2];
  if (row < rows) {
    unsigned short* target = output_row(p, request.q_start, row_base + row) + column;
    target[0] = to_bits<Element>(total.x * inverse.x);
    target[other] = to_bits<Element>(total.z * inverse.x);
  }
  if (row + 1 < rows) {
    unsigned short* target = output_row(p, request.q_start, row_base + row + 1) + column;
    target[0] = to_bits<Element>(total.y * inverse.y);
    target[other] = to_bits<Element>(total.w * inverse.y);
  }
}

// The other configuration, where the compiler has its instructions. A cubin holds one of the two; the CPU build, which emulates both, has
// both.
#if defined(KDTREE_HOST) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define KDTREE_WITH_HOPPER
#include "hopper.cuh"
#endif
#if defined(KDTREE_HOST) || !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define KDTREE_WITH_PORTABLE
#endif

// ------------------------------------------------------------------------------------------------------------------------------ kernels
//
// One pair for each element type and number of row tiles; kdtree_patch/tiles.py knows the names.

// clang-format off
#define KDTREE_FOR_EACH_VARIANT(DO, argument) \
  DO(bf16, Bf16, 16, argument)                \
  DO(bf16, Bf16, 32, argument)                \
  DO(bf16, Bf16, 40, argument)                \
  DO(fp16, Fp16, 16, argument)                \
  DO(fp16, Fp16, 32, argument)                \
  DO(fp16, Fp16, 40, argument)
#define KDTREE_FOR_EACH_HOPPER_VARIANT(DO, argument) \
  DO(bf16, Bf16, 32, argument)                      \
  DO(bf16, Bf16, 64, argument)                      \
  DO(bf16, Bf16, 72, argument)                      \
  DO(fp16, Fp16, 32, argument)                      \
  DO(fp16, Fp16, 64, argument)                      \
  DO(fp16, Fp16, 72, argument)
// clang-format on

#ifdef KDTREE_WITH_PORTABLE
#define KDTREE_DEFINE(TYPE, Element, ROWS, _)                                                                                         \
  extern "C" __global__ void __launch_bounds__(kThreads, 1) verify_attn_##TYPE##_r##ROWS(const __grid_constant__ VerifyParams p) {    \
    verify_attention<Element, ROWS / 8>(p);                                                                                           \
  }                                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(kThreads, 3) combine_splits_##TYPE##_r##ROWS(const __grid_constant__ VerifyParams p) { \
    combine_splits<Element, ROWS / 8, false>(p);                                                                                      \
  }
KDTREE_FOR_EACH_VARIANT(KDTREE_DEFINE, )
#endif

#ifdef KDTREE_WITH_HOPPER
#define KDTREE_DEFINE_HOPPER(TYPE, Element, ROWS, _)                                                                                       \
  extern "C" __global__ void __launch_bounds__(hopper::kThreads, 1) verify_attn_##TYPE##_h##ROWS(const __grid_constant__ VerifyParams p) { \
    hopper::verify_attention<Element, ROWS / 8>(p);                                                                                        \
  }                                                                                                                                        \
  extern "C" __global__ void __launch_bounds__(kThreads, 3) combine_splits_##TYPE##_h##ROWS(const __grid_constant__ VerifyParams p) {      \
    combine_splits<Element, ROWS / 8, Pool::is_fp8>(p);                                                                                    \
  }
KDTREE_FOR_EACH_HOPPER_VARIANT(KDTREE_DEFINE_HOPPER, )
#endif

// For the CPU build, which has all kernels and finds them by name: X(name) for each of them.
#define KDTREE_NAMES(TYPE, Element, ROWS, X) X(verify_attn_##TYPE##_r##ROWS) X(combine_splits_##TYPE##_r##ROWS)
#define KDTREE_HOPPER_NAMES(TYPE, Element, ROWS, X) X(verify_attn_##TYPE##_h##ROWS) X(combine_splits_##TYPE##_h##ROWS)
#define KDTREE_FOR_EACH_KERNEL(X) KDTREE_FOR_EACH_VARIANT(KDTREE_NAMES, X) KDTREE_FOR_EACH_HOPPER_VARIANT(KDTREE_HOPPER_NAMES, X)
