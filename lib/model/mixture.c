/* SPDX-License-Identifier: Apache-2.0 */
/* mixture.c -- see mixture.h. */
#include "model/mixture.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "base/mem.h"
#include "base/rng.h"
#include "base/stop.h"
#include "format/safetensors_table.h"

/* A tensor of the mixture. */
typedef struct {
    lm_model_tensor t;
    const lm_mixture_mlp *of; /* the expert; NULL: it is the base's, or a router's */
    const lm_st_tensor *from; /* NULL: of a router */
} piece;

struct lm_mixture {
    const lm_mixture_spec *spec;
    piece *piece;
    size_t n, cap;
    const piece **sorted; /* by name */
    lm_err *e;            /* of the walk */
};

/* ---- Finding ---- */

/* The part of a dense model that becomes this part of an expert; 0: none. */
static lm_part dense_part(lm_part part)
{
    switch (part) {
    case LM_PART_EXPERT_GATE:
    case LM_PART_SHARED_GATE:
        return LM_PART_GATE;
    case LM_PART_EXPERT_UP:
    case LM_PART_SHARED_UP:
        return LM_PART_UP;
    case LM_PART_EXPERT_DOWN:
    case LM_PART_SHARED_DOWN:
        return LM_PART_DOWN;
    case LM_PART_ROUTER:
    case LM_PART_ROUTER_NOISE:
    case LM_PART_SHARED_SWITCH:
        return 0;
    default:
        return part;
    }
}

static lm_code find_tensor(const lm_mixture *m, piece *p)
{
    const lm_mixture_spec *s = m->spec;
    const lm_part part = dense_part(p->t.part);
    char name[LM_TENSOR_NAME], have[LM_ST_SHAPE], want[LM_ST_SHAPE];

    if (!part)
        return LM_OK;
    if (lm_part_is_expert(p->t.part))
        p->of = &s->expert[p->t.expert];
    else if (part != p->t.part)
        p->of = &s->shared;
    lm_model_source *src = p->of ? p->of->src : s->base;
    lm_tensor_hf_name(s->dense->arch, part, p->t.layer, p->t.bias, name);
    const lm_st_tensor *t = p->from = lm_model_source_find(src, name);
    if (!t)
        t = p->from = lm_model_source_find(src, lm_arch_rootless(name));
    if (!t)
        return lm_fail(m->e, LM_EUSAGE, lm_model_source_path(src), NULL, "tensor \"%s\" is missing",
                       name);
    bool same = t->ndim == p->t.ndim;
    for (int d = 0; same && d < t->ndim; d++)
        same = t->dim[d] == p->t.dim[d];
    if (!same)
        return lm_fail(m->e, LM_EUSAGE, lm_model_source_path(src), NULL,
                       "tensor \"%s\" has shape [%s], config.json requires [%s]", name,
                       lm_st_show_shape(t->ndim, t->dim, have),
                       lm_st_show_shape(p->t.ndim, p->t.dim, want));
    return t->dtype == LM_DTYPE_NONE || !lm_dtype_is_float(t->dtype)
               ? lm_fail(m->e, LM_EUSAGE, lm_model_source_path(src), NULL,
                         "tensor \"%s\" has dtype %s, not a float type", name, t->dtype_name)
               : LM_OK;
}

static lm_code see(void *ctx, const lm_model_tensor *t)
{
    lm_mixture *m = ctx;

    if (lm_grow(&m->piece, &m->cap, m->n + 1, sizeof *m->piece, "tensors of a mixture", m->e))
        return m->e->code;
    m->piece[m->n] = (piece){ .t = *t };
    return find_tensor(m, &m->piece[m->n++]);
}

static int by_name(const void *a, const void *b)
{
    return strcmp((*(const piece *const *)a)->t.hf, (*(const piece *const *)b)->t.hf);
}

static int by_key(const void *key, const void *b)
{
    return strcmp(key, (*(const piece *const *)b)->t.hf);
}

lm_code lm_mixture_new(const lm_mixture_spec *spec, lm_mixture **out, lm_err *e)
{
    lm_mixture *m = NULL;
    lm_code rc = lm_alloc_n(&m, 1, sizeof *m, "a mixture", e);

    *out = NULL;
    if (rc)
        return rc;
    m->spec = spec;
    m->e = e;
    rc = lm_model_tensors_walk(spec->config, see, m);
    if (!rc)
        rc = lm_alloc_n(&m->sorted, m->n, sizeof(piece *), "tensors of a mixture", e);
    for (size_t i = 0; !rc && i < m->n; i++)
        m->sorted[i] = &m->piece[i];
    if (!rc)
        qsort(m->sorted, m->n, sizeof(piece *), by_name);
    if (rc)
        lm_mixture_free(m);
    else
        *out = m;
    return rc;
}

void lm_mixture_free(lm_mixture *m)
{
    if (!m)
        return;
    lm_free(m->piece);
    lm_free(m->sorted);
    lm_free(m);
}

lm_code lm_mixture_plan(const lm_mixture *m, lm_dtype dtype, lm_st_plan *plan, lm_err *e)
{
    lm_code rc = LM_OK;

    for (size_t i = 0; !rc && i < m->n; i++) {
        const piece *p = &m->piece[i];
        const lm_dtype own = (p->from ? p->from : m->piece[0].from)->dtype; /* the embedding's */
        rc = lm_st_plan_add(plan, p->t.hf, dtype == LM_DTYPE_NONE ? own : dtype, p->t.ndim,
                            p->t.dim, e);
    }
    return rc;
}

/* ---- Numbers ---- */

typedef struct {
    const piece *p;
    lm_rng noise, fresh, chosen;
    float *x;
    int64_t cols, inner; /* inner: the MLP's width */
    int64_t dropped;     /* inner columns that are drawn again */
    double deviation;    /* of the noise */
    double mean, spread; /* of the numbers that are replaced */
    double factor;
} change;

static bool is_down(const piece *p)
{
    return dense_part(p->t.part) == LM_PART_DOWN;
}

/* True if inner column i of the expert is drawn again. */
static bool is_dropped(const change *c, int64_t i)
{
    return c->dropped &&
           (int64_t)lm_rng_permute(c->chosen, (uint64_t)i, (uint64_t)c->inner) < c->dropped;
}

static bool drops(const change *c, const uint8_t *gone, int64_t row, int64_t col)
{
    return gone[is_down(c->p) ? col : row];
}

typedef struct {
    const change *c;
    const uint8_t *gone;
} change_job;

static void change_rows(void *ctx, int64_t begin, int64_t end, int worker)
{
    const change_job *j = ctx;
    const change *c = j->c;

    (void)worker;
    for (int64_t r = begin; r < end; r++)
        for (int64_t k = 0; k < c->cols; k++) {
            const uint64_t at = (uint64_t)(r * c->cols + k);
            double v = (double)c->x[at];
            if (c->dropped && drops(c, j->gone, r, k))
                v = c->mean + c->spread * lm_rng_normal(c->fresh, at);
            if (c->deviation > 0)
                v += c->deviation * lm_rng_normal(c->noise, at);
            c->x[at] = (float)(v * c->factor);
        }
}

/* Mean and deviation of the numbers that pass; gone NULL: all. */
static void measure(const change *c, const uint8_t *gone, int64_t rows, double *mean,
                    double *spread)
{
    double sum = 0, squares = 0, n = 0;

    for (int64_t r = 0; r < rows; r++)
        for (int64_t k = 0; k < c->cols; k++) {
            if (gone && !drops(c, gone, r, k))
                continue;
            const double v = (double)c->x[r * c->cols + k];
            sum += v;
            squares += v * v;
            n++;
        }
    *mean = n > 0 ? sum / n : 0;
    *spread = n > 0 ? sqrt(fmax(squares / n - *mean * *mean, 0)) : 0;
}

/* The numbers of an expert's matrix, in F32. */
static lm_code make_expert(const lm_mixture *m, const piece *p, float *x, lm_err *e)
{
    const lm_mixture_spec *s = m->spec;
    const uint64_t name = lm_hash_str(p->t.hf);
    const uint64_t number =
        (uint64_t)p->t.layer * ((uint64_t)s->config->layer[p->t.layer].moe.experts + 1) +
        (uint64_t)(p->of == &s->shared ? s->config->layer[p->t.layer].moe.experts : p->t.expert);
    change c = { .p = p,
                 .noise = lm_rng_make(s->seed, "expert noise", name),
                 .fresh = lm_rng_make(s->seed, "expert fresh", name),
                 .chosen = lm_rng_make(s->seed, "expert drop", number),
                 .x = x,
                 .cols = p->t.dim[1],
                 .inner = p->t.dim[is_down(p)],
                 .factor = is_down(p) ? p->of->down : 1 };
    uint8_t *gone = NULL;
    double mean;

    if (is_down(p) && s->halves && p->of != &s->shared && s->config->layer[p->t.layer].moe.shared)
        c.factor *= 0.5;
    c.dropped = (int64_t)llround(p->of->drop * (double)c.inner);
    if (lm_model_source_load(p->of->src, p->from, LM_DTYPE_F32, x, e) ||
        lm_alloc_n(&gone, (size_t)c.inner, 1, "columns of an expert", e))
        return e->code;
    for (int64_t i = 0; i < c.inner; i++)
        gone[i] = is_dropped(&c, i);
    if (c.dropped)
        measure(&c, gone, p->t.dim[0], &c.mean, &c.spread);
    c.deviation = p->of->noise;
    if (p->of->noise_share > 0) {
        measure(&c, NULL, p->t.dim[0], &mean, &c.deviation);
        c.deviation *= p->of->noise_share;
    }
    change_job j = { &c, gone };
    lm_par_for(s->par, p->t.dim[0], 1 + 16384 / (c.cols + 1), change_rows, &j);
    lm_free(gone);
    return LM_OK;
}

/* A router, its noise, or the gate of a shared expert. */
static void make_gate(const lm_mixture *m, const piece *p, float *x)
{
    const lm_mixture_spec *s = m->spec;
    const bool router = p->t.part == LM_PART_ROUTER;
    const int64_t n = p->t.dim[0] * p->t.dim[1];
    const float *given = router ? s->gates : p->t.part == LM_PART_ROUTER_NOISE ? NULL : s->switches;
    const lm_rng r = lm_rng_make(s->seed, "init", lm_hash_str(p->t.hf));

    for (int64_t i = 0; i < n; i++)
        x[i] = given    ? given[p->t.layer * n + i]
               : router ? (float)(s->gate_std * lm_rng_normal(r, (uint64_t)i))
                        : 0;
}

/* ---- Writing ---- */

enum { CHUNK = 1 << 24 }; /* bytes that are copied at a time */

typedef struct {
    const lm_mixture *m;
    lm_folder *f;
    void *buf;
    size_t cap;
} writer;

/* True if the numbers are those of the dense model. */
static bool is_copy(const lm_mixture *m, const piece *p)
{
    const lm_mixture_mlp *of = p->of;
    bool halved = of && m->spec->halves && of != &m->spec->shared && is_down(p) &&
                  m->spec->config->layer[p->t.layer].moe.shared;

    return p->from && (!of || (!halved && !(of->noise > 0) && !(of->noise_share > 0) &&
                               !(of->drop > 0) && (of->down <= 1 && of->down >= 1)));
}

static lm_code copy_piece(writer *w, const piece *p, lm_err *e)
{
    const lm_model_source *src = p->of ? p->of->src : w->m->spec->base;
    const size_t size = lm_dtype_size(p->from->dtype);
    lm_code rc = lm_grow(&w->buf, &w->cap, CHUNK, 1, "a part of a tensor", e);

    for (uint64_t at = 0, n; !rc && at < p->from->bytes; at += n) {
        n = p->from->bytes - at < CHUNK ? p->from->bytes - at : CHUNK;
        rc = lm_model_source_read(src, p->from, at, w->buf, n, e);
        rc = rc ? rc : lm_folder_write_as(w->f, p->from->dtype, w->buf, (int64_t)(n / size), e);
    }
    if (lm_model_source_random(src))
        lm_model_source_forget(src, p->from);
    return rc;
}

static lm_code write_piece(writer *w, const piece *p, lm_err *e)
{
    const int64_t n = p->t.dim[0] * (p->t.ndim == 2 ? p->t.dim[1] : 1);

    if (is_copy(w->m, p))
        return copy_piece(w, p, e);
    size_t bytes; /* the buffer is counted in bytes: copies share it */
    if (!lm_mul_ok((size_t)n, sizeof(float), &bytes))
        return lm_fail(e, LM_ELIMIT, p->t.hf, NULL, "has too many numbers");
    if (lm_grow(&w->buf, &w->cap, bytes, 1, "a tensor", e))
        return e->code;
    if (!p->from)
        make_gate(w->m, p, w->buf);
    else if (make_expert(w->m, p, w->buf, e))
        return e->code;
    return lm_folder_write_as(w->f, LM_DTYPE_F32, w->buf, n, e);
}

lm_code lm_mixture_write(const lm_mixture *m, lm_folder *f, lm_sink *sink, lm_err *e)
{
    writer w = { .m = m, .f = f };
    double done = 0;
    lm_code rc = LM_OK;

    for (const lm_st_tensor *t; !rc && !lm_stopping() && (t = lm_folder_next(f));) {
        const piece **p = bsearch(t->name, m->sorted, m->n, sizeof(piece *), by_key);
        rc = p ? write_piece(&w, *p, e)
               : lm_fail(e, LM_EBUG, t->name, NULL, "is planned but is not a tensor of the model");
        lm_progress(sink, "experts", ++done, (double)m->n, "tensors", NULL);
    }
    lm_free(w.buf);
    return rc;
}
