/* SPDX-License-Identifier: Apache-2.0 */
/* use.c -- adapters beside models that are used. */
#include "tune/use.h"

#include <string.h>

/* PiSSA and OLoRA begin with a part of the weights, which PEFT takes out of the base again when it loads them, LoftQ with
 * what its encoding loses; graphs read the base as it is. */
static lm_code check_start(const json_t *config, const char *path, lm_err *e)
{
    const char *kind = json_string_value(json_object_get(config, "init_lora_weights"));
    if (kind && (!strncmp(kind, "pissa", 5) || !strcmp(kind, "olora") || !strcmp(kind, "corda") ||
                 !strcmp(kind, "loftq")))
        return lm_fail(e, LM_EUSAGE, path,
                       "merge it by merge-models MODEL+ADAPTER, or convert it to a plain LoRA",
                       "init_lora_weights '%.20s' changes the weights of the base", kind);
    return LM_OK;
}

static lm_code attach(const char *path, const lm_bundle_opts *o, lm_loaded *l, lm_tune_use *u,
                      lm_err *e)
{
    if (lm_tune_folder_open_any(path, o, &u->folder, e))
        return e->code;
    const json_t *config = lm_tune_folder_config(u->folder);
    bool turned = json_is_true(json_object_get(config, "fan_in_fan_out"));
    if (check_start(config, path, e) || lm_tune_bases_read(l->src, turned, &u->bases, e) ||
        (lm_tune_folder_method(u->folder) && lm_tune_folder_bind(u->folder, &u->bases, e)) ||
        lm_attach_new(&u->bases, &l->config, config, path, &u->attach, e) ||
        lm_attach_read_ids(u->attach, lm_tune_folder_tensors(u->folder), e))
        return e->code;
    u->adapter = (lm_loaded_adapter){ .adapt = lm_attach_adapt(u->attach),
                                      .replaces = lm_attach_trains,
                                      .ctx = u->attach,
                                      .tensors = lm_tune_folder_tensors(u->folder),
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

void lm_tune_use_fini(lm_tune_use *u)
{
    lm_attach_free(u->attach);
    lm_tune_folder_close(u->folder);
    lm_tune_bases_fini(&u->bases);
    memset(u, 0, sizeof *u);
}
