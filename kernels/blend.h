/* SPDX-License-Identifier: Apache-2.0 */
/* blend.h -- the loops of merging: arrays of any float type, a block at a time.
 *
 * A caller takes a tensor in blocks of at most LM_BLEND_BLOCK elements, converts each model's block
 * to an array of "reals" (float, or double in the wide table), combines the arrays and stores the
 * result with one rounding.  Blocks stay in the first caches, so memory is passed once.
 *
 * The loops have one source (kernels/cpu/blend_body.h), compiled for each level; vector code
 * replaces it only where it gives the same bits.  Each product and each sum is rounded (no fused
 * multiply-add) and sums over a block run in 16 lanes of double, so every level gives the bits of
 * plain C.
 *
 * `src` and `dst` are whole arrays of type t at any address, `at` the first element; n <=
 * LM_BLEND_BLOCK where an array of reals is given.  Integer types are not served.  Threads: pure
 * functions. */
#ifndef LM_KERNELS_BLEND_H
#define LM_KERNELS_BLEND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/cpu.h"
#include "base/rng.h"
#include "numeric/dtype.h"

enum { LM_BLEND_BLOCK = 1024, LM_BLEND_MOST = 256 /* number of models */ };

/* The bits of |x| and the index of x.  As unsigned numbers they order magnitudes, NaN above all. */
typedef struct {
    uint64_t bits;
    int64_t index;
} lm_blend_entry;

/* How the sign of an element is elected, see lm_blend.agree. */
typedef enum { LM_BLEND_BY_WEIGHT, LM_BLEND_BY_SUM, LM_BLEND_BY_COUNT } lm_blend_vote;

typedef struct {
    int k;           /* number of models, at most LM_BLEND_MOST */
    const double *w; /* [k] */
    lm_blend_vote vote;
    bool normalize; /* divide by the sum of the weights that counted */
    double floor;   /* smallest divisor; 0: a divisor of 0 counts as 1 */
    double lambda;
} lm_blend_terms;

typedef struct {
    lm_cpu_level level;
    size_t real; /* bytes of a real */

    void (*load)(lm_dtype t, const void *src, int64_t at, void *x, int64_t n);
    void (*store)(lm_dtype t, void *dst, int64_t at, const void *x, int64_t n);
    /* acc = w src, or acc += w src */
    void (*start)(lm_dtype t, const void *src, int64_t at, double w, void *acc, int64_t n);
    void (*add)(lm_dtype t, const void *src, int64_t at, double w, void *acc, int64_t n);
    /* d = src - base; acc += w (src - base) */
    void (*delta)(lm_dtype t, const void *src, int64_t at, const void *base, void *d, int64_t n);
    void (*add_delta)(lm_dtype t, const void *src, int64_t at, const void *base, double w,
                      void *acc, int64_t n);
    void (*fill)(void *x, double v, int64_t n);
    void (*scale)(void *x, double by, int64_t n);                /* x *= by */
    void (*axpy)(const void *x, double w, void *acc, int64_t n); /* acc += w x */
    void (*mul)(const void *x, void *y, int64_t n);              /* y *= x */
    void (*div)(const void *x, void *y, int64_t n);              /* y /= x */
    void (*at_least)(void *x, double least, int64_t n);          /* x = max(x, least) */

    /* Sums in double over fixed lanes. */
    double (*dot)(const void *a, const void *b, int64_t n);
    double (*sum_abs)(const void *a, int64_t n);

    /* Pruning: elements not kept become 0 (NaN too), kept elements are multiplied by `scale`. */
    void (*keep_bits)(void *d, uint64_t lo, uint64_t hi, double scale,
                      int64_t n); /* lo <= b < hi */
    void (*keep_drawn)(void *d, const uint32_t *draw, uint64_t below, double scale, int64_t n);
    /* Keep elements with m > 0, times m. */
    void (*keep_each)(void *d, const void *m, int64_t n);
    /* Draws at .. at + n - 1 of a stream: lm_rng_u32 in bulk. */
    void (*draws)(lm_rng r, int64_t at, uint32_t *out, int64_t n);

    /* y = m == 0 ? x : y */
    void (*choose)(const void *m, const void *x, void *y, int64_t n);

    /* Selection on the bits of |x|. */
    void (*bits)(const void *x, uint64_t *out, int64_t n);
    /* Append those in [lo, hi) to list (room for n) and return how many; *above += the number >=
     * hi. */
    int64_t (*pick)(const void *x, uint64_t lo, uint64_t hi, int64_t at, int64_t n, int64_t *above,
                    lm_blend_entry *list);
    /* count[(b - lo) >> shift]++ for each b in [lo, hi). */
    void (*histogram)(const void *x, uint64_t lo, uint64_t hi, int shift, uint32_t *count,
                      int64_t n);

    /* out = base + lambda Delta, with d the k deltas (rows of `stride` reals).  The sign of an
     * element is + where the vote is >= 0 (sum of w d, of d, or of the signs of w d); a model's
     * w d counts where it has that sign, zeros never, NaN always. */
    void (*agree)(const lm_blend_terms *t, const void *d, int64_t stride, const void *base,
                  void *out, int64_t n);
    /* out = population variance over the k rows of d */
    void (*variance)(int k, const void *d, int64_t stride, void *out, int64_t n);
    /* out = s x + (1 - s) base, s = clamp(t / max(|base - x|, 1e-6), 0, 1) */
    void (*near)(double t, const void *base, const void *x, void *out, int64_t n);
} lm_blend;

/* The loops of the highest level <= max; wide: reals are double. */
const lm_blend *lm_blend_at(lm_cpu_level max, bool wide);

extern const lm_blend lm_blend_ref[2], lm_blend_avx2[2], lm_blend_avx512[2];

#endif
