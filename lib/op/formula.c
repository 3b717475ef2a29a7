/* SPDX-License-Identifier: Apache-2.0 */
/* formula.c -- from text to a program of `map`: a recursive descent that emits one step an operation, each with
 * a value of its own, then registers for those that are alive at the same time. */
#include "op/formula.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "op/ops.h"

enum { NAMES = 48, WORD = 32, NO_VALUE = -1 };

/* A value while compiling: a single number or the elements that a step makes. */
typedef struct {
    bool single;
    int at; /* number among the singles, or of the step */
} value;

typedef struct {
    char name[WORD];
    value v;
} binding;

typedef struct {
    lm_map_code code;
    value in[3];
    bool single;
} step;

/* What a single number is before steps over them. */
typedef struct {
    enum { A_CONSTANT, A_NUMBER, AN_OPERAND, A_STEP } kind;
    double constant;
    int at;
} single;

typedef struct {
    const lm_formula *f;
    const char *at;
    binding bound[NAMES];
    int n_bound;
    step step[2 * LM_MAP_STEPS];
    int n_steps;
    single single[LM_MAP_SINGLES];
    int n_single;
    lm_err *e;
} compiler;

static value failed(compiler *c, const char *what)
{
    lm_fail(c->e, LM_EBUG, "a formula", NULL, "%s at \"%.40s\" in \"%.120s\"", what, c->at,
            c->f->text);
    return (value){ true, 0 };
}

/* ---- values ---- */

static value new_single(compiler *c, single s)
{
    for (int i = 0; s.kind != A_STEP && i < c->n_single; i++)
        if (c->single[i].kind == s.kind && c->single[i].at == s.at &&
            c->single[i].constant == s.constant)
            return (value){ true, i };
    if (c->n_single == LM_MAP_SINGLES)
        return failed(c, "too many numbers");
    c->single[c->n_single] = s;
    return (value){ true, c->n_single++ };
}

static value constant(compiler *c, double x)
{
    return new_single(c, (single){ A_CONSTANT, x, 0 });
}

static value emit(compiler *c, lm_map_code code, value a, value b, value d)
{
    bool all = code != LM_MAP_LOAD && a.single && b.single && d.single;
    if (c->n_steps == 2 * LM_MAP_STEPS)
        return failed(c, "too many steps");
    c->step[c->n_steps] = (step){ code, { a, b, d }, all };
    value made = { false, c->n_steps };
    if (all)
        made = new_single(c, (single){ A_STEP, 0, c->n_steps });
    c->n_steps++;
    return made;
}

static value binary(compiler *c, lm_map_code code, value a, value b)
{
    return emit(c, code, a, b, b);
}

static void bind(compiler *c, const char *name, value v)
{
    int i = 0;
    while (i < c->n_bound && strcmp(c->bound[i].name, name))
        i++;
    if (i == NAMES) {
        failed(c, "too many names");
        return;
    }
    c->n_bound += i == c->n_bound;
    snprintf(c->bound[i].name, WORD, "%s", name);
    c->bound[i].v = v;
}

static value operand_value(compiler *c, const lm_formula_operand *o)
{
    if (lm_tensor_count(o->shape) == 1)
        return new_single(c, (single){ AN_OPERAND, 0, o->x });
    value x = { true, o->x }; /* of a load: the operand's number */
    return emit(c, LM_MAP_LOAD, x, x, x);
}

static value look_up(compiler *c, const char *name)
{
    const lm_formula *f = c->f;
    for (int i = 0; i < c->n_bound; i++)
        if (!strcmp(c->bound[i].name, name))
            return c->bound[i].v;
    for (int i = 0; i < f->n_operands; i++)
        if (!strcmp(f->operand[i].name, name)) {
            value v = operand_value(c, &f->operand[i]);
            bind(c, name, v);
            return v;
        }
    for (int i = 0; i < f->n_numbers; i++)
        if (!strcmp(f->number[i], name))
            return new_single(c, (single){ A_NUMBER, 0, i });
    for (int i = 0; i < f->n_constants; i++)
        if (!strcmp(f->constant[i].name, name))
            return constant(c, f->constant[i].value);
    return failed(c, "an unknown name");
}

/* ---- text ---- */

static void skip_blanks(compiler *c)
{
    c->at += strspn(c->at, " \n");
}

static bool take(compiler *c, char mark)
{
    skip_blanks(c);
    if (*c->at != mark)
        return false;
    c->at++;
    return true;
}

static bool is_letter(char x)
{
    return (x >= 'a' && x <= 'z') || (x >= 'A' && x <= 'Z') || x == '_';
}

static bool take_word(compiler *c, char out[WORD])
{
    size_t n = 0;
    skip_blanks(c);
    while (is_letter(c->at[n]) || (n && c->at[n] >= '0' && c->at[n] <= '9'))
        n++;
    if (!n || n >= WORD)
        return false;
    memcpy(out, c->at, n);
    out[n] = 0;
    c->at += n;
    return true;
}

static value comparison(compiler *c);

/* The arguments of a function, behind its name. */
static void arguments(compiler *c, int n, value out[3])
{
    bool ok = take(c, '(');
    for (int i = 0; ok && i < n; i++) {
        out[i] = comparison(c);
        ok = take(c, i == n - 1 ? ')' : ',');
    }
    if (!ok)
        failed(c, "arguments are missing");
}

static value call(compiler *c, const char *name)
{
    static const struct {
        const char *name;
        lm_map_code code;
        int n;
    } table[] = { { "sqrt", LM_MAP_SQRT, 1 },   { "abs", LM_MAP_ABS, 1 },
                  { "round", LM_MAP_ROUND, 1 }, { "min", LM_MAP_MIN, 2 },
                  { "max", LM_MAP_MAX, 2 },     { "where", LM_MAP_WHERE, 3 } };
    value v[3] = { { true, 0 }, { true, 0 }, { true, 0 } };
    if (!strcmp(name, "sign")) {
        arguments(c, 1, v);
        value zero = constant(c, 0), above = binary(c, LM_MAP_LESS, zero, v[0]);
        return binary(c, LM_MAP_SUB, above, binary(c, LM_MAP_LESS, v[0], zero));
    }
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (!strcmp(table[i].name, name)) {
            arguments(c, table[i].n, v);
            if (table[i].n < 2)
                v[1] = v[0];
            if (table[i].n < 3)
                v[2] = v[1];
            return emit(c, table[i].code, v[0], v[1], v[2]);
        }
    return failed(c, "an unknown function");
}

static value primary(compiler *c)
{
    char word[WORD], *end;
    if (take(c, '(')) {
        value v = comparison(c);
        return take(c, ')') ? v : failed(c, "a bracket is missing");
    }
    if (take(c, '-')) {
        value v = primary(c);
        return emit(c, LM_MAP_NEG, v, v, v);
    }
    if (take_word(c, word))
        return *c->at == '(' ? call(c, word) : look_up(c, word);
    double x = strtod(c->at, &end);
    if (end == c->at)
        return failed(c, "no value");
    c->at = end;
    return constant(c, x);
}

/* By a single number: times its reciprocal, which is made once a call. */
static value quotient(compiler *c, value a, value b)
{
    if (a.single || !b.single)
        return binary(c, LM_MAP_DIV, a, b);
    return binary(c, LM_MAP_MUL, a, binary(c, LM_MAP_DIV, constant(c, 1), b));
}

static value product(compiler *c)
{
    value v = primary(c);
    while (!c->e->code) {
        if (take(c, '*'))
            v = binary(c, LM_MAP_MUL, v, primary(c));
        else if (take(c, '/'))
            v = quotient(c, v, primary(c));
        else
            break;
    }
    return v;
}

static value sum(compiler *c)
{
    value v = product(c);
    while (!c->e->code) {
        if (take(c, '+'))
            v = binary(c, LM_MAP_ADD, v, product(c));
        else if (take(c, '-'))
            v = binary(c, LM_MAP_SUB, v, product(c));
        else
            break;
    }
    return v;
}

static value comparison(compiler *c)
{
    value v = sum(c);
    return take(c, '<') ? binary(c, LM_MAP_LESS, v, sum(c)) : v;
}

static void statements(compiler *c)
{
    char name[WORD];
    for (skip_blanks(c); *c->at && !c->e->code; skip_blanks(c)) {
        if (!take_word(c, name) || !take(c, '=')) {
            failed(c, "no statement");
            return;
        }
        bind(c, name, comparison(c));
        if (!take(c, ';') && *c->at)
            failed(c, "a statement does not end");
    }
}

/* ---- the program ---- */

/* Where single number i of the compiler lies: constants, then what is fetched, then results of steps. */
static void place_singles(const compiler *c, lm_map_program *p, int place[LM_MAP_SINGLES])
{
    int n = 0;
    for (int kind = A_CONSTANT; kind <= A_STEP; kind++)
        for (int i = 0; i < c->n_single; i++) {
            const single *s = &c->single[i];
            if ((int)s->kind != kind)
                continue;
            if (s->kind == A_CONSTANT)
                p->constant[p->n_constants++ % LM_MAP_CONSTANTS] = s->constant;
            else if (s->kind != A_STEP)
                p->fetch[p->n_fetched++] =
                    (lm_map_fetch){ s->kind == A_NUMBER ? LM_MAP_NUMBER : LM_MAP_OPERAND,
                                    (uint8_t)s->at, (uint8_t)n };
            place[i] = n++;
        }
}

typedef struct {
    const int *place;
    int last[2 * LM_MAP_STEPS];     /* the last step that reads the value of this one */
    uint8_t tile[2 * LM_MAP_STEPS]; /* its register */
    int index[2 * LM_MAP_STEPS];    /* its number in the program */
    int used_until[LM_MAP_TILES];
} allocator;

static uint8_t encoded(const allocator *a, value v)
{
    return v.single ? (uint8_t)(LM_MAP_SINGLE | a->place[v.at]) : a->tile[v.at];
}

/* A register that is free at step k; values that step k reads last may be written over. */
static int free_tile(const allocator *a, int k)
{
    int t = 0;
    while (t < LM_MAP_TILES && a->used_until[t] > k)
        t++;
    return t;
}

static void write_step(compiler *c, allocator *a, int k, lm_map_program *p)
{
    const step *s = &c->step[k];
    lm_map_step *out = &p->step[p->n_steps];
    if (p->n_steps == LM_MAP_STEPS) {
        failed(c, "too many steps");
        return;
    }
    out->code = (uint8_t)s->code;
    if (s->code == LM_MAP_LOAD) {
        out->a = (uint8_t)s->in[0].at;
    } else {
        out->a = encoded(a, s->in[0]);
        out->b = encoded(a, s->in[1]);
        out->c = encoded(a, s->in[2]);
    }
    a->index[k] = p->n_steps++;
    if (s->single) {
        for (int i = 0; i < c->n_single; i++)
            if (c->single[i].kind == A_STEP && c->single[i].at == k)
                out->to = (uint8_t)(LM_MAP_SINGLE | a->place[i]);
        return;
    }
    int t = free_tile(a, k);
    if (t == LM_MAP_TILES) {
        failed(c, "too many values at once");
        return;
    }
    a->used_until[t] = a->last[k] > k ? a->last[k] : k + 1;
    a->tile[k] = out->to = (uint8_t)t;
    if (t >= p->n_tiles)
        p->n_tiles = (uint8_t)(t + 1);
}

/* Whether all steps that read operand `name` are done with step k. */
static bool is_read_by(const compiler *c, const allocator *a, const char *name, int k)
{
    for (int i = 0; i < c->n_steps; i++)
        for (int o = 0; c->step[i].code == LM_MAP_LOAD && o < c->f->n_operands; o++)
            if (c->f->operand[o].x == c->step[i].in[0].at && !strcmp(c->f->operand[o].name, name) &&
                a->last[i] > k)
                return false;
    return true;
}

static void write_program(compiler *c, const value *result, lm_map_program *p)
{
    int place[LM_MAP_SINGLES] = { 0 };
    allocator a = { .place = place };
    place_singles(c, p, place);
    if (p->n_constants > LM_MAP_CONSTANTS)
        failed(c, "too many constants");
    for (int k = 0; k < c->n_steps; k++)
        for (int i = 0; c->step[k].code != LM_MAP_LOAD && i < 3; i++)
            if (!c->step[k].in[i].single)
                a.last[c->step[k].in[i].at] = k;
    for (int i = 0; i < c->f->n_results; i++)
        if (!result[i].single)
            a.last[result[i].at] = c->n_steps;
    for (int k = 0; k < c->n_steps && !c->e->code; k++)
        if (c->step[k].single)
            write_step(c, &a, k, p);
    p->n_single = p->n_steps;
    for (int k = 0; k < c->n_steps && !c->e->code; k++)
        if (!c->step[k].single)
            write_step(c, &a, k, p);
    for (int i = 0; i < c->f->n_results && !c->e->code; i++) {
        p->from[i] = encoded(&a, result[i]);
        if (!result[i].single && is_read_by(c, &a, c->f->result[i], result[i].at))
            p->direct[i] = (uint8_t)(1 + a.index[result[i].at]);
    }
}

lm_code lm_formula_compile(const lm_formula *f, lm_map_attr *out, lm_err *e)
{
    compiler c = { .f = f, .at = f->text, .e = e };
    value result[LM_MAP_Y];
    memset(out, 0, sizeof *out);
    snprintf(out->text, sizeof out->text, "%s", f->text);
    statements(&c);
    for (int i = 0; i < f->n_results && !e->code; i++) {
        value v = look_up(&c, f->result[i]);
        bool loaded = !v.single && c.step[v.at].code == LM_MAP_LOAD;
        /* An operand's own elements, which another result may be written over. */
        result[i] = loaded ? emit(&c, LM_MAP_MOVE, v, v, v) : v;
    }
    if (!e->code)
        write_program(&c, result, &out->program);
    return e->code;
}

/* ---- as a node ---- */

typedef struct {
    lm_formula f;
    lm_formula_operand operand[LM_MAP_X];
    lm_formula_constant constant[NAMES];
    const char *result[LM_MAP_Y];
    const lm_formula_name *made[LM_MAP_Y];
    lm_vid in[LM_MAX_IN], out[LM_MAX_OUT];
    lm_tensor shape;
} node;

int lm_formula_mentions(const char *text, const char *name)
{
    size_t n = strlen(name);
    int found = 0;
    for (const char *at = text; (at = strstr(at, name)); at += n) {
        bool inside = (at > text && (is_letter(at[-1]) || (at[-1] >= '0' && at[-1] <= '9'))) ||
                      is_letter(at[n]) || (at[n] >= '0' && at[n] <= '9');
        if (inside)
            continue;
        found = found > 1 || at[n + strspn(at + n, " ")] == '=' ? 2 : 1;
    }
    return found;
}

static void widen(lm_tensor *shape, const lm_tensor *x)
{
    if (!shape->ndim || (lm_tensor_count(shape) == 1 && lm_tensor_count(x) > 1))
        *shape = *x;
    else if (lm_tensor_count(x) > 1 && shape->ndim == x->ndim)
        for (int i = 0; i < x->ndim; i++)
            shape->dim[i] = x->dim[i] > shape->dim[i] ? x->dim[i] : shape->dim[i];
}

static lm_code add_name(lm_graph *g, node *n, const char *text, const lm_formula_name *name,
                        lm_err *e)
{
    int how = lm_formula_mentions(text, name->name);
    if (!how)
        return LM_OK;
    if (name->value >= 0) {
        if (n->f.n_operands == LM_MAP_X)
            return lm_fail(e, LM_EBUG, "a formula", NULL, "too many operands in \"%s\"", text);
        n->in[LM_MAP_FIRST_X + n->f.n_operands] = name->value;
        n->operand[n->f.n_operands] =
            (lm_formula_operand){ name->name, n->f.n_operands, &g->value[name->value].t };
        widen(&n->shape, &g->value[name->value].t);
        n->f.n_operands++;
    }
    if (how == 2 && (name->value >= 0 || name->made)) {
        if (n->f.n_results == LM_MAP_Y)
            return lm_fail(e, LM_EBUG, "a formula", NULL, "too many results in \"%s\"", text);
        n->made[n->f.n_results] = name;
        n->result[n->f.n_results++] = name->name;
    } else if (name->value < 0 && n->f.n_constants < NAMES) {
        n->constant[n->f.n_constants++] = (lm_formula_constant){ name->name, name->constant };
    }
    return LM_OK;
}

lm_code lm_formula_append(lm_graph *g, const char *text, const lm_formula_scope *s, lm_err *e)
{
    lm_map_attr attr;
    node n = { .shape = { .ndim = 0 } };
    n.f = (lm_formula){ .text = text,
                        .operand = n.operand,
                        .constant = n.constant,
                        .number = s->number,
                        .n_numbers = s->n_numbers,
                        .result = n.result };
    for (int i = 0; i < LM_MAX_IN; i++)
        n.in[i] = LM_NONE;
    for (int i = 0; i < LM_MAX_OUT; i++)
        n.out[i] = LM_SKIP;
    n.in[0] = s->gate;
    n.in[1] = s->numbers;
    for (int i = 0; i < s->n_names; i++)
        if (add_name(g, &n, text, &s->name[i], e))
            return e->code;
    for (int i = 0; i < n.f.n_results; i++)
        for (int k = 0; k < n.f.n_operands; k++)
            if (strcmp(n.result[i], n.operand[k].name) &&
                lm_graph_share(g, n.made[i]->value, n.in[LM_MAP_FIRST_X + k]))
                return lm_fail(e, LM_EBUG, "a formula", NULL, "%s lies over %s in \"%.120s\"",
                               n.result[i], n.operand[k].name, text);
    /* Values of the graph move as it grows: compiled before any is made. */
    if (lm_formula_compile(&n.f, &attr, e))
        return e->code;
    for (int i = 0; i < n.f.n_results; i++) {
        const lm_formula_name *name = n.made[i];
        n.shape.dtype = name->made_type;
        n.out[i] = name->value;
        if (name->made && lm_graph_value(g, LM_ROLE_ACT, n.shape, NULL, &n.out[i], e))
            return e->code;
    }
    if (lm_graph_append(g, &lm_op_map, &attr, n.in, n.out, e))
        return e->code;
    for (int i = 0; i < n.f.n_results; i++)
        if (n.made[i]->made)
            *n.made[i]->made = n.out[i];
    return LM_OK;
}
