// Little kernels that use one device primitive each, rightly or, if an argument says so, wrongly. For tests/test_host_primitives.py.

struct Bf16 {
  static constexpr bool is_bf16 = true;
};
struct Fp16 {
  static constexpr bool is_bf16 = false;
};

#include "host/device.h"
#include "host_params.h"

// What CUDA's overloads return.
static_assert(std::is_same_v<decltype(min(1, 2)), int> && std::is_same_v<decltype(max(1, 2u)), unsigned>);
static_assert(std::is_same_v<decltype(min(1ll, 2ll)), long long> && std::is_same_v<decltype(max(1.f, 2.f)), float>);
static_assert(sizeof(float4) == 16 && alignof(float4) == 16 && alignof(int4) == 16 && alignof(float2) == 8 && alignof(uint2) == 8);

// -- what they compute

// Each thread writes its indices and sizes, and the address of shared memory.
extern "C" __global__ void __launch_bounds__(64, 1) indices(const VerifyParams p) {
  KDTREE_DYNAMIC_SHARED(shared);
  launch_dependents(), wait_for_kernel_before();  // nothing: here a stream has one kernel at a time
  const int block = blockIdx.y * gridDim.x + blockIdx.x;
  int* out = (int*)p.out + (block * blockDim.x + threadIdx.x) * 8;
  out[0] = threadIdx.x, out[1] = blockIdx.x, out[2] = blockIdx.y, out[3] = blockDim.x, out[4] = gridDim.x, out[5] = gridDim.y;
  out[6] = shared_address(shared), out[7] = min(3, max(-4, -5));
}

// In: 32 offsets, then the contents of shared memory. Out: four and four registers a lane.
extern "C" __global__ void ldmatrix(const VerifyParams p) {
  KDTREE_DYNAMIC_SHARED(shared);
  for (int i = threadIdx.x; i < p.arguments[0]; i += 32) shared[i] = p.in[128 + i];
  __syncthreads();
  const unsigned address = shared_address(shared) + __ldg((const int*)p.in + threadIdx.x);
  unsigned r[4], transposed[4];
  ldmatrix_x4(r, address);
  ldmatrix_x4_trans(transposed, address);
  unsigned* out = (unsigned*)p.out + threadIdx.x * 8;
  for (int i = 0; i < 4; i++) out[i] = r[i], out[4 + i] = transposed[i];
}

// In, a lane: a (4 words), b (2), c (4). Out: c.
template <class Element>
__device__ __forceinline__ void multiply(const VerifyParams& p) {
  const unsigned* in = (const unsigned*)p.in + threadIdx.x * 10;
  unsigned a[4];
  float c[4];
  for (int i = 0; i < 4; i++) a[i] = in[i], c[i] = __uint_as_float(in[6 + i]);
  mma_m16n8k16<Element>(c, a, in[4], in[5]);
  for (int i = 0; i < 4; i++) ((float*)p.out)[threadIdx.x * 4 + i] = c[i];
}
extern "C" __global__ void mma_bf16(const VerifyParams p) { multiply<Bf16>(p); }
extern "C" __global__ void mma_fp16(const VerifyParams p) { multiply<Fp16>(p); }

// In: floats. Out, for each: bits, the pair (x, -x), its low and its high half as floats, 2^x, 1 / x.
template <class Element>
__device__ __forceinline__ void convert(const VerifyParams& p) {
  for (int i = threadIdx.x; i < p.arguments[0]; i += blockDim.x) {
    const float x = ((const float*)p.in)[i];
    unsigned* out = (unsigned*)p.out + i * 6;
    const unsigned pair = pack2<Element>(x, -x);
    const float2 back = unpack2<Element>(pair);
    out[0] = to_bits<Element>(x), out[1] = pair, out[2] = (unsigned)__float_as_int(back.x), out[3] = (unsigned)__float_as_int(back.y);
    out[4] = (unsigned)__float_as_int(exp2_approx(x)), out[5] = (unsigned)__float_as_int(reciprocal_approx(x));
  }
}
extern "C" __global__ void convert_bf16(const VerifyParams p) { convert<Bf16>(p); }
extern "C" __global__ void convert_fp16(const VerifyParams p) { convert<Fp16>(p); }

// In: an int a thread. Out: what each collective makes of it.
extern "C" __global__ void collectives(const VerifyParams p) {
  const int lane = threadIdx.x & 31, x = ((const int*)p.in)[threadIdx.x];
  int* out = (int*)p.out + threadIdx.x * 11;
  out[0] = __shfl_sync(~0u, x, lane * 7);
  out[1] = __shfl_xor_sync(~0u, x, 5);
  out[2] = __shfl_up_sync(~0u, x, 3);
  out[3] = (int)__shfl_xor_sync(~0u, (float)x, 16);
  out[4] = (int)__shfl_sync(~0u, (unsigned)x, 31);
  const unsigned votes = __ballot_sync(~0u, x & 1);
  out[5] = (int)votes;
  out[6] = __ffs((int)votes);
  out[7] = __popc(votes);
  out[8] = __reduce_add_sync(~0u, x - 500);
  out[9] = __reduce_max_sync(~0u, x - 1000);
  out[10] = (int)__reduce_or_sync(~0u, (unsigned)x << 22);
}

// -- who must wait for whom

// Each block shows what it finds in shared memory, then leaves something there.
extern "C" __global__ void fresh_memory(const VerifyParams p) {
  KDTREE_DYNAMIC_SHARED(shared);
  int* s_value = (int*)shared;
  ((int*)p.out)[blockIdx.x * blockDim.x + threadIdx.x] = s_value[threadIdx.x];
  s_value[threadIdx.x] = 3;
}

// Reverses the block's numbers through shared memory. arguments[0]: without the barrier.
extern "C" __global__ void reverse_block(const VerifyParams p) {
  KDTREE_DYNAMIC_SHARED(shared);
  float* s_value = (float*)shared;
  s_value[threadIdx.x] = ((const float*)p.in)[threadIdx.x];
  if (!p.arguments[0]) __syncthreads();
  ((float*)p.out)[threadIdx.x] = s_value[blockDim.x - 1 - threadIdx.x];
}

// The same within each warp.
extern "C" __global__ void reverse_warp(const VerifyParams p) {
  KDTREE_DYNAMIC_SHARED(shared);
  float* s_value = (float*)shared;
  s_value[threadIdx.x] = ((const float*)p.in)[threadIdx.x];
  if (!p.arguments[0]) __syncwarp();
  ((float*)p.out)[threadIdx.x] = s_value[threadIdx.x ^ 31];
}

// Two halves of the block; each sums its own numbers over several rounds, with a barrier of its own. arguments[0] leaves out the barrier
// before the reads, arguments[1] that after them.
extern "C" __global__ void two_groups(const VerifyParams p) {
  KDTREE_DYNAMIC_SHARED(shared);
  const int half = blockDim.x / 2, group = threadIdx.x / half, member = threadIdx.x % half;
  float* s_value = (float*)shared + group * half;
  float sum = 0.f;
  for (int round = 0; round < 4; round++) {
    s_value[member] = ((const float*)p.in)[round * blockDim.x + threadIdx.x];
    if (!p.arguments[0]) barrier_sync(1 + group, half);
    for (int i = 0; i < half; i++) sum += s_value[i];
    if (!p.arguments[1]) barrier_sync(1 + group, half);
  }
  ((float*)p.out)[threadIdx.x] = sum;
}

// Tiles of 16 bytes a thread through two stages, each thread reading what its neighbour copied: out = in, rotated by one thread within a
// tile. arguments[0] leaves out the wait, arguments[1] the barrier after it; without the barrier a copy may also start too early.
extern "C" __global__ void pipeline(const VerifyParams p) {
  KDTREE_DYNAMIC_SHARED(shared);
  const int threads = blockDim.x, tiles = p.arguments[2], neighbour = (threadIdx.x + 1) % threads;
  const auto copy = [&](int tile) {
    if (tile < tiles)
      cp_async_16(shared_address(shared + (tile % 2 * threads + threadIdx.x) * 16), p.in + (tile * threads + threadIdx.x) * 16, 16);
    cp_async_commit();
  };
  copy(0);
  for (int tile = 0; tile < tiles; tile++) {
    if (!p.arguments[0]) cp_async_wait<0>();
    if (!p.arguments[1]) __syncthreads();
    copy(tile + 1);
    const int4 value = *(const int4*)(shared + (tile % 2 * threads + neighbour) * 16);
    ((int4*)p.out)[tile * threads + threadIdx.x] = value;
    __syncwarp();
  }
}

// One thread after another: three groups of one copy; the second reads nothing. Out: the 48 bytes after each of four steps.
extern "C" __global__ void copy_groups(const VerifyParams p) {
  KDTREE_DYNAMIC_SHARED(shared);
  if (threadIdx.x != 0) return;
  for (int i = 0; i < 48; i++) shared[i] = 1;
  const unsigned address = shared_address(shared);
  const auto show = [&](int step) {
    for (int i = 0; i < 48; i++) p.out[step * 48 + i] = shared[i];
  };
  cp_async_16(address, p.in, 16);
  cp_async_commit();
  cp_async_16(address + 16, nullptr, 0);
  cp_async_commit();
  cp_async_16(address + 32, p.in + 32, 16);
  if (p.arguments[0]) show(0);
  cp_async_wait<1>();
  if (p.arguments[0]) show(1);
  cp_async_wait<0>();
  if (p.arguments[0]) show(2);
  cp_async_commit();
  ((unsigned char*)p.in)[32] = 200;  // it is only now that the third copy reads its source
  cp_async_wait<0>();
  show(3);
}

// A copy, then ldmatrix of its destination; arguments[0] leaves out the wait.
extern "C" __global__ void copy_then_ldmatrix(const VerifyParams p) {
  KDTREE_DYNAMIC_SHARED(shared);
  const unsigned address = shared_address(shared) + threadIdx.x * 16;
  cp_async_16(address, p.in + threadIdx.x * 16, 16);
  cp_async_commit();
  if (!p.arguments[0]) cp_async_wait<0>();
  __syncwarp();
  unsigned r[4];
  ldmatrix_x4(r, address);
  for (int i = 0; i < 4; i++) ((unsigned*)p.out)[threadIdx.x * 4 + i] = r[i];
}

// Warp 0 reads rows with ldmatrix that another warp copies next; arguments[0] leaves out the barrier in between.
extern "C" __global__ void ldmatrix_then_copy(const VerifyParams p) {
  KDTREE_DYNAMIC_SHARED(shared);
  unsigned r[4] = {0, 0, 0, 0};
  const unsigned address = shared_address(shared) + threadIdx.x % 32 * 16;
  if (threadIdx.x < 32) ldmatrix_x4(r, address);
  if (!p.arguments[0]) __syncthreads();
  if (threadIdx.x >= 32) cp_async_16(address, p.in, 16);
  cp_async_commit();
  cp_async_wait<0>();
  if (threadIdx.x < 32) ((unsigned*)p.out)[threadIdx.x] = r[0] & r[1] & r[2] & r[3];
}

// The first block leaves without waiting for its copies; the second must hear nothing of them.
extern "C" __global__ void abandoned_copies(const VerifyParams p) {
  KDTREE_DYNAMIC_SHARED(shared);
  const unsigned address = shared_address(shared) + threadIdx.x * 16;
  if (blockIdx.x == 0) {
    cp_async_16(address, p.in, 16);
    cp_async_commit();
    return;
  }
  ((int4*)shared)[threadIdx.x] = make_int4(5, 5, 5, 5);
  cp_async_wait<0>();
  __syncwarp();
  unsigned r[4];
  ldmatrix_x4(r, address);
  for (int i = 0; i < 4; i++) ((unsigned*)p.out)[threadIdx.x * 4 + i] = r[i];
}

// All lanes read one number, then the last lane changes it; arguments[0] leaves out the barrier in between.
extern "C" __global__ void read_then_write(const VerifyParams p) {
  KDTREE_DYNAMIC_SHARED(shared);
  float* s_value = (float*)shared;
  if (threadIdx.x == 0) *s_value = 7.f;
  __syncwarp();
  ((float*)p.out)[threadIdx.x] = *s_value;
  if (!p.arguments[0]) __syncwarp();
  if (threadIdx.x == 31) *s_value = 8.f;
}

// Warps 0 and 1 meet at a barrier after a store, then warps 2 and 3 at the same one before a load: they have not heard of the store.
extern "C" __global__ void barrier_used_again(const VerifyParams p) {
  KDTREE_DYNAMIC_SHARED(shared);
  if (threadIdx.x == 0) *(float*)shared = 7.f;
  barrier_sync(1, 64);
  if (threadIdx.x == 64) *(float*)p.out = *(float*)shared;
}

// Every lane has a 16-bit word, next to its neighbour's, to itself: nobody has to wait.
extern "C" __global__ void own_halves(const VerifyParams p) {
  KDTREE_DYNAMIC_SHARED(shared);
  unsigned short* s_own = (unsigned short*)shared + threadIdx.x;
  *s_own = to_bits<Bf16>(1.f);
  ((float*)p.out)[threadIdx.x] = unpack2<Bf16>(*s_own).x;
  *s_own = 0;
}

// -- what is refused

// arguments[0] says which primitive, arguments[1] which offset thread 5 gives it, arguments[2] the size or the mask.
extern "C" __global__ void bad_argument(const VerifyParams p) {
  KDTREE_DYNAMIC_SHARED(shared);
  const unsigned base = shared_address(shared), address = threadIdx.x == 5 ? base + p.arguments[1] : base;
  unsigned r[4];
  switch (p.arguments[0]) {
    case 0:
      shared_address(shared + (threadIdx.x == 5 ? p.arguments[1] : 0));
      break;
    case 1:
      ldmatrix_x4(r, address);
      break;
    case 2:
      ldmatrix_x4_trans(r, address);
      break;
    case 3:
      __reduce_or_sync((unsigned)p.arguments[2], 1);
      break;
    case 4:
      if (threadIdx.x == 5) cp_async_16(address, p.in, p.arguments[2]);
      break;
    case 5:
      if (threadIdx.x == 5) cp_async_16(base, p.in + p.arguments[1], 16);
      break;
    case 6:
      __shfl_sync((unsigned)p.arguments[2], 1, 0);
      break;
    case 7:
      __ballot_sync((unsigned)p.arguments[2], 1);
      break;
    case 8:
      __syncwarp((unsigned)p.arguments[2]);
      break;
    case 9:
      barrier_sync(p.arguments[1], p.arguments[2]);
      break;
    case 10:
      barrier_sync(1 + threadIdx.x % 2, blockDim.x);
      break;
    case 11:
      shared[p.arguments[1]] = 1;
      break;
    case 12:
      *(float4*)(shared + p.arguments[1]) = make_float4(0.f, 0.f, 0.f, 0.f);
      break;
    case 13:
      __reduce_add_sync((unsigned)p.arguments[2], 1);
      break;
    case 14:
      __reduce_max_sync((unsigned)p.arguments[2], 1);
      break;
  }
}

// arguments[0] says how the threads miss each other.
extern "C" __global__ void never_meet(const VerifyParams p) {
  const int warp = threadIdx.x / 32;
  switch (p.arguments[0]) {
    case 0:  // one warp has returned
      if (warp == 1) return;
      __syncthreads();
      break;
    case 1:  // one warp waits elsewhere
      barrier_sync(warp == 1 ? 3 : 2, blockDim.x);
      break;
    case 2:  // not enough come
      if (warp == 0) barrier_sync(1, 64);
      break;
    case 3:  // different counts
      barrier_sync(1, warp == 0 ? 32 * 2 : 32 * 3);
      break;
    case 4:  // lanes of one warp at different collectives
      if (threadIdx.x % 2) {
        __syncwarp();
      } else {
        __shfl_sync(~0u, 1, 0);
      }
      break;
    case 5:  // lanes of one warp at the same collective in two places
      if (threadIdx.x < 3) {
        __ballot_sync(~0u, 1);
      } else {
        __ballot_sync(~0u, 0);
      }
      break;
    case 6:  // a lane has returned
      if ((int)threadIdx.x == p.arguments[1]) return;
      __shfl_xor_sync(~0u, 1, 1);
      break;
    case 7:  // __syncthreads in two places
      if (warp == 0) {
        __syncthreads();
      } else {
        __syncthreads();
      }
      break;
  }
}

// -- the order

// Every thread adds its number to a list, twelve times, with a collective in between. Out: the length, then block * 1000 + thread.
extern "C" __global__ void order(const VerifyParams p) {
  int* out = (int*)p.out;
  for (int step = 0; step < 12; step++) {
    out[1 + out[0]++] = (int)(blockIdx.x * 1000 + threadIdx.x);
    __shfl_sync(~0u, 0, 0);
  }
}

// For the clock: arguments[0] rounds of what a tile of the real kernel does.
extern "C" __global__ void busy(const VerifyParams p) {
  KDTREE_DYNAMIC_SHARED(shared);
  const unsigned address = shared_address(shared) + threadIdx.x % 32 * 16;
  float c[5][4] = {};
  for (int round = 0; round < p.arguments[0]; round++) {
    for (int step = 0; step < 18; step++) {
      unsigned r[4];
      ldmatrix_x4(r, address);
      for (int n = 0; n < 5; n++) mma_m16n8k16<Bf16>(c[n], r, r[0], r[1]);
    }
    __syncthreads();
  }
  ((float*)p.out)[threadIdx.x] = c[0][0];
}

// clang-format off
#define KDTREE_FOR_EACH_KERNEL(X)                                                                               \
  X(indices) X(ldmatrix) X(mma_bf16) X(mma_fp16) X(convert_bf16) X(convert_fp16) X(collectives)                 \
  X(fresh_memory) X(reverse_block) X(reverse_warp) X(two_groups) X(pipeline) X(copy_groups)                     \
  X(copy_then_ldmatrix) X(ldmatrix_then_copy) X(abandoned_copies) X(read_then_write) X(own_halves)              \
  X(barrier_used_again) X(bad_argument) X(never_meet) X(order) X(busy)
// clang-format on
