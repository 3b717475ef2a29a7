/* SPDX-License-Identifier: Apache-2.0 */
/* subword_write.c -- the tokenizer.json of a learned WordPiece or Unigram model. */
#include <string.h>

#include "text/train_impl.h"

const char *lm_subword_normalizer(const lm_bpe_trainer *t)
{
    if (t->model == LM_TRAIN_UNIGRAM)
        return "{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Nmt\"},{\"type\":\"NFKC\"},"
               "{\"type\":\"Replace\",\"pattern\":{\"Regex\":\" {2,}\"},\"content\":\" \"}]}";
    return t->cased ? "{\"type\":\"BertNormalizer\",\"clean_text\":true,"
                      "\"handle_chinese_chars\":true,\"strip_accents\":null,\"lowercase\":false}"
                    : "{\"type\":\"BertNormalizer\",\"clean_text\":true,"
                      "\"handle_chinese_chars\":true,\"strip_accents\":null,\"lowercase\":true}";
}

const char *lm_subword_pretok(const lm_bpe_trainer *t)
{
    return t->model == LM_TRAIN_UNIGRAM ? "{\"type\":\"Metaspace\",\"replacement\":\"" LM_TRAIN_MARK
                                          "\",\"prepend_scheme\":\"always\",\"split\":true}"
                                        : "{\"type\":\"BertPreTokenizer\"}";
}

static const char *decoder_of(const lm_bpe_trainer *t)
{
    return t->model == LM_TRAIN_UNIGRAM ? lm_subword_pretok(t)
                                        : "{\"type\":\"WordPiece\",\"prefix\":\"" LM_TRAIN_PREFIX
                                          "\",\"cleanup\":true}";
}

static void write_item(lm_jw *w, const char *kind, const char *id, int type)
{
    lm_jw_obj(w, NULL);
    lm_jw_obj(w, kind);
    lm_jw_str(w, "id", id);
    lm_jw_int(w, "type_id", type);
    lm_jw_close_obj(w);
    lm_jw_close_obj(w);
}

static void write_special(const lm_bpe_trainer *t, lm_jw *w, int i)
{
    if (i < 0)
        return;
    lm_jw_obj(w, t->special.v[i].text);
    lm_jw_str(w, "id", t->special.v[i].text);
    lm_jw_arr(w, "ids");
    lm_jw_int(w, NULL, i);
    lm_jw_close_arr(w);
    lm_jw_arr(w, "tokens");
    lm_jw_str(w, NULL, t->special.v[i].text);
    lm_jw_close_arr(w);
    lm_jw_close_obj(w);
}

/* BERT's [CLS] A [SEP] B [SEP], or T5's A </s> B </s>, as far as these tokens were given. */
static void write_post(const lm_bpe_trainer *t, lm_jw *w)
{
    bool bert = t->model == LM_TRAIN_WORDPIECE;
    int first = bert ? lm_train_special(t, "[CLS]") : -1;
    int last = lm_train_special(t, bert ? "[SEP]" : "</s>");

    if (last < 0 || (bert && first < 0)) {
        lm_jw_str(w, "post_processor", NULL);
        return;
    }
    lm_jw_obj(w, "post_processor");
    lm_jw_str(w, "type", "TemplateProcessing");
    for (int pair = 0; pair < 2; pair++) {
        lm_jw_arr(w, pair ? "pair" : "single");
        if (first >= 0)
            write_item(w, "SpecialToken", t->special.v[first].text, 0);
        for (int i = 0; i <= pair; i++) {
            write_item(w, "Sequence", i ? "B" : "A", bert ? i : 0);
            write_item(w, "SpecialToken", t->special.v[last].text, bert ? i : 0);
        }
        lm_jw_close_arr(w);
    }
    lm_jw_obj(w, "special_tokens");
    write_special(t, w, first);
    write_special(t, w, last);
    lm_jw_close_obj(w);
    lm_jw_close_obj(w);
}

static void write_raw(lm_jw *w, const char *key, const char *json)
{
    lm_err ignored = { 0 };
    json_t *tree = NULL;

    if (lm_json_parse(json, strlen(json), key, &tree, &ignored))
        tree = NULL;
    lm_jw_json(w, key, tree);
    json_decref(tree);
}

void lm_subword_write(const lm_bpe_trainer *t, lm_jw *w)
{
    lm_jw_obj(w, NULL);
    lm_jw_str(w, "version", "1.0");
    lm_jw_str(w, "truncation", NULL);
    lm_jw_str(w, "padding", NULL);
    lm_jw_arr(w, "added_tokens");
    for (size_t i = 0; i < t->special.n; i++) {
        lm_jw_obj(w, NULL);
        lm_jw_int(w, "id", (int64_t)i);
        lm_jw_str(w, "content", t->special.v[i].text);
        lm_jw_bool(w, "single_word", false);
        lm_jw_bool(w, "lstrip", false);
        lm_jw_bool(w, "rstrip", false);
        lm_jw_bool(w, "normalized", false);
        lm_jw_bool(w, "special", true);
        lm_jw_close_obj(w);
    }
    lm_jw_close_arr(w);
    write_raw(w, "normalizer", lm_subword_normalizer(t));
    write_raw(w, "pre_tokenizer", lm_subword_pretok(t));
    write_post(t, w);
    write_raw(w, "decoder", decoder_of(t));
}
