/* SPDX-License-Identifier: Apache-2.0 */
/* use.c -- adapters beside models that are used. */
#include "tune/use.h"

#include <string.h>

#include "base/mem.h"
#include "tune/join.h"
#include "tune/quantised.h"
#include "tune/tuning.h"

/* The share of an adapter that may be missed where it is brought into another form. */
#define LOSS 1e-5

static lm_code refuse_start(const char *kind, const char *path, lm_err *e)
{
    return lm_fail(e, LM_EUSAGE, path,
                   "merge it by merge-models MODEL+ADAPTER, or convert it to a plain LoRA",
                   "init_lora_weights '%.20s' changes the weights of the base", kind);
}

/* The largest rank of any module. */
static int64_t most_rank(const json_t *config)
{
    int64_t most = (int64_t)json_integer_value(json_object_get(config, "r"));
    const char *key;
    json_t *v;

    json_object_foreach(json_object_get(config, "rank_pattern"), key,
                        v) if (json_integer_value(v) > most) most = (int64_t)json_integer_value(v);
    return most;
}

/* True if the method changes the bias of a module, for which LoRA has no place. */
static bool changes_bias(const lm_tune_folder *f)
{
    bool any = false;

    for (size_t i = 0; i < lm_tune_folder_parts(f); i++)
        any = any || (lm_tune_folder_part(f, i)->method->bias &&
                      lm_tune_folder_part(f, i)->module.has_bias);
    return any;
}

/* *open: shapes of the method's tensors follow from the weights (adamss): as low ranks they need no
 * weights again. */
static lm_code check_form(const lm_tune_folder *f, bool *open, lm_err *e)
{
    const lm_tune_part *p = lm_tune_folder_parts(f) ? lm_tune_folder_part(f, 0) : NULL;
    lm_tune_tensor *t = NULL;
    int n = 0;

    *open = false;
    if (!p || lm_alloc_n(&t, LM_TUNE_TENSORS, sizeof *t, "tensors of a module", e))
        return e->code;
    lm_code rc = p->method->tensors(&p->module, t, &n, e);
    for (int i = 0; !rc && i < n; i++)
        *open = *open || t[i].dim[0] == LM_TUNE_ANY;
    *open = *open && !changes_bias(f);
    lm_free(t);
    return rc;
}

/* PiSSA and OLoRA begin with a part of the weights, s B0 A0, which is taken out of the base
 * wherever it is loaded.  Graphs read the base as it is; beside it the adapter is s B A - s B0 A0,
 * a plain LoRA of twice the rank.  LoftQ's stays as it is, and brings weights of the base.  What
 * has open shapes becomes a LoRA, too, of the rank that it has. */
static lm_code make_plain(const char *path, lm_loaded *l, lm_tune_use *u, lm_err *e)
{
    const json_t *config = lm_tune_folder_config(u->folder);
    const char *kind = json_string_value(json_object_get(config, "init_lora_weights"));
    lm_tune_lora_report report;
    lm_tune_lora_opts o = { .rank = 2 * most_rank(config) };
    bool open;

    if (check_form(u->folder, &open, e))
        return e->code;
    if (open || (!lm_tune_folder_params(u->folder) &&
                 json_array_size(json_object_get(
                     config, "target_parameters")))) { /* names of weights, not of modules */
        o.rank = open ? INT16_MAX : most_rank(config);
        o.share = open ? 1 - 1e-12 : 0;
        if (lm_tune_to_plain(u->folder, l->src, &o, &u->plain, &report, e))
            return e->code;
        return report.worst <= LOSS
                   ? LM_OK
                   : lm_fail(e, LM_EUSAGE, path, "merge it by merge-models MODEL+ADAPTER",
                             "what it does to '%.100s' is not of low rank", report.where);
    }
    if (!kind || (strncmp(kind, "pissa", 5) && strcmp(kind, "olora") && strcmp(kind, "corda") &&
                  strcmp(kind, "loftq")))
        return LM_OK;
    if (!strcmp(kind, "corda"))
        return refuse_start(kind, path, e);
    if (!strcmp(kind, "loftq"))
        return lm_tune_quantised_new(u->folder, l->src, &u->quantised, e);
    if (lm_tune_to_plain(u->folder, l->src, &o, &u->plain, &report, e))
        return e->code;
    return report.worst > LOSS ? refuse_start(kind, path, e) : LM_OK; /* DoRA's, of full rank */
}

static bool replaces(void *ctx, const char *tensor)
{
    const lm_tune_use *u = ctx;

    return lm_attach_trains(u->attach, tensor) ||
           (u->quantised && lm_tune_quantised_has(u->quantised, tensor));
}

static lm_code attach(const char *path, const lm_bundle_opts *o, lm_loaded *l, lm_tune_use *u,
                      lm_err *e)
{
    if (lm_tune_folder_open_any(path, o, &u->folder, e))
        return e->code;
    const json_t *config = lm_tune_folder_config(u->folder);
    const lm_st *tensors = lm_tune_folder_tensors(u->folder);
    bool turned = json_is_true(json_object_get(config, "fan_in_fan_out"));
    if (lm_tune_bases_read(l->src, turned, &u->bases, e) ||
        (lm_tune_folder_method(u->folder) && lm_tune_folder_bind(u->folder, &u->bases, e)))
        return e->code;
    if (make_plain(path, l, u, e))
        return e->code;
    if (!u->plain.config && !u->quantised && lm_tune_folder_method(u->folder)) {
        if (lm_tune_complete(u->folder, l->src, &u->completed, e))
            return e->code;
        tensors = u->completed.tensors ? u->completed.tensors : tensors;
    }
    if (u->plain.config) {
        config = u->plain.config;
        tensors = u->plain.tensors;
    }
    if (u->quantised) {
        config = lm_tune_quantised_config(u->quantised);
        tensors = lm_tune_quantised_tensors(u->quantised);
    }
    if (lm_attach_new(&u->bases, &l->config, config, path, &u->attach, e))
        return e->code;
    lm_tuning ids = { .attach = u->attach, .bases = u->bases, .base = l->src };
    if (lm_tuning_ids(&ids, tensors, e))
        return e->code;
    u->adapter = (lm_loaded_adapter){ .adapt = lm_attach_adapt(u->attach),
                                      .replaces = replaces,
                                      .ctx = u,
                                      .tensors = tensors,
                                      .virtual_tokens = lm_attach_virtual(u->attach),
                                      .predicts = lm_attach_predicts(u->attach) };
    return LM_OK;
}

lm_code lm_tune_use_open(const char *path, const lm_bundle_opts *o, lm_loaded *l, lm_tune_use *out,
                         lm_err *e)
{
    *out = (lm_tune_use){ 0 };
    lm_code rc = attach(path, o, l, out, e);
    if (rc)
        lm_tune_use_fini(out);
    else
        l->adapter = &out->adapter;
    return rc;
}

bool lm_tune_use_joins(const lm_tune_use *u)
{
    return lm_join_takes(u->attach) && !(u->quantised && lm_tune_quantised_brings(u->quantised));
}

void lm_tune_use_fini(lm_tune_use *u)
{
    lm_attach_free(u->attach);
    lm_tune_plain_fini(&u->plain);
    lm_tune_completed_fini(&u->completed);
    lm_tune_quantised_free(u->quantised);
    lm_tune_folder_close(u->folder);
    lm_tune_bases_fini(&u->bases);
    memset(u, 0, sizeof *u);
}
