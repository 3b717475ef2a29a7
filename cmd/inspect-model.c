/* SPDX-License-Identifier: Apache-2.0 */
/* inspect-model -- list, summarise and compare model files.  See inspect-model(1). */
#include <string.h>

#include "base/buf.h"
#include "base/stop.h"
#include "common/tool.h"
#include "convert/verify.h"
#include "format/inspect.h"
#include "format/inspect_report.h"
#include "model/arch.h"

static struct {
    bool check, list, stats, strict, verify;
    lm_strs only;
    double atol, rtol;
} opt = { .list = true };

static const lm_opt options[] = {
    LM_GROUP("Input"),
    LM_LIST(0, "only", &opt.only, "GLOB", "only tensors whose name matches (may be repeated)"),
    LM_GROUP("Output"),
    LM_FLAG('s', "stats", &opt.stats, "read the data: min, max, mean, std, zeros, nonfinite"),
    LM_FLAG('l', "list", &opt.list, "one line for each tensor [on]"),
    LM_FLAG(0, "verify", &opt.verify,
            "check that each file, tensor, scale and key is read; else 3"),
    LM_GROUP("Comparison"),
    LM_FLAG(0, "check", &opt.check, "exit with 3 when the two models differ"),
    LM_REAL(0, "atol", &opt.atol, "X", 0, 1e300, "differences up to X are the same [0]"),
    LM_REAL(0, "rtol", &opt.rtol, "X", 0, 1e300, "and up to X times the value in A [0]"),
    LM_FLAG(0, "strict", &opt.strict, "count another dtype as a difference"),
    LM_END,
};

static const char *const examples[] = {
    "inspect-model --stats model/",
    "inspect-model --check a/ b/ && echo same",
    NULL,
};

static lm_tool tool = {
    .name = "inspect-model",
    .args = "MODEL [MODEL]",
    .brief = "list, summarise and compare model files",
    .opts = options,
    .use = LM_USE_OUTPUT | LM_USE_THREADS | LM_USE_JSON,
    .min_args = 1,
    .max_args = 2,
    .examples = examples,
};

/* Elements of the modules that predict tokens further on; *copies: of these, what is the model's own again. */
static int64_t count_ahead(const lm_model_source *m, const lm_config *c, int64_t *copies)
{
    int64_t n = 0;
    lm_part of;
    *copies = 0;
    for (size_t i = 0; i < lm_model_source_count(m); i++) {
        const lm_st_tensor *t = lm_model_source_at(m, i);
        if (lm_ahead_layer(c, t->name) < 0)
            continue;
        n += t->count;
        *copies += lm_ahead_is_copy(c, t->name, &of) ? t->count : 0;
    }
    return n;
}

/* Parameters of a mixture of experts that a token meets, and of modules apart from the model; nothing for others, and without
 * the config of a known model. */
static void count_parts(const lm_model_source *m, lm_inspect_opts *how)
{
    const json_t *config = lm_model_source_config(m);
    lm_config c;
    lm_err ignored = { 0 };
    int64_t copies;

    if (!config || lm_config_read(config, "config.json", &c, &ignored))
        return;
    lm_config_see(&c, m);
    how->active = lm_config_active_params(&c);
    how->active = how->active < lm_config_params(&c) ? how->active : 0;
    how->ahead_stored = count_ahead(m, &c, &copies);
    how->ahead = how->ahead_stored - copies;
    lm_config_fini(&c);
}

static lm_code show(lm_model_source *m, lm_par *par, lm_buf *text, lm_err *e)
{
    lm_inspect_opts how = { .json = tool.json,
                            .list = opt.list,
                            .stats = opt.stats,
                            .only = opt.only.v,
                            .n_only = opt.only.n };
    count_parts(m, &how);
    lm_code rc = lm_inspect_report(m, &how, par, &tool.sink, text, e);

    return rc || lm_stopping() ? rc : lm_model_source_finish(m, e);
}

static lm_code verify(lm_model_source *m, lm_buf *text, lm_err *e)
{
    uint64_t faults = 0;
    lm_code rc = lm_model_verify_report(m, tool.json, text, &faults, e);

    if (!rc && faults && !lm_stopping())
        lm_answer_no(&tool);
    return rc;
}

static lm_code compare(lm_model_source *a, lm_model_source *b, lm_par *par, lm_buf *text, lm_err *e)
{
    lm_compare_opts how = { opt.atol, opt.rtol, opt.strict, opt.only.v, opt.only.n };
    lm_model_diff diff;
    lm_code rc = lm_model_compare(a, b, &how, par, &tool.sink, &diff, e);

    if (!rc && !lm_stopping())
        rc = lm_model_source_finish(a, e);
    if (!rc && !lm_stopping())
        rc = lm_model_source_finish(b, e);
    if (!rc)
        rc = lm_compare_report(a, b, &diff, tool.json, text, e);
    if (!rc && opt.check && !diff.same && !lm_stopping())
        lm_answer_no(&tool);
    lm_model_diff_fini(&diff);
    return rc;
}

static lm_code write_text(lm_out *out, const lm_buf *text, lm_err *e)
{
    if (fwrite(text->data, 1, text->len, lm_out_file(out)) != text->len)
        return lm_fail_write(lm_out_path(out), e);
    return LM_OK;
}

static lm_code run(lm_err *e)
{
    lm_model_source *m[2] = { NULL, NULL };
    lm_par *par = NULL;
    lm_buf text = { 0 };
    lm_out *out = NULL;
    lm_code rc = lm_par_new(&par, opt.stats || tool.argc > 1 ? tool.threads : 1, e);

    const lm_bundle_opts how = lm_tool_bundle(&tool, par);
    for (int i = 0; i < tool.argc && !rc; i++)
        rc = lm_model_source_open(tool.argv[i], &how, &m[i], e);
    if (!rc)
        rc = lm_out_open(tool.output ? tool.output : "-", tool.force, &out, e);
    if (!rc)
        rc = m[1]         ? compare(m[0], m[1], par, &text, e)
             : opt.verify ? verify(m[0], &text, e)
                          : show(m[0], par, &text, e);
    if (!rc && !lm_stopping())
        rc = write_text(out, &text, e);
    if (!rc && !lm_stopping())
        rc = lm_out_commit(out, e);
    else
        lm_out_drop(out);
    lm_buf_fini(&text);
    lm_model_source_close(m[0]);
    lm_model_source_close(m[1]);
    lm_par_free(par);
    return rc;
}

int main(int argc, char **argv)
{
    lm_err e = { 0 };

    lm_begin(&tool, argc, argv);
    if (opt.check && tool.argc != 2)
        lm_misuse(&tool, "--check", "name the two models to compare", "one model given");
    if (opt.verify && (tool.argc == 2 || opt.stats || opt.only.n || lm_given(&tool, "list")))
        lm_misuse(&tool, "--verify", "verify one complete model", "%s",
                  tool.argc == 2 ? "cannot be used with two models"
                                 : "cannot be combined with --stats, --only and --list");
    if (tool.argc == 2 && opt.stats)
        lm_misuse(&tool, "--stats", "inspect one model at a time",
                  "cannot be used with two models");
    lm_refuse_twice(&tool, NULL, 0);
    for (int i = 0; i < tool.argc; i++)
        lm_refuse_same(&tool, tool.output, tool.argv[i]);
    if (run(&e))
        lm_complain(&tool, &e);
    return lm_end(&tool);
}
