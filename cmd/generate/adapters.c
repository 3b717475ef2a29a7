/* SPDX-License-Identifier: Apache-2.0 */
/* adapters.c -- several adapters on one base: each has graphs of its own, which read the base's weights.
 *
 * With --serve-batch prompts of all adapters are in one batch, with pages of one cache; LoRA adapters share graphs, too.
 * Otherwise each adapter has caches of its own: when a prompt asks for another adapter than the ones before it, these are
 * completed first; prompts of one adapter that stand together run together. */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "format/jsonl.h"
#include "generate/work.h"

/* "NAME=PATH": the length of NAME; 0: a path alone. */
static size_t name_length(const char *given)
{
    size_t n = strcspn(given, "=/");
    return given[n] == '=' ? n : 0;
}

bool generate_has_names(void)
{
    return opt.adapter.n > 0 && name_length(opt.adapter.v[0]) > 0;
}

void generate_check_adapters(void)
{
    for (int i = 0; i < opt.adapter.n; i++) {
        const char *a = opt.adapter.v[i];
        size_t n = name_length(a);
        if (opt.adapter.n > 1 && !n)
            lm_misuse(&tool, "--adapter", "write NAME=PATH",
                      "'%s' has no name by which prompts choose it", a);
        for (int k = 0; k < i; k++)
            if (n && n == name_length(opt.adapter.v[k]) && !strncmp(a, opt.adapter.v[k], n))
                lm_misuse(&tool, "--adapter", "give each one a name of its own",
                          "'%.*s' is given twice", (int)n, a);
        lm_refuse_same(&tool, tool.output, n ? a + n + 1 : a);
    }
    if (opt.adapter.n && (opt.cache.save || opt.cache.load))
        lm_misuse(&tool, "--adapter", "leave out --save-cache and --load-cache",
                  "caches in files are those of the model alone");
    if (opt.use_adapter && !generate_has_names())
        lm_misuse(&tool, "--use-adapter", "give --adapter NAME=PATH, too",
                  "chooses one of several adapters by its name");
    if (generate_has_names() && opt.prompt.n && !opt.use_adapter)
        lm_misuse(
            &tool, "--adapter", "choose one by --use-adapter NAME, or give prompts as JSONL",
            "adapters with names are chosen by the key \"adapter\" of prompts, which -p has not");
}

static lm_code open_named(generate_work *w, generate_adapter *a, const char *given, lm_err *e)
{
    size_t n = name_length(given);
    a->name = given;
    a->name_len = n;
    a->model = w->model;
    a->model.store = NULL;
    a->model.adapter = NULL;
    return lm_open_adapter(&tool, given + n + 1, w->par, &a->model, &a->use, e);
}

/* With --serve-batch: LoRA adapters become low-rank paths in the graphs of the model alone, whose rows choose among
 * them. */
static lm_code join_named(generate_work *w, lm_err *e)
{
    lm_attach **of = NULL;
    const lm_st **tensors = NULL;
    int n = 0;
    lm_code rc = lm_alloc_n(&of, (size_t)w->n_named, sizeof *of, "adapters", e);
    rc = rc ? rc : lm_alloc_n(&tensors, (size_t)w->n_named, sizeof *tensors, "adapters", e);
    for (int i = 0; !rc && i < w->n_named; i++) {
        lm_tune_use *u = &w->named[i].use;
        if (!lm_tune_use_joins(u))
            continue;
        of[n] = u->attach;
        tensors[n] = u->adapter.tensors;
        w->named[i].number = ++n;
    }
    if (!rc && n)
        rc = lm_join_new(of, tensors, n, &w->join, e);
    if (w->join)
        w->model.adapter = lm_join_adapter(w->join);
    lm_free(of);
    lm_free(tensors);
    return rc;
}

lm_code generate_open_adapters(generate_work *w, lm_err *e)
{
    w->now = &w->model;
    if (!opt.adapter.n)
        return LM_OK;
    if (!generate_has_names())
        return lm_open_adapter(&tool, opt.adapter.v[0], w->par, &w->model, &w->adapter, e);
    if (lm_alloc_n(&w->named, (size_t)opt.adapter.n, sizeof *w->named, "adapters", e))
        return e->code;
    for (int i = 0; i < opt.adapter.n; i++, w->n_named++)
        if (open_named(w, &w->named[i], opt.adapter.v[i], e))
            return e->code;
    if (opt.use_adapter && generate_want_adapter(w, opt.use_adapter, strlen(opt.use_adapter), e)) {
        lm_err_in(e, "--use-adapter");
        return e->code;
    }
    w->usual = w->wanted;
    return opt.serve.batch ? join_named(w, e) : LM_OK;
}

/* What the adapter's model shares with the model alone, whose weights are loaded. */
static void share_base(const generate_work *w, generate_adapter *a)
{
    a->model.codes_space = w->model.codes_space;
    a->model.base = w->model.store;
}

lm_code generate_serve_adapters(generate_work *w, lm_err *e)
{
    for (int i = 0; i < w->n_named; i++) {
        if (w->named[i].number)
            continue;
        share_base(w, &w->named[i]);
        if (lm_paged_add(w->paged, &w->named[i].model, &w->named[i].number, e))
            return e->code;
    }
    return LM_OK;
}

const lm_loaded *generate_model(const generate_work *w)
{
    return w->wanted ? &w->wanted->model : &w->model;
}

lm_code generate_want_adapter(generate_work *w, const char *name, size_t len, lm_err *e)
{
    generate_adapter *found = NULL;
    for (int i = 0; !found && i < w->n_named; i++)
        if (w->named[i].name_len == len && !memcmp(w->named[i].name, name, len))
            found = &w->named[i];
    if (len && !found)
        return lm_fail(e, LM_EUSAGE, "adapter", "give it by --adapter NAME=PATH",
                       "there is no adapter '%.*s'", (int)(len < 60 ? len : 60), name);
    w->wanted = found;
    return LM_OK;
}

lm_code generate_asks_adapter(generate_work *w, const char *line, size_t len, lm_err *e)
{
    lm_buf name = { 0 };
    size_t begin, end;
    int64_t lone = 0;
    w->wanted = w->usual;
    if (!w->n_named)
        return LM_OK;
    lm_jsonl_fault fault = lm_jsonl_find(line, len, "adapter", &begin, &end);
    if (fault.what && fault.kind == LM_JSONL_NO_STRING)
        return lm_fail(e, LM_EFORMAT, "adapter", "write {\"adapter\": \"NAME\"}",
                       "is not a string");
    if (fault.what)
        return LM_OK;
    lm_code rc = lm_jsonl_unescape(line + begin, end - begin, &name, &lone, e);
    if (!rc)
        rc = generate_want_adapter(w, name.data ? name.data : "", name.len, e);
    lm_buf_fini(&name);
    return rc;
}

bool generate_is_other(const generate_work *w)
{
    return !w->paged && generate_model(w) != w->now;
}

lm_code generate_turn_to(generate_work *w, lm_err *e)
{
    generate_adapter *a = w->wanted;
    if (!w->base_gen)
        w->base_gen = w->gen;
    if (a && !a->gen) {
        share_base(w, a);
        if (generate_new_generator(w, &a->model, &a->gen, e))
            return e->code;
    }
    w->gen = a ? a->gen : w->base_gen;
    w->now = generate_model(w);
    return LM_OK;
}

void generate_close_adapters(generate_work *w)
{
    if (w->base_gen)
        w->gen = w->base_gen;
    for (int i = 0; i < w->n_named; i++) {
        generate_adapter *a = &w->named[i];
        lm_generator_free(a->gen);
        lm_store_free(a->model.store); /* before that of the model, whose weights it reads */
        lm_tune_use_fini(&a->use);
    }
    lm_free(w->named);
    lm_join_free(w->join);
}
