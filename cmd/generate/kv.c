/* SPDX-License-Identifier: Apache-2.0 */
/* kv.c -- generate --kv and --list-kv. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/text.h"
#include "format/source.h"
#include "generate/work.h"
#include "kv/list.h"

lm_code generate_list_kv(lm_err *e)
{
    lm_buf text = { 0 };
    if (!(tool.json ? lm_kv_methods_json : lm_kv_methods_table)(false, &text, e))
        printf("%s", text.data);
    lm_buf_fini(&text);
    return e->code;
}

static void check_spec(const char *option, const char *text)
{
    lm_kv_spec *s = NULL;
    lm_err e = { 0 };
    lm_code rc = text ? lm_kv_spec_parse(text, &s, &e) : LM_OK;
    if (rc)
        snprintf(e.where, sizeof e.where, "%s", option);
    for (int i = 0; !rc && s && lm_kv_spec_file(s, i); i++)
        rc = lm_source_there((const char *[]){ lm_kv_spec_file(s, i) }, 1, &e);
    lm_kv_spec_free(s);
    if (rc) {
        lm_complain(&tool, &e);
        exit(lm_end(&tool));
    }
}

void generate_check_kv(void)
{
    check_spec("--kv", opt.kv);
    check_spec("--kv-down", opt.serve.down);
    check_spec("--states", opt.states);
}

void generate_name_spec(const char *option, lm_err *e)
{
    if (!strcmp(e->where, "states") || !strcmp(e->where, "kv cache"))
        snprintf(e->where, sizeof e->where, "%s", option);
    else
        lm_err_in(e, "%s", option);
}

lm_code generate_open_kv(generate_work *w, lm_dtype type, lm_err *e)
{
    if (opt.states && lm_cache_states_open(opt.states, &w->model.config, &w->states, e)) {
        generate_name_spec("--states", e);
        return e->code;
    }
    if (opt.kv && lm_cache_plan_open(opt.kv, &w->model.config, type, w->model.src, &w->caches, e))
        return e->code;
    const lm_kv_policy *p = w->caches.plan ? w->caches.plan->policy : NULL;
    if (p && tool.comm)
        return lm_fail(e, LM_EUSAGE, "--kv", "leave the policy out",
                       "processes that share a model keep all tokens");
    const lm_kv_about *a = w->cache ? lm_kv_file_about(w->cache) : NULL;
    if (p && (w->state || (a && !a->rows)))
        return lm_fail(e, LM_EUSAGE, "--kv", "leave it or --load-cache out",
                       "a policy cannot drop tokens of a saved cache");
    if (p && a && !a->policy)
        return lm_fail(e, LM_EUSAGE, "--kv", "leave the policy out",
                       "tokens of %s were dropped, and it does not name the policy",
                       opt.cache.load);
    if (p && a && strcmp(a->policy, w->caches.plan->text))
        return lm_fail(e, LM_EUSAGE, "--kv", "give that, or leave the policy out",
                       "tokens of %s were dropped with '%s', not '%s'", opt.cache.load, a->policy,
                       w->caches.plan->text);
    return LM_OK;
}

/* Methods that code, and no layer that they do not leave alone. */
static bool leaves_all_alone(const lm_kv_plan *p)
{
    bool coded = false;
    for (int64_t i = 0; i < 2 * p->layers; i++)
        coded = coded || p->side[i].format;
    return !coded &&
           (strstr(p->text, "first=") || strstr(p->text, "last=") || strstr(p->text, "skip="));
}

void generate_say_kv(const generate_work *w)
{
    const lm_kv_plan *p = w->caches.plan;
    char token[32], tail[32];
    double numbers = 0, bytes;
    if (!p)
        return;
    for (int64_t l = 0; l < p->layers; l++)
        numbers += (double)lm_kv_site_numbers(&w->caches.site[l]);
    if (leaves_all_alone(p))
        lm_say(&tool, LM_LOG_WARN,
               "--kv %s: all %" PRId64 " layers are left alone, so that nothing is coded", p->text,
               p->layers);
    bytes = lm_kv_plan_bytes(p, w->caches.site);
    lm_say(&tool, LM_LOG_INFO,
           "--kv %s: %s a token, %.2f bits a number; pages of %" PRId64 " tokens; %s of plain "
           "tokens a text",
           p->text, lm_show_bytes(bytes, token), bytes * 8 / numbers, p->page,
           lm_show_bytes(w->gen ? (double)lm_generator_tail_bytes(w->gen)
                                : (double)lm_paged_tail_bytes(w->paged),
                         tail));
    size_t prompts = 0;
    int64_t kept = w->gen ? lm_generator_kept(w->gen, &prompts) : 0;
    if (p->policy)
        lm_say(&tool, LM_LOG_INFO,
               "--kv: room for %" PRId64 " token%s of a text; prompts share a cache of %s", kept,
               lm_plural(kept), lm_show_bytes((double)prompts, token));
}

void generate_say_states(const generate_work *w)
{
    const lm_config *c = &w->model.config;
    double coded = 0, plain = 0;
    char a[32], b[32];
    for (int64_t l = 0; l < c->layers && w->states.plan; l++) {
        const lm_delta_sizes *d = &c->layer[l].delta;
        const lm_kv_format *f = w->states.plan->side[2 * l + LM_KV_K].format;
        const double numbers = (double)(d->heads * d->key_dim * d->value_dim) * sizeof(float);
        if (c->layer[l].attention != LM_ATTENTION_DELTA)
            continue;
        plain += numbers;
        coded +=
            f ? (double)d->heads * (double)lm_kv_page_bytes(f, d->key_dim, d->value_dim) : numbers;
    }
    if (w->states.plan)
        lm_say(&tool, LM_LOG_INFO, "--states %s: %s a text, f32 %s", w->states.plan->text,
               lm_show_bytes(coded, a), lm_show_bytes(plain, b));
}

void generate_say_memory(const generate_work *w)
{
    lm_generator_memory m;
    char caches[32], prompts[32], activations[32], policy[32];
    if (!w->gen)
        return;
    lm_generator_plan(w->gen, &m);
    lm_say(&tool, LM_LOG_INFO,
           "memory beside the weights: caches %s, that of prompts %s, activations %s, policy %s",
           lm_show_bytes((double)m.caches, caches), lm_show_bytes((double)m.prompts, prompts),
           lm_show_bytes((double)m.activations, activations),
           lm_show_bytes((double)m.policy, policy));
}
