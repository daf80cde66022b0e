/* Transformer layers over rows of a paged cache, in one call; or a layer in two calls: attention up to the logits of the
   router, and the routed experts. The caller chooses the experts between the two calls.

   Products, norms, RoPE, attention, SwiGLU and the combine are the functions of the other sources of this folder, called
   by address: the bits are the same as in the modules that call them one by one. Only sums of two terms, conversions and
   copies are computed here; each is rounded to the dtype of the rows, as in the modules. */

#include <stdint.h>
#include <string.h>

#include "bfloat16.h"
#include "gemm.h"
#include "paged_attention.h"
#include "integers.h"

/* Positions of a page. */
#define KEYS 64
/* Alignment of the buffers in the workspace: a cache line. */
#define ALIGNMENT 64

/* Functions of the other libraries; `swiglu` is the function for the dtype of the rows. */
typedef struct {
  void (*gemm)(const gemm_args *args);
  int64_t (*gemm_scratch_words)(int64_t rows, int64_t columns, int64_t depth, int threads);
  void (*norm)(const void *x, int64_t x_row, const void *weight, void *y, float *scales, int64_t rows, int64_t size,
               float eps, int is_bfloat16, int threads);
  void (*rope)(const void *x, int64_t token, int64_t sample, int64_t head, const void *cos, const void *sin,
               int64_t angle_token, int64_t angle_sample, void *y, int64_t tokens, int64_t samples, int64_t heads,
               int64_t size, int64_t half, float direction, int is_bfloat16, int threads);
  void (*attention)(query_view q, query_view out, paged_cache cache, int64_t rows, int64_t heads, int64_t d,
                    int threads);
  void (*swiglu)(const void *g, const void *u, void *hidden, int64_t n, int threads);
  void (*combine)(const void *y, const int64_t *rows, const float *weights, void *out, int64_t tokens, int64_t top_k,
                  int64_t width, int is_bfloat16, int threads);
  void (*choose)(const float *logits, int64_t rows, int64_t experts, int64_t top_k, int64_t is_post, float scale,
                 float *scores, uint8_t *taken, int64_t *ids, float *weights);
} kernel_functions;

/* Weight [outputs, inputs] with strides in elements, and bias [outputs] of the dtype of the result; NULL: none. */
typedef struct {
  const void *weight;
  int64_t line, step, kind;
  const void *bias;
} linear_weights;

/* Weights and sizes of a layer. Norms of queries and keys, sinks and the router may be absent: NULL. */
typedef struct {
  linear_weights query, key, value, output, router;
  const void *attention_norm, *query_norm, *key_norm, *ffn_norm;
  const float *sinks;
  void *key_pages, *value_pages;
  int64_t hidden, heads, groups, head_dim, window;
  /* Experts: weights gate and up [E, hidden, ffn], down [E, ffn, hidden], contiguous, of one dtype. */
  const void *gate, *up, *down;
  int64_t experts, ffn, top_k, expert_kind;
  /* Choice of experts: see router.c. */
  int64_t is_post;
  float eps, query_key_eps, routing_scale;
} layer_weights;

/* Final norm and projection to the vocabulary. */
typedef struct {
  linear_weights projection;
  const void *norm;
  int64_t hidden, outputs;
  float eps;
} head_weights;

/* The rows of a pass, which all layers share: cosines and sines [rows, >= half], index of each row in the cache, and
   its pages and number of keys. */
typedef struct {
  const kernel_functions *kernels;
  int64_t rows, is_bfloat16, threads;
  const void *cos, *sin;
  int64_t angle_row, half;
  const int64_t *slots;
  const int32_t *table;
  int64_t table_width;
  const int32_t *lengths;
  void *workspace;
} pass_rows;

/* Allocate from the workspace, or only count the bytes if it is NULL. */
typedef struct {
  char *start;
  int64_t used;
} arena;

static void *take(arena *memory, int64_t bytes) {
  void *found = memory->start ? memory->start + memory->used : 0;
  memory->used += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  return found;
}

static inline int64_t value_bytes(const pass_rows *p) { return p->is_bfloat16 ? sizeof(uint16_t) : sizeof(float); }

typedef struct {
  void *normed, *query, *key, *value, *query_2, *key_2, *projected;
  float *scales, *wide;
  uint32_t *scratch;
} attention_buffers;

static attention_buffers take_attention_buffers(arena *memory, const layer_weights *w, const pass_rows *p) {
  const int64_t bytes = value_bytes(p), rows = p->rows;
  const int64_t queries = w->heads * w->head_dim, keys = w->groups * w->head_dim;
  const int threads = (int)p->threads;
  attention_buffers b;
  b.normed = take(memory, rows * w->hidden * bytes);
  b.query = take(memory, rows * queries * bytes);
  b.query_2 = take(memory, rows * queries * bytes);
  b.key = take(memory, rows * keys * bytes);
  b.key_2 = take(memory, rows * keys * bytes);
  b.value = take(memory, rows * keys * bytes);
  b.projected = take(memory, rows * w->hidden * bytes);
  b.scales = take(memory, rows * max_i64(1, w->heads) * sizeof(float));
  b.wide = take(memory, p->is_bfloat16 && w->router.weight ? rows * w->hidden * sizeof(float) : 0);
  int64_t words = p->kernels->gemm_scratch_words(rows, queries, w->hidden, threads);
  words = max_i64(words, p->kernels->gemm_scratch_words(rows, keys, w->hidden, threads));
  words = max_i64(words, p->kernels->gemm_scratch_words(rows, w->hidden, queries, threads));
  if (w->router.weight) words = max_i64(words, p->kernels->gemm_scratch_words(rows, w->experts, w->hidden, threads));
  b.scratch = take(memory, words * sizeof *b.scratch);
  return b;
}

typedef struct {
  void *gathered, *gate, *up, *outputs, *routed;
  int64_t *order, *row_of, *starts;
  uint32_t *scratch;
} expert_buffers;

static expert_buffers take_expert_buffers(arena *memory, const layer_weights *w, const pass_rows *p) {
  const int64_t bytes = value_bytes(p), rows = p->rows, copies = rows * w->top_k;
  const int threads = (int)p->threads;
  expert_buffers b;
  /* The experts of a row differ, so that an expert has at most `rows` rows. */
  b.gathered = take(memory, rows * w->hidden * bytes);
  b.gate = take(memory, rows * w->ffn * bytes);
  b.up = take(memory, rows * w->ffn * bytes);
  b.outputs = take(memory, copies * w->hidden * bytes);
  b.routed = take(memory, rows * w->hidden * bytes);
  b.order = take(memory, copies * sizeof(int64_t));
  b.row_of = take(memory, copies * sizeof(int64_t));
  b.starts = take(memory, (w->experts + 1) * sizeof(int64_t));
  const int64_t words = max_i64(p->kernels->gemm_scratch_words(rows, w->ffn, w->hidden, threads),
                                p->kernels->gemm_scratch_words(rows, w->hidden, w->ffn, threads));
  b.scratch = take(memory, words * sizeof *b.scratch);
  return b;
}

/* Of a layer that decode_layers computes: input of its experts, logits of its router, and the choice of experts. */
typedef struct {
  void *normed;
  float *logits, *probs, *scores;
  uint8_t *taken;
} layer_buffers;

static layer_buffers take_layer_buffers(arena *memory, const layer_weights *w, const pass_rows *p) {
  layer_buffers b;
  b.normed = take(memory, p->rows * w->hidden * value_bytes(p));
  b.logits = take(memory, p->rows * w->experts * sizeof *b.logits);
  b.probs = take(memory, p->rows * w->top_k * sizeof *b.probs);
  b.scores = take(memory, w->experts * sizeof *b.scores);
  b.taken = take(memory, w->experts);
  return b;
}

/* Bytes of workspace that a layer needs for a pass of these rows. */
int64_t decode_workspace_bytes(const layer_weights *w, const pass_rows *p) {
  arena attention = {0, 0}, experts = {0, 0}, layer = {0, 0};
  take_attention_buffers(&attention, w, p);
  if (w->experts) take_expert_buffers(&experts, w, p);
  take_layer_buffers(&layer, w, p);
  return layer.used + max_i64(attention.used, experts.used);
}

/* sums = a + b of n elements; sums may be a or b. */
ALWAYS_INLINE void add(const int is_bfloat16, const void *a, const void *b, void *sums, int64_t n) {
  for (int64_t i = 0; i < n; i++)
    store_value(sums, i, load_value(a, i, is_bfloat16) + load_value(b, i, is_bfloat16), is_bfloat16);
}

static void add_rows(const pass_rows *p, const void *a, const void *b, void *sums, int64_t n) {
  if (p->is_bfloat16)
    add(1, a, b, sums, n);
  else
    add(0, a, b, sums, n);
}

/* out [rows, columns] of a dtype = x [rows, depth] of `kind` times the weight; both are contiguous. */
static void multiply_into(const pass_rows *p, void *out, int64_t out_kind, const void *x, int64_t kind,
                          linear_weights w, int64_t rows, int64_t columns, int64_t depth, uint32_t *scratch) {
  union {
    gemm_args args;
    char bytes[sizeof(gemm_args) + sizeof(gemm_term)];
  } call;
  call.args = (gemm_args){.out = {out, columns, out_kind, 0},
                          .rows = rows,
                          .columns = columns,
                          .rounds_to_bfloat16 = kind == BFLOAT16 || w.kind == BFLOAT16,
                          .threads = p->threads,
                          .scratch = scratch,
                          .count = 1};
  call.args.terms[0] = (gemm_term){{x, depth, 1, kind}, {w.weight, w.line, w.step, w.kind}, depth};
  p->kernels->gemm(&call.args);
}

/* The same with a result of the dtype of x. */
static void multiply(const pass_rows *p, void *out, const void *x, int64_t kind, linear_weights w, int64_t rows,
                     int64_t columns, int64_t depth, uint32_t *scratch) {
  multiply_into(p, out, kind, x, kind, w, rows, columns, depth, scratch);
}

/* Linear layer with its bias, which is added to the rounded product. */
static void linear(const pass_rows *p, void *out, const void *x, int64_t kind, linear_weights w, int64_t columns,
                   int64_t depth, uint32_t *scratch) {
  multiply(p, out, x, kind, w, p->rows, columns, depth, scratch);
  if (!w.bias) return;
  for (int64_t r = 0; r < p->rows; r++) {
    void *row = offset_pointer(out, r * columns, kind == BFLOAT16);
    if (kind == BFLOAT16)
      add(1, row, w.bias, row, columns);
    else
      add(0, row, w.bias, row, columns);
  }
}

/* Norm of each head, if the layer has it, and RoPE; x and other are buffers of [rows, heads, head_dim]; returns the
   buffer with the result. */
static void *normalize_and_rotate(const pass_rows *p, const layer_weights *w, const void *norm, int64_t heads, void *x,
                                  void *other, float *scales) {
  const int is_bfloat16 = (int)p->is_bfloat16, threads = (int)p->threads;
  const int64_t d = w->head_dim;
  if (norm) {
    p->kernels->norm(x, d, norm, other, scales, p->rows * heads, d, w->query_key_eps, is_bfloat16, threads);
    void *const normed = other;
    other = x, x = normed;
  }
  p->kernels->rope(x, heads * d, heads * d, d, p->cos, p->sin, p->angle_row, 0, other, p->rows, 1, heads, d, p->half,
                   1.0f, is_bfloat16, threads);
  return other;
}

/* Write keys and values [rows, groups, head_dim] into their slots of the pages. */
ALWAYS_INLINE void write_pages(const int is_bfloat16, const pass_rows *p, const layer_weights *w, const void *keys,
                               const void *values) {
  const int64_t d = w->head_dim, bytes = is_bfloat16 ? sizeof(uint16_t) : sizeof(float);
  for (int64_t r = 0; r < p->rows; r++) {
    const int64_t page = p->slots[r] / KEYS, slot = p->slots[r] % KEYS;
    for (int64_t g = 0; g < w->groups; g++) {
      const int64_t from = (r * w->groups + g) * d, to = (page * w->groups + g) * d * KEYS;
      memcpy(offset_pointer(w->value_pages, to + slot * d, is_bfloat16), offset_pointer(values, from, is_bfloat16),
             d * bytes);
      for (int64_t i = 0; i < d; i++) {
        if (is_bfloat16)
          ((uint16_t *)w->key_pages)[to + i * KEYS + slot] = ((const uint16_t *)keys)[from + i];
        else
          ((float *)w->key_pages)[to + i * KEYS + slot] = ((const float *)keys)[from + i];
      }
    }
  }
}

/* y = x + attention(norm(x)), normed = norm(y), and logits [rows, experts] of the router if there is one; y may be x. */
void decode_attention(const layer_weights *w, const pass_rows *p, const void *x, void *y, void *normed, float *logits) {
  arena memory = {p->workspace, 0};
  const attention_buffers b = take_attention_buffers(&memory, w, p);
  const kernel_functions *const k = p->kernels;
  const int is_bfloat16 = (int)p->is_bfloat16, threads = (int)p->threads;
  const int64_t rows = p->rows, kind = is_bfloat16 ? BFLOAT16 : FLOAT32;
  const int64_t queries = w->heads * w->head_dim, keys = w->groups * w->head_dim;
  k->norm(x, w->hidden, w->attention_norm, b.normed, b.scales, rows, w->hidden, w->eps, is_bfloat16, threads);
  linear(p, b.query, b.normed, kind, w->query, queries, w->hidden, b.scratch);
  linear(p, b.key, b.normed, kind, w->key, keys, w->hidden, b.scratch);
  linear(p, b.value, b.normed, kind, w->value, keys, w->hidden, b.scratch);
  void *const query = normalize_and_rotate(p, w, w->query_norm, w->heads, b.query, b.query_2, b.scales);
  void *const key = normalize_and_rotate(p, w, w->key_norm, w->groups, b.key, b.key_2, b.scales);
  if (is_bfloat16)
    write_pages(1, p, w, key, b.value);
  else
    write_pages(0, p, w, key, b.value);
  void *const attended = query == b.query ? b.query_2 : b.query;
  const paged_cache cache = {w->key_pages,   w->value_pages, is_bfloat16, w->groups, p->table,
                             p->table_width, p->lengths,     w->window,   w->sinks};
  k->attention((query_view){query, queries, w->head_dim, is_bfloat16},
               (query_view){attended, queries, w->head_dim, is_bfloat16}, cache, rows, w->heads, w->head_dim, threads);
  linear(p, b.projected, attended, kind, w->output, w->hidden, queries, b.scratch);
  add_rows(p, x, b.projected, y, rows * w->hidden);
  k->norm(y, w->hidden, w->ffn_norm, normed, b.scales, rows, w->hidden, w->eps, is_bfloat16, threads);
  if (!w->router.weight) return;
  const void *wide = normed;
  if (is_bfloat16) {
    for (int64_t i = 0; i < rows * w->hidden; i++) b.wide[i] = load_value(normed, i, 1);
    wide = b.wide;
  }
  linear(p, logits, wide, FLOAT32, w->router, w->experts, w->hidden, b.scratch);
}

/* Sort the copies of all rows by expert: starts [experts + 1], order [rows * top_k], and the place of each copy. */
static void sort_by_expert(const expert_buffers *b, const int64_t *ids, int64_t copies, int64_t experts) {
  memset(b->starts, 0, (experts + 1) * sizeof *b->starts);
  for (int64_t i = 0; i < copies; i++) b->starts[ids[i]]++;
  int64_t total = 0;
  for (int64_t e = 0; e < experts; e++) {
    const int64_t count = b->starts[e];
    b->starts[e] = total, total += count;
  }
  for (int64_t i = 0; i < copies; i++) {
    const int64_t place = b->starts[ids[i]]++;
    b->order[place] = i, b->row_of[i] = place;
  }
  /* Each start is now the start of the next expert. */
  for (int64_t e = experts; e > 0; e--) b->starts[e] = b->starts[e - 1];
  b->starts[0] = 0;
}

static linear_weights expert_weights(const void *weights, int64_t kind, int64_t expert, int64_t inputs,
                                     int64_t outputs) {
  return (linear_weights){offset_pointer(weights, expert * inputs * outputs, kind == BFLOAT16), 1, outputs, kind, 0};
}

/* y += the routed experts of the rows of normed, with experts ids [rows, top_k] and weights probs of the same shape;
   plus the output of shared experts, [rows, hidden], NULL: none. */
void decode_experts(const layer_weights *w, const pass_rows *p, const void *normed, const int64_t *ids,
                    const float *probs, const void *shared, void *y) {
  arena memory = {p->workspace, 0};
  const expert_buffers b = take_expert_buffers(&memory, w, p);
  const kernel_functions *const k = p->kernels;
  const int is_bfloat16 = (int)p->is_bfloat16, threads = (int)p->threads;
  const int64_t kind = is_bfloat16 ? BFLOAT16 : FLOAT32, row_bytes = w->hidden * value_bytes(p);
  sort_by_expert(&b, ids, p->rows * w->top_k, w->experts);
  for (int64_t e = 0; e < w->experts; e++) {
    const int64_t first = b.starts[e], rows = b.starts[e + 1] - first;
    if (!rows) continue;
    for (int64_t r = 0; r < rows; r++)
      memcpy((char *)b.gathered + r * row_bytes, (const char *)normed + b.order[first + r] / w->top_k * row_bytes,
             row_bytes);
    const linear_weights gate = expert_weights(w->gate, w->expert_kind, e, w->hidden, w->ffn),
                         up = expert_weights(w->up, w->expert_kind, e, w->hidden, w->ffn),
                         down = expert_weights(w->down, w->expert_kind, e, w->ffn, w->hidden);
    multiply(p, b.gate, b.gathered, kind, gate, rows, w->ffn, w->hidden, b.scratch);
    multiply(p, b.up, b.gathered, kind, up, rows, w->ffn, w->hidden, b.scratch);
    k->swiglu(b.gate, b.up, b.gate, rows * w->ffn, threads);
    multiply(p, (char *)b.outputs + first * row_bytes, b.gate, kind, down, rows, w->hidden, w->ffn, b.scratch);
  }
  k->combine(b.outputs, b.row_of, probs, b.routed, p->rows, w->top_k, w->hidden, is_bfloat16, threads);
  if (shared) add_rows(p, b.routed, shared, b.routed, p->rows * w->hidden);
  add_rows(p, y, b.routed, y, p->rows * w->hidden);
}

/* Layers with routed experts, one after another: x += attention(norm(x)), and x += the experts of norm(x), whose choice
   is written to ids [layers, rows, top_k]. */
void decode_layers(const layer_weights *const *layers, int64_t count, const pass_rows *p, void *x, int64_t *ids) {
  for (int64_t i = 0; i < count; i++) {
    const layer_weights *const w = layers[i];
    arena memory = {p->workspace, 0};
    const layer_buffers b = take_layer_buffers(&memory, w, p);
    pass_rows inner = *p;
    inner.workspace = memory.start + memory.used;
    decode_attention(w, &inner, x, x, b.normed, b.logits);
    p->kernels->choose(b.logits, p->rows, w->experts, w->top_k, w->is_post, w->routing_scale, b.scores, b.taken, ids,
                       b.probs);
    decode_experts(w, &inner, b.normed, ids, b.probs, 0, x);
    ids += p->rows * w->top_k;
  }
}

typedef struct {
  void *picked, *normed;
  float *scales;
  uint32_t *scratch;
} head_buffers;

static head_buffers take_head_buffers(arena *memory, const head_weights *w, const pass_rows *p) {
  const int64_t bytes = p->rows * w->hidden * value_bytes(p);
  head_buffers b;
  b.picked = take(memory, bytes);
  b.normed = take(memory, bytes);
  b.scales = take(memory, p->rows * sizeof *b.scales);
  b.scratch = take(memory, p->kernels->gemm_scratch_words(p->rows, w->outputs, w->hidden, (int)p->threads) *
                               sizeof *b.scratch);
  return b;
}

/* Bytes of workspace of the head. */
int64_t decode_head_workspace_bytes(const head_weights *w, const pass_rows *p) {
  arena memory = {0, 0};
  take_head_buffers(&memory, w, p);
  return memory.used;
}

/* Logits [rows, outputs], float32, of the rows of x at `places`; of the pass, only what is not of its cache is read. */
void decode_head(const head_weights *w, const pass_rows *p, const void *x, const int64_t *places, float *logits) {
  arena memory = {p->workspace, 0};
  const head_buffers b = take_head_buffers(&memory, w, p);
  const int64_t kind = p->is_bfloat16 ? BFLOAT16 : FLOAT32, row_bytes = w->hidden * value_bytes(p);
  for (int64_t r = 0; r < p->rows; r++)
    memcpy((char *)b.picked + r * row_bytes, (const char *)x + places[r] * row_bytes, row_bytes);
  p->kernels->norm(b.picked, w->hidden, w->norm, b.normed, b.scales, p->rows, w->hidden, w->eps, (int)p->is_bfloat16,
                   (int)p->threads);
  multiply_into(p, logits, FLOAT32, b.normed, kind, w->projection, p->rows, w->outputs, w->hidden, b.scratch);
}
