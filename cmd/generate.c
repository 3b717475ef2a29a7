/* SPDX-License-Identifier: Apache-2.0 */
/* generate -- continue prompts with a model.  See man/man1/generate.1.
 *
 * Its parts are in generate/ (generate/work.h); here is the order of the work. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/stop.h"
#include "base/stream.h"
#include "base/text.h"
#include "common/device.h"
#include "common/model.h"
#include "format/source.h"
#include "generate/cache.h"
#include "generate/chat.h"
#include "generate/serve.h"
#include "text/tokenizer_source.h"

/* What generates a text of its own from a source cannot have. */
static lm_code check_encoder(const generate_work *w, lm_err *e)
{
    const struct {
        const char *option;
        bool given;
    } all[] = { { "--states", opt.states != NULL },
                { "--serve-batch", opt.serve.batch > 0 },
                { "--save-cache", opt.cache.save != NULL },
                { "--load-cache", opt.cache.load != NULL },
                { "--chat", opt.chat.talk } };
    if (w->model.config.encoder && !lm_given(&tool, "echo"))
        opt.echo = false; /* an answer is no continuation */
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i].given && lm_config_check_alone(&w->model.config, all[i].option, "this", e))
            return e->code;
    return LM_OK;
}

static lm_code open_model(generate_work *w, lm_err *e)
{
    if (generate_defaults(w, e))
        return e->code;
    unsigned how = LM_TOKENIZER_NEEDED | (opt.check_tokenizer ? LM_TOKENIZER_CHECKED : 0u);
    lm_code rc =
        lm_tokenizer_choose(opt.tokenizer, w->model.src, w->model.config.vocab, how, &w->tok, e);
    return rc ? rc : lm_tok_scratch_new(w->tok, &w->scratch, e);
}

/* What one process does with caches and texts of its own. */
static void check_mesh(void)
{
    const struct {
        const char *option;
        bool given;
    } all[] = { { "--chat", opt.chat.talk },
                { "--serve-batch", opt.serve.batch > 0 },
                { "--save-cache", opt.cache.save != NULL },
                { "--load-cache", opt.cache.load != NULL },
                { "--use-adapter", opt.use_adapter != NULL } };
    if (!tool.comm)
        return;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i].given)
            lm_misuse(&tool, all[i].option, "leave it out, or start one process",
                      "processes that share a model do not have it");
    bool piped = !opt.prompt.n && tool.argc == 1;
    for (int i = 0; i < tool.argc; i++)
        piped |= lm_stream_same(tool.argv[i], "-");
    if (piped)
        lm_misuse(&tool, "standard input", "name a file, or give -p", "processes cannot share it");
}

/* Choose the faster type, unless one is given. */
static lm_dtype choose_dtype(const generate_work *w)
{
    if (opt.dtype[0] != 'a')
        return opt.dtype[0] == 'b' ? LM_DTYPE_BF16 : LM_DTYPE_F32;
    if (generate_cache_type(w) == LM_DTYPE_F32 || generate_cache_type(w) == LM_DTYPE_BF16)
        return generate_cache_type(w);
    return !w->backend->host_memory || tool.cpu >= LM_CPU_AVX512 ? LM_DTYPE_BF16 : LM_DTYPE_F32;
}

lm_code generate_new_generator(generate_work *w, lm_loaded *model, lm_generator **out, lm_err *e)
{
    const lm_generator_opts o = { .dtype = w->type,
                                  .batch = w->batch,
                                  .context = w->context,
                                  .kv = w->caches.plan,
                                  .state_codes = w->states.plan,
                                  .most_new = opt.max_new };
    return lm_generator_new(model, &o, w->backend, out, e);
}

static lm_code open_generator(generate_work *w, lm_dtype type, lm_err *e)
{
    int64_t all = opt.chat.talk ? 1 : opt.prompt.n * opt.samples;
    w->batch = !w->in && all < opt.batch ? all : opt.batch;
    if (opt.serve.batch)
        return generate_open_served(w, type, e);
    const lm_kv_plan *kv = w->caches.plan;
    w->type = type;
    /* behind a cache all prompts count, one of which fills the context at most */
    int64_t before = generate_cache_tokens(w),
            most_new = before ? w->context - before + 1 : opt.max_new;
    if (generate_match_cache(w, type, &kv, e))
        return e->code;
    const lm_generator_opts o = { .dtype = type,
                                  .batch = w->batch,
                                  .context = w->context,
                                  .kv = kv,
                                  .state_codes = w->states.plan,
                                  .most_new = most_new,
                                  .draft = opt.draft ? opt.drafts : 0 };
    if (lm_generator_new(&w->model, &o, w->backend, &w->gen, e)) {
        if (!strcmp(e->where, "drafts"))
            lm_err_in(e, "--draft");
        if (!strcmp(e->where, "states"))
            generate_name_spec("--states", e);
        if (kv && !strcmp(e->where, kv->text))
            lm_err_in(e, "--kv");
        return e->code;
    }
    return generate_read_cache(w, kv, e);
}

static lm_code open_caches(generate_work *w, lm_err *e)
{
    if ((opt.cache.save || opt.cache.load) &&
        lm_config_check_stored(&w->model.config, opt.cache.save ? "--save-cache" : "--load-cache",
                               e))
        return e->code;
    if (generate_open_cache(w, e) || lm_open_backend(&tool, w->par, true, &w->backend, e))
        return e->code;
    lm_dtype type = choose_dtype(w);
    if (generate_open_kv(w, type, e) || generate_choose_context(w, e) ||
        lm_place_weights(&tool, opt.weights_in, type, w->backend, &w->model, e) ||
        lm_sharing_use(&tool, &w->sharing, w->backend, &w->model, e) || open_generator(w, type, e))
        return e->code;
    char cache[32];
    size_t bytes = w->gen ? lm_generator_cache_bytes(w->gen) : lm_paged_bytes(w->paged);
    lm_say(&tool, LM_LOG_INFO, "%s %s, %s on %s, seed %lld, context %lld, caches %s", tool.name,
           LM_VERSION, type == LM_DTYPE_BF16 ? "bf16" : "f32", w->backend->name,
           (long long)tool.seed, (long long)w->context, lm_show_bytes((double)bytes, cache));
    generate_say_memory(w);
    generate_say_kv(w);
    generate_say_states(w);
    lm_say_weights(&tool, &w->model);
    return LM_OK;
}

static lm_code complete(generate_work *w, lm_err *e)
{
    const lm_generation *g = &w->generation;
    const int64_t own = lm_tokenizer_eos(w->tok);
    const int64_t *ends = g->n_eos ? g->eos : &own;
    int n_ends = g->n_eos ? g->n_eos : own >= 0;
    if (w->chat && generate_chat_ends(w, &ends, &n_ends, e))
        return e->code;
    lm_complete_opts o = { .sample = { opt.temperature, opt.top_k, opt.top_p, opt.min_p,
                                       opt.penalty },
                           .seed = (uint64_t)tool.seed,
                           .samples = opt.samples,
                           .eos = ends,
                           .n_eos = opt.ignore_eos ? 0 : n_ends,
                           .stop = opt.stop.v,
                           .n_stop = opt.stop.n,
                           .logprobs = opt.logprobs,
                           .any_order = opt.any_order,
                           .skip_special = opt.skip_special };
    const lm_complete_hooks h = {
        .next = generate_next,
        .text = w->text ? generate_show : NULL,
        .done = generate_finish,
        /* a talk cannot go on without an answer; no cache without a text */
        .failed = opt.chat.talk || opt.cache.save ? NULL : generate_fail,
        .ctx = w,
        .begin = w->model.config.encoder ? generate_begin_source
                 : opt.chat.talk         ? generate_chat_begin
                 : w->image              ? generate_begin
                                         : NULL
    };
    if (generate_is_other(w) && generate_turn_to(w, e)) /* --use-adapter */
        return e->code;
    lm_code rc = w->paged        ? generate_serve(w, &o, &h, e)
                 : opt.chat.talk ? generate_talk(w, &o, &h, e)
                 : !opt.max_new  ? generate_only_prompt(w, e)
                                 : lm_complete_run(w->gen, w->tok, &o, &h, &w->st, e);
    while (!rc && w->held && !lm_stopping()) { /* prompts of another adapter */
        o.first = w->asked;
        rc = generate_turn_to(w, e);
        rc = rc ? rc : lm_complete_run(w->gen, w->tok, &o, &h, &w->st, e);
    }
    if (rc == LM_ENUMERIC) {
        lm_err_in(e, "%s", tool.argv[0]);
        snprintf(e->todo, sizeof e->todo, "%s", lm_advise_finite(tool.argv[0]));
    }
    return rc;
}

/* Rank 0 writes; what the others would is the same. */
static lm_code open_out(generate_work *w, lm_err *e)
{
    return tool.rank ? lm_out_open("/dev/null", true, &w->out, e)
                     : lm_out_open(tool.output ? tool.output : "-", tool.force, &w->out, e);
}

static lm_code run(generate_work *w, lm_err *e)
{
    int n;
    const char *const *files = generate_files(&n);
    lm_code rc = lm_bundle_there(tool.argv[0], e);
    if (!rc) /* before a model is read from a pipe */
        rc = lm_source_there(files, n, e);
    if (!rc)
        rc = lm_par_new(&w->par, tool.threads, e);
    w->text = (opt.prompt.n || opt.chat.talk) && !tool.json;
    if (!rc)
        rc = lm_open_model(&tool, tool.argv[0], opt.tokenizer, w->par, &w->model, e);
    if (!rc)
        rc = lm_config_check_causal(&w->model.config, tool.argv[0], "use a causal language model",
                                    e);
    if (!rc)
        rc = check_encoder(w, e);
    if (!rc)
        rc = lm_sharing_ask(&tool, opt.mesh, opt.adapter.n ? opt.adapter.v[0] : NULL, &w->sharing,
                            e);
    if (!rc)
        rc = generate_open_adapters(w, e);
    if (!rc)
        rc = open_model(w, e);
    if (!rc)
        rc = generate_open_prompts(w, e);
    if (!rc)
        rc = generate_open_chat(w, e);
    if (!rc)
        rc = open_out(w, e);
    if (!rc && !tool.rank)
        rc = generate_open_metrics(w, e);
    if (!rc)
        rc = open_caches(w, e);
    if (rc)
        return rc;
    w->to = lm_out_file(w->out);
    w->live = isatty(lm_out_fd(w->out)) || !w->text ||
              opt.chat.talk; /* a reader of JSONL gets each answer at once */
    rc = complete(w, e);
    if (w->metrics)
        rc = generate_close_metrics(w, rc, e);
    if (!rc && !lm_stopping())
        rc = generate_save_cache(w, e);
    if (!rc && w->paged && tool.json)
        rc = generate_serve_record(w, e);
    if (!rc && !lm_stopping()) {
        lm_out *out = w->out;
        w->out = NULL;
        rc = lm_out_commit(out, e);
    }
    if (!rc)
        generate_summary(w);
    return rc;
}

/* An output inside the folder of prompts would be a prompt of the next run. */
static void refuse_text(const char *prompts)
{
    lm_refuse_text(&tool, tool.output, prompts);
    lm_refuse_inside(&tool, tool.output, prompts);
}

static void check_options(void)
{
    bool prompts_in = !opt.prompt.n && tool.argc == 1; /* or typed in a chat */
    if (!tool.argc)
        lm_misuse(&tool, "operands", "usage: generate [OPTION ...] MODEL [FILE ...]",
                  "0 given, 1 needed");
    if (prompts_in && lm_stream_same(tool.argv[0], "-"))
        lm_misuse(&tool, "standard input", "give prompts by -p or in files",
                  "the model is read from it, so the prompts cannot be");
    lm_refuse_twice(&tool, (const char *[]){ opt.tokenizer, prompts_in ? "-" : NULL }, 2);
    lm_refuse_same(&tool, tool.output, tool.argv[0]);
    for (int i = 1; i < tool.argc; i++)
        refuse_text(tool.argv[i]);
    if (tool.argc == 1 && !opt.prompt.n)
        lm_refuse_same(&tool, tool.output, "-");
    if (opt.tokenizer)
        lm_refuse_same(&tool, tool.output, opt.tokenizer);
    if (opt.prompt.n && tool.argc > 1)
        lm_misuse(&tool, tool.argv[1], "give prompts by -p or in files",
                  "cannot be combined with -p");
    if (opt.logprobs && opt.prompt.n && !tool.json)
        lm_misuse(&tool, "--logprobs", "add --json", "plain text cannot show them");
    for (int i = 0; i < opt.stop.n; i++)
        if (!*opt.stop.v[i])
            lm_misuse(&tool, "--stop", "leave it out", "an empty string occurs everywhere");
    if (opt.cache.load)
        lm_refuse_twice(
            &tool, (const char *[]){ opt.cache.load, prompts_in ? "-" : NULL, opt.tokenizer }, 3);
    generate_check_draft();
    generate_check_adapters();
    generate_check_cache();
    generate_check_serve();
    generate_check_chat();
    generate_check_kv();
    check_mesh();
}

int main(int argc, char **argv)
{
    lm_err err = { 0 };
    generate_work w = { .begin = lm_now() };

    lm_begin(&tool, argc, argv);
    if (!opt.list_kv)
        check_options();
    if (opt.list_kv ? generate_list_kv(&err) : run(&w, &err))
        lm_complain(&tool, &err);
    lm_out_drop(w.out);
    lm_metrics_close(w.metrics, &(lm_err){ 0 });
    lm_paged_free(w.paged);
    generate_close_adapters(&w);
    lm_generator_free(w.gen);
    generate_close_cache(&w);
    generate_close_chat(&w);
    lm_cache_plan_fini(&w.caches);
    lm_cache_plan_fini(&w.down);
    lm_cache_plan_fini(&w.states);
    lm_loaded_fini(&w.model);
    lm_tune_use_fini(&w.adapter);
    lm_close_backend(&tool, w.backend);
    lm_tok_scratch_free(w.scratch);
    lm_tokenizer_free(w.tok);
    lm_input_close(w.in);
    lm_doc_fini(&w.doc);
    lm_ids_fini(&w.ids);
    lm_ids_fini(&w.start);
    lm_buf_fini(&w.line);
    lm_buf_fini(&w.text_of);
    lm_generation_fini(&w.generation);
    lm_par_free(w.par);
    return lm_end(&tool);
}
