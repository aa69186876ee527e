// What the figures of the kernel are drawn from: the schedule and the shared memory as the kernel's own source has them, printed as JSON.
//
//     layout WORKERS HEADS Q_LEN ROW_BLOCKS ROWS_PER_BLOCK PREFIX...
//
// deals the requests of those prefixes out to the workers of the portable configuration. Compiled with -DKDTREE_HOST -Ikernels, as the CPU
// build is. Knows the kernel's names and nothing of pictures.

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "verify_attn_flash.cu"

namespace {

std::vector<Piece>* dealt;  // of the worker that runs

// One warp: what verify_attention does with its pieces, but for the attention.
void collect(VerifyParams p) {
  const SizedRequest sized = load_sized_request<kTileKeys>(p, threadIdx.x & 31);
  const Schedule schedule = make_schedule<kTileKeys>(p, sized, blockIdx.x);
  Pieces<kTileKeys> pieces(p, schedule, blockIdx.x, sized);
  Piece piece;
  if (!pieces.first(piece)) return;
  do {
    if (threadIdx.x == 0) dealt[blockIdx.x].push_back(piece);
  } while (pieces.next(piece, schedule));
}

void print_pieces(const VerifyParams& params) {
  std::vector<std::vector<Piece>> of_workers(static_cast<std::size_t>(params.workers));
  dealt = of_workers.data();
  const std::string error = host::launch(collect, {params.workers, 1}, 1, 32, 0, params, 0);
  if (!error.empty()) {
    std::fprintf(stderr, "%s\n", error.c_str());
    std::exit(1);
  }
  std::printf("\"pieces\": [");
  const char* comma = "";
  for (int worker = 0; worker < params.workers; worker++)
    for (const Piece& piece : of_workers[static_cast<std::size_t>(worker)]) {
      const Item& item = piece.item;
      std::printf("%s\n  [%d, %d, %d, %d, %d, %d]", comma, worker, item.number, item.row_block, piece.first, piece.last, item.tiles);
      comma = ",";
    }
  std::printf("],\n");
}

// Regions of a block's shared memory: name, first byte, bytes. Regions that lie over others come last.
struct Region {
  const char* name;
  int start, bytes;
};

void print_regions(const char* name, int rows, int bytes, const std::vector<Region>& regions) {
  std::printf("\"%s\": {\"rows\": %d, \"bytes\": %d, \"regions\": [", name, rows, bytes);
  const char* comma = "";
  for (const Region& region : regions) {
    std::printf("%s\n  [\"%s\", %d, %d]", comma, region.name, region.start, region.bytes);
    comma = ",";
  }
  std::printf("]},\n");
}

void print_portable() {
  using G = Geometry<5>;
  print_regions("portable", G::kRows, G::kSharedBytes,
                {{"tile, stage 0", 0, kTileBytes},
                 {"tile, stage 1", kTileBytes, kTileBytes},
                 {"P", G::kOffsetProb, G::kOffsetExchange - G::kOffsetProb},
                 {"partial scores", G::kOffsetExchange, G::kOffsetRows - G::kOffsetExchange},
                 {"rows, schedule", G::kOffsetRows, G::kSharedBytes - G::kOffsetRows},
                 {"before the first tile: queries", G::kOffsetQueries, G::kRows * kRowBytes}});
}

void print_hopper() {
  using G = hopper::Geometry<9>;
  constexpr int kStage = hopper::kChunks * hopper::kChunkBytes;
  print_regions("hopper", G::kRows, G::kSharedBytes,
                {{"queries: latent", 0, G::kOffsetStages},
                 {"stage 0: latent", G::stage(0), kStage},
                 {"stage 1", G::stage(1), kStage},
                 {"stage 2", G::stage(2), kStage},
                 {"stage 3", G::stage(3), kStage},
                 {"rope of stages and queries", G::kOffsetRope, G::kOffsetProb - G::kOffsetRope},
                 {"P, twice", G::kOffsetProb, G::kOffsetPartial - G::kOffsetProb},
                 {"scores of the other block, twice", G::kOffsetPartial, G::kOffsetMbarriers - G::kOffsetPartial},
                 {"mbarriers, rows, schedule", G::kOffsetMbarriers, G::kSharedBytes - G::kOffsetMbarriers}});
}

// Which of the eight 16-byte units of a 128-byte line of a key lies in which eighth of the banks.
void print_swizzle() {
  std::printf("\"swizzle\": [");
  for (int key = 0; key < 8; key++) {
    std::printf("%s[", key ? ", " : "");
    for (int unit = 0; unit < 8; unit++) std::printf("%s%d", unit ? ", " : "", tile_offset(key, unit) % 128 / 16);
    std::printf("]");
  }
  std::printf("]\n");
}

}  // namespace

int main(int count, char** words) {
  if (count < 7) return 2;
  const auto number = [&](int i) { return std::atoi(words[i]); };
  VerifyParams params{};
  params.workers = number(1), params.heads = number(2), params.row_blocks = number(4), params.rows_per_block = number(5);
  params.bs = count - 6;
  std::vector<int> qo_indptr{0}, kv_indptr{0};
  for (int i = 6; i < count; i++) {
    qo_indptr.push_back(qo_indptr.back() + number(3));
    kv_indptr.push_back(kv_indptr.back() + number(i));
  }
  params.qo_indptr = qo_indptr.data(), params.kv_indptr = kv_indptr.data();
  std::printf("{");
  print_pieces(params);
  print_portable();
  print_hopper();
  print_swizzle();
  std::printf("}\n");
}
