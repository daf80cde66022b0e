/* What stands between the products of experts, each in one pass over memory: SwiGLU's gate, silu(g) * u, and its
   gradient.

   Values are float32 or bfloat16 in memory and float32 between; a result is rounded once. Every element is computed
   alike, so that neither its place nor the number of threads changes a bit of it. */

#include <stdint.h>

#include "bfloat16.h"
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
#define BACKWARD(NAME, TYPE, OF, TO)                                                                                   \
  void NAME(const TYPE *grad, const TYPE *g, const TYPE *u, TYPE *hidden, TYPE *grad_g, TYPE *grad_u,                  \
            int64_t n, int threads) {                                                                                  \
    ABREAST                                                                                                            \
    for (int64_t i = 0; i < n; i++) {                                                                                  \
      const float g_i = OF(g[i]), u_i = OF(u[i]), grad_i = OF(grad[i]);                                      \
      const float share = sigmoid(g_i), silu = g_i * share;                                                            \
      hidden[i] = TO(silu * u_i);                                                                                      \
      grad_u[i] = TO(grad_i * silu);                                                                                   \
      grad_g[i] = TO(grad_i * u_i * (share + silu * (1.0f - share)));                                                  \
    }                                                                                                                  \
  }

FORWARD(silu_float32, float, of_float, to_float)
FORWARD(silu_bfloat16, uint16_t, of_bfloat16, to_bfloat16)
BACKWARD(silu_backward_float32, float, of_float, to_float)
BACKWARD(silu_backward_bfloat16, uint16_t, of_bfloat16, to_bfloat16)
