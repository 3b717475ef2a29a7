/* SPDX-License-Identifier: Apache-2.0 */
/* code_rows.cu -- stretches of rows in codes, and a part of a matrix as numbers. */
#include "kernels/cuda/code_rows.cuh"

/* ---- stretches ---- */

static int64_t row_bytes(lm_code_kind kind, int64_t cols)
{
    switch (kind) {
#define LM_CASE(k) \
    case k:        \
        return cols / coder<k>::block * coder<k>::bytes;
        LM_EACH_CODE(LM_CASE)
#undef LM_CASE
    default:
        return 0;
    }
}

bool code_next(const lm_code_rows *c, int64_t cols, int *i, code_stretch *out)
{
    if (*i >= c->n)
        return false;
    const struct lm_code_run first = lm_code_rows_run(c, (*i)++);
    code_stretch s = {};
    s.kind = lm_code_kind_of(first.format);
    s.row = first.row, s.rows = s.each = first.rows;
    s.pitch = row_bytes(s.kind, cols);
    s.data = first.data;
    /* run k of a stretch lies k * apart bytes behind its first */
    for (int64_t k = 1; *i < c->n; (*i)++, k++) {
        const struct lm_code_run next = lm_code_rows_run(c, *i);
        const int64_t behind = (int64_t)((uintptr_t)next.data - (uintptr_t)first.data);
        if (next.format != first.format || next.rows != first.rows ||
            (k > 1 && behind != k * s.apart))
            break;
        s.apart = k > 1 ? s.apart : behind;
        s.rows += next.rows;
    }
    *out = s;
    return true;
}

/* ---- numbers ---- */

template <class T, class Y>
__global__ void __launch_bounds__(256)
    code_numbers_kernel(code_stretch s, int64_t from, int64_t to, int64_t col, int64_t cols,
                        bool packed, int64_t out_row, Y *out)
{
    const int64_t eights = cols / 8, count = (to - from) * eights;
#pragma unroll 1
    for (int64_t i = global_thread(); i < count; i += global_threads()) {
        const int64_t row = from + i / eights, eight = i % eights;
        T v[8];
        Y y[8];
        rounded_eight(s.kind, load_eight(s.kind, code_row(s, row - s.row), col / 8 + eight),
                      col / 8 + eight, v);
#pragma unroll
        for (int j = 0; j < 8; j++)
            y[j] = from_float<Y>(to_float(v[j]));
        put_eight(out + (row - out_row) * cols + eight * 8, packed, y);
    }
}

template <class T, class Y>
void code_numbers(const lm_code_rows *c, int64_t width, int64_t row, int64_t rows, int64_t col,
                  int64_t cols, Y *out, const lm_stream *s)
{
    code_stretch w;
    for (int i = 0; code_next(c, width, &i, &w);) {
        const int64_t from = w.row > row ? w.row : row,
                      to = w.row + w.rows < row + rows ? w.row + w.rows : row + rows;
        if (from < to)
            LM_LAUNCH((code_numbers_kernel<T, Y>), grid_for((to - from) * cols / 8, 256, s), 256, 0,
                      s, w, from, to, col, cols, packs<Y>(wide<Y>::n, cols, out), row, out);
    }
}

#define NUMBERS(T, Y)                                                                   \
    template void code_numbers<T, Y>(const lm_code_rows *c, int64_t width, int64_t row, \
                                     int64_t rows, int64_t col, int64_t cols, Y *out,   \
                                     const lm_stream *s);
NUMBERS(float, float)
NUMBERS(bf16, bf16)
NUMBERS(f16, f16)
NUMBERS(bf16, float)
NUMBERS(f16, float)
