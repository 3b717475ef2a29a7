/* SPDX-License-Identifier: Apache-2.0 */
/* plan_words.c -- checks of tokenizers that are not merged: unreadable ones, and those of
 * adapters. */
#include <stdio.h>
#include <string.h>

#include "merge/plan_impl.h"
#include "text/tokenizer_source.h"

enum { MAX_FILE = 256 << 20 };

/* Vocabularies of tokenizers that have no tokenizer.json beside them. */
static const char *const vocabularies[] = { "tokenizer.model", "spiece.model",
                                            "sentencepiece.bpe.model", "vocab.txt", NULL };

static lm_code differ(const lm_merge_plan *p, const char *name, int a, int b, bool b_is_read,
                      lm_err *e)
{
    return lm_fail(e, LM_EUSAGE, p->model[b].name,
                   "save both with a tokenizer.json, then choose a tokenizer policy",
                   "its %s is not that of %.100s, and that of %.100s cannot be read", name,
                   p->model[a].name, b_is_read ? p->model[a].name : p->model[b].name);
}

/* Compare one file of all models: where a tokenizer was not read, its bytes must be those of the
 * first model with that file. */
static lm_code compare_file(const lm_merge_plan *p, const char *name, const bool *is_read,
                            lm_err *e)
{
    lm_buf first = { 0 };
    int a = -1;
    lm_code rc = LM_OK;

    for (int i = 0; !rc && i < p->recipe->n_inputs; i++) {
        lm_buf text = { 0 };
        bool found = false;

        rc = lm_model_source_file_now(p->model[i].source, name, MAX_FILE, &text, &found, e);
        if (!rc && found && a >= 0 && (!is_read[a] || !is_read[i]) &&
            (text.len != first.len || (text.len && memcmp(text.data, first.data, text.len))))
            rc = differ(p, name, a, i, is_read[i], e);
        if (!rc && found && a < 0) {
            a = i;
            first = text;
        } else {
            lm_buf_fini(&text);
        }
    }
    lm_buf_fini(&first);
    return rc;
}

lm_code lm_plan_unread_tokenizers(const lm_merge_plan *p, const bool *is_read, lm_err *e)
{
    bool all = true;
    lm_code rc = LM_OK;

    for (int i = 0; i < p->recipe->n_inputs; i++)
        all = all && is_read[i];
    for (int i = 0; !all && !rc && vocabularies[i]; i++)
        rc = compare_file(p, vocabularies[i], is_read, e);
    return rc;
}

/* ---- Adapters ---- */

static bool same_tokens(const lm_tokenizer *a, const lm_tokenizer *b)
{
    bool same = lm_tokenizer_vocab_size(a) == lm_tokenizer_vocab_size(b);

    for (int64_t id = 0; same && id < lm_tokenizer_vocab_size(a); id++) {
        size_t n = 0, k = 0;
        const char *x = lm_tokenizer_token(a, (uint32_t)id, &n);
        const char *y = lm_tokenizer_token(b, (uint32_t)id, &k);

        same = !x == !y && (!x || (n == k && !memcmp(x, y, n)));
    }
    return same;
}

lm_code lm_plan_adapter_tokens(const lm_merge_model *m, lm_sink *sink, lm_err *e)
{
    static const char name[] = "tokenizer.json";
    lm_buf mine = { 0 }, config = { 0 };
    lm_tokenizer *a = NULL, *b = NULL;
    bool found = false;
    char where[300];
    lm_code rc = lm_lora_file(m->lora, name, MAX_FILE, &mine, &found, e);

    snprintf(where, sizeof where, "%.200s: the adapter's %s", m->name, name);
    if (!rc && found && lm_model_source_random(m->source))
        rc = lm_tokenizer_of(m->source, &b, e);
    if (!rc && b)
        rc = lm_tokenizer_from_text(mine.data, mine.len, &config, where, &a, e);
    if (!rc && a && !same_tokens(a, b))
        lm_log(
            sink, LM_LOG_WARN,
            "%s: the adapter's tokenizer has other tokens than its base, whose tokenizer is used",
            m->name);
    lm_tokenizer_free(a);
    lm_tokenizer_free(b);
    lm_buf_fini(&mine);
    lm_buf_fini(&config);
    return rc;
}
