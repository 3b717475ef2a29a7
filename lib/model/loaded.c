/* SPDX-License-Identifier: Apache-2.0 */
/* loaded.c -- weights for use, in one type. */
#include "model/loaded.h"

#include <string.h>

#include "base/mem.h"
#include "model/weights.h"

lm_code lm_loaded_open(const char *path, const lm_bundle_opts *o, lm_loaded *l, lm_err *e)
{
    memset(l, 0, sizeof *l);
    if (lm_model_source_open(path, o, &l->src, e))
        return e->code;
    const json_t *config = lm_model_source_config(l->src);
    if (!config)
        lm_fail(e, LM_EUSAGE, lm_model_source_path(l->src), "name the folder that holds the model",
                "a lone file has no config.json");
    else
        lm_config_read(config, lm_model_source_path(l->src), &l->config, e);
    if (e->code)
        lm_loaded_fini(l);
    return e->code;
}

static int64_t slice_count(const lm_slice *s)
{
    return s->dim[0] * (s->ndim == 2 ? s->dim[1] : 1);
}

static int64_t slice_at(const lm_model *m, const lm_slice *s)
{
    const lm_tensor *t = &m->graph->value[m->param[s->param].value].t;
    return m->param[s->param].offset + s->row * (t->ndim == 2 ? t->dim[1] : 1);
}

/* Where a slice lies, and in which type. */
static void *place_of(const lm_loaded *l, const lm_model *m, const lm_slice *s, lm_dtype *type)
{
    int64_t at = slice_at(m, s);
    *type = at < l->first ? LM_DTYPE_BF16 : LM_DTYPE_F32;
    return at < l->first ? (void *)(l->low + at) : (void *)(l->block + (at - l->first));
}

/* Room for one slice at a time on its way to a device. */
static lm_code make_stage(lm_loaded *l, const lm_model *m, lm_err *e)
{
    for (int i = 0; i < m->n_slices; i++) {
        lm_dtype type;
        place_of(l, m, &m->slice[i], &type);
        size_t bytes = (size_t)slice_count(&m->slice[i]) * lm_dtype_size(type);
        l->stage_bytes = bytes > l->stage_bytes ? bytes : l->stage_bytes;
    }
    return l->b->host_alloc(l->b, l->stage_bytes, "a tensor", &l->stage, e);
}

static void drop_stage(lm_loaded *l)
{
    if (l->stage)
        l->b->host_free(l->b, l->stage, l->stage_bytes);
    l->stage = NULL;
}

/* Bring what was written to the stage to its place. */
static lm_code settle(lm_loaded *l, void *place, const void *from, size_t bytes, lm_err *e)
{
    lm_backend *b = l->b;
    return b->copy(b, place, from, bytes, b->main, e) ? e->code : b->sync(b, b->main, e);
}

/* Elements of the block that are there in BF16. */
static int64_t low_end(const lm_model *m)
{
    return m->build.precision.low == LM_DTYPE_BF16 ? m->decay_end : 0;
}

size_t lm_loaded_bytes(const lm_model *m)
{
    size_t low = (size_t)low_end(m);
    return low * sizeof(uint16_t) + ((size_t)m->block - low) * sizeof(float);
}

/* The types are those that the model's precision asks for: the matrices in one block, vectors
 * behind them. */
lm_code lm_loaded_room(lm_loaded *l, const lm_model *m, lm_backend *b, lm_err *e)
{
    l->b = b;
    l->dtype = m->build.precision.low;
    l->first = low_end(m);
    for (int i = 0; i < m->n_params; i++) {
        const lm_param *p = &m->param[i];
        if (l->first && p->weight != (p->offset < l->first))
            return lm_fail(e, LM_EBUG, m->graph->value[p->value].name, NULL,
                           "lies on the wrong side of the parameter block");
    }
    l->low_bytes = (size_t)l->first * sizeof *l->low;
    l->block_bytes = (size_t)(m->block - l->first) * sizeof *l->block;
    if ((l->first && b->alloc(b, l->low_bytes, "weights", (void **)&l->low, e)) ||
        b->alloc(b, l->block_bytes, "weights", (void **)&l->block, e))
        return e->code;
    return b->host_memory ? LM_OK : make_stage(l, m, e);
}

/* A matrix that the file holds transposed, element by element of a tile, in either type. */
static void transpose_into(const void *src, int64_t rows, int64_t cols, lm_dtype type, void *dst)
{
    enum { TILE = 64 };
    for (int64_t r0 = 0; r0 < rows; r0 += TILE)
        for (int64_t c0 = 0; c0 < cols; c0 += TILE)
            for (int64_t r = r0; r < rows && r < r0 + TILE; r++)
                for (int64_t c = c0; c < cols && c < c0 + TILE; c++)
                    if (type == LM_DTYPE_BF16)
                        ((uint16_t *)dst)[c * rows + r] = ((const uint16_t *)src)[r * cols + c];
                    else
                        ((float *)dst)[c * rows + r] = ((const float *)src)[r * cols + c];
}

static lm_code load_slice(lm_loaded *l, const lm_model *m, const lm_slice *s, const lm_st_tensor *t,
                          lm_err *e)
{
    lm_dtype type;
    void *place = place_of(l, m, s, &type), *to = l->stage ? l->stage : place, *tmp = NULL;
    if (s->transposed && lm_alloc_n(&tmp, (size_t)t->count, lm_dtype_size(type), "a tensor", e))
        return e->code;
    lm_code rc = lm_model_source_load(l->src, t, type, tmp ? tmp : to, e);
    if (!rc && tmp)
        transpose_into(tmp, s->dim[0], s->dim[1], type, to);
    lm_free(tmp);
    if (!rc && to != place)
        rc = settle(l, place, to, (size_t)t->count * lm_dtype_size(type), e);
    return rc;
}

lm_code lm_loaded_weights(lm_loaded *l, const lm_model *m, lm_backend *b, lm_err *e)
{
    if (lm_weights_check(m, l->src, e) || lm_loaded_room(l, m, b, e))
        return e->code;
    const lm_st_tensor *t = NULL;
    lm_code rc = lm_model_source_rewind(l->src, e);
    while (!rc && !(rc = lm_model_source_next(l->src, &t, e)) && t) {
        int i = lm_model_slice(m, t->name);
        if (i >= 0)
            rc = load_slice(l, m, &m->slice[i], t, e);
    }
    drop_stage(l);
    return rc ? rc : lm_model_source_finish(l->src, e);
}

typedef struct {
    lm_dtype from, to;
    const uint8_t *src;
    uint8_t *dst;
} convert_job;

static void convert_range(void *ctx, int64_t begin, int64_t end, int worker)
{
    const convert_job *j = ctx;
    (void)worker;
    lm_convert(j->from, j->src + (size_t)begin * lm_dtype_size(j->from), j->to,
               j->dst + (size_t)begin * lm_dtype_size(j->to), end - begin);
}

lm_code lm_loaded_put(lm_loaded *l, const lm_model *m, int i, lm_dtype dtype, const void *data,
                      lm_par *par, lm_err *e)
{
    const lm_slice *s = &m->slice[i];
    int64_t count = slice_count(s);
    lm_dtype type;
    void *place = place_of(l, m, s, &type), *to = l->stage ? l->stage : place, *tmp = NULL;
    if (s->transposed && lm_alloc_n(&tmp, (size_t)count, lm_dtype_size(type), "a tensor", e))
        return e->code;
    convert_job j = { dtype, type, data, tmp ? tmp : to };
    lm_par_for(par, count, 1 << 18, convert_range, &j);
    if (tmp)
        transpose_into(tmp, s->dim[0], s->dim[1], type, to);
    lm_free(tmp);
    return to == place ? LM_OK : settle(l, place, to, (size_t)count * lm_dtype_size(type), e);
}

lm_code lm_loaded_take(lm_loaded *l, const lm_model *m, const float *block, lm_backend *b,
                       lm_err *e)
{
    l->config = m->config;
    if (lm_loaded_room(l, m, b, e) || settle(l, l->block, block + l->first, l->block_bytes, e))
        return e->code;
    drop_stage(l);
    if (!l->low)
        return LM_OK;
    uint16_t *low = b->host_memory ? l->low : NULL;
    if (!low && lm_alloc_n(&low, (size_t)l->first, sizeof *low, "weights", e))
        return e->code;
    lm_round_bf16(block, low, l->first, b->par);
    if (low == l->low)
        return LM_OK;
    lm_code rc = settle(l, l->low, low, l->low_bytes, e);
    lm_free(low);
    return rc;
}

void lm_loaded_bind(const lm_loaded *l, const lm_model *m, lm_exec *x)
{
    for (int i = 0; i < m->n_params; i++) {
        int64_t at = m->param[i].offset;
        lm_exec_bind(x, m->param[i].value,
                     at < l->first ? (void *)(l->low + at) : (void *)(l->block + (at - l->first)));
    }
}

void lm_loaded_fini(lm_loaded *l)
{
    drop_stage(l);
    if (l->block)
        l->b->free(l->b, l->block, l->block_bytes);
    if (l->low)
        l->b->free(l->b, l->low, l->low_bytes);
    lm_model_source_close(l->src);
    lm_config_fini(&l->config);
    memset(l, 0, sizeof *l);
}
