/* SPDX-License-Identifier: Apache-2.0 */
/* gguf.c -- LoRA adapters for llama.cpp. */
#include "tune/gguf.h"

#include <stdio.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "convert/names.h"
#include "format/gguf.h"
#include "tune/apply.h"

typedef struct {
    const lm_tune_folder *f;
    const lm_arch *arch;
    lm_model_tensor *tensor; /* of the base */
    size_t n;
    double alpha;
    lm_gguf_plan *plan;
    lm_out *out;
} job;

static lm_code refuse(const job *j, const char *what, const char *module, lm_err *e)
{
    return lm_fail(e, LM_EUSAGE, lm_tune_folder_path(j->f), "merge it into its base",
                   "%s '%.150s', which a GGUF of an adapter does not hold", what, module);
}

/* The base's tensor of a part. */
static const lm_model_tensor *tensor_of(const job *j, const lm_tune_part *p)
{
    for (size_t i = 0; i < j->n; i++)
        if (!strcmp(lm_arch_rootless(j->tensor[i].hf), lm_arch_rootless(p->base->weight)))
            return &j->tensor[i];
    return NULL;
}

static lm_code rank_of(const job *j, const lm_tune_part *p, int64_t *rank, lm_err *e)
{
    lm_code rc =
        p->method->low_rank ? p->method->low_rank(&p->module, NULL, rank, NULL, NULL, e) : LM_OK;

    if (!rc && (!p->method->low_rank || !*rank))
        rc = lm_fail(e, LM_EUSAGE, lm_tune_folder_path(j->f), "convert it to a plain LoRA first",
                     "adapters of %s, as these values make it, have no factors", p->method->name);
    return rc;
}

/* Names and shapes. */
static lm_code plan_part(job *j, const lm_tune_part *p, lm_err *e)
{
    const lm_model_tensor *t = tensor_of(j, p);
    char name[LM_TENSOR_NAME + 16];
    int64_t rank = 0;
    lm_code rc = rank_of(j, p, &rank, e);

    if (rc)
        return rc;
    if (p->module.embedding)
        return refuse(j, "it adapts the embedding", p->module.name, e);
    for (int i = 0; i < p->n; i++)
        if (!strcmp(p->tensor[i].suffix, "lora_B.bias") && p->file[i])
            return refuse(j, "it changes the bias of", p->module.name, e);
    /* of several tensors there, or with other columns */
    if (!t || strchr(t->gguf, ',') || !lm_part_in_gguf(j->arch, t->part) ||
        t->order == LM_ORDER_TILED_COLS)
        return refuse(j, "it adapts", p->module.name, e);
    snprintf(name, sizeof name, "%s.lora_a", t->gguf);
    lm_gguf_put_tensor(j->plan, name, 0, 2, (const int64_t[]){ rank, p->module.in });
    snprintf(name, sizeof name, "%s.lora_b", t->gguf);
    lm_gguf_put_tensor(j->plan, name, 0, 2, (const int64_t[]){ p->module.out, rank });
    return LM_OK;
}

static lm_code make_plan(job *j, const lm_config *c, lm_err *e)
{
    size_t n = lm_tune_folder_parts(j->f);
    lm_code rc = lm_gguf_plan_new(&j->plan, e);

    if (rc)
        return rc;
    lm_gguf_put_str(j->plan, "general.architecture", c->arch->gguf, strlen(c->arch->gguf));
    lm_gguf_put_str(j->plan, "general.type", "adapter", 7);
    lm_gguf_put_str(j->plan, "adapter.type", "lora", 4);
    lm_gguf_put_f32(j->plan, "adapter.lora.alpha", (float)j->alpha);
    if (lm_tune_folder_wholes(j->f))
        return refuse(j, "it replaces", lm_tune_folder_whole(j->f, 0)->name, e);
    for (size_t i = 0; !rc && i < n; i++)
        rc = plan_part(j, lm_tune_folder_part(j->f, i), e);
    return rc;
}

/* A, then B with its rows in GGUF's order, at scale alpha / r. */
static lm_code write_part(const job *j, const lm_tune_part *p, lm_gguf_writer *w, lm_err *e)
{
    const lm_model_tensor *t = tensor_of(j, p);
    int64_t rank = 0, out = p->module.out, in = p->module.in;
    double *left = NULL, *right = NULL;
    float *x = NULL;
    lm_tune_loaded l;
    lm_code rc = lm_tune_load(j->f, p, &l, e);

    if (rc)
        return rc;
    rc = rank_of(j, p, &rank, e);
    rc = rc ? rc : lm_alloc_n(&left, (size_t)(out * rank), sizeof *left, "an adapter", e);
    rc = rc ? rc : lm_alloc_n(&right, (size_t)(in * rank), sizeof *right, "an adapter", e);
    rc = rc ? rc : lm_alloc_n(&x, (size_t)((out + in) * rank), sizeof *x, "an adapter", e);
    rc = rc ? rc : p->method->low_rank(&l.m, l.v, &rank, left, right, e);
    if (!rc) {
        float *b = x + in * rank;

        for (int64_t i = 0; i < in * rank; i++)
            x[i] = (float)right[i];
        for (int64_t i = 0; i < out; i++) {
            int64_t row = lm_model_tensor_moves(t) ? lm_model_tensor_hf_row(t, i) : i;

            for (int64_t k = 0; k < rank; k++)
                b[i * rank + k] = (float)(left[row * rank + k] * (double)rank / j->alpha);
        }
        rc = lm_gguf_write(w, x, (size_t)(in * rank) * sizeof *x, e);
        rc = rc ? rc : lm_gguf_write(w, b, (size_t)(out * rank) * sizeof *x, e);
    }
    lm_free(left);
    lm_free(right);
    lm_free(x);
    lm_tune_loaded_fini(&l);
    return rc;
}

static lm_code put(void *ctx, const void *data, size_t bytes, lm_err *e)
{
    lm_out *o = ctx;

    if (fwrite(data, 1, bytes, lm_out_file(o)) != bytes)
        return lm_fail_write(lm_out_path(o), e);
    return LM_OK;
}

static lm_code write_file(job *j, const char *path, bool force, lm_err *e)
{
    lm_gguf_writer *w = NULL;
    lm_code rc = lm_out_open(path, force, &j->out, e);

    rc = rc ? rc : lm_gguf_create_on(put, j->out, j->plan, &w, e);
    for (size_t i = 0; !rc && i < lm_tune_folder_parts(j->f); i++)
        rc = write_part(j, lm_tune_folder_part(j->f, i), w, e);
    if (!rc)
        rc = lm_gguf_finish(w, e);
    else if (w)
        lm_gguf_drop(w);
    if (!rc) {
        lm_out *o = j->out;

        j->out = NULL;
        rc = lm_out_commit(o, e);
    }
    return rc;
}

lm_code lm_tune_to_gguf(const lm_tune_folder *f, const lm_config *config, const char *path,
                        bool force, size_t *modules, lm_err *e)
{
    job j = { .f = f, .arch = config->arch };
    double alpha = 0;
    lm_code rc = lm_json_f64_or(lm_tune_folder_config(f), "lora_alpha", 8, &alpha,
                                lm_tune_folder_path(f), e);

    j.alpha = alpha > 0 ? alpha : 1;
    *modules = lm_tune_folder_parts(f);
    if (!rc && !*config->arch->gguf)
        rc = lm_fail(e, LM_EUSAGE, lm_tune_folder_path(f), NULL, "models of type %s have no GGUF",
                     config->arch->name);
    if (!rc && lm_tune_folder_params(f))
        rc = lm_fail(e, LM_EUSAGE, lm_tune_folder_path(f), "merge it into its base",
                     "it changes parameters of experts, '%.100s', which are not written as GGUF",
                     lm_tune_folder_param(f, 0)->stack.key);
    rc = rc ? rc : lm_model_tensors_make(config, &j.tensor, &j.n, e);
    rc = rc ? rc : make_plan(&j, config, e);
    rc = rc ? rc : write_file(&j, path, force, e);
    if (j.out)
        lm_out_drop(j.out);
    lm_gguf_plan_free(j.plan);
    lm_free(j.tensor);
    return rc;
}
