// What the kernels of host_kernels.cu and host_hopper_kernels.cu are given, by host_program.cpp.
#pragma once

struct VerifyParams {
  const unsigned char* in;
  unsigned char* out;
  int arguments[4];
};
