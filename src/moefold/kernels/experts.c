/* What stands between the products of experts, each in one pass over memory: SwiGLU's gate, silu(g) * u, its gradient,
   and weights with the values that they have in bfloat16.

   Values are float32 or bfloat16 in memory and float32 between; a result is rounded once. Every element is computed
   alike, so that neither its place nor the number of threads changes a bit of it. */

#include <stdint.h>
#include <string.h>

/* Elements below which threads cost more than they save: as torch has it. */
#define GRAIN 32768
#ifdef _OPENMP
#define ABREAST _Pragma("omp parallel for simd schedule(static) if (n > GRAIN) num_threads(threads)")
#else
#define ABREAST _Pragma("omp simd")
#endif

static inline float bits_to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

/* exp(x) to 2 units in the last place for -87 <= x <= 88, held at the ends beyond: x = n ln 2 + r, and the series of
   exp(r) for |r| <= ln(2) / 2. ln 2 is subtracted in two parts, the first exact. No table and no call, so that
   compilers vectorise it. What is held off there is 1e-38 of a gate. */
static inline float exponential(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  /* Added to 1.5 * 2**23, a number is rounded to an integer, which then is the lowest bits. */
  const float shifted = x * 1.44269504f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float series = 1.0f / 720;
  series = series * r + 1.0f / 120;
  series = series * r + 1.0f / 24;
  series = series * r + 1.0f / 6;
  series = series * r + 0.5f;
  series = series * r + 1.0f;
  series = series * r + 1.0f;
  return bits_to_float(float_to_bits(series) + (float_to_bits(shifted) << 23));
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

static inline float of_float(float value) { return value; }
static inline float to_float(float value) { return value; }
static inline float of_bfloat16(uint16_t value) { return bits_to_float((uint32_t)value << 16); }

/* To the nearest, ties to even; what is not a number stays none, which its bits tell: the compiler takes all for numbers. */
static inline uint16_t to_bfloat16(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
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
