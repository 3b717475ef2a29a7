/* SPDX-License-Identifier: Apache-2.0 */
/* kv_rows.c -- codes of a cache between the order of memory and that of files. */
#include "numeric/kv_rows.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "numeric/kv_impl.h"

/* What all functions need to know; view.data is set for each page. */
typedef struct {
    lm_kv_view view;
    int64_t from, n, groups; /* tokens from .. n - 1 */
    int64_t group, span;     /* tokens; 1 where a token has its own */
    size_t row;              /* bytes of a row of codes */
    size_t each;             /* bytes of a scale */
} shape;

static int64_t groups_of(int64_t n, int64_t each)
{
    return (n + each - 1) / each;
}

static lm_code shape_of(const lm_kv_format *f, int64_t T, int64_t D, int64_t from, int64_t n,
                        shape *s, lm_err *e)
{
    bool channel = f->axis == LM_KV_CHANNEL;
    *s = (shape){ .view = { .f = f, .T = T, .D = D }, .from = from, .n = n };
    lm_code rc = lm_kv_page(f, T, D, &s->view.at, e);
    s->group = !channel ? 1 : f->group ? f->group : T;
    s->span = channel ? 1 : f->span ? f->span : T;
    s->groups = channel ? D : lm_kv_groups(f, D);
    s->row = (size_t)((channel ? n - from : D) * f->bits + 7) / 8;
    s->each = f->scale == LM_DTYPE_NONE ? 0 : lm_dtype_size(f->scale);
    return rc;
}

/* Pages with tokens. */
static int64_t pages_of(const shape *s)
{
    return s->n > s->from ? groups_of(s->n, s->view.T) - s->from / s->view.T : 0;
}

static bool are_tokens(const lm_kv_format *f, int64_t T, int64_t from, int64_t n)
{
    int64_t step = lm_kv_step(f, T);
    return from >= 0 && from <= n && n <= INT32_MAX && from % step == 0 && n % step == 0;
}

lm_code lm_kv_rows_size_of(const lm_kv_format *f, int64_t T, int64_t D, int64_t from, int64_t n,
                           lm_kv_rows_size *out, lm_err *e)
{
    shape s;
    *out = (lm_kv_rows_size){ 0 };
    if (lm_kv_page_bytes(f, T, D) == SIZE_MAX || !are_tokens(f, T, from, n)) {
        lm_code rc = shape_of(f, T, D, 0, 0, &s, e);
        return rc ? rc
                  : lm_fail(e, LM_EUSAGE, f->name, NULL,
                            "tokens %" PRId64 " to %" PRId64 ", not multiples of %" PRId64, from, n,
                            lm_kv_step(f, T));
    }
    lm_code rc = shape_of(f, T, D, from, n, &s, e);
    if (rc)
        return rc;
    bool channel = f->axis == LM_KV_CHANNEL;
    int64_t count = n - from;
    size_t scales = (size_t)(groups_of(count, s.group) * s.groups) * s.each;
    out->codes = (size_t)(channel ? D : count) * s.row;
    out->scale = scales;
    out->min = lm_kv_has_min(f) ? scales : 0;
    if (f->second)
        out->second = s.each * (size_t)(channel ? count : groups_of(count, s.span) * D);
    out->pages = pages_of(&s);
    out->outliers = out->pages * f->outliers;
    return LM_OK;
}

/* ---- Codes ---- */

/* Where the code of token t of all begins. */
static size_t bit_of(const shape *s, int64_t t, int64_t d)
{
    int64_t row = t - s->from, i = d;
    if (s->view.f->axis == LM_KV_CHANNEL)
        row = d, i = t - s->from;
    return (size_t)row * s->row * 8 + (size_t)(i * s->view.f->bits);
}

/* A code crosses at most one byte's end. */
static void or_bits(uint8_t *p, size_t bit, unsigned v, int bits)
{
    unsigned shifted = v << bit % 8;
    p[bit / 8] |= (uint8_t)shifted;
    if (bit % 8 + (size_t)bits > 8)
        p[bit / 8 + 1] |= (uint8_t)(shifted >> 8);
}

static unsigned bits_at(const uint8_t *p, size_t bit, int bits)
{
    unsigned v = p[bit / 8];
    if (bit % 8 + (size_t)bits > 8)
        v |= (unsigned)p[bit / 8 + 1] << 8;
    return v >> bit % 8 & ((1u << bits) - 1);
}

/* The codes of a token one behind another to its row. */
static void pack_row(const uint8_t *code, int64_t D, int bits, uint8_t *row)
{
    uint64_t held = 0;
    int n = 0;
    for (int64_t d = 0; d < D; d++) {
        held |= (uint64_t)code[d] << n;
        for (n += bits; n >= 8; n -= 8, held >>= 8)
            *row++ = (uint8_t)held;
    }
    if (n)
        *row = (uint8_t)held;
}

static void unpack_row(const uint8_t *row, int64_t D, int bits, uint8_t *code)
{
    uint64_t held = 0;
    int n = 0;
    for (int64_t d = 0; d < D; d++, held >>= bits, n -= bits) {
        for (; n < bits; n += 8)
            held |= (uint64_t)*row++ << n;
        code[d] = (uint8_t)(held & ((1u << bits) - 1));
    }
}

/* The codes of token t of all, which `code` has, to rows that are cleared; and back. */
static void put_row(const shape *s, int64_t t, const uint8_t *code, uint8_t *rows)
{
    const lm_kv_format *f = s->view.f;
    if (f->axis == LM_KV_TOKEN) {
        pack_row(code, s->view.D, f->bits, rows + bit_of(s, t, 0) / 8);
        return;
    }
    for (int64_t d = 0; d < s->view.D; d++)
        or_bits(rows, bit_of(s, t, d), code[d], f->bits);
}

static void get_row(const shape *s, int64_t t, const uint8_t *rows, uint8_t *code)
{
    const lm_kv_format *f = s->view.f;
    if (f->axis == LM_KV_TOKEN) {
        unpack_row(rows + bit_of(s, t, 0) / 8, s->view.D, f->bits, code);
        return;
    }
    for (int64_t d = 0; d < s->view.D; d++)
        code[d] = (uint8_t)bits_at(rows, bit_of(s, t, d), f->bits);
}

/* ---- Scales: copies between two places ---- */

/* A scale of 2 or 4 bytes. */
static inline void copy_scale(char *page, char *row, size_t bytes, bool to_page)
{
    char *to = to_page ? page : row;
    const char *from = to_page ? row : page;
    if (bytes == 2)
        memcpy(to, from, 2);
    else
        memcpy(to, from, 4);
}

/* The scales of the tokens first + begin .. first + end - 1, of a page whose first token is `first`. */
static void copy_scales(const shape *s, int64_t first, int64_t begin, int64_t end,
                        const lm_kv_rows *r, bool to_page)
{
    const lm_kv_view *v = &s->view;
    const lm_kv_format *f = v->f;
    for (int64_t t = begin; t < end && s->each; t += s->group)
        for (int64_t g = 0; g < s->groups; g++) {
            int64_t d = f->axis == LM_KV_CHANNEL ? g : g * f->group;
            size_t at = (size_t)lm_kv_scale_at(f, v->T, v->D, t, d) * s->each;
            size_t row = (size_t)((first + t - s->from) / s->group * s->groups + g) * s->each;
            copy_scale(v->data + v->at.scale + at, (char *)r->scale + row, s->each, to_page);
            if (lm_kv_has_min(f))
                copy_scale(v->data + v->at.min + at, (char *)r->min + row, s->each, to_page);
        }
    int64_t across = f->axis == LM_KV_CHANNEL ? 1 : v->D;
    for (int64_t t = begin; t < end && f->second; t += s->span)
        for (int64_t d = 0; d < across; d++) {
            size_t at = (size_t)lm_kv_second_at(f, v->T, v->D, t, d) * s->each;
            size_t row = (size_t)((first + t - s->from) / s->span * across + d) * s->each;
            copy_scale(v->data + v->at.second + at, (char *)r->second + row, s->each, to_page);
        }
}

/* ---- Outliers ---- */

static uint16_t *page_outliers(const lm_kv_view *v)
{
    return (uint16_t *)(void *)(v->data + v->at.outliers);
}

static void get_outliers(const shape *s, int64_t page, const lm_kv_rows *r)
{
    const uint16_t *p = page_outliers(&s->view);
    uint32_t begin = page ? r->begin[page] : 0;
    memcpy(r->index + begin, p + 1, 2 * (size_t)*p);
    memcpy(r->value + begin, p + 1 + s->view.f->outliers, 2 * (size_t)*p);
    r->begin[page] = begin;
    r->begin[page + 1] = begin + *p;
}

static void put_outliers(const shape *s, int64_t page, const lm_kv_rows *r)
{
    uint16_t *p = page_outliers(&s->view);
    uint32_t begin = r->begin[page];
    *p = (uint16_t)(r->begin[page + 1] - begin);
    memcpy(p + 1, r->index + begin, 2 * (size_t)*p);
    memcpy(p + 1 + s->view.f->outliers, r->value + begin, 2 * (size_t)*p);
}

/* ---- Pages ---- */

/* Tokens of the page from token `first` on that are rows: *begin .. *end - 1 of the page. */
static void tokens_of_page(const shape *s, int64_t first, int64_t *begin, int64_t *end)
{
    *begin = s->from > first ? s->from - first : 0;
    *end = s->n - first < s->view.T ? s->n - first : s->view.T;
}

void lm_kv_rows_get(const lm_kv_format *f, int64_t T, int64_t D, int64_t from, int64_t n,
                    const void *const *page, const lm_kv_rows *out)
{
    uint8_t code[LM_KV_MAX_DIM];
    lm_kv_rows_size size;
    int64_t begin, end;
    shape s;
    lm_kv_rows_size_of(f, T, D, from, n, &size, NULL);
    shape_of(f, T, D, from, n, &s, NULL);
    if (out->codes)
        memset(out->codes, 0, size.codes);
    if (f->outliers)
        out->begin[0] = 0;
    for (int64_t first = from / T * T; first < n; first += T) {
        s.view.data = (char *)(uintptr_t)page[first / T];
        tokens_of_page(&s, first, &begin, &end);
        for (int64_t t = begin; t < end && out->codes; t++) {
            lm_kv_get_token(&s.view, t, code);
            put_row(&s, first + t, code, out->codes);
        }
        copy_scales(&s, first, begin, end, out, false);
        if (f->outliers)
            get_outliers(&s, first / T - from / T, out);
    }
}

void lm_kv_rows_put(const lm_kv_format *f, int64_t T, int64_t D, int64_t from, int64_t n,
                    const lm_kv_rows *rows, void *const *page)
{
    uint8_t code[LM_KV_MAX_DIM];
    int64_t begin, end;
    shape s;
    shape_of(f, T, D, from, n, &s, NULL);
    for (int64_t first = from / T * T; first < n; first += T) {
        s.view.data = page[first / T];
        tokens_of_page(&s, first, &begin, &end);
        for (int64_t t = begin; t < end && rows->codes; t++) {
            get_row(&s, first + t, rows->codes, code);
            lm_kv_put_token(&s.view, t, code);
        }
        copy_scales(&s, first, begin, end, rows, true);
        if (f->outliers)
            put_outliers(&s, first / T - from / T, rows);
    }
}

/* ---- Rows of any content ---- */

static bool all_finite(lm_dtype d, const void *x, size_t bytes)
{
    for (size_t i = 0; i < bytes / lm_dtype_size(d); i++)
        if (!isfinite(lm_get(d, x, (int64_t)i)))
            return false;
    return true;
}

/* Bits behind the codes of a row. */
static bool clean_ends(const shape *s, const uint8_t *codes, size_t bytes)
{
    int64_t in_row = s->view.f->axis == LM_KV_CHANNEL ? s->n - s->from : s->view.D;
    int used = (int)(in_row * s->view.f->bits % 8);
    for (size_t end = s->row; used && end <= bytes; end += s->row)
        if (codes[end - 1] >> used)
            return false;
    return true;
}

static bool good_outliers(const shape *s, const lm_kv_rows *r)
{
    int64_t most = s->view.f->outliers;
    bool good = r->begin[0] == 0;
    for (int64_t p = 0; p < pages_of(s) && good; p++) {
        int64_t begin, end;
        tokens_of_page(s, (s->from / s->view.T + p) * s->view.T, &begin, &end);
        uint32_t a = r->begin[p], b = r->begin[p + 1];
        good = a <= b && b - a <= most;
        for (uint32_t i = a; i < b && good; i++)
            good = r->index[i] >= begin * s->view.D && r->index[i] < end * s->view.D &&
                   (i == a || r->index[i] > r->index[i - 1]) &&
                   isfinite(lm_f16_to_f32(r->value[i]));
    }
    return good;
}

const char *lm_kv_rows_wrong(const lm_kv_format *f, int64_t T, int64_t D, int64_t from, int64_t n,
                             const lm_kv_rows *rows)
{
    lm_kv_rows_size size;
    shape s;
    if (lm_kv_rows_size_of(f, T, D, from, n, &size, NULL))
        return "such rows do not exist";
    shape_of(f, T, D, from, n, &s, NULL);
    if (s.each && !all_finite(f->scale, rows->scale, size.scale))
        return "a scale is NaN or infinite";
    if (size.min && !all_finite(f->scale, rows->min, size.min))
        return "a minimum is NaN or infinite";
    if (size.second && !all_finite(f->scale, rows->second, size.second))
        return "a second scale is NaN or infinite";
    if (!clean_ends(&s, rows->codes, size.codes))
        return "bits behind the codes of a row are set";
    if (f->outliers && !good_outliers(&s, rows))
        return "outliers do not rise, or are too many";
    return NULL;
}
