/* SPDX-License-Identifier: Apache-2.0 */
/* layouts.c -- policies: which tensors are split how, by their names. */
#include "parallel/layouts.h"

#include <fnmatch.h>

const lm_layout_rule lm_layouts_tensor[] = {
    { "*.qkv.*", "tp=split0" },
    { "*.attn.c_attn.*", "tp=split0" },
    { "*.gate_up.*", "tp=split0" },
    { "*.c_fc.*", "tp=split0" },
    { "*.up_proj.*", "tp=split0" },
    { "*.gate_proj.*", "tp=split0" },
    { "*.q_proj.*", "tp=split0" },
    { "*.k_proj.*", "tp=split0" },
    { "*.v_proj.*", "tp=split0" },
    { "*.o_proj.weight", "tp=split1" },
    { "*.c_proj.weight", "tp=split1" },
    { "*.down_proj.weight", "tp=split1" },
    { NULL, NULL },
};

const lm_layout_rule lm_layouts_vocabulary[] = {
    { "wte", "tp=split0" },
    { "embed_tokens", "tp=split0" },
    { "lm_head", "tp=split0" },
    { NULL, NULL },
};

static const lm_layout_rule *rule_of(const lm_layout_rule *r, const char *name)
{
    while (r->pattern && fnmatch(r->pattern, name, 0) != 0)
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
        lm_layout layout;
        if (r && (lm_layout_read(r->layout, &layout, e) || lm_graph_lay(g, (lm_vid)v, &layout, e)))
            return e->code;
    }
    return LM_OK;
}
