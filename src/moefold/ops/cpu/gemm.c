/* out (+)= a b, or a b + c d: matrices of any strides, float32 or bfloat16 in memory, summed in float32.

   Operands are packed: a by panels of ROWS rows, b by panels of LANES columns, in which what belongs to one step along
   the depth lies side by side; their edges are zeros. One routine, a tile, multiplies a panel of each. A step is one
   float32, or two bfloat16 where the processor multiplies pairs: a word of 32 bits in either case. In float32 whole
   panels are read where they lie, if that costs no more: small operands whose lines lie side by side, and rows of a.

   Each result is a sum in one order, by parts of STEPS of each term, whatever the threads, the strides and the other
   rows and columns, and is rounded once. */

#include <stdint.h>
#include <string.h>

#include "bfloat16.h"
#include "exponential.h"
#include "transpose.h"

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
/* What is read where it lies: an operand of so many numbers, which a cache holds, or rows that lie closer than what
   the lines of a cache repeat after, for so few columns that packing would not pay. */
#define NEAR (1 << 18)
#define CLOSE 1024
#define FEW_COLUMNS 1024
/* Panels of rows that threads do not share. */
#define FEW_PANELS 4

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
typedef uint32_t any_word __attribute__((may_alias));
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

/* `count` words of one line, from number `at` on, behind which `depth` numbers are left, `s` apart. */
INLINE void words_of_line(word *to, numbers x, int how, int64_t line, int64_t at, int64_t count, int64_t depth,
                          const int64_t s) {
  if (how != PAIRS) {
    wide_words(to, x, how, line, at, s, count);
    return;
  }
  const int64_t whole = least(count, depth / 2);
  const float *f = floats(x, line, at);
  const uint16_t *h = halves(x, line, at);
  if (x.kind == BFLOAT16)
    for (int64_t i = 0; i < whole; i++) to[i] = pair(h[2 * i * s], h[(2 * i + 1) * s]);
  else
    for (int64_t i = 0; i < whole; i++) to[i] = pair(to_bfloat16(f[2 * i * s]), to_bfloat16(f[(2 * i + 1) * s]));
  if (whole < count) to[whole] = x.kind == BFLOAT16 ? h[2 * whole * s] : to_bfloat16(f[2 * whole * s]);
}

/* The compiler has to know whether they lie side by side. */
static __attribute__((noinline)) void line_words(word *to, numbers x, int how, int64_t line, int64_t at, int64_t count,
                                                 int64_t depth) {
  if (x.step == 1)
    words_of_line(to, x, how, line, at, count, depth, 1);
  else
    words_of_line(to, x, how, line, at, count, depth, x.step);
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

/* sums [ROWS, LANES] (+)= panels a [steps, ROWS] times b [steps, LANES]. One line of a lies `a_line` words behind the
   other, those of b side by side; one step `a_step`, or `b_step`. */
#define TILE(NAME, PLUS)                                                                                               \
  INLINE void NAME(const word *a, int64_t a_line, int64_t a_step, const word *b, int64_t b_step, int64_t steps,        \
                   int is_first, float *sums) {                                                                        \
    for (int64_t from = 0; from < steps; from += STEPS) {                                                              \
      const int64_t stop = least(steps, from + STEPS);                                                                 \
      vector s[ROWS][2];                                                                                               \
      _Pragma("GCC unroll 14") for (int r = 0; r < ROWS; r++) s[r][0] = s[r][1] = (vector){0};                         \
      for (int64_t k = from; k < stop; k++) {                                                                          \
        const any_word *of_a = a + k * a_step, *of_b = b + k * b_step;                                                 \
        const vector b_0 = *(const vector *)of_b, b_1 = *(const vector *)(of_b + VECTOR);                              \
        _Pragma("GCC unroll 14") for (int r = 0; r < ROWS; r++) {                                                      \
          s[r][0] = PLUS(s[r][0], of_a[r * a_line], b_0);                                                              \
          s[r][1] = PLUS(s[r][1], of_a[r * a_line], b_1);                                                              \
        }                                                                                                              \
      }                                                                                                                \
      _Pragma("GCC unroll 14") for (int r = 0; r < ROWS; r++) {                                                        \
        vector *to = (vector *)(sums + r * LANES);                                                                     \
        if (from || !is_first) s[r][0] += to[0], s[r][1] += to[1];                                                     \
        to[0] = s[r][0], to[1] = s[r][1];                                                                              \
      }                                                                                                                \
    }                                                                                                                  \
  }
#define PLUS_NUMBER(sum, a, b) ((sum) + bits_to_float(a) * (b))
TILE(tile, PLUS_NUMBER)

/* The compiler has to know whether lines or steps of a lie side by side. Numbers, not structures, are handed over: a
   load from behind the results' stores would wait until memory has taken them. */
#define TILE_OF(NAME, TILE, LINE, STEP)                                                                                \
  static __attribute__((noinline)) void NAME(const word *a, int64_t a_stride, const word *b, int64_t b_step,           \
                                             int64_t steps, int is_first, float *sums) {                               \
    TILE(a, LINE, STEP, b, b_step, steps, is_first, sums);                                                             \
  }
TILE_OF(tile_by_lines, tile, 1, a_stride)
TILE_OF(tile_by_steps, tile, a_stride, 1)
#ifdef __AVX512BF16__
#define PLUS_PAIR(sum, a, b) ((vector)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)_mm512_set1_epi32((int)(a)), (__m512bh)(b)))
TILE(tile_of_pairs, PLUS_PAIR)
TILE_OF(pairs_by_lines, tile_of_pairs, 1, a_stride)
#define NARROW PAIRS
#else
#define pairs_by_lines tile_by_lines
#define NARROW ROUNDED
#endif

/* Where results go: rows of `row` numbers in memory. */
typedef struct {
  void *start;
  int64_t row, kind, adds;
} results;

INLINE void put(results out, int64_t row, int64_t column, const float *sums, int64_t rows, const int64_t columns) {
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

/* The operands of one side of all terms; `others` are the lines of the other side. */
typedef struct {
  const term *terms;
  int count, is_b, how;
  int64_t lines, others, steps;
} side;

static inline numbers operand(side s, int t) { return s.is_b ? s.terms[t].b : s.terms[t].a; }

/* Whether whole panels are read where the operand lies. */
static int is_near(side s, int t) {
  const numbers x = operand(s, t);
  if (s.how != AS_THEY_ARE) return 0;
  if (x.line == 1) return x.step * s.terms[t].depth <= NEAR;
  return !s.is_b && x.step == 1 && x.line < CLOSE && s.others <= FEW_COLUMNS;
}

/* Panels from..to; those of the terms lie behind each other in a panel. */
INLINE void pack_terms(word *panels, const int width, side s, int64_t from, int64_t to) {
  for (int t = 0; t < s.count; t++) {
    const int64_t depth = s.terms[t].depth;
    /* Of what is read where it lies, a last one that is not whole. */
    const int64_t first = is_near(s, t) ? least(to, most(from, s.lines / width)) : from;
    pack(panels + (first - from) * s.steps * width, s.steps * width, width, operand(s, t), s.how, first * width,
         least(s.lines, to * width), depth);
    panels += steps_of(depth, s.how) * width;
  }
}

/* Whether a panel of a term was packed. */
static inline int is_packed(side s, const int width, int t, int64_t index) {
  return (index + 1) * width > s.lines || !is_near(s, t);
}

/* sums of panel i of one side and j of the other, over all terms; what was packed of them lies where it is said. */
INLINE void sum_up(side of_a, side of_b, int64_t i, int64_t j, const word *a_packed, const word *b_packed, float *sums) {
  /* A term of no depth has no sums. */
  int is_first = 1;
  for (int t = 0; t < of_a.count; t++) {
    const numbers x = operand(of_a, t), y = operand(of_b, t);
    const int64_t steps = steps_of(of_a.terms[t].depth, of_a.how);
    const word *a = a_packed, *b = b_packed;
    int64_t a_line = 1, a_step = ROWS, b_step = LANES;
    if (!is_packed(of_a, ROWS, t, i)) a = (const word *)floats(x, i * ROWS, 0), a_line = x.line, a_step = x.step;
    if (!is_packed(of_b, LANES, t, j)) b = (const word *)floats(y, j * LANES, 0), b_step = y.step;
    if (of_a.how == PAIRS)
      pairs_by_lines(a, a_step, b, b_step, steps, is_first, sums);
    else if (a_line == 1)
      tile_by_lines(a, a_step, b, b_step, steps, is_first, sums);
    else
      tile_by_steps(a, a_line, b, b_step, steps, is_first, sums);
    a_packed += steps * ROWS, b_packed += steps * LANES, is_first &= steps == 0;
  }
}

static inline int64_t panels_of_all(int64_t columns, int64_t steps) {
  return least(parts(columns, LANES), most(1, SHARED / LANES / most(1, steps)));
}
static inline int64_t panels_of_one(int64_t rows, int64_t steps) {
  return least(parts(rows, ROWS), most(1, OWN / ROWS / most(1, steps)));
}

/* Numbers of a vector. */
int product_vector(void) { return VECTOR; }

/* Words of scratch memory at most, for a sum of terms of `depth` in all. */
int64_t product_scratch(int64_t rows, int64_t columns, int64_t depth, int threads) {
  const int64_t all = least(parts(columns, LANES) * depth, SHARED / LANES + depth);
  const int64_t one = least(parts(rows, ROWS) * depth, OWN / ROWS + depth);
  return all * LANES + threads * one * ROWS;
}

/* What is asked for, and scratch memory for it. */
typedef struct {
  results out;
  int64_t rows, columns, is_narrow, threads;
  word *scratch;
  int64_t count;
  term terms[];
} job;

/* out [rows, columns] (+)= the sum of the terms; if narrow, the operands have their values in bfloat16. */
void product(const job *asked) {
  const term *const terms = asked->terms;
  const results out = asked->out;
  const int64_t rows = asked->rows, columns = asked->columns;
  const int count = (int)asked->count, is_narrow = (int)asked->is_narrow;
  word *const scratch = asked->scratch;
  int threads = (int)asked->threads;
  const int how = is_narrow ? NARROW : AS_THEY_ARE;
  int64_t steps = 0;
  for (int t = 0; t < count; t++) steps += steps_of(terms[t].depth, how);
  if ((double)rows * columns * steps < GRAIN) threads = 1;
  const int64_t a_panels = parts(rows, ROWS), b_panels = parts(columns, LANES);
  const int64_t at_once = panels_of_all(columns, steps), own = panels_of_one(rows, steps);
  /* Rows are cut into as many chunks for each thread, but columns where panels of rows are few, which would be uneven. */
  const int64_t at_least = parts(a_panels, own);
  const int64_t chunks = a_panels <= FEW_PANELS ? at_least : least(a_panels, parts(at_least, threads) * threads);
  word *const columns_packed = scratch, *const rows_packed = scratch + at_once * LANES * steps;
  TOGETHER {
    /* The thread's own: the compiler has to see that packing leaves them as they are. */
    const side of_a = {terms, count, 0, how, rows, columns, steps}, of_b = {terms, count, 1, how, columns, rows, steps};
    word *const mine = rows_packed + THREAD * own * ROWS * steps;
    float sums[ROWS * LANES] __attribute__((aligned(64))) = {0};
    for (int64_t first = 0; first < b_panels; first += at_once) {
      const int64_t here = least(at_once, b_panels - first);
      const int64_t cuts = least(here, a_panels <= FEW_PANELS ? threads : parts(threads, chunks));
      const int64_t mine_from = THREAD * here / THREADS, mine_to = (THREAD + 1) * here / THREADS;
      pack_terms(columns_packed + mine_from * LANES * steps, LANES, of_b, first + mine_from, first + mine_to);
      AWAIT
      SHARE for (int64_t task = 0; task < chunks * cuts; task++) {
        const int64_t chunk = task % chunks, cut = task / chunks;
        const int64_t from = chunk * a_panels / chunks, to = (chunk + 1) * a_panels / chunks;
        pack_terms(mine, ROWS, of_a, from, to);
        for (int64_t j = cut * here / cuts; j < (cut + 1) * here / cuts; j++)
          for (int64_t i = from; i < to; i++) {
            const word *a_packed = mine + (i - from) * ROWS * steps, *b_packed = columns_packed + j * LANES * steps;
            sum_up(of_a, of_b, i, first + j, a_packed, b_packed, sums);
            const int64_t column = (first + j) * LANES, high = least(ROWS, rows - i * ROWS);
            /* As many columns as the compiler knows. */
            if (columns - column >= LANES)
              put(out, i * ROWS, column, sums, high, LANES);
            else
              put(out, i * ROWS, column, sums, high, columns - column);
          }
      }
    }
  }
}
