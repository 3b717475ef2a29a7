/* SPDX-License-Identifier: Apache-2.0 */
/* panels.c -- weights in the order in which products read them. */
#include "kernels/panels.h"

#include "op/example.h"
#include "op/ops.h"

static lm_code panels_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_tensor *x = &c->in[0];
    (void)want;
    return lm_expect(x->dim[0] % LM_PANEL == 0 && x->dim[1] % LM_PANEL == 0, "panels", e,
                     "rows and columns are multiples of %d", LM_PANEL);
}

static void panels_cost(const lm_call *c, lm_cost *out)
{
    out->flops = (double)lm_tensor_count(&c->in[0]);
    out->bytes = lm_call_bytes(c);
}

static void panels_example(lm_rng r, int i, lm_example *x)
{
    int64_t m = lm_example_size(r, i, 0, 5), k = lm_example_size(r, i, 1, 5);
    *x = (lm_example){ .n_in = 1, .want = 1 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, m * LM_PANEL, k * LM_PANEL);
    x->out[0] = x->in[0];
    x->out[0].dtype = LM_DTYPE_BF16;
}

const lm_op lm_op_panels = {
    .name = "panels",
    .in = { { "x", "M,K", LM_ACT_TYPE | LM_FIXED } },
    .out = { { "y", "M,K", LM_GIVEN | LM_ANY_TYPE } },
    .split = "",
    .prec = LM_PREC_DENY,
    .shape = panels_shape,
    .cost = panels_cost,
    .example = panels_example,
};
