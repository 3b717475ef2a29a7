/* SPDX-License-Identifier: Apache-2.0 */
/* unpack.c -- see unpack.h. */
#include "compress/unpack.h"

#include <string.h>

#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"
#include "compress/coded.h"
#include "compress/pick.h"
#include "compress/unpack_impl.h"
#include "format/lmz.h"
#include "format/safetensors_table.h"

bool lm_unpack_is_st(const char *name)
{
    size_t n = strlen(name), k = strlen(".safetensors");
    return n > k && !strcmp(name + n - k, ".safetensors");
}

static const char picked[] = "tensors.safetensors"; /* single tensors, in a folder */

/* ---- the destination ---- */

/* An lm_own_fn: with force, the files that an earlier unpacking of the same .lmz wrote may be
 * replaced. */
static bool is_own(const void *ctx, const char *name)
{
    const lm_unpack_to *t = ctx;
    bool own = lm_bundle_own_checkpoint(NULL, name) || !strcmp(name, picked) ||
               (t->like && lm_bundle_find(t->like, name));
    for (size_t i = 0; !own && t->like_lmz && i < lm_lmz_files(t->like_lmz); i++)
        own = !strcmp(lm_lmz_file(t->like_lmz, i)->name, name);
    return own;
}

lm_code lm_unpack_to_open(lm_unpack_to *t, const char *to, bool lone, lm_err *e)
{
    lm_bundle_opts opts = {
        .tmpdir = t->o->tmpdir, .par = t->o->par, .sink = t->o->sink, .own = is_own, .own_ctx = t
    };
    t->r->lone = lone && (!strcmp(to, "-") || lm_unpack_is_st(to));
    lm_code rc = t->r->lone ? lm_out_open(to, t->o->force, &t->lone, e)
                            : lm_bundle_create(to, t->o->force, &opts, &t->out, e);
    if (!rc && t->out)
        rc = lm_bundle_room(t->out, t->total, e);
    if (!rc && t->out && lm_bundle_out_kind(t->out) == LM_BUNDLE_FILE)
        lm_log(t->o->sink, LM_LOG_WARN, "%s: holds only the weights, other files are left out", to);
    return rc ? rc : lm_realloc_n(&t->copy, LM_UNPACK_COPY, 1, "a piece of a file", e);
}

lm_code lm_unpack_to_close(lm_unpack_to *t, lm_code rc, lm_err *e)
{
    bool good = !rc && !lm_stopping();
    if (t->lone) {
        if (good)
            rc = lm_out_commit(t->lone, e);
        else
            lm_out_drop(t->lone);
    } else if (t->out) {
        if (good)
            rc = lm_bundle_commit(t->out, e);
        else
            lm_bundle_drop(t->out);
    }
    lm_free(t->copy);
    return rc;
}

static lm_code begin(lm_unpack_to *t, const char *name, uint64_t bytes, lm_err *e)
{
    t->r->files++;
    return t->out ? lm_bundle_begin(t->out, name, bytes, e) : LM_OK;
}

static lm_code write_bytes(void *to, const void *data, size_t bytes, lm_err *e)
{
    lm_unpack_to *t = to;
    t->r->bytes += bytes;
    lm_progress(t->o->sink, "expand", (double)t->r->bytes, (double)t->total, "bytes", NULL);
    if (t->out)
        return lm_bundle_write(t->out, data, bytes, e);
    if (fwrite(data, 1, bytes, lm_out_file(t->lone)) != bytes)
        return lm_fail_write(lm_out_path(t->lone), e);
    return LM_OK;
}

/* ---- one file ---- */

/* A reader that keeps its first bytes, so that it can restart after the header has been
 * inspected. */
typedef struct {
    lm_read_fn read;
    void *ctx;
    lm_buf seen;
    size_t at;    /* the next bytes come from here */
    bool looking; /* bytes read are kept */
    lm_code failed;
} replay;

static lm_code replay_read(void *ctx, void *dst, size_t cap, size_t *got, lm_err *e)
{
    replay *p = ctx;
    size_t left = p->seen.len - p->at;
    if (!p->looking && left) {
        *got = left < cap ? left : cap;
        memcpy(dst, p->seen.data + p->at, *got);
        p->at += *got;
        return LM_OK;
    }
    p->failed = p->read(p->ctx, dst, cap, got, e);
    if (!p->failed && p->looking)
        return lm_buf_add(&p->seen, dst, *got, e);
    return p->failed;
}

static lm_code copy_file(lm_unpack_to *t, const char *name, uint64_t bytes, lm_read_fn read,
                         void *ctx, lm_err *e)
{
    lm_code rc = begin(t, name, bytes, e);
    while (!rc && !lm_stopping()) {
        size_t got = 0;
        rc = read(ctx, t->copy, LM_UNPACK_COPY, &got, e);
        if (rc || !got)
            break;
        rc = write_bytes(t, t->copy, got, e);
    }
    return rc;
}

static lm_code write_expanded(lm_unpack_to *t, const char *name, lm_coded *c, lm_err *e)
{
    for (size_t i = 0; i < lm_coded_count(c); i++)
        t->r->expanded += lm_coded_at(c, i)->format != NULL;
    lm_code rc = begin(t, name, lm_coded_bytes(c), e);
    return rc ? rc : lm_coded_run(c, write_bytes, t, t->o->par, e);
}

lm_code lm_unpack_file(lm_unpack_to *t, const char *name, uint64_t bytes, lm_read_fn read,
                       void *ctx, lm_err *e)
{
    replay p = { .read = read, .ctx = ctx, .looking = true };
    lm_st_stream *in = NULL;
    lm_coded *c = NULL;
    lm_err malformed = { 0 }; /* files that are not safetensors are copied unchanged */
    if (!lm_unpack_is_st(name))
        return copy_file(t, name, bytes, read, ctx, e);
    lm_code rc = lm_st_stream_open(replay_read, &p, name, &in, &malformed);
    p.looking = false;
    if (p.failed || rc == LM_ELIMIT)
        *e = malformed;
    else
        rc = rc ? LM_OK : lm_coded_expand(in, name, &c, e);
    if (!rc && c) {
        p.at = p.seen.len;
        rc = write_expanded(t, name, c, e);
    } else if (!rc) {
        rc = copy_file(t, name, bytes, replay_read, &p, e);
    }
    lm_coded_free(c);
    lm_st_stream_close(in);
    lm_buf_fini(&p.seen);
    return rc;
}

/* ---- all files ---- */

static lm_bundle_opts read_opts(const lm_unpack_opts *o)
{
    return (lm_bundle_opts){ .base = o->base, .tmpdir = o->tmpdir, .par = o->par, .sink = o->sink };
}

static lm_code open_lmz(const char *from, const lm_bundle_opts *opts, lm_bundle **in, lm_err *e)
{
    lm_code rc = lm_bundle_open(from, opts, in, e);
    if (!rc && lm_bundle_kind_of(*in) != LM_BUNDLE_LMZ)
        rc = lm_fail(e, LM_EUSAGE, lm_bundle_path(*in), "compress it instead", "is not an .lmz");
    return rc;
}

static bool is_lone(const lm_bundle *in)
{
    return lm_bundle_count(in) == 1 && lm_unpack_is_st(lm_bundle_at(in, 0)->name);
}

/* The first file of a stream may be its only one, which is written differently: it is kept on disk
 * until that is known. */
static lm_code first_file(lm_bundle *in, const lm_bundle_file **f, bool *lone, lm_err *e)
{
    lm_code rc = lm_bundle_next(in, f, e);
    if (!rc && *f && lm_unpack_is_st((*f)->name) && !lm_bundle_random(in))
        rc = lm_bundle_spool(in, e);
    *lone = !rc && lm_bundle_random(in) && is_lone(in);
    return rc;
}

lm_code lm_unpack(const char *from, const char *to, const lm_unpack_opts *o, lm_unpack_report *r,
                  lm_err *e)
{
    lm_bundle_opts opts = read_opts(o);
    lm_unpack_to t = { .o = o, .r = r };
    lm_bundle *in = NULL;
    const lm_bundle_file *f = NULL;
    bool lone = false;
    lm_code rc = open_lmz(from, &opts, &in, e);
    if (!rc)
        rc = first_file(in, &f, &lone, e);
    for (size_t i = 0; !rc && lm_bundle_random(in) && i < lm_bundle_count(in); i++)
        t.total += lm_bundle_at(in, i)->bytes;
    t.like = in;
    if (!rc)
        rc = lm_unpack_to_open(&t, to, lone, e);
    while (!rc && f && !lm_stopping()) {
        rc = lm_unpack_file(&t, f->name, f->bytes, lm_bundle_read, in, e);
        if (!rc)
            rc = lm_bundle_next(in, &f, e);
    }
    rc = lm_unpack_to_close(&t, rc, e);
    lm_bundle_close(in);
    return rc;
}

/* ---- comparing ---- */

static lm_code fill(lm_read_fn read, void *ctx, uint8_t *dst, size_t want, size_t *got, lm_err *e)
{
    size_t n = 1;
    lm_code rc = LM_OK;
    for (*got = 0; !rc && n && *got < want; *got += n)
        rc = read(ctx, dst + *got, want - *got, &n, e);
    return rc;
}

static lm_code compare_file(lm_bundle *a, lm_bundle *b, const lm_bundle_file *f,
                            const lm_bundle_file *g, uint8_t *x, uint8_t *y, lm_err *e)
{
    bool same = f->bytes == g->bytes;
    lm_code rc = LM_OK;
    for (uint64_t at = 0; !rc && same && at < f->bytes;) {
        size_t got, n = f->bytes - at < LM_UNPACK_COPY ? (size_t)(f->bytes - at) : LM_UNPACK_COPY;
        rc = fill(lm_bundle_read, a, x, n, &got, e);
        if (!rc)
            rc = lm_bundle_pread(b, g, at, y, n, e);
        same = rc || (got == n && !memcmp(x, y, n));
        at += n;
    }
    return rc || same ? rc
                      : lm_fail(e, LM_EFORMAT, f->name, "keep the .lmz and try again",
                                "the files written differ from the content of the .lmz");
}

static lm_code compare_bundles(lm_bundle *a, lm_bundle *b, uint8_t *x, uint8_t *y, lm_err *e)
{
    const lm_bundle_file *f, *g;
    size_t n = 0;
    lm_code rc = LM_OK;
    while (!rc && !(rc = lm_bundle_next(a, &f, e)) && f) {
        g = lm_bundle_kind_of(b) == LM_BUNDLE_FILE ? lm_bundle_at(b, 0)
                                                   : lm_bundle_find(b, f->name);
        rc = g ? compare_file(a, b, f, g, x, y, e)
               : lm_fail(e, LM_EFORMAT, f->name, NULL, "is not in %s", lm_bundle_path(b));
        n++;
    }
    if (!rc && n != lm_bundle_count(b))
        rc = lm_fail(e, LM_EFORMAT, lm_bundle_path(b), NULL, "it has %zu file%s, not %zu",
                     lm_bundle_count(b), lm_plural(lm_bundle_count(b)), n);
    return rc;
}

lm_code lm_unpack_compare(const char *from, const char *to, const lm_unpack_opts *o, lm_err *e)
{
    lm_bundle_opts opts = read_opts(o), plain = { .tmpdir = o->tmpdir, .sink = o->sink };
    lm_bundle *a = NULL, *b = NULL;
    uint8_t *x = NULL, *y = NULL;
    lm_code rc = open_lmz(from, &opts, &a, e);
    if (!rc)
        rc = lm_bundle_open(to, &plain, &b, e);
    if (!rc)
        rc = lm_bundle_spool(b, e);
    if (!rc && !lm_alloc_n(&x, LM_UNPACK_COPY, 1, "a piece of a file", e) &&
        !lm_alloc_n(&y, LM_UNPACK_COPY, 1, "a piece of a file", e))
        rc = compare_bundles(a, b, x, y, e);
    lm_free(x);
    lm_free(y);
    lm_bundle_close(a);
    lm_bundle_close(b);
    return e->code;
}

/* ---- single tensors ---- */

typedef struct {
    lm_st **st;
    json_t **described;
    size_t n;
} st_files;

static lm_code open_files(lm_bundle *in, st_files *s, lm_err *e)
{
    size_t n = lm_bundle_count(in);
    if (lm_alloc_n(&s->st, n, sizeof *s->st, "list of files", e) ||
        lm_alloc_n(&s->described, n, sizeof *s->described, "list of files", e))
        return e->code;
    for (size_t i = 0; i < n; i++) {
        const char *name = lm_bundle_at(in, i)->name;
        if (!lm_unpack_is_st(name))
            continue;
        if (lm_bundle_st(in, name, &s->st[s->n], e) ||
            lm_pick_described(s->st[s->n], &s->described[s->n], e))
            return e->code;
        s->n++;
    }
    return LM_OK;
}

static void close_files(st_files *s, size_t room)
{
    for (size_t i = 0; s->st && i < room; i++)
        lm_st_close(s->st[i]);
    for (size_t i = 0; s->described && i < room; i++)
        json_decref(s->described[i]);
    lm_free(s->st);
    lm_free(s->described);
}

/* A similar name among the stored tensors: one of small edit distance, or one that contains
 * `name`. */
static const char *similar(const st_files *s, const char *name)
{
    const char *part = NULL;
    for (size_t i = 0; i < s->n; i++)
        for (size_t k = 0; k < lm_st_count(s->st[i]); k++) {
            const char *t = lm_st_at(s->st[i], k)->name, *const one[] = { t, NULL };
            if (lm_nearest(name, one))
                return t;
            if (!part && *name && strstr(t, name))
                part = t;
        }
    return part;
}

static lm_code no_tensor(const st_files *s, const char *from, const char *name, lm_err *e)
{
    const char *near = similar(s, name);
    char todo[256], shown[LM_ST_SHOWN];
    snprintf(todo, sizeof todo, "did you mean %s?", near ? lm_st_show(near, shown) : "");
    return lm_fail(e, LM_EUSAGE, name, near ? todo : "list the tensors of the file",
                   "%s has no tensor of this name", from);
}

static lm_code pick_all(lm_pick *p, const st_files *s, const char *from, const char *const *names,
                        int n, lm_err *e)
{
    for (int k = 0; k < n; k++) {
        bool found = false;
        for (int i = 0; i < k; i++)
            if (!strcmp(names[i], names[k]))
                return lm_fail(e, LM_EUSAGE, names[k], NULL, "is requested twice");
        for (size_t i = 0; i < s->n && !found; i++) {
            if (lm_pick_add(p, s->st[i], s->described[i], names[k], &found, e) ||
                (found && lm_pick_meta(p, s->st[i], e)))
                return e->code;
        }
        if (!found)
            return no_tensor(s, from, names[k], e);
    }
    return LM_OK;
}

lm_code lm_unpack_tensors(const char *from, const char *to, const char *const *names, int n,
                          const lm_unpack_opts *o, lm_unpack_report *r, lm_err *e)
{
    lm_bundle_opts opts = read_opts(o);
    lm_unpack_to t = { .o = o, .r = r };
    lm_bundle *in = NULL;
    lm_pick *p = NULL;
    st_files s = { 0 };
    uint64_t bytes = 0;
    lm_code rc = open_lmz(from, &opts, &in, e);
    if (!rc)
        rc = lm_bundle_spool(in, e);
    if (!rc)
        rc = open_files(in, &s, e);
    if (!rc)
        rc = lm_pick_new(&p, e);
    if (!rc)
        rc = pick_all(p, &s, lm_bundle_path(in), names, n, e);
    if (!rc)
        rc = lm_pick_ready(p, &bytes, e);
    t.total = bytes;
    if (!rc)
        rc = lm_unpack_to_open(&t, to, true, e);
    if (!rc)
        rc = lm_unpack_file(&t, picked, bytes, lm_pick_read, p, e);
    rc = lm_unpack_to_close(&t, rc, e);
    lm_pick_free(p);
    close_files(&s, in ? lm_bundle_count(in) : 0);
    lm_bundle_close(in);
    return rc;
}
