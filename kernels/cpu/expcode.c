/* SPDX-License-Identifier: Apache-2.0 */
/* expcode.c -- the code of a plane: lengths by package-merge, canonical codes, their layout. */
#include "kernels/expcode.h"

#include <string.h>

enum { BITS = LM_EXP_BITS };

/* ---- Code lengths ---- */

typedef struct {
    uint32_t weight;
    uint8_t symbol;
} leaf;

/* Radix sort by weight, stable in the symbol: a byte of the weights per pass, without unpredictable
 * branches. */
static void sort_leaves(leaf *v, int n)
{
    leaf other[256], *from = v, *to = other, *t;
    uint32_t most = 0;
    for (int i = 0; i < n; i++)
        most = v[i].weight > most ? v[i].weight : most;
    for (int shift = 0; shift < 32 && most >> shift; shift += 8) {
        uint16_t at[257] = { 0 };
        for (int i = 0; i < n; i++)
            at[(from[i].weight >> shift & 255) + 1]++;
        for (int i = 1; i < 256; i++)
            at[i] = (uint16_t)(at[i] + at[i - 1]);
        for (int i = 0; i < n; i++)
            to[at[from[i].weight >> shift & 255]++] = from[i];
        t = from, from = to, to = t;
    }
    if (from != v)
        memcpy(v, from, (size_t)n * sizeof *v);
}

/* Optimal lengths of at most BITS (Larmore and Hirschberg, J. ACM 37(3), 1990).  Each of BITS lists
 * merges the leaves with the pairs of the list before; a leaf's length is the number of lists in
 * which it is among those chosen, 2n - 2 of the last one and the members of the chosen pairs of the
 * others. */
static void package_merge(const leaf *v, int n, uint8_t length[256])
{
    uint32_t weight[257], pair[257], list[512];
    uint16_t leaves[BITS][513]; /* leaves among the first i of each list */
    int size = 0;
    for (int i = 0; i < n; i++)
        weight[i] = v[i].weight;
    weight[n] = UINT32_MAX;
    for (int level = 0; level < BITS; level++) {
        int pairs = size / 2, p = 0, l = 0;
        for (int i = 0; i < pairs; i++)
            pair[i] = list[2 * i] + list[2 * i + 1];
        pair[pairs] = UINT32_MAX;
        /* without a branch, which would be unpredictable */
        for (size = 0; size < n + pairs; size++) {
            uint32_t a = weight[l], b = pair[p];
            int first = a <= b;
            leaves[level][size] = (uint16_t)l;
            list[size] = first ? a : b;
            l += first;
            p += 1 - first;
        }
        leaves[level][size] = (uint16_t)l;
    }
    for (int level = BITS - 1, take = 2 * n - 2; level >= 0 && take > 0; level--) {
        int l = leaves[level][take];
        for (int i = 0; i < l; i++)
            length[v[i].symbol]++;
        take = 2 * (take - l);
    }
}

static uint16_t reversed(unsigned code, int length)
{
    unsigned r = 0;
    for (int i = 0; i < length; i++, code >>= 1)
        r = r << 1 | (code & 1);
    return (uint16_t)r;
}

/* Codes from w->length, and the list of symbols that have one; false unless they fill the code. */
static bool number_codes(lm_exp_work *w)
{
    unsigned next[BITS + 2] = { 0 }, by[BITS + 1] = { 0 };
    w->n_used = 0;
    for (int s = 0; s < 256; s++) {
        if (w->length[s]) {
            by[w->length[s]]++;
            w->used[w->n_used++] = (uint8_t)s;
        }
    }
    for (int l = 1; l <= BITS; l++)
        next[l + 1] = (next[l] + by[l]) << 1;
    if (next[BITS + 1] != 2u << BITS)
        return false;
    for (int i = 0; i < w->n_used; i++) {
        int s = w->used[i];
        w->code[s] = reversed(next[w->length[s]]++, w->length[s]);
    }
    return true;
}

/* ---- Lengths in the head ---- */

/* The symbols whose lengths are in a head, in their order; `before` bytes list them. */
typedef struct {
    size_t n, before;
    uint8_t symbol[256];
} listing;

static listing list_span(int first, int last)
{
    listing l = { .before = 2 };
    for (int s = first; s <= last; s++)
        l.symbol[l.n++] = (uint8_t)s;
    return l;
}

static listing list_rows(const uint8_t count[16])
{
    listing l = { .before = 8 };
    for (int r = 0; r < 16; r++)
        for (int i = 0; i < count[r]; i++)
            l.symbol[l.n++] = (uint8_t)(16 * r + i);
    return l;
}

static void count_rows(const lm_exp_work *w, uint8_t count[16])
{
    memset(count, 0, 16);
    for (int i = 0; i < w->n_used; i++)
        count[w->used[i] >> 4] = (uint8_t)((w->used[i] & 15) + 1);
}

static listing list_used(const lm_exp_work *w)
{
    uint8_t count[16];
    if (w->form == LM_EXP_SPAN)
        return list_span(w->used[0], w->used[w->n_used - 1]);
    count_rows(w, count);
    return list_rows(count);
}

/* Bytes of a stream's size. */
static size_t size_bytes(lm_exp_form form)
{
    return form == LM_EXP_SPAN ? 3 : 2;
}

static size_t head_bytes(const listing *l, lm_exp_form form, size_t n)
{
    return l->before + (l->n + 1) / 2 + size_bytes(form) * (size_t)(lm_exp_streams(n) - 1);
}

/* dst holds zeros. */
static void put_lengths(const lm_exp_work *w, const listing *l, uint8_t *dst)
{
    uint8_t count[16];
    if (w->form == LM_EXP_SPAN) {
        dst[0] = l->symbol[0], dst[1] = l->symbol[l->n - 1];
    } else {
        count_rows(w, count);
        for (int r = 0; r < 16; r++)
            dst[r / 2] |= (uint8_t)(count[r] << 4 * (r & 1));
    }
    for (size_t i = 0; i < l->n; i++)
        dst[l->before + i / 2] |= (uint8_t)(w->length[l->symbol[i]] << 4 * (i & 1));
}

/* False unless the symbols with lengths are those that a writer would list. */
static bool get_lengths(lm_exp_work *w, const uint8_t *src, size_t len, listing *l)
{
    uint8_t count[16];
    if (len < 8 && (w->form == LM_EXP_ROWS || len < 3))
        return false;
    for (int r = 0; w->form == LM_EXP_ROWS && r < 16; r++)
        count[r] = src[r / 2] >> 4 * (r & 1) & 15;
    *l = w->form == LM_EXP_ROWS ? list_rows(count) : list_span(src[0], src[1]);
    if (l->n < 2 || len < l->before + (l->n + 1) / 2 ||
        (l->n % 2 && src[l->before + l->n / 2] >> 4))
        return false;
    memset(w->length, 0, sizeof w->length);
    for (size_t i = 0; i < l->n; i++) {
        uint8_t length = src[l->before + i / 2] >> 4 * (i & 1) & 15;
        if (length > BITS)
            return false;
        w->length[l->symbol[i]] = length;
    }
    if (!number_codes(w))
        return false;
    listing used = list_used(w);
    return used.n == l->n && used.symbol[0] == l->symbol[0];
}

/* ---- Writing ---- */

size_t lm_exp_fit(lm_exp_work *w, lm_exp_form form, size_t n)
{
    leaf v[256];
    uint64_t all = 0, bits = 0;
    int m = 0;
    w->form = form;
    for (int s = 0; s < 256; s++)
        if (w->weight[s])
            v[m++] = (leaf){ w->weight[s], (uint8_t)s };
    if (m < 2)
        return 0;
    sort_leaves(v, m);
    memset(w->length, 0, sizeof w->length);
    package_merge(v, m, w->length);
    number_codes(w);
    for (int i = 0; i < m; i++) {
        all += v[i].weight;
        bits += (uint64_t)v[i].weight * w->length[v[i].symbol];
    }
    listing l = list_used(w);
    return head_bytes(&l, form, n) + (bits * n / all + 7) / 8;
}

size_t lm_exp_plan(const lm_exp_kernels *k, lm_exp_work *w, const uint8_t *src, size_t n)
{
    k->count(w, src, n);
    return lm_exp_fit(w, LM_EXP_SPAN, n);
}

size_t lm_exp_write(const lm_exp_kernels *k, lm_exp_work *w, const uint8_t *src, size_t n,
                    uint8_t *dst, size_t cap)
{
    const listing l = list_used(w);
    size_t head = head_bytes(&l, w->form, n), total = head, bytes = size_bytes(w->form);
    int streams = lm_exp_streams(n);
    k->put(w, src, n);
    for (int i = 0; i < streams; i++)
        total += w->bytes[i];
    if (total > cap)
        return 0;
    memset(dst, 0, head);
    put_lengths(w, &l, dst);
    for (int i = 0; i + 1 < streams; i++) {
        uint8_t *at = dst + head - bytes * (size_t)(streams - 1 - i);
        for (size_t b = 0; b < bytes; b++)
            at[b] = (uint8_t)(w->bytes[i] >> 8 * b);
    }
    dst += head;
    for (int i = 0; i < streams; dst += w->bytes[i++])
        memcpy(dst, w->out + lm_exp_room(n) * (size_t)i, w->bytes[i]);
    return total;
}

/* ---- Reading ---- */

bool lm_exp_read(const lm_exp_kernels *k, lm_exp_work *w, lm_exp_form form, const uint8_t *src,
                 size_t len, uint8_t *dst, size_t n)
{
    listing l;
    w->form = form;
    if (!n || n > (form == LM_EXP_SPAN ? LM_EXP_MAX : LM_EXP_ROWS_MAX) ||
        !get_lengths(w, src, len, &l))
        return false;
    size_t bytes = size_bytes(form), head = head_bytes(&l, form, n), left = len - head;
    int streams = lm_exp_streams(n);
    if (len < head)
        return false;
    for (int i = 0; i + 1 < streams; i++) {
        const uint8_t *at = src + head - bytes * (size_t)(streams - 1 - i);
        w->bytes[i] = 0;
        for (size_t b = 0; b < bytes; b++)
            w->bytes[i] |= (uint32_t)at[b] << 8 * b;
        if (w->bytes[i] > left)
            return false;
        left -= w->bytes[i];
    }
    if (left > UINT32_MAX)
        return false;
    w->bytes[streams - 1] = (uint32_t)left;
    return k->get(w, src + head, dst, n);
}
