/* Causal attention of grouped queries, forwards and backwards: softmax(q k^T / sqrt(D)) v, in which a token sees itself
   and the tokens before it.

   Values are float32 or bfloat16 in memory and float32 between, from where they are packed to where a result is rounded,
   once.

   The lanes of a vector are queries. A panel of LANES queries lies in memory by dimension, [D, LANES], so that scores
   [keys, LANES] are sums of one number of a key times a vector of the panel, and maxima, sums and exponentials of the
   softmax are taken lane by lane: nothing goes across the lanes of a vector. One routine, `tile`, multiplies everywhere,
   for every width of vectors, and reads numbers beyond none of its edges.

   Each number is a sum in one order, whatever the threads, the tokens behind it, and its place in a vector. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "bfloat16.h"
#include "exponential.h"
#include "transpose.h"

/* Numbers of a vector, rows of results that its registers hold beside the operands, and keys whose scores lie in the
   first cache at once. */
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
/* The widest head. */
#define WIDEST 256
/* Products below which threads cost more than they save. */
#define GRAIN 1000000.0

#ifdef _OPENMP
#include <omp.h>
#define IS_LARGE (heads * tokens * tokens * (double)d > GRAIN)
#define ABREAST _Pragma("omp parallel for schedule(static) if (IS_LARGE) num_threads(threads)")
#define THREAD omp_get_thread_num()
#else
#define ABREAST
#define THREAD 0
#endif

typedef float vector __attribute__((vector_size(4 * VECTOR), aligned(4), may_alias));
typedef float buffer[LANES] __attribute__((aligned(64)));

/* out[r, :] (+)= sum over k < depth of a[r * row + k * step] * b[k, :], for few rows and `vectors` vectors. Rows and
   vectors are constants where it is called, so that the sums stay in registers. */
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

/* The same for any number of rows, and `width` columns of b and out: a multiple of VECTOR. */
static inline __attribute__((always_inline)) void product(const int adds, int64_t rows, int64_t width, int64_t depth,
                                                          const float *a, int64_t row, int64_t step, const float *b,
                                                          int64_t b_width, float *out, int64_t out_width) {
#define TILE(COUNT, VECTORS)                                                                                           \
  for (; rows - r >= COUNT; r += COUNT)                                                                                \
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

/* Heads of all samples: [tokens, samples, heads, D], whose last stride is 1; of bfloat16, if narrow, else of float32. */
typedef struct {
  void *start;
  int64_t token, sample, head, is_narrow;
} heads_of;

/* Rows of one head in memory, and how far they are apart. */
typedef struct {
  void *start;
  int64_t stride, is_narrow;
} rows_of;

static inline rows_of head_of(heads_of x, int64_t sample, int64_t head) {
  return (rows_of){from(x.start, sample * x.sample + head * x.head, x.is_narrow), x.token, x.is_narrow};
}

static inline rows_of rows_from(rows_of x, int64_t row) {
  return (rows_of){from(x.start, row * x.stride, x.is_narrow), x.stride, x.is_narrow};
}

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
/* A width of rows that vectors fill. */
static inline int64_t filled(int64_t d) { return (d + VECTOR - 1) / VECTOR * VECTOR; }

/* exp(x), 0 where that is below the range, and none of a number that is none. */
static inline float weight_of(float x) {
  const float y = x < -87.0f ? 0.0f : exponential(x);
  return is_no_number(x) ? x : y;
}

/* `count` rows of d numbers side by side, `width` apart, times a factor; what is behind them is 0. */
static inline void to_rows(float *rows, int64_t width, rows_of x, int64_t count, int64_t d, float factor) {
  for (int64_t r = 0; r < count; r++) {
    const void *row = rows_from(x, r).start;
    if (x.is_narrow)
      for (int64_t i = 0; i < d; i++) rows[r * width + i] = value_at(row, i, 1) * factor;
    else
      for (int64_t i = 0; i < d; i++) rows[r * width + i] = value_at(row, i, 0) * factor;
    for (int64_t i = d; i < width; i++) rows[r * width + i] = 0.0f;
  }
}

/* And back: one row of them. */
static inline void from_row(rows_of x, int64_t r, const float *row, int64_t d, float factor) {
  void *to = rows_from(x, r).start;
  if (x.is_narrow)
    for (int64_t i = 0; i < d; i++) set_value(to, i, row[i] * factor, 1);
  else
    for (int64_t i = 0; i < d; i++) set_value(to, i, row[i] * factor, 0);
}

/* A panel [width, LANES] of `count` rows of d numbers, times a factor, and those rows [LANES, width]; 0 behind both. */
static void to_panel(float *panel, float *rows, int64_t width, rows_of x, int64_t count, int64_t d, float factor) {
  to_rows(rows, width, x, count, d, factor);
  memset(rows + count * width, 0, (LANES - count) * width * sizeof *rows);
  for (int64_t i = 0; i < width; i += 4)
    for (int lane = 0; lane < LANES; lane += 4)
      turn(panel + i * LANES + lane, LANES, rows + lane * width + i, width * sizeof *rows);
}

/* And back: the first `count` rows of d numbers, each times a factor of its own. */
static void from_panel(rows_of x, float *rows, int64_t width, const float *panel, int64_t count, int64_t d,
                       const float *factors) {
  for (int64_t i = 0; i < width; i += 4)
    for (int lane = 0; lane < LANES; lane += 4)
      turn(rows + lane * width + i, width, panel + i * LANES + lane, LANES * sizeof *panel);
  for (int64_t r = 0; r < count; r++) from_row(x, r, rows + r * width, d, factors[r]);
}

/* Scores [count, LANES] of keys from `key` on with the panel of queries from `query` on; -inf for later keys. */
static inline void score(float *scores, const float *keys, int64_t key, int64_t count, const float *panel,
                         int64_t query, int64_t d) {
  const float hidden = bits_to_float(0xff800000u);
  product(0, count, LANES, d, keys + key * d, d, 1, panel, LANES, scores, LANES);
  for (int64_t j = key > query ? 0 : query + 1 - key; j < count; j++)
    for (int lane = 0; lane < LANES; lane++)
      scores[j * LANES + lane] = query + lane < key + j ? hidden : scores[j * LANES + lane];
}

/* exp(score - top) of each lane, added to its total. */
static inline void soften(float *scores, int64_t count, const float *tops, float *totals) {
  for (int64_t j = 0; j < count; j++)
    for (int lane = 0; lane < LANES; lane++) {
      const float weight = weight_of(scores[j * LANES + lane] - tops[lane]);
      scores[j * LANES + lane] = weight;
      totals[lane] += weight;
    }
}

/* What a panel of queries attends to, and the logarithms of their totals. */
static void attend(rows_of q, rows_of out, float *lse, const float *keys, const float *values, int64_t query,
                   int64_t tokens, int64_t d, float scale) {
  float panel[WIDEST * LANES] __attribute__((aligned(64))), mixed[WIDEST * LANES] __attribute__((aligned(64)));
  float rows[WIDEST * LANES] __attribute__((aligned(64)));
  float scores[KEYS * LANES] __attribute__((aligned(64)));
  buffer tops, totals, shares;
  const int64_t lanes = least(LANES, tokens - query), seen = query + lanes, width = filled(d);
  to_panel(panel, rows, width, rows_from(q, query), lanes, d, scale);
  for (int lane = 0; lane < LANES; lane++) tops[lane] = bits_to_float(0xff800000u), totals[lane] = 0.0f;
  for (int64_t key = 0; key < seen; key += KEYS) {
    const int64_t count = least(KEYS, seen - key);
    score(scores, keys, key, count, panel, query, d);
    buffer before;
    memcpy(before, tops, sizeof tops);
    for (int64_t j = 0; j < count; j++)
      for (int lane = 0; lane < LANES; lane++)
        tops[lane] = scores[j * LANES + lane] > tops[lane] ? scores[j * LANES + lane] : tops[lane];
    if (key) {
      for (int lane = 0; lane < LANES; lane++) {
        shares[lane] = weight_of(before[lane] - tops[lane]);
        totals[lane] *= shares[lane];
      }
      for (int64_t i = 0; i < d; i++)
        for (int lane = 0; lane < LANES; lane++) mixed[i * LANES + lane] *= shares[lane];
    }
    soften(scores, count, tops, totals);
    product(key > 0, d, LANES, count, values + key * d, 1, d, scores, LANES, mixed, LANES);
  }
  for (int lane = 0; lane < lanes; lane++) lse[query + lane] = tops[lane] + logf(totals[lane]);
  for (int lane = 0; lane < LANES; lane++) shares[lane] = 1.0f / totals[lane];
  from_panel(rows_from(out, query), rows, width, mixed, lanes, d, shares);
}

/* Numbers of a vector. */
int attention_vector(void) { return VECTOR; }

/* Numbers of scratch memory for each thread. */
int64_t attention_scratch(int64_t tokens, int64_t d) { return 2 * tokens * (d + filled(d)); }

/* out [tokens, samples, heads, d] and lse [samples, heads, tokens]; head a reads key/value head a / group. */
void attention_forward(heads_of q, heads_of k, heads_of v, heads_of out, float *lse, float *scratch, int64_t tokens,
                       int64_t samples, int64_t heads_each, int64_t group, int64_t d, int threads) {
  const int64_t heads = samples * heads_each;
  const float scale = 1.0f / sqrtf((float)d);
  ABREAST
  for (int64_t n = 0; n < heads; n++) {
    const int64_t sample = n / heads_each, head = n % heads_each;
    float *keys = scratch + THREAD * attention_scratch(tokens, d), *values = keys + tokens * d;
    to_rows(keys, d, head_of(k, sample, head / group), tokens, d, 1.0f);
    to_rows(values, d, head_of(v, sample, head / group), tokens, d, 1.0f);
    for (int64_t query = 0; query < tokens; query += LANES)
      attend(head_of(q, sample, head), head_of(out, sample, head), lse + n * tokens, keys, values, query, tokens, d,
             scale);
  }
}

/* Of one head: its tensors, and its keys, values and their gradients side by side. */
typedef struct {
  rows_of grad, q, out, dq;
  const float *lse;
  float *keys, *values, *grad_keys, *grad_values;
} head_parts;

/* A panel's share of all gradients. */
static void attend_back(head_parts at, int64_t query, int64_t tokens, int64_t d, float scale) {
  float panel[WIDEST * LANES] __attribute__((aligned(64))), grad_panel[WIDEST * LANES] __attribute__((aligned(64)));
  float rows[WIDEST * LANES] __attribute__((aligned(64))), grad_rows[WIDEST * LANES] __attribute__((aligned(64)));
  float mixed[WIDEST * LANES] __attribute__((aligned(64)));
  float weights[KEYS * LANES] __attribute__((aligned(64))), slopes[KEYS * LANES] __attribute__((aligned(64)));
  buffer lse, along, unused = {0}, scales;
  const int64_t lanes = least(LANES, tokens - query), seen = query + lanes, width = filled(d);
  to_panel(mixed, rows, width, rows_from(at.out, query), lanes, d, 1.0f);
  to_panel(panel, rows, width, rows_from(at.q, query), lanes, d, scale);
  to_panel(grad_panel, grad_rows, width, rows_from(at.grad, query), lanes, d, 1.0f);
  for (int lane = 0; lane < LANES; lane++) {
    lse[lane] = lane < lanes ? at.lse[query + lane] : 0.0f;
    along[lane] = 0.0f;
    scales[lane] = scale;
  }
  for (int64_t i = 0; i < d; i++)
    for (int lane = 0; lane < LANES; lane++) along[lane] += grad_panel[i * LANES + lane] * mixed[i * LANES + lane];
  for (int64_t key = 0; key < seen; key += KEYS) {
    const int64_t count = least(KEYS, seen - key);
    score(weights, at.keys, key, count, panel, query, d);
    soften(weights, count, lse, unused);
    product(0, count, LANES, d, at.values + key * d, d, 1, grad_panel, LANES, slopes, LANES);
    for (int64_t j = 0; j < count; j++)
      for (int lane = 0; lane < LANES; lane++)
        slopes[j * LANES + lane] = weights[j * LANES + lane] * (slopes[j * LANES + lane] - along[lane]);
    product(1, count, width, lanes, weights, LANES, 1, grad_rows, width, at.grad_values + key * width, width);
    product(1, count, width, lanes, slopes, LANES, 1, rows, width, at.grad_keys + key * width, width);
    product(key > 0, d, LANES, count, at.keys + key * d, 1, d, slopes, LANES, mixed, LANES);
  }
  from_panel(rows_from(at.dq, query), rows, width, mixed, lanes, d, scales);
}

/* Gradients of the queries, and those of the keys and values of each query head, all [tokens, samples, heads, d]. */
void attention_backward(heads_of grad, heads_of q, heads_of k, heads_of v, heads_of out, const float *lse, heads_of dq,
                        heads_of dk, heads_of dv, float *scratch, int64_t tokens, int64_t samples, int64_t heads_each,
                        int64_t group, int64_t d, int threads) {
  const int64_t heads = samples * heads_each, width = filled(d);
  const float scale = 1.0f / sqrtf((float)d);
  ABREAST
  for (int64_t n = 0; n < heads; n++) {
    const int64_t sample = n / heads_each, head = n % heads_each;
    float *grad_keys = scratch + THREAD * attention_scratch(tokens, d), *keys = grad_keys + 2 * tokens * width;
    const head_parts at = {.grad = head_of(grad, sample, head),
                           .q = head_of(q, sample, head),
                           .out = head_of(out, sample, head),
                           .lse = lse + n * tokens,
                           .dq = head_of(dq, sample, head),
                           .keys = keys,
                           .values = keys + tokens * d,
                           .grad_keys = grad_keys,
                           .grad_values = grad_keys + tokens * width};
    memset(at.grad_keys, 0, 2 * tokens * width * sizeof(float));
    to_rows(at.keys, d, head_of(k, sample, head / group), tokens, d, 1.0f);
    to_rows(at.values, d, head_of(v, sample, head / group), tokens, d, 1.0f);
    for (int64_t query = 0; query < tokens; query += LANES) attend_back(at, query, tokens, d, scale);
    for (int64_t t = 0; t < tokens; t++) {
      from_row(head_of(dk, sample, head), t, at.grad_keys + t * width, d, 1.0f);
      from_row(head_of(dv, sample, head), t, at.grad_values + t * width, d, 1.0f);
    }
  }
}
