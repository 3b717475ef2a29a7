/* SPDX-License-Identifier: Apache-2.0 */
/* input.c -- see input.h.  Splits the bytes of source.h into raw documents. */
#include "format/input.h"

#include <stdatomic.h>
#include <string.h>

#include "base/mem.h"
#include "format/input_kind.h"
#include "format/source.h"

#define MAX_DOC_DEFAULT ((size_t)4 << 30)

struct lm_input {
    lm_input_opts o;
    char *separator;
    size_t max_doc, separator_len;
    lm_source *src;
    bool in_member, jsonl;
    bool ended;     /* the member has no more bytes */
    int known_file; /* the file for which jsonl was detected, -1: none */
    bool behind;    /* after damage: the first piece of text is the rest of a document */
    const char *p;  /* the current block: p[at..n) is still to be split */
    size_t n, at;
    int64_t line, offset; /* of p[at] in the member; line from 1 */
    _Atomic int64_t docs; /* read by lm_input_stat from other threads */
    int64_t skipped, bad;
};

static bool blank(const char *s, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (s[i] != ' ' && s[i] != '\t' && s[i] != '\r' && s[i] != '\n' && s[i] != '\f' &&
            s[i] != '\v')
            return false;
    return true;
}

static int64_t count_lines(const char *s, size_t n)
{
    int64_t k = 0;
    const char *end = s + n;
    while (s < end && (s = memchr(s, '\n', (size_t)(end - s)))) {
        k++;
        s++;
    }
    return k;
}

/* Read more bytes to in->p; in->n == in->at afterwards means the end of the member. */
static lm_code refill(lm_input *in, lm_err *e)
{
    if (in->at < in->n)
        return LM_OK;
    in->at = in->n = 0;
    lm_code rc = lm_source_block(in->src, &in->p, &in->n, e);
    in->ended = !rc && in->n == 0;
    return rc;
}

/* Move k bytes of the block to the document. */
static lm_code take_bytes(lm_input *in, lm_doc *doc, size_t k, lm_err *e)
{
    if (doc->raw.len + k > in->max_doc)
        return lm_fail(e, LM_ELIMIT, lm_source_name(in->src),
                       "split the text, or allow larger documents",
                       "the document at line %lld exceeds the limit of %zu bytes",
                       (long long)doc->line, in->max_doc);
    lm_code rc = lm_buf_add(&doc->raw, in->p + in->at, k, e);
    in->offset += (int64_t)k;
    in->at += k;
    return rc;
}

/* Read the first bytes of a member and detect its kind.  Behind damage the kind is unchanged. */
static lm_code look_at_member(lm_input *in, lm_err *e)
{
    int file = lm_source_file(in->src);
    lm_code rc = refill(in, e);
    in->behind = lm_source_resumed(in->src);
    if (rc || (in->behind && in->known_file == file))
        return rc;
    if (in->n >= 3 && memcmp(in->p, "\xEF\xBB\xBF", 3) == 0) {
        in->at += 3; /* a byte order mark is not text */
        in->offset = 3;
    }
    in->known_file = file;
    return lm_input_recognise(in->o.kind, lm_source_name(in->src), in->p + in->at, in->n - in->at,
                              &in->jsonl, e);
}

static lm_code begin_member(lm_input *in, lm_err *e)
{
    lm_code rc;
    do {
        rc = lm_source_next(in->src, &in->in_member, e);
        in->at = in->n = 0;
        in->line = 1;
        in->offset = 0;
        in->ended = false;
        if (!rc && in->in_member)
            rc = look_at_member(in, e);
    } while (rc == LM_EFORMAT && in->in_member && lm_source_pass(in->src, e));
    if (in->o.bad)
        in->o.bad->parts = lm_source_bad(in->src, &in->o.bad->part);
    return rc;
}

static void begin_doc(lm_input *in, lm_doc *doc)
{
    doc->raw.len = 0;
    doc->line = in->line;
    doc->offset = in->offset;
}

/* Read one line into doc->raw, with its newline if it has one. */
static lm_code take_line(lm_input *in, lm_doc *doc, lm_err *e)
{
    for (;;) {
        lm_code rc = refill(in, e);
        if (rc || in->at == in->n)
            return rc;
        const char *nl = memchr(in->p + in->at, '\n', in->n - in->at);
        rc = take_bytes(in, doc, nl ? (size_t)(nl - in->p) - in->at + 1 : in->n - in->at, e);
        if (rc)
            return rc;
        if (nl) {
            in->line++;
            return LM_OK;
        }
    }
}

/* `bytes` without text were skipped.  They count towards the limit of the next document, so that an
 * endless stream of them ends too. */
static lm_code pass_over(const lm_input *in, size_t bytes, size_t *passed, lm_err *e)
{
    *passed += bytes;
    if (*passed <= in->max_doc)
        return LM_OK;
    return lm_fail(e, LM_ELIMIT, lm_source_name(in->src), "check its content",
                   "more than %zu bytes of blank lines before line %lld", in->max_doc,
                   (long long)in->line);
}

static lm_code cut_jsonl(lm_input *in, lm_doc *doc, lm_err *e)
{
    size_t passed = 0;
    do {
        begin_doc(in, doc);
        lm_code rc = take_line(in, doc, e);
        if (rc || !doc->raw.len)
            return rc;
        if (blank(doc->raw.data, doc->raw.len) && pass_over(in, doc->raw.len, &passed, e))
            return e->code;
    } while (blank(doc->raw.data, doc->raw.len));
    while (doc->raw.data[doc->raw.len - 1] == '\n' || doc->raw.data[doc->raw.len - 1] == '\r')
        doc->raw.len--;
    return LM_OK;
}

static lm_code cut_whole(lm_input *in, lm_doc *doc, lm_err *e)
{
    begin_doc(in, doc);
    for (;;) {
        lm_code rc = refill(in, e);
        if (rc || in->at == in->n)
            return rc;
        rc = take_bytes(in, doc, in->n - in->at, e);
        if (rc)
            return rc;
    }
}

static lm_code cut_blank(lm_input *in, lm_doc *doc, lm_err *e)
{
    size_t passed = 0;
    begin_doc(in, doc);
    for (;;) {
        size_t before = doc->raw.len;
        lm_code rc = take_line(in, doc, e);
        if (rc || doc->raw.len == before)
            return rc;
        size_t line = doc->raw.len - before;
        if (!blank(doc->raw.data + before, line))
            continue;
        doc->raw.len = before;
        if (before)
            return LM_OK;
        if (pass_over(in, line, &passed, e))
            return e->code;
        begin_doc(in, doc);
    }
}

/* Read up to the next separator, which may span two blocks; bytes read behind it are returned to
 * the block. */
static lm_code cut_separator(lm_input *in, lm_doc *doc, bool *more, lm_err *e)
{
    size_t len = in->separator_len;
    begin_doc(in, doc);
    *more = false;
    for (;;) {
        lm_code rc = refill(in, e);
        if (rc || in->at == in->n)
            return rc;
        size_t before = doc->raw.len, from = before >= len ? before - len + 1 : 0;
        const char *hit = memmem(in->p + in->at, in->n - in->at, in->separator, len);
        rc = take_bytes(in, doc, hit ? (size_t)(hit - in->p) - in->at + len : in->n - in->at, e);
        if (rc)
            return rc;
        hit = memmem(doc->raw.data + from, doc->raw.len - from, in->separator, len);
        if (!hit)
            continue;
        size_t keep = (size_t)(hit - doc->raw.data), back = doc->raw.len - keep - len;
        in->at -= back;
        in->offset -= (int64_t)back;
        in->line += count_lines(doc->raw.data, keep + len);
        doc->raw.len = keep;
        *more = true;
        return LM_OK;
    }
}

/* Newlines around a piece belong to the separator, not to the text. */
static void trim_piece(lm_doc *doc)
{
    char *s = doc->raw.data;
    size_t a = 0, b = doc->raw.len;
    while (b > a && (s[b - 1] == '\n' || s[b - 1] == '\r'))
        b--;
    while (a < b && (s[a] == '\n' || s[a] == '\r'))
        doc->line += s[a++] == '\n';
    memmove(s, s + a, b - a);
    doc->raw.len = b - a;
    doc->offset += (int64_t)a;
}

static lm_code cut_text(lm_input *in, lm_doc *doc, lm_err *e)
{
    bool more = false;
    size_t passed = 0;
    lm_code rc;
    do {
        int64_t from = in->offset;
        if (in->o.split == LM_SPLIT_NONE)
            rc = cut_whole(in, doc, e);
        else if (in->o.split == LM_SPLIT_BLANK)
            rc = cut_blank(in, doc, e);
        else
            rc = cut_separator(in, doc, &more, e);
        if (!rc && doc->raw.len && in->o.split != LM_SPLIT_NONE)
            trim_piece(doc);
        if (!rc && blank(doc->raw.data, doc->raw.len))
            doc->raw.len = 0;
        if (!rc && !doc->raw.len && more)
            rc = pass_over(in, (size_t)(in->offset - from), &passed, e);
    } while (!rc && !doc->raw.len && more);
    return rc;
}

/* True if the document is the rest of one that damage cut.  A line of JSONL behind damage is one if
 * it is not a valid record. */
static bool is_rest(lm_input *in)
{
    bool behind = in->behind && !in->jsonl;
    in->behind = false;
    return behind || (in->ended && lm_source_cut(in->src));
}

lm_code lm_input_next(lm_input *in, lm_doc *doc, bool *got, lm_err *e)
{
    lm_code rc = LM_OK;
    *got = false;
    doc->text = NULL;
    doc->len = 0;
    doc->raw.len = 0;
    doc->skip = doc->broken = false;
    doc->bad = 0;
    doc->val_at = doc->val_end = 0;
    while (!rc) {
        if (!in->in_member) {
            rc = begin_member(in, e);
            if (rc || !in->in_member)
                return rc;
        }
        rc = in->jsonl ? cut_jsonl(in, doc, e) : cut_text(in, doc, e);
        if (rc)
            break;
        if (doc->raw.len && is_rest(in)) {
            __atomic_fetch_add(&in->o.bad->records, 1, __ATOMIC_SEQ_CST);
            doc->raw.len = 0;
            if (!in->ended)
                continue;
        }
        if (doc->raw.len) {
            doc->raw.data[doc->raw.len] = 0;
            break;
        }
        in->in_member = false;
    }
    if (rc)
        return rc;
    doc->jsonl = in->jsonl;
    doc->operand = lm_source_operand(in->src);
    doc->index = atomic_fetch_add_explicit(&in->docs, 1, memory_order_relaxed);
    doc->name.len = 0;
    const char *name = lm_source_name(in->src);
    rc = lm_buf_add(&doc->name, name, strlen(name), e);
    doc->source = doc->name.data;
    *got = !rc;
    return rc;
}

lm_code lm_input_read(lm_input *in, lm_doc *doc, bool *got, lm_err *e)
{
    lm_code rc;
    do {
        rc = lm_input_next(in, doc, got, e);
        if (rc || !*got)
            return rc;
        rc = lm_doc_decode(&in->o, doc, e);
        in->skipped += doc->skip;
        in->bad += doc->skip ? 0 : doc->bad;
    } while (!rc && doc->skip);
    *got = !rc;
    return rc;
}

/* ---- life ---- */

lm_code lm_input_open(const lm_input_opts *o, const char *const *paths, int n, lm_input **out,
                      lm_err *e)
{
    lm_input *in;
    if (o->split == LM_SPLIT_STRING && (!o->separator || !*o->separator))
        return lm_fail(e, LM_EUSAGE, "separator", "give at least one byte", "it is empty");
    lm_code rc = lm_alloc_n(&in, 1, sizeof *in, "an input", e);
    if (rc)
        return rc;
    in->o = *o;
    in->known_file = -1;
    in->max_doc = o->max_doc ? o->max_doc : MAX_DOC_DEFAULT;
    if (o->separator) {
        rc = lm_strdup(&in->separator, o->separator, e);
        in->separator_len = strlen(o->separator);
    }
    if (!rc)
        rc = lm_source_open(paths, n, o->bad != NULL, in->max_doc, &in->src, e);
    if (rc) {
        lm_input_close(in);
        return rc;
    }
    *out = in;
    return LM_OK;
}

void lm_input_close(lm_input *in)
{
    if (!in)
        return;
    lm_source_close(in->src);
    lm_free(in->separator);
    lm_free(in);
}

void lm_doc_fini(lm_doc *doc)
{
    lm_buf_fini(&doc->raw);
    lm_buf_fini(&doc->own);
    lm_buf_fini(&doc->name);
    *doc = (lm_doc){ 0 };
}

const lm_input_files *lm_input_file_list(const lm_input *in)
{
    return lm_source_files(in->src);
}

lm_input_stats lm_input_stat(const lm_input *in)
{
    return (lm_input_stats){ .docs = atomic_load_explicit(&in->docs, memory_order_relaxed),
                             .skipped = in->skipped,
                             .bad = in->bad,
                             .bytes = lm_source_bytes(in->src),
                             .total = lm_source_total(in->src) };
}

uint64_t lm_input_digest(const lm_input *in, int i)
{
    return lm_source_digest(in->src, i);
}
