/* SPDX-License-Identifier: Apache-2.0 */
/* safetensors_scan.c -- reads a header in its usual form in one pass, without a JSON tree.
 *
 * A tree costs about ten allocations per tensor, which is most of the time for a header of a
 * million tensors.  The scan accepts a part of JSON: names without escapes, entries of exactly
 * dtype, shape and data_offsets in any order, integers.  At any other construct, and at every
 * error, it stops, and the tree parser reads the header or reports its fault. */
#include <string.h>

#include "base/json.h"
#include "base/text.h"
#include "format/safetensors_table.h"

typedef struct {
    const char *p, *end;
} cursor;

static void skip_space(cursor *c)
{
    while (c->p < c->end && (*c->p == ' ' || *c->p == '\n' || *c->p == '\t' || *c->p == '\r'))
        c->p++;
}

/* The next character, if it is `want`. */
static bool skip_mark(cursor *c, char want)
{
    skip_space(c);
    if (c->p == c->end || *c->p != want)
        return false;
    c->p++;
    return true;
}

/* Read a string without escapes to buf, NUL-terminated. */
static bool take_name(cursor *c, char *buf, size_t cap)
{
    const char *from;
    size_t n;

    if (!skip_mark(c, '"'))
        return false;
    from = c->p;
    while (c->p < c->end && *c->p != '"' && *c->p != '\\' && (unsigned char)*c->p >= ' ')
        c->p++;
    n = (size_t)(c->p - from);
    if (c->p == c->end || *c->p != '"' || n >= cap || lm_utf8_valid(from, n) != n)
        return false;
    memcpy(buf, from, n);
    buf[n] = '\0';
    c->p++;
    return true;
}

/* A whole number of at most 18 digits: it cannot overflow. */
static bool take_number(cursor *c, int64_t *out)
{
    const char *from;

    skip_space(c);
    from = c->p;
    *out = 0;
    while (c->p < c->end && *c->p >= '0' && *c->p <= '9' && c->p - from < 18)
        *out = *out * 10 + (*c->p++ - '0');
    return c->p > from && (*from != '0' || c->p == from + 1);
}

/* [n, n, ...]: at most `most` numbers; *n says how many. */
static bool take_numbers(cursor *c, int64_t *v, int most, int *n)
{
    *n = 0;
    if (!skip_mark(c, '['))
        return false;
    if (skip_mark(c, ']'))
        return true;
    do {
        if (*n == most || !take_number(c, &v[*n]))
            return false;
        ++*n;
    } while (skip_mark(c, ','));
    return skip_mark(c, ']');
}

/* {"dtype": ..., "shape": ..., "data_offsets": ...}, each once. */
static bool take_entry(cursor *c, lm_st_tensor *x, char dtype[32], int64_t offsets[2])
{
    enum { DTYPE = 1, SHAPE = 2, OFFSETS = 4 };
    char key[16];
    int seen = 0, n = 0;

    if (!skip_mark(c, '{'))
        return false;
    do {
        int now;
        if (!take_name(c, key, sizeof key) || !skip_mark(c, ':'))
            return false;
        if (!strcmp(key, "dtype") && take_name(c, dtype, 32))
            now = DTYPE;
        else if (!strcmp(key, "shape") && take_numbers(c, x->dim, LM_ST_MAX_DIMS, &x->ndim))
            now = SHAPE;
        else if (!strcmp(key, "data_offsets") && take_numbers(c, offsets, 2, &n) && n == 2)
            now = OFFSETS;
        else
            return false;
        if (seen & now)
            return false;
        seen |= now;
    } while (skip_mark(c, ','));
    return skip_mark(c, '}') && seen == (DTYPE | SHAPE | OFFSETS) && offsets[0] <= offsets[1];
}

/* Skip an object of any content; returns its begin and length. */
static bool take_object(cursor *c, const char **text, size_t *len)
{
    int depth = 0;
    bool quoted = false;

    skip_space(c);
    *text = c->p;
    if (c->p == c->end || *c->p != '{')
        return false;
    for (; c->p < c->end; c->p++) {
        char x = *c->p;
        if (quoted) {
            c->p += x == '\\' && c->p + 1 < c->end;
            quoted = x != '"';
        } else if (x == '"') {
            quoted = true;
        } else if (x == '{' || x == '[') {
            depth++;
        } else if ((x == '}' || x == ']') && !--depth) {
            *len = (size_t)(++c->p - *text);
            return true;
        }
    }
    return false;
}

static bool take_member(lm_st_table *t, cursor *c, bool *meta)
{
    lm_st_tensor x = { 0 };
    lm_err ignored = { 0 };
    char name[512], dtype[32];
    int64_t offsets[2];
    const char *text;
    size_t len;

    if (!take_name(c, name, sizeof name) || !skip_mark(c, ':'))
        return false;
    if (!strcmp(name, "__metadata__")) {
        if (*meta || !take_object(c, &text, &len))
            return false;
        *meta = true;
        return !lm_st_table_read_meta(t, text, len, "", &ignored);
    }
    if (!take_entry(c, &x, dtype, offsets))
        return false;
    x.name = name;
    x.dtype_name = dtype;
    x.offset = (uint64_t)offsets[0];
    if (lm_st_table_add(t, &x, "", LM_EFORMAT, &ignored))
        return false;
    return t->tensor[t->n - 1].bytes == (uint64_t)(offsets[1] - offsets[0]);
}

bool lm_st_table_scan(lm_st_table *t, const char *text, size_t len)
{
    cursor c = { text, text + len };
    bool meta = false, good = skip_mark(&c, '{');

    if (good && !skip_mark(&c, '}')) {
        do
            good = take_member(t, &c, &meta);
        while (good && skip_mark(&c, ','));
        good = good && skip_mark(&c, '}');
    }
    skip_space(&c);
    if (good && c.p == c.end)
        return true;
    lm_st_table_fini(t);
    return false;
}
