// cp.async as one thread sees it: copies are started, tied up in groups, and waited for by group.
// A copy reads its source and writes its destination as late as the hardware may: when its thread waits for it. The destination is ruined
// as early as the hardware may: when the copy is started. Knows nothing of blocks and threads.
#pragma once

#include <cstddef>
#include <vector>

namespace host {

struct AsyncCopy {
  long long offset;  // of the destination in shared memory
  const void* source;
  bool zeros;  // write zeros, leave the source alone
  int line;    // of the kernel's source
};

class AsyncCopies {
 public:
  void start(const AsyncCopy& copy) { copies_.push_back(copy); }
  void commit() { group_ends_.push_back(copies_.size()); }

  // Calls land(copy) for the copies of all committed groups but the newest `pending`.
  template <class Land>
  void wait(std::size_t pending, Land land) {
    if (group_ends_.size() <= pending) return;
    const std::size_t groups = group_ends_.size() - pending, landed = group_ends_[groups - 1];
    for (std::size_t i = 0; i < landed; ++i) land(copies_[i]);
    copies_.erase(copies_.begin(), copies_.begin() + static_cast<std::ptrdiff_t>(landed));
    group_ends_.erase(group_ends_.begin(), group_ends_.begin() + static_cast<std::ptrdiff_t>(groups));
    for (std::size_t& end : group_ends_) end -= landed;
  }

  void forget() {
    copies_.clear();
    group_ends_.clear();
  }

 private:
  std::vector<AsyncCopy> copies_;  // oldest first
  std::vector<std::size_t> group_ends_;
};

}  // namespace host
