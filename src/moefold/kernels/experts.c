/* What stands between the products of experts, each in one pass over memory: SwiGLU's gate, silu(g) * u, its gradient,
   and weights with the values that they have in bfloat16.

   Values are float32 or bfloat16 in memory and float32 between; a result is rounded once. Every element is computed
   alike, so that neither its place nor the number of threads changes a bit of it. */

#include <stdint.h>

#include "exponential.h"

/* Elements below which threads cost more than they save: as torch has it. */
#define GRAIN 32768
#ifdef _OPENMP
#define ABREAST _Pragma("omp parallel for simd schedule(static) if (n > GRAIN) num_threads(threads)")
#else
#define ABREAST _Pragma("omp simd")
#endif

/* What exp is held off at its ends is 1e-38 of a gate. */
static inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

static inline float of_float(float value) { return value; }
static inline float to_float(float value) { return value; }
static inline float of_bfloat16(uint16_t value) { return bits_to_float((uint32_t)value << 16); }

/* To the nearest, ties to even; what is not a number stays none. */
static inline uint16_t to_bfloat16(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (uint16_t)(is_no_number(value) ? 0x7fc0u : rounded);
}

/* hidden may be g or u. */
#define FORWARD(NAME, TYPE, OF, TO)                                                                                    \
  void NAME(const TYPE *g, const TYPE *u, TYPE *hidden, int64_t n, int threads) {                                      \
    ABREAST                                                                                                            \
    for (int64_t i = 0; i < n; i++) {                                                                                  \
      const float g_i = OF(g[i]);                                                                                      \
      hidden[i] = TO(g_i * sigmoid(g_i) * OF(u[i]));                                                                   \
    }                                                                                                                  \
  }

/* grad_g may be grad. */
#define BACKWARD(NAME, KEPT, OF_KEPT, TYPE, OF, TO)                                                                    \
  void NAME(const TYPE *grad, const KEPT *g, const KEPT *u, TYPE *hidden, TYPE *grad_g, TYPE *grad_u,                  \
            int64_t n, int threads) {                                                                                  \
    ABREAST                                                                                                            \
    for (int64_t i = 0; i < n; i++) {                                                                                  \
      const float g_i = OF_KEPT(g[i]), u_i = OF_KEPT(u[i]), grad_i = OF(grad[i]);                                      \
      const float share = sigmoid(g_i), silu = g_i * share;                                                            \
      hidden[i] = TO(silu * u_i);                                                                                      \
      grad_u[i] = TO(grad_i * silu);                                                                                   \
      grad_g[i] = TO(grad_i * u_i * (share + silu * (1.0f - share)));                                                  \
    }                                                                                                                  \
  }

#define FLOAT32 float, of_float
#define BFLOAT16 uint16_t, of_bfloat16
#define EXPANDED(MACRO, ...) MACRO(__VA_ARGS__)

FORWARD(silu_float32, float, of_float, to_float)
FORWARD(silu_bfloat16, uint16_t, of_bfloat16, to_bfloat16)
EXPANDED(BACKWARD, silu_backward_float32, FLOAT32, FLOAT32, to_float)
EXPANDED(BACKWARD, silu_backward_bfloat16, BFLOAT16, BFLOAT16, to_bfloat16)
/* Of projections that were kept in bfloat16. */
EXPANDED(BACKWARD, silu_backward_mixed, BFLOAT16, FLOAT32, to_float)

/* The values of bfloat16 that are nearest, as float32. */
void rounded_to_bfloat16(const float *x, float *y, int64_t n, int threads) {
  ABREAST
  for (int64_t i = 0; i < n; i++) y[i] = of_bfloat16(to_bfloat16(x[i]));
}
