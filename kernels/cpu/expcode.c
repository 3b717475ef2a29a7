/* SPDX-License-Identifier: Apache-2.0 */
/* expcode.c -- the code of a plane: lengths by package-merge, canonical codes, their layout. */
#include "kernels/expcode.h"

#include <string.h>

/* ---- Code lengths ---- */

typedef struct {
    uint32_t weight;
    uint8_t symbol;
} leaf;

static void sort_leaves(leaf *v, int n)
{
    for (int gap = n / 2; gap; gap = gap == 2 ? 1 : gap * 5 / 11) /* Shell's sort: n <= 256 */
        for (int i = gap; i < n; i++) {
            leaf x = v[i];
            int j = i;
            for (; j >= gap && (v[j - gap].weight > x.weight ||
                                (v[j - gap].weight == x.weight && v[j - gap].symbol > x.symbol));
                 j -= gap)
                v[j] = v[j - gap];
            v[j] = x;
        }
}

/* Optimal lengths of at most `limit` (Larmore and Hirschberg, J. ACM 37(3), 1990).  Each of `limit` lists
 * merges the leaves with the pairs of the list before; a leaf's length is the number of lists in
 * which it is among those chosen, 2n - 2 of the last one and the members of the chosen pairs of the
 * others. */
static void package_merge(const leaf *v, int n, int limit, uint8_t length[256])
{
    uint32_t weight[257], pair[257], list[512];
    uint16_t leaves[LM_EXP_LONG][513]; /* leaves among the first i of each list */
    int size = 0;
    for (int i = 0; i < n; i++)
        weight[i] = v[i].weight;
    weight[n] = UINT32_MAX;
    for (int level = 0; level < limit; level++) {
        int pairs = size / 2, p = 0, l = 0;
        for (int i = 0; i < pairs; i++)
            pair[i] = list[2 * i] + list[2 * i + 1];
        pair[pairs] = UINT32_MAX;
        for (size = 0; size < n + pairs; size++) { /* without a branch: it would be a guess */
            uint32_t a = weight[l], b = pair[p];
            int first = a <= b;
            leaves[level][size] = (uint16_t)l;
            list[size] = first ? a : b;
            l += first;
            p += 1 - first;
        }
        leaves[level][size] = (uint16_t)l;
    }
    for (int level = limit - 1, take = 2 * n - 2; level >= 0 && take > 0; level--) {
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
    unsigned next[LM_EXP_LONG + 2] = { 0 }, by[LM_EXP_LONG + 1] = { 0 };
    w->n_used = 0;
    for (int s = 0; s < 256; s++) {
        if (w->length[s]) {
            by[w->length[s]]++;
            w->used[w->n_used++] = (uint8_t)s;
        }
    }
    for (int l = 1; l <= w->limit; l++)
        next[l + 1] = (next[l] + by[l]) << 1;
    if (next[w->limit + 1] != 2u << w->limit)
        return false;
    for (int i = 0; i < w->n_used; i++) {
        int s = w->used[i];
        w->code[s] = reversed(next[w->length[s]]++, w->length[s]);
    }
    return true;
}

/* ---- Writing ---- */

static size_t head_bytes(const lm_exp_work *w, size_t n)
{
    size_t span = (size_t)(w->used[w->n_used - 1] - w->used[0]) + 1;
    return 2 + (span + 1) / 2 + 3 * (size_t)(lm_exp_streams(n) - 1);
}

size_t lm_exp_plan(const lm_exp_kernels *k, lm_exp_work *w, int limit, const uint8_t *src, size_t n)
{
    leaf v[256];
    uint64_t all = 0, bits = 0;
    int m = 0;
    w->limit = limit;
    k->count(w, src, n);
    for (int s = 0; s < 256; s++)
        if (w->weight[s])
            v[m++] = (leaf){ w->weight[s], (uint8_t)s };
    if (m < 2)
        return 0;
    sort_leaves(v, m);
    memset(w->length, 0, sizeof w->length);
    package_merge(v, m, limit, w->length);
    number_codes(w);
    for (int i = 0; i < m; i++) {
        all += v[i].weight;
        bits += (uint64_t)v[i].weight * w->length[v[i].symbol];
    }
    return head_bytes(w, n) + (bits * n / all + 7) / 8;
}

size_t lm_exp_write(const lm_exp_kernels *k, lm_exp_work *w, const uint8_t *src, size_t n,
                    uint8_t *dst, size_t cap)
{
    size_t head = head_bytes(w, n), total = head;
    int first = w->used[0], last = w->used[w->n_used - 1], streams = lm_exp_streams(n);
    k->put(w, src, n);
    for (int i = 0; i < streams; i++)
        total += w->bytes[i];
    if (total > cap)
        return 0;
    memset(dst, 0, head);
    dst[0] = (uint8_t)first, dst[1] = (uint8_t)last;
    for (int s = first; s <= last; s++)
        dst[2 + (s - first) / 2] |= (uint8_t)(w->length[s] << 4 * ((s - first) & 1));
    for (int i = 0; i + 1 < streams; i++) {
        uint8_t *at = dst + head - 3 * (streams - 1 - i);
        at[0] = (uint8_t)w->bytes[i];
        at[1] = (uint8_t)(w->bytes[i] >> 8);
        at[2] = (uint8_t)(w->bytes[i] >> 16);
    }
    dst += head;
    for (int i = 0; i < streams; dst += w->bytes[i++])
        memcpy(dst, w->out + lm_exp_room(n) * (size_t)i, w->bytes[i]);
    return total;
}

/* ---- Reading ---- */

static bool read_lengths(lm_exp_work *w, const uint8_t *src, size_t len)
{
    if (len < 3 || src[0] >= src[1])
        return false;
    int first = src[0], last = src[1];
    size_t span = (size_t)(last - first) + 1;
    if (len < 2 + (span + 1) / 2 || (span % 2 && src[2 + span / 2] >> 4))
        return false;
    memset(w->length, 0, sizeof w->length);
    for (int s = first; s <= last; s++) {
        int l = src[2 + (s - first) / 2] >> 4 * ((s - first) & 1) & 15;
        if (l > w->limit)
            return false;
        w->length[s] = (uint8_t)l;
    }
    return w->length[first] && w->length[last] && number_codes(w);
}

bool lm_exp_read(const lm_exp_kernels *k, lm_exp_work *w, int limit, const uint8_t *src, size_t len,
                 uint8_t *dst, size_t n)
{
    w->limit = limit;
    if (!n || n > LM_EXP_MAX || !read_lengths(w, src, len))
        return false;
    size_t head = head_bytes(w, n), left = len - head;
    int streams = lm_exp_streams(n);
    if (len < head)
        return false;
    for (int i = 0; i + 1 < streams; i++) {
        const uint8_t *at = src + head - 3 * (streams - 1 - i);
        w->bytes[i] = at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16;
        if (w->bytes[i] > left)
            return false;
        left -= w->bytes[i];
    }
    if (left > UINT32_MAX)
        return false;
    w->bytes[streams - 1] = (uint32_t)left;
    return k->get(w, src + head, dst, n);
}
