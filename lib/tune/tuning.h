/* SPDX-License-Identifier: Apache-2.0 */
/* tuning.h -- a new adapter for a base model: its configuration from a few words, the modules that
 * it changes, and the numbers with which it starts.
 *
 * A recipe is a name that users of the field know: a method of the registry, or one with certain
 * keys set ("rslora" is lora with use_rslora), with the learning rate that suits it.  Keys are
 * those of PEFT's adapter_config.json. */
#ifndef LM_TUNE_TUNING_H
#define LM_TUNE_TUNING_H

#include "base/par.h"
#include "model/store.h"
#include "train/session.h"
#include "tune/attach.h"
#include "tune/complete.h"
#include "tune/folder.h"

typedef struct {
    const char *name;   /* "qlora" */
    const char *method; /* of the registry; NULL: see `config` */
    const char *keys;   /* "use_rslora=true"; "": none */
    /* of the frozen weights, a name of the registry of formats; NULL: as they are */
    const char *format;
    const char *train; /* patterns of tensors of the model that train; NULL: none */
    double rate;       /* peak learning rate */
    double plus;       /* LoRA+: the rate of B over that of A; 0: the same */
    const char *about;
    /* JSON of a configuration whose kind the registry does not have (attach.h): prompts, prefixes,
     * bottlenecks; NULL, and no method: no adapter, tensors of the model train */
    const char *config;
} lm_tuning_recipe;

static inline bool lm_tuning_recipe_adapts(const lm_tuning_recipe *r)
{
    return r->method || r->config;
}

/* False: a new adapter of it cannot be made here; one that PEFT saved is merged and converted. */
bool lm_tuning_recipe_begins(const lm_tuning_recipe *r);
/* True if an adapter of this configuration is of the recipe's kind, whatever its values. */
bool lm_tuning_recipe_fits(const lm_tuning_recipe *r, const json_t *config);

/* A recipe by name, with every method of the registry under its own; false: unknown. */
bool lm_tuning_recipe_find(const char *name, lm_tuning_recipe *out);
/* All of them with their keys and defaults, as a table, or as one JSON array, appended to `out`. */
lm_code lm_tuning_recipes_table(lm_buf *out, lm_err *e);
lm_code lm_tuning_recipes_json(lm_buf *out, lm_err *e);
/* Its names, NULL-terminated, for completion; made once. */
const char *const *lm_tuning_recipe_names(void);

/* What is asked for.  All borrowed; NULL: not given. */
typedef struct {
    lm_tuning_recipe recipe;
    const char *base;       /* base_model_name_or_path */
    const lm_config *model; /* its shape; NULL: keys that follow from it are null */
    /* negative: not given.  The rank of lora is then 16, alpha twice the rank */
    double rank, alpha, dropout;
    const char *target;
    /* NULL: all linear layers, or those that suit the method */ /* "all-linear", names with commas,
     * or a regular expression */
    const char *exclude, *layers, *save; /* names; numbers "0-3,7"; modules_to_save */
    const char *const *set;              /* KEY=VALUE of adapter_config.json */
    int n_set;
} lm_tuning_ask;

/* The configuration: the method's defaults, the recipe's keys, then what is asked for, `set` last.
 * The caller releases it.  Fails: LM_EUSAGE for an option that the method has no key for, an
 * unknown key (the nearest is named), and values of another type. */
lm_code lm_tuning_config(const lm_tuning_ask *ask, json_t **out, lm_err *e);

/* An adapter that trains on a base.  `first`, `base` and `seed` are set by the caller before
 * lm_tuning_start. */
typedef struct {
    json_t *config; /* adapter_config.json */
    lm_buf text;    /* the same as PEFT writes it */
    lm_tune_bases bases;
    lm_attach *attach;
    const lm_model_source *base; /* borrowed */
    uint64_t seed;
    struct lm_ada *ada;    /* the schedule of AdaLoRA (ada.h); NULL: none */
    lm_st *first;          /* tensors of an adapter that it starts with; borrowed; NULL: none */
    lm_tune_folder *saved; /* that adapter, and its tensors if its file lacks some (complete.h) */
    lm_tune_completed completed;
} lm_tuning;

/* The configuration of a saved adapter of any kind, a folder, a tar or an .lmz, and its tensors;
 * for the caller to release in this order: json_decref, lm_st_close, lm_bundle_close.  Fails:
 * LM_EUSAGE for what is not an adapter; LM_EFORMAT, LM_EIO. */
lm_code lm_tuning_open(const char *path, const lm_bundle_opts *o, lm_bundle **files,
                       lm_st **tensors, json_t **config, lm_err *e);

/* config: taken, also after a failure.  where: names it in messages.  asked: it is new, and what it
 * names must be there (lm_tune_check_names); a saved one is read as PEFT reads it.  `c` is borrowed
 * for the life of *out.  Fails as lm_attach_new. */
lm_code lm_tuning_new(json_t *config, const char *where, bool asked, const lm_model_source *base,
                      const lm_config *c, lm_tuning *out, lm_err *e);
void lm_tuning_fini(lm_tuning *t);
/* Before a model is built, with `base` and `seed` set: find the indices of the adapter, if it has
 * some, among the tensors of a saved one, or (NULL) as the method begins; those that follow from
 * the base (adamss) are computed from it.  Fails as lm_attach_read_ids; LM_EUSAGE if a new adapter
 * of the method has none; for the base's weights. */
lm_code lm_tuning_ids(lm_tuning *t, const lm_st *saved, lm_err *e);
/* With `first` set, the tensors of the adapter at `path`: set it to them and those that the file
 * lacks, because they are drawn from a seed or follow from the base.  Nothing for a stream.  Fails
 * as lm_tune_folder_bind, lm_tune_complete. */
lm_code lm_tuning_complete(lm_tuning *t, const char *path, const lm_bundle_opts *o,
                           lm_model_source *base, lm_err *e);
/* Set what a build of the model needs: the adapter, and what of the base trains. */
void lm_tuning_build(lm_tuning *t, lm_build *b);
/* True if its beginning leaves the frozen weights as they are: with the adapter off, the model is
 * the base. */
bool lm_tuning_keeps_base(const lm_tuning *t);
/* What lm_tuning_start takes beside the store: for a short time, for one module, and (*keeps) until
 * the end of the process, the library of linear algebra and its buffers. */
double lm_tuning_room(const lm_tuning *t, double *keeps);
/* For lm_trainer_io.adapt, ctx the lm_tuning: draws the adapter's tensors, or computes them from
 * the base as the method says (which may change the base: PiSSA), or takes those of `first`. */
lm_code lm_tuning_start(void *ctx, lm_store *s, lm_err *e);

/* Of a run that is resumed: the configuration without what its checkpoint says about the file
 * alone; `saved`: its tensors. */
void lm_tuning_resume(json_t *config, const lm_st *saved);
/* Before a program is made: set in *s what the method does beside the steps of the optimiser, in a
 * training of s->o.steps steps.  Fails as lm_ada_new. */
lm_code lm_tuning_schedule(lm_tuning *t, lm_session *s, lm_err *e);

/* For lm_ckpt_opts.fold, ctx the lm_tuning: lm_attach_fold. */
lm_code lm_tuning_fold(void *ctx, lm_store *s, lm_err *e);

/* "LORA on 28 modules: q_proj, k_proj, ..."; appended to `out`. */
lm_code lm_tuning_line(const lm_tuning *t, lm_buf *out, lm_err *e);

#endif
