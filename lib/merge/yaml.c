/* SPDX-License-Identifier: Apache-2.0 */
/* yaml.c -- builds a tree from libyaml's events, within limits. */
#include "merge/yaml.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

#include "base/text.h"

/* A node with the size of its expansion. */
typedef struct {
    lm_yaml y;
    size_t nodes; /* number of nodes with aliases expanded */
    int height;   /* levels, 1 for a scalar */
} node;

typedef struct {
    const char *name;
    const node *what;
} anchor;

typedef struct {
    yaml_parser_t p;
    lm_arena *arena;
    const char *where;
    anchor *known;
    size_t n_known, cap_known, nodes;
    lm_err *err;
} reader;

/* Items of a collection while it is read. */
typedef struct {
    const lm_yaml **item;
    const char **key;
    int *line;
    size_t n, cap_item, cap_key, cap_line;
} items;

static int line_of(const yaml_event_t *ev)
{
    return (int)(ev->start_mark.line < 1000000000 ? ev->start_mark.line + 1 : 0);
}

static lm_code bad(const reader *r, int line, const char *todo, const char *what)
{
    return lm_fail(r->err, LM_EUSAGE, r->where, todo, "line %d: %s", line, what);
}

static lm_code too_large(const reader *r, int line)
{
    return lm_fail(r->err, LM_EUSAGE, r->where, "write a smaller file, with fewer aliases",
                   "line %d: more than %d nodes after expansion of aliases", line,
                   LM_YAML_MAX_NODES);
}

static lm_code next_event(reader *r, yaml_event_t *ev)
{
    if (yaml_parser_parse(&r->p, ev))
        return LM_OK;
    if (r->p.error == YAML_MEMORY_ERROR)
        return lm_fail(r->err, LM_ELIMIT, r->where, NULL, "no memory to parse YAML");
    return lm_fail(r->err, LM_EUSAGE, r->where, NULL, "line %zu: not YAML: %s",
                   r->p.problem_mark.line + 1, r->p.problem ? r->p.problem : "unreadable");
}

static lm_code new_node(reader *r, lm_yaml_kind kind, int line, node **out)
{
    lm_code rc = lm_arena_alloc(r->arena, out, 1, sizeof **out, r->err);

    if (!rc) {
        (*out)->y.kind = kind;
        (*out)->y.line = line;
        (*out)->nodes = 1;
        (*out)->height = 1;
    }
    return rc;
}

static lm_code remember(reader *r, const yaml_char_t *name, const node *what)
{
    char *copy = NULL;
    lm_code rc;

    if (!name)
        return LM_OK;
    rc = lm_arena_strdup(r->arena, &copy, (const char *)name, strlen((const char *)name), r->err);
    if (!rc)
        rc = lm_grow(&r->known, &r->cap_known, r->n_known + 1, sizeof *r->known, "YAML anchors",
                     r->err);
    if (!rc)
        r->known[r->n_known++] = (anchor){ copy, what };
    return rc;
}

static lm_code alias(reader *r, const yaml_event_t *ev, int depth, const node **out)
{
    const char *name = (const char *)ev->data.alias.anchor;

    for (size_t i = r->n_known; i-- > 0;) { /* the last definition holds */
        if (strcmp(r->known[i].name, name) != 0)
            continue;
        *out = r->known[i].what;
        r->nodes += (*out)->nodes;
        if (r->nodes > LM_YAML_MAX_NODES)
            return too_large(r, line_of(ev));
        if (depth + (*out)->height > LM_YAML_MAX_DEPTH)
            return bad(r, line_of(ev), NULL, "nested too deeply");
        return LM_OK;
    }
    return lm_fail(r->err, LM_EUSAGE, r->where, NULL, "line %d: alias '%.60s' has no anchor before",
                   line_of(ev), name);
}

static lm_code scalar(reader *r, const yaml_event_t *ev, node **out)
{
    const char *text = (const char *)ev->data.scalar.value;
    size_t len = ev->data.scalar.length;
    char *copy = NULL;
    lm_code rc = new_node(r, LM_YAML_SCALAR, line_of(ev), out);

    if (!rc && memchr(text, 0, len))
        rc = bad(r, line_of(ev), NULL, "a string holds a NUL byte");
    if (!rc)
        rc = lm_arena_strdup(r->arena, &copy, text, len, r->err);
    if (rc)
        return rc;
    (*out)->y.text = copy;
    (*out)->y.plain = ev->data.scalar.style == YAML_PLAIN_SCALAR_STYLE;
    return LM_OK;
}

static lm_code read_node(reader *r, yaml_event_t *ev, int depth, const node **out);

/* Name the next item. */
static lm_code name_item(reader *r, const char *key, int line, items *x)
{
    lm_code rc = lm_grow(&x->key, &x->cap_key, x->n + 1, sizeof *x->key, "YAML keys", r->err);

    if (!rc)
        rc = lm_grow(&x->line, &x->cap_line, x->n + 1, sizeof *x->line, "YAML keys", r->err);
    if (!rc) {
        x->key[x->n] = key;
        x->line[x->n] = line;
    }
    return rc;
}

/* A plain "<<": its value is a mapping, or a list of them, whose pairs are inserted. */
static bool is_merge_key(const yaml_event_t *ev)
{
    return ev->type == YAML_SCALAR_EVENT && ev->data.scalar.style == YAML_PLAIN_SCALAR_STYLE &&
           !strcmp((const char *)ev->data.scalar.value, "<<");
}

/* Check the key in ev: a string that is not a duplicate. */
static lm_code add_key(reader *r, const yaml_event_t *ev, items *x)
{
    char *copy = NULL;
    const char *key = (const char *)ev->data.scalar.value;
    size_t len = ev->data.scalar.length;
    lm_code rc;

    if (ev->type != YAML_SCALAR_EVENT || memchr(key, 0, len))
        return bad(r, line_of(ev), NULL, "a key must be a plain string");
    for (size_t i = 0; i < x->n; i++)
        if (!strcmp(x->key[i], key))
            return lm_fail(r->err, LM_EUSAGE, r->where, NULL,
                           "line %d: key '%.60s' exists already, in line %d", line_of(ev), key,
                           x->line[i]);
    if (++r->nodes > LM_YAML_MAX_NODES)
        return too_large(r, line_of(ev));
    rc = lm_arena_strdup(r->arena, &copy, key, len, r->err);
    return rc ? rc : name_item(r, copy, line_of(ev), x);
}

/* Append an item, with the size of its expansion; a pair if `map`. */
static lm_code add_item(reader *r, const node *child, bool map, items *x, node *out)
{
    lm_code rc = lm_grow(&x->item, &x->cap_item, x->n + 1, sizeof *x->item, "YAML nodes", r->err);

    if (rc)
        return rc;
    x->item[x->n++] = &child->y;
    out->nodes += child->nodes + map;
    if (out->height <= child->height)
        out->height = child->height + 1;
    return LM_OK;
}

/* Insert the pairs of `from` whose keys are missing. */
static lm_code take_pairs(reader *r, const lm_yaml *from, int line, items *x, node *out)
{
    lm_code rc = LM_OK;

    if (from->kind != LM_YAML_MAP)
        return bad(r, line, NULL, "the value of '<<' is a mapping, or a list of mappings");
    for (size_t i = 0; !rc && i < from->n; i++) {
        const node *child = (const node *)(const void *)from->item[i]; /* every lm_yaml is in one */
        bool there = false;

        for (size_t k = 0; k < x->n && !there; k++)
            there = !strcmp(x->key[k], from->key[i]);
        if (there)
            continue;
        r->nodes += child->nodes + 1;
        if (r->nodes > LM_YAML_MAX_NODES)
            return too_large(r, line);
        rc = name_item(r, from->key[i], from->key_line[i], x);
        if (!rc)
            rc = add_item(r, child, true, x, out);
    }
    return rc;
}

/* Insert the value of "<<" after all other keys, which take precedence; in a list the first one
 * does. */
static lm_code merge_pairs(reader *r, const node *from, int line, items *x, node *out)
{
    lm_code rc = LM_OK;

    if (!from)
        return LM_OK;
    if (from->y.kind != LM_YAML_LIST)
        return take_pairs(r, &from->y, line, x, out);
    for (size_t i = 0; !rc && i < from->y.n; i++)
        rc = take_pairs(r, from->y.item[i], line, x, out);
    return rc;
}

static lm_code keep(reader *r, const items *x, node *c)
{
    const lm_yaml **item = NULL;
    const char **key = NULL;
    int *line = NULL;
    lm_code rc = lm_arena_alloc(r->arena, &item, x->n, sizeof *item, r->err);

    if (!rc && c->y.kind == LM_YAML_MAP)
        rc = lm_arena_alloc(r->arena, &key, x->n, sizeof *key, r->err);
    if (!rc && c->y.kind == LM_YAML_MAP)
        rc = lm_arena_alloc(r->arena, &line, x->n, sizeof *line, r->err);
    for (size_t i = 0; !rc && i < x->n; i++) {
        item[i] = x->item[i];
        if (key) {
            key[i] = x->key[i];
            line[i] = x->line[i];
        }
    }
    c->y.n = x->n;
    c->y.item = item;
    c->y.key = key;
    c->y.key_line = line;
    return rc;
}

/* Read the key in ev, which is consumed, and the next event; *merge: it is "<<". */
static lm_code read_key(reader *r, yaml_event_t *ev, items *x, bool *merge)
{
    lm_code rc;

    *merge = is_merge_key(ev);
    rc = *merge ? LM_OK : add_key(r, ev, x);
    yaml_event_delete(ev);
    return rc ? rc : next_event(r, ev);
}

/* A list or map; ev is its start. */
static lm_code collection(reader *r, const yaml_event_t *start, int depth, node **out)
{
    bool map = start->type == YAML_MAPPING_START_EVENT, merge = false;
    const node *merged = NULL;
    int merge_line = 0;
    items x = { 0 };
    lm_code rc = new_node(r, map ? LM_YAML_MAP : LM_YAML_LIST, line_of(start), out);

    while (!rc) {
        yaml_event_t ev;
        const node *child = NULL;

        if ((rc = next_event(r, &ev)))
            break;
        if (ev.type == YAML_SEQUENCE_END_EVENT || ev.type == YAML_MAPPING_END_EVENT) {
            yaml_event_delete(&ev);
            break;
        }
        if (map && (rc = read_key(r, &ev, &x, &merge)))
            break;
        if (merge && !merged)
            merge_line = line_of(&ev);
        rc = read_node(r, &ev, depth + 1, &child);
        if (!rc && merge && merged)
            rc = bad(r, merge_line, "give '<<' a list", "'<<' occurs twice");
        else if (!rc && merge)
            merged = child;
        else if (!rc)
            rc = add_item(r, child, map, &x, *out);
    }
    if (!rc)
        rc = merge_pairs(r, merged, merge_line, &x, *out);
    if (!rc)
        rc = keep(r, &x, *out);
    lm_free(x.item);
    lm_free(x.key);
    lm_free(x.line);
    return rc;
}

/* Read the node that begins with ev, which is consumed. */
static lm_code read_node(reader *r, yaml_event_t *ev, int depth, const node **out)
{
    node *made = NULL;
    const yaml_char_t *name = NULL, *tag = NULL;
    lm_code rc = LM_OK;

    if (depth >= LM_YAML_MAX_DEPTH)
        rc = bad(r, line_of(ev), NULL, "nested too deeply");
    else if (ev->type != YAML_ALIAS_EVENT && ++r->nodes > LM_YAML_MAX_NODES)
        rc = too_large(r, line_of(ev));
    if (!rc && ev->type == YAML_ALIAS_EVENT)
        rc = alias(r, ev, depth, out);
    else if (!rc && ev->type == YAML_SCALAR_EVENT) {
        name = ev->data.scalar.anchor;
        tag = ev->data.scalar.tag;
        rc = scalar(r, ev, &made);
    } else if (!rc && ev->type == YAML_SEQUENCE_START_EVENT) {
        name = ev->data.sequence_start.anchor;
        tag = ev->data.sequence_start.tag;
        rc = collection(r, ev, depth, &made);
    } else if (!rc && ev->type == YAML_MAPPING_START_EVENT) {
        name = ev->data.mapping_start.anchor;
        tag = ev->data.mapping_start.tag;
        rc = collection(r, ev, depth, &made);
    } else if (!rc) {
        rc = bad(r, line_of(ev), NULL, "a value is missing");
    }
    if (!rc && tag)
        rc = bad(r, line_of(ev), "leave the tag out", "tags ('!...') are not supported");
    if (!rc && made) {
        rc = remember(r, name, made);
        *out = made;
    }
    yaml_event_delete(ev);
    return rc;
}

/* Read the next event, which has `type` in a valid stream. */
static lm_code skip(reader *r, yaml_event_type_t type, bool *other)
{
    yaml_event_t ev;
    lm_code rc = next_event(r, &ev);

    if (rc)
        return rc;
    *other = ev.type != type;
    if (*other && ev.type == YAML_DOCUMENT_START_EVENT)
        rc = bad(r, line_of(&ev), NULL, "a second document begins");
    yaml_event_delete(&ev);
    return rc;
}

static lm_code empty(reader *r, const node **root)
{
    node *made = NULL;
    lm_code rc = new_node(r, LM_YAML_SCALAR, 1, &made);

    if (!rc) {
        made->y.text = "";
        made->y.plain = true;
    }
    *root = made;
    return rc;
}

static lm_code read_stream(reader *r, const node **root)
{
    yaml_event_t ev;
    bool other = false;
    lm_code rc = skip(r, YAML_STREAM_START_EVENT, &other);

    if (!rc)
        rc = skip(r, YAML_DOCUMENT_START_EVENT, &other);
    if (!rc && other) /* the stream ended */
        return empty(r, root);
    if (!rc)
        rc = next_event(r, &ev);
    if (!rc)
        rc = read_node(r, &ev, 0, root);
    if (!rc)
        rc = skip(r, YAML_DOCUMENT_END_EVENT, &other);
    if (!rc)
        rc = skip(r, YAML_STREAM_END_EVENT, &other);
    return rc;
}

lm_code lm_yaml_parse(const char *text, size_t len, const char *where, lm_arena *a,
                      const lm_yaml **out, lm_err *e)
{
    reader r = { .arena = a, .where = where, .err = e };
    const node *root = NULL;
    lm_code rc;

    *out = NULL;
    if (len > LM_YAML_MAX_BYTES)
        return lm_fail(e, LM_EUSAGE, where, NULL, "%zu bytes are too many for a configuration",
                       len);
    if (!yaml_parser_initialize(&r.p))
        return lm_fail(e, LM_ELIMIT, where, NULL, "no memory to parse YAML");
    yaml_parser_set_input_string(&r.p, (const unsigned char *)text, len);
    rc = read_stream(&r, &root);
    yaml_parser_delete(&r.p);
    lm_free(r.known);
    if (!rc)
        *out = &root->y;
    return rc;
}

const lm_yaml *lm_yaml_get(const lm_yaml *map, const char *key)
{
    for (size_t i = 0; map && map->kind == LM_YAML_MAP && i < map->n; i++)
        if (!strcmp(map->key[i], key))
            return map->item[i];
    return NULL;
}

const lm_yaml *lm_yaml_given(const lm_yaml *map, const char *key)
{
    const lm_yaml *y = lm_yaml_get(map, key);

    return lm_yaml_is_null(y) ? NULL : y;
}

lm_code lm_yaml_wrong(const lm_yaml *y, const char *where, const char *key, const char *need,
                      lm_err *e)
{
    return lm_fail(e, LM_EUSAGE, where, NULL, "line %d: %s: %s is needed", y->line, key, need);
}

lm_code lm_yaml_check_keys(const lm_yaml *y, const char *where, const char *what,
                           const char *const *known, lm_err *e)
{
    if (y->kind != LM_YAML_MAP)
        return lm_yaml_wrong(y, where, what, "a mapping of keys to values", e);
    for (size_t i = 0; i < y->n; i++) {
        const char *near;
        char todo[160];
        size_t used;
        bool there = !strncmp(y->key[i], "x-", 2);

        for (const char *const *k = known; *k && !there; k++)
            there = !strcmp(*k, y->key[i]);
        if (there)
            continue;
        near = lm_nearest(y->key[i], known);
        used = (size_t)snprintf(todo, sizeof todo, near ? "did you mean '%s'?" : "%s",
                                near ? near : "choose from");
        for (const char *const *k = known; !near && *k && used < sizeof todo; k++)
            used += (size_t)snprintf(todo + used, sizeof todo - used, "%s %s",
                                     k == known ? "" : ",", *k);
        return lm_fail(e, LM_EUSAGE, where, todo, "line %d: unknown key '%.60s' in %s",
                       y->key_line[i], y->key[i], what);
    }
    return LM_OK;
}

/* A plain scalar that is one of the NULL-terminated words. */
static bool is_word(const lm_yaml *y, const char *const *words)
{
    for (; y->kind == LM_YAML_SCALAR && y->plain && *words; words++)
        if (!strcmp(y->text, *words))
            return true;
    return false;
}

bool lm_yaml_is_null(const lm_yaml *y)
{
    static const char *const words[] = { "", "~", "null", "Null", "NULL", NULL };

    return !y || is_word(y, words);
}

bool lm_yaml_truth(const lm_yaml *y, bool *out)
{
    static const char *const yes[] = { "true", "True", "TRUE", "yes", "Yes",
                                       "YES",  "on",   "On",   "ON",  NULL };
    static const char *const no[] = { "false", "False", "FALSE", "no",  "No",
                                      "NO",    "off",   "Off",   "OFF", NULL };

    *out = is_word(y, yes);
    return *out || is_word(y, no);
}

bool lm_yaml_number(const lm_yaml *y, double *out)
{
    return y->kind == LM_YAML_SCALAR && y->text[0] && lm_parse_double(y->text, out) &&
           isfinite(*out);
}

bool lm_yaml_integer(const lm_yaml *y, int64_t *out)
{
    double d;

    if (!lm_yaml_number(y, &d) || d != floor(d) || fabs(d) > 9e15)
        return false;
    *out = (int64_t)d;
    return true;
}
