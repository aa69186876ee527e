// One block of a grid on the CPU: its threads are fibers, its warps move in step from one collective to the next. The blocks of a cluster
// take turns as their warps do.
//
// Between two collectives the lanes of a warp run one after the other, each up to the next collective; the last to arrive there performs it
// for all 32. Then the schedule says which warp goes on. A lane that waits for an mbarrier holds up itself alone. Whatever the hardware
// would leave undefined ends the launch with a message instead: lanes of one warp at different collectives, threads that returned while
// others wait, barriers that can never fill, addresses outside. Knows the other headers here; nothing of the kernel.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <vector>

#include "async_copy.h"
#include "fiber.h"
#include "mbarrier.h"
#include "races.h"
#include "report.h"
#include "schedule.h"
#include "shared_memory.h"
#include "warpgroup.h"
#include "wgmma.h"

namespace host {

constexpr int kLanes = 32;
constexpr int kWarpgroup = 4;  // warps
constexpr int kBarriers = 16;
constexpr int kRegisters = 65536;  // of a multiprocessor
constexpr std::uint32_t kAllLanes = 0xffffffff;

class Block;
struct Cluster;
struct Warp;

struct Thread {
  Fiber fiber;
  Block* block = nullptr;
  Warp* warp = nullptr;
  int index = 0, lane = 0;
  int number = 0;  // among those of the cluster
  AsyncCopies copies;
  Site site{nullptr, 0};  // of the mbarrier_wait in which it is
};

// The thread that is running. All of a launch is on one operating-system thread; several launches may run at once on several.
KDTREE_HOST_LOCAL inline thread_local Thread* current = nullptr;

struct Warp {
  int index = 0;
  int number = 0;             // among those of the cluster
  Thread* threads = nullptr;  // 32 of them
  LaneOrder order;
  int position = 0;                 // in that order, of the lane that runs
  std::uint32_t ready = kAllLanes;  // lanes that can run, or could if the warp did not wait
  std::uint32_t arrived = 0;        // lanes at the collective `site`
  std::uint32_t returned = 0;       // lanes whose kernel function has returned
  Site site{"the start", 0};
  void* operands[kLanes] = {};
  int result = 0;     // what a collective leaves for all lanes
  int last_line = 0;  // of the last collective that was performed
  Wgmmas wgmmas;
  int registers = 0;  // of each thread
  int wanted = 0;     // that many it waits for
  Site registers_site{nullptr, 0};
  std::uint32_t cluster_arrivals = 0, cluster_waits = 0;  // at the barrier of the cluster
  Site cluster_site{nullptr, 0};
};

struct Barrier {
  Site site{nullptr, 0};  // of the first warp that came
  int expected = 0, arrived = 0;
  std::uint32_t warps = 0;  // that have come
  bool any = false;
  bool same_line = false;  // all must come in that very line
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
  int cluster = 1;  // blocks
};

// What the blocks of a cluster have in common.
struct Cluster {
  Cluster(const BlockShape& shape, Schedule& schedule)
      : schedule(schedule),
        stride((shape.shared_bytes + 15) / 16 * 16),
        shared_base(schedule.shared_base()),
        races(static_cast<std::size_t>(stride * shape.cluster), shape.cluster * shape.threads / kLanes, shape.cluster * kBarriers,
              shape.cluster * Mbarriers::kMost) {}

  Schedule& schedule;
  std::vector<Block*> blocks;
  long long stride;      // from the shared memory of one block to that of the next, as the race detector sees it
  unsigned shared_base;  // its address in each
  Races races;
  Report report;
  Fiber main;
  int running = 0;  // block
  // Its barrier:
  std::uint32_t phase = 0;  // how many are complete
  int arrived = 0;          // warps
};

class Block {
 public:
  using Body = void (*)(const void* argument);

  Block(const BlockShape& shape, Cluster& cluster, StackPool& stacks)
      : shape_(shape),
        cluster_(cluster),
        rank_(static_cast<int>(cluster.blocks.size())),
        schedule_(cluster.schedule),
        stacks_(stacks),
        shared_(static_cast<std::size_t>(shape.shared_bytes), cluster.shared_base + rank_bits()),
        races_(cluster.races),
        threads_(static_cast<std::size_t>(shape.threads)),
        warps_(static_cast<std::size_t>(shape.threads / kLanes)),
        warpgroups_((warps_.size() + kWarpgroup - 1) / kWarpgroup),
        mbarriers_(this, rank_),
        report_(cluster.report) {
    cluster.blocks.push_back(this);
    for (int i = 0; i < shape.threads; ++i) {
      Thread& thread = threads_[static_cast<std::size_t>(i)];
      thread.block = this;
      thread.warp = &warps_[static_cast<std::size_t>(i / kLanes)];
      thread.index = i;
      thread.number = rank_ * shape.threads + i;
      thread.lane = i % kLanes;
    }
  }

  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  // Runs all threads of a cluster, whose first block is (x, y), through body(argument). The report is empty if nothing was wrong.
  static const Report& run(Cluster& cluster, int x, int y, Body body, const void* argument) {
    cluster.report.clear();
    cluster.races.begin_cluster();
    cluster.schedule.begin_cluster();
    cluster.phase = 0, cluster.arrived = 0, cluster.running = 0;
    for (Block* block : cluster.blocks) block->begin(x + block->rank_, y, body, argument);
    current = &cluster.blocks.front()->next_thread();
    cluster.main.switch_to(current->fiber);  // comes back when all threads have returned, or at the first error
    current = nullptr;
    for (Block* block : cluster.blocks) {
      block->check_guards();
      block->check_warpgroups();
    }
    return cluster.report;
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
    warp.ready &= ~(1u << self.lane);
    if ((warp.arrived | warp.returned) != kAllLanes) return hand_over(self, next_of(warp));
    if (warp.returned != 0) fail_returned(warp);
    act(Operands<Operand>(warp.operands));
    warp.last_line = site.line;
    warp.arrived = 0;
    warp.ready = kAllLanes;
    hand_over(self, next_thread());
  }

  // The running thread waits, alone, until somebody wakes it.
  void sleep(Site site) {
    Thread& self = *current;
    self.site = site;
    self.warp->ready &= ~(1u << self.lane);
    hand_over(self, next_of(*self.warp));
  }
  void wake(Thread& thread) {
    thread.warp->ready |= 1u << thread.lane;
    runnable_ |= 1u << thread.warp->index;
  }

  // What the last lane of a warp does at a barrier of the block: the warp waits, unless it is the one that completes it.
  void arrive_at_barrier(Site site, Warp& warp, int id, int expected, bool value, bool same_line) {
    if (id < 0 || id >= kBarriers) fail(site, "there is no barrier %d", id);
    if (expected <= 0 || expected % kLanes != 0) fail(site, "barrier %d for %d threads: not a multiple of a warp", id, expected);
    if (expected > shape_.threads) fail(site, "barrier %d for %d threads: the block has %d", id, expected, shape_.threads);
    Barrier& barrier = barriers_[id];
    const bool first = barrier.arrived == 0;
    if (first) {
      barrier = Barrier{site, expected, 0, 0, false, same_line};
    } else if (barrier.same_line != same_line || (same_line && !(barrier.site == site))) {
      fail(site, "other warps (%08x) meet barrier %d in %s, line %d", barrier.warps, id, barrier.site.primitive, barrier.site.line);
    } else if (barrier.expected != expected) {
      fail(site, "barrier %d for %d threads, but for %d at line %d", id, expected, barrier.expected, barrier.site.line);
    }
    races_.arrive(rank_ * kBarriers + id, warp.number);
    barrier.warps |= 1u << warp.index;
    barrier.arrived += kLanes;
    barrier.any = barrier.any || value;
    runnable_ &= ~barrier.warps;
    if (barrier.arrived < barrier.expected) return;
    runnable_ |= barrier.warps;
    races_.release(rank_ * kBarriers + id, barrier.warps << warps_.front().number);
    for (Warp& waiting : warps_) {
      if (barrier.warps >> waiting.index & 1) waiting.result = barrier.any;
    }
    barrier = Barrier();
  }

  // What the last lane of a warp does at the barrier of the cluster.
  void arrive_at_cluster(Site site, Warp& warp) {
    if (warp.cluster_arrivals != warp.cluster_waits)
      fail(site, "the warp has arrived at the barrier of the cluster, but not waited for it");
    ++warp.cluster_arrivals;
    races_.arrive_at_cluster(warp.number);
    if (++cluster_.arrived < static_cast<int>(cluster_.blocks.size() * warps_.size())) return;
    cluster_.arrived = 0;
    ++cluster_.phase;
    races_.complete_cluster();
    for (Block* block : cluster_.blocks) {
      for (Warp& waiting : block->warps_) {
        if (waiting.cluster_site.primitive == nullptr) continue;
        waiting.cluster_site = {nullptr, 0};
        races_.wait_for_cluster(waiting.number);
        block->runnable_ |= 1u << waiting.index;
      }
    }
  }
  void wait_for_cluster(Site site, Warp& warp) {
    if (warp.cluster_arrivals == warp.cluster_waits) fail(site, "the warp has not arrived at the barrier of the cluster");
    if (++warp.cluster_waits <= cluster_.phase) return races_.wait_for_cluster(warp.number);
    warp.cluster_site = site;
    runnable_ &= ~(1u << warp.index);
  }

  // Addresses have the number of their block at the top: shared memory of a cluster has one address space.
  unsigned rank_bits() const { return static_cast<unsigned>(rank_) << kRankShift; }
  static unsigned without_rank(unsigned address) { return address & ((1u << kRankShift) - 1); }
  unsigned address_in(Site site, unsigned address, int rank) {
    if (rank < 0 || rank >= static_cast<int>(cluster_.blocks.size())) fail(site, "there is no block %d in the cluster", rank);
    if (!shared_.contains(shared_.offset_of(address), 0)) fail_outside(site, shared_.offset_of(address), 0);
    return without_rank(address) | static_cast<unsigned>(rank) << kRankShift;
  }
  // The other block that an address is of.
  Block& checked_other_block(Site site, unsigned address) {
    const unsigned rank = address >> kRankShift;
    if (rank >= cluster_.blocks.size() || cluster_.blocks[rank] == this)
      fail(site, "%08x is no address of another block of the cluster", address);
    return *cluster_.blocks[rank];
  }

  // The warpgroup of a warp, after it was found to be whole.
  Warpgroup& checked_warpgroup(Site site, const Warp& warp) {
    const int first = warp.index / kWarpgroup * kWarpgroup;
    if (first + kWarpgroup > static_cast<int>(warps_.size()))
      fail(site, "warp %d is in no whole warpgroup of %d warps", warp.index, kWarpgroup);
    return warpgroups_[static_cast<std::size_t>(first / kWarpgroup)];
  }

  // The warp gives registers back, or takes some as soon as there are enough.
  void set_registers(Site site, Warp& warp, int registers, bool up) {
    if (up ? registers < warp.registers : registers > warp.registers)
      fail(site, "the warp has %d registers a thread, cannot go %s to %d", warp.registers, up ? "up" : "down", registers);
    warp.wanted = registers;
    warp.registers_site = site;
    if (!up) warp.registers = registers;
    int free = registers_at_start() * static_cast<int>(warps_.size());
    for (const Warp& other : warps_) free -= other.registers;
    runnable_ &= ~(1u << warp.index);
    for (Warp& other : warps_) {
      const int more = other.wanted - other.registers;
      if (other.wanted == 0 || more > free) continue;
      free -= more;
      other.registers = other.wanted;
      other.wanted = 0;
      runnable_ |= 1u << other.index;
    }
  }

  // The offset of `size` bytes of shared memory that a primitive was given, after it was found to be inside and aligned to its size.
  long long checked_offset(Site site, unsigned address, int size) { return checked_offset(site, address, size, size); }
  long long checked_offset(Site site, unsigned address, int size, int alignment) {
    const long long offset = shared_.offset_of(address);
    if (!shared_.contains(offset, size)) current->block->fail_outside(site, offset, size);
    if (offset % alignment != 0) current->block->fail(site, "offset %lld is not a multiple of %d bytes", offset, alignment);
    return offset;
  }

  unsigned char* at(long long offset) { return shared_.data() + offset; }

  // Tell the race detector what the running thread does to this block's memory.
  void note_read(AccessKind kind, int line, long long offset, int size) {
    if (const Access* earlier = races_.read(access(kind, line), in_cluster(offset), size)) fail_race(kind, line, offset, *earlier);
  }
  void note_write(AccessKind kind, int line, long long offset, int size) {
    if (const Access* earlier = races_.write(access(kind, line), in_cluster(offset), size)) fail_race(kind, line, offset, *earlier);
  }
  long long in_cluster(long long offset) const { return rank_ * cluster_.stride + offset; }

  // The same for what goes through the async proxy: the wgmmas of the running warp.
  void note_wgmma_read(int line, long long offset, int size, bool check_fence) {
    const int warp = current->warp->number;
    if (const Access* earlier = races_.read_for_wgmma(access(AccessKind::kWgmma, line), warp, in_cluster(offset), size))
      fail_race(AccessKind::kWgmma, line, offset, *earlier);
    if (!check_fence) return;
    if (const Access* earlier = races_.unfenced(warp, in_cluster(offset), size)) fail_unfenced(AccessKind::kWgmma, line, offset, *earlier);
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
  int rank() const { return rank_; }
  Schedule& schedule() { return schedule_; }
  Mbarriers& mbarriers() { return mbarriers_; }
  Races& races() { return races_; }

 private:
  static constexpr int kRankShift = 24;  // of addresses in a cluster

  void begin(int x, int y, Body body, const void* argument) {
    x_ = x, y_ = y, body_ = body, argument_ = argument;
    shared_.poison();
    mbarriers_.clear();
    for (Barrier& barrier : barriers_) barrier = Barrier();
    for (Warpgroup& warpgroup : warpgroups_) warpgroup.clear();
    for (Thread& thread : threads_) {
      thread.copies.forget();
      thread.fiber.start(stacks_.get(static_cast<std::size_t>(thread.number)), &thread_main);
    }
    const int warps = static_cast<int>(warps_.size());
    for (int i = 0; i < warps; ++i) {
      Warp& warp = warps_[static_cast<std::size_t>(i)];
      warp = Warp();
      warp.index = i;
      warp.number = rank_ * warps + i;
      warp.threads = &threads_[static_cast<std::size_t>(i * kLanes)];
      warp.registers = registers_at_start();
    }
    runnable_ = all_warps();
    running_ = 0;
  }

  static void thread_main() {
    Fiber::entered();
    Block& block = *current->block;
    block.body_(block.argument_);
    block.thread_returned(*current);
  }

  [[noreturn]] void thread_returned(Thread& self) {
    Warp& warp = *self.warp;
    warp.returned |= 1u << self.lane;
    warp.ready &= ~(1u << self.lane);
    if ((warp.arrived | warp.returned) == kAllLanes) {
      if (warp.arrived != 0) fail_returned(warp);
      if (warp.wgmmas.pending()) fail({"wgmma", warp.wgmmas.oldest_line()}, "the warp has returned without a wgmma_wait that covers it");
      bool all = true;
      for (const Block* block : cluster_.blocks) all = all && block->returned_warps() == block->all_warps();
      if (all) self.fiber.leave_for(cluster_.main);
    }
    current = &next_of(warp);
    self.fiber.leave_for(current->fiber);
  }

  [[noreturn]] void abandon() { current->fiber.leave_for(cluster_.main); }

  static void hand_over(Thread& self, Thread& next) {
    if (&next == &self) return;
    current = &next;
    self.fiber.switch_to(next.fiber);
  }

  // At least one lane is ready. The order goes round, for those behind `position` that were woken.
  static Thread& next_lane(Warp& warp) {
    while (!(warp.ready >> warp.order[warp.position] & 1)) ++warp.position;
    return warp.threads[warp.order[warp.position]];
  }

  // Another lane of this warp, or, if none can run, the next warp.
  Thread& next_of(Warp& warp) {
    if (warp.ready != 0) return next_lane(warp);
    runnable_ &= ~(1u << warp.index);
    return next_thread();
  }

  // The first lane to run of the warp to run next, of the block to run next.
  Thread& next_thread() {
    std::uint32_t blocks = 0;
    for (const Block* block : cluster_.blocks) blocks |= static_cast<std::uint32_t>(block->runnable_ != 0) << block->rank_;
    if (blocks == 0) fail_deadlock();
    cluster_.running = schedule_.pick_block(blocks, cluster_.running);
    return cluster_.blocks[static_cast<std::size_t>(cluster_.running)]->next_own_thread();
  }
  Thread& next_own_thread() {
    running_ = schedule_.pick_warp(runnable_, running_);
    Warp& warp = warps_[static_cast<std::size_t>(running_)];
    warp.order = schedule_.lane_order();
    warp.position = 0;
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
    access.thread = static_cast<std::uint16_t>(current->number);
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

  int registers_at_start() const {
    const int registers = kRegisters / shape_.threads / 8 * 8;
    return registers < 256 ? registers : 256;
  }

  void check_warpgroups() {
    for (std::size_t i = 0; i < warpgroups_.size() && report_.empty(); ++i) {
      int missing = 0;
      const Step* const step = warpgroups_[i].incomplete(missing);
      if (step == nullptr) continue;
      report_.add("block (%d,%d): %s at line %d: warp %d of the warpgroup never came there", x_, y_, step->site.primitive, step->site.line,
                  static_cast<int>(i) * kWarpgroup + missing);
    }
  }

  [[noreturn]] void fail_returned(const Warp& warp) {
    fail(warp.site, "lanes %08x of warp %d wait here, but lanes %08x have returned", warp.arrived, warp.index, warp.returned);
  }

  [[noreturn]] void fail_deadlock() {
    for (const Block* block : cluster_.blocks) block->describe_deadlock();
    abandon();
  }

  void describe_deadlock() const {
    report_.add("%sblock (%d,%d): deadlock", rank_ == 0 ? "" : "; ", x_, y_);
    for (int id = 0; id < kBarriers; ++id) {
      const Barrier& barrier = barriers_[id];
      if (barrier.arrived == 0) continue;
      report_.add("; barrier %d: %d of %d threads (warps %08x) wait at %s, line %d", id, barrier.arrived, barrier.expected, barrier.warps,
                  barrier.site.primitive, barrier.site.line);
    }
    for (const Mbarrier& mbarrier : mbarriers_) {
      if (mbarrier.waiting.empty()) continue;
      const Thread& first = *mbarrier.waiting.front();
      report_.add("; ");
      mbarrier.describe(report_);
      report_.add("; %d threads wait, thread %d at line %d", static_cast<int>(mbarrier.waiting.size()), first.index, first.site.line);
    }
    for (const Warp& warp : warps_) {
      if (warp.wanted != 0)
        report_.add("; warp %d waits at %s, line %d", warp.index, warp.registers_site.primitive, warp.registers_site.line);
      if (warp.cluster_site.primitive != nullptr)
        report_.add("; warp %d waits at %s, line %d", warp.index, warp.cluster_site.primitive, warp.cluster_site.line);
    }
    report_.add("; warps that have returned: %08x", returned_warps());
  }

  [[noreturn]] void fail_race(AccessKind kind, int line, long long offset, const Access& earlier) {
    report_.add("block (%d,%d): race at offset %lld of shared memory: %s %d in thread %d, against %s %d in ", x_, y_, offset,
                kAccessNames[static_cast<int>(kind)], line, current->index, kAccessNames[static_cast<int>(earlier.kind)], earlier.line);
    add_thread(earlier.thread);
    report_.add(", and no barrier or wait between them");
    abandon();
  }

  [[noreturn]] void fail_unfenced(AccessKind kind, int line, long long offset, const Access& earlier) {
    report_.add("block (%d,%d): offset %lld of shared memory: %s %d in thread %d, after %s %d in ", x_, y_, offset,
                kAccessNames[static_cast<int>(kind)], line, current->index, kAccessNames[static_cast<int>(earlier.kind)], earlier.line);
    add_thread(earlier.thread);
    report_.add(", and no fence_proxy_async between them");
    abandon();
  }

  // By its number in the cluster.
  void add_thread(int thread) {
    int number = 0, block = 0;
    if (thread == Races::kSeveralThreads) {
      report_.add("several lanes of a warp");
      return;
    }
    if (races_.is_of_mbarrier(thread, number)) {
      block = number / Mbarriers::kMost;
      report_.add("some thread, for the mbarrier at offset %lld",
                  cluster_.blocks[static_cast<std::size_t>(block)]->mbarriers_[number].offset);
    } else if (races_.is_of_warp(thread, number)) {
      block = number / static_cast<int>(warps_.size());
      report_.add("warp %d", number % static_cast<int>(warps_.size()));
    } else {
      block = thread / shape_.threads;
      report_.add("thread %d", thread % shape_.threads);
    }
    if (shape_.cluster > 1) report_.add(" of block %d of the cluster", block);
  }

  const BlockShape shape_;
  Cluster& cluster_;
  const int rank_;  // in the cluster
  Schedule& schedule_;
  StackPool& stacks_;
  SharedMemory shared_;
  Races& races_;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::vector<Warpgroup> warpgroups_;
  Mbarriers mbarriers_;
  Barrier barriers_[kBarriers];
  int x_ = 0, y_ = 0;
  Body body_ = nullptr;
  const void* argument_ = nullptr;
  std::uint32_t runnable_ = 0;  // warps, a bit each
  int running_ = 0;
  Report& report_;
};

}  // namespace host
