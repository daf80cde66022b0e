/* Rotary position embedding of halves in one pass over memory: the pairs (i, i + half) of each head are turned, what is
   behind them is copied.

   Values are float32 or, if narrow, bfloat16 in memory and float32 between; a result is rounded once. */

#include <stdint.h>
#include <string.h>

#include "bfloat16.h"

/* The most pairs of a head. */
#define MOST_PAIRS 256
/* Numbers below which threads cost more than they save: as torch has it. */
#define GRAIN 32768
#ifdef _OPENMP
#define ABREAST _Pragma("omp parallel for schedule(static) if (all * heads * size > GRAIN) num_threads(threads)")
#else
#define ABREAST
#endif

INLINE void turn(const int is_narrow, const void *x, void *y, const float *cos, const float *sin, int64_t half) {
#pragma omp simd
  for (int64_t i = 0; i < half; i++) {
    const float first = value_at(x, i, is_narrow), second = value_at(x, half + i, is_narrow);
    set_value(y, i, first * cos[i] - second * sin[i], is_narrow);
    set_value(y, half + i, second * cos[i] + first * sin[i], is_narrow);
  }
}

/* y [tokens, samples, heads, size] of x, whose first three dimensions are so many numbers apart, by angles of the same
   type, whose first two are; forwards for direction 1, back for -1. */
void rope_turn(const void *x, int64_t token, int64_t sample, int64_t head, const void *cos, const void *sin,
               int64_t angle_token, int64_t angle_sample, void *y, int64_t tokens, int64_t samples, int64_t heads,
               int64_t size, int64_t half, float direction, int is_narrow, int threads) {
  const int64_t all = tokens * samples;
  const size_t number_bytes = is_narrow ? sizeof(uint16_t) : sizeof(float);
  ABREAST
  for (int64_t n = 0; n < all; n++) {
    const int64_t t = n / samples, b = n % samples, angle = t * angle_token + b * angle_sample;
    float cos_n[MOST_PAIRS], sin_n[MOST_PAIRS];
    for (int64_t i = 0; i < half; i++) {
      cos_n[i] = value_at(cos, angle + i, is_narrow);
      sin_n[i] = value_at(sin, angle + i, is_narrow) * direction;
    }
    for (int64_t a = 0; a < heads; a++) {
      const void *x_a = from(x, t * token + b * sample + a * head, is_narrow);
      void *y_a = from(y, (n * heads + a) * size, is_narrow);
      if (is_narrow)
        turn(1, x_a, y_a, cos_n, sin_n, half);
      else
        turn(0, x_a, y_a, cos_n, sin_n, half);
      memcpy(from(y_a, 2 * half, is_narrow), from(x_a, 2 * half, is_narrow), (size - 2 * half) * number_bytes);
    }
  }
}
