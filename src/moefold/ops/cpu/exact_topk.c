/* The positions of the k largest scores of each row; of equal scores, the lowest positions. Results do not depend on
   the guess, on vectors or on threads. */

#include <stdint.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "parallel.h"

/* Scores that are compared with the threshold at a time. */
#define BLOCK 64
/* Bins of a histogram of keys, a power of two. */
#define NUM_BINS 2048

#if defined(__AVX512F__)
static inline int64_t append_int32(const int32_t *keys, int32_t first, int32_t threshold, int32_t *out_keys,
                                   int32_t *out_positions) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  int64_t count = 0;
  for (int32_t i = 0; i < BLOCK; i += 16) {
    const __m512i key = _mm512_loadu_si512(keys + i);
    const __mmask16 passes = _mm512_cmpge_epi32_mask(key, _mm512_set1_epi32(threshold));
    const __m512i position = _mm512_add_epi32(lanes, _mm512_set1_epi32(first + i));
    _mm512_storeu_si512(out_keys + count, _mm512_maskz_compress_epi32(passes, key));
    _mm512_storeu_si512(out_positions + count, _mm512_maskz_compress_epi32(passes, position));
    count += __builtin_popcount(passes);
  }
  return count;
}
#define APPEND_INT32 append_int32
#endif

#define INSTANCE_FLOAT32(x) x##_float32
#define INSTANCE_BFLOAT16(x) x##_bfloat16
#define INSTANCE_FLOAT64(x) x##_float64

#define NAME INSTANCE_FLOAT32
#define BITS uint32_t
#define KEY int32_t
#define UKEY uint32_t
#define KEY_BITS 32
#define TO_KEY_BITS 0
#define INFINITY_KEY ((int32_t)0x7f800000)
#ifdef APPEND_INT32
#define APPEND_BLOCK APPEND_INT32
#endif
#include "topk_row.h"

#define NAME INSTANCE_BFLOAT16
#define BITS uint16_t
#define KEY int32_t
#define UKEY uint32_t
#define KEY_BITS 32
#define TO_KEY_BITS 16
#define INFINITY_KEY ((int32_t)0x7f800000)
#ifdef APPEND_INT32
#define APPEND_BLOCK APPEND_INT32
#endif
#include "topk_row.h"

#define NAME INSTANCE_FLOAT64
#define BITS uint64_t
#define KEY int64_t
#define UKEY uint64_t
#define KEY_BITS 64
#define TO_KEY_BITS 0
#define INFINITY_KEY ((int64_t)0x7ff0000000000000)
#include "topk_row.h"

/* Arguments that all rows share. */
typedef struct {
  const void *scores;
  int64_t row_stride; /* in elements */
  const int32_t *starts, *stops, *guess; /* each may be null */
  int64_t num_guesses;
  int32_t *out;
  int64_t k, width;
  int64_t room; /* survivors of a row in a workspace; at least k + BLOCK */
} Call;

static int64_t clamp(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : value > high ? high : value;
}

/* Types of scores: 0 float32, 1 bfloat16, 2 float64. Returns whether there is a NaN. */
static int topk_row(const Call *call, int64_t row, int type, char *workspace) {
  const int64_t start = call->starts ? clamp(call->starts[row], 0, call->width) : 0;
  const int64_t stop = call->stops ? clamp(call->stops[row], start, call->width) : call->width;
  const int32_t *guess = call->guess ? call->guess + row * call->num_guesses : 0;
  const int64_t num_guesses = call->guess ? call->num_guesses : 0;
  const int64_t offset = row * call->row_stride;
  int32_t *out = call->out + row * call->k;
  if (type == 0)
    return topk_row_float32((const uint32_t *)call->scores + offset, start, stop, call->k, guess, num_guesses, out,
                            workspace, call->room);
  if (type == 1)
    return topk_row_bfloat16((const uint16_t *)call->scores + offset, start, stop, call->k, guess, num_guesses, out,
                             workspace, call->room);
  return topk_row_float64((const uint64_t *)call->scores + offset, start, stop, call->k, guess, num_guesses, out,
                          workspace, call->room);
}

/* Write the positions of the top k of rows of scores [rows, width] to out [rows, k]; returns the number of rows with a
   NaN, whose positions are -1. The workspace has workspace_bytes for each thread. */
int64_t exact_topk(const void *scores, int64_t row_stride, const int32_t *starts, const int32_t *stops,
                   const int32_t *guess, int64_t num_guesses, int32_t *out, int64_t rows, int64_t k, int64_t width,
                   int type, char *workspace, int64_t workspace_bytes, int64_t room, int threads) {
  const Call call = {scores, row_stride, starts, stops, guess, num_guesses, out, k, width, room};
  int64_t rows_with_nan = 0;
  (void)threads;
  PRAGMA(omp parallel for schedule(dynamic) reduction(+ : rows_with_nan) num_threads(threads) if (rows > 1))
  for (int64_t row = 0; row < rows; row++)
    rows_with_nan += topk_row(&call, row, type, workspace + THREAD * workspace_bytes);
  return rows_with_nan;
}
