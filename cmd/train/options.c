/* SPDX-License-Identifier: Apache-2.0 */
/* options.c -- the options of train and their defaults.  See man/man1/train.1. */
#include "train/options.h"

#include "comm/threads.h"

/* -1: not given. */
#define DEFAULTS                                                                                 \
    {                                                                                            \
        .loop = LM_LOOP_DEFAULT, .steps = 1000, .batch = 8, .seq = 256, .mesh = LM_MESH_DEFAULT, \
        .dtype = "f32", .dropout = -1, .bias_rate = 1e-3, .ahead_weight = -1, .documents = true, \
        .check_tokenizer = true, .format = "auto"                                                \
    }

train_options opt = DEFAULTS;
const train_options built_in = DEFAULTS;

static const char *const formats[] = { "auto", "megatron", "llmc", "nanogpt", NULL };
static const char *const dtypes[] = { "f32", "bf16", NULL };

static const lm_opt options[] = {
    LM_GROUP("Run"),
    LM_LOOP_RESUME(opt.loop, "rate at other --steps: keep extend rewarm [extend]"),
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
    LM_MESH_MICROS(opt.mesh, "micro-batches in a step [as many as ranks]"),
    LM_LOOP_DTYPE(&opt.dtype, dtypes, "f32, or bf16 with f32 master weights [f32]"),
    LM_STR_OF(0, "objective", &opt.objective, "NAME", lm_targets_names,
              "clm, mlm[:key=X,...] or span[:key=X,...] [of MODEL]"),
    LM_INSTEAD("mlm-probability", "give --objective mlm:share=P"),
    LM_INSTEAD("whole-word-mask wwm", "give --objective mlm:whole_words=on"),
    LM_INSTEAD("noise-density", "give --objective span:density=P"),
    LM_INSTEAD("mean-noise-span-length", "give --objective span:mean=N"),
    LM_REAL(0, "dropout", &opt.dropout, "P", 0, 0.999, "all rates [those of config.json]"),
    LM_FLAG(0, "document-mask", &opt.documents, "attend inside documents only [on]"),
    LM_CHOICE(0, "format", &opt.format, "FORMAT", formats,
              "of DATA: auto, megatron, llmc or nanogpt [auto]"),
    LM_FLAG(0, "check-tokenizer", &opt.check_tokenizer, "refuse data of another tokenizer [on]"),
    LM_STR(0, "val", &opt.loop.val, "SHARD", "validation tokens [DATA/val]"),
    LM_LOOP_RECOMPUTE(opt.loop, "activations: none or full [none]"),
    LM_LOOP_DETERMINISTIC(opt.loop),
    LM_GROUP("Optimiser"),
    LM_LOOP_OPTIMIZER(opt.loop, "peak learning rate [of the optimiser]"),
    LM_GROUP("Ranks"),
    LM_COUNT(0, "ranks", &opt.mesh.ranks, "N", 1, LM_THREAD_RANKS,
             "threads that share each step [1]"),
    LM_MESH_AXES(opt.mesh, "how ranks share a step: dp=N,tp=N,pp=N,ep=N,cp=N [all dp]"),
    LM_STR(0, "plan", &opt.plan, "FILE", "ranks, micro-batches and types from a plan"),
    LM_CHOICE(0, "cp", &opt.mesh.context, "HOW", lm_context_names,
              "attention along cp: by heads, or around a ring [ulysses]"),
    LM_INSTEAD("cp-comm-type", "give --cp ring for p2p, --cp ulysses for a2a"),
    LM_MESH_STAGES(opt.mesh),
    LM_FLAG(0, "sequence-parallel", &opt.mesh.rows,
            "along tp ranks share the rows between layers, too [on]"),
    LM_REAL(0, "expert-room", &opt.mesh.expert_room, "X", 0.001, 1e6,
            "along ep memory for rows, over their mean; grows [1.25]"),
    LM_MESH_ZERO(opt.mesh),
    LM_FLAG(0, "elastic", &opt.mesh.elastic,
            "with fewer ranks go on with the nearest mesh; with --ranks they are processes"),
    LM_FLAG(0, "check-links", &opt.check_links,
            "try the links between processes, say what is wrong and stop"),
    LM_GROUP("Mixtures of experts"),
    LM_LOOP_MIXTURE(opt.loop),
    LM_REAL(0, "moe-router-bias-update-rate", &opt.bias_rate, "X", 0, 1,
            "of biases that follow loads, of routers that have them [0.001]"),
    LM_REAL(0, "mtp-loss-scaling-factor", &opt.ahead_weight, "X", 0, 1e6,
            "of modules that predict tokens further on; 0: they stay [0.1]"),
    LM_GROUP("Checkpoints, validation, reports"),
    LM_LOOP_REPORTS(opt.loop),
    LM_FLAG(0, "measure", &opt.measure, "with --dry-run: take a few steps, say how long all take"),
    LM_FLAG(0, "dump-graph", &opt.dump_graph, "print the training graph and stop"),
    LM_END
};

static const char *const side[] = { "tensorboard", "trace",    "ranks",         "mesh",
                                    "cp",          "schedule", "stages",        "sequence-parallel",
                                    "expert-room", "zero",     "zero-prefetch", "plan",
                                    NULL };

/* How ranks share the work, what a step has, and what its memory depends on: not what is learned, nor where it goes. */
static const char *const plans[] = { "mesh",
                                     "leaves",
                                     "cp",
                                     "schedule",
                                     "stages",
                                     "tied-apart",
                                     "sequence-parallel",
                                     "expert-room",
                                     "zero",
                                     "zero-prefetch",
                                     "batch-size",
                                     "gradient-accumulation-steps",
                                     "seq-len",
                                     "dtype",
                                     "recompute",
                                     NULL };

static const char *const examples[] = {
    "train m0/ data/ -o run/ --steps 300 --batch-size 16 --lr 3e-3 --dtype bf16",
    "train --resume run/ --steps 600", NULL
};

lm_tool tool = { .name = "train",
                 .args = "MODEL DATA | --resume RUN [DATA] | --dry-run PRESET",
                 .brief = "train a language model on token shards",
                 .opts = options,
                 .side = side,
                 .plans = plans,
                 .makes = LM_MAKES_FOLDER,
                 .use = LM_LOOP_USE | LM_USE_RANKS,
                 .min_args = 0,
                 .max_args = 2,
                 .examples = examples };
