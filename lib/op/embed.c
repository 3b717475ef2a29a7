/* SPDX-License-Identifier: Apache-2.0 */
/* embed.c -- token and position embeddings. */
#include "kernels/embed.h"

#include "numeric/code_rows.h"
#include "op/append.h"
#include "op/example.h"
#include "op/ops.h"

static const lm_field embed_fields[] = { { LM_ATTR_RARE_REAL(lm_embed_attr, scale) }, { 0 } };
static const lm_field dw_fields[] = { { LM_ATTR_WORD(lm_embed_attr, acc_tok, lm_acc_words) },
                                      { LM_ATTR_WORD(lm_embed_attr, acc_pos, lm_acc_words) },
                                      { LM_ATTR_RARE_REAL(lm_embed_attr, scale) },
                                      { 0 } };

static lm_code embed_shape(lm_call *c, unsigned want, lm_err *e)
{
    (void)want;
    return lm_expect(lm_absent(&c->in[2]) == lm_absent(&c->in[3]), "embed", e,
                     "pos and wpe go together");
}

static lm_code embed_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_graph *g = lm_grad_graph(s);
    lm_vid in[3] = { lm_grad_of(s, n->out[0]), n->in[0], n->in[2] };
    lm_vid wte = n->in[1], wpe = n->in[3], out[2];
    lm_embed_attr attr = *(const lm_embed_attr *)n->attr;
    if (!lm_grad_wants(s, wte) && !lm_grad_wants(s, wpe))
        return LM_OK;
    g->phase = LM_PHASE_BACKWARD_WEIGHT;
    if (lm_grad_param(s, wte, &out[0], &attr.acc_tok, e) ||
        lm_grad_param(s, wpe, &out[1], &attr.acc_pos, e))
        return e->code;
    if (out[0] == LM_SKIP) { /* wte is frozen, but the kernel writes its gradient */
        lm_tensor t = g->value[wte].t;
        t.dtype = lm_wide(t.dtype);
        if (lm_graph_value(g, LM_ROLE_ACT, t, NULL, &out[0], e))
            return e->code;
    }
    if (lm_graph_append(g, &lm_op_embed_dw, &attr, in, out, e))
        return e->code;
    /* The tables are not operands of the gradient: their shapes are those of its outputs. */
    return LM_OK;
}

static void embed_cost(const lm_call *c, lm_cost *out)
{
    out->flops = lm_absent(&c->in[2]) ? 0 : (double)lm_tensor_count(&c->out[0]);
    out->bytes = 2.0 * (double)lm_stored_bytes(&c->out[0]);
}

static void embed_example(lm_rng r, int i, lm_example *x)
{
    int64_t n = lm_example_size(r, i, 0, 127), v = lm_example_size(r, i, 1, 60);
    int64_t c = lm_example_size(r, i, 2, 130);
    lm_embed_attr attr = { LM_ACC_FIRST, LM_ACC_FIRST,
                           lm_example_draw(r, i, 4, 3) == 0 ? 5.65685 : 0 };
    *x = (lm_example){ .n_in = 4, .want = 1 };
    x->in[0] = lm_shape1(LM_DTYPE_I32, n);
    x->in[1] = lm_shape2(LM_DTYPE_F32, v, c);
    if (lm_example_draw(r, i, 3, 2)) {
        x->in[2] = lm_shape1(LM_DTYPE_I32, n);
        x->in[3] = lm_shape2(LM_DTYPE_F32, 20, c);
    }
    lm_example_attr(x, &attr);
}

static void embed_fill(lm_rng r, const lm_call *c)
{
    int32_t *tok = c->in[0].data, *pos = c->in[2].data;
    for (int64_t i = 0; i < c->in[0].dim[0]; i++) {
        tok[i] = (int32_t)lm_rng_below(r, (uint64_t)i * 2, (uint64_t)c->in[1].dim[0]);
        if (pos)
            pos[i] = (int32_t)lm_rng_below(r, (uint64_t)i * 2 + 1, (uint64_t)c->in[3].dim[0]);
    }
}

/* Rows of the vocabulary that are here; positions where their rows are. */
static lm_code embed_shard(lm_shard_call *s, lm_err *e)
{
    if (s->letters == LM_LETTER('V') && lm_shard_ids(s, 0, NULL, e))
        return e->code;
    if (s->in[3] == LM_NONE)
        s->in[2] = LM_NONE;
    return lm_shard_append(s, e);
}

static lm_code embed_dw_shard(lm_shard_call *s, lm_err *e)
{
    if (s->letters == LM_LETTER('V') && lm_shard_ids(s, 1, NULL, e))
        return e->code;
    return lm_shard_append(s, e);
}

const lm_op lm_op_embed = {
    .name = "embed",
    .attr_size = sizeof(lm_embed_attr),
    .in = { { "tok", "N", LM_IDS },
            { "wte", "V,C", LM_WEIGHT },
            { "pos", "N", LM_IDS | LM_OPTIONAL },
            { "wpe", "P,C", LM_WEIGHT | LM_OPTIONAL | LM_ADDEND } },
    .out = { { "x", "N,C", LM_ACT_TYPE } },
    .fields = embed_fields,
    .split = "N C V+",
    .shard = embed_shard,
    .ranges = "V",
    .prec = LM_PREC_ALLOW,
    .shape = embed_shape,
    .grad = embed_grad,
    .cost = embed_cost,
    .example = embed_example,
    .fill = embed_fill,
};

static void embed_dw_cost(const lm_call *c, lm_cost *out)
{
    out->flops = (double)lm_tensor_count(&c->in[0]);
    out->bytes = lm_call_bytes(c);
}

const lm_op lm_op_embed_dw = {
    .name = "embed_dw",
    .attr_size = sizeof(lm_embed_attr),
    .in = { { "dx", "N,C", LM_ACT_TYPE },
            { "tok", "N", LM_IDS },
            { "pos", "N", LM_IDS | LM_OPTIONAL } },
    .out = { { "dwte", "V,C", LM_GIVEN }, { "dwpe", "P,C", LM_GIVEN | LM_OPTIONAL } },
    .fields = dw_fields,
    .split = "N+ C V",
    .shard = embed_dw_shard,
    .ranges = "V",
    .prec = LM_PREC_ALLOW,
    .cost = embed_dw_cost,
};
