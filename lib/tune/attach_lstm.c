/* SPDX-License-Identifier: Apache-2.0 */
/* attach_lstm.c -- the encoder of P-tuning that reads the virtual tokens in their order: layers of
 * a bidirectional LSTM.
 *
 * Of a layer and a direction, with the rows x_t [in] of its input, H = encoder_hidden_size, s = the
 * logistic function:
 *   i, f, g, o = the quarters of W_ih x_t + b_ih + W_hh h_t-1 + b_hh     [4H]
 *   c_t = s(f) c_t-1 + s(i) tanh(g)     h_t = s(o) tanh(c_t)     c and h begin at zero
 * The result of a layer has h of both directions side by side [P,2H].  The graph has the nodes of
 * all P steps: P is small, and no operator here has a memory.  Names and first numbers are those of
 * torch.nn.LSTM.
 * Sources: Hochreiter and Schmidhuber 1997; huggingface/peft tuners/p_tuning. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "kernels/arrange.h"
#include "op/ops.h"
#include "tune/attach_impl.h"

/* The tensors of one direction of a layer, in the order of torch. */
enum { W_IN, W_STATE, B_IN, B_STATE, TENSORS };

/* "lstm_head.weight_ih_l1_reverse" */
static const char *part_of(int tensor, int64_t layer, bool back, char out[64])
{
    static const char *const names[] = { "weight_ih", "weight_hh", "bias_ih", "bias_hh" };
    snprintf(out, 64, "lstm_head.%s_l%d%s", names[tensor], (int)layer, back ? "_reverse" : "");
    return out;
}

/* ---- in the graph ---- */

/* Rows [1,H] one below the other; v is overwritten. */
static lm_vid stack(lm_builder *b, lm_vid *v, int64_t n)
{
    lm_join_attr attr = { .rows = true };
    while (n > 1) {
        int64_t made = 0;
        for (int64_t at = 0; at < n; at += LM_JOIN_PARTS) {
            lm_vid in[LM_JOIN_PARTS];
            for (int64_t k = 0; k < LM_JOIN_PARTS; k++)
                in[k] = at + k < n ? v[at + k] : LM_NONE;
            v[made++] = n - at > 1 ? lm_b_append(b, &lm_op_join, &attr, in) : in[0];
        }
        n = made;
    }
    return v[0];
}

/* c_t and h_t from the sums z [1,4H] of the gates; *c LM_NONE: the first step. */
static lm_vid run_gates(lm_rule *r, lm_vid z, int64_t hidden, lm_vid *c)
{
    lm_vid gate[4];
    for (int k = 0; k < 4; k++)
        gate[k] = lm_r_part(r, z, 0, 1, k * hidden, hidden);
    /* the logistic function by tanh, whose derivative does not overflow */
    lm_vid add =
        LM_R_MAP(r, "y = (1 + tanh(i/2))/2*tanh(g)", LM_IS("i", gate[0]), LM_IS("g", gate[2]));
    *c = *c < 0 ? add
                : LM_R_MAP(r, "y = (1 + tanh(f/2))/2*c + a", LM_IS("f", gate[1]), LM_IS("c", *c),
                           LM_IS("a", add));
    return LM_R_MAP(r, "y = (1 + tanh(o/2))/2*tanh(c)", LM_IS("o", gate[3]), LM_IS("c", *c));
}

/* h of one direction [P,H]; h: room for P values. */
static lm_vid run_way(const lm_attach *a, lm_builder *b, lm_rule *r, lm_vid x, int64_t in,
                      int64_t layer, bool back, lm_vid *h)
{
    const int64_t n = a->rows.count, hidden = a->rows.hidden, all = 4 * hidden;
    const int64_t dim[TENSORS][2] = { { all, in }, { all, hidden }, { all, 0 }, { all, 0 } };
    lm_vid p[TENSORS], c = LM_NONE, before = LM_NONE;
    char name[64];
    for (int i = 0; i < TENSORS; i++)
        p[i] = lm_attach_encoder_part(b, dim[i][1] ? 2 : 1, dim[i], 1 / sqrt((double)hidden),
                                      part_of(i, layer, back, name));
    if (!lm_b_ok(b))
        return LM_NONE;
    lm_vid sums = LM_R_MAP(r, "y = x + p + q", LM_IS("x", lm_r_matmul(r, x, false, p[W_IN], true)),
                           LM_IS("p", lm_r_shape2(r, p[B_IN], 1, all)),
                           LM_IS("q", lm_r_shape2(r, p[B_STATE], 1, all)));
    for (int64_t i = 0; i < n; i++) {
        int64_t t = back ? n - 1 - i : i;
        lm_vid z = lm_r_part(r, sums, t, 1, 0, all);
        if (before >= 0)
            z = LM_R_MAP(r, "y = z + w", LM_IS("z", z),
                         LM_IS("w", lm_r_matmul(r, before, false, p[W_STATE], true)));
        before = h[t] = run_gates(r, z, hidden, &c);
    }
    return lm_b_ok(b) ? stack(b, h, n) : LM_NONE;
}

lm_vid lm_attach_lstm(const lm_attach *a, lm_builder *b, lm_rule *r, lm_vid x)
{
    lm_vid *h = NULL, way[2];
    if (!lm_b_ok(b) ||
        lm_arena_alloc(lm_b_arena(b), &h, (size_t)a->rows.count, sizeof *h, lm_b_err(b)))
        return LM_NONE;
    for (int64_t l = 0; l < a->rows.lstm && lm_b_ok(b); l++) {
        int64_t in = l ? 2 * a->rows.hidden : a->config->width;
        for (int back = 0; back < 2; back++)
            way[back] = run_way(a, b, r, x, in, l, back, h);
        x = lm_b_ok(b) ? lm_r_join(r, way[0], way[1]) : LM_NONE;
    }
    return x;
}

/* ---- the same in double, for the file ---- */

static double logistic(double x)
{
    return 1 / (1 + exp(-x));
}

static double dot(const float *w, const double *x, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += (double)w[i] * x[i];
    return sum;
}

/* One step: z has room for 4H; h [H] and c [H] become those of t. */
static void step_way(float *const p[TENSORS], const double *x, int64_t in, int64_t hidden,
                     double *z, double *h, double *c)
{
    for (int64_t k = 0; k < 4 * hidden; k++)
        z[k] = dot(p[W_IN] + k * in, x, in) + dot(p[W_STATE] + k * hidden, h, hidden) +
               (double)p[B_IN][k] + (double)p[B_STATE][k];
    for (int64_t k = 0; k < hidden; k++) {
        c[k] = logistic(z[hidden + k]) * c[k] + logistic(z[k]) * tanh(z[2 * hidden + k]);
        h[k] = logistic(z[3 * hidden + k]) * tanh(c[k]);
    }
}

/* h of one direction into columns [back H, (back + 1) H) of y [P,2H]; room: for 6H. */
static lm_code fold_way(const lm_attach *a, const lm_store *s, const double *x, int64_t in,
                        int64_t layer, bool back, double *room, double *y, lm_err *e)
{
    const int64_t n = a->rows.count, hidden = a->rows.hidden;
    double *h = room, *c = room + hidden, *z = room + 2 * hidden;
    float *p[TENSORS] = { NULL };
    char name[64];
    lm_code rc = LM_OK;
    for (int i = 0; i < TENSORS && !rc; i++)
        rc = lm_attach_read_encoder(s, part_of(i, layer, back, name), &p[i], e);
    memset(room, 0, (size_t)(2 * hidden) * sizeof *room);
    for (int64_t i = 0; i < n && !rc; i++) {
        int64_t t = back ? n - 1 - i : i;
        step_way(p, x + t * in, in, hidden, z, h, c);
        memcpy(y + (2 * t + back) * hidden, h, (size_t)hidden * sizeof *h);
    }
    for (int i = 0; i < TENSORS; i++)
        lm_free(p[i]);
    return rc;
}

lm_code lm_attach_fold_lstm(const lm_attach *a, const lm_store *s, double **x, int64_t *width,
                            lm_err *e)
{
    const int64_t n = a->rows.count, hidden = a->rows.hidden;
    double *room = NULL, *y = NULL;
    lm_code rc = lm_alloc_n(&room, (size_t)(6 * hidden), sizeof *room, "an encoder of prompts", e);
    for (int64_t l = 0; l < a->rows.lstm && !rc; l++) {
        rc = lm_alloc_n(&y, (size_t)(2 * n * hidden), sizeof *y, "an encoder of prompts", e);
        for (int back = 0; back < 2 && !rc; back++)
            rc = fold_way(a, s, *x, *width, l, back, room, y, e);
        if (rc)
            break;
        lm_free(*x);
        *x = y;
        *width = 2 * hidden;
        y = NULL;
    }
    lm_free(y);
    lm_free(room);
    return rc;
}
