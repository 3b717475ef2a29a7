/* SPDX-License-Identifier: Apache-2.0 */
/* lmz_parts.c -- see lmz_parts.h.
 *
 * `growth` counts the bytes that the pieces add to the file.  While pieces are chosen by windows,
 * growth plus a reserve for the rest of the file stays within the limit.  If all tensors of a
 * window fit, each is a part.  Otherwise only those are that gain more than their records and a
 * joined part behind them cost, so that growth rises only by one joined part per window, which the
 * reserve covers. */
#include "format/lmz_parts.h"

#include <string.h>

enum {
    WINDOW = LM_LMZ_CHUNK,
    RECORDS = 56 + 60 + 17 + 1, /* P, C, in the index, and the head of a stored chunk */
    CHUNK = 60 + 4 + 1,         /* C, in the index, and the head */
    /* Two consecutive windows have more than WINDOW bytes together, and each costs RECORDS (and a
     * name, if it is a long tensor) and CHUNK. */
    RESERVE = 2000,
};

static lm_lmz_kind kind_of(const lm_st_tensor *t)
{
    return !strcmp(t->dtype_name, "C64") ? LM_LMZ_F32 : lm_lmz_kind_of(t->dtype);
}

/* Further chunks of this many bytes. */
static int64_t chunks_cost(uint64_t bytes)
{
    return (int64_t)(bytes / LM_LMZ_CHUNK * CHUNK);
}

/* The cost of a tensor as a part; its strings are in P and, at worst with the same length, in the
 * index. */
static int64_t cost_of(const lm_st_tensor *t)
{
    return (int64_t)(RECORDS + 2 * (strlen(t->name) + strlen(t->dtype_name))) +
           chunks_cost(t->bytes);
}

static int64_t limit_of(const lmz_parts *p)
{
    return (int64_t)(p->bytes / LMZ_GROWTH);
}

static int64_t reserve_of(const lmz_parts *p)
{
    return (int64_t)((p->bytes - p->end) / RESERVE);
}

/* True if parts may gain anything, by the dtypes alone: floating-point weights gain a sixth, other
 * types only what zstd gains from the whole file anyway. */
static bool may_pay(const lm_st_table *t)
{
    uint64_t cost = 0, gain = 0;
    for (size_t i = 0; i < t->n; i++) {
        const lm_st_tensor *x = &t->tensor[i];
        cost += RECORDS + strlen(x->name) + strlen(x->dtype_name);
        gain += kind_of(x) >= LM_LMZ_BF16 ? x->bytes / 7 : x->bytes / LMZ_GROWTH;
    }
    return gain >= cost;
}

/* ---- Pieces ---- */

static lm_code add_piece(lmz_parts *p, size_t tensor, lm_lmz_kind kind, uint64_t raw, lm_err *e)
{
    lm_code rc = lm_grow(&p->piece, &p->cap, p->n + 1, sizeof *p->piece, "parts of a file", e);
    if (rc)
        return rc;
    p->piece[p->n++] = (lmz_piece){ tensor, kind, p->end, raw };
    p->end += raw;
    return LM_OK;
}

static lm_code add_tensor(lmz_parts *p, size_t i, lm_err *e)
{
    const lm_st_tensor *t = &p->tensors->tensor[i];
    return add_piece(p, i, kind_of(t), t->bytes, e);
}

/* The file as one part. */
static lm_code add_whole(lmz_parts *p, lm_err *e)
{
    p->chosen = p->tensors->n;
    p->measure = false;
    return p->bytes ? add_piece(p, SIZE_MAX, LM_LMZ_BYTES, p->bytes, e) : LM_OK;
}

static lm_code add_header(lmz_parts *p, lm_err *e)
{
    p->growth = RECORDS + chunks_cost(p->head);
    return add_piece(p, SIZE_MAX, LM_LMZ_BYTES, p->head, e);
}

lm_code lmz_parts_begin(lmz_parts *p, const lm_st_table *tensors, uint64_t head, uint64_t bytes,
                        bool all, lm_err *e)
{
    lmz_parts_fini(p);
    p->tensors = tensors;
    p->head = head;
    p->bytes = bytes;
    for (size_t i = 0; i < tensors->n; i++)
        p->rest += cost_of(&tensors->tensor[i]);
    if (!tensors->n)
        return add_whole(p, e);
    if (all || RECORDS + chunks_cost(head) + p->rest <= limit_of(p))
        return add_header(p, e);
    if (!may_pay(tensors))
        return add_whole(p, e);
    p->measure = true;
    return LM_OK;
}

bool lmz_parts_next(lmz_parts *p, lmz_piece *out)
{
    if (p->next == p->n && !p->measure && p->chosen < p->tensors->n) {
        p->next = p->n = 0; /* there is space: the header was a piece */
        (void)!add_tensor(p, p->chosen++, &(lm_err){ 0 });
    }
    if (p->next == p->n)
        return false;
    *out = p->piece[p->next++];
    return true;
}

void lmz_parts_fini(lmz_parts *p)
{
    lm_free(p->piece);
    *p = (lmz_parts){ 0 };
}

/* ---- Choosing ---- */

/* The tensors of the next window: those that fit, or one longer tensor, and empty ones around them;
 * returns the end of the list. */
static size_t window_end(const lmz_parts *p, uint64_t *bytes)
{
    size_t i = p->chosen;
    for (*bytes = 0; i < p->tensors->n; i++) {
        uint64_t more = p->tensors->tensor[i].bytes;
        if (*bytes && more && (*bytes > WINDOW || more > WINDOW - *bytes))
            break;
        *bytes += more;
    }
    return i;
}

size_t lmz_parts_window(const lmz_parts *p)
{
    uint64_t bytes;
    window_end(p, &bytes);
    return (size_t)(p->end ? 0 : p->head) + (size_t)(bytes < WINDOW ? bytes : WINDOW);
}

/* The least gain of the tensors from p->chosen up to `end`, of longer ones by their first chunk. */
static lm_code measure(const lmz_parts *p, lmz_batches *b, size_t end, const uint8_t *data,
                       int64_t *gain, lm_err *e)
{
    lmz_sample *s = NULL;
    size_t n = end - p->chosen;
    lm_code rc = lm_alloc_n(&s, n, sizeof *s, "samples of tensors", e);
    for (size_t i = 0; i < n && !rc; i++) {
        const lm_st_tensor *t = &p->tensors->tensor[p->chosen + i];
        lm_lmz_kind kind = kind_of(t);
        uint32_t raw = t->bytes < WINDOW ? (uint32_t)t->bytes : WINDOW;
        /* For integers zstd gains as much from joined parts. */
        s[i] = (lmz_sample){ kind, data, kind < LM_LMZ_BF16 ? 0 : raw, 0 };
        data += raw;
    }
    rc = rc ? rc : lmz_batches_measure(b, s, n, e);
    for (size_t i = 0; i < n && !rc; i++)
        gain[i] = s[i].raw ? (int64_t)s[i].raw + 1 - s[i].coded : 0;
    lm_free(s);
    return rc;
}

/* True if the tensors behind a first window without parts are like it: short and of the same
 * kinds. */
static bool rest_is_like(const lm_st_table *t, size_t begin, size_t end)
{
    bool seen[LM_LMZ_KINDS] = { false };
    for (size_t i = begin; i < end; i++)
        seen[kind_of(&t->tensor[i])] = true;
    for (size_t i = end; i < t->n; i++)
        if (t->tensor[i].bytes > WINDOW || !seen[kind_of(&t->tensor[i])])
            return false;
    return true;
}

/* One tensor of a window that does not fit as a whole; *open: the last piece is a joined one. */
static lm_code choose_one(lmz_parts *p, size_t i, int64_t gain, int64_t reserve, bool *open,
                          lm_err *e)
{
    const lm_st_tensor *t = &p->tensors->tensor[i];
    int64_t more = cost_of(t) - gain;
    bool is_long = t->bytes > WINDOW;

    if (more + RECORDS <= 0 || (is_long && p->growth + more + reserve <= limit_of(p))) {
        p->growth += more;
        *open = false;
        return add_tensor(p, i, e);
    }
    if (*open && !is_long) {
        p->piece[p->n - 1].raw += t->bytes;
        p->end += t->bytes;
        return LM_OK;
    }
    if (!t->bytes)
        return LM_OK;
    p->growth += RECORDS + chunks_cost(t->bytes) - (is_long && gain > 0 ? gain : 0);
    *open = !is_long;
    return add_piece(p, SIZE_MAX, is_long ? kind_of(t) : LM_LMZ_BYTES, t->bytes, e);
}

static lm_code choose(lmz_parts *p, size_t end, uint64_t bytes, const int64_t *gain, lm_err *e)
{
    size_t first = p->chosen;
    int64_t more = 0, reserve = reserve_of(p) - (int64_t)(bytes / RESERVE);
    bool open = false, all;
    lm_code rc = LM_OK;

    for (size_t i = first; i < end; i++)
        more += cost_of(&p->tensors->tensor[i]) - gain[i - first];
    all = p->growth + more + reserve <= limit_of(p);
    p->growth += all ? more : 0;
    for (size_t i = first; i < end && !rc; i++)
        rc = all ? add_tensor(p, i, e) : choose_one(p, i, gain[i - first], reserve, &open, e);
    return rc;
}

static bool some_named(const lmz_parts *p)
{
    for (size_t i = 0; i < p->n; i++)
        if (p->piece[i].tensor != SIZE_MAX)
            return true;
    return false;
}

lm_code lmz_parts_choose(lmz_parts *p, lmz_batches *b, const uint8_t *window, lm_err *e)
{
    bool at_first = !p->end;
    uint64_t bytes;
    size_t begin = p->chosen, end = window_end(p, &bytes);
    int64_t *gain = NULL;
    lm_code rc = lm_alloc_n(&gain, end - begin, sizeof *gain, "samples of tensors", e);

    p->next = p->n = 0;
    rc = rc ? rc : measure(p, b, end, window + (at_first ? p->head : 0), gain, e);
    rc = rc ? rc : at_first ? add_header(p, e) : LM_OK;
    rc = rc ? rc : choose(p, end, bytes, gain, e);
    lm_free(gain);
    if (rc)
        return rc;
    if (at_first && bytes <= WINDOW && !some_named(p) && rest_is_like(p->tensors, begin, end)) {
        p->n = 0;
        p->end = 0;
        return add_whole(p, e);
    }
    p->chosen = end;
    for (size_t i = begin; i < end; i++)
        p->rest -= cost_of(&p->tensors->tensor[i]);
    p->measure = end < p->tensors->n && p->growth + p->rest > limit_of(p);
    return LM_OK;
}
