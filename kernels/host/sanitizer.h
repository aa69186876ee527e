// What the rest says to the compiler, and to a sanitizer when there is one; without one these are empty.
// AddressSanitizer must hear of every change of stack, and of memory that is out of bounds although it is allocated.
// Knows the sanitizers' C interfaces and nothing else.
#pragma once

#include <cstddef>
#include <cstring>

#if defined(__SANITIZE_ADDRESS__)
#define KDTREE_HOST_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KDTREE_HOST_ASAN 1
#endif
#endif

// In a build with -fsanitize=thread every load and store of the kernel is reported to us (plain_access.h); this keeps our own out of it.
#if defined(__SANITIZE_THREAD__)
#define KDTREE_HOST_UNSEEN __attribute__((no_sanitize("thread"), noinline))
#else
#define KDTREE_HOST_UNSEEN
#endif

// For variables: two libraries in one process, say of two versions of the kernel, must not share theirs, as the linker would have it.
#define KDTREE_HOST_LOCAL __attribute__((visibility("hidden")))

namespace host {

// What the primitives do to shared memory, which they report themselves.
KDTREE_HOST_UNSEEN inline void copy_bytes(void* target, const void* source, std::size_t bytes) { std::memcpy(target, source, bytes); }
KDTREE_HOST_UNSEEN inline void fill_bytes(void* target, int value, std::size_t bytes) { std::memset(target, value, bytes); }

}  // namespace host

#if defined(KDTREE_HOST_ASAN)

#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>

namespace host {

inline void forbid_memory(const void* start, std::size_t bytes) { __asan_poison_memory_region(start, bytes); }
inline void allow_memory(const void* start, std::size_t bytes) { __asan_unpoison_memory_region(start, bytes); }
inline void before_switch(void** fake_stack, const void* next_stack, std::size_t next_bytes) {
  __sanitizer_start_switch_fiber(fake_stack, next_stack, next_bytes);
}
inline void after_switch(void* fake_stack, const void** previous_stack, std::size_t* previous_bytes) {
  __sanitizer_finish_switch_fiber(fake_stack, previous_stack, previous_bytes);
}

}  // namespace host

#else

namespace host {

inline void forbid_memory(const void*, std::size_t) {}
inline void allow_memory(const void*, std::size_t) {}
inline void before_switch(void**, const void*, std::size_t) {}
inline void after_switch(void*, const void**, std::size_t*) {}

}  // namespace host

#endif
