/* Attention of single queries to the keys of a paged cache: decoding, and prefill in pieces.

   A page holds KEYS positions of all key/value heads: keys dimension-major, [D, KEYS], so that the lanes of a vector are
   keys in the scores, and values [KEYS, D], so that they are dims in the output. The queries that read the same pages,
   those of a group of heads and of consecutive tokens of a sample, share a tile.

   An element of the output is computed by the operations of attention.c, in its order: it has the same bits. */

#include "attention.h"
#include "paged_attention.h"

/* Queries of a tile. */
#define QUERIES 32

#ifdef _OPENMP
#include <omp.h>
#define OMP_PARALLEL_FOR _Pragma("omp parallel for schedule(dynamic) if (work > MIN_PARALLEL_WORK) num_threads(threads)")
#else
#define OMP_PARALLEL_FOR
#endif

static inline int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }

/* First position that a query attends to, which is itself at position length - 1. */
static inline int64_t first_position(int64_t length, int64_t window) {
  return window && length > window ? length - window : 0;
}

/* Return whether two rows have the same pages up to a number of positions. */
static int share_pages(paged_cache cache, int64_t a, int64_t b, int64_t length) {
  return !memcmp(cache.table + a * cache.table_width, cache.table + b * cache.table_width,
                 (length + KEYS - 1) / KEYS * sizeof *cache.table);
}

/* Write the first row of each set of at most `most` consecutive rows that share their pages; returns their number. */
static int64_t split_rows(int32_t *first_rows, paged_cache cache, int64_t rows, int64_t most) {
  int64_t sets = 0, longest = 0;
  for (int64_t r = 0; r < rows; r++) {
    const int64_t length = cache.lengths[r];
    if (r && r - first_rows[sets - 1] < most && share_pages(cache, r - 1, r, max_i64(longest, length))) {
      longest = max_i64(longest, length);
      continue;
    }
    first_rows[sets++] = (int32_t)r, longest = length;
  }
  first_rows[sets] = (int32_t)rows;
  return sets;
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

/* Replace the scores of keys beyond the length of a query, or before its window, by -inf; returns the maximum. */
static inline float mask_row(float *scores, int64_t key, int64_t count, int64_t length, int64_t window, float top) {
  const float masked = bits_to_float(0xff800000u);
  const int64_t low = min_i64(count, first_position(length, window) - key);
  for (int64_t j = 0; j < low; j++) scores[j] = masked;
  for (int64_t j = max_i64(0, length - key); j < count; j++) scores[j] = masked;
  for (int64_t j = 0; j < count; j++) top = scores[j] > top ? scores[j] : top;
  return top;
}

/* Compute the attention of the queries of a tile. */
static void attend_tile(query_view q, query_view out, paged_cache cache, query_tile t, int64_t d, float scale) {
  float queries[QUERIES * MAX_HEAD_DIM], acc[QUERIES * MAX_HEAD_DIM] __attribute__((aligned(64)));
  float key_copy[MAX_HEAD_DIM * KEYS] __attribute__((aligned(64)));
  float value_copy[KEYS * MAX_HEAD_DIM] __attribute__((aligned(64)));
  float scores[QUERIES * KEYS] __attribute__((aligned(64)));
  float tops[QUERIES], maxima[QUERIES], totals[QUERIES], rescale[QUERIES];
  const int64_t count = t.rows * t.heads, width = padded_width(d);
  int64_t begin = INT64_MAX, stop = 0;
  for (int64_t r = 0; r < t.rows; r++) {
    const int64_t length = cache.lengths[t.row + r];
    begin = min_i64(begin, first_position(length, cache.window) / KEYS * KEYS), stop = max_i64(stop, length);
    const rows_view heads = {
        offset_pointer(q.start, (t.row + r) * q.row + t.head * q.head, q.is_bfloat16), q.head, q.is_bfloat16};
    load_rows(queries + r * t.heads * d, d, heads, t.heads, d, scale);
  }
  for (int64_t n = 0; n < count; n++) tops[n] = maxima[n] = bits_to_float(0xff800000u), totals[n] = 0.0f;
  for (int64_t key = begin; key < stop; key += KEYS) {
    const int64_t keys = min_i64(KEYS, stop - key), key_width = padded_width(keys);
    const int64_t page = (cache.table[t.row * cache.table_width + key / KEYS] * cache.groups + t.group) * d * KEYS;
    const float *key_rows =
        page_rows(key_copy, KEYS, offset_pointer(cache.keys, page, cache.is_bfloat16), cache.is_bfloat16, d, KEYS);
    tiled_gemm(0, count, key_width, d, queries, d, 1, key_rows, KEYS, scores, KEYS);
    for (int64_t n = 0; n < count; n++) {
      maxima[n] = mask_row(scores + n * KEYS, key, keys, cache.lengths[t.row + n / t.heads], cache.window, maxima[n]);
      const float top = finite_top(maxima[n], cache.window);
      rescale[n] = exp_or_zero(tops[n] - top);
      tops[n] = top;
      for (int64_t j = 0; j < keys; j++) scores[n * KEYS + j] = exp_or_zero(scores[n * KEYS + j] - top);
    }
    if (key > begin)
      for (int64_t n = 0; n < count; n++) {
        totals[n] *= rescale[n];
        for (int64_t i = 0; i < width; i++) acc[n * width + i] *= rescale[n];
      }
    for (int64_t j = 0; j < keys; j++)
      for (int64_t n = 0; n < count; n++) totals[n] += scores[n * KEYS + j];
    const float *value_rows = page_rows(value_copy, width, offset_pointer(cache.values, page, cache.is_bfloat16),
                                        cache.is_bfloat16, keys, d);
    tiled_gemm(key > begin, count, width, keys, scores, KEYS, 1, value_rows, width, acc, width);
  }
  for (int64_t n = 0; n < count; n++) {
    const int64_t head = t.head + n % t.heads;
    const float factor = softmax_factor(&tops[n], &totals[n], cache.sinks ? cache.sinks + head : NULL);
    const rows_view to = {
        offset_pointer(out.start, (t.row + n / t.heads) * out.row + head * out.head, out.is_bfloat16), 0,
        out.is_bfloat16};
    store_row(to, 0, acc + n * width, d, factor);
  }
}

/* Positions of a page. */
int paged_attention_page_size(void) { return KEYS; }

/* Write out [rows, heads, d], all of positive length; `first_rows` is scratch memory of rows + 1 numbers. */
void paged_attention(query_view q, query_view out, paged_cache cache, int32_t *first_rows, int64_t rows, int64_t heads,
                     int64_t d, int threads) {
  const int64_t group = heads / cache.groups, tile_heads = min_i64(group, QUERIES);
  const int64_t parts = (group + tile_heads - 1) / tile_heads;
  const int64_t sets = split_rows(first_rows, cache, rows, max_i64(1, QUERIES / tile_heads));
  const float scale = 1.0f / sqrtf((float)d);
  double work = 0.0;
  for (int64_t r = 0; r < rows; r++) work += 2.0 * heads * cache.lengths[r] * d;
  (void)work, (void)threads;
  OMP_PARALLEL_FOR
  for (int64_t n = 0; n < sets * cache.groups * parts; n++) {
    const int64_t set = n / (cache.groups * parts), head_group = n / parts % cache.groups, part = n % parts;
    const query_tile tile = {.row = first_rows[set],
                             .rows = first_rows[set + 1] - first_rows[set],
                             .head = head_group * group + part * tile_heads,
                             .heads = min_i64(tile_heads, group - part * tile_heads),
                             .group = head_group};
    attend_tile(q, out, cache, tile, d, scale);
  }
}
