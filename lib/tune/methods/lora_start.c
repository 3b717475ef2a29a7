/* SPDX-License-Identifier: Apache-2.0 */
/* lora_start.c -- how A and B of LoRA begin, by init_lora_weights, other than A uniform and B zero:
 *
 * gaussian    A ~ N(0, 1/r^2), B = 0
 * orthogonal  A and B whose product is 0, of orthonormal halves (r even)
 * pissa       the largest r singular values of W: A = sqrt(S/s) V^T, B = U sqrt(S/s);
 *             pissa_niter_N is the same, exactly
 * olora       W = Q R: B = the first r columns of Q, A = the first r rows of R
 * loftq       B A from the singular values of what quantising W to NF4 (loftq_bits 8: to q8_0) loses, and W that
 *             quantised; loftq_iter times, each time of W - s B A.  PEFT leaves s out; here W' is nearest to W with
 *             s in it
 *
 * pissa and olora then take s B A out of W, so that W' is the base's W.
 * Sources: arXiv:2404.02948, 2406.01775, 2310.08659; huggingface/peft tuners/lora/layer.py. */
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "numeric/format.h"
#include "tune/methods.h"

/* w -= s B A */
static void take_out(const lm_tune_module *m, int64_t r, double s, const double *a, const double *b,
                     double *w)
{
    for (int64_t i = 0; i < m->out; i++)
        for (int64_t k = 0; k < r; k++)
            for (int64_t j = 0; j < m->in; j++)
                w[i * m->in + j] -= s * b[i * r + k] * a[k * m->in + j];
}

static lm_code start_pissa(const lm_tune_module *m, int64_t r, double s, double *w, double *a,
                           double *b, lm_err *e)
{
    double root = sqrt(fabs(s));
    lm_code rc = lm_tune_largest(w, m->out, m->in, r, 0.5, b, a, e);

    for (int64_t i = 0; !rc && root > 0 && i < r * m->in; i++)
        a[i] /= root;
    for (int64_t i = 0; !rc && root > 0 && i < r * m->out; i++)
        b[i] /= root;
    return rc;
}

/* Columns of W made orthonormal one after the other by reflections, with the signs of LAPACK: R's
 * diagonal has the sign opposite to the column's first number. */
static lm_code start_olora(const lm_tune_module *m, int64_t r, const double *w, double *a,
                           double *b, lm_err *e)
{
    double *x = NULL;
    lm_code rc = lm_alloc_n(&x, (size_t)(m->out * m->in), sizeof *x, "a start", e);

    if (rc)
        return rc;
    memcpy(x, w, (size_t)(m->out * m->in) * sizeof *x);
    for (int64_t k = 0; k < r && k < m->out && k < m->in; k++) {
        double norm = 0, beta, first = x[k * m->in + k];

        for (int64_t i = k; i < m->out; i++)
            norm += x[i * m->in + k] * x[i * m->in + k];
        beta = first > 0 ? -sqrt(norm) : sqrt(norm);
        norm -= first * beta; /* |v|^2 / 2 of v = x - beta e */
        x[k * m->in + k] = first - beta;
        for (int64_t j = k + 1; norm > 0 && j < m->in; j++) {
            double dot = 0;

            for (int64_t i = k; i < m->out; i++)
                dot += x[i * m->in + k] * x[i * m->in + j];
            for (int64_t i = k; i < m->out; i++)
                x[i * m->in + j] -= dot / norm * x[i * m->in + k];
        }
        a[k * m->in + k] = beta;
        for (int64_t j = 0; j < m->in; j++)
            a[k * m->in + j] = j < k ? 0 : j == k ? beta : x[k * m->in + j];
    }
    /* B = the first columns of the identity, through the reflections from the last to the first */
    memset(b, 0, (size_t)(m->out * r) * sizeof *b);
    for (int64_t k = 0; k < r && k < m->out; k++)
        b[k * r + k] = 1;
    for (int64_t k = (r < m->in ? r : m->in) - 1; k >= 0; k--) {
        double norm = 0;

        for (int64_t i = k; i < m->out; i++)
            norm += x[i * m->in + k] * x[i * m->in + k] / 2;
        for (int64_t c = 0; norm > 0 && c < r; c++) {
            double dot = 0;

            for (int64_t i = k; i < m->out; i++)
                dot += x[i * m->in + k] * b[i * r + c];
            for (int64_t i = k; i < m->out; i++)
                b[i * r + c] -= dot / norm * x[i * m->in + k];
        }
    }
    lm_free(x);
    return LM_OK;
}

enum { PIECE = 1 << 18 }; /* numbers that are quantised at a time, at most, or one row */

/* w through the format, whose blocks lie in rows, and back. */
static lm_code quantise(const lm_format *f, int64_t rows, int64_t cols, double *w, lm_err *e)
{
    const int64_t some = cols < PIECE ? PIECE / cols : 1, dim[] = { some, cols };
    lm_tensor_size size;
    void *plane[LM_MAX_PLANES] = { NULL };
    char *room = NULL;
    float *x = NULL;
    size_t at = 0;
    lm_code rc = lm_tensor_bytes(f, 2, dim, &size, e);

    rc = rc ? rc : lm_alloc_n(&x, (size_t)(some * cols), sizeof *x, "a start", e);
    rc = rc ? rc : lm_alloc_n(&room, size.all + 64 * LM_MAX_PLANES, 1, "a start", e);
    for (int i = 0; !rc && i < f->n_planes; i++) {
        plane[i] = room + at;
        at += (size.plane[i] + 63) / 64 * 64;
    }
    for (int64_t first = 0, n; !rc && first < rows; first += n) {
        double *piece = w + first * cols;

        n = rows - first < some ? rows - first : some;
        for (int64_t i = 0; i < n * cols; i++)
            x[i] = (float)piece[i];
        f->encode(f, x, n, cols, cols, plane, NULL);
        f->decode(f, (const void *const *)plane, n, cols, x, cols);
        for (int64_t i = 0; i < n * cols; i++)
            piece[i] = x[i];
    }
    lm_free(x);
    lm_free(room);
    return rc;
}

/* `rest` holds W, and what quantising took from it while its singular values are found. */
static lm_code start_loftq(const lm_tune_module *m, int64_t r, double s, double *w, double *a,
                           double *b, lm_err *e)
{
    const json_t *c = json_object_get(m->config, "loftq_config");
    int64_t bits = 4, rounds = 1, n = m->out * m->in;
    const lm_format *f = NULL;
    double *rest = NULL;
    lm_code rc = LM_OK;

    if (json_object_size(c)) {
        rc = lm_json_i64_or(c, "loftq_bits", 4, 4, 8, &bits, "loftq_config", e);
        rc = rc ? rc : lm_json_i64_or(c, "loftq_iter", 1, 1, 100, &rounds, "loftq_config", e);
    }
    rc = rc ? rc : lm_format_find(bits == 8 ? "q8_0" : "nf4", NULL, &f, e);
    rc = rc ? rc : lm_alloc_n(&rest, (size_t)n, sizeof *rest, "a start", e);
    for (int64_t k = 0; !rc && k < rounds; k++) {
        for (int64_t i = 0; i < n; i++)
            rest[i] = k ? rest[i] + w[i] : w[i];
        if (k) {
            memcpy(w, rest, (size_t)n * sizeof *w);
            take_out(m, r, s, a, b, w);
        }
        rc = quantise(f, m->out, m->in, w, e);
        for (int64_t i = 0; !rc && i < n; i++)
            rest[i] -= w[i];
        rc = rc ? rc : start_pissa(m, r, s, rest, a, b, e);
    }
    lm_free(rest);
    return rc;
}

/* Rows 0, 2, ... of an orthonormal Q [r,r] span what A uses, the others what B uses, so that B A =
 * 0. */
static void start_orthogonal(const lm_tune_module *m, int64_t r, lm_rng rng, double *a, double *b)
{
    /* Q = the identity with neighbours turned by 45 degrees: as good as any, and exactly
     * orthonormal */
    double c = sqrt(0.5);
    int64_t half = r / 2;

    for (int64_t k = 0; k < half; k++) {
        for (int64_t j = 0; j < m->in; j++) {
            double x = lm_rng_normal(rng, (uint64_t)(k * m->in + j)) / 10;

            a[2 * k * m->in + j] = c * x;
            a[(2 * k + 1) * m->in + j] = c * x;
        }
        for (int64_t i = 0; i < m->out; i++) {
            double x = lm_rng_normal(rng, (uint64_t)(half * m->in + k * m->out + i)) / 10;

            b[i * r + 2 * k] = c * x;
            b[i * r + 2 * k + 1] = -c * x;
        }
    }
}

lm_code lm_tune_lora_start(const lm_tune_module *m, int64_t r, double s, double *w, bool *changed,
                           double *a, double *b, lm_rng rng, lm_err *e)
{
    const char *kind = json_string_value(json_object_get(m->config, "init_lora_weights"));
    bool taken = false;
    lm_code rc = LM_OK;

    if (!kind || m->embedding)
        return LM_OK;
    if (!strcmp(kind, "gaussian")) {
        for (int64_t i = 0; i < r * m->in; i++)
            a[i] = lm_rng_normal(rng, (uint64_t)i) / (double)r;
        return LM_OK;
    }
    if (!strcmp(kind, "orthogonal") && r % 2 == 0) {
        start_orthogonal(m, r, rng, a, b);
        return LM_OK;
    }
    if (!strcmp(kind, "pissa") || !strncmp(kind, "pissa_niter_", 12)) {
        rc = start_pissa(m, r, s, w, a, b, e);
        taken = !rc;
    } else if (!strcmp(kind, "olora")) {
        rc = start_olora(m, r, w, a, b, e);
        taken = !rc;
    } else if (!strcmp(kind, "loftq")) {
        rc = start_loftq(m, r, s, w, a, b, e);
        *changed = true;
    } else {
        rc = lm_fail(e, LM_EUSAGE, "init_lora_weights",
                     "use true, gaussian, orthogonal (r even), pissa, olora or loftq",
                     "'%.40s' is not served", kind);
    }
    if (taken) {
        take_out(m, r, s, a, b, w);
        *changed = true;
    }
    return rc;
}
