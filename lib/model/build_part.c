/* SPDX-License-Identifier: Apache-2.0 */
/* build_part.c -- the part of a model that one rank of a mesh has: the list that the sharding pass makes of the whole one, axis
 * by axis, and which rows or columns of each tensor its parameters are. */
#include "model/build.h"

/* ---- the values of a model in the rank's list ---- */

static void renumber_one(const lm_vid *place, lm_vid *v)
{
    if (*v >= 0)
        *v = place[*v];
}

static void renumber_layers(lm_model *m, const lm_vid *place)
{
    const int64_t n = lm_config_depth(&m->config);
    for (int64_t i = 0; m->memory && i < LM_MEMORY * m->config.layers; i++)
        renumber_one(place, &m->memory[i]);
    for (int64_t l = 0; m->routed && l < n; l++) {
        lm_routed_layer *r = &m->routed[l];
        lm_vid *const all[] = { &r->z, &r->expert, &r->load, &r->mean, &r->dropped };
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            renumber_one(place, all[i]);
    }
    for (int64_t l = 0; m->kept && l < m->config.layers; l++) {
        lm_kept_layer *k = &m->kept[l];
        lm_vid *const all[] = { &k->used, &k->table, &k->row, &k->mass };
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            renumber_one(place, all[i]);
    }
}

static void renumber(lm_model *m, const lm_vid *place)
{
    lm_vid *one[LM_B_VALUES];
    const int n = lm_b_values(m, one);
    for (int i = 0; i < n; i++)
        renumber_one(place, one[i]);
    for (int i = 0; i < m->n_params; i++) {
        renumber_one(place, &m->param[i].value);
        if (m->grad)
            renumber_one(place, &m->grad[i]);
    }
    for (int i = 0; i < m->n_constants; i++)
        renumber_one(place, &m->constant[i].value);
    for (int i = 0; i < m->n_caches; i++)
        renumber_one(place, &m->cache[i].value);
    renumber_layers(m, place);
}

/* ---- cuts ---- */

/* The pieces of elements [from, from + count); false: a piece reaches beyond them. */
static bool pieces_between(const lm_portions *p, int64_t from, int64_t count, lm_portions *out)
{
    int64_t at = 0;
    *out = (lm_portions){ 0 };
    for (int i = 0; i < p->n; i++) {
        int64_t times = 0;
        for (int64_t k = 0; k < p->run[i].times; k++, at += p->run[i].size) {
            const bool inside = at >= from && at + p->run[i].size <= from + count;
            if (!inside && at < from + count && at + p->run[i].size > from)
                return false;
            times += inside;
        }
        if (times) {
            out->run[out->n] = p->run[i];
            out->run[out->n++].times = times;
        }
    }
    return out->n > 0;
}

/* Of the ranks that hold the same elements the first one; true for all where each holds its own.  *even: all pieces are shared
 * by as many. */
static bool is_first(const lm_portions *p, int ranks, int rank, bool *even)
{
    int64_t by = 0;
    *even = true;
    for (int i = 0; i < p->n; i++) {
        const int64_t units = p->run[i].size / p->run[i].unit,
                      own = units < ranks ? ranks / units : 1;
        *even &= !by || by == own;
        by = own;
    }
    return !by || rank % by == 0;
}

/* The rank that holds all rows from `row` on.  -1 if they are spread over several ranks. */
static int owner_of(const lm_portions *p, int64_t len, int ranks, int64_t row, int64_t rows)
{
    lm_range r;
    for (int rank = 0; rank < ranks; rank++)
        for (int64_t k = 0; lm_portions_at(p, len, ranks, rank, k, &r); k++)
            if (row >= r.from && row + rows <= r.from + r.count)
                return rank;
    return -1;
}

/* True if the tensors of parameter i, packed below each other, are split apart. */
static bool is_packed_apart(const lm_model *m, int i, const lm_tensor *whole, const lm_placement *p,
                            int ranks)
{
    lm_portions own;
    for (int k = 0; p->at == 0 && k < m->n_slices; k++) {
        const lm_slice *s = &m->slice[k];
        if (s->param == i && s->rows < whole->dim[0] &&
            !pieces_between(&p->pieces, s->row, s->rows, &own) &&
            owner_of(&p->pieces, whole->dim[0], ranks, s->row, s->rows) < 0)
            return false;
    }
    return true;
}

/* Packed parameters that no reader wants in pieces of their tensors stay whole: where a head's states are read together. */
static void keep_packed(const lm_model *m, lm_graph *g, lm_axis axis, int ranks)
{
    static const lm_placement replicated;
    for (int i = 0; i < m->n_params; i++) {
        lm_value *v = &g->value[m->param[i].value];
        lm_placement *p = &v->layout.axis[axis];
        const lm_vid grad = m->grad ? m->grad[i] : LM_NONE;
        if (p->share != LM_SPLIT || is_packed_apart(m, i, &v->t, p, ranks))
            continue;
        *p = replicated;
        if (grad >= 0)
            g->value[grad].layout.axis[axis] = replicated;
    }
}

/* A stack of matrices is split in whole ones. */
static bool splits_stack(const lm_slice *s, const lm_tensor *whole, const lm_placement *p,
                         int ranks)
{
    const int64_t each = s->rows / s->stack;
    bool apart = p->at == 0;
    lm_range r;
    for (int rank = 0; apart && rank < ranks; rank++)
        for (int64_t k = 0; lm_portions_at(&p->pieces, whole->dim[0], ranks, rank, k, &r); k++)
            apart &= r.from % each == 0 && r.count % each == 0;
    return apart;
}

/* The place of rows in the part of the parameter that a rank has. */
static void move_slice(lm_slice *s, const lm_tensor *whole, const lm_placement *p)
{
    const lm_cut *c = &s->cut;
    const int64_t row = s->row, rows = s->rows;
    lm_range r;
    s->row = s->rows = 0;
    for (int64_t k = 0; lm_portions_at(&p->pieces, whole->dim[0], c->ranks, c->rank, k, &r); k++)
        s->row += r.from >= row ? 0 : row - r.from < r.count ? row - r.from : r.count;
    for (int64_t k = 0; lm_cut_at(c, k, &r); k++)
        s->rows += r.count;
    s->stack = s->stack > 1 ? s->stack * s->rows / rows : 1;
}

static lm_code cut_slice(lm_slice *s, const lm_tensor *whole, const lm_placement *p, lm_axis axis,
                         const lm_mesh *mesh, lm_err *e)
{
    const int ranks = mesh->size[axis], rank = mesh->rank[axis];
    lm_cut *c = &s->cut;
    bool even = true;
    if (c->ranks)
        return lm_fail(e, LM_EBUG, s->name, NULL, "is split along %s and %s",
                       lm_axis_names[c->axis], lm_axis_names[axis]);
    *c = (lm_cut){ .ranks = ranks,
                   .rank = rank,
                   .dim = p->at,
                   .whole = whole->dim[p->at],
                   .pieces = p->pieces,
                   .axis = axis };
    if (whole->ndim > 2 || (s->stack > 1 && !splits_stack(s, whole, p, ranks)))
        return lm_fail(e, LM_EUSAGE, s->name, NULL, "holds several matrices, which are not split");
    if (p->at == 0 && s->rows < whole->dim[0]) {
        c->whole = s->rows;
        c->on = !pieces_between(&p->pieces, s->row, s->rows, &c->pieces);
        c->owner = c->on ? owner_of(&p->pieces, whole->dim[0], ranks, s->row, s->rows) : 0;
        if (c->owner < 0)
            return lm_fail(e, LM_EBUG, s->name, NULL, "is split in pieces with its neighbours");
    }
    c->counts = c->on ? rank == c->owner : is_first(&c->pieces, ranks, rank, &even);
    for (int i = 0; i < LM_INNER_AXES; i++)
        c->counts &= lm_inner_axes[i] == axis || mesh->rank[lm_inner_axes[i]] == 0;
    c->writes = c->counts;
    for (int i = 0; i < LM_AXES; i++)
        c->writes &= i == (int)axis || mesh->rank[i] == 0;
    if (!even)
        return lm_fail(e, LM_EUSAGE, s->name, NULL,
                       "has packed parts of which fewer ranks share one than another");
    if (p->at == 0)
        move_slice(s, whole, p);
    return LM_OK;
}

/* A list between two axes. */
typedef struct {
    lm_graph *g, *local; /* the one that `axis` has split, and what came of it */
    lm_axis axis;
    const lm_mesh *mesh;
    lm_vid *place; /* by value of g */
} step;

/* The parameters are those of the whole list `g` still; their gradients' sums follow from its layouts. */
static lm_code cut_params(lm_model *m, const step *x, lm_err *e)
{
    const lm_graph *g = x->g;
    for (int i = 0; i < m->n_params; i++) {
        lm_param *p = &m->param[i];
        const lm_value *v = &g->value[p->value];
        const lm_placement *at = &v->layout.axis[x->axis],
                           *of_grad = m->grad && m->grad[i] >= 0
                                          ? &g->value[m->grad[i]].layout.axis[x->axis]
                                          : at;
        p->part.axis[x->axis] = *at;
        p->count = lm_tensor_count(&x->local->value[x->place[p->value]].t);
        p->sums[x->axis] = of_grad->share == LM_PARTIAL ? LM_SUMS_ALL
                           : of_grad->sum               ? LM_SUMS_SHARED
                                                        : LM_SUMS_NONE;
        for (int k = 0; at->share == LM_SPLIT && k < m->n_slices; k++)
            if (m->slice[k].param == i && cut_slice(&m->slice[k], &v->t, at, x->axis, x->mesh, e))
                return e->code;
    }
    return LM_OK;
}

/* ---- layouts of the parameters ---- */

/* The parameter of *like that holds the tensors of parameter i; -1: it has none. */
static int same_param(const lm_model *m, int i, const lm_model *like)
{
    for (int k = 0; k < m->n_slices; k++)
        if (m->slice[k].param == i) {
            const int own = lm_model_slice(like, m->slice[k].name);
            return own < 0 ? -1 : like->slice[own].param;
        }
    return -1;
}

static lm_code lay_like(lm_model *m, lm_graph *g, lm_axis axis, const lm_model *like, lm_err *e)
{
    for (int i = 0; i < m->n_params; i++) {
        const int k = same_param(m, i, like);
        lm_layout layout = g->value[m->param[i].value].layout;
        if (k < 0)
            continue;
        lm_placement *p = &layout.axis[axis];
        *p = like->param[k].part.axis[axis];
        if (p->share == LM_SPLIT && !p->pieces.n) /* as it is, whatever readers here would choose */
            p->pieces =
                (lm_portions){ .n = 1,
                               .run = { { 1, g->value[m->param[i].value].t.dim[p->at], 1 } } };
        if (lm_graph_lay(g, m->param[i].value, &layout, e))
            return e->code;
    }
    return LM_OK;
}

/* What decoders read of a source, head by head, as they keep it; caches that the graph writes itself have a layout. */
static lm_code lay_memory(const lm_model *m, const step *x, lm_err *e)
{
    const lm_layout by_head = { .axis = { [LM_AXIS_TP] = { .share = LM_SPLIT, .at = 1 } } };
    const bool any = m->build.encode && x->axis == LM_AXIS_TP;
    for (int64_t i = 0; any && i < LM_MEMORY * m->config.layers; i++)
        if (m->memory[i] >= 0 && x->g->value[m->memory[i]].role != LM_ROLE_STATE &&
            lm_graph_lay(x->g, m->memory[i], &by_head, e))
            return e->code;
    return LM_OK;
}

static lm_code lay_params(lm_model *m, const step *x, lm_err *e)
{
    if (m->build.lay(&m->build, x->g, x->axis, e) || lay_memory(m, x, e))
        return e->code;
    if (m->build.like)
        return lay_like(m, x->g, x->axis, m->build.like, e);
    if (!lm_shard_complete(x->g, x->axis, x->mesh, e))
        keep_packed(m, x->g, x->axis, x->mesh->size[x->axis]);
    return e->code;
}

/* What is read behind a run must be whole. */
static lm_code make_whole(const lm_model *m, const step *x, lm_err *e)
{
    const lm_vid result[] = { m->loss, m->entropy, m->value, m->aux, m->logits };
    for (size_t i = 0; i < sizeof result / sizeof *result; i++)
        if (lm_shard_whole(x->g, x->axis, x->mesh, x->local, x->place, result[i], e))
            return e->code;
    for (int64_t k = 0; k < lm_model_losses_ahead(m); k++)
        if (lm_shard_whole(x->g, x->axis, x->mesh, x->local, x->place, m->ahead_loss[k], e))
            return e->code;
    return LM_OK;
}

static lm_code split_along(lm_model *m, step *x, lm_err *e)
{
    if (lay_params(m, x, e) ||
        lm_alloc_n(&x->place, x->g->n_values, sizeof *x->place, "the sharding pass", e))
        return e->code;
    if (!lm_pass_shard(x->g, x->axis, x->mesh, &x->local, x->place, e) && !make_whole(m, x, e) &&
        !cut_params(m, x, e))
        renumber(m, x->place);
    lm_free(x->place);
    return e->code;
}

lm_code lm_b_take_part(lm_model *m, lm_err *e)
{
    const lm_mesh *mesh = m->build.mesh;
    for (int i = 0; i < LM_INNER_AXES; i++) {
        step x = { .g = m->graph, .axis = lm_inner_axes[i], .mesh = mesh };
        if (lm_mesh_along(mesh, x.axis) == 1)
            continue;
        if (split_along(m, &x, e)) {
            lm_graph_free(x.local);
            return e->code;
        }
        m->whole[i] = x.g; /* its memory holds names and attributes */
        m->graph = x.local;
    }
    return LM_OK;
}
