/* SPDX-License-Identifier: Apache-2.0 */
/* salvage.c -- recovers the intact content of a damaged .lmz.  A full check collects the faults
 * first; then intact files are copied, and files of tensors are rebuilt from their intact
 * tensors. */
#include <string.h>

#include "base/mem.h"
#include "base/stop.h"
#include "compress/pick.h"
#include "compress/unpack_impl.h"

typedef struct {
    char *file, *tensor;
    /* Without a tensor: the bytes of joined tensors, otherwise 0: a header or a plain file. */
    uint64_t from, bytes;
} fault;

typedef struct {
    lm_lmz *z;
    fault *v;
    size_t n, cap;
    lm_unpack_lost_fn lost;
    void *ctx;
    uint64_t n_lost;
    lm_err err; /* out of memory while collecting */
} damage;

static void report_lost(damage *d, const char *file, const char *tensor, uint64_t chunk,
                        const char *what)
{
    d->n_lost++;
    if (d->lost)
        d->lost(d->ctx, file, tensor, chunk, what);
}

static void collect(void *ctx, const lm_lmz_fault *f)
{
    damage *d = ctx;
    fault x = { 0 };
    if (!f->file) {
        report_lost(d, NULL, NULL, f->chunk, f->what);
        return;
    }
    if (d->err.code || lm_strdup(&x.file, f->file, &d->err) ||
        (f->part && f->part->tensor && lm_strdup(&x.tensor, f->part->tensor, &d->err)) ||
        lm_grow(&d->v, &d->cap, d->n + 1, sizeof *d->v, "list of faults", &d->err)) {
        lm_free(x.file);
        lm_free(x.tensor);
        return;
    }
    if (f->part && !x.tensor && f->part->offset) {
        x.from = f->part->offset;
        x.bytes = f->part->raw;
    }
    report_lost(d, f->file, x.tensor, f->chunk, f->what);
    d->v[d->n++] = x;
}

static void damage_fini(damage *d)
{
    for (size_t i = 0; i < d->n; i++) {
        lm_free(d->v[i].file);
        lm_free(d->v[i].tensor);
    }
    lm_free(d->v);
    lm_lmz_free(d->z);
}

/* True if a fault is in tensor t, whose data begin at `at`, or in the tensors joined with it. */
static bool tensor_lost(const damage *d, const char *file, const lm_st_tensor *t, uint64_t at)
{
    for (size_t i = 0; i < d->n; i++) {
        const fault *x = &d->v[i];
        if (strcmp(x->file, file))
            continue;
        if (x->tensor ? !strcmp(x->tensor, t->name)
                      : at < x->from + x->bytes && x->from < at + t->bytes)
            return true;
    }
    return false;
}

/* Set *faulty if the file has a fault, and *lost if one lies outside its tensors: the whole file is
 * then lost. */
static void look_up(const damage *d, const char *file, bool *faulty, bool *lost)
{
    *faulty = *lost = false;
    for (size_t i = 0; i < d->n; i++)
        if (!strcmp(d->v[i].file, file)) {
            *faulty = true;
            *lost |= !d->v[i].tensor && !d->v[i].bytes;
        }
}

/* ---- a file of the .lmz by random access ---- */

typedef struct {
    const lm_lmz *z;
    size_t file;
    uint64_t at;
} place;

static lm_code place_pread(void *ctx, uint64_t from, void *dst, size_t bytes, lm_err *e)
{
    place *p = ctx;
    return lm_lmz_pread(p->z, p->file, from, dst, bytes, e);
}

static lm_code place_read(void *ctx, void *dst, size_t cap, size_t *got, lm_err *e)
{
    place *p = ctx;
    uint64_t left = lm_lmz_file(p->z, p->file)->bytes - p->at;
    *got = left < cap ? (size_t)left : cap;
    if (!*got || lm_lmz_pread(p->z, p->file, p->at, dst, *got, e))
        return e->code;
    p->at += *got;
    return LM_OK;
}

static lm_code pick_whole_ones(const damage *d, const char *file, const lm_st *st,
                               const json_t *described, lm_pick *p, size_t *n, lm_err *e)
{
    lm_buf name = { 0 };
    const lm_st_tensor *last = lm_st_count(st) ? lm_st_at(st, lm_st_count(st) - 1) : NULL;
    uint64_t data = last ? lm_st_file_bytes(st) - last->offset - last->bytes : 0;
    lm_code rc = lm_pick_meta(p, st, e);
    *n = 0;
    for (size_t i = 0; !rc && i < lm_st_count(st); i++) {
        const lm_st_tensor *t = lm_st_at(st, i), *part[2];
        bool found, whole = true;
        int parts;
        rc = lm_pick_whole(described, t, &name, e);
        if (rc)
            break;
        lm_pick_parts(st, described, name.data, part, &parts);
        for (int k = 0; k < parts; k++)
            whole &= !tensor_lost(d, file, part[k], data + part[k]->offset);
        if (parts && whole && part[0] == t) { /* reported once, at its first part */
            rc = lm_pick_add(p, st, described, name.data, &found, e);
            ++*n;
        }
    }
    lm_buf_fini(&name);
    return rc;
}

static lm_code save_tensors(damage *d, lm_unpack_to *t, size_t i, lm_err *e)
{
    const lm_bundle_file *f = lm_lmz_file(d->z, i);
    place at = { d->z, i, 0 };
    lm_st_io io = { .pread = place_pread, .ctx = &at, .bytes = f->bytes };
    lm_st *st = NULL;
    json_t *described = NULL;
    lm_pick *p = NULL;
    uint64_t bytes = 0;
    size_t n = 0;
    lm_err header = { 0 };
    if (lm_st_open_on(&io, f->name, &st, &header)) {
        report_lost(d, f->name, NULL, 0, header.what);
        return LM_OK;
    }
    lm_code rc = lm_pick_described(st, &described, e);
    if (!rc)
        rc = lm_pick_new(&p, e);
    if (!rc)
        rc = pick_whole_ones(d, f->name, st, described, p, &n, e);
    if (!rc && n)
        rc = lm_pick_ready(p, &bytes, e);
    if (!rc && n)
        rc = lm_unpack_file(t, f->name, bytes, lm_pick_read, p, e);
    lm_pick_free(p);
    json_decref(described);
    lm_st_close(st);
    return rc;
}

static lm_code save_file(damage *d, lm_unpack_to *t, size_t i, lm_err *e)
{
    const lm_bundle_file *f = lm_lmz_file(d->z, i);
    place at = { d->z, i, 0 };
    bool faulty, lost;
    look_up(d, f->name, &faulty, &lost);
    if (lost)
        return LM_OK;
    return faulty ? save_tensors(d, t, i, e)
                  : lm_unpack_file(t, f->name, f->bytes, place_read, &at, e);
}

lm_code lm_unpack_salvage(const char *from, const char *to, const lm_unpack_opts *o,
                          lm_unpack_lost_fn lost, void *ctx, uint64_t *n_lost, lm_unpack_report *r,
                          lm_err *e)
{
    lm_bundle_opts opts = { .base = o->base, .tmpdir = o->tmpdir, .par = o->par, .sink = o->sink };
    damage d = { .lost = lost, .ctx = ctx };
    lm_unpack_to t = { .o = o, .r = r };
    lm_err faults = { 0 };
    *n_lost = 0;
    if (!strcmp(from, "-"))
        return lm_fail(e, LM_EUSAGE, "salvage", "name a file",
                       "standard input cannot be read twice");
    lm_code rc = lm_lmz_salvage(from, &opts, &d.z, e);
    if (!rc && lm_lmz_verify(d.z, collect, &d, o->sink, &faults) && faults.code != LM_EFORMAT) {
        *e = faults;
        rc = faults.code;
    }
    if (!rc && d.err.code) {
        *e = d.err;
        rc = d.err.code;
    }
    size_t files = rc ? 0 : lm_lmz_files(d.z);
    for (size_t i = 0; i < files; i++)
        t.total += lm_lmz_file(d.z, i)->bytes;
    t.like_lmz = d.z;
    if (!rc)
        rc = lm_unpack_to_open(&t, to, files == 1 && lm_unpack_is_st(lm_lmz_file(d.z, 0)->name), e);
    for (size_t i = 0; !rc && i < files && !lm_stopping(); i++)
        rc = save_file(&d, &t, i, e);
    if (!rc && !lm_stopping() && !r->files)
        rc = lm_fail(e, LM_EFORMAT, from, NULL, "no part of it is intact");
    *n_lost = d.n_lost;
    rc = lm_unpack_to_close(&t, rc, e);
    damage_fini(&d);
    return rc;
}
