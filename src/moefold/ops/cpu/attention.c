/* Causal grouped-query attention, forward and backward: softmax(q k^T / sqrt(D)) v, within the documents of a sample,
   within a sliding window, and with attention sinks.

   Values are float32 or bfloat16 in memory and float32 in computation; a result is rounded once. Products of two values
   of bfloat16 (scores, and the gradients of the weights) are exact, and multiplied in pairs if the processor can.

   The lanes of a vector are queries. A panel of LANES queries is stored dimension-major, [D, LANES], so that scores
   [keys, LANES] are sums of one element of a key times a vector of the panel, and the maxima, sums and exponentials of
   the softmax are computed lane by lane, without cross-lane operations. One routine, `tile`, does all multiplications,
   for every vector width, and reads nothing out of bounds.

   Every element is summed in a fixed order, independent of threads, of later tokens, of other documents, and of its
   lane. Each document is attended to as if it were alone: blocks of keys begin at its first token. */

#include "attention.h"
#include "parallel.h"
#include "transpose.h"

#define LANES (2 * VECTOR)

typedef float buffer[LANES] __attribute__((aligned(64)));

/* Strided view of [tokens, samples, heads, D], whose last stride is 1; bfloat16 or float32. */
typedef struct {
  void *start;
  int64_t token, sample, head, is_bfloat16;
} heads_view;

/* Keys that a query attends to, in addition to causality. */
typedef struct {
  /* Cumulative lengths of the documents of all samples, [documents + 1] from 0; NULL: a sample is one document. */
  const int32_t *document_ends;
  /* Cumulative numbers of queries of the documents of one sample, [documents + 1] from 0: the queries of a document are
     its last tokens. NULL: every token is a query. */
  const int32_t *query_ends;
  int64_t documents, longest;
  /* Most keys of a query, its own included; 0: no limit. */
  int64_t window;
  /* A logit of each head that takes part in the softmax without a value; NULL: none. */
  const float *sinks;
} attention_limits;

/* Find the next document of a sample that begins at `from` or later; returns whether there is one. */
static int next_document(attention_limits limits, int64_t sample, int64_t tokens, int64_t *at, int64_t *from,
                         int64_t *length) {
  if (!limits.document_ends) {
    *from = 0, *length = tokens;
    return (*at)++ == 0;
  }
  const int64_t begin = sample * tokens;
  for (; *at < limits.documents; (*at)++) {
    const int64_t first = limits.document_ends[*at], stop = limits.document_ends[*at + 1];
    if (first < begin) continue;
    if (!limits.query_ends && first >= begin + tokens) return 0;
    *from = first - begin, *length = stop - first;
    (*at)++;
    return 1;
  }
  return 0;
}

/* Keys before the first query of the document that was found last, which begins at `from`; sets its first query. */
static int64_t past_keys(attention_limits limits, int64_t at, int64_t from, int64_t length, int64_t *first_query) {
  *first_query = limits.query_ends ? limits.query_ends[at - 1] : from;
  return limits.query_ends ? length - (limits.query_ends[at] - limits.query_ends[at - 1]) : 0;
}

static inline rows_view head_view(heads_view x, int64_t sample, int64_t head) {
  return (rows_view){offset_pointer(x.start, sample * x.sample + head * x.head, x.is_bfloat16), x.token, x.is_bfloat16};
}

/* Turn LANES rows of `width` words, `stride` bytes apart, to a panel [width, LANES]. */
static inline void turn_rows(float *panel, const void *rows, int64_t stride, int64_t width) {
  for (int64_t i = 0; i < width; i += BLOCK)
    for (int lane = 0; lane < LANES; lane += BLOCK)
      transpose_block(panel + i * LANES + lane, LANES, (const char *)rows + lane * stride + i * sizeof *panel, stride);
}

/* Load `count` rows of d elements, times a factor, as rows [LANES, width] and panel [width, LANES], zero-padded. */
static void load_panel(float *panel, float *rows, int64_t width, rows_view x, int64_t count, int64_t d, float factor) {
  load_rows(rows, width, x, count, d, factor);
  memset(rows + count * width, 0, (LANES - count) * width * sizeof *rows);
  turn_rows(panel, rows, width * sizeof *rows, width);
}

/* Load `count` rows of d numbers of bfloat16 as a panel of pairs. */
static void load_pair_panel(float *panel, rows_view x, int64_t count, int64_t d) {
  float rows[MAX_HEAD_DIM / 2 * LANES] __attribute__((aligned(64)));
  const int64_t words = padded_width(pair_words(d));
  if (count == LANES && d == 2 * words) {
    turn_rows(panel, x.start, x.stride * sizeof(uint16_t), words);
    return;
  }
  load_pair_rows(rows, words, x, count, d);
  memset(rows + count * words, 0, (LANES - count) * words * sizeof *rows);
  turn_rows(panel, rows, words * sizeof *rows, words);
}

/* Return whether a head's scores are products of pairs. */
static inline int has_pairs(rows_view x) { return HAS_PAIR_PRODUCTS && x.is_bfloat16; }

/* Store the first `count` rows of a panel, each times its own factor. */
static void store_panel(rows_view x, float *rows, int64_t width, const float *panel, int64_t count, int64_t d,
                        const float *factors) {
  for (int64_t i = 0; i < width; i += BLOCK)
    for (int lane = 0; lane < LANES; lane += BLOCK)
      transpose_block(rows + lane * width + i, width, panel + i * LANES + lane, LANES * sizeof *panel);
  for (int64_t r = 0; r < count; r++) store_row(x, r, rows + r * width, d, factors[r]);
}

/* First key of the blocks that a panel of queries from `query` on attends to: a multiple of KEYS. */
static inline int64_t first_block(int64_t query, int64_t window) {
  return window && query >= window ? (query - window + 1) / KEYS * KEYS : 0;
}

/* Compute the products [count, LANES] of rows from `row` on with a panel, in pairs times a factor. */
static inline void multiply_panel(float *products, const float *rows, int64_t row, int64_t count, const float *panel,
                                  int64_t d, int is_paired, float factor) {
  if (is_paired)
    tiled_pair_gemm(count, LANES, d, rows + row * pair_words(d), panel, LANES, products, LANES, factor);
  else
    tiled_gemm(0, count, LANES, d, rows + row * d, d, 1, panel, LANES, products, LANES);
}

/* Replace scores [count, LANES] of keys from `key` on for the queries from `query` on by -inf: of later keys, and of
   those before the window. */
static inline void mask_scores(float *scores, int64_t key, int64_t count, int64_t query, int64_t window) {
  const float masked = bits_to_float(0xff800000u);
  for (int64_t j = key > query ? 0 : query + 1 - key; j < count; j++)
    for (int lane = 0; lane < LANES; lane++)
      scores[j * LANES + lane] = query + lane < key + j ? masked : scores[j * LANES + lane];
  if (!window) return;
  for (int64_t j = 0; j < min_i64(count, query + LANES - window - key); j++)
    for (int lane = 0; lane < LANES; lane++)
      scores[j * LANES + lane] = query + lane - window >= key + j ? masked : scores[j * LANES + lane];
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

/* The tensors of one head in one document, forward; keys are pairs where q has pairs; `sink` is NULL without attention
   sinks. */
typedef struct {
  rows_view q, out;
  float *lse;
  const float *keys, *values, *sink;
  int64_t tokens, past, window;
} head_forward_args;

/* Forward of a panel of queries from the key `query` on: attention output and log-sum-exp. */
static void attend_forward(head_forward_args args, int64_t query, int64_t d, float scale) {
  float panel[MAX_HEAD_DIM * LANES] __attribute__((aligned(64))),
      acc[MAX_HEAD_DIM * LANES] __attribute__((aligned(64)));
  float rows[MAX_HEAD_DIM * LANES] __attribute__((aligned(64)));
  float scores[KEYS * LANES] __attribute__((aligned(64)));
  buffer tops, maxima, totals, rescale;
  const int64_t lanes = min_i64(LANES, args.tokens - query), num_keys = query + lanes, width = padded_width(d);
  const int64_t first = first_block(query, args.window);
  const rows_view q = rows_view_from(args.q, query - args.past);
  const int is_paired = has_pairs(q);
  if (is_paired)
    load_pair_panel(panel, q, lanes, d);
  else
    load_panel(panel, rows, width, q, lanes, d, scale);
  for (int lane = 0; lane < LANES; lane++) maxima[lane] = bits_to_float(0xff800000u), totals[lane] = 0.0f;
  memcpy(tops, maxima, sizeof tops);
  for (int64_t key = first; key < num_keys; key += KEYS) {
    const int64_t count = min_i64(KEYS, num_keys - key);
    multiply_panel(scores, args.keys, key, count, panel, d, is_paired, scale);
    mask_scores(scores, key, count, query, args.window);
    buffer previous_tops;
    memcpy(previous_tops, tops, sizeof tops);
    for (int64_t j = 0; j < count; j++)
      for (int lane = 0; lane < LANES; lane++)
        maxima[lane] = scores[j * LANES + lane] > maxima[lane] ? scores[j * LANES + lane] : maxima[lane];
    /* A window may begin in a later block than the panel's first: until then all weights of the query are exp(-inf). */
    for (int lane = 0; lane < LANES; lane++) tops[lane] = finite_top(maxima[lane], args.window);
    if (key > first) {
      for (int lane = 0; lane < LANES; lane++) {
        rescale[lane] = exp_or_zero(previous_tops[lane] - tops[lane]);
        totals[lane] *= rescale[lane];
      }
      for (int64_t i = 0; i < d; i++)
        for (int lane = 0; lane < LANES; lane++) acc[i * LANES + lane] *= rescale[lane];
    }
    softmax_weights(scores, count, tops, totals);
    tiled_gemm(key > first, d, LANES, count, args.values + key * d, 1, d, scores, LANES, acc, LANES);
  }
  for (int lane = 0; lane < LANES; lane++) rescale[lane] = softmax_factor(&tops[lane], &totals[lane], args.sink);
  for (int lane = 0; lane < lanes; lane++) args.lse[query - args.past + lane] = tops[lane] + logf(totals[lane]);
  store_panel(rows_view_from(args.out, query - args.past), rows, width, acc, lanes, d, rescale);
}

/* Floats of a vector. */
int attention_vector_width(void) { return VECTOR; }

/* Floats of scratch memory for each thread, where the longest document has so many tokens. */
int64_t attention_scratch_floats(int64_t tokens, int64_t d) {
  return 2 * tokens * (2 * pair_words(d) + padded_width(d));
}

/* Write out [tokens, samples, heads, d] and lse [samples, heads, tokens]; head a reads key/value head a / group. Tokens
   are those with queries. */
void attention_forward(heads_view q, heads_view k, heads_view v, heads_view out, float *lse, float *scratch,
                       attention_limits limits, int64_t tokens, int64_t samples, int64_t heads_each, int64_t group,
                       int64_t d, int threads) {
  const int64_t heads = samples * heads_each;
  const float scale = 1.0f / sqrtf((float)d);
  PARALLEL_FOR(heads * tokens * limits.longest * (double)d > MIN_PARALLEL_WORK)
  for (int64_t n = 0; n < heads; n++) {
    const int64_t sample = n / heads_each, head = n % heads_each;
    float *keys = scratch + THREAD * attention_scratch_floats(limits.longest, d), *values = keys + limits.longest * d;
    for (int64_t at = 0, from, length; next_document(limits, sample, tokens, &at, &from, &length);) {
      int64_t first_query;
      const int64_t past = past_keys(limits, at, from, length, &first_query);
      const rows_view key_rows = rows_view_from(head_view(k, sample, head / group), from);
      if (has_pairs(key_rows))
        load_pair_rows(keys, pair_words(d), key_rows, length, d);
      else
        load_rows(keys, d, key_rows, length, d, 1.0f);
      load_rows(values, d, rows_view_from(head_view(v, sample, head / group), from), length, d, 1.0f);
      const head_forward_args args = {.q = rows_view_from(head_view(q, sample, head), first_query),
                                      .out = rows_view_from(head_view(out, sample, head), first_query),
                                      .lse = lse + n * tokens + first_query,
                                      .keys = keys,
                                      .values = values,
                                      .sink = limits.sinks ? limits.sinks + head : NULL,
                                      .tokens = length,
                                      .past = past,
                                      .window = limits.window};
      for (int64_t query = past; query < length; query += LANES) attend_forward(args, query, d, scale);
    }
  }
}

/* The tensors of one head in one document, backward, with contiguous keys, values and their gradients. Values, and the
   keys of scores, are pairs where q has pairs; otherwise both keys are the same. */
typedef struct {
  rows_view grad, q, out, dq;
  const float *lse;
  float *keys, *score_keys, *values, *grad_keys, *grad_values;
  int64_t tokens, past, window;
} head_backward_args;

/* Backward of a panel of queries from the key `query` on: its gradients, and its share of the gradients of keys and values. */
static void attend_backward(head_backward_args args, int64_t query, int64_t d, float scale) {
  float panel[MAX_HEAD_DIM * LANES] __attribute__((aligned(64))),
      grad_panel[MAX_HEAD_DIM * LANES] __attribute__((aligned(64)));
  float rows[MAX_HEAD_DIM * LANES] __attribute__((aligned(64))),
      grad_rows[MAX_HEAD_DIM * LANES] __attribute__((aligned(64)));
  float acc[MAX_HEAD_DIM * LANES] __attribute__((aligned(64)));
  float probs[KEYS * LANES] __attribute__((aligned(64))), grad_scores[KEYS * LANES] __attribute__((aligned(64)));
  buffer lse, delta, unused = {0}, scales;
  const int64_t lanes = min_i64(LANES, args.tokens - query), num_keys = query + lanes, width = padded_width(d);
  const int64_t first = first_block(query, args.window);
  const rows_view q = rows_view_from(args.q, query - args.past), out = rows_view_from(args.out, query - args.past);
  const rows_view grad = rows_view_from(args.grad, query - args.past);
  const int is_paired = has_pairs(q);
  for (int lane = 0; lane < LANES; lane++) {
    lse[lane] = lane < lanes ? args.lse[query - args.past + lane] : 0.0f;
    delta[lane] = 0.0f;
    scales[lane] = scale;
  }
  if (is_paired) {
    load_pair_panel(acc, out, lanes, d);
    load_pair_panel(panel, q, lanes, d);
    load_pair_panel(grad_panel, grad, lanes, d);
    load_rows(rows, width, q, lanes, d, scale);
    load_rows(grad_rows, width, grad, lanes, d, 1.0f);
    for (int64_t i = 0; i < pair_words(d); i++)
      for (int lane = 0; lane < LANES; lane++) {
        const uint32_t pair = float_to_bits(grad_panel[i * LANES + lane]), other = float_to_bits(acc[i * LANES + lane]);
        delta[lane] += bits_to_float(pair << 16) * bits_to_float(other << 16);
        delta[lane] += bits_to_float(pair & 0xffff0000u) * bits_to_float(other & 0xffff0000u);
      }
  } else {
    load_panel(acc, rows, width, out, lanes, d, 1.0f);
    load_panel(panel, rows, width, q, lanes, d, scale);
    load_panel(grad_panel, grad_rows, width, grad, lanes, d, 1.0f);
    for (int64_t i = 0; i < d; i++)
      for (int lane = 0; lane < LANES; lane++) delta[lane] += grad_panel[i * LANES + lane] * acc[i * LANES + lane];
  }
  for (int64_t key = first; key < num_keys; key += KEYS) {
    const int64_t count = min_i64(KEYS, num_keys - key);
    multiply_panel(probs, args.score_keys, key, count, panel, d, is_paired, scale);
    mask_scores(probs, key, count, query, args.window);
    softmax_weights(probs, count, lse, unused);
    multiply_panel(grad_scores, args.values, key, count, grad_panel, d, is_paired, 1.0f);
    for (int64_t j = 0; j < count; j++)
      for (int lane = 0; lane < LANES; lane++)
        grad_scores[j * LANES + lane] = probs[j * LANES + lane] * (grad_scores[j * LANES + lane] - delta[lane]);
    tiled_gemm(1, count, width, lanes, probs, LANES, 1, grad_rows, width, args.grad_values + key * width, width);
    tiled_gemm(1, count, width, lanes, grad_scores, LANES, 1, rows, width, args.grad_keys + key * width, width);
    tiled_gemm(key > first, d, LANES, count, args.keys + key * d, 1, d, grad_scores, LANES, acc, LANES);
  }
  store_panel(rows_view_from(args.dq, query - args.past), rows, width, acc, lanes, d, scales);
}

/* Write the gradients of queries, and of keys and values per query head, all [tokens, samples, heads, d]. Tokens are
   those with queries; with `query_ends`, keys and values have more. */
void attention_backward(heads_view grad, heads_view q, heads_view k, heads_view v, heads_view out, const float *lse,
                        heads_view dq, heads_view dk, heads_view dv, float *scratch, attention_limits limits,
                        int64_t tokens, int64_t samples, int64_t heads_each, int64_t group, int64_t d, int threads) {
  const int64_t heads = samples * heads_each, width = padded_width(d), longest = limits.longest;
  const float scale = 1.0f / sqrtf((float)d);
  PARALLEL_FOR(heads * tokens * limits.longest * (double)d > MIN_PARALLEL_WORK)
  for (int64_t n = 0; n < heads; n++) {
    const int64_t sample = n / heads_each, head = n % heads_each;
    float *grad_keys = scratch + THREAD * attention_scratch_floats(longest, d), *keys = grad_keys + 2 * longest * width;
    for (int64_t at = 0, from, length; next_document(limits, sample, tokens, &at, &from, &length);) {
      int64_t first_query;
      const int64_t past = past_keys(limits, at, from, length, &first_query);
      const rows_view key_rows = rows_view_from(head_view(k, sample, head / group), from);
      const rows_view value_rows = rows_view_from(head_view(v, sample, head / group), from);
      const int is_paired = has_pairs(key_rows);
      float *const values = keys + length * d, *const score_keys = is_paired ? values + length * pair_words(d) : keys;
      const head_backward_args args = {.grad = rows_view_from(head_view(grad, sample, head), first_query),
                                       .q = rows_view_from(head_view(q, sample, head), first_query),
                                       .out = rows_view_from(head_view(out, sample, head), first_query),
                                       .dq = rows_view_from(head_view(dq, sample, head), first_query),
                                       .lse = lse + n * tokens + first_query,
                                       .keys = keys,
                                       .score_keys = score_keys,
                                       .values = values,
                                       .grad_keys = grad_keys,
                                       .grad_values = grad_keys + length * width,
                                       .tokens = length,
                                       .past = past,
                                       .window = limits.window};
      memset(args.grad_keys, 0, 2 * length * width * sizeof(float));
      load_rows(keys, d, key_rows, length, d, 1.0f);
      if (is_paired) {
        load_pair_rows(score_keys, pair_words(d), key_rows, length, d);
        load_pair_rows(values, pair_words(d), value_rows, length, d);
      } else {
        load_rows(values, d, value_rows, length, d, 1.0f);
      }
      for (int64_t query = past; query < length; query += LANES) attend_backward(args, query, d, scale);
      const rows_view dk_rows = rows_view_from(head_view(dk, sample, head), from);
      const rows_view dv_rows = rows_view_from(head_view(dv, sample, head), from);
      for (int64_t t = 0; t < length; t++) {
        store_row(dk_rows, t, args.grad_keys + t * width, d, 1.0f);
        store_row(dv_rows, t, args.grad_values + t * width, d, 1.0f);
      }
    }
  }
}

/* Write the sums [rows, d] of float32 [rows, group, d] over the query heads of a key/value head, in their order. */
void attention_sum_heads(const float *x, void *sums, int64_t rows, int64_t group, int64_t d, int is_bfloat16,
                         int threads) {
  PARALLEL_FOR(rows * group * (double)d > MIN_PARALLEL_WORK)
  for (int64_t r = 0; r < rows; r++) {
    const float *const heads = x + r * group * d;
    float sum[MAX_HEAD_DIM];
    memcpy(sum, heads, d * sizeof *sum);
    for (int64_t head = 1; head < group; head++)
      for (int64_t i = 0; i < d; i++) sum[i] += heads[head * d + i];
    store_row((rows_view){sums, d, is_bfloat16}, r, sum, d, 1.0f);
  }
}
