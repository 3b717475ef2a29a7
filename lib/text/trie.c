/* SPDX-License-Identifier: Apache-2.0 */
/* Building the trie of trie.h from sorted strings, parents before children.
 *
 * Free cells form a list.  A node with one child, the usual case, takes the first free cell.  A
 * node with several tries the last free cells, which lie in the emptiest blocks, and then appends a
 * block of 256 cells, where any set of children fits: the time of a node is bounded. */
#include "text/trie.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

enum { BLOCK = 256, MOST_TRIES = 64 };
#define FREE (UINT32_MAX - 1) /* as a parent: the cell is free */

typedef struct {
    size_t lo, hi, depth; /* the strings below a node share their first `depth` bytes */
    uint32_t node;
} range;

typedef struct {
    lm_trie *t;
    const lm_trie_string *v;
    size_t cap;
    uint32_t *next, *prev; /* of the list of free cells */
    size_t cap_next, cap_prev;
    uint32_t first, last; /* LM_TRIE_NONE: no free cell */
    range *stack;
    size_t n_stack, cap_stack;
    lm_err *e;
} builder;

static lm_code add_block(builder *b)
{
    size_t n = b->t->n;
    lm_code rc =
        n + BLOCK >= FREE
            ? lm_fail(b->e, LM_ELIMIT, "the vocabulary", NULL, "it is too large")
            : lm_grow(&b->t->cell, &b->cap, n + BLOCK, sizeof *b->t->cell, "the vocabulary", b->e);

    if (!rc)
        rc = lm_grow(&b->next, &b->cap_next, n + BLOCK, sizeof *b->next, "the vocabulary", b->e);
    if (!rc)
        rc = lm_grow(&b->prev, &b->cap_prev, n + BLOCK, sizeof *b->prev, "the vocabulary", b->e);
    if (rc)
        return rc;
    for (size_t i = n; i < n + BLOCK; i++) {
        b->t->cell[i].base = 0;
        b->t->cell[i].parent = FREE;
        b->t->cell[i].id = LM_TRIE_NONE;
        b->prev[i] = i == n ? b->last : (uint32_t)i - 1;
        b->next[i] = i + 1 == n + BLOCK ? LM_TRIE_NONE : (uint32_t)i + 1;
    }
    if (b->last == LM_TRIE_NONE)
        b->first = (uint32_t)n;
    else
        b->next[b->last] = (uint32_t)n;
    b->last = (uint32_t)(n + BLOCK - 1);
    b->t->n += BLOCK;
    return LM_OK;
}

static void take_cell(builder *b, uint32_t i, uint32_t parent)
{
    uint32_t p = b->prev[i], n = b->next[i];

    b->t->cell[i].parent = parent;
    if (p == LM_TRIE_NONE)
        b->first = n;
    else
        b->next[p] = n;
    if (n == LM_TRIE_NONE)
        b->last = p;
    else
        b->prev[n] = p;
}

static bool fits(const builder *b, uint32_t base, const uint8_t *bytes, size_t k)
{
    for (size_t i = 0; i < k; i++)
        if (b->t->cell[base ^ bytes[i]].parent != FREE)
            return false;
    return true;
}

/* The base of a node with children for bytes[0..k). */
static lm_code find_base(builder *b, const uint8_t *bytes, size_t k, uint32_t *base)
{
    uint32_t at = k == 1 ? b->first : b->last;
    lm_code rc;

    for (int i = 0; i < MOST_TRIES && at != LM_TRIE_NONE; i++, at = b->prev[at]) {
        *base = at ^ bytes[0];
        if (fits(b, *base, bytes, k))
            return LM_OK;
    }
    *base = (uint32_t)b->t->n;
    rc = add_block(b);
    return rc;
}

static lm_code push(builder *b, range r)
{
    lm_code rc =
        lm_grow(&b->stack, &b->cap_stack, b->n_stack + 1, sizeof r, "the vocabulary", b->e);

    if (!rc)
        b->stack[b->n_stack++] = r;
    return rc;
}

/* Give a node its id and its children. */
static lm_code expand(builder *b, range r)
{
    uint8_t bytes[256];
    size_t begin[257], k = 0;
    uint32_t base = 0;
    lm_code rc;

    for (; r.lo < r.hi && b->v[r.lo].len == r.depth; r.lo++)
        if (r.depth)
            b->t->cell[r.node].id = b->v[r.lo].id; /* the highest of equal strings is the last */
    for (size_t i = r.lo; i < r.hi; i++) {
        uint8_t c = (uint8_t)b->v[i].text[r.depth];
        if (!k || bytes[k - 1] != c) {
            bytes[k] = c;
            begin[k++] = i;
        }
    }
    begin[k] = r.hi;
    if (!k)
        return LM_OK;
    rc = find_base(b, bytes, k, &base);
    if (!rc)
        b->t->cell[r.node].base = base;
    for (size_t i = 0; i < k && !rc; i++) {
        take_cell(b, base ^ bytes[i], r.node);
        rc = push(b, (range){ begin[i], begin[i + 1], r.depth + 1, base ^ bytes[i] });
    }
    return rc;
}

static int by_text(const void *a, const void *b)
{
    const lm_trie_string *x = a, *y = b;
    int c = memcmp(x->text, y->text, x->len < y->len ? x->len : y->len);

    if (c)
        return c;
    if (x->len != y->len)
        return x->len < y->len ? -1 : 1;
    return (x->id > y->id) - (x->id < y->id);
}

lm_code lm_trie_build(lm_trie *t, lm_trie_string *v, size_t n, const char *where, lm_err *e)
{
    builder b = { .t = t, .v = v, .first = LM_TRIE_NONE, .last = LM_TRIE_NONE, .e = e };
    lm_code rc;

    for (size_t i = 0; i < n; i++)
        if (v[i].len > LM_TRIE_LONGEST)
            return lm_fail(e, LM_EFORMAT, where, NULL, "token %u has %u bytes, more than %d",
                           v[i].id, v[i].len, LM_TRIE_LONGEST);
    if (n)
        qsort(v, n, sizeof *v, by_text);
    rc = add_block(&b);
    if (!rc) {
        take_cell(&b, LM_TRIE_ROOT, LM_TRIE_NONE);
        rc = push(&b, (range){ 0, n, 0, LM_TRIE_ROOT });
    }
    while (!rc && b.n_stack)
        rc = expand(&b, b.stack[--b.n_stack]);
    lm_free(b.next);
    lm_free(b.prev);
    lm_free(b.stack);
    if (rc)
        lm_trie_fini(t);
    return rc;
}

void lm_trie_fini(lm_trie *t)
{
    lm_free(t->cell);
    memset(t, 0, sizeof *t);
}
