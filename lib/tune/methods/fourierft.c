/* SPDX-License-Identifier: Apache-2.0 */
/* fourierft.c -- some coefficients of the change's spectrum train: W' = W + scaling Re ifft2(S), S
 * zero but for n_frequency places that torch draws from random_loc_seed, so with c_k at (u_k, v_k):
 * W'[o,i] = W[o,i] + scaling / (out in) sum over k of c_k cos(2 pi (u_k o / out + v_k i / in)).
 * Sources: arXiv:2405.03003; huggingface/peft tuners/fourierft. */
#include <math.h>
#include <stdio.h>

#include "base/mem.h"
#include "tune/methods.h"
#include "tune/torch_rng.h"

static const lm_hyper hyper[] = {
    { "n_frequency", 1000, 1, 1e9, "coefficients", LM_WHOLE },
    { "scaling", 150, -1e12, 1e12, "scale", NULL },
    { "random_loc_seed", 777, 0, 9e15, "seed of their places", LM_WHOLE },
    { 0 },
};
enum { COUNT, SCALE, SEED };

int64_t lm_tune_spectrum_count(const lm_tune_module *m)
{
    double n = m->hyper[COUNT];

    lm_tune_pattern_value(m, "n_frequency_pattern", &n);
    return (int64_t)n;
}

lm_code lm_tune_spectrum(const lm_tune_module *m, const char *suffix, lm_tune_init init,
                         double scale, lm_tune_tensor *out, int *n, lm_err *e)
{
    int64_t count = lm_tune_spectrum_count(m);

    *n = 0;
    if (count < 1 || count > m->in * m->out)
        return lm_fail(e, LM_EUSAGE, m->name, "use a smaller n_frequency",
                       "it has no %lld coefficients", (long long)count);
    lm_tune_tensor_add(out, n, suffix, count, 0, init, scale);
    return LM_OK;
}

static lm_code tensors(const lm_tune_module *m, lm_tune_tensor *out, int *n, lm_err *e)
{
    return lm_tune_spectrum(m, "fourierft_spectrum", LM_TUNE_NORMAL, 1, out, n, e);
}

/* cos or sin of 2 pi u_k o / size, as [size,n]. */
static lm_vid waves(lm_rule *r, const int64_t *u, int64_t n, int64_t size, bool sine)
{
    double *t = NULL;

    if (!lm_r_ok(r) || lm_arena_alloc(r->arena, &t, (size_t)(size * n), sizeof *t, r->e))
        return LM_NONE;
    for (int64_t o = 0; o < size; o++)
        for (int64_t k = 0; k < n; k++) {
            double angle = 2 * acos(-1) * (double)(u[k] * o % size) / (double)size;

            t[o * n + k] = sine ? sin(angle) : cos(angle);
        }
    return lm_r_const(r, LM_DIMS(size, n), t);
}

enum { OUT_WAVES, IN_WAVES, TABLES = 4 }; /* cosines of both, then sines */

static void key_of(const lm_tune_module *m, int table, char *key, size_t size)
{
    snprintf(key, size, "waves %.0f %lld %lld %lld %d", m->hyper[SEED], (long long)m->out,
             (long long)m->in, (long long)lm_tune_spectrum_count(m), table);
}

/* The tables of a module, which others of its shape have too. */
static void make_tables(lm_rule *r, const lm_tune_module *m, lm_vid table[TABLES])
{
    int64_t n = lm_tune_spectrum_count(m), *u = NULL, *v = NULL;
    char key[96];
    lm_code rc = lm_alloc_n(&u, (size_t)n, sizeof *u, "places", r->e);

    rc = rc ? rc : lm_alloc_n(&v, (size_t)n, sizeof *v, "places", r->e);
    rc = rc ? rc : lm_torch_choose((uint64_t)m->hyper[SEED], m->in * m->out, n, u, r->e);
    for (int64_t k = 0; !rc && k < n; k++) {
        v[k] = u[k] % m->in;
        u[k] /= m->in;
    }
    for (int i = 0; !rc && i < TABLES; i++) {
        bool of_out = i % 2 == OUT_WAVES;

        key_of(m, i, key, sizeof key);
        table[i] = lm_r_keep(r, key,
                             waves(r, of_out ? u : v, n, of_out ? m->out : m->in, i >= TABLES / 2));
    }
    lm_free(u);
    lm_free(v);
}

static lm_vid weight(lm_rule *r, const lm_tune_module *m, lm_vid w, const lm_vid *p)
{
    int64_t n = lm_tune_spectrum_count(m);
    lm_vid table[TABLES];
    char key[96];

    if (!lm_r_ok(r))
        return LM_NONE;
    for (int i = 0; i < TABLES; i++) {
        key_of(m, i, key, sizeof key);
        table[i] = lm_r_kept(r, key);
    }
    if (table[TABLES - 1] < 0)
        make_tables(r, m, table);
    /* cos(a + b) = cos a cos b - sin a sin b */
    for (int sine = 0; sine < 2; sine++) {
        lm_vid left = LM_R_MAP(r, "y = t * c", LM_IS("t", table[2 * sine + OUT_WAVES]),
                               LM_IS("c", lm_r_shape2(r, p[0], 1, n)));

        w = lm_r_add(r, w, (sine ? -1 : 1) * m->hyper[SCALE] / ((double)m->out * (double)m->in),
                     lm_r_matmul(r, left, false, table[2 * sine + IN_WAVES], true));
    }
    return w;
}

const lm_tune_method lm_tune_fourierft = {
    .peft_type = "FOURIERFT",
    .name = "fourierft",
    .about = "some coefficients of the change's spectrum",
    .prefix = "fourierft_",
    .is = LM_TUNE_LINEAR | LM_TUNE_SEEDED,
    .hyper = hyper,
    .extra = "{\"n_frequency_pattern\": {}, \"fan_in_fan_out\": false}",
    .tensors = tensors,
    .weight = weight,
};
