/* Loads and stores of float32 or bfloat16 values, which are computed with as float32. */

#ifndef MOEFOLD_BFLOAT16_H
#define MOEFOLD_BFLOAT16_H

#include <stdint.h>

#include "exponential.h"

static inline float float_to_float(float value) { return value; }
static inline float float_from_float(float value) { return value; }
static inline float bfloat16_to_float(uint16_t value) { return bits_to_float((uint32_t)value << 16); }

/* Round to nearest, ties to even; NaN stays NaN. */
static inline uint16_t float_to_bfloat16(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (uint16_t)(is_nan(value) ? 0x7fc0u : rounded);
}

/* Inlined, so that is_bfloat16 is a compile-time constant at each call. */
#define ALWAYS_INLINE static inline __attribute__((always_inline))

ALWAYS_INLINE float load_value(const void *x, int64_t i, const int is_bfloat16) {
  return is_bfloat16 ? bfloat16_to_float(((const uint16_t *)x)[i]) : ((const float *)x)[i];
}

ALWAYS_INLINE void store_value(void *x, int64_t i, float value, const int is_bfloat16) {
  if (is_bfloat16)
    ((uint16_t *)x)[i] = float_to_bfloat16(value);
  else
    ((float *)x)[i] = value;
}

/* Pointer to element `place`. */
static inline void *offset_pointer(const void *x, int64_t place, int is_bfloat16) {
  return (char *)x + place * (int64_t)(is_bfloat16 ? sizeof(uint16_t) : sizeof(float));
}

#endif
