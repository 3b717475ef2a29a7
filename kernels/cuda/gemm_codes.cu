/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_codes.cu -- products whose B is in codes: of few rows by code_few.cu; otherwise a panel of B at a time becomes numbers
 * in scratch, small enough to stay in the second-level cache of a large card, and meets A in a product of numbers. */
#include "kernels/cuda/code_few.cuh"
#include "kernels/cuda/gemm.cuh"
#include "kernels/cuda/rows.cuh"

static const int64_t panel_bytes = (int64_t)32 << 20;

static bool few_rows(const gemm_call *g)
{
    return g->m <= most_few_rows && g->tb;
}

/* Columns of C that one panel makes: rows of the weight with tb, columns of it otherwise.  A multiple of the largest block, so
 * that every format has whole eights in it. */
static int64_t panel_cols(const gemm_call *g)
{
    const int64_t each = 256, line = g->k * (int64_t)lm_dtype_size(g->ab);
    const int64_t cols = panel_bytes / line / each * each;
    const int64_t most = cols > each ? cols : each;
    return g->n < most ? g->n : most;
}

static size_t panel_size(const gemm_call *g)
{
    const size_t bytes = (size_t)(panel_cols(g) * g->k) * lm_dtype_size(g->ab);
    return (bytes + 255) & ~(size_t)255;
}

/* The product of columns [col, col + cols) with their panel at `work`. */
static gemm_call panel_call(const gemm_call *g, int64_t col, int64_t cols, char *work)
{
    gemm_call p = *g;
    p.b_codes = nullptr;
    p.n = cols;
    p.b = work, p.ldb = g->tb ? g->k : cols;
    p.c = g->c ? (char *)g->c + col * (int64_t)lm_dtype_size(g->cd) : nullptr;
    p.bias = g->bias ? g->bias + col : nullptr;
    p.work = work ? work + panel_size(g) : nullptr;
    return p;
}

/* Of whole panels and of the last one. */
size_t gemm_codes_work(const gemm_call *g, const lm_stream *s)
{
    if (few_rows(g))
        return 0;
    const int64_t each = panel_cols(g), last = g->n % each;
    gemm_call whole = panel_call(g, 0, each, nullptr), rest = panel_call(g, 0, last, nullptr);
    size_t most = gemm_work(&whole, s), other = last ? gemm_work(&rest, s) : 0;
    return 256 + panel_size(g) + (other > most ? other : most); /* 256: scratch is aligned to 64 */
}

template <class T>
static void decode_panel(const gemm_call *g, int64_t col, int64_t cols, void *to,
                         const lm_stream *s)
{
    if (g->tb)
        code_numbers<T, T>(g->b_codes, g->k, col, cols, 0, g->k, (T *)to, s);
    else
        code_numbers<T, T>(g->b_codes, g->n, 0, g->k, col, cols, (T *)to, s);
}

static void run_panels(const gemm_call *g, lm_stream *s)
{
    char *work = (char *)(((uintptr_t)g->work + 255) & ~(uintptr_t)255);
    const int64_t each = panel_cols(g);
    for (int64_t col = 0; col < g->n; col += each) {
        const int64_t cols = g->n - col < each ? g->n - col : each;
        gemm_call p = panel_call(g, col, cols, work);
        if (g->ab == LM_DTYPE_F32)
            decode_panel<float>(g, col, cols, work, s);
        else if (g->ab == LM_DTYPE_BF16)
            decode_panel<bf16>(g, col, cols, work, s);
        else
            decode_panel<f16>(g, col, cols, work, s);
        gemm_run(&p, s);
    }
}

void gemm_codes_run(const gemm_call *g, lm_stream *s)
{
    code_few f = {};
    if (!few_rows(g)) {
        run_panels(g, s);
        return;
    }
    f.w = g->b_codes;
    f.act = g->ab;
    f.m = g->m, f.n = g->n, f.k = g->k;
    f.x = g->a, f.ldx = g->lda;
    f.y = g->c, f.ldy = g->ldc, f.wide_y = g->cd == LM_DTYPE_F32;
    f.bias = g->bias;
    code_few_run(&f, s);
}
