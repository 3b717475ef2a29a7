/* SPDX-License-Identifier: Apache-2.0 */
/* gaussian_ref.c -- the definition of the rows of Gaussian attention (kernels/gaussian.h). */
#include "kernels/gaussian.h"

#include <math.h>

#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"

/* The columns behind a head of D numbers, from x[from..], into y[to..]. */
static void put_columns(const lm_gaussian_attr *a, bool key, const lm_tensor *x, int64_t from,
                        lm_tensor *y, int64_t to)
{
    int own = lm_gaussian_own(a, key), units = lm_gaussian_units(a, key);
    double n = 0, part[3];
    for (int64_t d = 0; d < a->head_dim; d++)
        n += get(x, from + d) * get(x, from + d) / 2;
    part[0] = rounded(y->dtype, -n / LM_GAUSSIAN_UNIT);
    part[1] = part[2] = 0;
    if (isfinite(part[0])) {
        part[1] = rounded(y->dtype, -n - LM_GAUSSIAN_UNIT * part[0]);
        part[2] = rounded(y->dtype, -n - LM_GAUSSIAN_UNIT * part[0] - part[1]);
    }
    for (int i = 0; i < LM_GAUSSIAN_MORE; i++)
        set(y, to + i, 0);
    for (int i = 0; i < 3; i++) {
        if (own >= 0)
            set(y, to + own + i, part[i]);
        if (units >= 0)
            set(y, to + units + i, i ? 1 : LM_GAUSSIAN_UNIT);
    }
}

static void gaussian_rows(const lm_call *c)
{
    const lm_gaussian_attr *a = c->attr;
    const lm_tensor *x = &c->in[0];
    lm_tensor *y = &c->out[0];
    int64_t D = a->head_dim, heads = a->heads + a->kv_heads;
    for (int64_t i = 0; i < rows_of(x); i++) {
        int64_t from = i * width(x), to = i * width(y);
        for (int64_t h = 0; h < heads + a->kv_heads; h++, from += D, to += D) {
            for (int64_t d = 0; d < D; d++)
                set(y, to + d, get(x, from + d));
            if (h >= heads)
                continue;
            put_columns(a, h >= a->heads, x, from, y, to + D);
            to += LM_GAUSSIAN_MORE;
        }
    }
}

static void gaussian_rows_dx(const lm_call *c)
{
    const lm_gaussian_attr *a = c->attr;
    const lm_tensor *dy = &c->in[0], *y = &c->in[1];
    lm_tensor *dx = &c->out[0];
    int64_t D = a->head_dim, heads = a->heads + a->kv_heads;
    for (int64_t i = 0; i < rows_of(dx); i++) {
        int64_t from = i * width(y), to = i * width(dx);
        for (int64_t h = 0; h < heads + a->kv_heads; h++, from += D, to += D) {
            int own = h < heads ? lm_gaussian_own(a, h >= a->heads) : -1;
            double by = own < 0 ? 0 : get(dy, from + D + own) / LM_GAUSSIAN_UNIT;
            for (int64_t d = 0; d < D; d++)
                set(dx, to + d, get(dy, from + d) - (own < 0 ? 0 : by * get(y, from + d)));
            from += h < heads ? LM_GAUSSIAN_MORE : 0;
        }
    }
}

const lm_kernel lm_gaussian_ref_kernels[] = {
    { "gaussian_rows", LM_DTYPE_NONE, LM_CPU_REF, gaussian_rows, NULL },
    { "gaussian_rows_dx", LM_DTYPE_NONE, LM_CPU_REF, gaussian_rows_dx, NULL },
    { NULL, LM_DTYPE_NONE, LM_CPU_REF, NULL, NULL },
};
