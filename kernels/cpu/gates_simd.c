/* SPDX-License-Identifier: Apache-2.0 */
/* gates_simd.c -- gates of attention, moved by their size, and of the delta rule: a few numbers of each row, one by one. */
#include "kernels/gates.h"

#include <math.h>

#include "kernels/cpu/simd.h"
#include "kernels/cpu/tables.h"

enum { DW_ROWS = 512 /* rows whose parts of gradients of weights are added up by themselves */ };

/* ---- gate_split, gate_join ---- */

/* Runs of numbers that move, of rows [begin, end): x holds both, qkv and gate are apart. */
static void move_rows(const lm_gate_split_attr *a, size_t size, char *x, char *qkv, char *gate,
                      bool split, int64_t begin, int64_t end)
{
    size_t run = (size_t)a->head_dim * size, queries = (size_t)a->heads * run;
    size_t rest = 2 * (size_t)a->kv_heads * run;
    for (int64_t row = begin; row < end; row++) {
        char *all = x + (size_t)row * (2 * queries + rest);
        char *q = qkv + (size_t)row * (queries + rest), *g = gate + (size_t)row * queries;
        for (int64_t h = 0; h < a->heads; h++) {
            char *at = all + 2 * (size_t)h * run, *to = q + (size_t)h * run;
            char *of = g + (size_t)h * run;
            memcpy(split ? to : at, split ? at : to, run);
            memcpy(split ? of : at + run, split ? at + run : of, run);
        }
        char *behind = all + 2 * queries, *keys = q + queries;
        memcpy(split ? keys : behind, split ? behind : keys, rest);
    }
}

static void split_rows(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ctx;
    (void)worker;
    move_rows(c->attr, lm_dtype_size(c->in[0].dtype), c->in[0].data, c->out[0].data, c->out[1].data,
              true, begin, end);
}

static void join_rows(void *ctx, int64_t begin, int64_t end, int worker)
{
    const lm_call *c = ctx;
    (void)worker;
    move_rows(c->attr, lm_dtype_size(c->in[0].dtype), c->out[0].data, c->in[0].data, c->in[1].data,
              false, begin, end);
}

static void gate_split(const lm_call *c)
{
    lm_par_for(c->par, row_count(&c->in[0]), grain_rows(last_dim(&c->in[0])), split_rows,
               (void *)(uintptr_t)c);
}

static void gate_join(const lm_call *c)
{
    lm_par_for(c->par, row_count(&c->in[0]), grain_rows(last_dim(&c->in[0])), join_rows,
               (void *)(uintptr_t)c);
}

/* ---- delta_gates ---- */

static inline float sigmoid(float x)
{
    return 1 / (1 + expf(-x));
}

static inline float softplus(float x)
{
    return (x > 0 ? x : 0) + log1pf(expf(-fabsf(x)));
}

LM_INLINE float at(lm_dtype t, const void *x, int64_t i)
{
    if (t == LM_DTYPE_F32)
        return ((const float *)x)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)x)[i] << 16;
    float v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

LM_INLINE void gates_rows(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    const lm_delta_gates_attr *a = c->attr;
    const float *a_log = c->in[1].data, *dt = c->in[2].data;
    float *g = c->out[0].data, *beta = c->out[1].data;
    int64_t H = a->heads, group = H / a->key_heads;
    for (int64_t h = 0; h < H; h++) {
        float rate = -expf(a_log[h]);
        for (int64_t row = begin; row < end; row++) {
            int64_t b = row * 2 * H + lm_delta_gates_at(a, h);
            g[row * H + h] = rate * softplus(at(t, c->in[0].data, b + group) + dt[h]);
            beta[row * H + h] = sigmoid(at(t, c->in[0].data, b));
        }
    }
}
VF_TYPED(gates_rows)

LM_INLINE void dx_rows(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    const lm_delta_gates_attr *a = c->attr;
    const float *dg = opt_data(c->in, c->n_in, 0), *dbeta = opt_data(c->in, c->n_in, 1);
    const float *a_log = c->in[3].data, *dt = c->in[4].data;
    const void *ba = c->in[2].data;
    int64_t H = a->heads, group = H / a->key_heads;
    for (int64_t h = 0; h < H; h++) {
        float rate = -expf(a_log[h]);
        for (int64_t row = begin; row < end; row++) {
            int64_t b = row * 2 * H + lm_delta_gates_at(a, h), i = row * H + h;
            float p = sigmoid(at(t, ba, b)), s = sigmoid(at(t, ba, b + group) + dt[h]);
            vf_put_n(t, c->out[0].data, b, vf_set(dbeta ? dbeta[i] * p * (1 - p) : 0), 1);
            vf_put_n(t, c->out[0].data, b + group, vf_set(dg ? dg[i] * rate * s : 0), 1);
        }
    }
}
VF_TYPED(dx_rows)

/* Parts of the sums, of DW_ROWS rows each: [parts][2][H], of a_log and of dt. */
LM_INLINE void dw_parts(lm_dtype t, void *ctx, int64_t begin, int64_t end)
{
    const lm_call *c = ctx;
    const lm_delta_gates_attr *a = c->attr;
    const float *dg = c->in[0].data, *a_log = c->in[2].data, *dt = c->in[3].data;
    const void *ba = c->in[1].data;
    int64_t H = a->heads, group = H / a->key_heads, rows = row_count(&c->in[1]);
    for (int64_t k = begin; k < end; k++) {
        float *sum = (float *)c->work + 2 * k * H;
        int64_t last = (k + 1) * DW_ROWS < rows ? (k + 1) * DW_ROWS : rows;
        for (int64_t h = 0; h < H; h++) {
            float by_log = 0, by_dt = 0, rate = -expf(a_log[h]);
            for (int64_t row = k * DW_ROWS; row < last; row++) {
                float x = at(t, ba, row * 2 * H + lm_delta_gates_at(a, h) + group) + dt[h];
                by_log += dg[row * H + h] * softplus(x);
                by_dt += dg[row * H + h] * sigmoid(x);
            }
            sum[h] = rate * by_log;
            sum[H + h] = rate * by_dt;
        }
    }
}
VF_TYPED(dw_parts)

static void delta_gates(const lm_call *c)
{
    lm_par_for(c->par, row_count(&c->in[0]), grain_rows(16 * last_dim(&c->in[0])),
               VF_PICK(gates_rows, c->in[0].dtype), (void *)(uintptr_t)c);
}

static void delta_gates_dx(const lm_call *c)
{
    lm_par_for(c->par, row_count(&c->in[2]), grain_rows(16 * last_dim(&c->in[2])),
               VF_PICK(dx_rows, c->in[2].dtype), (void *)(uintptr_t)c);
}

static int64_t dw_count(const lm_call *c)
{
    return (row_count(&c->in[1]) + DW_ROWS - 1) / DW_ROWS;
}

static void delta_gates_dw(const lm_call *c)
{
    const lm_delta_gates_attr *a = c->attr;
    int64_t H = a->heads, parts = dw_count(c);
    lm_par_for(c->par, parts, 1, VF_PICK(dw_parts, c->in[1].dtype), (void *)(uintptr_t)c);
    for (int o = 0; o < 2; o++) {
        float *dw = opt_data(c->out, c->n_out, o);
        for (int64_t h = 0; dw && h < H; h++) {
            float sum = overwrites(c, a->acc) ? 0 : dw[h];
            for (int64_t k = 0; k < parts; k++)
                sum += ((const float *)c->work)[(2 * k + o) * H + h];
            dw[h] = sum;
        }
    }
}

static size_t dw_work(const lm_call *c, int threads)
{
    const lm_delta_gates_attr *a = c->attr;
    (void)threads;
    return (size_t)(2 * dw_count(c) * a->heads) * sizeof(float);
}

const lm_kernel LM_TABLE_NAME(gates, LM_SIMD)[] = {
    VF_KERNEL("gate_split", gate_split, NULL),
    VF_KERNEL("gate_join", gate_join, NULL),
    VF_KERNEL("delta_gates", delta_gates, NULL),
    VF_KERNEL("delta_gates_dx", delta_gates_dx, NULL),
    VF_KERNEL("delta_gates_dw", delta_gates_dw, dw_work),
    VF_KERNEL_END,
};
