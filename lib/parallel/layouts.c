/* SPDX-License-Identifier: Apache-2.0 */
/* layouts.c -- policies: which tensors are split how, by their names. */
#include "parallel/layouts.h"

#include <fnmatch.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "kernels/kv.h"
#include "op/ops.h"

const lm_layout_rule lm_layouts_tensor[] = {
    { "*.experts.*", "replicated" }, /* they are shared out along ep */
    /* low-rank paths: the factor at the side of the weight that is split */
    { "*.o_proj.lora_A", "tp=split1" },
    { "*.self_attention.dense.lora_A", "tp=split1" },
    { "*.dense_4h_to_h.lora_A", "tp=split1" },
    { "*.output.dense.lora_A", "tp=split1" },
    { "*.c_proj.lora_A", "tp=split1" },
    { "*.down_proj.lora_A", "tp=split1" },
    { "*.shared_gate_up.+", "tp=split0" },
    { "*.qkv.+", "tp=split0" },
    { "*.attn.c_attn.+", "tp=split0" },
    { "*.gate_up.+", "tp=split0" },
    { "*.c_fc.+", "tp=split0" },
    { "*.up_proj.+", "tp=split0" },
    { "*.gate_proj.+", "tp=split0" },
    { "*.q_proj.+", "tp=split0" },
    { "*.k_proj.+", "tp=split0" },
    { "*.v_proj.+", "tp=split0" },
    { "*.q_b_proj.+", "tp=split0" },
    { "*.kv_b_proj.+", "tp=split0" },
    { "*.query_key_value.+", "tp=split0" },
    { "*.dense_h_to_4h.+", "tp=split0" },
    { "*.intermediate.dense.+", "tp=split0" },
    { "*.o_proj.weight", "tp=split1" },
    { "*.self_attention.dense.weight", "tp=split1" },
    { "*.dense_4h_to_h.weight", "tp=split1" },
    { "*.output.dense.weight", "tp=split1" },
    { "*.c_proj.weight", "tp=split1" },
    { "*.down_proj.weight", "tp=split1" },
    { NULL, NULL },
};

const lm_layout_rule lm_layouts_vocabulary[] = {
    { "wte", "tp=split0" },
    { "*word_embeddings", "tp=split0" },
    { "embed_tokens", "tp=split0" },
    { "lm_head", "tp=split0" },
    { NULL, NULL },
};

const lm_layout_rule lm_layouts_experts[] = {
    { "*.experts.*", "ep=split0" },
    { NULL, NULL },
};

static bool fits(const char *pattern, const char *name)
{
    static const char *const column[] = { "weight", "bias", "lora_B" };
    const size_t n = strlen(pattern) - 1;
    char whole[80];
    if (pattern[n] != '+')
        return fnmatch(pattern, name, 0) == 0;
    for (size_t i = 0; i < sizeof column / sizeof *column; i++) {
        snprintf(whole, sizeof whole, "%.*s%s", (int)n, pattern, column[i]);
        if (fnmatch(whole, name, 0) == 0)
            return true;
    }
    return false;
}

static const lm_layout_rule *rule_of(const lm_layout_rule *r, const char *name)
{
    while (r->pattern && !fits(r->pattern, name))
        r++;
    return r->pattern ? r : NULL;
}

lm_code lm_layouts_apply(lm_graph *g, const lm_layout_rule *rules, lm_err *e)
{
    for (size_t v = 0; v < g->n_values; v++) {
        const lm_value *x = &g->value[v];
        const lm_value *p = x->role == LM_ROLE_GRAD && x->grad_of >= 0 ? &g->value[x->grad_of] : x;
        const lm_layout_rule *r =
            p->role == LM_ROLE_PARAM && p->name ? rule_of(rules, p->name) : NULL;
        lm_layout layout, all = x->layout;
        if (!r)
            continue;
        if (lm_layout_read(r->layout, &layout, e))
            return e->code;
        for (int i = 0; i < LM_AXES; i++)
            if (layout.axis[i].share != LM_REPLICATED)
                all.axis[i] = layout.axis[i];
        if (lm_graph_lay(g, (lm_vid)v, &all, e))
            return e->code;
    }
    return LM_OK;
}

/* The cache v, if it is one, head by head. */
static lm_code lay_cache(lm_graph *g, lm_vid v, lm_err *e)
{
    char text[64];
    lm_layout layout;
    if (v < 0 || g->value[v].role != LM_ROLE_STATE || g->value[v].t.ndim != 4)
        return LM_OK;
    snprintf(text, sizeof text, "tp=split1:%" PRId64 "/1", g->value[v].t.dim[1]);
    return lm_layout_read(text, &layout, e) || lm_graph_lay(g, v, &layout, e) ? e->code : LM_OK;
}

/* Caches of keys and values head by head, as the rows that are stored in them: here, or, of a source that is only read, by
 * the graph that encodes it, which must have them alike. */
static lm_code lay_caches(lm_graph *g, lm_err *e)
{
    lm_tensor in[LM_MAX_IN], out[LM_MAX_OUT];
    for (size_t k = 0; k < g->n_nodes; k++) {
        const lm_node *n = &g->node[k];
        const lm_call c = lm_node_call(g, n, in, out);
        const bool stores = n->op == &lm_op_attention_cached || n->op == &lm_op_kv_write,
                   reads = n->op == &lm_op_kv_attention &&
                           ((const lm_kv_attr *)n->attr)->attention.reads;
        if (!(stores || reads) || !n->op->splits(&c, 'K'))
            continue;
        for (int i = 0; stores && i < n->n_out; i++)
            if (lay_cache(g, n->out[i], e))
                return e->code;
        for (int i = 0; reads && i < n->n_in; i++)
            if (lay_cache(g, n->in[i], e))
                return e->code;
    }
    return LM_OK;
}

static lm_code lay_weights(lm_graph *g, lm_err *e)
{
    return lm_layouts_apply(g, lm_layouts_tensor, e) ||
                   lm_layouts_apply(g, lm_layouts_vocabulary, e) || lay_caches(g, e)
               ? e->code
               : LM_OK;
}

/* The rows between the layers, which follow those of the embedding, are split along an axis: each of so many runs, from both
 * ends of it or not; 0: all together.  Along tp those of a decoder stay whole behind an encoder. */
static lm_code lay_rows(lm_graph *g, lm_axis axis, int64_t runs, bool ends, lm_err *e)
{
    for (size_t k = 0; k < g->n_nodes; k++) {
        const lm_node *n = &g->node[k];
        if (n->op != &lm_op_embed)
            continue;
        const lm_value *x = &g->value[n->out[0]];
        lm_layout layout = x->layout;
        lm_placement *p = &layout.axis[axis];
        *p = (lm_placement){ .share = LM_SPLIT };
        if (runs)
            p->pieces = (lm_portions){ 1, { { runs, x->t.dim[0] / runs, 1 } }, ends };
        if (lm_graph_lay(g, n->out[0], &layout, e) || axis == LM_AXIS_TP)
            return e->code;
    }
    return LM_OK;
}

/* Each rank has whole windows along ep, and of each window a run of positions along cp. */
static lm_code lay(const lm_build *b, lm_graph *g, lm_axis axis, lm_err *e)
{
    switch (axis) {
    case LM_AXIS_TP:
        return lay_weights(g, e) || (b->lay_rows && lay_rows(g, axis, 0, false, e)) ? e->code
                                                                                    : LM_OK;
    case LM_AXIS_EP:
        return lm_layouts_apply(g, lm_layouts_experts, e) || lay_rows(g, axis, 0, false, e)
                   ? e->code
                   : LM_OK;
    case LM_AXIS_CP:
        return lay_rows(g, axis, b->batch / lm_mesh_along(b->mesh, LM_AXIS_EP),
                        b->mesh->context == LM_CONTEXT_ENDS, e);
    default:
        return LM_OK;
    }
}

void lm_layouts_share(lm_build *b, const lm_mesh *mesh, bool rows)
{
    if (lm_mesh_inner(mesh) == 1)
        return;
    b->mesh = mesh;
    b->lay = lay;
    b->lay_rows = rows;
}
