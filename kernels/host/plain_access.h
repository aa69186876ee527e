// Shows the race detector the plain loads and stores of the kernel. In a build with -fsanitize=thread the compiler calls a function at each
// of them; here are those functions, in place of ThreadSanitizer's library, which therefore must not be linked:
//
//     g++ <as in launch.cpp> -fsanitize=thread -nodefaultlibs -Wl,--no-as-needed -lstdc++ -lm -lc -lgcc_s
//
// In any other build this file is empty. Knows block.h. Only launch.cpp includes it, as the functions may exist only once.
#pragma once

#if defined(__SANITIZE_THREAD__)

#include "block.h"

namespace host {

__attribute__((no_sanitize("thread"))) inline void note_plain(const void* pointer, long long bytes, bool write) {
  const Thread* const thread = current;
  if (thread == nullptr) return;
  Block& block = *thread->block;
  const long long offset = static_cast<const unsigned char*>(pointer) - block.shared().data();
  if (offset < 0 || offset + bytes > block.shape().shared_bytes) return;
  if (write) {
    block.note_write(AccessKind::kStore, thread->warp->last_line, offset, static_cast<int>(bytes));
  } else {
    block.note_read(AccessKind::kLoad, thread->warp->last_line, offset, static_cast<int>(bytes));
  }
}

}  // namespace host

#define KDTREE_HOST_HOOK(name, parameters) \
  extern "C" __attribute__((no_sanitize("thread"), visibility("hidden"))) void __tsan_##name parameters
#define KDTREE_HOST_HOOKS(bytes)                                                            \
  KDTREE_HOST_HOOK(read##bytes, (void* p)) { host::note_plain(p, bytes, false); }           \
  KDTREE_HOST_HOOK(write##bytes, (void* p)) { host::note_plain(p, bytes, true); }           \
  KDTREE_HOST_HOOK(unaligned_read##bytes, (void* p)) { host::note_plain(p, bytes, false); } \
  KDTREE_HOST_HOOK(unaligned_write##bytes, (void* p)) { host::note_plain(p, bytes, true); }
KDTREE_HOST_HOOKS(1)
KDTREE_HOST_HOOKS(2)
KDTREE_HOST_HOOKS(4)
KDTREE_HOST_HOOKS(8)
KDTREE_HOST_HOOKS(16)
KDTREE_HOST_HOOK(read_range, (void* p, long bytes)) { host::note_plain(p, bytes, false); }
KDTREE_HOST_HOOK(write_range, (void* p, long bytes)) { host::note_plain(p, bytes, true); }
KDTREE_HOST_HOOK(func_entry, (void*)) {}
KDTREE_HOST_HOOK(func_exit, (void*)) {}
KDTREE_HOST_HOOK(vptr_update, (void**, void*)) {}
KDTREE_HOST_HOOK(init, ()) {}
#undef KDTREE_HOST_HOOKS
#undef KDTREE_HOST_HOOK

#endif
