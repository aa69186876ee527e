// The kernel as a library for the CPU: compiles kernels/verify_attn_flash.cu against device.h and exports two C functions.
//
//     g++ -std=c++17 -O2 -fno-strict-aliasing -fvisibility=hidden -DKDTREE_HOST -shared -fPIC kernels/host/launch.cpp -o host.so
//
// KDTREE_HOST_SOURCE may name another source: one that defines VerifyParams and KDTREE_FOR_EACH_KERNEL, as the tests of the primitives do.

#ifndef KDTREE_HOST_SOURCE
#define KDTREE_HOST_SOURCE "../verify_attn_flash.cu"
#endif
#include KDTREE_HOST_SOURCE

#include "launch.h"

#include <cstdio>
#include <cstring>
#include <exception>
#include <string>

#include "plain_access.h"

namespace {

struct Kernel {
  void (*function)(VerifyParams) = nullptr;
  int cluster_blocks = 1;
};

Kernel find_kernel(const char* name) {
#define KDTREE_HOST_FIND(kernel, ...) \
  if (std::strcmp(name, #kernel) == 0) return Kernel{&kernel __VA_OPT__(, ) __VA_ARGS__};
  KDTREE_FOR_EACH_KERNEL(KDTREE_HOST_FIND)
#undef KDTREE_HOST_FIND
  return {};
}

std::string launch_by_name(const char* name, host::Grid grid, int block_x, int shared_bytes, const void* params, unsigned long long seed) {
  const Kernel kernel = find_kernel(name);
  if (kernel.function == nullptr) return std::string("there is no kernel ") + name;
  return host::launch(kernel.function, grid, kernel.cluster_blocks, block_x, shared_bytes, *static_cast<const VerifyParams*>(params), seed);
}

}  // namespace

#define KDTREE_HOST_EXPORT extern "C" __attribute__((visibility("default")))

// Runs a kernel. Returns 0, or 1 with a message in `error`. Seed 0 is the plain order of blocks, warps and lanes.
KDTREE_HOST_EXPORT int kdtree_host_launch(const char* kernel, int grid_x, int grid_y, int block_x, int shared_bytes, const void* params,
                                          unsigned long long seed, char* error, int error_bytes) {
  std::string message;
  try {
    message = launch_by_name(kernel, {grid_x, grid_y}, block_x, shared_bytes, params, seed);
  } catch (const std::exception& failure) {
    message = std::string("out of memory or worse: ") + failure.what();
  }
  if (message.empty()) return 0;
  if (error != nullptr && error_bytes > 0) std::snprintf(error, static_cast<std::size_t>(error_bytes), "%s", message.c_str());
  return 1;
}

KDTREE_HOST_EXPORT int kdtree_host_params_size() { return static_cast<int>(sizeof(VerifyParams)); }
