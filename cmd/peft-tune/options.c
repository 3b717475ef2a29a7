/* SPDX-License-Identifier: Apache-2.0 */
/* options.c -- the options of peft-tune and their defaults.  See man/man1/peft-tune.1. */
#include "peft-tune/options.h"

/* -1: not given. */
tune_options opt = {
    .loop = LM_LOOP_DEFAULT,
    .tuning = LM_TUNING_DEFAULT("lora"),
    .steps = -1,
    .batch = 8,
    .seq = 1024,
    .target = -1,
    .mesh = LM_MESH_DEFAULT,
    .epochs = 3,
    .plus = -1,
    .states_in = "auto",
    .dtype = "auto",
    .loss_on = "auto",
    .truncation = "start",
    .packing = true,
};

static const char *const state_places[] = { "auto", "memory", "host", "file", NULL };
static const char *const dtypes[] = { "auto", "f32", "bf16", NULL };

static const lm_opt options[] = {
    LM_GROUP("Run"),
    LM_LOOP_RESUME(opt.loop, "of the rate, with other --epochs: keep extend rewarm [extend]"),
    LM_REAL(0, "epochs", &opt.epochs, "X", 1e-6, 1e9, "passes over the data [3]"),
    LM_ALSO("num-epochs num-train-epochs max-epochs"),
    LM_COUNT(0, "steps", &opt.steps, "N", 1, 1e15, "optimiser steps, instead of --epochs"),
    LM_ALSO("max-steps max-iters train-iters max-train-steps"),
    LM_COUNT(0, "batch-size", &opt.batch, "N", 1, 1e9, "windows in a micro-batch [8]"),
    LM_ALSO("per-device-train-batch-size micro-batch-size"),
    LM_INSTEAD("global-batch-size total-batch-size",
               "give --batch-size B and --gradient-accumulation-steps A: B x A windows a step"),
    LM_COUNT(0, "seq-len", &opt.seq, "N", 2, 1e9, "tokens in a window [1024, or the model's most]"),
    LM_ALSO("cutoff-len max-length max-seq-length max-seq-len sequence-len block-size "
            "max-source-length"),
    LM_COUNT(0, "target-len", &opt.target, "N", 1, 1e9,
             "with an encoder: most tokens of a target [as --seq-len]"),
    LM_ALSO("max-target-length"),
    LM_MESH_MICROS(opt.mesh, "micro-batches in a step [as many as ranks]"),
    LM_MESH_AXES(opt.mesh, "how ranks share a step: dp=N,tp=N,pp=N,ep=N,cp=N [all dp]"),
    LM_MESH_STAGES(opt.mesh),
    LM_MESH_ZERO(opt.mesh),
    LM_LOOP_DTYPE(&opt.dtype, dtypes, "f32, bf16; auto: bf16 if the model's is [auto]"),
    LM_LOOP_RECOMPUTE(opt.loop, "activations: none or full [none; qlora full]"),
    LM_LOOP_DETERMINISTIC(opt.loop),
    LM_GROUP("What trains"),
    LM_STR(0, "method", &opt.tuning.method, "NAME",
           "lora, qlora, dora, ...: see --list-methods [lora]"),
    LM_ALSO("adapter finetuning-type peft-type"),
    LM_FLAG(0, "list-methods", &opt.list_methods, "print them with their keys and stop"),
    LM_TUNING_RANK(opt.tuning, "of the adapter's matrices [lora 16; the method's]"),
    LM_ALSO("alpha"),
    LM_TUNING_TARGET(opt.tuning),
    LM_INSTEAD("lora-target-linear", "give --target all-linear"),
    LM_TUNING_WHERE(opt.tuning),
    LM_TUNING_SAVE(opt.tuning),
    LM_REAL(0, "lora-plus-ratio", &opt.plus, "X", 1, 1e4, "LoRA+: rate of B over that of A [1]"),
    LM_ALSO("loraplus-lr-ratio"),
    LM_TUNING_START(opt.tuning),
    LM_CHOICE(0, "states-in", &opt.states_in, "WHERE", state_places,
              "optimiser states: memory, host (of a device), file; auto: qlora host [auto]"),
    LM_STR(0, "train", &opt.train, "PATTERNS",
           "with full: tensors that train, A|B; globs, embed head norm bias [*]"),
    LM_GROUP("LoRA without training (-o is the adapter's folder)"),
    LM_FLAG(0, "unmerge", &opt.unmerge, "BASE TUNED: the difference of two models"),
    LM_ALSO("extract"),
    LM_FLAG(0, "to-lora", &opt.to_lora, "BASE ADAPTER: an adapter of another method, or rank"),
    LM_ALSO("convert"),
    LM_CHOICE(0, "combine", &opt.combine, "WAY", tune_combinations,
              "BASE ADAPTER[:WEIGHT] ...: their sum; linear, cat or svd"),
    LM_REAL(0, "share", &opt.share, "X", 0, 1,
            "of the squares that the ranks keep, at most --rank [all]"),
    LM_GROUP("Data"),
    LM_STR(0, "chat-template", &opt.chat_template, "NAME|FILE",
           "Jinja, or alpaca chatml exaone llama3 mistral [the model's]"),
    LM_CHOICE(0, "loss-on", &opt.loss_on, "WHAT", lm_loss_on_names,
              "all; assistant: its turns; last; completion; auto [auto]"),
    LM_INSTEAD("train-on-prompt train-on-inputs train-on-input", "give --loss-on all"),
    LM_INSTEAD("completion-only-loss", "give --loss-on completion"),
    LM_INSTEAD("assistant-only-loss", "give --loss-on assistant"),
    LM_INSTEAD("mask-history", "give --loss-on last"),
    LM_FLAG(0, "packing", &opt.packing, "several examples in a window [on]"),
    LM_ALSO("sample-packing"),
    LM_CHOICE(0, "truncation", &opt.truncation, "WAY", lm_cut_names,
              "longer examples: keep the start or the end, or drop them [start]"),
    LM_ALSO("truncation-mode truncate"),
    LM_STR(0, "map", &opt.map, "KEY=COLUMN", "names of columns: prompt=question,completion=answer"),
    LM_COUNT(0, "max-examples", &opt.max_examples, "N", 0, 1e15,
             "most records of DATA; 0: all [0]"),
    LM_ALSO("max-samples limit"),
    LM_STR(0, "val", &opt.loop.val, "FILE", "validation records, in the forms of DATA"),
    LM_ALSO("eval-dataset val-data"),
    LM_GROUP("Optimiser"),
    LM_LOOP_OPTIMIZER(opt.loop, "peak learning rate [of the method: see peft-tune(1)]"),
    LM_GROUP("Mixtures of experts"),
    LM_LOOP_MIXTURE(opt.loop),
    LM_GROUP("Checkpoints, validation, reports"),
    LM_LOOP_REPORTS(opt.loop),
    LM_FLAG(0, "dump-graph", &opt.dump_graph, "print the training graph and stop"),
    LM_END
};

static const char *const side[] = { "tensorboard", "trace", "mesh",          "schedule",
                                    "stages",      "zero",  "zero-prefetch", NULL };

static const char *const examples[] = {
    "peft-tune m/ chat.jsonl -o adapter/ --method lora --rank 16 --target all-linear",
    "peft-tune --resume adapter/ --epochs 5", NULL
};

lm_tool tool = {
    .name = "peft-tune",
    .args = "MODEL DATA | --resume RUN [DATA] | --unmerge BASE TUNED | --to-lora BASE ADAPTER | "
            "--combine WAY BASE ADAPTER[:WEIGHT] ...",
    .brief = "train an adapter of a model, or a part of the model",
    .opts = options,
    .side = side,
    .makes = LM_MAKES_OTHER, /* a folder, or with --to-lora a GGUF: peft-tune.c */
    .use = LM_LOOP_USE | LM_USE_RANKS,
    .min_args = 0,
    .max_args = -1,
    .examples = examples
};
