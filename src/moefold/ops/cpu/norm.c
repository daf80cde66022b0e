/* RMSNorm, x / sqrt(mean(x**2) + eps) * weight over rows, forwards and backwards. A row is read twice, the second time
   out of the cache, so that each is one pass over memory.

   Values are float32 or, if narrow, bfloat16 in memory and float32 between; a result is rounded once. Rows are computed
   alike, and the gradient of the weight is summed by blocks of rows, which go by the number of rows alone, and then over
   the blocks: the number of threads changes no bit. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "bfloat16.h"

/* Numbers below which threads cost more than they save: as torch has it. */
#define GRAIN 32768
#ifdef _OPENMP
#define ABREAST _Pragma("omp parallel for schedule(static) if (rows * size > GRAIN) num_threads(threads)")
#else
#define ABREAST
#endif

/* Sums of a row that run side by side. */
#define LANES 32
/* Rows of a block at least. */
#define LEAST_ROWS 64

INLINE float sum_of(float *lanes) {
  for (int lane = 0; lane < 16; lane++) lanes[lane] += lanes[lane + 16];
  for (int lane = 0; lane < 8; lane++) lanes[lane] += lanes[lane + 8];
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

INLINE float forward_row(const int is_narrow, const void *x, const void *weight, void *y, int64_t size, float eps) {
#define SQUARE(I) value_at(x, I, is_narrow) * value_at(x, I, is_narrow)
  float lanes[LANES] = {0};
  int64_t i = 0;
  for (; size - i >= LANES; i += LANES)
    for (int lane = 0; lane < LANES; lane++) lanes[lane] += SQUARE(i + lane);
  for (int lane = 0; lane < size - i; lane++) lanes[lane] += SQUARE(i + lane);
#undef SQUARE
  const float scale = 1.0f / sqrtf(sum_of(lanes) / (float)size + eps);
#pragma omp simd
  for (i = 0; i < size; i++)
    set_value(y, i, value_at(x, i, is_narrow) * scale * value_at(weight, i, is_narrow), is_narrow);
  return scale;
}

INLINE void backward_row(const int is_narrow, const void *grad, const void *x, const void *weight, float scale,
                         void *grad_x, float *grad_weight, int64_t size) {
#define TERM(I) value_at(x, I, is_narrow) * value_at(grad, I, is_narrow) * value_at(weight, I, is_narrow)
  float lanes[LANES] = {0};
  int64_t i = 0;
  for (; size - i >= LANES; i += LANES)
    for (int lane = 0; lane < LANES; lane++) lanes[lane] += TERM(i + lane);
  for (int lane = 0; lane < size - i; lane++) lanes[lane] += TERM(i + lane);
#undef TERM
  /* The part of the gradient along x, which scaling takes out. */
  const float along = sum_of(lanes) * (scale * scale * scale / (float)size);
#pragma omp simd
  for (i = 0; i < size; i++) {
    const float x_i = value_at(x, i, is_narrow), grad_i = value_at(grad, i, is_narrow);
    grad_weight[i] += x_i * grad_i * scale;
    set_value(grad_x, i, grad_i * value_at(weight, i, is_narrow) * scale - x_i * along, is_narrow);
  }
}

/* About as many rows as there are blocks: sums of both are short then. */
static int64_t block_rows(int64_t rows) {
  const int64_t count = (int64_t)sqrt((double)rows);
  return count < LEAST_ROWS ? LEAST_ROWS : count;
}

int64_t norm_blocks(int64_t rows) { return (rows + block_rows(rows) - 1) / block_rows(rows); }

/* y [rows, size] and what each row was scaled by; rows of x are x_row numbers apart. */
void norm_forward(const void *x, int64_t x_row, const void *weight, void *y, float *scales, int64_t rows, int64_t size,
                  float eps, int is_narrow, int threads) {
  ABREAST
  for (int64_t r = 0; r < rows; r++) {
    const void *x_r = from(x, r * x_row, is_narrow);
    void *y_r = from(y, r * size, is_narrow);
    scales[r] = is_narrow ? forward_row(1, x_r, weight, y_r, size, eps) : forward_row(0, x_r, weight, y_r, size, eps);
  }
}

/* grad_x [rows, size] and grad_weight [size]; sums [norm_blocks, size] are scratch memory. */
void norm_backward(const void *grad, int64_t grad_row, const void *x, int64_t x_row, const void *weight,
                   const float *scales, void *grad_x, void *grad_weight, float *sums, int64_t rows, int64_t size,
                   int is_narrow, int threads) {
  const int64_t height = block_rows(rows), blocks = norm_blocks(rows);
  ABREAST
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t start = b * height, stop = rows - start < height ? rows : start + height;
    float *sum = sums + b * size;
    memset(sum, 0, size * sizeof *sum);
    for (int64_t r = start; r < stop; r++) {
      const void *grad_r = from(grad, r * grad_row, is_narrow), *x_r = from(x, r * x_row, is_narrow);
      void *grad_x_r = from(grad_x, r * size, is_narrow);
      if (is_narrow)
        backward_row(1, grad_r, x_r, weight, scales[r], grad_x_r, sum, size);
      else
        backward_row(0, grad_r, x_r, weight, scales[r], grad_x_r, sum, size);
    }
  }
  for (int64_t b = 1; b < blocks; b++)
    for (int64_t i = 0; i < size; i++) sums[i] += sums[b * size + i];
  for (int64_t i = 0; i < size; i++) set_value(grad_weight, i, sums[i], is_narrow);
}
