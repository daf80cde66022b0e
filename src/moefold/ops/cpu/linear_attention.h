/* Memory layout of gated linear attention in chunks, and small parts that its sources share.

   A chunk has C rows (tokens) in memory, a multiple of VECTOR; rows after the last token of the sequence are zeros with
   a decay of 1, and write nothing. Rows of keys and values have D and Dv columns in memory, multiples of VECTOR, zero
   after the head dim. Everything is float32; tensors of tokens may be bfloat16 in memory. */

#ifndef MOEFOLD_LINEAR_ATTENTION_H
#define MOEFOLD_LINEAR_ATTENTION_H

#include "attention.h"
#include "parallel.h"
#include "transpose.h"

/* Split a loop among the threads of a call of sizes `s` if it has enough work. */
#define PARALLEL_TASKS(WORK) PRAGMA(omp parallel for schedule(static) if ((WORK) > MIN_PARALLEL_WORK) num_threads(s.threads))

/* Rows of a chunk that are computed together; lower triangular products skip the blocks above the diagonal. */
#define BLOCK_ROWS 16
_Static_assert(BLOCK_ROWS % VECTOR == 0 && BLOCK == VECTOR, "blocks of rows consist of whole vectors");

/* Strided view of [tokens, samples, heads, width], whose last stride is 1; bfloat16 or float32. */
typedef struct {
  void *start;
  int64_t token, sample, head, is_bfloat16;
} tokens_view;

/* Sizes of a call. */
typedef struct {
  int64_t tokens, samples, key_heads, repeats;
  /* Columns of keys, values and decays: one decay of a head, or one of each column of a key. */
  int64_t key_size, value_size, decay_size;
  /* Tokens of a chunk, and chunks. */
  int64_t chunk_size, chunks;
  /* Whether tokens have a write strength (the delta rule). */
  int64_t has_delta;
  int64_t threads;
} linear_sizes;

/* Sizes in memory: C, D and Dv rounded up, and the columns of the solved system: values, and with the delta rule keys. */
static inline int64_t chunk_rows(linear_sizes s) { return (s.chunk_size + BLOCK_ROWS - 1) / BLOCK_ROWS * BLOCK_ROWS; }
static inline int64_t key_width(linear_sizes s) { return padded_width(s.key_size); }
static inline int64_t value_width(linear_sizes s) { return padded_width(s.value_size); }
static inline int64_t decay_width(linear_sizes s) { return s.decay_size == 1 ? 1 : key_width(s); }
static inline int64_t solved_width(linear_sizes s) { return value_width(s) + (s.has_delta ? key_width(s) : 0); }

/* Tensors of all chunks that do not depend on the states, [N, B, A, ...] each, or their gradients. */
typedef struct {
  /* [C, D], [C, C] and [C, D]. */
  float *read_keys, *scores, *write_keys;
  /* [C, Dv] of values, then with the delta rule [C, D] of erase_keys. */
  float *solved;
  /* [1 or D]. */
  float *decay;
  /* Products of keys with the decays of channels between them, [C, C]: for the backward pass; else NULL. */
  float *products;
} chunk_tensors;

/* The tensors of one chunk of one head. */
static inline chunk_tensors chunk_at(chunk_tensors x, linear_sizes s, int64_t place) {
  const int64_t rows = chunk_rows(s);
  return (chunk_tensors){x.read_keys + place * rows * key_width(s), x.scores + place * rows * rows,
                         x.write_keys + place * rows * key_width(s), x.solved + place * rows * solved_width(s),
                         x.decay + place * decay_width(s), x.products + place * rows * rows};
}

/* Tokens of chunk n. */
static inline int64_t chunk_tokens(linear_sizes s, int64_t n) {
  return min_i64(s.chunk_size, s.tokens - n * s.chunk_size);
}

/* The rows of one head from a token on. */
static inline rows_view token_rows(tokens_view x, int64_t token, int64_t sample, int64_t head) {
  const int64_t place = token * x.token + sample * x.sample + head * x.head;
  return (rows_view){offset_pointer(x.start, place, x.is_bfloat16), x.token, x.is_bfloat16};
}

/* Load `count` rows of `size` elements as [rows, width], zero-padded. */
static inline void load_chunk(float *to, int64_t rows, int64_t width, rows_view x, int64_t count, int64_t size) {
  load_rows(to, width, x, count, size, 1.0f);
  memset(to + count * width, 0, (rows - count) * width * sizeof *to);
}

/* to [columns, rows] = from [rows, columns]^T; both sizes are multiples of VECTOR. */
static inline void transpose(float *to, const float *from, int64_t from_width, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; r += VECTOR)
    for (int64_t c = 0; c < columns; c += VECTOR)
      transpose_block(to + c * rows + r, rows, from + r * from_width + c, from_width * sizeof *from);
}

/* Products of the lower triangle: out[i, j] (+)= sum over d of a[i, d] * b[d, j] for columns j up to the block of row i;
   other columns are not written. */
static inline void lower_products(const int adds, int64_t rows, int64_t depth, const float *a, int64_t a_width, const float *b,
                           float *out) {
  for (int64_t i = 0; i < rows; i += BLOCK_ROWS)
    tiled_gemm(adds, BLOCK_ROWS, i + BLOCK_ROWS, depth, a + i * a_width, a_width, 1, b, rows, out + i * rows, rows);
}

/* out (+)= triangle b, with a triangle [rows, rows] that is zero above the diagonal, at least in the diagonal's blocks. */
static inline void lower_times(const int adds, int64_t rows, int64_t width, const float *triangle, const float *b,
                        int64_t b_width, float *out, int64_t out_width) {
  for (int64_t i = 0; i < rows; i += BLOCK_ROWS)
    tiled_gemm(adds, BLOCK_ROWS, width, i + BLOCK_ROWS, triangle + i * rows, rows, 1, b, b_width, out + i * out_width,
               out_width);
}

/* out (+)= triangle^T b. */
static inline void upper_times(const int adds, int64_t rows, int64_t width, const float *triangle, const float *b,
                        int64_t b_width, float *out, int64_t out_width) {
  for (int64_t i = 0; i < rows; i += BLOCK_ROWS)
    tiled_gemm(adds, BLOCK_ROWS, width, rows - i, triangle + i * rows + i, 1, rows, b + i * b_width, b_width,
               out + i * out_width, out_width);
}

static inline float dot(const float *a, const float *b, int64_t width) {
  vector sums = {0};
  for (int64_t i = 0; i < width; i += VECTOR) sums += *(const vector *)(a + i) * *(const vector *)(b + i);
  float total = 0.0f;
  for (int i = 0; i < VECTOR; i++) total += sums[i];
  return total;
}

/* y += factor * x. */
static inline void add_scaled(float *y, float factor, const float *x, int64_t width) {
  for (int64_t i = 0; i < width; i += VECTOR)
    *(vector *)(y + i) = multiply_add(*(const vector *)(y + i), factor, *(const vector *)(x + i));
}

/* y = factor * x. */
static inline void scale_row(float *restrict y, float factor, const float *restrict x, int64_t width) {
  for (int64_t i = 0; i < width; i++) y[i] = factor * x[i];
}

/* Tensors of the tokens, [S, B, heads, ...]. log_decay [S, B, A, 1 or D] and beta [S, B, A]
   are float32; beta is not read without the delta rule. */
typedef struct {
  tokens_view q, k, v, log_decay, beta;
  /* Whether a document starts at a token, [S, B]; NULL: no document starts. */
  const uint8_t *starts;
} linear_inputs;

/* Gradients of the tensors of the tokens, [S, B, heads, ...]; the gradients of log_decay and beta are float32. */
typedef struct {
  tokens_view q, k, v, log_decay, beta;
} linear_grads;

/* Find the first row of the document of each row of chunk n. Returns whether its first row begins a document, whose
   tokens have no earlier ones either. */
static inline int load_documents(int64_t *to, linear_inputs x, linear_sizes s, int64_t n, int64_t sample) {
  const int64_t count = chunk_tokens(s, n);
  const uint8_t *starts = x.starts ? x.starts + n * s.chunk_size * s.samples + sample : NULL;
  int64_t document = 0;
  for (int64_t i = 0; i < chunk_rows(s); i++) {
    if (starts && i < count && starts[i * s.samples]) document = i;
    to[i] = document;
  }
  return starts && starts[0];
}

/* Load the write strengths of chunk n of a head, zero-padded. */
static inline void load_beta(float *to, linear_inputs x, linear_sizes s, int64_t n, int64_t sample, int64_t head) {
  memset(to, 0, chunk_rows(s) * sizeof *to);
  if (!s.has_delta) return;
  const rows_view beta = token_rows(x.beta, n * s.chunk_size, sample, head);
  for (int64_t i = 0; i < chunk_tokens(s, n); i++) to[i] = ((const float *)beta.start)[i * beta.stride];
}

/* Store the gradients of the values and write strengths of chunk n of a head; `of_values` has rows `width` apart. */
static inline void store_value_grads(linear_grads to, linear_sizes s, int64_t n, int64_t sample, int64_t head,
                                     const float *of_values, int64_t width, const float *beta, const float *of_beta) {
  const int64_t count = chunk_tokens(s, n), first = n * s.chunk_size;
  const rows_view v = token_rows(to.v, first, sample, head);
  for (int64_t i = 0; i < count; i++) store_row(v, i, of_values + i * width, s.value_size, s.has_delta ? beta[i] : 1.0f);
  if (!s.has_delta) return;
  const rows_view strengths = token_rows(to.beta, first, sample, head);
  for (int64_t i = 0; i < count; i++) ((float *)strengths.start)[i * strengths.stride] = of_beta[i];
}

/* Add the products with earlier rows of x to the rows of x: x_i += sum over j < i of system[i, j] x_j. */
static inline void solve_forward(const float *system, float *x, int64_t rows, int64_t width) {
  const int64_t step = 8;
  for (int64_t i = 0; i < rows; i += step) {
    if (i) tiled_gemm(1, step, width, i, system + i * rows, rows, 1, x, width, x + i * width, width);
    for (int64_t row = i + 1; row < i + step; row++)
      for (int64_t j = i; j < row; j++) add_scaled(x + row * width, system[row * rows + j], x + j * width, width);
  }
}

/* The same with the transposed system: x_i += sum over j > i of system[j, i] x_j. */
static inline void solve_backward(const float *system, float *x, int64_t rows, int64_t width) {
  const int64_t step = 8;
  for (int64_t i = rows - step; i >= 0; i -= step) {
    const int64_t after = i + step;
    if (after < rows)
      tiled_gemm(1, step, width, rows - after, system + after * rows + i, 1, rows, x + after * width, width,
                 x + i * width, width);
    for (int64_t row = after - 2; row >= i; row--)
      for (int64_t j = row + 1; j < after; j++) add_scaled(x + row * width, system[j * rows + row], x + j * width, width);
  }
}

#endif
