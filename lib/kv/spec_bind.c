/* SPDX-License-Identifier: Apache-2.0 */
/* spec_bind.c -- a specification and the layers of a model: the form of keys and values of each. */
#include <stdio.h>
#include <string.h>

#include "kv/methods/methods.h"
#include "kv/spec_impl.h"
#include "numeric/format.h"

static const char where[] = LM_KV_WHERE;
static const char *const side_name[2] = { "keys", "values" };

enum { LEAST_PAGE = 64 };

/* ---- which item counts ---- */

static lm_code check_ranges(const lm_kv_item *it, int64_t layers, lm_err *e)
{
    for (int i = 0; i < it->n_ranges; i++) {
        int64_t from = it->range[i].from, to = it->range[i].to;
        from += from < 0 ? layers : 0;
        to += to < 0 ? layers : 0;
        if (from < 0 || from >= layers || to < 0 || to >= layers)
            return lm_fail(e, LM_EUSAGE, where, "write one of its layers, or -1 for the last",
                           "there is no layer %d: the model has %lld, from 0",
                           from < 0 || from >= layers ? it->range[i].from : it->range[i].to,
                           (long long)layers);
        if (from > to)
            return lm_fail(e, LM_EUSAGE, where, "write the smaller one first",
                           "layers %d-%d of %lld: the first is above the last", it->range[i].from,
                           it->range[i].to, (long long)layers);
    }
    return LM_OK;
}

static bool has_layer(const lm_kv_item *it, int64_t l, int64_t layers)
{
    for (int i = 0; i < it->n_ranges; i++) {
        int64_t from = it->range[i].from, to = it->range[i].to;
        if (l >= from + (from < 0 ? layers : 0) && l <= to + (to < 0 ? layers : 0))
            return true;
    }
    return false;
}

/* The item that counts for a side of a layer; -1: that of all layers. */
static int64_t find_item(const lm_kv_spec *s, int side, int64_t l, int64_t layers)
{
    for (size_t i = 0; i < s->n_items; i++)
        if (s->item[i].side[side].method && has_layer(&s->item[i], l, layers))
            return (int64_t)i;
    return -1;
}

static lm_code fail_item(const lm_kv_item *it, int side, lm_err *e)
{
    lm_buf text = { 0 };
    if (!lm_kv_add_ranges(it, &text, e))
        lm_fail(e, LM_EUSAGE, where, "the first item that names a layer counts",
                "no %s are left for '%s'", side_name[side], text.data);
    lm_buf_fini(&text);
    return e->code;
}

/* True for a method that changes how layers are stored. */
static bool stores(const lm_kv_use *u)
{
    return u->method && (u->method != &lm_kv_auto || lm_kv_has_budget(u));
}

/* it NULL: of all layers. */
static lm_code fail_empty(const lm_kv_item *it, lm_err *e)
{
    lm_buf text = { 0 };
    if (!it)
        lm_fail(e, LM_EUSAGE, where, "leave it out",
                "there is nothing to code in any layer of the model");
    else if (!lm_kv_add_ranges(it, &text, e))
        lm_fail(e, LM_EUSAGE, where, "name other layers", "there is nothing to code in '%s'",
                text.data);
    lm_buf_fini(&text);
    return e->code;
}

/* An item whose layers all belong to earlier ones, or keep nothing (a state in place of keys and values), is a mistake. */
static lm_code check_items(const lm_kv_spec *s, const lm_kv_site *site, int64_t layers, lm_err *e)
{
    bool counts[LM_KV_ITEMS][2] = { { false } }, keeps[LM_KV_ITEMS][2] = { { false } };
    bool any = !layers;
    for (size_t i = 0; i < s->n_items; i++)
        if (check_ranges(&s->item[i], layers, e))
            return e->code;
    for (int64_t i = 0; i < 2 * layers; i++) {
        const int64_t item = find_item(s, (int)(i % 2), i / 2, layers);
        const bool here = site[i / 2].kv_heads > 0;
        any |= here;
        if (item >= 0) {
            counts[item][i % 2] = true;
            keeps[item][i % 2] |= here;
        }
    }
    if (!any && (stores(&s->all[0]) || stores(&s->all[1]) || s->policy.method))
        return fail_empty(NULL, e);
    for (size_t i = 0; i < s->n_items; i++)
        for (int k = 0; k < 2; k++) {
            if (s->item[i].side[k].method && !counts[i][k])
                return fail_item(&s->item[i], k, e);
            if (stores(&s->item[i].side[k]) && !keeps[i][k])
                return fail_empty(&s->item[i], e);
        }
    return LM_OK;
}

/* ---- one side ---- */

/* The value of a key; 0: the method has no such key. */
static double value_of(const lm_kv_use *u, const char *key)
{
    int i = lm_hyper_find(u->method->hyper, key);
    return i < 0 ? 0 : u->h[i];
}

/* True if the method leaves this layer alone (LM_KV_ALONE). */
static bool is_alone(const lm_kv_use *u, const lm_kv_site *at)
{
    int64_t few = at->layers / 4 < 2 ? at->layers / 4 : 2;
    double first = value_of(u, "first"), last = value_of(u, "last");
    return (double)at->layer < (first < 0 ? (double)few : first) ||
           (double)at->layer >= (double)at->layers - (last < 0 ? (double)few : last) ||
           (value_of(u, "skip") != 0 && at->window);
}

/* Tokens that are coded together, against those that stay plain and the window of the layer. */
static lm_code check_side(const lm_kv_side *s, const lm_kv_site *at, lm_err *e)
{
    int64_t step = lm_kv_step(s->format, LEAST_PAGE);
    if (step > 1 && (s->residual < step || s->residual % step))
        return lm_fail(e, LM_EUSAGE, s->format->name, "choose a multiple",
                       "%lld newest tokens stay plain, and groups of %lld are coded",
                       (long long)s->residual, (long long)step);
    if (s->sinks % step)
        return lm_fail(e, LM_EUSAGE, s->format->name, "choose a multiple",
                       "%lld first tokens stay plain, and groups of %lld are coded",
                       (long long)s->sinks, (long long)step);
    if (at->window && at->window < step)
        return lm_fail(e, LM_EUSAGE, s->format->name, "choose smaller groups, or skip=window",
                       "a query sees %lld tokens, and groups of %lld are coded",
                       (long long)at->window, (long long)step);
    return LM_OK;
}

lm_code lm_kv_bind_side(const lm_kv_binding *b, const lm_kv_use *u, int side, const lm_kv_site *at,
                        lm_kv_side *out, lm_err *e)
{
    lm_buf name = { 0 };
    *out = (lm_kv_side){ .plain = at->act, .outliers = -1 };
    if (!at->kv_heads || is_alone(u, at))
        return LM_OK;
    lm_code rc = lm_kv_add_use(b->s, u, &name, e);
    lm_kv_ask q = { .method = u->method,
                    .h = u->h,
                    .side = side,
                    .site = at,
                    .page = b->p->page,
                    .data = u->file && b->data ? b->data[u->file - 1] : NULL,
                    .name = name.data,
                    .arena = b->p->arena };
    if (!rc)
        rc = u->method->form(&q, out, e);
    if (!rc && out->format)
        rc = check_side(out, at, e);
    if (lm_kv_site_dim(at, side) % 2) /* blocks of one number */
        out->rotate = false;
    lm_buf_fini(&name);
    return rc;
}

/* ---- all of them ---- */

static int64_t common_divisor(int64_t a, int64_t b)
{
    while (b) {
        int64_t r = a % b;
        a = b;
        b = r;
    }
    return a;
}

int64_t lm_kv_common_page(int64_t page, const lm_kv_format *f)
{
    int64_t step = lm_kv_step(f, LEAST_PAGE);
    return page * (step / common_divisor(page, step));
}

/* The least multiple of 64 tokens that each group divides. */
static lm_code choose_page(lm_kv_plan *p, lm_err *e)
{
    p->page = LEAST_PAGE;
    for (int64_t i = 0; i < 2 * p->layers; i++) {
        if (!p->side[i].format)
            continue;
        p->page = lm_kv_common_page(p->page, p->side[i].format);
        if (p->page > LM_KV_MAX_TOKENS)
            return lm_fail(e, LM_EUSAGE, where, "choose groups of 32, 64 or 128 tokens",
                           "no page of at most %d tokens holds whole groups of %lld tokens and of "
                           "the others",
                           LM_KV_MAX_TOKENS, (long long)lm_kv_step(p->side[i].format, LEAST_PAGE));
    }
    return LM_OK;
}

/* Of latents one method codes keys and values, which are the same numbers; the rotated part of keys stays plain. */
static lm_code join_uses(const lm_kv_binding *b, const lm_kv_use *plain, lm_err *e)
{
    for (int64_t l = 0; l < b->p->layers; l++) {
        if (!b->site[l].rotary)
            continue;
        if (!lm_kv_use_is_same(b->use[2 * l + LM_KV_K], b->use[2 * l + LM_KV_V]))
            return lm_fail(e, LM_EUSAGE, where, "give one method, without k= and v=",
                           "layer %lld keeps latents, which are keys and values at once",
                           (long long)l);
        b->use[2 * l + LM_KV_V] = plain;
    }
    return LM_OK;
}

static lm_code find_uses(const lm_kv_binding *b, lm_err *e)
{
    static const lm_kv_use plain = { .method = &lm_kv_auto };
    const lm_kv_spec *s = b->s;
    for (int64_t i = 0; i < 2 * b->p->layers; i++) {
        int k = (int)(i % 2);
        int64_t item = find_item(s, k, i / 2, b->p->layers);
        b->use[i] = !b->site[i / 2].kv_heads ? &plain
                    : item >= 0              ? &s->item[item].side[k]
                    : s->all[k].method       ? &s->all[k]
                                             : &plain;
    }
    return join_uses(b, &plain, e);
}

/* The forms for pages of p->page tokens. */
static lm_code bind_sides(const lm_kv_binding *b, lm_err *e)
{
    for (int64_t i = 0; i < 2 * b->p->layers; i++)
        if (lm_kv_bind_side(b, b->use[i], (int)(i % 2), &b->site[i / 2], &b->side[i], e)) {
            lm_err_in(e, "%s: %s of layer %lld", where, side_name[i % 2], (long long)(i / 2));
            return e->code;
        }
    return LM_OK;
}

static lm_code check_pages(const lm_kv_binding *b, lm_err *e)
{
    for (int64_t i = 0; i < 2 * b->p->layers; i++) {
        lm_kv_sections sections;
        const lm_kv_format *f = b->side[i].format;
        if (f && lm_kv_page(f, b->p->page, lm_kv_site_dim(&b->site[i / 2], (int)(i % 2)), &sections,
                            e)) {
            lm_err_in(e, "%s: %s of layer %lld", where, side_name[i % 2], (long long)(i / 2));
            return e->code;
        }
    }
    return LM_OK;
}

static lm_code put_text(const lm_kv_binding *b, bool chosen, lm_err *e)
{
    char *text;
    const char *of = lm_kv_spec_text(b->s);
    if (chosen)
        return lm_kv_bound_text(b, e);
    lm_code rc = lm_arena_strdup(b->p->arena, &text, of, strlen(of), e);
    b->p->text = rc ? NULL : text;
    return rc;
}

/* Forms may depend on the page, and the page on the groups of the forms, which do not depend on it. */
static lm_code bind_layers(const lm_kv_spec *s, const lm_kv_site *site,
                           const lm_kv_data *const *data, lm_kv_plan *p, lm_err *e)
{
    lm_kv_binding b = { .s = s, .site = site, .data = data, .p = p };
    bool chosen;
    if (lm_arena_alloc(p->arena, &b.side, (size_t)p->layers, 2 * sizeof *b.side, e) ||
        lm_arena_alloc(p->arena, &b.use, (size_t)p->layers, 2 * sizeof *b.use, e))
        return e->code;
    p->side = b.side;
    p->page = LEAST_PAGE;
    if (find_uses(&b, e) || lm_kv_bind_auto(&b, &chosen, e) || bind_sides(&b, e) ||
        choose_page(p, e))
        return e->code;
    if (p->page != LEAST_PAGE && bind_sides(&b, e))
        return e->code;
    return check_pages(&b, e) || put_text(&b, chosen, e) ? e->code : LM_OK;
}

/* The policy, against forms that cannot code single tokens anew, and windows. */
static lm_code bind_policy(const lm_kv_spec *s, const lm_kv_site *site, lm_kv_plan *p, lm_err *e)
{
    lm_kv_policy *policy;
    lm_buf name = { 0 };
    if (!s->policy.method || !p->layers)
        return LM_OK;
    if (lm_arena_alloc(p->arena, &policy, 1, sizeof *policy, e))
        return e->code;
    p->policy = policy;
    lm_code rc = lm_kv_add_use(s, &s->policy, &name, e);
    lm_kv_ask q = { .method = s->policy.method, .h = s->policy.h, .site = site, .name = name.data };
    if (!rc && (rc = q.method->policy(&q, policy, e)))
        lm_err_in(e, "%s", where);
    for (int64_t i = 0; i < p->layers && !rc && policy->ranked; i++) {
        lm_kv_side *keys = (lm_kv_side *)(uintptr_t)&p->side[2 * i + LM_KV_K];
        keys->pre_rope = true;
        keys->rotate = false; /* the matrix does not commute with the rotation by positions */
    }
    for (int64_t i = 0; i < 2 * p->layers && !rc; i++) {
        const lm_kv_format *f = p->side[i].format;
        if (f && lm_kv_policy_replaces(policy) && lm_kv_step(f, LEAST_PAGE) > 1)
            rc = lm_fail(e, LM_EUSAGE, where, "choose a method that codes single tokens",
                         "%s replaces single tokens, and %s codes groups of them", name.data,
                         f->name);
        if (!rc && f && lm_kv_policy_replaces(policy) &&
            p->side[i].residual + p->side[i].sinks + f->outliers > 0)
            rc =
                lm_fail(e, LM_EUSAGE, where, "set residual=0 and sinks=0, or choose another method",
                        "%s replaces single tokens, and %s keeps some plain beside its codes",
                        name.data, f->name);
    }
    lm_buf_fini(&name);
    return rc;
}

lm_code lm_kv_spec_bind(const lm_kv_spec *s, const lm_kv_site *site, int64_t layers,
                        const lm_kv_data *const *data, lm_kv_plan **out, lm_err *e)
{
    lm_kv_plan *p;
    *out = NULL;
    if (lm_alloc_n(&p, 1, sizeof *p, "kv cache plan", e))
        return e->code;
    p->layers = layers;
    if (lm_arena_new(&p->arena, 1 << 14, e) || check_items(s, site, layers, e) ||
        bind_layers(s, site, data, p, e) || bind_policy(s, site, p, e)) {
        lm_kv_plan_free(p);
        return e->code;
    }
    *out = p;
    return LM_OK;
}

void lm_kv_plan_free(lm_kv_plan *p)
{
    if (!p)
        return;
    lm_arena_free(p->arena);
    lm_free(p);
}

/* Of a token of one side in a page. */
static double side_bytes(const lm_kv_plan *p, const lm_kv_site *at, int side, const lm_kv_side *s)
{
    const int64_t dim = lm_kv_site_dim(at, side);
    double head = s->format ? (double)lm_kv_page_bytes(s->format, p->page, dim) / (double)p->page
                            : (double)lm_plain_bytes(s->plain, dim);
    return head * (double)at->kv_heads;
}

double lm_kv_plan_bytes(const lm_kv_plan *p, const lm_kv_site *site)
{
    double sum = 0;
    for (int64_t i = 0; i < 2 * p->layers; i++)
        sum += side_bytes(p, &site[i / 2], (int)(i % 2), &p->side[i]);
    return sum;
}

double lm_kv_plan_text_bytes(const lm_kv_plan *p, const lm_kv_site *site, const int64_t *rows)
{
    double sum = 0;
    for (int64_t i = 0; i < 2 * p->layers; i++) {
        const lm_kv_site *at = &site[i / 2];
        const lm_kv_side *s = &p->side[i];
        int64_t n = rows[i / 2], coded = n;
        if (s->format)
            coded = lm_kv_side_coded(s, n) - s->sinks;
        coded = coded > 0 ? coded : 0;
        sum += (double)coded * side_bytes(p, at, (int)(i % 2), s) +
               (double)(n - coded) *
                   (double)(lm_plain_bytes(at->act, lm_kv_site_dim(at, (int)(i % 2))) *
                            (size_t)at->kv_heads);
    }
    return sum;
}
