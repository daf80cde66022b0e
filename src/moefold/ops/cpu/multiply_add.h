/* A vector of VECTOR floats, which the including source defines, and its fused multiply-add. */

#ifndef MOEFOLD_MULTIPLY_ADD_H
#define MOEFOLD_MULTIPLY_ADD_H

#if defined(__FMA__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

typedef float vector __attribute__((vector_size(4 * VECTOR), aligned(4), may_alias));

/* sum + a * b, rounded once if the processor can. Compilers fuse it in some tiles only, and bits would depend on the
   number of rows. */
static inline __attribute__((always_inline)) vector multiply_add(vector sum, float a, vector b) {
#if defined(__FMA__) && VECTOR == 16
  return (vector)_mm512_fmadd_ps(_mm512_set1_ps(a), (__m512)b, (__m512)sum);
#elif defined(__FMA__) && VECTOR == 8
  return (vector)_mm256_fmadd_ps(_mm256_set1_ps(a), (__m256)b, (__m256)sum);
#elif defined(__ARM_NEON)
  return (vector)vfmaq_f32((float32x4_t)sum, vdupq_n_f32(a), (float32x4_t)b);
#else
  return sum + a * b;
#endif
}

#endif
