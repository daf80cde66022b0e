/* Causal grouped-query attention, forward and backward: softmax(q k^T / sqrt(D)) v.

   Values are float32 or bfloat16 in memory and float32 in computation; a result is rounded once.

   The lanes of a vector are queries. A panel of LANES queries is stored dimension-major, [D, LANES], so that scores
   [keys, LANES] are sums of one element of a key times a vector of the panel, and the maxima, sums and exponentials of
   the softmax are computed lane by lane, without cross-lane operations. One routine, `tile`, does all multiplications,
   for every vector width, and reads nothing out of bounds.

   Every element is summed in a fixed order, independent of threads, of later tokens, and of its lane. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "bfloat16.h"
#include "exponential.h"
#include "transpose.h"

/* Floats of a vector, rows of a tile whose sums fit into the registers with the operands, and keys whose scores fit
   into the L1 cache. */
#if defined(__AVX512F__)
#define VECTOR 16
#define ROWS 8
#define KEYS 64
#elif defined(__AVX__)
#define VECTOR 8
#define ROWS 6
#define KEYS 120
#else
#define VECTOR 4
#define ROWS 4
#define KEYS 128
#endif
#define LANES (2 * VECTOR)
/* Maximum head dim. */
#define MAX_HEAD_DIM 256
/* Multiply-adds below which threads cost more than they save. */
#define MIN_PARALLEL_WORK 1000000.0

#ifdef _OPENMP
#include <omp.h>
#define IS_LARGE (heads * tokens * tokens * (double)d > MIN_PARALLEL_WORK)
#define OMP_PARALLEL_FOR _Pragma("omp parallel for schedule(static) if (IS_LARGE) num_threads(threads)")
#define THREAD omp_get_thread_num()
#else
#define OMP_PARALLEL_FOR
#define THREAD 0
#endif

typedef float vector __attribute__((vector_size(4 * VECTOR), aligned(4), may_alias));
typedef float buffer[LANES] __attribute__((aligned(64)));

/* out[r, :] (+)= sum over k < depth of a[r * row + k * step] * b[k, :], for few rows and `vectors` vectors. Rows and
   vectors are constants at each call, so that the sums stay in registers. */
static inline __attribute__((always_inline)) void tile(const int rows, const int vectors, const int adds, int64_t depth,
                                                       const float *a, int64_t row, int64_t step, const float *b,
                                                       int64_t b_width, float *out, int64_t out_width) {
  vector sums[ROWS][2];
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
    for (int c = 0; c < vectors; c++)
      sums[r][c] = adds ? *(const vector *)(out + r * out_width + c * VECTOR) : (vector){0};
  for (int64_t k = 0; k < depth; k++) {
    vector b_k[2];
#pragma GCC unroll 2
    for (int c = 0; c < vectors; c++) b_k[c] = *(const vector *)(b + k * b_width + c * VECTOR);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
      for (int c = 0; c < vectors; c++) sums[r][c] += a[r * row + k * step] * b_k[c];
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
    for (int c = 0; c < vectors; c++) *(vector *)(out + r * out_width + c * VECTOR) = sums[r][c];
}

/* GEMM in tiles, for any number of rows and `width` columns of b and out, a multiple of VECTOR. */
static inline __attribute__((always_inline)) void tiled_gemm(const int adds, int64_t rows, int64_t width, int64_t depth,
                                                             const float *a, int64_t row, int64_t step, const float *b,
                                                             int64_t b_width, float *out, int64_t out_width) {
#define TILE(COUNT, VECTORS)            \
  for (; rows - r >= COUNT; r += COUNT) \
  tile(COUNT, VECTORS, adds, depth, a + r * row, row, step, b + c, b_width, out + r * out_width + c, out_width)
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

/* Strided view of [tokens, samples, heads, D], whose last stride is 1; bfloat16 or float32. */
typedef struct {
  void *start;
  int64_t token, sample, head, is_bfloat16;
} heads_view;

/* Rows of one head in memory, and their stride. */
typedef struct {
  void *start;
  int64_t stride, is_bfloat16;
} rows_view;

static inline rows_view head_view(heads_view x, int64_t sample, int64_t head) {
  return (rows_view){offset_pointer(x.start, sample * x.sample + head * x.head, x.is_bfloat16), x.token, x.is_bfloat16};
}

static inline rows_view rows_view_from(rows_view x, int64_t row) {
  return (rows_view){offset_pointer(x.start, row * x.stride, x.is_bfloat16), x.stride, x.is_bfloat16};
}

static inline int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
/* Row width rounded up to whole vectors. */
static inline int64_t padded_width(int64_t d) { return (d + VECTOR - 1) / VECTOR * VECTOR; }

/* exp(x), 0 on underflow; NaN stays NaN. */
static inline float exp_or_zero(float x) {
  const float y = x < -87.0f ? 0.0f : exp_float(x);
  return is_nan(x) ? x : y;
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

/* Store one row, times a factor. */
static inline void store_row(rows_view x, int64_t r, const float *row, int64_t d, float factor) {
  void *to = rows_view_from(x, r).start;
  if (x.is_bfloat16)
    for (int64_t i = 0; i < d; i++) store_value(to, i, row[i] * factor, 1);
  else
    for (int64_t i = 0; i < d; i++) store_value(to, i, row[i] * factor, 0);
}

/* Load `count` rows of d elements, times a factor, as rows [LANES, width] and panel [width, LANES], zero-padded. */
static void load_panel(float *panel, float *rows, int64_t width, rows_view x, int64_t count, int64_t d, float factor) {
  load_rows(rows, width, x, count, d, factor);
  memset(rows + count * width, 0, (LANES - count) * width * sizeof *rows);
  for (int64_t i = 0; i < width; i += 4)
    for (int lane = 0; lane < LANES; lane += 4)
      transpose_4x4(panel + i * LANES + lane, LANES, rows + lane * width + i, width * sizeof *rows);
}

/* Store the first `count` rows of a panel, each times its own factor. */
static void store_panel(rows_view x, float *rows, int64_t width, const float *panel, int64_t count, int64_t d,
                        const float *factors) {
  for (int64_t i = 0; i < width; i += 4)
    for (int lane = 0; lane < LANES; lane += 4)
      transpose_4x4(rows + lane * width + i, width, panel + i * LANES + lane, LANES * sizeof *panel);
  for (int64_t r = 0; r < count; r++) store_row(x, r, rows + r * width, d, factors[r]);
}

/* Compute scores [count, LANES] of keys from `key` on for the panel of queries from `query` on; -inf for later keys. */
static inline void masked_scores(float *scores, const float *keys, int64_t key, int64_t count, const float *panel,
                                 int64_t query, int64_t d) {
  const float masked = bits_to_float(0xff800000u);
  tiled_gemm(0, count, LANES, d, keys + key * d, d, 1, panel, LANES, scores, LANES);
  for (int64_t j = key > query ? 0 : query + 1 - key; j < count; j++)
    for (int lane = 0; lane < LANES; lane++)
      scores[j * LANES + lane] = query + lane < key + j ? masked : scores[j * LANES + lane];
}

/* Replace scores by exp(score - top) of each lane, and add them to its total. */
static inline void softmax_weights(float *scores, int64_t count, const float *tops, float *totals) {
  for (int64_t j = 0; j < count; j++)
    for (int lane = 0; lane < LANES; lane++) {
      const float prob = exp_or_zero(scores[j * LANES + lane] - tops[lane]);
      scores[j * LANES + lane] = prob;
      totals[lane] += prob;
    }
}

/* Forward of a panel of queries: attention output and log-sum-exp. */
static void attend_forward(rows_view q, rows_view out, float *lse, const float *keys, const float *values,
                           int64_t query, int64_t tokens, int64_t d, float scale) {
  float panel[MAX_HEAD_DIM * LANES] __attribute__((aligned(64))),
      acc[MAX_HEAD_DIM * LANES] __attribute__((aligned(64)));
  float rows[MAX_HEAD_DIM * LANES] __attribute__((aligned(64)));
  float scores[KEYS * LANES] __attribute__((aligned(64)));
  buffer tops, totals, rescale;
  const int64_t lanes = min_i64(LANES, tokens - query), num_keys = query + lanes, width = padded_width(d);
  load_panel(panel, rows, width, rows_view_from(q, query), lanes, d, scale);
  for (int lane = 0; lane < LANES; lane++) tops[lane] = bits_to_float(0xff800000u), totals[lane] = 0.0f;
  for (int64_t key = 0; key < num_keys; key += KEYS) {
    const int64_t count = min_i64(KEYS, num_keys - key);
    masked_scores(scores, keys, key, count, panel, query, d);
    buffer previous_tops;
    memcpy(previous_tops, tops, sizeof tops);
    for (int64_t j = 0; j < count; j++)
      for (int lane = 0; lane < LANES; lane++)
        tops[lane] = scores[j * LANES + lane] > tops[lane] ? scores[j * LANES + lane] : tops[lane];
    if (key) {
      for (int lane = 0; lane < LANES; lane++) {
        rescale[lane] = exp_or_zero(previous_tops[lane] - tops[lane]);
        totals[lane] *= rescale[lane];
      }
      for (int64_t i = 0; i < d; i++)
        for (int lane = 0; lane < LANES; lane++) acc[i * LANES + lane] *= rescale[lane];
    }
    softmax_weights(scores, count, tops, totals);
    tiled_gemm(key > 0, d, LANES, count, values + key * d, 1, d, scores, LANES, acc, LANES);
  }
  for (int lane = 0; lane < lanes; lane++) lse[query + lane] = tops[lane] + logf(totals[lane]);
  for (int lane = 0; lane < LANES; lane++) rescale[lane] = 1.0f / totals[lane];
  store_panel(rows_view_from(out, query), rows, width, acc, lanes, d, rescale);
}

/* Floats of a vector. */
int attention_vector_width(void) { return VECTOR; }

/* Floats of scratch memory for each thread. */
int64_t attention_scratch_floats(int64_t tokens, int64_t d) { return 2 * tokens * (d + padded_width(d)); }

/* Write out [tokens, samples, heads, d] and lse [samples, heads, tokens]; head a reads key/value head a / group. */
void attention_forward(heads_view q, heads_view k, heads_view v, heads_view out, float *lse, float *scratch,
                       int64_t tokens, int64_t samples, int64_t heads_each, int64_t group, int64_t d, int threads) {
  const int64_t heads = samples * heads_each;
  const float scale = 1.0f / sqrtf((float)d);
  OMP_PARALLEL_FOR
  for (int64_t n = 0; n < heads; n++) {
    const int64_t sample = n / heads_each, head = n % heads_each;
    float *keys = scratch + THREAD * attention_scratch_floats(tokens, d), *values = keys + tokens * d;
    load_rows(keys, d, head_view(k, sample, head / group), tokens, d, 1.0f);
    load_rows(values, d, head_view(v, sample, head / group), tokens, d, 1.0f);
    for (int64_t query = 0; query < tokens; query += LANES)
      attend_forward(head_view(q, sample, head), head_view(out, sample, head), lse + n * tokens, keys, values, query,
                     tokens, d, scale);
  }
}

/* Arguments of one head's backward: its tensors, and contiguous keys, values and their gradients. */
typedef struct {
  rows_view grad, q, out, dq;
  const float *lse;
  float *keys, *values, *grad_keys, *grad_values;
} head_backward_args;

/* Backward of a panel of queries: its gradients, and its share of the gradients of keys and values. */
static void attend_backward(head_backward_args args, int64_t query, int64_t tokens, int64_t d, float scale) {
  float panel[MAX_HEAD_DIM * LANES] __attribute__((aligned(64))),
      grad_panel[MAX_HEAD_DIM * LANES] __attribute__((aligned(64)));
  float rows[MAX_HEAD_DIM * LANES] __attribute__((aligned(64))),
      grad_rows[MAX_HEAD_DIM * LANES] __attribute__((aligned(64)));
  float acc[MAX_HEAD_DIM * LANES] __attribute__((aligned(64)));
  float probs[KEYS * LANES] __attribute__((aligned(64))), grad_scores[KEYS * LANES] __attribute__((aligned(64)));
  buffer lse, delta, unused = {0}, scales;
  const int64_t lanes = min_i64(LANES, tokens - query), num_keys = query + lanes, width = padded_width(d);
  load_panel(acc, rows, width, rows_view_from(args.out, query), lanes, d, 1.0f);
  load_panel(panel, rows, width, rows_view_from(args.q, query), lanes, d, scale);
  load_panel(grad_panel, grad_rows, width, rows_view_from(args.grad, query), lanes, d, 1.0f);
  for (int lane = 0; lane < LANES; lane++) {
    lse[lane] = lane < lanes ? args.lse[query + lane] : 0.0f;
    delta[lane] = 0.0f;
    scales[lane] = scale;
  }
  for (int64_t i = 0; i < d; i++)
    for (int lane = 0; lane < LANES; lane++) delta[lane] += grad_panel[i * LANES + lane] * acc[i * LANES + lane];
  for (int64_t key = 0; key < num_keys; key += KEYS) {
    const int64_t count = min_i64(KEYS, num_keys - key);
    masked_scores(probs, args.keys, key, count, panel, query, d);
    softmax_weights(probs, count, lse, unused);
    tiled_gemm(0, count, LANES, d, args.values + key * d, d, 1, grad_panel, LANES, grad_scores, LANES);
    for (int64_t j = 0; j < count; j++)
      for (int lane = 0; lane < LANES; lane++)
        grad_scores[j * LANES + lane] = probs[j * LANES + lane] * (grad_scores[j * LANES + lane] - delta[lane]);
    tiled_gemm(1, count, width, lanes, probs, LANES, 1, grad_rows, width, args.grad_values + key * width, width);
    tiled_gemm(1, count, width, lanes, grad_scores, LANES, 1, rows, width, args.grad_keys + key * width, width);
    tiled_gemm(key > 0, d, LANES, count, args.keys + key * d, 1, d, grad_scores, LANES, acc, LANES);
  }
  store_panel(rows_view_from(args.dq, query), rows, width, acc, lanes, d, scales);
}

/* Write the gradients of queries, and of keys and values per query head, all [tokens, samples, heads, d]. */
void attention_backward(heads_view grad, heads_view q, heads_view k, heads_view v, heads_view out, const float *lse,
                        heads_view dq, heads_view dk, heads_view dv, float *scratch, int64_t tokens, int64_t samples,
                        int64_t heads_each, int64_t group, int64_t d, int threads) {
  const int64_t heads = samples * heads_each, width = padded_width(d);
  const float scale = 1.0f / sqrtf((float)d);
  OMP_PARALLEL_FOR
  for (int64_t n = 0; n < heads; n++) {
    const int64_t sample = n / heads_each, head = n % heads_each;
    float *grad_keys = scratch + THREAD * attention_scratch_floats(tokens, d), *keys = grad_keys + 2 * tokens * width;
    const head_backward_args args = {.grad = head_view(grad, sample, head),
                                     .q = head_view(q, sample, head),
                                     .out = head_view(out, sample, head),
                                     .lse = lse + n * tokens,
                                     .dq = head_view(dq, sample, head),
                                     .keys = keys,
                                     .values = keys + tokens * d,
                                     .grad_keys = grad_keys,
                                     .grad_values = grad_keys + tokens * width};
    memset(args.grad_keys, 0, 2 * tokens * width * sizeof(float));
    load_rows(args.keys, d, head_view(k, sample, head / group), tokens, d, 1.0f);
    load_rows(args.values, d, head_view(v, sample, head / group), tokens, d, 1.0f);
    for (int64_t query = 0; query < tokens; query += LANES) attend_backward(args, query, tokens, d, scale);
    for (int64_t t = 0; t < tokens; t++) {
      store_row(head_view(dk, sample, head), t, args.grad_keys + t * width, d, 1.0f);
      store_row(head_view(dv, sample, head), t, args.grad_values + t * width, d, 1.0f);
    }
  }
}
