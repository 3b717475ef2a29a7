/* SPDX-License-Identifier: Apache-2.0 */
/* tokenizer_bert.c -- BERT's older file, vocab.txt, as a tokenizer.json.
 *
 * One token a line, ids from 0.  tokenizer_config.json decides about lower case, accents and
 * Chinese characters, and names the special tokens; without it everything is as in
 * bert-base-uncased. */
#include <stdio.h>
#include <string.h>

#include "base/text.h"
#include "text/added_list.h"
#include "text/tokenizer_impl.h"

enum { MOST_IDS = 1 << 27, SPECIALS = 5 };

/* The special tokens, in the order of their usual ids. */
enum { PAD, UNK, CLS, SEP, MASK };

typedef struct {
    const char *name[SPECIALS]; /* borrowed */
    int64_t id[SPECIALS];       /* -1: not in the vocabulary */
    bool lower, chinese;
    const json_t *accents, *added; /* of the configuration; NULL: not there */
} settings;

/* Other tokenizers with a file of this name cut words in other ways. */
static lm_code check_class(const json_t *config, const char *where, lm_err *e)
{
    static const char *const known[] = {
        "BertTokenizer",     "DistilBertTokenizer", "ElectraTokenizer",    "MobileBertTokenizer",
        "ConvBertTokenizer", "LayoutLMTokenizer",   "RetriBertTokenizer",  "SqueezeBertTokenizer",
        "LxmertTokenizer",   "FunnelTokenizer",     "PreTrainedTokenizer",
    };
    const char *class = json_string_value(json_object_get(config, "tokenizer_class"));
    bool basic = true;
    lm_code rc =
        config ? lm_json_bool_or(config, "do_basic_tokenize", true, &basic, where, e) : LM_OK;

    if (!rc && !basic)
        rc = lm_fail(e, LM_EFORMAT, where, "give the model's tokenizer.json",
                     "\"do_basic_tokenize\" false is not supported");
    if (rc || !class)
        return rc;
    size_t len = strlen(class);
    len -= lm_text_ends(class, "Fast") ? 4 : 0;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strlen(known[i]) == len && !memcmp(known[i], class, len))
            return LM_OK;
    return lm_fail(e, LM_EFORMAT, where, "give the model's tokenizer.json",
                   "tokenizer_class \"%.60s\" is not one whose vocab.txt is read", class);
}

static lm_code read_settings(const json_t *config, settings *s, const char *where, lm_err *e)
{
    static const char *const keys[] = { "pad_token", "unk_token", "cls_token", "sep_token",
                                        "mask_token" };
    static const char *const usual[] = { "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]" };
    lm_code rc = check_class(config, where, e);

    *s = (settings){ .lower = true, .chinese = true };
    for (int i = 0; i < SPECIALS; i++) {
        const json_t *c = json_object_get(config, keys[i]);
        const char *name = json_string_value(json_is_object(c) ? json_object_get(c, "content") : c);
        s->name[i] = name ? name : usual[i];
        s->id[i] = -1;
    }
    if (!rc && config)
        rc = lm_json_bool_or(config, "do_lower_case", true, &s->lower, where, e);
    if (!rc && config)
        rc = lm_json_bool_or(config, "tokenize_chinese_chars", true, &s->chinese, where, e);
    s->accents = json_object_get(config, "strip_accents");
    s->added = json_object_get(config, "added_tokens_decoder");
    return rc ? rc : lm_added_list_check(s->added, MOST_IDS, where, e);
}

/* The next line of *p..end, without its end. */
static size_t take_line(const char **p, const char *end, const char **line)
{
    const char *stop = memchr(*p, '\n', (size_t)(end - *p));
    size_t len;

    *line = *p;
    len = (size_t)((stop ? stop : end) - *p);
    *p = stop ? stop + 1 : end;
    return len && (*line)[len - 1] == '\r' ? len - 1 : len;
}

static lm_code write_vocab(lm_jw *w, const lm_buf *vocab, const char *path, settings *s, lm_err *e)
{
    const char *p = vocab->data, *end = p + vocab->len, *line;
    lm_buf name = { 0 };
    int64_t id = 0;
    lm_code rc = LM_OK;

    lm_jw_obj(w, "vocab");
    for (; p < end && !rc; id++) {
        size_t len = take_line(&p, end, &line);
        name.len = 0;
        rc = lm_buf_add(&name, line, len, e);
        if (!rc && (lm_utf8_valid(line, len) != len || memchr(line, 0, len)))
            rc = lm_fail(e, LM_EFORMAT, path, NULL, "line %lld is not UTF-8, or has a NUL in it",
                         (long long)id + 1);
        if (!rc && id == MOST_IDS)
            rc = lm_fail(e, LM_EFORMAT, path, NULL, "more than %d lines", MOST_IDS);
        for (int i = 0; i < SPECIALS && !rc; i++)
            if (!strcmp(name.data, s->name[i]))
                s->id[i] = id;
        if (!rc)
            lm_jw_int(w, name.data, id);
    }
    lm_jw_close_obj(w);
    for (int i = UNK; i <= SEP && !rc; i++)
        if (s->id[i] < 0)
            rc = lm_fail(e, LM_EFORMAT, path, NULL, "it has no line \"%.60s\"", s->name[i]);
    lm_buf_fini(&name);
    return rc;
}

static void write_added(lm_jw *w, const settings *s)
{
    char key[24];

    lm_jw_arr(w, "added_tokens");
    for (int i = 0; i < SPECIALS; i++) {
        snprintf(key, sizeof key, "%lld", (long long)s->id[i]);
        if (s->id[i] < 0 || json_object_get(s->added, key))
            continue;
        lm_jw_obj(w, NULL);
        lm_jw_int(w, "id", s->id[i]);
        lm_jw_str(w, "content", s->name[i]);
        lm_jw_bool(w, "single_word", false);
        lm_jw_bool(w, "lstrip", false);
        lm_jw_bool(w, "rstrip", false);
        lm_jw_bool(w, "normalized", false);
        lm_jw_bool(w, "special", true);
        lm_jw_close_obj(w);
    }
    lm_added_list_write(w, s->added, 0, -1);
    lm_jw_close_arr(w);
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

/* [CLS] A [SEP], and for pairs B [SEP] with type 1. */
static void write_post(lm_jw *w, const settings *s)
{
    lm_jw_obj(w, "post_processor");
    lm_jw_str(w, "type", "TemplateProcessing");
    for (int pair = 0; pair < 2; pair++) {
        lm_jw_arr(w, pair ? "pair" : "single");
        write_item(w, "SpecialToken", s->name[CLS], 0);
        write_item(w, "Sequence", "A", 0);
        write_item(w, "SpecialToken", s->name[SEP], 0);
        if (pair) {
            write_item(w, "Sequence", "B", 1);
            write_item(w, "SpecialToken", s->name[SEP], 1);
        }
        lm_jw_close_arr(w);
    }
    lm_jw_obj(w, "special_tokens");
    for (int i = CLS; i <= SEP; i++) {
        if (i == SEP && !strcmp(s->name[SEP], s->name[CLS]))
            continue;
        lm_jw_obj(w, s->name[i]);
        lm_jw_str(w, "id", s->name[i]);
        lm_jw_arr(w, "ids");
        lm_jw_int(w, NULL, s->id[i]);
        lm_jw_close_arr(w);
        lm_jw_arr(w, "tokens");
        lm_jw_str(w, NULL, s->name[i]);
        lm_jw_close_arr(w);
        lm_jw_close_obj(w);
    }
    lm_jw_close_obj(w);
    lm_jw_close_obj(w);
}

static void write_steps(lm_jw *w, const settings *s)
{
    lm_jw_obj(w, "normalizer");
    lm_jw_str(w, "type", "BertNormalizer");
    lm_jw_bool(w, "clean_text", true);
    lm_jw_bool(w, "handle_chinese_chars", s->chinese);
    if (json_is_boolean(s->accents))
        lm_jw_bool(w, "strip_accents", json_is_true(s->accents));
    else
        lm_jw_str(w, "strip_accents", NULL);
    lm_jw_bool(w, "lowercase", s->lower);
    lm_jw_close_obj(w);
    lm_jw_obj(w, "pre_tokenizer");
    lm_jw_str(w, "type", "BertPreTokenizer");
    lm_jw_close_obj(w);
    lm_jw_obj(w, "decoder");
    lm_jw_str(w, "type", "WordPiece");
    lm_jw_str(w, "prefix", "##");
    lm_jw_bool(w, "cleanup", true);
    lm_jw_close_obj(w);
}

static lm_code write_json(const lm_buf *vocab, const char *path, settings *s, lm_buf *json,
                          lm_err *e)
{
    lm_jw w;
    lm_code rc, end;

    lm_jw_begin(&w, json, 0, e);
    lm_jw_obj(&w, NULL);
    lm_jw_str(&w, "version", "1.0");
    lm_jw_str(&w, "truncation", NULL);
    lm_jw_str(&w, "padding", NULL);
    write_steps(&w, s);
    lm_jw_obj(&w, "model");
    lm_jw_str(&w, "type", "WordPiece");
    lm_jw_str(&w, "unk_token", s->name[UNK]);
    lm_jw_str(&w, "continuing_subword_prefix", "##");
    lm_jw_int(&w, "max_input_chars_per_word", 100);
    rc = write_vocab(&w, vocab, path, s, e);
    lm_jw_close_obj(&w);
    write_added(&w, s); /* ids are known by now */
    write_post(&w, s);
    lm_jw_close_obj(&w);
    end = lm_jw_end(&w);
    return rc ? rc : end;
}

lm_code lm_tokenizer_bert(const lm_buf *vocab, const char *path, const lm_buf *config, lm_buf *json,
                          lm_err *e)
{
    char beside[320];
    json_t *tree = NULL;
    settings s;
    lm_code rc = LM_OK;

    lm_tokenizer_config_where(path, beside, sizeof beside);
    if (config->len)
        rc = lm_json_parse(config->data, config->len, beside, &tree, e);
    if (!rc)
        rc = read_settings(tree, &s, beside, e);
    if (!rc)
        rc = write_json(vocab, path, &s, json, e);
    json_decref(tree);
    return rc;
}
