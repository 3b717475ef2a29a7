/* SPDX-License-Identifier: Apache-2.0 */
/* build_kept.c -- graphs whose caches keep some tokens: what their layers read besides, and masses of tokens. */
#include <inttypes.h>
#include <stdio.h>

#include "base/mem.h"
#include "kernels/kv_keep.h"
#include "kv/spec.h"
#include "model/build.h"
#include "model/cache_about.h"
#include "op/ops.h"

bool lm_b_kept(const lm_build *b, int64_t layer)
{
    return b->kept && b->kept[layer] > 0;
}

bool lm_b_ranked(const lm_build *b, int64_t layer)
{
    return lm_b_kept(b, layer) && b->kv->policy->ranked;
}

bool lm_b_weighs(const lm_build *b)
{
    const lm_kv_policy *p = b->kv->policy;
    return lm_kv_policy_weighs(p) && (b->whole || lm_kv_policy_replaces(p));
}

int64_t lm_b_kept_pages(const lm_build *b, int64_t layer)
{
    return (b->kept[layer] + b->kv->page - 1) / b->kv->page;
}

int64_t lm_b_masses(const lm_build *b, int64_t layer)
{
    return b->whole ? b->cache : lm_b_kept_pages(b, layer) * b->kv->page + 1;
}

static lm_code make_value(lm_model *m, lm_role role, lm_tensor shape, int64_t layer,
                          const char *word, lm_vid *out, lm_err *e)
{
    char name[64];
    snprintf(name, sizeof name, "layers.%d.%s", (int)layer, word);
    return lm_graph_value(m->graph, role, shape, name, out, e);
}

static lm_code make_layer(lm_model *m, int64_t layer, lm_err *e)
{
    const lm_build *b = &m->build;
    lm_kept_layer *k = &m->kept[layer];
    int64_t B = b->batch, K = lm_cache_shape_of(&m->config.layer[layer]).kv_heads;
    *k = (lm_kept_layer){ LM_NONE, LM_NONE, LM_NONE, LM_NONE };
    if (!lm_b_kept(b, layer))
        return LM_OK;
    lm_tensor mass = { .dtype = LM_DTYPE_F32, .ndim = 3, .dim = { B, K, lm_b_masses(b, layer) } };
    if (lm_b_weighs(b) && make_value(m, LM_ROLE_STATE, mass, layer, "mass", &k->mass, e))
        return e->code;
    int64_t pages = b->whole ? 1 : lm_b_kept_pages(b, layer);
    if ((!b->whole || lm_b_ranked(b, layer)) &&
        make_value(m, LM_ROLE_INPUT, lm_shape2(LM_DTYPE_I32, B, pages), layer, "table", &k->table,
                   e))
        return e->code;
    if (b->whole)
        return LM_OK;
    if (make_value(m, LM_ROLE_INPUT, lm_shape1(LM_DTYPE_I32, B), layer, "used", &k->used, e))
        return e->code;
    if (!lm_kv_policy_replaces(b->kv->policy))
        return LM_OK;
    return make_value(m, LM_ROLE_INPUT, lm_shape2(LM_DTYPE_I32, B, K), layer, "row", &k->row, e);
}

lm_code lm_b_make_kept(lm_model *m, lm_err *e)
{
    const lm_build *b = &m->build;
    if (lm_alloc_n(&m->kept, (size_t)m->config.layers, sizeof *m->kept, "layers of a policy", e))
        return e->code;
    int64_t ranks = 0; /* of the layers that are read at ranks, which all keep the same tokens */
    for (int64_t l = 0; l < m->config.layers; l++) {
        if (make_layer(m, l, e))
            return e->code;
        if (lm_b_ranked(b, l) && !b->whole)
            ranks = lm_b_kept_pages(b, l) * b->kv->page;
    }
    if (ranks && lm_graph_value(m->graph, LM_ROLE_INPUT, lm_shape2(LM_DTYPE_I32, b->batch, ranks),
                                "ranks", &m->ranks, e))
        return e->code;
    if (b->whole && lm_b_weighs(b) &&
        lm_graph_value(m->graph, LM_ROLE_INPUT, lm_shape1(LM_DTYPE_I32, b->batch), "from", &m->from,
                       e))
        return e->code;
    return lm_graph_value(m->graph, LM_ROLE_INPUT, lm_shape1(LM_DTYPE_I32, b->batch), "slot",
                          &m->slot, e);
}

/* Every query of a new token counts: its position is not below `used`. */
lm_vid lm_b_add_masses(lm_builder *b, int64_t layer, const lm_kv_mass_attr *a, lm_vid qkv,
                       lm_vid lse, lm_vid keys, lm_vid ktail)
{
    lm_model *m = b->m;
    const lm_kept_layer *k = &m->kept[layer];
    bool whole = m->build.whole;
    lm_vid used = whole ? m->used : k->used;
    lm_vid in[] = { qkv,     lse,      used, m->fresh, whole ? m->from : used,
                    LM_NONE, k->table, keys, m->slot,  ktail };
    lm_vid out[] = { k->mass };
    if (!lm_b_ok(b) || lm_graph_append(m->graph, &lm_op_kv_mass, a, in, out, b->e))
        return LM_NONE;
    return out[0];
}
