/* SPDX-License-Identifier: Apache-2.0 */
/* files.c -- quantize-kv on cache files: lists, codes, plain numbers.  No model is opened. */
#include "quantize-kv/files.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/stream.h"
#include "base/text.h"
#include "kv/file_report.h"
#include "kv/image.h"
#include "kv/list.h"
#include "model/cache_rope.h"
#include "quantize-kv/text.h"

static lm_tool *tool;
static const kv_file_options *o;

typedef struct {
    lm_par *par;
    lm_kv_file *file;
    lm_kv_image *in, *out;
    lm_kv_spec *spec;
    lm_kv_plan *plan;
    lm_kv_site *site;
    lm_kv_data *data[LM_KV_FILES];
    lm_buf text; /* of the specification, the list, the history */
    unsigned levels;
    uint64_t written; /* bytes of tensors */
} work;

static bool is_cachegen(void)
{
    return o->method && !strcmp(o->method, LM_KV_CACHEGEN);
}

/* cachegen with keys, as other methods have them. */
static bool has_cachegen_keys(void)
{
    return o->method && !strncmp(o->method, LM_KV_CACHEGEN ":", sizeof LM_KV_CACHEGEN);
}

/* ---- the method ---- */

/* Bits of the levels that were given; that of level 1 without any. */
static unsigned levels_of(void)
{
    unsigned levels = 0;
    for (int i = 0; i < o->level.n; i++) {
        const char *v = o->level.v[i];
        if (*v < '0' || *v > '3' || v[1])
            lm_misuse(tool, "--level", "give 0, 1, 2 or 3", "there is no level '%s'", v);
        levels |= 1u << (*v - '0');
    }
    return levels ? levels : 2;
}

static lm_code add_key(lm_buf *b, const char *key, int64_t v, lm_err *e)
{
    if (v < 0)
        return LM_OK;
    return lm_buf_addf(b, e, "%s%s=%lld", strchr(b->data, ':') ? "," : ":", key, (long long)v);
}

/* The method with its keys, for the layers of the file. */
static lm_code bind_method(work *w, lm_err *e)
{
    const lm_kv_about *a = lm_kv_file_about(w->file);
    if (lm_buf_add(&w->text, o->method, strlen(o->method), e) ||
        add_key(&w->text, "bits", o->bits, e) || add_key(&w->text, "group", o->group, e) ||
        add_key(&w->text, "residual", o->residual, e) ||
        lm_kv_spec_parse_of(w->text.data, lm_kv_file_names, &w->spec, e) ||
        lm_alloc_n(&w->site, (size_t)a->layers, sizeof *w->site, "layers", e))
        return e->code;
    for (int i = 0; lm_kv_spec_file(w->spec, i); i++) {
        if (lm_kv_data_read(lm_kv_spec_file(w->spec, i), &w->data[i], e) ||
            lm_kv_data_check(w->data[i], a->weights, a->config, e))
            return e->code;
    }
    for (int64_t i = 0; i < a->layers; i++)
        w->site[i] = (lm_kv_site){ .layer = i,
                                   .layers = a->layers,
                                   .kv_heads = a->kv_heads[i],
                                   .head_dim = a->head_dim[i],
                                   .rotary = a->latent ? a->latent[i] : 0,
                                   .max_positions = INT32_MAX,
                                   .act = a->act,
                                   .rope = strcmp(a->rope, "{}") != 0 };
    return lm_kv_spec_bind(w->spec, w->site, a->layers, (const lm_kv_data *const *)w->data,
                           &w->plan, e);
}

/* ---- the report ---- */

static void say_part(const work *w, const lm_kv_image *a, const lm_kv_image *b, int64_t part)
{
    const lm_kv_about *about = &a->about;
    if (lm_kv_about_has_state(about, part / 2))
        return;
    double error = lm_kv_rows_error(about->act, a->content.part[part].data[LM_KV_PLAIN],
                                    b->content.part[part].data[LM_KV_PLAIN],
                                    lm_kv_about_bytes(about, part) / lm_dtype_size(about->act));
    const lm_kv_about *to = w->out ? &w->out->about : about;
    const lm_kv_side *s = to->form ? &to->form[part] : NULL;
    lm_say(tool, LM_LOG_INFO, "layers.%lld.%s: relative error %.4g (%s)", (long long)(part / 2),
           lm_kv_part_name(about, part), error,
           s && s->format ? s->format->name
           : w->levels    ? "cachegen"
                          : lm_dtype_name(about->act));
}

/* The relative error of each part, against what was read. */
static lm_code say_errors(work *w, const lm_kv_image *coded, lm_err *e)
{
    lm_kv_image *a = NULL, *b = NULL;
    lm_code rc = lm_cache_convert(w->in, NULL, tool->cpu, w->par, &a, e);
    rc = rc ? rc : lm_cache_convert(coded, NULL, tool->cpu, w->par, &b, e);
    for (int64_t i = 0; i < 2 * w->in->about.layers && !rc; i++)
        say_part(w, a, b, i);
    lm_kv_image_free(a);
    lm_kv_image_free(b);
    return rc;
}

/* The same for the coarsest level of the file that was written. */
static lm_code say_level_errors(work *w, lm_err *e)
{
    int level = 3;
    lm_kv_file *f = NULL;
    lm_kv_image *m = NULL;
    while (!(w->levels >> level & 1))
        level--;
    const lm_kv_reading r = { .vocab = INT32_MAX, .context = INT32_MAX, .level = level };
    lm_code rc = lm_kv_file_open(tool->output, &f, e);
    rc = rc ? rc : lm_kv_image_read(f, &r, tool->cpu, w->par, &m, e);
    if (!rc)
        lm_say(tool, LM_LOG_INFO, "level %d:", level);
    rc = rc ? rc : say_errors(w, m, e);
    lm_kv_image_free(m);
    lm_kv_file_close(f);
    return rc;
}

static lm_code say_result(work *w, lm_err *e)
{
    char a[32], b[32];
    bool seen = tool->verbosity >= LM_LOG_INFO;
    double out = w->levels ? (double)w->written : (double)lm_kv_image_bytes(w->out);
    lm_say(tool, LM_LOG_NOTICE, "%lld token%s, %s to %s", (long long)w->in->about.tokens,
           lm_plural((uint64_t)w->in->about.tokens),
           lm_show_bytes((double)lm_kv_image_bytes(w->in), a), lm_show_bytes(out, b));
    if (seen && w->levels && tool->output && !lm_stream_is(tool->output))
        return say_level_errors(w, e);
    return seen && !w->levels ? say_errors(w, w->out, e) : LM_OK;
}

/* ---- the work ---- */

static lm_code show_methods(work *w, lm_err *e)
{
    lm_code rc =
        tool->json ? lm_kv_methods_json(true, &w->text, e) : lm_kv_methods_table(true, &w->text, e);
    return rc ? rc : kv_write_text(tool->output ? tool->output : "-", tool->force, &w->text, e);
}

/* With -d the level that was given, else the best one. */
static lm_code read_all(work *w, lm_err *e)
{
    const bool chosen = o->decode && o->level.n;
    const unsigned levels = lm_kv_file_levels(w->file);
    const lm_kv_reading r = { .vocab = INT32_MAX,
                              .context = INT32_MAX,
                              .level = chosen ? *o->level.v[0] - '0' : LM_KV_FILE_BEST,
                              .keep = o->verify ? levels : w->levels }; /* kept bytes are checked */
    const unsigned lacks = w->levels & ~levels;
    char list[LM_CACHEGEN_SHOWN];
    if (levels && lacks)
        lm_say(tool, LM_LOG_NOTICE, "coded from the numbers of its level %d, for it lacks them: %s",
               __builtin_ctz(levels), lm_cachegen_show_levels(lacks, list));
    return lm_kv_image_read(w->file, &r, tool->cpu, w->par, &w->in, e);
}

static lm_code write_cache(work *w, lm_err *e)
{
    const lm_kv_image *m = w->out ? w->out : w->in;
    const lm_kv_out to = { .path = tool->output ? tool->output : "-",
                           .force = tool->force,
                           .bytes = &w->written,
                           .from = w->file };
    lm_kv_about a = m->about;
    lm_history_step step = lm_tool_step(tool);
    w->text.len = 0;
    if (lm_history_add(a.history, &step, &w->text, e))
        return e->code;
    a.history = w->text.len ? w->text.data : NULL;
    return lm_kv_file_write(&to, &a, &m->content, w->levels, tool->cpu, w->par, e);
}

static lm_code convert(work *w, lm_err *e)
{
    w->levels = is_cachegen() ? levels_of() : 0;
    lm_code rc = o->decode || w->levels ? LM_OK : bind_method(w, e);
    rc = rc ? rc : read_all(w, e);
    if (!rc && (rc = lm_cache_convert(w->in, w->plan, tool->cpu, w->par, &w->out, e)))
        lm_err_in(e, "%s", lm_stream_is(tool->argv[0]) ? "standard input" : tool->argv[0]);
    rc = rc ? rc : write_cache(w, e);
    return rc ? rc : say_result(w, e);
}

static lm_code run(work *w, lm_err *e)
{
    if (o->methods)
        return show_methods(w, e);
    lm_code rc = lm_par_new(&w->par, tool->threads, e);
    rc = rc ? rc : lm_kv_file_open_input(tool->argv[0], &w->file, e);
    if (rc)
        return rc;
    if (o->list) {
        rc = lm_kv_file_report(w->file, tool->json, &w->text, e);
        return rc ? rc : kv_write_text(tool->output ? tool->output : "-", tool->force, &w->text, e);
    }
    return o->verify ? read_all(w, e) : convert(w, e);
}

void kv_files_check(lm_tool *t, const kv_file_options *options)
{
    tool = t;
    o = options;
    int asked = (o->method != NULL) + o->decode + o->list + o->verify + o->methods;
    bool keys = o->bits >= 0 || o->group >= 0 || o->residual >= 0;
    bool makes = o->method || o->decode;
    if (asked != 1)
        lm_misuse(tool, "command line",
                  "give one of --method, -d, -l, --verify, --list-methods, --calibrate, --evaluate",
                  asked ? "they cannot be combined" : "nothing to do");
    if (keys && (!o->method || is_cachegen() || strpbrk(o->method, ";,=+")))
        lm_misuse(tool, "--bits, --group, --residual", "write keys as --method int4:group=32",
                  "they go with one method by its name");
    if (o->level.n && !is_cachegen() && !o->decode)
        lm_misuse(tool, "--level", "give it with --method cachegen, or one with -d",
                  o->method ? "no other method has levels" : "no level is coded or decoded");
    if (has_cachegen_keys())
        lm_misuse(tool, "--method", "give its levels with --level", "cachegen has no keys");
    if (o->level.n > 1 && o->decode)
        lm_misuse(tool, "--level", "give one", "-d decodes one level");
    if (is_cachegen() || o->level.n)
        levels_of();
    if (tool->json && !o->list && !o->methods)
        lm_misuse(tool, "--json", "give -l or --list-methods", "nothing is listed");
    if (o->verify && tool->output)
        lm_misuse(tool, "-o", "leave it out", "--verify writes nothing");
    if (makes && !tool->output && isatty(STDOUT_FILENO) && !tool->force)
        lm_misuse(tool, "standard output", "redirect it, name a file with -o, or force it with -f",
                  "is a terminal");
    if (!o->methods)
        lm_refuse_same(tool, tool->output, tool->argv[0]);
}

void kv_files(lm_tool *t, const kv_file_options *options)
{
    lm_err e = { 0 };
    work w = { 0 };
    tool = t;
    o = options;
    if (run(&w, &e))
        lm_complain(tool, &e);
    lm_kv_image_free(w.in);
    lm_kv_image_free(w.out);
    lm_kv_file_close(w.file);
    lm_kv_plan_free(w.plan);
    lm_kv_spec_free(w.spec);
    for (int i = 0; i < LM_KV_FILES; i++)
        lm_kv_data_free(w.data[i]);
    lm_free(w.site);
    lm_buf_fini(&w.text);
    lm_par_free(w.par);
}
