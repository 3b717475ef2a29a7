/* SPDX-License-Identifier: Apache-2.0 */
/* latent_ref.c -- the definition of the latent family (kernels/latent.h). */
#include "kernels/latent.h"

#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"

/* Elements of a pair j of R numbers. */
static int64_t first_of(const lm_latent_attr *a, int64_t j)
{
    return a->pairs ? 2 * j : j;
}

static int64_t second_of(const lm_latent_attr *a, int64_t j)
{
    return a->pairs ? 2 * j + 1 : j + a->rotary_dim / 2;
}

/* y[to..] = x[from..] rotated by the angles of row `row` of the table; sign -1: back. */
static void turn(const lm_latent_attr *a, const lm_tensor *table, int64_t row, double sign,
                 const lm_tensor *x, int64_t from, lm_tensor *y, int64_t to)
{
    int64_t half = a->rotary_dim / 2;
    for (int64_t j = 0; j < half; j++) {
        double cs = get(table, row + j), sn = sign * get(table, row + half + j);
        double u = get(x, from + first_of(a, j)), v = get(x, from + second_of(a, j));
        set(y, to + first_of(a, j), u * cs - v * sn);
        set(y, to + second_of(a, j), v * cs + u * sn);
    }
}

static void copy(const lm_tensor *x, int64_t from, lm_tensor *y, int64_t to, int64_t n)
{
    for (int64_t j = 0; j < n; j++)
        set(y, to + j, get(x, from + j));
}

static void latent_rows(const lm_call *c)
{
    const lm_latent_attr *a = c->attr;
    const lm_tensor *q = &c->in[0], *kv = &c->in[1], *k = &c->in[2], *pos = &c->in[3],
                    *table = &c->in[4];
    lm_tensor *y = &c->out[0];
    int64_t H = a->heads, A = a->content_dim, R = a->rotary_dim, E = a->value_dim, D = A + R;
    for (int64_t i = 0; i < rows_of(q); i++) {
        int64_t row = (int64_t)get(pos, i) * R, at = i * (2 * H * D + H * E);
        for (int64_t h = 0; h < H; h++) {
            int64_t query = at + h * D, key = query + H * D, value = at + 2 * H * D + h * E;
            copy(q, (i * H + h) * D, y, query, A);
            turn(a, table, row, 1, q, (i * H + h) * D + A, y, query + A);
            copy(kv, (i * H + h) * (A + E), y, key, A);
            turn(a, table, row, 1, k, i * R, y, key + A);
            copy(kv, (i * H + h) * (A + E) + A, y, value, E);
        }
    }
}

static void turn_back_sum(const lm_call *c, int64_t i, lm_tensor *dk)
{
    const lm_latent_attr *a = c->attr;
    const lm_tensor *dy = &c->in[0], *table = &c->in[2];
    int64_t H = a->heads, R = a->rotary_dim, D = a->content_dim + R, half = R / 2;
    int64_t row = (int64_t)get(&c->in[1], i) * R;
    int64_t at = i * (2 * H * D + H * a->value_dim) + H * D + a->content_dim;
    for (int64_t j = 0; j < half; j++) {
        double cs = get(table, row + j), sn = get(table, row + half + j), u = 0, v = 0;
        for (int64_t h = 0; h < H; h++) {
            u += get(dy, at + h * D + first_of(a, j));
            v += get(dy, at + h * D + second_of(a, j));
        }
        set(dk, i * R + first_of(a, j), u * cs + v * sn);
        set(dk, i * R + second_of(a, j), v * cs - u * sn);
    }
}

static void latent_rows_dx(const lm_call *c)
{
    const lm_latent_attr *a = c->attr;
    const lm_tensor *dy = &c->in[0], *pos = &c->in[1], *table = &c->in[2];
    lm_tensor *dq = opt_out(c, 0), *dkv = opt_out(c, 1), *dk = opt_out(c, 2);
    int64_t H = a->heads, A = a->content_dim, R = a->rotary_dim, E = a->value_dim, D = A + R;
    for (int64_t i = 0; i < rows_of(dy); i++) {
        int64_t row = (int64_t)get(pos, i) * R, at = i * (2 * H * D + H * E);
        for (int64_t h = 0; h < H; h++) {
            int64_t query = at + h * D, key = query + H * D, value = at + 2 * H * D + h * E;
            if (dq) {
                copy(dy, query, dq, (i * H + h) * D, A);
                turn(a, table, row, -1, dy, query + A, dq, (i * H + h) * D + A);
            }
            if (dkv) {
                copy(dy, key, dkv, (i * H + h) * (A + E), A);
                copy(dy, value, dkv, (i * H + h) * (A + E) + A, E);
            }
        }
        if (dk)
            turn_back_sum(c, i, dk);
    }
}

static void latent_queries(const lm_call *c)
{
    const lm_latent_attr *a = c->attr;
    const lm_tensor *q = &c->in[0], *latent = &c->in[1], *k = &c->in[2], *w = &c->in[3],
                    *pos = &c->in[4], *table = &c->in[5];
    lm_tensor *y = &c->out[0];
    int64_t H = a->heads, A = a->content_dim, R = a->rotary_dim, L = a->latent_dim;
    for (int64_t i = 0; i < rows_of(q); i++) {
        int64_t row = (int64_t)get(pos, i) * R, at = i * (H + 1) * (L + R);
        for (int64_t h = 0; h < H; h++, at += L + R) {
            int64_t of = (i * H + h) * (A + R), first = h * (A + a->value_dim);
            for (int64_t l = 0; l < L; l++) {
                double sum = 0;
                for (int64_t j = 0; j < A; j++)
                    sum += get(q, of + j) * get(w, (first + j) * L + l);
                set(y, at + l, sum);
            }
            turn(a, table, row, 1, q, of + A, y, at + L);
        }
        copy(latent, i * L, y, at, L);
        turn(a, table, row, 1, k, i * R, y, at + L);
    }
}

static void latent_values(const lm_call *c)
{
    const lm_latent_attr *a = c->attr;
    const lm_tensor *z = &c->in[0], *w = &c->in[1];
    int64_t H = a->heads, A = a->content_dim, E = a->value_dim, L = a->latent_dim;
    for (int64_t i = 0; i < rows_of(z); i++)
        for (int64_t h = 0; h < H; h++)
            for (int64_t j = 0; j < E; j++) {
                double sum = 0;
                for (int64_t l = 0; l < L; l++)
                    sum += get(z, (i * H + h) * L + l) * get(w, (h * (A + E) + A + j) * L + l);
                set(&c->out[0], (i * H + h) * E + j, sum);
            }
}

const lm_kernel lm_latent_ref_kernels[] = {
    { "latent_rows", LM_DTYPE_NONE, LM_CPU_REF, latent_rows, NULL },
    { "latent_rows_dx", LM_DTYPE_NONE, LM_CPU_REF, latent_rows_dx, NULL },
    { "latent_queries", LM_DTYPE_NONE, LM_CPU_REF, latent_queries, NULL },
    { "latent_values", LM_DTYPE_NONE, LM_CPU_REF, latent_values, NULL },
    { NULL, LM_DTYPE_NONE, LM_CPU_REF, NULL, NULL },
};
