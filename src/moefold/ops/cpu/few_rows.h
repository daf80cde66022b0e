/* Products of few rows with a float32 matrix, which is read once and in the order of memory: its bandwidth is the limit.

   A result is summed in the order of the tiles of gemm.c. The including source defines VECTOR, STEPS and
   FETCH_INTO_L2. */

#ifndef MOEFOLD_FEW_ROWS_H
#define MOEFOLD_FEW_ROWS_H

#include <stdint.h>

#include "multiply_add.h"
#include "transpose.h"

/* Maximum number of rows, which share each loaded vector of the matrix. */
#define FEW_ROWS 8
/* Columns whose sums stay in the first cache, and steps that are added to them at a time. */
#define STREAMED_COLUMNS 1024
#define STREAMED_STEPS 8
/* Steps between those that are fetched and those that are read. */
#define FETCHED_AHEAD 16

/* x [rows, depth], with row stride x_row; w, whose steps or whose columns are w_stride apart; out with row stride
   out_row. Columns are a multiple of two vectors. */
typedef void few_rows(const float *x, int64_t x_row, const float *w, int64_t w_stride, int64_t columns, int64_t depth,
                      float *out, int64_t out_row);

/* to = sums of the chunk from step `from` on, after the chunks before it. */
ALWAYS_INLINE void finish_chunk(float *to, vector sums, int64_t from) {
  if (from) sums += *(vector *)to;
  *(vector *)to = sums;
}

/* Add `steps` steps to the sums of all columns. */
ALWAYS_INLINE void stream_steps(const int rows, const int steps, const float *x, int64_t x_row, const float *w,
                                int64_t w_step, int64_t vectors, vector sums[][STREAMED_COLUMNS / VECTOR]) {
  for (int64_t v = 0; v < vectors; v += 2, w += 2 * VECTOR) {
    vector s[FEW_ROWS][2];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) s[r][0] = sums[r][v], s[r][1] = sums[r][v + 1];
#pragma GCC unroll 8
    for (int u = 0; u < steps; u++) {
      const float *const of_w = w + u * w_step;
      const vector w_0 = *(const vector *)of_w, w_1 = *(const vector *)(of_w + VECTOR);
      FETCH_INTO_L2(of_w + FETCHED_AHEAD * w_step);
      FETCH_INTO_L2(of_w + FETCHED_AHEAD * w_step + VECTOR);
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++) {
        s[r][0] = multiply_add(s[r][0], x[r * x_row + u], w_0);
        s[r][1] = multiply_add(s[r][1], x[r * x_row + u], w_1);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) sums[r][v] = s[r][0], sums[r][v + 1] = s[r][1];
  }
}

/* w [depth, columns]: the sums of all columns are in memory, while steps are read one after another. */
ALWAYS_INLINE void stream(const int rows, const float *x, int64_t x_row, const float *w, int64_t w_step,
                          int64_t columns, int64_t depth, float *out, int64_t out_row) {
  vector sums[FEW_ROWS][STREAMED_COLUMNS / VECTOR];
  for (int64_t c = 0; c < columns; c += STREAMED_COLUMNS) {
    const int64_t vectors = (columns - c < STREAMED_COLUMNS ? columns - c : STREAMED_COLUMNS) / VECTOR;
    for (int64_t from = 0; from < depth; from += STEPS) {
      const int64_t stop = depth - from < STEPS ? depth : from + STEPS;
      for (int r = 0; r < rows; r++)
        for (int64_t v = 0; v < vectors; v++) sums[r][v] = (vector){0};
      int64_t k = from;
      for (; k + STREAMED_STEPS <= stop; k += STREAMED_STEPS)
        stream_steps(rows, STREAMED_STEPS, x + k, x_row, w + k * w_step + c, w_step, vectors, sums);
      for (; k < stop; k++) stream_steps(rows, 1, x + k, x_row, w + k * w_step + c, w_step, vectors, sums);
      for (int r = 0; r < rows; r++)
        for (int64_t v = 0; v < vectors; v++)
          finish_chunk(out + r * out_row + c + v * VECTOR, sums[r][v], from);
    }
  }
}

/* w [columns, depth], of depth a multiple of a vector: blocks are transposed, and multiplied at once. */
ALWAYS_INLINE void turn(const int rows, const float *x, int64_t x_row, const float *w, int64_t w_column,
                        int64_t columns, int64_t depth, float *out, int64_t out_row) {
  float turned[BLOCK][VECTOR] __attribute__((aligned(64)));
  _Static_assert(BLOCK == VECTOR, "a line of a block is a vector");
  for (int64_t c = 0; c < columns; c += BLOCK, w += BLOCK * w_column)
    for (int64_t from = 0; from < depth; from += STEPS) {
      const int64_t stop = depth - from < STEPS ? depth : from + STEPS;
      vector s[FEW_ROWS];
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++) s[r] = (vector){0};
      for (int64_t k = from; k < stop; k += BLOCK) {
        /* The same steps of the next columns. */
        for (int i = 0; i < BLOCK; i++) FETCH_INTO_L2(w + (BLOCK + i) * w_column + k);
        transpose_block(turned, VECTOR, w + k, sizeof *w * w_column);
#pragma GCC unroll 16
        for (int u = 0; u < BLOCK; u++)
#pragma GCC unroll 8
          for (int r = 0; r < rows; r++)
            s[r] = multiply_add(s[r], x[r * x_row + k + u], *(const vector *)turned[u]);
      }
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++) finish_chunk(out + r * out_row + c, s[r], from);
    }
}

#define DEFINE_FEW_ROWS(NAME, ROWS)                                                                                 \
  static __attribute__((noinline)) void NAME##_##ROWS(const float *x, int64_t x_row, const float *w,                \
                                                      int64_t w_stride, int64_t columns, int64_t depth, float *out, \
                                                      int64_t out_row) {                                            \
    NAME(ROWS, x, x_row, w, w_stride, columns, depth, out, out_row);                                                \
  }
#define DEFINE_FOR_ALL_ROWS(NAME)                                                                       \
  DEFINE_FEW_ROWS(NAME, 1)                                                                              \
  DEFINE_FEW_ROWS(NAME, 2)                                                                              \
  DEFINE_FEW_ROWS(NAME, 3)                                                                              \
  DEFINE_FEW_ROWS(NAME, 4)                                                                              \
  DEFINE_FEW_ROWS(NAME, 5)                                                                              \
  DEFINE_FEW_ROWS(NAME, 6)                                                                              \
  DEFINE_FEW_ROWS(NAME, 7)                                                                              \
  DEFINE_FEW_ROWS(NAME, 8)                                                                              \
  static few_rows *const NAME##_ROWS[FEW_ROWS] = {NAME##_1, NAME##_2, NAME##_3, NAME##_4,               \
                                                  NAME##_5, NAME##_6, NAME##_7, NAME##_8};
DEFINE_FOR_ALL_ROWS(stream)
DEFINE_FOR_ALL_ROWS(turn)

#endif
