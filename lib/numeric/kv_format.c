/* SPDX-License-Identifier: Apache-2.0 */
/* kv_format.c -- pages of coded caches: encoding, decoding. */
#include <math.h>

#include "numeric/kv_impl.h"

/* ---- pages ---- */

static lm_kv_view view_of(const lm_kv_format *f, int64_t T, int64_t D, int64_t kv, void *page)
{
    lm_kv_view p = { .f = f, .T = T, .D = D, .kv = kv, .data = page };
    lm_kv_page(f, T, D, &p.at, NULL);
    return p;
}

static lm_kv_scale scale_of(const lm_kv_view *p, int64_t t, int64_t d)
{
    const lm_kv_format *f = p->f;
    if (f->lower)
        return lm_kv_fixed(f, p->kv, p->D, d);
    if (f->scale == LM_DTYPE_NONE)
        return (lm_kv_scale){ f->head ? (double)f->head[p->kv] : f->constant, 0 };
    int64_t at = lm_kv_scale_at(f, p->T, p->D, t, d);
    return (lm_kv_scale){ lm_get(f->scale, p->data + p->at.scale, at),
                          lm_kv_has_min(f) ? lm_get(f->scale, p->data + p->at.min, at) : 0 };
}

static void put_scale(const lm_kv_view *p, int64_t t, int64_t d, lm_kv_scale by)
{
    int64_t at = lm_kv_scale_at(p->f, p->T, p->D, t, d);
    lm_set(p->f->scale, p->data + p->at.scale, at, by.s);
    if (lm_kv_has_min(p->f))
        lm_set(p->f->scale, p->data + p->at.min, at, by.m);
}

/* ---- outliers: a list by rising index ---- */

typedef struct {
    uint16_t *count, *index, *value;
} outliers;

static outliers outliers_of(const lm_kv_view *p)
{
    uint16_t *at = (uint16_t *)(void *)(p->data + p->at.outliers);
    return (outliers){ at, at + 1, at + 1 + p->f->outliers };
}

static void drop_outlier(const outliers *o, int64_t i)
{
    size_t after = (size_t)(*o->count - i - 1) * sizeof *o->index;
    memmove(o->index + i, o->index + i + 1, after);
    memmove(o->value + i, o->value + i + 1, after);
    --*o->count;
}

static void insert_outlier(const outliers *o, uint16_t index, uint16_t value)
{
    int64_t i = *o->count;
    for (; i > 0 && o->index[i - 1] > index; i--) {
        o->index[i] = o->index[i - 1];
        o->value[i] = o->value[i - 1];
    }
    o->index[i] = index;
    o->value[i] = value;
    ++*o->count;
}

/* How far beyond the range of its group a number of the list is. */
static double excess(const lm_kv_view *p, uint16_t index, uint16_t value)
{
    lm_kv_scale by = scale_of(p, index / p->D, index % p->D);
    double x = (double)lm_f16_to_f32(value);
    return by.s > 0 ? fabs((x - by.m) / by.s) : fabs(x - by.m) > 0 ? (double)INFINITY : 0;
}

/* Into the list, or in the place of the smallest (the last of several) if it is larger than that. */
static void add_outlier(const lm_kv_view *p, int64_t t, int64_t d, float x)
{
    outliers o = outliers_of(p);
    uint16_t index = (uint16_t)(t * p->D + d);
    uint16_t value = lm_f32_to_f16((float)lm_kv_stored(LM_DTYPE_F16, (double)x));
    if (*o.count == p->f->outliers) {
        int64_t least = 0;
        for (int64_t i = 1; i < *o.count; i++)
            if (excess(p, o.index[i], o.value[i]) <= excess(p, o.index[least], o.value[least]))
                least = i;
        double mine = excess(p, index, value), other = excess(p, o.index[least], o.value[least]);
        if (mine < other || (mine == other && index > o.index[least]))
            return;
        drop_outlier(&o, least);
    }
    insert_outlier(&o, index, value);
}

static void clear_outliers(const lm_kv_view *p, int64_t at, int64_t n)
{
    outliers o = outliers_of(p);
    for (int64_t i = *o.count - 1; i >= 0; i--)
        if (o.index[i] >= at * p->D && o.index[i] < (at + n) * p->D)
            drop_outlier(&o, i);
}

/* The outliers of token t, whose range is `range` or that of its channels. */
static void take_outliers(const lm_kv_view *p, const float *x, const float *range, int64_t t)
{
    const lm_kv_format *f = p->f;
    for (int64_t d = 0; d < p->D; d++) {
        const float *lo = f->lower ? &f->lower[p->kv * p->D + d] : range;
        const float *hi = f->lower ? &f->upper[p->kv * p->D + d] : range + 1;
        if (x[d] < *lo || x[d] > *hi)
            add_outlier(p, t, d, x[d]);
    }
}

/* ---- encoding ---- */

static void encode_token(const lm_kv_view *p, const float *x, const float *range, int64_t t)
{
    const lm_kv_format *f = p->f;
    int64_t group = f->axis == LM_KV_TOKEN && f->group ? f->group : p->D;
    double v[LM_KV_MAX_DIM];
    unsigned code[LM_KV_MAX_DIM];
    uint8_t all[LM_KV_MAX_DIM];
    for (int64_t d = 0; d < p->D; d++)
        v[d] = (double)x[d];
    for (int64_t d = 0; d < p->D && f->scale == LM_DTYPE_NONE; d++)
        all[d] = (uint8_t)lm_kv_code_of(f, scale_of(p, t, d), v[d]);
    for (int64_t d = 0; d < p->D && f->scale != LM_DTYPE_NONE; d += group) {
        int64_t n = d + group < p->D ? group : p->D - d;
        put_scale(p, t, d, lm_kv_code_group(f, v + d, n, range, code));
        for (int64_t i = 0; i < n; i++)
            all[d + i] = (uint8_t)code[i];
    }
    lm_kv_put_token(p, t, all);
}

static void encode_channels(const lm_kv_view *p, const float *x, int64_t pitch, int64_t at,
                            int64_t n)
{
    double v[LM_KV_MAX_TOKENS];
    unsigned code[LM_KV_MAX_TOKENS];
    for (int64_t d = 0; d < p->D; d++) {
        for (int64_t i = 0; i < n; i++)
            v[i] = (double)x[i * pitch + d];
        put_scale(p, at, d, lm_kv_code_group(p->f, v, n, NULL, code));
        for (int64_t i = 0; i < n; i++)
            lm_kv_put_code(p, at + i, d, code[i]);
    }
}

void lm_kv_encode(const lm_kv_format *f, int64_t T, int64_t D, int64_t kv, const float *x,
                  int64_t pitch, int64_t at, int64_t n, const float *range, void *page)
{
    lm_kv_view p = view_of(f, T, D, kv, page);
    int64_t step = lm_kv_step(f, T);
    if (f->outliers)
        clear_outliers(&p, at, n);
    for (int64_t i = 0; i < n; i += step) {
        const float *rows = x + i * pitch, *own = range ? range + 2 * i : NULL;
        if (f->second)
            lm_kv_encode_balanced(&p, rows, pitch, at + i, step);
        else if (f->axis == LM_KV_CHANNEL && !f->lower)
            encode_channels(&p, rows, pitch, at + i, step);
        else
            encode_token(&p, rows, own, at + i);
        if (f->outliers && (f->lower || own))
            take_outliers(&p, rows, own, at + i);
    }
}

/* The scales of the channels of token t, as far as they are not those of the token before; `first`: of a call. */
static void load_scales(const lm_kv_view *p, int64_t t, bool first, lm_kv_scale *by)
{
    const lm_kv_format *f = p->f;
    int64_t each = f->axis == LM_KV_CHANNEL ? 1 : f->group ? f->group : p->D;
    int64_t tokens = f->axis == LM_KV_TOKEN ? 1 : f->group ? f->group : p->T;
    if (!first && (t % tokens || f->lower))
        return;
    for (int64_t d = 0; d < p->D; d++)
        by[d] = d % each ? by[d - 1] : scale_of(p, t, d);
}

void lm_kv_decode(const lm_kv_format *f, int64_t T, int64_t D, int64_t kv, const void *page,
                  int64_t at, int64_t n, float *y, int64_t pitch)
{
    lm_kv_view p = view_of(f, T, D, kv, (void *)(uintptr_t)page);
    lm_kv_scale by[LM_KV_MAX_DIM];
    uint8_t code[LM_KV_MAX_DIM];
    double level[256];
    for (unsigned c = 0; c < 1u << f->bits; c++)
        level[c] = lm_kv_level(f, c);
    for (int64_t i = 0; i < n; i++) {
        load_scales(&p, at + i, i == 0, by);
        lm_kv_get_token(&p, at + i, code);
        for (int64_t d = 0; d < D; d++) {
            double v = by[d].s * level[code[d]] + by[d].m;
            if (f->second)
                v *= lm_get(f->scale, p.data + p.at.second, lm_kv_second_at(f, T, D, at + i, d));
            y[i * pitch + d] = (float)v;
        }
    }
    if (!f->outliers)
        return;
    outliers o = outliers_of(&p);
    for (int64_t i = 0; i < *o.count; i++) {
        int64_t t = o.index[i] / D;
        if (t >= at && t < at + n)
            y[(t - at) * pitch + o.index[i] % D] = lm_f16_to_f32(o.value[i]);
    }
}
