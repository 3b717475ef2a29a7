/* SPDX-License-Identifier: Apache-2.0 */
/* Ids back to text: the decoder of a tokenizer.json as a list of steps over a list of strings. */
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "text/tokenizer_impl.h"

enum { MAX_STEPS = 32, MAX_DEPTH = 8 };

typedef enum {
    STEP_BYTES,    /* ByteLevel: mapped characters to bytes, all strings joined */
    STEP_FALLBACK, /* runs of <0xXX> to text */
    STEP_FUSE,
    STEP_STRIP,
    STEP_REPLACE,
    STEP_META,
    STEP_SUFFIX,    /* BPEDecoder: a suffix represents a space */
    STEP_WORDPIECE, /* a space before every token without the prefix */
    STEP_KINDS,
} step_kind;

typedef struct {
    step_kind kind;
    char *from, *to;     /* owned; REPLACE both, META SUFFIX STRIP WORDPIECE from */
    int64_t start, stop; /* STRIP: how many at most */
    bool keep_first;     /* META: the first string keeps its leading space */
    bool clean;          /* WORDPIECE: spaces before punctuation are removed */
} step;

struct lm_decoder {
    step steps[MAX_STEPS];
    int n;
};

/* Strings one after the other. */
typedef struct {
    lm_buf text;
    size_t *end;
    size_t n, cap;
} strings;

static lm_code parse_texts(step *s, const char *from, const char *to, lm_err *e)
{
    lm_code rc = lm_strdup(&s->from, from, e);
    return rc || !to ? rc : lm_strdup(&s->to, to, e);
}

static lm_code parse_replace(const json_t *j, step *s, const char *where, lm_err *e)
{
    const char *to,
        *from = json_string_value(json_object_get(json_object_get(j, "pattern"), "String"));
    lm_code rc = lm_json_str_or(j, "content", NULL, &to, where, e);

    if (!rc && (!from || !*from || !to))
        rc = lm_fail(e, LM_EFORMAT, where, NULL,
                     "a Replace decoder needs \"pattern\": {\"String\": ...} and \"content\"");
    return rc ? rc : parse_texts(s, from, to, e);
}

static lm_code parse_strip(const json_t *j, step *s, const char *where, lm_err *e)
{
    const char *content;
    size_t one = 0, len;
    lm_code rc = lm_json_str_or(j, "content", "", &content, where, e);

    if (!rc)
        rc = lm_json_i64_or(j, "start", 0, 0, INT32_MAX, &s->start, where, e);
    if (!rc)
        rc = lm_json_i64_or(j, "stop", 0, 0, INT32_MAX, &s->stop, where, e);
    if (rc)
        return rc;
    len = strlen(content);
    if (len)
        lm_utf8_get(content, len, &one);
    if (!len || one != len)
        return lm_fail(e, LM_EFORMAT, where, NULL, "\"content\" of Strip must be one character");
    return parse_texts(s, content, NULL, e);
}

static lm_code parse_metaspace(const json_t *j, step *s, const char *where, lm_err *e)
{
    const char *mark, *scheme;
    bool prefix;
    lm_code rc = lm_json_str_or(j, "replacement", "\xE2\x96\x81", &mark, where, e);

    if (!rc)
        rc = lm_json_bool_or(j, "add_prefix_space", true, &prefix, where, e);
    if (!rc)
        rc = lm_json_str_or(j, "prepend_scheme", prefix ? "always" : "never", &scheme, where, e);
    if (!rc && !*mark)
        rc = lm_fail(e, LM_EFORMAT, where, NULL, "\"replacement\" is empty");
    if (rc)
        return rc;
    s->keep_first = !strcmp(scheme, "never");
    return parse_texts(s, mark, NULL, e);
}

static lm_code parse_wordpiece(const json_t *j, step *s, const char *where, lm_err *e)
{
    const char *prefix;
    lm_code rc = lm_json_str_or(j, "prefix", "##", &prefix, where, e);

    if (!rc)
        rc = lm_json_bool_or(j, "cleanup", true, &s->clean, where, e);
    return rc ? rc : parse_texts(s, prefix, NULL, e);
}

static lm_code parse_step(const json_t *j, lm_decoder *d, int depth, const char *where, lm_err *e)
{
    static const char *const types[] = {
        [STEP_BYTES] = "ByteLevel",   [STEP_FALLBACK] = "ByteFallback", [STEP_FUSE] = "Fuse",
        [STEP_STRIP] = "Strip",       [STEP_REPLACE] = "Replace",       [STEP_META] = "Metaspace",
        [STEP_SUFFIX] = "BPEDecoder", [STEP_WORDPIECE] = "WordPiece",
    };
    const char *type, *suffix;
    int k = 0;
    lm_code rc = lm_json_str_or(j, "type", "", &type, where, e);

    if (!rc && !strcmp(type, "Sequence")) {
        const json_t *list = json_object_get(j, "decoders"), *item;
        size_t i;
        if (!json_is_array(list) || depth == MAX_DEPTH)
            return lm_fail(e, LM_EFORMAT, where, NULL,
                           "\"decoders\" of a Sequence must be a list, nested %d deep at most",
                           MAX_DEPTH);
        json_array_foreach(list, i,
                           item) if ((rc = parse_step(item, d, depth + 1, where, e))) return rc;
        return LM_OK;
    }
    while (!rc && k < STEP_KINDS && strcmp(type, types[k]))
        k++;
    if (!rc && k == STEP_KINDS)
        rc = lm_fail(e, LM_EFORMAT, where, NULL, "decoder type \"%s\" is not supported", type);
    if (!rc && d->n == MAX_STEPS)
        rc = lm_fail(e, LM_EFORMAT, where, NULL, "more than %d decoders", MAX_STEPS);
    if (rc)
        return rc;
    step *s = &d->steps[d->n++];
    s->kind = (step_kind)k;
    if (k == STEP_STRIP)
        return parse_strip(j, s, where, e);
    if (k == STEP_REPLACE)
        return parse_replace(j, s, where, e);
    if (k == STEP_META)
        return parse_metaspace(j, s, where, e);
    if (k == STEP_WORDPIECE)
        return parse_wordpiece(j, s, where, e);
    if (k == STEP_SUFFIX) {
        rc = lm_json_str_or(j, "suffix", "</w>", &suffix, where, e);
        if (!rc && !*suffix)
            rc = lm_fail(e, LM_EFORMAT, where, NULL, "\"suffix\" is empty");
        return rc ? rc : parse_texts(s, suffix, NULL, e);
    }
    return LM_OK;
}

lm_code lm_decoder_new(const json_t *j, const char *where, lm_decoder **out, lm_err *e)
{
    lm_code rc;

    *out = NULL;
    if (!j || json_is_null(j))
        return LM_OK;
    rc = lm_alloc_n(out, 1, sizeof **out, "the decoder", e);
    if (!rc)
        rc = parse_step(j, *out, 0, where, e);
    if (rc) {
        lm_decoder_free(*out);
        *out = NULL;
    }
    return rc;
}

void lm_decoder_free(lm_decoder *d)
{
    for (int i = 0; d && i < d->n; i++) {
        lm_free(d->steps[i].from);
        lm_free(d->steps[i].to);
    }
    lm_free(d);
}

static lm_code end_string(strings *l, lm_err *e)
{
    lm_code rc = lm_grow(&l->end, &l->cap, l->n + 1, sizeof *l->end, "decoding", e);

    if (!rc)
        l->end[l->n++] = l->text.len;
    return rc;
}

static void strings_fini(strings *l)
{
    lm_buf_fini(&l->text);
    lm_free(l->end);
}

/* Append bytes, each maximal part that is not UTF-8 as one U+FFFD (Unicode, chapter 3, table
 * 3-8). */
static lm_code add_lossy(lm_buf *out, const char *s, size_t len, lm_err *e)
{
    lm_code rc = LM_OK;

    while (len && !rc) {
        size_t n = lm_utf8_valid(s, len), bad = 1;
        rc = lm_buf_add(out, s, n, e);
        s += n;
        len -= n;
        if (!len || rc)
            break;
        /* The number of bytes that could be the beginning of a character here. */
        uint8_t b = (uint8_t)*s, lo = 0x80, hi = 0xBF;
        size_t want = b >= 0xC2 && b < 0xE0   ? 2
                      : b >= 0xE0 && b < 0xF0 ? 3
                      : b >= 0xF0 && b < 0xF5 ? 4
                                              : 1;
        lo = b == 0xE0 ? 0xA0 : b == 0xF0 ? 0x90 : lo;
        hi = b == 0xED ? 0x9F : b == 0xF4 ? 0x8F : hi;
        while (bad < want && bad < len && (uint8_t)s[bad] >= lo && (uint8_t)s[bad] <= hi) {
            bad++;
            lo = 0x80;
            hi = 0xBF;
        }
        rc = lm_buf_add(out, "\xEF\xBF\xBD", 3, e);
        s += bad;
        len -= bad;
    }
    return rc;
}

/* One token's bytes; a token with a character outside the map represents its own UTF-8. */
static lm_code add_mapped(lm_buf *out, const char *s, size_t len, lm_err *e)
{
    size_t begin = out->len, one;
    lm_code rc = lm_buf_room(out, len, e);

    for (size_t i = 0; i < len && !rc; i += one) {
        int b = lm_byte_of_char(lm_utf8_get(s + i, len - i, &one));
        if (b < 0) {
            out->len = begin;
            return lm_buf_add(out, s, len, e);
        }
        out->data[out->len++] = (char)b;
    }
    return rc;
}

static lm_code run_bytes(const strings *in, strings *out, lm_err *e)
{
    lm_buf bytes = { 0 };
    lm_code rc = LM_OK;

    for (size_t i = 0, at = 0; i < in->n && !rc; at = in->end[i++])
        rc = add_mapped(&bytes, in->text.data + at, in->end[i] - at, e);
    if (!rc)
        rc = add_lossy(&out->text, bytes.data, bytes.len, e);
    lm_buf_fini(&bytes);
    return rc ? rc : end_string(out, e);
}

static int hex_digit(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                  : -1;
}

static int fallback_byte(const char *s, size_t len)
{
    if (len != 6 || memcmp(s, "<0x", 3) || s[5] != '>' || hex_digit(s[3]) < 0 ||
        hex_digit(s[4]) < 0)
        return -1;
    return hex_digit(s[3]) << 4 | hex_digit(s[4]);
}

/* A run of byte tokens: text if it is UTF-8, otherwise U+FFFD for every byte. */
static lm_code end_run(lm_buf *run, strings *out, lm_err *e)
{
    lm_code rc = LM_OK;

    if (!run->len)
        return LM_OK;
    if (lm_utf8_valid(run->data, run->len) == run->len) {
        rc = lm_buf_add(&out->text, run->data, run->len, e);
        if (!rc)
            rc = end_string(out, e);
    } else {
        for (size_t i = 0; i < run->len && !rc; i++) {
            rc = lm_buf_add(&out->text, "\xEF\xBF\xBD", 3, e);
            if (!rc)
                rc = end_string(out, e);
        }
    }
    run->len = 0;
    return rc;
}

static lm_code run_fallback(const strings *in, strings *out, lm_err *e)
{
    lm_buf run = { 0 };
    lm_code rc = LM_OK;

    for (size_t i = 0, at = 0; i < in->n && !rc; at = in->end[i++]) {
        const char *s = in->text.data + at;
        size_t len = in->end[i] - at;
        int b = fallback_byte(s, len);
        if (b >= 0) {
            char c = (char)b;
            rc = lm_buf_add(&run, &c, 1, e);
            continue;
        }
        rc = end_run(&run, out, e);
        if (!rc)
            rc = lm_buf_add(&out->text, s, len, e);
        if (!rc)
            rc = end_string(out, e);
    }
    if (!rc)
        rc = end_run(&run, out, e);
    lm_buf_fini(&run);
    return rc;
}

/* Append s with every `from` replaced by `to`. */
static lm_code add_replaced(lm_buf *out, const char *s, size_t len, const char *from,
                            const char *to, size_t to_len, lm_err *e)
{
    size_t n = strlen(from);
    const char *p;
    lm_code rc = LM_OK;

    while (!rc && len && (p = memmem(s, len, from, n))) {
        rc = lm_buf_add(out, s, (size_t)(p - s), e);
        if (!rc)
            rc = lm_buf_add(out, to, to_len, e);
        len -= (size_t)(p - s) + n;
        s = p + n;
    }
    return rc ? rc : lm_buf_add(out, s, len, e);
}

/* Remove the spaces that a cut at punctuation left in out->data[begin..len): in this order, each in
 * the result of the one before. */
static lm_code clean_up(lm_buf *out, size_t begin, lm_err *e)
{
    static const char *const pairs[][2] = {
        { " .", "." },   { " ?", "?" },     { " !", "!" },     { " ,", "," },
        { " ' ", "'" },  { " n't", "n't" }, { " 'm", "'m" },   { " do not", " don't" },
        { " 's", "'s" }, { " 've", "'ve" }, { " 're", "'re" },
    };
    lm_buf tmp = { 0 };
    lm_code rc = LM_OK;

    for (size_t i = 0; i < sizeof pairs / sizeof *pairs && !rc; i++) {
        const char *from = pairs[i][0], *to = pairs[i][1];
        if (!memmem(out->data + begin, out->len - begin, from, strlen(from)))
            continue;
        tmp.len = 0;
        rc = add_replaced(&tmp, out->data + begin, out->len - begin, from, to, strlen(to), e);
        out->len = begin;
        if (!rc)
            rc = lm_buf_add(out, tmp.data, tmp.len, e);
    }
    lm_buf_fini(&tmp);
    return rc;
}

static lm_code run_wordpiece(const step *s, const char *p, size_t len, bool first, lm_buf *out,
                             lm_err *e)
{
    size_t n = strlen(s->from), begin = out->len;
    bool inside = len >= n && !memcmp(p, s->from, n);
    lm_code rc = !first && !inside ? lm_buf_add(out, " ", 1, e) : LM_OK;

    if (!rc)
        rc = !first && inside ? lm_buf_add(out, p + n, len - n, e) : lm_buf_add(out, p, len, e);
    return rc || !s->clean || out->len == begin ? rc : clean_up(out, begin, e);
}

/* The steps that rewrite each string alone; first, last: its position in the list. */
static lm_code run_one(const step *s, const char *p, size_t len, bool first, bool last, lm_buf *out,
                       lm_err *e)
{
    size_t n = strlen(s->from);
    const char *end = p + len;

    switch (s->kind) {
    case STEP_STRIP:
        for (int64_t i = 0; i < s->start && (size_t)(end - p) >= n && !memcmp(p, s->from, n); i++)
            p += n;
        for (int64_t i = 0; i < s->stop && (size_t)(end - p) >= n && !memcmp(end - n, s->from, n);
             i++)
            end -= n;
        return lm_buf_add(out, p, (size_t)(end - p), e);
    case STEP_REPLACE:
        return add_replaced(out, p, len, s->from, s->to, strlen(s->to), e);
    case STEP_WORDPIECE:
        return run_wordpiece(s, p, len, first, out, e);
    case STEP_META:
        return add_replaced(out, p, len, s->from, " ", first && !s->keep_first ? 0 : 1, e);
    default:
        return add_replaced(out, p, len, s->from, " ", last ? 0 : 1, e);
    }
}

static lm_code run_step(const step *s, const strings *in, strings *out, lm_err *e)
{
    lm_code rc = LM_OK;

    out->n = out->text.len = 0;
    if (s->kind == STEP_BYTES)
        return run_bytes(in, out, e);
    if (s->kind == STEP_FALLBACK)
        return run_fallback(in, out, e);
    if (s->kind == STEP_FUSE) {
        rc = lm_buf_add(&out->text, in->text.data, in->text.len, e);
        return rc ? rc : end_string(out, e);
    }
    for (size_t i = 0, at = 0; i < in->n && !rc; at = in->end[i++]) {
        rc = run_one(s, in->text.data + at, in->end[i] - at, !i, i + 1 == in->n, &out->text, e);
        if (!rc)
            rc = end_string(out, e);
    }
    return rc;
}

/* The text of a token in decoding: added tokens in their normalised form, as in `tokenizers`
 * 0.23. */
static const char *token_text(const lm_tokenizer *t, uint32_t id, size_t *len)
{
    uint32_t a = id < t->vocab_size ? t->added_of[id] : LM_BPE_NONE;

    if (a == LM_BPE_NONE || !t->added.v[a].pattern)
        return lm_tokenizer_token(t, id, len);
    *len = t->added.v[a].pattern_len;
    return t->added.v[a].pattern;
}

/* The tokens' texts as the first list; without a decoder they are joined by spaces. */
static lm_code gather(const lm_tokenizer *t, const uint32_t *ids, size_t n, bool skip_special,
                      strings *out, lm_err *e)
{
    lm_code rc = LM_OK;

    for (size_t i = 0; i < n && !rc; i++) {
        size_t len;
        const char *s = token_text(t, ids[i], &len);
        if (!s)
            return lm_fail(e, LM_EFORMAT, "token ids", NULL,
                           "id %u at position %zu is not a token; the vocabulary ends at %lld",
                           ids[i], i, (long long)t->vocab_size - 1);
        if (skip_special && lm_tokenizer_is_special(t, ids[i]))
            continue;
        if (!t->decoder && out->n)
            rc = lm_buf_add(&out->text, " ", 1, e);
        if (!rc)
            rc = lm_buf_add(&out->text, s, len, e);
        if (!rc)
            rc = end_string(out, e);
    }
    return rc;
}

lm_code lm_tokenizer_decode(const lm_tokenizer *t, const uint32_t *ids, size_t n, bool skip_special,
                            lm_buf *out, lm_err *e)
{
    strings l[2] = { { .n = 0 }, { .n = 0 } };
    size_t most;
    int at = 0;
    lm_code rc = gather(t, ids, n, skip_special, &l[0], e);

    most = 64 * l[0].text.len + (1 << 20);
    for (int i = 0; !rc && t->decoder && l[at].n && i < t->decoder->n; i++, at ^= 1) {
        rc = run_step(&t->decoder->steps[i], &l[at], &l[at ^ 1], e);
        if (!rc && l[at ^ 1].text.len > most) /* replacements whose output is replaced again */
            rc = lm_fail(e, LM_ELIMIT, "decoder", "use another tokenizer",
                         "it expands the text to more than %zu bytes", most);
    }
    if (!rc)
        rc = lm_buf_add(out, l[at].text.data, l[at].text.len, e);
    strings_fini(&l[0]);
    strings_fini(&l[1]);
    return rc;
}

void lm_tok_stream_fini(lm_tok_stream *s)
{
    lm_ids_fini(&s->ids);
    lm_buf_fini(&s->before);
    lm_buf_fini(&s->after);
    *s = (lm_tok_stream){ 0 };
}

/* Append the text of ids that is not in the text of ids[0..shown), unless its end may still change
 * (`all` false and a U+FFFD at the end: possibly half a character). */
static lm_code show(lm_tok_stream *s, const lm_tokenizer *t, bool skip_special, bool all,
                    lm_buf *out, lm_err *e)
{
    size_t same = 0, n;
    lm_code rc;

    s->before.len = s->after.len = 0;
    rc = lm_tokenizer_decode(t, s->ids.v, s->shown, skip_special, &s->before, e);
    if (!rc)
        rc = lm_tokenizer_decode(t, s->ids.v, s->ids.n, skip_special, &s->after, e);
    if (rc)
        return rc;
    n = s->after.len;
    if (n <= s->before.len || (!all && n >= 3 && !memcmp(s->after.data + n - 3, "\xEF\xBF\xBD", 3)))
        return LM_OK;
    while (same < s->before.len && s->before.data[same] == s->after.data[same])
        same++;
    while (same && ((uint8_t)s->after.data[same] & 0xC0) == 0x80)
        same--;
    rc = lm_buf_add(out, s->after.data + same, n - same, e);
    if (rc)
        return rc;
    /* Keep the ids just written: they are the context of the following ids. */
    memmove(s->ids.v, s->ids.v + s->shown, (s->ids.n - s->shown) * sizeof *s->ids.v);
    s->ids.n -= s->shown;
    s->shown = s->ids.n;
    return LM_OK;
}

lm_code lm_tok_stream_push(lm_tok_stream *s, const lm_tokenizer *t, uint32_t id, bool skip_special,
                           lm_buf *out, lm_err *e)
{
    size_t len;
    lm_code rc = lm_grow(&s->ids.v, &s->ids.cap, s->ids.n + 1, sizeof *s->ids.v, "decoding", e);

    if (rc || !lm_tokenizer_token(t, id, &len))
        return rc;
    s->ids.v[s->ids.n++] = id;
    rc = show(s, t, skip_special, false, out, e);
    if (rc)
        s->ids.n--;
    return rc;
}

lm_code lm_tok_stream_end(lm_tok_stream *s, const lm_tokenizer *t, bool skip_special, lm_buf *out,
                          lm_err *e)
{
    lm_code rc = s->ids.n > s->shown ? show(s, t, skip_special, true, out, e) : LM_OK;

    s->ids.n = s->shown = 0;
    return rc;
}
