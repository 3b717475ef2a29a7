/* SPDX-License-Identifier: Apache-2.0 */
/* route_rows_simd.c -- the order of rows by expert, and rows there and back: each row is read and
 * written once. */
#include "kernels/route.h"

#include "kernels/cpu/route_sort.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/tables.h"

/* ---- plan ---- */

static void route_plan(const lm_call *c)
{
    const lm_route_plan_attr *a = c->attr;
    route_sort j = { .expert = c->in[0].data,
                     .count = lm_tensor_count(&c->in[0]),
                     .experts = a->experts,
                     .pad = a->pad,
                     .rows = c->out[1].dim[0],
                     .offsets = c->out[0].data,
                     .from = c->out[1].data,
                     .place = c->out[2].data,
                     .at = c->work };
    route_sort_run(&j, c->par);
}

static size_t route_plan_work(const lm_call *c, int threads)
{
    const lm_route_plan_attr *a = c->attr;
    (void)threads;
    return route_sort_ints(lm_tensor_count(&c->in[0]), a->experts) * sizeof(int32_t);
}

/* ---- lines ----
 *
 * Rows are at random places, and so short that the hardware has just begun to fetch one when it
 * ends.  So a line of a row is processed while the same line of the next row is fetched.  Results
 * beyond the caches are stored past them. */

enum { LINE = 64, BEYOND = 8 << 20 }; /* bytes */

/* Whether rows of `bytes`, `all` together, are stored past the caches. */
static bool streamed(const void *y, int64_t bytes, int64_t all)
{
    return all >= BEYOND && bytes % LINE == 0 && (uintptr_t)y % LINE == 0;
}

enum { MOST_VECTORS = LINE / VF_LANES / 2 };

/* Vectors of a line, and elements. */
#define VECTORS(t)  (LINE / VF_LANES / (int)((t) == LM_DTYPE_BF16 ? 2 : 4))
#define ELEMENTS(t) (LINE / (int)((t) == LM_DTYPE_BF16 ? 2 : 4))

LM_INLINE void load_line(lm_dtype t, vf *v, const void *x, int64_t i)
{
    for (int u = 0; u < VECTORS(t); u++)
        v[u] = vf_get(t, x, i + u * VF_LANES);
}

LM_INLINE void store_line(lm_dtype t, const vf *v, void *y, int64_t i, bool stream)
{
    for (int u = 0; u < VECTORS(t); u++)
        if (!stream)
            vf_put(t, y, i + u * VF_LANES, v[u]);
        else if (t == LM_DTYPE_F32)
            vf_stream((float *)y + i + u * VF_LANES, v[u]);
        else if (u % 2 == 0)
            vf_stream_bf16((uint16_t *)y + i + u * VF_LANES, v[u], v[u + 1]);
}

LM_INLINE void fetch_line(lm_dtype t, const void *x, int64_t i)
{
    _mm_prefetch((const char *)x + i * (LINE / ELEMENTS(t)), _MM_HINT_T0);
}

/* ---- rows ---- */

/* y = w x; next: the row after x. */
LM_INLINE void scale_row(lm_dtype t, float w, const void *x, const void *next, void *y,
                         int64_t cols, bool stream)
{
    int64_t i = 0;
    for (; i + ELEMENTS(t) <= cols; i += ELEMENTS(t)) {
        vf v[MOST_VECTORS];
        fetch_line(t, next, i);
        load_line(t, v, x, i);
        for (int u = 0; u < VECTORS(t); u++)
            v[u] *= vf_set(w);
        store_line(t, v, y, i, stream);
    }
    for (; i < cols; i += VF_LANES) {
        int64_t n = cols - i < VF_LANES ? cols - i : VF_LANES;
        vf_put_n(t, y, i, vf_set(w) * vf_get_n(t, x, i, n), n);
    }
}

/* y = x, of any type. */
static void copy_row(const char *x, const char *next, char *y, int64_t bytes, bool stream)
{
    int64_t i = 0, words = bytes / 4;
    for (; i + ELEMENTS(LM_DTYPE_F32) <= words; i += ELEMENTS(LM_DTYPE_F32)) {
        vf v[MOST_VECTORS];
        fetch_line(LM_DTYPE_F32, next, i);
        load_line(LM_DTYPE_F32, v, x, i);
        store_line(LM_DTYPE_F32, v, y, i, stream);
    }
    memcpy(y + 4 * i, x + 4 * i, (size_t)(bytes - 4 * i));
}

LM_INLINE void rows_span(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    const int32_t *from = c->in[1].data;
    const float *weight = opt_data(c->in, c->n_in, 3);
    int64_t k = c->in[2].dim[1], cols = c->in[0].dim[1], bytes = cols * (int64_t)lm_dtype_size(t);
    bool stream = streamed(c->out[0].data, bytes, c->out[0].dim[0] * bytes);
    for (int64_t r = begin; r < end; r++) {
        char *y = (char *)c->out[0].data + r * bytes;
        const char *x = c->in[0].data, *next = x;
        if (from[r] < 0) {
            memset(y, 0, (size_t)bytes);
            continue;
        }
        if (r + 1 < end && from[r + 1] >= 0)
            next += from[r + 1] / k * bytes;
        x += from[r] / k * bytes;
        if (weight)
            scale_row(t, weight[from[r]], x, next, y, cols, stream);
        else
            copy_row(x, next, y, bytes, stream);
    }
    _mm_sfence();
}
VF_TYPED(rows_span)

static void route_rows(const lm_call *c)
{
    lm_par_for(c->par, c->out[0].dim[0], grain_rows(c->out[0].dim[1]),
               VF_PICK(rows_span, c->in[0].dtype), (void *)c);
}

/* ---- sums ---- */

/* The rows of a token's assignments, and their weights. */
enum { AT_ONCE = 64 };
typedef struct {
    int n;
    float weight[AT_ONCE];
    const void *row[AT_ONCE];
} token_rows;

/* Assignments [a, end) into *p, as many as it holds; the next one is returned. */
static int64_t find_rows(const lm_call *c, int64_t a, int64_t end, token_rows *p)
{
    const int32_t *place = c->in[2].data;
    const float *weight = opt_data(c->in, c->n_in, 3);
    int64_t bytes = c->in[0].dim[1] * (int64_t)lm_dtype_size(c->in[0].dtype);
    for (p->n = 0; a < end && p->n < AT_ONCE; a++) {
        if (place[a] < 0)
            continue;
        p->weight[p->n] = weight ? weight[a] : 1;
        p->row[p->n++] = (const char *)c->in[0].data + place[a] * bytes;
    }
    return a;
}

/* y = the weighted sum of the rows; next: those of the next token. */
LM_INLINE void sum_rows(lm_dtype t, const token_rows *p, const token_rows *next, void *y,
                        int64_t cols, bool stream)
{
    int64_t i = 0;
    for (; i + ELEMENTS(t) <= cols; i += ELEMENTS(t)) {
        vf sum[MOST_VECTORS], v[MOST_VECTORS];
        for (int u = 0; u < VECTORS(t); u++)
            sum[u] = vf_zero();
        for (int r = 0; r < p->n; r++) {
            if (r < next->n)
                fetch_line(t, next->row[r], i);
            load_line(t, v, p->row[r], i);
            for (int u = 0; u < VECTORS(t); u++)
                sum[u] = vf_fma(vf_set(p->weight[r]), v[u], sum[u]);
        }
        store_line(t, sum, y, i, stream);
    }
    for (; i < cols; i += VF_LANES) {
        int64_t n = cols - i < VF_LANES ? cols - i : VF_LANES;
        vf sum = vf_zero();
        for (int r = 0; r < p->n; r++)
            sum = vf_fma(vf_set(p->weight[r]), vf_get_n(t, p->row[r], i, n), sum);
        vf_put_n(t, y, i, sum, n);
    }
}

/* The same for assignments [a, end) of any number; sum [C]: of those before. */
LM_INLINE void sum_many(lm_dtype t, const lm_call *c, int64_t a, int64_t end, void *y, float *sum)
{
    int64_t cols = c->in[0].dim[1];
    for (bool more = false;; more = true) {
        token_rows p;
        a = find_rows(c, a, end, &p);
        VF_FOR(i, n, cols, {
            vf s = more ? vf_get_any(LM_DTYPE_F32, sum, i, n) : vf_zero();
            for (int r = 0; r < p.n; r++)
                s = vf_fma(vf_set(p.weight[r]), vf_get_any(t, p.row[r], i, n), s);
            if (a == end)
                vf_put_any(t, y, i, s, n);
            else
                vf_put_any(LM_DTYPE_F32, sum, i, s, n);
        });
        if (a == end)
            break;
    }
}

typedef struct {
    const lm_call *call;
    float *sums; /* [threads,C], for tokens with more than AT_ONCE rows */
} sum_job;

LM_INLINE void sum_tokens(lm_dtype t, const sum_job *j, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = j->call;
    int64_t k = c->in[2].dim[1], cols = c->in[0].dim[1], bytes = cols * (int64_t)lm_dtype_size(t);
    bool stream = streamed(c->out[0].data, bytes, c->out[0].dim[0] * bytes);
    token_rows own[2];
    find_rows(c, begin * k, (begin + 1) * k, &own[begin % 2]);
    for (int64_t tok = begin; tok < end; tok++) {
        char *y = (char *)c->out[0].data + tok * bytes;
        token_rows *next = &own[(tok + 1) % 2];
        next->n = 0;
        if (k > AT_ONCE) {
            sum_many(t, c, tok * k, (tok + 1) * k, y, j->sums + worker * cols);
            continue;
        }
        if (tok + 1 < end)
            find_rows(c, (tok + 1) * k, (tok + 2) * k, next);
        sum_rows(t, &own[tok % 2], next, y, cols, stream);
    }
    _mm_sfence();
}

static void sum_f32(void *ctx, int64_t begin, int64_t end, int worker)
{
    sum_tokens(LM_DTYPE_F32, ctx, begin, end, worker);
}

static void sum_bf16(void *ctx, int64_t begin, int64_t end, int worker)
{
    sum_tokens(LM_DTYPE_BF16, ctx, begin, end, worker);
}

static void route_sum(const lm_call *c)
{
    sum_job j = { c, c->work };
    lm_par_for(c->par, c->out[0].dim[0], grain_rows(c->out[0].dim[1]), VF_PICK(sum, c->in[0].dtype),
               &j);
}

static size_t route_sum_work(const lm_call *c, int threads)
{
    bool many = c->in[2].dim[1] > AT_ONCE;
    return many ? (size_t)(threads * c->in[0].dim[1]) * sizeof(float) : 0;
}

/* ---- products ---- */

/* Four sums of their own, so that a product does not wait for the one before it; next: the row
 * after y. */
LM_INLINE float dot_of(lm_dtype t, const void *x, const void *y, const void *next, int64_t cols)
{
    vf s[4] = { vf_zero(), vf_zero(), vf_zero(), vf_zero() };
    int64_t i = 0;
    for (; i + 4 * VF_LANES <= cols; i += 4 * VF_LANES)
        for (int u = 0; u < 4; u++) {
            if (u * VF_LANES % ELEMENTS(t) == 0)
                fetch_line(t, next, i + u * VF_LANES);
            s[u] = vf_fma(vf_get(t, x, i + u * VF_LANES), vf_get(t, y, i + u * VF_LANES), s[u]);
        }
    for (; i < cols; i += VF_LANES) {
        int64_t n = cols - i < VF_LANES ? cols - i : VF_LANES;
        s[0] = vf_fma(vf_get_n(t, x, i, n), vf_get_n(t, y, i, n), s[0]);
    }
    return vf_sum((s[0] + s[1]) + (s[2] + s[3]));
}

LM_INLINE void dot_span(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    const int32_t *place = c->in[3].data;
    int64_t k = c->in[3].dim[1], cols = c->in[0].dim[1], bytes = cols * (int64_t)lm_dtype_size(t);
    float *d = c->out[0].data;
    for (int64_t a = begin * k; a < end * k; a++) {
        const char *x = (const char *)c->in[0].data + a / k * bytes, *y = c->in[1].data;
        bool more = a + 1 < end * k && place[a + 1] >= 0;
        const char *next = more ? y + place[a + 1] * bytes : y;
        d[a] = place[a] < 0 ? 0 : dot_of(t, x, y + place[a] * bytes, next, cols);
    }
}
VF_TYPED(dot_span)

static void route_dot(const lm_call *c)
{
    lm_par_for(c->par, c->in[0].dim[0], grain_rows(c->in[0].dim[1]),
               VF_PICK(dot_span, c->in[0].dtype), (void *)c);
}

const lm_kernel LM_TABLE_NAME(route_rows, LM_SIMD)[] = {
    VF_KERNEL_F32("route_plan", route_plan, route_plan_work),
    VF_KERNEL("route_rows", route_rows, NULL),
    VF_KERNEL("route_sum", route_sum, route_sum_work),
    VF_KERNEL("route_dot", route_dot, NULL),
    VF_KERNEL_END,
};
