/* RMSNorm, x / sqrt(mean(x**2) + eps) * weight over rows, forward and backward. A row is read twice, the second time
   from the cache, so each direction is one pass over memory.

   Values are float32 or bfloat16 in memory and float32 in computation; a result is rounded once. The gradient of the
   weight is summed over blocks of rows, which depend on the number of rows only, and then over the blocks: results are
   bitwise independent of the number of threads. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "bfloat16.h"
#include "parallel.h"

/* Independent partial sums of a row. */
#define LANES 32
/* Minimum rows of a block. */
#define MIN_BLOCK_ROWS 64

ALWAYS_INLINE float sum_lanes(float *lanes) {
  for (int lane = 0; lane < 16; lane++) lanes[lane] += lanes[lane + 16];
  for (int lane = 0; lane < 8; lane++) lanes[lane] += lanes[lane + 8];
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

ALWAYS_INLINE float forward_row(const int is_bfloat16, const void *x, const void *weight, void *y, int64_t size,
                                float eps) {
#define SQUARE(I) load_value(x, I, is_bfloat16) * load_value(x, I, is_bfloat16)
  float lanes[LANES] = {0};
  int64_t i = 0;
  for (; size - i >= LANES; i += LANES)
    for (int lane = 0; lane < LANES; lane++) lanes[lane] += SQUARE(i + lane);
  for (int lane = 0; lane < size - i; lane++) lanes[lane] += SQUARE(i + lane);
#undef SQUARE
  const float scale = 1.0f / sqrtf(sum_lanes(lanes) / (float)size + eps);
#pragma omp simd
  for (i = 0; i < size; i++)
    store_value(y, i, load_value(x, i, is_bfloat16) * scale * load_value(weight, i, is_bfloat16), is_bfloat16);
  return scale;
}

ALWAYS_INLINE void backward_row(const int is_bfloat16, const void *grad, const void *x, const void *weight, float scale,
                                void *grad_x, float *grad_weight, int64_t size) {
#define TERM(I) load_value(x, I, is_bfloat16) * load_value(grad, I, is_bfloat16) * load_value(weight, I, is_bfloat16)
  float lanes[LANES] = {0};
  int64_t i = 0;
  for (; size - i >= LANES; i += LANES)
    for (int lane = 0; lane < LANES; lane++) lanes[lane] += TERM(i + lane);
  for (int lane = 0; lane < size - i; lane++) lanes[lane] += TERM(i + lane);
#undef TERM
  /* The component of the gradient along x, which normalisation removes. */
  const float along = sum_lanes(lanes) * (scale * scale * scale / (float)size);
#pragma omp simd
  for (i = 0; i < size; i++) {
    const float x_i = load_value(x, i, is_bfloat16), grad_i = load_value(grad, i, is_bfloat16);
    grad_weight[i] += x_i * grad_i * scale;
    store_value(grad_x, i, grad_i * load_value(weight, i, is_bfloat16) * scale - x_i * along, is_bfloat16);
  }
}

/* About as many rows in a block as there are blocks, so that both sums are short. */
static int64_t block_rows(int64_t rows) {
  const int64_t count = (int64_t)sqrt((double)rows);
  return count < MIN_BLOCK_ROWS ? MIN_BLOCK_ROWS : count;
}

int64_t norm_num_blocks(int64_t rows) { return (rows + block_rows(rows) - 1) / block_rows(rows); }

/* Write y [rows, size] and the reciprocal RMS of each row; x_row is the row stride of x. */
void norm_forward(const void *x, int64_t x_row, const void *weight, void *y, float *scales, int64_t rows, int64_t size,
                  float eps, int is_bfloat16, int threads) {
  PARALLEL_FOR(rows * size > MIN_PARALLEL_ELEMENTS)
  for (int64_t r = 0; r < rows; r++) {
    const void *x_r = offset_pointer(x, r * x_row, is_bfloat16);
    void *y_r = offset_pointer(y, r * size, is_bfloat16);
    scales[r] = is_bfloat16 ? forward_row(1, x_r, weight, y_r, size, eps) : forward_row(0, x_r, weight, y_r, size, eps);
  }
}

/* Write grad_x [rows, size] and grad_weight [size]; sums [norm_num_blocks, size] is scratch memory. */
void norm_backward(const void *grad, int64_t grad_row, const void *x, int64_t x_row, const void *weight,
                   const float *scales, void *grad_x, void *grad_weight, float *sums, int64_t rows, int64_t size,
                   int is_bfloat16, int threads) {
  const int64_t height = block_rows(rows), blocks = norm_num_blocks(rows);
  PARALLEL_FOR(rows * size > MIN_PARALLEL_ELEMENTS)
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t start = b * height, stop = rows - start < height ? rows : start + height;
    float *sum = sums + b * size;
    memset(sum, 0, size * sizeof *sum);
    for (int64_t r = start; r < stop; r++) {
      const void *grad_r = offset_pointer(grad, r * grad_row, is_bfloat16),
                 *x_r = offset_pointer(x, r * x_row, is_bfloat16);
      void *grad_x_r = offset_pointer(grad_x, r * size, is_bfloat16);
      if (is_bfloat16)
        backward_row(1, grad_r, x_r, weight, scales[r], grad_x_r, sum, size);
      else
        backward_row(0, grad_r, x_r, weight, scales[r], grad_x_r, sum, size);
    }
  }
  for (int64_t b = 1; b < blocks; b++)
    for (int64_t i = 0; i < size; i++) sums[i] += sums[b * size + i];
  for (int64_t i = 0; i < size; i++) store_value(grad_weight, i, sums[i], is_bfloat16);
}
