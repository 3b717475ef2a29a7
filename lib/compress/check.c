/* SPDX-License-Identifier: Apache-2.0 */
/* check.c -- see check.h. */
#include "compress/check.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "base/json.h"
#include "base/stop.h"

typedef struct {
    const char *path;
    lm_check_fn each;
    void *ctx;
    uint64_t faults;
} check;

static void report_fault(check *c, const char *where, const char *file, const char *tensor,
                         uint64_t chunk, const char *what)
{
    c->faults++;
    c->each(c->ctx, &(lm_check_fault){ where, file, tensor, chunk, what });
}

static void on_fault(void *ctx, const lm_lmz_fault *f)
{
    check *c = ctx;
    report_fault(c, c->path, f->file, f->part ? f->part->tensor : NULL, f->chunk, f->what);
}

/* Turn damage into a fault, unless it was reported before; errors of other kinds stay in *e. */
static lm_code absorb(check *c, lm_code rc, bool reported, lm_err *e)
{
    if (rc != LM_EFORMAT)
        return rc;
    if (!reported)
        report_fault(c, e->where[0] ? e->where : c->path, NULL, NULL, UINT64_MAX, e->what);
    *e = (lm_err){ 0 };
    return LM_OK;
}

static lm_code read_stdin(void *ctx, void *dst, size_t cap, size_t *got, lm_err *e)
{
    ssize_t n;
    do
        n = read(STDIN_FILENO, dst, cap);
    while (n < 0 && errno == EINTR && !lm_stopping());
    *got = n > 0 ? (size_t)n : 0;
    return n < 0 ? lm_fail(e, LM_EIO, ctx, NULL, "cannot read") : LM_OK;
}

static lm_code check_stream(check *c, const lm_bundle_opts *o, lm_err *e)
{
    static char name[] = "standard input";
    const lm_bundle_file *f = NULL;
    lm_lmz *z = NULL;
    if (isatty(STDIN_FILENO))
        return lm_fail(e, LM_EUSAGE, name, "redirect an .lmz into it", "is a terminal");
    lm_code rc = lm_lmz_stream_open(read_stdin, name, name, o, &z, e);
    while (!rc && !lm_stopping() && !(rc = lm_lmz_next(z, &f, e)) && f)
        continue;
    lm_lmz_free(z);
    return absorb(c, rc, false, e);
}

static lm_code check_file(check *c, const lm_bundle_opts *o, lm_err *e)
{
    lm_lmz *z = NULL;
    lm_err more = { 0 };
    lm_code rc = lm_lmz_open(c->path, o, &z, e);
    if (rc == LM_EFORMAT) { /* the index is damaged: report the faults below it too */
        rc = absorb(c, rc, false, e);
        if (!lm_lmz_salvage(c->path, o, &z, &more))
            rc = absorb(c, lm_lmz_verify(z, on_fault, c, o->sink, e), true, e);
    } else if (!rc) {
        rc = absorb(c, lm_lmz_verify(z, on_fault, c, o->sink, e), true, e);
    }
    lm_lmz_free(z);
    return rc;
}

lm_code lm_check(const char *path, const lm_bundle_opts *o, lm_check_fn each, void *ctx,
                 uint64_t *faults, lm_err *e)
{
    check c = { .path = path, .each = each, .ctx = ctx };
    lm_code rc = strcmp(path, "-") ? check_file(&c, o, e) : check_stream(&c, o, e);
    *faults = c.faults;
    return rc;
}

static void add_fault(void *ctx, const lm_check_fault *f)
{
    lm_jw *w = ctx;
    lm_jw_obj(w, NULL);
    lm_jw_str(w, "file", f->file);
    lm_jw_str(w, "tensor", f->tensor);
    if (f->chunk != UINT64_MAX)
        lm_jw_int(w, "chunk", (int64_t)f->chunk);
    lm_jw_str(w, "what", f->what);
    lm_jw_close_obj(w);
}

lm_code lm_check_json(const char *path, const lm_bundle_opts *o, lm_buf *out, uint64_t *faults,
                      lm_err *e)
{
    lm_jw w;
    lm_jw_begin(&w, out, 0, e);
    lm_jw_obj(&w, NULL);
    lm_jw_str(&w, "path", path);
    lm_jw_arr(&w, "faults");
    lm_code rc = lm_check(path, o, add_fault, &w, faults, e);
    lm_jw_close_arr(&w);
    lm_jw_bool(&w, "ok", !rc && !*faults);
    lm_jw_close_obj(&w);
    return rc || lm_jw_end(&w) || lm_buf_add(out, "\n", 1, e) ? e->code : LM_OK;
}
