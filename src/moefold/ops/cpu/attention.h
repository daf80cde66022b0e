/* Parts of attention over panels of queries and over pages of keys: GEMM in tiles, exponentials, and rows in memory.

   Both compute an element of a result by the same operations in the same order, so that a token attends to the same
   bits in training and in decoding: scores are summed over the head dim, blocks of KEYS keys begin at multiples of KEYS
   from the first token of a document, and within a block sums are over ascending keys. */

#ifndef MOEFOLD_ATTENTION_H
#define MOEFOLD_ATTENTION_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "bfloat16.h"
#include "exponential.h"
#include "integers.h"

/* Floats of a vector, and rows of a tile whose sums fit into the registers with the operands. */
#if defined(__AVX512F__)
#define VECTOR 16
#define ROWS 8
#elif defined(__AVX__)
#define VECTOR 8
#define ROWS 6
#else
#define VECTOR 4
#define ROWS 4
#endif
/* Keys of a block, after which sums are rescaled: as many as in a page of the cache. Scores of a block fit into the L1
   cache. */
#define KEYS 64
/* Maximum head dim. */
#define MAX_HEAD_DIM 256
/* Multiply-adds below which threads cost more than they save. */
#define MIN_PARALLEL_WORK 1000000.0

#include "multiply_add.h"

/* Whether products of two operands of bfloat16 are computed in pairs, a pair of numbers in a word. Each product is exact
   in float32, as it is for converted numbers. */
#ifdef __AVX512BF16__
#define HAS_PAIR_PRODUCTS 1
#else
#define HAS_PAIR_PRODUCTS 0
#endif

/* Words of d numbers in pairs; the last one of an odd number is paired with 0. */
static inline int64_t pair_words(int64_t d) { return (d + 1) / 2; }

/* sum + a_0 * b_0 + a_1 * b_1 for pairs of bfloat16; called only where HAS_PAIR_PRODUCTS is 1. */
static inline __attribute__((always_inline)) vector add_pair_products(vector sum, float a, vector b) {
#ifdef __AVX512BF16__
  return (vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_ps(a), (__m512bh)b);
#else
  (void)a, (void)b;
  return sum;
#endif
}

/* What a tile computes: a product, a sum with what is there, or a product of pairs times a factor. */
enum tile_kind { PRODUCT, SUM, PAIR_PRODUCT };

/* out[r, :] (+)= sum over k < depth of a[r * row + k * step] * b[k, :], for few rows and `vectors` vectors. Rows,
   vectors and the kind are constants at each call, so that the sums stay in registers. */
static inline __attribute__((always_inline)) void tile(const int rows, const int vectors, const enum tile_kind kind,
                                                       int64_t depth, const float *a, int64_t row, int64_t step,
                                                       const float *b, int64_t b_width, float *out, int64_t out_width,
                                                       float factor) {
  vector sums[ROWS][2];
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
    for (int c = 0; c < vectors; c++)
      sums[r][c] = kind == SUM ? *(const vector *)(out + r * out_width + c * VECTOR) : (vector){0};
  for (int64_t k = 0; k < depth; k++) {
    vector b_k[2];
#pragma GCC unroll 2
    for (int c = 0; c < vectors; c++) b_k[c] = *(const vector *)(b + k * b_width + c * VECTOR);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
      for (int c = 0; c < vectors; c++)
        sums[r][c] = kind == PAIR_PRODUCT ? add_pair_products(sums[r][c], a[r * row + k * step], b_k[c])
                                          : multiply_add(sums[r][c], a[r * row + k * step], b_k[c]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
    for (int c = 0; c < vectors; c++) {
      if (kind == PAIR_PRODUCT) sums[r][c] *= factor;
      *(vector *)(out + r * out_width + c * VECTOR) = sums[r][c];
    }
}

/* GEMM in tiles, for any number of rows and `width` columns of b and out, a multiple of VECTOR. */
static inline __attribute__((always_inline)) void tiled_product(const enum tile_kind kind, int64_t rows, int64_t width,
                                                                int64_t depth, const float *a, int64_t row,
                                                                int64_t step, const float *b, int64_t b_width,
                                                                float *out, int64_t out_width, float factor) {
#define TILE(COUNT, VECTORS)            \
  for (; rows - r >= COUNT; r += COUNT) \
  tile(COUNT, VECTORS, kind, depth, a + r * row, row, step, b + c, b_width, out + r * out_width + c, out_width, factor)
  int64_t c = 0, r;
  for (; width - c >= 2 * VECTOR; c += 2 * VECTOR) {
    r = 0;
    TILE(ROWS, 2);
    TILE(4, 2);
    TILE(1, 2);
  }
  for (; c < width; c += VECTOR) {
    r = 0;
    TILE(ROWS, 1);
    TILE(4, 1);
    TILE(1, 1);
  }
#undef TILE
}

/* out (+)= a b in float32. */
static inline __attribute__((always_inline)) void tiled_gemm(const int adds, int64_t rows, int64_t width, int64_t depth,
                                                             const float *a, int64_t row, int64_t step, const float *b,
                                                             int64_t b_width, float *out, int64_t out_width) {
  if (adds)
    tiled_product(SUM, rows, width, depth, a, row, step, b, b_width, out, out_width, 1.0f);
  else
    tiled_product(PRODUCT, rows, width, depth, a, row, step, b, b_width, out, out_width, 1.0f);
}

/* out = factor * a b, where rows of a and columns of b are d numbers in pairs. */
static inline void tiled_pair_gemm(int64_t rows, int64_t width, int64_t d, const float *a, const float *b,
                                   int64_t b_width, float *out, int64_t out_width, float factor) {
  tiled_product(PAIR_PRODUCT, rows, width, pair_words(d), a, pair_words(d), 1, b, b_width, out, out_width, factor);
}

/* Rows of one head in memory, and their stride. */
typedef struct {
  void *start;
  int64_t stride, is_bfloat16;
} rows_view;

static inline rows_view rows_view_from(rows_view x, int64_t row) {
  return (rows_view){offset_pointer(x.start, row * x.stride, x.is_bfloat16), x.stride, x.is_bfloat16};
}

/* Row width rounded up to whole vectors. */
static inline int64_t padded_width(int64_t d) { return (d + VECTOR - 1) / VECTOR * VECTOR; }

/* exp(x), 0 on underflow; NaN stays NaN. */
static inline float exp_or_zero(float x) {
  const float y = x < -87.0f ? 0.0f : exp_float(x);
  return is_nan(x) ? x : y;
}

static inline int is_minus_infinity(float x) { return float_to_bits(x) == 0xff800000u; }

/* The maximum score of a query, or 0 while its window has not begun: exp(-inf - 0) is 0, and exp(-inf + inf) is not. */
static inline float finite_top(float maximum, int64_t window) {
  return window && is_minus_infinity(maximum) ? 0.0f : maximum;
}

/* Add the sink, if any, to the maximum score and the sum of weights of a query; returns the factor of its output. */
static inline float softmax_factor(float *top, float *total, const float *sink) {
  if (!sink) return 1.0f / *total;
  const float new_top = *sink > *top ? *sink : *top, kept = exp_or_zero(*top - new_top);
  *total = *total * kept + exp_or_zero(*sink - new_top);
  *top = new_top;
  return kept / *total;
}

/* Load `count` rows of d elements with stride `width`, times a factor, zero-padded. */
static inline void load_rows(float *rows, int64_t width, rows_view x, int64_t count, int64_t d, float factor) {
  for (int64_t r = 0; r < count; r++) {
    const void *row = rows_view_from(x, r).start;
    if (x.is_bfloat16)
      for (int64_t i = 0; i < d; i++) rows[r * width + i] = load_value(row, i, 1) * factor;
    else
      for (int64_t i = 0; i < d; i++) rows[r * width + i] = load_value(row, i, 0) * factor;
    for (int64_t i = d; i < width; i++) rows[r * width + i] = 0.0f;
  }
}

/* Load `count` rows of d numbers of bfloat16 as pairs with stride `words`, zero-padded; as `add_pair_products`. */
static inline void load_pair_rows(float *rows, int64_t words, rows_view x, int64_t count, int64_t d) {
#ifdef __AVX512BF16__
  for (int64_t r = 0; r < count; r++)
    for (int64_t i = 0; i < words; i += VECTOR) {
      const int64_t numbers = max_i64(0, min_i64(2 * VECTOR, d - 2 * i)), stored = min_i64(VECTOR, words - i);
      const __mmask32 valid = (__mmask32)((1ull << numbers) - 1);
      const __m512i pairs = _mm512_maskz_loadu_epi16(valid, (const uint16_t *)rows_view_from(x, r).start + 2 * i);
      _mm512_mask_storeu_epi32(rows + r * words + i, (__mmask16)((1u << stored) - 1), pairs);
    }
#else
  (void)rows, (void)words, (void)x, (void)count, (void)d;
#endif
}

/* Store one row, times a factor. */
static inline void store_row(rows_view x, int64_t r, const float *row, int64_t d, float factor) {
  void *to = rows_view_from(x, r).start;
  if (x.is_bfloat16)
    for (int64_t i = 0; i < d; i++) store_value(to, i, row[i] * factor, 1);
  else
    for (int64_t i = 0; i < d; i++) store_value(to, i, row[i] * factor, 0);
}

#endif
