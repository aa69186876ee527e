// wgmma as one warp sees it: where the descriptors say that the operands lie, the wgmmas that are on their way, and the accumulators that
// they own until they are waited for. A wgmma reads its operands and changes its accumulators as late as the hardware may: when the warp
// waits for its group. Until then the accumulators are NaN. Each warp does its own 16 of the 64 rows, as in the hardware.
//
// The four layouts are the "canonical layouts" of CUTLASS, include/cute/atom/mma_traits_sm90_gmma.hpp above make_gmma_desc (T: the elements
// of 16 bytes, here 8), and the descriptor's fields those of GmmaDescriptor in include/cute/arch/mma_sm90_desc.hpp:
//   K-major,  none    Swizzle<0,4,3> o ((8,m),(T,2)):((1T,SBO),(1,LBO))
//   K-major,  128 B   Swizzle<3,4,3> o ((8,m),(T,2)):((8T,SBO),(1,T))
//   MN-major, none    Swizzle<0,4,3> o ((T,1,m),(8,k)):((1,T,SBO),(1T,LBO))
//   MN-major, 128 B   Swizzle<3,4,3> o ((T,8,m),(8,k)):((1,T,LBO),(8T,SBO))
// Swizzle<3,4,3> changes bits 4-6 of the address by bits 7-9 of it: of the address, not of the offset in the tile.
// Knows the layout of registers and shared memory; nothing of how threads run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "numbers.h"
#include "sanitizer.h"

namespace host {

// A descriptor that was taken apart: PTX's "Matrix descriptor format" of wgmma.
class MatrixDescriptor {
 public:
  static constexpr unsigned kAddresses = 1 << 18;  // a descriptor can name the bytes below

  explicit MatrixDescriptor(unsigned long long bits)
      : bits_(bits), start_(field(0) << 4), leading_(field(16) << 4), stride_(field(32) << 4), swizzled_(bits >> 62 == 1) {}

  // What is wrong with it for `size` rows (of A) or columns (of B), or null.
  const char* fault(bool mn_major, int size) const {
    constexpr unsigned long long kReserved = 3ull << 14 | 3ull << 30 | 7ull << 46 | 0x3ffull << 52;
    if (bits_ & kReserved) return "bits that belong to no field are set";
    if (bits_ >> 62 > 1) return "only swizzles of 128 bytes and none are supported";
    if (bits_ >> 49 & 7) return "only a base offset of 0 is supported";
    if (!swizzled_) return nullptr;
    if (start_ & 0x380) return "the pattern of the 128-byte swizzle does not start at a multiple of 1024 bytes";
    const int row_bytes = mn_major ? (size < 64 ? size * 2 : 128) : 32;
    if ((start_ & 0x7f) + static_cast<unsigned>(row_bytes) > 128) return "the operand leaves the 128 bytes of a row of the swizzle";
    if (stride_ % 1024 != 0 && (mn_major || size > 8))
      return "the stride is not a multiple of the 1024 bytes that the swizzle repeats after";
    if (leading_ % 1024 != 0 && mn_major && size > 64)
      return "the leading dimension's offset is not a multiple of the 1024 bytes that the swizzle repeats after";
    return nullptr;
  }

  // The address of 16 bytes. K-major: elements k = 8 * part .. 8 * part + 7 of row or column mn.
  unsigned k_major(int mn, int part) const {
    const unsigned group = static_cast<unsigned>(mn) / 8 * stride_, row = static_cast<unsigned>(mn) % 8;
    if (swizzled_) return swizzle(start_ + group + row * 128 + static_cast<unsigned>(part) * 16);
    return start_ + group + row * 16 + static_cast<unsigned>(part) * leading_;
  }

  // MN-major: rows or columns 8 * part .. 8 * part + 7 of k.
  unsigned mn_major(int part, int k) const {
    const unsigned group = static_cast<unsigned>(k) / 8, row = static_cast<unsigned>(k) % 8, p = static_cast<unsigned>(part);
    if (swizzled_) return swizzle(start_ + p / 8 * leading_ + group * stride_ + row * 128 + p % 8 * 16);
    return start_ + p * stride_ + group * leading_ + row * 16;
  }

 private:
  unsigned field(int bit) const { return static_cast<unsigned>(bits_ >> bit & 0x3fff); }
  static unsigned swizzle(unsigned address) { return address ^ (address >> 3 & 0x70); }

  unsigned long long bits_;
  unsigned start_, leading_, stride_;
  bool swizzled_;
};

// The accumulators that one or several wgmmas of a warp add to: 16 rows of `columns`.
struct Accumulators {
  static constexpr std::uint32_t kInFlight = 0x7fe5a5a5;  // a NaN that no arithmetic makes

  float* lanes[32];
  int columns = 0;
  int pending = 0;            // wgmmas
  int fences = 0;             // of the warp, when they were given back
  std::vector<float> values;  // row by row

  // Lane l has, of each 8 columns, columns 2 * (l % 4) and the next of rows l / 4 and l / 4 + 8.
  template <class Visit>
  void for_each(Visit visit) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int tile = 0; tile < columns / 8; ++tile) {
        for (int i = 0; i < 4; ++i) {
          const int row = lane / 4 + i / 2 * 8, column = tile * 8 + lane % 4 * 2 + i % 2;
          visit(lanes[lane][tile * 4 + i], values[static_cast<std::size_t>(row * columns + column)]);
        }
      }
    }
  }
};

struct Wgmma {
  using Perform = void (*)(const Wgmma& wgmma, const unsigned char* shared, float* c);

  Perform perform = nullptr;
  int accumulators = 0;      // which
  std::vector<int> offsets;  // in shared memory, of the 16-byte parts of A, then of B
  struct Registers {
    const unsigned* held;  // by a lane
    unsigned words[4];     // as they were
  };
  std::vector<Registers> registers;  // of each lane, if A is not in shared memory
  int line = 0;              // of the kernel's source
};

constexpr int kPartsOfA = 32;

// The address of part i of A, of whose rows 16 are this warp's, and of B.
inline unsigned part_of_a(MatrixDescriptor a, bool mn_major, int first_row, int i) {
  return mn_major ? a.mn_major(first_row / 8 + i % 2, i / 2) : a.k_major(first_row + i / 2, i % 2);
}
inline unsigned part_of_b(MatrixDescriptor b, bool mn_major, int columns, int i) {
  return mn_major ? b.mn_major(i % (columns / 8), i / (columns / 8)) : b.k_major(i / 2, i % 2);
}

typedef float Floats __attribute__((vector_size(16), aligned(4), may_alias));
typedef std::uint32_t Words __attribute__((vector_size(16), aligned(4), may_alias));
typedef std::uint16_t Halves __attribute__((vector_size(8), aligned(2), may_alias));

// Four elements as floats, as float_of_bf16 and float_of_fp16 have it.
template <class Element>
inline Floats four_floats(Halves halves) {
  const Words bits = __builtin_convertvector(halves, Words);
  if constexpr (Element::is_bf16) {
    return reinterpret_cast<Floats>(bits << 16);
  } else {
    const Floats scaled = reinterpret_cast<Floats>((bits & 0x7fff) << 13) * 0x1p112f;
    const Words infinite = reinterpret_cast<Words>(scaled >= 65536.f) & 0x7f800000;
    return reinterpret_cast<Floats>(reinterpret_cast<Words>(scaled) | infinite | (bits & 0x8000) << 16);
  }
}

template <class Element>
KDTREE_HOST_UNSEEN inline void eight_floats(float* floats, const unsigned char* elements) {
  Halves lo, hi;
  std::memcpy(&lo, elements, sizeof lo);
  std::memcpy(&hi, elements + sizeof lo, sizeof hi);
  *reinterpret_cast<Floats*>(floats) = four_floats<Element>(lo);
  *reinterpret_cast<Floats*>(floats + 4) = four_floats<Element>(hi);
}

// c (16 x COLUMNS) += a (16 x K) * b (K x COLUMNS), in float32; the products are exact, and summed before c is added.
template <int K, int COLUMNS>
KDTREE_HOST_UNSEEN inline void multiply_add_rows(float* c, const float (&a)[16][K], const float (&b)[K][COLUMNS]) {
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < COLUMNS; column += 8) {
      Floats lo = {}, hi = {};
      for (int k = 0; k < K; ++k) {
        lo += a[row][k] * *reinterpret_cast<const Floats*>(&b[k][column]);
        hi += a[row][k] * *reinterpret_cast<const Floats*>(&b[k][column + 4]);
      }
      float* const sums = c + row * COLUMNS + column;
      *reinterpret_cast<Floats*>(sums) += lo, *reinterpret_cast<Floats*>(sums + 4) += hi;
    }
  }
}

template <class Element, int COLUMNS, bool MN_MAJOR>
KDTREE_HOST_UNSEEN inline void perform_wgmma(const Wgmma& wgmma, const unsigned char* shared, float* c) {
  float a[16][16], b[16][COLUMNS], part[8];
  const int* offset = wgmma.offsets.data();
  for (int i = 0; i < kPartsOfA; ++i) {
    eight_floats<Element>(part, shared + *offset++);
    for (int j = 0; j < 8; ++j) (MN_MAJOR ? a[i % 2 * 8 + j][i / 2] : a[i / 2][i % 2 * 8 + j]) = part[j];
  }
  for (int i = 0; i < 2 * COLUMNS; ++i) {
    if constexpr (MN_MAJOR) {
      eight_floats<Element>(&b[i / (COLUMNS / 8)][i % (COLUMNS / 8) * 8], shared + *offset++);
    } else {
      eight_floats<Element>(part, shared + *offset++);
      for (int j = 0; j < 8; ++j) b[i % 2 * 8 + j][i / 2] = part[j];
    }
  }
  multiply_add_rows(c, a, b);
}

// A of `Pool` and B of e4m3, both K-major.
template <class Pool, int COLUMNS>
KDTREE_HOST_UNSEEN inline void perform_fp8_wgmma(const Wgmma& wgmma, const unsigned char* shared, float* c) {
  float a[16][32], b[32][COLUMNS];
  const int* offset = wgmma.offsets.data();
  for (int i = 0; i < kPartsOfA; ++i, ++offset)
    for (int j = 0; j < 16; ++j) {
      const unsigned char byte = shared[*offset + j];
      a[i / 2][i % 2 * 16 + j] = Pool::is_e4m3 ? float_of_e4m3(byte) : float_of_e5m2(byte);
    }
  for (int i = 0; i < 2 * COLUMNS; ++i, ++offset)
    for (int j = 0; j < 16; ++j) b[i % 2 * 16 + j][i / 2] = float_of_e4m3(shared[*offset + j]);
  multiply_add_rows(c, a, b);
}

// A from registers, B MN-major.
template <class Element, int COLUMNS>
KDTREE_HOST_UNSEEN inline void perform_wgmma_of_registers(const Wgmma& wgmma, const unsigned char* shared, float* c) {
  float a[16][16], b[16][COLUMNS];
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      const unsigned word = wgmma.registers[static_cast<std::size_t>(lane)].words[i];
      float* const pair = &a[lane / 4 + i % 2 * 8][lane % 4 * 2 + i / 2 * 8];
      pair[0] = to_float<Element>(word), pair[1] = to_float<Element>(word >> 16);
    }
  for (int i = 0; i < 2 * COLUMNS; ++i)
    eight_floats<Element>(&b[i / (COLUMNS / 8)][i % (COLUMNS / 8) * 8], shared + wgmma.offsets[static_cast<std::size_t>(i)]);
  multiply_add_rows(c, a, b);
}

// The wgmmas of one warp that are on their way.
class Wgmmas {
 public:
  void fence() { ++fences_; }
  void commit() { group_ends_.push_back(wgmmas_.size()); }
  bool pending() const { return !wgmmas_.empty(); }
  int oldest_line() const { return wgmmas_.front().line; }

  // A new one, to be filled in by the caller. `fault` becomes what was wrong with its accumulators, if anything was. `lanes` are theirs.
  Wgmma& start(float* const* lanes, int columns, const char*& fault) {
    Wgmma& wgmma = wgmmas_.emplace_back();
    wgmma.accumulators = take(lanes, columns, fault);
    return wgmma;
  }

  // Calls complete(Wgmma, values of its accumulators) for those of all committed groups but the newest `keep`. Returns false if somebody
  // wrote to accumulators in the meantime.
  template <class Complete>
  bool wait(std::size_t keep, Complete complete) {
    if (group_ends_.size() <= keep) return true;
    bool untouched = true;
    const std::size_t groups = group_ends_.size() - keep, count = group_ends_[groups - 1];
    for (std::size_t i = 0; i < count; ++i) {
      Accumulators& accumulators = accumulators_[static_cast<std::size_t>(wgmmas_[i].accumulators)];
      complete(wgmmas_[i], accumulators.values.data());
      if (--accumulators.pending == 0) untouched = give_back(accumulators) && untouched;
    }
    wgmmas_.erase(wgmmas_.begin(), wgmmas_.begin() + static_cast<std::ptrdiff_t>(count));
    group_ends_.erase(group_ends_.begin(), group_ends_.begin() + static_cast<std::ptrdiff_t>(groups));
    for (std::size_t& end : group_ends_) end -= count;
    return untouched;
  }

 private:
  int take(float* const* lanes, int columns, const char*& fault) {
    if (fences_ == 0) fault = "wgmma_fence is missing before the first wgmma of the warp";
    Accumulators* mine = nullptr;
    for (Accumulators& other : accumulators_) {
      if (other.lanes[0] == lanes[0] && other.columns == columns) {
        mine = &other;
      } else if (other.pending != 0 && other.lanes[0] < lanes[0] + columns / 2 && lanes[0] < other.lanes[0] + other.columns / 2) {
        fault = "its accumulators are in part those of a wgmma of another shape that is on its way";
      }
    }
    if (mine == nullptr) {
      mine = &accumulators_.emplace_back();
      mine->columns = columns;
      mine->values.resize(static_cast<std::size_t>(16 * columns));
      mine->fences = -1;
    }
    if (mine->pending++ == 0) {
      for (int lane = 0; lane < 32; ++lane) mine->lanes[lane] = lanes[lane];
      bool changed = false;
      mine->for_each([&](float& d, float& value) {
        changed = changed || bits_of(d) != bits_of(value);
        value = d;
        d = float_of(Accumulators::kInFlight);
      });
      if (changed && mine->fences == fences_) fault = "the accumulators have changed since wgmma_wait, with no wgmma_fence after it";
    }
    return static_cast<int>(mine - accumulators_.data());
  }

  bool give_back(Accumulators& accumulators) {
    bool untouched = true;
    accumulators.for_each([&](float& d, float& value) {
      untouched = untouched && bits_of(d) == Accumulators::kInFlight;
      d = value;
    });
    accumulators.fences = fences_;
    return untouched;
  }

  std::vector<Wgmma> wgmmas_;  // oldest first
  std::vector<std::size_t> group_ends_;
  std::vector<Accumulators> accumulators_;
  int fences_ = 0;
};

}  // namespace host
