/* SPDX-License-Identifier: Apache-2.0 */
/* convert_tokbin.c -- llama2.c's tokenizer.bin.
 *
 * tokenizer.py of karpathy/llama2.c: u32 bytes of the longest token; then for each token f32 score,
 * i32 length, bytes.  The number of tokens is that of the model; U+2581 is written as a space; <s>
 * and </s>, tokens 1 and 2, are enclosed in line feeds.  The content is that of GGUF's "llama", and
 * is converted to a tokenizer.json in the same way. */
#include <inttypes.h>
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "convert/convert_impl.h"
#include "convert/gguf_meta.h"
#include "text/scored.h"

#define UNDERSCORE "\xe2\x96\x81" /* U+2581 */

typedef struct {
    lm_buf texts; /* texts of all tokens, one after the other */
    lm_gguf_text *text;
    int32_t *type;
    float *score;
    size_t n;
} tokens;

static lm_code take_text(tokens *t, size_t i, const char *s, size_t len, lm_err *e)
{
    size_t from = t->texts.len;
    lm_code rc = LM_OK;

    if ((i == 1 || i == 2) && len > 2 && s[0] == '\n' && s[len - 1] == '\n') {
        s++;
        len -= 2;
    }
    for (size_t k = 0; !rc && k < len; k++)
        rc = s[k] == ' ' ? lm_buf_add(&t->texts, UNDERSCORE, 3, e)
                         : lm_buf_add(&t->texts, s + k, 1, e);
    t->text[i].len = t->texts.len - from;
    t->type[i] = i == 0                                            ? LM_SCORED_UNKNOWN
                 : i <= 2                                          ? LM_SCORED_CONTROL
                 : len == 6 && !memcmp(s, "<0x", 3) && s[5] == '>' ? LM_SCORED_BYTE
                                                                   : LM_SCORED_NORMAL;
    return rc;
}

static lm_code take_tokens(tokens *t, const lm_buf *file, const char *path, lm_err *e)
{
    size_t at = 4;
    lm_code rc = LM_OK;

    for (size_t i = 0; !rc && i < t->n; i++) {
        size_t left = file->len > at ? file->len - at : 0;
        uint32_t len = 0;
        if (left >= 8) {
            memcpy(&t->score[i], file->data + at, 4);
            memcpy(&len, file->data + at + 4, 4);
        }
        if (left < 8 || len > left - 8)
            return lm_fail(e, LM_EFORMAT, path, NULL,
                           "it ends at byte %zu, within token %zu of the %zu that the model has",
                           file->len, i, t->n);
        rc = take_text(t, i, file->data + at + 8, len, e);
        at += 8 + (size_t)len;
    }
    if (!rc && at != file->len)
        rc = lm_fail(e, LM_EFORMAT, path, NULL, "it has more tokens than the model's %zu", t->n);
    for (size_t i = 0, from = 0; !rc && i < t->n; from += t->text[i++].len)
        t->text[i].text = t->texts.data + from;
    return rc;
}

/* Write it as the metadata of a GGUF file, which are then read. */
static lm_code as_gguf(lm_import *m, const tokens *t, const char *path, lm_err *e)
{
    lm_gguf_plan *p = NULL;
    lm_gguf *g = NULL;
    lm_buf header = { 0 }, json = { 0 }, config = { 0 };
    bool found;
    lm_code rc = lm_gguf_plan_new(&p, e);

    if (!rc) {
        lm_gguf_put_str(p, "tokenizer.ggml.model", "llama", 5);
        lm_gguf_put_strs(p, "tokenizer.ggml.tokens", t->text, t->n);
        lm_gguf_put_f32s(p, "tokenizer.ggml.scores", t->score, t->n);
        lm_gguf_put_i32s(p, "tokenizer.ggml.token_type", t->type, t->n);
        rc = lm_gguf_plan_header(p, &header, e);
    }
    if (!rc)
        rc = lm_gguf_parse(header.data, header.len, path, &g, e);
    if (!rc)
        rc = lm_gguf_get_vocab(g, &m->config, &json, &config, &found, e);
    if (!rc)
        rc = lm_import_put(m, "tokenizer.json", &json, e);
    if (!rc)
        rc = lm_import_put(m, "tokenizer_config.json", &config, e);
    lm_gguf_close(g);
    lm_gguf_plan_free(p);
    lm_buf_fini(&header);
    lm_buf_fini(&json);
    lm_buf_fini(&config);
    return rc;
}

lm_code lm_import_tokenizer_bin(lm_import *m, const char *path, lm_err *e)
{
    tokens t = { .n = (size_t)m->config.vocab };
    lm_buf file = { 0 };
    lm_code rc = lm_file_read(path, LM_SIDE_MAX, &file, e);

    if (!rc && t.n > file.len / 8)
        rc = lm_fail(e, LM_EFORMAT, path, NULL, "its %zu bytes do not hold the model's %zu token%s",
                     file.len, t.n, lm_plural(t.n));
    if (!rc)
        rc = lm_alloc_n(&t.text, t.n, sizeof *t.text, "tokens", e);
    if (!rc)
        rc = lm_alloc_n(&t.type, t.n, sizeof *t.type, "tokens", e);
    if (!rc)
        rc = lm_alloc_n(&t.score, t.n, sizeof *t.score, "tokens", e);
    if (!rc)
        rc = take_tokens(&t, &file, path, e);
    if (!rc)
        rc = as_gguf(m, &t, path, e);
    lm_buf_fini(&file);
    lm_buf_fini(&t.texts);
    lm_free(t.text);
    lm_free(t.type);
    lm_free(t.score);
    return rc;
}
