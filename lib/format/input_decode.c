/* SPDX-License-Identifier: Apache-2.0 */
/* input_decode.c -- a raw document to text: UTF-8, then JSON.  Part of input.h; any thread. */
#include <stdio.h>
#include <string.h>

#include "base/text.h"
#include "format/input.h"
#include "format/jsonl.h"

/* Length of the maximal subpart of an ill-formed sequence at s: the bytes that one U+FFFD replaces
 * (Unicode 15, section 3.9, "U+FFFD substitution of maximal subparts"). */
static size_t bad_length(const unsigned char *s, size_t n)
{
    unsigned lo = 0x80, hi = 0xBF;
    size_t need;
    if (s[0] >= 0xC2 && s[0] <= 0xDF)
        need = 1;
    else if (s[0] >= 0xE0 && s[0] <= 0xEF)
        need = 2;
    else if (s[0] >= 0xF0 && s[0] <= 0xF4)
        need = 3;
    else
        return 1;
    lo = s[0] == 0xE0 ? 0xA0 : s[0] == 0xF0 ? 0x90 : lo;
    hi = s[0] == 0xED ? 0x9F : s[0] == 0xF4 ? 0x8F : hi;
    size_t k = 1;
    while (k <= need && k < n && s[k] >= lo && s[k] <= hi) {
        lo = 0x80;
        hi = 0xBF;
        k++;
    }
    return k;
}

/* Rewrite doc->raw with U+FFFD in place of invalid UTF-8. */
static lm_code replace_bad(lm_doc *doc, size_t good, lm_err *e)
{
    const char *s = doc->raw.data;
    size_t n = doc->raw.len, at = 0;
    doc->own.len = 0;
    while (at < n) {
        lm_code rc = lm_buf_add(&doc->own, s + at, good, e);
        at += good;
        if (rc)
            return rc;
        if (at < n) {
            at += bad_length((const unsigned char *)s + at, n - at);
            doc->bad++;
            rc = lm_buf_add(&doc->own, "\xEF\xBF\xBD", 3, e);
            if (rc)
                return rc;
        }
        good = lm_utf8_valid(s + at, n - at);
    }
    lm_buf t = doc->raw;
    doc->raw = doc->own;
    doc->own = t;
    return LM_OK;
}

static lm_code fail_utf8(const lm_doc *doc, size_t at, lm_err *e)
{
    const unsigned char *s = (const unsigned char *)doc->raw.data;
    size_t n = doc->raw.len;
    if (doc->offset == 0 && n >= 2 &&
        ((s[0] == 0xFF && s[1] == 0xFE) || (s[0] == 0xFE && s[1] == 0xFF)))
        return lm_fail(e, LM_EFORMAT, doc->source, "convert it with iconv -t UTF-8",
                       "it is UTF-16, not UTF-8");
    return lm_fail(
        e, LM_EFORMAT, doc->source, "convert it to UTF-8, or have such text skipped or replaced",
        "invalid UTF-8 at byte %lld (0x%02x)", (long long)doc->offset + (long long)at, s[at]);
}

static lm_code check_utf8(const lm_input_opts *o, lm_doc *doc, lm_err *e)
{
    size_t good = lm_utf8_valid(doc->raw.data, doc->raw.len);
    if (good == doc->raw.len)
        return LM_OK;
    if (o->utf8 == LM_UTF8_REPLACE)
        return replace_bad(doc, good, e);
    if (o->utf8 == LM_UTF8_FAIL)
        return fail_utf8(doc, good, e);
    doc->bad = 1;
    doc->skip = true;
    return LM_OK;
}

/* Skip a document that is not a record, and keep the error of the first. */
static void note_bad(lm_input_bad *b, lm_doc *doc, const lm_err *why)
{
    doc->skip = doc->broken = true;
    while (__atomic_exchange_n(&b->taken, true, __ATOMIC_SEQ_CST))
        ;
    if (!b->record.code || doc->index < b->index) {
        b->index = doc->index;
        b->record = *why;
    }
    __atomic_store_n(&b->taken, false, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(&b->records, 1, __ATOMIC_SEQ_CST);
}

static const char *type_of(char first)
{
    return first == '['          ? "an array"
           : first == 'n'        ? "null"
           : strchr("tf", first) ? "a truth value"
                                 : "a number";
}

static lm_code fail_record(const lm_doc *doc, const char *field, lm_jsonl_fault f, lm_err *e)
{
    static const char name_it[] = "name the text field";
    char where[256], first = f.at < doc->raw.len ? doc->raw.data[f.at] : 0;
    lm_buf names = { 0 };
    snprintf(where, sizeof where, "%s:%lld", doc->source, (long long)doc->line);
    if (f.kind == LM_JSONL_MALFORMED)
        return lm_fail(e, LM_EFORMAT, where, "give one JSON object a line, as jq -c does",
                       "column %zu: %s (field '%s')", f.at + 1, f.what, field);
    if (f.kind == LM_JSONL_NO_STRING && first != '{')
        return lm_fail(e, LM_EFORMAT, where, "correct the record, or have such records skipped",
                       "column %zu: field '%s' is %s, not a string", f.at + 1, field,
                       type_of(first));
    lm_jsonl_names(doc->raw.data, doc->raw.len, &names, NULL);
    lm_code rc = f.kind == LM_JSONL_ABSENT
                     ? lm_fail(e, LM_EFORMAT, where, name_it, "no field '%s'; it has %s", field,
                               names.data ? names.data : "none")
                     : lm_fail(e, LM_EFORMAT, where, name_it,
                               "column %zu: field '%s' is an object, not a string; it has %s",
                               f.at + 1, field, names.data ? names.data : "none");
    lm_buf_fini(&names);
    return rc;
}

/* Find one field; *s is its string token. */
static lm_code find_field(lm_doc *doc, const char *field, char **s, size_t *len, lm_err *e)
{
    size_t at = 0, end = 0;
    lm_jsonl_fault f = lm_jsonl_find_path(doc->raw.data, doc->raw.len, field, &at, &end);
    if (f.what)
        return fail_record(doc, field, f, e);
    *s = doc->raw.data + at;
    *len = end - at;
    return LM_OK;
}

/* Escapes of lone surrogates are treated as invalid UTF-8. */
static lm_code judge_lone(const lm_input_opts *o, lm_doc *doc, int64_t lone, lm_err *e)
{
    if (!lone)
        return LM_OK;
    if (o->utf8 == LM_UTF8_FAIL)
        return lm_fail(e, LM_EFORMAT, doc->source,
                       "correct the text, or have such text skipped or replaced",
                       "line %lld: %lld escapes of lone surrogates (\\ud800 to \\udfff)",
                       (long long)doc->line, (long long)lone);
    doc->bad += lone;
    if (o->utf8 == LM_UTF8_SKIP) {
        doc->skip = true;
        doc->bad = 1;
    }
    return LM_OK;
}

static lm_code decode_one(const lm_input_opts *o, lm_doc *doc, const char *field, lm_err *e)
{
    char *tok = NULL;
    size_t len = 0;
    int64_t lone = 0;
    lm_code rc = find_field(doc, field, &tok, &len, e);
    if (rc)
        return rc;
    doc->val_at = (size_t)(tok - doc->raw.data);
    doc->val_end = doc->val_at + len;
    if (!memchr(tok, '\\', len)) {
        doc->text = tok + 1;
        doc->len = len - 2;
        return LM_OK;
    }
    doc->own.len = 0;
    rc = lm_jsonl_unescape(tok, len, &doc->own, &lone, e);
    if (rc)
        return rc;
    doc->text = doc->own.data;
    doc->len = doc->own.len;
    if (lone && o->utf8 == LM_UTF8_REPLACE)
        lm_jsonl_mend(tok, len);
    return judge_lone(o, doc, lone, e);
}

static lm_code decode_several(const lm_input_opts *o, lm_doc *doc, lm_err *e)
{
    int64_t lone = 0;
    lm_code rc = LM_OK;
    doc->own.len = 0;
    for (int i = 0; i < o->fields && !rc; i++) {
        char *tok = NULL;
        size_t len = 0;
        rc = find_field(doc, o->field[i], &tok, &len, e);
        if (!rc && i)
            rc = lm_buf_add(&doc->own, "\n", 1, e);
        if (!rc)
            rc = lm_jsonl_unescape(tok, len, &doc->own, &lone, e);
    }
    if (rc)
        return rc;
    doc->text = doc->own.data;
    doc->len = doc->own.len;
    return judge_lone(o, doc, lone, e);
}

static lm_code decode_json(const lm_input_opts *o, lm_doc *doc, lm_err *e)
{
    if (o->fields > 1)
        return decode_several(o, doc, e);
    return decode_one(o, doc, o->fields ? o->field[0] : "text", e);
}

lm_code lm_doc_decode(const lm_input_opts *o, lm_doc *doc, lm_err *e)
{
    lm_code rc = check_utf8(o, doc, e);
    if (!rc && !doc->skip) {
        doc->text = doc->raw.data;
        doc->len = doc->raw.len;
        lm_err why = { 0 };
        if (doc->jsonl)
            rc = decode_json(o, doc, &why);
        if (rc == LM_EFORMAT && o->bad) {
            note_bad(o->bad, doc, &why);
            rc = LM_OK;
        } else if (rc && !e->code) {
            *e = why;
        }
    }
    if (doc->skip || rc) {
        doc->text = NULL;
        doc->len = 0;
    }
    return rc;
}

lm_code lm_doc_write(const lm_input_opts *o, const lm_doc *doc, const char *text, size_t len,
                     lm_buf *out, lm_err *e)
{
    const char *raw = doc->raw.data;
    size_t n = doc->raw.len;
    lm_code rc;
    if (!doc->jsonl || o->fields > 1) {
        rc = lm_buf_add(out, "{", 1, e);
        const char *field = o->fields == 1 ? o->field[0] : "text";
        rc = rc ? rc : lm_jsonl_escape(field, strlen(field), out, e);
        rc = rc ? rc : lm_buf_add(out, ": ", 2, e);
        rc = rc ? rc : lm_jsonl_escape(text, len, out, e);
        return rc ? rc : lm_buf_add(out, "}\n", 2, e);
    }
    if (text == doc->text && len == doc->len) {
        rc = lm_buf_add(out, raw, n, e);
        return rc ? rc : lm_buf_add(out, "\n", 1, e);
    }
    rc = lm_buf_add(out, raw, doc->val_at, e);
    rc = rc ? rc : lm_jsonl_escape(text, len, out, e);
    rc = rc ? rc : lm_buf_add(out, raw + doc->val_end, n - doc->val_end, e);
    return rc ? rc : lm_buf_add(out, "\n", 1, e);
}
