/* SPDX-License-Identifier: Apache-2.0 */
/* adapters.c -- several adapters on one base: each has a graph and caches of its own, and reads the base's weights.
 *
 * Prompts are answered in their order.  When a prompt asks for another adapter than the ones before it, these are
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
    if (generate_has_names() && (opt.prompt.n || opt.chat.talk || opt.serve.batch || !opt.max_new))
        lm_misuse(&tool, "--adapter", "give prompts as JSONL, or a path without a name",
                  "adapters with names are chosen by the key \"adapter\" of prompts, %s",
                  opt.serve.batch ? "and not with --serve-batch" : "which these have not");
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
    return LM_OK;
}

lm_code generate_asks_adapter(generate_work *w, const char *line, size_t len, lm_err *e)
{
    lm_buf name = { 0 };
    size_t begin, end;
    int64_t lone = 0;
    w->wanted = NULL;
    if (!w->n_named)
        return LM_OK;
    lm_jsonl_fault fault = lm_jsonl_find(line, len, "adapter", &begin, &end);
    if (fault.what && fault.kind == LM_JSONL_NO_STRING)
        return lm_fail(e, LM_EFORMAT, "adapter", "write {\"adapter\": \"NAME\"}",
                       "is not a string");
    if (fault.what)
        return LM_OK; /* the model alone */
    lm_code rc = lm_jsonl_unescape(line + begin, end - begin, &name, &lone, e);
    for (int i = 0; !rc && !w->wanted && i < w->n_named; i++)
        if (w->named[i].name_len == name.len && !memcmp(w->named[i].name, name.data, name.len))
            w->wanted = &w->named[i];
    if (!rc && !w->wanted)
        rc = lm_fail(e, LM_EUSAGE, "adapter", "give it by --adapter NAME=PATH",
                     "there is no adapter '%.60s'", name.data ? name.data : "");
    lm_buf_fini(&name);
    return rc;
}

bool generate_is_other(const generate_work *w)
{
    return (w->wanted ? &w->wanted->model : &w->model) != w->now;
}

lm_code generate_turn_to(generate_work *w, lm_err *e)
{
    generate_adapter *a = w->wanted;
    if (!w->base_gen)
        w->base_gen = w->gen;
    if (a && !a->gen) {
        a->model.codes_space = w->model.codes_space;
        a->model.base = w->model.store;
        if (generate_new_generator(w, &a->model, &a->gen, e))
            return e->code;
    }
    w->gen = a ? a->gen : w->base_gen;
    w->now = a ? &a->model : &w->model;
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
}
