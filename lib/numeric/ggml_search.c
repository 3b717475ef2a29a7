/* SPDX-License-Identifier: Apache-2.0 */
/* ggml_search.c -- see ggml_search.h.  The steps that are tried, and in which order sums are taken, are
 * ggml's (src/ggml-quants.c), so that the bytes come out the same. */
#include "numeric/ggml_search.h"

#include <string.h>

void lm_to_lanes(const float *v, int groups, int n, lane *x)
{
    for (int l = 0; l < LANES; l++) {
        const float *from = v + (l < groups ? l : groups - 1) * n;
        for (int i = 0; i < n; i++)
            x[i][l] = from[i];
    }
}

/* ---- Scale and offset ---- */

/* Sums over the groups that do not depend on the step. */
typedef struct {
    lane lo, hi, sum_w, sum_x;
} facts;

ALWAYS void look(const lane *x, const lane *w, int n, facts *f)
{
    f->lo = f->hi = x[0];
    f->sum_w = f->sum_x = (lane){ 0 };
    for (int i = 0; i < n; i++) {
        f->lo = LOWER(x[i], f->lo);
        f->hi = HIGHER(x[i], f->hi);
        f->sum_w += w[i];
        f->sum_x += w[i] * x[i];
    }
    f->lo = PICK(f->lo > 0.0f, (lane){ 0 }, f->lo); /* -0 is kept, as in ggml */
}

/* Scale and minimum that are best for codes q by least squares, the minimum never above zero.  Inf
 * or NaN in lanes where no solution exists; *ok marks the lanes where one does. */
ALWAYS void fit(const lane *x, const lane *w, int n, const facts *f, const lane *q, lane *scale,
                lane *min, mask *ok)
{
    lane l1 = { 0 }, l2 = { 0 }, xl = { 0 };

    for (int i = 0; i < n; i++) {
        lane wq = w[i] * q[i];
        l1 += wq;
        l2 += wq * q[i];
        xl += wq * x[i];
    }
    lane det = f->sum_w * l2 - l1 * l1;
    *ok = ABOVE(det, ZERO);
    *min = (l2 * f->sum_x - l1 * xl) / det;
    *scale = PICK(ABOVE(*min, ZERO), xl / l2, (f->sum_w * xl - f->sum_x * l1) / det);
    *min = PICK(ABOVE(*min, ZERO), (lane){ 0 }, *min);
}

ALWAYS void sum_errors(const lane *x, const lane *w, int n, bool absolute, const lane *q,
                       const lane *scale, const lane *min, lane *error)
{
    *error = (lane){ 0 };
    for (int i = 0; i < n; i++) {
        lane d = *scale * q[i] + *min - x[i];
        *error += w[i] * (absolute ? MAGNITUDE(d) : d * d);
    }
}

/* Each step starts from the best minimum so far, as ggml's search does. */
ALWAYS void affine_search(const lane *x, const lane *w, const lm_affine_plan *p, int n,
                          bool absolute, lm_affine *out)
{
    const float top = (float)p->top;
    facts f;
    lane q[MOST_GROUP], scale, min, error, best = (lane){ 0 } + INFINITY;
    mask ok;

    look(x, w, n, &f);
    out->scale = (lane){ 0 };
    out->offset = -f.lo;
    memset(out->q, 0, (size_t)n * sizeof *out->q);
    for (int k = -1; k <= p->steps; k++) {
        float reach = k < 0 ? top : p->from + p->step * (float)k + top;
        mask alive = ABOVE(f.hi - f.lo, ZERO);
        lane inv = PICK(alive, reach / (f.hi - f.lo), (lane){ 0 });
        for (int i = 0; i < n; i++)
            q[i] = CODES(inv * (x[i] - f.lo), 0.0f, top);
        if (k < 0) {
            scale = 1.0f / inv;
            min = f.lo;
            ok = alive;
        } else {
            fit(x, w, n, &f, q, &scale, &min, &ok);
        }
        sum_errors(x, w, n, absolute, q, &scale, &min, &error);
        ok = ok & alive & ABOVE(best, error);
        best = PICK(ok, error, best);
        f.lo = PICK(ok, min, f.lo);
        out->scale = PICK(ok, scale, out->scale);
        out->offset = PICK(ok, -min, out->offset);
        for (int i = 0; i < n; i++)
            out->q[i] = PICK(ok, q[i], out->q[i]);
    }
}

WIDE void lm_affine_search(const lane *x, const lane *w, const lm_affine_plan *p, lm_affine *out)
{
    if (p->group == 32)
        affine_search(x, w, p, 32, false, out);
    else
        affine_search(x, w, p, 16, p->absolute, out);
}

/* ---- Scale alone ---- */

/* The first number of largest magnitude in each group. */
ALWAYS void find_extreme(const lane *x, int n, lane *most)
{
    *most = (lane){ 0 };
    for (int i = 0; i < n; i++)
        *most = PICK(MAGNITUDE(x[i]) > MAGNITUDE(*most), x[i], *most);
}

ALWAYS void signed_search(const lane *x, const lane *w, int n, float top, lane *scale, lane *out)
{
    lane most, best = { 0 }, q[MOST_GROUP];

    find_extreme(x, n, &most);
    mask alive = MAGNITUDE(most) >= LM_GGML_TINY;

    *scale = (lane){ 0 };
    memset(out, 0, (size_t)n * sizeof *out);
    for (int k = 0; k <= 18; k++) { /* the plain step first, then the others from small to large */
        int is = k == 0 ? 0 : k <= 9 ? k - 10 : k - 9;
        lane inv = PICK(alive, -(top + 0.1f * (float)is) / most, (lane){ 0 });
        lane xl = { 0 }, l2 = { 0 };
        for (int i = 0; i < n; i++) {
            q[i] = CODES(inv * x[i], -top, top - 1.0f);
            xl += w[i] * x[i] * q[i];
            l2 += w[i] * q[i] * q[i];
        }
        mask some = ABOVE(l2, ZERO), better = some & ABOVE(xl * xl, best * l2);
        if (k == 0)
            better = alive | ~alive;
        *scale = PICK(better, PICK(some, xl / l2, (lane){ 0 }), *scale);
        best = PICK(better, *scale * xl, best);
        for (int i = 0; i < n; i++)
            out[i] = PICK(better, q[i], out[i]);
    }
    for (int i = 0; i < n; i++) /* stored as 0; the scale is 0 anyway */
        out[i] = PICK(alive, out[i], (lane){ 0 } - top);
}

WIDE void lm_signed_search(const lane *x, const lane *w, int n, int top, lane *scale, lane *out)
{
    if (n == 32)
        signed_search(x, w, 32, (float)top, scale, out);
    else
        signed_search(x, w, 16, (float)top, scale, out);
}

/* One pass over the codes: each is set to the best value given the others. */
ALWAYS void descend(const lane *x, float top, lane *xl, lane *l2, lane *q)
{
    for (int i = 0; i < 16; i++) {
        lane w = x[i] * x[i];
        lane xl_i = *xl - w * x[i] * q[i], l2_i = *l2 - w * q[i] * q[i];
        mask open = ABOVE(xl_i, ZERO);
        lane next = CODES(x[i] * l2_i / PICK(open, xl_i, (lane){ 0 } + 1.0f), -top, top - 1.0f);
        xl_i += w * x[i] * next;
        l2_i += w * next * next;
        mask moved = SIGN_OF(-(mask)MAGNITUDE(next - q[i]));
        mask better = open & moved & ABOVE(l2_i, ZERO) & ABOVE(xl_i * xl_i * *l2, *xl * *xl * l2_i);
        q[i] = PICK(better, next, q[i]);
        *xl = PICK(better, xl_i, *xl);
        *l2 = PICK(better, l2_i, *l2);
    }
}

WIDE void lm_signed_descent(const lane *x, int top, lane *scale, lane *out)
{
    lane most, xl = { 0 }, l2 = { 0 };

    find_extreme(x, 16, &most);
    mask alive = MAGNITUDE(most) >= LM_GGML_TINY;
    lane inv =
        PICK(alive, (lane){ 0 } - (float)top, (lane){ 0 }) / PICK(alive, most, (lane){ 0 } + 1.0f);

    for (int i = 0; i < 16; i++) {
        lane w = x[i] * x[i];
        out[i] = CODES(inv * x[i], -(float)top, (float)top - 1.0f);
        xl += w * x[i] * out[i];
        l2 += w * out[i] * out[i];
    }
    for (int pass = 0; pass < 5; pass++)
        descend(x, (float)top, &xl, &l2, out);
    mask some = l2 > 0.0f;
    *scale = PICK(alive & some, xl / l2, (lane){ 0 });
    for (int i = 0; i < 16; i++)
        out[i] = PICK(alive, out[i], (lane){ 0 } - (float)top);
}

/* ---- Scales ---- */

/* The step of nine whose codes have the smallest weighted error. */
static float best_step(const float *x, const float *w, int n, int top, float most)
{
    float best = 0.0f, inv = (float)top / most;

    for (int k = 0; k <= 8; k++) { /* the plain step first */
        int is = k == 0 ? 0 : k <= 4 ? k - 5 : k - 4;
        float step = is ? (0.1f * (float)is + (float)top) / most : (float)top / most;
        float back = 1.0f / step, error = 0.0f;
        for (int i = 0; i < n; i++) {
            float d = x[i] - back * (float)lm_nearest_code(step * x[i], 0, top);
            error += w[i] * d * d;
        }
        if (k == 0 || error < best) {
            best = error;
            inv = step;
        }
    }
    return inv;
}

float lm_positive_search(const float *x, const float *w, int n, int top, uint8_t *q)
{
    float most = 0.0f, xl = 0.0f, l2 = 0.0f;

    memset(q, 0, (size_t)n);
    for (int i = 0; i < n; i++)
        most = x[i] > most ? x[i] : most;
    if (most < LM_GGML_TINY)
        return 0.0f;
    float inv = best_step(x, w, n, top, most);
    for (int i = 0; i < n; i++) {
        q[i] = (uint8_t)lm_nearest_code(inv * x[i], 0, top);
        xl += w[i] * x[i] * (float)q[i];
        l2 += w[i] * (float)q[i] * (float)q[i];
    }
    for (int pass = 0; pass < 5; pass++) {
        bool changed = false;
        for (int i = 0; i < n; i++) {
            float xl_i = xl - w[i] * x[i] * (float)q[i],
                  l2_i = l2 - w[i] * (float)q[i] * (float)q[i];
            if (!(xl_i > 0.0f && l2_i > 0.0f))
                continue;
            int next = lm_nearest_code(x[i] * l2_i / xl_i, 0, top);
            xl_i += w[i] * x[i] * (float)next;
            l2_i += w[i] * (float)next * (float)next;
            if (next == q[i] || !(xl_i * xl_i * l2 > xl * xl * l2_i))
                continue;
            q[i] = (uint8_t)next;
            xl = xl_i;
            l2 = l2_i;
            changed = true;
        }
        if (!changed)
            break;
    }
    return l2 > 0.0f ? xl / l2 : 0.0f;
}
