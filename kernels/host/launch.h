// Runs a kernel function over a grid. One block after the other, in the order that the seed says; all on the calling thread.
// Knows block.h; nothing of the kernel.
#pragma once

#include <string>

#include "block.h"

namespace host {

KDTREE_HOST_LOCAL inline thread_local StackPool kept_stacks;

struct Grid {
  int x, y;
};

// Returns an empty string, or what was wrong. `kernel` takes its parameters by value.
template <class Params>
std::string launch(void (*kernel)(Params), Grid grid, int block_threads, int shared_bytes, const Params& params, unsigned long long seed) {
  if (block_threads <= 0 || block_threads > 1024 || block_threads % kLanes != 0) {
    return "a block of " + std::to_string(block_threads) + " threads: must be a multiple of 32, at most 1024";
  }
  if (grid.x <= 0 || grid.y <= 0 || grid.y > 65535)
    return "a grid of " + std::to_string(grid.x) + " x " + std::to_string(grid.y) + " blocks";
  if (shared_bytes < 0) return std::to_string(shared_bytes) + " bytes of shared memory";

  struct Call {
    void (*kernel)(Params);
    const Params& params;
  } const call{kernel, params};
  const auto body = [](const void* argument) {
    const Call& call = *static_cast<const Call*>(argument);
    call.kernel(call.params);
  };

  Schedule schedule(seed);
  Block block({grid.x, grid.y, block_threads, shared_bytes}, schedule, kept_stacks);
  for (const int i : schedule.block_order(grid.x * grid.y)) {
    const Report& report = block.run(i % grid.x, i / grid.x, body, &call);
    if (!report.empty()) return std::string(report.text()) + " (seed " + std::to_string(seed) + ")";
  }
  return {};
}

}  // namespace host
