// The device primitives of the kernel for g++: the same names, the same meaning, on the threads of block.h.
// The kernel's source includes this in place of its PTX versions; `Element` is one of its tags, which say is_bf16.
// Each primitive checks what the hardware takes for granted. They know the line of the kernel they are called from, for the messages.
// Build with -std=c++17 -fno-strict-aliasing: kernels look at shared memory through pointers of several types.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "block.h"
#include "launch.h"
#include "numbers.h"
#include "vectors.h"

#define __global__
#define __device__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

#define threadIdx (host::thread_index())
#define blockIdx (host::block_index())
#define blockDim (host::block_size())
#define gridDim (host::grid_size())

#define KDTREE_DYNAMIC_SHARED(name) unsigned char* const name = host::current->block->shared().data()
// Its 32-bit address is a multiple of `bytes`; no pointer is.
#define KDTREE_ALIGNED_DYNAMIC_SHARED(name, bytes) unsigned char* const name = host::current->block->shared().aligned_data(bytes)

// The line of the call, as a default argument.
#define KDTREE_HOST_LINE int line = __builtin_LINE()

namespace host {

inline uint3 thread_index() { return {static_cast<unsigned>(current->index), 0, 0}; }
inline uint3 block_index() { return {static_cast<unsigned>(current->block->x()), static_cast<unsigned>(current->block->y()), 0}; }
inline uint3 block_size() { return {static_cast<unsigned>(current->block->shape().threads), 1, 1}; }
inline uint3 grid_size() {
  const BlockShape& shape = current->block->shape();
  return {static_cast<unsigned>(shape.grid_x), static_cast<unsigned>(shape.grid_y), 1};
}

}  // namespace host

// -- shared memory and cp.async

inline unsigned shared_address(const void* pointer, KDTREE_HOST_LINE) {
  host::Block& block = *host::current->block;
  const long long offset = block.shared().offset_of(pointer);
  // One past the end is an address, too.
  if (!block.shared().contains(offset, 0)) block.fail_outside({"shared_address", line}, offset, 0);
  return block.shared().address_of(offset);
}

inline void cp_async_16(unsigned dst_address, const void* source, int source_bytes, KDTREE_HOST_LINE) {
  host::Block& block = *host::current->block;
  const host::Site site{"cp_async_16", line};
  const long long offset = block.checked_offset(site, dst_address, 16);
  if (source_bytes != 0 && source_bytes != 16) block.fail(site, "%d bytes: must be 0 or 16", source_bytes);
  if (source_bytes != 0 && reinterpret_cast<std::uintptr_t>(source) % 16 != 0)
    block.fail(site, "source %p is not a multiple of 16", source);
  host::fill_bytes(block.at(offset), host::kPoison, 16);
  block.note_write(host::AccessKind::kCopyInFlight, line, offset, 16);
  host::current->copies.start({offset, source, source_bytes == 0, line});
}

inline void cp_async_commit() { host::current->copies.commit(); }

// Waits until no more than the newest PENDING groups of this thread are on their way.
template <int PENDING>
void cp_async_wait() {
  host::Block& block = *host::current->block;
  host::current->copies.wait(PENDING, [&block](const host::AsyncCopy& copy) {
    block.note_write(host::AccessKind::kCopyLanded, copy.line, copy.offset, 16);
    if (copy.zeros) {
      host::fill_bytes(block.at(copy.offset), 0, 16);
    } else {
      host::copy_bytes(block.at(copy.offset), copy.source, 16);
    }
  });
}

inline void keep_in_register(const unsigned char*&) {}
inline void keep_in_register(int&) {}

// -- ldmatrix and mma

namespace host {

// Lanes 8i .. 8i+7 name the eight rows, of eight 16-bit elements, of matrix i. Lane l receives the elements 2(l%4) and 2(l%4)+1 of row l/4,
// or, transposed, of column l/4; the first in the low half.
template <bool TRANSPOSED, int COUNT>
void load_matrices(Site site, unsigned (&r)[COUNT], unsigned address) {
  Block& block = *current->block;
  struct Operand {
    unsigned* r;
    const unsigned char* row;
  } operand{r, nullptr};
  if (current->lane < COUNT * 8) {  // the addresses of other lanes are not looked at
    const long long offset = block.checked_offset(site, address, 16);
    block.note_read(AccessKind::kLdmatrix, site.line, offset, 16);
    operand.row = block.at(offset);
  }
  block.meet(site, operand, [](const Operands<Operand>& lanes) {
    for (int i = 0; i < COUNT; ++i) {
      std::uint16_t matrix[8][8];
      for (int row = 0; row < 8; ++row) copy_bytes(matrix[row], lanes[i * 8 + row].row, 16);
      for (int lane = 0; lane < kLanes; ++lane) {
        const int major = lane / 4, minor = lane % 4 * 2;
        const unsigned lo = TRANSPOSED ? matrix[minor][major] : matrix[major][minor];
        const unsigned hi = TRANSPOSED ? matrix[minor + 1][major] : matrix[major][minor + 1];
        lanes[lane].r[i] = lo | hi << 16;
      }
    }
  });
}

}  // namespace host

inline void ldmatrix_x4(unsigned (&r)[4], unsigned address, KDTREE_HOST_LINE) {
  host::load_matrices<false>({"ldmatrix_x4", line}, r, address);
}
inline void ldmatrix_x2_trans(unsigned (&r)[2], unsigned address, KDTREE_HOST_LINE) {
  host::load_matrices<true>({"ldmatrix_x2_trans", line}, r, address);
}
inline void ldmatrix_x4_trans(unsigned (&r)[4], unsigned address, KDTREE_HOST_LINE) {
  host::load_matrices<true>({"ldmatrix_x4_trans", line}, r, address);
}

namespace host {

inline void multiply_add(float (&c)[16][8], const float (&a)[16][16], const float (&b)[16][8]) {
  typedef float Row __attribute__((vector_size(16), aligned(4), may_alias));  // half a row of b and c
  for (int row = 0; row < 16; ++row) {
    Row lo = *reinterpret_cast<const Row*>(&c[row][0]), hi = *reinterpret_cast<const Row*>(&c[row][4]);
    for (int k = 0; k < 16; ++k) {
      lo += a[row][k] * *reinterpret_cast<const Row*>(&b[k][0]);
      hi += a[row][k] * *reinterpret_cast<const Row*>(&b[k][4]);
    }
    *reinterpret_cast<Row*>(&c[row][0]) = lo, *reinterpret_cast<Row*>(&c[row][4]) = hi;
  }
}

}  // namespace host

// c (16 x 8) += a (16 x 16) * b (16 x 8), in float32. With group = lane / 4 and quad = lane % 4, a lane holds
//   a[i]  row group + 8 * (i % 2), columns 2 * quad + 8 * (i / 2) and the next       b0, b1  column group, rows 2 * quad (+ 8) and the next
//   c[i]  row group + 8 * (i / 2), column 2 * quad + i % 2
// The products are exact; the hardware's order of the sums is not documented, and is not that of this loop.
template <class Element>
void mma_m16n8k16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, KDTREE_HOST_LINE) {
  struct Operand {
    float* c;
    const unsigned* a;
    unsigned b[2];
  } operand{c, a, {b0, b1}};
  host::current->block->meet({"mma_m16n8k16", line}, operand, [](const host::Operands<Operand>& lanes) {
    // As the registers have them, two elements a word: rows of A, columns of B.
    unsigned words_a[16][8], words_b[8][8];
    for (int lane = 0; lane < host::kLanes; ++lane) {
      const int group = lane / 4, quad = lane % 4;
      for (int i = 0; i < 4; ++i) words_a[group + i % 2 * 8][quad + i / 2 * 4] = lanes[lane].a[i];
      for (int i = 0; i < 2; ++i) words_b[group][quad + i * 4] = lanes[lane].b[i];
    }
    float a[16][16], b[16][8], c[16][8] = {};
    for (int row = 0; row < 16; ++row) {
      for (int word = 0; word < 8; ++word) a[row][2 * word] = host::to_float<Element>(words_a[row][word]);
      for (int word = 0; word < 8; ++word) a[row][2 * word + 1] = host::to_float<Element>(words_a[row][word] >> 16);
    }
    for (int column = 0; column < 8; ++column) {
      for (int word = 0; word < 8; ++word) b[2 * word][column] = host::to_float<Element>(words_b[column][word]);
      for (int word = 0; word < 8; ++word) b[2 * word + 1][column] = host::to_float<Element>(words_b[column][word] >> 16);
    }
    host::multiply_add(c, a, b);
    for (int lane = 0; lane < host::kLanes; ++lane) {
      for (int i = 0; i < 4; ++i) lanes[lane].c[i] += c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
    }
  });
}

// -- barriers

namespace host {

inline int meet_at_barrier(Site site, int id, int threads, bool value, bool same_line) {
  struct Operand {
    int id, threads;
    bool value;
  } operand{id, threads, value};
  Block& block = *current->block;
  block.meet(site, operand, [&](const Operands<Operand>& lanes) {
    bool any = false;
    for (int lane = 0; lane < kLanes; ++lane) {
      if (lanes[lane].id != id || lanes[lane].threads != threads) block.fail(site, "the lanes of a warp name different barriers or counts");
      any = any || lanes[lane].value;
    }
    block.arrive_at_barrier(site, *current->warp, id, threads, any, same_line);
  });
  return current->warp->result;
}

}  // namespace host

inline void barrier_sync(int id, int threads, KDTREE_HOST_LINE) {
  host::meet_at_barrier({"barrier_sync", line}, id, threads, false, false);
}

inline bool barrier_sync_or(int id, int threads, bool value, KDTREE_HOST_LINE) {
  return host::meet_at_barrier({"barrier_sync_or", line}, id, threads, value, true) != 0;
}

// CUDA wants all threads of the block at one and the same __syncthreads.
inline void __syncthreads(KDTREE_HOST_LINE) {
  host::meet_at_barrier({"__syncthreads", line}, 0, host::current->block->shape().threads, false, true);
}

inline void __syncwarp(unsigned mask = host::kAllLanes, KDTREE_HOST_LINE) {
  host::Block& block = *host::current->block;
  const host::Site site{"__syncwarp", line};
  if (mask != host::kAllLanes) block.fail(site, "mask %08x: only the whole warp is supported", mask);
  block.meet(site, mask, [&block](const host::Operands<unsigned>&) { block.races().synchronise_warp(host::current->warp->index); });
}

// -- shuffles and votes

namespace host {

// `source` says which lane a lane reads; outside of 0 .. 31 it keeps its own value.
template <class Value>
Value shuffle(Site site, unsigned mask, Value value, int source, int width) {
  static_assert(sizeof(Value) == 4 && std::is_arithmetic_v<Value>, "int, unsigned and float can be shuffled");
  Block& block = *current->block;
  if (mask != kAllLanes || width != kLanes) block.fail(site, "mask %08x, width %d: only the whole warp is supported", mask, width);
  struct Operand {
    Value given, taken;
    int source;
  } operand{value, value, source};
  block.meet(site, operand, [](const Operands<Operand>& lanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const int source = lanes[lane].source;
      if (source >= 0 && source < kLanes) lanes[lane].taken = lanes[source].given;
    }
  });
  return operand.taken;
}

inline unsigned ballot(Site site, unsigned mask, bool predicate) {
  Block& block = *current->block;
  if (mask != kAllLanes) block.fail(site, "mask %08x: only the whole warp is supported", mask);
  Warp& warp = *current->warp;
  block.meet(site, predicate, [&warp](const Operands<bool>& lanes) {
    unsigned votes = 0;
    for (int lane = 0; lane < kLanes; ++lane) votes |= static_cast<unsigned>(lanes[lane]) << lane;
    warp.result = static_cast<int>(votes);
  });
  return static_cast<unsigned>(warp.result);
}

}  // namespace host

template <class Value>
Value __shfl_sync(unsigned mask, Value value, int source, int width = 32, KDTREE_HOST_LINE) {
  return host::shuffle({"__shfl_sync", line}, mask, value, source & 31, width);
}
template <class Value>
Value __shfl_xor_sync(unsigned mask, Value value, int lane_mask, int width = 32, KDTREE_HOST_LINE) {
  return host::shuffle({"__shfl_xor_sync", line}, mask, value, host::current->lane ^ lane_mask, width);
}
template <class Value>
Value __shfl_up_sync(unsigned mask, Value value, unsigned delta, int width = 32, KDTREE_HOST_LINE) {
  return host::shuffle({"__shfl_up_sync", line}, mask, value, host::current->lane - static_cast<int>(delta), width);
}

namespace host {

// One number made of all lanes', for all of them.
template <class Combine>
int reduce(Site site, unsigned mask, int value, Combine combine) {
  Block& block = *current->block;
  if (mask != kAllLanes) block.fail(site, "mask %08x: only the whole warp is supported", mask);
  Warp& warp = *current->warp;
  block.meet(site, value, [&warp, combine](const Operands<int>& lanes) {
    warp.result = lanes[0];
    for (int lane = 1; lane < kLanes; ++lane) warp.result = combine(warp.result, lanes[lane]);
  });
  return warp.result;
}

}  // namespace host

inline int __reduce_max_sync(unsigned mask, int value, KDTREE_HOST_LINE) {
  return host::reduce({"__reduce_max_sync", line}, mask, value, [](int a, int b) { return a > b ? a : b; });
}
// Overflow is the sanitizer's to find: CUDA's sum wraps, the kernel's must not.
inline int __reduce_add_sync(unsigned mask, int value, KDTREE_HOST_LINE) {
  return host::reduce({"__reduce_add_sync", line}, mask, value, [](int a, int b) { return a + b; });
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value, KDTREE_HOST_LINE) {
  return static_cast<unsigned>(host::reduce({"__reduce_or_sync", line}, mask, static_cast<int>(value), [](int a, int b) { return a | b; }));
}

inline unsigned __ballot_sync(unsigned mask, int predicate, KDTREE_HOST_LINE) {
  return host::ballot({"__ballot_sync", line}, mask, predicate != 0);
}

// -- kernels of a stream: here, one after the other

inline void launch_dependents() {}
inline void wait_for_kernel_before() {}

// -- arithmetic

// As ex2.approx.ftz: a result that is not a normal number is 0.
inline float exp2_approx(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.f : y;
}

// rcp.approx.ftz may be a unit in the last place off, this one is.
inline float reciprocal_approx(float x) { return std::nextafter(1.f / x, 0.f); }

template <class Element>
unsigned short to_bits(float x) {
  return Element::is_bf16 ? host::bf16_of(x) : host::fp16_of(x);
}
template <class Element>
unsigned pack2(float lo, float hi) {
  return to_bits<Element>(lo) | static_cast<unsigned>(to_bits<Element>(hi)) << 16;
}
template <class Element>
float2 unpack2(unsigned packed) {
  return {host::to_float<Element>(packed), host::to_float<Element>(packed >> 16)};
}

inline unsigned multiply_fp16x2(unsigned a, unsigned b) {
  const float lo = host::float_of_fp16(a & 0xffff) * host::float_of_fp16(b & 0xffff);
  const float hi = host::float_of_fp16(a >> 16) * host::float_of_fp16(b >> 16);
  return host::fp16_of(lo) | static_cast<unsigned>(host::fp16_of(hi)) << 16;
}

inline unsigned short fp16x2_to_e4m3x2(unsigned pair) {
  return static_cast<unsigned short>(host::e4m3_of(host::float_of_fp16(pair & 0xffff)) | host::e4m3_of(host::float_of_fp16(pair >> 16)) << 8);
}
inline unsigned e4m3x2_to_fp16x2(unsigned short pair) {
  return host::fp16_of(host::float_of_e4m3(pair)) | static_cast<unsigned>(host::fp16_of(host::float_of_e4m3(pair >> 8u))) << 16;
}
inline unsigned subtract_fp16x2(unsigned a, unsigned b) {
  const float lo = host::float_of_fp16(a & 0xffff) - host::float_of_fp16(b & 0xffff);
  const float hi = host::float_of_fp16(a >> 16) - host::float_of_fp16(b >> 16);
  return host::fp16_of(lo) | static_cast<unsigned>(host::fp16_of(hi)) << 16;
}
inline unsigned nan_if_infinite(unsigned pair) {
  for (const unsigned half : {0x7fffu, 0x7fff0000u})
    if ((pair & half) == (0x7c007c00u & half)) pair |= half;
  return pair;
}
inline unsigned max_u16x2(unsigned a, unsigned b) {
  const unsigned lo = (a & 0xffff) > (b & 0xffff) ? a : b, hi = a >> 16 > b >> 16 ? a : b;
  return (lo & 0xffff) | (hi & 0xffff0000);
}
// Byte i of the result is the one of y:x that the i-th nibble of the selector names; its highest bit, a sign's copy, is not supported.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(y) << 32 | x;
  unsigned result = 0;
  for (unsigned i = 0; i < 4; ++i) result |= static_cast<unsigned>(bytes >> (selector >> i * 4 & 7) * 8 & 0xff) << i * 8;
  return result;
}

inline int __float_as_int(float x) { return static_cast<int>(host::bits_of(x)); }
inline float __int_as_float(int x) { return host::float_of(static_cast<unsigned>(x)); }
inline float __uint_as_float(unsigned x) { return host::float_of(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }

template <class Value>
Value __ldg(const Value* pointer) {
  return *pointer;
}
template <class Value>
Value __ldcs(const Value* pointer) {
  return *pointer;
}

// CUDA's overloads and no others: what is ambiguous there is ambiguous here.
#define KDTREE_HOST_MIN_MAX(Result, A, B)                                                                     \
  inline Result min(A a, B b) {                                                                               \
    return static_cast<Result>(a) < static_cast<Result>(b) ? static_cast<Result>(a) : static_cast<Result>(b); \
  }                                                                                                           \
  inline Result max(A a, B b) { return static_cast<Result>(a) < static_cast<Result>(b) ? static_cast<Result>(b) : static_cast<Result>(a); }
#define KDTREE_HOST_MIN_MAX_INTEGERS(Signed)                             \
  KDTREE_HOST_MIN_MAX(Signed, Signed, Signed)                            \
  KDTREE_HOST_MIN_MAX(unsigned Signed, unsigned Signed, unsigned Signed) \
  KDTREE_HOST_MIN_MAX(unsigned Signed, Signed, unsigned Signed)          \
  KDTREE_HOST_MIN_MAX(unsigned Signed, unsigned Signed, Signed)
KDTREE_HOST_MIN_MAX_INTEGERS(int)
KDTREE_HOST_MIN_MAX_INTEGERS(long)
KDTREE_HOST_MIN_MAX_INTEGERS(long long)
#undef KDTREE_HOST_MIN_MAX_INTEGERS
#undef KDTREE_HOST_MIN_MAX
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }

#include "hopper.h"
