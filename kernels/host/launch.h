// Runs a kernel function over a grid. One cluster of blocks after the other, in the order that the seed says; all on the calling thread.
// Knows block.h; nothing of the kernel.
#pragma once

#include <deque>
#include <string>

#include "block.h"

namespace host {

KDTREE_HOST_LOCAL inline thread_local StackPool kept_stacks;

struct Grid {
  int x, y;
};

// Returns an empty string, or what was wrong. `kernel` takes its parameters by value. Clusters lie along x.
template <class Params>
std::string launch(void (*kernel)(Params), Grid grid, int cluster_blocks, int block_threads, int shared_bytes, const Params& params,
                   unsigned long long seed) {
  if (block_threads <= 0 || block_threads > 1024 || block_threads % kLanes != 0) {
    return "a block of " + std::to_string(block_threads) + " threads: must be a multiple of 32, at most 1024";
  }
  if (grid.x <= 0 || grid.y <= 0 || grid.y > 65535)
    return "a grid of " + std::to_string(grid.x) + " x " + std::to_string(grid.y) + " blocks";
  if (grid.x % cluster_blocks != 0) return std::to_string(grid.x) + " blocks along x in clusters of " + std::to_string(cluster_blocks);
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
  const BlockShape shape{grid.x, grid.y, block_threads, shared_bytes, cluster_blocks};
  Cluster cluster(shape, schedule);
  std::deque<Block> blocks;
  for (int i = 0; i < cluster_blocks; ++i) blocks.emplace_back(shape, cluster, kept_stacks);
  const int clusters_x = grid.x / cluster_blocks;
  for (const int i : schedule.cluster_order(clusters_x * grid.y)) {
    const Report& report = Block::run(cluster, i % clusters_x * cluster_blocks, i / clusters_x, body, &call);
    if (!report.empty()) return std::string(report.text()) + " (seed " + std::to_string(seed) + ")";
  }
  return {};
}

}  // namespace host
