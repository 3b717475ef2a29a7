/* SPDX-License-Identifier: Apache-2.0 */
/* spec_auto.c -- methods of layers by a budget of bits, from the errors that a calibration has for some candidates. */
#include <math.h>
#include <string.h>

#include "kv/choose.h"
#include "kv/methods/methods.h"
#include "kv/spec_impl.h"
#include "kv/store.h"

static const char where[] = LM_KV_WHERE;

enum { BITS }; /* key of auto */

bool lm_kv_has_budget(const lm_kv_use *u)
{
    return u->method == &lm_kv_auto && u->h[BITS] > 0;
}

lm_code lm_kv_read_candidates(const char *candidates, const char *from, lm_kv_use *out, int *n,
                              lm_err *e)
{
    char text[512];
    lm_kv_spec *s;
    *n = 0;
    for (const char *at = candidates; *at; at += *at == ';') {
        size_t len = strcspn(at, ";");
        if (len >= sizeof text || *n == LM_KV_MAX_CANDIDATES)
            return lm_fail(e, LM_EUSAGE, from, "give fewer",
                           "more than %d candidates, or a long one", LM_KV_MAX_CANDIDATES);
        memcpy(text, at, len);
        text[len] = 0;
        at += len;
        if (lm_kv_spec_parse(text, &s, e)) {
            lm_err_in(e, "%s", from);
            return e->code;
        }
        bool single = !s->n_items && !s->n_files && !s->policy.method && s->all[LM_KV_K].method &&
                      !lm_kv_has_budget(&s->all[LM_KV_K]) &&
                      lm_kv_use_is_same(&s->all[LM_KV_K], &s->all[LM_KV_V]);
        out[(*n)++] = s->all[LM_KV_K];
        lm_kv_spec_free(s);
        if (!single)
            return lm_fail(e, LM_EUSAGE, from, "give methods without policies, as int8;int4",
                           "the candidate '%.80s' is not one method", text);
    }
    return *n ? LM_OK
              : lm_fail(e, LM_EUSAGE, from, "use a calibration for auto",
                        "there are no candidates for auto");
}

lm_code lm_kv_check_candidates(const char *candidates, const char *from, lm_err *e)
{
    lm_kv_use *use;
    int n;
    lm_code rc = lm_alloc_n(&use, LM_KV_MAX_CANDIDATES, sizeof *use, "candidates", e);

    if (!rc)
        rc = lm_kv_read_candidates(candidates, from, use, &n, e);
    lm_free(use);
    return rc;
}

/* Bytes of a token of a side with a candidate; infinite: the candidate cannot store it. */
static double bytes_of(const lm_kv_binding *b, const lm_kv_use *u, int64_t i)
{
    const lm_kv_site *at = &b->site[i / 2];
    lm_err ignored = { 0 };
    lm_kv_side side;
    lm_kv_sections sections;
    if (lm_kv_bind_side(b, u, (int)(i % 2), at, &side, &ignored))
        return (double)INFINITY;
    if (!side.format)
        return (double)(lm_dtype_size(side.plain) * (size_t)(at->kv_heads * at->head_dim));
    int64_t page = lm_kv_common_page(b->p->page, side.format);
    if (lm_kv_page(side.format, page, at->head_dim, &sections, &ignored))
        return (double)INFINITY;
    return (double)sections.all / (double)page * (double)at->kv_heads;
}

/* The sides that have the budget of u: their numbers in index, their offers. */
typedef struct {
    int64_t *index, n;
    lm_kv_choice *offer;
    int *chosen;
    double numbers; /* of a token */
} group;

static lm_code add_side(const lm_kv_binding *b, const lm_kv_data *d, const lm_kv_use *candidate,
                        int m, int64_t i, group *g, lm_err *e)
{
    const lm_kv_numbers *have = i / 2 < d->layers ? &d->side[i] : NULL;
    if (!have || !have->errors || have->candidates != m)
        return lm_fail(e, LM_EUSAGE, where, "use the calibration of this model",
                       "%s has %lld errors for the %s of layer %lld, not %d", d->path,
                       (long long)(have ? have->candidates : 0), i % 2 ? "values" : "keys",
                       (long long)(i / 2), m);
    for (int k = 0; k < m; k++)
        g->offer[g->n * m + k] =
            (lm_kv_choice){ bytes_of(b, &candidate[k], i), (double)have->errors[k] };
    g->numbers += (double)(b->site[i / 2].kv_heads * b->site[i / 2].head_dim);
    g->index[g->n++] = i;
    return LM_OK;
}

/* The cheapest forms must fit. */
static lm_code check_bits(const group *g, int m, double bits, lm_err *e)
{
    double least = 0;
    for (int64_t i = 0; i < g->n; i++) {
        double one = INFINITY;
        for (int k = 0; k < m; k++)
            one = fmin(one, g->offer[i * m + k].bytes);
        least += one;
    }
    double need = ceil(least * 8 / g->numbers * 100) / 100;
    if (!isfinite(least) || least <= bits / 8 * g->numbers)
        return LM_OK; /* as lm_kv_choose */
    return lm_fail(e, LM_EUSAGE, where, "allow as many bits",
                   "the cheapest forms have %.4g bits a number, not %.4g", need, bits);
}

/* Choose for all sides with the budget of side `first`. */
static lm_code choose_group(lm_kv_binding *b, int64_t first, lm_err *e)
{
    const lm_kv_use *u = b->use[first];
    const lm_kv_data *d = u->file && b->data ? b->data[u->file - 1] : NULL;
    lm_kv_use *candidate;
    size_t sides = 2 * (size_t)b->p->layers;
    int m;
    group g = { .n = 0 };
    if (!d)
        return lm_fail(e, LM_EUSAGE, where, "measure a calibration, and set file",
                       "auto with bits needs a calibration");
    if (lm_arena_alloc(b->p->arena, &candidate, LM_KV_MAX_CANDIDATES, sizeof *candidate, e) ||
        lm_kv_read_candidates(d->candidates, d->path, candidate, &m, e) ||
        lm_arena_alloc(b->p->arena, &g.index, sides, sizeof *g.index, e) ||
        lm_arena_alloc(b->p->arena, &g.chosen, sides, sizeof *g.chosen, e) ||
        lm_arena_alloc(b->p->arena, &g.offer, sides, (size_t)m * sizeof *g.offer, e))
        return e->code;
    for (int64_t i = first; i < 2 * b->p->layers; i++)
        if (lm_kv_has_budget(b->use[i]) && lm_kv_use_is_same(b->use[i], u) &&
            add_side(b, d, candidate, m, i, &g, e))
            return e->code;
    if (check_bits(&g, m, u->h[BITS], e) ||
        lm_kv_choose(g.offer, g.n, m, u->h[BITS] / 8 * g.numbers, g.chosen, e))
        return e->code;
    for (int64_t i = 0; i < g.n; i++)
        b->use[g.index[i]] = &candidate[g.chosen[i]];
    return LM_OK;
}

lm_code lm_kv_bind_auto(lm_kv_binding *b, bool *any, lm_err *e)
{
    *any = false;
    for (int64_t i = 0; i < 2 * b->p->layers; i++) {
        if (!lm_kv_has_budget(b->use[i]))
            continue;
        *any = true;
        if (choose_group(b, i, e))
            return e->code;
    }
    return LM_OK;
}

/* ---- what was chosen, as text ---- */

/* Layers [first, last] have the same methods. */
static lm_code add_layers(const lm_kv_binding *b, int64_t first, int64_t last, lm_buf *out,
                          lm_err *e)
{
    lm_code rc = lm_buf_addf(out, e, "%slayers.%lld-%lld=k=", out->len ? ";" : "", (long long)first,
                             (long long)last);
    rc = rc ? rc : lm_kv_add_use(b->s, b->use[2 * first], out, e);
    rc = rc ? rc : lm_buf_addf(out, e, ",v=");
    return rc ? rc : lm_kv_add_use(b->s, b->use[2 * first + 1], out, e);
}

lm_code lm_kv_bound_text(const lm_kv_binding *b, lm_err *e)
{
    lm_buf text = { 0 };
    lm_kv_spec *s = NULL;
    char *own;
    lm_code rc = LM_OK;
    for (int64_t first = 0, last; first < b->p->layers && !rc; first = last + 1) {
        for (last = first; last + 1 < b->p->layers; last++)
            if (!lm_kv_use_is_same(b->use[2 * first], b->use[2 * last + 2]) ||
                !lm_kv_use_is_same(b->use[2 * first + 1], b->use[2 * last + 3]))
                break;
        rc = add_layers(b, first, last, &text, e);
    }
    if (!rc && b->s->policy.method)
        rc = lm_buf_addf(&text, e, ";");
    if (!rc && b->s->policy.method)
        rc = lm_kv_add_use(b->s, &b->s->policy, &text, e);
    if (!rc)
        rc = lm_kv_spec_parse(text.data, &s, e); /* its canonical text */
    if (!rc)
        rc = lm_arena_strdup(b->p->arena, &own, s->text.data, s->text.len, e);
    b->p->text = rc ? NULL : own;
    lm_kv_spec_free(s);
    lm_buf_fini(&text);
    return rc;
}
