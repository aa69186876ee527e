// cp.async as one thread sees it: copies are started, tied up in groups, and waited for by group; or promised to an mbarrier.
// A copy reads its source and writes its destination as late as the hardware may: when its thread waits for it, or when somebody waits for
// the mbarrier. The destination is ruined as early as the hardware may: when the copy is started. Knows nothing of blocks and threads.
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

  // How many were started since forget().
  std::size_t started() const { return landed_ + copies_.size(); }

  // Calls land(copy) for the copies of all committed groups but the newest `pending`.
  template <class Land>
  void wait(std::size_t pending, Land land) {
    if (group_ends_.size() <= pending) return;
    const std::size_t groups = group_ends_.size() - pending, landed = group_ends_[groups - 1];
    group_ends_.erase(group_ends_.begin(), group_ends_.begin() + static_cast<std::ptrdiff_t>(groups));
    land_first(landed, land);
  }

  // Calls land(copy) for the first `count` copies that were started, as far as they are still on their way.
  template <class Land>
  void land_until(std::size_t count, Land land) {
    if (count > landed_) land_first(count - landed_, land);
  }

  void forget() {
    copies_.clear();
    group_ends_.clear();
    landed_ = 0;
  }

 private:
  template <class Land>
  void land_first(std::size_t count, Land land) {
    for (std::size_t i = 0; i < count; ++i) land(copies_[i]);
    copies_.erase(copies_.begin(), copies_.begin() + static_cast<std::ptrdiff_t>(count));
    for (std::size_t& end : group_ends_) end = end > count ? end - count : 0;
    landed_ += count;
  }

  std::vector<AsyncCopy> copies_;  // on their way, oldest first
  std::vector<std::size_t> group_ends_;
  std::size_t landed_ = 0;
};

}  // namespace host
