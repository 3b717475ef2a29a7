/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_jsonl.c -- a line of JSONL: a full parser must accept what the scanner accepts, with the
 * same text. */
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "base/text.h"
#include "format/input.h"
#include "format/jsonl.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* True if the line contains an escape of a surrogate (\ud800 to \udfff). */
static bool has_surrogate(const char *p, size_t len)
{
    for (size_t i = 0; i + 5 < len; i++)
        if (p[i] == '\\' && p[i + 1] == 'u' && (p[i + 2] == 'd' || p[i + 2] == 'D') &&
            strchr("89abcdefABCDEF", p[i + 3]))
            return true;
    return false;
}

/* Compare with jansson's text of a valid line.  jansson refuses some lines that RFC 8259 allows:
 * numbers out of range, zeros in keys, and lone surrogates, which the scanner refuses in the text
 * only. */
static void compare(const lm_doc *doc)
{
    json_error_t why;
    json_t *tree = json_loadb(doc->raw.data, doc->raw.len, JSON_ALLOW_NUL, &why);
    if (!tree) {
        enum json_error_code code = json_error_code(&why);
        if (code != json_error_numeric_overflow && code != json_error_null_byte_in_key &&
            !has_surrogate(doc->raw.data, doc->raw.len))
            abort();
        return;
    }
    const json_t *text = json_object_get(tree, "text");
    if (!json_is_string(text) || json_string_length(text) != doc->len ||
        memcmp(json_string_value(text), doc->text, doc->len) != 0)
        abort();
    json_decref(tree);
}

/* Nested fields, and several fields: the text must be UTF-8, or the error LM_EFORMAT. */
static void read_fields(const uint8_t *data, size_t size)
{
    static const char *const field[] = { "a.b", "text", "a" };
    for (int n = 1; n <= 3; n += 2) {
        const lm_input_opts o = { .field = field, .fields = n, .utf8 = LM_UTF8_REPLACE };
        lm_doc doc = { .jsonl = true, .source = "fuzz", .line = 1 };
        lm_err e = { 0 };
        if (lm_buf_add(&doc.raw, data, size, &e))
            abort();
        lm_code rc = lm_doc_decode(&o, &doc, &e);
        if (rc ? rc != LM_EFORMAT : lm_utf8_valid(doc.text, doc.len) != doc.len)
            abort();
        lm_doc_fini(&doc);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    read_fields(data, size);
    static const lm_utf8_policy policies[] = { LM_UTF8_FAIL, LM_UTF8_REPLACE, LM_UTF8_SKIP };
    for (int i = 0; i < 3; i++) {
        const lm_input_opts o = { .utf8 = policies[i] };
        lm_doc doc = { .jsonl = true, .source = "fuzz", .line = 1 }, again = doc;
        lm_buf out = { 0 };
        lm_err e = { 0 };
        if (lm_buf_add(&doc.raw, data, size, &e))
            abort();
        if (!lm_doc_decode(&o, &doc, &e) && !doc.skip) {
            if (lm_utf8_valid(doc.text, doc.len) != doc.len)
                abort();
            if (i == 0)
                compare(&doc);
            /* written with another text and read again */
            if (lm_doc_write(&o, &doc, "\"\\\n\x01", 4, &out, &e) ||
                lm_buf_add(&again.raw, out.data, out.len, &e) || lm_doc_decode(&o, &again, &e) ||
                again.len != 4 || memcmp(again.text, "\"\\\n\x01", 4) != 0)
                abort();
        }
        lm_doc_fini(&doc);
        lm_doc_fini(&again);
        lm_buf_fini(&out);
    }
    return 0;
}
