/* SPDX-License-Identifier: Apache-2.0 */
/* tuning.h -- the adapter that a tool trains: its options, and their translation for the library;
 * peft-tune and align-model. */
#ifndef LM_CMD_TUNING_H
#define LM_CMD_TUNING_H

#include "common/tool.h"
#include "train/session.h"
#include "tune/tuning.h"

typedef struct {
    const char *method, *target, *exclude, *layers, *save, *init_adapter, *base_format,
        *embed_format;
    double rank, alpha, dropout; /* -1: not given */
    lm_strs set;
} lm_tuning_args;

#define LM_TUNING_DEFAULT(name)                                                                 \
    {                                                                                           \
        .method = name, .base_format = "auto", .embed_format = "auto", .rank = -1, .alpha = -1, \
        .dropout = -1                                                                           \
    }

extern const char *const lm_tuning_base_formats[];

/* Rows of an option table; `a` is an lm_tuning_args. */
#define LM_TUNING_RANK(a, rank_help)                                                    \
    LM_REAL(0, "rank", &(a).rank, "R", 1, 1e6, rank_help), LM_ALSO("lora-rank lora-r"), \
        LM_REAL(0, "lora-alpha", &(a).alpha, "X", 0, 1e9,                               \
                "the update is scaled by X / rank [2 R]")

#define LM_TUNING_TARGET(a)                                                                  \
    LM_REAL(0, "adapter-dropout", &(a).dropout, "P", 0, 0.999,                               \
            "of the adapter's inputs [the method's]"),                                       \
        LM_ALSO("lora-dropout"),                                                             \
        LM_STR(0, "target", &(a).target, "NAMES",                                            \
               "modules: names with commas, a regular expression, all-linear [all-linear]"), \
        LM_ALSO("lora-target target-modules lora-target-modules")

#define LM_TUNING_WHERE(a)                                                       \
    LM_STR(0, "exclude", &(a).exclude, "NAMES", "modules that are not changed"), \
        LM_ALSO("exclude-modules"),                                              \
        LM_STR(0, "layers", &(a).layers, "LIST", "only these: 0-3,7 [all]"),     \
        LM_ALSO("layers-to-transform")

#define LM_TUNING_SAVE(a)                                  \
    LM_STR(0, "modules-to-save", &(a).save, "NAMES",       \
           "modules that train whole beside the adapter"), \
        LM_LIST(0, "set", &(a).set, "KEY=VALUE", "a key of adapter_config.json; may be repeated")

#define LM_TUNING_START(a)                                                                    \
    LM_STR(0, "init-adapter", &(a).init_adapter, "ADAPTER",                                   \
           "start with this one, and with its configuration"),                                \
        LM_ALSO("adapter-name-or-path"),                                                      \
        LM_STR_OF(0, "base-format", &(a).base_format, "FORMAT", lm_tuning_base_formats,       \
                  "encode the frozen layers: nf4 nf4_dq q8_0 ...; auto: as they are [auto]"), \
        LM_STR_OF(0, "embed-format", &(a).embed_format, "FORMAT", lm_tuning_base_formats,     \
                  "the same of embedding and head [auto; qlora q8_0]"),                       \
        LM_INSTEAD("load-in-4bit", "give --base-format nf4, or --method qlora"),              \
        LM_INSTEAD("load-in-8bit", "give --base-format q8_0")

/* An option that serves adapters only; saved: it has no effect on the configuration of a saved
 * one. */
typedef struct {
    const char *name; /* without dashes; NULL ends a list */
    bool saved;
} lm_tuning_option;

/* The recipe of --method.  Fails: LM_EUSAGE, with the nearest name, or `list`: "see
 * --list-methods". */
lm_code lm_tuning_find(const lm_tuning_args *a, const char *list, lm_tuning_recipe *out, lm_err *e);
/* LM_EUSAGE for an option of the list that is given and has no effect: adapts false, the method has
 * no adapter (todo: the advice); resumed, or --init-adapter: a saved configuration applies. */
lm_code lm_tuning_refuse_alone(const lm_tool *t, const lm_tuning_args *a,
                               const lm_tuning_option *list, bool adapts, bool resumed,
                               const char *todo, lm_err *e);
/* When the model is open: how frozen weights are kept, and whether activations are computed again where no option says
 * so: a recipe that encodes the base is for little memory. */
lm_code lm_tuning_encode(const lm_tuning_args *a, const lm_tuning_recipe *r, lm_session *s,
                         lm_err *e);
/* When the program is made.  Fails: LM_EUSAGE for a format that was asked for and that no weight is kept in. */
lm_code lm_tuning_check_formats(const lm_tuning_args *a, const lm_session *s, lm_err *e);
/* The configuration, that of the resumed run, of --init-adapter, or a new one; the caller releases
 * it, and *first and *files, in the order of lm_tuning_open. */
lm_code lm_tuning_read(const lm_tuning_args *a, const lm_tuning_recipe *r, const lm_session *s,
                       lm_bundle **files, lm_st **first, json_t **config, lm_err *e);
/* Make the adapter, and the session train it.  config: taken, also after a failure; first: as
 * lm_tuning_read gave it, borrowed.  Fails as lm_tuning_new and lm_tuning_ids. */
lm_code lm_tuning_attach(const lm_tool *t, const lm_tuning_args *a, lm_session *s, json_t *config,
                         lm_st *first, lm_tuning *out, lm_err *e);
/* A failure that names a key or a part of a new configuration, or "adapter" and the key in its text: name the option
 * that gave it in its place.  Others stay.  Returns e->code. */
lm_code lm_tuning_name_option(const lm_tuning_args *a, lm_err *e);
/* A notice with the modules that it changes; nothing without adapter. */
void lm_tuning_say(lm_tool *t, const lm_tuning *tuning);

#endif
