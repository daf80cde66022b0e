/* Transposition of blocks of 32-bit words: 4x4, and as many as the floats of a vector in each direction. */

#ifndef MOEFOLD_TRANSPOSE_H
#define MOEFOLD_TRANSPOSE_H

#include <stdint.h>

#if defined(__AVX__)
#include <immintrin.h>
#endif

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

/* Words in each direction of `transpose_block`. */
#if defined(__AVX512F__)
#define BLOCK 16

/* Transpose the 16 words of 16 vectors. */
static inline void transpose_vectors(__m512 a[BLOCK]) {
  __m512 b[BLOCK];
#pragma GCC unroll 8
  for (int i = 0; i < BLOCK; i += 2)
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]), b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  /* a[4 g + j]: words j, 4 + j, 8 + j and 12 + j of the lines 4 g to 4 g + 3. */
#pragma GCC unroll 4
  for (int i = 0; i < BLOCK; i += 4) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      const __m512d low = _mm512_castps_pd(b[i + j]), high = _mm512_castps_pd(b[i + 2 + j]);
      a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      a[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    const __m512 low = _mm512_shuffle_f32x4(a[j], a[4 + j], 0x88), high = _mm512_shuffle_f32x4(a[8 + j], a[12 + j], 0x88);
    const __m512 low_2 = _mm512_shuffle_f32x4(a[j], a[4 + j], 0xdd),
                 high_2 = _mm512_shuffle_f32x4(a[8 + j], a[12 + j], 0xdd);
    a[j] = _mm512_shuffle_f32x4(low, high, 0x88), a[8 + j] = _mm512_shuffle_f32x4(low, high, 0xdd);
    a[4 + j] = _mm512_shuffle_f32x4(low_2, high_2, 0x88), a[12 + j] = _mm512_shuffle_f32x4(low_2, high_2, 0xdd);
  }
}

/* Transpose a block, from lines `stride` bytes apart to lines `to_width` words apart. */
static inline void transpose_block(void *to, int64_t to_width, const void *lines, int64_t stride) {
  __m512 a[BLOCK];
#pragma GCC unroll 16
  for (int i = 0; i < BLOCK; i++) a[i] = _mm512_loadu_ps((const char *)lines + i * stride);
  transpose_vectors(a);
#pragma GCC unroll 16
  for (int i = 0; i < BLOCK; i++) _mm512_storeu_ps((float *)to + i * to_width, a[i]);
}
#elif defined(__AVX__)
#define BLOCK 8

/* Transpose a block, from lines `stride` bytes apart to lines `to_width` words apart. */
static inline void transpose_block(void *to, int64_t to_width, const void *lines, int64_t stride) {
  __m256 a[BLOCK], b[BLOCK];
#pragma GCC unroll 8
  for (int i = 0; i < BLOCK; i++) a[i] = _mm256_loadu_ps((const float *)((const char *)lines + i * stride));
#pragma GCC unroll 4
  for (int i = 0; i < BLOCK; i += 2)
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]), b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  /* a[4 g + j]: words j and 4 + j of the lines 4 g to 4 g + 3. */
#pragma GCC unroll 2
  for (int i = 0; i < BLOCK; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      a[i + 2 * j] = _mm256_shuffle_ps(b[i + j], b[i + 2 + j], 0x44);
      a[i + 2 * j + 1] = _mm256_shuffle_ps(b[i + j], b[i + 2 + j], 0xee);
    }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    b[j] = _mm256_permute2f128_ps(a[j], a[4 + j], 0x20);
    b[4 + j] = _mm256_permute2f128_ps(a[j], a[4 + j], 0x31);
  }
#pragma GCC unroll 8
  for (int i = 0; i < BLOCK; i++) _mm256_storeu_ps((float *)to + i * to_width, b[i]);
}
#else
#define BLOCK 4

static inline void transpose_block(void *to, int64_t to_width, const void *lines, int64_t stride) {
  transpose_4x4(to, to_width, lines, stride);
}
#endif

#endif
