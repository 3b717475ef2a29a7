/* SPDX-License-Identifier: Apache-2.0 */
/* quantize-kv -- caches of keys and values: their files, calibrations and reports.  See man/man1/quantize-kv.1. */
#include <stdio.h>
#include <string.h>

#include "base/text.h"
#include "compress/kv_passkey.h"
#include "kv/list.h"
#include "quantize-kv/files.h"
#include "quantize-kv/model.h"

static bool calibrate, evaluate;
static kv_model_options model = KV_MODEL_OPTIONS;
static kv_file_options files = KV_FILE_OPTIONS;
static const char *const dtypes[] = { "f32", "bf16", NULL };

static const lm_opt options[] = {
    LM_GROUP("Cache files (FILE)"),
    LM_STR_OF('m', "method", &model.method, "METHOD", lm_kv_file_names,
              "code with METHOD: int4, kivi, cachegen"),
    KV_FILE_ROWS(files),
    LM_GROUP("With a model (MODEL DATA: token shards, or text)"),
    LM_FLAG(0, "calibrate", &calibrate,
            "make a calibration for METHOD: kvquant:bits=3, auto, fp8, all"),
    LM_FLAG(0, "evaluate", &evaluate, "measure methods beside each other"),
    LM_STR(0, "methods", &model.methods, "LIST", "--evaluate: specifications of --kv"),
    LM_STR(0, "states", &model.states, "SPEC",
           "--evaluate: states of recurrent layers, as --states"),
    LM_FLAG(0, "table", &model.table, "--evaluate: a table [yes, unless --json]"),
    LM_STR(0, "candidates", &model.candidates, "LIST",
           "--calibrate: methods for auto, separated by ;"),
    LM_COUNT(0, "windows", &model.windows, "N", 1, 1e6, "windows of the data [8]"),
    LM_COUNT(0, "seq-len", &model.seq, "N", KV_LEAST_WINDOW, 1e9,
             "tokens in a window [that of its training; unknown: 1024]"),
    LM_FLAG(0, "documents", &model.documents, "no window runs across documents [yes]"),
    LM_STR(0, "lengths", &model.lengths, "LIST",
           "tokens of passkeys' texts [128,256,... to --seq-len]"),
    LM_COUNT(0, "depths", &model.depths, "N", 1, 1000, "places of a passkey in its text [5]"),
    LM_COUNT(0, "repeats", &model.repeats, "N", 0, 1e6,
             "passkeys of each length and depth; 0: none [10]"),
    LM_COUNT(0, "records", &model.records, "N", 1, LM_KV_PASSKEY_NAMES,
             "passkeys in a text, one of them asked for [8]"),
    LM_STR(0, "text", &model.text, "DATA", "text between passkeys [DATA]"),
    LM_COUNT(0, "steps", &model.steps, "N", 0, 1e6,
             "tokens of each measurement of time; 0: none [32]"),
    LM_STR(0, "tokenizer", &model.tokenizer, "PATH",
           "tokenizer.json or its folder [the model's own]"),
    LM_FLAG(0, "check-tokenizer", &model.check_tokenizer,
            "refuse a tokenizer or shards of another model [yes]"),
    LM_CHOICE(0, "dtype", &model.dtype, "TYPE", dtypes,
              "--evaluate: compute in f32 or bf16 [bf16]"),
    LM_END
};

static const char *const examples[] = {
    "quantize-kv doc.kv --method kivi --bits 2 -o doc2.kv",
    "quantize-kv --evaluate m/ data/val --methods fp8,int4,kivi:bits=2 --table", NULL
};

static lm_tool tool = {
    .name = "quantize-kv",
    .args = "[FILE | MODEL DATA]",
    .brief = "code, decode, list, calibrate and measure caches of keys and values",
    .opts = options,
    .makes = LM_MAKES_OTHER,
    .use =
        LM_USE_OUTPUT | LM_USE_THREADS | LM_USE_DEVICE | LM_USE_JSON | LM_USE_SEED | LM_USE_HISTORY,
    .max_args = 2,
    .filter = true,
    .examples = examples,
};

/* Refuse options of the other way to work. */
static void refuse_others(const char *const *names, const char *way)
{
    char option[32];
    for (int i = 0; names[i]; i++)
        if (lm_given(&tool, names[i])) {
            snprintf(option, sizeof option, "--%s", names[i]);
            lm_misuse(&tool, option, "leave it out", "it has no effect on %s", way);
        }
}

static const char *const of_report[] = { "methods", "states",  "table",  "lengths", "depths",
                                         "repeats", "records", "text",   "steps",   "dtype",
                                         "seed",    "json",    "device", NULL };
static const char *const of_calibration[] = { "method", "candidates", NULL };
static const char *const of_both[] = { "windows",   "seq-len",         "documents",
                                       "tokenizer", "check-tokenizer", NULL };
static const char *const of_files[] = { "decode", "list",     "verify", "list-methods", "bits",
                                        "group",  "residual", "level",  "history",      NULL };

static void check_picture(void)
{
    if (!lm_text_ends(tool.output, ".svg") && !lm_text_ends(tool.output, ".png") &&
        !lm_text_ends(tool.output, ".txt"))
        lm_misuse(&tool, tool.output, "name it .svg, .png or .txt",
                  "the name does not determine the format of the picture");
    if (!model.repeats)
        lm_misuse(&tool, tool.output, "leave -o or --repeats 0 out",
                  "there are no passkeys to draw");
}

static void check_model(void)
{
    if (calibrate && evaluate)
        lm_misuse(&tool, "--calibrate, --evaluate", NULL, "give one of them");
    refuse_others(of_files, calibrate ? "--calibrate" : "--evaluate");
    refuse_others(calibrate ? of_report : of_calibration, calibrate ? "--calibrate" : "--evaluate");
    if (tool.argc != 2)
        lm_misuse(&tool, "command line", "give a model and data", "%d operands", tool.argc);
    if (calibrate && (!tool.output || !model.method))
        lm_misuse(&tool, model.method ? "-o" : "--method",
                  "give --method kvquant:bits=3 and -o FILE", "it is missing");
    if (evaluate && model.table && tool.json)
        lm_misuse(&tool, "--table", "leave one of them out", "--json prints no table");
    if (evaluate && tool.output)
        check_picture();
    lm_refuse_twice(&tool, (const char *[]){ model.tokenizer, model.text }, 2);
    lm_refuse_same(&tool, tool.output, tool.argv[0]);
    lm_refuse_text(&tool, tool.output, tool.argv[1]);
}

static void check_files(void)
{
    static const char way[] = "cache files";
    files.method = model.method;
    for (int i = 0; of_report[i]; i++)
        if (strcmp(of_report[i], "json"))
            refuse_others((const char *[]){ of_report[i], NULL }, way);
    refuse_others((const char *[]){ "candidates", NULL }, way);
    refuse_others(of_both, way);
    kv_files_check(&tool, &files);
    if (tool.argc > 1)
        lm_misuse(&tool, tool.argv[1], "give one file", "is a second operand");
}

int main(int argc, char **argv)
{
    lm_begin(&tool, argc, argv);
    if (calibrate || evaluate)
        check_model();
    else
        check_files();
    if (calibrate)
        kv_calibrate(&tool, &model);
    else if (evaluate)
        kv_evaluate(&tool, &model);
    else
        kv_files(&tool, &files);
    return lm_end(&tool);
}
