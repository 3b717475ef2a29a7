/* SPDX-License-Identifier: Apache-2.0 */
/* head_rotate.c -- the Hadamard rotation of heads, which is its own inverse and gradient. */
#include "graph/passes.h"
#include "kernels/kv.h"
#include "op/example.h"
#include "op/ops.h"

static const lm_field rotate_fields[] = { { LM_ATTR_INT(lm_head_rotate_attr, heads, 'H') },
                                          { LM_ATTR_INT(lm_head_rotate_attr, kv_heads, 'K') },
                                          { LM_ATTR_INT(lm_head_rotate_attr, head_dim, 'D') },
                                          { LM_ATTR_FLAG(lm_head_rotate_attr, q) },
                                          { LM_ATTR_FLAG(lm_head_rotate_attr, k) },
                                          { LM_ATTR_FLAG(lm_head_rotate_attr, v) },
                                          { LM_ATTR_RARE_INT(lm_head_rotate_attr, part, 0, 0) },
                                          { 0 } };

static lm_code rotate_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_head_rotate_attr *a = c->attr;
    (void)want;
    return lm_expect(a->head_dim > 0 && a->head_dim <= LM_KV_MAX_DIM && a->part >= 0 &&
                         a->part <= a->head_dim,
                     "head_rotate", e, "heads of %lld numbers, not of 1 to %d, or a larger part",
                     (long long)a->head_dim, LM_KV_MAX_DIM);
}

static lm_code rotate_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_vid in[1] = { lm_grad_of(s, n->out[0]) }, dx = LM_NONE;
    if (!lm_grad_wants(s, n->in[0]))
        return LM_OK;
    if (lm_graph_append(lm_grad_graph(s), &lm_op_head_rotate, n->attr, in, &dx, e))
        return e->code;
    return lm_grad_give(s, n->in[0], dx, e);
}

static void rotate_cost(const lm_call *c, lm_cost *out)
{
    const lm_head_rotate_attr *a = c->attr;
    int64_t heads = (a->q ? a->heads : 0) + (a->k ? a->kv_heads : 0) + (a->v ? a->kv_heads : 0);
    double stages = 1; /* with the scale */
    const int64_t part = lm_head_rotate_part(a);
    for (int64_t block = part & -part; block > 1; block /= 2)
        stages++;
    out->flops = stages * (double)(c->in[0].dim[0] * heads * part);
    out->bytes = lm_call_bytes(c);
}

static void rotate_example(lm_rng r, int i, lm_example *x)
{
    static const int64_t dims[] = { 1, 4, 8, 20, 32, 64, 80, 96, 128, 256, 512 };
    int64_t n = lm_example_size(r, i, 0, 17), d = dims[(i + 6) % 11];
    int64_t kv = (int64_t)lm_example_draw(r, i, 1, 3);
    int64_t h = 1 + (int64_t)lm_example_draw(r, i, 2, 4);
    unsigned flags = 1 + (unsigned)lm_example_draw(r, i, 3, 7);
    lm_head_rotate_attr attr = { h, kv, d, flags & 1, flags & 2, flags & 4, 0 };
    if (lm_example_draw(r, i, 4, 3) == 0) { /* as latents with a rotated part behind them */
        attr.part = d;
        d = attr.head_dim = d + 2 * (int64_t)(1 + lm_example_draw(r, i, 5, 32));
    }
    *x = (lm_example){ .n_in = 1, .want = 1 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, n, (h + 2 * kv) * d);
    lm_example_attr(x, &attr);
}

const lm_op lm_op_head_rotate = {
    .name = "head_rotate",
    .attr_size = sizeof(lm_head_rotate_attr),
    .in = { { "x", "N,(H+2K)D", LM_ACT_TYPE | LM_OVER } },
    .out = { { "y", "N,(H+2K)D", LM_ACT_TYPE | LM_OVER } },
    .fields = rotate_fields,
    .split = "N HK",
    .prec = LM_PREC_INFER,
    .shape = rotate_shape,
    .grad = rotate_grad,
    .cost = rotate_cost,
    .example = rotate_example,
};
