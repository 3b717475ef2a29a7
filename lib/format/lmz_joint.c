/* SPDX-License-Identifier: Apache-2.0 */
/* lmz_joint.c -- see lmz_joint.h. */
#include "format/lmz_joint.h"

#include <math.h>
#include <string.h>

enum {
    HEAD = 6,
    /* Pairs rarer than 2^-14, or with fewer than four occurrences, are listed: codes for them, of
     * 11 bits at most, would lengthen the codes of frequent pairs by more than the list costs. */
    RARE_BITS = 14,
    RARE_TIMES = 4,
    BLOCKS = 96, /* elements whose heads are counted, out of those of a chunk */
    BLOCK = 256,
};

static size_t map_bytes(int m)
{
    return 2 * (size_t)m;
}

/* ---- Choosing ---- */

static unsigned head_of(const uint8_t *x)
{
    return (x[0] >> 5 | x[1] << 3) & 1023;
}

/* How often each exponent with its two leading bits, 4 e + k, occurs among some of the elements, in
 * blocks spread over all of them; returns how many were counted.  Four tables avoid that equal
 * neighbours wait for each other's increment. */
static size_t count_heads(const uint8_t *x, size_t n, uint32_t count[1024])
{
    uint16_t part[4][1024] = { { 0 } };
    size_t blocks = n < (size_t)BLOCKS * BLOCK ? 1 : BLOCKS, m = blocks > 1 ? BLOCK : n;
    for (size_t b = 0; b < blocks; b++) {
        const uint8_t *at = x + (b ? 2 * ((n - m) * b / (blocks - 1)) : 0);
        size_t i = 0;
        for (; i + 4 <= m; i += 4) {
            uint64_t four; /* x86 is little-endian, as the elements are */
            memcpy(&four, at + 2 * i, sizeof four);
            part[0][four >> 5 & 1023]++;
            part[1][four >> 21 & 1023]++;
            part[2][four >> 37 & 1023]++;
            part[3][four >> 53 & 1023]++;
        }
        for (; i < m; i++)
            part[0][head_of(at + 2 * i)]++;
    }
    for (int h = 0; h < 1024; h++)
        count[h] = (uint32_t)part[0][h] + part[1][h] + part[2][h] + part[3][h];
    return blocks * m;
}

/* Choose the exponents of the map: the range, without 0, with the most elements. */
static void choose_range(const uint32_t head[1024], lm_joint_map *map)
{
    enum { SPAN = LM_JOINT_INDEXES - 1 };
    uint32_t count[256], sum = 0, most = 0;
    int low = 1, high = 1;
    for (int e = 0; e < 256; e++)
        count[e] = head[4 * e] + head[4 * e + 1] + head[4 * e + 2] + head[4 * e + 3];
    for (int e = 1; e < 256; e++) {
        sum += count[e];
        sum -= e > SPAN ? count[e - SPAN] : 0;
        if (sum > most) {
            most = sum;
            high = e;
        }
    }
    for (low = high > SPAN ? high - SPAN + 1 : 1; low < high && !count[low];)
        low++;
    map->low = (uint8_t)(low < LM_JOINT_LOW ? low : LM_JOINT_LOW);
    map->m = (uint8_t)(high - map->low + 2);
}

/* Ranks by frequency, the most frequent first; the order of equal ones is kept. */
static void rank_heads(const uint32_t *count, int n, uint8_t *rank)
{
    int order[LM_JOINT_RANKS];
    for (int i = 0; i < n; i++) {
        int j = i;
        for (; j && count[order[j - 1]] < count[i]; j--)
            order[j] = order[j - 1];
        order[j] = i;
    }
    for (int r = 0; r < n; r++)
        rank[order[r]] = (uint8_t)r;
}

/* Order the four ranks of each group as readers derive them from the map; and set the ranks of
 * escapes. */
static void order_groups(lm_joint_map *map)
{
    uint8_t next[LM_JOINT_INDEXES] = { 0 };
    for (int i = 0; i < 4 * map->m; i++) {
        uint8_t group = map->rank[i] >> 2;
        map->rank[i] = (uint8_t)(group << 2 | next[group]++);
    }
    for (int k = 0; k < 4; k++)
        map->rank[4 * map->m + k] = (uint8_t)(LM_JOINT_ESCAPE << 2 | k);
}

double lmz_joint_choose(lmz_joint *j, const void *src, size_t n)
{
    uint32_t head[1024], count[LM_JOINT_RANKS], group[LM_JOINT_INDEXES + 1] = { 0 };
    lm_joint_map *map = &j->map;
    double sum = 0;
    size_t m = count_heads(src, n, head), escapes = m;
    int distinct = 0;

    memset(map, 0, sizeof *map);
    choose_range(head, map);
    memcpy(count, head, 4 * sizeof *head);
    memcpy(count + 4, head + 4 * map->low, 4 * (map->m - 1u) * sizeof *head);
    rank_heads(count, 4 * map->m, map->rank);
    order_groups(map);
    for (int i = 0; i < 4 * map->m; i++) {
        group[map->rank[i] >> 2] += count[i];
        escapes -= count[i];
    }
    group[LM_JOINT_ESCAPE] = (uint32_t)escapes;
    for (int g = 0; g <= LM_JOINT_ESCAPE; g++) {
        distinct += group[g] > 0;
        sum += group[g] ? group[g] * log2(group[g]) : 0;
    }
    if (m < 2 || distinct < 2)
        return INFINITY;
    double bits = log2((double)m) - sum / (double)m;
    /* as in look_at of lmz_chunk.c */
    bits += (distinct - 1) / (2 * (double)m * 0.6931471805599453);
    return 8 + bits + 8 * (double)escapes / (double)m;
}

/* ---- Encoding ---- */

const uint8_t *lmz_joint_split(const lmz_joint *j, const void *src, size_t n, uint8_t *dst)
{
    uint8_t *rest = dst + HEAD + map_bytes(j->map.m);
    if (HEAD + map_bytes(j->map.m) >= n)
        return NULL;
    dst[0] = LMZ_JOINT;
    dst[1] = j->map.low;
    dst[2] = j->map.m;
    for (int i = 0; i < 2 * j->map.m; i++)
        dst[HEAD + i] = (uint8_t)(j->map.rank[2 * i] >> 2 | j->map.rank[2 * i + 1] >> 2 << 4);
    j->joint->split(&j->map, src, n, j->pair, rest);
    return rest;
}

/* True if a pair has no code: rare ones, and those with an escape. */
static bool is_listed(const lmz_joint *j, uint64_t all, int pair)
{
    uint32_t weight = j->work->weight[pair];
    return weight && ((uint64_t)weight << RARE_BITS < all || weight < RARE_TIMES ||
                      (pair & 15) == LM_JOINT_ESCAPE || pair >> 4 == LM_JOINT_ESCAPE);
}

size_t lmz_joint_plan(const lmz_joint *j, size_t n)
{
    size_t pairs = (n + 1) / 2;
    uint32_t *weight = j->work->weight, rare = 0;
    uint64_t all = 0, listed = 0; /* in weights: pairs, bytes */

    j->exp->count(j->work, j->pair, pairs);
    for (int p = 0; p < 256; p++)
        all += weight[p];
    for (int p = 0; p < 256; p++) {
        if (!is_listed(j, all, p))
            continue;
        rare += weight[p];
        listed += weight[p] * (1u + ((p & 15) == LM_JOINT_ESCAPE) + (p >> 4 == LM_JOINT_ESCAPE));
        weight[p] = 0;
    }
    weight[LM_JOINT_RARE] = rare;
    size_t coded = lm_exp_fit(j->work, LM_EXP_ROWS, pairs);
    return coded ? HEAD + map_bytes(j->map.m) + n + coded + (size_t)(listed * pairs / all) : 0;
}

static uint8_t exponent(const uint8_t *x)
{
    return (uint8_t)(x[0] >> 7 | x[1] << 1);
}

/* Copy the pairs without code, and the exponents of their escapes, to a list at `at`, and replace
 * them by LM_JOINT_RARE.  Returns the end of the list, NULL if it may not fit before `end`. */
static uint8_t *list_rare(const lmz_joint *j, const uint8_t *x, size_t n, uint8_t *at,
                          const uint8_t *end)
{
    uint8_t set[2][16] = { { 0 } };
    for (int p = 0; p < 256; p++)
        if (!j->work->weight[p] || p == LM_JOINT_RARE)
            set[p >> 7][p & 15] |= (uint8_t)(1 << (p >> 4 & 7));
    size_t some = j->joint->find(set, j->pair, n, j->places);
    for (size_t k = 0; k < some; k++) {
        for (uint32_t bits = j->places[k].bits; bits; bits &= bits - 1) {
            size_t i = j->places[k].from + (size_t)__builtin_ctz(bits);
            uint8_t p = j->pair[i];
            if (end - at < 3)
                return NULL;
            j->pair[i] = LM_JOINT_RARE;
            *at++ = p;
            if ((p & 15) == LM_JOINT_ESCAPE)
                *at++ = exponent(x + 4 * i);
            if (p >> 4 == LM_JOINT_ESCAPE)
                *at++ = exponent(x + 4 * i + 2);
        }
    }
    return at;
}

size_t lmz_joint_write(const lmz_joint *j, const void *src, size_t n, uint8_t *dst)
{
    size_t at = HEAD + map_bytes(j->map.m) + n, room = 2 * n, pairs = (n + 1) / 2, coded, listed;
    /* the buffer has room for n more bytes behind the pairs */
    uint8_t *list = j->pair + pairs, *list_end;

    list_end = list_rare(j, src, n, list, list + n / 2);
    if (!list_end)
        return 0;
    listed = (size_t)(list_end - list);
    coded = lm_exp_write(j->exp, j->work, j->pair, pairs, dst + at, room - at);
    if (!coded || listed > room - at - coded)
        return 0;
    memcpy(dst + at + coded, list, listed);
    dst[3] = (uint8_t)coded;
    dst[4] = (uint8_t)(coded >> 8);
    dst[5] = (uint8_t)(coded >> 16);
    return at + coded + listed;
}

/* ---- Decoding ---- */

bool lmz_joint_parse(const uint8_t *src, size_t len, size_t n, lmz_joint_parts *p)
{
    if (len < HEAD || !src[1] || src[1] > LM_JOINT_LOW || !src[2] || src[2] > LM_JOINT_INDEXES)
        return false;
    size_t before = HEAD + map_bytes(src[2]),
           coded = src[3] | (size_t)src[4] << 8 | (size_t)src[5] << 16;
    if (len < before || len - before < n || len - before - n < coded)
        return false;
    *p = (lmz_joint_parts){ .map = src,
                            .rest = src + before,
                            .pairs = src + before + n,
                            .rare = src + before + n + coded,
                            .coded = coded,
                            .listed = len - before - n - coded };
    return true;
}

/* Build the decoding tables from the head of a chunk; false unless each group has four members. */
static bool get_map(const uint8_t *src, lm_joint_map *map)
{
    const uint8_t *p = src + HEAD;
    uint8_t members[16] = { 0 };
    memset(map, 0, sizeof *map);
    map->low = src[1];
    map->m = src[2];
    for (int i = 0; i < 4 * map->m; i++) {
        unsigned group = p[i / 2] >> 4 * (i & 1) & 15,
                 e = i < 4 ? 0 : map->low + (unsigned)i / 4 - 1;
        if (group >= map->m || members[group] == 4)
            return false;
        unsigned rank = group << 2 | members[group]++;
        map->high[rank] = (uint8_t)(e >> 1);
        map->below[rank] = (uint8_t)((e & 1) << 7 | ((unsigned)i & 3) << 5);
    }
    return true;
}

/* True if a pair may have a code. */
static bool may_be_coded(const lmz_joint *j, uint8_t pair)
{
    return pair == LM_JOINT_RARE || ((pair & 15) < j->map.m && pair >> 4 < j->map.m);
}

/* Decode the element of `group` or, for an escape, of the next exponent in *list; false for a group
 * without members, and at the end of the list. */
static bool get_element(const lm_joint_map *map, unsigned group, uint8_t rest, const uint8_t **list,
                        const uint8_t *end, uint8_t *out)
{
    unsigned rank = group << 2 | (rest >> 5 & 3);
    if (group != LM_JOINT_ESCAPE) {
        out[0] = (uint8_t)(map->below[rank] | (rest & 31));
        out[1] = (uint8_t)(map->high[rank] | (rest & 0x80));
        return group < map->m;
    }
    if (*list == end)
        return false;
    unsigned e = *(*list)++;
    out[0] = (uint8_t)(e << 7 | (rest & 0x7f));
    out[1] = (uint8_t)(e >> 1 | (rest & 0x80));
    return true;
}

/* Decode the elements of the rare pairs; false unless the list has one entry for each place. */
static bool get_rare(const lmz_joint *j, size_t some, const lmz_joint_parts *p, size_t n,
                     uint8_t *out)
{
    const uint8_t *list = p->rare, *end = list + p->listed;
    for (size_t k = 0; k < some; k++) {
        for (uint32_t bits = j->places[k].bits; bits; bits &= bits - 1) {
            size_t i = 2 * (j->places[k].from + (size_t)__builtin_ctz(bits));
            if (list == end)
                return false;
            unsigned pair = *list++;
            if (!get_element(&j->map, pair & 15, p->rest[i], &list, end, out + 2 * i))
                return false;
            if (i + 1 == n
                    ? pair >> 4 != 0
                    : !get_element(&j->map, pair >> 4, p->rest[i + 1], &list, end, out + 2 * i + 2))
                return false;
        }
    }
    return list == end;
}

bool lmz_joint_decode(lmz_joint *j, const lmz_joint_parts *p, size_t n, void *dst)
{
    if (!get_map(p->map, &j->map) ||
        !lm_exp_read(j->exp, j->work, LM_EXP_ROWS, p->pairs, p->coded, j->pair, (n + 1) / 2))
        return false;
    for (int u = 0; u < j->work->n_used; u++)
        if (!may_be_coded(j, j->work->used[u]))
            return false;
    uint8_t last = j->pair[(n - 1) / 2];
    if (n % 2 && last != LM_JOINT_RARE && last >> 4)
        return false;
    size_t some = j->joint->join(&j->map, j->pair, p->rest, n, dst, j->places);
    return get_rare(j, some, p, n, dst);
}
