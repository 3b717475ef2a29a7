/* SPDX-License-Identifier: Apache-2.0 */
/* ggml_search.h -- the searches for good scales behind GGUF's blocks; private to lib/numeric.
 *
 * 16 groups of numbers are searched side by side, one in each lane of a vector (GCC's, lowered to
 * the instructions of the processor), so that the sums of a group keep their order for any width:
 * the bytes are the same on every processor.  Masks of all ones select the lanes that change. */
#ifndef LM_NUMERIC_GGML_SEARCH_H
#define LM_NUMERIC_GGML_SEARCH_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

enum { LANES = 16, MOST_GROUP = 32 };
typedef float lane __attribute__((vector_size(64)));
typedef int32_t mask __attribute__((vector_size(64)));
typedef uint32_t bits __attribute__((vector_size(64)));

/* One build for each vector width, chosen when the program starts.  One build only where that
 * fails: clang (for the fuzzers) would define the resolver again in each file that calls it, and
 * ThreadSanitizer is called in the resolver before it has started. */
#if defined __clang__ || defined __SANITIZE_THREAD__
#define WIDE
#else
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#define ALWAYS        static inline __attribute__((always_inline))
#define PICK(m, a, b) ((lane)(((m) & (mask)(a)) | (~(m) & (mask)(b))))
#define LOWER(a, b)   PICK((a) < (b), a, b)
#define HIGHER(a, b)  PICK((a) > (b), a, b)
#define MAGNITUDE(a)  ((lane)((mask)(a)&0x7fffffff))
#define TO_NEAREST    12582912.0f /* 1.5 * 2^23: adding it rounds |f| < 2^22 to even */
#define CODES(f, lo, hi) \
    HIGHER(LOWER(((f) + TO_NEAREST) - TO_NEAREST, (lane){ 0 } + (hi)), (lane){ 0 } + (lo))

/* a > b for numbers that are finite and not both zero; b may be ZERO.  By the sign of the
 * difference, because gcc 12 splits a comparison into lanes where its result is used for more than
 * a selection. */
#define ZERO        ((lane){ 0 })
#define SIGN_OF(v)  (-(mask)((bits)(v) >> 31)) /* all ones where the sign is set */
#define ABOVE(a, b) SIGN_OF((b) - (a))

#define LM_GGML_TINY 1e-15f /* groups whose magnitudes stay below are zero */

/* Rounded to even and limited to [lo, hi]; NaN gives lo. */
static inline int lm_nearest_code(float f, int lo, int hi)
{
    return f > (float)lo ? (f < (float)hi ? (int)rintf(f) : hi) : lo;
}

/* The groups of `n` numbers at v as lanes: number i of group l is x[i][l].  Lanes past the last of
 * `groups` groups repeat it. */
void lm_to_lanes(const float *v, int groups, int n, lane *x);

/* ---- Scale and offset: x = scale * q - offset, offset >= 0, q in 0..top ---- */

/* Steps after the plain one (top / span): (top + from + step k) / span for k = 0..steps. */
typedef struct {
    int group, top; /* group: 16 or 32 numbers */
    float from, step;
    int steps;
    bool absolute; /* errors count by their size, not by their square */
} lm_affine_plan;

typedef struct {
    lane scale, offset;
    lane q[MOST_GROUP]; /* whole numbers */
} lm_affine;

/* For each step the codes are fixed by rounding, the best scale and offset for those codes follow
 * from least squares weighted by w, and the smallest weighted error wins.  x, w: [group]. */
void lm_affine_search(const lane *x, const lane *w, const lm_affine_plan *p, lm_affine *out);

/* ---- Scale alone: x = scale * q, q in -top..top - 1 ---- */

/* The same with 19 steps near the one that puts the largest magnitude on -top.  x, w, out: [n], n 16
 * or 32; a group of zeros gets the codes -top and the scale 0. */
void lm_signed_search(const lane *x, const lane *w, int n, int top, lane *scale, lane *out);
/* For 16 numbers: one step, then codes moved one by one while the error, weighted by x^2, shrinks. */
void lm_signed_descent(const lane *x, int top, lane *scale, lane *out);

/* ---- Scales themselves: n numbers x >= 0 as scale * q, q in 0..top ---- */

/* Gives the scale.  At most 16 numbers. */
float lm_positive_search(const float *x, const float *w, int n, int top, uint8_t *q);

#endif
