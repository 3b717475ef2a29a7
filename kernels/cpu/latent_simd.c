/* SPDX-License-Identifier: Apache-2.0 */
/* latent_simd.c -- rows of latent attention on vectors.  Rotated parts pass through a small
 * array of F32, in which pairs of neighbours are turned one by one: they are few beside the
 * rest of a row.  Absorbed products take 4 rows and 4 vectors of latents, or 4 rows of the
 * weight, at a time. */
#include "kernels/latent.h"

#include "kernels/cpu/simd.h"
#include "kernels/cpu/tables.h"

enum { BLOCK = 4 };

LM_INLINE void *element(lm_dtype t, const void *p, int64_t i)
{
    return (char *)(uintptr_t)p + i * (t == LM_DTYPE_BF16 ? 2 : 4);
}

LM_INLINE void copy(lm_dtype t, const void *x, int64_t from, void *y, int64_t to, int64_t n)
{
    memcpy(element(t, y, to), element(t, x, from), (size_t)n * (t == LM_DTYPE_BF16 ? 2 : 4));
}

/* R numbers of F32 rotated in place. */
LM_INLINE void turn(const lm_latent_attr *a, const float *angles, float sign, float *x)
{
    int64_t half = a->rotary_dim / 2;
    const float *sines = angles + half;
    if (!a->pairs) {
        VF_FOR(j, n, half, {
            vf cs = vf_get_any(LM_DTYPE_F32, angles, j, n);
            vf sn = vf_get_any(LM_DTYPE_F32, sines, j, n) * vf_set(sign);
            vf u = vf_get_any(LM_DTYPE_F32, x, j, n), v = vf_get_any(LM_DTYPE_F32, x, half + j, n);
            vf_put_any(LM_DTYPE_F32, x, j, vf_fnma(v, sn, u * cs), n);
            vf_put_any(LM_DTYPE_F32, x, half + j, vf_fma(u, sn, v * cs), n);
        });
        return;
    }
    for (int64_t j = 0; j < half; j++) {
        float cs = angles[j], sn = sign * sines[j], u = x[2 * j], v = x[2 * j + 1];
        x[2 * j] = u * cs - v * sn;
        x[2 * j + 1] = v * cs + u * sn;
    }
}

LM_INLINE void load(lm_dtype t, const void *x, int64_t from, float *to, int64_t count)
{
    VF_FOR(j, n, count, { vf_put_any(LM_DTYPE_F32, to, j, vf_get_any(t, x, from + j, n), n); });
}

LM_INLINE void store(lm_dtype t, const float *x, void *y, int64_t to, int64_t count)
{
    VF_FOR(j, n, count, { vf_put_any(t, y, to + j, vf_get_any(LM_DTYPE_F32, x, j, n), n); });
}

/* y[to..] = x[from..] rotated. */
LM_INLINE void turned(lm_dtype t, const lm_latent_attr *a, const float *angles, float sign,
                      const void *x, int64_t from, void *y, int64_t to)
{
    float part[LM_LATENT_MOST_ROTARY];
    load(t, x, from, part, a->rotary_dim);
    turn(a, angles, sign, part);
    store(t, part, y, to, a->rotary_dim);
}

/* ---- expanded ---- */

LM_INLINE void expand_rows(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    const lm_latent_attr *a = c->attr;
    const void *q = c->in[0].data, *kv = c->in[1].data, *k = c->in[2].data;
    const int32_t *pos = c->in[3].data;
    void *y = c->out[0].data;
    int64_t H = a->heads, A = a->content_dim, R = a->rotary_dim, E = a->value_dim, D = A + R;
    for (int64_t i = begin; i < end; i++) {
        const float *angles = (const float *)c->in[4].data + pos[i] * R;
        int64_t at = i * (2 * H * D + H * E), keys = at + H * D, values = keys + H * D;
        for (int64_t h = 0; h < H; h++) {
            int64_t of = (i * H + h) * (A + E);
            copy(t, q, (i * H + h) * D, y, at + h * D, A);
            turned(t, a, angles, 1, q, (i * H + h) * D + A, y, at + h * D + A);
            copy(t, kv, of, y, keys + h * D, A);
            if (!h)
                turned(t, a, angles, 1, k, i * R, y, keys + A);
            else
                copy(t, y, keys + A, y, keys + h * D + A, R);
            copy(t, kv, of + A, y, values + h * E, E);
        }
    }
}
VF_TYPED(expand_rows)

static void latent_rows(const lm_call *c)
{
    lm_par_for(c->par, c->in[0].dim[0], grain_rows(last_dim(&c->out[0])),
               VF_PICK(expand_rows, c->in[0].dtype), (void *)(uintptr_t)c);
}

/* The rotated part of the keys' gradient, of all heads. */
LM_INLINE void sum_keys(lm_dtype t, const lm_latent_attr *a, const float *angles, const void *dy,
                        int64_t from, void *dk, int64_t to)
{
    float sum[LM_LATENT_MOST_ROTARY] = { 0 };
    for (int64_t h = 0; h < a->heads; h++)
        VF_FOR(j, n, a->rotary_dim, {
            vf x = vf_get_any(t, dy, from + h * (a->content_dim + a->rotary_dim) + j, n);
            vf_put_any(LM_DTYPE_F32, sum, j, vf_get_any(LM_DTYPE_F32, sum, j, n) + x, n);
        });
    turn(a, angles, -1, sum);
    store(t, sum, dk, to, a->rotary_dim);
}

LM_INLINE void expand_back(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    const lm_latent_attr *a = c->attr;
    const void *dy = c->in[0].data;
    const int32_t *pos = c->in[1].data;
    void *dq = opt_data(c->out, c->n_out, 0), *dkv = opt_data(c->out, c->n_out, 1);
    void *dk = opt_data(c->out, c->n_out, 2);
    int64_t H = a->heads, A = a->content_dim, R = a->rotary_dim, E = a->value_dim, D = A + R;
    for (int64_t i = begin; i < end; i++) {
        const float *angles = (const float *)c->in[2].data + pos[i] * R;
        int64_t at = i * (2 * H * D + H * E), keys = at + H * D, values = keys + H * D;
        for (int64_t h = 0; dq && h < H; h++) {
            copy(t, dy, at + h * D, dq, (i * H + h) * D, A);
            turned(t, a, angles, -1, dy, at + h * D + A, dq, (i * H + h) * D + A);
        }
        for (int64_t h = 0; dkv && h < H; h++) {
            copy(t, dy, keys + h * D, dkv, (i * H + h) * (A + E), A);
            copy(t, dy, values + h * E, dkv, (i * H + h) * (A + E) + A, E);
        }
        if (dk)
            sum_keys(t, a, angles, dy, keys + A, dk, i * R);
    }
}
VF_TYPED(expand_back)

static void latent_rows_dx(const lm_call *c)
{
    lm_par_for(c->par, c->in[0].dim[0], grain_rows(last_dim(&c->in[0])),
               VF_PICK(expand_back, c->in[0].dtype), (void *)(uintptr_t)c);
}

/* ---- absorbed ---- */

/* Work of a head: up to BLOCK rows of tokens. */
typedef struct {
    int64_t head, row, rows;
} block_of_rows;

LM_INLINE block_of_rows block_at(int64_t i, int64_t n)
{
    int64_t blocks = (n + BLOCK - 1) / BLOCK, row = i % blocks * BLOCK;
    return (block_of_rows){ i / blocks, row, n - row < BLOCK ? n - row : BLOCK };
}

LM_INLINE float number(lm_dtype t, const void *p, int64_t i)
{
    return t == LM_DTYPE_BF16 ? lm_bf16_to_f32(((const uint16_t *)p)[i]) : ((const float *)p)[i];
}

/* y[to + r pitch + l] = sum over j of q[from + r step + j] w[j,l] of `rows` rows r, for `wide`
 * vectors from l on. */
LM_INLINE void query_tile(lm_dtype t, const lm_call *c, const block_of_rows *b, int rows, int64_t l,
                          int wide, int64_t live)
{
    const lm_latent_attr *a = c->attr;
    const void *q = c->in[0].data, *w = c->in[3].data;
    int64_t A = a->content_dim, L = a->latent_dim, step = a->heads * (A + a->rotary_dim);
    int64_t from = b->row * step + b->head * (A + a->rotary_dim);
    int64_t first = b->head * (A + a->value_dim) * L + l;
    int64_t pitch = (a->heads + 1) * (L + a->rotary_dim);
    int64_t to = b->row * pitch + b->head * (L + a->rotary_dim) + l;
    vf sum[BLOCK][4];
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < wide; k++)
            sum[r][k] = vf_zero();
    for (int64_t j = 0; j < A; j++) {
        vf x[4];
        for (int k = 0; k < wide; k++)
            x[k] = live == VF_LANES ? vf_get(t, w, first + j * L + k * VF_LANES)
                                    : vf_get_n(t, w, first + j * L, live);
        for (int r = 0; r < rows; r++) {
            vf by = vf_set(number(t, q, from + r * step + j));
            for (int k = 0; k < wide; k++)
                sum[r][k] = vf_fma(by, x[k], sum[r][k]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < wide; k++)
            if (live == VF_LANES)
                vf_put(t, c->out[0].data, to + r * pitch + k * VF_LANES, sum[r][k]);
            else
                vf_put_n(t, c->out[0].data, to + r * pitch, sum[r][k], live);
}

LM_INLINE void query_block(lm_dtype t, const lm_call *c, const block_of_rows *b, int rows)
{
    int64_t L = ((const lm_latent_attr *)c->attr)->latent_dim, l = 0;
    for (; l + 4 * VF_LANES <= L; l += 4 * VF_LANES)
        query_tile(t, c, b, rows, l, 4, VF_LANES);
    for (; l + VF_LANES <= L; l += VF_LANES)
        query_tile(t, c, b, rows, l, 1, VF_LANES);
    if (l < L)
        query_tile(t, c, b, rows, l, 1, L - l);
}

/* Rotated parts of the queries; beside those of head 0 the key, too. */
LM_INLINE void query_rest(lm_dtype t, const lm_call *c, const block_of_rows *b)
{
    const lm_latent_attr *a = c->attr;
    const int32_t *pos = c->in[4].data;
    int64_t H = a->heads, A = a->content_dim, R = a->rotary_dim, L = a->latent_dim;
    for (int64_t i = b->row; i < b->row + b->rows; i++) {
        const float *angles = (const float *)c->in[5].data + pos[i] * R;
        int64_t at = i * (H + 1) * (L + R), key = at + H * (L + R);
        turned(t, a, angles, 1, c->in[0].data, (i * H + b->head) * (A + R) + A, c->out[0].data,
               at + b->head * (L + R) + L);
        if (b->head)
            continue;
        copy(t, c->in[1].data, i * L, c->out[0].data, key, L);
        turned(t, a, angles, 1, c->in[2].data, i * R, c->out[0].data, key + L);
    }
}

LM_INLINE void query_blocks(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    for (int64_t i = begin; i < end; i++) {
        const block_of_rows b = block_at(i, c->in[0].dim[0]);
        if (b.rows == BLOCK)
            query_block(t, c, &b, BLOCK);
        else
            for (int r = 0; r < b.rows; r++)
                query_block(t, c, &(block_of_rows){ b.head, b.row + r, 1 }, 1);
        query_rest(t, c, &b);
    }
}
VF_TYPED(query_blocks)

static void latent_queries(const lm_call *c)
{
    const lm_latent_attr *a = c->attr;
    int64_t blocks = (c->in[0].dim[0] + BLOCK - 1) / BLOCK;
    lm_par_for(c->par, a->heads * blocks, 1, VF_PICK(query_blocks, c->in[0].dtype),
               (void *)(uintptr_t)c);
}

/* o[r,j] of `rows` rows r and `wide` rows j of the weight. */
LM_INLINE void value_tile(lm_dtype t, const lm_call *c, const block_of_rows *b, int rows, int64_t j,
                          int wide)
{
    const lm_latent_attr *a = c->attr;
    const void *z = c->in[0].data, *w = c->in[1].data;
    int64_t H = a->heads, E = a->value_dim, L = a->latent_dim;
    int64_t from = (b->row * H + b->head) * L;
    int64_t first = (b->head * (a->content_dim + E) + a->content_dim + j) * L;
    vf sum[BLOCK][BLOCK];
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < wide; k++)
            sum[r][k] = vf_zero();
    VF_FOR(l, n, L, {
        vf x[BLOCK];
        for (int k = 0; k < wide; k++)
            x[k] = vf_get_any(t, w, first + k * L + l, n);
        for (int r = 0; r < rows; r++) {
            vf by = vf_get_any(t, z, from + r * H * L + l, n);
            for (int k = 0; k < wide; k++)
                sum[r][k] = vf_fma(by, x[k], sum[r][k]);
        }
    });
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < wide; k++)
            lm_set(t, c->out[0].data, ((b->row + r) * H + b->head) * E + j + k, vf_sum(sum[r][k]));
}

LM_INLINE void value_block(lm_dtype t, const lm_call *c, const block_of_rows *b, int rows)
{
    int64_t E = ((const lm_latent_attr *)c->attr)->value_dim, j = 0;
    for (; j + BLOCK <= E; j += BLOCK)
        value_tile(t, c, b, rows, j, BLOCK);
    for (; j < E; j++)
        value_tile(t, c, b, rows, j, 1);
}

LM_INLINE void value_blocks(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    for (int64_t i = begin; i < end; i++) {
        const block_of_rows b = block_at(i, c->in[0].dim[0]);
        if (b.rows == BLOCK)
            value_block(t, c, &b, BLOCK);
        else
            for (int r = 0; r < b.rows; r++)
                value_block(t, c, &(block_of_rows){ b.head, b.row + r, 1 }, 1);
    }
}
VF_TYPED(value_blocks)

static void latent_values(const lm_call *c)
{
    const lm_latent_attr *a = c->attr;
    int64_t blocks = (c->in[0].dim[0] + BLOCK - 1) / BLOCK;
    lm_par_for(c->par, a->heads * blocks, 1, VF_PICK(value_blocks, c->in[0].dtype),
               (void *)(uintptr_t)c);
}

const lm_kernel LM_TABLE_NAME(latent, LM_SIMD)[] = {
    VF_KERNEL("latent_rows", latent_rows, NULL),
    VF_KERNEL("latent_rows_dx", latent_rows_dx, NULL),
    VF_KERNEL("latent_queries", latent_queries, NULL),
    VF_KERNEL("latent_values", latent_values, NULL),
    VF_KERNEL_END,
};
