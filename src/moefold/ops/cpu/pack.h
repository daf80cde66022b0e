/* Packing of operands of gemm.c: panels [steps, width] of words, in which the lines of a step are contiguous.

   The including source defines VECTOR, LANES, CONVERT_STEPS and FETCH_INTO_L2. */

#ifndef MOEFOLD_PACK_H
#define MOEFOLD_PACK_H

#include <stdint.h>
#include <string.h>

#include "bfloat16.h"
#include "gemm.h"
#include "integers.h"
#include "transpose.h"

typedef uint32_t packed_word;
typedef uint32_t aliased_word __attribute__((may_alias));

/* Packed formats: float32, float32 rounded to bfloat16, or two bfloat16 in a word. */
enum { UNCHANGED, ROUND_TO_BFLOAT16, BFLOAT16_PAIRS };

/* Number of parts of a whole; the last one may be smaller. */
static inline int64_t ceil_div(int64_t whole, int64_t part) { return (whole + part - 1) / part; }
static inline int64_t num_steps(int64_t depth, int packing) {
  return packing == BFLOAT16_PAIRS ? ceil_div(depth, 2) : depth;
}
static inline packed_word pack_pair(uint16_t first, uint16_t second) { return first | (packed_word)second << 16; }

static inline const float *float_at(strided_matrix x, int64_t line, int64_t at) {
  return (const float *)x.start + line * x.line + at * x.step;
}
static inline const uint16_t *bfloat16_at(strided_matrix x, int64_t line, int64_t at) {
  return (const uint16_t *)x.start + line * x.line + at * x.step;
}

static inline const void *step_at(strided_matrix x, int64_t at) {
  return offset_pointer(x.start, at * x.step, x.kind == BFLOAT16);
}

/* Pack `count` elements from `at` on, `stride` apart, as float32 words. */
ALWAYS_INLINE void pack_floats(packed_word *to, strided_matrix x, int packing, int64_t line, int64_t at, int64_t stride,
                               int64_t count) {
  float *out = (float *)to;
  const float *f = float_at(x, line, at);
  const uint16_t *h = bfloat16_at(x, line, at);
  if (x.kind == BFLOAT16)
    for (int64_t i = 0; i < count; i++) out[i] = bfloat16_to_float(h[i * stride]);
  else if (packing == ROUND_TO_BFLOAT16)
    for (int64_t i = 0; i < count; i++) out[i] = bfloat16_to_float(float_to_bfloat16(f[i * stride]));
  else
    for (int64_t i = 0; i < count; i++) out[i] = f[i * stride];
}

/* Pack `count` words of one line from element `at` on, where `depth` elements are left, `s` apart. */
ALWAYS_INLINE void pack_line_strided(packed_word *to, strided_matrix x, int packing, int64_t line, int64_t at,
                                     int64_t count, int64_t depth, const int64_t s) {
  if (packing != BFLOAT16_PAIRS) {
    pack_floats(to, x, packing, line, at, s, count);
    return;
  }
  const int64_t whole = min_i64(count, depth / 2);
  const float *f = float_at(x, line, at);
  const uint16_t *h = bfloat16_at(x, line, at);
  if (x.kind == BFLOAT16)
    for (int64_t i = 0; i < whole; i++) to[i] = pack_pair(h[2 * i * s], h[(2 * i + 1) * s]);
  else
    for (int64_t i = 0; i < whole; i++)
      to[i] = pack_pair(float_to_bfloat16(f[2 * i * s]), float_to_bfloat16(f[(2 * i + 1) * s]));
  if (whole < count) to[whole] = x.kind == BFLOAT16 ? h[2 * whole * s] : float_to_bfloat16(f[2 * whole * s]);
}

/* A constant stride of 1 lets the compiler vectorise. */
static __attribute__((noinline)) void pack_line(packed_word *to, strided_matrix x, int packing, int64_t line,
                                                int64_t at, int64_t count, int64_t depth) {
  if (x.step == 1)
    pack_line_strided(to, x, packing, line, at, count, depth, 1);
  else
    pack_line_strided(to, x, packing, line, at, count, depth, x.step);
}

/* Pack the words of one step, of `count` contiguous lines. */
ALWAYS_INLINE void pack_step(packed_word *to, strided_matrix x, int packing, int64_t line, int64_t at, int64_t count,
                             int64_t depth) {
  if (packing != BFLOAT16_PAIRS) {
    pack_floats(to, x, packing, line, at, 1, count);
    return;
  }
  const float *f = float_at(x, line, at), *f_2 = f + x.step;
  const uint16_t *h = bfloat16_at(x, line, at), *h_2 = h + x.step;
  if (x.kind == BFLOAT16 && depth > 1)
    for (int64_t i = 0; i < count; i++) to[i] = pack_pair(h[i], h_2[i]);
  else if (x.kind == BFLOAT16)
    for (int64_t i = 0; i < count; i++) to[i] = h[i];
  else if (depth > 1)
    for (int64_t i = 0; i < count; i++) to[i] = pack_pair(float_to_bfloat16(f[i]), float_to_bfloat16(f_2[i]));
  else
    for (int64_t i = 0; i < count; i++) to[i] = float_to_bfloat16(f[i]);
}

/* Pack one step of the last, incomplete panel, zero-padded. */
static void pack_last_step(packed_word *to, int width, strided_matrix x, int packing, int64_t line, int64_t at,
                           int64_t count, int64_t depth) {
  pack_step(to, x, packing, line, at, count, depth);
  for (int64_t i = count; i < width; i++) to[i] = 0;
}

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define HAS_PAIR_VECTORS

/* Sixteen words of a line: pairs of bfloat16 as they are in memory, or of rounded floats. */
static inline __m512 load_pairs(const void *line, const int is_bfloat16) {
  const float *const f = line;
  if (is_bfloat16) return _mm512_loadu_ps(f);
  return (__m512)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(f + VECTOR), _mm512_loadu_ps(f));
}

/* Pack pairs of `count` lines, `stride` bytes apart, as a panel of `steps` steps, a multiple of BLOCK; zero-padded.
   Denormals may become 0, as the dot products read them as 0. */
ALWAYS_INLINE void pack_pairs(packed_word *panel, const int width, const char *lines, int64_t stride, int64_t count,
                              int64_t steps, const int is_bfloat16) {
  const int64_t step_bytes = is_bfloat16 ? 4 : 8;
  for (int from = 0; from < width; from += BLOCK) {
    const int lanes = width - from < BLOCK ? width - from : BLOCK;
    for (int64_t k = 0; k < steps; k += BLOCK) {
      const char *const block = lines + from * stride + k * step_bytes;
      __m512 a[BLOCK];
      for (int i = lanes; i < BLOCK; i++) a[i] = _mm512_setzero_ps();
      if (count >= from + lanes)
#pragma GCC unroll 16
        for (int i = 0; i < lanes; i++) {
          a[i] = load_pairs(block + i * stride, is_bfloat16);
          /* The same line of the next panel. */
          FETCH_INTO_L2(block + (width + i) * stride);
        }
      else
        for (int i = 0; i < lanes; i++)
          a[i] = from + i < count ? load_pairs(block + i * stride, is_bfloat16) : _mm512_setzero_ps();
      transpose_vectors(a);
      packed_word *const to = panel + k * width + from;
#pragma GCC unroll 16
      for (int i = 0; i < BLOCK; i++)
        if (lanes == BLOCK || k + i + 1 < steps)
          _mm512_storeu_ps(to + i * width, a[i]);
        else
          _mm512_mask_storeu_ps(to + i * width, (__mmask16)((1u << lanes) - 1), a[i]);
    }
  }
}

/* Pack the pairs of `count` contiguous lines in one step, zero-padded to `width`; `other` is 0 in a half step at the
   end. Whole vectors are stored, which the next step overwrites, except in the last step. */
ALWAYS_INLINE void pair_lines(packed_word *to, const int width, const void *one, const void *other, int64_t count,
                              int is_last, const int is_bfloat16) {
  static const uint16_t order[2 * VECTOR] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                             8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
#pragma GCC unroll 2
  for (int i = 0; i < width; i += VECTOR) {
    const int lanes = width - i < VECTOR ? width - i : VECTOR;
    const __mmask16 stored = (__mmask16)((1u << lanes) - 1);
    const __mmask16 valid = count >= i + lanes ? stored : count <= i ? 0 : (__mmask16)((1u << (count - i)) - 1);
    const __mmask16 valid_other = other ? valid : 0;
    __m512i pairs;
    if (is_bfloat16)
      pairs = _mm512_inserti64x4(
          _mm512_castsi256_si512(_mm256_maskz_loadu_epi16(valid, (const uint16_t *)one + i)),
          _mm256_maskz_loadu_epi16(valid_other, (const uint16_t *)other + i), 1);
    else
      pairs = (__m512i)_mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(valid_other, (const float *)other + i),
                                           _mm512_maskz_loadu_ps(valid, (const float *)one + i));
    pairs = _mm512_permutexvar_epi16(_mm512_loadu_si512(order), pairs);
    if (lanes == VECTOR || !is_last)
      _mm512_storeu_si512(to + i, pairs);
    else
      _mm512_mask_storeu_epi32(to + i, stored, pairs);
  }
}

/* Pack lines from..to, which are contiguous in each step, in panels of `size` words. */
ALWAYS_INLINE void pack_pairs_by_steps(packed_word *panels, int64_t size, const int width, strided_matrix x,
                                       int64_t from, int64_t to, int64_t depth, const int is_bfloat16) {
  for (int64_t at = 0; at < depth; at += 2, panels += width) {
    const void *one = offset_pointer(x.start, from + at * x.step, is_bfloat16);
    const void *other = at + 1 < depth ? offset_pointer(one, x.step, is_bfloat16) : 0;
    packed_word *out = panels;
    int64_t line = from;
    for (; to - line >= width; line += width, out += size) {
      pair_lines(out, width, one, other, width, at + 2 >= depth, is_bfloat16);
      one = offset_pointer(one, width, is_bfloat16), other = other ? offset_pointer(other, width, is_bfloat16) : 0;
    }
    if (line < to) pair_lines(out, width, one, other, to - line, at + 2 >= depth, is_bfloat16);
  }
}
#endif

/* Transpose lines [width, steps] to a panel [steps, width], in whole blocks where both sizes allow them, else in 4x4
   blocks, the last two of which may overlap. Steps are a multiple of 4. */
ALWAYS_INLINE void transpose_panel(packed_word *panel, const int width, const void *lines, int64_t stride,
                                   int64_t steps) {
  const int64_t block_steps = width % BLOCK ? 0 : steps / BLOCK * BLOCK;
  for (int i = 0; i < width && block_steps; i += BLOCK)
    for (int64_t k = 0; k < block_steps; k += BLOCK) {
      const char *const block = (const char *)lines + i * stride + 4 * k;
      /* The same lines of the next panel. */
      for (int r = 0; r < BLOCK; r++) FETCH_INTO_L2(block + (width + r) * stride);
      transpose_block(panel + k * width + i, width, block, stride);
    }
  for (int64_t k = block_steps; k < steps; k += 4)
#pragma GCC unroll 8
    for (int i = 0; i < width; i += 4) {
      const int line = i + 4 <= width ? i : width - 4;
      transpose_4x4(panel + k * width + line, width, (const char *)lines + line * stride + 4 * k, stride);
    }
}

/* Pack a panel [steps, width] of `count` lines from `line` on, with any step stride, zero-padded. */
ALWAYS_INLINE void pack_panel(packed_word *panel, const int width, strided_matrix x, int packing, int64_t line,
                              int64_t count, int64_t depth) {
  const int64_t each = packing == BFLOAT16_PAIRS ? 2 : 1, steps = num_steps(depth, packing);
  /* Complete lines may already have the layout of packed words, but for the last steps. */
  const int is_packed_layout =
      x.step == 1 && count == width && (x.kind == BFLOAT16 ? packing == BFLOAT16_PAIRS : packing == UNCHANGED);
  int64_t packed_steps = is_packed_layout ? depth / each / 4 * 4 : 0;
#ifdef HAS_PAIR_VECTORS
  if (packing == BFLOAT16_PAIRS && x.step == 1) {
    packed_steps = depth / each / BLOCK * BLOCK;
    if (x.kind == BFLOAT16)
      pack_pairs(panel, width, (const char *)bfloat16_at(x, line, 0), 2 * x.line, count, packed_steps, 1);
    else
      pack_pairs(panel, width, (const char *)float_at(x, line, 0), 4 * x.line, count, packed_steps, 0);
  } else
#endif
  if (x.kind == BFLOAT16)
    transpose_panel(panel, width, bfloat16_at(x, line, 0), 2 * x.line, packed_steps);
  else
    transpose_panel(panel, width, float_at(x, line, 0), 4 * x.line, packed_steps);
  packed_word lines[LANES * CONVERT_STEPS];
  if (packed_steps < steps) memset(lines, 0, sizeof lines);
  for (int64_t k = packed_steps; k < steps; k += CONVERT_STEPS) {
    const int64_t run = min_i64(CONVERT_STEPS, steps - k);
    for (int64_t i = 0; i < count; i++)
      pack_line(lines + i * CONVERT_STEPS, x, packing, line + i, each * k, run, depth - each * k);
    if (run == CONVERT_STEPS) {
      transpose_panel(panel + k * width, width, lines, 4 * CONVERT_STEPS, CONVERT_STEPS);
      continue;
    }
    for (int64_t j = 0; j < run; j++)
      for (int64_t i = 0; i < width; i++) panel[(k + j) * width + i] = lines[i * CONVERT_STEPS + j];
  }
}

/* Pack lines from..to of an operand in panels of `size` words. */
ALWAYS_INLINE void pack_panels(packed_word *panels, int64_t size, const int width, strided_matrix x, int packing,
                               int64_t from, int64_t to, int64_t depth) {
  if (x.line != 1) {
    for (; from < to; from += width, panels += size)
      pack_panel(panels, width, x, packing, from, min_i64(width, to - from), depth);
    return;
  }
#ifdef HAS_PAIR_VECTORS
  if (packing == BFLOAT16_PAIRS) {
    if (x.kind == BFLOAT16)
      pack_pairs_by_steps(panels, size, width, x, from, to, depth, 1);
    else
      pack_pairs_by_steps(panels, size, width, x, from, to, depth, 0);
    return;
  }
#endif
  /* A step of all panels is contiguous. */
  const int64_t each = packing == BFLOAT16_PAIRS ? 2 : 1;
  for (int64_t k = 0; k < num_steps(depth, packing); k++) {
    packed_word *out = panels + k * width;
    int64_t line = from;
    /* A constant width lets the compiler unroll. */
    for (; to - line >= width; line += width, out += size)
      pack_step(out, x, packing, line, each * k, width, depth - each * k);
    if (line < to) pack_last_step(out, width, x, packing, line, each * k, to - line, depth - each * k);
  }
}

#endif
