/* SPDX-License-Identifier: Apache-2.0 */
/* attention.c -- softmax attention over packed qkv rows, its backward, and the cached form. */
#include "kernels/attention.h"

#include "graph/passes.h"
#include "op/attention_bias.h"
#include "op/attention_blocks.h"
#include "op/ops.h"
#include "op/ring.h"

static const lm_field cached_fields[] = { { LM_ATTR_INT(lm_attention_attr, batch, 'B') },
                                          { LM_ATTR_INT(lm_attention_attr, seq, 'T') },
                                          { LM_ATTR_INT(lm_attention_attr, heads, 'H') },
                                          { LM_ATTR_INT(lm_attention_attr, kv_heads, 'K') },
                                          { LM_ATTR_INT(lm_attention_attr, head_dim, 'D') },
                                          { LM_ATTR_INT(lm_attention_attr, window, 0) },
                                          { LM_ATTR_FLAG(lm_attention_attr, causal) },
                                          { LM_ATTR_REAL(lm_attention_attr, scale) },
                                          { LM_ATTR_RARE_REAL(lm_attention_attr, soft_cap) },
                                          { LM_ATTR_RARE_INT(lm_attention_attr, value_dim, 'E',
                                                             'D') },
                                          { LM_ATTR_RARE_INT(lm_attention_attr, bias_zero, 0, 0) },
                                          LM_BLOCK_FIELDS(lm_attention_attr, blocks),
                                          { LM_ATTR_RARE_FLAG(lm_attention_attr, undivided) },
                                          { LM_ATTR_RARE_FLAG(lm_attention_attr, reads) },
                                          { 0 } };
static const lm_field attention_fields[] = {
    { LM_ATTR_INT(lm_attention_attr, batch, 'B') },
    { LM_ATTR_INT(lm_attention_attr, seq, 'T') },
    { LM_ATTR_INT(lm_attention_attr, heads, 'H') },
    { LM_ATTR_INT(lm_attention_attr, kv_heads, 'K') },
    { LM_ATTR_INT(lm_attention_attr, head_dim, 'D') },
    { LM_ATTR_INT(lm_attention_attr, window, 0) },
    { LM_ATTR_FLAG(lm_attention_attr, causal) },
    { LM_ATTR_REAL(lm_attention_attr, scale) },
    { LM_ATTR_REAL(lm_attention_attr, dropout) },
    { LM_ATTR_INT(lm_attention_attr, site, 0) },
    { LM_ATTR_RARE_REAL(lm_attention_attr, soft_cap) },
    { LM_ATTR_RARE_INT(lm_attention_attr, value_dim, 'E', 'D') },
    { LM_ATTR_RARE_INT(lm_attention_attr, bias_zero, 0, 0) },
    LM_BLOCK_FIELDS(lm_attention_attr, blocks),
    { LM_ATTR_RARE_FLAG(lm_attention_attr, undivided) },
    { LM_ATTR_RARE_REAL(lm_attention_attr, pairs) },
    LM_ORIGIN_FIELDS(lm_attention_attr, origin),
    { 0 }
};
static const lm_field dbias_fields[] = {
    { LM_ATTR_INT(lm_attention_dbias_attr, attention.batch, 'B') },
    { LM_ATTR_INT(lm_attention_dbias_attr, attention.seq, 'T') },
    { LM_ATTR_INT(lm_attention_dbias_attr, attention.heads, 'H') },
    { LM_ATTR_INT(lm_attention_dbias_attr, attention.kv_heads, 'K') },
    { LM_ATTR_INT(lm_attention_dbias_attr, attention.head_dim, 'D') },
    { LM_ATTR_INT(lm_attention_dbias_attr, attention.window, 0) },
    { LM_ATTR_FLAG(lm_attention_dbias_attr, attention.causal) },
    { LM_ATTR_REAL(lm_attention_dbias_attr, attention.scale) },
    { LM_ATTR_REAL(lm_attention_dbias_attr, attention.dropout) },
    { LM_ATTR_INT(lm_attention_dbias_attr, attention.site, 0) },
    { LM_ATTR_RARE_REAL(lm_attention_dbias_attr, attention.soft_cap) },
    { LM_ATTR_RARE_INT(lm_attention_dbias_attr, attention.value_dim, 'E', 'D') },
    { LM_ATTR_RARE_INT(lm_attention_dbias_attr, attention.bias_zero, 0, 0) },
    { LM_ATTR_RARE_FLAG(lm_attention_dbias_attr, attention.undivided) },
    { LM_ATTR_RARE_REAL(lm_attention_dbias_attr, attention.pairs) },
    LM_ORIGIN_FIELDS(lm_attention_dbias_attr, attention.origin),
    { LM_ATTR_WORD(lm_attention_dbias_attr, acc, lm_acc_words) },
    { 0 }
};

static const lm_field dsinks_fields[] = { { LM_ATTR_INT(lm_attention_dsinks_attr, batch, 'B') },
                                          { LM_ATTR_INT(lm_attention_dsinks_attr, seq, 'T') },
                                          { LM_ATTR_INT(lm_attention_dsinks_attr, heads, 'H') },
                                          { LM_ATTR_WORD(lm_attention_dsinks_attr, acc,
                                                         lm_acc_words) },
                                          { 0 } };

static lm_code attention_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_attention_attr *a = c->attr;
    (void)want;
    if (lm_expect(a->kv_heads > 0 && a->heads % a->kv_heads == 0, "attention", e,
                  "%lld heads are not a multiple of %lld kv heads", (long long)a->heads,
                  (long long)a->kv_heads))
        return e->code;
    return lm_expect(a->value_dim >= 0, "attention", e, "a value head of %lld numbers",
                     (long long)a->value_dim) ||
                   lm_attention_check_blocks("attention", a, e)
               ? e->code
               : LM_OK;
}

lm_code lm_attention_check_blocks(const char *op, const lm_attention_attr *a, lm_err *e)
{
    const lm_attention_blocks *b = &a->blocks;
    if (!b->size)
        return LM_OK;
    return lm_expect(b->size > 0 && b->local > 0 && b->global >= 0 && b->stride >= 0, op, e,
                     "blocks of %lld keys, of which %lld local, %lld global and each %lld-th",
                     (long long)b->size, (long long)b->local, (long long)b->global,
                     (long long)b->stride) ||
                   lm_expect(a->causal && !a->window, op, e,
                             "blocks go with causal attention without a window")
               ? e->code
               : LM_OK;
}

lm_code lm_attention_check_no_blocks(const char *op, const lm_attention_attr *a, lm_err *e)
{
    return lm_expect(!a->blocks.size, op, e, "has no blocks of keys");
}

lm_code lm_attention_check_bias(const char *op, const lm_attention_attr *a, const lm_tensor *bias,
                                lm_err *e)
{
    const int64_t columns = lm_absent(bias) ? 0 : bias->dim[1];
    if (lm_expect(lm_absent(bias) || !a->blocks.size, op, e,
                  "biases by distance go with attention without blocks"))
        return e->code;
    return lm_expect(lm_absent(bias)
                         ? a->bias_zero == 0
                         : a->pairs > 0 || (a->bias_zero >= 0 && a->bias_zero < columns),
                     op, e, "distance 0 has column %lld of %lld columns of biases",
                     (long long)a->bias_zero, (long long)columns);
}

/* Sinks are part of what divides. */
static lm_code check_undivided(const char *op, const lm_attention_attr *a, const lm_tensor *sinks,
                               lm_err *e)
{
    return lm_expect(!a->undivided || lm_absent(sinks), op, e,
                     "sums that are not divided have sinks");
}

static lm_code forward_shape(lm_call *c, unsigned want, lm_err *e)
{
    if (attention_shape(c, want, e) || check_undivided("attention", c->attr, &c->in[3], e))
        return e->code;
    return lm_attention_check_bias("attention", c->attr, &c->in[4], e);
}

static lm_code backward_shape(lm_call *c, unsigned want, lm_err *e)
{
    if (attention_shape(c, want, e))
        return e->code;
    return lm_attention_check_bias("attention_dx", c->attr, &c->in[6], e);
}

static lm_code sinks_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_graph *g = lm_grad_graph(s);
    const lm_attention_attr *a = n->attr;
    lm_attention_dsinks_attr attr = { .batch = a->batch, .seq = a->seq, .heads = a->heads };
    lm_vid in[4] = { lm_grad_of(s, n->out[0]), n->out[0], n->out[1], n->in[3] }, dsinks;
    g->phase = LM_PHASE_BACKWARD_WEIGHT;
    if (lm_grad_weight(s, n->in[3], &dsinks, &attr.acc, e) ||
        lm_graph_append(g, &lm_op_attention_dsinks, &attr, in, &dsinks, e) ||
        lm_grad_weight_give(s, n->in[3], dsinks, e))
        return e->code;
    g->phase = LM_PHASE_BACKWARD_INPUT;
    return LM_OK;
}

static lm_code bias_grad(lm_grad *s, const lm_node *n, const lm_vid *in, lm_err *e)
{
    lm_graph *g = lm_grad_graph(s);
    lm_attention_dbias_attr attr = { .attention = *(const lm_attention_attr *)n->attr };
    lm_vid dbias;
    g->phase = LM_PHASE_BACKWARD_WEIGHT;
    if (lm_grad_weight(s, n->in[4], &dbias, &attr.acc, e) ||
        lm_graph_append(g, &lm_op_attention_dbias, &attr, in, &dbias, e) ||
        lm_grad_weight_give(s, n->in[4], dbias, e))
        return e->code;
    g->phase = LM_PHASE_BACKWARD_INPUT;
    return LM_OK;
}

static lm_code attention_grad(lm_grad *s, const lm_node *n, lm_err *e)
{
    lm_vid in[7] = {
        lm_grad_of(s, n->out[0]), n->in[0], n->out[0], n->out[1], n->in[1], n->in[2], n->in[4]
    };
    lm_vid dqkv = LM_NONE;
    if (n->in[3] >= 0 && lm_grad_wants(s, n->in[3]) && sinks_grad(s, n, e))
        return e->code;
    if (n->in[4] >= 0 && lm_grad_wants(s, n->in[4]) && bias_grad(s, n, in, e))
        return e->code;
    if (!lm_grad_wants(s, n->in[0]))
        return LM_OK;
    if (lm_graph_append(lm_grad_graph(s), &lm_op_attention_dx, n->attr, in, &dqkv, e))
        return e->code;
    return lm_grad_give(s, n->in[0], dqkv, e);
}

/* Pairs of one head and sequence that are visible, the mean of all heads. */
static double visible_pairs(const lm_attention_attr *a)
{
    if (a->pairs > 0)
        return a->pairs;
    if (a->blocks.size)
        return lm_attention_block_pairs(&a->blocks, a->heads, a->seq);
    double t = (double)a->seq, w = a->window > 0 && a->window < a->seq ? (double)a->window : t;
    double before = w * (w + 1) / 2 + (t - w) * w; /* with the query's own */
    return a->causal ? before : 2 * before - t;
}

static void attention_cost(const lm_call *c, lm_cost *out)
{
    const lm_attention_attr *a = c->attr;
    out->flops = 2.0 * (double)(a->batch * a->heads) * visible_pairs(a) *
                 (double)(a->head_dim + lm_attention_value_dim(a));
    out->bytes = lm_call_bytes(c);
}

/* Key and value heads of different sizes, where the example has them.  The greatest are those of latent attention. */
static void draw_value_dim(lm_rng r, int i, bool cached, lm_attention_attr *a)
{
    static const int64_t dims[][2] = { { 24, 16 }, { 192, 128 }, { 20, 7 },   { 16, 32 },
                                       { 96, 64 }, { 40, 136 },  { 576, 512 } };
    if (lm_example_draw(r, i, 15, 2))
        return;
    const int64_t *d = dims[(lm_example_draw(r, i, 2, 6) + (uint64_t)i) % (cached ? 7 : 6)];
    a->head_dim = d[0];
    a->value_dim = d[1];
}

/* Blocks, for a few of the examples that can have them; *seq is then more than a tile of any kernel. */
static void draw_blocks(lm_rng r, int i, lm_attention_attr *a, int64_t *seq)
{
    static const int64_t sizes[] = { 3, 16, 16, 32, 48, 64 };
    if (!a->causal || a->window || lm_example_draw(r, i, 30, 3))
        return;
    a->blocks = (lm_attention_blocks){ .size = sizes[lm_example_draw(r, i, 31, 6)],
                                       .local = 1 + (int64_t)lm_example_draw(r, i, 32, 3),
                                       .global = (int64_t)lm_example_draw(r, i, 33, 3),
                                       .stride = (int64_t)lm_example_draw(r, i, 34, 9),
                                       .homogeneous = lm_example_draw(r, i, 35, 3) == 0 };
    *seq += (int64_t)lm_example_draw(r, i, 36, 200);
    a->head_dim = a->head_dim > 32 ? 32 : a->head_dim;
}

/* Scores are small, as those of a Gaussian kernel are: sums of their exponentials have no bound. */
static void draw_undivided(lm_rng r, int i, lm_attention_attr *a)
{
    a->undivided = lm_example_draw(r, i, 23, 3) == 0;
    if (a->undivided)
        a->scale = 0.1;
}

void lm_attention_example_bias(lm_rng r, int i, int64_t distances, lm_attention_attr *a,
                               lm_tensor *bias)
{
    int64_t columns = 1 + (int64_t)lm_example_draw(r, i, 20, 2 * (uint64_t)distances);
    if (a->blocks.size || lm_example_draw(r, i, 21, 3))
        return;
    a->bias_zero = (int64_t)lm_example_draw(r, i, 22, (uint64_t)columns);
    *bias = lm_shape2(LM_DTYPE_F32, a->heads, columns);
}

static void attention_example(lm_rng r, int i, lm_example *x)
{
    static const int64_t dims[] = { 4, 8, 16, 32, 64, 128 };
    int64_t b = 1 + (int64_t)lm_example_draw(r, i, 0, 2), t = lm_example_size(r, i, 1, 70);
    int64_t d = dims[lm_example_draw(r, i, 2, 6)], kv = 1 + (int64_t)lm_example_draw(r, i, 3, 2);
    int64_t h = kv * (1 + (int64_t)lm_example_draw(r, i, 4, 3));
    lm_attention_attr attr = { .batch = b, .seq = t, .heads = h, .kv_heads = kv, .head_dim = d };
    attr.causal = lm_example_draw(r, i, 5, 4) != 0;
    attr.window = lm_example_draw(r, i, 6, 3) == 0 ? 1 + t / 3 : 0;
    draw_blocks(r, i, &attr, &t);
    attr.seq = t;
    attr.scale = 0.3;
    attr.dropout = lm_example_draw(r, i, 7, 5) == 0 ? 0.25 : 0;
    attr.site = i;
    if (attr.dropout > 0 && i % 2)
        attr.origin = (lm_attention_origin){ t + 9, h + 3, 2, 1, 4, 3 };
    attr.soft_cap = lm_example_draw(r, i, 9, 3) == 0 ? 1.5 : 0;
    draw_value_dim(r, i, false, &attr);
    *x = (lm_example){ .n_in = 3, .want = 3 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, b * t, lm_attention_row(&attr, true));
    if (lm_example_draw(r, i, 8, 2))
        x->in[1] = lm_shape1(LM_DTYPE_I32, b * t);
    if (lm_example_draw(r, i, 10, 2))
        x->in[2] = lm_shape1(LM_DTYPE_I32, b * t);
    if (lm_example_draw(r, i, 11, 3) == 0) {
        x->n_in = 4;
        x->in[3] = lm_shape1(LM_DTYPE_F32, h);
    } else {
        draw_undivided(r, i, &attr);
    }
    lm_attention_example_bias(r, i, 2 * t, &attr, &x->in[4]);
    if (!lm_absent(&x->in[4]))
        x->n_in = 5;
    lm_example_attr(x, &attr);
}

static void attention_fill(lm_rng r, const lm_call *c)
{
    const lm_attention_attr *a = c->attr;
    lm_example_documents(r, a->batch, a->seq, 9, c->in[1].data, c->in[2].data);
}

/* Offsets of strided blocks count heads of the whole.  Blocks of keys are counted from the beginning of a document, which may be on
 * another rank.  Distances of parts from both ends are no line of biases, which are the last operand, and no row of draws. */
static bool attention_splits(const lm_call *c, char letter)
{
    const lm_attention_attr *a = c->attr;
    bool shifted = a->blocks.size && a->blocks.stride && !a->blocks.homogeneous;
    if (letter == 't')
        return a->dropout <= 0 && !a->blocks.size && lm_absent(&c->in[c->n_in - 1]);
    return letter == 'B' || (letter == 'T' ? !a->blocks.size : !shifted);
}

const lm_op lm_op_attention = {
    .name = "attention",
    .attr_size = sizeof(lm_attention_attr),
    .in = { { "qkv", "BT,(H+K)D+KE", LM_ACT_TYPE },
            { "lo", "BT", LM_IDS | LM_OPTIONAL },
            { "hi", "BT", LM_IDS | LM_OPTIONAL },
            { "sinks", "H", LM_OPTIONAL },
            { "bias", "H,Z", LM_OPTIONAL } },
    .out = { { "o", "BT,HE", LM_ACT_TYPE }, { "lse", "B,H,T", LM_SAVED } },
    .fields = attention_fields,
    .split = "B HK T",
    .splits = attention_splits,
    .shard = lm_attention_shard,
    .ranges = "BT",
    .around = 'T',
    .prec = LM_PREC_ALLOW,
    .tolerance = { 2e-6, 1e-2 },
    .shape = forward_shape,
    .grad = attention_grad,
    .cost = attention_cost,
    .example = attention_example,
    .fill = attention_fill,
};

static void dx_cost(const lm_call *c, lm_cost *out)
{
    attention_cost(c, out);
    out->flops *=
        2.5; /* five products against two; the recomputed scores are not extra by convention */
}

const lm_op lm_op_attention_dx = {
    .name = "attention_dx",
    .attr_size = sizeof(lm_attention_attr),
    .in = { { "do", "BT,HE", LM_ACT_TYPE },
            { "qkv", "BT,(H+K)D+KE", LM_ACT_TYPE },
            { "o", "BT,HE", LM_ACT_TYPE },
            { "lse", "B,H,T", 0 },
            { "lo", "BT", LM_IDS | LM_OPTIONAL },
            { "hi", "BT", LM_IDS | LM_OPTIONAL },
            { "bias", "H,Z", LM_OPTIONAL } },
    .out = { { "dqkv", "BT,(H+K)D+KE", LM_ACT_TYPE | LM_GRADIENT } },
    .fields = attention_fields,
    .split = "B HK T",
    .splits = attention_splits,
    .shard = lm_attention_dx_shard,
    .ranges = "BT",
    .around = 'T',
    .prec = LM_PREC_ALLOW,
    .tolerance = { 2e-6, 1e-2 },
    .shape = backward_shape,
    .cost = dx_cost,
};

static lm_code dbias_shape(lm_call *c, unsigned want, lm_err *e)
{
    if (attention_shape(c, want, e))
        return e->code;
    return lm_attention_check_bias("attention_dbias", c->attr, &c->in[6], e);
}

const lm_op lm_op_attention_dbias = {
    .name = "attention_dbias",
    .attr_size = sizeof(lm_attention_dbias_attr),
    .in = { { "do", "BT,HE", LM_ACT_TYPE },
            { "qkv", "BT,(H+K)D+KE", LM_ACT_TYPE },
            { "o", "BT,HE", LM_ACT_TYPE },
            { "lse", "B,H,T", 0 },
            { "lo", "BT", LM_IDS | LM_OPTIONAL },
            { "hi", "BT", LM_IDS | LM_OPTIONAL },
            { "bias", "H,Z", 0 } },
    .out = { { "dbias", "H,Z", 0 } },
    .fields = dbias_fields,
    .split = "B+ HK T+",
    .splits = attention_splits,
    .shard = lm_attention_dbias_shard,
    .ranges = "BT",
    .around = 'T',
    .prec = LM_PREC_ALLOW,
    .tolerance = { 1e-5, 1e-2 },
    .shape = dbias_shape,
    .cost = attention_cost,
};

static lm_code dsinks_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_attention_dsinks_attr *a = c->attr;
    (void)want;
    return lm_expect(a->heads > 0 && c->in[0].dim[1] % a->heads == 0, "attention_dsinks", e,
                     "rows of %lld numbers are not %lld heads", (long long)c->in[0].dim[1],
                     (long long)a->heads);
}

static void dsinks_cost(const lm_call *c, lm_cost *out)
{
    out->flops = 2.0 * (double)lm_tensor_count(&c->in[0]);
    out->bytes = lm_call_bytes(c);
}

static void dsinks_example(lm_rng r, int i, lm_example *x)
{
    int64_t b = 1 + (int64_t)lm_example_draw(r, i, 0, 3), t = lm_example_size(r, i, 1, 70);
    int64_t h = 1 + (int64_t)lm_example_draw(r, i, 2, 6), d = lm_example_size(r, i, 3, 70);
    lm_attention_dsinks_attr attr = { b, t, h,
                                      lm_example_draw(r, i, 4, 2) ? LM_ACC_FIRST : LM_ACC_ADD };
    *x = (lm_example){ .n_in = 4, .want = 1 };
    x->in[0] = x->in[1] = lm_shape2(LM_DTYPE_F32, b * t, h * d);
    x->in[2] = (lm_tensor){ .dtype = LM_DTYPE_F32, .ndim = 3, .dim = { b, h, t } };
    x->in[3] = lm_shape1(LM_DTYPE_F32, h);
    lm_example_attr(x, &attr);
}

const lm_op lm_op_attention_dsinks = {
    .name = "attention_dsinks",
    .attr_size = sizeof(lm_attention_dsinks_attr),
    .in = { { "do", "BT,W", LM_ACT_TYPE },
            { "o", "BT,W", LM_ACT_TYPE },
            { "lse", "B,H,T", 0 },
            { "sinks", "H", 0 } },
    .out = { { "dsinks", "H", 0 } },
    .fields = dsinks_fields,
    .split = "B+ HW T+",
    .prec = LM_PREC_ALLOW,
    .tolerance = { 1e-5, 1e-2 },
    .shape = dsinks_shape,
    .cost = dsinks_cost,
    .example = dsinks_example,
};

static lm_code cached_shape(lm_call *c, unsigned want, lm_err *e)
{
    const char *op = "attention_cached";
    const lm_attention_attr *a = c->attr;
    bool ragged = !lm_absent(&c->in[3]), paged = !lm_absent(&c->in[5]);
    bool values = !lm_absent(&c->out[2]);
    if (attention_shape(c, want, e) || lm_attention_check_bias(op, a, &c->in[7], e) ||
        check_undivided(op, a, &c->in[6], e) ||
        lm_expect(!a->reads || (values && !a->causal && a->window == 0 && lm_absent(&c->in[7]) &&
                                a->blocks.size == 0),
                  op, e,
                  "what is only read has values, no order, no window, no blocks and no biases") ||
        lm_expect(values || lm_attention_value_dim(a) <= a->head_dim, op, e,
                  "values of %lld numbers are not part of keys of %lld", (long long)a->value_dim,
                  (long long)a->head_dim) ||
        lm_expect(ragged == !lm_absent(&c->in[4]), op, e, "first and kind go together") ||
        lm_expect(ragged == (a->seq == 0), op, e, "first goes with T = 0") ||
        lm_expect(ragged || c->in[0].dim[0] == a->batch * a->seq, op, e,
                  "qkv has %lld rows, not %lld times %lld", (long long)c->in[0].dim[0],
                  (long long)a->batch, (long long)a->seq) ||
        lm_expect(paged || c->out[1].dim[0] == a->batch, op, e,
                  "caches of %lld sequences, not of %lld", (long long)c->out[1].dim[0],
                  (long long)a->batch) ||
        lm_expect(!paged || c->out[1].dim[2] % LM_PAGE_UNIT == 0, op, e,
                  "pages of %lld positions: not a multiple of %d", (long long)c->out[1].dim[2],
                  LM_PAGE_UNIT))
        return e->code;
    return LM_OK;
}

/* The positions that a sequence has room for. */
static int64_t cached_room(const lm_call *c)
{
    return c->out[1].dim[2] * (lm_absent(&c->in[5]) ? 1 : c->in[5].dim[1]);
}

/* Those of them that the query at the last one sees, the mean of all heads. */
static double seen_of(const lm_attention_attr *a, int64_t room)
{
    const lm_attention_blocks *b = &a->blocks;
    return b->size && room ? lm_attention_block_keys(b, a->heads, room) : (double)room;
}

static void cached_cost(const lm_call *c, lm_cost *out)
{
    const lm_attention_attr *a = c->attr;
    out->flops = 2.0 * (double)(c->in[0].dim[0] * a->heads) *
                 (double)(a->head_dim + lm_attention_value_dim(a)) * seen_of(a, cached_room(c));
    out->bytes = lm_call_bytes(c);
}

/* Rows of any number in each sequence, and some of none. */
static void make_ragged(lm_rng r, int i, lm_attention_attr *attr, lm_example *x)
{
    int64_t rows = lm_example_size(r, i, 1, 40) + attr->batch;
    attr->seq = 0;
    x->in[0].dim[0] = rows;
    x->out[1].dim[2] += rows;
    x->in[3] = lm_shape1(LM_DTYPE_I32, attr->batch + 1);
    x->in[4] = lm_shape1(LM_DTYPE_I32, attr->batch);
}

static void make_paged(lm_rng r, int i, const lm_attention_attr *attr, lm_example *x)
{
    int64_t page = LM_PAGE_UNIT << lm_example_draw(r, i, 10, 3), *dim = x->out[1].dim;
    int64_t width = (dim[2] + page - 1) / page;
    x->in[5] = lm_shape2(LM_DTYPE_I32, attr->batch, width);
    dim[0] = attr->batch * width + 1;
    dim[2] = page;
}

static void cached_example(lm_rng r, int i, lm_example *x)
{
    static const int64_t dims[] = { 4, 8, 16, 32, 64, 128 };
    int64_t b = 1 + (int64_t)lm_example_draw(r, i, 0, 3), t = 1;
    int64_t d = dims[lm_example_draw(r, i, 2, 6)], kv = 1 + (int64_t)lm_example_draw(r, i, 3, 2);
    int64_t h = kv * (1 + (int64_t)lm_example_draw(r, i, 4, 3));
    if (lm_example_draw(r, i, 5, 2)) /* half of the examples decode */
        t = lm_example_size(r, i, 1, 40);
    int64_t s = t + lm_example_size(r, i, 6, 70);
    lm_attention_attr attr = { .batch = b, .seq = t, .heads = h, .kv_heads = kv, .head_dim = d };
    attr.causal = true;
    attr.window = lm_example_draw(r, i, 7, 3) == 0 ? 1 + s / 3 : 0;
    draw_blocks(r, i, &attr, &s);
    attr.scale = 0.3;
    attr.soft_cap = lm_example_draw(r, i, 12, 3) == 0 ? 1.5 : 0;
    draw_value_dim(r, i, true, &attr);
    bool values =
        attr.value_dim == 0 || attr.value_dim > attr.head_dim || lm_example_draw(r, i, 11, 2);
    *x = (lm_example){ .n_in = 3, .want = lm_example_draw(r, i, 14, 2) ? 15 : 7 };
    x->in[0] = lm_shape2(LM_DTYPE_F32, b * t, lm_attention_row(&attr, values));
    x->in[1] = x->in[2] = lm_shape1(LM_DTYPE_I32, b);
    x->out[1] =
        (lm_tensor){ .dtype = LM_DTYPE_NONE, .ndim = 4, .dim = { b, kv, s, attr.head_dim } };
    if (lm_example_draw(r, i, 8, 3) == 0)
        make_ragged(r, i, &attr, x);
    if (lm_example_draw(r, i, 13, 2))
        make_paged(r, i, &attr, x);
    x->n_in = 6;
    if (lm_example_draw(r, i, 15, 3) == 0) {
        x->n_in = 7;
        x->in[6] = lm_shape1(LM_DTYPE_F32, h);
    } else {
        draw_undivided(r, i, &attr);
    }
    if (values && lm_example_draw(r, i, 16, 4) == 0) {
        attr.reads = true;
        attr.blocks = (lm_attention_blocks){ 0 };
        attr.causal = false;
        attr.window = 0;
        x->in[0].dim[1] = lm_attention_row(&attr, values);
    } else {
        lm_attention_example_bias(r, i, s, &attr, &x->in[7]);
    }
    if (!lm_absent(&x->in[7]))
        x->n_in = 8;
    if (values) {
        x->out[2] = x->out[1];
        x->out[2].dim[3] = lm_attention_value_dim(&attr);
    } else {
        x->want &= ~4u;
    }
    lm_example_attr(x, &attr);
}

/* Pages in an order that is not that of the positions; page 0 belongs to no sequence. */
static void fill_table(const lm_call *c)
{
    int32_t *table = c->in[5].data;
    int64_t n = c->in[5].dim[0] * c->in[5].dim[1];
    for (int64_t k = 0; k < n; k++)
        table[k] = (int32_t)(n - k);
}

/* The rows of sequence b, of which the last few may belong to none. */
static void fill_ragged(lm_rng r, const lm_call *c)
{
    int32_t *first = c->in[3].data, *kind = c->in[4].data;
    int64_t batch = c->in[1].dim[0], rows = c->in[0].dim[0] - batch, at = 0;
    for (int64_t b = 0; b < batch; b++) {
        kind[b] = (int32_t)lm_rng_below(r, 100 + (uint64_t)b, 2);
        first[b] = (int32_t)at;
        at += kind[b] == LM_ROWS_PROMPT
                  ? (int64_t)lm_rng_below(r, 200 + (uint64_t)b, (uint64_t)(rows / batch) + 2)
                  : (int64_t)lm_rng_below(r, 200 + (uint64_t)b, 2);
    }
    first[batch] = (int32_t)at;
}

static void cached_fill(lm_rng r, const lm_call *c)
{
    const lm_attention_attr *a = c->attr;
    int32_t *used = c->in[1].data, *fresh = c->in[2].data, *first = c->in[3].data;
    if (c->in[5].data)
        fill_table(c);
    if (first)
        fill_ragged(r, c);
    for (int64_t b = 0; b < a->batch; b++) {
        int64_t most = first ? first[b + 1] - first[b] : a->seq;
        fresh[b] = (int32_t)lm_rng_below(r, (uint64_t)b * 2, (uint64_t)most + 1);
        used[b] = (int32_t)lm_rng_below(r, (uint64_t)b * 2 + 1,
                                        (uint64_t)(cached_room(c) - fresh[b]) + 1);
    }
}

/* Heads of keys (U) and of values (V) in rows of qkv: what is only read has neither there, and latents are keys alone. */
static int64_t cached_letter(const lm_call *c, char letter)
{
    const lm_attention_attr *a = c->attr;
    const bool none = a->reads || (letter == 'V' && lm_absent(&c->out[2]));
    return letter == 'U' || letter == 'V' ? (none ? 0 : a->kv_heads) : -1;
}

const lm_op lm_op_attention_cached = {
    .name = "attention_cached",
    .attr_size = sizeof(lm_attention_attr),
    .in = { { "qkv", "N,(H+U)D+VE", LM_ACT_TYPE }, /* U, V: K or 0 (lm_attention_row) */
            { "used", "B", LM_IDS },
            { "fresh", "B", LM_IDS },
            { "first", "B+1", LM_IDS | LM_OPTIONAL },
            { "kind", "B", LM_IDS | LM_OPTIONAL },
            { "table", "B,P", LM_IDS | LM_OPTIONAL },
            { "sinks", "H", LM_OPTIONAL },
            { "bias", "H,Z", LM_OPTIONAL } },
    .out = { { "o", "N,HE", LM_ACT_TYPE },
             { "kcache", "G,K,S,D", LM_ACT_TYPE | LM_GIVEN },
             { "vcache", "G,K,S,E", LM_ACT_TYPE | LM_GIVEN | LM_OPTIONAL },
             { "lse", "N,H", LM_SAVED | LM_OPTIONAL } },
    .fields = cached_fields,
    .letter = cached_letter,
    .split = "HKUV",
    .splits = attention_splits,
    .prec = LM_PREC_ALLOW,
    .tolerance = { 2e-6, 1e-2 },
    .shape = cached_shape,
    .cost = cached_cost,
    .example = cached_example,
    .fill = cached_fill,
};
