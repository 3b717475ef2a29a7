/* SPDX-License-Identifier: Apache-2.0 */
/* From the text of a tokenizer.json to a tokenizer, every part checked.
 *
 * "truncation" and "padding" shape batches of a training framework; they are ignored. */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "text/tokenizer_impl.h"
#include "text/tokenizer_lists.h"

enum { MAX_IDS = 1 << 27 };

/* The highest id of the vocabulary, checked against its size: small gaps are allowed, large ones
 * are refused. */
static lm_code find_highest(const lm_lists *l, const json_t *added, size_t *n_ids,
                            const char *where, lm_err *e)
{
    size_t limit = 2 * (l->n_tokens + json_array_size(added)) + 65536, i;
    const json_t *v;

    *n_ids = 1;
    if (limit > MAX_IDS)
        limit = MAX_IDS;
    for (i = 0; i < l->n_tokens; i++) {
        const lm_list_token *t = &l->tokens[i];
        if (t->id < 0 || (uint64_t)t->id >= limit)
            return lm_fail(e, LM_EFORMAT, where, NULL,
                           "the id of token \"%.*s\" is not a number from 0 to %zu",
                           (int)(t->len < 80 ? t->len : 80), l->text.data + t->off, limit - 1);
        if ((size_t)t->id >= *n_ids)
            *n_ids = (size_t)t->id + 1;
    }
    json_array_foreach(added, i, v)
    {
        const json_t *id = json_object_get(v, "id");
        if (!json_is_integer(id) || json_integer_value(id) < 0 ||
            (size_t)json_integer_value(id) >= limit)
            return lm_fail(e, LM_EFORMAT, where, NULL,
                           "the id of added token %zu is not a number from 0 to %zu", i, limit - 1);
        if ((size_t)json_integer_value(id) >= *n_ids)
            *n_ids = (size_t)json_integer_value(id) + 1;
    }
    return LM_OK;
}

static lm_code load_added_token(lm_tokenizer *t, const json_t *j, lm_added_token *a,
                                const char *where, lm_err *e)
{
    const json_t *content = json_object_get(j, "content");
    uint32_t id = (uint32_t)json_integer_value(json_object_get(j, "id")), in_vocab;
    lm_code rc;

    if (!json_is_string(content))
        return lm_fail(e, LM_EFORMAT, where, NULL, "\"content\" of added token %u is missing", id);
    rc = lm_alloc_n(&a->text, json_string_length(content) + 1, 1, "added tokens", e);
    if (rc)
        return rc;
    a->len = json_string_length(content);
    memcpy(a->text, json_string_value(content), a->len);
    a->id = id;
    rc = lm_json_bool_or(j, "special", false, &a->special, where, e);
    if (!rc)
        rc = lm_json_bool_or(j, "single_word", false, &a->single_word, where, e);
    if (!rc)
        rc = lm_json_bool_or(j, "lstrip", false, &a->lstrip, where, e);
    if (!rc)
        rc = lm_json_bool_or(j, "rstrip", false, &a->rstrip, where, e);
    if (!rc)
        rc = lm_json_bool_or(j, "normalized", !a->special, &a->normalized, where, e);
    if (rc)
        return rc;
    in_vocab = lm_bpe_find(&t->bpe, a->text, a->len);
    if (in_vocab != LM_BPE_NONE && in_vocab != id)
        return lm_fail(e, LM_EFORMAT, where, NULL,
                       "added token \"%.80s\" has id %u, the vocabulary gives it %u", a->text, id,
                       in_vocab);
    if (t->added_of[id] != LM_BPE_NONE ||
        (in_vocab == LM_BPE_NONE && t->bpe.tokens[id].off != LM_BPE_NONE))
        return lm_fail(e, LM_EFORMAT, where, NULL,
                       "id %u of added token \"%.80s\" belongs to another token", id, a->text);
    return LM_OK;
}

/* Tokens of the second group are searched in their normalised form. */
static lm_code normalize_added(lm_tokenizer *t, lm_added_token *a, lm_regex_match *m, lm_err *e)
{
    lm_buf x = { 0 }, y = { 0 };
    const char *p;
    lm_code rc = lm_normal_run(t->normal, m, a->text, a->len, &x, &y, &p, &a->pattern_len, e);

    if (!rc)
        rc = lm_alloc_n(&a->pattern, a->pattern_len + 1, 1, "added tokens", e);
    if (!rc && a->pattern_len)
        memcpy(a->pattern, p, a->pattern_len);
    lm_buf_fini(&x);
    lm_buf_fini(&y);
    return rc;
}

static lm_code load_added(lm_tokenizer *t, const json_t *list, const char *where, lm_err *e)
{
    size_t i, n = json_array_size(list);
    const json_t *j;
    lm_regex_match *m = NULL;
    lm_code rc = lm_alloc_n(&t->added.v, n, sizeof *t->added.v, "added tokens", e);

    if (!rc)
        rc = lm_alloc_n(&t->added_of, (size_t)t->vocab_size, sizeof(uint32_t), "added tokens", e);
    if (!rc && t->normal)
        rc = lm_regex_match_new(&m, e);
    if (!rc)
        memset(t->added_of, 0xFF, (size_t)t->vocab_size * sizeof(uint32_t));
    json_array_foreach(list, i, j)
    {
        if (rc)
            break;
        lm_added_token *a = &t->added.v[t->added.n++];
        rc = load_added_token(t, j, a, where, e);
        if (!rc)
            t->added_of[a->id] = (uint32_t)i;
        if (!rc && t->normal && a->normalized)
            rc = normalize_added(t, a, m, e);
    }
    lm_regex_match_free(m);
    return rc ? rc : lm_added_index(&t->added, e);
}

/* The id of a special token: as the configuration names it, otherwise the first well-known name in
 * the vocabulary. */
static int64_t find_special(const lm_tokenizer *t, const json_t *config, const char *key,
                            const char *const *names)
{
    const json_t *c = json_object_get(config, key);
    const char *s = json_string_value(json_is_object(c) ? json_object_get(c, "content") : c);
    int64_t id = s ? lm_tokenizer_id(t, s, strlen(s)) : -1;

    /* The name must be a token of its own: added, or at least in the vocabulary. */
    for (int i = 0; id < 0 && names[i]; i++)
        id = lm_tokenizer_id(t, names[i], strlen(names[i]));
    return id;
}

static void find_specials(lm_tokenizer *t, const json_t *config)
{
    static const char *const bos[] = {
        "<s>", "<|begin_of_text|>", "<|startoftext|>", "<bos>", "[CLS]", NULL
    };
    static const char *const eos[] = { "<|endoftext|>", "</s>",       "<|end_of_text|>", "<eos>",
                                       "<|im_end|>",    "<|return|>", "[SEP]",           NULL };
    static const char *const pad[] = { "<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>",
                                       NULL };
    static const char *const unk[] = { "<unk>", "[UNK]", NULL };
    static const char *const mask[] = { "[MASK]", "<mask>", NULL };

    t->bos = find_special(t, config, "bos_token", bos);
    t->eos = find_special(t, config, "eos_token", eos);
    t->mask = find_special(t, config, "mask_token", mask);
    t->pad = find_special(t, config, "pad_token", pad);
    t->unk = find_special(t, config, "unk_token", unk);
}

/* `cut`: the lists are already in *l, and empty in the tree. */
static lm_code build(lm_tokenizer *t, const json_t *j, const json_t *config, lm_lists *l, bool cut,
                     const char *where, lm_err *e)
{
    static const char *const known[] = {
        "version",       "truncation",     "padding", "added_tokens", "normalizer",
        "pre_tokenizer", "post_processor", "decoder", "model",        NULL
    };
    const json_t *model = json_object_get(j, "model"), *vocab = json_object_get(model, "vocab");
    const json_t *merges = json_object_get(model, "merges");
    const json_t *added = json_object_get(j, "added_tokens");
    size_t n_ids = 0;
    lm_subword_kind kind = LM_SUBWORD_NONE;
    lm_code rc = lm_word_model_check(model, cut, &kind, where, e);

    if (!rc)
        rc = lm_tokenizer_check_keys(j, known, where, e);
    if (!rc && added && !json_is_null(added) && !json_is_array(added))
        rc = lm_fail(e, LM_EFORMAT, where, NULL, "\"added_tokens\" must be a list");
    if (!rc && !cut)
        rc = lm_lists_from_tree(l, vocab, merges, where, e);
    if (!rc)
        rc = find_highest(l, added, &n_ids, where, e);
    t->vocab_size = (int64_t)n_ids;
    if (!rc)
        rc = lm_word_model_load(t, kind, model, l, where, e);
    if (!rc)
        rc = lm_normal_new(json_object_get(j, "normalizer"), where, &t->normal, e);
    if (!rc)
        rc = lm_pretok_new(json_object_get(j, "pre_tokenizer"), where, &t->pretok, e);
    if (!rc)
        rc = load_added(t, added, where, e);
    if (!rc)
        rc = lm_post_parse(t, json_object_get(j, "post_processor"), where, e);
    if (!rc)
        rc = lm_decoder_new(json_object_get(j, "decoder"), where, &t->decoder, e);
    if (rc)
        return rc;
    if (t->bpe.byte_level)
        t->plain_bytes = lm_pretok_leave_bytes(t->pretok);
    t->scan = lm_pretok_scanner(t->pretok);
    find_specials(t, config);
    return LM_OK;
}

lm_code lm_tokenizer_from_json(const char *json, size_t len, const char *config, size_t config_len,
                               const char *where, lm_tokenizer **out, lm_err *e)
{
    json_t *j = NULL, *c = NULL;
    char beside[320];
    lm_lists lists = { .n_tokens = 0 };
    lm_buf rest = { 0 };
    bool cut = false;
    lm_code rc = lm_alloc_n(out, 1, sizeof **out, "the tokenizer", e);

    if (!rc)
        rc = lm_lists_cut(&lists, json, len, &rest, &cut, e);
    if (!rc)
        rc = lm_json_parse(cut ? rest.data : json, cut ? rest.len : len, where, &j, e);
    lm_tokenizer_config_where(where, beside, sizeof beside);
    if (!rc && config)
        rc = lm_json_parse(config, config_len, beside, &c, e);
    if (!rc && !json_is_object(j))
        rc = lm_fail(e, LM_EFORMAT, where, NULL, "a tokenizer must be an object");
    if (!rc)
        rc = build(*out, j, c, &lists, cut, where, e);
    if (!rc)
        rc = lm_buf_add(&(*out)->json, json, len, e);
    if (!rc && config)
        rc = lm_buf_add(&(*out)->config, config, config_len, e);
    json_decref(j);
    json_decref(c);
    lm_lists_fini(&lists);
    lm_buf_fini(&rest);
    if (rc) {
        lm_tokenizer_free(*out);
        *out = NULL;
    }
    return rc;
}

void lm_tokenizer_free(lm_tokenizer *t)
{
    if (!t)
        return;
    lm_bpe_fini(&t->bpe);
    lm_subword_fini(&t->subword);
    lm_normal_free(t->normal);
    lm_pretok_free(t->pretok);
    lm_added_fini(&t->added);
    lm_decoder_free(t->decoder);
    lm_free(t->added_of);
    lm_free(t->unk_name);
    lm_buf_fini(&t->json);
    lm_buf_fini(&t->config);
    lm_free(t);
}
