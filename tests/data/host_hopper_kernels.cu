// Little kernels that use the primitives of Hopper, rightly or, if an argument says so, wrongly. For tests/test_host_hopper.py.

struct Bf16 {
  static constexpr bool is_bf16 = true;
};
struct Fp16 {
  static constexpr bool is_bf16 = false;
};

#include "host/device.h"
#include "host_params.h"

// The first multiple of 1024 in shared memory.
__device__ __forceinline__ unsigned char* aligned(unsigned char* shared) { return shared + (0u - shared_address(shared)) % 1024; }

__device__ __forceinline__ unsigned long long descriptor(unsigned address, int leading, int stride, int swizzle) {
  return (unsigned long long)(address >> 4) | (unsigned long long)(leading >> 4) << 16 | (unsigned long long)(stride >> 4) << 32 |
         (unsigned long long)swizzle << 62;
}

// A tile of `rows` x 64 elements, K-major with the 128-byte swizzle; step: which 16 of the 64.
__device__ __forceinline__ unsigned long long tile_of(const unsigned char* tile, int step = 0) {
  return descriptor(shared_address(tile) + step * 32, 0, 1024, 1);
}

// -- what they compute

// In: the words bytes, start, leading and stride of a, of b, swizzle; then d, 128 x COLUMNS / 2 floats; then shared memory. Out: d.
template <class Element, int TILES, bool TRANSPOSED>
__device__ __forceinline__ void multiply(const VerifyParams& p) {
  KDTREE_DYNAMIC_SHARED(shared);
  const int* words = (const int*)p.in;
  const float* in = (const float*)(words + 8) + threadIdx.x * TILES * 4;
  const unsigned char* bytes = p.in + 32 + 128 * TILES * 16;
  unsigned char* s_operands = aligned(shared);
  for (int i = threadIdx.x; i < words[0]; i += blockDim.x) s_operands[i] = bytes[i];
  fence_proxy_async();
  __syncthreads();
  float d[TILES][4];
  for (int i = 0; i < TILES * 4; i++) d[i / 4][i % 4] = in[i];
  const unsigned base = shared_address(s_operands);
  wgmma_fence();
  wgmma_m64k16<Element, TILES, TRANSPOSED>(d, descriptor(base + words[1], words[2], words[3], words[7]),
                                           descriptor(base + words[4], words[5], words[6], words[7]));
  wgmma_commit();
  wgmma_wait<0>();
  for (int i = 0; i < TILES * 4; i++) ((float*)p.out)[threadIdx.x * TILES * 4 + i] = d[i / 4][i % 4];
}

#define MULTIPLY(tiles)                                                                                                \
  extern "C" __global__ void wgmma_bf16_##tiles(const VerifyParams p) { multiply<Bf16, tiles, false>(p); }             \
  extern "C" __global__ void wgmma_fp16_##tiles(const VerifyParams p) { multiply<Fp16, tiles, false>(p); }             \
  extern "C" __global__ void wgmma_bf16_##tiles##_transposed(const VerifyParams p) { multiply<Bf16, tiles, true>(p); } \
  extern "C" __global__ void wgmma_fp16_##tiles##_transposed(const VerifyParams p) { multiply<Fp16, tiles, true>(p); }
MULTIPLY(1)
MULTIPLY(2)
MULTIPLY(5)
MULTIPLY(8)
MULTIPLY(9)

// In: a word a lane, of an 8 x 8 matrix of 16-bit numbers. Out: the same of the transposed one.
extern "C" __global__ void movmatrix(const VerifyParams p) {
  ((unsigned*)p.out)[threadIdx.x] = movmatrix_trans(((const unsigned*)p.in)[threadIdx.x]);
}

// In: an int a thread, several for the block's two groups of 64 threads. Out: whether one of the group's is not zero; each round has a
// number of its own, and a barrier of the group's own. arguments[0]: rounds.
extern "C" __global__ void vote(const VerifyParams p) {
  for (int round = 0; round < p.arguments[0]; round++) {
    const int i = round * blockDim.x + threadIdx.x;
    ((int*)p.out)[i] = barrier_sync_or(1 + threadIdx.x / 64, 64, ((const int*)p.in)[i] != 0);
  }
}

// -- who must wait for whom

// Tiles of 2 KB through two stages: 64 threads copy by cp.async, 64 read, each what begins 16 bytes after the 32 that it would have copied:
// out = in, rotated by 16 bytes within a tile. arguments[0]: tiles. arguments[1]: what is wrong.
extern "C" __global__ void copy_pipeline(const VerifyParams p) {
  KDTREE_DYNAMIC_SHARED(shared);
  const int tiles = p.arguments[0], fault = p.arguments[1];
  const unsigned full = shared_address(shared), empty = full + 16, stages = full + 128;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < 2; stage++) mbarrier_init(full + stage * 8, 64), mbarrier_init(empty + stage * 8, fault == 8 ? 2 : 64);
    mbarrier_fence_init();
  }
  if (fault != 9) __syncthreads();
  const int member = threadIdx.x % 64;
  if (threadIdx.x >= 64) {
    for (int tile = 0; tile < tiles; tile++) {
      const int stage = tile % 2, round = tile / 2;
      if (fault != 2) mbarrier_wait(empty + stage * 8, (round & 1) ^ 1);
      const unsigned target = stages + stage * 2048 + member * 32;
      cp_async_16(target, p.in + tile * 2048 + member * 32, 16);
      if (fault == 4) cp_async_mbarrier_arrive(full + stage * 8);
      cp_async_16(target + 16, p.in + tile * 2048 + member * 32 + 16, 16);
      if (fault == 1) mbarrier_arrive(full + stage * 8);  // says that they have landed, which they need not
      if (fault == 0 || fault == 2 || fault == 3 || fault >= 7) cp_async_mbarrier_arrive(full + stage * 8);
      if (fault == 5) {  // right, too
        cp_async_commit();
        cp_async_wait<0>();
        cp_async_mbarrier_arrive(full + stage * 8);
      }
      if (fault == 6) {  // and this
        cp_async_mbarrier_arrive(full + stage * 8);
        cp_async_commit();
        cp_async_wait<0>();
      }
    }
    return;
  }
  for (int tile = 0; tile < tiles; tile++) {
    const int stage = tile % 2, round = tile / 2;
    if (fault != 3) mbarrier_wait(full + stage * 8, round & 1);
    if (fault == 7) mbarrier_arrive(empty + stage * 8);
    for (int half = 0; half < 2; half++) {
      const int from = (member * 2 + half + 1) % 128;
      const int4 value = *(const int4*)(shared + 128 + stage * 2048 + from * 16);
      ((int4*)p.out)[tile * 128 + member * 2 + half] = value;
    }
    if (fault == 8) {  // one lane for all, although not all may be done
      if (member % 32 == 0) mbarrier_arrive(empty + stage * 8);
    } else if (fault != 7) {
      mbarrier_arrive(empty + stage * 8);
    }
  }
}

// out (64 x 64) = the sum over tiles of A (64 x 64) * B (64 x 64), which come as they lie in shared memory, K-major and swizzled, 8 KB
// each; two stages. Threads 128 .. 255 copy by cp.async; the block has 384. arguments[0]: tiles; [1]: what is wrong. In 8 and 9 threads 256
// .. 383 wait for the copies and pass the word on.
extern "C" __global__ void wgmma_pipeline(const VerifyParams p) {
  KDTREE_DYNAMIC_SHARED(shared);
  const int tiles = p.arguments[0], fault = p.arguments[1], lane = threadIdx.x % 32;
  unsigned char* s_stages = aligned(shared);
  const unsigned stages = shared_address(s_stages), full = stages + 2 * 16384, empty = full + 16, passed_on = full + 32;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < 2; stage++) mbarrier_init(full + stage * 8, 128), mbarrier_init(empty + stage * 8, 4);
    for (int stage = 0; stage < 2; stage++) mbarrier_init(passed_on + stage * 8, 128);
    mbarrier_fence_init();
  }
  __syncthreads();
  if (threadIdx.x >= 256) {
    set_max_registers_down<24>();
    if (fault == 8 || fault == 9) {
      for (int tile = 0; tile < tiles; tile++) {
        mbarrier_wait(full + tile % 2 * 8, tile / 2 & 1);
        if (fault == 8) fence_proxy_async();  // right: between the copies and who uses them
        mbarrier_arrive(passed_on + tile % 2 * 8);
      }
    }
    return;
  }
  if (threadIdx.x >= 128) {
    set_max_registers_down<96>();
    for (int tile = 0; tile < tiles; tile++) {
      mbarrier_wait(empty + tile % 2 * 8, (tile / 2 & 1) ^ 1);
      for (int i = threadIdx.x - 128; i < 1024; i += 128) cp_async_16(stages + tile % 2 * 16384 + i * 16, p.in + tile * 16384 + i * 16, 16);
      if (fault == 4) {  // right, too: the writers fence
        cp_async_commit();
        cp_async_wait<0>();
        fence_proxy_async();
        mbarrier_arrive(full + tile % 2 * 8);
      } else if (fault == 7) {
        cp_async_commit();
        cp_async_wait<0>();
        mbarrier_arrive(full + tile % 2 * 8);
        fence_proxy_async();  // too late
      } else {
        cp_async_mbarrier_arrive(full + tile % 2 * 8);
      }
    }
    return;
  }
  set_max_registers_up<240>();
  float d[8][4] = {};
  for (int tile = 0; tile < tiles; tile++) {
    const unsigned char* s_stage = s_stages + tile % 2 * 16384;
    if (fault == 6 && lane != 0) fence_proxy_async();  // too early
    mbarrier_wait((fault == 8 || fault == 9 ? passed_on : full) + tile % 2 * 8, tile / 2 & 1);
    if (fault == 0 || fault == 2 || fault == 3 || fault == 5 || (fault == 6 && lane == 0)) fence_proxy_async();
    wgmma_fence();
    for (int step = 0; step < 4; step++) wgmma_m64k16<Bf16, 8, false>(d, tile_of(s_stage, step), tile_of(s_stage + 8192, step));
    wgmma_commit();
    if (fault == 2) {  // the stage is given back while it is being read
      if (lane == 0) mbarrier_arrive(empty + tile % 2 * 8);
      wgmma_wait<0>();
    } else if (fault == 3) {  // right: the stage before this one is given back
      wgmma_wait<1>();
      if (lane == 0 && tile > 0) mbarrier_arrive(empty + (tile - 1) % 2 * 8);
    } else if (fault == 5) {  // it is the stage before this one that is no longer read
      wgmma_wait<1>();
      if (lane == 0) mbarrier_arrive(empty + tile % 2 * 8);
    } else {
      wgmma_wait<0>();
      if (lane == 0) mbarrier_arrive(empty + tile % 2 * 8);
    }
  }
  if (fault == 3 || fault == 5) wgmma_wait<0>();
  for (int i = 0; i < 32; i++) ((float*)p.out)[threadIdx.x * 32 + i] = d[i / 4][i % 4];
}

// Threads write the operands (16 KB, as above) themselves. arguments[0] says what is wrong.
extern "C" __global__ void wgmma_of_stores(const VerifyParams p) {
  KDTREE_DYNAMIC_SHARED(shared);
  const int fault = p.arguments[0];
  unsigned char* s_tile = aligned(shared);
  for (int i = threadIdx.x; i < 1024; i += 128) ((int4*)s_tile)[i] = ((const int4*)p.in)[i];
  if (fault != 1 && fault != 2 && fault != 3) fence_proxy_async();
  if (fault != 4) __syncthreads();
  if (fault == 2) fence_proxy_async();                      // right, too: the readers fence
  if (fault == 3 && threadIdx.x < 64) fence_proxy_async();  // not all of them
  float d[8][4] = {};
  wgmma_fence();
  for (int step = 0; step < 4; step++) wgmma_m64k16<Bf16, 8, false>(d, tile_of(s_tile, step), tile_of(s_tile + 8192, step));
  wgmma_commit();
  if (fault == 5) {  // others may still read it
    for (int i = threadIdx.x; i < 1024; i += 128) ((int4*)s_tile)[i] = make_int4(0, 0, 0, 0);
  }
  if (fault != 6) wgmma_wait<0>();
  for (int i = 0; i < 32; i++) ((float*)p.out)[threadIdx.x * 32 + i] = d[i / 4][i % 4];
  if (fault == 6) wgmma_wait<0>();
}

// A wait that returns at once, and phases in turn: out: how far each step came.
extern "C" __global__ void parities(const VerifyParams p) {
  KDTREE_DYNAMIC_SHARED(shared);
  const unsigned mbarrier = shared_address(shared);
  if (threadIdx.x == 0) mbarrier_init(mbarrier, 32), mbarrier_fence_init();
  __syncthreads();
  mbarrier_wait(mbarrier, 1);
  int seen = 0;
  for (int phase = 0; phase < 5; phase++) {
    shared[64 + threadIdx.x] = (unsigned char)phase;
    mbarrier_arrive(mbarrier);
    mbarrier_wait(mbarrier, phase & 1);
    mbarrier_wait(mbarrier, phase & 1);  // it is still the last that is complete
    seen += shared[64 + (threadIdx.x + 7) % 32];
    __syncwarp();
  }
  ((int*)p.out)[threadIdx.x] = seen;
}

// -- what is refused

// arguments[0] says which misuse.
extern "C" __global__ void misuse(const VerifyParams p) {
  KDTREE_DYNAMIC_SHARED(shared);
  const unsigned base = shared_address(shared), aligned_base = base + (0u - base) % 1024;
  const int warp = threadIdx.x / 32;
  float d[1][4] = {}, other[1][4] = {};
  if (threadIdx.x == 0) mbarrier_init(base, 2), mbarrier_init(base + 8, 1), mbarrier_fence_init();
  __syncthreads();
  const bool first = threadIdx.x == 0;
  const unsigned long long good = descriptor(aligned_base, 0, 1024, 1);
  switch (p.arguments[0]) {
    case 0:
      if (first) mbarrier_arrive(base + 16);
      break;
    case 1:
      mbarrier_init(base + 20, 1);
      break;
    case 2:
      mbarrier_init(base + 16, 0);
      break;
    case 3:
      if (first) mbarrier_init(base + 8, 1);
      break;
    case 4:
      if (first) mbarrier_wait(base, 2);
      break;
    case 5:
      if (first) mbarrier_arrive(base), mbarrier_wait(base, 0);
      break;
    case 6:
      if (first) cp_async_mbarrier_arrive(base + 8), mbarrier_arrive(base + 8);
      break;
    case 7:
      if (first) *(int*)(shared + 8) = 0, mbarrier_arrive(base + 8);
      break;
    case 8:
      if (first) cp_async_mbarrier_arrive(base + 8), cp_async_mbarrier_arrive(base + 8);
      break;
    case 9:
      if (warp == 0) barrier_sync(3, 64);
      break;
    case 10:
      set_max_registers_up<24>();
      break;
    case 11:
      if (warp < 4) set_max_registers_up<256>();
      break;
    case 12:
      if (warp >= 4) set_max_registers_down<40>();
      break;
    case 13:
      if (warp < 4) wgmma_m64k16<Bf16, 1, false>(d, good, good);
      break;
    case 14:
      if (warp < 4) {
        wgmma_fence(), wgmma_m64k16<Bf16, 1, false>(d, good, good + (warp == 2 ? 2 : 0)), wgmma_commit();
        wgmma_wait<0>();
      }
      break;
    case 15:
      if (warp < 4 && warp != 2) wgmma_fence();
      break;
    case 16:
      if (warp < 4) wgmma_fence(), wgmma_m64k16<Bf16, 1, false>(d, good | 1 << 14, good);
      break;
    case 17:
      if (warp < 4) wgmma_fence(), wgmma_m64k16<Bf16, 1, false>(d, good, good ^ 3ull << 62);
      break;
    case 18:
      if (warp < 4) wgmma_fence(), wgmma_m64k16<Bf16, 1, false>(d, good + 8, good);
      break;
    case 19:
      if (warp < 4) wgmma_fence(), wgmma_m64k16<Bf16, 1, false>(d, good, good + 7);
      break;
    case 20:
      if (warp < 4) wgmma_fence(), wgmma_m64k16<Bf16, 1, false>(d, good + (1ull << 32), good);
      break;
    case 21:
      if (warp < 4) wgmma_fence(), wgmma_m64k16<Bf16, 1, false>(d, good, good + 1024);
      break;
    case 22:
      if (warp < 4) wgmma_fence(), wgmma_m64k16<Bf16, 1, false>(d, good, good + threadIdx.x % 2 * 2);
      break;
    case 23:
      if (warp < 4) wgmma_fence(), wgmma_m64k16<Bf16, 1, false>(d, good, good);
      break;
    case 24:
      if (warp < 4) {
        wgmma_fence(), wgmma_m64k16<Bf16, 1, false>(d, good, good), wgmma_commit(), d[0][1] = 0.f;
        wgmma_wait<0>();
      }
      break;
    case 25:
      if (warp < 4) {
        wgmma_fence(), wgmma_m64k16<Bf16, 1, false>(d, good, good), wgmma_commit(), wgmma_wait<0>();
        d[0][0] = 1.f;
        wgmma_m64k16<Bf16, 1, false>(d, good, good);
      }
      break;
    case 26:
      if (warp < 4) wgmma_fence(), wgmma_m64k16<Bf16, 1, false>(d, good ^ 1ull << 49, good);
      break;
    case 27:
      if (warp < 4) {
        wgmma_fence(), wgmma_m64k16<Bf16, 1, false>(d, good, good), wgmma_commit();
        wgmma_m64k16<Bf16, 1, false>(other, good, good), wgmma_wait<0>();
      }
      break;
    case 28:
      if (first) mbarrier_wait(base, 0);
      if (threadIdx.x == 32) {
        for (int i = 0; i < 4; i++) mbarrier_arrive(base);
      }
      break;
    case 29:
      if (warp == 0) movmatrix_trans(threadIdx.x), barrier_sync_or(1, 48, true);
      break;
    case 30:
      if (first) {
        movmatrix_trans(1);
      } else {
        movmatrix_trans(2);
      }
      break;
    case 31:
      if (warp == 0) {
        barrier_sync_or(1, 64, true);
      } else if (warp == 1) {
        barrier_sync(1, 64);
      }
      break;
  }
  for (int i = 0; i < 4; i++) ((volatile float*)p.out)[0] = d[0][i] + other[0][i];
}

// -- clusters of two blocks

// In: a uint4 for each of the 64 threads of each block, in each round. The blocks send each other theirs, and each thread writes what the
// other block's next thread has sent. arguments[0]: rounds; [1]: what is wrong.
extern "C" __global__ void trade(const VerifyParams p) {
  KDTREE_DYNAMIC_SHARED(shared);
  const int rounds = p.arguments[0], fault = p.arguments[1], block = blockIdx.x % 2, thread = threadIdx.x;
  const unsigned there = shared_address(shared), read = there + 8, other = map_address(there, block ^ 1);
  if (thread == 0) mbarrier_init(there, 1), mbarrier_init(read, 64), mbarrier_fence_init();
  if (fault != 5) cluster_arrive(), cluster_wait();
  for (int round = 0; round < rounds; round++) {
    const int first = (round * gridDim.x + blockIdx.x) * 64;
    if (thread == 0) mbarrier_arrive_expecting(there, fault == 3 ? 63 * 16 : 64 * 16);
    if (fault != 2) mbarrier_wait(read, (round & 1) ^ 1);
    const uint4 sent = ((const uint4*)p.in)[first + thread];
    if (fault == 6) {
      *(uint4*)(shared + 128 + thread * 16) = sent;  // where the other block's go
    } else {
      store_async(other + 128 + thread * 16, sent, other);
    }
    if (fault != 1) mbarrier_wait(there, round & 1);
    if (fault == 4) mbarrier_arrive_remote(other + 8);
    ((uint4*)p.out)[first + thread] = *(const uint4*)(shared + 128 + (thread + 1) % 64 * 16);
    if (fault != 4) mbarrier_arrive_remote(other + 8);
  }
  if (fault == 5) return;
  cluster_arrive(), cluster_wait();
}

// out: whether a phase was complete, asked before and after its arrivals, and after they have come and a copy is on its way.
extern "C" __global__ void tests_of_a_phase(const VerifyParams p) {
  KDTREE_DYNAMIC_SHARED(shared);
  const unsigned mbarrier = shared_address(shared);
  if (threadIdx.x == 0) mbarrier_init(mbarrier, 1), mbarrier_fence_init();
  __syncthreads();
  if (threadIdx.x != 0) return;
  int* const out = (int*)p.out;
  out[0] = mbarrier_test(mbarrier, 1);  // the one before the first
  out[1] = mbarrier_test(mbarrier, 0);
  mbarrier_arrive(mbarrier);
  out[2] = mbarrier_test(mbarrier, 0);
  cp_async_16(mbarrier + 16, p.in, 16);
  cp_async_mbarrier_arrive(mbarrier);
  out[3] = mbarrier_test(mbarrier, 1);
  out[4] = 0;
  while (!mbarrier_test(mbarrier, 1)) out[4]++;
  out[5] = *(const int*)(shared + 16);
}

// arguments[0] says which misuse.
extern "C" __global__ void misuse_of_clusters(const VerifyParams p) {
  KDTREE_DYNAMIC_SHARED(shared);
  const int block = blockIdx.x % 2;
  const unsigned base = shared_address(shared), other = map_address(base, block ^ 1);
  if (threadIdx.x == 0) mbarrier_init(base, 1), mbarrier_fence_init();
  cluster_arrive(), cluster_wait();
  const bool first = threadIdx.x == 0;
  switch (p.arguments[0]) {
    case 100:
      if (first) map_address(base, 2);
      break;
    case 101:
      if (first) store_async(base + 16, 1u, base);
      break;
    case 102:
      if (first) store_async(other + 16, 1u, base);
      break;
    case 103:
      if (first) mbarrier_arrive_remote(base);
      break;
    case 104:
      if (first) mbarrier_arrive(other);
      break;
    case 105:
      if (first) store_async(other + 20, make_uint2(1, 2), other);
      break;
    case 106:
      if (first) mbarrier_arrive_remote(other + 8);
      break;
    case 107:
      cluster_wait();
      break;
    case 108:
      cluster_arrive(), cluster_arrive();
      break;
    case 109:
      if (block == 0) cluster_arrive(), cluster_wait();
      break;
    case 110:
      if (first) mbarrier_arrive_expecting(base, -1);
      break;
    case 111:
      if (first && block == 0) mbarrier_arrive_expecting(base, 4), mbarrier_wait(base, 0);
      break;
    case 112:
      if (first) mbarrier_test(base, 2);
      break;
  }
  ((volatile int*)p.out)[0] = 1;
}

// For the clock: arguments[0] wgmmas of 64 x 72.
extern "C" __global__ void busy(const VerifyParams p) {
  KDTREE_DYNAMIC_SHARED(shared);
  unsigned char* s_tile = aligned(shared);
  for (int i = threadIdx.x; i < 8192 + 9216; i += 128) s_tile[i] = 0;
  fence_proxy_async();
  __syncthreads();
  float d[9][4] = {};
  for (int i = 0; i < p.arguments[0]; i += 4) {
    wgmma_fence();
    for (int step = 0; step < 4; step++) wgmma_m64k16<Bf16, 9, false>(d, tile_of(s_tile, step), tile_of(s_tile + 8192, step));
    wgmma_commit();
    wgmma_wait<0>();
  }
  ((float*)p.out)[threadIdx.x] = d[0][0];
}

// clang-format off
#define KDTREE_HOST_MULTIPLY(X, tiles) \
  X(wgmma_bf16_##tiles) X(wgmma_fp16_##tiles) X(wgmma_bf16_##tiles##_transposed) X(wgmma_fp16_##tiles##_transposed)
#define KDTREE_FOR_EACH_KERNEL(X)                                                                               \
  KDTREE_HOST_MULTIPLY(X, 1) KDTREE_HOST_MULTIPLY(X, 2) KDTREE_HOST_MULTIPLY(X, 5) KDTREE_HOST_MULTIPLY(X, 8)   \
  KDTREE_HOST_MULTIPLY(X, 9) X(movmatrix) X(vote) X(copy_pipeline) X(wgmma_pipeline) X(wgmma_of_stores) \
  X(parities) X(misuse) X(busy) X(trade, 2) X(tests_of_a_phase) X(misuse_of_clusters, 2)
// clang-format on
