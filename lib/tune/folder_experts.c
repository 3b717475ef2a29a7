/* SPDX-License-Identifier: Apache-2.0 */
/* folder_experts.c -- pairs of lora_A and lora_B of an adapter's file, each to its parameter of the
 * base. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "format/safetensors_table.h"
#include "tune/folder_impl.h"
#include "tune/methods.h"

enum { MOST = 8 }; /* parameters of a module */

static const char inner[] = ".base_layer";

/* The length of a module's name without the ends of nesting, and how many these are. */
static size_t strip(const char *name, size_t len, int *depth)
{
    size_t k = sizeof inner - 1;

    *depth = 0;
    while (len > k && !strncmp(name + len - k, inner, k)) {
        len -= k;
        ++*depth;
    }
    return len;
}

/* Of a target "mlp.experts.down_proj": "down_proj", if `module` ends in "mlp.experts"; else
 * NULL. */
static const char *named(const char *target, const char *module)
{
    const char *dot = strrchr(target, '.');
    size_t n = dot ? (size_t)(dot - target) : 0, m = strlen(module);

    if (!dot)
        return target;
    if (n > m || strncmp(module + m - n, target, n) != 0 || (m > n && module[m - n - 1] != '.'))
        return NULL;
    return dot + 1;
}

static const json_t *targets_of(const lm_tune_folder *f)
{
    return json_object_get(f->config, "target_parameters");
}

static bool is_target(const lm_tune_folder *f, const char *module)
{
    const json_t *v;
    size_t i;

    json_array_foreach((json_t *)(uintptr_t)targets_of(f), i, v)
    {
        if (json_is_string(v) && named(json_string_value(v), module))
            return true;
    }
    return false;
}

const char *lm_tune_folder_key(const lm_tune_folder *f, const lm_tune_part *p, char out[600])
{
    const char *module = p->module.name;
    const json_t *v;
    size_t i;

    if (p->method != &lm_tune_lora)
        return module;
    json_array_foreach((json_t *)(uintptr_t)targets_of(f), i, v)
    {
        const char *name = json_is_string(v) ? named(json_string_value(v), module) : NULL;

        if (name && !strcmp(name, "weight")) {
            snprintf(out, 600, "%s.weight", module);
            return out;
        }
    }
    return module;
}

lm_code lm_tune_folder_level(lm_tune_folder *f, const lm_st_tensor *t, const char *name, size_t len,
                             const char *own, bool *taken, lm_err *e)
{
    bool is_a = !strcmp(own, "lora_A.weight");
    lm_tune_level *l = NULL;
    char *module = NULL;
    int depth;
    lm_code rc;

    *taken = false;
    if (f->method != &lm_tune_lora || (!is_a && strcmp(own, "lora_B.weight") != 0))
        return LM_OK;
    len = strip(name, len, &depth);
    rc = lm_arena_strdup(f->arena, &module, name, len, e);
    if (rc || !is_target(f, module))
        return rc;
    for (size_t i = f->n_levels; i-- > 0 && !l;) /* names in files are sorted: it is the last */
        if (f->level[i].depth == depth && !strcmp(f->level[i].module, module))
            l = &f->level[i];
    if (!l) {
        rc = lm_grow(&f->level, &f->cap_levels, f->n_levels + 1, sizeof *f->level, "adapter", e);
        if (rc)
            return rc;
        l = &f->level[f->n_levels++];
        *l = (lm_tune_level){ .module = module, .depth = depth };
    }
    *(is_a ? &l->a : &l->b) = t;
    *taken = true;
    return LM_OK;
}

/* ---- Pairs and parameters of one module ---- */

typedef struct {
    lm_tune_folder *f;
    const lm_tune_level *level; /* innermost first */
    lm_tune_stack stack[MOST];  /* in the order of wrapping */
    int n;                      /* of both */
    int fit[MOST], first[MOST]; /* of each pair: its parameter */
    int found;
    lm_tune_param param[MOST][MOST]; /* of pair, parameter */
    bool fits[MOST][MOST];
} match;

static bool has_shape(const lm_tune_level *l, const lm_tune_stack *s, int64_t rank)
{
    return l->a->dim[0] == rank * s->experts && l->b->dim[1] == rank * s->experts &&
           l->a->dim[1] == s->in && l->b->dim[0] == s->out;
}

/* Pair i on parameter k, if its shape is that. */
static lm_code try_pair(match *m, int i, int k, lm_err *e)
{
    const lm_tune_level *l = &m->level[i];
    lm_tune_param *p = &m->param[i][k];
    lm_tune_module module = { .name = m->stack[k].key };
    double values[64];
    lm_code rc = lm_tune_read_hyper(m->f->method, m->f->config, module.name, m->f->path, values, e);

    if (rc)
        return rc;
    module.hyper = values;
    *p = (lm_tune_param){ .stack = m->stack[k],
                          .a = l->a,
                          .b = l->b,
                          .rank = (int64_t)lm_tune_value(m->f->method, &module, "r"),
                          .scale = lm_tune_lora_scale(&module) };
    m->fits[i][k] = has_shape(l, &p->stack, p->rank);
    if (!m->fits[i][k] && p->stack.slice[0].expert < 0) { /* the file has it the other way */
        lm_tune_stack *s = &p->stack;
        int64_t out = s->out;

        s->out = s->in;
        s->in = out;
        s->turned = !s->turned;
        m->fits[i][k] = has_shape(l, s, p->rank);
    }
    return LM_OK;
}

/* Give the pairs from i on to parameters that are left; counts the ways up to two, the first of
 * which is kept. */
static void assign(match *m, int i, unsigned used)
{
    if (i == m->n) {
        if (!m->found++)
            memcpy(m->first, m->fit, sizeof m->first);
        return;
    }
    for (int k = 0; k < m->n && m->found < 2; k++)
        if (m->fits[i][k] && !(used >> k & 1)) {
            m->fit[i] = k;
            assign(m, i + 1, used | 1u << k);
        }
}

/* The parameters of a module that target_parameters names, in the order of wrapping. */
static lm_code collect(match *m, int pairs, lm_err *e)
{
    const char *module = m->level->module;
    const json_t *v;
    size_t i;

    json_array_foreach((json_t *)(uintptr_t)targets_of(m->f), i, v)
    {
        const char *name = named(json_string_value(v), module);
        lm_tune_stack s;
        bool found = false;
        int at = 0;

        for (int k = 0; name && k < m->n; k++)
            if (!strcmp(m->stack[k].name, name))
                name = NULL;
        if (!name)
            continue;
        if (lm_tune_stack_find(m->f->bases, module, name, m->f->arena, &s, &found, e))
            return e->code;
        if (!found)
            continue;
        if (m->n == MOST)
            return lm_fail(e, LM_EFORMAT, m->f->path, NULL,
                           "target_parameters names more than %d parameters of '%.100s'", MOST,
                           module);
        while (at < m->n && lm_tune_stack_order(m->stack[at].name) <= lm_tune_stack_order(name))
            at++;
        memmove(&m->stack[at + 1], &m->stack[at], (size_t)(m->n - at) * sizeof s);
        m->stack[at] = s;
        m->n++;
    }
    if (m->n != pairs)
        return lm_fail(e, LM_EUSAGE, m->f->path, "use the model on which it was trained",
                       "it has %d pair%s of lora_A and lora_B for '%.100s', where %.80s has %d of "
                       "the parameters in target_parameters",
                       pairs, lm_plural(pairs), module, m->f->bases->path, m->n);
    return LM_OK;
}

/* What is wrong if no way, or more than one, fits. */
static lm_code check_fit(const match *m, lm_err *e)
{
    const lm_tune_level *l = m->level;
    const lm_tune_stack *s = &m->stack[0];
    bool in_order = true, known = true;

    if (!m->found)
        return lm_fail(
            e, LM_EUSAGE, m->f->path, "use the model on which it was trained",
            "the ranks and shapes of lora_A [%lld,%lld] and lora_B [%lld,%lld] of '%.80s'"
            " do not fit %s [%lld,%lld,%lld]%s of the base",
            (long long)l->a->dim[0], (long long)l->a->dim[1], (long long)l->b->dim[0],
            (long long)l->b->dim[1], l->module, s->name, (long long)s->experts, (long long)s->out,
            (long long)s->in, m->n > 1 ? " and the other parameters" : "");
    for (int i = 0; i < m->n; i++) {
        in_order = in_order && m->first[i] == i;
        known = known && (!i || lm_tune_stack_order(m->stack[i - 1].name) <
                                    lm_tune_stack_order(m->stack[i].name));
    }
    if (m->found > 1 && !(in_order && known))
        return lm_fail(
            e, LM_EUSAGE, m->f->path, "train it with ranks that differ",
            "shapes do not say which pair of '%.100s' belongs to which of its parameters",
            l->module);
    return LM_OK;
}

static lm_code check_pair(const lm_tune_folder *f, const lm_tune_level *l, lm_err *e)
{
    char show[LM_ST_SHOWN];

    if (!l->a || !l->b)
        return lm_fail(e, LM_EFORMAT, f->path, "copy all files of the adapter",
                       "'%.150s' has lora_%c but no lora_%c", l->module, l->a ? 'A' : 'B',
                       l->a ? 'B' : 'A');
    for (int i = 0; i < 2; i++) {
        const lm_st_tensor *t = i ? l->b : l->a;

        if (t->ndim != 2 || !lm_dtype_is_float(t->dtype))
            return lm_fail(e, LM_EFORMAT, f->path, NULL, "tensor '%s' is %s of %d dimension%s",
                           lm_st_show(t->name, show), t->dtype_name, t->ndim, lm_plural(t->ndim));
    }
    return LM_OK;
}

static lm_code bind_module(lm_tune_folder *f, const lm_tune_level *l, int n, lm_err *e)
{
    match *m = NULL;
    lm_code rc = LM_OK;

    for (int i = 0; !rc && i < n; i++)
        rc = check_pair(f, &l[i], e);
    rc = rc ? rc : lm_alloc_n(&m, 1, sizeof *m, "adapter", e);
    if (rc)
        return rc;
    m->f = f;
    m->level = l;
    rc = collect(m, n, e);
    for (int i = 0; !rc && i < n; i++)
        for (int k = 0; !rc && k < n; k++)
            rc = try_pair(m, i, k, e);
    if (!rc)
        assign(m, 0, 0);
    rc = rc ? rc : check_fit(m, e);
    rc = rc ? rc
            : lm_grow(&f->param, &f->cap_params, f->n_params + (size_t)n, sizeof *f->param,
                      "adapter", e);
    for (int i = 0; !rc && i < n; i++) {
        lm_tune_param *p = &f->param[f->n_params++];

        *p = m->param[i][m->first[i]];
        p->by_order = m->found > 1;
    }
    lm_free(m);
    return rc;
}

/* What PEFT does not do with parameters. */
static lm_code check_config(const lm_tune_folder *f, lm_err *e)
{
    static const char *const keys[] = { "use_dora", "lora_bias" };
    const char *start = json_string_value(json_object_get(f->config, "init_lora_weights"));

    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (json_is_true(json_object_get(f->config, keys[i])))
            return lm_fail(e, LM_EUSAGE, f->path, "use the program that made it",
                           "%s is set, which target_parameters do not have in PEFT", keys[i]);
    if (start && strcmp(start, "gaussian") && strcmp(start, "orthogonal") && strcmp(start, "eva"))
        return lm_fail(e, LM_EUSAGE, f->path, "use the program that made it",
                       "init_lora_weights '%.40s' changes the base, which with target_parameters "
                       "is not served",
                       start);
    return LM_OK;
}

lm_code lm_tune_folder_check_targets(const lm_tune_folder *f, lm_err *e)
{
    const json_t *all = targets_of(f), *v;
    bool bad = all && !json_is_null(all) && !json_is_array(all);
    size_t i;

    json_array_foreach((json_t *)(uintptr_t)all, i, v) bad = bad || !json_is_string(v);
    return bad ? lm_fail(e, LM_EFORMAT, f->path, "write [\"mlp.experts.down_proj\", ...]",
                         "target_parameters is not a list of names")
               : LM_OK;
}

static int by_module(const void *x, const void *y)
{
    const lm_tune_level *a = x, *b = y;
    int c = strcmp(a->module, b->module);

    return c ? c : b->depth - a->depth;
}

lm_code lm_tune_folder_bind_params(lm_tune_folder *f, lm_err *e)
{
    size_t n = f->n_levels;
    lm_code rc = n ? check_config(f, e) : LM_OK;

    if (n)
        qsort(f->level, n, sizeof *f->level, by_module);
    for (size_t i = 0, k; !rc && i < n; i = k) {
        for (k = i + 1; k < n && !strcmp(f->level[i].module, f->level[k].module);)
            k++;
        rc = k - i > MOST ? lm_fail(e, LM_EFORMAT, f->path, NULL,
                                    "'%.100s' has more than %d pairs of lora_A and lora_B",
                                    f->level[i].module, MOST)
                          : bind_module(f, &f->level[i], (int)(k - i), e);
    }
    return rc;
}

bool lm_tune_folder_params_line(const lm_tune_folder *f, char *out, size_t size)
{
    const lm_tune_param *p = f->param;
    size_t n = 0, of = 0;

    if (!f->n_params)
        return false;
    while (of < f->n_params && !strcmp(f->param[of].stack.module, p->stack.module))
        of++;
    n = (size_t)snprintf(out, size, "parameters of %lld experts, in '%.100s'",
                         (long long)p->stack.experts, p->stack.module);
    for (size_t i = 0; i < of && n < size; i++) {
        p = &f->param[i];
        n += (size_t)snprintf(out + n, size - n, "%s %.40s by lora_A [%lld,%lld]", i ? "," : ":",
                              p->stack.name, (long long)p->a->dim[0], (long long)p->a->dim[1]);
    }
    if (n < size)
        snprintf(out + n, size - n,
                 p->by_order ? "; shapes fit both ways: in the order in which PEFT wraps them"
                             : "; by their shapes");
    return true;
}
