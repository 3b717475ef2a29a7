/* SPDX-License-Identifier: Apache-2.0 */
/* code_rows.c -- rows of codes as numbers. */
#include "numeric/code_rows.h"

#include <string.h>

#include "base/mem.h"
#include "numeric/kv_format.h"

static bool rows_apart(const lm_format *f)
{
    for (int p = 0; p < f->n_planes; p++)
        if (f->plane[p].rows != 1)
            return false;
    return true;
}

bool lm_format_codes(const lm_format *f, int64_t cols)
{
    lm_tensor_size size;
    return f->decode && rows_apart(f) && !lm_tensor_bytes(f, 1, &cols, &size, NULL);
}

static size_t page_bytes(const lm_tensor *t)
{
    size_t bytes = t->ndim == 4 ? lm_kv_page_bytes(t->kv, t->dim[2], t->dim[3]) : SIZE_MAX;
    if (bytes == SIZE_MAX || t->dim[0] < 0 || t->dim[1] < 0 ||
        !lm_mul_ok(bytes, (size_t)t->dim[0], &bytes) ||
        !lm_mul_ok(bytes, (size_t)t->dim[1], &bytes))
        return SIZE_MAX;
    return bytes;
}

/* The first run with rows behind `row` of the matrix. */
static int run_at(const lm_code_rows *c, int64_t row)
{
    int low = 0, high = c->n;
    while (low < high) {
        const int middle = low + (high - low) / 2;
        const struct lm_code_run r = lm_code_rows_run(c, middle);
        if (r.row + r.rows <= row)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

lm_code_rows lm_code_rows_part(const lm_code_rows *c, int64_t row, int64_t rows)
{
    const int first = run_at(c, row);
    int n = 0;
    while (first + n < c->n && lm_code_rows_run(c, first + n).row < row + rows)
        n++;
    return (lm_code_rows){ .n = n, .before = c->before + row, .run = c->run + first };
}

size_t lm_code_rows_bytes(const lm_code_rows *c, int64_t row, int64_t rows, int64_t cols)
{
    lm_tensor_size size;
    size_t sum = 0;
    for (int i = run_at(c, row); i < c->n; i++) {
        const struct lm_code_run r = lm_code_rows_run(c, i);
        const int64_t begin = r.row > row ? r.row : row,
                      end = r.row + r.rows < row + rows ? r.row + r.rows : row + rows;
        if (begin >= end)
            break;
        lm_tensor_bytes(r.format, 2, (int64_t[]){ end - begin, cols }, &size, NULL);
        if (!lm_add_ok(sum, size.all, &sum))
            return SIZE_MAX;
    }
    return sum;
}

size_t lm_stored_bytes(const lm_tensor *t)
{
    if (t->kv)
        return page_bytes(t);
    return t->codes ? lm_code_rows_bytes(t->codes, 0, t->dim[0], t->dim[1])
                    : lm_plain_bytes(t->dtype, lm_tensor_count(t));
}

size_t lm_code_rows_scratch(lm_dtype to, int64_t cols)
{
    return to == LM_DTYPE_F32 ? 0 : (size_t)cols * sizeof(float);
}

/* The planes of row number `row` of the run. */
static void planes_at(const struct lm_code_run *r, int64_t row, int64_t cols, const void **plane)
{
    const uint8_t *at = r->data;
    for (int p = 0; p < r->format->n_planes; p++) {
        size_t bytes = lm_plane_bytes(&r->format->plane[p], 1, cols);
        plane[p] = at + (size_t)row * bytes;
        at += (size_t)r->rows * bytes;
    }
}

/* Rows from `row` of the run on as F32. */
static void decode(const struct lm_code_run *r, int64_t row, int64_t rows, int64_t cols,
                   const lm_code_rows_coder *by, void *y)
{
    const void *plane[LM_MAX_PLANES] = { NULL };
    planes_at(r, row, cols, plane);
    if (!by || !by->decode(r->format, plane, rows, cols, y))
        r->format->decode(r->format, plane, rows, cols, y, cols);
}

/* The same as BF16, if the coder knows how to. */
static bool decode_bf16(const struct lm_code_run *r, int64_t row, int64_t rows, int64_t cols,
                        const lm_code_rows_coder *by, uint16_t *y)
{
    const void *plane[LM_MAX_PLANES] = { NULL };
    planes_at(r, row, cols, plane);
    return by && by->decode_bf16(r->format, plane, rows, cols, y);
}

/* Elements of the type wanted. */
static void copy(const struct lm_code_run *r, int64_t row, int64_t rows, int64_t cols, void *y)
{
    const void *plane[LM_MAX_PLANES] = { NULL };
    planes_at(r, row, cols, plane);
    memcpy(y, plane[0], lm_plane_bytes(&r->format->plane[0], rows, cols));
}

/* Rows as `to`, not F32: one at a time, so that it stays in the cache. */
static void decode_as(const struct lm_code_run *r, int64_t row, int64_t rows, int64_t cols,
                      lm_dtype to, const lm_code_rows_coder *by, char *y, void *scratch)
{
    if (to == LM_DTYPE_BF16 && decode_bf16(r, row, rows, cols, by, (uint16_t *)y))
        return;
    for (int64_t k = 0; k < rows; k++, y += (size_t)cols * lm_dtype_size(to)) {
        decode(r, row + k, 1, cols, by, scratch);
        if (by && to == LM_DTYPE_BF16)
            by->to_bf16(scratch, (uint16_t *)y, cols);
        else
            lm_convert(LM_DTYPE_F32, scratch, to, y, cols);
    }
}

void lm_code_rows_numbers(const lm_code_rows *c, int64_t row, int64_t rows, int64_t cols,
                          lm_dtype to, const lm_code_rows_coder *by, void *dst, void *scratch)
{
    char *y = dst;
    for (int i = run_at(c, row); i < c->n && rows > 0; i++) {
        const struct lm_code_run run = lm_code_rows_run(c, i), *r = &run;
        int64_t first = row - r->row, n = r->rows - first < rows ? r->rows - first : rows;
        if (r->format->element == to)
            copy(r, first, n, cols, y);
        else if (to == LM_DTYPE_F32)
            decode(r, first, n, cols, by, y);
        else
            decode_as(r, first, n, cols, to, by, y, scratch);
        y += (size_t)(n * cols) * lm_dtype_size(to);
        row += n;
        rows -= n;
    }
}
