/* SPDX-License-Identifier: Apache-2.0 */
/* lmz_joint.c -- see lmz_joint.h. */
#include "format/lmz_joint.h"

#include <math.h>
#include <string.h>

static void put24(uint8_t *p, size_t v)
{
    p[0] = (uint8_t)v;
    p[1] = (uint8_t)(v >> 8);
    p[2] = (uint8_t)(v >> 16);
}

static size_t get24(const uint8_t *p)
{
    return p[0] | (size_t)p[1] << 8 | (size_t)p[2] << 16;
}

/* ---- Choosing ---- */

/* The least exponent that pays for its four symbols: a symbol that is next to never used takes
 * 2^-12 of the code all the same, an escape 20 bits where it occurs.  A share of 2^-12 pays: what a
 * sample of 4096 has at all. */
static uint8_t choose_low(const uint32_t count[256])
{
    int top = 255, low;
    while (top > 1 && !count[top])
        top--;
    low = top < LM_JOINT_EXPONENTS ? 1 : top - LM_JOINT_EXPONENTS + 1;
    low = low < LM_JOINT_LOW ? low : LM_JOINT_LOW;
    while (low < top && low < LM_JOINT_LOW && !count[low])
        low++;
    return (uint8_t)low;
}

/* How often each exponent with its two leading bits occurs: 4 e + k.  In four tables, so that equal
 * neighbours do not wait for each other. */
static void count_heads(const uint8_t *sample, size_t m, uint32_t count[1024])
{
    uint16_t part[4][1024] = { 0 };
    for (size_t i = 0; i < m; i++)
        part[i & 3][(sample[2 * i] >> 5 | sample[2 * i + 1] << 3) & 1023]++;
    for (int h = 0; h < 1024; h++)
        count[h] = (uint32_t)part[0][h] + part[1][h] + part[2][h] + part[3][h];
}

double lmz_joint_guess(const uint8_t *sample, size_t m, uint8_t *low)
{
    uint32_t head[1024], exponent[256], symbol[256] = { 0 };
    double sum = 0, escaped = 0;
    int distinct = 0;

    count_heads(sample, m, head);
    for (int e = 0; e < 256; e++)
        exponent[e] = head[4 * e] + head[4 * e + 1] + head[4 * e + 2] + head[4 * e + 3];
    *low = choose_low(exponent);
    for (unsigned e = 0; e < 256; e++) {
        unsigned d = e - *low, index = !e ? 0 : d < LM_JOINT_EXPONENTS ? d + 1 : 63;
        for (unsigned k = 0; exponent[e] && k < 4; k++)
            symbol[index << 2 | k] += head[4 * e + k];
        escaped += index == 63 ? exponent[e] : 0;
    }
    for (int s = 0; s < 256; s++) {
        distinct += symbol[s] > 0;
        sum += symbol[s] ? symbol[s] * log2(symbol[s]) : 0;
    }
    if (m < 2 || distinct < 2)
        return INFINITY;
    double bits = log2((double)m) - sum / (double)m;
    bits += (distinct - 1) / (2 * (double)m * 0.6931471805599453); /* as look_at in lmz_chunk.c */
    return 6 + bits + 8 * escaped / (double)m;
}

/* ---- Encoding ---- */

void lmz_joint_split(const lmz_joint *j, const void *src, size_t n, uint8_t low, uint8_t *dst)
{
    dst[0] = LMZ_JOINT;
    dst[1] = low;
    put24(dst + 2, j->joint->split(src, n, low, j->symbol, dst + LMZ_JOINT_HEAD));
}

size_t lmz_joint_plan(const lmz_joint *j, size_t n)
{
    size_t coded = lm_exp_plan(j->exp, j->work, LM_EXP_LONG, j->symbol, n), escapes = 0;
    if (!coded)
        return 0;
    for (unsigned s = LM_JOINT_ESCAPE; s < 256; s++)
        escapes += j->work->weight[s];
    return LMZ_JOINT_HEAD + lm_joint_rest(n) + coded + escapes;
}

size_t lmz_joint_write(const lmz_joint *j, const void *src, size_t n, uint8_t *dst)
{
    const uint8_t *from = src;
    size_t at = LMZ_JOINT_HEAD + lm_joint_rest(n), room = 2 * n, escapes = 0, coded;
    bool escaped = get24(dst + 2) != 0;

    coded = at < room ? lm_exp_write(j->exp, j->work, j->symbol, n, dst + at, room - at) : 0;
    if (!coded)
        return 0;
    at += coded;
    for (size_t i = 0; escaped && (i = j->joint->escape(j->symbol, i, n)) < n; i++) {
        if (at == room)
            return 0;
        dst[at++] = (uint8_t)(from[2 * i] >> 7 | from[2 * i + 1] << 1);
        escapes++;
    }
    put24(dst + 2, escapes);
    put24(dst + 5, coded);
    return at;
}

/* ---- Decoding ---- */

bool lmz_joint_parse(const uint8_t *src, size_t len, size_t n, lmz_joint_parts *p)
{
    size_t rest = lm_joint_rest(n);
    if (len < LMZ_JOINT_HEAD || len - LMZ_JOINT_HEAD < rest || !src[1] || src[1] > LM_JOINT_LOW)
        return false;
    *p = (lmz_joint_parts){ .low = src[1], .escapes = get24(src + 2), .coded = get24(src + 5) };
    p->rest = src + LMZ_JOINT_HEAD;
    p->symbols = p->rest + rest;
    if (p->coded > len - LMZ_JOINT_HEAD - rest || (n % 4 && p->rest[rest - 1] >> 6 * n % 8))
        return false;
    p->escape = p->symbols + p->coded;
    return len - LMZ_JOINT_HEAD - rest - p->coded == p->escapes;
}

/* The exponents of the escapes, each in its element; false unless there are as many. */
static bool patch(const lmz_joint *j, const lmz_joint_parts *p, size_t n, uint8_t *out)
{
    size_t k = 0;
    for (size_t i = 0; (i = j->joint->escape(j->symbol, i, n)) < n; i++) {
        if (k == p->escapes)
            return false;
        out[2 * i] = (uint8_t)((out[2 * i] & 0x7f) | p->escape[k] << 7);
        out[2 * i + 1] = (uint8_t)((out[2 * i + 1] & 0x80) | p->escape[k++] >> 1);
    }
    return k == p->escapes;
}

bool lmz_joint_decode(const lmz_joint *j, const lmz_joint_parts *p, size_t n, void *dst)
{
    if (!lm_exp_read(j->exp, j->work, LM_EXP_LONG, p->symbols, p->coded, j->symbol, n))
        return false;
    if (!j->joint->join(j->symbol, p->rest, n, p->low, dst))
        return !p->escapes;
    return patch(j, p, n, dst);
}
