/* SPDX-License-Identifier: Apache-2.0 */
/* A tokenizer's other files.  GPT-2's pair, vocab.json and merges.txt, rewritten as one
 * tokenizer.json: byte-level, GPT-2's pattern, <|endoftext|> as a special token when the vocabulary
 * has it. */
#include <stdio.h>
#include <string.h>

#include "base/file.h"
#include "base/text.h"
#include "text/added_list.h"
#include "text/pretok_scan.h"
#include "text/tokenizer_impl.h"

enum { MAX_FILE = 256 << 20, MOST_IDS = 1 << 27 };

/* "merges": one "left right" a line; a first line "#version ..." and empty lines are passed over.
 */
static lm_code write_merges(lm_jw *w, const char *path, const lm_buf *text, lm_err *e)
{
    const char *p = text->data, *end = p + text->len, *stop, *space;
    size_t line = 1;

    lm_jw_arr(w, "merges");
    for (; p < end; p = stop + 1, line++) {
        stop = memchr(p, '\n', (size_t)(end - p));
        if (!stop)
            stop = end;
        size_t len = (size_t)(stop - p);
        if (len && p[len - 1] == '\r')
            len--;
        if (!len || (len >= 8 && !memcmp(p, "#version", 8)))
            continue;
        space = memchr(p, ' ', len);
        if (!space || memchr(space + 1, ' ', len - (size_t)(space + 1 - p)))
            return lm_fail(e, LM_EFORMAT, path, NULL, "line %zu is not two tokens and a space",
                           line);
        lm_jw_arr(w, NULL);
        lm_jw_strn(w, NULL, p, (size_t)(space - p));
        lm_jw_strn(w, NULL, space + 1, len - (size_t)(space + 1 - p));
        lm_jw_close_arr(w);
    }
    lm_jw_close_arr(w);
    return LM_OK;
}

static void write_byte_level(lm_jw *w, const char *key, bool use_regex)
{
    lm_jw_obj(w, key);
    lm_jw_str(w, "type", "ByteLevel");
    lm_jw_bool(w, "add_prefix_space", false);
    lm_jw_bool(w, "trim_offsets", true);
    lm_jw_bool(w, "use_regex", use_regex);
    lm_jw_close_obj(w);
}

/* "normalizer" and "pre_tokenizer": Qwen2 has the same pair of files but cuts other words. */
static void write_words(lm_jw *w, const json_t *config)
{
    const char *class = json_string_value(json_object_get(config, "tokenizer_class"));

    if (!class || strncmp(class, "Qwen2Tokenizer", 14) != 0) {
        lm_jw_str(w, "normalizer", NULL);
        write_byte_level(w, "pre_tokenizer", true);
        return;
    }
    lm_jw_obj(w, "normalizer");
    lm_jw_str(w, "type", "NFC");
    lm_jw_close_obj(w);
    lm_jw_obj(w, "pre_tokenizer");
    lm_jw_str(w, "type", "Sequence");
    lm_jw_arr(w, "pretokenizers");
    lm_jw_obj(w, NULL);
    lm_jw_str(w, "type", "Split");
    lm_jw_obj(w, "pattern");
    lm_jw_str(w, "Regex", lm_scan_pattern(LM_SCAN_QWEN));
    lm_jw_close_obj(w);
    lm_jw_str(w, "behavior", "Isolated");
    lm_jw_bool(w, "invert", false);
    lm_jw_close_obj(w);
    write_byte_level(w, NULL, false);
    lm_jw_close_arr(w);
    lm_jw_close_obj(w);
}

/* The id that a vocabulary's text gives to <|endoftext|>, -1 if none; a text search is enough for
 * GPT-2's file. */
static int64_t find_end_of_text(const lm_buf *vocab)
{
    static const char key[] = "\"<|endoftext|>\"";
    const char *p = memmem(vocab->data, vocab->len, key, sizeof key - 1);
    int64_t id = 0;

    if (!p)
        return -1;
    p += sizeof key - 1;
    p += strspn(p, " \t\r\n");
    if (*p++ != ':')
        return -1;
    p += strspn(p, " \t\r\n");
    if (*p < '0' || *p > '9')
        return -1;
    while (*p >= '0' && *p <= '9' && id < INT32_MAX)
        id = id * 10 + (*p++ - '0');
    return id;
}

static void write_added(lm_jw *w, int64_t id, const json_t *more)
{
    lm_jw_arr(w, "added_tokens");
    if (id >= 0) {
        lm_jw_obj(w, NULL);
        lm_jw_int(w, "id", id);
        lm_jw_str(w, "content", "<|endoftext|>");
        lm_jw_bool(w, "single_word", false);
        lm_jw_bool(w, "lstrip", false);
        lm_jw_bool(w, "rstrip", false);
        lm_jw_bool(w, "normalized", false);
        lm_jw_bool(w, "special", true);
        lm_jw_close_obj(w);
    }
    lm_added_list_write(w, more, 0, id);
    lm_jw_close_arr(w);
}

/* Everything except the vocabulary's text, which comes last and is copied unchanged: the parser of
 * the whole text checks it. */
static lm_code write_rest(const lm_buf *vocab, const char *merges_path, const lm_buf *merges,
                          const json_t *config, lm_buf *json, lm_err *e)
{
    lm_jw w;
    lm_code end, rc;

    lm_jw_begin(&w, json, 0, e);
    lm_jw_obj(&w, NULL);
    lm_jw_str(&w, "version", "1.0");
    lm_jw_str(&w, "truncation", NULL);
    lm_jw_str(&w, "padding", NULL);
    write_added(&w, find_end_of_text(vocab), json_object_get(config, "added_tokens_decoder"));
    write_words(&w, config);
    write_byte_level(&w, "post_processor", true);
    write_byte_level(&w, "decoder", true);
    lm_jw_obj(&w, "model");
    lm_jw_str(&w, "type", "BPE");
    rc = write_merges(&w, merges_path, merges, e);
    lm_jw_close_obj(&w);
    lm_jw_close_obj(&w);
    end = lm_jw_end(&w);
    return rc ? rc : end;
}

/* The configuration, its list of added tokens checked. */
static lm_code read_config(const lm_buf *config, const char *merges_path, json_t **tree, lm_err *e)
{
    char beside[320];
    lm_code rc = LM_OK;

    lm_tokenizer_config_where(merges_path, beside, sizeof beside);
    if (config->len)
        rc = lm_json_parse(config->data, config->len, beside, tree, e);
    return rc ? rc
              : lm_added_list_check(json_object_get(*tree, "added_tokens_decoder"), MOST_IDS,
                                    beside, e);
}

lm_code lm_tokenizer_join(const lm_buf *vocab, const char *merges_path, const lm_buf *merges,
                          const lm_buf *config, lm_buf *json, lm_err *e)
{
    size_t valid = lm_utf8_valid(merges->data, merges->len);
    json_t *tree = NULL;
    lm_code rc = read_config(config, merges_path, &tree, e);

    if (!rc && valid != merges->len)
        rc = lm_fail(e, LM_EFORMAT, merges_path, NULL, "invalid UTF-8 at byte %zu", valid);
    if (!rc)
        rc = write_rest(vocab, merges_path, merges, tree, json, e);
    json_decref(tree);
    if (!rc) {
        while (json->len && json->data[json->len - 1] != '}') /* a newline, if any */
            json->len--;
        json->len -= 2; /* the closing braces of model and of the whole */
        rc = lm_buf_addf(json, e, ",\"vocab\":");
    }
    if (!rc)
        rc = lm_buf_add(json, vocab->data, vocab->len, e);
    return rc ? rc : lm_buf_add(json, "}}", 2, e);
}

lm_code lm_tokenizer_join_files(const char *vocab_path, const char *merges_path,
                                const lm_buf *config, lm_buf *json, lm_err *e)
{
    lm_buf vocab = { 0 }, merges = { 0 };
    lm_code rc = lm_file_read(vocab_path, MAX_FILE, &vocab, e);

    if (!rc)
        rc = lm_file_read(merges_path, MAX_FILE, &merges, e);
    if (!rc)
        rc = lm_tokenizer_join(&vocab, merges_path, &merges, config, json, e);
    lm_buf_fini(&vocab);
    lm_buf_fini(&merges);
    return rc;
}

void lm_tokenizer_config_where(const char *where, char *out, size_t size)
{
    size_t n = strlen(where);

    while (n && where[n - 1] != '/' && where[n - 1] != ' ')
        n--;
    snprintf(out, size, "%.*stokenizer_config.json", (int)(n < size ? n : 0), where);
}
