/* SPDX-License-Identifier: Apache-2.0 */
/* A small reader of JSON for two shapes only: {"text": number, ...} and [["a", "b"], "a b", ...].
 * It accepts only a part of JSON, never more. */
#include "text/tokenizer_lists.h"

#include <string.h>

#include "base/mem.h"
#include "base/text.h"

typedef struct {
    const char *p, *end;
    lm_lists *l;
    lm_err *e;
    lm_code rc; /* memory */
} reader;

void lm_lists_fini(lm_lists *l)
{
    lm_buf_fini(&l->text);
    lm_free(l->tokens);
    lm_free(l->merges);
    memset(l, 0, sizeof *l);
}

static void skip_space(reader *r)
{
    while (r->p < r->end && (*r->p == ' ' || *r->p == '\n' || *r->p == '\t' || *r->p == '\r'))
        r->p++;
}

/* The next character, if it is c. */
static bool skip_mark(reader *r, char c)
{
    skip_space(r);
    if (r->p == r->end || *r->p != c)
        return false;
    r->p++;
    return true;
}

static bool hex4(const char *p, uint32_t *out)
{
    *out = 0;
    for (int i = 0; i < 4; i++) {
        char c = p[i];
        int d = c >= '0' && c <= '9'   ? c - '0'
                : c >= 'a' && c <= 'f' ? c - 'a' + 10
                : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                       : -1;
        if (d < 0)
            return false;
        *out = *out << 4 | (uint32_t)d;
    }
    return true;
}

/* The escape after a backslash, as a code point; refuses U+0000 and half a surrogate pair. */
static bool take_escape(reader *r, uint32_t *cp)
{
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    const char *at = r->p < r->end && *r->p ? strchr(names, *r->p) : NULL;
    uint32_t low;

    if (at) {
        *cp = (uint8_t)values[at - names];
        r->p++;
        return true;
    }
    if (r->end - r->p < 5 || *r->p != 'u' || !hex4(r->p + 1, cp) || !*cp)
        return false;
    r->p += 5;
    if (*cp < 0xD800 || *cp > 0xDFFF)
        return true;
    if (*cp > 0xDBFF || r->end - r->p < 6 || r->p[0] != '\\' || r->p[1] != 'u' ||
        !hex4(r->p + 2, &low) || low < 0xDC00 || low > 0xDFFF)
        return false;
    *cp = 0x10000 + ((*cp - 0xD800) << 10) + (low - 0xDC00);
    r->p += 6;
    return true;
}

/* Append a string to l->text; *len: its bytes. */
static bool take_string(reader *r, size_t *len)
{
    lm_buf *t = &r->l->text;
    size_t begin = t->len;

    if (!skip_mark(r, '"'))
        return false;
    for (;;) {
        const char *from = r->p;
        uint32_t cp;
        while (r->p < r->end && *r->p != '"' && *r->p != '\\' && (uint8_t)*r->p >= ' ')
            r->p++;
        r->rc = lm_buf_room(t, (size_t)(r->p - from) + 4, r->e);
        if (r->rc || r->p == r->end)
            return false;
        memcpy(t->data + t->len, from, (size_t)(r->p - from));
        t->len += (size_t)(r->p - from);
        char c = *r->p++;
        if (c == '"')
            break;
        if (c != '\\' || !take_escape(r, &cp))
            return false;
        t->len += lm_utf8_put(cp, t->data + t->len);
    }
    *len = t->len - begin;
    return true;
}

/* A whole number of at most 10 digits, as in JSON. */
static bool take_id(reader *r, int64_t *out)
{
    const char *from;

    skip_space(r);
    from = r->p;
    *out = 0;
    while (r->p < r->end && *r->p >= '0' && *r->p <= '9' && r->p - from < 11)
        *out = *out * 10 + (*r->p++ - '0');
    return r->p > from && r->p - from < 11 && (*from != '0' || r->p == from + 1);
}

static bool add_token(reader *r, size_t off, size_t len, int64_t id)
{
    lm_lists *l = r->l;

    r->rc = lm_grow(&l->tokens, &l->cap_tokens, l->n_tokens + 1, sizeof *l->tokens,
                    "the vocabulary", r->e);
    if (!r->rc)
        l->tokens[l->n_tokens++] = (lm_list_token){ off, len, id, 0 };
    return !r->rc;
}

static bool add_merge(reader *r, size_t off, size_t left, size_t right)
{
    lm_lists *l = r->l;

    r->rc =
        lm_grow(&l->merges, &l->cap_merges, l->n_merges + 1, sizeof *l->merges, "the merges", r->e);
    if (!r->rc)
        l->merges[l->n_merges++] = (lm_list_merge){ off, left, right };
    return !r->rc;
}

static bool read_vocab(reader *r)
{
    size_t len;
    int64_t id;

    if (!skip_mark(r, '{'))
        return false;
    do {
        size_t off = r->l->text.len;
        if (!take_string(r, &len) || !skip_mark(r, ':') || !take_id(r, &id) ||
            !add_token(r, off, len, id))
            return false;
    } while (skip_mark(r, ','));
    return skip_mark(r, '}');
}

/* "left right" at off: the space is removed. */
static bool split_merge(reader *r, size_t off, size_t len)
{
    char *s = r->l->text.data + off, *space = memchr(s, ' ', len);

    if (!space || memchr(space + 1, ' ', len - (size_t)(space + 1 - s)))
        return false;
    size_t left = (size_t)(space - s);
    memmove(space, space + 1, len - left - 1);
    r->l->text.len--;
    return add_merge(r, off, left, len - left - 1);
}

static bool read_merges(reader *r)
{
    size_t left, right;

    if (!skip_mark(r, '['))
        return false;
    if (skip_mark(r, ']'))
        return true;
    do {
        size_t off = r->l->text.len;
        if (skip_mark(r, '[')) {
            if (!take_string(r, &left) || !skip_mark(r, ',') || !take_string(r, &right) ||
                !skip_mark(r, ']') || !add_merge(r, off, left, right))
                return false;
        } else if (!take_string(r, &left) || !split_merge(r, off, left)) {
            return false;
        }
    } while (skip_mark(r, ','));
    return skip_mark(r, ']');
}

/* Skip a string whose opening quote has been read. */
static bool skip_string(reader *r)
{
    for (; r->p < r->end; r->p++) {
        if (*r->p == '\\' && r->p + 1 < r->end)
            r->p++;
        else if (*r->p == '"')
            return r->p++, true;
    }
    return false;
}

/* Skip any value without checking it: the parser checks it later. */
static bool skip_value(reader *r)
{
    int depth = 0;

    do {
        skip_space(r);
        if (r->p == r->end)
            return false;
        char c = *r->p++;
        if (c == '"' && !skip_string(r))
            return false;
        depth += c == '{' || c == '[' ? 1 : c == '}' || c == ']' ? -1 : 0;
        while (!depth && r->p < r->end && !strchr(",}] \n\r\t", *r->p) && c != '"' && c != '}' &&
               c != ']')
            r->p++;
    } while (depth > 0);
    return depth == 0;
}

static bool is_key(const char *key, const char *end, const char *name)
{
    return (size_t)(end - key) == strlen(name) && !memcmp(key, name, (size_t)(end - key));
}

/* Read the members of the object at r.  At the top, model is entered; in it, vocab and merges are
 * read and left out of *rest, to which everything else up to r->p is copied. */
static bool walk(reader *r, bool in_model, const char **done, lm_buf *rest, int *found)
{
    if (!skip_mark(r, '{'))
        return false;
    do {
        if (!skip_mark(r, '"'))
            return false;
        const char *key = r->p, *key_end;
        if (!skip_string(r))
            return false;
        key_end = r->p - 1;
        if (!skip_mark(r, ':'))
            return false;
        skip_space(r);
        bool vocab = in_model && is_key(key, key_end, "vocab");
        bool merges = in_model && is_key(key, key_end, "merges");
        if (vocab || merges) {
            r->rc = lm_buf_add(rest, *done, (size_t)(r->p - *done), r->e);
            if (!r->rc)
                r->rc = lm_buf_add(rest, vocab ? "{}" : "[]", 2, r->e);
            if (r->rc || !(vocab ? read_vocab(r) : read_merges(r)))
                return false;
            *done = r->p;
            *found += vocab ? 1 : 16;
        } else if (!in_model && is_key(key, key_end, "model")) {
            if (!walk(r, true, done, rest, found))
                return false;
        } else if (!skip_value(r)) {
            return false;
        }
    } while (skip_mark(r, ','));
    return skip_mark(r, '}');
}

lm_code lm_lists_cut(lm_lists *l, const char *json, size_t len, lm_buf *rest, bool *done, lm_err *e)
{
    reader r = { .p = json, .end = json + len, .l = l, .e = e };
    const char *upto = json;
    int found = 0;

    *done = false;
    if (lm_utf8_valid(json, len) == len && !memchr(json, 0, len) &&
        walk(&r, false, &upto, rest, &found) && (found == 1 || found == 17)) {
        r.rc = lm_buf_add(rest, upto, (size_t)(json + len - upto), e);
        *done = !r.rc;
    }
    if (!*done)
        lm_lists_fini(l);
    return r.rc;
}

/* [text, score], ... in the order of ids. */
static lm_code read_scored(reader *r, const json_t *vocab, const char *where)
{
    const json_t *v;
    size_t i;

    json_array_foreach(vocab, i, v)
    {
        const json_t *text = json_array_get(v, 0), *score = json_array_get(v, 1);
        size_t off = r->l->text.len, n = json_string_length(text);
        if (!json_is_string(text) || !json_is_number(score) || json_array_size(v) != 2)
            return lm_fail(r->e, LM_EFORMAT, where, NULL,
                           "entry %zu of the vocabulary is not [\"text\", score]", i);
        r->rc = lm_buf_add(&r->l->text, json_string_value(text), n, r->e);
        if (r->rc || !add_token(r, off, n, (int64_t)i))
            return r->rc;
        r->l->tokens[i].score = json_number_value(score);
    }
    return LM_OK;
}

lm_code lm_lists_from_tree(lm_lists *l, const json_t *vocab, const json_t *merges,
                           const char *where, lm_err *e)
{
    reader r = { .l = l, .e = e };
    const char *key;
    json_t *v;
    size_t i;

    if (json_is_array(vocab))
        return read_scored(&r, vocab, where);
    json_object_foreach((json_t *)vocab, key, v)
    {
        size_t off = l->text.len, n = strlen(key);
        r.rc = lm_buf_add(&l->text, key, n, e);
        if (r.rc || !add_token(&r, off, n, json_is_integer(v) ? json_integer_value(v) : -1))
            return r.rc;
    }
    json_array_foreach(merges, i, v)
    {
        const json_t *a = json_array_get(v, 0), *b = json_array_get(v, 1);
        bool pair = json_is_string(a) && json_is_string(b) && json_array_size(v) == 2, ok = pair;
        size_t off = l->text.len;
        const json_t *first = pair ? a : v;
        if (pair || json_is_string(v))
            r.rc = lm_buf_add(&l->text, json_string_value(first), json_string_length(first), e);
        if (pair && !r.rc)
            r.rc = lm_buf_add(&l->text, json_string_value(b), json_string_length(b), e);
        if (pair && !r.rc)
            add_merge(&r, off, json_string_length(a), json_string_length(b));
        else if (!r.rc && json_is_string(v))
            ok = split_merge(&r, off, json_string_length(v));
        if (r.rc)
            return r.rc;
        if (!ok)
            return lm_fail(e, LM_EFORMAT, where, NULL,
                           "merge %zu is neither [\"left\", \"right\"] nor \"left right\"", i);
    }
    return LM_OK;
}
