/* SPDX-License-Identifier: Apache-2.0 */
/* waveft.c -- some wavelet coefficients of the change train: W' = W + scaling T, T the inverse of
 * one level of the Haar transform (db1) of a matrix that is zero but for n_frequency places, which
 * torch draws from random_loc_seed.
 *
 * The matrix has sides rounded up to even numbers, and W' takes its middle.  Its quarters a, h, v,
 * d give T[2i + x, 2j + z] = (a + (-1)^x h + (-1)^z v + (-1)^(x+z) d)[i,j] / 2.  use_idwt false:
 * the matrix itself. Sources: arXiv:2505.12532; huggingface/peft tuners/waveft. */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "tune/methods.h"
#include "tune/torch_rng.h"

static const lm_hyper hyper[] = {
    { "n_frequency", 2592, 1, 1e9, "coefficients", LM_WHOLE },
    { "scaling", 25, -1e12, 1e12, "scale", NULL },
    { "random_loc_seed", 777, 0, 9e15, "seed of their places", LM_WHOLE },
    { "use_idwt", 1, 0, 1, "the inverse transform applies", "false true" },
    { "wavelet_family", 0, 0, 0, "wavelet", "db1" },
    { 0 },
};
enum { COUNT, SCALE, SEED, INVERSE };

static const char *const refused[] = { "proportional_parameters", NULL };

static lm_code tensors(const lm_tune_module *m, lm_tune_tensor *out, int *n, lm_err *e)
{
    return lm_tune_spectrum(m, "waveft_spectrum", LM_TUNE_ZEROS, 0, out, n, e);
}

/* Where the padded matrix begins: half of what is added to an odd side, which is none. */
typedef struct {
    int64_t rows, cols;
} sides;

/* Places of quarter (right, low) spread to [out,in]: element (o,i) is the quarter's at (o/2, i/2). */
static lm_vid spread(lm_rule *r, const lm_tune_module *m, const int32_t *at, sides s, int low,
                     int right)
{
    int32_t *ids = NULL;
    int64_t rows = s.rows / 2, cols = s.cols / 2;

    if (!lm_r_ok(r) || lm_arena_alloc(r->arena, &ids, (size_t)(m->out * m->in), sizeof *ids, r->e))
        return LM_NONE;
    for (int64_t o = 0; o < m->out; o++)
        for (int64_t i = 0; i < m->in; i++)
            ids[o * m->in + i] = at[(low * rows + o / 2) * s.cols + right * cols + i / 2];
    return lm_r_ids(r, ids, LM_DIMS(m->out, m->in));
}

/* Places of the matrix itself. */
static lm_vid spread_plain(lm_rule *r, const lm_tune_module *m, const int32_t *at)
{
    size_t n = (size_t)(m->out * m->in);
    int32_t *ids = NULL;

    if (!lm_r_ok(r) || lm_arena_alloc(r->arena, &ids, n, sizeof *ids, r->e))
        return LM_NONE;
    memcpy(ids, at, n * sizeof *ids);
    return lm_r_ids(r, ids, LM_DIMS(m->out, m->in));
}

/* 1, -1, 1 ... */
static lm_vid signs(lm_rule *r, int64_t rows, int64_t cols)
{
    double *t = NULL;

    if (!lm_r_ok(r) || lm_arena_alloc(r->arena, &t, (size_t)(rows * cols), sizeof *t, r->e))
        return LM_NONE;
    for (int64_t i = 0; i < rows * cols; i++)
        t[i] = i % 2 ? -1 : 1;
    return lm_r_const(r, LM_DIMS(rows, cols), t);
}

/* The number of the coefficient at each place of the padded matrix; -1: none. */
static lm_code find_places(const lm_tune_module *m, sides s, int32_t *at, lm_err *e)
{
    int64_t n = lm_tune_spectrum_count(m), *u = NULL;
    lm_code rc = lm_alloc_n(&u, (size_t)n, sizeof *u, "places", e);

    rc = rc ? rc : lm_torch_choose((uint64_t)m->hyper[SEED], m->in * m->out, n, u, e);
    for (int64_t i = 0; !rc && i < s.rows * s.cols; i++)
        at[i] = -1;
    for (int64_t k = 0; !rc && k < n; k++)
        at[u[k] / m->in * s.cols + u[k] % m->in] = (int32_t)k;
    lm_free(u);
    return rc;
}

enum { QUARTERS = 4 };

/* Indices into the coefficients, which other modules of the shape have too: of each quarter, or
 * the first alone, of the plain matrix. */
static void find_ids(lm_rule *r, const lm_tune_module *m, bool plain, lm_vid ids[QUARTERS])
{
    sides s = { plain ? m->out : (m->out + 1) / 2 * 2, plain ? m->in : (m->in + 1) / 2 * 2 };
    int32_t *at = NULL;
    char key[96];

    for (int i = 0; i < (plain ? 1 : QUARTERS); i++) {
        snprintf(key, sizeof key, "places %.0f %lld %lld %lld %d", m->hyper[SEED],
                 (long long)m->out, (long long)m->in, (long long)lm_tune_spectrum_count(m),
                 plain ? -1 : i);
        ids[i] = lm_r_kept(r, key);
        if (ids[i] >= 0)
            continue;
        if (!at && (lm_alloc_n(&at, (size_t)(s.rows * s.cols), sizeof *at, "places", r->e) ||
                    find_places(m, s, at, r->e)))
            break;
        ids[i] =
            lm_r_keep(r, key, plain ? spread_plain(r, m, at) : spread(r, m, at, s, i / 2, i % 2));
    }
    lm_free(at);
}

static lm_vid weight(lm_rule *r, const lm_tune_module *m, lm_vid w, const lm_vid *p)
{
    bool plain = m->hyper[INVERSE] <= 0;
    lm_vid ids[QUARTERS] = { LM_NONE, LM_NONE, LM_NONE, LM_NONE };

    if (!lm_r_ok(r))
        return LM_NONE;
    find_ids(r, m, plain, ids);
    if (plain)
        return lm_r_add(r, w, m->hyper[SCALE], lm_r_gather_by(r, p[0], ids[0]));
    return LM_R_MAP(r, "y = w + 0.5 * k * (a + x * h + u * (v + x * d))", LM_IS("w", w),
                    LM_CONSTANT("k", m->hyper[SCALE]), LM_IS("a", lm_r_gather_by(r, p[0], ids[0])),
                    LM_IS("h", lm_r_gather_by(r, p[0], ids[1])),
                    LM_IS("v", lm_r_gather_by(r, p[0], ids[2])),
                    LM_IS("d", lm_r_gather_by(r, p[0], ids[3])), LM_IS("x", signs(r, m->out, 1)),
                    LM_IS("u", signs(r, 1, m->in)));
}

const lm_tune_method lm_tune_waveft = {
    .peft_type = "WAVEFT",
    .name = "waveft",
    .about = "some wavelet coefficients of the change",
    .prefix = "waveft_",
    .is = LM_TUNE_LINEAR | LM_TUNE_SEEDED,
    .hyper = hyper,
    .refused = refused,
    .extra = "{\"n_frequency_pattern\": {}, \"fan_in_fan_out\": false}",
    .tensors = tensors,
    .weight = weight,
};
