/* SPDX-License-Identifier: Apache-2.0 */
/* convert_flat.c -- tensors in a known order, without names. */
#include "convert/convert_flat.h"

#include <inttypes.h>
#include <math.h>

#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"

const lm_flat_item lm_llmc_order[] = {
    { .part = LM_PART_EMBED },
    { .part = LM_PART_POSITION },
    { .part = LM_PART_ATTN_NORM },
    { .part = LM_PART_ATTN_NORM, .bias = true },
    { .part = LM_PART_QKV },
    { .part = LM_PART_QKV, .bias = true },
    { .part = LM_PART_ATTN_OUT },
    { .part = LM_PART_ATTN_OUT, .bias = true },
    { .part = LM_PART_MLP_NORM },
    { .part = LM_PART_MLP_NORM, .bias = true },
    { .part = LM_PART_UP },
    { .part = LM_PART_UP, .bias = true },
    { .part = LM_PART_DOWN },
    { .part = LM_PART_DOWN, .bias = true },
    { .part = LM_PART_OUTPUT_NORM },
    { .part = LM_PART_OUTPUT_NORM, .bias = true },
    { .part = 0 },
};

const lm_flat_item lm_llama2c_order[] = {
    { .part = LM_PART_EMBED },       { .part = LM_PART_ATTN_NORM },
    { .part = LM_PART_Q },           { .part = LM_PART_K },
    { .part = LM_PART_V },           { .part = LM_PART_ATTN_OUT },
    { .part = LM_PART_MLP_NORM },    { .part = LM_PART_GATE },
    { .part = LM_PART_DOWN },        { .part = LM_PART_UP },
    { .part = LM_PART_OUTPUT_NORM }, { .tables = true },
    { .part = LM_PART_OUTPUT },      { .part = 0 },
};

const lm_flat_item lm_llama2c_order1[] = {
    { .part = LM_PART_ATTN_NORM },
    { .part = LM_PART_MLP_NORM },
    { .part = LM_PART_OUTPUT_NORM },
    { .part = LM_PART_EMBED },
    { .part = LM_PART_Q },
    { .part = LM_PART_K },
    { .part = LM_PART_V },
    { .part = LM_PART_ATTN_OUT },
    { .part = LM_PART_GATE },
    { .part = LM_PART_DOWN },
    { .part = LM_PART_UP },
    { .part = LM_PART_OUTPUT },
    { .part = 0 },
};

/* ---- The order of the file ---- */

typedef lm_code (*visit_fn)(void *ctx, size_t nth, uint64_t bytes, lm_err *e);

typedef struct {
    const lm_config *c;
    const lm_flat_file *f;
    const lm_model_tensor *wanted;
    size_t n;
} walk;

static uint64_t bytes_of(const walk *l, const lm_model_tensor *s)
{
    int64_t rows = s->part == LM_PART_EMBED && l->f->pad_rows ? l->f->pad_rows : s->dim[0];

    return lm_plain_bytes(l->f->dtype, rows * (s->ndim == 2 ? s->dim[1] : 1));
}

static uint64_t table_bytes(const lm_config *c)
{
    return (uint64_t)(c->max_positions * c->layer[0].head_dim) * 4; /* cosines, then sines */
}

/* Visit the tensors in the file's order; the tables are number n. */
static lm_code go_through(const walk *l, visit_fn visit, void *ctx, lm_err *e)
{
    lm_code rc = LM_OK;

    for (const lm_flat_item *o = l->f->order; !rc && (o->part || o->tables); o++) {
        if (o->tables)
            rc = visit(ctx, l->n, table_bytes(l->c), e);
        for (size_t i = 0; !rc && i < l->n; i++) /* of all layers; a tied model has no head */
            if (l->wanted[i].part == o->part && l->wanted[i].bias == o->bias)
                rc = visit(ctx, i, bytes_of(l, &l->wanted[i]), e);
    }
    return rc;
}

/* ---- Importing ---- */

typedef struct {
    lm_map map;
    lm_model_tensor *wanted;
    size_t n;
    uint64_t *at; /* of wanted tensor i */
    uint64_t end;
    size_t *wanted_of;
    size_t cap_of;
    lm_import *m;
    lm_dtype dtype;
    void *copy;
    size_t cap;
} flat;

static lm_code load(lm_import *m, const lm_st_tensor *t, const void **data, lm_err *e)
{
    flat *q = m->state;
    size_t i = q->wanted_of[(size_t)(t - lm_st_plan_at(m->plan, 0))];
    const lm_format *f = lm_format_of_dtype(q->dtype);
    lm_rows r;
    lm_code rc;

    *data = q->map.data + q->at[i];
    if (!lm_rows_of_tensor(&q->wanted[i], false, f, f, &r) && q->at[i] % 4 == 0)
        return LM_OK;
    rc = lm_grow(&q->copy, &q->cap, t->bytes, 1, "a tensor", e);
    r.src = *data;
    *data = r.dst = q->copy;
    return rc ? rc : lm_rows_convert(&r, m->par, e);
}

static void close_flat(lm_import *m)
{
    flat *q = m->state;

    lm_map_close(&q->map);
    lm_free(q->wanted);
    lm_free(q->at);
    lm_free(q->wanted_of);
    lm_free(q->copy);
    lm_free(q);
}

static lm_code locate_tensor(void *ctx, size_t nth, uint64_t bytes, lm_err *e)
{
    flat *q = ctx;
    size_t i = lm_st_plan_count(q->m->plan);
    lm_code rc = LM_OK;

    if (q->end > q->map.size || bytes > q->map.size - q->end)
        return lm_fail(e, LM_EFORMAT, q->m->path, "fetch the file again",
                       "it ends at byte %zu, within '%s'", q->map.size,
                       nth < q->n ? q->wanted[nth].gguf : "its tables");
    if (nth < q->n) {
        const lm_model_tensor *s = &q->wanted[nth];
        q->at[nth] = q->end;
        rc = lm_st_plan_add(q->m->plan, s->hf, q->dtype, s->ndim, s->dim, e);
        if (!rc)
            rc = lm_grow(&q->wanted_of, &q->cap_of, i + 1, sizeof *q->wanted_of, "tensors", e);
        if (!rc)
            q->wanted_of[i] = nth;
    }
    q->end += bytes;
    return rc;
}

lm_code lm_flat_import(lm_import *m, lm_map *map, const lm_flat_file *f, lm_err *e)
{
    flat *q = NULL;
    lm_code rc = lm_alloc_n(&q, 1, sizeof *q, "a checkpoint", e);

    if (rc) {
        lm_map_close(map);
        return rc;
    }
    *q = (flat){ .map = *map, .m = m, .dtype = f->dtype, .end = f->header };
    m->state = q;
    m->close = close_flat;
    m->load = load;
    if ((uint64_t)m->config.layers > map->size / 16)
        return lm_fail(e, LM_EFORMAT, m->path, NULL, "it has %zu byte%s for %" PRId64 " layer%s",
                       map->size, lm_plural(map->size), m->config.layers,
                       lm_plural(m->config.layers));
    rc = lm_model_tensors_make(&m->config, &q->wanted, &q->n, e);
    if (!rc)
        rc = lm_alloc_n(&q->at, q->n, sizeof *q->at, "tensors", e);
    if (!rc)
        rc = go_through(&(walk){ &m->config, f, q->wanted, q->n }, locate_tensor, q, e);
    if (!rc && q->end != q->map.size)
        rc =
            lm_fail(e, LM_EFORMAT, m->path, NULL, "it has %zu byte%s, its header requires %" PRIu64,
                    q->map.size, lm_plural(q->map.size), q->end);
    return rc;
}

/* ---- Exporting ---- */

typedef struct {
    lm_import *m;
    const lm_flat_file *f;
    lm_match s;
    lm_out *out;
    void *cast;
    size_t cap;
    uint64_t total, done;
} writer;

static lm_code add_up(void *ctx, size_t nth, uint64_t bytes, lm_err *e)
{
    (void)nth;
    (void)e;
    ((writer *)ctx)->total += bytes;
    return LM_OK;
}

static lm_code put_tables(writer *w, lm_err *e)
{
    const lm_config *c = &w->m->config;
    int64_t half = c->rope[0].dim / 2;
    float *row = NULL;
    lm_code rc = lm_alloc_n(&row, (size_t)half, sizeof *row, "tables of the rotation", e);

    for (int64_t i = 0; !rc && i < 2 * c->max_positions; i++) {
        int64_t pos = i % c->max_positions;
        for (int64_t k = 0; k < half; k++) {
            double angle = (double)pos * pow(c->rope[0].theta, -(double)k / (double)half);
            row[k] = (float)(i < c->max_positions ? cos(angle) : sin(angle));
        }
        rc = lm_export_write(w->out, row, (size_t)half * sizeof *row, e);
    }
    lm_free(row);
    return rc;
}

static lm_code put_zeros(writer *w, uint64_t bytes, lm_err *e)
{
    static const uint8_t zeros[4096];
    lm_code rc = LM_OK;

    for (uint64_t n; !rc && bytes; bytes -= n) {
        n = bytes < sizeof zeros ? bytes : sizeof zeros;
        rc = lm_export_write(w->out, zeros, n, e);
    }
    return rc;
}

static lm_code write_tensor(void *ctx, size_t nth, uint64_t bytes, lm_err *e)
{
    writer *w = ctx;
    lm_rows r;
    const void *data;
    lm_code rc;

    if (lm_stopping())
        return LM_OK;
    if (nth == w->s.n)
        return put_tables(w, e);
    const lm_st_tensor *t = w->s.from[nth];
    const lm_format *f = lm_format_of_dtype(w->f->dtype);
    size_t own = lm_plain_bytes(w->f->dtype, t->count);
    rc = w->m->load(w->m, t, &data, e);
    if (!rc && lm_rows_of_tensor(&w->s.wanted[nth], true, lm_format_of_dtype(t->dtype), f, &r)) {
        rc = lm_grow(&w->cast, &w->cap, own, 1, "a tensor", e);
        r.src = data;
        r.dst = w->cast;
        if (!rc)
            rc = lm_rows_convert(&r, w->m->par, e);
        data = w->cast;
    }
    if (!rc)
        rc = lm_export_write(w->out, data, own, e);
    if (!rc)
        rc = put_zeros(w, bytes - own, e);
    w->done += bytes;
    lm_progress(w->m->sink, "convert", (double)w->done, (double)w->total, "bytes", t->name);
    return rc;
}

lm_code lm_flat_export(lm_import *m, const char *path, const lm_flat_file *f, const void *header,
                       const lm_export_opts *o, lm_err *e)
{
    writer w = { .m = m, .f = f, .total = f->header };
    walk l = { &m->config, f, NULL, 0 };
    if (!lm_config_alike(&m->config))
        return lm_fail(e, LM_EUSAGE, m->path, NULL, "the format has no layers of different sizes");
    lm_code rc = lm_match_make(m, &w.s, e);

    l.wanted = w.s.wanted;
    l.n = w.s.n;
    if (!rc && m->spool)
        rc = m->spool(m, e); /* tensors come in another order than in the source */
    if (!rc)
        rc = go_through(&l, add_up, &w, e);
    if (!rc)
        rc = lm_export_open(path, o->force, w.total, &w.out, e);
    if (!rc)
        rc = lm_export_write(w.out, header, f->header, e);
    if (!rc)
        rc = go_through(&l, write_tensor, &w, e);
    if (!rc && m->end && !lm_stopping())
        rc = m->end(m, e);
    if (!rc && !lm_stopping())
        rc = lm_out_commit(w.out, e);
    else
        lm_out_drop(w.out);
    lm_free(w.cast);
    lm_match_fini(&w.s);
    return rc;
}
