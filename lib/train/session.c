/* SPDX-License-Identifier: Apache-2.0 */
/* session.c -- a training from its model and data to its last checkpoint. */
#include "train/session.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "base/mem.h"
#include "base/par.h"
#include "base/text.h"
#include "format/folder_run.h"
#include "format/fp8_source.h"
#include "kernels/peak.h"
#include "model/arch.h"
#include "model/preset.h"
#include "text/tokenizer_match.h"
#include "text/tokenizer_source.h"
#include "train/advice.h"
#include "train/data.h"
#include "train/disk.h"
#include "train/report.h"
#include "train/run.h"

/* ---- the model ---- */

static lm_code load_config(lm_session *s, lm_err *e)
{
    const char *model = s->ask.model;
    if (!s->config_json && s->ask.plan && lm_path_exists(model) &&
        lm_config_alone(model, &s->config_json, e))
        return e->code;
    if (s->config_json)
        return LM_OK;
    if (lm_fp8_source_open(model, &s->ask.how, &s->source, e))
        return e->code;
    if (!lm_model_source_config(s->source))
        return lm_fail(e, LM_EUSAGE, lm_model_source_path(s->source), "name a model folder",
                       "a lone file has no config.json");
    s->config_json = json_deep_copy(lm_model_source_config(s->source));
    return s->config_json ? LM_OK
                          : lm_fail(e, LM_ELIMIT, "config.json", NULL, "no memory for a copy");
}

/* Masks of the model's tokenizer; of a plan that has none, any. */
static lm_code make_masks(lm_session *s, lm_err *e)
{
    lm_tokenizer *tok = NULL;
    lm_mlm *m = &s->o.mlm;
    if (s->source && lm_tokenizer_of(s->source, &tok, e))
        return e->code;
    if (tok) {
        lm_code rc = lm_mlm_init(m, tok, s->config.vocab, s->ask.model, e);
        if (!rc && s->o.nsp.on)
            rc = lm_nsp_ids_of(tok, s->config.vocab, s->ask.model, &s->o.nsp, e);
        lm_tokenizer_free(tok);
        return rc;
    }
    if (!s->ask.plan)
        return lm_fail(e, LM_EUSAGE, s->ask.model, "copy its tokenizer into the folder",
                       "has no tokenizer, which names the mask token");
    m->words = s->config.vocab;
    return LM_OK;
}

/* The model gets a head of pairs, if it has none, and its class. */
static lm_code use_pairs(lm_session *s, lm_err *e)
{
    if (s->config.types < 2)
        return lm_fail(e, LM_EUSAGE, s->ask.model, "use a model with 2",
                       "has %lld type%s of tokens, but the texts of a pair are of two",
                       (long long)s->config.types, lm_plural((uint64_t)s->config.types));
    s->o.nsp.on = true;
    s->o.documents = true; /* no row sees the padding */
    return lm_config_set_pairs(&s->config, s->config_json, true, s->ask.model, e);
}

/* The sequence length, that of sources, becomes that of their targets. */
static lm_code use_spans(lm_session *s, const lm_targets *t, lm_err *e)
{
    if (lm_span_fit(s->o.seq, t->key[LM_TARGETS_DENSITY], t->key[LM_TARGETS_MEAN], &s->span, e) ||
        lm_span_ids(&s->config, s->source, &s->span, e))
        return e->code;
    s->o.seq = s->span.target;
    s->o.source = s->span.source;
    s->o.documents = false; /* text runs on over their borders, as in the published training */
    s->o.span = &s->span;
    return LM_OK;
}

static lm_targets_kind kind_of_model(const lm_config *c)
{
    return c->encoder                   ? LM_TARGETS_SPANS
           : lm_config_bidirectional(c) ? LM_TARGETS_MASKED
                                        : LM_TARGETS_NEXT;
}

/* The objective is that of the model: only an encoder fills masks, and only one with a decoder reads text with gaps. */
static lm_code choose_objective(lm_session *s, lm_err *e)
{
    lm_targets t = { .kind = LM_TARGETS_NEXT };
    if (s->ask.targets)
        t = *s->ask.targets;
    if (t.kind == LM_TARGETS_OF_MODEL)
        lm_targets_set(&t, kind_of_model(&s->config));
    if (t.kind == LM_TARGETS_MASKED && !lm_config_bidirectional(&s->config))
        return lm_fail(
            e, LM_EUSAGE, s->ask.model, "use an encoder such as BERT, or another objective",
            "a %s model sees no later tokens: it fills no masks", lm_arch_name(s->config.arch));
    if (t.kind == LM_TARGETS_SPANS)
        return use_spans(s, &t, e);
    if (s->config.encoder && s->ask.pairs)
        return LM_OK;
    if (s->config.encoder)
        return lm_config_check_alone(&s->config, s->ask.model,
                                     s->ask.targets ? "a loss of next tokens" : "this training", e);
    if (t.kind != LM_TARGETS_MASKED)
        return lm_config_check_causal(
            &s->config, s->ask.model,
            s->ask.targets ? "choose masked language modelling" : "train fills its masks", e);
    s->o.mlm = (lm_mlm){ .share = t.key[LM_TARGETS_SHARE],
                         .whole_words = t.key[LM_TARGETS_WHOLE_WORDS] > 0 };
    if (t.key[LM_TARGETS_NEXT_SENTENCE] > 0 && use_pairs(s, e))
        return e->code;
    return make_masks(s, e);
}

lm_code lm_session_config(lm_session *s, json_t *preset, lm_err *e)
{
    s->config_json = preset;
    if (load_config(s, e) || lm_config_read(s->config_json, s->ask.model, &s->config, e))
        return e->code;
    if (s->source)
        lm_config_see(&s->config, s->source);
    if (choose_objective(s, e))
        return e->code;
    if (s->ask.dropout >= 0)
        lm_config_set_dropout(&s->config, s->ask.dropout);
    if (lm_config_check_dropout(&s->config, s->ask.model, "the rate of dropout that is asked for",
                                e))
        return e->code;
    /* The weights are saved as the F32 master copy, and the config says so. */
    json_object_del(s->config_json, "dtype");
    json_object_set_new(s->config_json, "torch_dtype", json_string("float32"));
    return LM_OK;
}

/* ---- modules that predict tokens further on ---- */

/* Of DeepSeek-V3's last 4.8 T tokens (arXiv:2412.19437, section 4.2), and of Megatron-LM. */
static const double usual_weight = 0.1;

static bool has_ahead(const lm_session *s)
{
    bool any = !s->source; /* of a plan, the config is all there is */
    for (size_t i = 0; s->source && !any && i < lm_model_source_count(s->source); i++)
        any = lm_ahead_layer(&s->config, lm_model_source_at(s->source, i)->name) >= 0;
    return any;
}

/* They train with the model, or are kept as they are; a model of scores, and an adapter's file, have none.  Folders that
 * transformers saved have the key of the config without the tensors. */
static lm_code choose_ahead(lm_session *s, lm_err *e)
{
    const lm_config *c = &s->config;
    lm_build *b = &s->o.build;
    b->ahead = LM_AHEAD_NONE;
    if (!c->ahead || b->trainable || b->adapt)
        return LM_OK;
    if (!c->scores && has_ahead(s)) {
        s->o.ahead_weight = s->o.ahead_weight < 0 ? usual_weight : s->o.ahead_weight;
        b->ahead = s->o.ahead_weight > 0 ? LM_AHEAD_RUNS : LM_AHEAD_KEPT;
        return LM_OK;
    }
    if (!c->scores && s->o.ahead_weight > 0)
        return lm_fail(
            e, LM_EUSAGE, s->ask.model, "give it no weight",
            "\"num_nextn_predict_layers\" is %lld, but no tensor of these layers is there",
            (long long)c->ahead);
    if (!c->scores)
        lm_log(s->ask.sink, LM_LOG_WARN,
               "%s: \"num_nextn_predict_layers\" is %lld, but no tensor of these layers is there: "
               "the run has none",
               s->ask.model, (long long)c->ahead);
    return lm_config_drop_ahead(s->config_json, e);
}

/* ---- the head of pairs ---- */

static bool has_part(const lm_session *s, lm_part part)
{
    char name[LM_TENSOR_NAME];
    const char *bare = lm_arch_rootless(lm_tensor_hf_name(s->config.arch, part, -1, false, name));
    for (size_t i = 0; i < lm_model_source_count(s->source); i++)
        if (!strcmp(lm_arch_rootless(lm_model_source_at(s->source, i)->name), bare))
            return true;
    return false;
}

/* It trains, or is kept as it is; folders that call themselves a model with it, but have none, lose the name. */
static lm_code choose_pairs(lm_session *s, lm_err *e)
{
    lm_build *b = &s->o.build;
    b->pairs = LM_PAIRS_NONE;
    if (!s->config.pairs || b->trainable || b->adapt)
        return LM_OK;
    b->pairs = s->o.nsp.on ? LM_PAIRS_LOSS : LM_PAIRS_KEPT;
    if (s->o.nsp.on || !s->source || has_part(s, LM_PART_PAIR))
        return LM_OK;
    b->pairs = LM_PAIRS_NONE;
    return lm_config_set_pairs(&s->config, s->config_json, false, s->ask.model, e);
}

static int rank_of(const lm_session *s)
{
    return s->ask.comm ? lm_comm_rank(s->ask.comm) : 0;
}

/* With several ranks: of all processes or devices, which are alike; of all threads, and of ranks beyond them that have cores. */
static double peak_flops(const lm_session *s)
{
    const int ranks = (int)lm_mesh_ranks(&s->o.mesh);
    const lm_dtype low = s->o.precision.low;
    if (s->ask.comm || !s->backend->host_memory)
        return rank_of(s) ? 0 : ranks * s->backend->peak_flops(s->backend, low);
    const int cores = lm_cpu_count(), busy = ranks < cores ? ranks : cores;
    if (ranks <= 1)
        return s->backend->peak_flops(s->backend, low);
    const int threads = lm_par_threads(s->par);
    return lm_cpu_peak(low, s->backend->cpu, s->par) *
           (busy > threads ? (double)busy / threads : 1);
}

/* The stages of ranks along pp; a program for other options may have been made before. */
static lm_code choose_stages(lm_session *s, lm_err *e)
{
    lm_trainer_opts *o = &s->o;
    const int64_t leaves = o->leaves > 0 ? o->leaves
                                         : lm_mesh_along(&o->mesh, LM_AXIS_DP) *
                                               lm_pipeline_ranks_of_stage(o->pipe_schedule);
    const lm_train_pipe_ask ask = { .schedule = o->pipe_schedule,
                                    .stages = o->pipe_stages,
                                    .ranks = lm_mesh_along(&o->mesh, LM_AXIS_PP),
                                    .micros = o->accumulate / leaves,
                                    .batch = o->batch,
                                    .seq = o->seq,
                                    .source = o->span ? o->span->source : 0 };
    lm_train_pipe_free(s->pipe);
    o->pipe = s->pipe = NULL;
    if (ask.ranks == 1 || lm_train_pipe_new(&ask, &s->config, &s->pipe, e))
        return e->code;
    o->pipe = s->pipe;
    return LM_OK;
}

lm_code lm_session_program(lm_session *s, lm_memory_plan *plan, lm_err *e)
{
    if (choose_ahead(s, e) || choose_pairs(s, e) ||
        lm_trainer_place(&s->o, &s->config, rank_of(s), e) || choose_stages(s, e))
        return e->code;
    if (s->ask.peak_flops >= 0)
        s->o.peak_flops = s->ask.peak_flops;
    else if (!s->ask.plan)
        s->o.peak_flops = peak_flops(s);
    if (lm_trainer_program(&s->o, &s->config, s->o.eval_every > 0, s->backend, &s->program, e))
        return e->code;
    if (plan)
        lm_trainer_plan(&s->o, s->program, s->ask.lmz, plan);
    return LM_OK;
}

/* ---- the data ---- */

lm_code lm_session_find_data(lm_session *s, lm_err *e)
{
    return lm_data_find(s->ask.data, s->ask.val, &s->train_path, &s->val_path, e);
}

static lm_code open_tokens(lm_session *s, const char *path, lm_tokens **out, lm_err *e)
{
    const lm_data_opts o = { .kind = s->ask.kind,
                             .vocab = s->config.vocab,
                             .eos = lm_config_eos(&s->config),
                             .seq = s->o.span ? s->o.span->window - 1
                                              : s->o.seq - (s->o.mlm.share > 0),
                             .m = s->ask.check_tokenizer ? s->source : NULL };
    return lm_data_open(path, &o, s->par, out, e);
}

lm_code lm_session_open_train(lm_session *s, lm_err *e)
{
    return open_tokens(s, s->train_path, &s->train, e);
}

lm_code lm_session_open_val(lm_session *s, lm_err *e)
{
    if (s->o.eval_every <= 0)
        return LM_OK;
    if (!s->val_path)
        return lm_fail(e, LM_EUSAGE, "validation", "name validation data",
                       "no validation data in %s", s->ask.data);
    if (open_tokens(s, s->val_path, &s->val, e) ||
        (s->ask.check_tokenizer && lm_tokens_check_same(s->train, s->val, e)))
        return e->code;
    /* masks and spans see text on both sides: their loss says nothing of its size */
    if (!s->o.mlm.share && !s->o.span &&
        lm_data_id_bytes(s->source, s->config.vocab, &s->id_bytes, e))
        return e->code;
    if (lm_tokens_same(s->train, s->val))
        lm_log(
            s->ask.sink, LM_LOG_WARN,
            "%s: the validation data are the training data: their loss says nothing of other text",
            s->val_path);
    return LM_OK;
}

lm_code lm_session_use_examples(lm_session *s, const lm_packed *train, const lm_packed *val,
                                int64_t ids, const char *name, lm_err *e)
{
    s->packed = train;
    s->val_packed = val;
    s->ids = ids;
    if (!s->train_path && lm_strdup(&s->train_path, name, e))
        return e->code;
    if (s->o.eval_every <= 0)
        return LM_OK;
    if (!val)
        return lm_fail(e, LM_EUSAGE, "validation", "name validation data",
                       "no validation data are given");
    return lm_data_id_bytes(s->source, s->config.vocab, &s->id_bytes, e);
}

/* ---- ranks ---- */

static lm_code agree_on_model(lm_session *s, lm_err *e)
{
    char text[80], *config = json_dumps(s->config_json, JSON_COMPACT | JSON_SORT_KEYS);
    if (!config)
        return lm_fail(e, LM_ELIMIT, "config.json", NULL, "no memory for a copy");
    snprintf(text, sizeof text, "a config of digest %016" PRIx64 " at step %" PRId64,
             lm_hash_str(config), s->ask.step);
    free(config);
    return lm_comm_agree(s->ask.comm, "model", text, e);
}

static lm_code agree_on_data(lm_session *s, const char *what, const lm_tokens *data, lm_err *e)
{
    char text[80];
    uint64_t digest;
    if (!data)
        return LM_OK;
    if (lm_data_digest(data, &digest, e))
        return e->code;
    snprintf(text, sizeof text, "%" PRId64 " ids of digest %016" PRIx64, lm_tokens_count(data),
             digest);
    return lm_comm_agree(s->ask.comm, what, text, e);
}

lm_code lm_session_agree(lm_session *s, lm_err *e)
{
    if (!s->ask.comm)
        return LM_OK;
    if (s->ask.data_digest && lm_comm_agree(s->ask.comm, "data", s->ask.data_digest, e))
        return e->code;
    return agree_on_model(s, e) || agree_on_data(s, "data", s->train, e) ||
                   agree_on_data(s, "validation data", s->val, e)
               ? e->code
               : LM_OK;
}

/* ---- the run ---- */

/* The files that go with the model into each checkpoint; kept in memory, for where they came from may
 * be gone or pruned by then. */
static lm_code read_files(lm_session *s, lm_err *e)
{
    lm_code rc = lm_model_source_tokenizer(s->source, &s->files, e);
    return rc ? rc : lm_model_source_json(s->source, "generation_config.json", &s->generation, e);
}

static lm_code keep_options(lm_session *s, lm_err *e)
{
    const lm_run_paths paths = { .data = s->ask.data,
                                 .data_digest = s->ask.data_digest,
                                 .val = s->ask.val,
                                 .base = s->adapter.config ? s->ask.model : NULL,
                                 .tensorboard = s->ask.tensorboard,
                                 .metrics = s->ask.metrics,
                                 .tiers = s->ask.tiers };
    return lm_run_options(s->ask.tool, s->ask.options, &paths, &s->o.schedule, &s->options, e);
}

static lm_code make_history(lm_session *s, lm_err *e)
{
    lm_history_input in[2] = { { .name = s->ask.model }, { .name = s->train_path } };
    lm_history_step step = s->ask.history;
    step.inputs = in;
    step.n_inputs = 2;
    if (!step.none && lm_model_source_digest(s->source, &in[0].digest, e))
        return e->code;
    return lm_history_add(lm_model_source_meta(s->source, LM_HISTORY_KEY), &step, &s->history, e);
}

static lm_code open_folder(lm_session *s, lm_err *e)
{
    const lm_session_ask *a = &s->ask;
    if (a->from < 0 && lm_run_apart(a->run, a->model, e))
        return e->code;
    s->made = !lm_path_exists(a->run);
    return lm_run_open(a->run, a->from, a->force, a->sink, &s->lock, e) ||
                   (a->tiers && lm_run_tiers_open(a->tiers, a->run, a->from, a->force, a->sink, e))
               ? e->code
               : LM_OK;
}

static lm_code open_records(lm_session *s, lm_err *e)
{
    const lm_session_ask *a = &s->ask;
    lm_metrics_mode mode = a->from >= 0 ? LM_METRICS_APPEND
                           : a->force   ? LM_METRICS_REPLACE
                                        : LM_METRICS_NEW;
    if ((a->metrics && lm_metrics_open(a->metrics, mode, a->sink, &s->metrics, e)) ||
        (a->tensorboard && lm_tb_open(a->tensorboard, a->wall_clock(), &s->tb, e)))
        return e->code;
    lm_metrics_begin_run(s->metrics, a->tool, LM_VERSION, a->argc, a->argv, a->seed);
    lm_train_report_place(s->metrics, s->backend, &s->o, &s->config);
    return lm_metrics_end(s->metrics, e);
}

lm_code lm_session_open_run(lm_session *s, lm_err *e)
{
    if (!rank_of(s) && (read_files(s, e) || keep_options(s, e) || make_history(s, e) ||
                        open_folder(s, e) || open_records(s, e)))
        return e->code;
    if (s->ask.comm && lm_comm_barrier(s->ask.comm, e))
        return e->code;
    return s->ask.tiers ? lm_run_tiers_place(s->ask.tiers, s->ask.run, s->ask.from, e) : LM_OK;
}

/* ---- the training ---- */

typedef struct {
    const lm_session *s;
    const lm_memory_plan *plan;
} start;

static bool lies_in(const char *step_dir, const char *run)
{
    char folder[PATH_MAX];
    lm_err unread = { 0 };
    return !lm_path_folder(step_dir, folder, &unread) && lm_path_same(folder, run);
}

/* Disks may get room while a run goes on, but memory that is too small stops it for certain. */
static lm_code check_places(const start *x, lm_err *e)
{
    const lm_session_ask *a = &x->s->ask;
    for (int i = 0; i < a->tiers->n; i++) {
        const lm_run_tier *t = &a->tiers->at[i];
        char need[32], room[32];
        lm_disk space;
        if (lm_train_disk_tier(&x->s->o, x->plan, a->step, t, &space, e))
            return e->code;
        if (t->memory && space.need > space.free)
            return lm_fail(e, LM_ELIMIT, t->folder,
                           "keep fewer there, enlarge that file system, or give folders only",
                           "%" PRId64 " checkpoints at once need %s of shared memory, %s are free",
                           space.at_once, lm_show_bytes(space.need, need),
                           lm_show_bytes(space.free, room));
        lm_train_advise_space(&space, t->folder, a->lmz, a->sink);
    }
    return LM_OK;
}

/* The last work before the first step, when memory and inputs are there. */
static lm_code begin_run(void *ctx, lm_err *e)
{
    const start *x = ctx;
    const lm_session_ask *a = &x->s->ask;
    lm_disk space;
    if (lm_run_claim(a->run, a->from, a->resume && !lies_in(a->resume, a->run), e) ||
        lm_train_disk(&x->s->o, x->plan, a->step, a->keep, a->run, &space, e))
        return e->code;
    lm_train_advise_space(&space, a->run, a->lmz, a->sink);
    if (a->tiers && (lm_run_tiers_claim(a->tiers, a->run, a->from, e) || check_places(x, e)))
        return e->code;
    if (*a->note)
        lm_log(a->sink, LM_LOG_NOTICE, "%s", a->note);
    return LM_OK;
}

lm_code lm_session_train(lm_session *s, const lm_memory_plan *plan, lm_train_result *r, lm_err *e)
{
    const lm_session_ask *a = &s->ask;
    lm_trainer_io io = { .config = &s->config,
                         .comm = a->comm,
                         .program = s->program,
                         .weights = s->source,
                         .par = s->par,
                         .resume = a->resume,
                         .objective = a->objective,
                         .train = s->train,
                         .val = s->val,
                         .packed = s->packed,
                         .val_packed = s->val_packed,
                         .ids = s->ids,
                         .adapt = s->adapter.start,
                         .adapt_ctx = s->adapter.ctx,
                         .after = s->adapter.after,
                         .checkpoint = { .run_dir = a->run,
                                         .config = s->config_json,
                                         .adapter_config = s->adapter.config,
                                         .fold = s->adapter.fold,
                                         .fold_ctx = s->adapter.ctx,
                                         .form = s->adapter.form,
                                         .generation_config = s->generation,
                                         .files = &s->files,
                                         .options = s->options.data,
                                         .history = s->history.data,
                                         .seq = s->o.source ? s->o.source : s->o.seq,
                                         .keep = a->keep,
                                         .lmz = a->lmz,
                                         .replace = a->force && a->from < 0 },
                         .tiers = a->tiers,
                         .metrics = s->metrics,
                         .tensorboard = s->tb,
                         .wall_clock = a->wall_clock,
                         .id_bytes = s->id_bytes,
                         .trace = a->trace,
                         .force = a->force,
                         .sink = a->sink };
    start x = { s, plan };
    if (lm_trainer_train(&s->o, &io, s->backend, begin_run, &x, &s->trainer, r, e))
        return e->code;
    if (a->tiers && !rank_of(s) && lm_trainer_saved(s->trainer) == r->step)
        lm_run_tiers_end(a->tiers, a->run);
    return LM_OK;
}

void lm_session_close(lm_session *s, lm_err *e)
{
    lm_trainer_free(s->trainer);
    lm_program_free(s->program);
    lm_train_pipe_free(s->pipe);
    lm_span_fini(&s->span);
    lm_metrics_close(s->metrics, e);
    if (s->tb)
        lm_tb_close(s->tb, e);
    lm_lock_drop(s->lock);
    if (s->ask.tiers)
        lm_run_tiers_close(s->ask.tiers, e->code != LM_OK);
    if (e->code && s->made)
        remove(s->ask.run); /* only when nothing is in it */
    lm_model_source_close(s->source);
    lm_config_fini(&s->config);
    json_decref(s->config_json);
    json_decref(s->generation);
    lm_tokens_close(s->train);
    lm_tokens_close(s->val);
    lm_free(s->id_bytes);
    lm_mlm_fini(&s->o.mlm);
    lm_folder_files_fini(&s->files);
    lm_buf_fini(&s->options);
    lm_buf_fini(&s->history);
    lm_free(s->train_path);
    lm_free(s->val_path);
}
