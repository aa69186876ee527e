// The primitives of Hopper (sm_90a): mbarriers, wgmma and what goes with them; with the same strictness as device.h, which
// includes this at its end. Copies land when somebody waits for the phase that counts them, wgmmas are performed when somebody waits for
// their group, both as late as the hardware may; what they will change is NaN until then.
#pragma once

#include <cstdint>

#include "block.h"

// -- mbarriers and the copies that they count

namespace host {

// The mbarrier at an address, after it was found to be one. A use of it counts as a read: it must come after the initialisation.
inline Mbarrier& checked_mbarrier(Site site, unsigned address) {
  Block& block = *current->block;
  const long long offset = block.checked_offset(site, address, Mbarrier::kBytes);
  Mbarrier* const mbarrier = block.mbarriers().find(offset);
  if (mbarrier == nullptr) block.fail(site, "no mbarrier was initialised at offset %lld", offset);
  unsigned char bytes[Mbarrier::kBytes];
  copy_bytes(bytes, block.at(offset), sizeof bytes);
  for (const unsigned char byte : bytes) {
    if (byte != Mbarrier::kOpaque) block.fail(site, "something was written over the mbarrier at offset %lld", offset);
  }
  block.note_read(AccessKind::kMbarrier, site.line, offset, Mbarrier::kBytes);
  return *mbarrier;
}

// Goes on to the next phase if nothing is missing in this one, and if it must: copies take their time as long as nobody waits for them.
inline void advance(Mbarrier& mbarrier) {
  Block& block = *current->block;
  if (mbarrier.all_arrivals() != mbarrier.expected || (!mbarrier.copy_arrivals.empty() && mbarrier.waiting.empty())) return;
  for (const CopyArrival& arrival : mbarrier.copy_arrivals) {
    const int thread = arrival.thread->index;
    arrival.thread->copies.land_until(arrival.copies, [&](const AsyncCopy& copy) {
      block.races().land(mbarrier.index, copy.line, copy.offset, 16, thread);
      if (copy.zeros) {
        fill_bytes(block.at(copy.offset), 0, 16);
      } else {
        copy_bytes(block.at(copy.offset), copy.source, 16);
      }
    });
    block.races().copies_arrive(mbarrier.index, thread);
  }
  block.races().complete(mbarrier.index);
  for (Thread* thread : mbarrier.waiting) block.wake(*thread);
  mbarrier.begin_next_phase();
}

inline void check_room_for_arrival(Site site, const Mbarrier& mbarrier) {
  if (mbarrier.all_arrivals() < mbarrier.expected) return;
  current->block->fail(site, "the mbarrier at offset %lld has had all %d arrivals of phase %u, whose copies nobody has waited for",
                       mbarrier.offset, mbarrier.expected, mbarrier.phase);
}

}  // namespace host

inline void mbarrier_init(unsigned mbarrier, int arrivals, KDTREE_HOST_LINE) {
  host::Block& block = *host::current->block;
  const host::Site site{"mbarrier_init", line};
  const long long offset = block.checked_offset(site, mbarrier, host::Mbarrier::kBytes);
  if (arrivals < 1 || arrivals > host::Mbarrier::kMostArrivals)
    block.fail(site, "%d arrivals: must be 1 to %d", arrivals, host::Mbarrier::kMostArrivals);
  if (const host::Mbarrier* other = block.mbarriers().find(offset))
    block.fail(site, "offset %lld is an mbarrier already, initialised at line %d", offset, other->line);
  if (block.mbarriers().full()) block.fail(site, "more than %d mbarriers", host::Mbarriers::kMost);
  host::Mbarrier& added = block.mbarriers().add(offset);
  added.line = line;
  added.expected = arrivals;
  host::fill_bytes(block.at(offset), host::Mbarrier::kOpaque, host::Mbarrier::kBytes);
  block.note_write(host::AccessKind::kMbarrierInit, line, offset, host::Mbarrier::kBytes);
}

// For other blocks of a cluster and for the async proxy, neither of which has to do with mbarriers here.
inline void mbarrier_fence_init() {}

inline void mbarrier_arrive(unsigned mbarrier, KDTREE_HOST_LINE) {
  const host::Site site{"mbarrier_arrive", line};
  host::Mbarrier& arrived = host::checked_mbarrier(site, mbarrier);
  host::check_room_for_arrival(site, arrived);
  host::current->block->races().arrive_alone(arrived.index, host::current->index);
  ++arrived.arrived;
  host::advance(arrived);
}

// Waits until the phase of that parity is complete: the one before the present phase is, the present one is not.
inline void mbarrier_wait(unsigned mbarrier, int parity, KDTREE_HOST_LINE) {
  host::Block& block = *host::current->block;
  const host::Site site{"mbarrier_wait", line};
  if (parity != 0 && parity != 1) block.fail(site, "parity %d: must be 0 or 1", parity);
  host::Mbarrier& waited = host::checked_mbarrier(site, mbarrier);
  const std::uint32_t phase = waited.phase;
  if (static_cast<int>(phase & 1) == parity) {
    waited.waiting.push_back(host::current);
    host::advance(waited);
    if (waited.phase == phase) block.sleep(site);
    // It tries again and again, and may have been elsewhere in the meantime.
    if (waited.phase != phase + 1) block.fail(site, "phase %u was complete, and so was the next one before this thread had seen it", phase);
  }
  block.races().wait(waited.index, host::current->index);
}

// The mbarrier counts an arrival when all cp.asyncs that this thread has started so far have landed.
inline void cp_async_mbarrier_arrive(unsigned mbarrier, KDTREE_HOST_LINE) {
  const host::Site site{"cp_async_mbarrier_arrive", line};
  host::Mbarrier& arrived = host::checked_mbarrier(site, mbarrier);
  host::check_room_for_arrival(site, arrived);
  arrived.copy_arrivals.push_back({host::current, host::current->copies.started()});
  host::advance(arrived);
}

// Between writes of threads, or of their cp.asyncs, and their use by wgmma.
inline void fence_proxy_async() { host::current->block->races().fence(host::current->index); }

// -- within a warp

// An 8 x 8 matrix of 16-bit numbers, of which a lane has row lane / 4 and columns lane % 4 * 2 and the next: transposed.
inline unsigned movmatrix_trans(unsigned a, KDTREE_HOST_LINE) {
  struct Operand {
    unsigned given, taken;
  } operand{a, 0};
  host::current->block->meet({"movmatrix_trans", line}, operand, [](const host::Operands<Operand>& lanes) {
    const auto element = [&](int row, int column) { return lanes[row * 4 + column / 2].given >> column % 2 * 16 & 0xffff; };
    for (int lane = 0; lane < host::kLanes; ++lane) {
      const int row = lane / 4, column = lane % 4 * 2;
      lanes[lane].taken = element(column, row) | element(column + 1, row) << 16;
    }
  });
  return operand.taken;
}

// -- what a warpgroup does

namespace host {

inline void take_step(const Step& step) {
  Block& block = *current->block;
  const Warp& warp = *current->warp;
  const Step* const other = block.checked_warpgroup(step.site, warp).take(warp.index % kWarpgroup, step);
  if (other == nullptr) return;
  block.fail(step.site, "with operands %llx and %llx; another warp of the warpgroup has in its place %s at line %d, with %llx and %llx",
             step.a, step.b, other->site.primitive, other->site.line, other->a, other->b);
}

// act() when all lanes of the warp are here.
template <class Act>
void step_together(Site site, Act act) {
  int nothing = 0;
  current->block->meet(site, nothing, [&](const Operands<int>&) {
    take_step({site});
    act(*current->warp);
  });
}

template <int REGISTERS>
void set_max_registers(Site site, bool up) {
  static_assert(REGISTERS >= 24 && REGISTERS <= 256 && REGISTERS % 8 == 0, "setmaxnreg takes multiples of 8 from 24 to 256");
  step_together(site, [&](Warp& warp) { current->block->set_registers(site, warp, REGISTERS, up); });
}

}  // namespace host

// A kernel is taken to start with as many registers a thread as there are for all its threads, in multiples of 8.
template <int REGISTERS>
void set_max_registers_up(KDTREE_HOST_LINE) {
  host::set_max_registers<REGISTERS>({"set_max_registers_up", line}, true);
}
template <int REGISTERS>
void set_max_registers_down(KDTREE_HOST_LINE) {
  host::set_max_registers<REGISTERS>({"set_max_registers_down", line}, false);
}

// -- wgmma

inline void wgmma_fence(KDTREE_HOST_LINE) {
  host::step_together({"wgmma_fence", line}, [](host::Warp& warp) { warp.wgmmas.fence(); });
}
inline void wgmma_commit(KDTREE_HOST_LINE) {
  host::step_together({"wgmma_commit", line}, [](host::Warp& warp) { warp.wgmmas.commit(); });
}

// Waits until no more than the newest PENDING groups of this warpgroup are on their way.
template <int PENDING>
void wgmma_wait(KDTREE_HOST_LINE) {
  const host::Site site{"wgmma_wait", line};
  host::step_together(site, [site](host::Warp& warp) {
    host::Block& block = *host::current->block;
    block.races().settle(warp.index);
    const bool untouched = warp.wgmmas.wait(PENDING, [&block, site](const host::Wgmma& wgmma, float* values) {
      for (const int offset : wgmma.offsets) block.note_wgmma_read(wgmma.line, offset, 16, false);
      for (const host::Wgmma::Registers& lane : wgmma.registers) {
        for (int i = 0; i < 4; ++i) {
          if (lane.held[i] != lane.words[i])
            block.fail(site, "registers that the wgmma of line %d reads were written to before it was waited for", wgmma.line);
        }
      }
      wgmma.perform(wgmma, block.shared().data(), values);
    });
    block.races().complete_wgmma(warp.index);
    if (!untouched) block.fail(site, "accumulators were written to between wgmma and this wait");
  });
}

// Tells a compiler that does not know what wgmma does to registers.
template <int ROW_TILES>
void hold_accumulators(float (&)[ROW_TILES][4]) {}

// d (64 x 8 * ROW_TILES) += a (64 x 16) * b (16 x 8 * ROW_TILES), in float32, of operands in shared memory that descriptors name: K-major
// both, or, TRANSPOSED, MN-major both. With w the warp of the warpgroup, group = lane / 4 and quad = lane % 4, a lane holds
//   d[n][i]  row 16 * w + group + 8 * (i / 2), column 8 * n + 2 * quad + i % 2
namespace host {

// What a lane brings: accumulators, and A as a descriptor or as four registers.
struct WgmmaOperand {
  float* d;
  unsigned long long a, b;
  const unsigned* registers;
};

template <int ROW_TILES>
void start_wgmma(Site site, WgmmaOperand operand, bool mn_major, Wgmma::Perform perform) {
  static_assert(ROW_TILES >= 1 && ROW_TILES <= 32, "n is a multiple of 8, at most 256");
  constexpr int kColumns = 8 * ROW_TILES;
  current->block->meet(site, operand, [site, mn_major, perform](const Operands<WgmmaOperand>& lanes) {
    Block& block = *current->block;
    Warp& warp = *current->warp;
    const MatrixDescriptor a(lanes[0].a), b(lanes[0].b);
    const bool a_is_shared = lanes[0].registers == nullptr;
    float* d[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      if (lanes[lane].a != lanes[0].a || lanes[lane].b != lanes[0].b) block.fail(site, "the lanes of a warp have different descriptors");
      d[lane] = lanes[lane].d;
    }
    take_step({site, lanes[0].a, lanes[0].b});
    if (const char* fault = a_is_shared ? a.fault(mn_major, 64) : nullptr) block.fail(site, "descriptor %llx of a: %s", lanes[0].a, fault);
    if (const char* fault = b.fault(mn_major, kColumns)) block.fail(site, "descriptor %llx of b: %s", lanes[0].b, fault);
    if (block.shared().address_of(block.shape().shared_bytes) > MatrixDescriptor::kAddresses)
      block.fail(site, "shared memory goes beyond the %u bytes that a descriptor can name", MatrixDescriptor::kAddresses);
    const char* fault = nullptr;
    Wgmma& wgmma = warp.wgmmas.start(d, kColumns, fault);
    if (fault != nullptr) block.fail(site, "%s", fault);
    wgmma.line = site.line;
    wgmma.perform = perform;
    const auto use = [&](unsigned address) {
      const long long offset = block.checked_offset(site, address, 16);
      block.note_wgmma_read(site.line, offset, 16, true);
      wgmma.offsets.push_back(static_cast<int>(offset));
    };
    block.races().settle(warp.index);
    wgmma.offsets.reserve(kPartsOfA + 2 * kColumns);
    const int first_row = warp.index % kWarpgroup * 16;
    if (a_is_shared) {
      for (int i = 0; i < kPartsOfA; ++i) use(part_of_a(a, mn_major, first_row, i));
    } else {
      for (int lane = 0; lane < kLanes; ++lane) {
        const unsigned* const held = lanes[lane].registers;
        wgmma.registers.push_back({held, {held[0], held[1], held[2], held[3]}});
      }
    }
    for (int i = 0; i < 2 * kColumns; ++i) use(part_of_b(b, mn_major, kColumns, i));
  });
}

}  // namespace host

template <class Element, int ROW_TILES, bool TRANSPOSED>
void wgmma_m64k16(float (&d)[ROW_TILES][4], unsigned long long a, unsigned long long b, KDTREE_HOST_LINE) {
  host::start_wgmma<ROW_TILES>({"wgmma_m64k16", line}, {&d[0][0], a, b, nullptr}, TRANSPOSED,
                               &host::perform_wgmma<Element, 8 * ROW_TILES, TRANSPOSED>);
}

// The same of a (64 x 32) of the pool's type and b (32 x 8 * ROW_TILES) of e4m3, both K-major.
template <int ROW_TILES>
void wgmma_fp8_m64k32(float (&d)[ROW_TILES][4], unsigned long long a, unsigned long long b, KDTREE_HOST_LINE) {
  host::start_wgmma<ROW_TILES>({"wgmma_fp8_m64k32", line}, {&d[0][0], a, b, nullptr}, false, &host::perform_fp8_wgmma<Pool, 8 * ROW_TILES>);
}

// d += a (64 x 16) * b, where a comes from registers, which must stay as they are until the wgmma was waited for, and b is MN-major:
//   a[i]  row 16 * w + group + 8 * (i % 2), columns 2 * quad + 8 * (i / 2) and the next
template <class Element, int ROW_TILES>
void wgmma_m64k16(float (&d)[ROW_TILES][4], const unsigned (&a)[4], unsigned long long b, KDTREE_HOST_LINE) {
  host::start_wgmma<ROW_TILES>({"wgmma_m64k16", line}, {&d[0][0], 0, b, a}, true,
                               &host::perform_wgmma_of_registers<Element, 8 * ROW_TILES>);
}
inline void hold_operand(unsigned (&)[4]) {}
