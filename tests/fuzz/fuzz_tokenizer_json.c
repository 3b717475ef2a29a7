/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_tokenizer_json.c -- a tokenizer.json, or a vocab.txt that begins with '[', and, after a NUL,
 * a text: a tokenizer that loads must encode the text or give a message, decode its own ids to valid UTF-8, and stream the same
 * text. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/text.h"
#include "text/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void use(const lm_tokenizer *t, lm_tok_scratch *s, const char *text, size_t len)
{
    lm_ids ids = { 0 }, types = { 0 };
    lm_buf whole = { 0 }, parts = { 0 };
    lm_tok_stream st = { 0 };
    lm_err e = { 0 };
    int64_t n = lm_tokenizer_vocab_size(t);
    lm_code rc = lm_tokenizer_encode(t, s, text, len, true, &ids, &e);

    if (!rc)
        rc = lm_tokenizer_encode_pair(t, s, text, text && len && (uint8_t)*text < 128 ? 1 : 0, "b",
                                      1, true, &ids, &types, &e);
    for (size_t i = 0; i < ids.n; i++) {
        if (ids.v[i] >= n)
            abort();
        lm_tokenizer_id_bytes(t, ids.v[i]);
    }
    if (!rc)
        rc = lm_tokenizer_decode(t, ids.v, ids.n, true, &whole, &e);
    if (!rc && lm_utf8_valid(whole.data, whole.len) != whole.len)
        abort();
    for (size_t i = 0; i < ids.n && i < 64 && !rc; i++)
        rc = lm_tok_stream_push(&st, t, ids.v[i], false, &parts, &e);
    if (!rc)
        rc = lm_tok_stream_end(&st, t, false, &parts, &e);
    if (!rc && lm_utf8_valid(parts.data, parts.len) != parts.len)
        abort();
    lm_tok_stream_fini(&st);
    lm_ids_fini(&ids);
    lm_ids_fini(&types);
    lm_buf_fini(&whole);
    lm_buf_fini(&parts);
}

/* False if it does not load. */
static bool load(const char *text, size_t len, lm_tokenizer **t)
{
    lm_buf config = { 0 };
    bool list = len && *text == '[';
    lm_err e = { 0 };

    if (list ? lm_tokenizer_from_text(text, len, &config, "fuzz/vocab.txt", t, &e)
             : lm_tokenizer_from_json(text, len, NULL, 0, "fuzz", t, &e)) {
        if (!e.code || !e.what[0])
            abort();
        return false;
    }
    json_t *whole = NULL; /* what was cut out of the text must have been JSON, too */
    if (!list && lm_json_parse(text, len, "fuzz", &whole, &e))
        abort();
    json_decref(whole);
    return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *json = (const char *)data, *nul = memchr(data, 0, size);
    size_t len = nul ? (size_t)(nul - json) : size;
    lm_tokenizer *t;
    lm_tok_scratch *s;
    lm_err e = { 0 };

    if (!load(json, len, &t))
        return 0;
    if (lm_tok_scratch_new(t, &s, &e))
        return 0;
    if (nul)
        use(t, s, nul + 1, size - len - 1);
    lm_tok_scratch_free(s);
    lm_tokenizer_free(t);
    return 0;
}
