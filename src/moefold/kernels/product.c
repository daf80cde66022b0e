/* out (+)= a b, or a b + c d: matrices of any strides, float32 or bfloat16 in memory, summed in float32.

   Operands are packed: a by panels of ROWS rows, b by panels of LANES columns, in which what belongs to one step along
   the depth lies side by side; their edges are zeros. One routine, a tile, multiplies a panel of each. A step is one
   float32, or two bfloat16 where the processor multiplies pairs: a word of 32 bits in either case.

   Each result is a sum in one order, by parts of STEPS, whatever the threads, the strides and the other rows and
   columns, and is rounded once. */

#include <stdint.h>
#include <string.h>

#include "bfloat16.h"
#include "exponential.h"
#include "turn.h"

/* Numbers of a vector, and rows of two vectors of sums that its registers hold beside the operands. */
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
/* Words of packed columns that all threads read, and of packed rows that one thread has; a panel at least. */
#define SHARED (1 << 20)
#define OWN (1 << 16)
/* Steps that are packed at a time where numbers are converted: a multiple of 4. */
#define RUN 32
/* Products below which threads cost more than they save. */
#define GRAIN 1000000.0

#ifdef _OPENMP
#include <omp.h>
#define TOGETHER _Pragma("omp parallel num_threads(threads)")
#define SHARE _Pragma("omp for schedule(static)")
#define AWAIT _Pragma("omp barrier")
#define THREAD omp_get_thread_num()
#define THREADS omp_get_num_threads()
#else
#define TOGETHER
#define SHARE
#define AWAIT
#define THREAD 0
#define THREADS 1
#endif
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

typedef uint32_t word;
typedef float vector __attribute__((vector_size(4 * VECTOR), aligned(4), may_alias));

/* What numbers are in memory, and what they are packed as: in float32, with the values that they have in bfloat16, or
   two of bfloat16 in a word. */
enum { FLOAT32, BFLOAT16 };
enum { AS_THEY_ARE, ROUNDED, PAIRS };

/* An operand: rows of a, or columns of b, are its lines. Strides are in numbers. */
typedef struct {
  const void *start;
  int64_t line, step, kind;
} numbers;

/* One product of the sum. */
typedef struct {
  numbers a, b;
  int64_t depth;
} term;

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
/* Parts of a whole, the last one perhaps smaller. */
static inline int64_t parts(int64_t whole, int64_t part) { return (whole + part - 1) / part; }
static inline int64_t steps_of(int64_t depth, int how) { return how == PAIRS ? parts(depth, 2) : depth; }
static inline word pair(uint16_t first, uint16_t second) { return first | (word)second << 16; }

static inline const float *floats(numbers x, int64_t line, int64_t at) {
  return (const float *)x.start + line * x.line + at * x.step;
}
static inline const uint16_t *halves(numbers x, int64_t line, int64_t at) {
  return (const uint16_t *)x.start + line * x.line + at * x.step;
}

/* `count` numbers from `at` on, `stride` apart, as words of float32. */
INLINE void wide_words(word *to, numbers x, int how, int64_t line, int64_t at, int64_t stride, int64_t count) {
  float *out = (float *)to;
  const float *f = floats(x, line, at);
  const uint16_t *h = halves(x, line, at);
  if (x.kind == BFLOAT16)
    for (int64_t i = 0; i < count; i++) out[i] = of_bfloat16(h[i * stride]);
  else if (how == ROUNDED)
    for (int64_t i = 0; i < count; i++) out[i] = of_bfloat16(to_bfloat16(f[i * stride]));
  else
    for (int64_t i = 0; i < count; i++) out[i] = f[i * stride];
}

/* `count` words of one line, from number `at` on, behind which `depth` numbers are left. */
static void line_words(word *to, numbers x, int how, int64_t line, int64_t at, int64_t count, int64_t depth) {
  if (how != PAIRS) {
    wide_words(to, x, how, line, at, x.step, count);
    return;
  }
  const int64_t whole = least(count, depth / 2), s = x.step;
  const float *f = floats(x, line, at);
  const uint16_t *h = halves(x, line, at);
  if (x.kind == BFLOAT16)
    for (int64_t i = 0; i < whole; i++) to[i] = pair(h[2 * i * s], h[(2 * i + 1) * s]);
  else
    for (int64_t i = 0; i < whole; i++) to[i] = pair(to_bfloat16(f[2 * i * s]), to_bfloat16(f[(2 * i + 1) * s]));
  if (whole < count) to[whole] = x.kind == BFLOAT16 ? h[2 * whole * s] : to_bfloat16(f[2 * whole * s]);
}

/* The words of one step, of `count` lines that lie side by side. */
INLINE void step_words(word *to, numbers x, int how, int64_t line, int64_t at, int64_t count, int64_t depth) {
  if (how != PAIRS) {
    wide_words(to, x, how, line, at, 1, count);
    return;
  }
  const float *f = floats(x, line, at), *f_2 = f + x.step;
  const uint16_t *h = halves(x, line, at), *h_2 = h + x.step;
  if (x.kind == BFLOAT16 && depth > 1)
    for (int64_t i = 0; i < count; i++) to[i] = pair(h[i], h_2[i]);
  else if (x.kind == BFLOAT16)
    for (int64_t i = 0; i < count; i++) to[i] = h[i];
  else if (depth > 1)
    for (int64_t i = 0; i < count; i++) to[i] = pair(to_bfloat16(f[i]), to_bfloat16(f_2[i]));
  else
    for (int64_t i = 0; i < count; i++) to[i] = to_bfloat16(f[i]);
}

/* The same of the last lines, which are fewer than a panel has: zeros behind them. */
static void last_words(word *to, int width, numbers x, int how, int64_t line, int64_t at, int64_t count, int64_t depth) {
  step_words(to, x, how, line, at, count, depth);
  for (int64_t i = count; i < width; i++) to[i] = 0;
}

/* Lines [width, steps] to a panel [steps, width], by squares; the last two squares may have lines in common. */
INLINE void turn_all(word *panel, const int width, const void *lines, int64_t stride, int64_t steps) {
  for (int64_t k = 0; k < steps; k += 4)
#pragma GCC unroll 8
    for (int i = 0; i < width; i += 4) {
      const int line = i + 4 <= width ? i : width - 4;
      turn(panel + k * width + line, width, (const char *)lines + line * stride + 4 * k, stride);
    }
}

/* A panel [steps, width] of `count` lines from `line` on, whose steps lie side by side or wherever; zeros behind them. */
INLINE void pack_lines(word *panel, const int width, numbers x, int how, int64_t line, int64_t count, int64_t depth) {
  const int64_t each = how == PAIRS ? 2 : 1, steps = steps_of(depth, how);
  /* Whole lines may lie in memory as the words that they become, but for the last steps. */
  const int is_ready = x.step == 1 && count == width && (x.kind == BFLOAT16 ? how == PAIRS : how == AS_THEY_ARE);
  const int64_t ready = is_ready ? depth / each / 4 * 4 : 0;
  if (x.kind == BFLOAT16)
    turn_all(panel, width, halves(x, line, 0), 2 * x.line, ready);
  else
    turn_all(panel, width, floats(x, line, 0), 4 * x.line, ready);
  word lines[LANES * RUN];
  if (ready < steps) memset(lines, 0, sizeof lines);
  for (int64_t k = ready; k < steps; k += RUN) {
    const int64_t run = least(RUN, steps - k);
    for (int64_t i = 0; i < count; i++) line_words(lines + i * RUN, x, how, line + i, each * k, run, depth - each * k);
    if (run == RUN) {
      turn_all(panel + k * width, width, lines, 4 * RUN, RUN);
      continue;
    }
    for (int64_t j = 0; j < run; j++)
      for (int64_t i = 0; i < width; i++) panel[(k + j) * width + i] = lines[i * RUN + j];
  }
}

/* Lines from..to of an operand as panels, each `size` words behind the one before. */
INLINE void pack(word *panels, int64_t size, const int width, numbers x, int how, int64_t from, int64_t to, int64_t depth) {
  if (x.line != 1) {
    for (; from < to; from += width, panels += size)
      pack_lines(panels, width, x, how, from, least(width, to - from), depth);
    return;
  }
  /* A step of all panels lies side by side. */
  const int64_t each = how == PAIRS ? 2 : 1;
  for (int64_t k = 0; k < steps_of(depth, how); k++) {
    word *out = panels + k * width;
    int64_t line = from;
    /* As many words as the compiler knows. */
    for (; to - line >= width; line += width, out += size) step_words(out, x, how, line, each * k, width, depth - each * k);
    if (line < to) last_words(out, width, x, how, line, each * k, to - line, depth - each * k);
  }
}

/* sums [ROWS, LANES] of panels a [steps, ROWS] and b [steps, LANES]. */
#define TILE(NAME, PLUS)                                                                                               \
  static __attribute__((noinline)) void NAME(const word *a, const word *b, int64_t steps, float *sums) {               \
    for (int64_t from = 0; from < steps; from += STEPS) {                                                              \
      const int64_t stop = least(steps, from + STEPS);                                                                 \
      vector s[ROWS][2];                                                                                               \
      _Pragma("GCC unroll 14") for (int r = 0; r < ROWS; r++) s[r][0] = s[r][1] = (vector){0};                         \
      for (int64_t k = from; k < stop; k++) {                                                                          \
        const vector b_0 = *(const vector *)(b + k * LANES), b_1 = *(const vector *)(b + k * LANES + VECTOR);          \
        _Pragma("GCC unroll 14") for (int r = 0; r < ROWS; r++) {                                                      \
          s[r][0] = PLUS(s[r][0], a[k * ROWS + r], b_0);                                                               \
          s[r][1] = PLUS(s[r][1], a[k * ROWS + r], b_1);                                                               \
        }                                                                                                              \
      }                                                                                                                \
      _Pragma("GCC unroll 14") for (int r = 0; r < ROWS; r++) {                                                        \
        vector *to = (vector *)(sums + r * LANES);                                                                     \
        if (from) s[r][0] += to[0], s[r][1] += to[1];                                                                  \
        to[0] = s[r][0], to[1] = s[r][1];                                                                              \
      }                                                                                                                \
    }                                                                                                                  \
  }
#define PLUS_NUMBER(sum, a, b) ((sum) + bits_to_float(a) * (b))
TILE(tile, PLUS_NUMBER)
#ifdef __AVX512BF16__
#define PLUS_PAIR(sum, a, b) ((vector)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)_mm512_set1_epi32((int)(a)), (__m512bh)(b)))
TILE(tile_of_pairs, PLUS_PAIR)
#define NARROW PAIRS
#else
#define tile_of_pairs tile
#define NARROW ROUNDED
#endif

/* Where results go: rows of `row` numbers in memory. */
typedef struct {
  void *start;
  int64_t row, kind, adds;
} results;

static inline void put(results out, int64_t row, int64_t column, const float *sums, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; r++, sums += LANES) {
    const int64_t at = (row + r) * out.row + column;
    float *f = (float *)out.start + at;
    uint16_t *h = (uint16_t *)out.start + at;
    if (out.kind == BFLOAT16)
      for (int64_t c = 0; c < columns; c++) h[c] = to_bfloat16(out.adds ? of_bfloat16(h[c]) + sums[c] : sums[c]);
    else if (out.adds)
      for (int64_t c = 0; c < columns; c++) f[c] += sums[c];
    else
      memcpy(f, sums, columns * sizeof *f);
  }
}

/* Panels from..to of one side of all terms, which lie behind each other in a panel; `lines` there are in all. */
INLINE void pack_terms(word *panels, const int width, const term *terms, int count, int is_b, int how, int64_t from,
                       int64_t to, int64_t lines, int64_t steps) {
  for (int t = 0; t < count; t++) {
    const numbers x = is_b ? terms[t].b : terms[t].a;
    pack(panels, steps * width, width, x, how, from * width, least(lines, to * width), terms[t].depth);
    panels += steps_of(terms[t].depth, how) * width;
  }
}

static inline int64_t panels_of_all(int64_t columns, int64_t steps) {
  return least(parts(columns, LANES), most(1, SHARED / LANES / most(1, steps)));
}
static inline int64_t panels_of_one(int64_t rows, int64_t steps) {
  return least(parts(rows, ROWS), most(1, OWN / ROWS / most(1, steps)));
}

/* Whether the processor multiplies pairs of bfloat16, and numbers of a vector. */
int product_multiplies_pairs(void) { return NARROW == PAIRS; }
int product_vector(void) { return VECTOR; }

/* Words of scratch memory at most, for a sum of terms of `depth` in all. */
int64_t product_scratch(int64_t rows, int64_t columns, int64_t depth, int threads) {
  const int64_t all = least(parts(columns, LANES) * depth, SHARED / LANES + depth);
  const int64_t one = least(parts(rows, ROWS) * depth, OWN / ROWS + depth);
  return all * LANES + threads * one * ROWS;
}

/* out [rows, columns] (+)= the sum of the terms; if narrow, the operands have their values in bfloat16. */
void product(const term *terms, int count, results out, int64_t rows, int64_t columns, int is_narrow, word *scratch,
             int threads) {
  const int how = is_narrow ? NARROW : AS_THEY_ARE;
  int64_t steps = 0;
  for (int t = 0; t < count; t++) steps += steps_of(terms[t].depth, how);
  if ((double)rows * columns * steps < GRAIN) threads = 1;
  const int64_t a_panels = parts(rows, ROWS), b_panels = parts(columns, LANES);
  const int64_t at_once = panels_of_all(columns, steps), own = panels_of_one(rows, steps);
  /* Rows are cut into as many chunks for each thread; where they do not suffice, columns are cut too. */
  const int64_t chunks = least(a_panels, parts(parts(a_panels, own), threads) * threads);
  word *const columns_packed = scratch, *const rows_packed = scratch + at_once * LANES * steps;
  TOGETHER {
    word *const mine = rows_packed + THREAD * own * ROWS * steps;
    float sums[ROWS * LANES] __attribute__((aligned(64))) = {0};
    for (int64_t first = 0; first < b_panels; first += at_once) {
      const int64_t here = least(at_once, b_panels - first), cuts = least(here, parts(threads, chunks));
      const int64_t mine_from = THREAD * here / THREADS, mine_to = (THREAD + 1) * here / THREADS;
      pack_terms(columns_packed + mine_from * LANES * steps, LANES, terms, count, 1, how, first + mine_from,
                 first + mine_to, columns, steps);
      AWAIT
      SHARE for (int64_t task = 0; task < chunks * cuts; task++) {
        const int64_t chunk = task / cuts, cut = task % cuts;
        const int64_t from = chunk * a_panels / chunks, to = (chunk + 1) * a_panels / chunks;
        pack_terms(mine, ROWS, terms, count, 0, how, from, to, rows, steps);
        for (int64_t j = cut * here / cuts; j < (cut + 1) * here / cuts; j++)
          for (int64_t i = from; i < to; i++) {
            const word *a = mine + (i - from) * ROWS * steps, *b = columns_packed + j * LANES * steps;
            const int64_t column = (first + j) * LANES;
            if (how == PAIRS)
              tile_of_pairs(a, b, steps, sums);
            else
              tile(a, b, steps, sums);
            put(out, i * ROWS, column, sums, least(ROWS, rows - i * ROWS), least(LANES, columns - column));
          }
      }
    }
  }
}
