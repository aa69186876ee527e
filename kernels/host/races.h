// Finds data races in shared memory whatever order the threads happened to run in: two accesses of one word, at least one a write, by
// different threads, with nothing between them that orders them. Every thread has a clock, and whatever orders threads tells them each
// other's times; an access is ordered after another if whoever makes it has been told of the other's time (a vector clock).
//   * A barrier, of a block or of a cluster, and __syncwarp order whole warps.
//   * Arriving at an mbarrier tells it what the one thread has done and knows; waiting for its phase tells the one thread that waits. What
//   a
//     thread was told for itself, its warp learns at the next __syncwarp or barrier.
//   * What the hardware writes on behalf of an mbarrier, the copies whose end it counts, is the work of an agent of its own; and so is what
//   it
//     reads for the wgmmas of a warp, of which every lane is told when they are complete.
// It also finds words that were written by a thread or by cp.async and are then used through the async proxy, with no fence in between.
// Only what is reported to it counts: the primitives always, plain loads and stores in a build with -fsanitize=thread (plain_access.h).
// What it does not see it cannot blame: there are no false alarms, and 16-bit words that share a 32-bit one are told apart. Knows the
// numbers of threads, barriers and mbarriers, which go through all blocks of a cluster; nothing of how they run.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace host {

enum class AccessKind : std::uint8_t { kLoad, kStore, kLdmatrix, kCopyInFlight, kCopyLanded, kWgmma, kMbarrierInit, kMbarrier };

// For messages; a line number follows.
constexpr const char* kAccessNames[] = {"load after line",  "store after line", "ldmatrix at line",      "cp.async in flight of line",
                                        "cp.async of line", "wgmma at line",    "mbarrier_init at line", "use of the mbarrier at line"};

struct Access {
  std::uint32_t time = 0;    // of the clock of its thread
  int line = 0;              // of the kernel's source; for a load or store, of the collective before it
  std::uint16_t thread = 0;  // from the number of threads on: the agents of mbarriers, then those of warps
  std::uint8_t bytes = 0;    // of the word, a bit each
  AccessKind kind = AccessKind::kLoad;
};

class Races {
 public:
  static constexpr int kSeveralThreads = 0xffff;

  Races(std::size_t bytes, int warps, int barriers, int mbarriers)
      : warps_(warps),
        threads_(warps * 32),
        mbarriers_(mbarriers),
        width_(static_cast<std::size_t>(warps_ + threads_ + mbarriers_ + warps_)),
        writes_(bytes / 4 + 1),
        reads_((bytes / 4 + 1) * static_cast<std::size_t>(warps)),
        clocks_(static_cast<std::size_t>(threads_ + mbarriers_ + warps_)),
        heard_(static_cast<std::size_t>(warps_) * width_),
        meetings_(static_cast<std::size_t>(barriers) * width_),
        cluster_meeting_(width_),
        cluster_released_(width_),
        alone_(static_cast<std::size_t>(warps_)),
        fenced_lanes_(static_cast<std::size_t>(warps_)),
        fences_changed_(static_cast<std::size_t>(warps_)),
        fences_(static_cast<std::size_t>(threads_)),
        fenced_landings_(static_cast<std::size_t>(threads_)),
        own_landings_(static_cast<std::size_t>(threads_)) {}

  // A new cluster knows everything that happened before; so nothing has to be erased.
  void begin_cluster() {
    const std::uint32_t now = *std::max_element(clocks_.begin(), clocks_.end());
    start_ = now + 1;
    single_ = false;
    std::fill(clocks_.begin(), clocks_.end(), start_);
    std::fill(heard_.begin(), heard_.end(), now);
    std::fill(meetings_.begin(), meetings_.end(), 0);
    std::fill(cluster_meeting_.begin(), cluster_meeting_.end(), 0);
    std::fill(alone_.begin(), alone_.end(), 0);
    std::fill(fenced_lanes_.begin(), fenced_lanes_.end(), 0);
    std::fill(own_landings_.begin(), own_landings_.end(), 0);
    for (std::vector<std::vector<std::uint32_t>>* lists : {&fences_, &fenced_landings_})
      for (std::vector<std::uint32_t>& list : *lists) list.clear();
    for (std::vector<std::uint32_t>* rows : {&arriving_, &released_, &landings_}) std::fill(rows->begin(), rows->end(), 0);
  }

  // -- barriers of warps

  void arrive(int barrier, int warp) {
    std::uint32_t* const meeting = row(meetings_, barrier);
    merge(meeting, heard(warp));
    for_lanes(alone_[at(warp)], [&](int lane) { merge(meeting, row(told_, warp * 32 + lane)); });
    meeting[warp] = tick_warp(warp);
  }

  void release(int barrier, std::uint32_t warps) {
    std::uint32_t* const meeting = row(meetings_, barrier);
    for (int warp = 0; warp < warps_; ++warp) {
      if (!(warps >> warp & 1)) continue;
      merge(heard(warp), meeting);
      alone_[at(warp)] = 0;
    }
    std::fill(meeting, meeting + width_, 0);
  }

  // -- the barrier of the cluster, at which a warp first arrives and later waits

  void arrive_at_cluster(int warp) {
    merge(cluster_meeting_.data(), heard(warp));
    for_lanes(alone_[at(warp)], [&](int lane) { merge(cluster_meeting_.data(), row(told_, warp * 32 + lane)); });
    cluster_meeting_[at(warp)] = tick_warp(warp);
  }

  void complete_cluster() {
    cluster_released_ = cluster_meeting_;
    std::fill(cluster_meeting_.begin(), cluster_meeting_.end(), 0);
  }

  void wait_for_cluster(int warp) { merge(heard(warp), cluster_released_.data()); }

  void synchronise_warp(int warp) {
    for_lanes(alone_[at(warp)], [&](int lane) { merge(heard(warp), row(told_, warp * 32 + lane)); });
    alone_[at(warp)] = 0;
    heard(warp)[warp] = tick_warp(warp);
  }

  // -- mbarriers

  // The mbarrier is told what the thread has done and knows.
  void arrive_alone(int mbarrier, int thread) {
    use_single();
    std::uint32_t* const arriving = row(arriving_, mbarrier);
    merge(arriving, heard(thread / 32));
    if (alone(thread)) merge(arriving, row(told_, thread));
    arriving[warps_ + thread] = clocks_[at(thread)]++;
  }

  // It is told that the thread's copies have landed, and of nothing else that the thread has done.
  void copies_arrive(int mbarrier, int thread) {
    std::uint32_t* const arriving = row(arriving_, mbarrier);
    const std::uint32_t* const landings = row(landings_, thread, mbarriers_);
    for (int other = 0; other < mbarriers_; ++other) raise(arriving[warps_ + threads_ + other], landings[other]);
    raise(arriving[warps_ + thread], own_landings_[at(thread)]);
  }

  void land(int mbarrier, int line, long long offset, int size, int thread) {
    row(landings_, thread, mbarriers_)[mbarrier] = store_lands(mbarrier, line, offset, size);
  }

  // What another block of the cluster has stored for the mbarrier is there. Returns the time.
  std::uint32_t store_lands(int mbarrier, int line, long long offset, int size) {
    use_single();
    Access access;
    access.time = clocks_[at(threads_ + mbarrier)];
    access.line = line;
    access.thread = static_cast<std::uint16_t>(threads_ + mbarrier);
    access.bytes = 15;
    access.kind = AccessKind::kCopyLanded;
    // The record of the copy in flight has kept everybody away since it was started.
    std::fill_n(writes_.begin() + static_cast<std::ptrdiff_t>(offset / 4), size / 4, access);
    return access.time;
  }

  void complete(int mbarrier) {
    use_single();
    std::uint32_t* const arriving = row(arriving_, mbarrier);
    arriving[warps_ + threads_ + mbarrier] = clocks_[at(threads_ + mbarrier)]++;
    // Who has heard of each lane has heard of the warp.
    for (int warp = 0; warp < warps_; ++warp) {
      const std::uint32_t* const lanes = arriving + warps_ + warp * 32;
      raise(arriving[warp], *std::min_element(lanes, lanes + 32));
    }
    std::copy(arriving, arriving + width_, row(released_, mbarrier));
    std::fill(arriving, arriving + width_, 0);
  }

  // The thread is told what the last phase that is complete was told.
  void wait(int mbarrier, int thread) {
    use_single();
    const std::uint32_t* const released = row(released_, mbarrier);
    const int warp = thread / 32;
    if (covers(heard(warp), released)) return;
    if (alone(thread)) return merge(row(told_, thread), released);
    std::copy(released, released + width_, row(told_, thread));
    alone_[at(warp)] |= 1u << thread % 32;
  }

  // -- the async proxy

  void fence(int thread) {
    use_single();
    fences_[at(thread)].push_back(clocks_[at(thread)]++);
    std::uint32_t* const known = row(fenced_, thread);
    std::copy(heard(thread / 32), heard(thread / 32) + width_, known);
    if (alone(thread)) merge(known, row(told_, thread));
    std::vector<std::uint32_t>& landings = fenced_landings_[at(thread)];
    landings.insert(landings.end(), known + warps_ + threads_, known + warps_ + threads_ + mbarriers_);
    fenced_lanes_[at(thread / 32)] |= 1u << thread % 32;
    fences_changed_[at(thread / 32)] = true;
  }

  // Each returns the earlier access that this one races with, or null. The wgmma of a warp knows what all lanes of it know.
  const Access* read(Access access, long long offset, int size) {
    return for_words(access, alone_or_not(access), offset, size, &Races::read_word);
  }
  const Access* write(Access access, long long offset, int size) {
    if (access.kind == AccessKind::kCopyLanded) own_landings_[access.thread] = clocks_[access.thread];
    return for_words(access, alone_or_not(access), offset, size, &Races::write_word);
  }
  const Access* read_for_wgmma(Access access, int warp, long long offset, int size) {
    use_single();
    access.thread = static_cast<std::uint16_t>(threads_ + mbarriers_ + warp);
    return for_words(access, {warp, nullptr}, offset, size, &Races::read_word);
  }

  // All lanes are told that what the wgmmas of the warp have read by now is read.
  void complete_wgmma(int warp) {
    use_single();
    const int agent = threads_ + mbarriers_ + warp;
    heard(warp)[warps_ + agent] = clocks_[at(agent)]++;
  }

  // What all lanes of the warp know becomes what the warp knows: before read_for_wgmma, which does not look at each lane.
  void settle(int warp) {
    if (alone_[at(warp)] != 0xffffffff) return;
    const std::uint32_t* const first = row(told_, warp * 32);
    std::vector<std::uint32_t>& common = scratch_;
    common.assign(first, first + width_);
    for (int lane = 1; lane < 32; ++lane) lower(common.data(), row(told_, warp * 32 + lane));
    merge(heard(warp), common.data());
    for (int lane = 0; lane < 32; ++lane) {
      if (covers(heard(warp), row(told_, warp * 32 + lane))) alone_[at(warp)] &= ~(1u << lane);
    }
  }

  // The last write of these words that the async proxy may not see yet, or null: one through the generic proxy, with no fence on the way to
  // who uses it: by who wrote before it told others, by all lanes of the warp after they were told, or, of what
  // cp.async has written, by a thread that has waited for it and then told who uses it.
  const Access* unfenced(int warp, long long offset, int size) {
    const Actor actor{warp, nullptr};
    for (long long word = offset / 4, end = (offset + size + 3) / 4; word < end; ++word) {
      const Access& write = writes_[static_cast<std::size_t>(word)];
      if ((write.kind != AccessKind::kStore && write.kind != AccessKind::kCopyLanded) || write.time < start_) continue;
      const int thread = write.thread;
      if (thread < threads_) {
        const std::vector<std::uint32_t>& fences = fences_[at(thread)];
        const auto fence = std::lower_bound(fences.begin(), fences.end(), write.time);
        if (fence != fences.end() && *fence < time_known(thread, thread / 32, actor)) continue;
      }
      const std::uint32_t* const fenced = fenced_of(warp);
      if (fenced != nullptr && ((thread < threads_ && write.time <= fenced[thread / 32]) || write.time <= fenced[warps_ + thread]))
        continue;
      if (is_between(thread, threads_, threads_ + mbarriers_) && fenced_on_the_way(thread - threads_, write.time, actor)) continue;
      return &write;
    }
    return nullptr;
  }

  // For messages: whether this Access.thread is the agent of the mbarrier or of the warp of that number.
  bool is_of_mbarrier(int thread, int& mbarrier) const { return is_between(thread, threads_, threads_ + mbarriers_, mbarrier); }
  bool is_of_warp(int thread, int& warp) const { return is_between(thread, threads_ + mbarriers_, threads_ + mbarriers_ + warps_, warp); }

 private:
  // Times that somebody has been told of, in rows of width_: of each warp, all its lanes; of each thread; of each agent.
  using Rows = std::vector<std::uint32_t>;

  struct Actor {
    int warp;
    const std::uint32_t* told;  // what a thread knows and its warp does not, or null
  };

  static std::size_t at(int index) { return static_cast<std::size_t>(index); }
  static bool is_between(int number, int first, int end) { return number >= first && number < end; }
  static bool is_between(int number, int first, int end, int& index) {
    index = number - first;
    return number >= first && number < end;
  }
  bool is_agent(int thread) const { return thread >= threads_ && thread != kSeveralThreads; }
  static void raise(std::uint32_t& time, std::uint32_t other) { time = std::max(time, other); }

  std::uint32_t* row(Rows& rows, int index) { return rows.data() + at(index) * width_; }
  static std::uint32_t* row(Rows& rows, int index, int width) { return rows.data() + at(index) * at(width); }
  std::uint32_t* heard(int warp) { return row(heard_, warp); }
  bool alone(int thread) const { return alone_[at(thread / 32)] >> thread % 32 & 1; }
  Access& last_read(std::size_t word, int warp) { return reads_[word * at(warps_) + at(warp)]; }

  template <class Visit>
  static void for_lanes(std::uint32_t lanes, Visit visit) {
    for (; lanes != 0; lanes &= lanes - 1) visit(__builtin_ctz(lanes));
  }

  // Kernels without mbarriers and fences have nothing to say of single threads, and do not pay for it.
  std::size_t used() const { return single_ ? width_ : at(warps_); }
  void use_single() {
    if (single_) return;
    single_ = true;
    for (Rows* rows : {&told_, &fenced_}) rows->resize(at(threads_) * width_);
    for (Rows* rows : {&arriving_, &released_}) rows->resize(at(mbarriers_) * width_);
    landings_.resize(at(threads_) * at(mbarriers_));
  }

  void merge(std::uint32_t* times, const std::uint32_t* others) {
    for (std::size_t i = 0, end = used(); i < end; ++i) times[i] = std::max(times[i], others[i]);
  }
  void lower(std::uint32_t* times, const std::uint32_t* others) {
    for (std::size_t i = 0, end = used(); i < end; ++i) times[i] = std::min(times[i], others[i]);
  }
  bool covers(const std::uint32_t* times, const std::uint32_t* others) {
    bool all = true;
    for (std::size_t i = 0, end = used(); i < end; ++i) all &= times[i] >= others[i];
    return all;
  }

  // Returns the time of the latest access so far of its lanes; what they do from now on is later.
  std::uint32_t tick_warp(int warp) {
    const auto first = clocks_.begin() + warp * 32;
    const std::uint32_t latest = *std::max_element(first, first + 32);
    std::fill(first, first + 32, latest + 1);
    return latest;
  }

  Actor alone_or_not(const Access& access) { return {access.thread / 32, alone(access.thread) ? row(told_, access.thread) : nullptr}; }

  const Access* for_words(Access access, Actor actor, long long offset, int size,
                          const Access* (Races::*visit)(const Access&, const Actor&, std::size_t)) {
    access.time = clocks_[access.thread];
    for (long long at = offset, end = offset + size; at < end;) {
      const int first = static_cast<int>(at & 3), count = static_cast<int>(std::min<long long>(4 - first, end - at));
      access.bytes = static_cast<std::uint8_t>(((1 << count) - 1) << first);
      if (const Access* earlier = (this->*visit)(access, actor, static_cast<std::size_t>(at / 4))) return earlier;
      at += count;
    }
    return nullptr;
  }

  const Access* read_word(const Access& access, const Actor& actor, std::size_t word) {
    const Access& write = writes_[word];
    if (conflict(write, write.thread / 32, access, actor) || overtakes_copy(write, access)) return &write;
    Access& mine = last_read(word, actor.warp);
    if (mine.time == access.time && mine.thread != access.thread && (mine.bytes & access.bytes) && !is_agent(mine.thread) &&
        !is_agent(access.thread)) {
      mine.bytes &= access.bytes;  // of the bytes that several lanes have read, no lane may write any
      mine.thread = kSeveralThreads;
    } else {
      mine = access;
    }
    return nullptr;
  }

  const Access* write_word(const Access& access, const Actor& actor, std::size_t word) {
    Access& write = writes_[word];
    if (conflict(write, write.thread / 32, access, actor)) return &write;
    if (access.kind != AccessKind::kCopyLanded && overtakes_copy(write, access)) return &write;
    for (int warp = 0; warp < warps_; ++warp) {
      if (conflict(last_read(word, warp), warp, access, actor)) return &last_read(word, warp);
    }
    write = access;
    return nullptr;
  }

  bool conflict(const Access& earlier, int warp, const Access& access, const Actor& actor) {
    return (earlier.bytes & access.bytes) && earlier.thread != access.thread && earlier.time >= start_ &&
           earlier.time > time_known(earlier.thread, warp, actor);
  }

  // Up to which time the actor knows what that thread has done.
  std::uint32_t time_known(int thread, int warp, const Actor& actor) {
    std::uint32_t known = 0;
    for (const std::uint32_t* times : {static_cast<const std::uint32_t*>(heard(actor.warp)), actor.told}) {
      if (times == nullptr) continue;
      if (!is_agent(thread)) raise(known, times[warp]);
      if (thread != kSeveralThreads) raise(known, times[warps_ + thread]);
    }
    return known;
  }

  // Its own thread, too, must wait for a copy.
  bool overtakes_copy(const Access& earlier, const Access& access) const {
    return earlier.kind == AccessKind::kCopyInFlight && (earlier.bytes & access.bytes) && earlier.time >= start_;
  }

  // What all lanes of the warp knew when each of them fenced last; null if some lane never did.
  const std::uint32_t* fenced_of(int warp) {
    if (fenced_lanes_[at(warp)] != 0xffffffff) return nullptr;
    fenced_warps_.resize(at(warps_) * width_);
    std::uint32_t* const common = row(fenced_warps_, warp);
    if (fences_changed_[at(warp)]) {
      std::copy(row(fenced_, warp * 32), row(fenced_, warp * 32) + width_, common);
      for (int lane = 1; lane < 32; ++lane) lower(common, row(fenced_, warp * 32 + lane));
      fences_changed_[at(warp)] = false;
    }
    return common;
  }

  // Whether some thread that the actor has heard of fenced when it knew that this copy, of an mbarrier, had landed.
  bool fenced_on_the_way(int mbarrier, std::uint32_t time, const Actor& actor) {
    for (int i = 0; i < threads_; ++i) {
      const int thread = (go_between_ + i) % threads_;
      const std::vector<std::uint32_t>& fences = fences_[at(thread)];
      const std::uint32_t* const landings = fenced_landings_[at(thread)].data() + mbarrier;
      std::size_t first = 0, end = fences.size();  // the first fence that knew is in between
      while (first < end) {
        const std::size_t middle = (first + end) / 2;
        if (landings[middle * at(mbarriers_)] < time)
          first = middle + 1;
        else
          end = middle;
      }
      if (first == fences.size() || fences[first] >= time_known(thread, thread / 32, actor)) continue;
      go_between_ = thread;
      return true;
    }
    return false;
  }

  int warps_, threads_, mbarriers_;
  int go_between_ = 0;  // the thread that it was last time
  std::size_t width_;
  std::uint32_t start_ = 1;
  bool single_ = false;
  std::vector<Access> writes_, reads_;       // the last of each 32-bit word; reads of each warp
  std::vector<std::uint32_t> clocks_;        // of threads, then of mbarriers' copies
  Rows heard_, meetings_;                    // what each warp knows, what each barrier is told
  Rows cluster_meeting_, cluster_released_;  // what the barrier of the cluster is told in this phase, what it was told in the last
  Rows told_;                                // what single threads know besides, where alone_ has their bit
  Rows arriving_, released_;                 // what each mbarrier is told in this phase, what it was told in the last
  std::vector<std::uint32_t> alone_;
  Rows fenced_, fenced_warps_;  // what each thread knew at its last fence, where fenced_lanes_ has its bit; of warps, what all lanes knew
  std::vector<std::uint32_t> fenced_lanes_;
  std::vector<char> fences_changed_;
  std::vector<std::vector<std::uint32_t>> fences_;           // the times of each thread's fences
  std::vector<std::vector<std::uint32_t>> fenced_landings_;  // for each of them, what it knew of the mbarriers' copies
  std::vector<std::uint32_t> landings_;                      // the times at which copies of each thread landed for each mbarrier
  std::vector<std::uint32_t> own_landings_;                  // the time at which copies landed that each thread waited for itself
  std::vector<std::uint32_t> scratch_;
};

}  // namespace host
