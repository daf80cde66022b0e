/* Squares of words that are turned on their way. */

#ifndef MOEFOLD_TURN_H
#define MOEFOLD_TURN_H

#include <stdint.h>

typedef float quad __attribute__((vector_size(16), aligned(1), may_alias));
#ifdef __clang__
#define MIXED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int places __attribute__((vector_size(16)));
#define MIXED(a, b, ...) __builtin_shuffle(a, b, (places){__VA_ARGS__})
#endif

/* A square of 4 by 4 words, turned: from lines that are `stride` bytes apart to lines `to_width` words apart. */
static inline void turn(void *to, int64_t to_width, const void *lines, int64_t stride) {
  const char *line = lines;
  char *out = to;
  to_width *= sizeof(uint32_t);
  const quad a = *(const quad *)line, b = *(const quad *)(line + stride);
  const quad c = *(const quad *)(line + 2 * stride), d = *(const quad *)(line + 3 * stride);
  const quad ab = MIXED(a, b, 0, 4, 1, 5), cd = MIXED(c, d, 0, 4, 1, 5);
  const quad ab_2 = MIXED(a, b, 2, 6, 3, 7), cd_2 = MIXED(c, d, 2, 6, 3, 7);
  *(quad *)out = MIXED(ab, cd, 0, 1, 4, 5);
  *(quad *)(out + to_width) = MIXED(ab, cd, 2, 3, 6, 7);
  *(quad *)(out + 2 * to_width) = MIXED(ab_2, cd_2, 0, 1, 4, 5);
  *(quad *)(out + 3 * to_width) = MIXED(ab_2, cd_2, 2, 3, 6, 7);
}

#endif
