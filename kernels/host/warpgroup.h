// The four warps of a warpgroup and the instructions that all of them must execute alike and in the same order, each in its own time.
// Knows nothing of how warps run.
#pragma once

#include <cstddef>
#include <deque>

#include "report.h"

namespace host {

// One such instruction, with whatever operands must be the same.
struct Step {
  Site site;
  unsigned long long a = 0, b = 0;

  bool operator==(const Step& other) const { return site == other.site && a == other.a && b == other.b; }
};

class Warpgroup {
 public:
  static constexpr int kWarps = 4;

  // The next step of a warp, 0 .. 3. Returns what another warp did in its place if that was something else, or null.
  const Step* take(int warp, const Step& step) {
    const std::size_t i = taken_[warp]++ - dropped_;
    if (i < steps_.size()) {
      if (!(steps_[i] == step)) return &steps_[i];
    } else {
      steps_.push_back(step);
    }
    while (!steps_.empty() && all_took_first()) {
      steps_.pop_front();
      ++dropped_;
    }
    return nullptr;
  }

  // A step that some warp never came to, or null.
  const Step* incomplete(int& warp) const {
    for (warp = 0; warp < kWarps; ++warp) {
      if (taken_[warp] - dropped_ < steps_.size()) return &steps_[taken_[warp] - dropped_];
    }
    return nullptr;
  }

  void clear() { *this = Warpgroup(); }

 private:
  bool all_took_first() const {
    for (const std::size_t taken : taken_) {
      if (taken == dropped_) return false;
    }
    return true;
  }

  std::deque<Step> steps_;  // that not all warps have taken
  std::size_t taken_[kWarps] = {}, dropped_ = 0;
};

}  // namespace host
