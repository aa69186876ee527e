// The machine-dependent part of a fiber: save the registers that a function call must keep, change the stack, go on over there.
// Hand-written for x86_64 and aarch64, because ucontext makes a system call per switch; every other machine (or -DKDTREE_HOST_UCONTEXT) has
// ucontext. Knows the calling conventions and nothing else.
#pragma once

#include <cstddef>
#include <cstdint>

#if (defined(__x86_64__) || defined(__aarch64__)) && !defined(KDTREE_HOST_UCONTEXT)

extern "C" __attribute__((visibility("hidden"))) void kdtree_switch_stack(void** saved_stack_pointer, void* next_stack_pointer);

#if defined(__x86_64__)
asm(R"(
.pushsection .text
.type kdtree_switch_stack, @function
kdtree_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size kdtree_switch_stack, . - kdtree_switch_stack
.popsection
)");
#else
asm(R"(
.pushsection .text
.type kdtree_switch_stack, %function
kdtree_switch_stack:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size kdtree_switch_stack, . - kdtree_switch_stack
.popsection
)");
#endif

namespace host {

class Context {
 public:
  // Makes the next switch to this context call `entry`, which must never return.
  void start(unsigned char* stack, std::size_t bytes, void (*entry)()) {
    auto** top = reinterpret_cast<void**>(reinterpret_cast<std::uintptr_t>(stack + bytes) & ~std::uintptr_t{15});
#if defined(__x86_64__)
    // From the top: a return address of 0 (where a debugger's back trace ends), entry, six registers. A function starts at 8 modulo 16.
    constexpr int kWords = 8, kEntry = 6;
#else
    constexpr int kWords = 20, kEntry = 11;  // x30, the link register
#endif
    void** frame = top - kWords;
    for (int i = 0; i < kWords; ++i) frame[i] = nullptr;
    frame[kEntry] = reinterpret_cast<void*>(entry);
    stack_pointer_ = frame;
  }

  void switch_to(Context& next) { kdtree_switch_stack(&stack_pointer_, next.stack_pointer_); }

 private:
  void* stack_pointer_ = nullptr;
};

}  // namespace host

#else

#include <ucontext.h>

namespace host {

class Context {
 public:
  void start(unsigned char* stack, std::size_t bytes, void (*entry)()) {
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack;
    context_.uc_stack.ss_size = bytes;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
  }

  void switch_to(Context& next) { swapcontext(&context_, &next.context_); }

 private:
  ucontext_t context_;
};

}  // namespace host

#endif
