/* SPDX-License-Identifier: Apache-2.0 */
/* formula_program.c -- from steps to a program of `map`: places of single numbers, and registers for the values that
 * are alive at the same time. */
#include <string.h>

#include "op/formula_impl.h"

/* Where single number i of the compiler lies: constants, then what is fetched, then results of steps. */
static void place_singles(const formula_compiler *c, lm_map_program *p, int place[FORMULA_SINGLES])
{
    int n = 0;
    for (int kind = A_CONSTANT; kind <= A_STEP; kind++)
        for (int i = 0; i < c->n_single; i++) {
            const formula_single *s = &c->single[i];
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
    int last[FORMULA_STEPS];     /* the last step that reads the value of this one */
    uint8_t tile[FORMULA_STEPS]; /* its register */
    int index[FORMULA_STEPS];    /* its number in the program */
    int used_until[LM_MAP_TILES];
} allocator;

static uint8_t encoded(const allocator *a, formula_value v)
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

static void write_step(formula_compiler *c, allocator *a, int k, lm_map_program *p)
{
    const formula_step *s = &c->step[k];
    lm_map_step *out = &p->step[p->n_steps];
    if (p->n_steps == LM_MAP_STEPS) {
        formula_fail(c, "too many steps");
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
        formula_fail(c, "too many values at once");
        return;
    }
    a->used_until[t] = a->last[k] > k ? a->last[k] : k + 1;
    a->tile[k] = out->to = (uint8_t)t;
    if (t >= p->n_tiles)
        p->n_tiles = (uint8_t)(t + 1);
}

/* Whether all steps that read operand `name` are done with step k. */
static bool is_read_by(const formula_compiler *c, const allocator *a, const char *name, int k)
{
    for (int i = 0; i < c->n_steps; i++)
        for (int o = 0; c->step[i].code == LM_MAP_LOAD && o < c->f->n_operands; o++)
            if (c->f->operand[o].x == c->step[i].in[0].at && !strcmp(c->f->operand[o].name, name) &&
                a->last[i] > k)
                return false;
    return true;
}

void formula_program(formula_compiler *c, const formula_value *result, lm_map_program *p)
{
    int place[FORMULA_SINGLES] = { 0 };
    allocator a = { .place = place };
    if (c->n_single > LM_MAP_SINGLES) {
        formula_fail(c, "too many numbers");
        return;
    }
    place_singles(c, p, place);
    if (p->n_constants > LM_MAP_CONSTANTS)
        formula_fail(c, "too many constants");
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
