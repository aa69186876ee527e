// Runs a kernel of host_kernels.cu or host_hopper_kernels.cu from the command line, so that a sanitizer's build needs no Python around it:
//
//     program KERNEL GRID_X GRID_Y BLOCK SHARED_BYTES FIRST_SEED SEEDS INPUT OUTPUT OUTPUT_BYTES ARGUMENT...
//
// INPUT and OUTPUT are files; OUTPUT holds OUTPUT_BYTES for each seed. Prints a line for each seed: what was wrong, or nothing.

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <vector>

#include "host_params.h"

extern "C" int kdtree_host_launch(const char* kernel, int grid_x, int grid_y, int block_x, int shared_bytes, const void* params,
                                  unsigned long long seed, char* error, int error_bytes);
extern "C" int kdtree_host_params_size();

int main(int count, char** words) {
  if (count < 11 || count > 15 || kdtree_host_params_size() != sizeof(VerifyParams)) return 2;
  const auto number = [&](int i) { return std::atoi(words[i]); };
  std::ifstream input(words[8], std::ios::binary);
  const std::vector<char> in{std::istreambuf_iterator<char>(input), {}};
  std::ofstream output(words[9], std::ios::binary);
  for (int i = 0; i < number(7); i++) {
    std::vector<unsigned char> given(in.begin(), in.end()), out(static_cast<std::size_t>(number(10)));
    VerifyParams params{given.data(), out.data(), {}};
    for (int j = 11; j < count; j++) params.arguments[j - 11] = number(j);
    char error[1024] = "";
    const unsigned long long seed = std::strtoull(words[6], nullptr, 10) + static_cast<unsigned long long>(i);
    kdtree_host_launch(words[1], number(2), number(3), number(4), number(5), &params, seed, error, sizeof error);
    std::printf("%s\n", error);
    output.write(reinterpret_cast<const char*>(out.data()), static_cast<std::streamsize>(out.size()));
  }
}
