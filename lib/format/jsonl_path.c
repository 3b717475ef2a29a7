/* SPDX-License-Identifier: Apache-2.0 */
/* jsonl_path.c -- strings inside of objects of a line of JSON, and the names of all of them; see jsonl.h. */
#include <string.h>

#include "format/jsonl.h"

enum { PART_MAX = 256, NAMES_MOST = 8 };

/* The value under field[0..n) in the object line[from..to); false if there is none, or more than one. */
static bool find_member(const char *line, size_t from, size_t to, const char *field, size_t n,
                        lm_jsonl_member *out)
{
    char name[PART_MAX];
    lm_jsonl_member m;
    size_t at = 0;
    int found = 0;
    if (n >= sizeof name)
        return false;
    memcpy(name, field, n);
    name[n] = 0;
    while (lm_jsonl_next(line + from, to - from, &at, &m))
        if (lm_jsonl_is(line + from + m.key, m.key_end - m.key, name)) {
            *out = m;
            out->value += from;
            out->value_end += from;
            found++;
        }
    return found == 1;
}

lm_jsonl_fault lm_jsonl_find_path(const char *line, size_t len, const char *field, size_t *begin,
                                  size_t *end)
{
    lm_jsonl_fault f = lm_jsonl_find(line, len, field, begin, end);
    size_t from = 0, to = len;
    lm_jsonl_member m;
    if (!f.what || f.kind != LM_JSONL_ABSENT || !strchr(field, '.'))
        return f;
    for (;;) {
        size_t part = strcspn(field, ".");
        if (!find_member(line, from, to, field, part, &m))
            return f;
        field += part;
        if (!*field)
            break;
        field++;
        from = m.value;
        to = m.value_end;
        if (line[from] != '{')
            return f;
    }
    if (line[m.value] != '"')
        return (lm_jsonl_fault){ .what = "the field is not a string",
                                 .at = m.value,
                                 .kind = LM_JSONL_NO_STRING };
    *begin = m.value;
    *end = m.value_end;
    return (lm_jsonl_fault){ 0 };
}

typedef struct {
    lm_buf *out;
    const char *in; /* the key of the object being searched, without its quotes */
    size_t in_len;
    bool all; /* not only strings */
    int n;
} naming;

static lm_code add_name(naming *g, const char *key, size_t len, lm_err *e)
{
    if (g->n >= NAMES_MOST)
        return g->n++ == NAMES_MOST ? lm_buf_addf(g->out, e, ", ...") : LM_OK;
    return lm_buf_addf(g->out, e, "%s'%.*s%s%.*s'", g->n++ ? ", " : "", (int)g->in_len,
                       g->in ? g->in : "", g->in ? "." : "", (int)len, key);
}

static lm_code name_members(naming *g, const char *object, size_t len, lm_err *e)
{
    lm_jsonl_member m;
    size_t at = 0;
    lm_code rc = LM_OK;
    while (!rc && lm_jsonl_next(object, len, &at, &m)) {
        const char *key = object + m.key + 1;
        size_t n = m.key_end - m.key - 2;
        if (object[m.value] == '"' || g->all) {
            rc = add_name(g, key, n, e);
        } else if (object[m.value] == '{' && !g->in) {
            g->in = key;
            g->in_len = n;
            rc = name_members(g, object + m.value, m.value_end - m.value, e);
            g->in = NULL;
            g->in_len = 0;
        }
    }
    return rc;
}

lm_code lm_jsonl_names(const char *line, size_t len, lm_buf *out, lm_err *e)
{
    naming g = { .out = out };
    lm_code rc = name_members(&g, line, len, e);
    if (rc || g.n)
        return rc;
    g.all = true;
    return name_members(&g, line, len, e);
}
