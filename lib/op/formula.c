/* SPDX-License-Identifier: Apache-2.0 */
/* formula.c -- from text to steps: a recursive descent that emits one step an operation. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "op/formula_impl.h"

formula_value formula_fail(formula_compiler *c, const char *what)
{
    lm_fail(c->e, LM_EBUG, "a formula", NULL, "%s at \"%.40s\" in \"%.120s\"", what, c->at,
            c->f->text);
    return (formula_value){ true, 0 };
}

/* ---- values ---- */

formula_value formula_new_single(formula_compiler *c, formula_single s)
{
    for (int i = 0; s.kind != A_STEP && i < c->n_single; i++)
        if (c->single[i].kind == s.kind && c->single[i].at == s.at &&
            c->single[i].constant == s.constant)
            return (formula_value){ true, i };
    if (c->n_single == FORMULA_SINGLES)
        return formula_fail(c, "too many numbers");
    c->single[c->n_single] = s;
    return (formula_value){ true, c->n_single++ };
}

formula_value formula_constant(formula_compiler *c, double x)
{
    return formula_new_single(c, (formula_single){ A_CONSTANT, x, 0 });
}

formula_value formula_emit(formula_compiler *c, lm_map_code code, formula_value a, formula_value b,
                           formula_value d)
{
    bool all = code != LM_MAP_LOAD && a.single && b.single && d.single;
    if (c->n_steps == FORMULA_STEPS)
        return formula_fail(c, "too many steps");
    c->step[c->n_steps] = (formula_step){ code, { a, b, d }, all };
    formula_value made = { false, c->n_steps };
    if (all)
        made = formula_new_single(c, (formula_single){ A_STEP, 0, c->n_steps });
    c->n_steps++;
    return made;
}

static formula_value binary(formula_compiler *c, lm_map_code code, formula_value a, formula_value b)
{
    return formula_emit(c, code, a, b, b);
}

static void bind(formula_compiler *c, const char *name, formula_value v)
{
    int i = 0;
    while (i < c->n_bound && strcmp(c->bound[i].name, name))
        i++;
    if (i == NAMES) {
        formula_fail(c, "too many names");
        return;
    }
    c->n_bound += i == c->n_bound;
    snprintf(c->bound[i].name, WORD, "%s", name);
    c->bound[i].v = v;
}

/* A matrix of one number is a column of one row, which is computed with as the columns of more rows are: results of a row do
 * not depend on how many there are. */
static bool is_single(const lm_tensor *x)
{
    return lm_tensor_count(x) == 1 && (x->ndim != 2 || x->dtype == LM_DTYPE_F64);
}

static formula_value operand_value(formula_compiler *c, const lm_formula_operand *o)
{
    if (is_single(o->shape))
        return formula_new_single(c, (formula_single){ AN_OPERAND, 0, o->x });
    formula_value x = { true, o->x }; /* of a load: the operand's number */
    return formula_emit(c, LM_MAP_LOAD, x, x, x);
}

static formula_value look_up(formula_compiler *c, const char *name)
{
    const lm_formula *f = c->f;
    for (int i = 0; i < c->n_bound; i++)
        if (!strcmp(c->bound[i].name, name))
            return c->bound[i].v;
    for (int i = 0; i < f->n_operands; i++)
        if (!strcmp(f->operand[i].name, name)) {
            formula_value v = operand_value(c, &f->operand[i]);
            bind(c, name, v);
            return v;
        }
    for (int i = 0; i < f->n_numbers; i++)
        if (!strcmp(f->number[i], name))
            return formula_new_single(c, (formula_single){ A_NUMBER, 0, i });
    for (int i = 0; i < f->n_constants; i++)
        if (!strcmp(f->constant[i].name, name))
            return formula_constant(c, f->constant[i].value);
    return formula_fail(c, "an unknown name");
}

/* ---- text ---- */

static void skip_blanks(formula_compiler *c)
{
    c->at += strspn(c->at, " \n");
}

static bool skip_mark(formula_compiler *c, char mark)
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

static bool take_word(formula_compiler *c, char out[WORD])
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

static formula_value comparison(formula_compiler *c);

/* The arguments of a function, behind its name. */
static void arguments(formula_compiler *c, int n, formula_value out[3])
{
    bool ok = skip_mark(c, '(');
    for (int i = 0; ok && i < n; i++) {
        out[i] = comparison(c);
        ok = skip_mark(c, i == n - 1 ? ')' : ',');
    }
    if (!ok)
        formula_fail(c, "arguments are missing");
}

static formula_value call(formula_compiler *c, const char *name)
{
    static const struct {
        const char *name;
        lm_map_code code;
        int n;
    } table[] = { { "sqrt", LM_MAP_SQRT, 1 },   { "abs", LM_MAP_ABS, 1 },
                  { "round", LM_MAP_ROUND, 1 }, { "min", LM_MAP_MIN, 2 },
                  { "max", LM_MAP_MAX, 2 },     { "where", LM_MAP_WHERE, 3 },
                  { "exp", LM_MAP_EXP, 1 },     { "log", LM_MAP_LOG, 1 },
                  { "sin", LM_MAP_SIN, 1 },     { "cos", LM_MAP_COS, 1 },
                  { "tanh", LM_MAP_TANH, 1 },   { "erf", LM_MAP_ERF, 1 } };
    formula_value v[3] = { { true, 0 }, { true, 0 }, { true, 0 } };
    if (!strcmp(name, "sign")) {
        arguments(c, 1, v);
        formula_value zero = formula_constant(c, 0), above = binary(c, LM_MAP_LESS, zero, v[0]);
        return binary(c, LM_MAP_SUB, above, binary(c, LM_MAP_LESS, v[0], zero));
    }
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (!strcmp(table[i].name, name)) {
            arguments(c, table[i].n, v);
            if (table[i].n < 2)
                v[1] = v[0];
            if (table[i].n < 3)
                v[2] = v[1];
            return formula_emit(c, table[i].code, v[0], v[1], v[2]);
        }
    return formula_fail(c, "an unknown function");
}

static formula_value primary(formula_compiler *c)
{
    char word[WORD], *end;
    if (skip_mark(c, '(')) {
        formula_value v = comparison(c);
        return skip_mark(c, ')') ? v : formula_fail(c, "a bracket is missing");
    }
    if (skip_mark(c, '-')) {
        formula_value v = primary(c);
        return formula_emit(c, LM_MAP_NEG, v, v, v);
    }
    if (take_word(c, word))
        return *c->at == '(' ? call(c, word) : look_up(c, word);
    double x = strtod(c->at, &end);
    if (end == c->at)
        return formula_fail(c, "no value");
    c->at = end;
    return formula_constant(c, x);
}

/* By a single number: times its reciprocal, which is made once a call. */
static formula_value quotient(formula_compiler *c, formula_value a, formula_value b)
{
    if (a.single || !b.single)
        return binary(c, LM_MAP_DIV, a, b);
    return binary(c, LM_MAP_MUL, a, binary(c, LM_MAP_DIV, formula_constant(c, 1), b));
}

static formula_value product(formula_compiler *c)
{
    formula_value v = primary(c);
    while (!c->e->code) {
        if (skip_mark(c, '*'))
            v = binary(c, LM_MAP_MUL, v, primary(c));
        else if (skip_mark(c, '/'))
            v = quotient(c, v, primary(c));
        else
            break;
    }
    return v;
}

static formula_value sum(formula_compiler *c)
{
    formula_value v = product(c);
    while (!c->e->code) {
        if (skip_mark(c, '+'))
            v = binary(c, LM_MAP_ADD, v, product(c));
        else if (skip_mark(c, '-'))
            v = binary(c, LM_MAP_SUB, v, product(c));
        else
            break;
    }
    return v;
}

static formula_value comparison(formula_compiler *c)
{
    formula_value v = sum(c);
    return skip_mark(c, '<') ? binary(c, LM_MAP_LESS, v, sum(c)) : v;
}

static void statements(formula_compiler *c)
{
    char name[WORD];
    for (skip_blanks(c); *c->at && !c->e->code; skip_blanks(c)) {
        if (!take_word(c, name) || !skip_mark(c, '=')) {
            formula_fail(c, "no statement");
            return;
        }
        bind(c, name, comparison(c));
        if (!skip_mark(c, ';') && *c->at)
            formula_fail(c, "a statement does not end");
    }
}

/* ---- both ---- */

/* For dumps: the text and its constants, as much as there is room for. */
static void write_text(const lm_formula *f, char *out, size_t room)
{
    size_t n = 0;
    for (const char *at = f->text; *at && n + 2 < room; at++) {
        out[n++] = *at;
        if (*at == ';' && at[1] && at[1] != ' ')
            out[n++] = ' ';
    }
    out[n] = 0;
    for (int i = 0, shown = 0; i < f->n_constants; i++)
        if (n + 1 < room && lm_formula_mentions(f->text, f->constant[i].name) == 1)
            n += (size_t)snprintf(out + n, room - n, "%s %s=%g", shown++ ? "," : " with",
                                  f->constant[i].name, f->constant[i].value);
}

lm_code lm_formula_compile(const lm_formula *f, lm_map_attr *out, lm_err *e)
{
    formula_compiler c = { .f = f, .at = f->text, .e = e };
    formula_value result[LM_MAP_Y];
    memset(out, 0, sizeof *out);
    write_text(f, out->text, sizeof out->text);
    statements(&c);
    for (int i = 0; i < f->n_results && !e->code; i++) {
        formula_value v = look_up(&c, f->result[i]);
        bool loaded = !v.single && c.step[v.at].code == LM_MAP_LOAD;
        /* An operand's own elements, which another result may be written over. */
        result[i] = loaded ? formula_emit(&c, LM_MAP_MOVE, v, v, v) : v;
    }
    if (!e->code)
        formula_program(&c, result, &out->program);
    return e->code;
}
