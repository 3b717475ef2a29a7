/* SPDX-License-Identifier: Apache-2.0 */
/* Every operator of the registry in every form in which it can be split, on 2 and 4 ranks.
 *
 * The walk names no operator: forms are those of graph/shard.h.  Each rank of a team of threads runs the form on its
 * parts of the operands, and gathers the results by the operators of exchange; they must be those of the whole call.  In the
 * end each word of each operator's table must have been met, so that a new operator says how it is split, or "" that it
 * is not, and has examples that show it. */
#include "comm/threads.h"
#include "graph/links.h"
#include "graph/ring.h"
#include "graph/shard.h"
#include "op_trial.h"

enum { EXAMPLES = 10, MOST_OPS = 256, WORDS = 8, MOST_RANKS = 4, MOST_VALUES = 128 };

static bool met[MOST_OPS][WORDS], met_form[MOST_OPS], met_ends;

/* One form of one node. */
typedef struct {
    const trial *t;
    const lm_node *n;
    const lm_split_form *form;
    void *before[LM_MAX_OUT]; /* the whole results, before the call */
    const operands *want;     /* the whole operands behind it */
    bool left_out;            /* optional addends are one rank's */
} work;

/* What one rank has. */
typedef struct {
    const work *w;
    lm_mesh mesh;
    lm_graph *g;
    void *mem[MOST_VALUES];
} rank;

/* Copy the part of a rank out of the whole value; coded pages [pages,K,T,D] are blocks of bytes. */
static void slice(const lm_tensor *whole, const lm_placement *p, const lm_mesh *mesh, char *part)
{
    const lm_kv_format *coded = whole->kv;
    size_t inner =
        coded ? lm_kv_page_bytes(coded, whole->dim[2], whole->dim[3]) : lm_dtype_size(whole->dtype);
    int64_t outer = 1, len = whole->dim[p->at];
    for (int d = 0; d < whole->ndim; d++)
        if (d < p->at)
            outer *= whole->dim[d];
        else if (d > p->at && !coded)
            inner *= (size_t)whole->dim[d];
    for (int64_t o = 0; o < outer; o++) {
        lm_range r;
        for (int64_t k = 0;
             lm_portions_at(&p->pieces, len, mesh->size[LM_AXIS_TP], mesh->rank[LM_AXIS_TP], k, &r);
             k++) {
            size_t bytes = (size_t)r.count * inner;
            memcpy(part, (const char *)whole->data + (size_t)(o * len + r.from) * inner, bytes);
            part += bytes;
        }
    }
}

/* Addends of a value: random ones, and on rank 0 what is left. */
static void addend(const lm_tensor *whole, const lm_mesh *mesh, bool zeros, char *part)
{
    int ranks = mesh->size[LM_AXIS_TP], mine = mesh->rank[LM_AXIS_TP];
    for (int64_t i = 0; i < lm_tensor_count(whole); i++) {
        double left = lm_get(whole->dtype, whole->data, i), x = 0;
        for (int r = 1; r < ranks && !zeros; r++) {
            double one = lm_rng_normal(lm_rng_make(2, "addends", (uint64_t)r), (uint64_t)i);
            left -= one;
            x = r == mine ? one : x;
        }
        lm_set(whole->dtype, part, i, mine ? x : left);
    }
}

/* The same of what several ranks hold: random addends, and what is left on the first of them. */
static void addend_of_shared(const lm_tensor *whole, const lm_placement *p, const lm_mesh *mesh,
                             char *mine)
{
    int ranks = mesh->size[LM_AXIS_TP], me = mesh->rank[LM_AXIS_TP];
    int64_t inner = 1, len = whole->dim[p->at];
    for (int d = p->at + 1; d < whole->ndim; d++)
        inner *= whole->dim[d];
    for (int64_t i = 0; i < lm_tensor_count(whole); i++) {
        double left = lm_get(whole->dtype, whole->data, i), x = 0;
        bool first = true, is_first = false;
        for (int r = 0; r < ranks; r++) {
            lm_range h;
            bool holds = false;
            for (int64_t k = 0; lm_portions_at(&p->pieces, len, ranks, r, k, &h); k++)
                holds |= i / inner % len >= h.from && i / inner % len < h.from + h.count;
            double one = lm_rng_normal(lm_rng_make(2, "addends", (uint64_t)r), (uint64_t)i);
            if (holds && first)
                is_first = r == me;
            else if (holds)
                left -= one, x = r == me ? one : x;
            first = first && !holds;
        }
        lm_set(whole->dtype, mine, i, is_first ? left : x);
    }
}

/* The operand of this rank in a placement: a value of its graph, with its numbers. */
static lm_code put(rank *k, lm_role role, const lm_tensor *whole, const lm_placement *p, bool zeros,
                   lm_vid *out, lm_err *e)
{
    lm_tensor part = lm_placement_part(p, LM_AXIS_TP, &k->mesh, whole);
    if (lm_graph_value(k->g, role, part, NULL, out, e))
        return e->code;
    char *data = take(lm_stored_bytes(&part));
    k->mem[*out] = data;
    if (p->share == LM_SPLIT && p->sum) {
        lm_tensor mine = *whole;
        mine.data = take(lm_stored_bytes(whole));
        addend_of_shared(whole, p, &k->mesh, mine.data);
        slice(&mine, p, &k->mesh, data);
        lm_free(mine.data);
    } else if (p->share == LM_SPLIT) {
        slice(whole, p, &k->mesh, data);
    } else if (p->share == LM_PARTIAL) {
        addend(whole, &k->mesh, zeros, data);
    } else {
        memcpy(data, whole->data, lm_stored_bytes(whole));
    }
    return LM_OK;
}

static lm_code build(rank *k, lm_vid *gathered, lm_err *e)
{
    const work *w = k->w;
    const lm_placement replicated = { .share = LM_REPLICATED };
    lm_vid in[LM_MAX_IN], out[LM_MAX_OUT];
    for (int i = 0; i < w->n->n_in; i++) {
        bool absent = w->left_out && w->form->in[i].share == LM_PARTIAL && k->mesh.rank[LM_AXIS_TP];
        unsigned both = LM_ADDEND | LM_OPTIONAL;
        bool once = (w->n->op->in[i].is & both) == both;
        in[i] = LM_NONE;
        if (w->n->in[i] >= 0 && !(absent && once) &&
            put(k, LM_ROLE_INPUT, &w->want->in[i], &w->form->in[i], w->left_out && once, &in[i], e))
            return e->code;
    }
    for (int i = 0; i < w->n->n_out; i++) {
        lm_tensor whole = w->want->out[i];
        whole.data = w->before[i];
        out[i] = LM_NONE;
        if (w->n->out[i] >= 0 && put(k, LM_ROLE_STATE, &whole, &w->form->out[i], true, &out[i], e))
            return e->code;
    }
    if (lm_split_form_append(w->t->g, w->n, w->form, LM_AXIS_TP, &k->mesh, k->g, in, out, e))
        return e->code;
    for (int i = 0; i < w->n->n_out; i++) {
        gathered[i] = out[i];
        if (w->n->out[i] < 0 || w->form->out[i].share == LM_REPLICATED || w->want->out[i].kv)
            continue;
        if (lm_exchange_append(k->g, LM_AXIS_TP, &k->mesh, out[i], &w->want->out[i],
                               &w->form->out[i], &replicated, &gathered[i], e))
            return e->code;
    }
    for (size_t v = 0; v < k->g->n_values; v++)
        if (!k->mem[v])
            k->mem[v] = take(bytes_of(&k->g->value[v].t));
    return LM_OK;
}

static void run_local(rank *k, const lm_step *step)
{
    for (size_t n = 0; n < k->g->n_nodes; n++) {
        lm_tensor in[LM_MAX_IN], out[LM_MAX_OUT];
        const lm_node *node = &k->g->node[n];
        lm_call c = lm_node_call(k->g, node, in, out);
        for (int i = 0; i < c.n_in; i++)
            in[i].data = node->in[i] >= 0 ? k->mem[node->in[i]] : NULL;
        for (int i = 0; i < c.n_out; i++)
            out[i].data = node->out[i] >= 0 ? k->mem[node->out[i]] : NULL;
        c.step = step;
        const lm_kernel *kernel = lm_cpu_kernel(node->op->name, LM_DTYPE_F64, LM_CPU_REF);
        size_t bytes = kernel->work ? kernel->work(&c, 1) : 0;
        c.work = take(bytes);
        kernel->run(&c);
        lm_free(c.work);
    }
}

/* Addends are rounded to the types of the operands. */
static double tolerance(const work *w)
{
    double most = 1e-8;
    for (int i = 0; i < w->n->n_in + w->n->n_out; i++) {
        bool in = i < w->n->n_in;
        lm_dtype d = in ? w->want->in[i].dtype : w->want->out[i - w->n->n_in].dtype;
        if (lm_dtype_is_float(d))
            most = fmax(most, d == LM_DTYPE_F64 ? 0 : d == LM_DTYPE_F32 ? 1e-5 : 3e-2);
    }
    return most;
}

/* Codes are compared where they are. */
static bool has_codes(const rank *k, const lm_tensor *want, const lm_placement *p, const char *got)
{
    const lm_tensor part = lm_placement_part(p, LM_AXIS_TP, &k->mesh, want);
    const size_t bytes = lm_stored_bytes(&part);
    char *mine = take(bytes);
    if (p->share == LM_SPLIT)
        slice(want, p, &k->mesh, mine);
    else
        memcpy(mine, want->data, bytes);
    const bool same = !memcmp(mine, got, bytes);
    lm_free(mine);
    return same;
}

static lm_code compare(const rank *k, const lm_vid *gathered, lm_err *e)
{
    for (int i = 0; i < k->w->n->n_out; i++) {
        if (k->w->n->out[i] < 0)
            continue;
        lm_tensor got = k->w->want->out[i];
        got.data = k->mem[gathered[i]];
        if (got.kv) {
            if (!has_codes(k, &k->w->want->out[i], &k->w->form->out[i], got.data))
                return lm_fail(e, LM_EBUG, k->w->n->op->out[i].name, NULL, "other codes");
            continue;
        }
        double d = distance(&got, &k->w->want->out[i], 1e-2);
        if (!(d <= tolerance(k->w)))
            return lm_fail(e, LM_EBUG, k->w->n->op->out[i].name, NULL, "relative error %.3g", d);
    }
    return LM_OK;
}

/* Blocks of these travel around the ranks. */
static bool is_of_ring(const work *w)
{
    const char around = w->n->op->around;
    return around && w->form->letters == 1U << (around - 'A');
}

static lm_code run_rank(void *ctx, lm_comm *c, lm_err *e)
{
    rank k = { .w = ctx, .mesh = lm_mesh_alone };
    lm_vid gathered[LM_MAX_OUT];
    lm_links links = lm_comm_links(c), *by_axis[LM_AXES] = { [LM_AXIS_TP] = &links };
    lm_step step = k.w->t->step;
    lm_ring *ring = NULL;
    step.links = by_axis;
    k.mesh.size[LM_AXIS_TP] = lm_comm_size(c);
    k.mesh.rank[LM_AXIS_TP] = lm_comm_rank(c);
    if (lm_graph_new(&k.g, e) || (is_of_ring(k.w) && lm_ring_new(c, &ring, e)))
        return e->code;
    if (ring)
        lm_ring_join(ring, &links);
    if (!build(&k, gathered, e)) {
        run_local(&k, &step);
        if (links.failure.code)
            *e = links.failure;
        else
            compare(&k, gathered, e);
    }
    if (e->code)
        lm_comm_abort(c, e);
    lm_ring_free(ring);
    for (size_t v = 0; v < MOST_VALUES; v++)
        lm_free(k.mem[v]);
    lm_graph_free(k.g);
    return e->code;
}

static void note_form(const lm_op *op, const lm_split_form *f)
{
    int number = 0;
    for (const char *p = op->split; f->word && p < f->word; p++)
        number += *p == ' ';
    for (int j = 0; lm_op_at(j); j++)
        if (lm_op_at(j) == op) {
            met[j][number] |= f->word != NULL;
            met_form[j] |= f->code != NULL;
        }
}

/* Rows that the data sort to ranks are not random numbers: trainings test these forms (test_train_rows.c). */
static bool is_of_experts(const lm_split_form *f)
{
    return f->code && strpbrk(f->code, "se");
}

/* Ways to pack a dimension: one third of it, and what is left. */
static void draw_packed(const lm_node *n, const operands *o, lm_placement *have)
{
    for (int i = 0; i < n->n_in + n->n_out; i++) {
        const lm_tensor *t = i < n->n_in ? &o->in[i] : &o->out[i - n->n_in];
        have[i] = (lm_placement){ .share = LM_REPLICATED };
        int d = t->ndim - 1;
        if (d < 0 || t->dim[d] < 3)
            continue;
        int64_t third = t->dim[d] / 3;
        have[i] = (lm_placement){ .share = LM_SPLIT, .at = d };
        have[i].pieces =
            (lm_portions){ .n = 2, .run = { { 1, third, 1 }, { 1, t->dim[d] - third, 1 } } };
    }
}

/* Parts from both ends of the first dimension, or of the rows of each of two sequences. */
static void draw_ends(const lm_node *n, const operands *o, int ranks, lm_placement *have)
{
    for (int i = 0; i < n->n_in + n->n_out; i++) {
        const lm_tensor *t = i < n->n_in ? &o->in[i] : &o->out[i - n->n_in];
        const int64_t len = t->ndim ? t->dim[0] : 0, twice = len % (4 * ranks) == 0 ? 2 : 1;
        have[i] = (lm_placement){ .share = LM_REPLICATED };
        if (len == 0 || len % (2 * ranks))
            continue;
        have[i].share = LM_SPLIT;
        have[i].pieces =
            (lm_portions){ .n = 1, .run = { { twice, len / twice, 1 } }, .ends = true };
    }
}

static void check_forms(work *w, int ranks, bool ends)
{
    lm_split_form form[LM_SPLIT_FORMS];
    lm_placement have[LM_MAX_IN + LM_MAX_OUT];
    if (ends)
        draw_ends(w->n, w->want, ranks, have);
    else
        draw_packed(w->n, w->want, have);
    int n_forms = lm_split_forms(w->t->g, w->n, ranks, have, form);
    for (int f = 1; f < n_forms; f++) {
        lm_err e = { 0 };
        w->form = &form[f];
        note_form(w->n->op, &form[f]);
        met_ends |= form[f].ends && is_of_ring(w);
        if (is_of_experts(&form[f]))
            continue;
        if (lm_threads_run(ranks, 60, run_rank, w, &e))
            fail_msg("%s (example %d of %s), %d ranks, form %d (%.3s): %s: %s", w->n->op->name,
                     w->t->example, w->t->op->name, ranks, f, form[f].word ? form[f].word : "-",
                     e.where, e.what);
    }
}

static void check_node(trial *t, const lm_node *n)
{
    operands o;
    work w = { .t = t, .n = n, .want = &o, .left_out = t->example % 2 };
    bind(t, n, &o);
    for (int i = 0; i < n->n_out; i++)
        w.before[i] = copy_as(&o.out[i], o.out[i].dtype).data;
    run_kernel(lm_cpu_kernel(n->op->name, LM_DTYPE_F64, LM_CPU_REF), &o, 1);
    for (int ranks = 2; ranks <= MOST_RANKS; ranks += 2)
        for (int ends = 0; ends < 2; ends++)
            check_forms(&w, ranks, ends);
    for (int i = 0; i < n->n_out; i++)
        lm_free(w.before[i]);
}

static void test_forms(void **state)
{
    const lm_op *op;
    (void)state;
    for (int j = 0; (op = lm_op_at(j)); j++)
        for (int i = 0; op->example && (op->grad || *op->split || op->form) && i < EXAMPLES; i++) {
            trial t;
            open_trial(&t, op, i, LM_DTYPE_F64);
            t.step.more = i % 2;
            for (size_t k = 0; k < t.g->n_nodes; k++)
                check_node(&t, &t.g->node[k]);
            close_trial(&t);
        }
}

static void test_all_words(void **state)
{
    const lm_op *op;
    int replicated = 0;
    (void)state;
    for (int j = 0; (op = lm_op_at(j)); j++) {
        assert_true(j < MOST_OPS);
        if (!op->split)
            fail_msg("operator %s: say in `split` along which letters, or \"\"", op->name);
        replicated += !*op->split && !op->form;
        if (op->form && !met_form[j])
            fail_msg("operator %s was never split in its own form: give it an example", op->name);
        int number = 0;
        for (const char *w = op->split; *w; number++) {
            assert_true(number < WORDS);
            if (!met[j][number])
                fail_msg("operator %s was never split along %s: give it an example", op->name, w);
            w += strcspn(w, " ");
            w += strspn(w, " ");
        }
    }
    assert_true(met_ends);
    print_message("%d operators are replicated only\n", replicated);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forms),
        cmocka_unit_test(test_all_words),
    };
    return cmocka_run_group_tests_name("op_split", tests, NULL, NULL);
}
