/* SPDX-License-Identifier: Apache-2.0 */
/* weights.c -- the flat block of parameters: initialise, load, write, bind. */
#include "model/weights.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/hash.h"
#include "base/mem.h"
#include "base/rng.h"

/* Element (r, c) of a slice in the file's shape lies here in the block. */
static int64_t slice_cols(const lm_model *m, const lm_slice *s)
{
    const lm_tensor *t = &m->graph->value[m->param[s->param].value].t;
    return t->ndim == 2 ? t->dim[1] : 1;
}

static int64_t slice_at(const lm_model *m, const lm_slice *s)
{
    return m->param[s->param].offset + s->row * slice_cols(m, s);
}

typedef struct {
    lm_rng rng;
    const lm_slice *s;
    float *dst;
    int64_t cols;
} init_job;

/* Numbers are counted in the file's order, so that the published layout decides, not ours. */
static void init_range(void *ctx, int64_t begin, int64_t end, int worker)
{
    const init_job *j = ctx;
    (void)worker;
    for (int64_t i = begin; i < end; i++) {
        int64_t r = i / j->cols, c = i % j->cols;
        int64_t index = j->s->transposed ? c * j->s->rows + r : i;
        j->dst[i] = (float)(j->s->std * lm_rng_normal(j->rng, (uint64_t)index));
    }
}

static void fill_range(void *ctx, int64_t begin, int64_t end, int worker)
{
    const init_job *j = ctx;
    float v = j->s->init == LM_INIT_ONES ? 1.0f : 0.0f;
    (void)worker;
    for (int64_t i = begin; i < end; i++)
        j->dst[i] = v;
}

void lm_weights_init(const lm_model *m, uint64_t seed, lm_par *par, float *block)
{
    for (int i = 0; i < m->n_slices; i++) {
        const lm_slice *s = &m->slice[i];
        init_job j = { .rng = lm_rng_make(seed, "init", lm_hash_str(s->name)),
                       .s = s,
                       .dst = block + slice_at(m, s),
                       .cols = slice_cols(m, s) };
        lm_par_for(par, s->rows * j.cols, 1 << 16,
                   s->init == LM_INIT_NORMAL ? init_range : fill_range, &j);
    }
}

enum { TILE = 64 }; /* of a transposition: 64 x 64 floats stay in the first-level cache */

static void transpose(const float *src, int64_t rows, int64_t cols, float *dst)
{
    for (int64_t r0 = 0; r0 < rows; r0 += TILE)
        for (int64_t c0 = 0; c0 < cols; c0 += TILE)
            for (int64_t r = r0; r < rows && r < r0 + TILE; r++)
                for (int64_t c = c0; c < cols && c < c0 + TILE; c++)
                    dst[c * rows + r] = src[r * cols + c];
}

void lm_slice_get(const lm_model *m, int i, const float *block, float *dst)
{
    const lm_slice *s = &m->slice[i];
    int64_t cols = slice_cols(m, s);
    if (s->transposed)
        transpose(block + slice_at(m, s), s->rows, cols, dst);
    else
        memcpy(dst, block + slice_at(m, s), (size_t)(s->rows * cols) * sizeof *dst);
}

int64_t lm_slice_offset(const lm_model *m, int i)
{
    return slice_at(m, &m->slice[i]);
}

void lm_slice_turn(const lm_model *m, int i, const float *src, float *dst)
{
    const lm_slice *s = &m->slice[i];
    int64_t cols = slice_cols(m, s);
    if (s->transposed)
        transpose(src, cols, s->rows, dst);
    else
        memcpy(dst, src, (size_t)(s->rows * cols) * sizeof *src);
}

void lm_slice_put(const lm_model *m, int i, const float *src, float *block)
{
    lm_slice_turn(m, i, src, block + lm_slice_offset(m, i));
}

float *lm_slice_view(const lm_model *m, int i, float *block)
{
    const lm_slice *s = &m->slice[i];
    return s->transposed ? NULL : block + slice_at(m, s);
}

static void show_shape(int ndim, const int64_t *dim, char *out, size_t size)
{
    size_t n = 0;
    out[0] = 0;
    for (int i = 0; i < ndim && n + 24 < size; i++)
        n += (size_t)snprintf(out + n, size - n, i ? ",%" PRId64 : "%" PRId64, dim[i]);
}

static lm_code check_tensor(const lm_slice *s, const lm_st_tensor *t, const char *file, lm_err *e)
{
    char want[64], have[256];
    bool same = t->ndim == s->ndim;
    for (int i = 0; same && i < s->ndim; i++)
        same = t->dim[i] == s->dim[i];
    show_shape(s->ndim, s->dim, want, sizeof want);
    show_shape(t->ndim, t->dim, have, sizeof have);
    if (!same)
        return lm_fail(e, LM_EFORMAT, file, "config.json and weights belong to different models",
                       "tensor \"%s\" has shape [%s], config.json asks for [%s]", t->name, have,
                       want);
    if (t->dtype == LM_DTYPE_NONE || !lm_dtype_is_float(t->dtype))
        return lm_fail(e, LM_EFORMAT, file, NULL, "tensor \"%s\" has dtype %s, not a float type",
                       t->name, t->dtype_name);
    return LM_OK;
}

static lm_code load_slice(const lm_model *m, int i, const lm_model_source *src,
                          const lm_st_tensor *t, float *block, lm_err *e)
{
    const lm_slice *s = &m->slice[i];
    if (!s->transposed)
        return lm_model_source_load(src, t, LM_DTYPE_F32, block + slice_at(m, s), e);
    float *tmp = NULL;
    if (lm_alloc_n(&tmp, (size_t)t->count, sizeof *tmp, "a tensor", e))
        return e->code;
    lm_code rc = lm_model_source_load(src, t, LM_DTYPE_F32, tmp, e);
    if (!rc)
        lm_slice_put(m, i, tmp, block);
    lm_free(tmp);
    return rc;
}

lm_code lm_weights_check(const lm_model *m, const lm_model_source *src, lm_err *e)
{
    bool *seen = NULL;
    lm_code rc = LM_OK;
    if (lm_alloc_n(&seen, (size_t)m->n_slices, sizeof *seen, "a list of tensors", e))
        return e->code;
    for (size_t k = 0; !rc && k < lm_model_source_count(src); k++) {
        const lm_st_tensor *t = lm_model_source_at(src, k);
        const char *file = lm_model_source_file_of(src, t);
        int i = lm_model_slice(m, t->name);
        if (i < 0) {
            if (!lm_model_ignores(m, t->name))
                rc = lm_fail(e, LM_EFORMAT, file, NULL, "tensor \"%s\" is no part of a %s model",
                             t->name, lm_arch_name(m->config.arch));
            continue;
        }
        rc = check_tensor(&m->slice[i], t, file, e);
        seen[i] = true;
    }
    lm_err_in(e, "%s", lm_model_source_path(src));
    for (int i = 0; !rc && i < m->n_slices; i++)
        if (!seen[i])
            rc = lm_fail(e, LM_EFORMAT, lm_model_source_path(src), NULL, "tensor \"%s\" is missing",
                         m->slice[i].name);
    lm_free(seen);
    return rc;
}

lm_code lm_weights_load(const lm_model *m, lm_model_source *src, lm_par *par, float *block,
                        lm_err *e)
{
    const lm_st_tensor *t = NULL;
    lm_code rc = lm_weights_check(m, src, e);
    (void)par;
    if (!rc)
        rc = lm_model_source_rewind(src, e);
    while (!rc && !(rc = lm_model_source_next(src, &t, e)) && t) {
        int i = lm_model_slice(m, t->name);
        if (i >= 0)
            rc = load_slice(m, i, src, t, block, e);
    }
    return rc ? rc : lm_model_source_finish(src, e);
}

/* Slice i in the block's order, wherever that lies in the file. */
static lm_code load_staged(const lm_model *m, int i, const lm_model_source *src,
                           const lm_st_tensor *t, float *stage, float *turned, lm_err *e)
{
    const lm_slice *s = &m->slice[i];
    if (lm_model_source_load(src, t, LM_DTYPE_F32, s->transposed ? turned : stage, e))
        return e->code;
    if (s->transposed)
        transpose(turned, slice_cols(m, s), s->rows, stage);
    return LM_OK;
}

lm_code lm_weights_load_on(const lm_model *m, lm_model_source *src, lm_backend *b, float *block,
                           lm_err *e)
{
    if (b->host_memory)
        return lm_weights_load(m, src, b->par, block, e);
    const lm_st_tensor *t = NULL;
    float *turned = NULL;
    void *stage = NULL;
    size_t most = 0, turns = 0, room = 0;
    for (int i = 0; i < m->n_slices; i++) {
        size_t n = (size_t)(m->slice[i].rows * slice_cols(m, &m->slice[i]));
        most = n > most ? n : most;
        turns = m->slice[i].transposed && n > turns ? n : turns;
    }
    lm_code rc = lm_weights_check(m, src, e);
    if (!rc)
        rc = b->host_alloc(b, most * sizeof(float), "a tensor", &stage, e);
    if (!rc && turns)
        rc = lm_grow(&turned, &room, turns, sizeof *turned, "a tensor", e);
    if (!rc)
        rc = lm_model_source_rewind(src, e);
    while (!rc && !(rc = lm_model_source_next(src, &t, e)) && t) {
        int i = lm_model_slice(m, t->name);
        if (i < 0)
            continue;
        rc = load_staged(m, i, src, t, stage, turned, e);
        if (!rc)
            rc = b->copy(b, block + slice_at(m, &m->slice[i]), stage,
                         (size_t)t->count * sizeof(float), b->main, e);
        if (!rc)
            rc = b->sync(b, b->main, e); /* the next one comes to the same place */
    }
    if (stage)
        b->host_free(b, stage, most * sizeof(float));
    lm_free(turned);
    return rc ? rc : lm_model_source_finish(src, e);
}

lm_code lm_weights_plan(const lm_model *m, lm_dtype dtype, lm_st_plan *plan, lm_err *e)
{
    for (int i = 0; i < m->n_slices; i++)
        if (lm_st_plan_add(plan, m->slice[i].name, dtype, m->slice[i].ndim, m->slice[i].dim, e))
            return e->code;
    return LM_OK;
}

lm_code lm_weights_write(const lm_model *m, const float *block, lm_folder *f, lm_err *e)
{
    float *tmp = NULL;
    size_t room = 0;
    lm_code rc = LM_OK;
    for (const lm_st_tensor *t; !rc && (t = lm_folder_next(f));) {
        int i = lm_model_slice(m, t->name);
        if (i < 0) {
            rc = lm_fail(e, LM_EBUG, t->name, NULL, "is planned but no tensor of the model");
            break;
        }
        const float *data = block + slice_at(m, &m->slice[i]);
        int64_t count = t->count;
        if (m->slice[i].transposed) {
            rc = lm_grow(&tmp, &room, (size_t)count, sizeof *tmp, "a tensor", e);
            if (!rc)
                lm_slice_get(m, i, block, tmp);
            data = tmp;
        }
        if (!rc)
            rc = lm_folder_write_as(f, LM_DTYPE_F32, data, count, e);
    }
    lm_free(tmp);
    return rc;
}

typedef struct {
    const float *src;
    uint16_t *dst;
    lm_kernel_fn cast;
} round_job;

static void round_range(void *ctx, int64_t begin, int64_t end, int worker)
{
    const round_job *j = ctx;
    lm_tensor in = lm_shape1(LM_DTYPE_F32, end - begin);
    lm_tensor out = lm_shape1(LM_DTYPE_BF16, end - begin);
    (void)worker;
    in.data = (void *)(uintptr_t)(j->src + begin);
    out.data = j->dst + begin;
    j->cast(&(lm_call){ .in = &in, .n_in = 1, .out = &out, .n_out = 1 });
}

void lm_round_bf16(const float *src, uint16_t *dst, int64_t n, lm_par *par)
{
    round_job j = { src, dst, lm_cpu_kernel("cast", LM_DTYPE_F32, lm_cpu_detect())->run };
    lm_par_for(par, n, 1 << 18, round_range, &j);
}

void lm_weights_round(const lm_model *m, const float *block, uint16_t *low, lm_par *par)
{
    lm_round_bf16(block, low, m->block, par);
}

void lm_weights_round_on(const lm_model *m, lm_backend *b, const float *block, uint16_t *low)
{
    if (b->host_memory) {
        lm_weights_round(m, block, low, b->par);
        return;
    }
    lm_tensor in = lm_shape1(LM_DTYPE_F32, m->block), out = lm_shape1(LM_DTYPE_BF16, m->block);
    in.data = (void *)(uintptr_t)block;
    out.data = low;
    b->kernel(b, "cast", LM_DTYPE_F32)
        ->run(&(lm_call){ .in = &in, .n_in = 1, .out = &out, .n_out = 1, .stream = b->main });
}

lm_code lm_rotary_new(const lm_model *m, lm_backend *b, lm_rotary *r, lm_err *e)
{
    *r = (lm_rotary){ .b = b };
    if (m->rope == LM_NONE)
        return LM_OK;
    float *host = NULL;
    size_t n = (size_t)(m->rope_rows * m->config.head_dim), bytes = n * sizeof *r->data;
    if (b->alloc(b, bytes, "a rotary table", (void **)&r->data, e))
        return e->code;
    r->bytes = bytes;
    if (b->host_memory) {
        lm_rope_table(&m->config, m->rope_rows, r->data);
        return LM_OK;
    }
    lm_code rc = lm_alloc_n(&host, n, sizeof *host, "a rotary table", e);
    if (!rc) {
        lm_rope_table(&m->config, m->rope_rows, host);
        rc = b->copy(b, r->data, host, bytes, b->main, e);
    }
    if (!rc)
        rc = b->sync(b, b->main, e);
    lm_free(host);
    if (rc)
        lm_rotary_fini(r);
    return rc;
}

void lm_rotary_bind(const lm_rotary *r, const lm_model *m, lm_exec *x)
{
    if (m->rope != LM_NONE)
        lm_exec_bind(x, m->rope, r->data);
}

void lm_rotary_fini(lm_rotary *r)
{
    if (r->data)
        r->b->free(r->b, r->data, r->bytes);
    memset(r, 0, sizeof *r);
}

void lm_weights_bind(const lm_model *m, lm_exec *x, const float *block, const uint16_t *low,
                     float *rope)
{
    for (int i = 0; i < m->n_params; i++) {
        const lm_param *p = &m->param[i];
        const void *data =
            p->weight && low ? (const void *)(low + p->offset) : (const void *)(block + p->offset);
        lm_exec_bind(x, p->value, (void *)(uintptr_t)data);
    }
    if (m->rope != LM_NONE && rope) {
        lm_rope_table(&m->config, m->rope_rows, rope);
        lm_exec_bind(x, m->rope, rope);
    }
}
