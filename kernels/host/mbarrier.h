// mbarriers: which phase each is in, and what is still missing in it. Copies that it counts, and what other blocks store for it, land when
// somebody waits for the phase and nothing else is missing, which is as late as the hardware may; without either a phase is complete with
// its last arrival.
// Knows nothing of how threads run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "report.h"

namespace host {

class Block;
struct Thread;

// The arrival of a thread's cp.asyncs: of the first `copies` that it has started.
struct CopyArrival {
  Thread* thread;
  std::size_t copies;
};

// What a thread of another block has stored.
struct AsyncStore {
  static constexpr int kMostBytes = 16;

  long long offset;  // in the mbarrier's block
  int bytes;
  unsigned char value[kMostBytes];
  int line;  // of the kernel's source
};

struct Mbarrier {
  static constexpr int kMostArrivals = (1 << 20) - 1;
  static constexpr int kBytes = 8;
  static constexpr unsigned char kOpaque = 0xb7;  // what shared memory has in its place

  Block* block = nullptr;
  int number = 0;        // among those of the cluster
  long long offset = 0;  // in shared memory
  int line = 0;          // of its initialisation

  int expected = 0;         // arrivals in each phase
  std::uint32_t phase = 0;  // how many are complete
  int arrived = 0;
  std::vector<CopyArrival> copy_arrivals;
  long long missing_bytes = 0;  // that were announced and not stored; below 0, stored and not announced
  std::vector<AsyncStore> stores;
  std::vector<Thread*> waiting;  // for the end of this phase

  int all_arrivals() const { return arrived + static_cast<int>(copy_arrivals.size()); }
  bool is_complete() const { return all_arrivals() == expected && missing_bytes == 0; }

  // After the copies have landed and the waiting threads were told.
  void begin_next_phase() {
    ++phase;
    arrived = 0;
    copy_arrivals.clear();
    stores.clear();
    waiting.clear();
  }

  void describe(Report& report) const {
    report.add("mbarrier at offset %lld (line %d), phase %u: %d of %d arrivals", offset, line, phase, all_arrivals(), expected);
    if (missing_bytes != 0) report.add(", %lld bytes missing", missing_bytes);
    if (!copy_arrivals.empty()) report.add(" (%d by cp.async)", static_cast<int>(copy_arrivals.size()));
  }
};

// All of a block.
class Mbarriers {
 public:
  static constexpr int kMost = 32;

  Mbarriers(Block* block, int rank) : block_(block), rank_(rank) { mbarriers_.reserve(kMost); }

  void clear() { mbarriers_.clear(); }
  bool full() const { return mbarriers_.size() == kMost; }

  Mbarrier* find(long long offset) {
    for (Mbarrier& mbarrier : mbarriers_) {
      if (mbarrier.offset == offset) return &mbarrier;
    }
    return nullptr;
  }

  // It stays where it is until clear().
  Mbarrier& add(long long offset) {
    Mbarrier& mbarrier = mbarriers_.emplace_back();
    mbarrier.block = block_;
    mbarrier.number = rank_ * kMost + static_cast<int>(mbarriers_.size()) - 1;
    mbarrier.offset = offset;
    return mbarrier;
  }

  // By its number among those of the cluster.
  Mbarrier& operator[](int number) { return mbarriers_[static_cast<std::size_t>(number % kMost)]; }
  auto begin() const { return mbarriers_.begin(); }
  auto end() const { return mbarriers_.end(); }

 private:
  Block* block_;
  int rank_;
  std::vector<Mbarrier> mbarriers_;
};

}  // namespace host
