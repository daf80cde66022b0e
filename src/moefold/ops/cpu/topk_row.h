/* Exact top-k of one row by guess, verify and refine. Included once for each type of scores, with these macros:

   NAME(x)     name of a function or type of this instance
   BITS        integer of a score in memory
   KEY, UKEY   signed and unsigned integer of a score as it is compared
   KEY_BITS    bits of KEY
   TO_KEY_BITS shift that brings the bits of a score to the highest bits of KEY
   INFINITY_KEY  key of +infinity; keys beyond it and its negative are NaN
   APPEND_BLOCK  optional: function that stores the keys and positions of a block that reach a threshold, and returns
                 their number; it may write BLOCK elements

   A key has the order of its score: the bits of positive floats are ascending, the bits of negative floats, without
   the sign, descending. -0.0 and 0.0 have the same key. Integers, because -ffinite-math-only removes tests for NaN. */

static inline KEY NAME(key_of)(BITS bits) {
  const KEY value = (KEY)((UKEY)bits << TO_KEY_BITS);
  const KEY lowest = (KEY)((UKEY)1 << (KEY_BITS - 1));
  return value < 0 ? (KEY)((UKEY)lowest - (UKEY)value) : value;
}

/* Positions whose keys are at least a threshold, in ascending order. */
typedef struct {
  KEY *keys;
  int32_t *positions;
  KEY *scratch;
  int64_t count;
} NAME(Survivors);

/* Return the k-th largest of 1 <= k <= count keys, and in ties how many of the k largest are equal to it. The range of
   the keys is divided into bins, and the search goes on in the bin of the k-th key. Overwrites scratch [count]. */
static KEY NAME(kth_largest)(const KEY *keys, int64_t count, int64_t k, KEY *scratch, int64_t *ties) {
  int32_t counts[NUM_BINS];
  for (;;) {
    KEY low = keys[0], high = keys[0];
    for (int64_t i = 0; i < count; i++) {
      low = keys[i] < low ? keys[i] : low;
      high = keys[i] > high ? keys[i] : high;
    }
    if (low == high) {
      *ties = k;
      return low;
    }
    int shift = 0;
    while (((UKEY)high - (UKEY)low) >> shift >= NUM_BINS) shift++;
    const int64_t num_bins = (int64_t)(((UKEY)high - (UKEY)low) >> shift) + 1;
    for (int64_t bin = 0; bin < num_bins; bin++) counts[bin] = 0;
    for (int64_t i = 0; i < count; i++) counts[((UKEY)keys[i] - (UKEY)low) >> shift]++;
    int64_t bin = num_bins - 1;
    while (counts[bin] < k) k -= counts[bin--];
    const UKEY first = (UKEY)low + ((UKEY)bin << shift);
    if (shift == 0) {
      *ties = k;
      return (KEY)first;
    }
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++) {
      const KEY key = keys[i];
      scratch[kept] = key;
      kept += ((UKEY)key - (UKEY)low) >> shift == (UKEY)bin;
    }
    keys = scratch;
    count = kept;
  }
}

/* Keep the k largest survivors, of equal survivors the first; returns the key of the last. Needs count >= k. */
static KEY NAME(shrink)(NAME(Survivors) *s, int64_t k) {
  int64_t ties;
  const KEY kth = NAME(kth_largest)(s->keys, s->count, k, s->scratch, &ties);
  int64_t kept = 0;
  for (int64_t i = 0; i < s->count; i++) {
    const KEY key = s->keys[i];
    const int64_t is_tie = (key == kth) & (ties > 0);
    s->keys[kept] = key;
    s->positions[kept] = s->positions[i];
    kept += (key > kth) | is_tie;
    ties -= is_tie;
  }
  s->count = kept;
  return kth;
}

/* Append each of BLOCK keys, at positions first, first + 1, ..., that is at least the threshold. */
static inline void NAME(append)(NAME(Survivors) *s, const KEY *keys, int32_t first, KEY threshold) {
#ifdef APPEND_BLOCK
  s->count += APPEND_BLOCK(keys, first, threshold, s->keys + s->count, s->positions + s->count);
#else
  int64_t count = s->count;
  for (int32_t i = 0; i < BLOCK; i++) {
    s->keys[count] = keys[i];
    s->positions[count] = first + i;
    count += keys[i] >= threshold;
  }
  s->count = count;
#endif
}

/* Collect the k best of scores [start, stop), or all that reach the threshold if these are fewer; returns whether there
   is a NaN. Whenever the survivors fill their room, the k best of them stay, and only larger keys may follow. */
static int NAME(collect)(NAME(Survivors) *s, const BITS *scores, int64_t start, int64_t stop, int64_t k, KEY threshold,
                         int64_t room) {
  KEY found_nan = 0;
  s->count = 0;
  for (int64_t first = start; first < stop; first += BLOCK) {
    const int64_t count = stop - first < BLOCK ? stop - first : BLOCK;
    KEY keys[BLOCK];
    KEY found = 0;
    for (int64_t i = 0; i < count; i++) {
      const KEY key = NAME(key_of)(scores[first + i]);
      keys[i] = key;
      found |= (KEY) - (key >= threshold);
      found_nan |= (KEY) - ((key > INFINITY_KEY) | (key < -INFINITY_KEY));
    }
    if (!found) continue;
    /* Lower than every threshold. */
    for (int64_t i = count; i < BLOCK; i++) keys[i] = -INFINITY_KEY - 1;
    if (s->count + BLOCK > room) threshold = NAME(shrink)(s, k) + 1;
    NAME(append)(s, keys, (int32_t)first, threshold);
  }
  return found_nan != 0;
}

/* Return a threshold that at least k scores probably reach: the k-th largest score of the guessed positions. Positions
   outside of [start, stop) are ignored; with less than k / 2 others the threshold is the lowest key. */
static KEY NAME(guess_threshold)(const BITS *scores, int64_t start, int64_t stop, int64_t k, const int32_t *guess,
                                 int64_t num_guesses, KEY *keys, int64_t room) {
  int64_t count = 0;
  for (int64_t i = 0; i < num_guesses && count < room; i++)
    if (guess[i] >= start && guess[i] < stop) keys[count++] = NAME(key_of)(scores[guess[i]]);
  int64_t ties;
  if (count < k / 2 || count == 0) return -INFINITY_KEY;
  return NAME(kth_largest)(keys, count, count < k ? count : k, keys, &ties);
}

/* Write the positions [k] of one row in ascending order, -1 after the last; returns whether there is a NaN. */
static int NAME(topk_row)(const BITS *scores, int64_t start, int64_t stop, int64_t k, const int32_t *guess,
                          int64_t num_guesses, int32_t *out, char *workspace, int64_t room) {
  KEY *keys = (KEY *)workspace;
  NAME(Survivors) s = {keys, (int32_t *)(keys + 2 * room), keys + room, 0};
  KEY threshold = -INFINITY_KEY;
  if (num_guesses && stop - start > room)
    threshold = NAME(guess_threshold)(scores, start, stop, k, guess, num_guesses, s.scratch, room);
  const int has_nan = NAME(collect)(&s, scores, start, stop, k, threshold, room);
  const int64_t chosen = stop - start < k ? stop - start : k;
  if (!has_nan && s.count < chosen) NAME(collect)(&s, scores, start, stop, k, -INFINITY_KEY, room);
  if (!has_nan && s.count > chosen) NAME(shrink)(&s, chosen);
  for (int64_t i = 0; i < k; i++) out[i] = i < chosen && !has_nan ? s.positions[i] : -1;
  return has_nan;
}

#undef NAME
#undef BITS
#undef KEY
#undef UKEY
#undef KEY_BITS
#undef TO_KEY_BITS
#undef INFINITY_KEY
#undef APPEND_BLOCK
