/* SPDX-License-Identifier: Apache-2.0 */
/* scored_merges.c -- the merges that follow from the scores of tokens. */
#include "text/scored.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

enum { MOST_PIECE = 512 }; /* longest token, in bytes, for which merges are searched */

static int compare(const lm_scored_token *a, const lm_scored_token *b)
{
    int c = memcmp(a->text, b->text, a->len < b->len ? a->len : b->len);
    return c ? c : (a->len > b->len) - (a->len < b->len);
}

static int by_score(const void *a, const void *b)
{
    const lm_scored_merge *x = a, *y = b;

    if (x->score < y->score || x->score > y->score)
        return x->score < y->score ? 1 : -1;
    if (x->left != y->left)
        return x->left < y->left ? -1 : 1;
    return (x->right > y->right) - (x->right < y->right);
}

static int by_text(const void *a, const void *b, void *ctx)
{
    const lm_scored_token *v = ctx;
    return compare(&v[*(const uint32_t *)a], &v[*(const uint32_t *)b]);
}

/* The token with this text, if words can consist of it; otherwise -1. */
static int64_t find_scored(const lm_scored_token *v, const uint32_t *sorted, size_t n,
                           const char *text, size_t len)
{
    const lm_scored_token want = { .text = text, .len = len };
    size_t low = 0, high = n;

    while (low < high) {
        size_t mid = low + (high - low) / 2;
        int c = compare(&v[sorted[mid]], &want);
        if (!c)
            return v[sorted[mid]].type == LM_SCORED_NORMAL ? (int64_t)sorted[mid] : -1;
        if (c < 0)
            low = mid + 1;
        else
            high = mid;
    }
    return -1;
}

lm_code lm_scored_merges(const lm_scored_token *v, size_t n, lm_scored_merge **out, size_t *n_out,
                         lm_err *e)
{
    uint32_t *sorted = NULL;
    size_t cap = 0;
    lm_code rc = lm_alloc_n(&sorted, n, sizeof *sorted, "tokens by text", e);

    *n_out = 0;
    for (size_t i = 0; !rc && i < n; i++)
        sorted[i] = (uint32_t)i;
    if (!rc && n)
        qsort_r(sorted, n, sizeof *sorted, by_text, (void *)(uintptr_t)v);
    for (size_t i = 0; !rc && i < n; i++) {
        const lm_scored_token *t = &v[i];
        for (size_t k = 1; !rc && t->type == LM_SCORED_NORMAL && t->len <= MOST_PIECE && k < t->len;
             k++) {
            int64_t left, right;
            if (((unsigned char)t->text[k] & 0xc0) == 0x80 ||
                (left = find_scored(v, sorted, n, t->text, k)) < 0 ||
                (right = find_scored(v, sorted, n, t->text + k, t->len - k)) < 0)
                continue;
            rc = lm_grow(out, &cap, *n_out + 1, sizeof **out, "merges", e);
            if (!rc)
                (*out)[(*n_out)++] = (lm_scored_merge){ (uint32_t)i, (uint32_t)left,
                                                        (uint32_t)right, (uint32_t)k, v[i].score };
        }
    }
    if (!rc && *n_out)
        qsort(*out, *n_out, sizeof **out, by_score);
    lm_free(sorted);
    return rc;
}
