/* SPDX-License-Identifier: Apache-2.0 */
/* convert-model -- models between Hugging Face, GGUF, llm.c and llama2.c.  See convert-model(1). */
#include <string.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/stop.h"
#include "base/text.h"
#include "common/model.h"
#include "common/tool.h"
#include "convert/convert.h"
#include "train/importance.h"

static struct {
    const char *from, *to, *type, *dtype, *tokenizer, *name, *imatrix, *save_imatrix;
    int64_t shard, chunks;
    bool originals, pure, check_tokenizer;
} opt = { .from = "auto",
          .to = "auto",
          .type = "keep",
          .shard = LM_MAX_SHARD_BYTES,
          .originals = true,
          .check_tokenizer = true };

static const char *const dtypes[] = { "f32", "f16", "bf16", NULL };

static const lm_opt options[] = {
    LM_GROUP("Input"),
    LM_CHOICE(0, "from", &opt.from, "FORMAT", lm_model_formats,
              "hf, gguf, llmc or llama2c [auto: by content]"),
    LM_STR('t', "tokenizer", &opt.tokenizer, "PATH",
           "use this tokenizer instead of the input's; none: no tokenizer"),
    LM_GROUP("Output"),
    LM_CHOICE(0, "to", &opt.to, "FORMAT", lm_model_formats,
              "hf, gguf, llmc or llama2c [auto: by the output's name]"),
    LM_CHOICE(0, "type", &opt.type, "TYPE", lm_gguf_types, "GGUF: type of the matrices [keep]"),
    LM_ALSO("outtype quantization qtype"),
    LM_FLAG(0, "pure", &opt.pure, "GGUF: no mixture, every matrix in the type itself"),
    LM_CHOICE(0, "dtype", &opt.dtype, "TYPE", dtypes,
              "hf, llmc: f32, f16 or bf16 [as they are; decoded blocks bf16]"),
    LM_ALSO("torch-dtype"),
    LM_ALSO_AS("bf16", "bf16"),
    LM_ALSO_AS("fp16", "f16"),
    LM_ALSO_AS("fp32", "f32"),
    LM_STR(0, "name", &opt.name, "TEXT", "GGUF: general.name [the input's, or its path's]"),
    LM_ALSO("model-name"),
    LM_FLAG(0, "originals", &opt.originals,
            "GGUF: keep config.json and tokenizer files for an exact way back [on]"),
    LM_BYTES(0, "max-shard-size", &opt.shard, "BYTES", 1, 9e18,
             "hf: begin another file at this size [5 GB]"),
    LM_GROUP("Importance (GGUF)"),
    LM_STR(0, "imatrix", &opt.imatrix, "PATH",
           "weigh errors by an importance matrix: a file of llama-imatrix, or a text or token "
           "shards to "
           "make one from"),
    LM_COUNT(0, "imatrix-chunks", &opt.chunks, "N", 1, 1e12,
             "make it from the first N chunks of 512 tokens [all]"),
    LM_STR(0, "save-imatrix", &opt.save_imatrix, "FILE", "keep the computed matrix, as GGUF"),
    LM_FLAG(0, "check-tokenizer", &opt.check_tokenizer,
            "refuse token shards made with another tokenizer than the model's [on]"),
    LM_END,
};

static const char *const examples[] = {
    "convert-model model/ -o model.gguf --type q8_0",
    "convert-model model.gguf -o back/",
    NULL,
};

static lm_tool tool = {
    .name = "convert-model",
    .args = "MODEL",
    .brief = "convert a model between Hugging Face, GGUF, llm.c and llama2.c",
    .opts = options,
    .makes = LM_MAKES_OTHER,
    .use = LM_USE_HISTORY | LM_USE_OUTPUT | LM_USE_THREADS | LM_USE_JSON,
    .min_args = 1,
    .max_args = 1,
    .examples = examples,
};

/* ---- Options that would do nothing ---- */

static void check_use(lm_model_format to, const lm_import *m)
{
    static const struct {
        const char *option;
        unsigned formats; /* of the output: bits of lm_model_format */
    } uses[] = {
        { "type", 1u << LM_FORMAT_GGUF },
        { "name", 1u << LM_FORMAT_GGUF },
        { "pure", 1u << LM_FORMAT_GGUF },
        { "imatrix", 1u << LM_FORMAT_GGUF },
        { "imatrix-chunks", 1u << LM_FORMAT_GGUF },
        { "save-imatrix", 1u << LM_FORMAT_GGUF },
        { "check-tokenizer", 1u << LM_FORMAT_GGUF },
        { "originals", 1u << LM_FORMAT_GGUF },
        { "max-shard-size", 1u << LM_FORMAT_HF },
        { "dtype", 1u << LM_FORMAT_HF | 1u << LM_FORMAT_LLMC },
        { "tokenizer", 1u << LM_FORMAT_HF | 1u << LM_FORMAT_GGUF },
        { "history", 1u << LM_FORMAT_HF | 1u << LM_FORMAT_GGUF },
    };

    for (size_t i = 0; i < sizeof uses / sizeof *uses; i++) {
        bool decodes = !strcmp(uses[i].option, "dtype") && m->quantised;
        char name[40] = "--";
        strcat(name, uses[i].option);
        if (lm_given(&tool, uses[i].option) && !decodes && !(uses[i].formats & 1u << to))
            lm_misuse(&tool, name, "leave it out", "it has no effect on an output of format %s",
                      lm_model_formats[to]);
    }
}

/* Refuse options without effect for the type and the kind of importance. */
static void check_importance(void)
{
    bool made = opt.imatrix && !lm_imatrix_is(opt.imatrix);

    if (opt.pure && !lm_gguf_type_mixes(opt.type))
        lm_misuse(&tool, "--pure", "leave it out", "%s is not a mixture", opt.type);
    if (opt.imatrix && !lm_gguf_type_weighs(opt.type))
        lm_misuse(&tool, "--imatrix", "leave it out, or choose another --type",
                  "%s does not use an importance matrix", opt.type);
    if (lm_given(&tool, "imatrix-chunks") && !made)
        lm_misuse(&tool, "--imatrix-chunks", "leave it out, or name a text with --imatrix",
                  "no importance matrix is computed");
    if (lm_given(&tool, "check-tokenizer") && !made)
        lm_misuse(&tool, "--check-tokenizer", "leave it out, or name token shards with --imatrix",
                  "no importance matrix is computed");
    if (opt.save_imatrix && !made)
        lm_misuse(&tool, "--save-imatrix", "leave it out, or name a text with --imatrix",
                  "no importance matrix is computed");
}

/* Refuse outputs that would overwrite an input or each other. */
static void check_paths(void)
{
    lm_refuse_twice(&tool, (const char *[]){ opt.tokenizer, opt.imatrix }, 2);
    lm_refuse_same(&tool, tool.output, tool.argv[0]);
    if (opt.tokenizer)
        lm_refuse_same(&tool, tool.output, opt.tokenizer);
    if (!opt.imatrix)
        return;
    lm_refuse_text(&tool, tool.output, opt.imatrix);
    if (!opt.save_imatrix)
        return;
    lm_refuse_same(&tool, opt.save_imatrix, tool.argv[0]);
    lm_refuse_text(&tool, opt.save_imatrix, opt.imatrix);
    if (!strcmp(opt.save_imatrix, tool.output))
        lm_misuse(&tool, "--save-imatrix", "name another file", "it is also the output");
}

/* ---- Importance ---- */

static lm_code make_importance(lm_import *m, lm_imatrix **out, lm_err *e)
{
    const lm_importance_opts o = { .chunks = opt.chunks, .check_tokenizer = opt.check_tokenizer };
    double start = lm_now();
    lm_backend *b = NULL;
    lm_code rc = lm_backend_cpu(tool.cpu, m->par, &b, e);

    if (!rc)
        rc = lm_importance_make(m, opt.imatrix, &o, b, out, e);
    lm_backend_close(b);
    if (!rc && *out)
        lm_say(&tool, LM_LOG_INFO, "%s: importance of %zu matrices from %lld chunk%s, %.2f s",
               opt.imatrix, lm_imatrix_count(*out), (long long)lm_imatrix_chunks(*out),
               lm_plural(lm_imatrix_chunks(*out)), lm_now() - start);
    if (!rc && *out && opt.save_imatrix)
        rc = lm_imatrix_write(*out, opt.save_imatrix, tool.force, e);
    return rc;
}

/* ---- The conversion ---- */

static const lm_product products[] = { [LM_FORMAT_HF] = LM_MAKES_MODEL,
                                       [LM_FORMAT_GGUF] = LM_MAKES_GGUF,
                                       [LM_FORMAT_LLMC] = LM_MAKES_BIN,
                                       [LM_FORMAT_LLAMA2C] = LM_MAKES_BIN };

static lm_code report(const lm_import *m, lm_model_format to, double seconds, lm_err *e)
{
    lm_buf text = { 0 };
    lm_jw j;
    lm_jw_begin(&j, &text, 0, e);
    lm_jw_obj(&j, NULL);
    lm_jw_str(&j, "input", m->path);
    lm_jw_str(&j, "from", lm_model_formats[m->format]);
    lm_jw_str(&j, "output", tool.output);
    lm_jw_str(&j, "to", lm_model_formats[to]);
    lm_jw_int(&j, "tensors", (int64_t)lm_st_plan_count(m->plan));
    lm_jw_f64(&j, "seconds", seconds);
    lm_jw_close_obj(&j);
    lm_code rc = lm_jw_end(&j);
    if (!rc)
        printf("%s\n", text.data);
    lm_buf_fini(&text);
    return rc;
}

static lm_code convert(lm_import *m, lm_export_opts o, lm_err *e)
{
    lm_model_format to = lm_model_format_of(opt.to);
    lm_history_input input = { .name = m->path, .digest = m->digest };
    lm_history_step step = lm_tool_step(&tool);
    lm_imatrix *importance = NULL;
    double start = lm_now();
    lm_code rc = LM_OK;

    if (to == LM_FORMAT_AUTO)
        to = lm_export_format(tool.output, m);
    check_use(to, m);
    lm_refuse_ending(&tool, tool.output, products[to]);
    if (to == LM_FORMAT_GGUF)
        check_importance();
    if (opt.imatrix)
        rc = lm_imatrix_is(opt.imatrix) ? lm_imatrix_open(opt.imatrix, &importance, e)
                                        : make_importance(m, &importance, e);
    o.imatrix = importance;
    step.inputs = &input;
    step.n_inputs = 1;
    o.step = &step;
    lm_say(&tool, LM_LOG_INFO, "%s: %s to %s, %zu tensor%s", m->path, lm_model_formats[m->format],
           lm_model_formats[to], lm_st_plan_count(m->plan), lm_plural(lm_st_plan_count(m->plan)));
    if (!rc && !lm_stopping())
        rc = lm_export(m, tool.output, to, &o, e);
    if (!rc && tool.json && !lm_stopping())
        rc = report(m, to, lm_now() - start, e);
    lm_imatrix_free(importance);
    return rc;
}

static lm_code run(lm_err *e)
{
    double start = lm_now();
    lm_dtype dtype = opt.dtype ? lm_dtype_parse(opt.dtype) : LM_DTYPE_NONE;
    lm_import m = { 0 };
    lm_par *par = NULL;
    lm_code rc = lm_par_new(&par, tool.threads, e);

    lm_bundle_opts bundle = lm_tool_bundle(&tool, par);
    bundle.also = "a .gguf";
    lm_import_opts in = { &bundle, par, &tool.sink, opt.tokenizer, dtype, false };
    lm_export_opts out = { .force = tool.force,
                           .bundle = &bundle,
                           .type = opt.type,
                           .pure = opt.pure,
                           .imatrix_name = opt.imatrix ? lm_path_base(opt.imatrix) : NULL,
                           .dtype = dtype,
                           .shard_bytes = (uint64_t)opt.shard,
                           .originals = opt.originals,
                           .name = opt.name };
    if (!rc)
        rc = lm_import_open(tool.argv[0], lm_model_format_of(opt.from), &in, &m, e);
    if (!rc && !lm_stopping())
        rc = convert(&m, out, e);
    lm_import_close(&m);
    lm_par_free(par);
    lm_say(&tool, LM_LOG_INFO, "%.2f s", lm_now() - start);
    return rc;
}

int main(int argc, char **argv)
{
    lm_err e = { 0 };

    lm_begin(&tool, argc, argv);
    if (!tool.output)
        lm_misuse(&tool, "-o", "name it with -o", "an output is needed");
    if (!strcmp(tool.output, "-") && isatty(STDOUT_FILENO))
        lm_misuse(&tool, "-o", "name a file, or redirect it",
                  "a model cannot be written to a terminal");
    if (tool.json && !strcmp(tool.output, "-"))
        lm_misuse(&tool, "--json", "write the model to a file", "standard output holds the model");
    check_paths();
    if (run(&e)) {
        if (!strcmp(e.todo, "find the weights that are not finite"))
            snprintf(e.todo, sizeof e.todo, "%s", lm_advise_finite(tool.argv[0]));
        lm_complain(&tool, &e);
    }
    return lm_end(&tool);
}
