// Finds data races in shared memory whatever order the threads happened to run in: two accesses of one word, at least one a write, by
// different threads, with no barrier between them. Every warp has a clock that ticks at its barriers and at __syncwarp, and a barrier tells
// those who meet in it each other's clocks; an access is ordered after another if its warp has been told of the other's time (a vector
// clock). Only what is reported to it counts: ldmatrix and cp.async always, plain loads and stores in a build with -fsanitize=thread
// (plain_access.h). What it does not see it cannot blame: there are no false alarms, and 16-bit words that share a 32-bit one are told
// apart. Knows the numbers of threads and barriers; nothing of how they run.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace host {

enum class AccessKind : std::uint8_t { kLoad, kStore, kLdmatrix, kCopyInFlight, kCopyLanded };

// For messages; a line number follows.
constexpr const char* kAccessNames[] = {"load after line", "store after line", "ldmatrix at line", "cp.async in flight of line",
                                        "cp.async of line"};

struct Access {
  std::uint32_t time = 0;  // of the warp's clock
  int line = 0;            // of the kernel's source; for a load or store, of the collective before it
  std::uint16_t thread = 0;
  std::uint8_t bytes = 0;  // of the word, a bit each
  AccessKind kind = AccessKind::kLoad;
};

class Races {
 public:
  static constexpr int kSeveralThreads = 0xffff;

  Races(std::size_t bytes, int warps, int barriers)
      : warps_(warps),
        writes_(bytes / 4 + 1),
        reads_((bytes / 4 + 1) * static_cast<std::size_t>(warps)),
        clocks_(static_cast<std::size_t>(warps)),
        told_(static_cast<std::size_t>(warps * warps)),
        meetings_(static_cast<std::size_t>(barriers * warps)) {}

  // A new block knows everything that happened before; so nothing has to be erased.
  void begin_block() {
    const std::uint32_t now = *std::max_element(clocks_.begin(), clocks_.end());
    start_ = now + 1;
    std::fill(clocks_.begin(), clocks_.end(), start_);
    std::fill(told_.begin(), told_.end(), now);
    std::fill(meetings_.begin(), meetings_.end(), 0);
  }

  void arrive(int barrier, int warp) {
    for (int other = 0; other < warps_; ++other) meeting(barrier, other) = std::max(meeting(barrier, other), told(warp, other));
    meeting(barrier, warp) = clock(warp);
  }

  void release(int barrier, std::uint32_t warps) {
    for (int warp = 0; warp < warps_; ++warp) {
      if (!(warps >> warp & 1)) continue;
      for (int other = 0; other < warps_; ++other) told(warp, other) = std::max(told(warp, other), meeting(barrier, other));
      ++clock(warp);
    }
    for (int warp = 0; warp < warps_; ++warp) meeting(barrier, warp) = 0;
  }

  void synchronise_warp(int warp) {
    told(warp, warp) = clock(warp);
    ++clock(warp);
  }

  // Both return the earlier access that this one races with, or null.
  const Access* read(Access access, long long offset, int size) { return for_words(access, offset, size, &Races::read_word); }
  const Access* write(Access access, long long offset, int size) { return for_words(access, offset, size, &Races::write_word); }

 private:
  std::uint32_t& clock(int warp) { return clocks_[static_cast<std::size_t>(warp)]; }
  std::uint32_t& told(int warp, int other) { return told_[static_cast<std::size_t>(warp * warps_ + other)]; }
  std::uint32_t& meeting(int barrier, int warp) { return meetings_[static_cast<std::size_t>(barrier * warps_ + warp)]; }
  Access& last_read(std::size_t word, int warp) { return reads_[word * static_cast<std::size_t>(warps_) + static_cast<std::size_t>(warp)]; }

  const Access* for_words(Access access, long long offset, int size, const Access* (Races::*visit)(const Access&, std::size_t)) {
    access.time = clock(access.thread / 32);
    for (long long at = offset, end = offset + size; at < end;) {
      const int first = static_cast<int>(at & 3), count = static_cast<int>(std::min<long long>(4 - first, end - at));
      access.bytes = static_cast<std::uint8_t>(((1 << count) - 1) << first);
      if (const Access* earlier = (this->*visit)(access, static_cast<std::size_t>(at / 4))) return earlier;
      at += count;
    }
    return nullptr;
  }

  const Access* read_word(const Access& access, std::size_t word) {
    const Access& write = writes_[word];
    if (conflict(write, write.thread / 32, access) || overtakes_copy(write, access)) return &write;
    Access& mine = last_read(word, access.thread / 32);
    if (mine.time == access.time && mine.thread != access.thread && (mine.bytes & access.bytes)) {
      mine.bytes &= access.bytes;  // of the bytes that several lanes have read, no lane may write any
      mine.thread = kSeveralThreads;
    } else {
      mine = access;
    }
    return nullptr;
  }

  const Access* write_word(const Access& access, std::size_t word) {
    Access& write = writes_[word];
    if (conflict(write, write.thread / 32, access)) return &write;
    if (access.kind != AccessKind::kCopyLanded && overtakes_copy(write, access)) return &write;
    for (int warp = 0; warp < warps_; ++warp) {
      if (conflict(last_read(word, warp), warp, access)) return &last_read(word, warp);
    }
    write = access;
    return nullptr;
  }

  bool conflict(const Access& earlier, int warp, const Access& access) {
    return (earlier.bytes & access.bytes) && earlier.thread != access.thread && earlier.time > told(access.thread / 32, warp);
  }

  // Its own thread, too, must wait for a copy.
  bool overtakes_copy(const Access& earlier, const Access& access) const {
    return earlier.kind == AccessKind::kCopyInFlight && (earlier.bytes & access.bytes) && earlier.time >= start_;
  }

  int warps_;
  std::uint32_t start_ = 1;
  std::vector<Access> writes_, reads_;  // the last of each 32-bit word; reads of each warp
  std::vector<std::uint32_t> clocks_, told_, meetings_;
};

}  // namespace host
