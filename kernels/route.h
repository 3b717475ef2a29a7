/* SPDX-License-Identifier: Apache-2.0 */
/* route.h -- routing of tokens to the experts of a mixture: which experts a token goes to and with
 * what weight, in what order its copies lie for the grouped products (grouped.h), and the way back.
 *
 * T tokens, E experts, K choices of a token; assignment a = t K + s is choice s of token t.  R rows
 * of the grouped products: the copies of tokens, sorted by expert.  An assignment can be dropped:
 * its token does not go there.  Between equal scores the expert, token or assignment of the lowest
 * index comes first.
 *
 * route_choose     in  z [T,E] F32 logits, bias [E] F32 (optional, finite)
 *                  out weight [T,K] F32, 0 where dropped
 *                      expert [T,K] I32: e, or -1 - e where expert e was chosen and the assignment
 *                      then dropped
 *     The scores s of a token are softmax(z), or sigmoid(z) with attr.sigmoid.  Its choices are the
 *     K experts with the largest s + bias, in descending order; without a bias those with the
 *     largest z: the same, but ties only where logits are equal.  weight: attr.scale s, of the
 *     score without the bias; with attr.normalise divided by (the sum of s over the token's K
 *     choices, dropped ones included, + 1e-20).
 *       groups > 1      only experts of the `kept_groups` best groups, of E / groups neighbours
 *                       each, are chosen.  A group's value is the sum of its two largest s + bias
 *                       (DeepSeek-V3, arXiv:2412.19437, section 2.1.2), or with attr.group_max its
 *                       largest (DeepSeek-V2, arXiv:2405.04434, section 2.2.2)
 *       second_random   K = 2: the second choice is drawn with probabilities proportional to s
 *                       among those left, as the largest of s / -log(u): the Gumbel trick for
 *                       GShard's random second expert (arXiv:2006.16668). u = (draw / 2^9 + 1/2) /
 *                       2^23 of the draw from Philox (seed, "route", site) at index (step*2^16 +
 *                       micro) T E + t E + e, as in dropout (elementwise.h).  Graphs for evaluation
 *                       are made without it
 *       by_expert       expert choice (arXiv:2202.09368).  K = E and choice s is expert s; it is
 *                       dropped unless t is among the `capacity` tokens with the largest s of that
 *                       expert.  No bias, no groups, not normalised
 *       capacity > 0    an expert takes that many assignments at most.  attr.policy: which are
 *                       dropped beyond it
 *           position      the last of: first choices of all tokens, in order, then all second
 *                         choices, ... (Switch, arXiv:2101.03961; GShard)
 *           probability   those with the smallest weights; NaN is the largest (X-MoE,
 *                         arXiv:2508.13337)
 *           reroute       as position; then the dropped ones, in the same order, go to the best
 *                         expert that has room and is no choice of the token, of whatever group;
 *                         without such an expert they remain dropped. Weights are those of the
 *                         choices after that
 *     A row of z with NaN or infinity: its weights are NaN, its choices experts 0 to K-1 (then as
 *     capacity says).
 * route_choose_dz  in  z [T,E] F32, expert [T,K] I32, dweight [T,K] F32       out dz [T,E] F32
 *     The gradient of the weights that were not dropped.  Choices have none, nor has the bias.
 * route_plan       in  expert [T,K] I32
 *                  out offsets [E+1] I32, from [R] I32, place [T,K] I32
 *     Assignments in order of their experts, then of a: rows offsets[e] to offsets[e+1]-1 are those
 *     of expert e, from[r] is the assignment of row r, and place[a] its row; -1: no assignment, or
 *     dropped.  R = T K, and rows from offsets[E] on are not used; with attr.pad = C > 0 R = E C,
 *     expert e has rows e C to e C + C - 1, and its assignments past C of them are left out.
 * route_rows       in  x [T,C] act, from [R] I32, place [T,K] I32, weight [T,K] F32 (optional: 1)
 *                  out y [R,C] act = weight[a] x[t] of a = from[r], 0 where that is -1
 * route_sum        in  y [R,C] act, from [R] I32, place [T,K] I32, weight [T,K] F32 (optional: 1)
 *                  out x [T,C] act = sum over s, in order and in F32, of weight[a] y[place[a]],
 *                      without dropped ones
 * route_dot        in  x [T,C] act, y [R,C] act, from [R] I32, place [T,K] I32
 *                  out d [T,K] F32 = <x[t], y[place[a]]>, 0 where place is -1
 *     Each gradient of these three is one of the others.  from and place are those of one
 *     route_plan; each kernel reads the one that it needs.  Its offsets [E+1] I32 (optional) are the last operand: no
 *     kernel reads them, but rows of experts can be shared out among ranks by them (dispatch.h).
 * route_aux        in  z [T,E] F32, expert [T,K] I32, count [E] F32 (optional)
 *                  out loss [1] F32, mean [E] F32 (optional): of p over tokens,
 *                      load [E] F32 (optional): n, dropped [1] F32 (optional): number of dropped ones
 *     p: softmax(z), or sigmoid(z) over their sum; n_e: assignments of expert e, dropped ones too, as in
 *     Switch and Megatron-LM (with reroute: as they are after it); with attr.by_expert those that were
 *     not dropped, and `dropped` is 0.  A row of z with NaN or infinity: p is NaN for the experts of
 *     these logits and 0 for the others, so that `mean` tells which; loss is NaN.  loss is the sum of
 *       balance   times E / (K T^2) sum over e of n_e sum over t of p_te (Switch, equations 4 to 6);
 *                 with `count`, that in place of n: the loads of other layers or batches, too
 *       sequence  times the mean over sequences of attr.seq tokens of the same with their own n, p
 *                 and T (DeepSeek-V3, equations 17 to 20)
 *       z         times the mean over t of (log of the sum of exp z_t)^2 (ST-MoE, arXiv:2202.08906,
 *                 equation 5)
 *       affinity  times the mean over t of 1 - the sum over nodes of q_tn^2, q_tn the sum of p_te over the
 *                 experts of node n, of E / attr.nodes neighbours each: 0 where each token stays on one
 *                 node, 1 - 1 / nodes where it goes everywhere alike
 * route_aux_dz     in  z [T,E] F32, expert [T,K] I32, dloss [1] F32, count [E] F32 (optional)
 *                  out dz [T,E] F32
 *     n and count have no gradient.
 * route_bar        in  y [T,E] F32
 *                  out bar [T,E] F32, at [T,2] I32
 *     bar_te is the K-th largest number of row t without y_te, K < E: y_te is one of the K largest where it is above its
 *     bar (kth_excluding of arXiv:1701.06538, appendix A).  at: where the K-th and the next largest of the row stand.  A
 *     row with NaN or infinity: bars are NaN, places 0.
 * route_bar_dy     in  y [T,E] F32, at [T,2] I32, dbar [T,E] F32       out dy [T,E] F32, NaN of such a row
 * route_importance in  weight [T,K] F32, expert [T,K] I32
 *                  out sum [E] F32: of the weights of each expert, dropped ones left out
 * route_importance_dw  in expert [T,K] I32, dsum [E] F32               out dweight [T,K] F32, 0 where dropped
 *
 * No operand aliases another.  E is at most LM_ROUTE_MOST_EXPERTS, T K and R are below 2^31;
 * experts are between -E and E-1, those of a token all different.  Results do not depend on the
 * number of threads, on a device either.
 * Tolerance: relative L2 2e-6 of weights, losses and (F32) sums, 4e-3 in BF16; 1e-5 of dz, whose
 * terms cancel; rows without weight, expert, offsets, from, place, load and bars are exact, except that
 * scores which differ by less than their rounding may come in either order. */
#ifndef LM_KERNELS_ROUTE_H
#define LM_KERNELS_ROUTE_H

#include "kernels/kernel.h"

typedef enum { LM_OVERFLOW_POSITION, LM_OVERFLOW_PROBABILITY, LM_OVERFLOW_REROUTE } lm_overflow;

enum { LM_ROUTE_MOST_EXPERTS = 4096 };

typedef struct {
    int64_t k;
    int64_t capacity; /* assignments of an expert at most; 0: no limit */
    lm_overflow policy;
    bool sigmoid, normalise, second_random, by_expert;
    double scale;
    int64_t groups, kept_groups; /* groups 0 or 1: none */
    bool group_max;
    int64_t site; /* of the draws */
} lm_route_attr;

typedef struct {
    int64_t experts, pad;
} lm_route_plan_attr;

typedef struct {
    bool sigmoid;
    double balance, sequence, z;
    int64_t seq; /* tokens of a sequence, T is a multiple; 0: all are one */
    bool by_expert;
    double affinity;
    int64_t nodes; /* with affinity: a divisor of E */
} lm_route_aux_attr;

typedef struct {
    int64_t k;
} lm_route_bar_attr;

typedef struct {
    int64_t experts;
} lm_route_importance_attr;

/* The expert of an assignment, also of a dropped one. */
static inline int32_t lm_route_expert(int32_t expert)
{
    return expert < 0 ? -1 - expert : expert;
}

/* The expert for which route_aux counts an assignment; -1: none. */
static inline int32_t lm_route_counted(const lm_route_aux_attr *a, int32_t expert)
{
    return a->by_expert ? expert < 0 ? -1 : expert : lm_route_expert(expert);
}

#endif
