/* Arguments of the GEMM of gemm.c. */

#ifndef MOEFOLD_GEMM_H
#define MOEFOLD_GEMM_H

#include <stdint.h>

/* Dtypes in memory. */
enum { FLOAT32, BFLOAT16 };

/* An operand, whose lines are rows of a or columns of b. Strides are in elements. */
typedef struct {
  const void *start;
  int64_t line, step, kind;
} strided_matrix;

/* One product of the sum. a: [rows, depth], b: [columns, depth]. */
typedef struct {
  strided_matrix a, b;
  int64_t depth;
} gemm_term;

/* The output matrix, with row stride `row`. */
typedef struct {
  void *start;
  int64_t row, kind, adds;
} output_matrix;

/* Arguments of gemm(), with scratch memory. */
typedef struct {
  output_matrix out;
  int64_t rows, columns, rounds_to_bfloat16, threads;
  uint32_t *scratch;
  int64_t count;
  gemm_term terms[];
} gemm_args;

#endif
