/* SPDX-License-Identifier: Apache-2.0 */
/* cache_device.c -- the arrays of formats in the memory of a device. */
#include "model/cache_device.h"

#include "base/mem.h"
#include "graph/backend.h"

/* Numbers of the arrays of a side: lower, upper, head. */
static void lengths_of(const lm_kv_format *f, const lm_layer *y, size_t n[3])
{
    size_t channels = (size_t)(y->kv_heads * y->head_dim);
    n[0] = f && f->lower ? channels : 0;
    n[1] = f && f->upper ? channels : 0;
    n[2] = f && f->head ? (size_t)y->kv_heads : 0;
}

static size_t numbers_of(const lm_kv_plan *p, const lm_config *c)
{
    size_t all = 0, n[3];
    for (int64_t i = 0; i < 2 * p->layers; i++) {
        lengths_of(p->side[i].format, &c->layer[i / 2], n);
        all += n[0] + n[1] + n[2];
    }
    return all;
}

/* The format of side i with its arrays at `to`, which moves behind them. */
static lm_code copy_format(lm_cache_formats *f, const lm_kv_format *from, const lm_layer *y,
                           int64_t i, float **to, lm_err *e)
{
    const float *array[3] = { from->lower, from->upper, from->head };
    const float **place[3] = { &f->format[i].lower, &f->format[i].upper, &f->format[i].head };
    size_t n[3];
    lengths_of(from, y, n);
    f->format[i] = *from;
    f->side[i].format = &f->format[i];
    for (int k = 0; k < 3; k++) {
        if (!n[k])
            continue;
        if (f->b->copy(f->b, *to, array[k], n[k] * sizeof **to, f->b->main, e))
            return e->code;
        *place[k] = *to;
        *to += n[k];
    }
    return LM_OK;
}

lm_code lm_cache_formats_on(const lm_kv_plan *plan, const lm_config *c, lm_backend *b,
                            lm_cache_formats *out, lm_err *e)
{
    *out = (lm_cache_formats){ .plan = plan, .b = b };
    size_t numbers = plan && !b->host_memory && plan->layers == c->layers ? numbers_of(plan, c) : 0;
    if (!numbers)
        return LM_OK;
    size_t sides = (size_t)(2 * plan->layers);
    void *arrays = NULL;
    out->bytes = numbers * sizeof *out->arrays;
    if (lm_alloc_n(&out->side, sides, sizeof *out->side, "formats of caches", e) ||
        lm_alloc_n(&out->format, sides, sizeof *out->format, "formats of caches", e) ||
        b->alloc(b, out->bytes, "ranges of caches", &arrays, e))
        return e->code;
    float *to = out->arrays = arrays;
    for (int64_t i = 0; i < 2 * plan->layers; i++) {
        out->side[i] = plan->side[i];
        if (plan->side[i].format &&
            copy_format(out, plan->side[i].format, &c->layer[i / 2], i, &to, e))
            return e->code;
    }
    out->own = *plan;
    out->own.side = out->side;
    out->plan = &out->own;
    return b->sync(b, b->main, e);
}

void lm_cache_formats_fini(lm_cache_formats *f)
{
    if (f->arrays)
        f->b->free(f->b, f->arrays, f->bytes);
    lm_free(f->side);
    lm_free(f->format);
    *f = (lm_cache_formats){ 0 };
}
