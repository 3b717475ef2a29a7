/* SPDX-License-Identifier: Apache-2.0 */
/* sensitivity.c -- the errors that `auto` chooses by.
 *
 * The output of attention is computed once with the numbers of the model, then with the keys, and with the values, of each
 * candidate.  Loops run over blocks of LANES numbers, of one head's keys in the order block, channel, lane: compilers
 * make vectors of them. */
#include <math.h>
#include <string.h>

#include "kv/spec_impl.h"
#include "kv/store.h"

enum { LANES = 16, LEAST_PAGE = 64 };

typedef struct {
    const lm_kv_attention *a;
    int64_t n, rows; /* tokens; those whose queries are sampled */
    const float *q;
    float *keys;  /* of one head [blocks, D, LANES] */
    float *p;     /* [blocks, LANES] */
    float *out;   /* [rows, H*D] of the model's numbers */
    float *other; /* with those of a candidate */
} sampling;

static int64_t blocks_of(int64_t n)
{
    return (n + LANES - 1) / LANES;
}

/* ---- attention of the sampled rows ---- */

static int64_t row_at(const sampling *s, int64_t r)
{
    return (r + 1) * s->n / s->rows - 1;
}

static void order_keys(const sampling *s, const float *k)
{
    int64_t D = s->a->head_dim, C = s->a->kv_heads * D;
    memset(s->keys, 0, (size_t)(blocks_of(s->n) * D * LANES) * sizeof *s->keys);
    for (int64_t j = 0; j < s->n; j++)
        for (int64_t d = 0; d < D; d++)
            s->keys[(j / LANES * D + d) * LANES + j % LANES] = k[j * C + d];
}

/* Scores of all tokens of the blocks in which [from, to) lies. */
static void score(const sampling *s, const float *q, int64_t from, int64_t to)
{
    int64_t D = s->a->head_dim;
    for (int64_t b = from / LANES; b < blocks_of(to); b++) {
        const float *keys = s->keys + b * D * LANES;
        float sum[LANES] = { 0 };
        for (int64_t d = 0; d < D; d++)
            for (int i = 0; i < LANES; i++)
                sum[i] += q[d] * keys[d * LANES + i];
        memcpy(s->p + b * LANES, sum, sizeof sum);
    }
}

static void weigh(const sampling *s, int64_t from, int64_t to)
{
    double scale = s->a->scale, cap = s->a->soft_cap, sum = 0;
    float most = -INFINITY;
    for (int64_t j = from; j < to; j++) {
        double x = (double)s->p[j] * scale;
        s->p[j] = (float)(cap > 0 ? cap * tanh(x / cap) : x);
        most = fmaxf(most, s->p[j]);
    }
    for (int64_t j = from; j < to; j++) {
        s->p[j] = expf(s->p[j] - most);
        sum += (double)s->p[j];
    }
    float factor = (float)(1 / sum);
    for (int64_t j = from; j < to; j++)
        s->p[j] *= factor;
}

/* out [D]: rows [from, to) of v by their probabilities. */
static void add_values(const sampling *s, const float *v, int64_t from, int64_t to, float *out)
{
    int64_t D = s->a->head_dim, C = s->a->kv_heads * D, whole = D - D % LANES;
    for (int64_t at = 0; at < whole; at += LANES) {
        float sum[LANES] = { 0 };
        for (int64_t j = from; j < to; j++)
            for (int i = 0; i < LANES; i++)
                sum[i] += s->p[j] * v[j * C + at + i];
        memcpy(out + at, sum, sizeof sum);
    }
    for (int64_t d = whole; d < D; d++) {
        float sum = 0;
        for (int64_t j = from; j < to; j++)
            sum += s->p[j] * v[j * C + d];
        out[d] = sum;
    }
}

static void attend(const sampling *s, const float *k, const float *v, float *out)
{
    const lm_kv_attention *a = s->a;
    int64_t D = a->head_dim, group = a->heads / a->kv_heads;
    for (int64_t h = 0; h < a->heads; h++) {
        int64_t head = h / group * D;
        if (h % group == 0)
            order_keys(s, k + head);
        for (int64_t r = 0; r < s->rows; r++) {
            int64_t i = row_at(s, r), to = i + 1;
            int64_t from = a->window && to > a->window ? to - a->window : 0;
            score(s, s->q + (i * a->heads + h) * D, from, to);
            weigh(s, from, to);
            add_values(s, v + head, from, to, out + (r * a->heads + h) * D);
        }
    }
}

/* The sum of squares of the differences of the outputs, or of the output itself. */
static float error_of(const sampling *s, bool possible)
{
    double sum = 0;
    for (int64_t i = 0; i < s->rows * s->a->heads * s->a->head_dim; i++) {
        double x = (double)s->out[i] - (possible ? (double)s->other[i] : 0);
        sum += x * x;
    }
    return (float)(sum * (double)s->n / (double)s->rows);
}

/* ---- candidates ---- */

/* Store x as side k with a candidate into y; *possible: it can. */
static lm_code store_side(const lm_kv_binding *b, const lm_kv_use *u, int k, const float *x,
                          int64_t n, float *y, bool *possible, lm_err *e)
{
    const lm_kv_site *at = b->site;
    lm_kv_side side;
    lm_kv_sections sections;
    lm_err ignored = { 0 };
    *possible = !lm_kv_bind_side(b, u, k, at, &side, &ignored);
    int64_t page = *possible && side.format ? lm_kv_common_page(b->p->page, side.format) : 0;
    *possible = *possible &&
                (!side.format || !lm_kv_page(side.format, page, at->head_dim, &sections, &ignored));
    return *possible ? lm_kv_store(&side, page, at->kv_heads, at->head_dim, x, n, y, e) : LM_OK;
}

static lm_code measure(const sampling *s, const lm_kv_binding *b, const lm_kv_use *u, int side,
                       const float *const kv[2], float *stored, float *error, lm_err *e)
{
    bool possible;
    if (store_side(b, u, side, kv[side], s->n, stored, &possible, e))
        return e->code;
    if (possible)
        attend(s, side == LM_KV_K ? stored : kv[0], side == LM_KV_V ? stored : kv[1], s->other);
    *error = error_of(s, possible);
    return LM_OK;
}

static lm_code make_room(sampling *s, lm_err *e)
{
    size_t D = (size_t)s->a->head_dim, blocks = (size_t)blocks_of(s->n) * LANES;
    size_t outputs = (size_t)(s->rows * s->a->heads) * D;
    if (lm_alloc_n(&s->keys, blocks * (D + 1) + 2 * outputs, sizeof *s->keys, "attention", e))
        return e->code;
    s->p = s->keys + blocks * D;
    s->out = s->p + blocks;
    s->other = s->out + outputs;
    return LM_OK;
}

lm_code lm_kv_sensitivity(const char *candidates, const lm_kv_site *at, const lm_kv_attention *a,
                          int64_t n, int64_t queries, const float *q, const float *k,
                          const float *v, float error[2][LM_KV_MAX_CANDIDATES], int *m, lm_err *e)
{
    const float *const kv[2] = { k, v };
    lm_kv_plan p = { .layers = 1, .page = LEAST_PAGE };
    lm_kv_binding b = { .site = at, .p = &p };
    sampling s = { .a = a, .n = n, .q = q, .rows = queries && queries < n ? queries : n };
    lm_kv_use *use;
    float *stored = NULL;
    lm_code rc = lm_alloc_n(&use, LM_KV_MAX_CANDIDATES, sizeof *use, "candidates", e);
    if (rc)
        return rc;
    rc = lm_kv_read_candidates(candidates, LM_KV_WHERE, use, m, e);
    if (!rc)
        rc = lm_arena_new(&p.arena, 1 << 14, e);
    if (!rc)
        rc = lm_alloc_n(&stored, (size_t)(n * at->kv_heads * at->head_dim), sizeof *stored,
                        "stored keys", e);
    if (!rc)
        rc = make_room(&s, e);
    if (!rc)
        attend(&s, k, v, s.out);
    for (int i = 0; i < *m && !rc; i++)
        for (int side = 0; side < 2 && !rc; side++)
            rc = measure(&s, &b, &use[i], side, kv, stored, &error[side][i], e);
    lm_free(s.keys);
    lm_free(stored);
    lm_free(use);
    lm_arena_free(p.arena);
    return rc;
}
