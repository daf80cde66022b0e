/* GEMM: out (+)= a b, or a b + c d, for matrices of any strides, float32 or bfloat16 in memory, accumulated in float32.

   Operands are packed: a in panels of ROWS rows, b in panels of LANES columns, in which the elements of one step along
   the depth are contiguous; edges are zero-padded. A tile multiplies a panel of a by a panel of b. A step is one
   float32, or two bfloat16 where the processor has bfloat16 dot products: a 32-bit word in either case. In float32
   whole panels are read in place if that costs no more: small operands with contiguous lines, and rows of a. A product
   of few rows is not tiled, but reads b once: see few_rows.h.

   Each result is summed in a fixed order, in chunks of STEPS of each term, independent of threads, strides and the
   other rows and columns, of which there may be any number, and is rounded once. */

#include <stdint.h>
#include <string.h>

#include "bfloat16.h"
#include "exponential.h"
#include "gemm.h"
#include "integers.h"
#include "parallel.h"

/* Floats of a vector, and rows of a tile, limited by registers for two accumulator vectors a row and the operands. */
#if defined(__AVX512F__)
#define VECTOR 16
#define ROWS 14
#elif defined(__AVX__)
#define VECTOR 8
#define ROWS 6
#else
#define VECTOR 4
#define ROWS 6
#endif
#define LANES (2 * VECTOR)
#define STEPS 512
/* Words of packed columns shared by all threads, and of packed rows of each thread; at least a panel. */
#define SHARED_PACK_WORDS (1 << 20)
#define THREAD_PACK_WORDS (1 << 16)
/* Words of packed columns of each thread where one panel of rows reads them. */
#define CORE_PACK_WORDS (1 << 17)
/* Steps packed at a time where the dtype is converted: a multiple of 4. */
#define CONVERT_STEPS 32
/* Multiply-adds below which threads cost more than they save. */
#define MIN_PARALLEL_WORK 1000000.0
/* Limits of operands that are read in place: elements that fit into a cache, or a row stride that avoids conflicts of
   cache lines, with so few columns that packing does not pay. */
#define MAX_IN_PLACE_VALUES (1 << 18)
#define MAX_IN_PLACE_STRIDE 1024
#define MAX_IN_PLACE_COLUMNS 1024
/* Row panels up to which threads split the columns only. */
#define MAX_SHARED_ROW_PANELS 4

#define FETCH_INTO_L2(address) __builtin_prefetch(address, 0, 2)
#include "few_rows.h"
#include "pack.h"

/* sums [ROWS, LANES] (+)= panels a [steps, ROWS] times b [steps, LANES], for the first `rows` rows, a constant at each
   use. Lines of a have stride `a_line`, lines of b stride 1; steps have strides `a_step` and `b_step`, all in words.
   FETCH takes what follows b: of an operand read in place the next panel, whose strides no processor foresees. */
#define TILE(NAME, MULTIPLY_ADD, FETCH)                                                                                \
  ALWAYS_INLINE void NAME(const int rows, const packed_word *a, int64_t a_line, int64_t a_step, const packed_word *b,  \
                          int64_t b_step, int64_t steps, int is_first, float *sums) {                                  \
    for (int64_t from = 0; from < steps; from += STEPS) {                                                              \
      const int64_t stop = min_i64(steps, from + STEPS);                                                               \
      vector s[ROWS][2];                                                                                               \
      _Pragma("GCC unroll 14") for (int r = 0; r < rows; r++) s[r][0] = s[r][1] = (vector){0};                         \
      for (int64_t k = from; k < stop; k++) {                                                                          \
        const aliased_word *of_a = a + k * a_step, *of_b = b + k * b_step;                                             \
        const vector b_0 = *(const vector *)of_b, b_1 = *(const vector *)(of_b + VECTOR);                              \
        FETCH(of_b + LANES);                                                                                           \
        FETCH(of_b + LANES + VECTOR);                                                                                  \
        _Pragma("GCC unroll 14") for (int r = 0; r < rows; r++) {                                                      \
          s[r][0] = MULTIPLY_ADD(s[r][0], of_a[r * a_line], b_0);                                                      \
          s[r][1] = MULTIPLY_ADD(s[r][1], of_a[r * a_line], b_1);                                                      \
        }                                                                                                              \
      }                                                                                                                \
      _Pragma("GCC unroll 14") for (int r = 0; r < rows; r++) {                                                        \
        vector *to = (vector *)(sums + r * LANES);                                                                     \
        if (from || !is_first) s[r][0] += to[0], s[r][1] += to[1];                                                     \
        to[0] = s[r][0], to[1] = s[r][1];                                                                              \
      }                                                                                                                \
    }                                                                                                                  \
  }
#define FMA_FLOAT(sum, a, b) multiply_add(sum, bits_to_float(a), b)
TILE(tile, FMA_FLOAT, FETCH_INTO_L2)

/* Variants with a constant number of rows, and a constant stride of 1 for lines or for steps of a. Arguments are
   scalars, not structs: loads of struct members after the stores of the results would stall until these are done. */
#define DEFINE_TILE_VARIANT(NAME, TILE, COUNT, LINE, STEP)                                                 \
  static __attribute__((noinline)) void NAME(const packed_word *a, int64_t a_stride, const packed_word *b, \
                                             int64_t b_step, int64_t steps, int is_first, float *sums) {   \
    TILE(COUNT, a, LINE, STEP, b, b_step, steps, is_first, sums);                                          \
  }
/* Few rows occur in decoding, and in the last panel. */
#define DEFINE_TILES_BY_LINES(NAME, TILE)                \
  DEFINE_TILE_VARIANT(NAME##_1, TILE, 1, 1, a_stride)    \
  DEFINE_TILE_VARIANT(NAME##_2, TILE, 2, 1, a_stride)    \
  DEFINE_TILE_VARIANT(NAME##_4, TILE, 4, 1, a_stride)    \
  DEFINE_TILE_VARIANT(NAME##_6, TILE, 6, 1, a_stride)
#define DEFINE_HIGH_TILES_BY_LINES(NAME, TILE)           \
  DEFINE_TILE_VARIANT(NAME##_10, TILE, 10, 1, a_stride)  \
  DEFINE_TILE_VARIANT(NAME##_all, TILE, ROWS, 1, a_stride)
DEFINE_TILES_BY_LINES(tile_by_lines, tile)
DEFINE_TILE_VARIANT(tile_by_steps, tile, ROWS, a_stride, 1)
#if ROWS > 6
DEFINE_HIGH_TILES_BY_LINES(tile_by_lines, tile)
#endif
#ifdef __AVX512BF16__
#define DOT_BFLOAT16_PAIR(sum, a, b) \
  ((vector)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)_mm512_set1_epi32((int)(a)), (__m512bh)(b)))
/* Pairs are always packed. */
#define FETCH_NOTHING(address)
TILE(tile_of_pairs, DOT_BFLOAT16_PAIR, FETCH_NOTHING)
DEFINE_TILES_BY_LINES(pairs_by_lines, tile_of_pairs)
DEFINE_HIGH_TILES_BY_LINES(pairs_by_lines, tile_of_pairs)
#define LOW_PRECISION_PACKING BFLOAT16_PAIRS
#else
#define LOW_PRECISION_PACKING ROUND_TO_BFLOAT16
#endif

/* Panels of b that one row is multiplied by at a time: the sums of fewer would wait for each other. */
#define WIDE_PANELS 4
/* Steps of b that are fetched ahead of a row. */
#define FETCHED_STEPS 16

/* As TILE for one row and WIDE_PANELS panels of b, `b_panel` words apart; sums [WIDE_PANELS, ROWS, LANES]. */
#define WIDE_TILE(NAME, MULTIPLY_ADD)                                                                                  \
  static __attribute__((noinline)) void NAME(const packed_word *a, const packed_word *b, int64_t b_step,               \
                                             int64_t b_panel, int64_t steps, int is_first, float *sums) {              \
    for (int64_t from = 0; from < steps; from += STEPS) {                                                              \
      const int64_t stop = min_i64(steps, from + STEPS);                                                               \
      vector s[2 * WIDE_PANELS];                                                                                       \
      _Pragma("GCC unroll 8") for (int v = 0; v < 2 * WIDE_PANELS; v++) s[v] = (vector){0};                            \
      for (int64_t k = from; k < stop; k++) {                                                                          \
        const aliased_word *of_b = b + k * b_step;                                                                     \
        _Pragma("GCC unroll 8") for (int v = 0; v < 2 * WIDE_PANELS; v++) {                                            \
          const aliased_word *of_v = of_b + v / 2 * b_panel + v % 2 * VECTOR;                                          \
          FETCH_INTO_L2(of_v + FETCHED_STEPS * b_step);                                                                \
          s[v] = MULTIPLY_ADD(s[v], ((const aliased_word *)a)[k * ROWS], *(const vector *)of_v);                       \
        }                                                                                                              \
      }                                                                                                                \
      _Pragma("GCC unroll 8") for (int v = 0; v < 2 * WIDE_PANELS; v++) {                                              \
        vector *to = (vector *)(sums + v / 2 * ROWS * LANES + v % 2 * VECTOR);                                         \
        if (from || !is_first) s[v] += *to;                                                                            \
        *to = s[v];                                                                                                    \
      }                                                                                                                \
    }                                                                                                                  \
  }
WIDE_TILE(wide_tile, FMA_FLOAT)
#ifdef __AVX512BF16__
WIDE_TILE(wide_tile_of_pairs, DOT_BFLOAT16_PAIR)
#endif

typedef void tile_variant(const packed_word *a, int64_t a_stride, const packed_word *b, int64_t b_step, int64_t steps,
                          int is_first, float *sums);

/* Return the variant of the fewest rows that computes the first `rows` rows of a packed panel. */
static inline tile_variant *variant_by_lines(int64_t rows, int packing) {
#ifdef __AVX512BF16__
  if (packing == BFLOAT16_PAIRS)
    return rows == 1   ? pairs_by_lines_1
           : rows == 2 ? pairs_by_lines_2
           : rows <= 4 ? pairs_by_lines_4
           : rows <= 6 ? pairs_by_lines_6
           : rows <= 10 ? pairs_by_lines_10
                        : pairs_by_lines_all;
#endif
  (void)packing;
#if ROWS > 6
  if (rows > 6) return rows <= 10 ? tile_by_lines_10 : tile_by_lines_all;
#endif
  return rows == 1 ? tile_by_lines_1 : rows == 2 ? tile_by_lines_2 : rows <= 4 ? tile_by_lines_4 : tile_by_lines_6;
}

#ifdef HAS_PAIR_VECTORS
/* Round LANES floats; returns 0 if the instruction may differ from `float_to_bfloat16`: for NaN and denormals. */
static inline int round_lanes(uint16_t *to, const float *sums) {
  const __m512 low = _mm512_loadu_ps(sums), high = _mm512_loadu_ps(sums + VECTOR);
  const int is_nan_or_denormal = 0xa1;
  if (_mm512_fpclass_ps_mask(low, is_nan_or_denormal) | _mm512_fpclass_ps_mask(high, is_nan_or_denormal)) return 0;
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  return 1;
}
#endif

ALWAYS_INLINE void store_tile(output_matrix out, int64_t row, int64_t column, const float *sums, int64_t rows,
                              const int64_t columns) {
  for (int64_t r = 0; r < rows; r++, sums += LANES) {
    const int64_t at = (row + r) * out.row + column;
    float *f = (float *)out.start + at;
    uint16_t *h = (uint16_t *)out.start + at;
#ifdef HAS_PAIR_VECTORS
    if (columns == LANES && out.kind == BFLOAT16 && !out.adds && round_lanes(h, sums)) continue;
#endif
    if (out.kind == BFLOAT16)
      for (int64_t c = 0; c < columns; c++)
        h[c] = float_to_bfloat16(out.adds ? bfloat16_to_float(h[c]) + sums[c] : sums[c]);
    else if (out.adds)
      for (int64_t c = 0; c < columns; c++) f[c] += sums[c];
    else
      memcpy(f, sums, columns * sizeof *f);
  }
}

/* Fetch a tile that will be stored. */
static inline void fetch_tile(output_matrix out, int64_t row, int64_t column, int64_t rows) {
  for (int64_t r = 0; r < rows; r++) {
    const char *const to = offset_pointer(out.start, (row + r) * out.row + column, out.kind == BFLOAT16);
    __builtin_prefetch(to, 1, 3);
    if (out.kind == FLOAT32) __builtin_prefetch(to + 64, 1, 3);
  }
}

/* One side (a or b) of all terms; `others` is the number of lines of the other side. */
typedef struct {
  const gemm_term *terms;
  int count, is_b, packing;
  int64_t lines, others, steps;
} operand_side;

static inline strided_matrix operand_of(operand_side s, int t) { return s.is_b ? s.terms[t].b : s.terms[t].a; }

/* Return whether complete panels of an operand are read in place. */
static int reads_in_place(operand_side s, int t) {
  const strided_matrix x = operand_of(s, t);
  if (s.packing != UNCHANGED) return 0;
  if (x.line == 1) return x.step * s.terms[t].depth <= MAX_IN_PLACE_VALUES || (s.is_b && s.others <= ROWS);
  return !s.is_b && x.step == 1 && x.line < MAX_IN_PLACE_STRIDE && s.others <= MAX_IN_PLACE_COLUMNS;
}

/* Pack panels from..to; the terms are consecutive in a panel. */
ALWAYS_INLINE void pack_operand(packed_word *panels, const int width, operand_side s, int64_t from, int64_t to) {
  for (int t = 0; t < s.count; t++) {
    const int64_t depth = s.terms[t].depth;
    /* If an operand is read in place, only its incomplete last panel is packed. */
    const int64_t first = reads_in_place(s, t) ? min_i64(to, max_i64(from, s.lines / width)) : from;
    pack_panels(panels + (first - from) * s.steps * width, s.steps * width, width, operand_of(s, t), s.packing,
                first * width, min_i64(s.lines, to * width), depth);
    panels += num_steps(depth, s.packing) * width;
  }
}

/* Return whether a panel of a term was packed. */
static inline int is_panel_packed(operand_side s, const int width, int t, int64_t index) {
  return (index + 1) * width > s.lines || !reads_in_place(s, t);
}

/* Compute the tile of panels i of a and j of b, summed over all terms; a_packed and b_packed are their packed words. */
ALWAYS_INLINE void compute_tile(operand_side of_a, operand_side of_b, int64_t i, int64_t j, const packed_word *a_packed,
                                const packed_word *b_packed, float *sums) {
  /* A term of depth 0 leaves the sums untouched. */
  int is_first = 1;
  for (int t = 0; t < of_a.count; t++) {
    const strided_matrix x = operand_of(of_a, t), y = operand_of(of_b, t);
    const int64_t steps = num_steps(of_a.terms[t].depth, of_a.packing);
    const packed_word *a = a_packed, *b = b_packed;
    int64_t a_line = 1, a_step = ROWS, b_step = LANES;
    if (!is_panel_packed(of_a, ROWS, t, i))
      a = (const packed_word *)float_at(x, i * ROWS, 0), a_line = x.line, a_step = x.step;
    if (!is_panel_packed(of_b, LANES, t, j)) b = (const packed_word *)float_at(y, j * LANES, 0), b_step = y.step;
    if (a_line == 1)
      variant_by_lines(min_i64(ROWS, of_a.lines - i * ROWS), of_a.packing)(a, a_step, b, b_step, steps, is_first, sums);
    else
      tile_by_steps(a, a_line, b, b_step, steps, is_first, sums);
    a_packed += steps * ROWS, b_packed += steps * LANES, is_first &= steps == 0;
  }
}

/* Compute the tiles of one row and the complete panels j to j + WIDE_PANELS - 1 of b, as compute_tile
   does; panels of packed words are `b_panel` words apart. */
ALWAYS_INLINE void compute_wide_tile(operand_side of_a, operand_side of_b, int64_t j, const packed_word *a_packed,
                                     const packed_word *b_packed, int64_t b_panel, float *sums) {
  int is_first = 1;
  for (int t = 0; t < of_a.count; t++) {
    const strided_matrix y = operand_of(of_b, t);
    const int64_t steps = num_steps(of_a.terms[t].depth, of_a.packing);
    const packed_word *b = b_packed;
    int64_t b_step = LANES, panel = b_panel;
    if (!is_panel_packed(of_b, LANES, t, j))
      b = (const packed_word *)float_at(y, j * LANES, 0), b_step = y.step, panel = LANES;
#ifdef __AVX512BF16__
    if (of_a.packing == BFLOAT16_PAIRS)
      wide_tile_of_pairs(a_packed, b, b_step, panel, steps, is_first, sums);
    else
#endif
      wide_tile(a_packed, b, b_step, panel, steps, is_first, sums);
    a_packed += steps * ROWS, b_packed += steps * LANES, is_first &= steps == 0;
  }
}

static inline int64_t max_column_panels(int64_t columns, int64_t steps) {
  return min_i64(ceil_div(columns, LANES), max_i64(1, SHARED_PACK_WORDS / LANES / max_i64(1, steps)));
}
static inline int64_t max_row_panels(int64_t rows, int64_t steps) {
  return min_i64(ceil_div(rows, ROWS), max_i64(1, THREAD_PACK_WORDS / ROWS / max_i64(1, steps)));
}

/* Floats of a vector. */
int gemm_vector_width(void) { return VECTOR; }

/* Maximum words of scratch memory, for terms of total depth `depth`. */
int64_t gemm_scratch_words(int64_t rows, int64_t columns, int64_t depth, int threads) {
  const int64_t shared = min_i64(ceil_div(columns, LANES) * depth, SHARED_PACK_WORDS / LANES + depth);
  const int64_t per_thread = min_i64(ceil_div(rows, ROWS) * depth, THREAD_PACK_WORDS / ROWS + depth);
  return shared * LANES + threads * per_thread * ROWS;
}

/* Return the function for a product of few rows in float32; 0: it is tiled. */
static few_rows *few_rows_variant(const gemm_args *args) {
  const gemm_term *const term = args->terms;
  if (args->count != 1 || args->rows > FEW_ROWS || args->rounds_to_bfloat16 || args->columns % LANES) return 0;
  if (args->out.adds || args->out.kind != FLOAT32 || term->a.kind != FLOAT32 || term->b.kind != FLOAT32) return 0;
  if (term->a.step != 1 || term->depth == 0) return 0;
  if (term->b.line == 1) return stream_ROWS[args->rows - 1];
  return term->b.step == 1 && term->depth % BLOCK == 0 ? turn_ROWS[args->rows - 1] : 0;
}

/* out = a b of few rows; threads split the columns. */
static void multiply_few_rows(const gemm_args *args, few_rows *multiply, int threads) {
  const strided_matrix a = args->terms[0].a, b = args->terms[0].b;
  const int64_t b_stride = b.line == 1 ? b.step : b.line, panels = args->columns / LANES;
  PRAGMA(omp parallel num_threads(threads)) {
    const int64_t first = THREAD * panels / THREADS * LANES, last = (THREAD + 1) * panels / THREADS * LANES;
    multiply(a.start, a.line, float_at(b, first, 0), b_stride, last - first, args->terms[0].depth,
             (float *)args->out.start + first, args->out.row);
  }
}

/* out [rows, columns] (+)= the sum of the terms, with operands rounded to bfloat16 if asked. */
static void multiply_at_once(const gemm_args *args) {
  const gemm_term *const terms = args->terms;
  const output_matrix out = args->out;
  const int64_t rows = args->rows, columns = args->columns;
  const int count = (int)args->count, rounds_to_bfloat16 = (int)args->rounds_to_bfloat16;
  packed_word *const scratch = args->scratch;
  int threads = (int)args->threads;
  const int packing = rounds_to_bfloat16 ? LOW_PRECISION_PACKING : UNCHANGED;
  int64_t steps = 0;
  for (int t = 0; t < count; t++) steps += num_steps(terms[t].depth, packing);
  if ((double)rows * columns * steps < MIN_PARALLEL_WORK) threads = 1;
  few_rows *const multiply = few_rows_variant(args);
  if (multiply) {
    multiply_few_rows(args, multiply, threads);
    return;
  }
  const int64_t a_panels = ceil_div(rows, ROWS), b_panels = ceil_div(columns, LANES);
  const int64_t thread_panels = max_row_panels(rows, steps);
  /* Packed columns that only one panel of rows reads should not leave the cache of their core. */
  const int64_t core_panels = a_panels == 1 ? threads * max_i64(1, CORE_PACK_WORDS / LANES / max_i64(1, steps)) : b_panels;
  const int64_t shared_panels = min_i64(max_column_panels(columns, steps), core_panels);
  /* Rows are split into equally many chunks for each thread; columns are split where row panels are few, because chunks
     of them would be uneven. */
  const int64_t min_chunks = ceil_div(a_panels, thread_panels);
  const int64_t chunks =
      a_panels <= MAX_SHARED_ROW_PANELS ? min_chunks : min_i64(a_panels, ceil_div(min_chunks, threads) * threads);
  packed_word *const columns_packed = scratch, *const rows_packed = scratch + shared_panels * LANES * steps;
  PRAGMA(omp parallel num_threads(threads)) {
    /* Thread-local copies, so that the compiler knows that packing does not modify them. */
    const operand_side of_a = {terms, count, 0, packing, rows, columns, steps},
                       of_b = {terms, count, 1, packing, columns, rows, steps};
    packed_word *const thread_rows = rows_packed + THREAD * thread_panels * ROWS * steps;
    float sums[WIDE_PANELS * ROWS * LANES] __attribute__((aligned(64))) = {0};
    for (int64_t first = 0; first < b_panels; first += shared_panels) {
      const int64_t num_panels = min_i64(shared_panels, b_panels - first);
      const int64_t column_chunks =
          min_i64(num_panels, a_panels <= MAX_SHARED_ROW_PANELS ? threads : ceil_div(threads, chunks));
      const int64_t thread_first = THREAD * num_panels / THREADS, thread_last = (THREAD + 1) * num_panels / THREADS;
      pack_operand(columns_packed + thread_first * LANES * steps, LANES, of_b, first + thread_first,
                   first + thread_last);
      PRAGMA(omp barrier)
      PRAGMA(omp for schedule(static)) for (int64_t task = 0; task < chunks * column_chunks; task++) {
        const int64_t chunk = task % chunks, column_chunk = task / chunks;
        const int64_t from = chunk * a_panels / chunks, to = (chunk + 1) * a_panels / chunks;
        pack_operand(thread_rows, ROWS, of_a, from, to);
        const int64_t last = (column_chunk + 1) * num_panels / column_chunks;
        int64_t j = column_chunk * num_panels / column_chunks;
        if (rows == 1)
          for (; j + WIDE_PANELS <= last && (first + j + WIDE_PANELS) * LANES <= columns; j += WIDE_PANELS) {
            compute_wide_tile(of_a, of_b, first + j, thread_rows, columns_packed + j * LANES * steps, LANES * steps, sums);
            for (int64_t i = 0; i < WIDE_PANELS; i++)
              store_tile(out, 0, (first + j + i) * LANES, sums + i * ROWS * LANES, 1, LANES);
          }
        for (; j < last; j++)
          for (int64_t i = from; i < to; i++) {
            const packed_word *a_packed = thread_rows + (i - from) * ROWS * steps,
                              *b_packed = columns_packed + j * LANES * steps;
            const int64_t column = (first + j) * LANES, high = min_i64(ROWS, rows - i * ROWS);
            fetch_tile(out, i * ROWS, column, high);
            compute_tile(of_a, of_b, i, first + j, a_packed, b_packed, sums);
            /* A constant width lets the compiler unroll. */
            if (columns - column >= LANES)
              store_tile(out, i * ROWS, column, sums, high, LANES);
            else
              store_tile(out, i * ROWS, column, sums, high, columns - column);
          }
      }
    }
  }
}

/* out (+)= the sum of the terms. A deep product of operands whose steps are far apart, as the gradient of a weight, is
   computed a chunk of STEPS after another, so that the operands of a chunk stay in the caches. The sums of chunks are
   added in memory in the order in which a tile adds them. */
void gemm(const gemm_args *args) {
  const gemm_term *const whole = args->terms;
  const int has_pairs = (int)args->rounds_to_bfloat16 && LOW_PRECISION_PACKING == BFLOAT16_PAIRS;
  const int64_t chunk = has_pairs ? 2 * STEPS : STEPS;
  if (args->count != 1 || args->out.adds || args->out.kind != FLOAT32 || whole->depth <= chunk || whole->a.line != 1 ||
      whole->b.line != 1) {
    multiply_at_once(args);
    return;
  }
  union {
    gemm_args args;
    char bytes[sizeof(gemm_args) + sizeof(gemm_term)];
  } part;
  memcpy(part.bytes, args, sizeof part);
  gemm_term *const term = part.args.terms;
  for (int64_t from = 0; from < whole->depth; from += chunk) {
    term->depth = min_i64(chunk, whole->depth - from);
    multiply_at_once(&part.args);
    term->a.start = step_at(term->a, chunk), term->b.start = step_at(term->b, chunk);
    part.args.out.adds = 1;
  }
}
