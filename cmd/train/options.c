/* SPDX-License-Identifier: Apache-2.0 */
/* options.c -- the options of train and their defaults.  See man/man1/train.1. */
#include "train/options.h"

#include "train/resume.h"

/* -1: not given. */
#define DEFAULTS                                                                              \
    {                                                                                         \
        .steps = 1000, .batch = 8, .seq = 256, .accumulate = 1, .decay_steps = -1,            \
        .step_size = 1000, .cycles = 1, .lr = -1, .min_lr_ratio = 0.1, .gamma = 0.999,        \
        .schedule = "cosine", .optimizer = "adamw", .dtype = "f32", .beta1 = -1, .beta2 = -1, \
        .eps = -1, .weight_decay = -1, .momentum = -1, .dampening = -1, .max_grad_norm = 1,   \
        .dropout = -1, .documents = true, .check_tokenizer = true, .format = "auto",          \
        .eval_batches = 16, .log_every = 1, .keep = 3, .checkpoint_format = "safetensors",    \
        .peak_tflops = -1                                                                     \
    }

train_options opt = DEFAULTS;
const train_options built_in = DEFAULTS;

static const char *const formats[] = { "auto", "megatron", "llmc", "nanogpt", NULL };
static const char *const dtypes[] = { "f32", "bf16", NULL };
static const char *const checkpoint_formats[] = { "safetensors", "lmz", NULL };

static const lm_opt options[] = {
    LM_GROUP("Run"),
    LM_STR(0, "resume", &opt.resume, "RUN", "go on with a run at its newest checkpoint"),
    LM_ALSO("resume-from-checkpoint"),
    LM_CHOICE(0, "resume-schedule", &opt.resume_schedule, "HOW", lm_resume_names,
              "of the rate, with other --steps: keep extend rewarm [extend]"),
    LM_COUNT(0, "steps", &opt.steps, "N", 1, 1e15, "optimiser steps in all [1000]"),
    LM_ALSO("max-steps max-iters train-iters max-train-steps"),
    LM_INSTEAD("epochs num-epochs num-train-epochs max-epochs",
               "give --steps N: epochs x tokens of DATA / (batch size x seq-len x accumulation)"),
    LM_COUNT(0, "batch-size", &opt.batch, "N", 1, 1e9, "sequences in a micro-batch [8]"),
    LM_ALSO("per-device-train-batch-size micro-batch-size"),
    LM_INSTEAD("global-batch-size total-batch-size",
               "give --batch-size B and --gradient-accumulation-steps A: B x A sequences a step"),
    LM_COUNT(0, "seq-len", &opt.seq, "N", 1, 1e9, "tokens in a sequence [256]"),
    LM_ALSO("block-size seq-length sequence-length max-seq-length max-seq-len context-length"),
    LM_COUNT(0, "gradient-accumulation-steps", &opt.accumulate, "N", 1, 65535,
             "micro-batches in a step [1]"),
    LM_ALSO("grad-accum-steps"),
    LM_CHOICE(0, "dtype", &opt.dtype, "TYPE", dtypes, "f32, or bf16 with f32 master weights [f32]"),
    LM_ALSO("torch-dtype precision"),
    LM_ALSO_AS("bf16", "bf16"),
    LM_ALSO_AS("fp32", "f32"),
    LM_INSTEAD("fp16", "give --dtype bf16: it needs no loss scaling"),
    LM_REAL(0, "dropout", &opt.dropout, "P", 0, 0.999, "all rates [those of config.json]"),
    LM_FLAG(0, "document-mask", &opt.documents, "attend inside documents only [on]"),
    LM_CHOICE(0, "format", &opt.format, "FORMAT", formats,
              "of DATA: auto, megatron, llmc or nanogpt [auto]"),
    LM_FLAG(0, "check-tokenizer", &opt.check_tokenizer,
            "refuse data of another tokenizer than the model's [on]"),
    LM_STR(0, "val", &opt.val, "SHARD", "validation tokens [DATA/val]"),
    LM_FLAG(0, "deterministic", &opt.deterministic, "the same bits again, also on a GPU"),
    LM_GROUP("Optimiser"),
    LM_STR_OF(0, "optimizer", &opt.optimizer, "NAMES", lm_optim_names,
              "NAME[:key=value,...][;PATTERN=NAME...]... [adamw]"),
    LM_ALSO("optim"),
    LM_FLAG(0, "list-optimizers", &opt.list_optimizers, "print them with their keys and stop"),
    LM_REAL(0, "lr", &opt.lr, "X", 0, 1e3, "peak learning rate [of the optimiser]"),
    LM_ALSO("learning-rate max-lr"),
    LM_CHOICE(0, "lr-schedule", &opt.schedule, "NAME", lm_sched_names,
              "constant linear cosine step exponential wsd [cosine]"),
    LM_ALSO("lr-scheduler-type lr-scheduler lr-decay-style"),
    LM_COUNT(0, "warmup", &opt.warmup, "N", 0, 1e15, "steps of linear warm-up [0]"),
    LM_ALSO("warmup-steps warmup-iters num-warmup-steps lr-warmup-iters lr-warmup-steps"),
    LM_INSTEAD("warmup-ratio warmup-fraction lr-warmup-fraction",
               "give --warmup N: ratio x --steps"),
    LM_REAL(0, "min-lr-ratio", &opt.min_lr_ratio, "X", 0, 1, "floor, as a share of --lr [0.1]"),
    LM_INSTEAD("min-lr", "give --min-lr-ratio X: the least learning rate / --lr"),
    LM_COUNT(0, "decay-steps", &opt.decay_steps, "N", 0, 1e15, "wsd: last steps [10 % of --steps]"),
    LM_COUNT(0, "step-size", &opt.step_size, "N", 1, 1e15, "step: steps between drops [1000]"),
    LM_REAL(0, "gamma", &opt.gamma, "X", 0, 1, "step, exponential: factor [0.999]"),
    LM_COUNT(0, "cycles", &opt.cycles, "N", 1, 1e6, "cosine: restarts [1]"),
    LM_ALSO("num-cycles"),
    LM_REAL(0, "beta1", &opt.beta1, "X", 0, 0.9999999, "first moment [of the optimiser]"),
    LM_ALSO("adam-beta1"),
    LM_REAL(0, "beta2", &opt.beta2, "X", 0, 0.9999999, "second moment [of the optimiser]"),
    LM_ALSO("adam-beta2"),
    LM_REAL(0, "eps", &opt.eps, "X", 0, 1, "epsilon [of the optimiser]"),
    LM_ALSO("adam-epsilon adam-eps epsilon"),
    LM_REAL(0, "weight-decay", &opt.weight_decay, "X", 0, 10,
            "on matrices only [of the optimiser]"),
    LM_REAL(0, "momentum", &opt.momentum, "X", 0, 0.9999999, "of the buffer [of the optimiser]"),
    LM_REAL(0, "dampening", &opt.dampening, "X", 0, 1, "of what enters the buffer [0]"),
    LM_FLAG(0, "nesterov", &opt.nesterov, "Nesterov's momentum"),
    LM_REAL(0, "max-grad-norm", &opt.max_grad_norm, "X", 0, 1e9, "clip the norm; 0: no [1]"),
    LM_ALSO("grad-clip clip-grad gradient-clip-norm gradient-clipping"),
    LM_REAL(0, "clip-value", &opt.clip_value, "X", 0, 1e9, "clip each element; 0: no [0]"),
    LM_GROUP("Checkpoints, validation, reports"),
    LM_STR(0, "save-every", &opt.save_every, "N|TIME",
           "steps (100) or time (10m); 0: at the end [30m]"),
    LM_ALSO("save-steps save-interval"),
    LM_COUNT(0, "keep", &opt.keep, "N", 0, 1e6, "newest checkpoints kept; 0: all [3]"),
    LM_ALSO("save-total-limit"),
    LM_CHOICE(0, "checkpoint-format", &opt.checkpoint_format, "FORMAT", checkpoint_formats,
              "safetensors in a folder, or lmz, compressed [safetensors]"),
    LM_COUNT(0, "eval-every", &opt.eval_every, "N", 0, 1e15, "steps; 0: never [0]"),
    LM_ALSO("eval-steps eval-interval"),
    LM_COUNT(0, "eval-batches", &opt.eval_batches, "N", 0, 1e15, "0: all of them [16]"),
    LM_ALSO("eval-iters"),
    LM_COUNT(0, "early-stop", &opt.patience, "N", 0, 1e9, "evaluations without gain; 0: off [0]"),
    LM_ALSO("early-stopping-patience"),
    LM_REAL(0, "early-stop-delta", &opt.min_delta, "X", 0, 1e9, "what counts as gain [0]"),
    LM_ALSO("early-stopping-threshold"),
    LM_COUNT(0, "log-every", &opt.log_every, "N", 1, 1e15, "steps between records [1]"),
    LM_ALSO("logging-steps log-interval"),
    LM_STR(0, "tensorboard", &opt.tensorboard, "FILE", "event file for TensorBoard"),
    LM_REAL(0, "peak-tflops", &opt.peak_tflops, "X", 0, 1e9, "for MFU; 0: none [measured]"),
    LM_STR(0, "trace", &opt.trace, "FILE", "time line of step 3, for chrome://tracing"),
    LM_FLAG(0, "stats", &opt.stats, "at the end, the time of each operator"),
    LM_FLAG(0, "measure", &opt.measure, "with --dry-run: take a few steps, say how long all take"),
    LM_FLAG(0, "dump-graph", &opt.dump_graph, "print the training graph and stop"),
    LM_END
};

static const char *const examples[] = {
    "train m0/ data/ -o run/ --steps 300 --batch-size 16 --lr 3e-3 --dtype bf16",
    "train --resume run/ --steps 600", NULL
};

static const char *const side[] = { "tensorboard", "trace", NULL };

lm_tool tool = { .name = "train",
                 .args = "MODEL DATA | --resume RUN [DATA] | --dry-run PRESET",
                 .brief = "train a language model on token shards",
                 .opts = options,
                 .side = side,
                 .makes = LM_MAKES_FOLDER,
                 .use = LM_USE_OUTPUT | LM_USE_THREADS | LM_USE_SEED | LM_USE_JSON | LM_USE_DEVICE |
                        LM_USE_DRY_RUN | LM_USE_METRICS | LM_USE_HISTORY,
                 .min_args = 0,
                 .max_args = 2,
                 .examples = examples };
