/* SPDX-License-Identifier: Apache-2.0 */
/* embed_simd.c -- embedding lookup, and its gradient by counting sort: rows are grouped by id in
 * row order, then each id is summed by one thread, so the bits do not depend on threads. */
#include "kernels/embed.h"

#include "kernels/cpu/code_rows.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/tables.h"
#include "kernels/panels.h"

/* The scale of a token's row, as activations of type t have it. */
static float scale_of(const lm_call *c, lm_dtype t)
{
    const lm_embed_attr *a = c->attr;
    float cell;
    lm_set(t, &cell, 0, a->scale != 0 ? a->scale : 1);
    return (float)lm_get(t, &cell, 0);
}

#ifdef __AVX512F__
#define CODER lm_code_rows_avx512
#else
#define CODER lm_code_rows_avx2
#endif

/* A row of a table in codes or panels as numbers, and what makes it; 0: the table is rows of numbers. */
static size_t codes_work(const lm_call *c)
{
    int64_t n_cols = last_dim(&c->out[0]);
    lm_dtype t = c->in[1].dtype;
    if (c->in[1].panels)
        return (size_t)n_cols * sizeof(float);
    if (!c->in[1].codes)
        return 0;
    return ((size_t)n_cols * sizeof(float) + lm_code_rows_scratch(t, n_cols) + 63) / 64 * 64;
}

/* Row `r` of panels: 16 pairs of each 32 numbers, 32 apart. */
static void row_of_panels(const uint16_t *panels, int64_t r, int64_t n_cols, uint16_t *out)
{
    for (int64_t k = 0; k < n_cols; k += LM_PANEL) {
        const uint16_t *from = panels + lm_panel_at(r, k, n_cols);
        for (int i = 0; i < LM_PANEL; i += 2)
            memcpy(out + k + i, from + i * 16, 2 * sizeof *out);
    }
}

LM_INLINE void embed_some(lm_dtype t, const lm_call *c, int64_t begin, int64_t end, void *made)
{
    const int32_t *tok = c->in[0].data, *pos = opt_data(c->in, c->n_in, 2);
    const void *wte = c->in[1].data, *wpe = opt_data(c->in, c->n_in, 3);
    void *x = c->out[0].data;
    int64_t n_cols = last_dim(&c->out[0]);
    float scale = scale_of(c, t);
    for (int64_t row = begin; row < end; row++) {
        int64_t from = tok[row] * n_cols, to = row * n_cols;
        if (tok[row] >= c->in[1].dim[0]) { /* virtual */
            size_t bytes = (size_t)n_cols * lm_dtype_size(t);
            if (wpe)
                memcpy((char *)x + (size_t)row * bytes,
                       (const char *)wpe + (size_t)pos[row] * bytes, bytes);
            else
                memset((char *)x + (size_t)row * bytes, 0, bytes);
            continue;
        }
        if (c->in[1].panels) {
            row_of_panels(c->in[1].data, tok[row], n_cols, made);
            wte = made;
            from = 0;
        } else if (made) {
            lm_code_rows_numbers(c->in[1].codes, tok[row], 1, n_cols, t, &CODER, made,
                                 (float *)made + n_cols);
            wte = made;
            from = 0;
        }
        if (!wpe && scale == 1) {
            VF_FOR(i, n, n_cols, { vf_put_any(t, x, to + i, vf_get_any(t, wte, from + i, n), n); });
            continue;
        }
        int64_t place = wpe ? pos[row] * n_cols : 0;
        VF_FOR(i, n, n_cols, {
            vf v = vf_get_any(t, wte, from + i, n);
            if (scale != 1)
                v *= vf_set(scale);
            if (wpe)
                v += vf_get_any(t, wpe, place + i, n);
            vf_put_any(t, x, to + i, v, n);
        });
    }
}

static void embed_rows_f32(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ctx;
    size_t room = codes_work(c);
    embed_some(LM_DTYPE_F32, c, begin, end, room ? (char *)c->work + (size_t)worker * room : NULL);
}

static void embed_rows_bf16(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ctx;
    size_t room = codes_work(c);
    embed_some(LM_DTYPE_BF16, c, begin, end, room ? (char *)c->work + (size_t)worker * room : NULL);
}

static size_t embed_work(const lm_call *c, int threads)
{
    return (size_t)threads * codes_work(c);
}

static void embed(const lm_call *c)
{
    lm_par_for(c->par, row_count(&c->out[0]), grain_rows(last_dim(&c->out[0])),
               VF_PICK(embed_rows, c->out[0].dtype), (void *)(uintptr_t)c);
}

typedef struct {
    const void *dx;
    float *dw;
    const int32_t *start; /* rows of id k: order[start[k] .. start[k+1]) */
    const int32_t *order;
    int64_t n_cols;
    bool fresh; /* replace dw instead of adding */
    float scale;
} scatter;

LM_INLINE void scatter_ids(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const scatter *s = ctx;
    for (int64_t id = begin; id < end; id++) {
        float *dw = s->dw + id * s->n_cols;
        if (s->fresh)
            memset(dw, 0, (size_t)s->n_cols * sizeof(float));
        for (int32_t k = s->start[id]; k < s->start[id + 1]; k++) {
            int64_t from = s->order[k] * s->n_cols;
            VF_FOR(i, n, s->n_cols, {
                vf d = vf_get_any(t, s->dx, from + i, n);
                if (s->scale != 1)
                    d *= vf_set(s->scale);
                vf_put_any(LM_DTYPE_F32, dw, i, vf_get_any(LM_DTYPE_F32, dw, i, n) + d, n);
            });
        }
    }
}
VF_TYPED(scatter_ids)

/* start[0..n_ids], order[0..n_rows): a stable counting sort of the rows by id, without those behind the table. */
static void sort_rows(const int32_t *ids, int64_t n_rows, int64_t n_ids, int32_t *start,
                      int32_t *order)
{
    memset(start, 0, (size_t)(n_ids + 1) * sizeof(int32_t));
    for (int64_t r = 0; r < n_rows; r++)
        if (ids[r] < n_ids)
            start[ids[r] + 1]++;
    for (int64_t k = 0; k < n_ids; k++)
        start[k + 1] += start[k];
    for (int64_t r = 0; r < n_rows; r++) /* start[k] runs ahead to the end of its group ... */
        if (ids[r] < n_ids)
            order[start[ids[r]]++] = (int32_t)r;
    for (int64_t k = n_ids; k > 0; k--) /* ... which is where the next group began */
        start[k] = start[k - 1];
    start[0] = 0;
}

static void add_rows(const lm_call *c, const int32_t *ids, lm_tensor *dw, lm_acc acc, float scale)
{
    int64_t n_rows = row_count(&c->in[0]), n_ids = row_count(dw);
    int32_t *start = c->work, *order = start + n_ids + 1;
    sort_rows(ids, n_rows, n_ids, start, order);
    scatter s = { c->in[0].data, dw->data, start, order, last_dim(dw), overwrites(c, acc), scale };
    lm_par_for(c->par, n_ids, 64, VF_PICK(scatter_ids, c->in[0].dtype), &s);
}

static void embed_dw(const lm_call *c)
{
    const lm_embed_attr *a = c->attr;
    add_rows(c, c->in[1].data, &c->out[0], a->acc_tok, scale_of(c, c->in[0].dtype));
    if (opt_data(c->out, c->n_out, 1))
        add_rows(c, c->in[2].data, &c->out[1], a->acc_pos, 1);
}

static size_t embed_dw_work(const lm_call *c, int threads)
{
    (void)threads;
    int64_t n_ids = row_count(&c->out[0]);
    if (c->n_out > 1 && c->out[1].ndim && row_count(&c->out[1]) > n_ids)
        n_ids = row_count(&c->out[1]);
    return (size_t)(n_ids + 1 + row_count(&c->in[0])) * sizeof(int32_t);
}

const lm_kernel LM_TABLE_NAME(embed, LM_SIMD)[] = {
    VF_KERNEL("embed", embed, embed_work),
    VF_KERNEL("embed_dw", embed_dw, embed_dw_work),
    VF_KERNEL_END,
};
