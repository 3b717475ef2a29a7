/* SPDX-License-Identifier: Apache-2.0 */
/* mixture_run.c -- see mixture_run.h. */
#include "merge/mixture_run.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "base/mem.h"
#include "base/stop.h"
#include "format/folder.h"
#include "format/folder_json.h"
#include "format/fp8_source.h"
#include "merge/mixture_gates.h"
#include "model/mixture.h"

typedef struct {
    const lm_mixture_recipe *r;
    const lm_mixture_opts *o;
    lm_model_source **src; /* of each path; the first is the base's */
    const char **path;
    int n;
    json_t *tree, *generation;
    lm_config config, dense;
    lm_mixture_mlp *expert;
    float *gates, *switches;
    lm_mixture_spec spec;
    lm_mixture *mixture;
    lm_st_plan *plan;
} job;

/* ---- Models ---- */

static lm_code check_alike(const job *j, int i, lm_err *e)
{
    const char *path = j->path[i];
    const json_t *tree = lm_model_source_config(j->src[i]);
    lm_config c = { 0 };

    if (!tree)
        return lm_fail(e, LM_EUSAGE, path, "name the model's folder",
                       "there is no config.json beside these weights");
    if (lm_config_read(tree, path, &c, e))
        return e->code;
    bool alike = c.arch == j->dense.arch && c.layers == j->dense.layers &&
                 c.width == j->dense.width && c.layer[0].ffn == j->dense.layer[0].ffn &&
                 c.layer[0].mlp == j->dense.layer[0].mlp;
    if (!alike)
        lm_fail(
            e, LM_EUSAGE, path, "give models of one architecture and size",
            "is a %s of %lld layers, width %lld and MLPs of %lld, %s a %s of %lld, %lld and %lld",
            lm_arch_name(c.arch), (long long)c.layers, (long long)c.width,
            (long long)c.layer[0].ffn, j->path[0], lm_arch_name(j->dense.arch),
            (long long)j->dense.layers, (long long)j->dense.width,
            (long long)j->dense.layer[0].ffn);
    lm_config_fini(&c);
    return e->code;
}

/* The index of a model, which is opened when it is new. */
static int open_model(job *j, const char *path, lm_err *e)
{
    for (int i = 0; i < j->n; i++)
        if (!strcmp(j->path[i], path))
            return i;
    j->path[j->n] = path;
    if (lm_fp8_source_open(path, j->o->bundle, &j->src[j->n], e) ||
        lm_model_source_spool(j->src[j->n], e))
        return -1;
    j->n++;
    if (j->n > 1 && check_alike(j, j->n - 1, e))
        return -1;
    return j->n - 1;
}

/* The names of mergekit for what the models make. */
static lm_code check_architecture(const job *j, lm_err *e)
{
    static const char *const names[][2] = { { "mixtral", "mixtral" },
                                            { "qwen2_moe", "qwen moe" },
                                            { "qwen3_moe", "qwen3 moe" } };
    const char *want = j->r->architecture, *is = j->config.arch->name;

    for (size_t i = 0; want && i < sizeof names / sizeof *names; i++)
        if (!strcmp(names[i][0], is) && !strncasecmp(names[i][1], want, strlen(want)))
            return LM_OK;
    return want ? lm_fail(e, LM_EUSAGE, j->r->base, "leave architecture out",
                          "a %s becomes a %s, not '%.40s'", lm_arch_name(j->dense.arch), is, want)
                : LM_OK;
}

static lm_code read_base(job *j, lm_err *e)
{
    const lm_mixture_recipe *r = j->r;

    if (open_model(j, r->base, e) < 0)
        return e->code;
    const json_t *tree = lm_model_source_config(j->src[0]);
    if (!tree)
        return lm_fail(e, LM_EUSAGE, r->base, "name the model's folder",
                       "there is no config.json beside these weights");
    if (lm_config_read(tree, r->base, &j->dense, e) ||
        lm_mixture_config(tree, r->base, r->n, r->chosen, &j->tree, e) ||
        lm_model_source_json(j->src[0], "generation_config.json", &j->generation, e))
        return e->code;
    if (lm_config_read(j->tree, r->base, &j->config, e) || check_architecture(j, e))
        return e->code;
    const bool shared = j->config.layer[0].moe.shared > 0;
    if (shared != (r->shared != NULL))
        return lm_fail(e, LM_EUSAGE, r->base, shared ? "add it under shared_experts" : NULL,
                       shared ? "a %s needs a shared expert" : "a %s has no shared experts",
                       j->config.arch->name);
    return LM_OK;
}

static lm_code take_expert(job *j, const lm_recipe_expert *x, lm_mixture_mlp *out, lm_err *e)
{
    const int i = open_model(j, x->path, e);

    if (i >= 0)
        *out = (lm_mixture_mlp){ .src = j->src[i], .noise = x->noise, .down = x->residual };
    return i < 0 ? e->code : LM_OK;
}

static lm_code open_all(job *j, lm_err *e)
{
    const lm_mixture_recipe *r = j->r;
    lm_code rc = lm_alloc_n(&j->src, (size_t)r->n + 2, sizeof *j->src, "models", e);

    if (!rc)
        rc = lm_alloc_n(&j->path, (size_t)r->n + 2, sizeof *j->path, "models", e);
    if (!rc)
        rc = lm_alloc_n(&j->expert, (size_t)r->n, sizeof *j->expert, "experts", e);
    if (!rc)
        rc = read_base(j, e);
    for (int i = 0; !rc && i < r->n; i++)
        rc = take_expert(j, &r->expert[i], &j->expert[i], e);
    return !rc && r->shared ? take_expert(j, r->shared, &j->spec.shared, e) : rc;
}

/* ---- The result ---- */

static lm_code make_plan(job *j, lm_err *e)
{
    lm_history_input *in = NULL;
    lm_history_step step = j->o->step;
    lm_dtype dtype = j->o->dtype != LM_DTYPE_NONE ? j->o->dtype : j->r->dtype;
    lm_code rc = lm_alloc_n(&in, (size_t)j->n, sizeof *in, "inputs", e);

    for (int i = 0; !rc && i < j->n; i++) {
        in[i].name = j->path[i];
        rc = lm_model_source_digest(j->src[i], &in[i].digest, e);
    }
    step.inputs = in;
    step.n_inputs = j->n;
    if (!rc)
        rc = lm_st_plan_new(&j->plan, e);
    if (!rc)
        rc = lm_history_plan(lm_model_source_meta(j->src[0], LM_HISTORY_KEY), &step, j->plan, e);
    if (!rc)
        rc = lm_mixture_plan(j->mixture, dtype, j->plan, e);
    if (!rc && dtype != LM_DTYPE_NONE)
        lm_config_set_dtype(j->tree, dtype == LM_DTYPE_F32   ? "float32"
                                     : dtype == LM_DTYPE_F16 ? "float16"
                                                             : "bfloat16");
    lm_free(in);
    return rc;
}

static lm_code make_gates(job *j, lm_err *e)
{
    const lm_gates_spec s = { .recipe = j->r,
                              .config = &j->dense,
                              .base = j->src[0],
                              .backend = j->o->backend,
                              .par = j->o->par,
                              .sink = j->o->sink,
                              .seed = j->o->seed };
    const size_t rows = (size_t)j->config.layers, width = (size_t)j->config.width;

    if (lm_alloc_n(&j->gates, rows * (size_t)j->r->n * width, sizeof *j->gates, "gates", e) ||
        lm_alloc_n(&j->switches, rows * width, sizeof *j->switches, "gates", e) ||
        lm_mixture_gates(&s, j->gates, j->switches, e))
        return e->code;
    j->spec.gates = j->gates;
    j->spec.switches = j->switches;
    return LM_OK;
}

static lm_code write_model(job *j, lm_err *e)
{
    const lm_folder_spec spec = { .config = j->tree,
                                  .generation_config = j->generation,
                                  .tokenizer_from = j->src[0],
                                  .plan = j->plan,
                                  .max_shard_bytes = j->o->max_shard_bytes };
    lm_folder *f = NULL;
    lm_code rc = make_gates(j, e);

    if (rc || lm_stopping())
        return rc;
    rc = lm_folder_create(j->o->output, j->o->force, j->o->bundle, &spec, &f, e);
    if (!rc)
        rc = lm_mixture_write(j->mixture, f, j->o->sink, e);
    if (!rc && !lm_stopping())
        return lm_folder_commit(f, e);
    lm_folder_drop(f);
    return rc;
}

lm_code lm_mixture_run(const lm_mixture_recipe *r, const lm_mixture_opts *o, lm_mixture_counts *out,
                       lm_err *e)
{
    job j = { .r = r, .o = o };
    lm_code rc = open_all(&j, e);

    j.spec.config = &j.config;
    j.spec.dense = &j.dense;
    j.spec.base = j.n ? j.src[0] : NULL;
    j.spec.expert = j.expert;
    j.spec.seed = o->seed;
    j.spec.par = o->par;
    if (!rc)
        rc = lm_mixture_new(&j.spec, &j.mixture, e);
    if (!rc)
        rc = make_plan(&j, e);
    if (!rc)
        *out = (lm_mixture_counts){ .model_type = j.config.arch->name,
                                    .experts = r->n,
                                    .chosen = r->chosen,
                                    .parameters = lm_config_params(&j.config),
                                    .active = lm_config_active_params(&j.config),
                                    .bytes = lm_st_plan_data_bytes(j.plan) };
    if (!rc && o->output)
        rc = write_model(&j, e);
    lm_mixture_free(j.mixture);
    lm_st_plan_free(j.plan);
    for (int i = 0; i < r->n + 2 && j.src; i++)
        lm_model_source_close(j.src[i]);
    lm_config_fini(&j.config);
    lm_config_fini(&j.dense);
    json_decref(j.tree);
    json_decref(j.generation);
    lm_free(j.src);
    lm_free(j.path);
    lm_free(j.expert);
    lm_free(j.gates);
    lm_free(j.switches);
    return rc;
}
