/* Transposition of 4x4 blocks of 32-bit words. */

#ifndef MOEFOLD_TRANSPOSE_H
#define MOEFOLD_TRANSPOSE_H

#include <stdint.h>

typedef float quad __attribute__((vector_size(16), aligned(1), may_alias));
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int shuffle_indices __attribute__((vector_size(16)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (shuffle_indices){__VA_ARGS__})
#endif

/* Transpose a 4x4 block of words, from lines `stride` bytes apart to lines `to_width` words apart. */
static inline void transpose_4x4(void *to, int64_t to_width, const void *lines, int64_t stride) {
  const char *line = lines;
  char *out = to;
  to_width *= sizeof(uint32_t);
  const quad a = *(const quad *)line, b = *(const quad *)(line + stride);
  const quad c = *(const quad *)(line + 2 * stride), d = *(const quad *)(line + 3 * stride);
  const quad ab = SHUFFLE(a, b, 0, 4, 1, 5), cd = SHUFFLE(c, d, 0, 4, 1, 5);
  const quad ab_2 = SHUFFLE(a, b, 2, 6, 3, 7), cd_2 = SHUFFLE(c, d, 2, 6, 3, 7);
  *(quad *)out = SHUFFLE(ab, cd, 0, 1, 4, 5);
  *(quad *)(out + to_width) = SHUFFLE(ab, cd, 2, 3, 6, 7);
  *(quad *)(out + 2 * to_width) = SHUFFLE(ab_2, cd_2, 0, 1, 4, 5);
  *(quad *)(out + 3 * to_width) = SHUFFLE(ab_2, cd_2, 2, 3, 6, 7);
}

#endif
