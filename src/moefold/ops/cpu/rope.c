/* Rotary position embedding (RoPE) of half-split pairs in one pass over memory: the pairs (i, i + half) of each head
   are rotated, the dims after them are copied.

   Values are float32 or bfloat16 in memory and float32 in computation; a result is rounded once. */

#include <stdint.h>
#include <string.h>

#include "bfloat16.h"
#include "parallel.h"

/* Maximum pairs of a head. */
#define MAX_PAIRS 256

ALWAYS_INLINE void rotate_pairs(const int is_bfloat16, const void *x, void *y, const float *cos, const float *sin,
                                int64_t half) {
#pragma omp simd
  for (int64_t i = 0; i < half; i++) {
    const float first = load_value(x, i, is_bfloat16), second = load_value(x, half + i, is_bfloat16);
    store_value(y, i, first * cos[i] - second * sin[i], is_bfloat16);
    store_value(y, half + i, second * cos[i] + first * sin[i], is_bfloat16);
  }
}

/* Write y [tokens, samples, heads, size]. token, sample and head are the strides of x, angle_token and angle_sample
   the strides of cos and sin, which have the same type, in elements. direction: 1 forward, -1 backward. */
void rope_apply(const void *x, int64_t token, int64_t sample, int64_t head, const void *cos, const void *sin,
                int64_t angle_token, int64_t angle_sample, void *y, int64_t tokens, int64_t samples, int64_t heads,
                int64_t size, int64_t half, float direction, int is_bfloat16, int threads) {
  const int64_t all = tokens * samples;
  const size_t number_bytes = is_bfloat16 ? sizeof(uint16_t) : sizeof(float);
  PARALLEL_FOR(all * heads * size > MIN_PARALLEL_ELEMENTS)
  for (int64_t n = 0; n < all; n++) {
    const int64_t t = n / samples, b = n % samples, angle = t * angle_token + b * angle_sample;
    float cos_n[MAX_PAIRS], sin_n[MAX_PAIRS];
    for (int64_t i = 0; i < half; i++) {
      cos_n[i] = load_value(cos, angle + i, is_bfloat16);
      sin_n[i] = load_value(sin, angle + i, is_bfloat16) * direction;
    }
    for (int64_t a = 0; a < heads; a++) {
      const void *x_a = offset_pointer(x, t * token + b * sample + a * head, is_bfloat16);
      void *y_a = offset_pointer(y, (n * heads + a) * size, is_bfloat16);
      if (is_bfloat16)
        rotate_pairs(1, x_a, y_a, cos_n, sin_n, half);
      else
        rotate_pairs(0, x_a, y_a, cos_n, sin_n, half);
      memcpy(offset_pointer(y_a, 2 * half, is_bfloat16), offset_pointer(x_a, 2 * half, is_bfloat16),
             (size - 2 * half) * number_bytes);
    }
  }
}
