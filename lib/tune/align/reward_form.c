/* SPDX-License-Identifier: Apache-2.0 */
/* reward_form.c -- rewards of the form of a completion, whatever it says. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "tune/align/reward_impl.h"

/* ---- texts ---- */

/* The completion as UTF-8: a token may end within a character. */
static lm_code clean_text(reward *r, const lm_reward_item *item, lm_err *e)
{
    const char *p = item->text, *end = p + item->text_len;
    r->clean.len = 0;
    while (p < end) {
        size_t n = lm_utf8_valid(p, (size_t)(end - p));
        if (lm_buf_add(&r->clean, p, n, e))
            return e->code;
        p += n;
        if (p < end && lm_buf_add(&r->clean, "\xef\xbf\xbd", 3, e))
            return e->code;
        p += p < end;
    }
    return lm_buf_add(&r->clean, "", 0, e);
}

/* A text on which the engine reaches its limits does not match: a model must not stop its own
 * training. */
lm_code reward_regex(reward *r, const lm_reward_item *item, double *out, lm_err *e)
{
    lm_err limits = { 0 };
    size_t begin, end;
    bool found = false;
    if (clean_text(r, item, e))
        return e->code;
    lm_regex_find(r->regex, r->match, r->clean.data ? r->clean.data : "", r->clean.len, 0, &begin,
                  &end, &found, &limits);
    *out = found && !limits.code ? 1 : 0;
    return LM_OK;
}

static const char *skip_space(const char *p, const char *end)
{
    while (p < end && strchr(" \t\r\n\v\f", *p) && *p)
        p++;
    return p;
}

/* Behind `mark` if the text begins with it; NULL otherwise. */
static const char *skip_mark(const char *p, const char *end, const char *mark)
{
    const size_t n = strlen(mark);
    return p && (size_t)(end - p) >= n && !memcmp(p, mark, n) ? p + n : NULL;
}

static const char *find_mark(const char *p, const char *end, const char *mark)
{
    return p ? memmem(p, (size_t)(end - p), mark, strlen(mark)) : NULL;
}

lm_code reward_think(reward *r, const lm_reward_item *item, double *out, lm_err *e)
{
    const char *end = item->text + item->text_len, *p = skip_mark(item->text, end, "<think>");
    (void)r, (void)e;
    *out = p && !find_mark(p, end, "<think>") && find_mark(p, end, "</think>") ? 1 : 0;
    return LM_OK;
}

/* p is at <NAME>: behind the first </NAME>, if there is no other <NAME>; NULL otherwise. */
static const char *skip_block(const char *p, const char *end, const char *open, const char *close)
{
    p = skip_mark(p, end, open);
    if (!p || find_mark(p, end, open))
        return NULL;
    p = find_mark(p, end, close);
    return p ? p + strlen(close) : NULL;
}

lm_code reward_tags(reward *r, const lm_reward_item *item, double *out, lm_err *e)
{
    const char *end = item->text + item->text_len, *p = skip_space(item->text, end);
    (void)r, (void)e;
    p = skip_block(p, end, "<think>", "</think>");
    p = p ? skip_block(skip_space(p, end), end, "<answer>", "</answer>") : NULL;
    *out = p && skip_space(p, end) == end ? 1 : 0;
    return LM_OK;
}

/* ---- tokens ---- */

const lm_hyper reward_length_keys[] = {
    { "target", 0, 0, 1e9, "tokens that cost nothing", LM_WHOLE },
    { "cost", 0.001, 0, 1e6, "of each further token", NULL },
    { 0 },
};

lm_code reward_length(reward *r, const lm_reward_item *item, double *out, lm_err *e)
{
    double over = (double)item->n - r->key[0];
    (void)e;
    *out = over > 0 ? -r->key[1] * over : 0;
    return LM_OK;
}

const lm_hyper reward_overlong_keys[] = {
    { "most", 0, 0, 1e9, "tokens from which it is -1; 0: the most new tokens", LM_WHOLE },
    { "soft", 0, 0, 1e9, "tokens before that in which it falls; 0: a fifth of them", LM_WHOLE },
    { 0 },
};

lm_code reward_overlong(reward *r, const lm_reward_item *item, double *out, lm_err *e)
{
    double most = r->key[0], soft = r->key[1] > 0 ? r->key[1] : most / 5, n = (double)item->n;
    (void)e;
    *out = n <= most - soft ? 0 : n > most ? -1 : (most - soft - n) / soft;
    return LM_OK;
}

const lm_hyper reward_repetition_keys[] = {
    { "ngram", 3, 1, 64, "tokens of an n-gram", LM_WHOLE },
    { "penalty", -1, -1e6, 0, "of a completion of nothing else", NULL },
    { 0 },
};

typedef struct {
    const uint32_t *ids;
    int64_t n;
} gram;

static int compare_grams(const void *a, const void *b)
{
    const gram *x = a, *y = b;
    return memcmp(x->ids, y->ids, (size_t)x->n * sizeof *x->ids);
}

lm_code reward_repetition(reward *r, const lm_reward_item *item, double *out, lm_err *e)
{
    int64_t n = (int64_t)r->key[0], all = item->n - n + 1, unique = 1;
    gram *g = NULL;
    *out = 0;
    if (all < 2)
        return LM_OK;
    if (lm_alloc_n(&g, (size_t)all, sizeof *g, "n-grams of a completion", e))
        return e->code;
    for (int64_t i = 0; i < all; i++)
        g[i] = (gram){ item->ids + i, n };
    qsort(g, (size_t)all, sizeof *g, compare_grams);
    for (int64_t i = 1; i < all; i++)
        unique += compare_grams(&g[i - 1], &g[i]) != 0;
    lm_free(g);
    *out = unique < all ? (1 - (double)unique / (double)all) * r->key[1] : 0;
    return LM_OK;
}
