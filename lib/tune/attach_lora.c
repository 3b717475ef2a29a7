/* SPDX-License-Identifier: Apache-2.0 */
/* attach_lora.c -- LoRA as low-rank paths: y += s (x A^T) B^T, with the A of neighbouring modules packed into one parameter, and
 * their B likewise, as long as they have one rank.  With lora_dropout each module drops inputs of its own. */
#include <math.h>
#include <string.h>

#include "kernels/embed.h"
#include "kernels/lora.h"
#include "op/ops.h"
#include "tune/attach_impl.h"
#include "tune/methods.h"

static double value_of(const attach_module *m, const char *key)
{
    return lm_tune_value(&lm_tune_lora, &m->module, key);
}

static double scale_of(const attach_module *m)
{
    double r = value_of(m, "r");
    return value_of(m, "lora_alpha") / (value_of(m, "use_rslora") > 0 ? sqrt(r) : r);
}

bool lm_attach_is_lora(const lm_attach *a, const attach_module *m)
{
    return a->method == &lm_tune_lora && !(value_of(m, "use_dora") > 0) &&
           !(value_of(m, "lora_bias") > 0);
}

/* Modules of one path. */
typedef struct {
    const attach_module *m[LM_LORA_BLOCKS];
    int64_t at[LM_LORA_BLOCKS]; /* columns of y before it */
    int n;
} path;

static lm_vid declare_a(lm_builder *b, const path *p, int64_t rank)
{
    const lm_tune_module *first = &p->m[0]->module;
    lm_vid v = lm_b_param(b, 2, (int64_t[]){ p->n * rank, first->in }, "%s.lora_A", first->name);
    for (int i = 0; i < p->n; i++)
        lm_b_slice(b, rank, false, LM_INIT_UNIFORM, 1 / sqrt((double)first->in),
                   "base_model.model.%s.lora_A.weight", p->m[i]->module.name);
    return v;
}

static lm_vid declare_b(lm_builder *b, const path *p, int64_t rank)
{
    int64_t rows = 0;
    for (int i = 0; i < p->n; i++)
        rows += p->m[i]->module.out;
    lm_vid v = lm_b_param(b, 2, (int64_t[]){ rows, rank }, "%s.lora_B", p->m[0]->module.name);
    for (int i = 0; i < p->n; i++)
        lm_b_slice(b, p->m[i]->module.out, false, LM_INIT_ZEROS, 0,
                   "base_model.model.%s.lora_B.weight", p->m[i]->module.name);
    return v;
}

/* h of the path: its node stands before the product, so that its gradient is added to the product's, in place. */
static lm_vid append_down(lm_builder *b, const path *p, lm_vid x)
{
    lm_vid a = declare_a(b, p, (int64_t)value_of(p->m[0], "r"));
    x = lm_b_adapter_dropout(b, x, value_of(p->m[0], "lora_dropout"));
    return lm_b_append(b, &lm_op_lora_down, NULL, (lm_vid[]){ x, a });
}

static lm_vid append_up(lm_builder *b, const path *p, lm_vid y, lm_vid h)
{
    lm_lora_attr attr = { .blocks = p->n };
    for (int i = 0; i < p->n; i++)
        attr.block[i] = (lm_lora_block){ p->at[i], p->m[i]->module.out, scale_of(p->m[i]) };
    lm_vid up = declare_b(b, p, (int64_t)value_of(p->m[0], "r"));
    return lm_b_append(b, &lm_op_lora_up, &attr, (lm_vid[]){ y, h, up });
}

/* The paths of a place: a new one where the rank changes, or each module drops inputs of its own. */
static int list_paths(const lm_attach *a, const lm_adapt_linear *place, path *p)
{
    int n = 0;
    for (int i = 0; i < place->n_modules; i++) {
        const attach_module *m = lm_attach_find(a, place->module[i].name);
        if (!m)
            continue;
        if (!n || value_of(m, "r") != value_of(p[n - 1].m[0], "r") ||
            value_of(m, "lora_dropout") > 0)
            p[n++].n = 0;
        path *to = &p[n - 1];
        to->m[to->n] = m;
        to->at[to->n++] = place->module[i].row;
    }
    return n;
}

lm_vid lm_attach_lora(lm_attach *a, lm_builder *b, const lm_adapt_linear *place)
{
    path p[LM_ADAPT_MODULES];
    lm_vid h[LM_ADAPT_MODULES];
    int n = list_paths(a, place, p);
    for (int i = 0; i < n; i++)
        h[i] = append_down(b, &p[i], place->x);
    lm_vid y = lm_b_linear(b, place->x, place->w, place->bias);
    for (int i = 0; i < n; i++)
        y = append_up(b, &p[i], y, h[i]);
    return y;
}

/* Rows of A^T are looked up like those of the table. */
lm_vid lm_attach_lora_embed(lm_attach *a, lm_builder *b, const lm_adapt_embed *place,
                            const attach_module *m)
{
    int64_t rank = (int64_t)value_of(m, "r"), tokens = m->module.in, width = m->module.out;
    lm_embed_attr embed = { .scale = 0 };
    lm_lora_attr attr = { .blocks = 1, .block = { { 0, width, scale_of(m) } } };
    const char *name = m->module.name;
    (void)a;
    lm_vid down = lm_b_param(b, 2, (int64_t[]){ tokens, rank }, "%s.lora_embedding_A", name);
    lm_b_slice(b, tokens, true, LM_INIT_ZEROS, 0, "base_model.model.%s.lora_embedding_A", name);
    lm_vid up = lm_b_param(b, 2, (int64_t[]){ width, rank }, "%s.lora_embedding_B", name);
    lm_b_slice(b, width, false, LM_INIT_NORMAL, 1, "base_model.model.%s.lora_embedding_B", name);
    lm_vid h =
        lm_b_append(b, &lm_op_embed, &embed, (lm_vid[]){ place->tokens, down, LM_NONE, LM_NONE });
    return lm_b_append(b, &lm_op_lora_up, &attr, (lm_vid[]){ place->x, h, up });
}
