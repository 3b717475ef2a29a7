/* SPDX-License-Identifier: Apache-2.0 */
/* options.h -- the command line of peft-tune: its options, and what is asked for by them. */
#ifndef LM_CMD_PEFT_TUNE_OPTIONS_H
#define LM_CMD_PEFT_TUNE_OPTIONS_H

#include "common/loop.h"
#include "common/mesh.h"
#include "common/tuning.h"
#include "train/packed.h"
#include "tune/partial.h"

typedef struct {
    lm_loop_args loop;
    int64_t steps, batch, seq, target;
    lm_mesh_args mesh;
    double epochs;
    const char *dtype;
    bool dump_graph;

    lm_tuning_args tuning;
    const char *train, *states_in;
    double plus;
    bool list_methods, unmerge, to_lora;
    const char *combine;
    double share;

    const char *chat_template, *loss_on, *truncation, *map;
    bool packing;
    int64_t max_examples;
} tune_options;

extern lm_tool tool;
extern tune_options opt; /* the present values */

/* Everything that main owns. */
typedef struct {
    lm_session t;
    lm_loop_run run;
    lm_buf groups;   /* of the optimiser, for LoRA+ */
    char digest[24]; /* of the data */
    char *template;  /* absolute path of --chat-template */
    lm_text_example_maker maker;
    lm_text_record_map map;
    lm_packed_set data, val;
    lm_tuning_recipe recipe;
    lm_tune_partial part; /* of a recipe without adapter */
    lm_tuning tuning;     /* of the others */
    lm_bundle *files;     /* of --init-adapter */
    lm_st *first;
} tune_session;

/* True if nothing is trained or written. */
bool tune_plan_only(void);
/* Set what is asked of the library from options and operands, with --resume also from the options of the run.  Misuse of
 * operands ends the program.  Fails: LM_EUSAGE, and what reading a run fails with. */
lm_code tune_ask(tune_session *s, lm_err *e);
/* When the model is open: what trains, and how the rest is kept.  Fails: LM_EUSAGE. */
lm_code tune_choose(tune_session *s, lm_err *e);
/* When the model is open: the shape of a step, of a model with an encoder the most that it may be.  Fails: LM_EUSAGE for
 * options that the model's data do not have. */
lm_code tune_ask_shape(tune_session *s, lm_err *e);
/* When the data are read: of pairs the lengths of the longest. */
void tune_fit_pairs(tune_session *s);
/* When the data are read: the number of steps, optimisers and schedule. */
lm_code tune_ask_steps(tune_session *s, lm_err *e);
/* LM_EUSAGE if the data of a resumed run have changed, unless they were named again. */
lm_code tune_check_data(tune_session *s, lm_err *e);

/* ---- derive.c ---- */

extern const char *const tune_combinations[];
/* True if an adapter is made without training. */
bool tune_derives(void);
lm_code tune_derive(lm_err *e);

#endif
