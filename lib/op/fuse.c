/* SPDX-License-Identifier: Apache-2.0 */
/* fuse.c -- joining operators that follow each other (fuse.h).
 *
 * Each rule looks at one node and its neighbours and proposes a node in place of some; `join` finds
 * a position for it in the list, asks the backend whether it has a kernel, and inserts it.  All
 * other nodes remain unchanged. */
#include "op/fuse.h"

#include <string.h>

#include "kernels/attention.h"
#include "kernels/elementwise.h"
#include "kernels/linear.h"
#include "kernels/norm.h"
#include "kernels/rope.h"
#include "op/ops.h"

/* Readers and writer of a value. */
typedef struct {
    int64_t reads;  /* operands, not nodes */
    size_t readers; /* the sum of the indices of their nodes: the index itself for one read */
    lm_node *writer;
    bool kept;
} use;

typedef struct {
    lm_graph *g;
    lm_backend *b;
    use *use; /* by value */
    /* Nodes that read value v before the pass, in order: reader[begin[v]] to reader[begin[v + 1]].
     * Joined nodes among them have another operator by now, or none. */
    size_t *begin, *reader;
    lm_err *e;
} fuser;

/* A node that could replace its parts; its layer and phase are those of the first. */
enum { MAX_PARTS = 3 };
typedef struct {
    lm_node made;
    lm_node *part[MAX_PARTS];
    int n_parts;
    bool everywhere; /* every backend has its operator */
} joint;

/* Count the operands of node n, or with sign -1 remove them. */
static void count_node(fuser *f, lm_node *n, int sign)
{
    size_t k = (size_t)(n - f->g->node);
    for (int i = 0; i < n->n_in; i++)
        if (n->in[i] >= 0) {
            f->use[n->in[i]].reads += sign;
            f->use[n->in[i]].readers += sign > 0 ? k : -k; /* wraps */
        }
    for (int i = 0; i < n->n_out; i++)
        if (n->out[i] >= 0)
            f->use[n->out[i]].writer = sign > 0 ? n : NULL;
}

static void list_readers(fuser *f)
{
    const lm_graph *g = f->g;
    for (size_t v = 0; v < g->n_values; v++)
        f->begin[v + 1] = f->begin[v] + (size_t)f->use[v].reads;
    /* begin[v] advances to the end of the readers of v, which is the beginning of those of v + 1 */
    for (size_t k = 0; k < g->n_nodes; k++)
        for (int i = 0; i < g->node[k].n_in; i++)
            if (g->node[k].in[i] >= 0)
                f->reader[f->begin[g->node[k].in[i]]++] = k;
    for (size_t v = g->n_values; v > 0; v--)
        f->begin[v] = f->begin[v - 1];
    f->begin[0] = 0;
}

static lm_code count_uses(fuser *f, const lm_vid *keep, int n_keep)
{
    lm_graph *g = f->g;
    size_t reads = 0;
    if (lm_alloc_n(&f->use, g->n_values, sizeof *f->use, "a pass", f->e) ||
        lm_alloc_n(&f->begin, g->n_values + 1, sizeof *f->begin, "a pass", f->e))
        return f->e->code;
    for (int i = 0; i < n_keep; i++)
        f->use[keep[i]].kept = true;
    for (size_t k = 0; k < g->n_nodes; k++)
        count_node(f, &g->node[k], 1);
    for (size_t v = 0; v < g->n_values; v++)
        reads += (size_t)f->use[v].reads;
    if (lm_alloc_n(&f->reader, reads, sizeof *f->reader, "a pass", f->e))
        return f->e->code;
    list_readers(f);
    return LM_OK;
}

/* ---- queries of the rules ---- */

/* The value is read exactly `reads` times, only here. */
static bool has_reads(const fuser *f, lm_vid v, int reads)
{
    return v >= 0 && f->g->value[v].role == LM_ROLE_ACT && !f->use[v].kept &&
           f->use[v].reads == reads;
}

/* The node of the only read of v. */
static lm_node *only_reader(const fuser *f, lm_vid v)
{
    return &f->g->node[f->use[v].readers];
}

static bool unread(const fuser *f, lm_vid v)
{
    return v < 0 || has_reads(f, v, 0);
}

static lm_dtype type_of(const fuser *f, lm_vid v)
{
    return f->g->value[v].t.dtype;
}

/* The node that computes v by `op` as its first output, or NULL. */
static lm_node *made_by(const fuser *f, lm_vid v, const lm_op *op)
{
    lm_node *n = v < 0 ? NULL : f->use[v].writer;
    return n && n->op == op && n->out[0] == v ? n : NULL;
}

/* A node that computes `op` of v as its first operand, or NULL.  `op` is one that no rule appends. */
static lm_node *taken_by(const fuser *f, lm_vid v, const lm_op *op)
{
    for (size_t i = v < 0 ? 0 : f->begin[v]; v >= 0 && i < f->begin[v + 1]; i++) {
        lm_node *n = &f->g->node[f->reader[i]];
        if (n->op == op && n->in[0] == v)
            return n;
    }
    return NULL;
}

static lm_activation gelu_act(const lm_node *n)
{
    const lm_gelu_attr *a = n->attr;
    return a->exact ? LM_ACT_GELU_EXACT : LM_ACT_GELU;
}

/* ---- join ---- */

/* True if one of the values shares memory with v. */
static bool touches(const lm_graph *g, const lm_vid *some, int n, lm_vid v)
{
    for (int i = 0; i < n; i++)
        if (lm_graph_share(g, some[i], v))
            return true;
    return false;
}

/* True if a and b must keep their order: one writes an operand of the other. */
static bool ordered(const lm_graph *g, const lm_node *a, const lm_node *b)
{
    for (int i = 0; i < a->n_out; i++)
        if (touches(g, b->in, b->n_in, a->out[i]) || touches(g, b->out, b->n_out, a->out[i]))
            return true;
    for (int i = 0; i < a->n_in; i++)
        if (touches(g, b->out, b->n_out, a->in[i]))
            return true;
    return false;
}

static bool is_part(const joint *j, const lm_node *n)
{
    for (int i = 0; i < j->n_parts; i++)
        if (j->part[i] == n)
            return true;
    return false;
}

/* True if all parts may move to the position of `to`. */
static bool may_move(const lm_graph *g, const joint *j, const lm_node *to)
{
    for (int i = 0; i < j->n_parts; i++) {
        const lm_node *n = j->part[i], *from = n < to ? n : to, *end = n < to ? to : n;
        for (const lm_node *m = from + 1; m < end; m++)
            if (!is_part(j, m) && ordered(g, n, m))
                return false;
    }
    return true;
}

/* The last position of a part to which all others may move, or NULL. */
static lm_node *find_place(const lm_graph *g, const joint *j)
{
    lm_node *best = NULL;
    for (int i = 0; i < j->n_parts; i++)
        if (j->part[i] > best && may_move(g, j, j->part[i]))
            best = j->part[i];
    return best;
}

static bool wanted(const fuser *f, const joint *j)
{
    lm_tensor in[LM_MAX_IN], out[LM_MAX_OUT];
    lm_call c = lm_node_call(f->g, &j->made, in, out);
    return j->everywhere || f->b->joins(f->b, j->made.op->name, lm_node_act(f->g, &j->made), &c);
}

/* Make `op` of the parts; operands and attr (borrowed) of `made` are set.  False: not joined, or e
 * is set. */
static bool join(fuser *f, joint *j, const lm_op *op)
{
    void *attr = NULL;
    j->made.op = op;
    j->made.n_in = lm_op_ins(op);
    j->made.n_out = lm_op_outs(op);
    j->made.phase = j->part[0]->phase;
    j->made.layer = j->part[0]->layer;
    lm_node *place = find_place(f->g, j);
    if (!place || !wanted(f, j) || lm_arena_alloc(f->g->arena, &attr, 1, op->attr_size, f->e))
        return false;
    memcpy(attr, j->made.attr, op->attr_size);
    j->made.attr = attr;
    for (int i = 0; i < j->n_parts; i++) {
        count_node(f, j->part[i], -1);
        *j->part[i] = (lm_node){ .op = NULL };
    }
    *place = j->made;
    count_node(f, place, 1);
    return true;
}

/* ---- rules; each returns true when it has changed the list ---- */

/* linear, cast to F32: the product writes its F32 sums. */
static bool linear_cast(fuser *f, lm_node *n)
{
    lm_node *cast = has_reads(f, n->out[0], 1) ? taken_by(f, n->out[0], &lm_op_cast) : NULL;
    joint j = { .made = *n, .part = { n, cast }, .n_parts = 2, .everywhere = true };

    if (!cast || type_of(f, cast->out[0]) != LM_DTYPE_F32)
        return false;
    j.made.out[0] = cast->out[0];
    return join(f, &j, &lm_op_linear);
}

/* norm, linear, and with `then` what follows. */
static bool norm_linear(fuser *f, lm_node *n, lm_node *then, lm_activation act)
{
    lm_node *norm = has_reads(f, n->in[0], 1) ? made_by(f, n->in[0], &lm_op_norm) : NULL;
    if (!norm || !unread(f, norm->out[1]))
        return false;

    const lm_norm_attr *a = norm->attr;
    lm_norm_linear_attr attr = { a->kind, a->eps, act, a->plus_one };
    joint j = { .made = { .attr = &attr,
                          .in = { norm->in[0], norm->in[1], norm->in[2], norm->in[3], n->in[1],
                                  n->in[2] },
                          .out = { then ? then->out[0] : n->out[0], norm->out[2] } },
                .part = { n, norm, then },
                .n_parts = then ? 3 : 2 };
    return join(f, &j, &lm_op_norm_linear);
}

static bool norm_linear_act(fuser *f, lm_node *n)
{
    if (!has_reads(f, n->out[0], 1))
        return false;
    lm_node *gelu = taken_by(f, n->out[0], &lm_op_gelu);
    lm_node *swiglu = taken_by(f, n->out[0], &lm_op_swiglu);
    lm_node *geglu = taken_by(f, n->out[0], &lm_op_geglu);
    return (gelu && norm_linear(f, n, gelu, gelu_act(gelu))) ||
           (swiglu && norm_linear(f, n, swiglu, LM_ACT_SWIGLU)) ||
           (geglu && norm_linear(f, n, geglu, LM_ACT_GEGLU));
}

/* linear, gelu; the sums are kept where other nodes read them (the backward). */
static bool linear_act(fuser *f, lm_node *n)
{
    lm_node *gelu = taken_by(f, n->out[0], &lm_op_gelu);
    if (!gelu || type_of(f, gelu->out[0]) != type_of(f, n->in[0]))
        return false;
    lm_linear_act_attr attr = { gelu_act(gelu) };
    lm_vid z = has_reads(f, n->out[0], 1) ? LM_NONE : n->out[0];
    joint j = { .made = { .attr = &attr,
                          .in = { n->in[0], n->in[1], n->in[2] },
                          .out = { gelu->out[0], z } },
                .part = { n, gelu },
                .n_parts = 2 };
    return join(f, &j, &lm_op_linear_act);
}

static bool linear_act_dx(fuser *f, lm_node *n)
{
    lm_node *gelu = has_reads(f, n->out[0], 1) ? taken_by(f, n->out[0], &lm_op_gelu_dx) : NULL;
    if (!gelu)
        return false;
    lm_linear_act_attr attr = { gelu_act(gelu) };
    joint j = { .made = { .attr = &attr,
                          .in = { n->in[0], n->in[1], gelu->in[1] },
                          .out = { gelu->out[0] } },
                .part = { n, gelu },
                .n_parts = 2 };
    return join(f, &j, &lm_op_linear_act_dx);
}

/* norm_dx and the norm_dw that reads the same. */
static bool norm_dx_dw(fuser *f, lm_node *n)
{
    lm_node *dw = NULL;
    for (size_t i = f->begin[n->in[0]]; i < f->begin[n->in[0] + 1] && !dw; i++) {
        lm_node *m = &f->g->node[f->reader[i]];
        if (m->op == &lm_op_norm_dw && m->in[0] == n->in[0] && m->in[1] == n->in[1] &&
            m->in[2] == n->in[3])
            dw = m;
    }
    if (!dw)
        return false;
    joint j = { .made = { .attr = dw->attr,
                          .in = { n->in[0], n->in[1], n->in[2], n->in[3], n->in[4] },
                          .out = { n->out[0], dw->out[0], dw->out[1] } },
                .part = { n, dw },
                .n_parts = 2 };
    return join(f, &j, &lm_op_norm_dx_dw);
}

/* head_stats and the head_grad of its sums, which nothing else reads. */
static bool head_loss(fuser *f, lm_node *n)
{
    lm_node *grad = has_reads(f, n->out[1], 1) ? only_reader(f, n->out[1]) : NULL;
    if (!grad || grad->op != &lm_op_head_grad || grad->in[3] != n->out[1] ||
        !unread(f, n->out[2]) || n->out[3] >= 0 || n->out[4] >= 0)
        return false;
    joint j = { .made = { .attr = grad->attr,
                          .in = { n->in[0], n->in[1], n->in[2], grad->in[4], n->in[3] },
                          .out = { n->out[0], grad->out[0], grad->out[1], grad->out[2] } },
                .part = { n, grad },
                .n_parts = 2,
                .everywhere = true };
    return join(f, &j, &lm_op_head_loss);
}

/* The rope of one row a sequence before the attention n, or NULL. */
static lm_node *rope_before(const fuser *f, const lm_node *n)
{
    const lm_attention_attr *a = n->attr;
    lm_node *rope = has_reads(f, n->in[0], 1) ? made_by(f, n->in[0], &lm_op_rope) : NULL;
    const lm_rope_attr *r = rope ? rope->attr : NULL;
    /* One piece, keys and values alike, and neither biases nor statistics. */
    bool plain = n->in[3] < 0 && n->in[5] < 0 && n->in[7] < 0 && n->out[3] < 0 && n->out[2] >= 0 &&
                 lm_attention_value_dim(a) == a->head_dim;
    bool fits = plain && a->seq == 1 && r && !r->inverse && r->heads == a->heads &&
                r->kv_heads == a->kv_heads && r->head_dim == a->head_dim;
    return fits ? rope : NULL;
}

/* The head_norm before the rope, or NULL. */
static lm_node *head_norm_before(const fuser *f, const lm_node *rope)
{
    const lm_rope_attr *r = rope->attr;
    lm_node *norm = has_reads(f, rope->in[0], 1) ? made_by(f, rope->in[0], &lm_op_head_norm) : NULL;
    const lm_head_norm_attr *a = norm ? norm->attr : NULL;
    bool fits = a && unread(f, norm->out[1]) && a->heads == r->heads &&
                a->kv_heads == r->kv_heads && a->head_dim == r->head_dim;
    return fits ? norm : NULL;
}

/* (head_norm,) rope, attention_cached. */
static bool attention_step(fuser *f, lm_node *n, bool normed)
{
    const lm_attention_attr *a = n->attr;
    lm_node *rope = rope_before(f, n), *norm = rope && normed ? head_norm_before(f, rope) : NULL;
    if (!rope || (normed && !norm) || a->reads)
        return false;

    lm_attention_step_attr attr = { .attention = *a };
    attr.rotary_dim = ((const lm_rope_attr *)rope->attr)->rotary_dim;
    if (norm) {
        attr.eps = ((const lm_head_norm_attr *)norm->attr)->eps;
        attr.plus_one = ((const lm_head_norm_attr *)norm->attr)->plus_one;
    }
    joint j = { .made = { .attr = &attr,
                          .in = { norm ? norm->in[0] : rope->in[0], n->in[1], n->in[2], rope->in[1],
                                  rope->in[2], norm ? norm->in[1] : LM_NONE,
                                  norm ? norm->in[2] : LM_NONE, n->in[6] },
                          .out = { n->out[0], n->out[1], n->out[2] } },
                .part = { n, rope, norm },
                .n_parts = norm ? 3 : 2 };
    return join(f, &j, &lm_op_attention_step);
}

/* Try the rules on n, the join of most nodes first. */
static void visit(fuser *f, lm_node *n)
{
    if (n->op == &lm_op_linear) {
        if (linear_cast(f, n) && n->op != &lm_op_linear)
            return; /* moved later in the list; the walk will reach it */
        if (norm_linear_act(f, n) || norm_linear(f, n, NULL, LM_ACT_NONE))
            return;
        linear_act(f, n);
    } else if (n->op == &lm_op_linear_dx) {
        linear_act_dx(f, n);
    } else if (n->op == &lm_op_norm_dx) {
        norm_dx_dw(f, n);
    } else if (n->op == &lm_op_attention_cached) {
        (void)(attention_step(f, n, true) || attention_step(f, n, false));
    } else if (n->op == &lm_op_head_stats) {
        head_loss(f, n);
    }
}

static void squeeze(lm_graph *g)
{
    size_t left = 0;
    for (size_t k = 0; k < g->n_nodes; k++)
        if (g->node[k].op)
            g->node[left++] = g->node[k];
    g->n_nodes = left;
}

lm_code lm_fuse(lm_graph *g, lm_backend *b, const lm_vid *keep, int n_keep, lm_err *e)
{
    fuser f = { .g = g, .b = b, .e = e };
    if (!count_uses(&f, keep, n_keep)) {
        for (size_t k = 0; k < g->n_nodes && !e->code; k++)
            visit(&f, &g->node[k]);
        squeeze(g);
    }
    lm_free(f.use);
    lm_free(f.begin);
    lm_free(f.reader);
    return e->code;
}
