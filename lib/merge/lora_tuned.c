/* SPDX-License-Identifier: Apache-2.0 */
/* lora_tuned.c -- adapters of methods other than LoRA: the rule of each module on the tensors of the base, in double. */
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "format/safetensors_table.h"
#include "merge/lora_impl.h"

static lm_code add_change(lm_lora *l, const char *name, const lm_tune_part *p, bool bias, lm_err *e)
{
    lm_lora_change *c = NULL;
    lm_code rc = lm_lora_change_of(l, name, strlen(name), "", &c, e);

    if (!rc && c->part)
        rc = lm_fail(e, LM_EUSAGE, l->path, "merge it with the program that made it",
                     "it changes '%.150s' in two ways", name);
    if (!rc) {
        c->part = p;
        c->of_bias = bias;
    }
    return rc;
}

/* A bias that the base does not have cannot be changed; methods that leave such modules alone pass. */
static lm_code check_bias(const lm_lora *l, const lm_tune_part *p, lm_err *e)
{
    lm_tune_loaded loaded;
    double *none = NULL;
    bool any = false;
    lm_code rc = lm_tune_load(l->folder, p, &loaded, e);

    rc = rc ? rc : lm_alloc_n(&none, (size_t)p->module.out, sizeof *none, "adapter", e);
    rc = rc ? rc : lm_tune_bias(&loaded, NULL, NULL, none, &any, NULL, e);
    lm_free(none);
    lm_tune_loaded_fini(&loaded);
    if (!rc && any)
        rc = lm_fail(e, LM_EUSAGE, l->path, "run it beside the base",
                     "'%.150s' of the base has no bias, to which the adapter would add",
                     p->module.name);
    return rc;
}

static lm_code bind_part(lm_lora *l, const lm_tune_part *p, lm_err *e)
{
    const lm_tune_method *t = p->method;
    lm_code rc = LM_OK;

    if (t->weight)
        rc = add_change(l, p->base->weight, p, false, e);
    if (!rc && t->bias && p->base->bias)
        rc = add_change(l, p->base->bias, p, true, e);
    else if (!rc && t->bias && !(t->is & (LM_TUNE_MIXES | LM_TUNE_VECTORS)))
        rc = check_bias(l, p, e);
    return rc;
}

lm_code lm_lora_bind_parts(lm_lora *l, const lm_model_source *base, lm_err *e)
{
    bool turned = false;
    lm_code rc = lm_json_bool_or(l->config, "fan_in_fan_out", false, &turned, l->path, e);

    l->model = base;
    rc = rc ? rc : lm_tune_bases_read(base, turned, &l->bases, e);
    rc = rc ? rc : lm_tune_folder_bind(l->folder, &l->bases, e);
    for (size_t i = 0; !rc && i < lm_tune_folder_wholes(l->folder); i++) {
        const lm_tune_whole *w = lm_tune_folder_whole(l->folder, i);

        rc = lm_lora_replace(l, w->name, w->file, e);
    }
    for (size_t i = 0; !rc && i < l->n; i++)
        rc = lm_lora_hold_whole(l, &l->change[i], e);
    for (size_t i = 0; !rc && i < lm_tune_folder_parts(l->folder); i++)
        rc = bind_part(l, lm_tune_folder_part(l->folder, i), e);
    return rc ? rc : lm_lora_bind_params(l, e);
}

/* ---- One tensor ---- */

/* v [rows,cols] transposed to out. */
static void turn(const double *v, int64_t rows, int64_t cols, double *out)
{
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++)
            out[j * rows + i] = v[i * cols + j];
}

/* W [out,in] of the module, from bytes as in the file. */
static void read_weight(const lm_tune_module *m, const void *w, lm_dtype type, double *room,
                        double *out)
{
    int64_t in = m->in ? m->in : 1, n = m->out * in;

    lm_convert(type, w, LM_DTYPE_F64, m->turned ? room : out, n);
    if (m->turned)
        turn(room, in, m->out, out);
}

static lm_code add_weight(const lm_lora_change *c, const lm_tune_loaded *l, const lm_st_tensor *t,
                          const void *w, lm_dtype type, void *out, lm_par *par, lm_err *e)
{
    const lm_tune_module *m = &c->part->module;
    double *x = NULL, *room = NULL;
    lm_code rc = lm_alloc_n(&x, (size_t)t->count, sizeof *x, "a merged tensor", e);

    rc = rc ? rc : lm_alloc_n(&room, (size_t)t->count, sizeof *room, "a merged tensor", e);
    if (!rc) {
        read_weight(m, w, type, room, x);
        rc = lm_tune_weight(l, x, x, par, e);
    }
    if (!rc && m->turned)
        turn(x, m->out, m->in, room);
    if (!rc)
        lm_tune_round(m->turned ? room : x, t->dtype, out, t->count);
    lm_free(x);
    lm_free(room);
    return rc;
}

/* W of the module whose bias changes, for rules that read it. */
static lm_code weight_beside(const lm_lora *l, const lm_tune_module *m, const char *name,
                             double **out, lm_err *e)
{
    const lm_st_tensor *t = lm_model_source_find(l->model, name);
    double *room = NULL;
    lm_code rc = lm_alloc_n(out, (size_t)t->count, sizeof **out, "a merged tensor", e);

    rc = rc ? rc : lm_alloc_n(&room, (size_t)t->count, sizeof *room, "a merged tensor", e);
    rc =
        rc ? rc
           : lm_model_source_load((lm_model_source *)(uintptr_t)l->model, t, LM_DTYPE_F64, room, e);
    if (!rc && m->turned)
        turn(room, m->in, m->out, *out);
    else if (!rc)
        memcpy(*out, room, (size_t)t->count * sizeof *room);
    lm_free(room);
    return rc;
}

static lm_code add_bias(const lm_lora *l, const lm_lora_change *c, const lm_tune_loaded *loaded,
                        const lm_st_tensor *t, const void *b, void *out, lm_par *par, lm_err *e)
{
    double *x = NULL, *w = NULL;
    bool any;
    lm_code rc = lm_alloc_n(&x, (size_t)t->count, sizeof *x, "a merged tensor", e);

    if (!rc)
        lm_convert(t->dtype, b, LM_DTYPE_F64, x, t->count);
    if (!rc && (loaded->method->is & LM_TUNE_MIXES))
        rc = weight_beside(l, &c->part->module, c->part->base->weight, &w, e);
    rc = rc ? rc : lm_tune_bias(loaded, w, x, x, &any, par, e);
    if (!rc)
        lm_tune_round(x, t->dtype, out, t->count);
    lm_free(x);
    lm_free(w);
    return rc;
}

/* b of the module whose weight changes, likewise. */
static lm_code bias_beside(const lm_lora *l, const lm_lora_change *c, lm_tune_loaded *loaded,
                           double **out, lm_err *e)
{
    const char *name = c->part->base->bias;
    const lm_st_tensor *t =
        name && (loaded->method->is & LM_TUNE_MIXES) ? lm_model_source_find(l->model, name) : NULL;
    lm_code rc = t ? lm_alloc_n(out, (size_t)t->count, sizeof **out, "a bias", e) : LM_OK;

    if (!rc && t)
        rc = lm_model_source_load((lm_model_source *)(uintptr_t)l->model, t, LM_DTYPE_F64, *out, e);
    loaded->m.bias = *out;
    return rc;
}

lm_code lm_lora_add_part(const lm_lora *l, const lm_lora_change *c, const lm_st_tensor *t,
                         const void *w, void *out, lm_par *par, lm_err *e)
{
    lm_dtype type = t->dtype;
    double *b = NULL;
    lm_tune_loaded loaded;
    lm_code rc = lm_tune_load(l->folder, c->part, &loaded, e);

    if (rc)
        return rc;
    if (c->whole) { /* peft saves the embedding that it adapts */
        w = c->whole_data;
        type = c->whole->dtype;
    }
    rc = c->of_bias ? LM_OK : bias_beside(l, c, &loaded, &b, e);
    rc = rc           ? rc
         : c->of_bias ? add_bias(l, c, &loaded, t, w, out, par, e)
                      : add_weight(c, &loaded, t, w, type, out, par, e);
    lm_free(b);
    lm_tune_loaded_fini(&loaded);
    if (rc)
        lm_err_in(e, "%s", l->path);
    return rc;
}
