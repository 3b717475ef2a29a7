/* SPDX-License-Identifier: Apache-2.0 */
/* kv_keep.c -- masses of cached tokens, and rows of those that stay. */
#include "kernels/kv_keep.h"

#include "op/attention_blocks.h"
#include "op/kv_example.h"
#include "op/ops.h"

static lm_tensor shape3(lm_dtype t, int64_t a, int64_t b, int64_t c)
{
    return (lm_tensor){ .dtype = t, .ndim = 3, .dim = { a, b, c } };
}

/* ---- masses ---- */

static const lm_field mass_fields[] = { { LM_ATTR_INT(lm_kv_mass_attr, attention.batch, 'B') },
                                        { LM_ATTR_INT(lm_kv_mass_attr, attention.seq, 0) },
                                        { LM_ATTR_INT(lm_kv_mass_attr, attention.heads, 'H') },
                                        { LM_ATTR_INT(lm_kv_mass_attr, attention.kv_heads, 'K') },
                                        { LM_ATTR_INT(lm_kv_mass_attr, attention.head_dim, 'D') },
                                        { LM_ATTR_INT(lm_kv_mass_attr, attention.window, 0) },
                                        { LM_ATTR_REAL(lm_kv_mass_attr, attention.scale) },
                                        { LM_ATTR_RARE_REAL(lm_kv_mass_attr, attention.soft_cap) },
                                        { LM_ATTR_INT(lm_kv_mass_attr, residual, 0) },
                                        { LM_ATTR_INT(lm_kv_mass_attr, sinks, 0) },
                                        { LM_ATTR_RARE_FLAG(lm_kv_mass_attr, latent) },
                                        { 0 } };

enum { QKV, LSE, USED, FRESH, FROM, FIRST, TABLE, KEYS, SLOT, KTAIL, N_IN };

static lm_code mass_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_kv_mass_attr *a = c->attr;
    const lm_attention_attr *x = &a->attention;
    const lm_tensor *in = c->in;
    bool ragged = !lm_absent(&in[FIRST]), table = !lm_absent(&in[TABLE]);
    bool tail = a->residual + a->sinks > 0;
    (void)want;
    if (lm_expect(x->kv_heads > 0 && x->heads % x->kv_heads == 0, "kv_mass", e,
                  "%lld heads are not a multiple of %lld kv heads", (long long)x->heads,
                  (long long)x->kv_heads) ||
        lm_expect(x->causal && x->dropout == 0 && !x->undivided, "kv_mass", e,
                  "is causal, without dropout, and divides") ||
        lm_expect(in[QKV].dim[1] == lm_kv_mass_row(a) * x->head_dim &&
                      (!a->latent || x->kv_heads == 1),
                  "kv_mass", e, "rows of %lld numbers are not those of %lld heads",
                  (long long)in[QKV].dim[1], (long long)lm_kv_mass_row(a)) ||
        lm_expect(ragged == (x->seq == 0) && (ragged || in[QKV].dim[0] == x->batch * x->seq),
                  "kv_mass", e, "rows are B times seq, or have first") ||
        lm_expect(table || (!in[KEYS].kv && in[KEYS].dim[0] == x->batch), "kv_mass", e,
                  "coded pages have a table, caches without one are as many as sequences") ||
        lm_expect(!tail || in[KEYS].kv, "kv_mass", e, "residual and sinks go with coded pages") ||
        lm_expect(tail != lm_absent(&in[KTAIL]), "kv_mass", e,
                  "a tail goes with residual or sinks") ||
        lm_attention_check_no_blocks("kv_mass", x, e))
        return e->code;
    return lm_expect(!tail || in[KTAIL].dim[2] == a->residual + a->sinks, "kv_mass", e,
                     "the tail has %lld rows, not residual + sinks",
                     (long long)(tail ? in[KTAIL].dim[2] : 0));
}

static void mass_cost(const lm_call *c, lm_cost *out)
{
    const lm_attention_attr *a = &((const lm_kv_mass_attr *)c->attr)->attention;
    out->flops =
        2.0 * (double)(c->in[QKV].dim[0] * a->heads * a->head_dim) * (double)c->out[0].dim[2];
    out->bytes = lm_call_bytes(c);
}

static void mass_example(lm_rng r, int i, lm_example *x)
{
    static const int64_t dims[] = { 4, 20, 32, 64, 80, 128 };
    bool coded = lm_example_draw(r, i, 0, 2), ragged = lm_example_draw(r, i, 1, 2);
    bool table = coded || lm_example_draw(r, i, 2, 2);
    int64_t b = 1 + (int64_t)lm_example_draw(r, i, 3, 3), d = dims[lm_example_draw(r, i, 4, 6)];
    int64_t kv = 1 + (int64_t)lm_example_draw(r, i, 5, 2);
    int64_t h = kv * (1 + (int64_t)lm_example_draw(r, i, 6, 5));
    int64_t T = 16 << lm_example_draw(r, i, 7, 3), P = 1 + (int64_t)lm_example_draw(r, i, 8, 5);
    int64_t t = lm_example_draw(r, i, 9, 2) ? 1 : lm_example_size(r, i, 10, 64);
    const lm_kv_format *f = lm_kv_example_format(false, (uint64_t)i / 2);
    lm_kv_mass_attr a = { .attention = { .batch = b, .heads = h, .kv_heads = kv, .head_dim = d } };
    a.attention.causal = true;
    a.attention.seq = ragged ? 0 : t;
    a.attention.scale = 0.3;
    a.attention.window = lm_example_draw(r, i, 11, 3) == 0 ? 1 + T : 0;
    a.attention.soft_cap = lm_example_draw(r, i, 12, 3) == 0 ? 1.5 : 0;
    if (coded && (lm_kv_step(f, T) > 1 || lm_example_draw(r, i, 13, 2)))
        a.residual = T;
    if (coded && lm_example_draw(r, i, 14, 2))
        a.sinks = lm_kv_step(f, T) > 1 ? T : 5;
    *x = (lm_example){ .n_in = N_IN, .want = 1 };
    a.latent = kv == 1 && lm_example_draw(r, i, 16, 3) == 0;
    x->in[QKV] = lm_shape2(LM_DTYPE_F32, b * t + (ragged ? 3 : 0), lm_kv_mass_row(&a) * d);
    x->in[LSE] = lm_shape2(LM_DTYPE_F32, x->in[QKV].dim[0], h);
    x->in[USED] = x->in[FRESH] = x->in[FROM] = x->in[SLOT] = lm_shape1(LM_DTYPE_I32, b);
    if (ragged)
        x->in[FIRST] = lm_shape1(LM_DTYPE_I32, b + 1);
    if (table)
        x->in[TABLE] = lm_shape2(LM_DTYPE_I32, b, P);
    x->in[KEYS] = (lm_tensor){ .dtype = LM_DTYPE_F32,
                               .ndim = 4,
                               .dim = { table ? b * P + 1 : b, kv, table ? T : P * T, d },
                               .kv = coded ? f : NULL };
    if (a.residual + a.sinks > 0)
        x->in[KTAIL] = (lm_tensor){ .dtype = LM_DTYPE_F32,
                                    .ndim = 4,
                                    .dim = { b + 1, kv, a.residual + a.sinks, d } };
    x->out[0] = shape3(LM_DTYPE_F32, b + 1, kv, P * T + 3);
    lm_example_attr(x, &a);
}

static void mass_fill(lm_rng r, const lm_call *c)
{
    const lm_kv_mass_attr *a = c->attr;
    int64_t B = a->attention.batch, room = c->out[0].dim[2] - 3, rows = c->in[QKV].dim[0] / B;
    int32_t *used = c->in[USED].data, *fresh = c->in[FRESH].data, *from = c->in[FROM].data;
    int32_t *first = c->in[FIRST].data, *table = c->in[TABLE].data, *slot = c->in[SLOT].data;
    for (int64_t b = 0; b < B; b++) {
        fresh[b] = (int32_t)lm_rng_below(r, (uint64_t)b * 8, (uint64_t)rows + 1);
        fresh[b] = fresh[b] > room ? (int32_t)room : fresh[b];
        used[b] = (int32_t)lm_rng_below(r, (uint64_t)b * 8 + 1, (uint64_t)(room - fresh[b]) + 1);
        from[b] = (int32_t)lm_rng_below(r, (uint64_t)b * 8 + 2, 2) *
                  (used[b] + (int32_t)lm_rng_below(r, (uint64_t)b * 8 + 3, (uint64_t)fresh[b] + 1));
        slot[b] = (int32_t)(B - b);
        if (first) {
            first[0] = 0;
            first[b + 1] = first[b] + fresh[b];
        }
        for (int64_t p = 0, P = c->in[TABLE].dim[1]; table && p < P; p++)
            table[b * P + p] = (int32_t)(B * P - b * P - p);
    }
    for (int64_t i = 0; i < lm_tensor_count(&c->in[LSE]); i++) /* no less than most scores */
        lm_set(c->in[LSE].dtype, c->in[LSE].data, i, 4 + lm_rng_uniform(r, 1000 + (uint64_t)i));
    if (c->in[KEYS].kv)
        lm_kv_example_pages(r, &c->in[KEYS]);
}

const lm_op lm_op_kv_mass = {
    .name = "kv_mass",
    .attr_size = sizeof(lm_kv_mass_attr),
    .in = { { "qkv", "N,(H+V)D", LM_ACT_TYPE | LM_FIXED },
            { "lse", "N,H", LM_FIXED },
            { "used", "B", LM_IDS },
            { "fresh", "B", LM_IDS },
            { "from", "B", LM_IDS },
            { "first", "B+1", LM_IDS | LM_OPTIONAL },
            { "table", "B,P", LM_IDS | LM_OPTIONAL },
            { "keys", "G,K,S,D", LM_ACT_TYPE | LM_FIXED | LM_KV },
            { "slot", "B", LM_IDS },
            { "ktail", "L,K,R,D", LM_ACT_TYPE | LM_FIXED | LM_OPTIONAL } },
    .out = { { "mass", "L,K,M", LM_GIVEN } },
    .fields = mass_fields,
    .split = "",
    .prec = LM_PREC_ALLOW,
    .tolerance = { 2e-6, 1e-2 },
    .shape = mass_shape,
    .cost = mass_cost,
    .example = mass_example,
    .fill = mass_fill,
};

/* ---- rows that stay ---- */

static const lm_field gather_fields[] = { { LM_ATTR_INT(lm_kv_gather_attr, batch, 'B') },
                                          { LM_ATTR_INT(lm_kv_gather_attr, rows, 'M') },
                                          { LM_ATTR_INT(lm_kv_gather_attr, heads, 'H') },
                                          { LM_ATTR_INT(lm_kv_gather_attr, kv_heads, 'K') },
                                          { LM_ATTR_INT(lm_kv_gather_attr, head_dim, 'D') },
                                          { 0 } };

enum { G_KEYS, G_VALUES, G_AT, G_COUNT, G_RUN, G_WEIGHT, G_N_IN };

static lm_code gather_shape(lm_call *c, unsigned want, lm_err *e)
{
    (void)want;
    return lm_expect(lm_absent(&c->in[G_RUN]) == lm_absent(&c->in[G_WEIGHT]), "kv_gather", e,
                     "runs go with weights");
}

static void gather_cost(const lm_call *c, lm_cost *out)
{
    const lm_kv_gather_attr *a = c->attr;
    double rows = (double)(a->batch * a->rows * a->kv_heads * 2);
    out->flops = lm_absent(&c->in[G_RUN]) ? 0 : 4 * rows * (double)a->head_dim;
    out->bytes = 2 * rows * (double)a->head_dim * (double)lm_dtype_size(c->in[G_KEYS].dtype);
}

static void gather_example(lm_rng r, int i, lm_example *x)
{
    static const int64_t dims[] = { 4, 20, 32, 64, 80, 128 };
    int64_t b = 1 + (int64_t)lm_example_draw(r, i, 0, 3), d = dims[lm_example_draw(r, i, 1, 6)];
    int64_t kv = 1 + (int64_t)lm_example_draw(r, i, 2, 3), m = lm_example_size(r, i, 3, 40);
    int64_t h = kv * (1 + (int64_t)lm_example_draw(r, i, 4, 3)), s = lm_example_size(r, i, 5, 70);
    lm_kv_gather_attr a = { b, m, h, kv, d };
    *x = (lm_example){ .n_in = G_N_IN, .want = 1 };
    x->in[G_KEYS] = x->in[G_VALUES] =
        (lm_tensor){ .dtype = LM_DTYPE_F32, .ndim = 4, .dim = { b, kv, s, d } };
    x->in[G_AT] = shape3(LM_DTYPE_I32, b, kv, m);
    x->in[G_COUNT] = lm_shape1(LM_DTYPE_I32, b);
    if (lm_example_draw(r, i, 6, 2)) {
        x->in[G_RUN] = x->in[G_AT];
        x->in[G_WEIGHT] = shape3(LM_DTYPE_F32, b, kv, s);
    }
    lm_example_attr(x, &a);
}

static void gather_fill(lm_rng r, const lm_call *c)
{
    const lm_kv_gather_attr *a = c->attr;
    int32_t *at = c->in[G_AT].data, *count = c->in[G_COUNT].data, *run = c->in[G_RUN].data;
    int64_t S = c->in[G_KEYS].dim[2];
    for (int64_t b = 0; b < a->batch; b++)
        count[b] = (int32_t)lm_rng_below(r, (uint64_t)b, (uint64_t)a->rows + 1);
    for (int64_t i = 0; i < a->batch * a->kv_heads * a->rows; i++) {
        at[i] = (int32_t)lm_rng_below(r, 1000 + (uint64_t)i, (uint64_t)S);
        if (run)
            run[i] = (int32_t)lm_rng_below(r, 100000 + (uint64_t)i, (uint64_t)(S - at[i]) + 1);
    }
}

const lm_op lm_op_kv_gather = {
    .name = "kv_gather",
    .attr_size = sizeof(lm_kv_gather_attr),
    .in = { { "keys", "B,K,S,D", LM_ACT_TYPE | LM_FIXED },
            { "values", "B,K,S,D", LM_ACT_TYPE | LM_FIXED },
            { "at", "B,K,M", LM_IDS },
            { "count", "B", LM_IDS },
            { "run", "B,K,M", LM_IDS | LM_OPTIONAL },
            { "weight", "B,K,S", LM_FIXED | LM_OPTIONAL } },
    .out = { { "y", "BM,(H+2K)D", LM_ACT_TYPE } },
    .fields = gather_fields,
    .split = "",
    .prec = LM_PREC_INFER,
    .shape = gather_shape,
    .cost = gather_cost,
    .example = gather_example,
    .fill = gather_fill,
};
