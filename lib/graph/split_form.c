/* SPDX-License-Identifier: Apache-2.0 */
/* split_form.c -- the forms in which a node can be split over ranks, from the letters of its operator. */
#include <string.h>

#include "graph/passes.h"
#include "graph/shard.h"

/* What is known of a node while its forms are made. */
typedef struct {
    const lm_graph *g;
    const lm_node *n;
    int ranks;
    const lm_placement *have;
    int64_t size[LM_LETTERS];
    lm_tensor in[LM_MAX_IN], out[LM_MAX_OUT];
    lm_call call;
    lm_split_form *form;
    int n_forms;
} maker;

static const lm_operand *operand(const maker *m, int i)
{
    return i < m->n->n_in ? &m->n->op->in[i] : &m->n->op->out[i - m->n->n_in];
}

static const lm_tensor *shape(const maker *m, int i)
{
    return i < m->n->n_in ? &m->in[i] : &m->out[i - m->n->n_in];
}

static lm_placement *placement(lm_split_form *f, const lm_node *n, int i)
{
    return i < n->n_in ? &f->in[i] : &f->out[i - n->n_in];
}

static bool is_any(const lm_operand *o)
{
    return o->dims[0] == '*' || o->dims[0] == '~';
}

/* The shape of the operands of any shape. */
static const lm_tensor *any_shape(const maker *m)
{
    for (int i = 0; i < m->n->n_in + m->n->n_out; i++)
        if (operand(m, i)->dims[0] == '*' && !lm_absent(shape(m, i)))
            return shape(m, i);
    return NULL;
}

/* Numbers in an order of their own are never split here, */
static bool is_plain(const lm_tensor *t)
{
    return !t->panels && !t->codes && !t->kv;
}

/* but pages of coded caches [pages,K,T,D] are, by heads: each head's is a block of bytes. */
static bool can_split(const lm_tensor *t, int d)
{
    return is_plain(t) || (t->kv && d == 1);
}

static lm_split_form *add_form(maker *m, const lm_split_form *f)
{
    if (m->n_forms == LM_SPLIT_FORMS)
        return NULL;
    m->form[m->n_forms] = *f;
    return &m->form[m->n_forms++];
}

/* Whether ranks may hold more or less than each other one, and the same. */
typedef struct {
    bool even, shared;
} terms;

/* Rows that each rank has by what the data say (LM_SORTED), or has made of its part of others (LM_OWN). */
static bool sort_dim(lm_placement *p, const lm_tensor *t, int d, lm_share as,
                     const lm_portions *pieces)
{
    if (p->share != LM_REPLICATED || !is_plain(t) ||
        (as == LM_OWN && (!pieces->n || !lm_portions_fit(pieces, t->dim[d]))))
        return false;
    *p = (lm_placement){ .share = as, .at = d };
    if (as == LM_OWN)
        p->pieces = *pieces;
    return true;
}

/* Split dimension d of an operand; false: it is split already, or ranks have nothing of it. */
static bool split_dim(const maker *m, lm_placement *p, const lm_operand *o, const lm_tensor *t,
                      int d, const lm_portions *pieces, terms x)
{
    static const lm_portions whole;
    if (p->share == LM_SPLIT || !can_split(t, d) || !lm_portions_fit(pieces, t->dim[d]) ||
        !lm_portions_serve(pieces, t->dim[d], m->ranks, x.even, x.shared))
        return false;
    *p = (lm_placement){ .share = LM_SPLIT, .at = d };
    if (!lm_portions_same(pieces, &whole, t->dim[d], m->ranks))
        p->pieces = *pieces;
    p->sum = (o->is & LM_GRADIENT) && lm_portions_shared(pieces, m->ranks);
    return true;
}

static bool is_shared(const maker *m, const lm_split_form *f, int i)
{
    const lm_placement *p = placement((lm_split_form *)(uintptr_t)f, m->n, i);
    return p->share == LM_SPLIT && lm_portions_shared(&p->pieces, m->ranks);
}

/* Add a form, and where ranks hold the same of linear operands, one in which these are addends. */
static void add_linear_too(maker *m, const lm_split_form *f)
{
    lm_split_form sums = *f;
    bool linear = false;
    add_form(m, f);
    for (int i = 0; i < m->n->n_in; i++)
        linear |= (operand(m, i)->is & LM_LINEAR) && is_shared(m, f, i);
    for (int i = 0; linear && i < m->n->n_in + m->n->n_out; i++)
        if (is_shared(m, f, i) && (i >= m->n->n_in || (operand(m, i)->is & LM_LINEAR)))
            placement(&sums, m->n, i)->sum = true;
    if (linear)
        add_form(m, &sums);
}

/* ---- words of letters ---- */

static bool is_single(unsigned letters)
{
    return (letters & (letters - 1)) == 0;
}

/* The placement of one operand when the letters are split; false: it cannot be split so. */
static bool place_operand(const maker *m, lm_split_form *f, int i, bool summed)
{
    const lm_operand *o = operand(m, i);
    const lm_tensor *t = shape(m, i);
    lm_placement *p = placement(f, m->n, i);
    bool output = i >= m->n->n_in;
    for (int d = 0; !is_any(o) && d < t->ndim; d++) {
        bool held, even = !is_single(f->letters);
        lm_portions pieces;
        if (!lm_dim_pieces(o->dims, d, f->letters, m->size, &held, &pieces))
            return false;
        bool alone = lm_dim_letter(o->dims, d) != 0;
        if (held && !alone &&
            f->pieces.n) /* packed in one operand, and part of a product in another */
            return false;
        if (held && !even && alone)
            pieces = f->pieces;
        if (held && f->ends) {
            pieces = alone ? (lm_portions){ .n = 1, .run = { { 1, t->dim[d], 1 } } } : pieces;
            pieces.ends = true;
        }
        if (held && f->as) {
            if (!alone || !sort_dim(p, t, d, f->as, &f->pieces))
                return false;
            continue;
        }
        if (held && !split_dim(m, p, o, t, d, &pieces, (terms){ even, even || f->pieces.n > 0 }))
            return false;
    }
    if (summed && p->share == LM_REPLICATED && (output || (o->is & LM_ADDEND)))
        p->share = LM_PARTIAL;
    if (p->share == LM_PARTIAL && !output && !lm_dtype_is_float(t->dtype))
        p->share = LM_REPLICATED; /* ids of what is added */
    return p->share != LM_PARTIAL || (lm_dtype_is_float(t->dtype) && is_plain(t));
}

/* Sums over what several ranks hold are right if one of the factors is an addend. */
static bool counts_twice(const maker *m, const lm_split_form *f)
{
    bool shared = false, sum = false;
    for (int i = 0; i < m->n->n_in; i++)
        if (!lm_absent(shape(m, i))) {
            shared |= is_shared(m, f, i);
            sum |= f->in[i].sum;
        }
    return shared && !sum;
}

/* Gradients that are made of others are addends if one of those is; without others, the call itself makes them so. */
static void carry_sums(const maker *m, lm_split_form *f)
{
    bool made = false, sum = false;
    for (int i = 0; i < m->n->n_in; i++) {
        made |= !lm_absent(shape(m, i)) && (operand(m, i)->is & LM_GRADIENT);
        sum |= f->in[i].sum;
    }
    for (int i = 0; made && !sum && i < m->n->n_out; i++)
        f->out[i].sum = false;
}

static void add_letters(maker *m, const lm_split_form *word, bool summed)
{
    lm_split_form f = *word;
    bool splits = false;
    for (int i = 0; i < m->n->n_in + m->n->n_out; i++) {
        if (lm_absent(shape(m, i)))
            continue;
        if (!place_operand(m, &f, i, summed))
            return;
        splits |= placement(&f, m->n, i)->share == LM_SPLIT || f.as;
    }
    carry_sums(m, &f);
    if (splits && (!summed || !counts_twice(m, &f)))
        add_linear_too(m, &f);
}

/* A form for each way in which one of the operands packs the dimension d that is the letter alone. */
static void add_packed(maker *m, const lm_split_form *word, bool summed, int i, int d)
{
    const lm_placement *have = &m->have[i];
    int64_t len = shape(m, i)->dim[d];
    if (have->share != LM_SPLIT || have->at != d || !have->pieces.n)
        return;
    for (int k = 0; k < m->n_forms; k++)
        if (m->form[k].word == word->word &&
            lm_portions_same(&m->form[k].pieces, &have->pieces, len, m->ranks))
            return;
    lm_split_form f = *word;
    f.pieces = have->pieces;
    add_letters(m, &f, summed);
}

static bool is_sorted(const lm_placement *p, int d)
{
    return (p->share == LM_SORTED || p->share == LM_OWN) && p->at == d;
}

/* The form in which the letter's dimensions are sorted, as operand i is. */
static void add_sorted(maker *m, const lm_split_form *word, int i, int d)
{
    lm_split_form f = *word;
    f.as = m->have[i].share;
    f.pieces = m->have[i].pieces;
    if (is_sorted(&m->have[i], d))
        add_letters(m, &f, false);
}

/* True if an operand has the letters in a dimension of which it has parts from both ends. */
static bool has_ends(const maker *m, unsigned letters, int i)
{
    const lm_placement *have = &m->have[i];
    lm_portions pieces;
    bool held = false;
    return have->share == LM_SPLIT && have->pieces.ends && !is_any(operand(m, i)) &&
           lm_dim_pieces(operand(m, i)->dims, have->at, letters, m->size, &held, &pieces) && held;
}

/* The form in which parts along a letter are from both ends, if those of an operand are. */
static void add_ends(maker *m, const lm_split_form *word, bool summed)
{
    const lm_op *op = m->n->op;
    const char letter = word->word[0];
    lm_split_form f = *word;
    if ((op->ranges && strchr(op->ranges, letter) && op->around != letter) ||
        (op->splits && !op->splits(&m->call, (char)(letter - 'A' + 'a'))))
        return;
    for (int i = 0; i < m->n->n_in + m->n->n_out; i++)
        f.ends |= has_ends(m, f.letters, i);
    if (f.ends)
        add_letters(m, &f, summed);
}

/* Heads of ranks are as many; of those behind the first letter, several ranks may hold one. */
static bool divides(int64_t size, int ranks, bool shared)
{
    return size % ranks == 0 || (shared && size > 0 && ranks % size == 0);
}

static void add_word(maker *m, const char *word, size_t n)
{
    lm_split_form f = { .word = word };
    bool summed = word[n - 1] == '+';
    for (size_t i = 0; i < n - summed; i++) {
        f.letters |= 1U << (word[i] - 'A');
        const bool even = n - summed > 1 || word[i] == m->n->op->around;
        if ((m->n->op->splits && !m->n->op->splits(&m->call, word[i])) ||
            (even && !divides(m->size[word[i] - 'A'], m->ranks, i > 0)))
            return;
    }
    add_letters(m, &f, summed);
    if (!m->have || !is_single(f.letters))
        return;
    add_ends(m, &f, summed);
    for (int i = 0; i < m->n->n_in + m->n->n_out; i++)
        for (int d = 0; d < shape(m, i)->ndim && !is_any(operand(m, i)); d++) {
            char letter = lm_dim_letter(operand(m, i)->dims, d);
            if (!letter || f.letters != 1U << (letter - 'A'))
                continue;
            if (!m->n->op->ranges || !strchr(m->n->op->ranges, letter))
                add_packed(m, &f, summed, i, d);
            if (!summed)
                add_sorted(m, &f, i, d);
        }
}

/* ---- operands of any shape ---- */

/* Whether t is split with `any` along d: their shapes are the same, or may differ elsewhere. */
static bool is_like(const maker *m, const lm_tensor *t, const lm_tensor *any, int d)
{
    return lm_same_shape(t, any) ||
           (m->n->op->splits && t->ndim == any->ndim && t->dim[d] == any->dim[d]);
}

/* Whether an input has one number along d, which all indices of `any` read. */
static bool is_repeated(const maker *m, int i, const lm_tensor *any, int d)
{
    const lm_tensor *t = shape(m, i);
    return i < m->n->n_in && operand(m, i)->dims[0] == '~' && t->ndim == any->ndim &&
           t->dim[d] == 1 && any->dim[d] > 1;
}

static void add_any_dim(maker *m, const char *word, bool summed, const lm_tensor *any, int d,
                        const lm_portions *pieces, lm_share as)
{
    lm_split_form f = { .word = word, .pieces = *pieces, .as = as };
    for (int i = 0; i < m->n->n_in + m->n->n_out; i++) {
        const lm_tensor *t = shape(m, i);
        lm_placement *p = placement(&f, m->n, i);
        if (lm_absent(t))
            continue;
        if (is_any(operand(m, i)) && is_like(m, t, any, d)) {
            if (as ? !sort_dim(p, t, d, as, pieces)
                   : !split_dim(m, p, operand(m, i), t, d, pieces, (terms){ false, pieces->n > 0 }))
                return;
        } else if (is_repeated(m, i, any, d)) {
            continue;
        } else if (is_any(operand(m, i)) && lm_tensor_count(t) > 1) {
            return;
        } else if (summed && (i >= m->n->n_in || (operand(m, i)->is & LM_ADDEND))) {
            p->share = LM_PARTIAL;
        }
    }
    if (!summed || !counts_twice(m, &f))
        add_linear_too(m, &f);
}

/* True for operators that have to know where parts of a dimension of "*" are. */
static bool has_origin(const lm_op *op)
{
    return op->ranges && *op->ranges == '*';
}

static void add_any(maker *m, const char *word, size_t n)
{
    static const lm_portions whole;
    const int runs = has_origin(m->n->op) ? 1 : LM_PORTIONS_RUNS;
    const lm_tensor *any = any_shape(m);
    bool summed = word[n - 1] == '+';
    for (int d = 0; any && d < any->ndim; d++) {
        if (m->n->op->splits && !m->n->op->splits(&m->call, (char)('0' + d)))
            continue;
        add_any_dim(m, word, summed, any, d, &whole, LM_REPLICATED);
        for (int i = 0; m->have && i < m->n->n_in + m->n->n_out; i++) {
            const lm_placement *have = &m->have[i];
            const lm_portions *last = m->n_forms ? &m->form[m->n_forms - 1].pieces : &whole;
            if (have->share == LM_SPLIT && have->at == d && have->pieces.n &&
                have->pieces.n <= runs && shape(m, i)->ndim == any->ndim &&
                is_like(m, shape(m, i), any, d) &&
                !lm_portions_same(last, &have->pieces, any->dim[d], m->ranks))
                add_any_dim(m, word, summed, any, d, &have->pieces, LM_REPLICATED);
            if (!summed && is_sorted(have, d) && !has_origin(m->n->op))
                add_any_dim(m, word, false, any, d, &have->pieces, have->share);
        }
    }
}

/* ---- forms of the operator's own ---- */

/* The experts of a call; 0: it has none. */
static int64_t experts_of(const lm_node *n, const lm_tensor *in)
{
    for (int i = 0; i < n->n_in; i++)
        if (!lm_absent(&in[i]) && !strcmp(n->op->in[i].name, "offsets"))
            return in[i].dim[0] - 1;
    return 0;
}

/* The length of the dimensions that a form splits in tokens; 0: it splits none. */
static int64_t tokens_of(const maker *m, const char *code)
{
    for (int i = 0; i < m->n->n_in + m->n->n_out; i++)
        if (code[i] == '0' && !lm_absent(shape(m, i)))
            return shape(m, i)->dim[0];
    return 0;
}

/* The pieces of a dimension of `len` elements, as many for each token; tokens 0: those that are given. */
static lm_portions times(const lm_portions *p, int64_t len, int64_t tokens)
{
    lm_portions all = *p;
    const int64_t each = tokens ? len / tokens : 1;
    if (tokens && !p->n)
        return (lm_portions){ .n = 1, .run = { { 1, len, each } } };
    for (int i = 0; i < all.n; i++) {
        all.run[i].size *= each;
        all.run[i].unit *= each;
    }
    return all;
}

/* The placement of operand i by the character of a form; false: it cannot be split so. */
static bool place_by_code(const maker *m, lm_split_form *f, int i)
{
    const lm_tensor *t = shape(m, i);
    lm_placement *p = placement(f, m->n, i);
    const char code = f->code[i];
    const int64_t experts = experts_of(m->n, m->in);
    switch (code) {
    case '-':
        return true;
    case '+':
        p->share = LM_PARTIAL;
        return lm_dtype_is_float(t->dtype) && is_plain(t);
    case 's':
        return sort_dim(p, t, 0, LM_SORTED, NULL);
    case 'o': {
        const lm_portions own = times(&f->pieces, t->dim[0], tokens_of(m, f->code));
        return sort_dim(p, t, 0, LM_OWN, &own);
    }
    case 'e': {
        const lm_portions each = { .n = 1, .run = { { 1, t->dim[0], t->dim[0] / experts } } };
        return split_dim(m, p, operand(m, i), t, 0, &each, (terms){ false, false });
    }
    default:
        return split_dim(m, p, operand(m, i), t, code - '0', &f->pieces,
                         (terms){ false, f->pieces.n > 0 });
    }
}

static void add_code(maker *m, const char *code, const lm_portions *pieces)
{
    lm_split_form f = { .code = code, .pieces = *pieces };
    if (m->n->op->form_fits && !m->n->op->form_fits(&m->call, pieces, m->ranks))
        return;
    for (int i = 0; i < m->n->n_in + m->n->n_out; i++)
        if (!lm_absent(shape(m, i)) && !place_by_code(m, &f, i))
            return;
    add_form(m, &f);
}

static void add_codes(maker *m)
{
    static const lm_portions whole;
    const char *code;
    for (int k = 0; m->n->op->form && (code = m->n->op->form(&m->call, k)); k++) {
        const bool own = strchr(code, 'o') != NULL, tokens = strchr(code, '0') != NULL,
                   sorts = !own && strpbrk(code, "se");
        const int first = m->n_forms;
        if (!own || tokens)
            add_code(m, code, &whole);
        for (int i = 0; m->have && !sorts && i < m->n->n_in + m->n->n_out; i++) {
            const lm_placement *have = &m->have[i];
            const bool split = have->share == LM_SPLIT && code[i] == '0' + have->at,
                       made = !tokens && have->share == LM_OWN && code[i] == 'o';
            bool known = (!split && !made) || !have->pieces.n;
            for (int f = first; !known && f < m->n_forms; f++)
                known = lm_portions_same(&m->form[f].pieces, &have->pieces,
                                         shape(m, i)->dim[have->at], m->ranks);
            if (!known)
                add_code(m, code, &have->pieces);
        }
    }
}

/* ---- addends ---- */

/* The form in which linear operands are addends, and with them the outputs. */
static void add_linear(maker *m)
{
    lm_split_form f = { 0 };
    bool any = false;
    for (int i = 0; i < m->n->n_in + m->n->n_out; i++) {
        if (lm_absent(shape(m, i)))
            continue;
        if (i < m->n->n_in && !(operand(m, i)->is & LM_LINEAR))
            continue;
        placement(&f, m->n, i)->share = LM_PARTIAL;
        any |= i < m->n->n_in;
        if (!lm_dtype_is_float(shape(m, i)->dtype) || !is_plain(shape(m, i)))
            return;
    }
    if (any)
        add_form(m, &f);
}

int lm_split_forms(const lm_graph *g, const lm_node *n, int ranks, const lm_placement *have,
                   lm_split_form form[LM_SPLIT_FORMS])
{
    maker m = { .g = g, .n = n, .ranks = ranks, .have = have, .form = form };
    lm_err ignored = { 0 };
    m.call = lm_node_call(g, n, m.in, m.out);
    lm_split_form replicated = { 0 };
    add_form(&m, &replicated);
    add_linear(&m);
    add_codes(&m);
    if (!n->op->split || lm_op_letters(n->op, &m.call, m.size, &ignored))
        return m.n_forms;
    for (const char *w = n->op->split; *w;) {
        size_t length = strcspn(w, " ");
        if (*w == '*')
            add_any(&m, w, length);
        else
            add_word(&m, w, length);
        w += length + strspn(w + length, " ");
    }
    return m.n_forms;
}

/* ---- the local call ---- */

lm_tensor lm_placement_part(const lm_placement *p, lm_axis axis, const lm_mesh *mesh,
                            const lm_tensor *whole)
{
    lm_layout l = { 0 };
    lm_tensor part;
    l.axis[axis] = *p;
    lm_layout_part(&l, mesh, whole, &part, NULL);
    return part;
}

/* Attributes that are sizes of split letters become those of this rank. */
static void set_sizes(const lm_op *op, const lm_split_form *f, const int64_t size[LM_LETTERS],
                      int ranks, int rank, char *attr)
{
    for (const lm_field *field = op->fields; f->letters && field && field->name; field++) {
        int64_t *at = (int64_t *)(void *)(attr + field->at);
        if (!field->letter || !(f->letters >> (field->letter - 'A') & 1) || *at == 0)
            continue;
        int64_t whole = size[field->letter - 'A'];
        const lm_portions heads = { .n = 1, .run = { { 1, whole, 1 } } };
        *at = lm_portions_count(is_single(f->letters) ? &f->pieces : &heads, whole, ranks, rank);
    }
}

lm_code lm_shard_append(lm_shard_call *s, lm_err *e)
{
    return lm_graph_append(s->graph, s->op, s->attr, s->in, s->out, e);
}

/* The call of this rank with its operands: by the rule of the operator, if that has one for the word. */
static lm_code append_call(const lm_split_form *f, lm_shard_call *s, const int64_t size[LM_LETTERS],
                           lm_err *e)
{
    if (!s->op->shard || (s->op->form ? !f->code : !f->letters && s->dim < 0))
        return lm_shard_append(s, e);
    for (int i = 0; i < LM_LETTERS; i++)
        if (f->letters == 1U << i)
            lm_portions_at(&f->pieces, size[i], s->ranks, s->rank, 0, &s->range);
    return s->op->shard(s, e);
}

lm_code lm_split_form_append(const lm_graph *g, const lm_node *n, const lm_split_form *f,
                             lm_axis axis, const lm_mesh *mesh, lm_graph *local, const lm_vid *in,
                             lm_vid *out, lm_err *e)
{
    lm_tensor shape_in[LM_MAX_IN], shape_out[LM_MAX_OUT];
    lm_vid mine[LM_MAX_IN];
    int64_t size[LM_LETTERS] = { 0 };
    char *attr = NULL;
    lm_call c = lm_node_call(g, n, shape_in, shape_out);
    if (f->letters && lm_op_letters(n->op, &c, size, e))
        return e->code;
    if (n->op->attr_size) {
        if (lm_arena_alloc(local->arena, &attr, 1, n->op->attr_size, e))
            return e->code;
        memcpy(attr, n->attr, n->op->attr_size);
        set_sizes(n->op, f, size, mesh->size[axis], mesh->rank[axis], attr);
    }
    memcpy(mine, in, (size_t)n->n_in * sizeof *in);
    for (int i = 0; i < n->n_out; i++) {
        if (n->out[i] < 0) {
            out[i] = LM_SKIP;
        } else if (out[i] == LM_NONE) {
            lm_tensor t = lm_placement_part(&f->out[i], axis, mesh, &shape_out[i]);
            if (lm_graph_value(local, LM_ROLE_ACT, t, g->value[n->out[i]].name, &out[i], e))
                return e->code;
        }
    }
    lm_shard_call s = { .graph = local,
                        .op = n->op,
                        .attr = attr,
                        .in = mine,
                        .out = out,
                        .letters = f->letters,
                        .form = f->code,
                        .ends = f->ends,
                        .pieces = &f->pieces,
                        .dim = -1,
                        .axis = axis,
                        .ranks = mesh->size[axis],
                        .rank = mesh->rank[axis] };
    if (has_origin(n->op) && f->in[0].share == LM_SPLIT) {
        s.dim = f->in[0].at;
        s.length = shape_in[0].dim[s.dim];
    }
    const int64_t experts = f->code ? experts_of(n, shape_in) : 0;
    if (experts)
        lm_portions_at(&f->pieces, experts, s.ranks, s.rank, 0, &s.range);
    return append_call(f, &s, size, e);
}
