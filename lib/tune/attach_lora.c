/* SPDX-License-Identifier: Apache-2.0 */
/* attach_lora.c -- low-rank paths: y += s (x A^T) B^T, with the A of neighbouring modules packed
 * into one parameter, and their B likewise, as long as they have one rank.  With lora_dropout each
 * module of LoRA drops inputs of its own.
 *
 * AdaLoRA scales the columns of x A^T by E.  DoRA scales the rows of the changed weight, which are
 * columns of the result: y = c (x W^T + s (x A^T) B^T) + bias, c = m / |W + s B A| of each row.  As
 * no gradient flows through the lengths, neither W + s B A nor a gradient of its size outlives
 * their computation. */
#include <math.h>
#include <string.h>

#include "kernels/embed.h"
#include "kernels/lora.h"
#include "op/ops.h"
#include "tune/attach_impl.h"
#include "tune/methods.h"

static double value_of(const lm_attach *a, const attach_module *m, const char *key)
{
    return lm_tune_value(a->method, &m->module, key);
}

static bool has_singular(const lm_attach *a)
{
    return a->method == &lm_tune_adalora;
}

static int64_t rank_of(const lm_attach *a, const attach_module *m)
{
    return has_singular(a) ? lm_tune_adalora_rank(&m->module) : (int64_t)value_of(a, m, "r");
}

static double scale_of(const lm_attach *a, const attach_module *m)
{
    return has_singular(a) ? lm_tune_adalora_scale(&m->module) : lm_tune_lora_scale(&m->module);
}

bool lm_attach_is_lora(const lm_attach *a, const attach_module *m)
{
    return has_singular(a) || (a->method == &lm_tune_lora && !(value_of(a, m, "lora_bias") > 0));
}

bool lm_attach_has_lengths(const lm_attach *a, const attach_module *m)
{
    return a->method == &lm_tune_lora && value_of(a, m, "use_dora") > 0;
}

bool lm_attach_embeds(const lm_attach *a, const attach_module *m)
{
    return a->method == &lm_tune_lora && lm_attach_is_lora(a, m) && !lm_attach_has_lengths(a, m);
}

bool lm_attach_has_rank(const lm_attach *a, const attach_module *m)
{
    return !has_singular(a) || rank_of(a, m) > 0;
}

/* ---- one path ---- */

/* Modules of one path. */
typedef struct {
    const attach_module *m[LM_LORA_BLOCKS];
    int64_t at[LM_LORA_BLOCKS]; /* columns of y before it */
    int n;
    int64_t rank;
    lm_vid a, b, h;
} path;

static lm_vid declare_a(const lm_attach *a, lm_builder *b, const path *p)
{
    const lm_tune_module *first = &p->m[0]->module;
    bool singular = has_singular(a);
    lm_vid v = lm_b_param(b, 2, (int64_t[]){ p->n * p->rank, first->in }, "%s%s.lora_A", a->prefix,
                          first->name);
    for (int i = 0; i < p->n; i++)
        lm_b_slice(b, p->rank, false, singular ? LM_INIT_NORMAL : LM_INIT_UNIFORM,
                   singular ? LM_TUNE_ADALORA_STD : 1 / sqrt((double)first->in),
                   "%sbase_model.model.%s.lora_A%s", a->prefix, p->m[i]->module.name,
                   singular ? "" : ".weight");
    return v;
}

static lm_vid declare_e(lm_builder *b, const path *p)
{
    lm_vid v =
        lm_b_param(b, 2, (int64_t[]){ p->n * p->rank, 1 }, "%s.lora_E", p->m[0]->module.name);
    for (int i = 0; i < p->n; i++)
        lm_b_slice(b, p->rank, false, LM_INIT_ZEROS, 0, "base_model.model.%s.lora_E",
                   p->m[i]->module.name);
    return v;
}

static lm_vid declare_b(const lm_attach *a, lm_builder *b, const path *p)
{
    int64_t rows = 0;
    bool singular = has_singular(a);
    for (int i = 0; i < p->n; i++)
        rows += p->m[i]->module.out;
    lm_vid v = lm_b_param(b, 2, (int64_t[]){ rows, p->rank }, "%s%s.lora_B", a->prefix,
                          p->m[0]->module.name);
    for (int i = 0; i < p->n; i++)
        lm_b_slice(b, p->m[i]->module.out, false, singular ? LM_INIT_NORMAL : LM_INIT_ZEROS,
                   singular ? LM_TUNE_ADALORA_STD : 0, "%sbase_model.model.%s.lora_B%s", a->prefix,
                   p->m[i]->module.name, singular ? "" : ".weight");
    return v;
}

/* h in the rows of the adapter, zeros in others. */
static lm_vid own_rows(const lm_attach *a, lm_builder *b, lm_vid h)
{
    if (a->mask < 0 || !lm_b_ok(b))
        return h;
    lm_rule r = { .g = lm_b_graph(b), .arena = lm_b_arena(b), .e = lm_b_err(b) };
    h = LM_R_MAP(&r, "y = where(m, h, 0)", LM_IS("m", a->mask), LM_IS("h", h));
    lm_rule_fini(&r);
    return h;
}

/* h of the path: its node stands before the product, so that its gradient is added to the
 * product's, in place. */
static void append_down(const lm_attach *a, lm_builder *b, path *p, lm_vid x)
{
    lm_rule r = { .g = lm_b_graph(b), .arena = lm_b_arena(b), .e = lm_b_err(b) };
    p->a = declare_a(a, b, p);
    p->h = lm_b_append(b, &lm_op_lora_down, NULL, (lm_vid[]){ x, p->a });
    if (!has_singular(a))
        return;
    lm_vid e = declare_e(b, p);
    if (lm_b_ok(b))
        p->h = LM_R_MAP(&r, "y = h * e", LM_IS("h", p->h),
                        LM_IS("e", lm_r_shape2(&r, e, 1, p->n * p->rank)));
    lm_rule_fini(&r);
}

static lm_vid append_up(const lm_attach *a, lm_builder *b, path *p, lm_vid y)
{
    lm_lora_attr attr = { .blocks = p->n };
    for (int i = 0; i < p->n; i++)
        attr.block[i] = (lm_lora_block){ p->at[i], p->m[i]->module.out, scale_of(a, p->m[i]) };
    p->b = declare_b(a, b, p);
    return lm_b_append(b, &lm_op_lora_up, &attr, (lm_vid[]){ y, p->h, p->b });
}

/* ---- all of a place ---- */

/* The paths of a place: a new one where the rank changes, or each module drops inputs of its
 * own. */
static int list_paths(const lm_attach *a, const lm_adapt_linear *place, path *p)
{
    int n = 0;
    for (int i = 0; i < place->n_modules; i++) {
        const attach_module *m = lm_attach_find(a, place->module[i].name);
        if (!m)
            continue;
        if (!n || rank_of(a, m) != p[n - 1].rank || value_of(a, m, "lora_dropout") > 0)
            p[n++] = (path){ .rank = rank_of(a, m) };
        path *to = &p[n - 1];
        to->m[to->n] = m;
        to->at[to->n++] = place->module[i].row;
    }
    return n;
}

/* c of the rows of W + s B A [1,out]; a row without length has no direction, and remains zero. */
static lm_vid lengths(const lm_attach *a, lm_builder *b, lm_rule *r, const lm_adapt_linear *place,
                      const path *p)
{
    const lm_tune_module *m = &p->m[0]->module;
    lm_vid magnitude = lm_b_param(b, 1, &m->out, "%s.lora_magnitude_vector", m->name);
    lm_b_slice(b, m->out, false, LM_INIT_ZEROS, 0, "base_model.model.%s.lora_magnitude_vector",
               m->name); /* the method's start has the numbers */
    /* in F32, of the numbers that the products read */
    lm_vid w = lm_b_append(b, &lm_op_widen, NULL, &place->w);
    lm_vid up = lm_b_append(b, &lm_op_widen, NULL, &p->b);
    lm_vid down = lm_b_append(b, &lm_op_widen, NULL, &p->a);
    if (!lm_b_ok(b))
        return LM_NONE;
    w = lm_r_add(r, w, scale_of(a, p->m[0]), lm_r_matmul(r, up, false, down, false));
    return LM_R_MAP(
        r, "y = where(q, m / sqrt(max(q, 1e-37)), 0)",
        LM_IS("m", lm_r_shape2(r, magnitude, 1, m->out)),
        LM_IS("q", lm_r_shape2(r, lm_r_stop(r, lm_r_sum(r, w, true, false)), 1, m->out)));
}

/* A place of one module.  Where inputs of the path are dropped, W x of them is scaled, too, but W x
 * stays whole beside it. */
static lm_vid with_lengths(const lm_attach *a, lm_builder *b, const lm_adapt_linear *place, path *p)
{
    lm_rule r = { .g = lm_b_graph(b), .arena = lm_b_arena(b), .e = lm_b_err(b) };
    lm_vid x = lm_b_adapter_dropout(b, place->x, value_of(a, p->m[0], "lora_dropout"));
    append_down(a, b, p, x);
    lm_vid product = lm_b_linear(b, x, place->w, LM_NONE), y;
    lm_vid both = append_up(a, b, p, product);
    lm_vid c = lengths(a, b, &r, place, p);
    if (!lm_b_ok(b))
        y = LM_NONE;
    else if (x != place->x)
        y = LM_R_MAP(&r, "y = w + c * z - p",
                     LM_IS("w", lm_b_linear(b, place->x, place->w, place->bias)), LM_IS("c", c),
                     LM_IS("z", both), LM_IS("p", product));
    else if (place->bias < 0)
        y = LM_R_MAP(&r, "y = c * z", LM_IS("c", c), LM_IS("z", both));
    else
        y = LM_R_MAP(&r, "y = c * z + b", LM_IS("c", c), LM_IS("z", both),
                     LM_IS("b", lm_r_shape2(&r, place->bias, 1, p->m[0]->module.out)));
    lm_rule_fini(&r);
    return y;
}

int lm_attach_lora_down(const lm_attach *a, lm_builder *b, const lm_adapt_linear *place,
                        lm_vid h[LM_ADAPT_MODULES])
{
    path p[LM_ADAPT_MODULES];
    int n = list_paths(a, place, p);
    for (int i = 0; i < n; i++) {
        append_down(a, b, &p[i],
                    lm_b_adapter_dropout(b, place->x, value_of(a, p[i].m[0], "lora_dropout")));
        h[i] = own_rows(a, b, p[i].h);
    }
    return n;
}

lm_vid lm_attach_lora_up(const lm_attach *a, lm_builder *b, const lm_adapt_linear *place,
                         const lm_vid h[LM_ADAPT_MODULES], lm_vid y)
{
    path p[LM_ADAPT_MODULES];
    int n = list_paths(a, place, p);
    for (int i = 0; i < n; i++) {
        p[i].h = h[i];
        y = append_up(a, b, &p[i], y);
    }
    return y;
}

lm_vid lm_attach_lora(lm_attach *a, lm_builder *b, const lm_adapt_linear *place)
{
    path p[LM_ADAPT_MODULES];
    list_paths(a, place, p);
    if (place->n_modules == 1 && lm_attach_has_lengths(a, p[0].m[0]))
        return with_lengths(a, b, place, &p[0]);
    lm_vid h[LM_ADAPT_MODULES];
    lm_attach_lora_down(a, b, place, h);
    return lm_attach_lora_up(a, b, place, h, lm_b_linear(b, place->x, place->w, place->bias));
}

lm_vid lm_attach_lora_logits(const lm_attach *a, lm_builder *b, const lm_adapt_linear *place,
                             const attach_module *m, lm_vid y)
{
    lm_rule r = { .g = lm_b_graph(b), .arena = lm_b_arena(b), .e = lm_b_err(b) };
    path p = { .m = { m }, .n = 1, .rank = rank_of(a, m) };
    append_down(a, b, &p, place->x);
    p.b = declare_b(a, b, &p);
    lm_vid d = lm_b_linear(b, p.h, p.b, LM_NONE);
    y = lm_b_ok(b) ? lm_r_add(&r, y, scale_of(a, m), d) : LM_NONE;
    lm_attach_end_rule(b, &r);
    return y;
}

/* Rows of A^T are looked up like those of the table. */
lm_vid lm_attach_lora_embed(lm_attach *a, lm_builder *b, const lm_adapt_embed *place,
                            const attach_module *m)
{
    int64_t rank = rank_of(a, m), tokens = m->module.in, width = m->module.out;
    lm_embed_attr embed = { .scale = 0 };
    lm_lora_attr attr = { .blocks = 1, .block = { { 0, width, scale_of(a, m) } } };
    const char *name = m->module.name;
    lm_vid down =
        lm_b_param(b, 2, (int64_t[]){ tokens, rank }, "%s%s.lora_embedding_A", a->prefix, name);
    lm_b_slice(b, tokens, true, LM_INIT_ZEROS, 0, "%sbase_model.model.%s.lora_embedding_A",
               a->prefix, name);
    lm_vid up =
        lm_b_param(b, 2, (int64_t[]){ width, rank }, "%s%s.lora_embedding_B", a->prefix, name);
    lm_b_slice(b, width, false, LM_INIT_NORMAL, 1, "%sbase_model.model.%s.lora_embedding_B",
               a->prefix, name);
    lm_vid h =
        lm_b_append(b, &lm_op_embed, &embed, (lm_vid[]){ place->tokens, down, LM_NONE, LM_NONE });
    h = own_rows(a, b, h);
    return lm_b_append(b, &lm_op_lora_up, &attr, (lm_vid[]){ place->x, h, up });
}
