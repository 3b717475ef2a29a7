/* GPT-2's pair of files, vocab.json and merges.txt, rewritten as one tokenizer.json: byte-level,
 * GPT-2's pattern, <|endoftext|> as a special token when the vocabulary has it. */
#include <string.h>

#include "base/file.h"
#include "base/text.h"
#include "text/tokenizer_impl.h"

enum { MAX_FILE = 256 << 20 };

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

static void write_byte_level(lm_jw *w, const char *key)
{
    lm_jw_obj(w, key);
    lm_jw_str(w, "type", "ByteLevel");
    lm_jw_bool(w, "add_prefix_space", false);
    lm_jw_bool(w, "trim_offsets", true);
    lm_jw_bool(w, "use_regex", true);
    lm_jw_close_obj(w);
}

static void write_added(lm_jw *w, const json_t *vocab)
{
    static const char eot[] = "<|endoftext|>";
    const json_t *id = json_object_get(vocab, eot);

    lm_jw_arr(w, "added_tokens");
    if (json_is_integer(id)) {
        lm_jw_obj(w, NULL);
        lm_jw_int(w, "id", json_integer_value(id));
        lm_jw_str(w, "content", eot);
        lm_jw_bool(w, "single_word", false);
        lm_jw_bool(w, "lstrip", false);
        lm_jw_bool(w, "rstrip", false);
        lm_jw_bool(w, "normalized", false);
        lm_jw_bool(w, "special", true);
        lm_jw_close_obj(w);
    }
    lm_jw_close_arr(w);
}

lm_code lm_tokenizer_join_files(const char *vocab_path, const char *merges_path, lm_buf *json,
                                lm_err *e)
{
    json_t *vocab = NULL;
    lm_buf merges = { 0 };
    lm_jw w;
    lm_code end, rc = lm_json_load(vocab_path, MAX_FILE, &vocab, e);

    if (!rc && !json_is_object(vocab))
        rc = lm_fail(e, LM_EFORMAT, vocab_path, NULL, "a vocabulary must be an object");
    if (!rc)
        rc = lm_file_read(merges_path, MAX_FILE, &merges, e);
    if (!rc && lm_utf8_valid(merges.data, merges.len) != merges.len)
        rc = lm_fail(e, LM_EFORMAT, merges_path, NULL, "invalid UTF-8 at byte %zu",
                     lm_utf8_valid(merges.data, merges.len));
    if (!rc) {
        lm_jw_begin(&w, json, 0, e);
        lm_jw_obj(&w, NULL);
        lm_jw_str(&w, "version", "1.0");
        lm_jw_str(&w, "truncation", NULL);
        lm_jw_str(&w, "padding", NULL);
        write_added(&w, vocab);
        lm_jw_str(&w, "normalizer", NULL);
        write_byte_level(&w, "pre_tokenizer");
        write_byte_level(&w, "post_processor");
        write_byte_level(&w, "decoder");
        lm_jw_obj(&w, "model");
        lm_jw_str(&w, "type", "BPE");
        lm_jw_json(&w, "vocab", vocab);
        rc = write_merges(&w, merges_path, &merges, e);
        lm_jw_close_obj(&w);
        lm_jw_close_obj(&w);
        end = lm_jw_end(&w);
        rc = rc ? rc : end;
    }
    lm_buf_fini(&merges);
    json_decref(vocab);
    return rc;
}
