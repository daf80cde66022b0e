/* Combine of a mixture-of-experts layer, the weighted sum of each token's rows, and its gradients.

   Values are float32 or bfloat16 in memory and float32 in computation. A sum is over ascending choices, each product
   fused with its addition where the processor can, and is rounded once: it does not depend on the other tokens. */

#include <stdint.h>

#include "bfloat16.h"
#include "parallel.h"

/* Columns summed at a time. */
#define COLUMNS 128

#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define FUSED_MULTIPLY_ADD(a, b, sum) __builtin_fmaf(a, b, sum)
#else
#define FUSED_MULTIPLY_ADD(a, b, sum) ((sum) + (a) * (b))
#endif

ALWAYS_INLINE void combine_token(const int is_bfloat16, const void *y, const int64_t *rows, const float *weights,
                                 void *out, int64_t top_k, int64_t width) {
  for (int64_t first = 0; first < width; first += COLUMNS) {
    const int64_t count = width - first < COLUMNS ? width - first : COLUMNS;
    float sums[COLUMNS] = {0};
    for (int64_t k = 0; k < top_k; k++) {
      const float weight = weights ? weights[k] : 1.0f;
      const void *row = offset_pointer(y, rows[k] * width + first, is_bfloat16);
      for (int64_t i = 0; i < count; i++) sums[i] = FUSED_MULTIPLY_ADD(weight, load_value(row, i, is_bfloat16), sums[i]);
    }
    for (int64_t i = 0; i < count; i++) store_value(out, first + i, sums[i], is_bfloat16);
  }
}

/* Write out [tokens, width]: the sums of the rows of y [., width] with numbers rows [tokens, top_k], times the weights
   of the same shape, or 1 without. */
void combine(const void *y, const int64_t *rows, const float *weights, void *out, int64_t tokens, int64_t top_k,
             int64_t width, int is_bfloat16, int threads) {
  PARALLEL_FOR(tokens * top_k * width > MIN_PARALLEL_ELEMENTS)
  for (int64_t t = 0; t < tokens; t++) {
    const float *weights_t = weights ? weights + t * top_k : 0;
    void *out_t = offset_pointer(out, t * width, is_bfloat16);
    if (is_bfloat16)
      combine_token(1, y, rows + t * top_k, weights_t, out_t, top_k, width);
    else
      combine_token(0, y, rows + t * top_k, weights_t, out_t, top_k, width);
  }
}

/* Partial sums of a dot product, a whole number of vectors. */
#define PARTIAL_SUMS 32

/* scaled = weight * grad, rounded once; returns the dot product of grad and y, in partial sums that are added in
   order. */
ALWAYS_INLINE float scale_and_dot(const int is_bfloat16, const void *grad, const void *y, float weight, void *scaled,
                                  int64_t width) {
  float sums[PARTIAL_SUMS] = {0}, total = 0.0f;
  int64_t first = 0;
  for (; first + PARTIAL_SUMS <= width; first += PARTIAL_SUMS)
    for (int64_t i = 0; i < PARTIAL_SUMS; i++) {
      const float value = load_value(grad, first + i, is_bfloat16);
      sums[i] = FUSED_MULTIPLY_ADD(value, load_value(y, first + i, is_bfloat16), sums[i]);
      store_value(scaled, first + i, weight * value, is_bfloat16);
    }
  for (int64_t i = 0; first + i < width; i++) {
    const float value = load_value(grad, first + i, is_bfloat16);
    sums[i] = FUSED_MULTIPLY_ADD(value, load_value(y, first + i, is_bfloat16), sums[i]);
    store_value(scaled, first + i, weight * value, is_bfloat16);
  }
  for (int64_t i = 0; i < PARTIAL_SUMS; i++) total += sums[i];
  return total;
}

/* Write the gradients of `combine` from the gradient of its result, [tokens, width]: of the rows of y, each of
   which belongs to one choice of one token, and of the weights, [tokens, top_k]. */
void combine_backward(const void *grad, const void *y, const int64_t *rows, const float *weights, void *grad_y,
                      float *grad_weights, int64_t tokens, int64_t top_k, int64_t width, int is_bfloat16,
                      int threads) {
  PARALLEL_FOR(tokens * top_k * width > MIN_PARALLEL_ELEMENTS)
  for (int64_t t = 0; t < tokens; t++) {
    const void *grad_t = offset_pointer(grad, t * width, is_bfloat16);
    for (int64_t k = t * top_k; k < (t + 1) * top_k; k++) {
      const void *row = offset_pointer(y, rows[k] * width, is_bfloat16);
      void *scaled = offset_pointer(grad_y, rows[k] * width, is_bfloat16);
      grad_weights[k] = is_bfloat16 ? scale_and_dot(1, grad_t, row, weights[k], scaled, width)
                                    : scale_and_dot(0, grad_t, row, weights[k], scaled, width);
    }
  }
}
