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
__device__ __forceinline__ void ldmatrix_x2_trans(unsigned (&r)[2], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(address) : "memory");
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

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
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

#endif  // KDTREE_HOST

// ---------------------------------------------------------------------------------------------------------------------------- constants

constexpr int kLatent = 512;               // columns of a value
constexpr int kRope = 64;                  // columns that only the scores use
constexpr int kHeadDim = kLatent + kRope;  // columns of a query and of a key
constexpr int kRowBytes = kHeadDim * 2;    // one key in shared memory: 1,152 bytes, nine lines of 128
constexpr int kThreads = 256;              // eight warps
constexpr int kTileKeys = 32;              // keys in a tile
constexpr int kKeyGroups = kTileKeys / 8;  // groups of 8 keys, as the fragments of a score product hold them
constexpr int kStages = 2;                 // tiles in shared memory: one in use, one arriving
constexpr int kTileBytes = kTileKeys * kRowBytes;
constexpr int kKSteps = kHeadDim / 16 / 4;  // 16-column steps of the score product that each of four warps takes
constexpr int kDimTiles = 4;                // 16-column tiles of the output that each of eight warps holds
constexpr float kNothingSeen = -3e38f;      // the running maximum before any column; exp2(-inf - kNothingSeen) is 0, not NaN

// -------------------------------------------------------------------------------------------------------------------------- parameters

// Everything one call needs, passed by value; kdtree_patch/kernel.py has the same layout. Strides are in bytes.
struct VerifyParams {
  const unsigned char* q;            // (tokens, heads, 576)
  const unsigned char* k_extend;     // (tokens, 576): the keys of the draft tokens
  const unsigned char* kv_pool;      // (slots, 576)
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
  int reserved;
};

enum WideIndex { kWideQo = 1, kWideKvPtr = 2, kWideKvIdx = 4, kWideMask = 8 };

__device__ __forceinline__ long long load_index(const void* base, long long i, bool wide) {
  return wide ? __ldg((const long long*)base + i) : (long long)__ldg((const int*)base + i);
}

// What a block must know of one request.
struct Request {
  long long q_start;   // its first draft token
  long long kv_start;  // its first entry of kv_indices
  int q_len, prefix;
  __device__ __forceinline__ int columns() const { return prefix + q_len; }
};

__device__ __forceinline__ Request load_request(const VerifyParams& p, int b) {
  Request r;
  r.q_start = load_index(p.qo_indptr, b, p.wide_indices & kWideQo);
  r.kv_start = load_index(p.kv_indptr, b, p.wide_indices & kWideKvPtr);
  r.q_len = (int)(load_index(p.qo_indptr, b + 1, p.wide_indices & kWideQo) - r.q_start);
  r.prefix = (int)(load_index(p.kv_indptr, b + 1, p.wide_indices & kWideKvPtr) - r.kv_start);
  return r;
}

// ---------------------------------------------------------------------------------------------------------------------------- schedule
//
// The line: request 0's row block 0 with its tiles, then row block 1, ..., then request 1's. Worker c of W takes tiles [T*c/W, T*(c+1)/W)
// of the T tiles. W is the number of blocks, but never more than T: then no stretch is empty and the workers of a cut item are consecutive.
// If all requests on the line are alike and there are fewer items than workers, W is rounded down to a multiple of the items: then every
// stretch lies inside one item, and the row blocks of one request read the same keys at the same time, the second from L2.
//
// A request whose prefix is shorter than a tile is not on the line: its items are dealt out whole. Graph runners pad a batch with requests
// of prefix 1, and those must not move the cuts of the others: a request's result has the same bits with and without padding.

struct Item {
  int request, row_block;
  int tiles;        // tiles of the whole item
  long long first;  // where the item starts on the line; 0 for a short one
};

struct Schedule {
  long long tiles;  // T
  int workers;      // W
  int short_items;
  __device__ __forceinline__ long long stretch_start(int worker) const { return tiles * worker / workers; }
  // The worker whose stretch holds a tile: the largest c with T*c/W <= tile.
  __device__ __forceinline__ int owner(long long tile) const { return (int)(((tile + 1) * workers + tiles - 1) / tiles) - 1; }
};

// Tiles and row blocks of a request; no row blocks beyond the batch or without draft tokens.
struct RequestSize {
  int tiles, blocks;
  bool is_short;
  // What the request adds to the line (tiles) or to the short items.
  __device__ __forceinline__ int units(bool of_short) const { return is_short != of_short ? 0 : of_short ? blocks : tiles * blocks; }
};

__device__ __forceinline__ RequestSize size_request(const VerifyParams& p, int b) {
  RequestSize size{0, 0, false};
  if (b >= p.bs) return size;
  const Request r = load_request(p, b);
  if (r.q_len <= 0) return size;
  size.tiles = (r.columns() + kTileKeys - 1) / kTileKeys;
  size.blocks = min((r.q_len * p.heads + p.rows_per_block - 1) / p.rows_per_block, p.row_blocks);
  size.is_short = r.prefix < kTileKeys;
  return size;
}

template <class Combine>
__device__ __forceinline__ int warp_reduce(int x, Combine combine) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) x = combine(x, __shfl_xor_sync(~0u, x, offset));
  return x;
}

// One warp, all lanes: counts the line and the short items.
__device__ Schedule make_schedule(const VerifyParams& p) {
  auto plus = [](int a, int b) { return a + b; };
  auto larger = [](int a, int b) { return max(a, b); };
  long long total = 0;
  int on_line = 0, most_tiles = 0, most_blocks = 0, short_items = 0;
  for (int b = threadIdx.x & 31; b < p.bs; b += 32) {
    const RequestSize size = size_request(p, b);
    total += size.units(false);
    short_items += size.units(true);
    if (size.is_short) continue;
    on_line += 1;
    most_tiles = max(most_tiles, size.tiles);
    most_blocks = max(most_blocks, size.blocks);
  }
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) {
    // A 64-bit shuffle is two 32-bit ones; the halves are summed as one number.
    const int lo = __shfl_xor_sync(~0u, (int)(total & 0xffffffffll), offset), hi = __shfl_xor_sync(~0u, (int)(total >> 32), offset);
    total += ((long long)hi << 32) | (unsigned)lo;
  }
  const int items = warp_reduce(on_line, plus) * (most_blocks = warp_reduce(most_blocks, larger));
  most_tiles = warp_reduce(most_tiles, larger);
  Schedule s;
  s.tiles = total;
  s.workers = (int)max(1ll, min((long long)p.workers, total));
  s.short_items = warp_reduce(short_items, plus);
  const bool alike = total == (long long)items * most_tiles;
  if (alike && items > 0 && items <= s.workers) s.workers = s.workers / items * items;
  return s;
}

// One warp, all lanes: the item that holds a tile of the line, or the short item of that number. It must exist.
__device__ Item find_item(const VerifyParams& p, long long position, bool of_short) {
  const int lane = threadIdx.x & 31;
  long long before = 0;  // units of the requests already passed
  for (int b0 = 0; b0 < p.bs; b0 += 32) {
    const RequestSize size = size_request(p, b0 + lane);
    const int units = size.units(of_short);
    // Inclusive prefix sum over the 32 requests; 32 bits hold it relative to `before` for any batch that fits a GPU's memory.
    int sum = units;
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
      const int below = __shfl_up_sync(~0u, sum, offset);
      if (lane >= offset) sum += below;
    }
    const unsigned hit = __ballot_sync(~0u, position >= before + sum - units && position < before + sum);
    if (hit) {
      const int source = __ffs((int)hit) - 1;
      Item item;
      item.request = b0 + source;
      item.tiles = __shfl_sync(~0u, size.tiles, source);
      const long long request_start = before + __shfl_sync(~0u, sum - units, source);
      item.row_block = (int)(of_short ? position - request_start : (position - request_start) / item.tiles);
      item.first = of_short ? 0 : request_start + (long long)item.row_block * item.tiles;
      return item;
    }
    before += __shfl_sync(~0u, sum, 31);
  }
  return Item{0, 0, 1, position};
}

// ------------------------------------------------------------------------------------------------------------------- geometry of a block

// ROW_TILES groups of 8 attention rows. The eight warps of a block are used in three ways:
//   scores:  warp = key_group (2 groups of 16 keys) x quarter (4 quarters of the 576 columns): partial scores of all rows.
//   softmax: warp n finishes row tile n: it sums the partial scores through shared memory and has all 32 keys of its 8 rows, so that a
//            row's maximum and sum never leave the warp.
//   values:  each warp owns 64 of the 512 output columns, all rows and all keys.
template <int ROW_TILES>
struct Geometry {
  static_assert(ROW_TILES <= kThreads / 32, "one warp finishes each row tile");
  static constexpr int kRows = ROW_TILES * 8;
  static constexpr int kProbStride = (ROW_TILES | 1) * 16;                            // an odd number of 16-byte units: no bank conflicts
  static constexpr int kOffsetProb = kStages * kTileBytes;                            // P^T: [key][row]
  static constexpr int kOffsetExchange = kOffsetProb + kTileKeys * kProbStride;       // [row tile][warp][lane] float4: partial scores
  static constexpr int kOffsetRescale = kOffsetExchange + ROW_TILES * kThreads * 16;  // what a tile multiplies each row's output by
  static constexpr int kOffsetMax = kOffsetRescale + kRows * 4;                       // maximum of each row, when the item is done
  static constexpr int kOffsetSum = kOffsetMax + kRows * 4;                           // sum of each row, likewise
  static constexpr int kOffsetItem = kOffsetSum + kRows * 4;                          // Item and Schedule, broadcast by warp 0
  static constexpr int kSharedBytes = kOffsetItem + 64;
  static constexpr int kPartialFloat4 = 8 * kDimTiles * ROW_TILES * 32;  // accumulators of one block
  static_assert(kSharedBytes <= 101376, "must fit the parts with 99 KB of shared memory a block: sm_86, sm_89, sm_120");
};

// What warp 0 tells the others.
struct Broadcast {
  Item item;
  Schedule schedule;
};
static_assert(sizeof(Broadcast) <= 64, "Geometry::kOffsetItem reserves 64 bytes");

// Byte offset of 16-byte unit `unit` of key `key` in a tile. Rows are 9 * 128 bytes, so without the XOR eight rows would hit the same
// banks.
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
  float* const s_rescale;
  float* const s_max;
  float* const s_sum;

  // The current item.
  Request request;
  int row_base, rows;  // first row of the row block within the request; valid rows of the block
  int columns;         // prefix + q_len
  long long mask_base;
  unsigned r_q[kKSteps][ROW_TILES][2];   // Q^T fragments of this warp's column quarter
  float r_out[kDimTiles][ROW_TILES][4];  // O^T accumulators: 64 columns x rows
  float2 r_max;                          // of the rows that this thread finishes, 2 * quad and the next of row tile `warp`
  float2 r_sum;                          // this thread's share of their sums
  long long r_slot;                      // slot of the key that this thread copies next

  __device__ __forceinline__ VerifyBlock(const VerifyParams& params, unsigned char* memory)
      : p(params),
        shared(memory),
        warp(threadIdx.x >> 5),
        lane(threadIdx.x & 31),
        group(lane >> 2),
        quad(lane & 3),
        key_group(warp & 1),
        quarter(warp >> 1),
        s_rescale((float*)(memory + G::kOffsetRescale)),
        s_max((float*)(memory + G::kOffsetMax)),
        s_sum((float*)(memory + G::kOffsetSum)) {}

  __device__ __forceinline__ bool finishes_rows() const { return warp < ROW_TILES; }

  __device__ __forceinline__ void clear() {
    r_max = make_float2(kNothingSeen, kNothingSeen);
    r_sum = make_float2(0.f, 0.f);
#pragma unroll
    for (int i = 0; i < kDimTiles; i++)
#pragma unroll
      for (int n = 0; n < ROW_TILES; n++) r_out[i][n][0] = r_out[i][n][1] = r_out[i][n][2] = r_out[i][n][3] = 0.f;
  }

  // The 16-column step number `step` of this warp. Quarter k takes steps 8k..8k+7, whole 128-byte lines, and one of the four rope steps.
  __device__ __forceinline__ int column_step(int step) const { return step < 8 ? 8 * quarter + step : 32 + quarter; }

  // Q^T fragments straight from global memory: they stay in registers for the whole item. Rows that do not exist are zero.
  __device__ __forceinline__ void load_queries() {
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) {
      const int row = n * 8 + group;
      const bool exists = row < rows;
      const int token = (row_base + (exists ? row : 0)) / p.heads, head = (row_base + (exists ? row : 0)) % p.heads;
      const unsigned* words = (const unsigned*)(p.q + (request.q_start + token) * p.q_token_stride + head * p.q_head_stride) + quad;
#pragma unroll
      for (int step = 0; step < kKSteps; step++) {
        const int word = column_step(step) * 8;
        const unsigned lo = __ldg(words + word), hi = __ldg(words + word + 4);
        r_q[step][n][0] = exists ? lo : 0u;
        r_q[step][n][1] = exists ? hi : 0u;
      }
    }
  }

  // Reads the slot of the key that this thread copies in a tile: one key for eight threads. Done a tile ahead of the copy.
  __device__ __forceinline__ void load_slot(int tile) {
    if (request.prefix > 0) {
      const int column = min(tile * kTileKeys + (int)(threadIdx.x >> 3), request.prefix - 1);
      r_slot = load_index(p.kv_indices, request.kv_start + column, p.wide_indices & kWideKvIdx);
    }
  }

  // Starts the copy of a tile of keys: prefix columns from the pool, draft columns from k_extend, zeros beyond the last column.
  __device__ __forceinline__ void copy_tile(int tile) {
    const int key = threadIdx.x >> 3, unit = threadIdx.x & 7;
    const int column = tile * kTileKeys + key;
    const int bytes = column < columns ? 16 : 0;
    const unsigned char* source =
        p.k_extend + (request.q_start + (column < columns ? max(column - request.prefix, 0) : 0)) * p.k_extend_stride;
    if (column < request.prefix) source = p.kv_pool + r_slot * p.kv_slot_stride;
    source += unit * 16;
    const unsigned target = shared_address(shared + (tile & 1) * kTileBytes) + tile_offset(key, unit);
#pragma unroll
    for (int line = 0; line < kRowBytes / 128; line++) cp_async_16(target + line * 128, source + line * 128, bytes);
    cp_async_commit();
  }

  // Partial scores of 16 keys x all rows over this warp's quarter of the columns.
  __device__ __forceinline__ void score_product(unsigned tile_address, float (&r_part)[ROW_TILES][4]) const {
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) r_part[n][0] = r_part[n][1] = r_part[n][2] = r_part[n][3] = 0.f;
    const int key = key_group * 16 + (lane & 15);
    const unsigned row_address = tile_address + key * kRowBytes;
    const unsigned first_unit = ((lane >> 4) ^ (key & 7)) << 4;  // unit 0 or 1 of a line, swizzled
#pragma unroll
    for (int step = 0; step < kKSteps; step++) {
      // Two units a step: within a line the swizzle is an XOR with the step, between lines an addition.
      const unsigned address = step < 8 ? row_address + quarter * 256 + (step >> 2) * 128 + (first_unit ^ ((step & 3) << 5))
                                        : row_address + 1024 + (first_unit ^ (quarter << 5));
      unsigned r_keys[4];
      ldmatrix_x4(r_keys, address);
#pragma unroll
      for (int n = 0; n < ROW_TILES; n++) mma_m16n8k16<Element>(r_part[n], r_keys, r_q[step][n][0], r_q[step][n][1]);
    }
  }

  // Partial scores into shared memory, each row tile for the warp that finishes it. Ends with a barrier.
  __device__ __forceinline__ void send_scores(const float (&r_part)[ROW_TILES][4]) const {
    float4* const s_exchange = (float4*)(shared + G::kOffsetExchange) + threadIdx.x;
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) s_exchange[n * kThreads] = make_float4(r_part[n][0], r_part[n][1], r_part[n][2], r_part[n][3]);
    __syncthreads();
  }

  // The scores that this thread finishes, in log2 units: keys (4 groups of 8, `group` within each) x rows 2 * quad and the next.
  __device__ __forceinline__ void sum_scores(float2 (&r_score)[kKeyGroups]) const {
    const float4* const s_exchange = (const float4*)(shared + G::kOffsetExchange) + warp * kThreads + lane;
#pragma unroll
    for (int keys = 0; keys < 2; keys++) {
      float4 sum = s_exchange[keys * 32];
#pragma unroll
      for (int part = 1; part < 4; part++) {
        const float4 more = s_exchange[(part * 2 + keys) * 32];
        sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
      }
      r_score[keys * 2] = make_float2(sum.x * p.scale_log2e, sum.y * p.scale_log2e);
      r_score[keys * 2 + 1] = make_float2(sum.z * p.scale_log2e, sum.w * p.scale_log2e);
    }
  }

  // What is not visible becomes -inf. Only tiles that reach beyond the prefix need a look at the mask.
  __device__ __forceinline__ void mask_scores(int tile, float2 (&r_score)[kKeyGroups]) const {
    if ((tile + 1) * kTileKeys <= request.prefix) return;
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int row = warp * 8 + quad * 2 + e, token = (row_base + row) / p.heads;
#pragma unroll
      for (int keys = 0; keys < kKeyGroups; keys++) {
        const int column = tile * kTileKeys + keys * 8 + group;
        bool visible = column < columns && row < rows;
        if (visible && column >= request.prefix)
          visible = p.custom_mask ? p.custom_mask[mask_base + (long long)token * columns + column] != 0 : column - request.prefix <= token;
        if (!visible) (e ? r_score[keys].y : r_score[keys].x) = __int_as_float(0xff800000);
      }
    }
  }

  // Scores to probabilities, P = exp2(score - running maximum), in shared memory. The maximum is exact at every tile: the largest weight of
  // a row is then 1 and carries no rounding error, which a reference that lags behind would add to every row. The row sums are taken of the
  // rounded values, as the product is. True if a maximum has risen.
  __device__ __forceinline__ bool softmax(const float2 (&r_score)[kKeyGroups]) {
    float2 now = r_max;
#pragma unroll
    for (int keys = 0; keys < kKeyGroups; keys++) now = make_float2(fmaxf(now.x, r_score[keys].x), fmaxf(now.y, r_score[keys].y));
#pragma unroll
    for (int offset = 4; offset < 32; offset <<= 1) {
      now.x = fmaxf(now.x, __shfl_xor_sync(~0u, now.x, offset));
      now.y = fmaxf(now.y, __shfl_xor_sync(~0u, now.y, offset));
    }
    const float2 factor = make_float2(exp2_approx(r_max.x - now.x), exp2_approx(r_max.y - now.y));
    const bool risen = now.x > r_max.x || now.y > r_max.y;
    r_max = now;
    r_sum = make_float2(r_sum.x * factor.x, r_sum.y * factor.y);
    if (group == 0) *(float2*)&s_rescale[warp * 8 + quad * 2] = factor;
    unsigned char* const s_prob = shared + G::kOffsetProb + group * G::kProbStride + warp * 16 + quad * 4;
#pragma unroll
    for (int keys = 0; keys < kKeyGroups; keys++) {
      const unsigned packed = pack2<Element>(exp2_approx(r_score[keys].x - now.x), exp2_approx(r_score[keys].y - now.y));
      const float2 rounded = unpack2<Element>(packed);
      r_sum.x += rounded.x, r_sum.y += rounded.y;
      *(unsigned*)(s_prob + keys * 8 * G::kProbStride) = packed;
    }
    return risen;
  }

  // Fits the output accumulators to the new maxima.
  __device__ __forceinline__ void rescale_output() {
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) {
      const float2 factor = *(const float2*)&s_rescale[n * 8 + quad * 2];
#pragma unroll
      for (int i = 0; i < kDimTiles; i++) {
        r_out[i][n][0] *= factor.x, r_out[i][n][1] *= factor.y;
        r_out[i][n][2] *= factor.x, r_out[i][n][3] *= factor.y;
      }
    }
  }

  // O^T += V^T P^T: V^T is the K tile read transposed, columns warp * 64 .. + 63.
  __device__ __forceinline__ void value_product(unsigned tile_address) {
    const int key = (lane & 7) + ((lane >> 4) << 3);
    const unsigned value_address = tile_address + key * kRowBytes + warp * 128;
    const unsigned value_unit = (((lane >> 3) & 1) ^ (key & 7)) << 4;
    const unsigned prob_address =
        shared_address(shared + G::kOffsetProb) + ((lane & 7) + (((lane >> 3) & 1) << 3)) * G::kProbStride + ((lane >> 4) << 4);
#pragma unroll
    for (int step = 0; step < kTileKeys / 16; step++) {
      unsigned r_prob[(ROW_TILES + 1) / 2][4];  // [pair of row tiles][2 registers of each]
#pragma unroll
      for (int pair = 0; pair < ROW_TILES / 2; pair++)
        ldmatrix_x4_trans(r_prob[pair], prob_address + step * 16 * G::kProbStride + pair * 32);
      if constexpr (ROW_TILES % 2 == 1) {
        unsigned last[2];
        ldmatrix_x2_trans(last, prob_address + step * 16 * G::kProbStride + (ROW_TILES / 2) * 32 - ((lane >> 4) << 4));
        r_prob[ROW_TILES / 2][0] = last[0], r_prob[ROW_TILES / 2][1] = last[1];
      }
      unsigned r_value[kDimTiles][4];
#pragma unroll
      for (int i = 0; i < kDimTiles; i++) ldmatrix_x4_trans(r_value[i], value_address + step * 16 * kRowBytes + (value_unit ^ (i << 5)));
#pragma unroll
      for (int i = 0; i < kDimTiles; i++)
#pragma unroll
        for (int n = 0; n < ROW_TILES; n++)
          mma_m16n8k16<Element>(r_out[i][n], r_value[i], r_prob[n / 2][(n & 1) * 2], r_prob[n / 2][(n & 1) * 2 + 1]);
    }
  }

  __device__ __forceinline__ void attend_tile(int tile, int last) {
    const unsigned tile_address = shared_address(shared + (tile & 1) * kTileBytes);
    cp_async_wait<0>();
    __syncthreads();  // the tile is complete, and nobody reads the other stage, P or the exchange area any more
    if (tile + 1 < last) {
      copy_tile(tile + 1);
      load_slot(tile + 2);
    }
    {
      float r_part[ROW_TILES][4];
      score_product(tile_address, r_part);
      send_scores(r_part);
    }
    bool risen = false;
    if (finishes_rows()) {
      float2 r_score[kKeyGroups];
      sum_scores(r_score);
      mask_scores(tile, r_score);
      risen = softmax(r_score);
    }
    if (__syncthreads_or(risen)) rescale_output();  // P is complete
    value_product(tile_address);
  }

  // Tiles [first, last) of an item, into the accumulators. The first copies are on their way before the queries are read.
  __device__ __forceinline__ void attend(const Item& item, int first, int last) {
    request = load_request(p, item.request);
    columns = request.columns();
    load_slot(first);
    copy_tile(first);
    load_slot(first + 1);
    row_base = item.row_block * p.rows_per_block;
    rows = min(p.rows_per_block, request.q_len * p.heads - row_base);
    mask_base = p.custom_mask ? load_index(p.mask_indptr, item.request, p.wide_indices & kWideMask) : 0;
    load_queries();
    clear();
    for (int tile = first; tile < last; tile++) attend_tile(tile, last);
  }

  // Maxima and sums of the rows, for every thread of the block. Ends with a barrier.
  __device__ __forceinline__ void publish_rows() {
    if (finishes_rows()) {
#pragma unroll
      for (int offset = 4; offset < 32; offset <<= 1) {
        r_sum.x += __shfl_xor_sync(~0u, r_sum.x, offset);
        r_sum.y += __shfl_xor_sync(~0u, r_sum.y, offset);
      }
      if (group == 0) {
        *(float2*)&s_max[warp * 8 + quad * 2] = r_max;
        *(float2*)&s_sum[warp * 8 + quad * 2] = r_sum;
      }
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
        const float sum = s_sum[row], factor = sum == 0.f ? 0.f : 1.f / sum;
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
      p.partial_stats[(long long)slot * G::kRows + threadIdx.x] = make_float2(s_max[threadIdx.x], s_sum[threadIdx.x]);
    float4* target = p.partial_out + (long long)slot * G::kPartialFloat4 + warp * kDimTiles * ROW_TILES * 32 + lane;
#pragma unroll
    for (int i = 0; i < kDimTiles; i++)
#pragma unroll
      for (int n = 0; n < ROW_TILES; n++)
        target[(i * ROW_TILES + n) * 32] = make_float4(r_out[i][n][0], r_out[i][n][1], r_out[i][n][2], r_out[i][n][3]);
  }

  static __device__ __forceinline__ unsigned short* output_row(const VerifyParams& p, long long q_start, int row) {
    return (unsigned short*)(p.out + (q_start + row / p.heads) * p.out_token_stride + (row % p.heads) * p.out_head_stride);
  }
};

// A worker starts at most one item that it does not finish, and finishes at most one that it did not start: two partial results a worker.
__device__ __forceinline__ int partial_slot(int worker, bool starts_item) { return 2 * worker + (starts_item ? 1 : 0); }

// Row of cut_items that describes an item: by item if there are no more items than workers, else by the worker that starts it.
__device__ __forceinline__ int cut_item_row(const VerifyParams& p, int item, int worker) {
  return p.bs * p.row_blocks <= p.workers ? item : worker;
}

// Grid: (workers). Block: 256 threads, one warp schedules.
template <class Element, int ROW_TILES>
__device__ __forceinline__ void verify_attention(const VerifyParams& p) {
  using G = Geometry<ROW_TILES>;
  KDTREE_DYNAMIC_SHARED(shared);
  Broadcast* const s_broadcast = (Broadcast*)(shared + G::kOffsetItem);
  const int worker = blockIdx.x;
  VerifyBlock<Element, ROW_TILES> block(p, shared);

  if (block.warp == 0) {
    const Schedule schedule = make_schedule(p);
    if (block.lane == 0) s_broadcast->schedule = schedule;
  }
  __syncthreads();
  const Schedule schedule = s_broadcast->schedule;
  const bool rows_by_worker = p.bs * p.row_blocks > p.workers;
  if (rows_by_worker && threadIdx.x == 0) p.cut_items[worker] = make_int4(0, 0, -1, 0);

  // Short items first, from the last worker backwards, because the line may leave the last workers without a stretch; then the stretch.
  int next_short = p.workers - 1 - worker;
  const bool has_stretch = worker < schedule.workers;
  long long position = has_stretch ? schedule.stretch_start(worker) : 0;
  const long long end = has_stretch ? schedule.stretch_start(worker + 1) : 0;
  while (true) {
    const bool is_short = next_short < schedule.short_items;
    if (!is_short && position >= end) break;
    if (block.warp == 0) {
      const Item found = find_item(p, is_short ? next_short : position, is_short);
      if (block.lane == 0) s_broadcast->item = found;
    }
    __syncthreads();  // the item is known; nobody is left in the attend of the last one, which ends with barriers
    const Item item = s_broadcast->item;
    const int first = is_short ? 0 : (int)(position - item.first);
    const int last = is_short ? item.tiles : (int)min((long long)item.tiles, end - item.first);

    block.attend(item, first, last);
    block.publish_rows();
    const bool whole = first == 0 && last == item.tiles;
    if (whole) {
      block.write_output();
    } else {
      block.write_partial(partial_slot(worker, first == 0));
    }
    if (first == 0 && threadIdx.x == 0) {
      // The last item that a worker starts is the one that may be cut, so what is said last is what counts.
      const int number = item.request * p.row_blocks + item.row_block;
      const int last_worker = whole ? worker : schedule.owner(item.first + item.tiles - 1);
      p.cut_items[cut_item_row(p, number, worker)] = make_int4(number, worker, last_worker, 0);
    }
    if (is_short) {
      next_short += p.workers;
    } else {
      position = item.first + last;
    }
  }
}

// ------------------------------------------------------------------------------------------------------------------------------ combine
//
// Merges the partial results of the items that were cut, in the order of the workers, so that the same input gives the same bits:
//     M = max_s m_s,  out = sum_s 2^(m_s - M) * o_s / sum_s 2^(m_s - M) * l_s
// Grid: (chunks, min(items, workers)). Block: 256 threads = 64 positions x 4 groups of splits; a position is a float4 of the accumulators.

constexpr int kCombinePositions = 64;
constexpr int kCombineGroups = kThreads / kCombinePositions;
constexpr int kCombineRows = kCombinePositions / 32 * 8;  // rows that 64 positions touch: two row tiles

template <class Element, int ROW_TILES>
__device__ __forceinline__ void combine_splits(const VerifyParams& p) {
  using G = Geometry<ROW_TILES>;
  KDTREE_DYNAMIC_SHARED(shared);
  float4* const s_reduce = (float4*)shared;                       // [4 groups][64 positions]
  float* const s_inverse = (float*)(shared + kThreads * 16);      // [16 rows]
  float* const s_weight = (float*)(shared + kThreads * 16 + 64);  // [splits][16 rows]

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

  const Request request = load_request(p, item / p.row_blocks);
  const int row_base = item % p.row_blocks * p.rows_per_block;
  const int rows = min(p.rows_per_block, request.q_len * p.heads - row_base);
  const int position = threadIdx.x % kCombinePositions, split_group = threadIdx.x / kCombinePositions;

  for (int chunk = blockIdx.x; chunk < G::kPartialFloat4 / kCombinePositions; chunk += gridDim.x) {
    // Weights: 16 threads a row, each a share of the splits.
    {
      const int weight_row = threadIdx.x / 16, share = threadIdx.x % 16;
      const int row = (chunk * 2 + weight_row / 8) % ROW_TILES * 8 + weight_row % 8;
      float highest = kNothingSeen, sum = 0.f;
      for (int s = share; s < splits; s += 16) highest = fmaxf(highest, p.partial_stats[slot(s) * G::kRows + row].x);
#pragma unroll
      for (int offset = 8; offset; offset >>= 1) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, offset));
      for (int s = share; s < splits; s += 16) {
        const float2 stats = p.partial_stats[slot(s) * G::kRows + row];
        const float weight = exp2_approx(stats.x - highest);
        s_weight[s * kCombineRows + weight_row] = weight;
        sum += weight * stats.y;
      }
#pragma unroll
      for (int offset = 8; offset; offset >>= 1) sum += __shfl_xor_sync(~0u, sum, offset);
      if (share == 0) s_inverse[weight_row] = sum == 0.f ? 0.f : 1.f / sum;
    }
    __syncthreads();

    const int lane = position & 31, fragment = chunk * 2 + position / 32;
    const int weight_row = position / 32 * 8 + (lane & 3) * 2;
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
    const float4* source = p.partial_out + chunk * kCombinePositions + position;
#pragma unroll 4
    for (int s = split_group; s < splits; s += kCombineGroups) {
      const float4 part = __ldcs(source + slot(s) * G::kPartialFloat4);
      const float2 weight = *(const float2*)&s_weight[s * kCombineRows + weight_row];
      total.x += weight.x * part.x, total.y += weight.y * part.y;
      total.z += weight.x * part.z, total.w += weight.y * part.w;
    }
    s_reduce[threadIdx.x] = total;
    __syncthreads();
    if (split_group == 0) {
#pragma unroll
      for (int g = 1; g < kCombineGroups; g++) {
        const float4 part = s_reduce[g * kCombinePositions + position];
        total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
      }
      const int row = fragment % ROW_TILES * 8 + (lane & 3) * 2, dim_tile = fragment / ROW_TILES;
      const int column = dim_tile / kDimTiles * 64 + dim_tile % kDimTiles * 16 + (lane >> 2);
      const float2 inverse = *(const float2*)&s_inverse[weight_row];
      if (row < rows) {
        unsigned short* target = VerifyBlock<Element, ROW_TILES>::output_row(p, request.q_start, row_base + row) + column;
        target[0] = to_bits<Element>(total.x * inverse.x);
        target[8] = to_bits<Element>(total.z * inverse.x);
      }
      if (row + 1 < rows) {
        unsigned short* target = VerifyBlock<Element, ROW_TILES>::output_row(p, request.q_start, row_base + row + 1) + column;
        target[0] = to_bits<Element>(total.y * inverse.y);
        target[8] = to_bits<Element>(total.w * inverse.y);
      }
    }
    __syncthreads();  // weights and sums are free for the next chunk
  }
}

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
// clang-format on

#define KDTREE_DEFINE(TYPE, Element, ROWS, _)                                                                       \
  extern "C" __global__ void __launch_bounds__(kThreads, 1) verify_attn_##TYPE##_r##ROWS(const VerifyParams p) {    \
    verify_attention<Element, ROWS / 8>(p);                                                                         \
  }                                                                                                                 \
  extern "C" __global__ void __launch_bounds__(kThreads, 4) combine_splits_##TYPE##_r##ROWS(const VerifyParams p) { \
    combine_splits<Element, ROWS / 8>(p);                                                                           \
  }
KDTREE_FOR_EACH_VARIANT(KDTREE_DEFINE, )

// For the CPU build, which finds kernels by name: X(name) for each of them.
#define KDTREE_NAMES(TYPE, Element, ROWS, X) X(verify_attn_##TYPE##_r##ROWS) X(combine_splits_##TYPE##_r##ROWS)
#define KDTREE_FOR_EACH_KERNEL(X) KDTREE_FOR_EACH_VARIANT(KDTREE_NAMES, X)
