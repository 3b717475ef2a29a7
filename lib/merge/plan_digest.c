/* SPDX-License-Identifier: Apache-2.0 */
/* plan_digest.c -- the digest of each input of a merge, for reports and history. */
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/hash.h"
#include "base/stop.h"
#include "base/stream.h"
#include "format/safetensors_table.h"
#include "merge/plan_impl.h"

static int by_name(const void *a, const void *b)
{
    return strcmp((*(const lm_st_tensor *const *)a)->name, (*(const lm_st_tensor *const *)b)->name);
}

enum { SAMPLE = 4096, PIECE = 1 << 20 };

typedef struct {
    const lm_model_source *m;
    uint8_t *room; /* PIECE bytes */
    bool whole;
    lm_sink *sink;
    double done, total;
} digesting;

/* Bytes of t in a sample. */
static lm_code digest_sample(digesting *d, const lm_st_tensor *t, uint64_t *h, lm_err *e)
{
    size_t n = t->bytes < SAMPLE ? (size_t)t->bytes : SAMPLE;
    uint64_t at[3] = { 0, (t->bytes - n) / 2, t->bytes - n };
    lm_code rc = LM_OK;

    for (int i = 0; !rc && i < 3; i++) {
        rc = lm_model_source_peek(d->m, t, at[i], d->room, n, e);
        if (!rc)
            *h = lm_hash64(d->room, n, *h);
    }
    return rc;
}

static lm_code digest_whole(digesting *d, const lm_st_tensor *t, uint64_t *h, lm_err *e)
{
    lm_hash128 all;
    uint64_t of;
    lm_code rc = LM_OK;

    lm_hash128_init(&all);
    for (uint64_t at = 0; !rc && at < t->bytes && !lm_stopping(); at += PIECE) {
        size_t n = t->bytes - at < PIECE ? (size_t)(t->bytes - at) : PIECE;
        rc = lm_model_source_read(d->m, t, at, d->room, n, e);
        if (!rc)
            lm_hash128_add(&all, d->room, n);
        d->done += (double)n;
        lm_progress(d->sink, "reading for its digest", d->done, d->total, "bytes", NULL);
    }
    of = lm_hash128_end64(&all);
    *h = lm_hash64(&of, sizeof of, *h);
    return rc;
}

static lm_code digest_tensors(digesting *d, const lm_st_tensor *const *t, size_t n, uint64_t *h,
                              lm_err *e)
{
    lm_code rc = lm_alloc_n(&d->room, PIECE, 1, "digesting", e);

    for (size_t i = 0; !rc && i < n && !lm_stopping(); i++) {
        *h = lm_hash64(t[i]->name, strlen(t[i]->name), *h);
        *h = lm_hash64(t[i]->dtype_name, strlen(t[i]->dtype_name), *h);
        *h = lm_hash64(t[i]->dim, (size_t)t[i]->ndim * sizeof *t[i]->dim, *h);
        rc = (d->whole ? digest_whole : digest_sample)(d, t[i], h, e);
    }
    lm_free(d->room);
    return rc;
}

/* XXH3-64 over name, dtype, shape and bytes of each tensor, tensors in order of their names: the
 * same for a folder, its tar and its .lmz.  Unless `whole`, only 4 KiB at the beginning, the middle
 * and the end of each tensor are read, so that it takes little time.  0 (no failure) for a stream
 * that was not spooled, and when lm_stopping(). */
static lm_code digest_of(const lm_model_source *m, bool whole, lm_sink *sink, uint64_t *out,
                         lm_err *e)
{
    digesting d = { .m = m, .whole = whole, .sink = sink };
    const lm_st_tensor **t = NULL;
    size_t n = lm_model_source_count(m);
    uint64_t h = 0;
    lm_code rc;

    *out = 0;
    if (!lm_model_source_random(m))
        return LM_OK;
    d.total = (double)lm_model_source_bytes(m);
    rc = lm_alloc_n(&t, n, sizeof *t, "names of tensors", e);
    for (size_t i = 0; !rc && i < n; i++)
        t[i] = lm_model_source_at(m, i);
    if (!rc && n)
        qsort(t, n, sizeof *t, by_name);
    if (!rc)
        rc = digest_tensors(&d, t, n, &h, e);
    lm_free(t);
    *out = rc || lm_stopping() ? 0 : h ? h : 1;
    return rc;
}

/* Mix the digest of a file into *h: of `name` in the folder `path`, or of `path` (name NULL). */
static lm_code mix_file(const char *path, const char *name, uint64_t *h, lm_err *e)
{
    char *joined = NULL;
    uint64_t of;
    lm_code rc = name ? lm_path_join(&joined, path, name, e) : LM_OK;

    if (!rc)
        rc = lm_digest_path(joined ? joined : path, &of, e);
    if (!rc)
        *h = lm_hash64(&of, sizeof of, *h);
    lm_free(joined);
    return rc;
}

lm_code lm_plan_digest(lm_merge_plan *p, int i, const lm_merge_plan_opts *o, lm_err *e)
{
    const lm_merge_input *in = &p->recipe->input[i];
    lm_merge_model *m = &p->model[i];
    const char *lora = !m->lora ? NULL : in->lora ? in->lora : in->path;
    lm_code rc = o->whole_digest ? lm_model_source_spool(m->source, e) : LM_OK;

    if (!rc)
        rc = digest_of(m->source, o->whole_digest, o->sink, &m->digest, e);
    if (rc || !m->digest)
        return rc;
    if (lora && lm_stream_is(lora)) { /* a stream cannot be read twice */
        m->digest = 0;
        return LM_OK;
    }
    if (lora && !lm_path_is_dir(lora)) {
        rc = mix_file(lora, NULL, &m->digest, e);
    } else if (lora) {
        rc = mix_file(lora, "adapter_config.json", &m->digest, e);
        if (!rc)
            rc = mix_file(lora, "adapter_model.safetensors", &m->digest, e);
    }
    if (!rc && in->fisher)
        rc = mix_file(in->fisher, NULL, &m->digest, e);
    if (!rc && in->gram)
        rc = mix_file(in->gram, NULL, &m->digest, e);
    return rc;
}

const char *lm_plan_digest_kind(const lm_merge_plan *p)
{
    return p->whole ? "xxh3_tensors" : "xxh3_sample";
}
