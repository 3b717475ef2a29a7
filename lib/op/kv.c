/* SPDX-License-Identifier: Apache-2.0 */
/* kv.c -- attention over coded caches. */
#include "kernels/kv.h"

#include "numeric/code_rows.h"
#include "op/attention_bias.h"
#include "op/attention_blocks.h"
#include "op/kv_example.h"
#include "op/ops.h"

static const lm_field kv_fields[] = { { LM_ATTR_INT(lm_kv_attr, attention.batch, 'B') },
                                      { LM_ATTR_INT(lm_kv_attr, attention.seq, 0) },
                                      { LM_ATTR_INT(lm_kv_attr, attention.heads, 'H') },
                                      { LM_ATTR_INT(lm_kv_attr, attention.kv_heads, 'K') },
                                      { LM_ATTR_INT(lm_kv_attr, attention.head_dim, 'D') },
                                      { LM_ATTR_RARE_INT(lm_kv_attr, attention.value_dim, 'E',
                                                         'D') },
                                      { LM_ATTR_RARE_FLAG(lm_kv_attr, latent) },
                                      { LM_ATTR_RARE_FLAG(lm_kv_attr, attention.reads) },
                                      { LM_ATTR_INT(lm_kv_attr, attention.window, 0) },
                                      { LM_ATTR_REAL(lm_kv_attr, attention.scale) },
                                      { LM_ATTR_RARE_REAL(lm_kv_attr, attention.soft_cap) },
                                      { LM_ATTR_RARE_INT(lm_kv_attr, attention.bias_zero, 0, 0) },
                                      { LM_ATTR_INT(lm_kv_attr, residual[0], 0) },
                                      { LM_ATTR_INT(lm_kv_attr, residual[1], 0) },
                                      { LM_ATTR_INT(lm_kv_attr, sinks[0], 0) },
                                      { LM_ATTR_INT(lm_kv_attr, sinks[1], 0) },
                                      { 0 } };

enum {
    QKV,
    USED,
    FRESH,
    FIRST,
    KIND,
    TABLE,
    KEYS,
    VALUES,
    SLOT,
    KTAIL,
    VTAIL,
    ROPE,
    PLACE,
    SINKS,
    BIAS,
    N_IN
};

/* Plain tokens leave the groups of the format whole; a plain side has no tail. */
static bool keeps_groups(int64_t residual, int64_t sinks, const lm_tensor *t)
{
    int64_t step = t->kv ? lm_kv_step(t->kv, t->dim[2]) : 1;
    if (!t->kv)
        return residual == 0 && sinks == 0;
    return residual >= 0 && sinks >= 0 && residual % step == 0 && sinks % step == 0 &&
           (step == 1 || residual > 0);
}

lm_code lm_kv_check_sides(const char *op, const lm_kv_attr *a, const lm_tensor *const pages[2],
                          const lm_tensor *const tail[2], const lm_tensor *slot, lm_err *e)
{
    static const char *const names[] = { "keys", "values" };
    const lm_attention_attr *x = &a->attention;
    bool any = false;
    if (a->latent) {
        if (lm_expect(x->kv_heads == 1 && x->value_dim > 0 && x->value_dim < x->head_dim &&
                          x->value_dim % 4 == 0 && !a->token_range,
                      op, e, "latents of %lld numbers in a key of %lld of %lld heads",
                      (long long)x->value_dim, (long long)x->head_dim, (long long)x->kv_heads))
            return e->code;
    } else if (lm_expect(lm_attention_value_dim(x) == x->head_dim, op, e,
                         "values of %lld numbers with keys of %lld: such caches have no coded form",
                         (long long)x->value_dim, (long long)x->head_dim)) {
        return e->code;
    }
    for (int side = 0; side < 2; side++) {
        long long residual = a->residual[side], sinks = a->sinks[side];
        const lm_kv_format *f = pages[side]->kv;
        if (lm_expect(keeps_groups(a->residual[side], a->sinks[side], pages[side]), op, e,
                      "residual %lld and sinks %lld do not fit the %s, %s", residual, sinks,
                      names[side], f ? f->name : "which are plain") ||
            lm_expect((residual + sinks > 0) != lm_absent(tail[side]), op, e,
                      "the tail of the %s goes with their residual or sinks", names[side]) ||
            lm_expect(lm_absent(tail[side]) || tail[side]->dim[2] == residual + sinks, op, e,
                      "the tail of the %s has %lld rows, not residual + sinks", names[side],
                      (long long)tail[side]->dim[2]) ||
            lm_expect(pages[side]->dim[3] == lm_kv_side_dim(a, side), op, e,
                      "%s of %lld numbers, not %lld", names[side], (long long)pages[side]->dim[3],
                      (long long)lm_kv_side_dim(a, side)) ||
            lm_expect(!f || f->values == (side == 1 && !a->latent), op, e,
                      "%s are in the order of %s", names[side], names[f && f->values]))
            return e->code;
        any = any || residual + sinks > 0;
    }
    return lm_expect(any != lm_absent(slot), op, e, "slot goes with tails");
}

double lm_kv_token_bytes(const lm_tensor *t, lm_dtype act)
{
    if (!t->kv)
        return (double)t->dim[3] * (double)lm_dtype_size(act);
    return (double)lm_kv_page_bytes(t->kv, t->dim[2], t->dim[3]) / (double)t->dim[2];
}

static lm_code kv_shape(lm_call *c, unsigned want, lm_err *e)
{
    const lm_kv_attr *a = c->attr;
    const lm_attention_attr *x = &a->attention;
    const lm_tensor *in = c->in;
    bool ragged = !lm_absent(&in[FIRST]);
    (void)want;
    if (lm_expect(x->kv_heads > 0 && x->heads % x->kv_heads == 0, "kv_attention", e,
                  "%lld heads are not a multiple of %lld kv heads", (long long)x->heads,
                  (long long)x->kv_heads) ||
        lm_expect(x->causal != x->reads && x->dropout == 0 && !x->undivided, "kv_attention", e,
                  "is causal or reads, without dropout, and divides") ||
        lm_expect(!x->reads || (x->window == 0 && lm_absent(&in[BIAS]) && lm_absent(&in[ROPE]) &&
                                !a->latent),
                  "kv_attention", e, "what is only read has no window, bias, rope or latent") ||
        lm_expect(ragged == !lm_absent(&in[KIND]) && ragged == (x->seq == 0) &&
                      (ragged || in[QKV].dim[0] == x->batch * x->seq),
                  "kv_attention", e, "rows are B times seq, or have first and kind") ||
        lm_expect(
            lm_absent(&in[ROPE])
                ? lm_absent(&in[PLACE])
                : in[ROPE].dim[1] % 2 == 0 && in[ROPE].dim[1] <= x->head_dim && !a->latent,
            "kv_attention", e,
            "R of the rope table is not even, or above D, or of latents, or place has none") ||
        lm_attention_check_no_blocks("kv_attention", x, e) ||
        lm_attention_check_bias("kv_attention", x, &in[BIAS], e))
        return e->code;
    return lm_kv_check_sides("kv_attention", a, (const lm_tensor *[]){ &in[KEYS], &in[VALUES] },
                             (const lm_tensor *[]){ &in[KTAIL], &in[VTAIL] }, &in[SLOT], e);
}

static void kv_cost(const lm_call *c, lm_cost *out)
{
    const lm_attention_attr *a = &((const lm_kv_attr *)c->attr)->attention;
    int64_t room = c->in[TABLE].dim[1] * c->in[KEYS].dim[2];
    out->flops = 2.0 * (double)(c->in[QKV].dim[0] * a->heads) *
                 (double)(a->head_dim + lm_attention_value_dim(a)) * (double)room;
    out->bytes = lm_call_bytes(c);
}

/* ---- examples: a format for keys and one for values ---- */

#define GRID(side, b, x, l, g)                                                             \
    {                                                                                      \
        .name = #b " bits", .values = side, .bits = b, .axis = x, .levels = l, .group = g, \
        .scale = LM_DTYPE_F16                                                              \
    }
#define GGML(side, b, l)                                                                   \
    {                                                                                      \
        .name = "ggml", .values = side, .bits = b, .levels = l, .group = 32, .ggml = true, \
        .scale = LM_DTYPE_F16                                                              \
    }
#define SPECIAL(side)                                                                       \
    { .name = "fp8",                                                                        \
      .values = side,                                                                       \
      .bits = 8,                                                                            \
      .levels = LM_KV_FLOAT8,                                                               \
      .float8 = LM_DTYPE_F8E4M3,                                                            \
      .scale = LM_DTYPE_NONE,                                                               \
      .constant = 0.5 },                                                                    \
    {                                                                                       \
        .name = "codebook", .values = side, .bits = 2, .levels = LM_KV_TABLE, .norm = true, \
        .renorm = true, .scale = LM_DTYPE_F16, .n_table = 4, .table = {                     \
            -1.5104f,                                                                       \
            -0.4528f,                                                                       \
            0.4528f,                                                                        \
            1.5104f                                                                         \
        }                                                                                   \
    }
#define FORMATS(side)                                                                         \
    {                                                                                         \
        GRID(side, 8, LM_KV_TOKEN, LM_KV_SYM, 0), GRID(side, 4, LM_KV_TOKEN, LM_KV_ASYM, 32), \
            GRID(side, 2, LM_KV_CHANNEL, LM_KV_ASYM, 16),                                     \
            GRID(side, 5, LM_KV_TOKEN, LM_KV_SYM, 16), GGML(side, 4, LM_KV_SYM),              \
            GRID(side, 3, LM_KV_CHANNEL, LM_KV_SYM, 0), SPECIAL(side),                        \
            GRID(side, 6, LM_KV_TOKEN, LM_KV_ASYM, 0),                                        \
        {                                                                                     \
            .name = "fp8 groups", .values = side, .bits = 8, .levels = LM_KV_FLOAT8,          \
            .float8 = LM_DTYPE_F8E4M3, .group = 16, .scale = LM_DTYPE_F16,                    \
        }                                                                                     \
    }
static const lm_kv_format keys_formats[] = FORMATS(false), values_formats[] = FORMATS(true);
enum { N_EXAMPLES = sizeof keys_formats / sizeof *keys_formats };

const lm_kv_format *lm_kv_example_format(bool values, uint64_t i)
{
    uint64_t k = i % (N_EXAMPLES + 1);
    return k == N_EXAMPLES ? NULL : &(values ? values_formats : keys_formats)[k];
}

void lm_kv_example_side(lm_kv_attr *to, int side, const lm_kv_format *f, int64_t T, uint64_t a,
                        uint64_t b)
{
    bool steps = f && lm_kv_step(f, T) > 1;
    if (steps || (f && a % 2))
        to->residual[side] = T;
    if (f && b % 2)
        to->sinks[side] = steps ? T : 5;
}

void lm_kv_example_latent(lm_rng r, int i, uint64_t draws, lm_kv_attr *a, const lm_kv_format *f[2])
{
    static const int64_t dims[] = { 4, 20, 32, 64, 112 }, rotary[] = { 2, 4, 8, 16 };
    if (lm_example_draw(r, i, draws, 4))
        return;
    a->latent = true;
    a->attention.heads /= a->attention.kv_heads;
    a->attention.kv_heads = 1;
    a->attention.value_dim = dims[lm_example_draw(r, i, draws + 1, 5)];
    a->attention.head_dim = a->attention.value_dim + rotary[lm_example_draw(r, i, draws + 2, 4)];
    f[1] = lm_example_draw(r, i, draws + 3, 2)
               ? lm_kv_example_format(false, lm_example_draw(r, i, draws + 4, 64))
               : NULL;
}

static lm_tensor cache(const lm_kv_format *f, int64_t pages, int64_t K, int64_t T, int64_t D)
{
    return (lm_tensor){ .dtype = LM_DTYPE_F32, .ndim = 4, .dim = { pages, K, T, D }, .kv = f };
}

static void kv_example(lm_rng r, int i, lm_example *x)
{
    static const int64_t dims[] = { 4, 20, 32, 64, 80, 128 };
    const lm_kv_format *f[2] = { lm_kv_example_format(false, (uint64_t)i),
                                 lm_kv_example_format(true, lm_example_draw(r, i, 0, 64)) };
    int64_t b = 1 + (int64_t)lm_example_draw(r, i, 1, 3);
    int64_t d = dims[lm_example_draw(r, i, 2, 6)], kv = 1 + (int64_t)lm_example_draw(r, i, 3, 2);
    int64_t h = kv * (1 + (int64_t)lm_example_draw(r, i, 4, 5)),
            T = 16 << lm_example_draw(r, i, 5, 3);
    int64_t P = 1 + (int64_t)lm_example_draw(r, i, 6, 5), t = lm_example_size(r, i, 7, 40);
    lm_kv_attr a = { .attention = { .batch = b, .heads = h, .kv_heads = kv, .head_dim = d } };
    bool ragged = lm_example_draw(r, i, 8, 2);
    a.attention.causal = true;
    a.attention.scale = 0.3;
    a.attention.window = lm_example_draw(r, i, 9, 3) == 0 ? 1 + T : 0;
    a.attention.soft_cap = lm_example_draw(r, i, 10, 3) == 0 ? 1.5 : 0;
    lm_kv_example_latent(r, i, 20, &a, f);
    a.attention.reads = !a.latent && lm_example_draw(r, i, 30, 4) == 0;
    if (a.attention.reads) {
        a.attention.causal = false;
        a.attention.window = 0;
    }
    h = a.attention.heads;
    kv = a.attention.kv_heads;
    for (int side = 0; side < 2; side++) /* one of the bits each */
        lm_kv_example_side(&a, side, f[side], T, lm_example_draw(r, i, 11, 4) >> side,
                           lm_example_draw(r, i, 12, 4) >> side);
    if (lm_example_draw(r, i, 13, 2)) /* half of the examples decode */
        t = 1;
    a.attention.seq = ragged ? 0 : t;
    *x = (lm_example){ .n_in = N_IN, .want = 3 };
    x->in[QKV] = lm_shape2(LM_DTYPE_F32, b * t + (ragged ? 3 : 0), lm_kv_row_heads(&a));
    x->in[USED] = x->in[FRESH] = lm_shape1(LM_DTYPE_I32, b);
    if (ragged) {
        x->in[FIRST] = lm_shape1(LM_DTYPE_I32, b + 1);
        x->in[KIND] = lm_shape1(LM_DTYPE_I32, b);
    }
    x->in[TABLE] = lm_shape2(LM_DTYPE_I32, b, P);
    for (int side = 0; side < 2; side++) {
        int64_t rows = a.residual[side] + a.sinks[side], dim = lm_kv_side_dim(&a, side);
        x->in[KEYS + side] = cache(f[side], b * P + 1, kv, T, dim);
        if (rows > 0) {
            x->in[SLOT] = lm_shape1(LM_DTYPE_I32, b);
            x->in[KTAIL + side] = cache(NULL, b + 1, kv, rows, dim);
        }
    }
    if (lm_example_draw(r, i, 14, 3) == 0 && !a.latent && !a.attention.reads) {
        x->in[ROPE] =
            lm_shape2(LM_DTYPE_F32, P * T + 1, lm_example_draw(r, i, 15, 2) ? d : d / 4 * 2);
        if (i % 2)
            x->in[PLACE] = lm_shape2(LM_DTYPE_I32, b, P * T);
    }
    if (lm_example_draw(r, i, 16, 3) == 0)
        x->in[SINKS] = lm_shape1(LM_DTYPE_F32, h);
    if (!a.attention.reads)
        lm_attention_example_bias(r, i, P * T, &a.attention, &x->in[BIAS]);
    lm_example_attr(x, &a);
}

void lm_kv_example_pages(lm_rng r, const lm_tensor *t)
{
    if (!t->kv)
        return;
    int64_t T = t->dim[2], D = t->dim[3], step = lm_kv_step(t->kv, T);
    size_t bytes = lm_kv_page_bytes(t->kv, T, D);
    float x[128 * 128];
    memset(t->data, 0, lm_stored_bytes(t));
    for (int64_t p = 0; p < t->dim[0] * t->dim[1]; p++) {
        for (int64_t i = 0; i < step * D; i++)
            x[i] =
                (float)(lm_rng_normal(r, (uint64_t)(p * step * D + i)) + 0.2 * (double)(i % D % 3));
        for (int64_t at = 0; at < T; at += step)
            lm_kv_encode(t->kv, T, D, p % t->dim[1], x, D, at, step, NULL,
                         (char *)t->data + (size_t)p * bytes);
    }
}

static void kv_fill(lm_rng r, const lm_call *c)
{
    const lm_kv_attr *a = c->attr;
    int64_t B = a->attention.batch, P = c->in[TABLE].dim[1], T = c->in[KEYS].dim[2];
    int64_t rows = c->in[QKV].dim[0] / B;
    int32_t *used = c->in[USED].data, *fresh = c->in[FRESH].data, *first = c->in[FIRST].data;
    int32_t *kind = c->in[KIND].data, *table = c->in[TABLE].data, *slot = c->in[SLOT].data;
    for (int64_t b = 0; b < B; b++) {
        used[b] = (int32_t)lm_rng_below(r, (uint64_t)b * 8, (uint64_t)(P * T) + 1);
        fresh[b] = (int32_t)lm_rng_below(r, (uint64_t)b * 8 + 1, (uint64_t)rows + 1);
        if (first) {
            first[0] = 0;
            kind[b] = (int32_t)lm_rng_below(r, (uint64_t)b * 8 + 2, 2);
            fresh[b] = kind[b] && fresh[b] > 1 ? 1 : fresh[b];
            first[b + 1] = first[b] + fresh[b];
        }
        if (slot)
            slot[b] = (int32_t)(B - b);
        for (int64_t p = 0; p < P;
             p++) /* 7 permutes: B P + 1 pages, of which 0 is left out if it divides */
            table[b * P + p] = (int32_t)((b * P + p) * 7 % (B * P + 1));
    }
    int32_t *place = c->in[PLACE].data;
    for (int64_t i = 0; place && i < lm_tensor_count(&c->in[PLACE]); i++)
        place[i] = (int32_t)lm_rng_below(r, 1000 + (uint64_t)i, (uint64_t)c->in[ROPE].dim[0]);
    for (int64_t i = 0; c->in[ROPE].data && i < lm_tensor_count(&c->in[ROPE]); i++)
        lm_set(c->in[ROPE].dtype, c->in[ROPE].data, i,
               lm_rng_uniform(r, 5000 + (uint64_t)i) * 2 - 1);
    lm_kv_example_pages(r, &c->in[KEYS]);
    lm_kv_example_pages(r, &c->in[VALUES]);
}

/* Formats that know what each head is like, or a range of all heads of a token, are of all heads. */
bool lm_kv_splits(const lm_call *c, char letter)
{
    const lm_kv_attr *a = c->attr;
    bool alone = !a->token_range;
    (void)letter;
    for (int i = 0; i < c->n_in + c->n_out; i++) {
        const lm_tensor *t = i < c->n_in ? &c->in[i] : &c->out[i - c->n_in];
        alone &= lm_absent(t) || !t->kv || (!t->kv->lower && !t->kv->head);
    }
    return alone;
}

/* Heads of keys (U) and of values (V) in rows of qkv: what is only read has neither there, and latents are keys alone. */
static int64_t kv_letter(const lm_call *c, char letter)
{
    const lm_kv_attr *a = c->attr;
    const bool none = a->attention.reads || (letter == 'V' && a->latent);
    return letter == 'U' || letter == 'V' ? (none ? 0 : a->attention.kv_heads) : -1;
}

const lm_op lm_op_kv_attention = {
    .name = "kv_attention",
    .attr_size = sizeof(lm_kv_attr),
    .letter = kv_letter,
    .in = { { "qkv", "N,(H+U)D+VE", LM_ACT_TYPE },
            { "used", "B", LM_IDS },
            { "fresh", "B", LM_IDS },
            { "first", "B+1", LM_IDS | LM_OPTIONAL },
            { "kind", "B", LM_IDS | LM_OPTIONAL },
            { "table", "B,P", LM_IDS },
            { "keys", "G,K,T,I", LM_ACT_TYPE | LM_FIXED | LM_KV },
            { "values", "G,K,T,J", LM_ACT_TYPE | LM_FIXED | LM_KV },
            { "slot", "B", LM_IDS | LM_OPTIONAL },
            { "ktail", "L,K,R,I", LM_ACT_TYPE | LM_FIXED | LM_OPTIONAL },
            { "vtail", "L,K,S,J", LM_ACT_TYPE | LM_FIXED | LM_OPTIONAL },
            { "rope", "X,Y", LM_FIXED | LM_OPTIONAL },
            { "place", "B,M", LM_IDS | LM_OPTIONAL },
            { "sinks", "H", LM_OPTIONAL },
            { "bias", "H,Z", LM_OPTIONAL } },
    .out = { { "o", "N,HE", LM_ACT_TYPE }, { "lse", "N,H", LM_SAVED | LM_OPTIONAL } },
    .fields = kv_fields,
    .split = "HKUV",
    .splits = lm_kv_splits,
    .prec = LM_PREC_ALLOW,
    .tolerance = { 2e-6, 1e-2 },
    .shape = kv_shape,
    .cost = kv_cost,
    .example = kv_example,
    .fill = kv_fill,
};
