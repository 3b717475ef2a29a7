/* SPDX-License-Identifier: Apache-2.0 */
/* targets.c -- objectives of a pretraining by name. */
#include "train/targets.h"

#include <string.h>

#include "base/hyper.h"

const char *const lm_targets_names[] = { "clm", "mlm", "span", NULL };

static const lm_hyper none[] = { { .name = NULL } };
static const lm_hyper masks[] = {
    [LM_TARGETS_SHARE] = { "share", 0.15, 1e-6, 0.999, "of the tokens that are predicted", NULL },
    [LM_TARGETS_WHOLE_WORDS] = { "whole_words", 0, 0, 1, "words are masked as a whole", "off on" },
    [LM_TARGETS_NEXT_SENTENCE] = { "next_sentence", 0, 0, 1,
                                   "of pairs of texts, with next-sentence prediction", "off on" },
    { .name = NULL },
};
static const lm_hyper spans[] = {
    [LM_TARGETS_DENSITY] = { "density", 0.15, 1e-6, 0.999, "of the text that is cut out", NULL },
    [LM_TARGETS_MEAN] = { "mean", 3, 1, 1e6, "length of a span", NULL },
    { .name = NULL },
};
static const lm_hyper *const table_of[] = { [LM_TARGETS_OF_MODEL] = none,
                                            [LM_TARGETS_NEXT] = none,
                                            [LM_TARGETS_MASKED] = masks,
                                            [LM_TARGETS_SPANS] = spans };

void lm_targets_set(lm_targets *t, lm_targets_kind kind)
{
    t->kind = kind;
    for (int i = 0; table_of[kind][i].name; i++)
        t->key[i] = table_of[kind][i].value;
}

lm_code lm_targets_parse(const char *text, lm_targets *out, lm_err *e)
{
    static const char where[] = "objective";
    const char *at = text ? text : "";
    size_t n = strcspn(at, ":");
    *out = (lm_targets){ .kind = LM_TARGETS_OF_MODEL };
    if (!text)
        return LM_OK;
    for (int i = 0; lm_targets_names[i]; i++)
        if (strlen(lm_targets_names[i]) == n && !memcmp(at, lm_targets_names[i], n))
            lm_targets_set(out, LM_TARGETS_NEXT + (unsigned)i);
    if (out->kind == LM_TARGETS_OF_MODEL)
        return lm_fail(e, LM_EUSAGE, where, "give clm, mlm or span", "unknown objective \"%.*s\"",
                       (int)(n < 40 ? n : 40), at);
    const lm_hyper *table = table_of[out->kind];
    const char *name = lm_targets_names[out->kind - LM_TARGETS_NEXT];
    for (at += n; *at;) {
        lm_hyper_text kv;
        at++;
        if (lm_hyper_next(&at, "", where, name, &kv, e))
            return e->code;
        int i = lm_hyper_find(table, kv.key);
        if (i < 0)
            return lm_hyper_fail(table, where, name, "", kv.key, e);
        if (lm_hyper_set(&table[i], where, name, kv.value, &out->key[i], e))
            return e->code;
    }
    return LM_OK;
}
