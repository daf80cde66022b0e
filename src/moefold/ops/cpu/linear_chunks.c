/* Products within the chunks of gated linear attention with one decay of a head (Gated DeltaNet), forward and backward.

   With t_i the sum of the log decays up to token i of a chunk, and decay_ij = exp(t_i - t_j) for tokens j <= i of the
   same document, else 0:

     scores     = q k^T o decay                                      lower triangle
     system     = I + beta (k k^T o decay)                           strictly lower triangle, unit diagonal
     solved     = system^-1 [beta v, -beta k o exp(t)]
     read_keys  = q o exp(t)         write_keys = k o exp(t_last - t)

   Value heads that share a key head are computed one after another by one thread: their products q k^T and k k^T, and
   the gradients of these, are computed once. Every sum has one order for any number of threads. */

#include "linear_attention.h"

/* Decays of the rows of a chunk, [C] each. */
typedef struct {
  float *total, *beta;
  /* Decay since the start of the chunk and up to its end; 0 where the document of a row ends between. */
  float *since_start, *to_end;
  /* First row of a row's document. */
  int64_t *document;
} row_decays;

/* Floats of scratch memory of the decays of a chunk. */
static int64_t decays_floats(int64_t rows) { return rows * (4 + (int64_t)(sizeof(int64_t) / sizeof(float))); }

static row_decays decays_in(float *scratch, int64_t rows) {
  return (row_decays){scratch, scratch + rows, scratch + 2 * rows, scratch + 3 * rows, (int64_t *)(scratch + 4 * rows)};
}

/* Compute the decays of chunk n of a head; returns the decay of a state over the chunk. */
static float load_decays(row_decays to, linear_inputs x, linear_sizes s, int64_t n, int64_t sample, int64_t head) {
  const int64_t rows = chunk_rows(s), count = chunk_tokens(s, n);
  const rows_view log_decay = token_rows(x.log_decay, n * s.chunk_size, sample, head);
  const int starts_first = load_documents(to.document, x, s, n, sample);
  load_beta(to.beta, x, s, n, sample, head);
  float total = 0.0f;
  for (int64_t i = 0; i < rows; i++) {
    if (i < count) total += ((const float *)log_decay.start)[i * log_decay.stride];
    to.total[i] = total;
  }
  for (int64_t i = 0; i < rows; i++) {
    to.since_start[i] = starts_first || to.document[i] ? 0.0f : exp_or_zero(to.total[i]);
    to.to_end[i] = to.document[i] == to.document[rows - 1] ? exp_or_zero(total - to.total[i]) : 0.0f;
  }
  return to.since_start[rows - 1];
}

/* Compute row i of the decays between the tokens of a chunk, up to the end of the diagonal's block. */
static void decay_row(float *row, row_decays decays, int64_t i) {
  const int64_t stop = i / BLOCK_ROWS * BLOCK_ROWS + BLOCK_ROWS;
  const float total = decays.total[i];
  for (int64_t j = 0; j < stop; j++) row[j] = exp_or_zero(j > i ? -100.0f : total - decays.total[j]);
  memset(row, 0, decays.document[i] * sizeof *row);
}

/* Floats of scratch memory of each thread. */
int64_t linear_chunks_scratch_floats(linear_sizes s);

/* Compute the tensors of the chunks. */
void linear_chunks_forward(linear_inputs x, chunk_tensors chunks, float *scratch, linear_sizes s) {
  const int64_t rows = chunk_rows(s), keys = key_width(s), values = value_width(s), width = solved_width(s);
  const int64_t groups = s.samples * s.key_heads, all = s.chunks * groups;
  PARALLEL_TASKS((double)groups * s.repeats * s.tokens * s.chunk_size * (keys + values))
  for (int64_t task = 0; task < all; task++) {
    const int64_t n = task / groups, sample = task % groups / s.key_heads, group = task % s.key_heads;
    const int64_t count = chunk_tokens(s, n), first = n * s.chunk_size;
    float *own = scratch + THREAD * linear_chunks_scratch_floats(s);
    const row_decays decays = decays_in(own, rows);
    float *q = own + decays_floats(rows), *k = q + rows * keys, *columns = k + rows * keys;
    float *qk = columns + rows * keys, *kk = qk + rows * rows, *system = kk + rows * rows, *v = system + rows * rows;
    float row[rows];
    load_chunk(q, rows, keys, token_rows(x.q, first, sample, group), count, s.key_size);
    load_chunk(k, rows, keys, token_rows(x.k, first, sample, group), count, s.key_size);
    transpose(columns, k, keys, rows, keys);
    lower_products(0, rows, keys, q, keys, columns, qk);
    if (s.has_delta) lower_products(0, rows, keys, k, keys, columns, kk);
    for (int64_t head = group * s.repeats; head < (group + 1) * s.repeats; head++) {
      const int64_t place = (n * s.samples + sample) * s.key_heads * s.repeats + head;
      const chunk_tensors to = chunk_at(chunks, s, place);
      to.decay[0] = load_decays(decays, x, s, n, sample, head);
      load_chunk(v, rows, values, token_rows(x.v, first, sample, head), count, s.value_size);
      for (int64_t i = 0; i < rows; i++) {
        const int64_t stop = i / BLOCK_ROWS * BLOCK_ROWS + BLOCK_ROWS;
        float *restrict scores = to.scores + i * rows, *restrict line = system + i * rows;
        decay_row(row, decays, i);
        for (int64_t j = 0; j < stop; j++) scores[j] = qk[i * rows + j] * row[j];
        memset(scores + stop, 0, (rows - stop) * sizeof *scores);
        scale_row(to.read_keys + i * keys, decays.since_start[i], q + i * keys, keys);
        scale_row(to.write_keys + i * keys, decays.to_end[i], k + i * keys, keys);
        if (!s.has_delta) {
          memcpy(to.solved + i * width, v + i * values, values * sizeof *v);
          continue;
        }
        for (int64_t j = 0; j < stop; j++) line[j] = -decays.beta[i] * (kk[i * rows + j] * row[j]);
        scale_row(to.solved + i * width, decays.beta[i], v + i * values, values);
        scale_row(to.solved + i * width + values, -decays.beta[i] * decays.since_start[i], k + i * keys, keys);
      }
      if (s.has_delta) solve_forward(system, to.solved, rows, width);
    }
  }
}

/* Scratch memory of the backward pass of a chunk. */
typedef struct {
  row_decays decays;
  /* Rows, their gradients summed over the value heads of the key head, and a transposed matrix. */
  float *q, *k, *dq, *dk, *columns;
  /* Products k k^T, decays between tokens, the system, and the gradients of the products q k^T and k k^T. */
  float *kk, *decay, *system, *dqk, *dkk;
  /* Gradients of the solution, products of these with the solution, and a row of values. */
  float *solved, *products, *v;
  /* Gradients of the sums of log decays, and of beta. */
  float *dtotal, *dbeta;
} backward_scratch;

static backward_scratch backward_scratch_in(float *at, linear_sizes s) {
  const int64_t rows = chunk_rows(s), keys = key_width(s), values = value_width(s), width = solved_width(s);
  backward_scratch own = {.decays = decays_in(at, rows)};
  at += decays_floats(rows);
  float **const matrices[] = {&own.q, &own.k, &own.dq, &own.dk};
  for (int i = 0; i < 4; i++, at += rows * keys) *matrices[i] = at;
  float **const squares[] = {&own.kk, &own.decay, &own.system, &own.dqk, &own.dkk, &own.products};
  for (int i = 0; i < 6; i++, at += rows * rows) *squares[i] = at;
  own.v = at, at += rows * values;
  own.solved = at, at += rows * width;
  own.dtotal = at, at += rows;
  own.dbeta = at, at += rows;
  own.columns = at;
  return own;
}

/* Floats of scratch memory of each thread. */
int64_t linear_chunks_scratch_floats(linear_sizes s) {
  const int64_t rows = chunk_rows(s), keys = key_width(s), values = value_width(s), width = solved_width(s);
  const int64_t columns = rows * (width > keys ? width : keys);
  return decays_floats(rows) + rows * (4 * keys + values + width + 2) + 6 * rows * rows + columns;
}

/* Add row i of the gradients of the products with earlier tokens, from the gradients of the scores (`of_scores`)
   and of the system (the negative of own.products). */
static void product_grads(backward_scratch own, const float *restrict of_scores, const float *restrict scores, int64_t i,
                          int64_t rows, int64_t has_delta) {
  const int64_t stop = i / BLOCK_ROWS * BLOCK_ROWS + BLOCK_ROWS;
  const float *restrict decay = own.decay + i * rows, *restrict kk = own.kk + i * rows;
  float *restrict of_qk = own.dqk + i * rows, *restrict of_kk = own.dkk + i * rows, *restrict of_total = own.dtotal;
  float row_total = 0.0f, of_beta = 0.0f;
#pragma omp simd reduction(+ : row_total)
  for (int64_t j = 0; j < stop; j++) {
    /* Gradients right of the diagonal were not computed. */
    const float grad = j > i ? 0.0f : of_scores[j];
    of_qk[j] += grad * decay[j];
    const float of_exponent = grad * scores[j];
    row_total += of_exponent;
    of_total[j] -= of_exponent;
  }
  if (has_delta) {
    const float *restrict products = own.products + i * rows;
    const float beta = own.decays.beta[i];
#pragma omp simd reduction(+ : row_total, of_beta)
    for (int64_t j = 0; j < stop; j++) {
      const float product = kk[j] * decay[j], negative = j < i ? products[j] : 0.0f;
      of_beta -= negative * product;
      of_kk[j] -= beta * negative * decay[j];
      const float of_exponent = -beta * negative * product;
      row_total += of_exponent;
      of_total[j] -= of_exponent;
    }
  }
  own.dtotal[i] += row_total;
  own.dbeta[i] += of_beta;
}

/* Add row i of the gradients of keys, queries and decays from the gradients of read_keys, write_keys and the
   right-hand sides of the system; returns the gradient of the sum of the log decays up to the last token. */
static float row_grads(backward_scratch own, chunk_tensors grads, linear_sizes s, int64_t i) {
  const int64_t keys = key_width(s), values = value_width(s), width = solved_width(s);
  const float *q = own.q + i * keys, *k = own.k + i * keys;
  const float *of_read = grads.read_keys + i * keys, *of_write = grads.write_keys + i * keys;
  const float since_start = own.decays.since_start[i], to_end = own.decays.to_end[i], beta = own.decays.beta[i];
  float of_since = dot(of_read, q, keys);
  add_scaled(own.dq + i * keys, since_start, of_read, keys);
  add_scaled(own.dk + i * keys, to_end, of_write, keys);
  if (s.has_delta) {
    const float *of_value = own.solved + i * width, *of_erase = of_value + values;
    const float along = dot(of_erase, k, keys);
    of_since -= beta * along;
    own.dbeta[i] += dot(of_value, own.v + i * values, values) - since_start * along;
    add_scaled(own.dk + i * keys, -beta * since_start, of_erase, keys);
  }
  const float of_end = dot(of_write, k, keys) * to_end;
  own.dtotal[i] += of_since * since_start - of_end;
  return of_end;
}

/* Store the gradients of the values, decays and write strengths of one head. */
static void store_head_grads(backward_scratch own, linear_grads to, linear_sizes s, int64_t n, int64_t sample,
                             int64_t head) {
  const rows_view log_decay = token_rows(to.log_decay, n * s.chunk_size, sample, head);
  float of_later = 0.0f;
  for (int64_t i = chunk_rows(s) - 1; i >= 0; i--) {
    of_later += own.dtotal[i];
    if (i < chunk_tokens(s, n)) ((float *)log_decay.start)[i * log_decay.stride] = of_later;
  }
  store_value_grads(to, s, n, sample, head, own.solved, solved_width(s), own.decays.beta, own.dbeta);
}

/* Backward of the tensors of one value head; adds to the gradients of its key head. */
static void head_backward(backward_scratch own, linear_inputs x, chunk_tensors chunk, chunk_tensors grads, linear_grads to,
                          linear_sizes s, int64_t n, int64_t sample, int64_t head) {
  const int64_t rows = chunk_rows(s), values = value_width(s), width = solved_width(s);
  const int64_t count = chunk_tokens(s, n), first = n * s.chunk_size;
  const float whole = load_decays(own.decays, x, s, n, sample, head);
  memset(own.dtotal, 0, 2 * rows * sizeof(float));
  for (int64_t i = 0; i < rows; i++) decay_row(own.decay + i * rows, own.decays, i);
  memcpy(own.solved, grads.solved, rows * width * sizeof(float));
  if (s.has_delta) {
    load_chunk(own.v, rows, values, token_rows(x.v, first, sample, head), count, s.value_size);
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < i / BLOCK_ROWS * BLOCK_ROWS + BLOCK_ROWS; j++)
        own.system[i * rows + j] = -own.decays.beta[i] * (own.kk[i * rows + j] * own.decay[i * rows + j]);
    solve_backward(own.system, own.solved, rows, width);
    transpose(own.columns, chunk.solved, width, rows, width);
    lower_products(0, rows, width, own.solved, width, own.columns, own.products);
  }
  float of_last = grads.decay[0] * whole;
  for (int64_t i = 0; i < rows; i++) {
    product_grads(own, grads.scores + i * rows, chunk.scores + i * rows, i, rows, s.has_delta);
    of_last += row_grads(own, grads, s, i);
  }
  own.dtotal[rows - 1] += of_last;
  store_head_grads(own, to, s, n, sample, head);
}

/* Compute the gradients of the tensors of the tokens from the gradients of the tensors of the chunks. */
void linear_chunks_backward(linear_inputs x, chunk_tensors chunks, chunk_tensors grads, linear_grads to, float *scratch,
                            linear_sizes s) {
  const int64_t rows = chunk_rows(s), keys = key_width(s), values = value_width(s);
  const int64_t groups = s.samples * s.key_heads, all = s.chunks * groups;
  PARALLEL_TASKS(2.0 * groups * s.repeats * s.tokens * s.chunk_size * (keys + values))
  for (int64_t task = 0; task < all; task++) {
    const int64_t n = task / groups, sample = task % groups / s.key_heads, group = task % s.key_heads;
    const int64_t count = chunk_tokens(s, n), first = n * s.chunk_size;
    const backward_scratch own = backward_scratch_in(scratch + THREAD * linear_chunks_scratch_floats(s), s);
    load_chunk(own.q, rows, keys, token_rows(x.q, first, sample, group), count, s.key_size);
    load_chunk(own.k, rows, keys, token_rows(x.k, first, sample, group), count, s.key_size);
    if (s.has_delta) {
      transpose(own.columns, own.k, keys, rows, keys);
      lower_products(0, rows, keys, own.k, keys, own.columns, own.kk);
    }
    memset(own.dq, 0, 2 * rows * keys * sizeof(float));
    memset(own.dqk, 0, 2 * rows * rows * sizeof(float));
    for (int64_t head = group * s.repeats; head < (group + 1) * s.repeats; head++) {
      const int64_t place = (n * s.samples + sample) * s.key_heads * s.repeats + head;
      head_backward(own, x, chunk_at(chunks, s, place), chunk_at(grads, s, place), to, s, n, sample, head);
    }
    lower_times(1, rows, keys, own.dqk, own.k, keys, own.dq, keys);
    upper_times(1, rows, keys, own.dqk, own.q, keys, own.dk, keys);
    lower_times(1, rows, keys, own.dkk, own.k, keys, own.dk, keys);
    upper_times(1, rows, keys, own.dkk, own.k, keys, own.dk, keys);
    const rows_view dq = token_rows(to.q, first, sample, group), dk = token_rows(to.k, first, sample, group);
    for (int64_t i = 0; i < count; i++) {
      store_row(dq, i, own.dq + i * keys, s.key_size, 1.0f);
      store_row(dk, i, own.dk + i * keys, s.key_size, 1.0f);
    }
  }
}
