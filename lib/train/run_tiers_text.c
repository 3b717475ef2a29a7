/* SPDX-License-Identifier: Apache-2.0 */
/* run_tiers_text.c -- places of checkpoints, as text. */
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/hyper.h"
#include "base/mem.h"
#include "base/text.h"
#include "train/run_tiers.h"

static const char where[] = "place of checkpoints";
static const double default_seconds = 30 * 60;
enum { DEFAULT_KEPT = 3, MOST_KEPT = 1000000 };

bool lm_run_interval(const char *text, int64_t *steps, double *seconds)
{
    const size_t n = strlen(text);
    const bool is_time = n && strchr("smh", text[n - 1]);
    *steps = 0;
    *seconds = 0;
    return is_time ? lm_parse_seconds(text, seconds) && *seconds > 0
                   : lm_parse_count(text, steps) && *steps > 0;
}

static lm_code set_key(const lm_hyper_text *kv, lm_run_tier *t, lm_err *e)
{
    int64_t n;
    if (!strcmp(kv->key, "every"))
        return lm_run_interval(kv->value, &t->every, &t->seconds)
                   ? LM_OK
                   : lm_fail(e, LM_EUSAGE, where, "give steps (every=100) or a time (every=10m)",
                             "every=%s is neither", kv->value);
    if (strcmp(kv->key, "keep") != 0)
        return lm_fail(e, LM_EUSAGE, where, "give every or keep", "has no key \"%s\"", kv->key);
    if (!lm_parse_count(kv->value, &n) || n < 0 || n > MOST_KEPT)
        return lm_fail(e, LM_EUSAGE, where, "give a number; 0 keeps all", "keep=%s", kv->value);
    t->keep = (int)n;
    return t->memory && !n ? lm_fail(e, LM_EUSAGE, where, "give keep=1",
                                     "keep=0 in memory would fill it with all checkpoints")
                           : LM_OK;
}

/* A folder may have ':' in its name: keys are behind the last one that has a known key behind it. */
static const char *find_keys(const char *text)
{
    const char *keys = strrchr(text, ':');
    return keys && (!strncmp(keys, ":every=", 7) || !strncmp(keys, ":keep=", 6))
               ? keys
               : text + strlen(text);
}

static lm_code parse_one(const char *text, lm_run_tier *t, lm_err *e)
{
    const char *at = find_keys(text);
    char place[PATH_MAX], *cwd;
    *t = (lm_run_tier){ .seconds = default_seconds, .keep = DEFAULT_KEPT };
    if (at == text || (size_t)(at - text) >= sizeof place)
        return lm_fail(e, LM_EUSAGE, where, "give PLACE:every=N,keep=K",
                       "\"%.80s\" names no folder", text);
    snprintf(place, sizeof place, "%.*s", (int)(at - text), text);
    t->memory = !strcmp(place, "memory");
    t->keep = t->memory ? 1 : DEFAULT_KEPT;
    while (*at) {
        lm_hyper_text kv;
        at++;
        if (lm_hyper_next(&at, "", where, place, &kv, e) || set_key(&kv, t, e))
            return e->code;
    }
    if (t->memory)
        return LM_OK;
    if (!(cwd = realpath(".", NULL)))
        return lm_fail(e, LM_EIO, ".", NULL, "cannot determine the current folder");
    lm_code rc = lm_path_join(&t->folder, cwd, place, e);
    free(cwd);
    return rc;
}

static bool is_same_place(const lm_run_tier *a, const lm_run_tier *b)
{
    return a->memory || b->memory
               ? a->memory && b->memory
               : !strcmp(a->folder, b->folder) || lm_path_same(a->folder, b->folder);
}

lm_code lm_run_tiers_parse(const char *const *text, int n, lm_run_tiers *out, lm_err *e)
{
    *out = (lm_run_tiers){ 0 };
    if (n > LM_RUN_TIERS)
        return lm_fail(e, LM_EUSAGE, where, NULL, "%d are given, and %d are the most", n,
                       LM_RUN_TIERS);
    for (int i = 0; i < n; i++) {
        out->n++;
        if (parse_one(text[i], &out->at[i], e))
            return e->code;
        for (int k = 0; k < i; k++)
            if (is_same_place(&out->at[k], &out->at[i]))
                return lm_fail(e, LM_EUSAGE, where, "give each once", "\"%.80s\" is given twice",
                               text[i]);
    }
    return LM_OK;
}

lm_code lm_run_tier_text(const lm_run_tier *t, lm_buf *out, lm_err *e)
{
    const char *place = t->memory ? "memory" : t->folder;
    return t->every ? lm_buf_addf(out, e, "%s:every=%" PRId64 ",keep=%d", place, t->every, t->keep)
                    : lm_buf_addf(out, e, "%s:every=%.17gs,keep=%d", place, t->seconds, t->keep);
}

int64_t lm_run_tiers_in_memory(const lm_run_tiers *t)
{
    int64_t n = 0;
    for (int i = 0; i < t->n; i++)
        n += t->at[i].memory ? t->at[i].keep + 1 : 0;
    return n;
}
