/* Draws of tokens from rows of logits: the most likely token, or the inverse of the cumulative distribution.

   Weights are proportional to the probabilities, in float64 and rounded to integers, so that their sums are exact. */

#include <float.h>
#include <math.h>
#include <stdint.h>

#include "exponential.h"

/* Tokens whose weights are computed together, and most blocks of a row. */
#define BLOCK 1024
#define MAX_BLOCKS 1024
/* Distance to the largest logit from which a weight, below 2^62, is 0. */
#define LOWEST (-64.0)
#define NO_TOKEN (-1)

/* Most tokens of a row. */
int64_t draw_max_tokens(void) { return (int64_t)BLOCK * MAX_BLOCKS; }

/* exp(x) to 2 ULP for LOWEST <= x <= 0: x = n ln 2 + r, and the series of exp(r) for |r| <= ln(2) / 2. */
static inline double exp_double(double x) {
  /* Adding 1.5 * 2**52 rounds a number to an integer, which is then in the lowest bits. */
  const double shifted = x * 1.4426950408889634 + 6755399441055744.0;
  const double n = shifted - 6755399441055744.0;
  /* The first part of ln 2 has few bits, so that its product with n is exact. */
  const double r = (x - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
  double series = 1.0 / 6227020800;
  series = series * r + 1.0 / 479001600;
  series = series * r + 1.0 / 39916800;
  series = series * r + 1.0 / 3628800;
  series = series * r + 1.0 / 362880;
  series = series * r + 1.0 / 40320;
  series = series * r + 1.0 / 5040;
  series = series * r + 1.0 / 720;
  series = series * r + 1.0 / 120;
  series = series * r + 1.0 / 24;
  series = series * r + 1.0 / 6;
  series = series * r + 0.5;
  series = series * r + 1.0;
  series = series * r + 1.0;
  uint64_t bits, shift;
  memcpy(&bits, &series, sizeof bits);
  memcpy(&shift, &shifted, sizeof shift);
  bits += shift << 52;
  memcpy(&series, &bits, sizeof bits);
  return series;
}

/* Largest logit of a row in *top; 0 if the row has no distribution: NaN, +inf, or only -inf. */
static int find_top(const float *logits, int64_t n, float *top) {
  float largest = -FLT_MAX;
  uint32_t is_undefined = 0, is_finite = 0;
  for (int64_t i = 0; i < n; i++) {
    const uint32_t bits = float_to_bits(logits[i]);
    is_undefined |= (bits & 0x7fffffffu) > 0x7f800000u || bits == 0x7f800000u;
    is_finite |= bits != 0xff800000u;
    largest = logits[i] > largest ? logits[i] : largest;
  }
  *top = largest;
  return is_finite && !is_undefined;
}

/* Weights of n <= BLOCK tokens; returns their sum. */
static __attribute__((noinline)) int64_t find_weights(const float *logits, int64_t n, double top, double temperature,
                                                      double unit, int64_t *weights) {
  int64_t sum = 0;
  /* Loops of one element size each are vectorised. */
  double values[BLOCK];
  for (int64_t i = 0; i < n; i++) values[i] = logits[i];
  for (int64_t i = 0; i < n; i++) {
    const double distance = values[i] / temperature - top;
    values[i] = exp_double(distance < LOWEST ? LOWEST : distance) * unit;
  }
  for (int64_t i = 0; i < n; i++) weights[i] = (int64_t)__builtin_rint(values[i]);
  for (int64_t i = 0; i < n; i++) sum += weights[i];
  return sum;
}

static int64_t draw_row(const float *logits, int64_t n, double temperature, double unit, double uniform) {
  float top;
  if (!find_top(logits, n, &top)) return NO_TOKEN;
  if (temperature == 0) {
    int64_t i = 0;
    while (logits[i] != top) i++;
    return i;
  }
  int64_t weights[BLOCK], sums[MAX_BLOCKS], total = 0;
  const double scaled_top = (double)top / temperature;
  for (int64_t b = 0; b * BLOCK < n; b++) {
    const int64_t count = n - b * BLOCK < BLOCK ? n - b * BLOCK : BLOCK;
    sums[b] = find_weights(logits + b * BLOCK, count, scaled_top, temperature, unit, weights);
    total += sums[b];
  }
  /* The product is rounded, maybe up to the sum. */
  int64_t left = (int64_t)(uniform * (double)total), b = 0, i = 0;
  left = left < total ? left : total - 1;
  for (; left >= sums[b]; b++) left -= sums[b];
  find_weights(logits + b * BLOCK, n - b * BLOCK < BLOCK ? n - b * BLOCK : BLOCK, scaled_top, temperature, unit, weights);
  for (; left >= weights[i]; i++) left -= weights[i];
  return b * BLOCK + i;
}

/* Draw a token from each row of logits [rows, n], `stride` apart: the first of the largest at temperature 0, else by
   uniforms [rows] in [0, 1); NO_TOKEN for a row with NaN or infinity. The weight of the largest is `unit`. */
void draw_tokens(const float *logits, int64_t stride, int64_t rows, int64_t n, double temperature, double unit,
                 const double *uniforms, int64_t *tokens) {
  for (int64_t r = 0; r < rows; r++)
    tokens[r] = draw_row(logits + r * stride, n, temperature, unit, temperature == 0 ? 0 : uniforms[r]);
}
