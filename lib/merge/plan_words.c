/* SPDX-License-Identifier: Apache-2.0 */
/* plan_words.c -- tokenizers that are not read, compared by their bytes. */
#include <string.h>

#include "merge/plan_impl.h"

enum { MAX_FILE = 256 << 20 };

/* Vocabularies of tokenizers that have no tokenizer.json beside them. */
static const char *const vocabularies[] = { "tokenizer.model", "spiece.model",
                                            "sentencepiece.bpe.model", "vocab.txt", NULL };

static lm_code differ(const lm_merge_plan *p, const char *name, int a, int b, bool b_is_read,
                      lm_err *e)
{
    return lm_fail(e, LM_EUSAGE, p->model[b].name,
                   "save both with a tokenizer.json, then choose one with --tokenizer",
                   "its %s is not that of %.100s, and that of %.100s cannot be read", name,
                   p->model[a].name, b_is_read ? p->model[a].name : p->model[b].name);
}

/* One file of all models: the bytes are those of the first that has it, wherever a tokenizer was not
 * read. */
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
