// bf16 and fp16 as bits, converted as the GPU's cvt.rn does: to nearest, ties to even, NaN becomes 0x7fff.
// Knows IEEE 754 and nothing else.
#pragma once

#include <cstdint>
#include <cstring>

namespace host {

inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline std::uint16_t bf16_of(float value) {
  const std::uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline std::uint16_t fp16_of(float value) {
  const std::uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  std::uint32_t half;
  if (size > 0x7f800000) return 0x7fff;
  if (size >= 0x47800000) {  // 2^16 and beyond is infinity; from 65520 on, the rounding below arrives there, too
    half = 0x7c00;
  } else if (size >= 0x38800000) {  // 2^-14, the smallest normal fp16
    half = (size + 0xfff + (size >> 13 & 1) - 0x38000000) >> 13;
  } else {  // next to 0.5 a float's unit is 2^-24, that of an fp16 subnormal: the addition does the rounding
    half = bits_of(float_of(size) + 0.5f) - bits_of(0.5f);
  }
  return static_cast<std::uint16_t>(sign | half);
}

inline float float_of_bf16(std::uint32_t bits) { return float_of(bits << 16); }

// Without a branch, so that the compiler can convert several at once.
inline float float_of_fp16(std::uint32_t bits) {
  const float scaled = float_of((bits & 0x7fff) << 13) * 0x1p112f;    // moves the exponent; right for subnormals too
  const std::uint32_t infinite = scaled >= 65536.f ? 0x7f800000 : 0;  // infinity and NaN keep an exponent of all ones
  return float_of(bits_of(scaled) | infinite | (bits & 0x8000) << 16);
}

// fp8 of two kinds: e5m2 is the upper half of an fp16; e4m3 has no infinity, and NaN is all ones.
inline float float_of_e5m2(std::uint32_t bits) { return float_of_fp16((bits & 0xff) << 8); }
inline float float_of_e4m3(std::uint32_t bits) {
  const std::uint32_t size = bits & 0x7f;
  const float scaled = size == 0x7f ? float_of(0x7fffffff) : float_of(size << 20) * 0x1p120f;
  return bits & 0x80 ? -scaled : scaled;
}

// As cvt.rn.satfinite: too large ones become the largest.
inline std::uint8_t e4m3_of(float value) {
  const std::uint32_t bits = bits_of(value), sign = bits >> 24 & 0x80, size = bits & 0x7fffffff;
  if (size > 0x7f800000) return 0x7f;
  std::uint32_t e4m3;
  if (size >= bits_of(448.f)) {
    e4m3 = 0x7e;
  } else if (size >= bits_of(0x1p-6f)) {  // the smallest normal e4m3
    e4m3 = (size + 0x7ffff + (size >> 20 & 1) - (120u << 23)) >> 20;
  } else {  // next to 2^14 a float's unit is 2^-9, that of an e4m3 subnormal: the addition does the rounding
    e4m3 = bits_of(float_of(size) + 0x1p14f) - bits_of(0x1p14f);
  }
  return static_cast<std::uint8_t>(sign | e4m3);
}

template <class Element>
float to_float(std::uint32_t bits) {
  return Element::is_bf16 ? float_of_bf16(bits & 0xffff) : float_of_fp16(bits & 0xffff);
}

}  // namespace host
