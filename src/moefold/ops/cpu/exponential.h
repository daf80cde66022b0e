/* A vectorisable exp(x), and bit casts of float32. */

#ifndef MOEFOLD_EXPONENTIAL_H
#define MOEFOLD_EXPONENTIAL_H

#include <stdint.h>
#include <string.h>

static inline float bits_to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

/* Tests the bits, because -ffinite-math-only removes floating-point NaN tests. */
static inline int is_nan(float value) { return (float_to_bits(value) & 0x7fffffffu) > 0x7f800000u; }

/* exp(x) to 2 ULP for -87 <= x <= 88, clamped outside: x = n ln 2 + r, and the series of exp(r) for |r| <= ln(2) / 2.
   ln 2 is subtracted in two parts, the first exact. No table and no call, so that compilers vectorise it. */
static inline float exp_float(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  /* Adding 1.5 * 2**23 rounds a number to an integer, which is then in the lowest bits. */
  const float shifted = x * 1.44269504f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float series = 1.0f / 720;
  series = series * r + 1.0f / 120;
  series = series * r + 1.0f / 24;
  series = series * r + 1.0f / 6;
  series = series * r + 0.5f;
  series = series * r + 1.0f;
  series = series * r + 1.0f;
  return bits_to_float(float_to_bits(series) + (float_to_bits(shifted) << 23));
}

#endif
