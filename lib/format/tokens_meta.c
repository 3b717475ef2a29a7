/* SPDX-License-Identifier: Apache-2.0 */
/* tokens_meta.c -- see tokens_meta.h. */
#include "format/tokens_meta.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/file.h"

enum { MAX_FILE = 64 << 20 };

static bool is_ours(const json_t *j, const char *name)
{
    return json_is_object(j) && json_is_string(json_object_get(j, "format")) &&
           json_is_integer(json_object_get(j, "vocab_size")) &&
           json_is_object(json_object_get(j, name));
}

static lm_code read_tokenizer(const json_t *j, const char *where, lm_tokens_tokenizer *out,
                              lm_err *e)
{
    const json_t *t = json_object_get(j, "tokenizer");
    const char *hex = NULL;
    char *end = NULL;
    if (!t || json_is_null(t))
        return LM_OK;
    if (lm_json_i64(t, "ids", 1, INT32_MAX, &out->ids, where, e) ||
        lm_json_str_or(t, "xxh3", NULL, &hex, where, e))
        return e->code;
    out->digest = hex ? strtoull(hex, &end, 16) : 0;
    if (!hex || strlen(hex) != 16 || *end)
        return lm_fail(e, LM_EFORMAT, where, "shard the text again",
                       "tokenizer: xxh3 is not 16 hexadecimal digits");
    return LM_OK;
}

static lm_code read_ours(const json_t *j, const char *name, const char *where, lm_tokens_meta *m,
                         lm_err *e)
{
    const char *format = NULL;
    if (lm_json_str_or(j, "format", NULL, &format, where, e))
        return e->code;
    m->kind = lm_tokens_kind_find(format);
    if (m->kind == LM_TOKENS_AUTO)
        return lm_fail(e, LM_EFORMAT, where, "shard the text again",
                       "format '%.40s' is not one of megatron, llmc and nanogpt", format);
    m->there = true;
    if (lm_json_i64(j, "vocab_size", 1, INT64_MAX, &m->vocab, where, e) ||
        lm_json_i64_or(j, "eos_token_id", -1, 0, UINT32_MAX, &m->eos, where, e) ||
        lm_json_i64(json_object_get(j, name), "tokens", 0, INT64_MAX, &m->tokens, where, e))
        return e->code;
    return read_tokenizer(j, where, &m->tokenizer, e);
}

lm_code lm_tokens_meta_read(const char *base, lm_tokens_meta *out, lm_err *e)
{
    const char *name = lm_path_base(base);
    lm_buf path = { 0 };
    json_t *j = NULL;
    *out = (lm_tokens_meta){ .eos = -1 };
    if (strcmp(name, "train") != 0 && strcmp(name, "val") != 0)
        return LM_OK;
    lm_code rc = lm_buf_addf(&path, e, "%.*smeta.json", (int)(name - base), base);
    if (!rc && lm_path_exists(path.data)) {
        rc = lm_json_load(path.data, MAX_FILE, &j, e);
        if (!rc && is_ours(j, name))
            rc = read_ours(j, name, path.data, out, e);
        json_decref(j);
    }
    lm_buf_fini(&path);
    return rc;
}

void lm_tokens_meta_write_tokenizer(lm_jw *w, const lm_tokens_tokenizer *t)
{
    char hex[17];
    if (!t->ids) {
        lm_jw_str(w, "tokenizer", NULL);
        return;
    }
    snprintf(hex, sizeof hex, "%016" PRIx64, t->digest);
    lm_jw_obj(w, "tokenizer");
    lm_jw_int(w, "ids", t->ids);
    lm_jw_str(w, "xxh3", hex);
    lm_jw_close_obj(w);
}
