/* SPDX-License-Identifier: Apache-2.0 */
/* cachegen_tables.c -- distributions of a part's channels: which channels share one, and their form
 * in a file.
 *
 * Channels are sorted by the entropy of their counts and cut into classes of equal size.  Symbols are
 * centred (differences by nature, anchors by their mean code), so that channels of about the same
 * entropy have about the same distribution.  Short caches need few classes, whose tables cost little;
 * long ones reach a table for each channel. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kv/cachegen_impl.h"

enum {
    SLOTS = 1 << LM_RANS_BITS,
    TABLE_BYTES = 2 + 3 * LM_RANS_SYMBOLS, /* most bytes of a table */
    HEAD_BYTES = 12,
    PRODUCTS = 1024,
};

/* ---- A table in a file ---- */

static size_t put_table(const uint16_t *start, int symbols, uint8_t *out)
{
    uint8_t *p = out + 2;
    int first = 0, last = symbols - 1;
    while (start[first + 1] == 0)
        first++;
    while (start[last] == SLOTS)
        last--;
    out[0] = (uint8_t)first, out[1] = (uint8_t)last;
    for (int s = first; s <= last; s++) {
        unsigned f = (unsigned)(start[s + 1] - start[s]);
        for (; f >= 128; f >>= 7)
            *p++ = (uint8_t)(f | 128);
        *p++ = (uint8_t)f;
    }
    return (size_t)(p - out);
}

/* Bytes consumed, 0 if they are not a table. */
static size_t get_table(const uint8_t *p, size_t len, int symbols, uint16_t *start)
{
    size_t at = 2;
    int sum = 0, width = lm_rans_width(symbols);
    if (len < 2 || p[0] > p[1] || p[1] >= symbols)
        return 0;
    for (int s = 0; s < width; s++) {
        start[s] = (uint16_t)sum;
        if (s < p[0] || s > p[1])
            continue;
        int f = 0, shift = 0;
        do {
            if (at == len || shift > 14)
                return 0;
            f |= (p[at] & 127) << shift;
            shift += 7;
        } while (p[at++] & 128);
        sum += f;
        if (sum > SLOTS || (!f && (s == p[0] || s == p[1])))
            return 0;
    }
    return sum == SLOTS ? at : 0;
}

/* ---- Choosing classes ---- */

typedef struct {
    double entropy;
    int64_t channel;
} ranked;

static int by_entropy(const void *a, const void *b)
{
    const ranked *x = a, *y = b;
    if (x->entropy != y->entropy)
        return x->entropy < y->entropy ? -1 : 1;
    return x->channel < y->channel ? -1 : 1;
}

/* Mean bits per symbol; product[n] = n log2(n) for n < PRODUCTS. */
static double entropy_of(const uint32_t *count, int symbols, const double *product)
{
    double all = 0, sum = 0;
    for (int s = 0; s < symbols; s++) {
        all += count[s];
        sum += count[s] < PRODUCTS ? product[count[s]] : count[s] * log2(count[s]);
    }
    return all > 0 ? log2(all) - sum / all : 0;
}

static int64_t class_begin(int64_t channels, int64_t classes, int64_t i)
{
    return channels / classes * i + channels % classes * i / classes;
}

/* The counts of a class, halved until their sum fits; those that are not 0 stay so. */
static void merge(const ranked *order, int64_t n, const uint32_t *count, int symbols,
                  uint32_t *merged)
{
    uint64_t sum[LM_RANS_SYMBOLS] = { 0 }, all = 0;
    int shift = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t *c = count + order[i].channel * symbols;
        for (int s = 0; s < symbols; s++)
            sum[s] += c[s], all += c[s];
    }
    while (all >> shift > UINT32_MAX - LM_RANS_SYMBOLS)
        shift++;
    for (int s = 0; s < symbols; s++)
        merged[s] = (uint32_t)(sum[s] >> shift) + (sum[s] && !(sum[s] >> shift));
}

/* The bits of all counts and tables with `classes` classes; the tables go to start[class] if it is
 * not NULL. */
static double fit_classes(const ranked *order, int64_t channels, int64_t classes,
                          const uint32_t *count, int symbols, uint16_t *start)
{
    double bits = 0;
    for (int64_t i = 0; i < classes; i++) {
        int64_t begin = class_begin(channels, classes, i);
        uint32_t merged[LM_RANS_SYMBOLS];
        uint16_t table[256];
        uint8_t bytes[TABLE_BYTES];
        merge(order + begin, class_begin(channels, classes, i + 1) - begin, count, symbols, merged);
        lm_rans_fit(merged, symbols, table);
        bits +=
            lm_rans_bits(merged, symbols, table) + 8.0 * (double)put_table(table, symbols, bytes);
        if (start)
            memcpy(start + i * lm_rans_width(symbols), table,
                   (size_t)lm_rans_width(symbols) * sizeof *table);
    }
    return bits + 8.0 * (double)channels * (classes > 256 ? 2 : 1);
}

static lm_code alloc_set(cachegen_tables *t, int set, lm_err *e)
{
    size_t width = (size_t)lm_rans_width(cachegen_table_symbols(t, set));
    lm_code rc = lm_alloc_n(&t->start[set], (size_t)t->tables[set] * width, sizeof *t->start[set],
                            "distributions of a cache", e);
    return rc ? rc
              : lm_alloc_n(&t->at[set], (size_t)cachegen_channels(&t->part), sizeof *t->at[set],
                           "distributions of a cache", e);
}

static lm_code fit_set(cachegen_tables *t, int set, const uint32_t *count, ranked *order, lm_err *e)
{
    int64_t channels = cachegen_channels(&t->part), best = 1, worse = 0;
    int symbols = cachegen_table_symbols(t, set);
    double least = INFINITY, product[PRODUCTS] = { 0 };
    for (int n = 1; n < PRODUCTS; n++)
        product[n] = n * log2(n);
    for (int64_t c = 0; c < channels; c++)
        order[c] = (ranked){ entropy_of(count + c * symbols, symbols, product), c };
    qsort(order, (size_t)channels, sizeof *order, by_entropy);
    /* the cost has one minimum, but for noise */
    for (int64_t n = 1; worse < 3; n = 2 * n < channels ? 2 * n : channels) {
        double bits = fit_classes(order, channels, n, count, symbols, NULL);
        worse = bits < least ? 0 : worse + 1;
        if (bits < least)
            least = bits, best = n;
        if (n == channels)
            break;
    }
    t->tables[set] = (int)best;
    lm_code rc = alloc_set(t, set, e);
    if (rc)
        return rc;
    fit_classes(order, channels, best, count, symbols, t->start[set]);
    for (int64_t i = 0; i < best; i++)
        for (int64_t c = class_begin(channels, best, i); c < class_begin(channels, best, i + 1);
             c++)
            t->at[set][order[c].channel] = (uint32_t)(i * lm_rans_width(symbols));
    return LM_OK;
}

/* ---- Anchors relative to their mean ---- */

static uint8_t to_symbol(uint8_t code, uint8_t mean)
{
    int s = code - mean + CACHEGEN_MIDDLE;
    return (uint8_t)(s < 0                   ? s + CACHEGEN_ANCHORS
                     : s >= CACHEGEN_ANCHORS ? s - CACHEGEN_ANCHORS
                                             : s);
}

static uint8_t from_symbol(uint8_t symbol, uint8_t mean)
{
    int c = symbol + mean - CACHEGEN_MIDDLE;
    return (uint8_t)(c < 0                   ? c + CACHEGEN_ANCHORS
                     : c >= CACHEGEN_ANCHORS ? c - CACHEGEN_ANCHORS
                                             : c);
}

static void centre(cachegen_tables *t, uint32_t *count)
{
    for (int64_t c = 0; c < cachegen_channels(&t->part); c++, count += CACHEGEN_ANCHORS) {
        uint32_t other[CACHEGEN_ANCHORS];
        uint64_t all = 0, sum = 0;
        for (uint64_t s = 0; s < CACHEGEN_ANCHORS; s++)
            all += count[s], sum += count[s] * s;
        t->mean[c] = (uint8_t)(all ? (sum + all / 2) / all : CACHEGEN_MIDDLE);
        for (int s = 0; s < CACHEGEN_ANCHORS; s++)
            other[to_symbol((uint8_t)s, t->mean[c])] = count[s];
        memcpy(count, other, sizeof other);
    }
}

void cachegen_to_symbols(const cachegen_tables *t, uint8_t *code, int64_t n)
{
    int64_t channels = cachegen_channels(&t->part);
    for (int64_t i = 0; i < n; i++, code += channels)
        for (int64_t c = 0; cachegen_is_anchor(i) && c < channels; c++)
            code[c] = to_symbol(code[c], t->mean[c]);
}

void cachegen_from_symbols(const cachegen_tables *t, uint8_t *code, int64_t n)
{
    int64_t channels = cachegen_channels(&t->part);
    for (int64_t i = 0; i < n; i++, code += channels)
        for (int64_t c = 0; cachegen_is_anchor(i) && c < channels; c++)
            code[c] = from_symbol(code[c], t->mean[c]);
}

/* ---- All of a part ---- */

static lm_code alloc_mean(cachegen_tables *t, lm_err *e)
{
    return lm_alloc_n(&t->mean, (size_t)cachegen_channels(&t->part), 1, "distributions of a cache",
                      e);
}

lm_code cachegen_fit(cachegen_tables *t, cachegen_counts *counts, lm_err *e)
{
    ranked *order = NULL;
    lm_code rc = alloc_mean(t, e);
    rc = rc ? rc
            : lm_alloc_n(&order, (size_t)cachegen_channels(&t->part), sizeof *order,
                         "distributions of a cache", e);
    if (!rc) {
        centre(t, counts->anchor);
        rc = fit_set(t, 0, counts->anchor, order, e);
    }
    rc = rc ? rc : fit_set(t, 1, counts->difference, order, e);
    lm_free(order);
    return rc;
}

static lm_code add16(lm_buf *out, unsigned v, lm_err *e)
{
    return lm_buf_add(out, (uint8_t[2]){ (uint8_t)v, (uint8_t)(v >> 8) }, 2, e);
}

lm_code cachegen_tables_write(const cachegen_tables *t, lm_buf *out, lm_err *e)
{
    int64_t channels = cachegen_channels(&t->part);
    lm_code rc = add16(out, (unsigned)channels & 0xffff, e);
    rc = rc ? rc : add16(out, (unsigned)(channels >> 16), e);
    rc = rc ? rc : add16(out, (unsigned)t->part.bins, e);
    for (int set = 0; set < 2 && !rc; set++) /* minus one: 65536 tables fit */
        rc = add16(out, (unsigned)t->tables[set] - 1, e);
    rc = rc ? rc : add16(out, 0, e);
    rc = rc ? rc : lm_buf_add(out, t->mean, (size_t)channels, e);
    for (int set = 0; set < 2; set++) {
        uint32_t width = (uint32_t)lm_rans_width(cachegen_table_symbols(t, set));
        for (int64_t c = 0; c < channels && !rc; c++) {
            uint32_t table = t->at[set][c] / width;
            rc = t->tables[set] > 256 ? add16(out, table, e)
                                      : lm_buf_add(out, &(uint8_t){ (uint8_t)table }, 1, e);
        }
    }
    for (int set = 0; set < 2; set++) {
        int symbols = cachegen_table_symbols(t, set);
        for (int64_t i = 0; i < t->tables[set] && !rc; i++) {
            uint8_t bytes[TABLE_BYTES];
            size_t n = put_table(t->start[set] + i * lm_rans_width(symbols), symbols, bytes);
            rc = lm_buf_add(out, bytes, n, e);
        }
    }
    return rc;
}

static unsigned get16(const uint8_t *p)
{
    return p[0] | (unsigned)p[1] << 8;
}

static lm_code bad(const char *what, lm_err *e)
{
    return lm_fail(e, LM_EFORMAT, "", "fetch or write it again", "damaged tables: %s", what);
}

/* The table of each channel; *p moves behind. */
static bool read_classes(cachegen_tables *t, int set, const uint8_t **p)
{
    uint32_t width = (uint32_t)lm_rans_width(cachegen_table_symbols(t, set));
    bool wide = t->tables[set] > 256, good = true;
    for (int64_t c = 0; c < cachegen_channels(&t->part); c++) {
        unsigned table = wide ? get16(*p) : **p;
        *p += wide ? 2 : 1;
        good = good && table < (unsigned)t->tables[set];
        t->at[set][c] = table * width;
    }
    return good;
}

static bool read_set(cachegen_tables *t, int set, const uint8_t **p, const uint8_t *end)
{
    int symbols = cachegen_table_symbols(t, set);
    for (int64_t i = 0; i < t->tables[set]; i++) {
        size_t n =
            get_table(*p, (size_t)(end - *p), symbols, t->start[set] + i * lm_rans_width(symbols));
        if (!n)
            return false;
        *p += n;
    }
    return true;
}

lm_code cachegen_tables_read(cachegen_tables *t, const uint8_t *p, size_t len, lm_err *e)
{
    const uint8_t *end = p + len;
    int64_t channels = cachegen_channels(&t->part);
    size_t need = HEAD_BYTES + (size_t)channels;
    if (len < HEAD_BYTES)
        return bad("they are cut", e);
    if ((get16(p) | (int64_t)get16(p + 2) << 16) != channels ||
        get16(p + 4) != (unsigned)t->part.bins)
        return lm_fail(e, LM_EFORMAT, "", "fetch or write it again",
                       "tables of %lld channels and %u bins, not of %lld and %d",
                       (long long)(get16(p) | (int64_t)get16(p + 2) << 16), get16(p + 4),
                       (long long)channels, t->part.bins);
    for (int set = 0; set < 2; set++) {
        t->tables[set] = (int)get16(p + 6 + 2 * set) + 1;
        need += (size_t)channels * (t->tables[set] > 256 ? 2 : 1);
        /* a table has two bytes or more: bounds what is allocated */
        need += 2 * (size_t)t->tables[set];
        if (t->tables[set] > channels)
            return bad("more distributions than channels", e);
    }
    if (get16(p + 10) || len < need)
        return bad("they are cut", e);
    lm_code rc = alloc_mean(t, e);
    rc = rc ? rc : alloc_set(t, 0, e);
    rc = rc ? rc : alloc_set(t, 1, e);
    if (rc)
        return rc;
    p += HEAD_BYTES;
    for (int64_t c = 0; c < channels; c++) {
        t->mean[c] = *p++;
        if (t->mean[c] >= CACHEGEN_ANCHORS)
            return bad("a mean beyond its range", e);
    }
    if (!read_classes(t, 0, &p) || !read_classes(t, 1, &p))
        return bad("a channel names a distribution that is not there", e);
    if (!read_set(t, 0, &p, end) || !read_set(t, 1, &p, end) || p != end)
        return bad("a distribution is not valid", e);
    return LM_OK;
}

void cachegen_tables_fini(cachegen_tables *t)
{
    lm_free(t->mean);
    for (int set = 0; set < 2; set++) {
        lm_free(t->start[set]);
        lm_free(t->at[set]);
    }
}
