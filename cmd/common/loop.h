/* SPDX-License-Identifier: Apache-2.0 */
/* loop.h -- the options of tools that train: resuming, optimiser, learning-rate schedule,
 * checkpoints, validation and reports; train, peft-tune and align-model.  What these tools do with
 * them: training.h. */
#ifndef LM_CMD_LOOP_H
#define LM_CMD_LOOP_H

#include "common/tool.h"
#include "train/resume.h"
#include "train/session.h"

typedef struct {
    const char *resume, *resume_schedule, *val;
    bool deterministic;
    const char *recompute; /* NULL: the tool's choice */
    const char *schedule, *optimizer;
    double lr, min_lr_ratio, gamma;
    int64_t warmup, decay_steps, step_size, cycles;
    double beta1, beta2, eps, weight_decay, momentum, dampening;
    bool nesterov;
    double max_grad_norm, clip_value;
    double aux_coef, z_coef, affinity_coef; /* of mixtures of experts */
    int64_t affinity_nodes;
    const char *aux_type;
    double capacity;
    const char *drop_policy;
    bool pad_experts, random_second, expert_choice;
    double jitter, router_noise;
    const char *router_dtype;
    int64_t eval_every, eval_batches, log_every, keep, patience;
    double min_delta, peak_tflops;
    const char *save_every, *checkpoint_format, *tensorboard, *trace;
    lm_strs save_to;
    bool stats, list_optimizers;
    bool elastic; /* set by the tool: with fewer ranks the run goes on */
} lm_loop_args;

/* -1: not given. */
#define LM_LOOP_DEFAULT                                                                       \
    {                                                                                         \
        .decay_steps = -1, .step_size = 1000, .cycles = 1, .lr = -1, .min_lr_ratio = 0.1,     \
        .gamma = 0.999, .schedule = "cosine", .optimizer = "adamw", .beta1 = -1, .beta2 = -1, \
        .eps = -1, .weight_decay = -1, .momentum = -1, .dampening = -1, .max_grad_norm = 1,   \
        .eval_batches = 16, .log_every = 1, .keep = 3, .checkpoint_format = "safetensors",    \
        .peak_tflops = -1, .aux_coef = -1, .aux_type = "model", .drop_policy = "probs",       \
        .jitter = -1, .router_dtype = "f32"                                                   \
    }

extern const char *const lm_loop_formats[]; /* of checkpoints */
extern const char *const lm_loop_side[];    /* for lm_tool.side */
extern const char *const lm_loop_recomputes[];
extern const char *const lm_loop_aux_types[], *const lm_loop_drop_policies[],
                                                  *const lm_loop_router_dtypes[];

/* For lm_tool.use. */
#define LM_LOOP_USE                                                                                \
    (LM_USE_OUTPUT | LM_USE_THREADS | LM_USE_SEED | LM_USE_JSON | LM_USE_DEVICE | LM_USE_DRY_RUN | \
     LM_USE_METRICS | LM_USE_HISTORY)

/* Rows of an option table; `a` is an lm_loop_args. */
#define LM_LOOP_RESUME(a, schedule_help)                                                  \
    LM_STR(0, "resume", &(a).resume, "RUN", "go on with a run at its newest checkpoint"), \
        LM_ALSO("resume-from-checkpoint"),                                                \
        LM_CHOICE(0, "resume-schedule", &(a).resume_schedule, "HOW", lm_resume_names,     \
                  schedule_help)

/* The type of the computation; `p` is a const char *. */
#define LM_LOOP_DTYPE(p, types, help)                                                \
    LM_CHOICE(0, "dtype", p, "TYPE", types, help), LM_ALSO("torch-dtype precision"), \
        LM_ALSO_AS("bf16", "bf16"), LM_ALSO_AS("fp32", "f32"),                       \
        LM_INSTEAD("fp16", "give --dtype bf16: it needs no loss scaling")

#define LM_LOOP_DETERMINISTIC(a) \
    LM_FLAG(0, "deterministic", &(a).deterministic, "the same bits again, also on a GPU")

#define LM_LOOP_RECOMPUTE(a, help)                                               \
    LM_CHOICE(0, "recompute", &(a).recompute, "WHAT", lm_loop_recomputes, help), \
        LM_ALSO("recompute-granularity activation-checkpointing"),               \
        LM_ALSO_AS("gradient-checkpointing", "full"),                            \
        LM_INSTEAD("recompute-activations selective-activation-checkpointing",   \
                   "give --recompute full")

#define LM_LOOP_OPTIMIZER(a, lr_help)                                                             \
    LM_STR_OF(0, "optimizer", &(a).optimizer, "NAMES", lm_optim_names,                            \
              "NAME[:key=value,...][;PATTERN=NAME...]... [adamw]"),                               \
        LM_ALSO("optim"),                                                                         \
        LM_FLAG(0, "list-optimizers", &(a).list_optimizers,                                       \
                "print them with their keys and stop"),                                           \
        LM_REAL(0, "lr", &(a).lr, "X", 0, 1e3, lr_help), LM_ALSO("learning-rate max-lr"),         \
        LM_CHOICE(0, "lr-schedule", &(a).schedule, "NAME", lm_sched_names,                        \
                  "constant linear cosine step exponential wsd [cosine]"),                        \
        LM_ALSO("lr-scheduler-type lr-scheduler lr-decay-style"),                                 \
        LM_COUNT(0, "warmup", &(a).warmup, "N", 0, 1e15, "steps of linear warm-up [0]"),          \
        LM_ALSO("warmup-steps warmup-iters num-warmup-steps lr-warmup-iters lr-warmup-steps"),    \
        LM_INSTEAD("warmup-ratio warmup-fraction lr-warmup-fraction",                             \
                   "give --warmup N: ratio x --steps"),                                           \
        LM_REAL(0, "min-lr-ratio", &(a).min_lr_ratio, "X", 0, 1,                                  \
                "floor, as a share of --lr [0.1]"),                                               \
        LM_INSTEAD("min-lr", "give --min-lr-ratio X: the least learning rate / --lr"),            \
        LM_COUNT(0, "decay-steps", &(a).decay_steps, "N", 0, 1e15,                                \
                 "wsd: last steps [10 % of --steps]"),                                            \
        LM_COUNT(0, "step-size", &(a).step_size, "N", 1, 1e15,                                    \
                 "step: steps between drops [1000]"),                                             \
        LM_REAL(0, "gamma", &(a).gamma, "X", 0, 1, "step, exponential: factor [0.999]"),          \
        LM_COUNT(0, "cycles", &(a).cycles, "N", 1, 1e6, "cosine: restarts [1]"),                  \
        LM_ALSO("num-cycles"),                                                                    \
        LM_REAL(0, "beta1", &(a).beta1, "X", 0, 0.9999999, "first moment [of the optimiser]"),    \
        LM_ALSO("adam-beta1"),                                                                    \
        LM_REAL(0, "beta2", &(a).beta2, "X", 0, 0.9999999, "second moment [of the optimiser]"),   \
        LM_ALSO("adam-beta2"),                                                                    \
        LM_REAL(0, "eps", &(a).eps, "X", 0, 1, "epsilon [of the optimiser]"),                     \
        LM_ALSO("adam-epsilon adam-eps epsilon"),                                                 \
        LM_REAL(0, "weight-decay", &(a).weight_decay, "X", 0, 10,                                 \
                "on matrices only [of the optimiser]"),                                           \
        LM_REAL(0, "momentum", &(a).momentum, "X", 0, 0.9999999,                                  \
                "of the buffer [of the optimiser]"),                                              \
        LM_REAL(0, "dampening", &(a).dampening, "X", 0, 1, "of what enters the buffer [0]"),      \
        LM_FLAG(0, "nesterov", &(a).nesterov, "Nesterov's momentum"),                             \
        LM_REAL(0, "max-grad-norm", &(a).max_grad_norm, "X", 0, 1e9, "clip the norm; 0: no [1]"), \
        LM_ALSO("grad-clip clip-grad gradient-clip-norm gradient-clipping"),                      \
        LM_REAL(0, "clip-value", &(a).clip_value, "X", 0, 1e9, "clip each element; 0: no [0]")

/* Names of Megatron-LM. */
#define LM_LOOP_MIXTURE(a)                                                                       \
    LM_REAL(0, "moe-aux-loss-coeff", &(a).aux_coef, "X", 0, 1e6,                                 \
            "balance of the experts' load [of the model]"),                                      \
        LM_ALSO("router-aux-loss-coef"),                                                         \
        LM_CHOICE(0, "moe-aux-loss-type", &(a).aux_type, "TYPE", lm_loop_aux_types,              \
                  "model, layer, sequence, importance, load [model]"),                           \
        LM_INSTEAD("moe-router-load-balancing-type",                                             \
                   "give --moe-aux-loss-type layer for aux_loss, sequence for seq_aux_loss"),    \
        LM_REAL(0, "moe-z-loss-coeff", &(a).z_coef, "X", 0, 1e6, "size of routers' logits [0]"), \
        LM_ALSO("router-z-loss-coef"),                                                           \
        LM_REAL(0, "moe-affinity-loss-coeff", &(a).affinity_coef, "X", 0, 1e6,                   \
                "tokens to nodes [0]"),                                                          \
        LM_COUNT(0, "moe-affinity-nodes", &(a).affinity_nodes, "N", 1, 4096, "of the experts"),  \
        LM_REAL(0, "moe-expert-capacity-factor", &(a).capacity, "X", 0, 1e6,                     \
                "rows an expert takes, over the mean; 0: all [0]"),                              \
        LM_CHOICE(0, "moe-token-drop-policy", &(a).drop_policy, "POLICY", lm_loop_drop_policies, \
                  "beyond it: probs, position or reroute [probs]"),                              \
        LM_FLAG(0, "moe-pad-expert-input-to-capacity", &(a).pad_experts, "with empty rows"),     \
        LM_FLAG(0, "moe-random-second", &(a).random_second, "of two experts draw the second"),   \
        LM_FLAG(0, "moe-expert-choice", &(a).expert_choice, "experts choose tokens"),            \
        LM_REAL(0, "moe-input-jitter-eps", &(a).jitter, "X", 0, 0.999,                           \
                "of routers' inputs [of the model]"),                                            \
        LM_ALSO("router-jitter-noise"),                                                          \
        LM_REAL(0, "moe-router-noise", &(a).router_noise, "X", 0, 1e6,                           \
                "deviation, of routers' logits [0]"),                                            \
        LM_CHOICE(0, "moe-router-dtype", &(a).router_dtype, "TYPE", lm_loop_router_dtypes,       \
                  "of routers' products: f32 or bf16 [f32]")

#define LM_LOOP_REPORTS(a)                                                                       \
    LM_STR(0, "save-every", &(a).save_every, "N|TIME",                                           \
           "steps (100) or time (10m); 0: at the end [30m]"),                                    \
        LM_ALSO("save-steps save-interval"),                                                     \
        LM_COUNT(0, "keep", &(a).keep, "N", 0, 1e6, "newest checkpoints kept; 0: all [3]"),      \
        LM_ALSO("save-total-limit"),                                                             \
        LM_LIST(0, "save-to", &(a).save_to, "PLACE[:every=N,keep=K]",                            \
                "also write checkpoints there, a folder or `memory`; may be repeated"),          \
        LM_CHOICE(0, "checkpoint-format", &(a).checkpoint_format, "FORMAT", lm_loop_formats,     \
                  "safetensors in a folder, or lmz, compressed [safetensors]"),                  \
        LM_COUNT(0, "eval-every", &(a).eval_every, "N", 0, 1e15, "steps; 0: never [0]"),         \
        LM_ALSO("eval-steps eval-interval"),                                                     \
        LM_COUNT(0, "eval-batches", &(a).eval_batches, "N", 0, 1e15, "0: all of them [16]"),     \
        LM_ALSO("eval-iters"),                                                                   \
        LM_COUNT(0, "early-stop", &(a).patience, "N", 0, 1e9,                                    \
                 "evaluations without gain; 0: off [0]"),                                        \
        LM_ALSO("early-stopping-patience"),                                                      \
        LM_REAL(0, "early-stop-delta", &(a).min_delta, "X", 0, 1e9, "what counts as gain [0]"),  \
        LM_ALSO("early-stopping-threshold"),                                                     \
        LM_COUNT(0, "log-every", &(a).log_every, "N", 1, 1e15, "steps between records [1]"),     \
        LM_ALSO("logging-steps log-interval"),                                                   \
        LM_STR(0, "tensorboard", &(a).tensorboard, "FILE", "event file for TensorBoard"),        \
        LM_REAL(0, "peak-tflops", &(a).peak_tflops, "X", 0, 1e9, "for MFU; 0: none [measured]"), \
        LM_STR(0, "trace", &(a).trace, "FILE", "time line of step 3, for chrome://tracing"),     \
        LM_FLAG(0, "stats", &(a).stats, "at the end, the time of each operator")

/* What a tool owns of a run besides its session. */
typedef struct {
    char *step_dir, *own_run; /* the checkpoint and the run of --resume; NULL without */
    int64_t step;             /* done in it */
    json_t *saved;            /* options of that run, from which those of this one borrow */
    char note[256];           /* a change of the learning rate by --resume; "": none */
    lm_buf options;           /* of this run, as its checkpoints keep them */
    lm_run_tiers tiers;       /* other places of checkpoints */
} lm_loop_run;

/* Set the optimisers and all numbers of `o` that these options give, for a training of `steps`
 * steps, and the position of the schedule of a resumed run; fallback: the peak rate when the
 * options give no rate; negative: the optimiser's.  Fails: LM_EUSAGE for a hyper-parameter that the
 * optimiser does not have, an option that the schedule does not read, and the like; as
 * lm_resume_schedule. */
lm_code lm_loop_ask(const lm_tool *t, const lm_loop_args *a, double fallback, int64_t steps,
                    lm_loop_run *r, lm_trainer_opts *o, lm_err *e);
/* What the session needs of these options and of the tool itself; seconds since 1970 included. */
void lm_loop_session(lm_tool *t, const lm_loop_args *a, lm_loop_run *r, lm_session_ask *ask);

#endif
