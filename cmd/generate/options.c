/* SPDX-License-Identifier: Apache-2.0 */
/* options.c -- the options of generate and their defaults.  See man/man1/generate.1. */
#include "common/model.h"
#include "generate/cache.h"
#include "generate/chat.h"
#include "generate/serve.h"
#include "kv/list.h"

generate_options opt = { .dtype = "auto",
                         .weights_in = "auto",
                         .max_new = -1,
                         .top_k = -1,
                         .temperature = -1,
                         .top_p = -1,
                         .min_p = -1,
                         .penalty = -1,
                         .batch = 8,
                         .drafts = 1,
                         .samples = 1,
                         .generation = true,
                         .check_tokenizer = true,
                         .echo = true,
                         .special = true,
                         .skip_special = true };

static const char *const dtypes[] = { "auto", "f32", "bf16", NULL };
static const char *const drafters[] = { "mtp", NULL };

static const lm_opt options[] = {
    LM_GROUP("Prompts"),
    LM_LIST('p', "prompt", &opt.prompt, "TEXT", "continue TEXT, print text (may be repeated)"),
    LM_FLAG(0, "echo", &opt.echo, "with -p: print the prompt in front of the answer [yes]"),
    LM_FLAG(0, "add-special", &opt.special, "add what the tokenizer's post-processor adds [yes]"),
    LM_COUNT(0, "n", &opt.samples, "N", 1, 1e6, "answers to each prompt [1]"),
    LM_ALSO("num-return-sequences num-samples"),
    LM_GROUP("Sampling (defaults: generation_config.json, else those in brackets)"),
    LM_FLAG(0, "generation-config", &opt.generation, "read defaults from the model's file [yes]"),
    LM_REAL('T', "temperature", &opt.temperature, "X", 0, 100,
            "0: always the most likely token [1]"),
    LM_ALSO("temp"),
    LM_INSTEAD("do-sample", "give --temperature: above 0 draws, 0 takes the most likely"),
    LM_COUNT(0, "top-k", &opt.top_k, "N", 0, 1e9, "from the N most likely tokens only; 0: all [0]"),
    LM_REAL(0, "top-p", &opt.top_p, "X", 0, 1, "from the most likely ones that sum up to X [1]"),
    LM_REAL(0, "min-p", &opt.min_p, "X", 0, 1, "none below X times the highest probability [0]"),
    LM_REAL(0, "repetition-penalty", &opt.penalty, "X", 0.01, 100, "1: none [1]"),
    LM_ALSO("repeat-penalty"),
    LM_GROUP("End"),
    LM_COUNT('n', "max-new-tokens", &opt.max_new, "N", 0, 1e9, "stop after N tokens [128]"),
    LM_ALSO("max-tokens n-predict num-tokens"),
    LM_INSTEAD("max-length", "give --max-new-tokens N: the length without the prompt"),
    LM_LIST('s', "stop", &opt.stop, "TEXT", "stop where TEXT occurs (may be repeated)"),
    LM_ALSO("stop-strings stop-sequences"),
    LM_FLAG(0, "ignore-eos", &opt.ignore_eos, "continue after the end-of-text token"),
    LM_GROUP("Model"),
    LM_ADAPTERS(&opt.adapter),
    LM_STR(0, "use-adapter", &opt.use_adapter, "NAME",
           "of -p, --chat and records without \"adapter\" [the model alone]"),
    LM_STR(0, "tokenizer", &opt.tokenizer, "PATH",
           "tokenizer.json or its folder [the model's own]"),
    LM_FLAG(0, "check-tokenizer", &opt.check_tokenizer,
            "refuse a tokenizer of another model [yes]"),
    LM_CHOICE(0, "dtype", &opt.dtype, "TYPE", dtypes, "f32, bf16, or auto for the faster [auto]"),
    LM_ALSO("torch-dtype precision"),
    LM_ALSO_AS("bf16", "bf16"),
    LM_ALSO_AS("fp32", "f32"),
    LM_WEIGHTS_IN(&opt.weights_in),
    LM_STR(0, "mesh", &opt.mesh, "AXES", "processes share the weights: tp=N"),
    LM_COUNT(0, "context", &opt.context, "N", 1, 1e9,
             "capacity in tokens, prompt and new [-p: enough; else 2048]"),
    LM_ALSO("ctx-size context-length max-model-len block-size seq-len"),
    LM_COUNT('b', "batch-size", &opt.batch, "N", 1, 1024, "texts at a time [8]"),
    LM_CHOICE(0, "draft", &opt.draft, "HOW", drafters,
              "mtp: the model's module for later tokens drafts some"),
    LM_COUNT(0, "draft-tokens", &opt.drafts, "N", 1, 64, "that are drafted a step [1]"),
    LM_ALSO("num-speculative-tokens draft-max"),
    LM_GROUP("Keys and values"),
    LM_STR_OF(0, "kv", &opt.kv, "SPEC", lm_kv_names,
              "how they are stored: int8, k=int8,v=int4 ..."),
    LM_ALSO("kv-cache-dtype cache-type"),
    LM_INSTEAD("cache-type-k cache-type-v", "give --kv k=TYPE,v=TYPE"),
    LM_STR_OF(0, "states", &opt.states, "SPEC", lm_kv_names,
              "how states of recurrent layers are: int8, fp8:scale=token"),
    LM_FLAG(0, "list-kv", &opt.list_kv, "print the methods with their keys and stop"),
    GENERATE_CHAT_OPTIONS(opt.chat),
    GENERATE_SERVE_OPTIONS(opt.serve),
    GENERATE_CACHE_OPTIONS(opt.cache),
    LM_GROUP("Output"),
    LM_FLAG(0, "skip-special", &opt.skip_special, "leave special tokens out of the text [yes]"),
    LM_FLAG(0, "logprobs", &opt.logprobs, "JSON: ids and log-probabilities of the new tokens"),
    LM_FLAG(0, "as-they-come", &opt.any_order, "JSON: answers as they end, not in order"),
    LM_END
};

static const char *const examples[] = {
    "generate run/ -p 'The system' -n 64 --temperature 0",
    "generate run/ --top-p 0.95 < prompts.jsonl > answers.jsonl",
    "generate model/ --chat --system 'Be brief.'", NULL
};

lm_tool tool = {
    .name = "generate",
    .args = "MODEL [FILE ...]",
    .brief = "continue prompts with a model",
    .opts = options,
    .use = LM_USE_OUTPUT | LM_USE_THREADS | LM_USE_SEED | LM_USE_JSON | LM_USE_DEVICE |
           LM_USE_METRICS | LM_USE_RANKS,
    .min_args = 0, /* --list-kv */
    .max_args = -1,
    .examples = examples,
};
