/* SPDX-License-Identifier: Apache-2.0 */
/* kv_write.c -- new rows into coded caches. */
#include "numeric/code_rows.h"
#include "op/kv_example.h"
#include "op/ops.h"

static const lm_field write_fields[] = { { LM_ATTR_INT(lm_kv_attr, attention.batch, 'B') },
                                         { LM_ATTR_INT(lm_kv_attr, attention.seq, 0) },
                                         { LM_ATTR_INT(lm_kv_attr, attention.heads, 'H') },
                                         { LM_ATTR_INT(lm_kv_attr, attention.kv_heads, 'K') },
                                         { LM_ATTR_INT(lm_kv_attr, attention.head_dim, 'D') },
                                         { LM_ATTR_RARE_INT(lm_kv_attr, attention.value_dim, 'E',
                                                            'D') },
                                         { LM_ATTR_RARE_FLAG(lm_kv_attr, latent) },
                                         { LM_ATTR_INT(lm_kv_attr, residual[0], 0) },
                                         { LM_ATTR_INT(lm_kv_attr, residual[1], 0) },
                                         { LM_ATTR_INT(lm_kv_attr, sinks[0], 0) },
                                         { LM_ATTR_INT(lm_kv_attr, sinks[1], 0) },
                                         { LM_ATTR_FLAG(lm_kv_attr, token_range) },
                                         { LM_ATTR_REAL(lm_kv_attr, outliers) },
                                         { 0 } };

enum { QKV, USED, FRESH, FIRST, TABLE, SLOT, ROW, N_IN };
enum { KEYS, VALUES, KTAIL, VTAIL };

/* Outliers are found by ranges. */
static bool has_ranges(const lm_kv_attr *a, const lm_tensor *t)
{
    return !t->kv || t->kv->outliers == 0 || t->kv->lower || (t->kv->values && a->token_range);
}

/* Values can take a range of their token. */
static bool takes_ranges(const lm_tensor *t)
{
    return t->kv && t->kv->axis == LM_KV_TOKEN && t->kv->levels == LM_KV_TABLE && t->kv->zero;
}

/* A token can be replaced alone. */
static bool is_single(const lm_kv_attr *a, int side, const lm_tensor *t)
{
    return !t->kv || (a->residual[side] + a->sinks[side] == 0 && t->kv->outliers == 0 &&
                      lm_kv_step(t->kv, t->dim[2]) == 1);
}

static lm_code write_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_kv_attr *a = c->attr;
    const lm_attention_attr *x = &a->attention;
    const lm_tensor *in = c->in, *out = c->out;
    bool ragged = !lm_absent(&in[FIRST]);
    (void)want;
    if (lm_expect(ragged == (x->seq == 0) && (ragged || in[QKV].dim[0] == x->batch * x->seq),
                  "kv_write", e, "rows are B times seq, or have first") ||
        lm_expect(has_ranges(a, &out[KEYS]) && has_ranges(a, &out[VALUES]), "kv_write", e,
                  "a format with outliers has no ranges of channels or tokens") ||
        lm_expect(!a->token_range ||
                      (takes_ranges(&out[VALUES]) && a->outliers >= 0 && a->outliers < 1),
                  "kv_write", e, "the values have no range of tokens") ||
        lm_expect(
            lm_absent(&in[ROW]) || (is_single(a, 0, &out[KEYS]) && is_single(a, 1, &out[VALUES])),
            "kv_write", e, "tokens of groups, with tails or with outliers cannot be replaced"))
        return e->code;
    return lm_kv_check_sides("kv_write", a, (const lm_tensor *[]){ &out[KEYS], &out[VALUES] },
                             (const lm_tensor *[]){ &out[KTAIL], &out[VTAIL] }, &in[SLOT], e);
}

/* Each key and value is read, and written once plain or as codes; about ten operations find a code. */
static void write_cost(const lm_call *c, lm_cost *out)
{
    const lm_kv_attr *a = c->attr;
    lm_dtype act = c->in[QKV].dtype;
    double rows = (double)(c->in[QKV].dim[0] * a->attention.kv_heads);
    for (int side = 0; side < 2; side++) {
        const double numbers = rows * (double)lm_kv_side_dim(a, side);
        out->flops += 10 * numbers;
        out->bytes += numbers * (double)lm_dtype_size(act) * (a->residual[side] ? 3 : 1) +
                      rows * lm_kv_token_bytes(&c->out[KEYS + side], act);
    }
}

static void write_example(lm_rng r, int i, lm_example *x)
{
    static const int64_t dims[] = { 4, 20, 32, 64, 80, 128 };
    const lm_kv_format *f[2] = { lm_kv_example_format(false, (uint64_t)i),
                                 lm_kv_example_format(true, lm_example_draw(r, i, 0, 64)) };
    int64_t b = 1 + (int64_t)lm_example_draw(r, i, 1, 3);
    int64_t d = dims[lm_example_draw(r, i, 2, 6)], kv = 1 + (int64_t)lm_example_draw(r, i, 3, 2);
    int64_t h = kv * (1 + (int64_t)lm_example_draw(r, i, 4, 2));
    int64_t T = 16 << lm_example_draw(r, i, 5, 3), t = lm_example_size(r, i, 6, 40);
    int64_t P = (t + T - 1) / T + (int64_t)lm_example_draw(r, i, 7, 3);
    lm_kv_attr a = { .attention = { .batch = b, .heads = h, .kv_heads = kv, .head_dim = d } };
    bool ragged = lm_example_draw(r, i, 8, 2);
    bool replaces = lm_example_draw(r, i, 11, 4) == 0;
    lm_kv_example_latent(r, i, 20, &a, f);
    kv = a.attention.kv_heads;
    for (int side = 0; side < 2; side++) {
        bool steps = f[side] && lm_kv_step(f[side], T) > 1;
        if (replaces)
            f[side] = steps ? NULL : f[side];
        else
            lm_kv_example_side(&a, side, f[side], T, lm_example_draw(r, i, 9, 4) >> side,
                               lm_example_draw(r, i, 10, 4) >> side);
    }
    a.attention.seq = ragged ? 0 : t;
    *x = (lm_example){ .n_in = N_IN, .want = 3 };
    x->in[QKV] = lm_shape2(LM_DTYPE_F32, b * t + (ragged ? 3 : 0), lm_kv_row_heads(&a));
    x->in[USED] = x->in[FRESH] = lm_shape1(LM_DTYPE_I32, b);
    if (ragged)
        x->in[FIRST] = lm_shape1(LM_DTYPE_I32, b + 1);
    x->in[TABLE] = lm_shape2(LM_DTYPE_I32, b, P);
    if (replaces)
        x->in[ROW] = lm_shape2(LM_DTYPE_I32, x->in[QKV].dim[0], kv);
    for (int side = 0; side < 2; side++) {
        int64_t rows = a.residual[side] + a.sinks[side];
        d = lm_kv_side_dim(&a, side);
        x->out[side] = (lm_tensor){
            .dtype = LM_DTYPE_NONE, .ndim = 4, .dim = { b * P + 1, kv, T, d }, .kv = f[side]
        };
        if (rows > 0) {
            x->want |= 4u << side;
            x->in[SLOT] = lm_shape1(LM_DTYPE_I32, b);
            x->out[KTAIL + side] =
                (lm_tensor){ .dtype = LM_DTYPE_NONE, .ndim = 4, .dim = { b + 1, kv, rows, d } };
        }
    }
    lm_example_attr(x, &a);
}

static void write_fill(lm_rng r, const lm_call *c)
{
    const lm_kv_attr *a = c->attr;
    int64_t B = a->attention.batch, P = c->in[TABLE].dim[1], room = P * c->out[KEYS].dim[2];
    int64_t rows = c->in[QKV].dim[0] / B;
    int32_t *used = c->in[USED].data, *fresh = c->in[FRESH].data, *first = c->in[FIRST].data;
    int32_t *table = c->in[TABLE].data, *slot = c->in[SLOT].data;
    for (int64_t b = 0; b < B; b++) {
        fresh[b] = (int32_t)lm_rng_below(r, (uint64_t)b * 8, (uint64_t)rows + 1);
        fresh[b] = fresh[b] > room ? (int32_t)room : fresh[b];
        used[b] = (int32_t)lm_rng_below(r, (uint64_t)b * 8 + 1, (uint64_t)(room - fresh[b]) + 1);
        if (first) {
            first[0] = 0;
            first[b + 1] = first[b] + fresh[b];
        }
        if (slot)
            slot[b] = (int32_t)(B - b);
        for (int64_t p = 0; p < P; p++) /* each page once */
            table[b * P + p] = (int32_t)(B * P - b * P - p);
    }
    int32_t *row = c->in[ROW].data;
    for (int64_t i = 0; row && i < lm_tensor_count(&c->in[ROW]); i++)
        row[i] = (int32_t)lm_rng_below(r, 1000 + (uint64_t)i, (uint64_t)room);
    lm_kv_example_pages(r, &c->out[KEYS]);
    lm_kv_example_pages(r, &c->out[VALUES]);
}

const lm_op lm_op_kv_write = {
    .name = "kv_write",
    .attr_size = sizeof(lm_kv_attr),
    .in = { { "qkv", "N,(H+K)D+VE", LM_ACT_TYPE }, /* V: K, of latents 0 */
            { "used", "B", LM_IDS },
            { "fresh", "B", LM_IDS },
            { "first", "B+1", LM_IDS | LM_OPTIONAL },
            { "table", "B,P", LM_IDS },
            { "slot", "B", LM_IDS | LM_OPTIONAL },
            { "row", "N,K", LM_IDS | LM_OPTIONAL } },
    .out = { { "keys", "G,K,T,I", LM_ACT_TYPE | LM_GIVEN | LM_KV },
             { "values", "G,K,T,J", LM_ACT_TYPE | LM_GIVEN | LM_KV },
             { "ktail", "L,K,R,I", LM_ACT_TYPE | LM_GIVEN | LM_OPTIONAL },
             { "vtail", "L,K,S,J", LM_ACT_TYPE | LM_GIVEN | LM_OPTIONAL } },
    .fields = write_fields,
    .split = "HKV",
    .splits = lm_kv_splits,
    .prec = LM_PREC_ALLOW,
    .shape = write_shape,
    .cost = write_cost,
    .example = write_example,
    .fill = write_fill,
};
