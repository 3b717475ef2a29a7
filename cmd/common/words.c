/* SPDX-License-Identifier: Apache-2.0 */
/* words.c -- the options of the quantities that library messages name.
 *
 * The library knows quantities, such as a batch size, but not how a program sets them.  Here the
 * name of a quantity in the place of an error, in its advice, or in a warning becomes the option of
 * the running tool.  A tool without that option prints the library's words. */
#include <stdio.h>
#include <string.h>

#include "common/frame.h"

/* Places of errors, and the long names of their options. */
static const struct {
    const char *words, *option;
} places[] = {
    { "vocabulary size", "vocab-size" },
    { "end-of-text token", "eos-token" },
    { "end-of-text id", "eos-id" },
    { "validation fraction", "val-fraction" },
    { "sequence length", "seq-len" },
    { "mesh", "mesh" },
    { "zero", "zero" },
    { "shard format", "format" },
    { "special tokens", "special" },
    { "word pattern", "pattern" },
    { "config key", "set" },
    { "matrix type", "type" },
    { "importance matrix", "imatrix" },
    { "merge method", "method" },
    { "base model", "base" },
    { "weight search", "search" },
    { "base of a delta", "base" },
    { "salvage", "salvage" },
    { "validation", "eval-every" },
    { "optimizer", "optimizer" },
    { "objective", "objective" },
    { "patterns", "train" },
    { "loss", "loss" },
    { "reward", "reward" },
    { "group", "group" },
    { "updates", "updates" },
    { "best", "best" },
    { "resample", "resample" },
    { "correct-least", "correct-least" },
    { "kl-target", "kl-target" },
    { "checkpoint format", "checkpoint-format" },
    { "kv cache", "kv" },
    { "kv cache", "methods" },
    { "kv cache", "method" },
};

/* Parts of advice and warnings.  A phrase that contains another one comes before it.  TOOL is the name of the running tool,
 * once in a text. */
static const struct {
    const char *words;
    const char *option; /* NULL: for all tools */
    const char *text;
} advice[] = {
    { "choose masked language modelling", "objective", "give --objective mlm" },
    { "blocks around a ring", "cp", "give --cp ring" },
    { "choose a chat template", "chat-template", "give --chat-template NAME|FILE" },
    { "train on all of it", "loss-on", "leave --loss-on out" },
    { "give the prompt under", "map", "rename columns with --map, or give the prompt under" },
    { "or rename keys", "map", "or rename columns with --map" },
    { "or rename its keys", "map", "or rename columns with --map" },
    { "name an end-of-text token, or use none", "eos-token",
      "name one with --eos-token, or give --no-eos" },
    { "give the id, or use none", "eos", "give the id, or --no-eos" },
    { "a larger vocabulary size", "vocab-size", "a larger --vocab-size" },
    { "go on without the tokenizer check", "check-tokenizer", "go on with --no-check-tokenizer" },
    { "the model's own tokenizer, or none", "tokenizer",
      "the model's own tokenizer with --tokenizer, or --tokenizer none" },
    { "convert without a tokenizer", "tokenizer", "give --tokenizer none" },
    { "choose a tokenizer policy", "tokenizer", "choose a policy with --tokenizer" },
    { "choose another tokenizer", "tokenizer", "choose another one with --tokenizer" },
    { "name a tokenizer", "tokenizer", "name one with --tokenizer" },
    { "name the text field", "field", "name the text's with --field" },
    { "leave the generation configuration out", "generation-config",
      "leave it out with --no-generation-config" },
    { "a context of", "context", "--context" },
    { "smaller batch size", "batch-size", "smaller --batch-size" },
    { "and a batch size of", "batch-size", "--batch-size" },
    { "a batch size of", "batch-size", "--batch-size" },
    { "and a gradient accumulation of", "gradient-accumulation-steps",
      "--gradient-accumulation-steps" },
    { "a shorter sequence length", "seq-len", "a shorter --seq-len" },
    { "a sequence length of", "seq-len", "--seq-len" },
    { "a number of ranks of", "ranks", "--ranks" },
    { "use level 0", "zero", "give --zero 0" },
    { "nor computing in BF16", "dtype", "nor --dtype bf16" },
    { ", computing in BF16,", "dtype", " --dtype bf16" },
    { ", computing in BF16", "dtype", " --dtype bf16" },
    { "computing in BF16", "dtype", "--dtype bf16" },
    { "a warm-up of", "warmup", "--warmup" },
    { "a decay of", "decay-steps", "--decay-steps" },
    { "choose a constant schedule", "lr-schedule", "give --lr-schedule constant" },
    { "schedule continuation", "resume-schedule", "--resume-schedule" },
    { "the learning rate or the limit of the gradient norm", "max-grad-norm",
      "--lr or --max-grad-norm" },
    { "keep fewer of them", "keep", "lower --keep" },
    { "have them compressed", "checkpoint-format", "take --checkpoint-format lmz" },
    { "resume the run in", "resume", "go on from there with TOOL --resume" },
    { "start a run with", "resume", "start a run with TOOL" },
    { "allow replacing the run", "force", "replace the run with -f" },
    { "in another folder, or allow losing the later checkpoints", "force",
      "with -o, or give up the later checkpoints with -f" },
    { "make that one whole first", NULL, "make that whole first (compress-ckpt --rebase none)" },
    { "in a new folder", "output", "-o RUN" },
    { "give it as the importance matrix", "imatrix", "give it to --imatrix" },
    { "a result type of wider range", "dtype", "a type of wider range with --dtype" },
    { "give its base", "base", "give its base with --base" },
    { "the base from which it was made", "base", "the base from which it was made with --base" },
    { "write a whole file, or rebase it first", "rebase",
      "write a whole file without --base, or --rebase it first" },
    { "allow overwriting it", "force", "add -f to overwrite it" },
    { "allow replacing it", "force", "add -f to replace it" },
    { "name the folder of the new run", "output", "name the folder of the new run with -o" },
    { "longer windows", "seq-len", "a larger --seq-len" },
    { "list the tensors of the file", "list", "list the tensors with -l" },
    { "expand it first", NULL, "expand it first (compress-ckpt -d)" },
    { "expand its states first", NULL, "expand its states with compress-ckpt -d" },
    { "use fewer threads", NULL, "use fewer threads (-j)" },
    { "salvage its intact parts", NULL,
      "salvage its intact parts with compress-ckpt -d --salvage" },
    { "find the weights that are not finite", NULL,
      "inspect-model --stats shows which weights are not finite" },
    { "name validation data", "val", "give --val SHARD" },
    { "allow more time for an answer", "reward-timeout", "allow more time with --reward-timeout" },
    { "measure a calibration, and set file", NULL,
      "make one with quantize-kv --calibrate, and set file=FILE" },
    { "measure it, or set file", NULL,
      "make it with quantize-kv --calibrate --method all -o FILE MODEL DATA, or set file=FILE" },
    { "list the methods to see all", "list-kv", "--list-kv shows all" },
    { "list the methods to see all", "list-methods", "--list-methods shows all" },
    { "list the methods to see their keys", "list-methods", "--list-methods shows its keys" },
    { "lower the rank of the adapter", "rank", "lower the --rank of the adapter" },
    { "list the losses to see all", "list-losses", "--list-losses shows all" },
    { "choose one of the presets", NULL, "init-model --list shows the presets" },
};

/* The text with the tool's name in it. */
static const char *with_name(const char *text, char *out, size_t size)
{
    static const char mark[] = "TOOL";
    const char *at = strstr(text, mark);
    if (!at)
        return text;
    snprintf(out, size, "%.*s%s%s", (int)(at - text), text, lm_the_frame.name,
             at + sizeof mark - 1);
    return out;
}

static bool has(const char *option)
{
    return !option || lm_option_find(option) >= 0;
}

/* Of several options for one place: the one that was given, else the first that the tool has. */
const char *lm_place_shown(const char *where, char *out, size_t size)
{
    const char *shown = where;
    bool given = false;
    for (size_t i = 0; i < sizeof places / sizeof *places && !given; i++) {
        size_t n = strlen(places[i].words); /* more places may follow */
        int option = lm_option_find(places[i].option);
        if (strncmp(where, places[i].words, n) || (where[n] && where[n] != ':') || option < 0)
            continue;
        given = lm_the_frame.given[option];
        if (shown == where || given)
            snprintf(out, size, "--%s%s", places[i].option, where + n);
        shown = out;
    }
    return shown;
}

const char *lm_advice_shown(const char *text, char *out, size_t size)
{
    snprintf(out, size, "%s", text);
    for (size_t i = 0; i < sizeof advice / sizeof *advice; i++) {
        char named[160];
        const char *text_shown = with_name(advice[i].text, named, sizeof named);
        size_t words = strlen(advice[i].words), to = strlen(text_shown);
        char *at = has(advice[i].option) ? strstr(out, advice[i].words) : NULL;
        char next = at ? at[words] : '.';
        if (next == '.' || next == '_' || next == '-') /* a part of a name */
            continue;
        size_t rest = strlen(at + words) + 1;
        if ((size_t)(at - out) + to + rest > size)
            continue;
        memmove(at + to, at + words, rest);
        memcpy(at, text_shown, to);
    }
    return out;
}
