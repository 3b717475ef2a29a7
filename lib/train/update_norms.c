/* SPDX-License-Identifier: Apache-2.0 */
/* update_norms.c -- gradients that are sums over ranks, and the norms: sums of blocks of the whole model's tensors, the same bits
 * whichever rank has which. */
#include "base/mem.h"
#include "kernels/comm.h"
#include "op/ops.h"
#include "train/update_impl.h"

/* The exchange of the ranks along an axis. */
static lm_exchange_attr along(const lm_update *u, lm_axis axis)
{
    const lm_mesh *mesh = u->o.mesh;
    return (lm_exchange_attr){ .axis = (int)axis,
                               .ranks = mesh->size[axis],
                               .rank = mesh->rank[axis],
                               .op = LM_EXCHANGE_SUM };
}

static bool is_split(const lm_update *u)
{
    return u->o.mesh && lm_mesh_inner(u->o.mesh) > 1;
}

/* The end of the run of tensors from number i on that lie one behind another, up to the zeros between them, and for which
 * `has` holds; *end: of its elements. */
static int run_from(const lm_update *u, int i, bool (*has)(const lm_update *, int, lm_axis),
                    lm_axis axis, int64_t *end)
{
    *end = u->t[i].offset;
    for (; i < u->n_tensors && has(u, i, axis) && u->t[i].offset - *end < LM_BLOCK_ALIGN; i++)
        *end = u->t[i].offset + update_count(&u->t[i]);
    return i;
}

lm_code update_view_run(lm_update *u, lm_vid of, int64_t from, int64_t end, lm_vid *out, lm_err *e)
{
    return lm_graph_view(u->g, of, from, lm_shape1(LM_DTYPE_F32, end - from), NULL, out, e);
}

static bool is_addend(const lm_update *u, int i, lm_axis axis)
{
    return u->t[i].sums[axis] == LM_SUMS_ALL;
}

/* Gradients that are addends along an axis become their sums, in place. */
static lm_code append_sums(lm_update *u, lm_axis axis, lm_err *e)
{
    lm_exchange_attr a = along(u, axis);
    for (int i = 0; i < u->n_tensors; i++) {
        const lm_update_tensor *t = &u->t[i];
        const lm_sums sums = t->sums[axis];
        const lm_op *op = sums == LM_SUMS_ALL ? &lm_op_all_reduce : &lm_op_sum_shared;
        lm_vid x = t->grad;
        int64_t end;
        if (sums == LM_SUMS_NONE || !update_count(t) ||
            (t->cut && sums == LM_SUMS_SHARED &&
             !lm_portions_shared(&t->cut->pieces, (int)a.ranks)))
            continue;
        if (sums == LM_SUMS_ALL) {
            const int next = run_from(u, i, is_addend, axis, &end);
            if (update_view_run(u, u->v.grad, t->offset, end, &x, e))
                return e->code;
            i = next - 1;
        } else {
            a.dim = t->cut->dim;
            a.len = t->cut->whole;
            a.pieces = t->cut->pieces;
            a.sum = true;
        }
        lm_vid out = x;
        if (lm_graph_append(u->g, op, &a, &x, &out, e))
            return e->code;
    }
    return LM_OK;
}

/* Whether this rank counts tensor i: of those that hold the same numbers one does. */
static bool counts(const lm_update *u, int i)
{
    const lm_cut *cut = u->t[i].cut;
    bool first = true;
    for (int k = 0; u->o.mesh && k < LM_INNER_AXES; k++)
        first &= u->o.mesh->rank[lm_inner_axes[k]] == 0;
    return cut ? cut->counts : first;
}

/* The table of the blocks that this rank counts, filled when it is known which of them it has. */
static lm_code make_blocks(lm_update *u, lm_err *e)
{
    int64_t n = 0;
    for (int i = 0; i < u->n_tensors; i++)
        n += counts(u, i) ? update_norm_blocks(update_count(&u->t[i])) : 0;
    return update_room(u, lm_shape2(LM_DTYPE_I32, n > 0 ? n : 1, 4), &u->blocks, e);
}

/* Those that other ranks turn out to have stay empty. */
void update_fill_blocks(lm_update *u)
{
    size_t c = 0;
    while (u->constant[c].value != u->blocks)
        c++;
    lm_sum_block *block = u->constant[c].number;
    for (int i = 0; i < u->n_tensors; i++) {
        const lm_update_tensor *t = &u->t[i];
        int64_t from, end;
        update_own_range(u, i, &from, &end);
        for (int64_t k = from / LM_SUM_BLOCK; counts(u, i) && k * LM_SUM_BLOCK < end; k++) {
            const int64_t at = t->offset + k * LM_SUM_BLOCK, left = end - k * LM_SUM_BLOCK;
            *block++ =
                (lm_sum_block){ .page = (int32_t)(at / LM_SUM_BLOCK),
                                .first = (int32_t)(at % LM_SUM_BLOCK),
                                .count = (int32_t)(left < LM_SUM_BLOCK ? left : LM_SUM_BLOCK),
                                .place = (int32_t)(t->norm_at + k) };
        }
    }
}

/* Whether the ranks along an axis have different tensors, or parts of them: those along dp have the same, unless they share
 * them. */
static bool is_across(const lm_update *u, lm_axis axis)
{
    return (axis != LM_AXIS_DP || u->o.zero) && u->o.mesh && lm_mesh_along(u->o.mesh, axis) > 1;
}

/* s = the sum of squares of a block, of all ranks together: where one rank has a block, the sums over the ranks are its own,
 * to the bit. */
lm_code update_append_sumsq(lm_update *u, lm_vid of, lm_vid s, lm_err *e)
{
    const lm_vid in[2] = { of, u->blocks };
    lm_vid sums = LM_NONE;
    if (lm_graph_value(u->g, LM_ROLE_ACT, lm_shape1(LM_DTYPE_F64, u->o.norm_blocks), NULL, &sums,
                       e) ||
        lm_graph_append(u->g, &lm_op_sumsq, NULL, in, &sums, e))
        return e->code;
    for (int axis = LM_AXES - 1; axis >= 0; axis--) {
        lm_vid all = sums; /* in place */
        if (!is_across(u, (lm_axis)axis))
            continue;
        const lm_exchange_attr a = along(u, (lm_axis)axis);
        if (lm_graph_append(u->g, &lm_op_all_reduce, &a, &sums, &all, e))
            return e->code;
    }
    return lm_graph_append(u->g, &lm_op_total, NULL, &sums, &s, e);
}

static lm_code append_all_sums(lm_update *u, lm_err *e)
{
    for (int k = LM_INNER_AXES - 1; is_split(u) && k >= 0; k--)
        if (lm_mesh_along(u->o.mesh, lm_inner_axes[k]) > 1 && append_sums(u, lm_inner_axes[k], e))
            return e->code;
    return LM_OK;
}

lm_code update_append_norm(lm_update *u, lm_err *e)
{
    lm_clip_attr clip = { u->o.clip_norm };
    lm_vid both[2] = { u->v.sumsq, u->v.loss };
    u->g->when = LM_UPDATE_NORM;
    u->scale = LM_NONE;
    return make_blocks(u, e) || append_all_sums(u, e) ||
                   update_append_sumsq(u, u->v.grad, u->v.sumsq, e) ||
                   lm_graph_append(u->g, &lm_op_clip, &clip, both, &u->scale, e)
               ? e->code
               : LM_OK;
}
