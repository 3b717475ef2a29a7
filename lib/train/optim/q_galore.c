/* SPDX-License-Identifier: Apache-2.0 */
/* q_galore.c -- Q-GaLore (arXiv:2407.08296): GaLore with bases of 4 bits that are made anew only where they still
 * turn, AdamW with states of 8 bits, and weights on a grid of 8 bits, rounded by chance.
 *   every `gap` steps of the tensor (from the first on)
 *     Q = the first `rank` singular vectors of g on its shorter side, in affine codes (kernels/codes.h)
 *     queue: the last queue_size cosines of its first vector with that before;
 *     gap *= gamma_proj where the queue is full and its mean at least cos_threshold
 *   r = g Q' (rows >= cols) or Q' g;  m = b1 m + (1 - b1) r;  v = b2 v + (1 - b2) r^2
 *   N = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps);  p -= lr galore_scale (N Q or Q N);  p -= lr wd p
 *   hidden matrices: p becomes a number of affine8 at a distance that is drawn (weight_quant)
 * A gap is update_proj_gap times a power of gamma_proj, a whole number, so that bases are due at multiples of
 * update_proj_gap alone.  The master copy of the weights stays in F32; its numbers are those of the codes.
 * Tensors outside the layers, vectors, and matrices with a side of at most `rank` are not projected. */
#include <math.h>

#include "kernels/factor.h"
#include "op/ops.h"
#include "train/optim/rule.h"

static const lm_hyper hyper[] = {
    BETA_1(0.9),
    BETA_2(0.999),
    EPS(1e-8),
    { "rank", 128, 1, 16384, "singular vectors of a basis", LM_WHOLE },
    { "update_proj_gap", 200, 1, 1e6, "steps between two bases, at first", LM_WHOLE },
    { "galore_scale", 0.25, 0, 100, "of the projected step", NULL },
    { "cos_threshold", 0.4, -1, 1, "mean cosine that lengthens the gap", NULL },
    { "gamma_proj", 2, 1, 1000, "by which factor", NULL },
    { "queue_size", 5, 1, 1000, "cosines of that mean", LM_WHOLE },
    { "proj_bits", 4, 4, 8, "of bases: 4 or 8", LM_WHOLE },
    { "weight_quant", 1, 0, 1, "hidden matrices on a grid of 8 bits", "off on" },
    { "stochastic_round", 1, 0, 1, "rounded to that by chance", "off on" },
    { "min_8bit_size", 4096, 0, 1e15, "elements from which on states have 8 bits", LM_WHOLE },
    DECAY(0),
    { 0 },
};
enum { GAP = 4, GAMMA = 7, QUEUE, BITS };

static const char *const numbers_are[] = { "lr", "bc1", "bc2", "done" };
enum { N_NUMBERS = 4 };

static lm_code check(const double *h, lm_err *e)
{
    if (h[BITS] != 4 && h[BITS] != 8)
        return lm_fail(e, LM_EUSAGE, "proj_bits", NULL, "is 4 or 8");
    if (h[GAP] != rint(h[GAP]) || h[GAMMA] != rint(h[GAMMA]) || h[QUEUE] != rint(h[QUEUE]))
        return lm_fail(e, LM_EUSAGE, "update_proj_gap, gamma_proj and queue_size", NULL,
                       "are whole numbers");
    return LM_OK;
}

static void numbers(const double *h, double lr, int64_t t, double *out)
{
    lm_rule_bias(h, lr, t, out);
    out[3] = (double)t;
}

/* Of a tensor: its basis, and when it is made anew. */
typedef struct {
    bool right;
    lm_rule_codes q;
    lm_vid past;              /* the first vector of the last basis */
    lm_vid queue, count, gap; /* cosines; bases so far; steps between two, 0 at first */
} projector;

/* A formula whose results are needed in steps, too, in which nothing may be written. */
static lm_code ungated(lm_update *u, const char *text, const lm_formula_name *names, int n,
                       lm_err *e)
{
    const lm_formula_scope scope = { .name = names,
                                     .n_names = n,
                                     .number = numbers_are,
                                     .n_numbers = N_NUMBERS,
                                     .numbers = lm_update_numbers(u),
                                     .gate = LM_NONE };
    return lm_formula_append(lm_update_graph(u), text, &scope, e);
}

/* 1 where the basis is due. */
static lm_code is_due(lm_update *u, const projector *p, lm_vid *due, lm_err *e)
{
    const lm_formula_name names[] = { LM_IS("gap", p->gap), LM_IS("count", p->count),
                                      LM_CONSTANT("least", lm_update_hyper(u, "update_proj_gap")),
                                      LM_MAKES("due", due) };
    *due = LM_NONE;
    return ungated(u,
                   "now = where(gap, gap, least);"
                   "due = where(count, abs(done - now*round(done/now)) < 0.5, 1)",
                   names, 4, e);
}

/* The cosine of two vectors. */
static lm_code cosine(lm_update *u, const lm_update_tensor *t, lm_vid a, lm_vid b, lm_vid *out,
                      lm_err *e)
{
    lm_vid part[3] = { LM_NONE, LM_NONE, LM_NONE };
    *out = LM_NONE;
    if (lm_rule(u, t, "ab = a*b; aa = a*a; bb = b*b",
                NAMES(LM_IS("a", a), LM_IS("b", b), LM_MAKES("ab", &part[0]),
                      LM_MAKES("aa", &part[1]), LM_MAKES("bb", &part[2])),
                e))
        return e->code;
    for (int k = 0; k < 3; k++)
        if (lm_rule_reduce(u, LM_REDUCE_SUM, LM_OVER_ALL, false, part[k], &part[k], e))
            return e->code;
    return lm_rule(u, t, "cosine = ab / max(sqrt(aa)*sqrt(bb), 1e-8)",
                   NAMES(LM_IS("ab", part[0]), LM_IS("aa", part[1]), LM_IS("bb", part[2]),
                         LM_MAKES("cosine", out)),
                   e);
}

/* The queue moves on by one where a basis follows another. */
static lm_code push(lm_update *u, const lm_update_tensor *t, const projector *p, lm_vid due,
                    lm_vid x, lm_err *e)
{
    int64_t n = (int64_t)lm_update_hyper(u, "queue_size");
    lm_tensor others = lm_shape1(LM_DTYPE_F32, n - 1), one = lm_shape1(LM_DTYPE_F32, 1);
    lm_graph *g = lm_update_graph(u);
    lm_vid head, tail, last, copy = LM_NONE;
    if (n > 1 &&
        (lm_graph_view(g, p->queue, 0, others, NULL, &head, e) ||
         lm_graph_view(g, p->queue, 1, others, NULL, &tail, e) ||
         lm_rule(u, t, "copy = tail", NAMES(LM_IS("tail", tail), LM_MAKES("copy", &copy)), e) ||
         lm_rule(u, t, "head = where(due*count, copy, head)",
                 NAMES(LM_IS("head", head), LM_IS("copy", copy), LM_IS("due", due),
                       LM_IS("count", p->count)),
                 e)))
        return e->code;
    return lm_graph_view(g, p->queue, n - 1, one, NULL, &last, e) ||
                   lm_rule(u, t, "last = where(due*count, x, last)",
                           NAMES(LM_IS("last", last), LM_IS("x", x), LM_IS("due", due),
                                 LM_IS("count", p->count)),
                           e)
               ? e->code
               : LM_OK;
}

/* The gap grows where bases have come to rest. */
static lm_code look_ahead(lm_update *u, const lm_update_tensor *t, const projector *p, lm_vid due,
                          lm_err *e)
{
    lm_vid sum;
    return lm_rule_reduce(u, LM_REDUCE_SUM, LM_OVER_ALL, false, p->queue, &sum, e) ||
                   lm_rule(
                       u, t,
                       "now = where(gap, gap, update_proj_gap);"
                       "rests = due*(queue_size < count)*(1 - (sum < cos_threshold*queue_size));"
                       "gap = where(rests, now*gamma_proj, now)",
                       NAMES(LM_IS("gap", p->gap), LM_IS("count", p->count), LM_IS("sum", sum),
                             LM_IS("due", due)),
                       e)
               ? e->code
               : LM_OK;
}

static lm_code write_basis(lm_update *u, const projector *p, lm_vid due, lm_vid made, lm_err *e)
{
    lm_vid gate = LM_NONE, in[2], out[3] = { p->q.code, p->q.scale, p->q.zero };
    lm_codes_attr a = { .format = p->q.format };
    const lm_formula_name names[] = { LM_IS("open", lm_update_scale(u)), LM_IS("due", due),
                                      LM_MAKES("gate", &gate) };
    if (ungated(u, "gate = where(due, open, 0/0)", names, 3, e))
        return e->code;
    in[0] = gate;
    in[1] = made;
    return lm_graph_append(lm_update_graph(u), &lm_op_encode, &a, in, out, e);
}

static lm_code refresh(lm_update *u, const lm_update_tensor *t, const projector *p, lm_vid clean,
                       lm_err *e)
{
    lm_svd_attr a = { .rank = (int64_t)lm_update_hyper(u, "rank"), .right = p->right };
    lm_vid due, in[2], made[2] = { LM_NONE, LM_NONE }, x;
    if (lm_update_every(u, (int64_t)lm_update_hyper(u, "update_proj_gap"), 0, true, e) ||
        is_due(u, p, &due, e))
        return e->code;
    in[0] = clean;
    in[1] = due;
    if (lm_graph_append(lm_update_graph(u), &lm_op_svd, &a, in, made, e) ||
        cosine(u, t, p->past, made[1], &x, e) || push(u, t, p, due, x, e) ||
        lm_rule(u, t, "count = count + due", NAMES(LM_IS("count", p->count), LM_IS("due", due)),
                e) ||
        look_ahead(u, t, p, due, e) ||
        lm_rule(u, t, "past = where(due, first, past)",
                NAMES(LM_IS("past", p->past), LM_IS("first", made[1]), LM_IS("due", due)), e) ||
        write_basis(u, p, due, made[0], e))
        return e->code;
    lm_update_always(u);
    return LM_OK;
}

static lm_code make_projector(lm_update *u, const lm_update_tensor *t, projector *p, lm_err *e)
{
    static const char *const names[3] = { "ortho_matrix", "ortho_matrix_scales",
                                          "ortho_matrix_zeros" };
    int64_t rows = t->shape.dim[0], cols = t->shape.dim[1];
    int64_t rank = (int64_t)lm_update_hyper(u, "rank"),
            size = (int64_t)lm_update_hyper(u, "queue_size");
    lm_codes_format f = lm_update_hyper(u, "proj_bits") == 4 ? LM_CODES_AFFINE4 : LM_CODES_AFFINE8;
    p->right = rows >= cols;
    lm_tensor basis =
        p->right ? lm_shape2(LM_DTYPE_F32, rank, cols) : lm_shape2(LM_DTYPE_F32, rows, rank);
    lm_tensor vector = lm_shape1(LM_DTYPE_F32, p->right ? cols : rows);
    lm_tensor queue = lm_shape1(LM_DTYPE_F32, size);
    return lm_rule_coded(u, t, names, f, basis, &p->q, e) ||
                   lm_update_state(u, t, "past_ortho_vector", vector, &p->past, e) ||
                   lm_update_state(u, t, "queue", queue, &p->queue, e) ||
                   lm_rule_number(u, t, "svd_count", &p->count, e) ||
                   lm_rule_number(u, t, "update_proj_gap", &p->gap, e)
               ? e->code
               : LM_OK;
}

static bool has_codes(const lm_update *u, lm_tensor shape)
{
    return (double)lm_tensor_count(&shape) >= lm_update_hyper(u, "min_8bit_size");
}

static lm_code update_projected(lm_update *u, const lm_update_tensor *t, lm_err *e)
{
    int64_t rows = t->shape.dim[0], cols = t->shape.dim[1];
    int64_t rank = (int64_t)lm_update_hyper(u, "rank");
    lm_tensor low =
        rows >= cols ? lm_shape2(LM_DTYPE_F32, rows, rank) : lm_shape2(LM_DTYPE_F32, rank, cols);
    lm_vid clean = LM_NONE, q, r, way = LM_NONE;
    lm_rule_moments x;
    projector p;
    if (make_projector(u, t, &p, e) ||
        lm_rule(u, t, "clean = g", NAMES(LM_MAKES("clean", &clean)), e) ||
        refresh(u, t, &p, clean, e) || lm_rule_decode(u, &p.q, &q, e) ||
        (p.right ? lm_rule_abt(u, clean, q, &r, e) : lm_rule_atb(u, q, clean, &r, e)) ||
        lm_rule_moments_make(u, t, low, has_codes(u, low), &x, e) || lm_rule_moments_read(u, &x, e))
        return e->code;
    return lm_rule(u, t,
                   "m = beta1*m + (1 - beta1)*r;"
                   "v = beta2*v + (1 - beta2)*r*r;"
                   "way = m/bc1 / (sqrt(v/bc2) + eps)",
                   NAMES(LM_IS("m", x.m), LM_IS("v", x.v), LM_IS("r", r), LM_MAKES("way", &way)),
                   e) ||
                   lm_rule_moments_write(u, &x, e) ||
                   (p.right ? lm_rule_ab(u, way, q, &way, e) : lm_rule_ab(u, q, way, &way, e)) ||
                   lm_rule(u, t,
                           "next = p - lr*galore_scale*way;"
                           "p = next - lr*weight_decay*next",
                           NAMES(LM_IS("way", way)), e)
               ? e->code
               : LM_OK;
}

static lm_code update_plain(lm_update *u, const lm_update_tensor *t, lm_err *e)
{
    bool embeds = lm_part_is_embedding(t->part);
    lm_rule_moments x;
    return lm_rule_moments_make(u, t, t->shape, !embeds && has_codes(u, t->shape), &x, e) ||
                   lm_rule_moments_read(u, &x, e) ||
                   lm_rule(u, t,
                           "m = beta1*m + (1 - beta1)*g;"
                           "v = beta2*v + (1 - beta2)*g*g;"
                           "p = p*(1 - lr*weight_decay) - lr/bc1 * m / (sqrt(v/bc2) + eps)",
                           NAMES(LM_IS("m", x.m), LM_IS("v", x.v)), e) ||
                   lm_rule_moments_write(u, &x, e)
               ? e->code
               : LM_OK;
}

/* To numbers of 8 bits.  The codes live inside the step. */
static lm_code round_weights(lm_update *u, const lm_update_tensor *t, lm_err *e)
{
    lm_graph *g = lm_update_graph(u);
    int64_t n = lm_tensor_count(&t->shape);
    lm_tensor bytes = lm_shape1(LM_DTYPE_U8, n),
              blocks = lm_shape1(LM_DTYPE_F32, lm_codes_blocks(n));
    lm_codes_attr a = { .format = LM_CODES_AFFINE8,
                        .stochastic = lm_update_hyper(u, "stochastic_round") != 0,
                        .stream = t->index };
    lm_vid in[2] = { lm_update_scale(u), t->param }, y = LM_NONE, out[3];
    if (lm_graph_value(g, LM_ROLE_ACT, bytes, NULL, &out[0], e) ||
        lm_graph_value(g, LM_ROLE_ACT, blocks, NULL, &out[1], e) ||
        lm_graph_value(g, LM_ROLE_ACT, blocks, NULL, &out[2], e) ||
        lm_graph_value(g, LM_ROLE_ACT, t->shape, NULL, &y, e) ||
        lm_graph_append(g, &lm_op_encode, &a, in, out, e) ||
        lm_graph_append(g, &lm_op_decode, &a, out, &y, e))
        return e->code;
    return lm_rule(u, t, "p = rounded", NAMES(LM_IS("rounded", y)), e);
}

static lm_code update(lm_update *u, const lm_update_tensor *t, lm_err *e)
{
    int64_t rank = (int64_t)lm_update_hyper(u, "rank");
    bool hidden = lm_rule_is_hidden(t);
    bool projected = hidden && t->shape.dim[0] > rank && t->shape.dim[1] > rank;
    if (projected ? update_projected(u, t, e) : update_plain(u, t, e))
        return e->code;
    return hidden && lm_update_hyper(u, "weight_quant") != 0 ? round_weights(u, t, e) : LM_OK;
}

const lm_optim lm_optim_q_galore = {
    .name = "q-galore",
    .rate = 1e-2,
    .about = "GaLore with bases, states and weights in few bits",
    .hyper = hyper,
    .check = check,
    .n_numbers = N_NUMBERS,
    .numbers = numbers,
    .number = numbers_are,
    .update = update,
};
