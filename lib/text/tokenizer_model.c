/* SPDX-License-Identifier: Apache-2.0 */
/* tokenizer_model.c -- the value of "model" in a tokenizer.json, checked and loaded. */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "text/tokenizer_impl.h"
#include "text/tokenizer_lists.h"

lm_code lm_tokenizer_check_keys(const json_t *obj, const char *const *known, const char *where,
                                lm_err *e)
{
    const char *key;
    json_t *value;

    json_object_foreach((json_t *)obj, key, value)
    {
        int k = 0;
        while (known[k] && strcmp(key, known[k]))
            k++;
        if (!known[k])
            return lm_fail(e, LM_EFORMAT, where, NULL, "unknown key \"%s\"", key);
    }
    return LM_OK;
}

/* BPE options that would change the result in a way that is not implemented. */
static lm_code check_bpe(const json_t *m, const char *where, lm_err *e)
{
    static const char *const affixes[] = { "continuing_subword_prefix", "end_of_word_suffix" };
    const char *affix;
    double dropout;
    lm_code rc = lm_json_f64_or(m, "dropout", 0, &dropout, where, e);

    if (!rc && dropout != 0)
        rc = lm_fail(e, LM_EFORMAT, where, "set it to null",
                     "dropout %g would make encoding random", dropout);
    for (int i = 0; i < 2 && !rc; i++) {
        rc = lm_json_str_or(m, affixes[i], "", &affix, where, e);
        if (!rc && *affix)
            rc = lm_fail(e, LM_EFORMAT, where, NULL, "%s \"%s\" is not supported", affixes[i],
                         affix);
    }
    if (!rc && !json_is_array(json_object_get(m, "merges")))
        rc = lm_fail(e, LM_EFORMAT, where, NULL, "\"merges\" must be a list");
    return rc;
}

static const struct {
    const char *name;
    const char *keys[12];
} kinds[] = {
    [LM_SUBWORD_NONE] = { "BPE",
                          { "type", "dropout", "unk_token", "continuing_subword_prefix",
                            "end_of_word_suffix", "fuse_unk", "byte_fallback", "ignore_merges",
                            "vocab", "merges", NULL } },
    [LM_SUBWORD_WORDPIECE] = { "WordPiece",
                               { "type", "unk_token", "continuing_subword_prefix",
                                 "max_input_chars_per_word", "vocab", NULL } },
    [LM_SUBWORD_UNIGRAM] = { "Unigram", { "type", "unk_id", "vocab", "byte_fallback", NULL } },
};

const char *lm_tokenizer_model(const lm_tokenizer *t)
{
    return kinds[t->subword.kind].name;
}

lm_code lm_tokenizer_need_bpe(const lm_tokenizer *t, const char *where, const char *what, lm_err *e)
{
    if (t->subword.kind == LM_SUBWORD_NONE)
        return LM_OK;
    return lm_fail(e, LM_EUSAGE, where, "use a model with a BPE tokenizer",
                   "its tokenizer has a %s model, and %s BPE alone", lm_tokenizer_model(t), what);
}

lm_code lm_word_model_check(const json_t *m, bool cut, lm_subword_kind *kind, const char *where,
                            lm_err *e)
{
    const json_t *vocab = json_object_get(m, "vocab");
    const char *type;
    size_t k = 0;
    lm_code rc;

    if (!json_is_object(m))
        return lm_fail(e, LM_EFORMAT, where, NULL, "\"model\" is missing or not an object");
    /* files of old versions do not name the type */
    rc = lm_json_str_or(m, "type",
                        json_object_get(m, "max_input_chars_per_word") ? "WordPiece" : "BPE", &type,
                        where, e);
    while (!rc && k < 3 && strcmp(type, kinds[k].name))
        k++;
    if (!rc && k == 3)
        rc = lm_fail(e, LM_EFORMAT, where, "use a model with a BPE, WordPiece or Unigram tokenizer",
                     "model type \"%s\" is not supported", type);
    if (rc)
        return rc;
    *kind = (lm_subword_kind)k;
    rc = lm_tokenizer_check_keys(m, kinds[k].keys, where, e);
    if (!rc && *kind == LM_SUBWORD_NONE)
        rc = check_bpe(m, where, e);
    if (!rc && *kind == LM_SUBWORD_UNIGRAM && (!json_is_array(vocab) || !json_array_size(vocab)))
        rc = lm_fail(e, LM_EFORMAT, where, NULL, "\"vocab\" must be a list with tokens");
    if (!rc && *kind != LM_SUBWORD_UNIGRAM &&
        (!json_is_object(vocab) || (!cut && !json_object_size(vocab))))
        rc = lm_fail(e, LM_EFORMAT, where, NULL, "\"vocab\" must be an object with tokens");
    return rc;
}

static lm_code load_vocab(lm_tokenizer *t, const lm_lists *l, const char *where, lm_err *e)
{
    lm_code rc = lm_bpe_begin_vocab(&t->bpe, l->n_tokens, (size_t)t->vocab_size, e);

    for (size_t i = 0; i < l->n_tokens && !rc; i++)
        rc = lm_bpe_add_token(&t->bpe, l->text.data + l->tokens[i].off, l->tokens[i].len,
                              (uint32_t)l->tokens[i].id, where, e);
    if (!rc)
        lm_bpe_end_vocab(&t->bpe);
    return rc;
}

static lm_code load_unk_name(lm_tokenizer *t, const json_t *m, const char *where, lm_err *e)
{
    const char *unk;
    lm_code rc = lm_json_str_or(m, "unk_token", NULL, &unk, where, e);

    if (rc || !unk)
        return rc;
    rc = lm_strdup(&t->unk_name, unk, e);
    t->bpe.unk_name = t->unk_name;
    t->bpe.unk_id = lm_bpe_find(&t->bpe, unk, strlen(unk));
    return rc;
}

static lm_code load_bpe(lm_tokenizer *t, const json_t *m, const lm_lists *l, const char *where,
                        lm_err *e)
{
    lm_code rc = lm_bpe_begin_merges(&t->bpe, l->n_merges, e);

    if (!rc)
        rc = lm_json_bool_or(m, "fuse_unk", false, &t->bpe.fuse_unk, where, e);
    if (!rc)
        rc = lm_json_bool_or(m, "byte_fallback", false, &t->bpe.byte_fallback, where, e);
    if (!rc)
        rc = lm_json_bool_or(m, "ignore_merges", false, &t->bpe.ignore_merges, where, e);
    if (!rc)
        rc = load_unk_name(t, m, where, e);
    for (size_t i = 0; i < l->n_merges && !rc; i++) {
        const lm_list_merge *x = &l->merges[i];
        const char *left = l->text.data + x->off;
        rc = lm_bpe_add_merge(&t->bpe, left, x->left, left + x->left, x->right, (uint32_t)i, where,
                              e);
        if (rc == LM_EFORMAT && e)
            snprintf(e->where, sizeof e->where, "%s: merge %zu", where, i);
    }
    return rc;
}

static lm_code load_wordpiece(lm_tokenizer *t, const json_t *m, const char *where, lm_err *e)
{
    const char *prefix;
    int64_t most;
    lm_code rc = lm_json_str_or(m, "continuing_subword_prefix", "##", &prefix, where, e);

    if (!rc)
        rc = lm_json_i64_or(m, "max_input_chars_per_word", 100, 0, INT64_MAX, &most, where, e);
    if (!rc && !json_is_string(json_object_get(m, "unk_token")))
        rc = lm_fail(e, LM_EFORMAT, where, NULL, "WordPiece needs an \"unk_token\"");
    if (!rc)
        rc = load_unk_name(t, m, where, e);
    if (rc)
        return rc;
    t->subword.most_chars = (size_t)most;
    return lm_subword_index(&t->subword, &t->bpe, prefix, where, e);
}

static lm_code load_unigram(lm_tokenizer *t, const json_t *m, const lm_lists *l, const char *where,
                            lm_err *e)
{
    int64_t unk;
    lm_code rc = lm_json_i64_or(m, "unk_id", -1, 0, (int64_t)l->n_tokens - 1, &unk, where, e);

    if (!rc)
        rc = lm_json_bool_or(m, "byte_fallback", false, &t->bpe.byte_fallback, where, e);
    if (!rc)
        rc = lm_alloc_n(&t->subword.score, t->bpe.n_ids, sizeof(double), "the vocabulary", e);
    if (rc)
        return rc;
    for (size_t i = 0; i < l->n_tokens; i++)
        t->subword.score[l->tokens[i].id] = l->tokens[i].score;
    if (unk >= 0)
        t->bpe.unk_id = (uint32_t)unk;
    lm_subword_set_unknown(&t->subword, &t->bpe);
    return lm_subword_index(&t->subword, &t->bpe, NULL, where, e);
}

lm_code lm_word_model_load(lm_tokenizer *t, lm_subword_kind kind, const json_t *m,
                           const lm_lists *l, const char *where, lm_err *e)
{
    lm_code rc = load_vocab(t, l, where, e);

    if (rc)
        return rc;
    if (kind == LM_SUBWORD_NONE)
        return load_bpe(t, m, l, where, e);
    t->subword.kind = kind;
    t->bpe.subword = &t->subword;
    t->bpe.byte_level = false; /* words are cut as text */
    return kind == LM_SUBWORD_WORDPIECE ? load_wordpiece(t, m, where, e)
                                        : load_unigram(t, m, l, where, e);
}
