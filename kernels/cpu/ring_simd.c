/* SPDX-License-Identifier: Apache-2.0 */
/* ring_simd.c -- sums of blocks of the ring (kernels/ring.h) on vectors, one pass over memory each.
 *
 * Sums stay in F32 from block to block while blocks are in the type of activations, so that the operands of a call may be of
 * two types; for types other than F32 and BF16 the reference runs. */
#include "kernels/cpu/ring.h"

#include "kernels/cpu/simd.h"
#include "kernels/cpu/tables.h"

/* An operand from its number `at` on. */
typedef struct {
    void *data;
    int64_t at;
} span;

/* `count` numbers: o = x a + y b. */
LM_INLINE void blend(lm_dtype ta, lm_dtype tb, lm_dtype to, span a, span b, span o, float x,
                     float y, int64_t count)
{
    const vf vx = vf_set(x), vy = vf_set(y);
    VF_FOR(i, n, count, {
        const vf p = vx * vf_get_any(ta, a.data, a.at + i, n),
                 q = vf_get_any(tb, b.data, b.at + i, n);
        vf_put_any(to, o.data, o.at + i, vf_fma(vy, q, p), n);
    });
}

/* n numbers of result 0 from `at` on: x times operand 0 there plus y times operand `second` from `from` on. */
LM_INLINE void blend_call(lm_dtype tb, const lm_call *c, int second, int64_t at, int64_t from,
                          float x, float y, int64_t n)
{
    const lm_dtype ta = c->in[0].dtype, to = c->out[0].dtype;
    const span a = { c->in[0].data, at }, b = { c->in[second].data, from },
               o = { c->out[0].data, at };
    if (ta == LM_DTYPE_F32 && to == LM_DTYPE_F32)
        blend(LM_DTYPE_F32, tb, LM_DTYPE_F32, a, b, o, x, y, n);
    else if (ta == LM_DTYPE_F32)
        blend(LM_DTYPE_F32, tb, LM_DTYPE_BF16, a, b, o, x, y, n);
    else if (to == LM_DTYPE_F32)
        blend(LM_DTYPE_BF16, tb, LM_DTYPE_F32, a, b, o, x, y, n);
    else
        blend(LM_DTYPE_BF16, tb, LM_DTYPE_BF16, a, b, o, x, y, n);
}

LM_INLINE void copy(lm_dtype tb, const lm_call *c, int64_t at, int64_t from, int64_t count)
{
    const void *b = c->in[1].data;
    void *y = c->out[0].data;
    if (c->out[0].dtype == LM_DTYPE_F32)
        VF_FOR(i, n, count,
               { vf_put_any(LM_DTYPE_F32, y, at + i, vf_get_any(tb, b, from + i, n), n); });
    else
        VF_FOR(i, n, count,
               { vf_put_any(LM_DTYPE_BF16, y, at + i, vf_get_any(tb, b, from + i, n), n); });
}

LM_INLINE void add_rows(lm_dtype tb, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    const bool adds = opt_data(c->in, c->n_in, 0) != NULL;
    const int64_t w = c->out[0].dim[1], first = ((const lm_ring_attr *)c->attr)->first;
    for (int64_t i = begin; i < end; i++) {
        const int64_t from = i * c->in[1].dim[1] + first;
        if (adds)
            blend_call(tb, c, 1, i * w, from, 1, 1, w);
        else
            copy(tb, c, i * w, from, w);
    }
}
VF_TYPED(add_rows)

LM_INLINE void merge_rows(lm_dtype tb, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    const lm_ring_merge_attr *a = c->attr;
    const float *la = c->in[1].data, *lb = c->in[3].data;
    float *lse = c->out[1].data;
    const int64_t cols = c->out[0].dim[1], n = cols / a->heads;
    for (int64_t i = begin; i < end; i++)
        for (int64_t h = 0; h < a->heads; h++) {
            const int64_t k = ring_merge_place(a, i, h), at = i * cols + h * n;
            double by[2];
            lse[k] = (float)ring_merge_lse(a->undivided, la[k], lb[k], by);
            blend_call(tb, c, 2, at, at, (float)by[0], (float)by[1], n);
        }
}
VF_TYPED(merge_rows)

static const lm_kernel *reference(const char *op)
{
    const lm_kernel *k = lm_ring_ref_kernels;
    while (strcmp(k->op, op))
        k++;
    return k;
}

static bool is_served(const lm_tensor *t)
{
    return !t->ndim || t->dtype == LM_DTYPE_F32 || t->dtype == LM_DTYPE_BF16;
}

static bool are_served(const lm_call *c)
{
    return is_served(&c->in[0]) && is_served(&c->out[0]);
}

static size_t add_work(const lm_call *c, int threads)
{
    return are_served(c) ? 0 : reference("ring_add")->work(c, threads);
}

static size_t merge_work(const lm_call *c, int threads)
{
    return are_served(c) ? 0 : reference("ring_merge")->work(c, threads);
}

static void run(const lm_call *c, lm_par_fn fn)
{
    lm_par_for(c->par, c->out[0].dim[0], grain_rows(c->out[0].dim[1]), fn, (void *)(uintptr_t)c);
}

static void ring_add(const lm_call *c)
{
    if (!are_served(c)) {
        reference("ring_add")->run(c);
        return;
    }
    if (opt_data(c->in, c->n_in, 0))
        ring_wait(c, 0);
    run(c, VF_PICK(add_rows, c->in[1].dtype));
}

static void ring_merge(const lm_call *c)
{
    if (are_served(c))
        run(c, VF_PICK(merge_rows, c->in[2].dtype));
    else
        reference("ring_merge")->run(c);
}

const lm_kernel LM_TABLE_NAME(ring, LM_SIMD)[] = {
    VF_KERNEL("ring_add", ring_add, add_work),
    VF_KERNEL("ring_merge", ring_merge, merge_work),
    VF_KERNEL_END,
};
