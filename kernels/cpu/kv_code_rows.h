/* SPDX-License-Identifier: Apache-2.0 */
/* kv_code_rows.h -- codes between pages and the order of files (numeric/kv_rows.h), 16 tokens at
 * a time; scales and outliers are copied by the definition's own loops. */
#ifndef LM_KERNELS_CPU_KV_CODE_ROWS_H
#define LM_KERNELS_CPU_KV_CODE_ROWS_H

#include "kernels/cpu/kv_code_lines.h"
#include "numeric/kv_rows.h"

/* Tokens [from, end) of a head, coded by channel or by token; row: bytes of a row of codes. */
typedef struct {
    const lm_kv_format *f;
    int64_t T, D, ld, from, end;
    size_t row;
    uint8_t *codes;
} kv_moving;

/* Tokens [first, last) of the 16 from token t on, rows of tokens, to the rows of files or from
 * there. */
LM_INLINE void move_tokens(const kv_moving *m, bool pack, int64_t t, int64_t first, int64_t last,
                           uint8_t *line, uint8_t *code)
{
    if (pack)
        tokens_of_lines(m->f->values, m->ld, line, code);
    for (int64_t i = first; i < last; i++)
        move_codes(m->f->bits, pack, code + (i - t) * m->ld, m->D,
                   m->codes + (size_t)(i - m->from) * m->row);
    if (!pack)
        lines_of_tokens(m->f->values, m->ld, code, line);
}

/* The same by channel; m->from is a multiple of 16. */
LM_INLINE void move_channels(const kv_moving *m, bool pack, int64_t t, int64_t last, uint8_t *line,
                             uint8_t *code)
{
    size_t at = (size_t)((t - m->from) * m->f->bits / 8);
    if (pack)
        channels_of_lines(m->f->values, m->ld, line, code);
    for (int64_t d = 0; d < m->D; d++)
        move_codes(m->f->bits, pack, code + d * 16, last - t, m->codes + (size_t)d * m->row + at);
    if (!pack)
        lines_of_channels(m->f->values, m->ld, code, line);
}

/* The 16 tokens from t on of a page. */
static void move_patch(const kv_moving *m, bool pack, const char *page, int64_t t)
{
    uint8_t line[KV_PATCH] __attribute__((aligned(64))), code[KV_PATCH];
    const kv_patch p = patch_of(m->f, m->T, m->D, page, t % m->T);
    int64_t first = t > m->from ? t : m->from;
    int64_t last = t + LM_KV_TILE < m->end ? t + LM_KV_TILE : m->end;
    size_t bytes = (size_t)(LM_KV_TILE * m->ld);
    if (pack)
        take_patch(&p, line);
    else if (first > t || last < t + LM_KV_TILE || m->ld > m->D)
        memset(code, 0, bytes);
    if (m->f->axis == LM_KV_TOKEN)
        move_tokens(m, pack, t, first, last, line, code);
    else
        move_channels(m, pack, t, last, line, code);
    if (!pack)
        put_patch(&p, line);
}

/* Codes of the tokens [from, end); false: they do not lie at bytes. */
static bool move_rows(const lm_kv_format *f, int64_t T, int64_t D, int64_t from, int64_t end,
                      uint8_t *codes, bool pack, const void *const *page)
{
    bool channel = f->axis == LM_KV_CHANNEL;
    kv_moving m = { f, T, D, (D + 15) / 16 * 16, from, end, 0, codes };
    m.row = (size_t)((channel ? end - from : D) * f->bits + 7) / 8;
    if (channel && from % LM_KV_TILE)
        return false;
    for (int64_t t = from / LM_KV_TILE * LM_KV_TILE; t < end; t += LM_KV_TILE)
        move_patch(&m, pack, page[t / T], t);
    return true;
}

static void get_rows(const lm_kv_format *f, int64_t T, int64_t D, int64_t from, int64_t end,
                     const void *const *page, const lm_kv_rows *out)
{
    lm_kv_rows rest = *out;
    if (move_rows(f, T, D, from, end, out->codes, true, page))
        rest.codes = NULL;
    lm_kv_rows_get(f, T, D, from, end, page, &rest);
}

static void put_rows(const lm_kv_format *f, int64_t T, int64_t D, int64_t from, int64_t end,
                     const lm_kv_rows *rows, void *const *page)
{
    lm_kv_rows rest = *rows;
    if (move_rows(f, T, D, from, end, rows->codes, false, (const void *const *)page))
        rest.codes = NULL;
    lm_kv_rows_put(f, T, D, from, end, &rest, page);
}

#endif
