/* Short causal convolution of each channel, maybe with SiLU, forward and backward.

   out[s] = act(sum over d < K of weight[K - 1 - d] x[s - d]), where tokens before a token's document do not count.

   Values are float32 or bfloat16 in memory and float32 in computation; a result is rounded once. A thread computes a
   block of channels of one sample, token by token. Sums have one order for any number of threads. */

#include <math.h>
#include <string.h>

#include "bfloat16.h"
#include "integers.h"
#include "parallel.h"

/* Channels of a block, whose rows stay in the cache, and the maximum of taps. */
#define CHANNELS 128
#define MAX_TAPS 8
/* Numbers below which threads cost more than they save. */
#define MIN_PARALLEL_WORK 200000.0

typedef float row[CHANNELS] __attribute__((aligned(64)));

/* Tokens [S, B, C] and the K - 1 tokens before them [K - 1, B, C]; weights [C, K]; earlier tokens of each token's
   document [S, B]. Rows are contiguous, and so is everything else. */
typedef struct {
  const void *x, *previous, *weight;
  const int64_t *num_previous;
  int64_t tokens, samples, channels, taps, is_bfloat16, has_silu;
} convolution_inputs;

/* Load token s of a sample, which may be one of the tokens before the first. */
static inline void load_token(float *to, convolution_inputs in, int64_t s, int64_t sample, int64_t first, int64_t count) {
  const void *from = s < 0 ? in.previous : in.x;
  const int64_t token = s < 0 ? s + in.taps - 1 : s, at = (token * in.samples + sample) * in.channels + first;
  if (in.is_bfloat16)
    for (int64_t c = 0; c < count; c++) to[c] = load_value(from, at + c, 1);
  else
    for (int64_t c = 0; c < count; c++) to[c] = load_value(from, at + c, 0);
}

static inline void store_token(void *to, int64_t at, const float *from, int64_t count, int64_t is_bfloat16) {
  if (is_bfloat16)
    for (int64_t c = 0; c < count; c++) store_value(to, at + c, from[c], 1);
  else
    for (int64_t c = 0; c < count; c++) store_value(to, at + c, from[c], 0);
}

static void load_weights(row *to, convolution_inputs in, int64_t first, int64_t count) {
  for (int64_t k = 0; k < in.taps; k++)
    for (int64_t c = 0; c < count; c++)
      to[k][c] = load_value(in.weight, (first + c) * in.taps + in.taps - 1 - k, (int)in.is_bfloat16);
}

/* Number of taps that count for token s: its own tap, and earlier taps of its document. */
static inline int64_t counted_taps(convolution_inputs in, int64_t s, int64_t sample) {
  return min_i64(in.taps, in.num_previous[s * in.samples + sample] + 1);
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + exp_float(-x)); }

/* Sum of the taps of token s; `tokens` holds token t in row t % taps. */
static inline void sum_taps(float *restrict total, const row *tokens, const row *weights, int64_t taps, int64_t counted,
                            int64_t s, int64_t count) {
  for (int64_t c = 0; c < count; c++) total[c] = 0.0f;
  for (int64_t d = 0; d < counted; d++) {
    const float *restrict token = tokens[(s - d + taps) % taps], *restrict weight = weights[d];
    for (int64_t c = 0; c < count; c++) total[c] += token[c] * weight[c];
  }
}

/* Compute out [S, B, C]. */
void convolution_forward(convolution_inputs in, void *out, int threads) {
  const int64_t blocks = (in.channels + CHANNELS - 1) / CHANNELS;
  PARALLEL_FOR((double)in.tokens * in.samples * in.channels > MIN_PARALLEL_WORK)
  for (int64_t task = 0; task < in.samples * blocks; task++) {
    const int64_t sample = task / blocks, first = task % blocks * CHANNELS;
    const int64_t count = min_i64(CHANNELS, in.channels - first);
    row tokens[MAX_TAPS], weights[MAX_TAPS], total;
    load_weights(weights, in, first, count);
    for (int64_t s = 1 - in.taps; s < in.tokens; s++) {
      load_token(tokens[(s + in.taps) % in.taps], in, s, sample, first, count);
      if (s < 0) continue;
      sum_taps(total, tokens, weights, in.taps, counted_taps(in, s, sample), s, count);
      if (in.has_silu)
        for (int64_t c = 0; c < count; c++) total[c] *= sigmoid(total[c]);
      store_token(out, (s * in.samples + sample) * in.channels + first, total, count, in.is_bfloat16);
    }
  }
}

/* Compute the gradients of x and previous, and the gradients of the weights of each sample, float32 [B, K, C]: row k
   is for the token k positions before. */
void convolution_backward(convolution_inputs in, const void *grad, void *grad_x, void *grad_previous,
                          float *grad_weight, int threads) {
  const int64_t blocks = (in.channels + CHANNELS - 1) / CHANNELS, taps = in.taps;
  PARALLEL_FOR((double)in.tokens * in.samples * in.channels > MIN_PARALLEL_WORK)
  for (int64_t task = 0; task < in.samples * blocks; task++) {
    const int64_t sample = task / blocks, first = task % blocks * CHANNELS;
    const int64_t count = min_i64(CHANNELS, in.channels - first);
    /* The last tokens, the gradients of the sums of the last tokens, and how many taps these have. */
    row tokens[MAX_TAPS], grads[MAX_TAPS], weights[MAX_TAPS], total, of_weights[MAX_TAPS];
    int64_t counted[MAX_TAPS] = {0};
    load_weights(weights, in, first, count);
    memset(of_weights, 0, sizeof of_weights);
    for (int64_t s = 1 - taps; s < in.tokens + taps - 1; s++) {
      const int64_t at = (s + taps) % taps;
      counted[at] = 0;
      if (s < in.tokens) load_token(tokens[at], in, s, sample, first, count);
      if (s >= 0 && s < in.tokens) {
        float *restrict of_total = grads[at];
        convolution_inputs given = in;
        given.x = grad;
        load_token(of_total, given, s, sample, first, count);
        counted[at] = counted_taps(in, s, sample);
        if (in.has_silu) {
          sum_taps(total, tokens, weights, taps, counted[at], s, count);
          for (int64_t c = 0; c < count; c++) {
            const float gate = sigmoid(total[c]);
            of_total[c] *= gate * (1.0f + total[c] * (1.0f - gate));
          }
        }
        for (int64_t d = 0; d < counted[at]; d++) {
          const float *restrict token = tokens[(s - d + taps) % taps];
          float *restrict of_weight = of_weights[d];
          for (int64_t c = 0; c < count; c++) of_weight[c] += of_total[c] * token[c];
        }
      }
      /* The gradient of the token whose last later tap was this tap. */
      const int64_t done = s - taps + 1;
      if (done < 1 - taps) continue;
      for (int64_t c = 0; c < count; c++) total[c] = 0.0f;
      for (int64_t d = 0; d < taps; d++) {
        const int64_t later = (done + d + 2 * taps) % taps;
        if (d >= counted[later]) continue;
        const float *restrict of_total = grads[later], *restrict weight = weights[d];
        for (int64_t c = 0; c < count; c++) total[c] += of_total[c] * weight[c];
      }
      const int64_t place = (done < 0 ? done + taps - 1 : done) * in.samples + sample;
      store_token(done < 0 ? grad_previous : grad_x, place * in.channels + first, total, count, in.is_bfloat16);
    }
    for (int64_t k = 0; k < taps; k++)
      memcpy(grad_weight + (sample * taps + k) * in.channels + first, of_weights[k], count * sizeof(float));
  }
}
