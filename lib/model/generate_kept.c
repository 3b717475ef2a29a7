/* SPDX-License-Identifier: Apache-2.0 */
/* generate_kept.c -- caches that keep some tokens as images: which tokens a slot holds, in which order, and how much they
 * were read. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "kv/image.h"
#include "model/generate_keep.h"

static const char where[] = "cache";

/* ---- to an image ---- */

typedef struct {
    int32_t at, row;
} kept_row;

static int by_position(const void *a, const void *b)
{
    const kept_row *x = a, *y = b;
    return (x->at > y->at) - (x->at < y->at);
}

lm_code generator_keep_describe(const lm_generator *g, int64_t slot, lm_kv_image *m, lm_err *e)
{
    const generator_keep *k = g->keep;
    kept_row *sorted;
    lm_code rc = lm_alloc_n(&sorted, (size_t)m->about.tokens, sizeof *sorted, "rows of a cache", e);
    for (int64_t l = 0; l < k->layers && !rc; l++)
        for (int64_t h = 0; h < k->layer[l].heads; h++) {
            int64_t n = m->about.rows[l];
            const int32_t *at = k->rows[l] ? generator_kept_positions(&k->layer[l], slot, h) : NULL;
            for (int64_t i = 0; i < n; i++)
                sorted[i] = (kept_row){ at ? at[i] : (int32_t)i, (int32_t)i };
            qsort(sorted, (size_t)n, sizeof *sorted, by_position);
            for (int64_t i = 0; i < n; i++) {
                m->content.at[l][h * n + i] = sorted[i].at;
                if (m->about.ordered)
                    m->content.order[l][h * n + i] = sorted[i].row;
                if (m->about.weighed)
                    m->content.mass[l][h * n + i] =
                        at ? generator_kept_mass(k, l, slot, h)[sorted[i].row] : 0;
            }
        }
    lm_free(sorted);
    return rc;
}

/* ---- from an image ---- */

/* Tokens of a layer without a policy: all. */
static bool is_whole(const lm_kv_image *m, int64_t layer)
{
    int64_t n = m->about.rows[layer];
    bool whole = n == m->about.tokens;
    for (int64_t i = 0; i < m->about.kv_heads[layer] * n && whole; i++)
        whole = m->content.at[layer][i] == i % n;
    return whole;
}

/* Positions below the end; of ranked tokens the first ones, and those up to the end. */
static bool good_positions(const lm_generator *g, const lm_kv_image *m, int64_t layer)
{
    const lm_kv_policy *p = g->keep->p;
    int64_t n = m->about.rows[layer], gone = m->about.tokens - n;
    bool good = true;
    for (int64_t i = 0; i < m->about.kv_heads[layer] * n && good; i++) {
        int32_t at = m->content.at[layer][i];
        good = at < m->about.tokens;
        if (p->ranked)
            good = at == i % n + (i % n < p->sinks ? 0 : gone);
    }
    return good;
}

static lm_code check_layer(const lm_generator *g, const lm_kv_image *m, int64_t l, lm_err *e)
{
    const generator_keep *k = g->keep;
    int64_t n = m->about.rows[l], room = k->layer[l].room;
    if (!k->rows[l])
        return is_whole(m, l) ? LM_OK
                              : lm_fail(e, LM_EFORMAT, where, "write it again",
                                        "layer %" PRId64 " lacks tokens of its window", l);
    if (!good_positions(g, m, l))
        return lm_fail(e, LM_EFORMAT, where, "write it again",
                       "layer %" PRId64 " has tokens that its policy does not leave", l);
    if (n > room)
        return lm_fail(e, LM_EUSAGE, where, "give a larger context",
                       "layer %" PRId64 " has %" PRId64 " tokens, and room for %" PRId64, l, n,
                       room);
    return LM_OK;
}

lm_code generator_keep_check(const lm_generator *g, const lm_kv_image *m, int64_t n, lm_err *e)
{
    const lm_kv_about *a = &m->about;
    const lm_kv_policy *p = g->keep->p;
    bool replaces = lm_kv_policy_replaces(p);
    if (!a->rows)
        return lm_fail(e, LM_EUSAGE, where, "continue it without a policy",
                       "caches that drop tokens cannot take it");
    if (replaces && (!a->policy || strcmp(a->policy, g->kv->text) || !a->ordered ||
                     a->weighed != (p->kind == LM_KV_H2O)))
        return lm_fail(e, LM_EUSAGE, where, "continue it without a policy",
                       "tokens were dropped from it by another one");
    if (a->tokens + n > g->context)
        return lm_fail(e, LM_EUSAGE, where, "give a larger context",
                       "it has %" PRId64 " tokens, and %" PRId64
                       " follow; the context holds %" PRId64,
                       a->tokens, n, g->context);
    for (int64_t l = 0; l < g->keep->layers; l++)
        if (check_layer(g, m, l, e))
            return e->code;
    return LM_OK;
}

/* The row of the cache in which row i of a head of the image is. */
static int64_t row_of(const lm_kv_image *m, int64_t layer, int64_t head, int64_t i)
{
    return m->about.ordered ? m->content.order[layer][head * m->about.rows[layer] + i] : i;
}

static void take_head(generator_keep *k, int64_t slot, const lm_kv_image *m, int64_t l, int64_t h)
{
    int64_t n = m->about.rows[l];
    int32_t *at = generator_kept_positions(&k->layer[l], slot, h);
    float *mass = k->mass.bytes ? generator_kept_mass(k, l, slot, h) : NULL;
    if (mass)
        memset(mass, 0, (size_t)(k->layer[l].room + 1) * sizeof *mass);
    for (int64_t i = 0; i < n; i++) {
        int64_t row = row_of(m, l, h, i);
        at[row] = m->content.at[l][h * n + i];
        if (mass && k->p->kind == LM_KV_RANDOM)
            lm_kv_random_masses(k->p->seed, l, h, at[row], 1, &mass[row]);
        else if (mass)
            mass[row] = m->content.mass[l][h * n + i];
    }
}

lm_code generator_keep_take(lm_generator *g, int64_t slot, const lm_kv_image *m, lm_err *e)
{
    generator_keep *k = g->keep;
    if (k->mass.bytes && k->mass.dev != k->mass.host &&
        (lm_mirror_pull(&k->mass, k->mass.bytes, NULL, e) || generator_wait_for_last(g, e)))
        return e->code;
    k->n[slot] = m->about.policy ? m->about.prompt : m->about.tokens;
    k->pending[slot] = false;
    for (int64_t l = 0; l < k->layers; l++) {
        if (!k->rows[l])
            continue;
        for (int64_t h = 0; h < k->layer[l].heads; h++)
            take_head(k, slot, m, l, h);
        k->layer[l].used[slot] = m->about.rows[l];
    }
    return k->mass.bytes ? lm_mirror_push(&k->mass, k->mass.bytes, NULL, e) : LM_OK;
}
