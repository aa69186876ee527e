// Everything that a seed shuffles: the order of the clusters, which block of one and which warp goes on after a collective, the order of
// the lanes of a warp. The order is a function of the seed alone, so a failing seed can be run again. Seed 0 is the plain order, 0, 1, 2,
// ... Knows nothing of blocks and threads.
#pragma once

#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

namespace host {

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {  // splitmix64
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

  int below(int bound) { return static_cast<int>((next() >> 32) * static_cast<std::uint64_t>(bound) >> 32); }

 private:
  std::uint64_t state_;
};

// A permutation of the 32 lanes that costs no table: multiply by an odd number, add, flip bits. There are 16 x 32 x 32 of them.
class LaneOrder {
 public:
  LaneOrder() = default;
  explicit LaneOrder(std::uint64_t random)
      : factor_(static_cast<unsigned>(random) | 1),
        offset_(static_cast<unsigned>(random >> 8)),
        flip_(static_cast<unsigned>(random >> 16)) {}

  int operator[](int i) const { return static_cast<int>(((static_cast<unsigned>(i) * factor_ + offset_) ^ flip_) & 31); }

 private:
  unsigned factor_ = 1, offset_ = 0, flip_ = 0;
};

class Schedule {
 public:
  explicit Schedule(std::uint64_t seed) : plain_(seed == 0), random_(seed) {}

  std::vector<int> cluster_order(int clusters) {
    std::vector<int> order(static_cast<std::size_t>(clusters));
    std::iota(order.begin(), order.end(), 0);
    for (int i = clusters - 1; i > 0 && !plain_; --i) std::swap(order.data()[i], order.data()[random_.below(i + 1)]);
    return order;
  }

  // Races come in two kinds: some need a fine interleaving of the warps, some need one warp far ahead. So each cluster has its own temper:
  // the chance, in 64ths, that the running warp, or block, goes on as long as nothing stops it.
  void begin_cluster() {
    constexpr int kStay[] = {0, 48, 63};
    stay_ = kStay[random_.below(3)];
  }

  // One of the blocks of `runnable` (a bit each, at least one set). Plain order: the running one until nothing of it can run.
  int pick_block(std::uint32_t runnable, int running) {
    if ((runnable >> running & 1) && (plain_ || runnable == 1u << running || random_.below(64) < stay_)) return running;
    return plain_ ? __builtin_ctz(runnable) : any_of(runnable);
  }

  // One of the warps of `runnable` (a bit each, at least one set). Plain order: the lowest, so each warp runs until a barrier stops it.
  int pick_warp(std::uint32_t runnable, int running) {
    if (plain_) return __builtin_ctz(runnable);
    if ((runnable >> running & 1) && random_.below(64) < stay_) return running;
    return any_of(runnable);
  }

  // Whether copies land although nobody waits for them.
  bool lands_now() { return plain_ || random_.below(4) == 0; }

  LaneOrder lane_order() { return plain_ ? LaneOrder() : LaneOrder(random_.next()); }

  // Where shared memory starts in its 32-bit address space: a multiple of 128 and of nothing more, since that is all the kernel may rely
  // on; and so low that the 18 bits of a matrix descriptor hold any address of a block's 227 KiB.
  unsigned shared_base() { return plain_ ? 1024 : 128u * static_cast<unsigned>(1 + 2 * random_.below(64)); }

 private:
  int any_of(std::uint32_t bits) {
    for (int skip = random_.below(__builtin_popcount(bits)); skip > 0; --skip) bits &= bits - 1;
    return __builtin_ctz(bits);
  }

  bool plain_;
  Random random_;
  int stay_ = 0;
};

}  // namespace host
