/* SPDX-License-Identifier: Apache-2.0 */
/* compress-ckpt -- models and checkpoints to .lmz and back.  See man/man1/compress-ckpt.1. */
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"
#include "common/tool.h"
#include "compress/check.h"
#include "compress/pack.h"
#include "compress/table.h"
#include "compress/unpack.h"
#include "format/folder_run.h"

static struct {
    bool decompress, test, list, to_stdout, keep, rm, salvage;
    int64_t level;
    const char *base, *rebase, *states, *weights;
    lm_strs tensor;
} opt = { .keep = true };

static const char *const state_forms[] = { "bf16", "int8", NULL };

static const lm_opt options[] = {
    LM_GROUP("What to do (by default: compress)"),
    LM_FLAG('d', "decompress", &opt.decompress, "expand .lmz files again"),
    LM_FLAG('t', "test", &opt.test, "check every chunk; exit with 3 when one is damaged"),
    LM_FLAG('l', "list", &opt.list, "a table of tensors; with -v of their planes too"),
    LM_STR(0, "rebase", &opt.rebase, "BASE|none", "rewrite against another base, or whole"),
    LM_GROUP("Compression"),
    LM_LEVEL("level", &opt.level, "N", 1, 19, "effort, also written -1 ... -19 [3]"),
    LM_STR(0, "base", &opt.base, "MODEL", "write, or read, a delta against MODEL"),
    LM_CHOICE(0, "optimizer-states", &opt.states, "FORM", state_forms,
              "lossy: the optimiser's states as bf16 or int8"),
    LM_STR(0, "weights", &opt.weights, "CODEC",
           "lossy: the weights by a codec: bf16, fp8_e4m3 ..."),
    LM_GROUP("Decompression"),
    LM_LIST(0, "tensor", &opt.tensor, "NAME", "only this tensor, as a .safetensors (repeatable)"),
    LM_FLAG(0, "salvage", &opt.salvage,
            "restore the intact parts of a damaged file; list the rest"),
    LM_GROUP("Files"),
    LM_FLAG('c', "stdout", &opt.to_stdout, "write to standard output, as -o - does"),
    LM_FLAG('k', "keep", &opt.keep, "keep the input [on]"),
    LM_FLAG(0, "rm", &opt.rm, "remove the input once the output was read back and found equal"),
    LM_END,
};

static const char *const examples[] = {
    "compress-ckpt model/ && compress-ckpt -l model.lmz",
    "compress-ckpt run/step-002000 --base run/step-001000 -o step-002000.lmz",
    NULL,
};

static lm_tool tool = {
    .name = "compress-ckpt",
    .args = "[MODEL ...]",
    .brief = "compress models and checkpoints, without loss unless requested",
    .opts = options,
    .makes = LM_MAKES_OTHER,
    .use = LM_USE_HISTORY | LM_USE_OUTPUT | LM_USE_THREADS | LM_USE_JSON,
    .min_args = 0,
    .max_args = -1,
    .filter = true,
    .alias = "Tj",
    .examples = examples,
};

/* ---- names ---- */

/* The path of the product of `input`; the caller frees it. */
static lm_code output_of(const char *input, char **out, lm_err *e)
{
    static const char *const archives[] = { ".tar",    ".tar.gz",  ".tar.zst",
                                            ".tar.xz", ".tar.bz2", ".tar.lz4" };
    size_t n = strlen(input);
    if (tool.output || opt.to_stdout || opt.tensor.n || !strcmp(input, "-"))
        return lm_strdup(out, tool.output ? tool.output : "-", e);
    if (opt.rebase)
        return lm_strdup(out, input, e);
    if (opt.decompress && !lm_text_ends(input, ".lmz"))
        return lm_fail(e, LM_EUSAGE, input, "name the output with -o", "does not end in .lmz");
    if (opt.decompress)
        return lm_asprintf(out, e, "%.*s", (int)(n - 4), input);
    while (n > 1 && input[n - 1] == '/')
        n--;
    for (size_t i = 0; i < sizeof archives / sizeof *archives; i++)
        if (lm_text_ends(input, archives[i]))
            n = strlen(input) - strlen(archives[i]);
    const char *base = lm_path_base(input);
    if (!strcmp(base, ".") || !strcmp(base, "..") || (n == 1 && *input == '/'))
        return lm_fail(e, LM_EUSAGE, input, "name the output with -o",
                       "does not determine the name of the output");
    if (lm_text_ends(input, ".lmz"))
        return lm_fail(e, LM_EUSAGE, input, "give -d, --rebase, or another output with -o",
                       "is already compressed");
    return lm_asprintf(out, e, "%.*s.lmz", (int)n, input);
}

static void refuse_terminal(const char *output)
{
    if (!strcmp(output, "-") && isatty(STDOUT_FILENO) && !tool.force)
        lm_misuse(&tool, "standard output", "redirect it, name a file with -o, or force it with -f",
                  "is a terminal");
}

static lm_unpack_opts unpack_opts(lm_par *par)
{
    return (lm_unpack_opts){
        .base = opt.base, .force = tool.force, .par = par, .sink = &tool.sink, .tmpdir = tool.tmpdir
    };
}

/* ---- compressing ---- */

/* Print a line for each tensor coded with loss: to standard output, unless the product goes
 * there. */
static void print_losses(const lm_pack_report *r, bool apart)
{
    for (size_t i = 0; i < r->n_loss; i++) {
        const lm_pack_loss *l = &r->loss[i];
        char line[512];
        snprintf(line, sizeof line, "%-9s max %.3e  rel %.3e  bound %.3e  %s", l->codec,
                 l->err.max_abs, l->err.rel_l2, l->err.bound, l->tensor);
        if (apart)
            puts(line);
        else
            lm_say(&tool, LM_LOG_NOTICE, "%s", line);
    }
}

static lm_code report_packed(const char *input, const char *output, const lm_pack_report *r,
                             lm_err *e)
{
    char raw[32], coded[32];
    bool apart = strcmp(output, "-") != 0;
    if (tool.json) {
        lm_buf text = { 0 };
        if (lm_print_text(lm_pack_report_json(r, input, output, &text, e), &text, ""))
            return e->code;
    } else {
        print_losses(r, apart);
    }
    if ((opt.states || opt.weights) && !r->n_loss)
        lm_say(&tool, LM_LOG_WARN, "%s: has no tensor that %s would make smaller", input,
               !opt.weights  ? "--optimizer-states"
               : !opt.states ? "--weights"
                             : "--weights or --optimizer-states");
    lm_say(&tool, LM_LOG_NOTICE, "%s: %" PRIu64 " %s, %s to %s (%.1f %%)%s",
           apart ? output : "standard output", r->files, r->files == 1 ? "file" : "files",
           lm_show_bytes((double)r->raw, raw), lm_show_bytes((double)r->coded, coded),
           r->raw ? 100 * (double)r->coded / (double)r->raw : 100, r->n_loss ? ", with loss" : "");
    return LM_OK;
}

static lm_code find_formats(lm_coded_policy *p, lm_err *e)
{
    if (opt.states && lm_format_find(strcmp(opt.states, "int8") ? opt.states : "dynamic8",
                                     lm_lossy_takes, &p->states, e))
        return e->code;
    if (opt.weights && lm_format_find(opt.weights, lm_lossy_takes, &p->weights, e)) {
        lm_err_in(e, "--weights");
        return e->code;
    }
    return LM_OK;
}

/* Check that the input may be removed afterwards.  lm_pack ensures that the output holds all of
 * it. */
static lm_code check_removal(const char *input, lm_err *e)
{
    char *real = NULL;
    struct stat st;
    if (!lstat(input, &st) && S_ISLNK(st.st_mode))
        return lm_fail(e, LM_EUSAGE, input, "name its target", "is a link");
    lm_code rc = lm_run_resolve(input, &real, e);
    if (!rc && strcmp(real, input))
        rc = lm_fail(e, LM_EUSAGE, input, "name the checkpoint", "is a run, of which %s is used",
                     real);
    lm_free(real);
    return rc;
}

static lm_code compress(const char *input, const char *output, lm_par *par, lm_err *e)
{
    lm_history_step step = lm_tool_step(&tool);
    lm_pack_report r = { 0 };
    lm_pack_opts o = { .level = (int)opt.level,
                       .base = opt.base,
                       .step = &step,
                       .force = tool.force,
                       .verify = opt.rm,
                       .whole = opt.rm,
                       .par = par,
                       .sink = &tool.sink,
                       .tmpdir = tool.tmpdir };
    if (opt.rebase) {
        o.base = strcmp(opt.rebase, "none") ? opt.rebase : NULL;
        o.input_base = opt.base;
        o.verify = true;
        o.force |= !strcmp(input, output);
    }
    lm_code rc = find_formats(&o.lossy, e);
    if (!rc && opt.rm)
        rc = check_removal(input, e);
    if (!rc)
        rc = lm_pack(input, output, &o, &r, e);
    if (!rc && !lm_stopping())
        rc = report_packed(input, output, &r, e);
    if (!rc && opt.rm && !lm_stopping() && !(rc = lm_run_replace(input, output, e)))
        rc = lm_rm_rf(input, e);
    lm_pack_report_fini(&r);
    return rc;
}

/* For --rebase the input must be an .lmz. */
static lm_code check_lmz(const char *input, lm_err *e)
{
    lm_lmz *z = NULL;
    lm_code rc = lm_lmz_open_index(input, NULL, &z, e);
    lm_lmz_free(z);
    return rc;
}

/* ---- expanding ---- */

static void say_lost(void *ctx, const char *file, const char *tensor, uint64_t chunk,
                     const char *what)
{
    char at[32] = "";
    if (chunk != UINT64_MAX)
        snprintf(at, sizeof at, ": chunk %" PRIu64, chunk);
    lm_say(&tool, LM_LOG_ERROR, "%s%s%s%s%s%s: %s: lost", (const char *)ctx, file ? ": " : "",
           file ? file : "", tensor ? ": " : "", tensor ? tensor : "", at, what);
}

static lm_code report_expanded(const char *input, const char *output, const lm_unpack_report *r,
                               uint64_t lost, lm_err *e)
{
    char bytes[32];
    lm_buf text = { 0 };
    lm_say(&tool, LM_LOG_NOTICE, "%s: %" PRIu64 " %s, %s%s",
           strcmp(output, "-") ? output : "standard output", r->files,
           r->files == 1 ? "file" : "files", lm_show_bytes((double)r->bytes, bytes),
           lost ? ", incomplete" : "");
    return tool.json
               ? lm_print_text(lm_unpack_report_json(r, input, output, lost, &text, e), &text, "")
               : LM_OK;
}

static lm_code expand_file(const char *input, const char *output, lm_par *par, lm_err *e)
{
    lm_unpack_opts o = unpack_opts(par);
    lm_unpack_report r = { 0 };
    uint64_t lost = 0;
    lm_code rc =
        opt.salvage
            ? lm_unpack_salvage(input, output, &o, say_lost, (void *)(uintptr_t)input, &lost, &r, e)
        : opt.tensor.n ? lm_unpack_tensors(input, output, opt.tensor.v, opt.tensor.n, &o, &r, e)
                       : lm_unpack(input, output, &o, &r, e);
    if (rc || lm_stopping())
        return rc;
    if (lost)
        lm_answer_no(&tool);
    if (report_expanded(input, output, &r, lost, e) || !opt.rm)
        return e->code;
    if (r.expanded)
        return lm_fail(e, LM_EUSAGE, input, "remove it by hand",
                       "is kept: its expanded tensors cannot be compared with the original");
    rc = lm_unpack_compare(input, output, &o, e);
    if (rc || lm_stopping() || (rc = lm_run_replace(input, output, e)))
        return rc;
    return lm_rm_rf(input, e);
}

/* For a run, its newest checkpoint. */
static lm_code expand(const char *input, const char *output, lm_par *par, lm_err *e)
{
    char *path = NULL;
    lm_code rc = lm_run_resolve(input, &path, e);
    if (!rc && opt.rm && strcmp(path, input))
        rc = lm_fail(e, LM_EUSAGE, input, "name the checkpoint", "is a run, of which %s is used",
                     path);
    if (!rc)
        rc = expand_file(path, output, par, e);
    lm_free(path);
    return rc;
}

/* ---- testing ---- */

static void say_fault(void *ctx, const lm_check_fault *f)
{
    char at[32] = "";
    (void)ctx;
    if (f->chunk != UINT64_MAX)
        snprintf(at, sizeof at, ": chunk %" PRIu64, f->chunk);
    lm_say(&tool, LM_LOG_ERROR, "%s%s%s%s%s%s: %s", f->where, f->file ? ": " : "",
           f->file ? f->file : "", f->tensor ? ": " : "", f->tensor ? f->tensor : "", at, f->what);
}

static lm_code test(const char *path, lm_par *par, lm_err *e)
{
    lm_bundle_opts o = { .base = opt.base, .par = par, .sink = &tool.sink, .tmpdir = tool.tmpdir };
    lm_buf text = { 0 };
    uint64_t faults = 0;
    lm_code rc = tool.json ? lm_check_json(path, &o, &text, &faults, e)
                           : lm_check(path, &o, say_fault, NULL, &faults, e);
    if (rc || lm_stopping()) {
        lm_buf_fini(&text);
        return rc;
    }
    if (faults)
        lm_answer_no(&tool);
    else
        lm_say(&tool, LM_LOG_NOTICE, "%s: no fault", lm_path_shown(path));
    return tool.json ? lm_print_text(LM_OK, &text, "") : LM_OK;
}

static lm_code list(const char *path, lm_err *e)
{
    static int tables;
    lm_table_opts o = { tool.json, true, tool.verbosity >= LM_LOG_INFO };
    lm_lmz *z = NULL;
    lm_buf text = { 0 };
    if (!strcmp(path, "-"))
        return lm_fail(e, LM_EUSAGE, "--list", "name a file",
                       "needs the index at the end of a file");
    lm_code rc = lm_lmz_open_index(path, NULL, &z, e);
    if (!rc && tables++ && !tool.json)
        rc = lm_buf_add(&text, "\n", 1, e);
    if (!rc)
        rc = lm_lmz_table(z, path, &o, &text, e);
    lm_lmz_free(z);
    return lm_print_text(rc, &text, "");
}

/* ---- the command line ---- */

/* For -t and -l: the newest checkpoint of a run. */
static lm_code test_or_list(const char *input, lm_par *par, lm_err *e)
{
    char *path = NULL;
    lm_code rc = lm_run_resolve(input, &path, e);
    if (!rc && lm_path_is_dir(path))
        rc = lm_fail(e, LM_EUSAGE, path, "inspect-model reads models of any form",
                     "is a folder, not an .lmz");
    if (!rc)
        rc = opt.test ? test(path, par, e) : list(path, e);
    lm_free(path);
    return rc;
}

static lm_code handle(const char *input, lm_par *par, lm_err *e)
{
    char *output = NULL;
    lm_refuse_same(&tool, "-", input);
    if (opt.test || opt.list)
        return test_or_list(input, par, e);
    lm_code rc = opt.rebase ? check_lmz(input, e) : LM_OK;
    if (!rc)
        rc = output_of(input, &output, e);
    if (rc)
        return rc;
    if (tool.json && !strcmp(output, "-"))
        lm_misuse(&tool, "--json", "name a file with -o",
                  "the product goes to standard output, too");
    if (!(opt.rebase && !strcmp(input, output)))
        lm_refuse_same(&tool, output, input);
    if (opt.base)
        lm_refuse_same(&tool, output, opt.base);
    lm_refuse_ending(&tool, output, opt.decompress ? LM_MAKES_MODEL : LM_MAKES_LMZ);
    refuse_terminal(output);
    rc = opt.decompress ? expand(input, output, par, e) : compress(input, output, par, e);
    lm_free(output);
    return rc;
}

/* Options that exclude each other. */
static void check_options(void)
{
    bool packs = !opt.decompress && !opt.test && !opt.list, lossy = opt.states || opt.weights;
    bool looks = opt.test || opt.list,
         piped = opt.to_stdout || (tool.output && !strcmp(tool.output, "-"));
    const struct {
        bool wrong;
        const char *option, *todo, *what;
    } checks[] = {
        { opt.decompress + opt.test + opt.list + (opt.rebase != NULL) > 1, "-d -t -l --rebase",
          "choose one", "do different things" },
        { opt.level && !packs, "--level", NULL, "applies to compressing only" },
        { lossy && (!packs || opt.rebase), opt.states ? "--optimizer-states" : "--weights", NULL,
          "applies to compressing only" },
        { lm_given(&tool, "history") && !lossy, "--history",
          "the digest is of the model before --weights and --optimizer-states",
          "has no effect without lossy coding" },
        { opt.tensor.n && !opt.decompress, "--tensor", "give -d too", "applies to -d only" },
        { opt.salvage && !opt.decompress, "--salvage", "give -d too", "applies to -d only" },
        { opt.tensor.n && opt.salvage, "--tensor", "salvage everything first",
          "does not go with --salvage" },
        { opt.list && opt.base, "--base", "leave it out", "is not read for a table" },
        { looks && (tool.output || opt.to_stdout), "--output", "redirect standard output",
          "applies neither to -t nor to -l" },
        { tool.output && opt.to_stdout, "--stdout", "give -c or -o", "contradicts -o" },
        { tool.output && tool.argc > 1, "--output", "give one input", "cannot hold %d inputs" },
        { (opt.to_stdout || opt.tensor.n) && tool.argc > 1, "standard output", "give one input",
          "cannot hold %d inputs" },
        { opt.rm && lm_given(&tool, "keep") && opt.keep, "--rm", "give one of them",
          "contradicts --keep" },
        { opt.rm && (!packs || opt.rebase) && !opt.decompress, "--rm", NULL,
          "applies to compressing and -d only" },
        { opt.rm && (lossy || opt.salvage || opt.tensor.n), "--rm", "remove the input by hand",
          "would lose parts that the output does not hold" },
        { (opt.rm || opt.rebase) && piped, opt.rm ? "--rm" : "--rebase", "write to a file",
          "standard output cannot be read back" },
    };
    for (size_t i = 0; i < sizeof checks / sizeof *checks; i++)
        if (checks[i].wrong)
            lm_misuse(&tool, checks[i].option, checks[i].todo, checks[i].what, tool.argc);
    for (int i = 0; i < tool.argc; i++)
        if (!strcmp(tool.argv[i], "-") && (opt.rm || opt.rebase))
            lm_misuse(&tool, opt.rm ? "--rm" : "--rebase", "name a file",
                      "does not go with standard input");
}

int main(int argc, char **argv)
{
    lm_err e = { 0 };
    lm_par *par = NULL;
    lm_begin(&tool, argc, argv);
    if (lm_given(&tool, "keep") && !opt.keep)
        opt.rm = true;
    check_options();
    lm_refuse_twice(&tool, &opt.base, 1);
    if (lm_par_new(&par, tool.threads, &e))
        lm_complain(&tool, &e);
    for (int i = 0; par && i < tool.argc && !lm_stopping(); i++)
        if (handle(tool.argv[i], par, &e))
            lm_complain(&tool, &e);
    lm_par_free(par);
    return lm_end(&tool);
}
