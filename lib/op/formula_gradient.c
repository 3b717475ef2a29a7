/* SPDX-License-Identifier: Apache-2.0 */
/* formula_gradient.c -- a program of `map` differentiated: its steps are written again as values made once, the gradients
 * of all of them follow in reverse order, and what no result needs is left out. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "op/formula_impl.h"

/* The gradient of a value; it is absent until something is added to it. */
typedef struct {
    bool have;
    formula_value v;
} slope;

typedef struct {
    formula_compiler c;
    formula_value tile[LM_MAP_TILES], single[LM_MAP_SINGLES]; /* of the given program, so far */
    slope of_step[FORMULA_STEPS], of_single[FORMULA_SINGLES];
} gradient;

static formula_value load(gradient *g, int x)
{
    formula_value v = { true, x };
    for (int k = 0; k < g->c.n_steps; k++)
        if (g->c.step[k].code == LM_MAP_LOAD && g->c.step[k].in[0].at == x)
            return (formula_value){ false, k };
    return formula_emit(&g->c, LM_MAP_LOAD, v, v, v);
}

/* ---- the given program as values made once ---- */

static formula_value operand_of(const gradient *g, uint8_t which)
{
    return which & LM_MAP_SINGLE ? g->single[which & ~LM_MAP_SINGLE]
                                 : g->tile[which % LM_MAP_TILES];
}

static void read_program(gradient *g, const lm_map_program *p)
{
    for (int i = 0; i < p->n_constants; i++)
        g->single[i] = formula_constant(&g->c, p->constant[i]);
    for (int i = 0; i < p->n_fetched; i++) {
        const lm_map_fetch *f = &p->fetch[i];
        g->single[f->to] = formula_new_single(
            &g->c,
            (formula_single){ f->origin == LM_MAP_NUMBER ? A_NUMBER : AN_OPERAND, 0, f->at });
    }
    for (int k = 0; k < p->n_steps && !g->c.e->code; k++) {
        const lm_map_step *s = &p->step[k];
        formula_value v = s->code == LM_MAP_LOAD
                              ? load(g, s->a)
                              : formula_emit(&g->c, (lm_map_code)s->code, operand_of(g, s->a),
                                             operand_of(g, s->b), operand_of(g, s->c));
        if (s->to & LM_MAP_SINGLE)
            g->single[s->to & ~LM_MAP_SINGLE] = v;
        else
            g->tile[s->to % LM_MAP_TILES] = v;
    }
}

/* ---- rules ---- */

static formula_value with(gradient *g, lm_map_code code, formula_value a, formula_value b)
{
    return formula_emit(&g->c, code, a, b, b);
}

static formula_value times(gradient *g, formula_value a, formula_value b)
{
    return with(g, LM_MAP_MUL, a, b);
}

static formula_value of_one(gradient *g, lm_map_code code, formula_value a)
{
    return formula_emit(&g->c, code, a, a, a);
}

static void give(gradient *g, formula_value to, formula_value d)
{
    slope *s = to.single ? &g->of_single[to.at] : &g->of_step[to.at];
    s->v = s->have ? with(g, LM_MAP_ADD, s->v, d) : d;
    s->have = true;
}

/* Where `condition` holds, d goes to a, else to b. */
static void give_one(gradient *g, formula_value condition, formula_value a, formula_value b,
                     formula_value d)
{
    formula_value zero = formula_constant(&g->c, 0);
    give(g, a, formula_emit(&g->c, LM_MAP_WHERE, condition, d, zero));
    give(g, b, formula_emit(&g->c, LM_MAP_WHERE, condition, zero, d));
}

/* 2 / sqrt(pi) exp(-a a) d */
static formula_value bell(gradient *g, formula_value a, formula_value d)
{
    formula_value e = of_one(g, LM_MAP_EXP, of_one(g, LM_MAP_NEG, times(g, a, a)));
    return times(g, times(g, d, e), formula_constant(&g->c, 1.1283791670955126));
}

/* d sign(a) */
static formula_value along_sign(gradient *g, formula_value a, formula_value d)
{
    formula_value zero = formula_constant(&g->c, 0);
    formula_value up = formula_emit(&g->c, LM_MAP_WHERE, with(g, LM_MAP_LESS, zero, a), d, zero);
    formula_value down = formula_emit(&g->c, LM_MAP_WHERE, with(g, LM_MAP_LESS, a, zero), d, zero);
    return with(g, LM_MAP_SUB, up, down);
}

static void give_quotient(gradient *g, formula_value a, formula_value b, formula_value y,
                          formula_value d)
{
    formula_value part = with(g, LM_MAP_DIV, d, b);
    give(g, a, part);
    give(g, b, of_one(g, LM_MAP_NEG, times(g, part, y)));
}

/* Of y = f(a) with the gradient d of y. */
static void differentiate_one(gradient *g, lm_map_code code, formula_value a, formula_value y,
                              formula_value d)
{
    switch (code) {
    case LM_MAP_MOVE:
        give(g, a, d);
        break;
    case LM_MAP_NEG:
        give(g, a, of_one(g, LM_MAP_NEG, d));
        break;
    case LM_MAP_ABS:
        give(g, a, along_sign(g, a, d));
        break;
    case LM_MAP_SQRT:
        give(g, a, with(g, LM_MAP_DIV, times(g, d, formula_constant(&g->c, 0.5)), y));
        break;
    case LM_MAP_EXP:
        give(g, a, times(g, d, y));
        break;
    case LM_MAP_LOG:
        give(g, a, with(g, LM_MAP_DIV, d, a));
        break;
    case LM_MAP_SIN:
        give(g, a, times(g, d, of_one(g, LM_MAP_COS, a)));
        break;
    case LM_MAP_COS:
        give(g, a, of_one(g, LM_MAP_NEG, times(g, d, of_one(g, LM_MAP_SIN, a))));
        break;
    case LM_MAP_TANH:
        give(g, a, with(g, LM_MAP_SUB, d, times(g, d, times(g, y, y))));
        break;
    case LM_MAP_ERF:
        give(g, a, bell(g, a, d));
        break;
    default: /* a load; round */
        break;
    }
}

static void differentiate(gradient *g, const formula_step *s, formula_value y, formula_value d)
{
    formula_value a = s->in[0], b = s->in[1];
    switch (s->code) {
    case LM_MAP_ADD:
        give(g, a, d);
        give(g, b, d);
        break;
    case LM_MAP_SUB:
        give(g, a, d);
        give(g, b, of_one(g, LM_MAP_NEG, d));
        break;
    case LM_MAP_MUL:
        give(g, a, times(g, d, b));
        give(g, b, times(g, d, a));
        break;
    case LM_MAP_DIV:
        give_quotient(g, a, b, y, d);
        break;
    case LM_MAP_MIN:
        give_one(g, with(g, LM_MAP_LESS, a, b), a, b, d);
        break;
    case LM_MAP_MAX:
        give_one(g, with(g, LM_MAP_LESS, b, a), a, b, d);
        break;
    case LM_MAP_LESS:
        break;
    case LM_MAP_WHERE:
        give_one(g, a, b, s->in[2], d);
        break;
    default:
        differentiate_one(g, s->code, a, y, d);
    }
}

/* The value that step k makes. */
static formula_value result_of(const formula_compiler *c, int k)
{
    for (int i = 0; c->step[k].single && i < c->n_single; i++)
        if (c->single[i].kind == A_STEP && c->single[i].at == k)
            return (formula_value){ true, i };
    return (formula_value){ false, k };
}

static slope slope_of(const gradient *g, formula_value v)
{
    return v.single ? g->of_single[v.at] : g->of_step[v.at];
}

/* The gradient of operand x: of its load, or of a single number. */
static formula_value gradient_of(gradient *g, int x)
{
    for (int k = 0; k < g->c.n_steps; k++)
        if (g->c.step[k].code == LM_MAP_LOAD && g->c.step[k].in[0].at == x && g->of_step[k].have)
            return g->of_step[k].v;
    for (int i = 0; i < g->c.n_single; i++)
        if (g->c.single[i].kind == AN_OPERAND && g->c.single[i].at == x && g->of_single[i].have)
            return g->of_single[i].v;
    return formula_constant(&g->c, 0);
}

/* ---- what is left ---- */

typedef struct {
    bool step[FORMULA_STEPS], single[FORMULA_SINGLES];
} needed;

static void need(needed *n, formula_value v)
{
    *(v.single ? &n->single[v.at] : &n->step[v.at]) = true;
}

static void mark_needed(const formula_compiler *c, const formula_value *result, int n_results,
                        needed *n)
{
    memset(n, 0, sizeof *n);
    for (int i = 0; i < n_results; i++)
        need(n, result[i]);
    for (int k = c->n_steps - 1; k >= 0; k--) {
        formula_value made = result_of(c, k);
        bool used = made.single ? n->single[made.at] : n->step[k];
        n->step[k] = used;
        for (int i = 0; used && c->step[k].code != LM_MAP_LOAD && i < 3; i++)
            need(n, c->step[k].in[i]);
    }
}

typedef struct {
    formula_value step[FORMULA_STEPS], single[FORMULA_SINGLES]; /* by value of the whole */
    int *source, n_sources;
} places;

/* The number of operand x among those that are left. */
static int place_of_operand(places *p, int x, formula_compiler *to)
{
    int i = 0;
    while (i < p->n_sources && p->source[i] != x)
        i++;
    if (i == LM_MAP_X) {
        formula_fail(to, "too many operands");
        return 0;
    }
    if (i == p->n_sources)
        p->source[p->n_sources++] = x;
    return i;
}

static formula_value moved(const places *p, formula_value v)
{
    return v.single ? p->single[v.at] : p->step[v.at];
}

/* Copy what is needed of `from` to `to`, whose results then are result[i]. */
static void copy_needed(const formula_compiler *from, const needed *n, formula_compiler *to,
                        places *p, formula_value *result, int n_results)
{
    for (int i = 0; i < from->n_single; i++) {
        formula_single s = from->single[i];
        if (!n->single[i] || s.kind == A_STEP)
            continue;
        if (s.kind == AN_OPERAND)
            s.at = place_of_operand(p, s.at, to);
        p->single[i] = formula_new_single(to, s);
    }
    for (int k = 0; k < from->n_steps && !to->e->code; k++) {
        const formula_step *s = &from->step[k];
        formula_value in[3], made = result_of(from, k);
        if (!n->step[k])
            continue;
        for (int i = 0; i < 3; i++)
            in[i] = s->code == LM_MAP_LOAD
                        ? (formula_value){ true, place_of_operand(p, s->in[0].at, to) }
                        : moved(p, s->in[i]);
        *(made.single ? &p->single[made.at] : &p->step[k]) =
            formula_emit(to, s->code, in[0], in[1], in[2]);
    }
    for (int i = 0; i < n_results && !to->e->code; i++) {
        formula_value v = moved(p, result[i]);
        bool loaded =
            !v.single && to->step[v.at].code == LM_MAP_LOAD; /* stored by a step of its own */
        result[i] = loaded ? formula_emit(to, LM_MAP_MOVE, v, v, v) : v;
    }
}

lm_code lm_formula_gradient(const lm_map_program *p, unsigned seeds, const int *x, int n,
                            lm_map_attr *out, int source[LM_MAP_X], lm_err *e)
{
    static const char *const names[LM_MAP_Y] = { "d0", "d1", "d2", "d3", "d4", "d5" };
    lm_formula f = { .text = "", .result = names, .n_results = n };
    gradient g = { .c = { .f = &f, .at = f.text, .e = e } };
    formula_compiler left = { .f = &f, .at = f.text, .e = e };
    formula_value result[LM_MAP_Y];
    needed used;
    places to = { .source = source };
    memset(out, 0, sizeof *out);
    for (int i = 0; i < LM_MAP_X; i++)
        source[i] = -1;
    read_program(&g, p);
    int forward = g.c.n_steps;
    for (int k = 0; k < LM_MAP_Y && !e->code; k++)
        if (seeds >> k & 1)
            give(&g, operand_of(&g, p->from[k]), load(&g, LM_MAP_X + k));
    for (int k = forward; k-- > 0 && !e->code;) {
        formula_value y = result_of(&g.c, k);
        slope d = slope_of(&g, y);
        if (d.have)
            differentiate(&g, &g.c.step[k], y, d.v);
    }
    for (int i = 0; i < n && !e->code; i++)
        result[i] = gradient_of(&g, x[i]);
    if (e->code)
        return e->code;
    mark_needed(&g.c, result, n, &used);
    copy_needed(&g.c, &used, &left, &to, result, n);
    if (!e->code)
        formula_program(&left, result, &out->program);
    snprintf(out->text, sizeof out->text, "the gradient of a formula");
    return e->code;
}
