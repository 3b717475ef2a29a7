/* SPDX-License-Identifier: Apache-2.0 */
/* pack.c -- best-fit decreasing; see pack.h. */
#include "train/pack.h"

#include <inttypes.h>

#include "base/mem.h"
#include "base/text.h"

/* Open windows by their room: a queue for each room 1..size, and a tree over rooms whose nodes count
 * the windows below them; leaf of room r: leaves + r. */
typedef struct {
    int64_t size, leaves, windows;
    int64_t *tree;        /* [2 leaves] */
    int64_t *head, *tail; /* [size + 1] windows; -1: none */
    int64_t *next;        /* [items] of each window */
} rooms;

static void fini_rooms(rooms *r)
{
    lm_free(r->tree);
    lm_free(r->head);
    lm_free(r->tail);
    lm_free(r->next);
}

static lm_code init_rooms(rooms *r, int64_t size, int64_t items, lm_err *e)
{
    *r = (rooms){ .size = size, .leaves = 1 };
    while (r->leaves < size + 1)
        r->leaves *= 2;
    if (lm_alloc_n(&r->tree, 2 * (size_t)r->leaves, sizeof *r->tree, "packing", e) ||
        lm_alloc_n(&r->head, (size_t)size + 1, sizeof *r->head, "packing", e) ||
        lm_alloc_n(&r->tail, (size_t)size + 1, sizeof *r->tail, "packing", e) ||
        lm_alloc_n(&r->next, (size_t)items, sizeof *r->next, "packing", e)) {
        fini_rooms(r);
        return e->code;
    }
    for (int64_t i = 0; i <= size; i++)
        r->head[i] = r->tail[i] = -1;
    return LM_OK;
}

static void count(rooms *r, int64_t room, int64_t change)
{
    for (int64_t i = r->leaves + room; i; i /= 2)
        r->tree[i] += change;
}

static void add_window(rooms *r, int64_t window, int64_t room)
{
    if (!room)
        return;
    r->next[window] = -1;
    if (r->tail[room] >= 0)
        r->next[r->tail[room]] = window;
    else
        r->head[room] = window;
    r->tail[room] = window;
    count(r, room, 1);
}

/* The least room of at least `need` that a window has; -1: none. */
static int64_t best_room(const rooms *r, int64_t need)
{
    int64_t i = r->leaves + need;
    if (r->tree[i])
        return need;
    while (i > 1 && (i & 1 || !r->tree[i + 1]))
        i /= 2;
    if (i <= 1)
        return -1;
    for (i++; i < r->leaves;)
        i = r->tree[2 * i] ? 2 * i : 2 * i + 1;
    return i - r->leaves;
}

/* The window for the next item, whose room shrinks by it. */
static int64_t place(rooms *r, int64_t length)
{
    int64_t room = best_room(r, length), w;
    if (room < 0) {
        room = r->size;
        w = r->windows++;
    } else {
        w = r->head[room];
        r->head[room] = r->next[w];
        if (r->head[room] < 0)
            r->tail[room] = -1;
        count(r, room, -1);
    }
    add_window(r, w, room - length);
    return w;
}

/* Items by falling length, equal ones in their order; those of length 0 are left out.  *n_out: how
 * many remain. */
static lm_code sort_items(const int64_t *length, int64_t n, int64_t size, int64_t *out,
                          int64_t *n_out, lm_err *e)
{
    int64_t *at = NULL; /* where the next item of this length goes */
    if (lm_alloc_n(&at, (size_t)size + 2, sizeof *at, "packing", e))
        return e->code;
    for (int64_t i = 0; i < n; i++)
        at[length[i]]++;
    int64_t sum = 0;
    for (int64_t s = size; s > 0; s--) {
        int64_t k = at[s];
        at[s] = sum;
        sum += k;
    }
    for (int64_t i = 0; i < n; i++)
        if (length[i])
            out[at[length[i]]++] = i;
    *n_out = sum;
    lm_free(at);
    return LM_OK;
}

static lm_code check(const int64_t *length, int64_t n, int64_t size, lm_err *e)
{
    for (int64_t i = 0; i < n; i++)
        if (length[i] < 0 || length[i] > size)
            return lm_fail(e, LM_EUSAGE, "packing", "cut it, or use longer windows",
                           "an example of %" PRId64 " token%s does not fit a window of %" PRId64,
                           length[i], lm_plural((uint64_t)length[i]), size);
    return LM_OK;
}

/* One item a window, in their order. */
static void keep_apart(const int64_t *length, int64_t n, lm_packing *p)
{
    for (int64_t i = 0; i < n; i++) {
        if (!length[i])
            continue;
        p->start[p->windows] = p->windows;
        p->item[p->windows++] = i;
        p->used += length[i];
    }
    p->start[p->windows] = p->windows;
}

/* Items in the order of placement, their windows in where[]: lists by window. */
static void list_items(const int64_t *order, const int64_t *where, int64_t n, lm_packing *p)
{
    for (int64_t i = 0; i < n; i++)
        p->start[where[i] + 1]++;
    for (int64_t w = 0; w < p->windows; w++)
        p->start[w + 1] += p->start[w];
    /* start[w] moves to the end of w while it is filled: the start of w + 1 */
    for (int64_t i = 0; i < n; i++)
        p->item[p->start[where[i]]++] = order[i];
    for (int64_t w = p->windows; w > 0; w--)
        p->start[w] = p->start[w - 1];
    p->start[0] = 0;
}

static lm_code join_items(const int64_t *length, int64_t n, int64_t size, lm_packing *p, lm_err *e)
{
    int64_t *order = NULL, *where = NULL, m = 0;
    rooms r = { 0 };
    lm_code rc = lm_alloc_n(&order, (size_t)n, sizeof *order, "packing", e);
    rc = rc ? rc : lm_alloc_n(&where, (size_t)n, sizeof *where, "packing", e);
    rc = rc ? rc : sort_items(length, n, size, order, &m, e);
    rc = rc ? rc : init_rooms(&r, size, m, e);
    for (int64_t i = 0; i < m && !rc; i++) {
        where[i] = place(&r, length[order[i]]);
        p->used += length[order[i]];
    }
    p->windows = r.windows;
    if (!rc)
        list_items(order, where, m, p);
    fini_rooms(&r);
    lm_free(order);
    lm_free(where);
    return rc;
}

lm_code lm_pack_make(const int64_t *length, int64_t n, int64_t size, bool join, lm_packing *out,
                     lm_err *e)
{
    *out = (lm_packing){ 0 };
    if (check(length, n, size, e) ||
        lm_alloc_n(&out->start, (size_t)n + 1, sizeof *out->start, "packed windows", e) ||
        lm_alloc_n(&out->item, (size_t)n, sizeof *out->item, "packed windows", e)) {
        lm_pack_fini(out);
        return e->code;
    }
    if (!join) {
        keep_apart(length, n, out);
        return LM_OK;
    }
    if (join_items(length, n, size, out, e))
        lm_pack_fini(out);
    return e->code;
}

void lm_pack_fini(lm_packing *p)
{
    lm_free(p->start);
    lm_free(p->item);
    *p = (lm_packing){ 0 };
}
