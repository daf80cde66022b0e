/* Attention of single queries to the keys of a paged cache: decoding, and prefill in pieces.

   A page holds KEYS positions of all key/value heads: keys dimension-major, [D, KEYS], so that the lanes of a vector are
   keys in the scores, and values [KEYS, D], so that they are dims in the output. A tile has the queries of consecutive
   rows for one key/value head. Queries of rows with the same page at a place of their tables are multiplied by it
   together: consecutive tokens of a sample, and samples that share a prompt, whose sums go on from its pages to their
   own.

   An element of the output is computed by the operations of attention.c, in its order: it has the same bits. */

#include "attention.h"
#include "paged_attention.h"
#include "parallel.h"
#include "transpose.h"

/* Queries of a tile. */
#define QUERIES 32
#define CACHE_LINE 64

/* First position that a query attends to, which is itself at position length - 1. */
static inline int64_t first_position(int64_t length, int64_t window) {
  return window && length > window ? length - window : 0;
}

/* Queries of a tile, all of one key/value head. */
typedef struct {
  int64_t row, rows, head, heads, group;
} query_tile;

/* Return `count` rows of a page as float32 with rows of `width`, copied to `copy` unless they are so in memory. */
static inline const float *page_rows(float *copy, int64_t width, const void *page, int64_t is_bfloat16, int64_t count,
                                     int64_t d) {
  if (!is_bfloat16 && width == d) return page;
  load_rows(copy, width, (rows_view){(void *)page, d, is_bfloat16}, count, d, 1.0f);
  return copy;
}

/* Return the keys [d, KEYS] of a page as operands of the scores: float32, or pairs of dims [pair_words(d), KEYS]. */
static inline const float *page_keys(float *copy, const void *page, int64_t is_bfloat16, int64_t d) {
  if (!HAS_PAIR_PRODUCTS || !is_bfloat16) return page_rows(copy, KEYS, page, is_bfloat16, d, KEYS);
  const uint16_t *row = page;
  for (int64_t i = 0; i < d; i += 2, row += 2 * KEYS, copy += KEYS)
    for (int64_t j = 0; j < KEYS; j++)
      copy[j] = bits_to_float(row[j] | (i + 1 < d ? (uint32_t)row[KEYS + j] << 16 : 0));
  return copy - pair_words(d) * KEYS;
}

/* Replace the scores of keys beyond the length of a query, or before its window, by -inf; returns the maximum. */
static inline float mask_row(float *scores, int64_t key, int64_t count, int64_t length, int64_t window, float top) {
  const float masked = bits_to_float(0xff800000u);
  const int64_t low = min_i64(count, first_position(length, window) - key);
  for (int64_t j = 0; j < low; j++) scores[j] = masked;
  for (int64_t j = max_i64(0, length - key); j < count; j++) scores[j] = masked;
  for (int64_t j = 0; j < count; j++) top = scores[j] > top ? scores[j] : top;
  return top;
}

/* The state of the queries of a tile, query n % heads of row n / heads. */
typedef struct {
  float queries[QUERIES * MAX_HEAD_DIM], acc[QUERIES * MAX_HEAD_DIM] __attribute__((aligned(64)));
  float scores[QUERIES * KEYS] __attribute__((aligned(64)));
  float tops[QUERIES], maxima[QUERIES], totals[QUERIES];
} tile_state;

/* Rows of a tile, from `first` up to `stop`, that read one page, and how many of its keys they read. */
typedef struct {
  int64_t first, stop, page, keys;
} page_run;

static inline int64_t first_block(paged_cache cache, int64_t row) {
  return first_position(cache.lengths[row], cache.window) / KEYS * KEYS;
}

/* Return whether a row attends to a key of the block from `key` on. */
static inline int reads_block(paged_cache cache, int64_t row, int64_t key) {
  return key < cache.lengths[row] && key >= first_block(cache, row);
}

/* Split the rows of a tile into runs that read one page at the block from `key` on; returns their number. */
static int64_t split_rows(page_run *runs, paged_cache cache, query_tile t, int64_t key) {
  int64_t count = 0;
  for (int64_t r = 0; r < t.rows; r++) {
    const int64_t row = t.row + r;
    if (!reads_block(cache, row, key)) continue;
    const int64_t page = cache.table[row * cache.table_width + key / KEYS];
    const int64_t keys = min_i64(KEYS, cache.lengths[row] - key);
    page_run *const last = runs + count - 1;
    if (count && last->stop == r && last->page == page)
      last->stop = r + 1, last->keys = max_i64(last->keys, keys);
    else
      runs[count++] = (page_run){r, r + 1, page, keys};
  }
  return count;
}

/* Compute the softmax weights of the queries of a run, and rescale their sums. */
static void weigh_keys(tile_state *state, const float *key_rows, paged_cache cache, query_tile t, page_run run,
                       int64_t key, int64_t d, float scale) {
  const int64_t from = run.first * t.heads, to = run.stop * t.heads, width = padded_width(d);
  if (HAS_PAIR_PRODUCTS && cache.is_bfloat16)
    tiled_pair_gemm(to - from, padded_width(run.keys), d, state->queries + from * pair_words(d), key_rows, KEYS,
                    state->scores + from * KEYS, KEYS, scale);
  else
    tiled_gemm(0, to - from, padded_width(run.keys), d, state->queries + from * d, d, 1, key_rows, KEYS,
               state->scores + from * KEYS, KEYS);
  for (int64_t n = from; n < to; n++) {
    const int64_t row = t.row + n / t.heads;
    float *const scores = state->scores + n * KEYS;
    state->maxima[n] = mask_row(scores, key, run.keys, cache.lengths[row], cache.window, state->maxima[n]);
    const float top = finite_top(state->maxima[n], cache.window), rescale = exp_or_zero(state->tops[n] - top);
    state->tops[n] = top;
    for (int64_t j = 0; j < run.keys; j++) scores[j] = exp_or_zero(scores[j] - top);
    for (int64_t j = run.keys; j < KEYS; j++) scores[j] = 0.0f;
    if (key == first_block(cache, row)) continue;
    state->totals[n] *= rescale;
    for (int64_t i = 0; i < width; i++) state->acc[n * width + i] *= rescale;
  }
}

/* Queries whose totals are summed at a time, in quads. */
#define SUMMED_QUERIES 16

/* Add the weights of all keys of a block, in ascending order, to the totals of `count` queries. */
static void add_weights(tile_state *state, int64_t count, int64_t keys) {
  for (int64_t n = 0; n < count; n += SUMMED_QUERIES) {
    quad *const totals = (quad *)(state->totals + n);
    quad sums[4] = {totals[0], totals[1], totals[2], totals[3]};
    for (int64_t j = 0; j < keys; j += 4) {
      quad columns[4][4];
#pragma GCC unroll 4
      for (int g = 0; g < 4; g++)
        transpose_4x4(columns[g], 4, state->scores + (n + 4 * g) * KEYS + j, KEYS * sizeof(float));
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++)
#pragma GCC unroll 4
        for (int g = 0; g < 4; g++) sums[g] += columns[g][i];
    }
    for (int g = 0; g < 4; g++) totals[g] = sums[g];
  }
}

/* The page of a run, of the keys or the values of all heads. */
static inline const void *page_of(const void *pages, paged_cache cache, query_tile t, page_run run, int64_t d) {
  return offset_pointer(pages, (run.page * cache.groups + t.group) * d * KEYS, cache.is_bfloat16);
}

/* Fetch the first `used` numbers of each line of a page: no processor foresees where the next one is. Inlined, because
   gcc removes calls of a function without effects. */
ALWAYS_INLINE void fetch_page(const char *line, int64_t is_bfloat16, int64_t lines, int64_t width, int64_t used) {
  const int64_t size = is_bfloat16 ? sizeof(uint16_t) : sizeof(float);
  for (const char *const stop = line + lines * width * size; line < stop; line += width * size)
    for (int64_t i = 0; i < used * size; i += CACHE_LINE) __builtin_prefetch(line + i, 0, 2);
}

ALWAYS_INLINE void fetch_keys(paged_cache cache, query_tile t, page_run run, int64_t d) {
  fetch_page(page_of(cache.keys, cache, t, run, d), cache.is_bfloat16, d, KEYS, run.keys);
}

/* Compute the attention of the queries of a tile. */
static void attend_tile(query_view q, query_view out, paged_cache cache, query_tile t, int64_t d, float scale) {
  tile_state state;
  float copy[MAX_HEAD_DIM * KEYS] __attribute__((aligned(64)));
  page_run buffers[2][QUERIES], *runs = buffers[0], *next = buffers[1];
  const int64_t count = t.rows * t.heads, width = padded_width(d);
  int64_t begin = INT64_MAX, stop = 0;
  for (int64_t r = 0; r < t.rows; r++) {
    begin = min_i64(begin, first_block(cache, t.row + r)), stop = max_i64(stop, cache.lengths[t.row + r]);
    const rows_view heads = {
        offset_pointer(q.start, (t.row + r) * q.row + t.head * q.head, q.is_bfloat16), q.head, q.is_bfloat16};
    if (HAS_PAIR_PRODUCTS && q.is_bfloat16)
      load_pair_rows(state.queries + r * t.heads * pair_words(d), pair_words(d), heads, t.heads, d);
    else
      load_rows(state.queries + r * t.heads * d, d, heads, t.heads, d, scale);
  }
  for (int64_t n = 0; n < QUERIES; n++)
    state.tops[n] = state.maxima[n] = bits_to_float(0xff800000u), state.totals[n] = 0.0f;
  memset(state.acc, 0, count * width * sizeof *state.acc);
  const int64_t summed = (count + SUMMED_QUERIES - 1) / SUMMED_QUERIES * SUMMED_QUERIES;
  memset(state.scores + count * KEYS, 0, (summed - count) * KEYS * sizeof *state.scores);
  /* The keys of as many runs of the next block as there are in this one are fetched before it. */
  int64_t num_runs = split_rows(runs, cache, t, begin), num_fetched = 0;
  for (int64_t key = begin; key < stop; key += KEYS) {
    const int64_t num_next = key + KEYS < stop ? split_rows(next, cache, t, key + KEYS) : 0;
    int64_t num_rows = 0;
    for (int64_t i = 0; i < num_runs; i++) num_rows += runs[i].stop - runs[i].first;
    /* The weights of queries that read no key of the block are 0. */
    if (num_rows < t.rows) memset(state.scores, 0, count * KEYS * sizeof *state.scores);
    for (int64_t i = 0; i < num_runs; i++) {
      const void *page = page_of(cache.keys, cache, t, runs[i], d);
      if (i + 1 < num_runs && i + 1 >= num_fetched) fetch_keys(cache, t, runs[i + 1], d);
      fetch_page(page_of(cache.values, cache, t, runs[i], d), cache.is_bfloat16, 1, KEYS * d,
                 runs[i].keys * d);
      weigh_keys(&state, page_keys(copy, page, cache.is_bfloat16, d), cache, t, runs[i], key, d, scale);
    }
    add_weights(&state, count, min_i64(KEYS, stop - key));
    for (int64_t i = 0; i < num_runs; i++) {
      const void *page = page_of(cache.values, cache, t, runs[i], d);
      if (i < num_next) fetch_keys(cache, t, next[i], d);
      const float *value_rows = page_rows(copy, width, page, cache.is_bfloat16, runs[i].keys, d);
      const int64_t from = runs[i].first * t.heads, queries = runs[i].stop * t.heads - from;
      tiled_gemm(1, queries, width, runs[i].keys, state.scores + from * KEYS, KEYS, 1, value_rows, width,
                 state.acc + from * width, width);
    }
    page_run *const read = runs;
    runs = next, next = read, num_fetched = num_runs, num_runs = num_next;
  }
  for (int64_t n = 0; n < count; n++) {
    const int64_t head = t.head + n % t.heads;
    const float factor = softmax_factor(&state.tops[n], &state.totals[n], cache.sinks ? cache.sinks + head : NULL);
    const rows_view to = {
        offset_pointer(out.start, (t.row + n / t.heads) * out.row + head * out.head, out.is_bfloat16), 0,
        out.is_bfloat16};
    store_row(to, 0, state.acc + n * width, d, factor);
  }
}

/* Positions of a page. */
int paged_attention_page_size(void) { return KEYS; }

/* Write out [rows, heads, d], all of positive length. */
void paged_attention(query_view q, query_view out, paged_cache cache, int64_t rows, int64_t heads, int64_t d,
                     int threads) {
  const int64_t group = heads / cache.groups, tile_heads = min_i64(group, QUERIES);
  const int64_t parts = (group + tile_heads - 1) / tile_heads;
  /* Fewer rows of a tile where there would be fewer tiles than threads; a result does not depend on them. */
  const int64_t tile_rows = max_i64(1, min_i64(QUERIES / tile_heads, rows * cache.groups * parts / (2 * threads)));
  const int64_t sets = (rows + tile_rows - 1) / tile_rows;
  const float scale = 1.0f / sqrtf((float)d);
  double work = 0.0;
  for (int64_t r = 0; r < rows; r++) work += 2.0 * heads * cache.lengths[r] * d;
  (void)work;
  PRAGMA(omp parallel for schedule(dynamic) if (work > MIN_PARALLEL_WORK) num_threads(threads))
  for (int64_t n = 0; n < sets * cache.groups * parts; n++) {
    const int64_t row = n / (cache.groups * parts) * tile_rows, head_group = n / parts % cache.groups, part = n % parts;
    const query_tile tile = {.row = row,
                             .rows = min_i64(tile_rows, rows - row),
                             .head = head_group * group + part * tile_heads,
                             .heads = min_i64(tile_heads, group - part * tile_heads),
                             .group = head_group};
    attend_tile(q, out, cache, tile, d, scale);
  }
}
