/* SPDX-License-Identifier: Apache-2.0 */
/* The tokenizer.json of a trained vocabulary, and its tokenizer_config.json. */
#include "base/json.h"
#include "base/mem.h"
#include "text/bpe_learn.h"
#include "text/bpe_train.h"

#include <string.h>

static void write_byte_level(lm_jw *w, const char *key, bool regex)
{
    lm_jw_obj(w, key);
    lm_jw_str(w, "type", "ByteLevel");
    lm_jw_bool(w, "add_prefix_space", false);
    lm_jw_bool(w, "trim_offsets", true);
    lm_jw_bool(w, "use_regex", regex);
    lm_jw_close_obj(w);
}

static void write_pretok(lm_scan_kind scan, const char *pattern, lm_jw *w)
{
    if (scan == LM_SCAN_GPT2) {
        write_byte_level(w, "pre_tokenizer", true);
        return;
    }
    lm_jw_obj(w, "pre_tokenizer");
    lm_jw_str(w, "type", "Sequence");
    lm_jw_arr(w, "pretokenizers");
    lm_jw_obj(w, NULL);
    lm_jw_str(w, "type", "Split");
    lm_jw_obj(w, "pattern");
    lm_jw_str(w, "Regex", pattern);
    lm_jw_close_obj(w);
    lm_jw_str(w, "behavior", "Isolated");
    lm_jw_bool(w, "invert", false);
    lm_jw_close_obj(w);
    write_byte_level(w, NULL, false);
    lm_jw_close_arr(w);
    lm_jw_close_obj(w);
}

static void write_model(const lm_bpe_learned *l, lm_jw *w)
{
    const lm_bpe *v = &l->vocab;
    char *key = NULL;
    lm_code rc = LM_OK;

    lm_jw_obj(w, "model");
    lm_jw_str(w, "type", "BPE");
    lm_jw_str(w, "dropout", NULL);
    lm_jw_str(w, "unk_token", NULL);
    lm_jw_str(w, "continuing_subword_prefix", NULL);
    lm_jw_str(w, "end_of_word_suffix", NULL);
    lm_jw_bool(w, "fuse_unk", false);
    lm_jw_bool(w, "byte_fallback", false);
    lm_jw_bool(w, "ignore_merges", false);
    lm_jw_obj(w, "vocab");
    for (size_t i = 0; i < v->n_tokens && !rc; i++) {
        rc = lm_asprintf(&key, w->err, "%.*s", (int)v->tokens[i].len, v->text + v->tokens[i].off);
        if (!rc)
            lm_jw_int(w, key, (int64_t)i);
        lm_free(key);
        key = NULL;
    }
    lm_jw_close_obj(w);
    lm_jw_arr(w, "merges");
    for (size_t i = 0; i < l->n_merges; i++) {
        const lm_bpe_pair *m = &l->merges[i];
        lm_jw_arr(w, NULL);
        lm_jw_strn(w, NULL, v->text + v->tokens[m->left].off, v->tokens[m->left].len);
        lm_jw_strn(w, NULL, v->text + v->tokens[m->right].off, v->tokens[m->right].len);
        lm_jw_close_arr(w);
    }
    lm_jw_close_arr(w);
    lm_jw_close_obj(w);
    if (rc && !w->rc)
        w->rc = rc;
}

lm_code lm_bpe_learned_write(const lm_bpe_learned *l, const lm_added *special, lm_scan_kind scan,
                             const char *pattern, lm_buf *json, lm_err *e)
{
    lm_jw w;

    lm_jw_begin(&w, json, 2, e);
    lm_jw_obj(&w, NULL);
    lm_jw_str(&w, "version", "1.0");
    lm_jw_str(&w, "truncation", NULL);
    lm_jw_str(&w, "padding", NULL);
    lm_jw_arr(&w, "added_tokens");
    for (size_t i = 0; i < special->n; i++) {
        lm_jw_obj(&w, NULL);
        lm_jw_int(&w, "id", (int64_t)i);
        lm_jw_str(&w, "content", special->v[i].text);
        lm_jw_bool(&w, "single_word", false);
        lm_jw_bool(&w, "lstrip", false);
        lm_jw_bool(&w, "rstrip", false);
        lm_jw_bool(&w, "normalized", false);
        lm_jw_bool(&w, "special", true);
        lm_jw_close_obj(&w);
    }
    lm_jw_close_arr(&w);
    lm_jw_str(&w, "normalizer", NULL);
    write_pretok(scan, pattern, &w);
    write_byte_level(&w, "post_processor", true);
    write_byte_level(&w, "decoder", true);
    write_model(l, &w);
    lm_jw_close_obj(&w);
    return lm_jw_end(&w);
}

lm_code lm_bpe_train_config(const lm_bpe_train_opts *o, lm_buf *json, lm_err *e)
{
    static const char *const named[][2] = {
        { "pad_token", "[PAD]" }, { "unk_token", "[UNK]" },   { "cls_token", "[CLS]" },
        { "sep_token", "[SEP]" }, { "mask_token", "[MASK]" }, { "pad_token", "<pad>" },
        { "unk_token", "<unk>" }, { "eos_token", "</s>" },    { "bos_token", "<s>" },
    };
    const char *eot = o->n_special && o->model == LM_TRAIN_BPE ? o->special[0] : NULL;
    lm_jw w;

    lm_jw_begin(&w, json, 2, e);
    lm_jw_obj(&w, NULL);
    lm_jw_str(&w, "tokenizer_class", "PreTrainedTokenizerFast");
    lm_jw_bool(&w, "clean_up_tokenization_spaces", false);
    if (eot)
        lm_jw_str(&w, "bos_token", eot);
    if (eot)
        lm_jw_str(&w, "eos_token", eot);
    for (int i = 0; i < o->n_special && o->model != LM_TRAIN_BPE; i++)
        for (size_t k = 0; k < sizeof named / sizeof *named; k++)
            if (!strcmp(o->special[i], named[k][1]))
                lm_jw_str(&w, named[k][0], o->special[i]);
    lm_jw_close_obj(&w);
    return lm_jw_end(&w);
}
