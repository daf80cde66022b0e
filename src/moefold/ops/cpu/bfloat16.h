/* Values in memory, float32 or bfloat16, and what they are in between, float32. */

#ifndef MOEFOLD_BFLOAT16_H
#define MOEFOLD_BFLOAT16_H

#include <stdint.h>

#include "exponential.h"

static inline float of_float(float value) { return value; }
static inline float to_float(float value) { return value; }
static inline float of_bfloat16(uint16_t value) { return bits_to_float((uint32_t)value << 16); }

/* To the nearest, ties to even; what is not a number stays none. */
static inline uint16_t to_bfloat16(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (uint16_t)(is_no_number(value) ? 0x7fc0u : rounded);
}

/* Of functions that know where they are called whether memory is narrow, of bfloat16. */
#define INLINE static inline __attribute__((always_inline))

INLINE float value_at(const void *x, int64_t i, const int is_narrow) {
  return is_narrow ? of_bfloat16(((const uint16_t *)x)[i]) : ((const float *)x)[i];
}

INLINE void set_value(void *x, int64_t i, float value, const int is_narrow) {
  if (is_narrow)
    ((uint16_t *)x)[i] = to_bfloat16(value);
  else
    ((float *)x)[i] = value;
}

/* From the number at `place` on. */
static inline void *from(const void *x, int64_t place, int is_narrow) {
  return (char *)x + place * (int64_t)(is_narrow ? sizeof(uint16_t) : sizeof(float));
}

#endif
