/* SPDX-License-Identifier: Apache-2.0 */
/* codes.c -- states of optimisers in codes with scales (kernels/codes.h). */
#include "op/ops.h"
#include "train/optim/rule.h"

lm_code lm_rule_coded(lm_update *u, const lm_update_tensor *t, const char *const name[3],
                      lm_codes_format format, lm_tensor shape, lm_rule_codes *out, lm_err *e)
{
    int64_t n = lm_tensor_count(&shape);
    lm_tensor bytes = shape, blocks = lm_shape1(LM_DTYPE_F32, lm_codes_blocks(n));
    bytes.dtype = LM_DTYPE_U8;
    /* Blocks run through memory: codes of a tensor that files have transposed stay in that order, too. */
    if (t->transposed || lm_codes_bytes(format, n) != n)
        bytes = lm_shape1(LM_DTYPE_U8, lm_codes_bytes(format, n));
    *out = (lm_rule_codes){ format, shape, LM_NONE, LM_NONE, LM_NONE };
    if (lm_update_state(u, t, name[0], bytes, &out->code, e) ||
        lm_update_state(u, t, name[1], blocks, &out->scale, e) ||
        (format != LM_CODES_DYNAMIC8 && lm_update_state(u, t, name[2], blocks, &out->zero, e)))
        return e->code;
    return LM_OK;
}

lm_code lm_rule_decode(lm_update *u, const lm_rule_codes *c, lm_vid *out, lm_err *e)
{
    lm_vid in[3] = { c->code, c->scale, c->zero };
    lm_codes_attr a = { .format = c->format };
    lm_graph *g = lm_update_graph(u);
    return lm_graph_value(g, LM_ROLE_ACT, c->shape, NULL, out, e) ||
                   lm_graph_append(g, &lm_op_decode, &a, in, out, e)
               ? e->code
               : LM_OK;
}

static lm_code encode(lm_update *u, const lm_rule_codes *c, lm_vid x, lm_err *e)
{
    lm_vid in[2] = { lm_update_scale(u), x };
    lm_vid out[3] = { c->code, c->scale, c->zero >= 0 ? c->zero : LM_SKIP };
    lm_codes_attr a = { .format = c->format };
    return lm_graph_append(lm_update_graph(u), &lm_op_encode, &a, in, out, e);
}

lm_code lm_rule_moments_make(lm_update *u, const lm_update_tensor *t, lm_tensor shape, bool coded,
                             lm_rule_moments *out, lm_err *e)
{
    static const char *const first[3] = { "state1", "absmax1", NULL };
    static const char *const second[3] = { "state2", "absmax2", NULL };
    *out = (lm_rule_moments){ .m = LM_NONE, .v = LM_NONE, .coded = coded };
    if (!coded)
        return lm_update_state(u, t, "exp_avg", shape, &out->m, e) ||
                       lm_update_state(u, t, "exp_avg_sq", shape, &out->v, e)
                   ? e->code
                   : LM_OK;
    return lm_rule_coded(u, t, first, LM_CODES_DYNAMIC8, shape, &out->first, e) ||
                   lm_rule_coded(u, t, second, LM_CODES_DYNAMIC8, shape, &out->second, e)
               ? e->code
               : LM_OK;
}

static lm_code span_of(lm_update *u, const lm_rule_codes *all, int64_t at, int64_t n,
                       lm_rule_codes *out, lm_err *e)
{
    lm_graph *g = lm_update_graph(u);
    *out = *all;
    out->shape = lm_shape1(LM_DTYPE_F32, n);
    return lm_graph_view(g, all->code, at, lm_shape1(LM_DTYPE_U8, n), NULL, &out->code, e) ||
                   lm_graph_view(g, all->scale, at / LM_CODES_BLOCK,
                                 lm_shape1(LM_DTYPE_F32, lm_codes_blocks(n)), NULL, &out->scale, e)
               ? e->code
               : LM_OK;
}

lm_code lm_rule_moments_span(lm_update *u, const lm_rule_moments *all, int64_t at, int64_t n,
                             lm_rule_moments *out, lm_err *e)
{
    *out = *all;
    return span_of(u, &all->first, at, n, &out->first, e) ||
                   span_of(u, &all->second, at, n, &out->second, e)
               ? e->code
               : LM_OK;
}

lm_code lm_rule_moments_read(lm_update *u, lm_rule_moments *x, lm_err *e)
{
    return x->coded && (lm_rule_decode(u, &x->first, &x->m, e) ||
                        lm_rule_decode(u, &x->second, &x->v, e))
               ? e->code
               : LM_OK;
}

lm_code lm_rule_moments_write(lm_update *u, const lm_rule_moments *x, lm_err *e)
{
    return x->coded && (encode(u, &x->first, x->m, e) || encode(u, &x->second, x->v, e)) ? e->code
                                                                                         : LM_OK;
}
