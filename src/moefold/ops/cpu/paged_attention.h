/* Arguments of the attention of paged_attention.c. */

#ifndef MOEFOLD_PAGED_ATTENTION_H
#define MOEFOLD_PAGED_ATTENTION_H

#include <stdint.h>

/* Strided view of [rows, heads, D], whose last stride is 1; bfloat16 or float32. */
typedef struct {
  void *start;
  int64_t row, head, is_bfloat16;
} query_view;

/* Pages [P, G, D, KEYS] of keys and [P, G, KEYS, D] of values, contiguous, of one dtype; the pages of each row, and the
   number of keys that it attends to. */
typedef struct {
  void *keys, *values;
  int64_t is_bfloat16, groups;
  const int32_t *table;
  int64_t table_width;
  const int32_t *lengths;
  /* Most keys of a query, its own included; 0: no limit. */
  int64_t window;
  /* A logit of each head that takes part in the softmax without a value; NULL: none. */
  const float *sinks;
} paged_cache;

#endif
