/* SPDX-License-Identifier: Apache-2.0 */
/* The steps of pretok.h.  A step either cuts every piece at the matches of a pattern, or rewrites
 * every piece into a new buffer. */
#include "text/pretok.h"

#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "text/bpe.h"
#include "text/normal.h"
#include "text/pretok_class.h"
#include "text/pretok_split.h"

enum { MAX_STEPS = 32, MAX_DEPTH = 8 };

typedef enum { STEP_CUT, STEP_PREFIX, STEP_BYTES, STEP_META } step_kind;
typedef enum { PREPEND_NEVER, PREPEND_FIRST, PREPEND_ALWAYS } prepend;

typedef struct {
    step_kind kind;
    lm_pretok_cut cut; /* STEP_CUT */
    char mark[4];      /* STEP_META: the replacement of a space */
    size_t mark_len;
    prepend scheme;
} step;

struct lm_pretok {
    step steps[MAX_STEPS];
    int n;
};

static lm_code add_step(lm_pretok *p, step s, const char *where, lm_err *e)
{
    if (p->n == MAX_STEPS) {
        lm_regex_free(s.cut.regex);
        return lm_fail(e, LM_EFORMAT, where, NULL, "more than %d pre-tokenizers", MAX_STEPS);
    }
    p->steps[p->n++] = s;
    return LM_OK;
}

static lm_code add_cut(lm_pretok *p, lm_pretok_cut c, const char *where, lm_err *e)
{
    return add_step(p, (step){ .kind = STEP_CUT, .cut = c }, where, e);
}

static lm_code parse_behavior(const json_t *j, const char *dflt, lm_pretok_cut *c,
                              const char *where, lm_err *e)
{
    static const char *const names[] = {
        [LM_CUT_ISOLATED] = "Isolated",           [LM_CUT_REMOVED] = "Removed",
        [LM_CUT_PREVIOUS] = "MergedWithPrevious", [LM_CUT_NEXT] = "MergedWithNext",
        [LM_CUT_CONTIGUOUS] = "Contiguous",
    };
    const char *name;
    lm_code rc = lm_json_str_or(j, "behavior", dflt, &name, where, e);

    if (rc)
        return rc;
    for (int i = 0; i <= LM_CUT_CONTIGUOUS && name; i++)
        if (!strcmp(name, names[i])) {
            c->behavior = (lm_cut_behavior)i;
            return LM_OK;
        }
    return lm_fail(e, LM_EFORMAT, where, NULL, "unknown behavior \"%s\"", name ? name : "");
}

static lm_code parse_split(const json_t *j, lm_pretok *p, const char *where, lm_err *e)
{
    lm_pretok_cut c = { .kind = LM_CUT_REGEX };
    const char *text = NULL;
    lm_code rc = parse_behavior(j, NULL, &c, where, e);

    if (!rc)
        rc = lm_json_bool_or(j, "invert", false, &c.invert, where, e);
    if (!rc)
        rc = lm_pattern_from_json(j, where, &c.regex, &text, e);
    if (rc)
        return rc;
    if (text && lm_scan_of_pattern(text) != LM_SCAN_NONE) {
        c.kind = LM_CUT_SCAN;
        c.scan = lm_scan_of_pattern(text);
    }
    return add_cut(p, c, where, e);
}

static lm_code parse_byte_level(const json_t *j, lm_pretok *p, const char *where, lm_err *e)
{
    bool prefix = true, regex = true;
    lm_code rc = lm_json_bool_or(j, "add_prefix_space", true, &prefix, where, e);

    if (!rc)
        rc = lm_json_bool_or(j, "use_regex", true, &regex, where, e);
    if (!rc && prefix)
        rc = add_step(p, (step){ .kind = STEP_PREFIX }, where, e);
    if (!rc && regex)
        rc = add_cut(p, (lm_pretok_cut){ .kind = LM_CUT_SCAN, .scan = LM_SCAN_GPT2 }, where, e);
    return rc ? rc : add_step(p, (step){ .kind = STEP_BYTES }, where, e);
}

static lm_code parse_metaspace(const json_t *j, lm_pretok *p, const char *where, lm_err *e)
{
    static const char *const schemes[] = { "never", "first", "always" };
    const char *mark, *scheme;
    bool old_prefix, split;
    step s = { .kind = STEP_META };
    int k = 0;
    lm_code rc = lm_json_str_or(j, "replacement", "\xE2\x96\x81", &mark, where, e);

    if (!rc)
        rc = lm_json_bool_or(j, "add_prefix_space", true, &old_prefix, where, e);
    if (!rc)
        rc =
            lm_json_str_or(j, "prepend_scheme", old_prefix ? "always" : "never", &scheme, where, e);
    if (!rc)
        rc = lm_json_bool_or(j, "split", true, &split, where, e);
    if (rc)
        return rc;
    while (k < 3 && strcmp(scheme, schemes[k]))
        k++;
    if (k == 3)
        return lm_fail(e, LM_EFORMAT, where, NULL, "unknown prepend_scheme \"%s\"", scheme);
    s.scheme = (prepend)k;
    s.mark_len = strlen(mark);
    size_t one = 0;
    uint32_t cp = s.mark_len ? lm_utf8_get(mark, s.mark_len, &one) : 0;
    if (!s.mark_len || one != s.mark_len)
        return lm_fail(e, LM_EFORMAT, where, NULL, "replacement \"%s\" is not one character", mark);
    memcpy(s.mark, mark, s.mark_len);
    rc = add_step(p, s, where, e);
    if (!rc && split)
        rc = add_cut(p, (lm_pretok_cut){ .kind = LM_CUT_CHAR, .ch = cp, .behavior = LM_CUT_NEXT },
                     where, e);
    return rc;
}

/* Pre-tokenisers that cut at classes of characters. */
static lm_code parse_class(const char *type, const json_t *j, lm_pretok *p, bool *known,
                           const char *where, lm_err *e)
{
    lm_pretok_cut c = { .kind = LM_CUT_CLASS };
    const char *delimiter;
    bool single;
    lm_code rc = LM_OK;

    *known = true;
    if (!strcmp(type, "Digits")) {
        rc = lm_json_bool_or(j, "individual_digits", false, &single, where, e);
        c.mask = LM_CLASS_NUMBER;
        c.behavior = !rc && single ? LM_CUT_ISOLATED : LM_CUT_CONTIGUOUS;
    } else if (!strcmp(type, "Punctuation")) {
        c.mask = LM_CLASS_PUNCT;
        rc = parse_behavior(j, "Isolated", &c, where, e);
    } else if (!strcmp(type, "Whitespace")) {
        c = (lm_pretok_cut){ .kind = LM_CUT_WORDS, .behavior = LM_CUT_REMOVED, .invert = true };
    } else if (!strcmp(type, "WhitespaceSplit")) {
        c.mask = LM_CLASS_SPACE;
        c.behavior = LM_CUT_REMOVED;
    } else if (!strcmp(type, "BertPreTokenizer")) {
        c.mask = LM_CLASS_SPACE;
        c.behavior = LM_CUT_REMOVED;
        rc = add_cut(p, c, where, e);
        c.mask = LM_CLASS_PUNCT;
        c.behavior = LM_CUT_ISOLATED;
    } else if (!strcmp(type, "CharDelimiterSplit")) {
        rc = lm_json_str_or(j, "delimiter", "", &delimiter, where, e);
        size_t one = 0, len = rc ? 0 : strlen(delimiter);
        c.kind = LM_CUT_CHAR;
        c.behavior = LM_CUT_REMOVED;
        c.ch = len ? lm_utf8_get(delimiter, len, &one) : 0;
        if (!rc && (!len || one != len))
            rc = lm_fail(e, LM_EFORMAT, where, NULL, "\"delimiter\" must be one character");
    } else {
        *known = false;
        return LM_OK;
    }
    return rc ? rc : add_cut(p, c, where, e);
}

static lm_code parse_step(const json_t *j, lm_pretok *p, int depth, const char *where, lm_err *e)
{
    const char *type;
    bool known;
    lm_code rc = lm_json_str_or(j, "type", "", &type, where, e);

    if (rc)
        return rc;
    if (!strcmp(type, "ByteLevel"))
        return parse_byte_level(j, p, where, e);
    if (!strcmp(type, "Split"))
        return parse_split(j, p, where, e);
    if (!strcmp(type, "Metaspace"))
        return parse_metaspace(j, p, where, e);
    if (!strcmp(type, "Sequence")) {
        const json_t *list = json_object_get(j, "pretokenizers"), *item;
        size_t i;
        if (!json_is_array(list) || depth == MAX_DEPTH)
            return lm_fail(e, LM_EFORMAT, where, NULL,
                           "\"pretokenizers\" of a Sequence must be a list, nested %d deep at most",
                           MAX_DEPTH);
        json_array_foreach(list, i,
                           item) if ((rc = parse_step(item, p, depth + 1, where, e))) return rc;
        return LM_OK;
    }
    rc = parse_class(type, j, p, &known, where, e);
    if (!rc && !known)
        rc =
            lm_fail(e, LM_EFORMAT, where, NULL, "pre_tokenizer type \"%s\" is not supported", type);
    return rc;
}

lm_code lm_pretok_new(const json_t *j, const char *where, lm_pretok **out, lm_err *e)
{
    lm_code rc = lm_alloc_n(out, 1, sizeof **out, "the pre-tokenizer", e);

    if (!rc && j && !json_is_null(j))
        rc = parse_step(j, *out, 0, where, e);
    if (rc) {
        lm_pretok_free(*out);
        *out = NULL;
    }
    return rc;
}

void lm_pretok_free(lm_pretok *p)
{
    for (int i = 0; p && i < p->n; i++)
        lm_regex_free(p->steps[i].cut.regex);
    lm_free(p);
}

void lm_pretok_scratch_fini(lm_pretok_scratch *s)
{
    for (int i = 0; i < 2; i++) {
        lm_buf_fini(&s->buf[i]);
        lm_free(s->list[i].v);
    }
    lm_free(s->cut.v);
    memset(s, 0, sizeof *s);
}

bool lm_pretok_leave_bytes(lm_pretok *p)
{
    if (!p->n || p->steps[p->n - 1].kind != STEP_BYTES)
        return false;
    p->n--;
    return true;
}

lm_scan_kind lm_pretok_scanner(const lm_pretok *p)
{
    const lm_pretok_cut *c = &p->steps[0].cut;
    bool scan = p->n == 1 && p->steps[0].kind == STEP_CUT && c->kind == LM_CUT_SCAN;
    /* The matches tile the text, so all behaviours that keep matches separate cut at the same
     * places. */
    return scan && c->behavior == LM_CUT_ISOLATED ? c->scan : LM_SCAN_NONE;
}

/* One piece through a step that writes: append its new form to *out. */
static lm_code rewrite(const step *s, const char *p, size_t len, bool start, lm_buf *out, lm_err *e)
{
    lm_code rc = lm_buf_room(out, s->kind == STEP_META ? 4 * (len + 1) : 2 * len + 1, e);
    bool marked;

    if (rc)
        return rc;
    switch (s->kind) {
    case STEP_PREFIX:
        if (len && p[0] != ' ')
            rc = lm_buf_add(out, " ", 1, e);
        return rc ? rc : lm_buf_add(out, p, len, e);
    case STEP_BYTES:
        for (size_t i = 0; i < len; i++)
            out->len += lm_byte_utf8((uint8_t)p[i], out->data + out->len);
        return LM_OK;
    default:
        marked = len && (p[0] == ' ' || (len >= s->mark_len && !memcmp(p, s->mark, s->mark_len)));
        if (!marked && (s->scheme == PREPEND_ALWAYS || (s->scheme == PREPEND_FIRST && start)))
            rc = lm_buf_add(out, s->mark, s->mark_len, e);
        for (size_t i = 0; i < len && !rc; i++)
            rc = p[i] == ' ' ? lm_buf_add(out, s->mark, s->mark_len, e)
                             : lm_buf_add(out, p + i, 1, e);
        return rc;
    }
}

static lm_code rewrite_all(const step *s, const char *base, const lm_pieces *from, lm_pieces *to,
                           lm_buf *out, lm_err *e)
{
    lm_code rc = lm_grow(&to->v, &to->cap, from->n, sizeof *to->v, "words", e);

    out->len = 0;
    for (size_t i = 0; i < from->n && !rc; i++) {
        size_t at = out->len;
        rc = rewrite(s, base + from->v[i].off, from->v[i].len, from->v[i].start, out, e);
        to->v[i] = (lm_piece){ at, out->len - at, from->v[i].start };
    }
    to->n = from->n;
    return rc;
}

lm_code lm_pretok_run(const lm_pretok *p, lm_regex_match *m, lm_pretok_scratch *s, const char *text,
                      size_t len, bool start, const char **base, const lm_pieces **words, lm_err *e)
{
    lm_pieces *from = &s->list[0], *to = &s->list[1], *swap;
    int writes = 0;
    lm_code rc = lm_grow(&from->v, &from->cap, 1, sizeof *from->v, "words", e);

    if (rc)
        return rc;
    from->v[0] = (lm_piece){ 0, len, start };
    from->n = 1;
    for (int i = 0; i < p->n && !rc; i++) {
        const step *st = &p->steps[i];
        if (st->kind == STEP_CUT) {
            to->n = 0;
            rc = lm_cut_all(&st->cut, m, text, from, &s->cut, to, e);
        } else {
            lm_buf *out = &s->buf[writes++ & 1];
            rc = rewrite_all(st, text, from, to, out, e);
            text = out->data;
        }
        swap = from;
        from = to;
        to = swap;
    }
    *base = text;
    *words = from;
    return rc;
}
