// One block of a grid on the CPU: its threads are fibers, its warps move in step from one collective to the next.
//
// Between two collectives the lanes of a warp run one after the other, each up to the next collective; the last to arrive there performs it
// for all 32. Then the schedule says which warp goes on. Whatever the hardware would leave undefined ends the launch with a message
// instead: lanes of one warp at different collectives, threads that returned while others wait, barriers that can never fill, addresses
// outside. Knows the other headers here; nothing of the kernel.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <vector>

#include "async_copy.h"
#include "fiber.h"
#include "races.h"
#include "report.h"
#include "schedule.h"
#include "shared_memory.h"

namespace host {

constexpr int kLanes = 32;
constexpr int kBarriers = 16;
constexpr std::uint32_t kAllLanes = 0xffffffff;

// Which primitive, on which line of the kernel.
struct Site {
  const char* primitive;
  int line;
};

class Block;
struct Warp;

struct Thread {
  Fiber fiber;
  Block* block = nullptr;
  Warp* warp = nullptr;
  int index = 0, lane = 0;
  AsyncCopies copies;
};

// The thread that is running. All of a launch is on one operating-system thread; several launches may run at once on several.
KDTREE_HOST_LOCAL inline thread_local Thread* current = nullptr;

struct Warp {
  int index = 0;
  Thread* threads = nullptr;  // 32 of them
  LaneOrder order;
  int stopped = 0;             // lanes that have run since the last collective, to the next one or to the end
  std::uint32_t arrived = 0;   // lanes at the collective `site`
  std::uint32_t returned = 0;  // lanes whose kernel function has returned
  Site site{"the start", 0};
  void* operands[kLanes] = {};
  int result = 0;     // what a collective leaves for all lanes
  int last_line = 0;  // of the last collective that was performed
};

struct Barrier {
  Site site{nullptr, 0};  // of the first warp that came
  int expected = 0, arrived = 0;
  std::uint32_t warps = 0;  // that wait
  bool any = false;
};

// The operands of the 32 lanes, as they lie in the lanes' own frames.
template <class Operand>
class Operands {
 public:
  explicit Operands(void* const* lanes) : lanes_(lanes) {}
  Operand& operator[](int lane) const { return *static_cast<Operand*>(lanes_[lane]); }

 private:
  void* const* lanes_;
};

struct BlockShape {
  int grid_x, grid_y, threads, shared_bytes;
};

class Block {
 public:
  using Body = void (*)(const void* argument);

  Block(const BlockShape& shape, Schedule& schedule, StackPool& stacks)
      : shape_(shape),
        schedule_(schedule),
        stacks_(stacks),
        shared_(static_cast<std::size_t>(shape.shared_bytes), schedule.shared_base()),
        races_(static_cast<std::size_t>(shape.shared_bytes), shape.threads / kLanes, kBarriers),
        threads_(static_cast<std::size_t>(shape.threads)),
        warps_(static_cast<std::size_t>(shape.threads / kLanes)) {
    for (int i = 0; i < shape.threads; ++i) {
      Thread& thread = threads_[static_cast<std::size_t>(i)];
      thread.block = this;
      thread.warp = &warps_[static_cast<std::size_t>(i / kLanes)];
      thread.index = i;
      thread.lane = i % kLanes;
    }
  }

  // Runs all threads of block (x, y) through body(argument). The report is empty if nothing was wrong.
  const Report& run(int x, int y, Body body, const void* argument) {
    x_ = x, y_ = y, body_ = body, argument_ = argument;
    report_.clear();
    shared_.poison();
    races_.begin_block();
    schedule_.begin_block();
    for (Barrier& barrier : barriers_) barrier = Barrier();
    for (Thread& thread : threads_) {
      thread.copies.forget();
      thread.fiber.start(stacks_.get(static_cast<std::size_t>(thread.index)), &thread_main);
    }
    for (std::size_t i = 0; i < warps_.size(); ++i) {
      warps_[i] = Warp();
      warps_[i].index = static_cast<int>(i);
      warps_[i].threads = &threads_[i * kLanes];
    }
    runnable_ = all_warps();
    running_ = 0;
    current = &next_thread();
    main_.switch_to(current->fiber);  // comes back when all threads have returned, or at the first error
    current = nullptr;
    check_guards();
    return report_;
  }

  // A collective of a warp: every lane calls this with its operand, the last one runs act(Operands) for all of them.
  template <class Operand, class Act>
  void meet(Site site, Operand& operand, Act act) {
    Thread& self = *current;
    Warp& warp = *self.warp;
    if (warp.arrived != 0 && (warp.site.line != site.line || warp.site.primitive != site.primitive)) {
      fail(site, "the warp diverged: lanes %08x of it are at %s, line %d", warp.arrived, warp.site.primitive, warp.site.line);
    }
    warp.site = site;
    warp.arrived |= 1u << self.lane;
    warp.operands[self.lane] = &operand;
    if (++warp.stopped < kLanes) return hand_over(self, next_lane(warp));
    if (warp.returned != 0) fail_returned(warp);
    act(Operands<Operand>(warp.operands));
    warp.last_line = site.line;
    hand_over(self, next_thread());
  }

  // What the last lane of a warp does at a barrier of the block: the warp waits, unless it is the one that completes it.
  void arrive_at_barrier(Site site, Warp& warp, int id, int expected, bool value, bool same_line) {
    if (id < 0 || id >= kBarriers) fail(site, "there is no barrier %d", id);
    if (expected <= 0 || expected % kLanes != 0) fail(site, "barrier %d for %d threads: not a multiple of a warp", id, expected);
    if (expected > shape_.threads) fail(site, "barrier %d for %d threads: the block has %d", id, expected, shape_.threads);
    Barrier& barrier = barriers_[id];
    const bool first = barrier.arrived == 0;
    if (first) {
      barrier = Barrier{site, expected, 0, 0, false};
    } else if (barrier.site.primitive != site.primitive || (same_line && barrier.site.line != site.line)) {
      fail(site, "other warps (%08x) meet barrier %d in %s, line %d", barrier.warps, id, barrier.site.primitive, barrier.site.line);
    } else if (barrier.expected != expected) {
      fail(site, "barrier %d for %d threads, but for %d at line %d", id, expected, barrier.expected, barrier.site.line);
    }
    races_.arrive(id, warp.index);
    barrier.warps |= 1u << warp.index;
    barrier.arrived += kLanes;
    barrier.any = barrier.any || value;
    runnable_ &= ~(1u << warp.index);
    if (barrier.arrived < barrier.expected) return;
    runnable_ |= barrier.warps;
    races_.release(id, barrier.warps);
    for (Warp& waiting : warps_) {
      if (barrier.warps >> waiting.index & 1) waiting.result = barrier.any;
    }
    barrier = Barrier();
  }

  // The offset of `size` bytes of shared memory that a primitive was given, after it was found to be inside and aligned to its size.
  long long checked_offset(Site site, unsigned address, int size) {
    const long long offset = shared_.offset_of(address);
    if (!shared_.contains(offset, size)) fail_outside(site, offset, size);
    if (offset % size != 0) fail(site, "offset %lld is not a multiple of %d bytes", offset, size);
    return offset;
  }

  unsigned char* at(long long offset) { return shared_.data() + offset; }

  // Tell the race detector what the running thread does.
  void note_read(AccessKind kind, int line, long long offset, int size) {
    if (const Access* earlier = races_.read(access(kind, line), offset, size)) fail_race(kind, line, offset, *earlier);
  }
  void note_write(AccessKind kind, int line, long long offset, int size) {
    if (const Access* earlier = races_.write(access(kind, line), offset, size)) fail_race(kind, line, offset, *earlier);
  }

  // Ends the launch: the threads of this block are left where they are, as nothing of theirs needs to be destroyed.
  [[noreturn]] __attribute__((format(printf, 3, 4))) void fail(Site site, const char* format, ...) {
    report_.add("block (%d,%d) thread %d: %s at line %d: ", x_, y_, current->index, site.primitive, site.line);
    va_list arguments;
    va_start(arguments, format);
    report_.add(format, arguments);
    va_end(arguments);
    abandon();
  }

  [[noreturn]] void fail_outside(Site site, long long offset, int size) {
    fail(site, "offset %lld, size %d: outside the block's %d bytes of shared memory", offset, size, shape_.shared_bytes);
  }

  const BlockShape& shape() const { return shape_; }
  int x() const { return x_; }
  int y() const { return y_; }
  SharedMemory& shared() { return shared_; }
  Races& races() { return races_; }

 private:
  static void thread_main() {
    Fiber::entered();
    Block& block = *current->block;
    block.body_(block.argument_);
    block.thread_returned(*current);
  }

  [[noreturn]] void thread_returned(Thread& self) {
    Warp& warp = *self.warp;
    warp.returned |= 1u << self.lane;
    Thread* next;
    if (++warp.stopped < kLanes) {
      next = &next_lane(warp);
    } else {
      if (warp.arrived != 0) fail_returned(warp);
      runnable_ &= ~(1u << warp.index);
      if (returned_warps() == all_warps()) self.fiber.leave_for(main_);
      next = &next_thread();
    }
    current = next;
    self.fiber.leave_for(next->fiber);
  }

  [[noreturn]] void abandon() { current->fiber.leave_for(main_); }

  static void hand_over(Thread& self, Thread& next) {
    if (&next == &self) return;
    current = &next;
    self.fiber.switch_to(next.fiber);
  }

  static Thread& next_lane(Warp& warp) { return warp.threads[warp.order[warp.stopped]]; }

  // The first lane to run of the warp to run next.
  Thread& next_thread() {
    if (runnable_ == 0) fail_deadlock();
    running_ = schedule_.pick_warp(runnable_, running_);
    Warp& warp = warps_[static_cast<std::size_t>(running_)];
    warp.order = schedule_.lane_order();
    warp.stopped = 0;
    warp.arrived = 0;
    return next_lane(warp);
  }

  std::uint32_t all_warps() const { return kAllLanes >> (kLanes - static_cast<int>(warps_.size())); }
  std::uint32_t returned_warps() const {
    std::uint32_t returned = 0;
    for (const Warp& warp : warps_) returned |= static_cast<std::uint32_t>(warp.returned == kAllLanes) << warp.index;
    return returned;
  }

  static Access access(AccessKind kind, int line) {
    Access access;
    access.thread = static_cast<std::uint16_t>(current->index);
    access.kind = kind;
    access.line = line;
    return access;
  }

  void check_guards() {
    const long long offset = shared_.trespass();
    if (offset == 0 || !report_.empty()) return;
    report_.add("block (%d,%d): a store hit offset %lld, outside the block's %d bytes of shared memory", x_, y_, offset,
                shape_.shared_bytes);
  }

  [[noreturn]] void fail_returned(const Warp& warp) {
    fail(warp.site, "lanes %08x of warp %d wait here, but lanes %08x have returned", warp.arrived, warp.index, warp.returned);
  }

  [[noreturn]] void fail_deadlock() {
    report_.add("block (%d,%d): deadlock", x_, y_);
    for (int id = 0; id < kBarriers; ++id) {
      const Barrier& barrier = barriers_[id];
      if (barrier.arrived == 0) continue;
      report_.add("; barrier %d: %d of %d threads (warps %08x) wait at %s, line %d", id, barrier.arrived, barrier.expected, barrier.warps,
                  barrier.site.primitive, barrier.site.line);
    }
    report_.add("; warps that have returned: %08x", returned_warps());
    abandon();
  }

  [[noreturn]] void fail_race(AccessKind kind, int line, long long offset, const Access& earlier) {
    report_.add("block (%d,%d): race at offset %lld of shared memory: %s %d in thread %d, against %s %d in ", x_, y_, offset,
                kAccessNames[static_cast<int>(kind)], line, current->index, kAccessNames[static_cast<int>(earlier.kind)], earlier.line);
    if (earlier.thread == Races::kSeveralThreads) {
      report_.add("several lanes of a warp");
    } else {
      report_.add("thread %d", earlier.thread);
    }
    report_.add(", and no barrier or wait between them");
    abandon();
  }

  const BlockShape shape_;
  Schedule& schedule_;
  StackPool& stacks_;
  SharedMemory shared_;
  Races races_;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  Barrier barriers_[kBarriers];
  Fiber main_;
  int x_ = 0, y_ = 0;
  Body body_ = nullptr;
  const void* argument_ = nullptr;
  std::uint32_t runnable_ = 0;  // warps, a bit each
  int running_ = 0;
  Report report_;
};

}  // namespace host
