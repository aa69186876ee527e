// A fiber: a function on its own stack that runs until it hands over to another fiber. Every thread of a block is one.
// All fibers of a launch live on one operating-system thread, so nothing here is locked.
// Knows context.h, sanitizer.h and mmap; nothing of CUDA.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <new>
#include <vector>

#include "context.h"
#include "sanitizer.h"

namespace host {

struct Stack {
  unsigned char* start = nullptr;
  std::size_t bytes = 0;
};

// Stacks of one size that are kept from block to block and from launch to launch. Each has a page below it that faults when touched.
class StackPool {
 public:
  StackPool() = default;
  StackPool(const StackPool&) = delete;
  StackPool& operator=(const StackPool&) = delete;
  ~StackPool() {
    for (unsigned char* mapping : mappings_) munmap(mapping, kMappingBytes);
  }

  Stack get(std::size_t index) {
    while (mappings_.size() <= index) mappings_.push_back(map());
    // The stacks' tops are staggered by whole cache lines: at equal distances of a power of two all of them would share a few cache sets.
    const std::size_t stagger = index % 64 * kStaggerBytes;
    return {mappings_[index] + kGuardBytes, kMappingBytes - kGuardBytes - stagger};
  }

 private:
  static constexpr std::size_t kGuardBytes = 65536;  // a whole page even where pages are 64 KiB
  static constexpr std::size_t kMappingBytes = kGuardBytes + 512 * 1024;
  static constexpr std::size_t kStaggerBytes = 17 * 64;

  static unsigned char* map() {
    void* mapping = mmap(nullptr, kMappingBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) throw std::bad_alloc();
    mprotect(mapping, kGuardBytes, PROT_NONE);
    return static_cast<unsigned char*>(mapping);
  }

  std::vector<unsigned char*> mappings_;
};

class Fiber {
 public:
  // `entry` begins with Fiber::entered() and ends with leave_for(). What lay on the stack before is forgotten, not unwound.
  void start(Stack stack, void (*entry)()) {
    allow_memory(stack.start, stack.bytes);
    stack_ = stack;
    fake_stack_ = nullptr;
    context_.start(stack.start, stack.bytes, entry);
  }

  // Returns when some fiber switches back to this one.
  void switch_to(Fiber& next) {
    previous_ = this;
    before_switch(&fake_stack_, next.stack_.start, next.stack_.bytes);
    context_.switch_to(next.context_);
    learn_previous(fake_stack_);
  }

  [[noreturn]] void leave_for(Fiber& next) {
    previous_ = this;
    before_switch(nullptr, next.stack_.start, next.stack_.bytes);
    context_.switch_to(next.context_);
    std::abort();
  }

  static void entered() { learn_previous(nullptr); }

 private:
  // The first fiber runs on the stack of the operating-system thread; AddressSanitizer is the one who knows where that is.
  static void learn_previous(void* fake_stack) {
    const void* start = nullptr;
    std::size_t bytes = 0;
    after_switch(fake_stack, &start, &bytes);
    if (previous_->stack_.start == nullptr) {
      previous_->stack_ = {const_cast<unsigned char*>(static_cast<const unsigned char*>(start)), bytes};
    }
  }

  KDTREE_HOST_LOCAL inline static thread_local Fiber* previous_ = nullptr;

  Context context_;
  Stack stack_;
  void* fake_stack_ = nullptr;
};

}  // namespace host
