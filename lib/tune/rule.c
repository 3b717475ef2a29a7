/* SPDX-License-Identifier: Apache-2.0 */
/* rule.c -- arithmetic of rules as nodes. */
#include "tune/rule.h"

#include <string.h>

#include "kernels/arrange.h"
#include "kernels/matmul.h"
#include "op/ops.h"

void lm_rule_fini(lm_rule *r)
{
    lm_free(r->made);
    r->made = NULL;
    r->n_made = r->cap_made = 0;
}

bool lm_r_ok(const lm_rule *r)
{
    return !r->e->code;
}

/* Whether the call can go on: no failure yet, and these operands are there. */
static bool can(lm_rule *r, lm_vid a, lm_vid b)
{
    if (!lm_r_ok(r))
        return false;
    if (a >= 0 && b >= 0)
        return true;
    lm_fail(r->e, LM_EBUG, "a rule", NULL, "an operand is absent");
    return false;
}

static lm_vid append(lm_rule *r, const lm_op *op, const void *attr, const lm_vid *in)
{
    lm_vid out[LM_MAX_OUT];

    for (int i = 0; i < LM_MAX_OUT; i++)
        out[i] = i ? LM_SKIP : LM_NONE;
    if (!lm_r_ok(r) || lm_graph_append(r->g, op, attr, in, out, r->e))
        return LM_NONE;
    return out[0];
}

int64_t lm_r_dim(const lm_rule *r, lm_vid v, int i)
{
    const lm_tensor *t;

    if (!lm_r_ok(r) || v < 0)
        return 0;
    t = &r->g->value[v].t;
    i = i < 0 ? t->ndim + i : i;
    return i >= 0 && i < t->ndim ? t->dim[i] : 1;
}

/* ---- Values that modules share ---- */

typedef struct kept {
    struct kept *next;
    lm_vid v;
    char key[96];
} kept;

lm_vid lm_r_kept(const lm_rule *r, const char *key)
{
    if (r->shared)
        for (const kept *k = *r->shared; k; k = k->next)
            if (!strcmp(k->key, key))
                return k->v;
    return LM_NONE;
}

lm_vid lm_r_keep(lm_rule *r, const char *key, lm_vid v)
{
    kept *k = NULL;

    if (!r->shared || !can(r, v, v) || strlen(key) >= sizeof k->key)
        return v;
    if (lm_arena_alloc(r->arena, &k, 1, sizeof *k, r->e))
        return LM_NONE;
    k->next = *r->shared;
    k->v = v;
    strcpy(k->key, key);
    *r->shared = k;
    return v;
}

/* ---- Constants ---- */

static lm_vid make(lm_rule *r, lm_dtype type, int ndim, const int64_t *dim, const double *number,
                   const int32_t *id)
{
    lm_tensor t = { .dtype = type, .ndim = ndim };
    lm_vid v = LM_NONE;

    memcpy(t.dim, dim, (size_t)ndim * sizeof *dim);
    if (!lm_r_ok(r) || lm_graph_value(r->g, LM_ROLE_CONST, t, NULL, &v, r->e) ||
        lm_grow(&r->made, &r->cap_made, r->n_made + 1, sizeof *r->made, "constants", r->e))
        return LM_NONE;
    r->made[r->n_made++] = (lm_rule_const){ v, number, id, lm_tensor_count(&t) };
    return v;
}

lm_vid lm_r_const(lm_rule *r, int ndim, const int64_t *dim, const double *numbers)
{
    return make(r, LM_DTYPE_F32, ndim, dim, numbers, NULL);
}

void lm_rule_fill(const lm_rule *r, void *(*data)(void *ctx, lm_vid v), void *ctx)
{
    for (size_t i = 0; i < r->n_made; i++) {
        const lm_rule_const *c = &r->made[i];
        void *to = data(ctx, c->value);

        if (to && c->id)
            memcpy(to, c->id, (size_t)c->count * sizeof *c->id);
        else if (to)
            lm_convert(LM_DTYPE_F64, c->number, r->g->value[c->value].t.dtype, to, c->count);
    }
}

/* A [rows,cols] with one 1 in each column (or row), where `row` says. */
static lm_vid selection(lm_rule *r, int64_t rows, int64_t cols, int64_t n, int64_t times,
                        bool inner, bool turned)
{
    double *t = NULL;

    if (!lm_r_ok(r) || lm_arena_alloc(r->arena, &t, (size_t)(rows * cols), sizeof *t, r->e))
        return LM_NONE;
    for (int64_t i = 0; i < n * times; i++) {
        int64_t source = inner ? i / times : i % n;

        t[turned ? i * n + source : source * n * times + i] = 1;
    }
    return lm_r_const(r, LM_DIMS(rows, cols), t);
}

lm_vid lm_r_repeat(lm_rule *r, int64_t n, int64_t times)
{
    return selection(r, n, n * times, n, times, false, false);
}

lm_vid lm_r_spread(lm_rule *r, int64_t n, int64_t times, bool inner)
{
    return selection(r, n * times, n, n, times, inner, true);
}

/* ---- Products ---- */

lm_vid lm_r_matmul(lm_rule *r, lm_vid a, bool turn_a, lm_vid b, bool turn_b)
{
    lm_matmul_attr attr = { turn_a, turn_b };

    return can(r, a, b) ? append(r, &lm_op_matmul, &attr, (lm_vid[]){ a, b }) : LM_NONE;
}

lm_vid lm_r_inverse(lm_rule *r, lm_vid v)
{
    return can(r, v, v) ? append(r, &lm_op_inverse, NULL, (lm_vid[]){ v }) : LM_NONE;
}

/* ---- Shapes ---- */

lm_vid lm_r_permute(lm_rule *r, lm_vid v, int ndim, const int64_t *dim, const int *perm,
                    int to_ndim, const int64_t *to)
{
    lm_permute_attr attr = { .ndim = ndim, .to_ndim = to_ndim };

    if (!can(r, v, v))
        return LM_NONE;
    for (int i = 0; i < ndim; i++) {
        attr.dim[i] = dim[i];
        attr.perm[i] = perm ? perm[i] : i;
    }
    memcpy(attr.to, to, (size_t)to_ndim * sizeof *to);
    return append(r, &lm_op_permute, &attr, (lm_vid[]){ v });
}

lm_vid lm_r_reshape(lm_rule *r, lm_vid v, int ndim, const int64_t *dim)
{
    const lm_tensor *t;
    bool same;

    if (!can(r, v, v))
        return LM_NONE;
    t = &r->g->value[v].t;
    same = t->ndim == ndim && !memcmp(t->dim, dim, (size_t)ndim * sizeof *dim);
    return same ? v
                : lm_r_permute(r, v, 1, (const int64_t[]){ lm_tensor_count(t) }, NULL, ndim, dim);
}

lm_vid lm_r_shape2(lm_rule *r, lm_vid v, int64_t rows, int64_t cols)
{
    return lm_r_reshape(r, v, LM_DIMS(rows, cols));
}

lm_vid lm_r_turn(lm_rule *r, lm_vid v)
{
    int64_t rows = lm_r_dim(r, v, -2), cols = lm_r_dim(r, v, -1);

    if (!can(r, v, v))
        return LM_NONE;
    if (r->g->value[v].t.ndim == 3) {
        int64_t n = lm_r_dim(r, v, 0);

        return lm_r_permute(r, v, LM_DIMS(n, rows, cols), (const int[]){ 0, 2, 1 },
                            LM_DIMS(n, cols, rows));
    }
    return lm_r_permute(r, v, LM_DIMS(rows, cols), (const int[]){ 1, 0 }, LM_DIMS(cols, rows));
}

lm_vid lm_r_part(lm_rule *r, lm_vid v, int64_t row, int64_t rows, int64_t col, int64_t cols)
{
    lm_window_attr attr = { row, col, rows, cols };

    if (!can(r, v, v))
        return LM_NONE;
    return rows == lm_r_dim(r, v, 0) && cols == lm_r_dim(r, v, 1)
               ? v
               : append(r, &lm_op_window, &attr, (lm_vid[]){ v });
}

lm_vid lm_r_join(lm_rule *r, lm_vid a, lm_vid b)
{
    lm_join_attr attr = { false };
    lm_vid in[LM_JOIN_PARTS];

    for (int i = 0; i < LM_JOIN_PARTS; i++)
        in[i] = i == 0 ? a : i == 1 ? b : LM_NONE;
    return can(r, a, b) ? append(r, &lm_op_join, &attr, in) : LM_NONE;
}

lm_vid lm_r_stop(lm_rule *r, lm_vid v)
{
    return can(r, v, v) ? append(r, &lm_op_stop, NULL, (lm_vid[]){ v }) : LM_NONE;
}

/* ---- Indices ---- */

lm_vid lm_r_ids(lm_rule *r, const int32_t *ids, int ndim, const int64_t *dim)
{
    return make(r, LM_DTYPE_I32, ndim, dim, NULL, ids);
}

lm_vid lm_r_gather_by(lm_rule *r, lm_vid v, lm_vid ids)
{
    return can(r, v, ids) ? append(r, &lm_op_gather, NULL, (lm_vid[]){ v, ids }) : LM_NONE;
}

lm_vid lm_r_gather(lm_rule *r, lm_vid v, const int32_t *ids, int ndim, const int64_t *dim)
{
    return can(r, v, v) ? lm_r_gather_by(r, v, lm_r_ids(r, ids, ndim, dim)) : LM_NONE;
}

lm_vid lm_r_columns(lm_rule *r, lm_vid v, const int32_t *ids, int64_t n)
{
    int64_t rows = lm_r_dim(r, v, 0), cols = lm_r_dim(r, v, 1);
    int32_t *at = NULL;

    if (!can(r, v, v) || lm_arena_alloc(r->arena, &at, (size_t)(n * rows), sizeof *at, r->e))
        return LM_NONE;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < n; j++)
            at[i * n + j] = (int32_t)(i * cols + ids[j]);
    return lm_r_gather(r, v, at, LM_DIMS(rows, n));
}

/* Places as indices; fails for one that is outside or named twice. */
static int32_t *check_places(lm_rule *r, const int64_t *at, int64_t n, int64_t all)
{
    int32_t *ids = NULL;
    uint8_t *seen = NULL;

    if (all > INT32_MAX) {
        lm_fail(r->e, LM_ELIMIT, "a matrix", NULL, "it has more than %d elements", INT32_MAX);
        return NULL;
    }
    if (lm_arena_alloc(r->arena, &ids, (size_t)n, sizeof *ids, r->e) ||
        lm_alloc_n(&seen, (size_t)(all / 8 + 1), 1, "places", r->e))
        return NULL;
    for (int64_t k = 0; k < n; k++) {
        bool bad = at[k] < 0 || at[k] >= all;

        if (bad || seen[at[k] / 8] >> at[k] % 8 & 1) {
            lm_fail(r->e, LM_EFORMAT, "the adapter's indices", NULL, "index %lld is %s",
                    (long long)k, bad ? "outside the matrix" : "there twice");
            break;
        }
        seen[at[k] / 8] |= (uint8_t)(1u << at[k] % 8);
        ids[k] = (int32_t)at[k];
    }
    lm_free(seen);
    return lm_r_ok(r) ? ids : NULL;
}

lm_vid lm_r_scatter(lm_rule *r, lm_vid v, const int64_t *at, int ndim, const int64_t *dim)
{
    lm_scatter_attr attr = { .ndim = ndim, .unique = true };
    int64_t all = 1, n;
    int32_t *ids;

    if (!can(r, v, v))
        return LM_NONE;
    for (int i = 0; i < ndim; i++)
        all *= attr.dim[i] = dim[i];
    n = lm_tensor_count(&r->g->value[v].t);
    ids = check_places(r, at, n, all);
    if (!ids)
        return LM_NONE;
    lm_tensor shape = r->g->value[v].t;
    return append(r, &lm_op_scatter, &attr,
                  (lm_vid[]){ v, make(r, LM_DTYPE_I32, shape.ndim, shape.dim, NULL, ids) });
}

/* ---- Formulas and sums ---- */

lm_vid lm_r_map(lm_rule *r, const char *text, const lm_formula_name *names, int n)
{
    lm_formula_name all[16];
    lm_vid y = LM_NONE;
    lm_formula_scope scope = { .name = all, .n_names = n + 1, .numbers = LM_NONE, .gate = LM_NONE };

    if (!lm_r_ok(r))
        return LM_NONE;
    memcpy(all, names, (size_t)n * sizeof *names);
    all[n] = (lm_formula_name)LM_MAKES("y", &y);
    if (lm_formula_append(r->g, text, &scope, r->e))
        return LM_NONE;
    return y;
}

static lm_vid reduce(lm_rule *r, lm_vid v, lm_reduce_kind kind, lm_reduce_over over)
{
    lm_reduce_attr attr = { .kind = kind, .over = over };

    return can(r, v, v) ? append(r, &lm_op_reduce, &attr, (lm_vid[]){ v }) : LM_NONE;
}

lm_vid lm_r_sum(lm_rule *r, lm_vid v, bool squares, bool of_columns)
{
    return reduce(r, v, squares ? LM_REDUCE_SQUARES : LM_REDUCE_SUM,
                  of_columns ? LM_OVER_COLUMN : LM_OVER_ROW);
}

lm_vid lm_r_row_max(lm_rule *r, lm_vid v)
{
    return reduce(r, v, LM_REDUCE_MAX, LM_OVER_ROW);
}

lm_vid lm_r_add(lm_rule *r, lm_vid w, double s, lm_vid d)
{
    if (!can(r, w, d))
        return LM_NONE;
    return LM_R_MAP(r, "y = w + s * d", LM_IS("w", w), LM_IS("d", d), LM_CONSTANT("s", s));
}

lm_vid lm_r_scale(lm_rule *r, double s, lm_vid v)
{
    return can(r, v, v) ? LM_R_MAP(r, "y = s * v", LM_IS("v", v), LM_CONSTANT("s", s)) : LM_NONE;
}

/* ---- Rotations ---- */

lm_vid lm_r_skew(lm_rule *r, lm_vid upper, int64_t n)
{
    int64_t b = lm_r_dim(r, upper, 0), m = n * (n - 1) / 2;
    int32_t *ids = NULL;
    lm_vid half;

    if (!can(r, upper, upper) ||
        lm_arena_alloc(r->arena, &ids, (size_t)(b * n * n), sizeof *ids, r->e))
        return LM_NONE;
    for (int64_t k = 0; k < b; k++)
        for (int64_t i = 0, at = 0; i < n; i++)
            for (int64_t j = 0; j < n; j++)
                ids[(k * n + i) * n + j] = j > i ? (int32_t)(k * m + at++) : -1;
    half = lm_r_gather(r, upper, ids, LM_DIMS(b, n, n));
    return LM_R_MAP(r, "y = a - b", LM_IS("a", half), LM_IS("b", lm_r_turn(r, half)));
}

/* b identities */
static lm_vid identities(lm_rule *r, int64_t b, int64_t n)
{
    double *t = NULL;

    if (!lm_r_ok(r) || lm_arena_alloc(r->arena, &t, (size_t)(b * n * n), sizeof *t, r->e))
        return LM_NONE;
    for (int64_t i = 0; i < b * n; i++)
        t[i * n + i % n] = 1;
    return lm_r_const(r, LM_DIMS(b, n, n), t);
}

lm_vid lm_r_cayley(lm_rule *r, lm_vid q, int terms)
{
    lm_vid one = identities(r, lm_r_dim(r, q, 0), lm_r_dim(r, q, 1)), sum, power;

    if (!terms) /* (1 - q)(1 + q)^-1 = 2 (1 + q)^-1 - 1 */
        return LM_R_MAP(r, "y = 2*a - i", LM_IS("a", lm_r_inverse(r, lm_r_add(r, one, 1, q))),
                        LM_IS("i", one));
    sum = terms > 1 ? lm_r_add(r, one, 2, q) : one;
    if (terms < 3)
        return sum;
    power = lm_r_matmul(r, q, false, q, false);
    sum = lm_r_add(r, sum, 2, power);
    for (int i = 3; i < terms - 1; i++) {
        power = lm_r_matmul(r, power, false, q, false);
        sum = lm_r_add(r, sum, 2, power);
    }
    return lm_r_add(r, sum, 1, lm_r_matmul(r, power, false, q, false));
}

lm_vid lm_r_blocks(lm_rule *r, lm_vid w, lm_vid blocks)
{
    int64_t b = lm_r_dim(r, blocks, 0), n = lm_r_dim(r, blocks, 1);
    int64_t rows = lm_r_dim(r, w, 0), cols = lm_r_dim(r, w, 1);

    if (b == 1) /* rows of n numbers, all through the same block */
        return lm_r_shape2(r,
                           lm_r_matmul(r, lm_r_shape2(r, w, rows * (n ? cols / n : 1), n), false,
                                       lm_r_reshape(r, blocks, LM_DIMS(n, n)), true),
                           rows, cols);
    lm_vid x =
        lm_r_permute(r, w, LM_DIMS(rows, b, n), (const int[]){ 1, 0, 2 }, LM_DIMS(b, rows, n));
    return lm_r_permute(r, lm_r_matmul(r, x, false, blocks, true), LM_DIMS(b, rows, n),
                        (const int[]){ 1, 0, 2 }, LM_DIMS(rows, cols));
}
