/* States between the chunks of gated linear attention, and its outputs, forward and backward.

   With the state S before a chunk, and what `linear_chunks.c` computed of the chunk:

     written = values + erase_keys S
     out     = read_keys S + scores written
     S'      = decay S + write_keys^T written

   The chunks of a head follow one another, and their states stay in the cache; heads are computed in parallel. Every sum
   has one order for any number of threads. */

#include "linear_attention.h"

/* Copy the rows and columns of a padded matrix, or pad them with zeros. */
static void copy_matrix(float *to, int64_t to_width, int64_t to_rows, const float *from, int64_t from_width, int64_t rows,
                        int64_t columns) {
  for (int64_t i = 0; i < to_rows; i++) {
    for (int64_t j = 0; j < to_width; j++) to[i * to_width + j] = i < rows && j < columns ? from[i * from_width + j] : 0;
  }
}

/* written = values + erase_keys state. */
static void write_values(float *written, chunk_tensors chunk, linear_sizes s, const float *state) {
  const int64_t rows = chunk_rows(s), keys = key_width(s), values = value_width(s), width = solved_width(s);
  for (int64_t i = 0; i < rows; i++) memcpy(written + i * values, chunk.solved + i * width, values * sizeof *written);
  if (s.has_delta) tiled_gemm(1, rows, values, keys, chunk.solved + values, width, 1, state, values, written, values);
}

/* next = decay state. */
static void decay_state(float *next, const float *state, const float *decay, linear_sizes s) {
  const int64_t keys = key_width(s), values = value_width(s), step = decay_width(s) > 1;
  for (int64_t d = 0; d < keys; d++) scale_row(next + d * values, decay[d * step], state + d * values, values);
}

/* Floats of scratch memory of each thread. */
int64_t linear_scan_scratch_floats(linear_sizes s) {
  const int64_t rows = chunk_rows(s), keys = key_width(s), values = value_width(s);
  return 2 * keys * values + 4 * rows * values + values * rows + values * keys;
}

/* Compute out [S, B, A, Dv], the last state [B, A, D, Dv], and for the backward pass the states before the chunks
   [N, B, A, D, Dv] and the written values [N, B, A, C, Dv], which may be NULL. D and Dv of `first` and `last` are the
   head dims; D and Dv of the other tensors are padded. */
void linear_scan_forward(chunk_tensors chunks, const float *first, tokens_view out, float *last, float *states,
                         float *written, float *scratch, linear_sizes s) {
  const int64_t heads = s.key_heads * s.repeats, all = s.samples * heads;
  const int64_t rows = chunk_rows(s), keys = key_width(s), values = value_width(s);
  PARALLEL_TASKS((double)all * s.tokens * keys * values)
  for (int64_t head = 0; head < all; head++) {
    float *own = scratch + THREAD * linear_scan_scratch_floats(s);
    float *outputs = own + 2 * keys * values, *scratch_written = outputs + rows * values;
    float *state = states ? states + head * keys * values : own;
    copy_matrix(state, values, keys, first + head * s.key_size * s.value_size, s.value_size, s.key_size, s.value_size);
    for (int64_t n = 0; n < s.chunks; n++) {
      const int64_t place = n * all + head;
      const chunk_tensors chunk = chunk_at(chunks, s, place);
      float *writes = written ? written + place * rows * values : scratch_written;
      const int keeps_next = states && n + 1 < s.chunks;
      float *next = keeps_next ? states + (place + all) * keys * values : own + (n % 2 ? 0 : keys * values);
      write_values(writes, chunk, s, state);
      tiled_gemm(0, rows, values, keys, chunk.read_keys, keys, 1, state, values, outputs, values);
      lower_times(1, rows, values, chunk.scores, writes, values, outputs, values);
      decay_state(next, state, chunk.decay, s);
      tiled_gemm(1, keys, values, rows, chunk.write_keys, 1, keys, writes, values, next, values);
      const rows_view to = token_rows(out, n * s.chunk_size, head / heads, head % heads);
      for (int64_t i = 0; i < chunk_tokens(s, n); i++) store_row(to, i, outputs + i * values, s.value_size, 1.0f);
      state = next;
    }
    for (int64_t d = 0; d < s.key_size; d++)
      memcpy(last + (head * s.key_size + d) * s.value_size, state + d * values, s.value_size * sizeof *last);
  }
}

/* Compute the gradients of the chunks' tensors and of the first state; `grad_last`: gradient of the last state. */
void linear_scan_backward(tokens_view grad_out, const float *grad_last, chunk_tensors chunks, const float *states,
                          const float *written, chunk_tensors grads, float *grad_first, float *scratch, linear_sizes s) {
  const int64_t heads = s.key_heads * s.repeats, all = s.samples * heads;
  const int64_t rows = chunk_rows(s), keys = key_width(s), values = value_width(s), width = solved_width(s);
  PARALLEL_TASKS(2.0 * all * s.tokens * keys * values)
  for (int64_t head = 0; head < all; head++) {
    float *grad = scratch + THREAD * linear_scan_scratch_floats(s), *previous = grad + keys * values;
    float *outputs = previous + keys * values, *of_written = outputs + rows * values;
    float *columns = of_written + rows * values, *state_columns = columns + values * rows;
    copy_matrix(grad, values, keys, grad_last + head * s.key_size * s.value_size, s.value_size, s.key_size, s.value_size);
    for (int64_t n = s.chunks - 1; n >= 0; n--) {
      const int64_t place = n * all + head;
      const chunk_tensors chunk = chunk_at(chunks, s, place), to = chunk_at(grads, s, place);
      const float *state = states + place * keys * values, *writes = written + place * rows * values;
      const rows_view from = token_rows(grad_out, n * s.chunk_size, head / heads, head % heads);
      load_chunk(outputs, rows, values, from, chunk_tokens(s, n), s.value_size);
      /* Gradients of the scores and of the written values. */
      transpose(columns, writes, values, rows, values);
      lower_products(0, rows, values, outputs, values, columns, to.scores);
      tiled_gemm(0, rows, values, keys, chunk.write_keys, keys, 1, grad, values, of_written, values);
      upper_times(1, rows, values, chunk.scores, outputs, values, of_written, values);
      /* Gradients of the keys, which are multiplied with a state or its gradient. */
      transpose(state_columns, grad, values, keys, values);
      tiled_gemm(0, rows, keys, values, writes, values, 1, state_columns, keys, to.write_keys, keys);
      transpose(state_columns, state, values, keys, values);
      tiled_gemm(0, rows, keys, values, outputs, values, 1, state_columns, keys, to.read_keys, keys);
      for (int64_t i = 0; i < rows; i++)
        memcpy(to.solved + i * width, of_written + i * values, values * sizeof *of_written);
      if (s.has_delta)
        tiled_gemm(0, rows, keys, values, of_written, values, 1, state_columns, keys, to.solved + values, width);
      memset(to.decay, 0, decay_width(s) * sizeof *to.decay);
      for (int64_t d = 0; d < keys; d++)
        to.decay[decay_width(s) > 1 ? d : 0] += dot(grad + d * values, state + d * values, values);
      /* Gradient of the state before the chunk. */
      decay_state(previous, grad, chunk.decay, s);
      tiled_gemm(1, keys, values, rows, chunk.read_keys, 1, keys, outputs, values, previous, values);
      if (s.has_delta)
        tiled_gemm(1, keys, values, rows, chunk.solved + values, 1, width, of_written, values, previous, values);
      float *const swapped = grad;
      grad = previous, previous = swapped;
    }
    for (int64_t d = 0; d < s.key_size; d++)
      memcpy(grad_first + (head * s.key_size + d) * s.value_size, grad + d * values, s.value_size * sizeof *grad);
  }
}

/* Floats of a vector. */
int linear_vector_width(void) { return VECTOR; }
