/* SPDX-License-Identifier: Apache-2.0 */
/* cache.c -- generate --save-cache, --load-cache, --deadline. */
#include "generate/cache.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/mem.h"
#include "base/stream.h"
#include "base/text.h"
#include "model/cache_about.h"
#include "model/cache_rope.h"
#include "model/generate_cache.h"

/* ---- options ---- */

static void check_save(void)
{
    if (lm_path_is_stdout(opt.cache.save))
        opt.cache.save = "-";
    const char *to = opt.cache.save;
    bool one = opt.prompt.n == 1 && opt.samples == 1;
    if (!one)
        lm_misuse(&tool, "--save-cache", "give one -p, and --n 1",
                  "the cache of one text is saved");
    if (!strcmp(to, "-") && opt.max_new != 0)
        lm_misuse(&tool, "--save-cache", "add -n 0", "standard output is for the text");
    if (!strcmp(to, "-") && tool.output)
        lm_misuse(&tool, "-o", "leave it out", "cannot be combined with --save-cache -");
    if (!strcmp(to, "-") && isatty(STDOUT_FILENO) && !tool.force)
        lm_misuse(&tool, "standard output", "name a file, or give -f", "is a terminal");
    if (strcmp(to, "-")) {
        lm_refuse_same(&tool, to, tool.argv[0]);
        if (opt.cache.load)
            lm_refuse_same(&tool, to, opt.cache.load);
        if (tool.output)
            lm_refuse_same(&tool, to, tool.output);
    }
}

void generate_check_cache(void)
{
    const generate_cache_options *o = &opt.cache;
    if ((o->save || o->load) && opt.serve.batch)
        lm_misuse(&tool, o->save ? "--save-cache" : "--load-cache", "leave one out",
                  "cannot be combined with --serve-batch");
    if (opt.max_new == 0 && !o->save)
        lm_misuse(&tool, "--max-new-tokens", "give 1 or more, or --save-cache",
                  "0 tokens are of use only to save a cache");
    if (o->deadline > 0 && !o->load)
        lm_misuse(&tool, "--deadline", "add --load-cache", "no cache is loaded");
    if (o->unverified && (!o->load || lm_stream_is(o->load)))
        lm_misuse(&tool, "--unverified", "give --load-cache FILE", "a file is needed");
    if (o->save)
        check_save();
    if (o->load && tool.output)
        lm_refuse_same(&tool, tool.output, o->load);
}

/* ---- loading ---- */

lm_code generate_open_cache(generate_work *w, lm_err *e)
{
    const char *path = opt.cache.load;
    if (opt.cache.save && lm_out_try(opt.cache.save, tool.force, e))
        return e->code;
    if (!path)
        return LM_OK;
    if (opt.cache.unverified)
        return lm_kv_llama_open(path, &w->state, e);
    if (!lm_stream_is(path) && lm_kv_llama_is(path))
        return lm_fail(e, LM_EUSAGE, path, "add --unverified if it is of this model",
                       "it is a state of llama.cpp, which does not name its model");
    return lm_kv_file_open_input(path, &w->cache, e);
}

int64_t generate_cache_tokens(const generate_work *w)
{
    const lm_kv_about *a = w->cache ? lm_kv_file_about(w->cache) : NULL;
    if (w->state)
        return lm_kv_llama_tokens(w->state) + lm_kv_llama_has_next(w->state);
    return a ? a->tokens + a->has_next : 0;
}

lm_dtype generate_cache_type(const generate_work *w)
{
    return w->cache ? lm_kv_file_about(w->cache)->act : LM_DTYPE_NONE;
}

static lm_code describe(generate_work *w, lm_dtype type, lm_cache_about *out, lm_err *e)
{
    uint8_t digest[16];
    const lm_kv_policy *p = w->caches.plan ? w->caches.plan->policy : NULL;
    int64_t positions = w->context, most = w->model.config.max_positions;
    if (p && p->ranked && positions > most) /* ranks are below it */
        positions = most;
    *out = (lm_cache_about){ 0 };
    if (lm_model_source_weights_digest(w->model.src, digest, e))
        return e->code;
    return lm_cache_about_model(&w->model.config, digest, positions, type, out, e);
}

/* Layers with a window are stored apart there. */
static lm_code check_state(const generate_work *w, lm_err *e)
{
    const lm_config *c = &w->model.config;
    for (int64_t i = 0; i < c->layers && w->state; i++)
        if (c->layer[i].attention == LM_ATTENTION_LATENT || lm_layer_has_state(&c->layer[i]))
            return lm_fail(e, LM_EUSAGE, opt.cache.load, "compute the text again",
                           "states of llama.cpp with latents or recurrent layers are not read");
    for (int64_t i = 0; i < c->layers && w->state; i++)
        if (c->layer[i].window)
            return lm_fail(e, LM_EUSAGE, opt.cache.load, NULL,
                           "states of models with sliding windows are not read");
    return LM_OK;
}

/* Without a policy, and with one that drops no generated tokens, what was kept stays, and new tokens are appended. */
static lm_code keep_rows(generate_work *w, const lm_kv_about *f, const lm_kv_plan **plan, lm_err *e)
{
    enum { PLAIN_PAGE = 64 };
    lm_kv_plan *p = &w->plan;
    bool ranked = false;
    if (*plan && (*plan)->policy && lm_kv_policy_replaces((*plan)->policy))
        return LM_OK;
    for (int64_t i = 0; i < 2 * f->layers && f->form; i++)
        ranked = ranked || f->form[i].pre_rope;
    if (ranked)
        return lm_fail(e, LM_EUSAGE, opt.cache.load, "add --kv and that policy",
                       "its tokens have positions inside the cache, of '%s'",
                       f->policy ? f->policy : "streaming");
    if (lm_alloc_n(&w->plain, 2 * (size_t)f->layers, sizeof *w->plain, "forms of a cache", e))
        return e->code;
    for (int64_t i = 0; i < 2 * f->layers; i++)
        w->plain[i].plain = f->act;
    *p = *plan ? **plan
               : (lm_kv_plan){ .layers = f->layers,
                               .page = f->form ? f->page : PLAIN_PAGE,
                               .side = f->form ? f->form : w->plain,
                               .text = f->spec ? f->spec : "auto" };
    w->stay = (lm_kv_policy){ .kind = LM_KV_STAY, .window = 1 };
    for (int64_t l = 0; l < f->layers; l++)
        if (f->rows[l] > w->stay.capacity)
            w->stay.capacity = f->rows[l];
    p->policy = &w->stay;
    *plan = p;
    return LM_OK;
}

lm_code generate_match_cache(generate_work *w, lm_dtype type, const lm_kv_plan **plan, lm_err *e)
{
    lm_cache_about a;
    if (!w->cache)
        return check_state(w, e);
    const lm_kv_about *f = lm_kv_file_about(w->cache);
    lm_code rc = describe(w, type, &a, e);
    rc = rc ? rc : lm_kv_file_match(w->cache, &a.about, w->context, e);
    lm_cache_about_fini(&a);
    if (!rc && f->act != type)
        rc = lm_fail(e, LM_EUSAGE, opt.cache.load, "give --dtype as the cache has it",
                     "it has numbers of %s, the model runs in %s", lm_dtype_name(f->act),
                     lm_dtype_name(type));
    if (!rc && f->rows)
        return keep_rows(w, f, plan, e);
    if (rc || *plan || !f->form)
        return rc;
    w->plan =
        (lm_kv_plan){ .layers = f->layers, .page = f->page, .side = f->form, .text = f->spec };
    *plan = &w->plan;
    return LM_OK;
}

/* A cache in other forms than those of the generator. */
static lm_code convert(generate_work *w, const lm_kv_plan *plan, lm_err *e)
{
    lm_kv_image *other;
    lm_kv_plan forms = plan ? *plan : (lm_kv_plan){ 0 };
    if (plan && plan->policy && plan->policy->kind != LM_KV_STAY)
        return LM_OK; /* the policy of the cache, with its forms */
    forms.policy = NULL;
    if (lm_cache_convert(w->image, plan ? &forms : NULL, tool.cpu, w->par, &other, e)) {
        lm_err_in(e, "%s", opt.cache.load);
        return e->code;
    }
    lm_kv_image_free(w->image);
    w->image = other;
    return LM_OK;
}

static void say_levels(const generate_work *w, const int *chosen)
{
    int64_t n = lm_cachegen_chunks(w->image->about.tokens);
    char text[200] = "";
    if (!lm_kv_file_levels(w->cache))
        return;
    for (int64_t i = 0; i < n && strlen(text) < sizeof text - 8; i++)
        if (chosen[i] == LM_KV_COMPUTE)
            snprintf(text + strlen(text), 8, "%s-", i ? " " : "");
        else
            snprintf(text + strlen(text), 8, "%s%d", i ? " " : "", chosen[i]);
    lm_say(&tool, LM_LOG_INFO, "levels of its chunks: %s%s", text,
           strlen(text) < sizeof text - 8 ? "" : " ...");
}

/* The state of llama.cpp; its weights of these two types have their rows in another order. */
static lm_code read_state(generate_work *w, const lm_kv_plan *plan, lm_err *e)
{
    const lm_config *c = &w->model.config;
    const char *type = lm_arch_name(c->arch);
    bool pairs = !strcmp(type, "llama") || !strcmp(type, "mistral");
    lm_cache_about a;
    lm_code rc = describe(w, w->type, &a, e);
    rc = rc ? rc : lm_kv_llama_read(w->state, &a.about, pairs, c->vocab, &w->image, e);
    lm_cache_about_fini(&a);
    return rc ? rc : convert(w, plan, e);
}

static lm_code compute(void *ctx, int64_t first, int64_t n, lm_err *e)
{
    generate_work *w = ctx;
    return lm_generator_compute(w->gen, 0, w->image, first, n, e);
}

/* What a deadline depends on: how many rows follow the cache, the time of a row, and whether rows can be computed.  The
 * time is measured within a tenth of what is left. */
static lm_code plan_deadline(generate_work *w, lm_kv_reading *r, lm_err *e)
{
    double left = r->deadline - (lm_now() - w->begin);
    if (!(r->deadline > 0) || !lm_kv_file_levels(w->cache) || left <= 0)
        return LM_OK;
    r->rows_behind = lm_generator_rows_behind(w->gen, lm_kv_file_about(w->cache), w->first_tokens);
    r->compute = lm_generator_computes(w->gen) ? compute : NULL;
    r->ctx = w;
    return lm_generator_row_seconds(w->gen, 0, left / 10, &r->row_seconds, e);
}

lm_code generate_read_cache(generate_work *w, const lm_kv_plan *plan, lm_err *e)
{
    int *chosen;
    char bytes[32];
    if (!w->cache)
        return w->state ? read_state(w, plan, e) : LM_OK;
    int64_t tokens = lm_kv_file_about(w->cache)->tokens;
    if (lm_alloc_n(&chosen, (size_t)lm_cachegen_chunks(tokens), sizeof *chosen, "chunks", e))
        return e->code;
    lm_kv_reading r = { .vocab = w->model.config.vocab,
                        .context = w->context,
                        .level = LM_KV_FILE_BEST,
                        .deadline = opt.cache.deadline,
                        .begin = w->begin,
                        .chosen = chosen };
    lm_code rc = plan_deadline(w, &r, e);
    rc = rc ? rc : lm_kv_image_read(w->cache, &r, tool.cpu, w->par, &w->image, e);
    if (!rc) {
        lm_say(&tool, LM_LOG_INFO, "%s: %lld tokens, %s, after %.3f s",
               lm_stream_same(opt.cache.load, "-") ? "standard input" : opt.cache.load,
               (long long)tokens, lm_show_bytes((double)lm_kv_image_bytes(w->image), bytes),
               lm_now() - w->begin);
        say_levels(w, chosen);
        rc = convert(w, plan, e);
    }
    lm_free(chosen);
    return rc;
}

/* ---- running ---- */

lm_code generate_add_cache(const generate_work *w, lm_ids *ids, lm_err *e)
{
    size_t n = (size_t)generate_cache_tokens(w);
    if (!n)
        return LM_OK;
    if (lm_grow(&ids->v, &ids->cap, ids->n + n, sizeof *ids->v, "tokens", e))
        return e->code;
    memmove(ids->v + n, ids->v, ids->n * sizeof *ids->v);
    for (int64_t i = 0; i < w->image->about.tokens; i++)
        ids->v[i] = (uint32_t)w->image->content.ids[i];
    if (w->image->about.has_next)
        ids->v[n - 1] = (uint32_t)w->image->about.next;
    ids->n += n;
    return LM_OK;
}

/* The logits of the first new token are there. */
static lm_code say_ready(generate_work *w, lm_err *e)
{
    if (w->backend->sync(w->backend, w->backend->main, e))
        return e->code;
    w->ready = lm_now() - w->begin;
    if (opt.cache.deadline > 0 && w->ready > opt.cache.deadline)
        lm_say(&tool, LM_LOG_WARN, "--deadline: the first token came after %.3g s, not %.3g s",
               w->ready, opt.cache.deadline);
    else
        lm_say(&tool, LM_LOG_INFO, "first token after %.3f s", w->ready);
    return LM_OK;
}

lm_code generate_begin(void *ctx, lm_generator *g, int64_t slot, const uint32_t *ids, int64_t n,
                       lm_err *e)
{
    generate_work *w = ctx;
    int64_t before = generate_cache_tokens(w);
    w->last = ids[n - 1];
    if (!w->image)
        return lm_generator_prompt(g, slot, ids, n, NULL, e);
    w->st.prompt_tokens -= before;
    lm_code rc = lm_generator_resume(g, slot, w->image, ids + before, n - before, w->par, e);
    if (rc)
        lm_err_in(e, "%s", opt.cache.load);
    return rc || w->ready > 0 ? rc : say_ready(w, e);
}

lm_code generate_only_prompt(generate_work *w, lm_err *e)
{
    lm_completion c = { 0 };
    double start = lm_now();
    bool got;
    lm_code rc = generate_next(w, &c, &got, e);
    if (!rc && (!w->image || (int64_t)c.ids.n > generate_cache_tokens(w)))
        rc = generate_begin(w, w->gen, 0, c.ids.v, (int64_t)c.ids.n, e);
    w->st.prompts = 1;
    w->st.prompt_tokens += (int64_t)c.ids.n;
    w->st.prompt_seconds = lm_now() - start;
    lm_ids_fini(&c.ids);
    lm_buf_fini(&c.prompt);
    return rc ? rc : w->backend->sync(w->backend, w->backend->main, e);
}

/* ---- saving ---- */

/* The slot's cache and the token that follows; with nothing run, the cache that was loaded. */
static lm_code make_image(generate_work *w, lm_kv_image **out, lm_err *e)
{
    lm_cache_about a;
    const lm_kv_about *f = w->cache ? lm_kv_file_about(w->cache) : NULL;
    int64_t used = lm_generator_used(w->gen, 0);
    lm_code rc = describe(w, w->type, &a, e);
    a.about.has_next = w->tokens > used;
    a.about.next = (int32_t)w->last;
    if (f && f->policy && !f->ordered && !strcmp(w->plan.text, f->policy))
        a.about.policy = f->policy; /* it dropped tokens of the prompt only, and is done */
    rc = rc ? rc : lm_generator_save(w->gen, 0, &a.about, w->par, out, e);
    lm_cache_about_fini(&a);
    return rc;
}

lm_code generate_save_cache(generate_work *w, lm_err *e)
{
    const lm_kv_out to = { .path = opt.cache.save, .force = tool.force };
    lm_kv_image *m = NULL;
    if (!opt.cache.save)
        return LM_OK;
    lm_code rc = lm_generator_used(w->gen, 0) ? make_image(w, &m, e) : LM_OK;
    const lm_kv_image *from = m ? m : w->image;
    rc = rc ? rc : lm_kv_file_write(&to, &from->about, &from->content, 0, tool.cpu, w->par, e);
    lm_kv_image_free(m);
    return rc;
}

void generate_close_cache(generate_work *w)
{
    lm_kv_image_free(w->image);
    lm_kv_file_close(w->cache);
    lm_kv_llama_close(w->state);
    lm_free(w->plain);
}
