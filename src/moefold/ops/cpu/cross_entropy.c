/* Softmax statistics of rows of logits, for the loss: the maximum, the sum of the exponentials, the logit of the label.

   A row is computed by one function, in one order, so that its bits do not depend on threads and other rows. */

#include <float.h>
#include <stdint.h>

#include "bfloat16.h"
#include "exponential.h"
#include "integers.h"
#include "parallel.h"

/* Sums of a row that grow side by side, whatever the width of a vector. */
#define SUMS 64

/* Largest of n logits; NaN for a row without softmax: with NaN or +inf, or only -inf. */
static float find_top(const float *x, int64_t n) {
  float largest = -FLT_MAX;
  uint32_t is_undefined = 0, is_finite = 0;
  for (int64_t i = 0; i < n; i++) {
    const uint32_t bits = float_to_bits(x[i]);
    is_undefined |= is_nan(x[i]) || bits == 0x7f800000u;
    is_finite |= bits != 0xff800000u;
    largest = x[i] > largest ? x[i] : largest;
  }
  return is_undefined || !is_finite ? bits_to_float(0x7fc00000u) : largest;
}

/* Add exp(x - top) of `count` logits to their sums. */
ALWAYS_INLINE void add_exponentials(float *sums, const float *x, float *y, int64_t count, float top, const int writes) {
  _Pragma("GCC ivdep") for (int64_t i = 0; i < count; i++) {
    const float distance = x[i] - top;
    /* A mask, because gcc makes no vectors of a branch. */
    const float value = bits_to_float(float_to_bits(exp_float(distance)) & -(uint32_t)(distance >= -87.0f));
    sums[i] += value;
    if (writes) y[i] = value;
  }
}

/* Sum of exp(x - top); writes them to y, which may be x, if asked. */
ALWAYS_INLINE float sum_exponentials(const float *x, float *y, int64_t n, float top, const int writes) {
  float sums[SUMS] = {0};
  for (int64_t from = 0; from < n; from += SUMS)
    /* Of a constant count gcc 12 would make as many steps without vectors. */
    add_exponentials(sums, x + from, y + from, min_i64(SUMS, n - from), top, writes);
  float sum = 0.0f;
  for (int i = 0; i < SUMS; i++) sum += sums[i];
  return sum;
}

/* Statistics of the rows of x [rows, n]; a label below 0 has no logit. The exponentials are written to y, which may be
   x, unless y is NULL. */
void cross_entropy_statistics(const float *x, float *y, const int64_t *labels, float *tops, float *sums, float *targets,
                              int64_t rows, int64_t n, int threads) {
  PARALLEL_FOR(rows * n > MIN_PARALLEL_ELEMENTS)
  for (int64_t r = 0; r < rows; r++) {
    const float *const x_r = x + r * n;
    float *const y_r = y ? y + r * n : 0;
    const float top = find_top(x_r, n);
    targets[r] = labels[r] < 0 ? 0.0f : x_r[labels[r]];
    tops[r] = top;
    if (!is_nan(top))
      sums[r] = y ? sum_exponentials(x_r, y_r, n, top, 1) : sum_exponentials(x_r, 0, n, top, 0);
    else
      sums[r] = top;
    if (is_nan(top) && y)
      for (int64_t i = 0; i < n; i++) y_r[i] = top;
  }
}
