/* Softmax of rows, and the choice of experts by it.

   A row is computed by one function, in one order, so that its bits do not depend on the number of rows. */

#include <float.h>
#include <stdint.h>

#include "exponential.h"
#include "parallel.h"

/* NaN or +inf, whose softmax is NaN; -ffinite-math-only removes floating-point tests. */
static inline int has_no_softmax(float value) { return is_nan(value) || float_to_bits(value) == 0x7f800000u; }

static inline int is_minus_infinity(float value) { return float_to_bits(value) == 0xff800000u; }

/* y = softmax(x) of n elements; y may be x. NaN as in torch: for a row with NaN or +inf, or with only -inf. */
static __attribute__((noinline)) void softmax_row(const float *x, float *y, int64_t n) {
  float largest = -FLT_MAX, sum = 0.0f;
  int is_undefined = 0, is_empty = 1;
  for (int64_t i = 0; i < n; i++) {
    is_undefined |= has_no_softmax(x[i]);
    is_empty &= is_minus_infinity(x[i]);
    largest = x[i] > largest ? x[i] : largest;
  }
  if (is_undefined || is_empty) {
    for (int64_t i = 0; i < n; i++) y[i] = bits_to_float(0x7fc00000u);
    return;
  }
  for (int64_t i = 0; i < n; i++) y[i] = is_minus_infinity(x[i]) ? 0.0f : exp_float(x[i] - largest);
  for (int64_t i = 0; i < n; i++) sum += y[i];
  for (int64_t i = 0; i < n; i++) y[i] /= sum;
}

/* Softmax of each row of x [rows, n]; y may be x. */
void router_softmax(const float *x, float *y, int64_t rows, int64_t n, int threads) {
  PARALLEL_FOR(rows * n > MIN_PARALLEL_ELEMENTS)
  for (int64_t r = 0; r < rows; r++) softmax_row(x + r * n, y + r * n, n);
}

/* Choose the top_k largest logits of each row, descending, of equal logits the lower expert; their weights are `scale`
   times the softmax of the chosen logits (is_post), or of all logits. `scores` and `taken` are scratch, [experts]
   each. */
void router_choose(const float *logits, int64_t rows, int64_t experts, int64_t top_k, int64_t is_post, float scale,
                   float *scores, uint8_t *taken, int64_t *ids, float *weights) {
  for (int64_t r = 0; r < rows; r++, logits += experts, ids += top_k, weights += top_k) {
    memset(taken, 0, experts);
    for (int64_t k = 0; k < top_k; k++) {
      int64_t best = -1;
      float largest = 0.0f;
      for (int64_t e = 0; e < experts; e++) {
        if (taken[e]) continue;
        /* -inf is a value like others, as in the routers of the modules. */
        const float value = logits[e] < -FLT_MAX ? -FLT_MAX : logits[e];
        if (best < 0 || value > largest) best = e, largest = value;
      }
      taken[best] = 1, ids[k] = best;
    }
    if (is_post) {
      for (int64_t k = 0; k < top_k; k++) weights[k] = logits[ids[k]];
      softmax_row(weights, weights, top_k);
    } else {
      softmax_row(logits, scores, experts);
      for (int64_t k = 0; k < top_k; k++) weights[k] = scores[ids[k]];
    }
    if (scale != 1.0f)
      for (int64_t k = 0; k < top_k; k++) weights[k] *= scale;
  }
}
