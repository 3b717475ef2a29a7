/* SPDX-License-Identifier: Apache-2.0 */
/* embed_ref.c -- the definition of the embed family (kernels/embed.h). */
#include "kernels/embed.h"

#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"
#include "kernels/panels.h"
#include "numeric/code_rows.h"

static double scale_of(const lm_call *c)
{
    const lm_embed_attr *a = c->attr;
    return a->scale != 0 ? a->scale : 1;
}

static void embed(const lm_call *c)
{
    const lm_tensor *tok = &c->in[0], *wte = &c->in[1], *pos = opt_in(c, 2), *wpe = opt_in(c, 3);
    lm_tensor *x = &c->out[0];
    int64_t n_cols = width(x);
    double scale = rounded(x->dtype, scale_of(c));
    lm_tensor row = { .data = c->work, .dtype = wte->dtype };
    for (int64_t n = 0; n < rows_of(x); n++) {
        int64_t t = (int64_t)get(tok, n) * n_cols, p = wpe ? (int64_t)get(pos, n) * n_cols : 0;
        if ((int64_t)get(tok, n) >= wte->dim[0]) {
            for (int64_t i = 0; i < n_cols; i++)
                set(x, n * n_cols + i, wpe ? get(wpe, p + i) : 0);
            continue;
        }
        if (wte->codes) {
            lm_code_rows_numbers(wte->codes, (int64_t)get(tok, n), 1, n_cols, wte->dtype, NULL,
                                 row.data, (double *)row.data + n_cols);
            t = 0;
        }
        for (int64_t i = 0; i < n_cols; i++) {
            int64_t at = wte->panels ? lm_panel_at((int64_t)get(tok, n), i, n_cols) : t + i;
            set(x, n * n_cols + i,
                scale * get(wte->codes ? &row : wte, at) + (wpe ? get(wpe, p + i) : 0));
        }
    }
}

static size_t embed_work(const lm_call *c, int threads)
{
    int64_t n_cols = width(&c->out[0]);
    (void)threads;
    if (!c->in[1].codes)
        return 0;
    return (size_t)n_cols * sizeof(double) + lm_code_rows_scratch(c->in[1].dtype, n_cols);
}

/* Each id is summed at its first occurrence, over that row and all later ones, in double. */
static void scatter(const lm_call *c, const lm_tensor *dx, const lm_tensor *ids, lm_tensor *dw,
                    lm_acc acc, double scale)
{
    int64_t n_rows = rows_of(dx), n_cols = width(dx);
    for (int64_t i = 0; overwrites(c, acc) && i < lm_tensor_count(dw); i++)
        set(dw, i, 0);
    for (int64_t n = 0; n < n_rows; n++) {
        int64_t id = (int64_t)get(ids, n), before = 0;
        while (before < n && (int64_t)get(ids, before) != id)
            before++;
        if (before < n || id >= dw->dim[0])
            continue;
        for (int64_t i = 0; i < n_cols; i++) {
            double sum = 0;
            for (int64_t m = n; m < n_rows; m++)
                sum += (int64_t)get(ids, m) == id ? get(dx, m * n_cols + i) : 0;
            set(dw, id * n_cols + i, get(dw, id * n_cols + i) + scale * sum);
        }
    }
}

static void embed_dw(const lm_call *c)
{
    const lm_embed_attr *a = c->attr;
    scatter(c, &c->in[0], &c->in[1], &c->out[0], a->acc_tok, rounded(c->in[0].dtype, scale_of(c)));
    if (opt_out(c, 1))
        scatter(c, &c->in[0], &c->in[2], &c->out[1], a->acc_pos, 1);
}

const lm_kernel lm_embed_ref_kernels[] = {
    { "embed", LM_DTYPE_NONE, LM_CPU_REF, embed, embed_work },
    { "embed_dw", LM_DTYPE_NONE, LM_CPU_REF, embed_dw, NULL },
    { NULL, LM_DTYPE_NONE, LM_CPU_REF, NULL, NULL },
};
