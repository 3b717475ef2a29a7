/* SPDX-License-Identifier: Apache-2.0 */
/* options.h -- the command line of align-model: its options, and what is asked for by them. */
#ifndef LM_CMD_ALIGN_MODEL_OPTIONS_H
#define LM_CMD_ALIGN_MODEL_OPTIONS_H

#include "common/loop.h"
#include "common/mesh.h"
#include "common/tuning.h"
#include "model/generation.h"
#include "text/tokenizer.h"
#include "tune/align/gkd.h"
#include "tune/align/offline.h"
#include "tune/align/prompts.h"

typedef struct {
    lm_loop_args loop;
    lm_mesh_args mesh;
    const char *loss, *dtype;
    /* hyper-parameters; NULL: not given */
    const char *beta, *smoothing, *average, *weighting, *entropy_coef, *f_divergence, *f_alpha;
    const char *ld_alpha, *gamma, *cpo_alpha, *alpha, *desirable, *undesirable, *lambda;
    const char *distill_temperature;
    int64_t steps, batch, micro, length, seq, max_examples;
    double epochs;
    const char *template, *truncation, *map;
    bool list_losses;
    lm_tuning_args tuning;
    /* of sampled completions */
    lm_strs reward, command, reward_model, stop;
    const char *weights, *advantage, *scale, *correct, *reference, *teacher;
    double kl_target, kl_horizon, discount, gae_lambda, least;
    const char *samples;
    int64_t best, tries;
    bool whiten;
    int64_t group, updates, iterations, most_prompt, most_new, top_k, sequences, memory, shown;
    double temperature, top_p, min_p, kl, correct_most, correct_least, missing_eos, clip_reward,
        timeout;
    bool each, normalise, mask_truncated, list_rewards;
} align_options;

/* --min-reward that was not given. */
#define ANY_REWARD (-1e30)
enum { MOST_REWARDS = 16 };

extern lm_tool tool;
extern align_options opt;

/* Everything that main owns. */
typedef struct {
    lm_session t;
    lm_align_spec spec;
    lm_loop_run run;
    /* files of the reference's log-probabilities: of this run, of the one that is resumed */
    char *reference, *kept;
    uint8_t weights[16]; /* digest of the reference's */
    lm_tokenizer *tok;
    lm_chat *chat;
    lm_text_record_map map;
    lm_text_answers *train, *val;
    lm_offline *offline;
    lm_tuning_recipe recipe;
    lm_tuning tuning; /* of a recipe with an adapter */
    lm_bundle *files; /* of --init-adapter */
    lm_st *first;
    /* of sampled completions: */
    bool samples; /* the loss is one of policies, or rewards are given */
    lm_prompts prompts, val_prompts;
    lm_generation generation; /* ids that end a completion */
    lm_reward_set *reward;
    lm_on_policy *policy;
    lm_metrics *completions;
    char *log;          /* path of the former; */
    int64_t log_before; /* its bytes before the run; -1: it did not exist */
    lm_samples *kept_samples;
    /* of the reference: MODEL+ADAPTER as it is and with absolute paths; both of them, the adapter NULL: none */
    char *ref_spec, *ref_owned, *ref_base, *ref_adapter;
    char *judges[MOST_REWARDS], *template; /* absolute: --reward-model, --chat-template */
    /* of distillation: */
    char *teacher_path; /* absolute */
    lm_teacher teacher;
    lm_gkd *gkd;
} align_session;

/* ---- ask.c ---- */

/* Set what is asked of the library from operands and options, except what depends on the data; with --resume also from
 * the options of the run.  Misuse of operands ends the program.  Fails: LM_EUSAGE, and what reading a run fails
 * with. */
lm_code align_ask(align_session *s, lm_err *e);
/* Set the number of steps and the learning rate, when the number of records is known (0: it is not). */
lm_code align_schedule(align_session *s, int64_t records, lm_err *e);

/* The ranks whose memory is that of this machine. */
int align_ranks_here(const align_session *s);
/* Check that all processes have read the same data, of which this is the digest. */
lm_code align_agree_on_data(uint64_t digest, lm_err *e);

/* ---- answers.c ---- */

/* The most tokens of a text for this model. */
int64_t align_length(const align_session *s);
/* Read the answers, and choose windows and micro-batches that were not given; without data as for the longest texts. */
lm_code align_open_answers(align_session *s, lm_err *e);
/* The tokenizer and the chat template of the model. */
lm_code align_open_text(align_session *s, lm_err *e);
/* The objective of these answers. */
lm_code align_make_objective(align_session *s, lm_err *e);
void align_close_answers(align_session *s);

/* ---- adapter.c ---- */

/* Check --method and its options; the model of a resumed run is the base of its adapter. */
lm_code align_ask_adapter(align_session *s, lm_err *e);
/* When the model is open: what trains, and how the rest is kept. */
lm_code align_choose_adapter(align_session *s, lm_err *e);
/* The learning rate by default: of an adapter ten times the loss's, as TRL's guides advise. */
double align_rate(const align_session *s);
void align_close_adapter(align_session *s);

/* ---- refuse.c ---- */

/* LM_EUSAGE for an option that is given now and that the loss does not read. */
lm_code align_refuse_without_effect(const align_session *s, lm_err *e);

/* ---- reference.c ---- */

/* MODEL or MODEL+ADAPTER with absolute paths, for a resumed run, which may begin in another folder. */
lm_code align_absolute(const char **spec, char **owned, lm_err *e);
/* True if sampled completions are compared with a reference. */
bool align_compares(const align_session *s);
/* Choose it: --reference, otherwise the model before the first step, whose absolute path then is the option. */
lm_code align_find_reference(align_session *s, lm_err *e);
/* Of given answers: --reference, if there is one; a resumed run has its file, and asks no model unless it is named again. */
lm_code align_find_given_reference(align_session *s, lm_err *e);
/* Beside an adapter: the frozen weights of the training are the reference's. */
bool align_shares_reference(const align_session *s);
/* Pass it to the objective of sampled completions. */
void align_reference(const align_session *s, lm_on_policy_opts *o);
/* Add its weights, as far as the training does not have them. */
lm_code align_add_reference(const align_session *s, lm_memory_plan *plan, lm_err *e);
void align_close_reference(align_session *s);

/* ---- rollouts.c ---- */

/* True if rewards are given. */
bool align_has_rewards(void);
/* Check the options of completions against the loss. */
lm_code align_ask_rollouts(align_session *s, lm_err *e);
/* Tokens of the longest prompt, where no prompts are read yet. */
int64_t align_planned_prompt(const align_session *s);
/* LM_EUSAGE if prompts of so many tokens and their completions pass the positions of the model; todo: the advice. */
lm_code align_check_positions(const align_session *s, int64_t prompt, const char *todo, lm_err *e);
/* Read the prompts, and choose windows. */
lm_code align_open_prompts(align_session *s, lm_err *e);
/* Start the rewards' commands, and make the objective. */
lm_code align_make_policy(align_session *s, lm_err *e);
/* Add what rollouts and the reference take. */
lm_code align_add_memory(align_session *s, lm_memory_plan *plan, lm_err *e);
/* What is sampled after prompts of at most so many tokens; it borrows from s. */
lm_rollout_opts align_rollout(align_session *s, int64_t most_prompt);
lm_code align_add_rollouts(align_session *s, int64_t most_prompt, lm_memory_plan *plan, lm_err *e);
/* The ids that end a completion. */
lm_code align_read_ends(align_session *s, lm_err *e);
void align_close_rollouts(align_session *s);

/* ---- log.c ---- */

/* The log of completions, in the folder of the run, which exists; and the file of those that are kept. */
lm_code align_open_log(align_session *s, lm_err *e);
/* Before lm_session_close, which removes the folder of a run that has failed if nothing is in it. */
void align_close_log(align_session *s);

/* ---- distil.c ---- */

/* True if the loss learns from a teacher. */
bool align_distils(const align_session *s);
/* Check the options of teachers against the loss. */
lm_code align_ask_teacher(align_session *s, lm_err *e);
/* Tokens of the longest prompt with a completion of the model's own; 0: it samples none. */
int64_t align_longest_own(const align_session *s);
/* When windows are chosen: open the teacher, and make it part of the model's loss. */
lm_code align_open_teacher(align_session *s, lm_err *e);
/* The objective, when the answers are read. */
lm_code align_make_distilling(align_session *s, lm_err *e);
/* Add what the teacher and the model's own completions take. */
lm_code align_add_teacher(align_session *s, lm_memory_plan *plan, lm_err *e);
/* When the training is closed. */
void align_close_teacher(align_session *s);

#endif
