/* SPDX-License-Identifier: Apache-2.0 */
/* pack.c -- writes the files of a bundle to an .lmz; see pack.h. */
#include "compress/pack.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"
#include "format/bundle.h"
#include "format/folder_json.h"
#include "format/folder_run.h"
#include "format/lmz.h"

enum { COPY = 16 << 20, MAX_JSON = 64 << 20 };

typedef struct {
    const lm_pack_opts *o;
    lm_bundle_opts in_opts, base_opts;
    char *from, *base_path, *base_name; /* resolved; base_name in the form that the .lmz stores */
    lm_bundle *in, *base;
    lm_out *out;
    lm_lmz_writer *w;
    lm_pack_report *r;
    uint64_t total;
    void *copy;
} job;

/* ---- the chain of bases ---- */

/* True if the chain that begins at the model `path` contains `target`: a delta of target to path
 * could never be read again. */
static lm_code check_circle(const char *path, const char *target, lm_err *e)
{
    char *now = NULL;
    lm_code rc = lm_strdup(&now, path, e);
    for (int step = 0; !rc && step <= LM_LMZ_MAX_CHAIN; step++) {
        lm_lmz *z = NULL;
        lm_err ignored = { 0 };
        char *next = NULL, folder[PATH_MAX];
        if (lm_path_same(now, target))
            rc = lm_fail(e, LM_EUSAGE, path, "choose a base that does not depend on it",
                         "is itself a delta against %s", target);
        if (rc || lm_path_is_dir(now) || lm_lmz_open_index(now, NULL, &z, &ignored))
            break;
        const lm_lmz_info *info = lm_lmz_about(z);
        if (info->delta && !(rc = lm_path_folder(now, folder, e)))
            rc = lm_path_join(&next, folder, info->base_name, e);
        lm_lmz_free(z);
        lm_free(now);
        now = next;
        if (!next)
            break;
    }
    lm_free(now);
    return rc;
}

static lm_code open_base(job *j, const char *to, lm_err *e)
{
    if (!j->o->base)
        return LM_OK;
    if (lm_run_resolve(j->o->base, &j->base_path, e))
        return e->code;
    if (lm_lmz_base_name(to, j->base_path, &j->base_name, e))
        return e->code; /* also a base that is a pipe, before it is opened */
    if (strcmp(to, "-") && check_circle(j->base_path, to, e))
        return e->code;
    if (lm_bundle_open(j->base_path, &j->base_opts, &j->base, e))
        return e->code;
    return lm_bundle_spool(j->base, e);
}

/* ---- files ---- */

static lm_code step_done(job *j, const char *name, uint64_t bytes)
{
    j->r->raw += bytes;
    lm_progress(j->o->sink, "compress", (double)j->r->raw, (double)j->total, "bytes", name);
    return LM_OK;
}

static lm_code pack_plain(job *j, const lm_bundle_file *f, lm_err *e)
{
    const uint8_t *map = lm_bundle_random(j->in) ? lm_bundle_map(j->in, f) : NULL;
    lm_code rc = lm_lmz_begin(j->w, f->name, f->bytes, e);
    for (uint64_t at = 0; !rc && at < f->bytes && !lm_stopping();) {
        size_t got = f->bytes - at < COPY ? (size_t)(f->bytes - at) : COPY;
        const void *data = j->copy;
        if (map)
            data = map + at;
        else
            rc = lm_bundle_read(j->in, j->copy, got, &got, e);
        if (!rc && !got)
            rc = lm_fail(e, LM_EFORMAT, f->name, "it is truncated: fetch or write it again",
                         "it ends early");
        if (!rc)
            rc = lm_lmz_write(j->w, data, got, e);
        if (map)
            lm_bundle_forget(j->in, f, at, got);
        at += got;
        step_done(j, f->name, got);
    }
    return rc;
}

static lm_code keep_losses(job *j, const char *file, const lm_coded *c, lm_err *e)
{
    lm_pack_report *r = j->r;
    for (size_t i = 0; i < lm_coded_count(c); i++) {
        const lm_coded_item *it = lm_coded_at(c, i);
        if (!it->format)
            continue;
        if (lm_grow(&r->loss, &r->cap_loss, r->n_loss + 1, sizeof *r->loss, "report", e))
            return e->code;
        lm_pack_loss *l = &r->loss[r->n_loss];
        *l = (lm_pack_loss){ .codec = it->format->name,
                             .count = it->count,
                             .before = lm_plain_bytes(lm_dtype_parse(it->dtype), it->count),
                             .after = it->coded,
                             .err = it->err };
        r->n_loss++;
        if (lm_strdup(&l->file, file, e) || lm_strdup(&l->tensor, it->name, e))
            return e->code;
    }
    return LM_OK;
}

static lm_code pack_coded(job *j, const lm_bundle_file *f, lm_err *e)
{
    lm_st_stream *in = NULL;
    lm_coded *c = NULL;
    lm_code rc = lm_st_stream_open(lm_bundle_read, j->in, f->name, &in, e);
    if (!rc)
        rc = lm_coded_reduce(in, f->name, &j->o->lossy, j->o->step, &c, e);
    if (!rc)
        rc = lm_lmz_begin(j->w, f->name, lm_coded_bytes(c), e);
    if (!rc)
        rc = lm_coded_run(c, lm_lmz_write, j->w, j->o->par, e);
    if (!rc)
        rc = keep_losses(j, f->name, c, e);
    if (!rc)
        step_done(j, f->name, f->bytes);
    lm_coded_free(c);
    lm_st_stream_close(in);
    return rc;
}

static const char *torch_dtype(const lm_format *c)
{
    return !c                            ? NULL
           : c->element == LM_DTYPE_BF16 ? "bfloat16"
           : c->element == LM_DTYPE_F16  ? "float16"
           : c->element == LM_DTYPE_F32  ? "float32"
                                         : NULL;
}

/* config.json names the dtype of the weights. */
static lm_code update_config(job *j, const char *file, json_t *config, lm_err *e)
{
    (void)file;
    (void)e;
    lm_config_set_dtype(config, torch_dtype(j->o->lossy.weights));
    return LM_OK;
}

static bool is_in_map(const json_t *map, const char *tensor, const char *file)
{
    const char *named = json_string_value(json_object_get(map, tensor));
    return named && !strcmp(named, file);
}

/* Add to *change the growth of the tensors of a file that is still to come. */
static lm_code foresee(job *j, const char *file, const json_t *map, double *change, lm_err *e)
{
    lm_st *st = NULL;
    lm_err malformed = { 0 }; /* reported when it is that file's turn */
    lm_tensor_size size;
    lm_code rc = lm_bundle_st(j->in, file, &st, &malformed) ? LM_OK : e->code;
    for (size_t i = 0; !rc && st && i < lm_st_count(st); i++) {
        const lm_st_tensor *t = lm_st_at(st, i);
        const lm_format *f = lm_coded_choice(&j->o->lossy, file, t);
        if (!f || !is_in_map(map, t->name, file))
            continue;
        rc = lm_tensor_bytes(f, 1, &t->count, &size, e);
        *change += rc ? 0 : (double)size.all - (double)t->bytes;
    }
    lm_st_close(st);
    return rc;
}

/* The index of a model in several files holds the total bytes of its tensors. */
static lm_code update_index(job *j, const char *file, json_t *index, lm_err *e)
{
    json_t *meta = json_object_get(index, "metadata"), *map = json_object_get(index, "weight_map");
    json_t *total = json_object_get(meta, "total_size");
    double change = 0;
    bool behind = false;
    if (!json_is_number(total))
        return LM_OK;
    for (size_t i = 0; i < j->r->n_loss; i++) {
        const lm_pack_loss *l = &j->r->loss[i];
        if (is_in_map(map, l->tensor, l->file))
            change += (double)l->after - (double)l->before;
    }
    lm_code rc = lm_bundle_spool(j->in, e);
    for (size_t i = 0; !rc && i < lm_bundle_count(j->in); i++) {
        const char *name = lm_bundle_at(j->in, i)->name;
        if (behind && lm_text_ends(name, ".safetensors") && !lm_coded_is_state(name))
            rc = foresee(j, name, map, &change, e);
        behind |= !strcmp(name, file);
    }
    if (!rc)
        json_object_set_new(meta, "total_size",
                            json_integer((json_int_t)(json_number_value(total) + change)));
    return rc;
}

typedef lm_code (*update_fn)(job *j, const char *file, json_t *o, lm_err *e);

/* Update a JSON file that describes the weights. */
static lm_code pack_json(job *j, const lm_bundle_file *f, update_fn update, lm_err *e)
{
    json_t *o = NULL;
    lm_buf text = { 0 }, out = { 0 };
    char *name = NULL; /* spooling may move the memory that f borrows */
    uint64_t bytes = f->bytes;
    lm_code rc = lm_strdup(&name, f->name, e);
    if (!rc)
        rc = lm_bundle_load(j->in, name, MAX_JSON, &text, e);
    if (!rc)
        rc = lm_json_parse(text.data, text.len, name, &o, e);
    if (!rc)
        rc = update(j, name, o, e);
    if (!rc)
        rc = lm_json_pretty(o, &out, e);
    if (!rc)
        rc = lm_lmz_begin(j->w, name, out.len, e);
    if (!rc)
        rc = lm_lmz_write(j->w, out.data, out.len, e);
    if (!rc)
        step_done(j, name, bytes);
    json_decref(o);
    lm_buf_fini(&text);
    lm_buf_fini(&out);
    lm_free(name);
    return rc;
}

static lm_code pack_file(job *j, const lm_bundle_file *f, lm_err *e)
{
    const lm_coded_policy *p = &j->o->lossy;
    bool lossy = lm_coded_is_state(f->name) ? p->states != NULL : p->weights != NULL;
    j->r->files++;
    if (lossy && lm_text_ends(f->name, ".safetensors"))
        return pack_coded(j, f, e);
    if (torch_dtype(p->weights) && !strcmp(f->name, "config.json"))
        return pack_json(j, f, update_config, e);
    if (p->weights && p->weights->element != LM_DTYPE_NONE &&
        !strcmp(f->name, "model.safetensors.index.json"))
        return pack_json(j, f, update_index, e);
    return pack_plain(j, f, e);
}

/* Entries that the .lmz cannot hold: a warning, or an error if all of the input must be in it. */
static lm_code check_left_out(job *j, lm_err *e)
{
    char more[48] = "is";
    size_t others = 0;
    const char *first = lm_bundle_left_out(j->in, &others);
    if (!first)
        return LM_OK;
    if (j->o->whole)
        return lm_fail(e, LM_EUSAGE, j->from, "keep the input, or move this entry elsewhere",
                       "holds '%s', which an .lmz does not carry", first);
    if (others)
        snprintf(more, sizeof more, "and %zu %s are", others, others == 1 ? "other" : "others");
    lm_log(j->o->sink, LM_LOG_WARN, "%s: '%s' %s left out: an .lmz holds plain files",
           lm_bundle_path(j->in), first, more);
    return LM_OK;
}

static lm_code pack_files(job *j, lm_err *e)
{
    const lm_bundle_file *f = NULL;
    bool known = lm_bundle_random(j->in);
    lm_code rc = known ? check_left_out(j, e) : LM_OK;
    while (!rc && !lm_stopping() && !(rc = lm_bundle_next(j->in, &f, e)) && f)
        rc = pack_file(j, f, e);
    if (!rc && !lm_stopping() && !j->r->files)
        rc = lm_fail(e, LM_EUSAGE, j->from, NULL, "it holds no files");
    return rc || known || lm_stopping() ? rc : check_left_out(j, e);
}

/* ---- packing ---- */

static lm_code write_out(void *ctx, const void *data, size_t bytes, lm_err *e)
{
    job *j = ctx;
    j->r->coded += bytes;
    if (fwrite(data, 1, bytes, lm_out_file(j->out)) != bytes)
        return lm_fail_write(lm_out_path(j->out), e);
    return LM_OK;
}

/* Read the output back before it gets its final name. */
static lm_code verify(job *j, const char *to, lm_err *e)
{
    char path[64], before[33];
    lm_bundle_opts opts = { .base = j->base_path, .par = j->o->par };
    lm_bundle *again = NULL;
    lm_lmz *z = NULL;
    if (fflush(lm_out_file(j->out)))
        return lm_fail_write(lm_out_path(j->out), e);
    snprintf(path, sizeof path, "/proc/self/fd/%d", lm_out_fd(j->out));
    lm_code rc = lm_lmz_open(path, &opts, &z, e);
    if (!rc)
        rc = lm_lmz_verify(z, NULL, NULL, j->o->sink, e);
    if (!rc)
        rc = lm_bundle_open(j->from, &j->in_opts, &again, e);
    if (!rc)
        rc = lm_bundle_digest(again, before, j->o->sink, e);
    if (!rc && strcmp(before, lm_lmz_about(z)->digest))
        rc = lm_fail(e, LM_EFORMAT, to, "keep the input and try again",
                     "reading it back gives digest %s, the input has %s", lm_lmz_about(z)->digest,
                     before);
    lm_bundle_close(again);
    lm_lmz_free(z);
    return rc;
}

static lm_code check_inside(const char *from, const char *to, lm_err *e)
{
    char in[PATH_MAX], out[PATH_MAX];
    if (!lm_path_is_dir(from) || !strcmp(to, "-"))
        return LM_OK;
    if (lm_path_folder(to, out, e))
        return e->code;
    size_t n = realpath(from, in) ? strlen(in) : 0;
    if (n && !strncmp(in, out, n) && (!out[n] || out[n] == '/'))
        return lm_fail(e, LM_EUSAGE, to, "write it to another folder", "lies inside the input %s",
                       from);
    return LM_OK;
}

static lm_code open_all(job *j, const char *from, const char *to, lm_err *e)
{
    if (lm_run_resolve(from, &j->from, e) || check_inside(j->from, to, e) || open_base(j, to, e) ||
        lm_bundle_open(j->from, &j->in_opts, &j->in, e) || lm_out_open(to, j->o->force, &j->out, e))
        return e->code;
    for (size_t i = 0; lm_bundle_random(j->in) && i < lm_bundle_count(j->in); i++)
        j->total += lm_bundle_at(j->in, i)->bytes;
    return lm_realloc_n(&j->copy, COPY, 1, "a piece of a file", e);
}

static lm_code run(job *j, const char *to, lm_err *e)
{
    lm_lmz_opts opts = { .level = j->o->level,
                         .par = j->o->par,
                         .base = j->base,
                         .base_name = j->base_name,
                         .sink = j->o->sink };
    lm_code rc = lm_lmz_create_on(write_out, j, lm_out_path(j->out), &opts, &j->w, e);
    if (!rc)
        rc = pack_files(j, e);
    if (rc || lm_stopping()) {
        lm_lmz_drop(j->w);
        return rc;
    }
    rc = lm_lmz_close(j->w, e);
    if (!rc && j->o->verify)
        rc = verify(j, to, e);
    return rc;
}

lm_code lm_pack(const char *from, const char *to, const lm_pack_opts *o, lm_pack_report *r,
                lm_err *e)
{
    job j = {
        .o = o,
        .r = r,
        .in_opts = { .base = o->input_base, .tmpdir = o->tmpdir, .par = o->par, .sink = o->sink },
        .base_opts = { .tmpdir = o->tmpdir, .par = o->par, .sink = o->sink }
    };
    lm_code rc = open_all(&j, from, to, e);
    if (!rc)
        rc = run(&j, to, e);
    if (!rc && !lm_stopping())
        rc = lm_out_commit(j.out, e);
    else
        lm_out_drop(j.out);
    lm_bundle_close(j.in);
    lm_bundle_close(j.base);
    lm_free(j.copy);
    lm_free(j.from);
    lm_free(j.base_path);
    lm_free(j.base_name);
    return rc;
}
