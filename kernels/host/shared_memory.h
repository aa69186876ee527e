// The dynamic shared memory of one block: exactly the bytes that were asked for, between two guard areas, all 0xff (NaN) when a block
// starts. Primitives name a place by a 32-bit address, as on the GPU. Knows nothing of blocks and threads.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>

#include "sanitizer.h"

namespace host {

constexpr unsigned char kPoison = 0xff;  // NaN as a float, as a bf16 and as an fp16

class SharedMemory {
 public:
  // `base` is the 32-bit address of the first byte.
  SharedMemory(std::size_t bytes, unsigned base) : bytes_(bytes), base_(base) {
    // 128 bytes are all that the kernel may expect, so the start is aligned to that and to no more.
    mapping_ = static_cast<unsigned char*>(std::aligned_alloc(256, (kGuardBytes + bytes + kGuardBytes + 255) / 256 * 256));
    if (mapping_ == nullptr) throw std::bad_alloc();
    std::memset(mapping_, kGuard, kGuardBytes);
    std::memset(data() + bytes_, kGuard, kGuardBytes);
    forbid_guards();
  }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory() {
    allow_guards();
    std::free(mapping_);
  }

  unsigned char* data() { return mapping_ + kGuardBytes; }
  // For a block that asks for more than 128: before anybody has taken an address.
  unsigned char* aligned_data(unsigned alignment) {
    base_ = (base_ + alignment - 1) / alignment * alignment;
    return data();
  }
  std::size_t bytes() const { return bytes_; }
  void poison() { std::memset(data(), kPoison, bytes_); }

  // Where a pointer or an address lies relative to the start; any number if it is outside.
  long long offset_of(const void* pointer) { return static_cast<const unsigned char*>(pointer) - data(); }
  long long offset_of(unsigned address) const { return static_cast<long long>(address) - base_; }
  bool contains(long long offset, int size) const { return offset >= 0 && offset + size <= static_cast<long long>(bytes_); }
  unsigned address_of(long long offset) const { return base_ + static_cast<unsigned>(offset); }

  // The offset of a byte next to the memory that somebody wrote, or 0: offset 0 is never outside.
  long long trespass() {
    allow_guards();
    long long found = 0;
    for (std::size_t i = 0; i < kGuardBytes && found == 0; ++i) {
      if (data()[-1 - static_cast<long long>(i)] != kGuard) found = -1 - static_cast<long long>(i);
      if (data()[bytes_ + i] != kGuard) found = static_cast<long long>(bytes_ + i);
    }
    forbid_guards();
    return found;
  }

 private:
  static constexpr std::size_t kGuardBytes = 4096 + 128;
  static constexpr unsigned char kGuard = 0xa5;

  void forbid_guards() {
    forbid_memory(mapping_, kGuardBytes);
    forbid_memory(data() + bytes_, kGuardBytes);
  }
  void allow_guards() {
    allow_memory(mapping_, kGuardBytes);
    allow_memory(data() + bytes_, kGuardBytes);
  }

  unsigned char* mapping_;
  std::size_t bytes_;
  unsigned base_;
};

}  // namespace host
