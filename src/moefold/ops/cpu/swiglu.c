/* SwiGLU, silu(g) * u, and its gradient, each in one pass over memory.

   Values are float32 or bfloat16 in memory and float32 in computation; a result is rounded once. Every element is
   computed in the same way, so results are bitwise independent of position and number of threads. */

#include <stdint.h>

#include "bfloat16.h"
#include "exponential.h"
#include "integers.h"
#include "parallel.h"

/* Elements of a part of a thread. Its loop has a pragma of its own: the `if` of `parallel for simd` would also turn off
   the vectors of small arrays. */
#define PART 1024

/* The clamping of exp changes the result by at most 1e-38. */
static inline float sigmoid(float x) { return 1.0f / (1.0f + exp_float(-x)); }

/* hidden may be g or u. */
#define FORWARD(NAME, TYPE, OF, TO)                                               \
  void NAME(const TYPE *g, const TYPE *u, TYPE *hidden, int64_t n, int threads) { \
    PARALLEL_FOR(n > MIN_PARALLEL_ELEMENTS)                                       \
    for (int64_t from = 0; from < n; from += PART) {                              \
      const int64_t stop = min_i64(n, from + PART);                               \
      _Pragma("GCC ivdep") for (int64_t i = from; i < stop; i++) {                \
        const float g_i = OF(g[i]);                                               \
        hidden[i] = TO(g_i * sigmoid(g_i) * OF(u[i]));                            \
      }                                                                           \
    }                                                                             \
  }

/* grad_g may be grad. */
#define BACKWARD(NAME, TYPE, OF, TO)                                                                             \
  void NAME(const TYPE *grad, const TYPE *g, const TYPE *u, TYPE *hidden, TYPE *grad_g, TYPE *grad_u, int64_t n, \
            int threads) {                                                                                       \
    PARALLEL_FOR(n > MIN_PARALLEL_ELEMENTS)                                                                      \
    for (int64_t from = 0; from < n; from += PART) {                                                             \
      const int64_t stop = min_i64(n, from + PART);                                                              \
      _Pragma("GCC ivdep") for (int64_t i = from; i < stop; i++) {                                               \
        const float g_i = OF(g[i]), u_i = OF(u[i]), grad_i = OF(grad[i]);                                        \
        const float share = sigmoid(g_i), silu = g_i * share;                                                    \
        hidden[i] = TO(silu * u_i);                                                                              \
        grad_u[i] = TO(grad_i * silu);                                                                           \
        grad_g[i] = TO(grad_i * u_i * (share + silu * (1.0f - share)));                                          \
      }                                                                                                          \
    }                                                                                                            \
  }

FORWARD(swiglu_float32, float, float_to_float, float_from_float)
FORWARD(swiglu_bfloat16, uint16_t, bfloat16_to_float, float_to_bfloat16)
BACKWARD(swiglu_backward_float32, float, float_to_float, float_from_float)
BACKWARD(swiglu_backward_bfloat16, uint16_t, bfloat16_to_float, float_to_bfloat16)
