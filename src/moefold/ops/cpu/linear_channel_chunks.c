/* Products within the chunks of gated linear attention with one decay of each key channel (Kimi Delta Attention, gated
   linear attention), forward and backward; otherwise as linear_chunks.c.

   A product of a query i and an earlier key j is the sum over channels of q_i k_j exp(t_i - t_j). Within blocks of SUB
   rows it is computed directly. For earlier blocks, exp(t_i - t_j) = exp(t_i - r) exp(r - t_j) with the reference
   r = t of the last row before the block of i: no factor exceeds 1. The factors of the keys follow from one block to the
   next by a product with exp of the difference of two references. Value heads are computed one by one. */

#include "linear_attention.h"

/* Rows of a block whose products are computed without a reference. */
#define SUB 8

/* Sums of the log decays and their exponentials, [C, D] each, for the rows of a chunk of one head. */
typedef struct {
  /* Sum up to a row; decay since the start of the chunk and up to its end, 0 if another document lies between. */
  float *total, *since_start, *to_end;
  /* Decays of a row since the end of the block before its own, and up to the end of its own block. */
  float *since_block, *to_block;
  /* Write strengths [C]. */
  float *beta;
  /* First row of a row's document. */
  int64_t *document;
} channel_decays;

static int64_t decays_floats(int64_t rows, int64_t keys) {
  return 5 * rows * keys + rows * (1 + (int64_t)(sizeof(int64_t) / sizeof(float)));
}

static channel_decays decays_in(float *at, int64_t rows, int64_t keys) {
  float *const documents = at + 5 * rows * keys;
  return (channel_decays){at,
                          at + rows * keys,
                          at + 2 * rows * keys,
                          at + 3 * rows * keys,
                          at + 4 * rows * keys,
                          documents + 2 * rows,
                          (int64_t *)documents};
}

static inline void exponentials(float *restrict to, const float *restrict a, const float *restrict b, int64_t keys) {
  for (int64_t d = 0; d < keys; d++) to[d] = exp_or_zero(a[d] - b[d]);
}

/* Compute the decays of chunk n of a head. `whole` [D] is the decay of a state over the chunk. */
static void load_decays(channel_decays to, float *whole, linear_inputs x, linear_sizes s, int64_t n, int64_t sample,
                        int64_t head) {
  const int64_t rows = chunk_rows(s), keys = key_width(s);
  const int starts_first = load_documents(to.document, x, s, n, sample);
  load_beta(to.beta, x, s, n, sample, head);
  load_chunk(to.total, rows, keys, token_rows(x.log_decay, n * s.chunk_size, sample, head), chunk_tokens(s, n), s.key_size);
  for (int64_t i = keys; i < rows * keys; i++) to.total[i] += to.total[i - keys];
  const float *last = to.total + (rows - 1) * keys;
  for (int64_t i = 0; i < rows; i++) {
    const int64_t at = i * keys, block = i / SUB * SUB;
    for (int64_t d = 0; d < keys; d++) to.since_start[at + d] = exp_or_zero(to.total[at + d]);
    exponentials(to.to_end + at, last, to.total + at, keys);
    exponentials(to.to_block + at, to.total + (block + SUB - 1) * keys, to.total + at, keys);
    if (block) exponentials(to.since_block + at, to.total + at, to.total + (block - 1) * keys, keys);
    if (starts_first || to.document[i]) memset(to.since_start + at, 0, keys * sizeof(float));
    if (to.document[i] != to.document[rows - 1]) memset(to.to_end + at, 0, keys * sizeof(float));
  }
  memcpy(whole, to.since_start + (rows - 1) * keys, keys * sizeof *whole);
}

/* Decay from the end of the block before `start` to the end of the block after, one number of each channel. */
static inline void block_decay(float *to, channel_decays decays, int64_t start, int64_t keys) {
  exponentials(to, decays.total + (start + SUB - 1) * keys, decays.total + (start - 1) * keys, keys);
}

/* to = a o b. */
static inline void multiply_rows(float *restrict to, const float *restrict a, const float *restrict b, int64_t count) {
  for (int64_t i = 0; i < count; i++) to[i] = a[i] * b[i];
}

/* to += a o b. */
static inline void add_products(float *restrict to, const float *restrict a, const float *restrict b, int64_t count) {
  for (int64_t i = 0; i < count; i++) to[i] += a[i] * b[i];
}

/* Sums over the channels of q_i k_j exp(t_i - t_j) and k_i k_j exp(t_i - t_j), for row i. */
static inline void pair_products(const float *restrict q, const float *restrict k, const float *restrict later,
                                 const float *restrict key, const float *restrict earlier, int64_t keys, float *score,
                                 float *product) {
  float of_query = 0.0f, of_key = 0.0f;
#pragma omp simd reduction(+ : of_query, of_key)
  for (int64_t d = 0; d < keys; d++) {
    const float decayed = key[d] * exp_or_zero(later[d] - earlier[d]);
    of_query += q[d] * decayed;
    of_key += k[d] * decayed;
  }
  *score = of_query, *product = of_key;
}

/* Set row i of a triangle to zero at other documents and right of column `stop`. */
static inline void mask_row(float *row, int64_t document, int64_t stop, int64_t rows) {
  memset(row, 0, document * sizeof *row);
  memset(row + stop, 0, (rows - stop) * sizeof *row);
}

/* Compute scores and the products of keys with the decays between them, both [C, C]. `columns` [D, C] and `weighted`
   [2 SUB, D] are scratch memory. */
static void triangle_products(float *scores, float *products, const float *q, const float *k, channel_decays decays,
                              float *columns, float *weighted, int64_t rows, int64_t keys) {
  float *const queries = weighted, *const later_keys = weighted + SUB * keys, *const factors = weighted + 2 * SUB * keys;
  float *const blocked = factors + keys;
  multiply_rows(blocked, k, decays.to_block, rows * keys);
  transpose(columns, blocked, keys, rows, keys);
  for (int64_t start = 0; start < rows; start += SUB) {
    if (start) {
      if (start > SUB) {
        block_decay(factors, decays, start - SUB, keys);
        for (int64_t d = 0; d < keys; d++)
          for (int64_t j = 0; j < start - SUB; j++) columns[d * rows + j] *= factors[d];
      }
      const int64_t width = padded_width(start);
      multiply_rows(queries, q + start * keys, decays.since_block + start * keys, SUB * keys);
      multiply_rows(later_keys, k + start * keys, decays.since_block + start * keys, SUB * keys);
      tiled_gemm(0, SUB, width, keys, queries, keys, 1, columns, rows, scores + start * rows, rows);
      tiled_gemm(0, SUB, width, keys, later_keys, keys, 1, columns, rows, products + start * rows, rows);
    }
    for (int64_t i = start; i < start + SUB; i++) {
      float *const row = scores + i * rows, *const line = products + i * rows;
      for (int64_t j = start; j < i; j++)
        pair_products(q + i * keys, k + i * keys, decays.total + i * keys, k + j * keys, decays.total + j * keys, keys,
                      row + j, line + j);
      row[i] = dot(q + i * keys, k + i * keys, keys);
      mask_row(row, decays.document[i], i + 1, rows);
      mask_row(line, decays.document[i], i, rows);
    }
  }
}

/* Scratch memory of a chunk. */
typedef struct {
  channel_decays decays;
  /* Rows; their gradients, summed over the value heads of the key head. */
  float *q, *k, *dq, *dk;
  /* Gradients of a head's queries and keys from the scores and products: as the later and the earlier of two rows. */
  float *of_query, *of_later, *of_earlier;
  /* Keys with the decay up to the block before the current one, or gradients of such keys. */
  float *blocked;
  /* The system, gradients of scores and of products of keys, all zero where a triangle is. */
  float *system, *of_scores, *of_products;
  /* Gradients of the solution, and a row of values. */
  float *solved, *v;
  /* Gradients of the sums of log decays [C, D], and of beta [C]. */
  float *dtotal, *dbeta;
  /* [2 SUB + 1, D] and more; a transposed matrix. */
  float *weighted, *columns;
} channel_scratch;

static channel_scratch scratch_in(float *at, linear_sizes s) {
  const int64_t rows = chunk_rows(s), keys = key_width(s), values = value_width(s), width = solved_width(s);
  channel_scratch own = {.decays = decays_in(at, rows, keys)};
  at += decays_floats(rows, keys);
  float **const matrices[] = {&own.q,          &own.k,       &own.dq,     &own.dk, &own.of_query, &own.of_later,
                              &own.of_earlier, &own.blocked, &own.dtotal};
  for (int i = 0; i < 9; i++, at += rows * keys) *matrices[i] = at;
  float **const squares[] = {&own.system, &own.of_scores, &own.of_products};
  for (int i = 0; i < 3; i++, at += rows * rows) *squares[i] = at;
  own.v = at, at += rows * values;
  own.solved = at, at += rows * width;
  own.dbeta = at, at += rows;
  own.weighted = at, at += (2 * SUB + 1 + rows) * keys;
  own.columns = at;
  return own;
}

/* Floats of scratch memory of each thread. */
int64_t linear_channel_chunks_scratch_floats(linear_sizes s) {
  const int64_t rows = chunk_rows(s), keys = key_width(s), values = value_width(s), width = solved_width(s);
  const int64_t columns = rows * (width > keys ? width : keys);
  return decays_floats(rows, keys) + rows * (9 * keys + values + width + 1) + 3 * rows * rows +
         (2 * SUB + 1 + rows) * keys + columns;
}

/* Compute the tensors of the chunks. */
void linear_channel_chunks_forward(linear_inputs x, chunk_tensors chunks, float *scratch, linear_sizes s) {
  const int64_t rows = chunk_rows(s), keys = key_width(s), values = value_width(s), width = solved_width(s);
  const int64_t heads = s.key_heads * s.repeats, each = s.samples * heads, all = s.chunks * each;
  PARALLEL_TASKS((double)each * s.tokens * s.chunk_size * (keys + values))
  for (int64_t place = 0; place < all; place++) {
    const int64_t n = place / each, sample = place % each / heads, head = place % heads;
    const int64_t count = chunk_tokens(s, n), first = n * s.chunk_size;
    const channel_scratch own = scratch_in(scratch + THREAD * linear_channel_chunks_scratch_floats(s), s);
    const chunk_tensors to = chunk_at(chunks, s, place);
    const channel_decays decays = own.decays;
    load_chunk(own.q, rows, keys, token_rows(x.q, first, sample, head / s.repeats), count, s.key_size);
    load_chunk(own.k, rows, keys, token_rows(x.k, first, sample, head / s.repeats), count, s.key_size);
    load_chunk(own.v, rows, values, token_rows(x.v, first, sample, head), count, s.value_size);
    load_decays(decays, to.decay, x, s, n, sample, head);
    triangle_products(to.scores, s.has_delta ? to.products : own.of_products, own.q, own.k, decays, own.columns,
                      own.weighted, rows, keys);
    multiply_rows(to.read_keys, own.q, decays.since_start, rows * keys);
    multiply_rows(to.write_keys, own.k, decays.to_end, rows * keys);
    if (!s.has_delta) {
      memcpy(to.solved, own.v, rows * values * sizeof(float));
      continue;
    }
    for (int64_t i = 0; i < rows; i++) {
      const float beta = decays.beta[i];
      float *const erase = to.solved + i * width + values;
      scale_row(own.system + i * rows, -beta, to.products + i * rows, rows);
      scale_row(to.solved + i * width, beta, own.v + i * values, values);
      multiply_rows(erase, own.k + i * keys, decays.since_start + i * keys, keys);
      for (int64_t d = 0; d < keys; d++) erase[d] *= -beta;
    }
    solve_forward(own.system, to.solved, rows, width);
  }
}

/* Gradients of the products of row i with the rows before it in its block. */
static void pair_grads(channel_scratch own, int64_t i, int64_t rows, int64_t keys) {
  const float *restrict q = own.q + i * keys, *restrict k = own.k + i * keys, *restrict later = own.decays.total + i * keys;
  float *restrict of_query = own.of_query + i * keys, *restrict of_later = own.of_later + i * keys;
  for (int64_t j = i / SUB * SUB; j < i; j++) {
    const float score = own.of_scores[i * rows + j], product = own.of_products[i * rows + j];
    const float *restrict key = own.k + j * keys, *restrict earlier = own.decays.total + j * keys;
    float *restrict of_earlier = own.of_earlier + j * keys;
    for (int64_t d = 0; d < keys; d++) {
      const float decay = exp_or_zero(later[d] - earlier[d]);
      of_query[d] += score * (decay * key[d]);
      of_later[d] += product * (decay * key[d]);
      of_earlier[d] += decay * (score * q[d] + product * k[d]);
    }
  }
  add_scaled(own.of_query + i * keys, own.of_scores[i * rows + i], own.k + i * keys, keys);
  add_scaled(own.of_earlier + i * keys, own.of_scores[i * rows + i], own.q + i * keys, keys);
}

/* Gradients of queries and keys, as the later and the earlier of two rows, from the gradients of the scores and
   products. */
static void triangle_grads(channel_scratch own, int64_t rows, int64_t keys) {
  const channel_decays decays = own.decays;
  float *const queries = own.weighted, *const later_keys = queries + SUB * keys, *const factors = later_keys + SUB * keys;
  memset(own.of_query, 0, 3 * rows * keys * sizeof(float));
  /* Later rows, first to last: `blocked` holds the earlier keys with the decay up to the block. */
  multiply_rows(own.blocked, own.k, decays.to_block, rows * keys);
  for (int64_t start = SUB; start < rows; start += SUB) {
    if (start > SUB) {
      block_decay(factors, decays, start - SUB, keys);
      for (int64_t j = 0; j < start - SUB; j++)
        for (int64_t d = 0; d < keys; d++) own.blocked[j * keys + d] *= factors[d];
    }
    tiled_gemm(0, SUB, keys, start, own.of_scores + start * rows, rows, 1, own.blocked, keys, queries, keys);
    tiled_gemm(0, SUB, keys, start, own.of_products + start * rows, rows, 1, own.blocked, keys, later_keys, keys);
    multiply_rows(own.of_query + start * keys, queries, decays.since_block + start * keys, SUB * keys);
    multiply_rows(own.of_later + start * keys, later_keys, decays.since_block + start * keys, SUB * keys);
  }
  /* Earlier rows, last to first: `blocked` holds the gradients of the keys with the decay up to the block. */
  memset(own.blocked, 0, rows * keys * sizeof(float));
  for (int64_t start = rows - SUB; start > 0; start -= SUB) {
    multiply_rows(queries, own.q + start * keys, decays.since_block + start * keys, SUB * keys);
    multiply_rows(later_keys, own.k + start * keys, decays.since_block + start * keys, SUB * keys);
    tiled_gemm(1, start, keys, SUB, own.of_scores + start * rows, 1, rows, queries, keys, own.blocked, keys);
    tiled_gemm(1, start, keys, SUB, own.of_products + start * rows, 1, rows, later_keys, keys, own.blocked, keys);
    const int64_t before = start - SUB;
    multiply_rows(own.of_earlier + before * keys, own.blocked + before * keys, decays.to_block + before * keys, SUB * keys);
    if (!before) break;
    block_decay(factors, decays, before, keys);
    for (int64_t j = 0; j < before; j++)
      for (int64_t d = 0; d < keys; d++) own.blocked[j * keys + d] *= factors[d];
  }
  for (int64_t i = 0; i < rows; i++) pair_grads(own, i, rows, keys);
}

/* Compute the masked gradients of scores and products of keys, and the part of beta's gradient that comes from these. */
static void square_grads(channel_scratch own, chunk_tensors chunk, chunk_tensors grads, linear_sizes s) {
  const int64_t rows = chunk_rows(s), width = solved_width(s);
  if (s.has_delta) {
    for (int64_t i = 0; i < rows; i++)
      scale_row(own.system + i * rows, -own.decays.beta[i], chunk.products + i * rows, rows);
    solve_backward(own.system, own.solved, rows, width);
    transpose(own.columns, chunk.solved, width, rows, width);
    /* The gradient of the system is the negative of these products. */
    lower_products(0, rows, width, own.solved, width, own.columns, own.of_products);
  }
  for (int64_t i = 0; i < rows; i++) {
    float *const row = own.of_products + i * rows;
    memcpy(own.of_scores + i * rows, grads.scores + i * rows, (i + 1) * sizeof(float));
    mask_row(own.of_scores + i * rows, own.decays.document[i], i + 1, rows);
    mask_row(row, own.decays.document[i], s.has_delta ? i : 0, rows);
    if (!s.has_delta) continue;
    own.dbeta[i] = -dot(row, chunk.products + i * rows, rows);
    for (int64_t j = 0; j < rows; j++) row[j] *= -own.decays.beta[i];
  }
}

/* Add row i of the gradients of queries, keys and decays from all tensors of the chunk. */
static void row_grads(channel_scratch own, chunk_tensors grads, linear_sizes s, int64_t i) {
  const int64_t keys = key_width(s), values = value_width(s), width = solved_width(s), at = i * keys;
  const float *restrict q = own.q + at, *restrict k = own.k + at, beta = own.decays.beta[i];
  const float *restrict since_start = own.decays.since_start + at, *restrict to_end = own.decays.to_end + at;
  const float *restrict of_read = grads.read_keys + at, *restrict of_write = grads.write_keys + at;
  const float *restrict of_query = own.of_query + at, *restrict of_later = own.of_later + at;
  const float *restrict of_earlier = own.of_earlier + at;
  float *restrict dq = own.dq + at, *restrict dk = own.dk + at, *restrict dtotal = own.dtotal + at;
  float *restrict of_last = own.dtotal + (chunk_rows(s) - 1) * keys;
  for (int64_t d = 0; d < keys; d++) {
    const float through_read = of_read[d] * since_start[d], through_write = of_write[d] * to_end[d];
    dq[d] += of_query[d] + through_read;
    dk[d] += of_later[d] + of_earlier[d] + through_write;
    dtotal[d] += q[d] * (of_query[d] + through_read) + k[d] * (of_later[d] - of_earlier[d] - through_write);
  }
  for (int64_t d = 0; d < keys; d++) of_last[d] += of_write[d] * to_end[d] * k[d];
  if (!s.has_delta) return;
  const float *restrict of_erase = own.solved + i * width + values;
  float along = 0.0f;
#pragma omp simd reduction(+ : along)
  for (int64_t d = 0; d < keys; d++) {
    const float through_erase = of_erase[d] * since_start[d];
    along += through_erase * k[d];
    dk[d] -= beta * through_erase;
    dtotal[d] -= beta * through_erase * k[d];
  }
  own.dbeta[i] += dot(own.solved + i * width, own.v + i * values, values) - along;
}

/* Backward of the tensors of one value head; adds to the gradients of its key head. */
static void head_backward(channel_scratch own, linear_inputs x, chunk_tensors chunk, chunk_tensors grads, linear_grads to,
                          linear_sizes s, int64_t n, int64_t sample, int64_t head) {
  const int64_t rows = chunk_rows(s), keys = key_width(s), values = value_width(s), width = solved_width(s);
  const int64_t count = chunk_tokens(s, n), first = n * s.chunk_size;
  float whole[keys];
  load_decays(own.decays, whole, x, s, n, sample, head);
  if (s.has_delta) load_chunk(own.v, rows, values, token_rows(x.v, first, sample, head), count, s.value_size);
  memcpy(own.solved, grads.solved, rows * width * sizeof(float));
  memset(own.dtotal, 0, rows * keys * sizeof(float));
  square_grads(own, chunk, grads, s);
  triangle_grads(own, rows, keys);
  for (int64_t i = 0; i < rows; i++) row_grads(own, grads, s, i);
  add_products(own.dtotal + (rows - 1) * keys, grads.decay, whole, keys);
  for (int64_t i = rows - 2; i >= 0; i--)
    for (int64_t d = 0; d < keys; d++) own.dtotal[i * keys + d] += own.dtotal[(i + 1) * keys + d];
  const rows_view log_decay = token_rows(to.log_decay, first, sample, head);
  for (int64_t i = 0; i < count; i++) store_row(log_decay, i, own.dtotal + i * keys, s.key_size, 1.0f);
  store_value_grads(to, s, n, sample, head, own.solved, width, own.decays.beta, own.dbeta);
}

/* Compute the gradients of the tensors of the tokens from the gradients of the tensors of the chunks. */
void linear_channel_chunks_backward(linear_inputs x, chunk_tensors chunks, chunk_tensors grads, linear_grads to,
                                    float *scratch, linear_sizes s) {
  const int64_t rows = chunk_rows(s), keys = key_width(s), values = value_width(s);
  const int64_t groups = s.samples * s.key_heads, all = s.chunks * groups;
  PARALLEL_TASKS(2.0 * groups * s.repeats * s.tokens * s.chunk_size * (keys + values))
  for (int64_t task = 0; task < all; task++) {
    const int64_t n = task / groups, sample = task % groups / s.key_heads, group = task % s.key_heads;
    const int64_t count = chunk_tokens(s, n), first = n * s.chunk_size;
    const channel_scratch own = scratch_in(scratch + THREAD * linear_channel_chunks_scratch_floats(s), s);
    load_chunk(own.q, rows, keys, token_rows(x.q, first, sample, group), count, s.key_size);
    load_chunk(own.k, rows, keys, token_rows(x.k, first, sample, group), count, s.key_size);
    memset(own.dq, 0, 2 * rows * keys * sizeof(float));
    for (int64_t head = group * s.repeats; head < (group + 1) * s.repeats; head++) {
      const int64_t place = (n * s.samples + sample) * s.key_heads * s.repeats + head;
      head_backward(own, x, chunk_at(chunks, s, place), chunk_at(grads, s, place), to, s, n, sample, head);
    }
    const rows_view dq = token_rows(to.q, first, sample, group), dk = token_rows(to.k, first, sample, group);
    for (int64_t i = 0; i < count; i++) {
      store_row(dq, i, own.dq + i * keys, s.key_size, 1.0f);
      store_row(dk, i, own.dk + i * keys, s.key_size, 1.0f);
    }
  }
}
