/* SPDX-License-Identifier: Apache-2.0 */
/* source_data.c -- reads the tensors of a model, in order or at random.
 *
 * The current tensor of a stream is held in memory (the window); so is a decoded tensor of an .lmz,
 * so that many small reads of one tensor decode it once. */
#include <inttypes.h>
#include <string.h>

#include "base/mem.h"
#include "format/folder_impl.h"
#include "format/safetensors_table.h"

/* The window is a cache, not part of the model, so it may change in a const m. */
static lm_model_source *mutable(const lm_model_source *m)
{
    return (lm_model_source *)(uintptr_t)m;
}

static bool forward(const lm_model_source *m)
{
    return m->stream && !lm_bundle_random(m->b);
}

static lm_code foreign(const lm_model_source *m, lm_err *e)
{
    return lm_fail(e, LM_EBUG, m->path, NULL, "a tensor of another model is requested");
}

/* ---- In order ---- */

/* Go to the next tensor of the stream; the lock is held. */
static lm_code step(lm_model_source *m, const lm_st_tensor **t, lm_err *e)
{
    lm_code rc = lm_st_stream_next(m->stream, t, e);

    m->held = NULL;
    if (!rc && *t)
        m->taken++;
    return rc;
}

lm_code lm_model_source_next(lm_model_source *m, const lm_st_tensor **t, lm_err *e)
{
    lm_code rc = LM_OK;

    *t = NULL;
    if (m->next >= lm_model_source_count(m))
        return LM_OK;
    if (!forward(m)) {
        *t = lm_model_source_at(m, m->next++);
        return LM_OK;
    }
    pthread_rwlock_wrlock(&m->lock);
    while (!rc && m->taken <= m->next) /* a read may already have moved the stream to this tensor */
        rc = step(m, t, e);
    if (!rc)
        *t = lm_model_source_at(m, m->next++);
    pthread_rwlock_unlock(&m->lock);
    return rc;
}

lm_code lm_model_source_rewind(lm_model_source *m, lm_err *e)
{
    if (m->stream && m->taken > 1)
        return lm_fail(e, LM_EUSAGE, m->path, "give the model as a file",
                       "its tensors were read already");
    m->next = 0;
    return LM_OK;
}

lm_code lm_model_source_spool(lm_model_source *m, lm_err *e)
{
    lm_code rc = LM_OK;

    pthread_rwlock_wrlock(&m->lock);
    if (!lm_bundle_random(m->b) && !m->ended)
        rc = lm_bundle_spool(m->b, e);
    pthread_rwlock_unlock(&m->lock);
    return rc;
}

/* A file that was reported absent must not follow later in the stream. */
static lm_code check_missed(const lm_model_source *m, const char *name, lm_err *e)
{
    for (size_t i = 0; i < m->n_missed; i++)
        if (!strcmp(m->missed[i], name))
            return lm_fail(e, LM_EUSAGE, m->path,
                           "give the model as a file, or write its small files first",
                           "%s follows the weights, where it cannot be used", name);
    return LM_OK;
}

static lm_code check_spooled(const lm_model_source *m, lm_err *e)
{
    lm_code rc = LM_OK;

    for (size_t i = 0; !rc && i < m->n_missed; i++)
        if (lm_bundle_find(m->b, m->missed[i]))
            rc = check_missed(m, m->missed[i], e);
    return rc;
}

lm_code lm_model_source_finish(lm_model_source *m, lm_err *e)
{
    const lm_bundle_file *f = NULL;
    const lm_st_tensor *t = NULL;
    lm_code rc = LM_OK;

    if (m->by)
        return m->below ? lm_model_source_finish(m->below, e) : LM_OK;
    if (!forward(m) || m->ended)
        return check_spooled(m, e);
    pthread_rwlock_wrlock(&m->lock);
    do {
        rc = step(m, &t, e);
    } while (!rc && t);
    m->taken = lm_model_source_count(m);
    while (!rc && !(rc = lm_bundle_next(m->b, &f, e)) && f && !(rc = check_missed(m, f->name, e)))
        rc = lm_source_keep(m, f, e);
    m->ended = !rc;
    pthread_rwlock_unlock(&m->lock);
    return rc;
}

/* ---- The window ---- */

static lm_code make_window(lm_model_source *m, const lm_st_tensor *t, lm_err *e)
{
    m->held = NULL;
    if (t->bytes <= m->window_bytes)
        return LM_OK;
    lm_free(m->window);
    m->window = NULL;
    m->window_bytes = 0;
    if (t->bytes > SIZE_MAX)
        return lm_fail(e, LM_ELIMIT, m->path, NULL, "a tensor is larger than memory can be");
    lm_code rc = lm_alloc_n(&m->window, (size_t)t->bytes, 1, "a tensor", e);
    if (!rc)
        m->window_bytes = (size_t)t->bytes;
    return rc;
}

/* Bytes of a tensor that is neither on a stream nor mapped as a whole file. */
static lm_code read_spooled(const lm_model_source *m, const lm_st_tensor *t, uint64_t from,
                            void *dst, size_t bytes, lm_err *e)
{
    return lm_bundle_pread(m->b, m->streamed, lm_st_stream_data_at(m->stream) + t->offset + from,
                           dst, bytes, e);
}

/* Read t from the stream into the window; the lock is held.  *held = false: the stream was spooled
 * instead. */
static lm_code read_streamed(lm_model_source *m, const lm_st_tensor *t, bool *held, lm_err *e)
{
    size_t i = (size_t)(t - lm_st_stream_at(m->stream, 0));
    char show[LM_ST_SHOWN];
    const lm_st_tensor *now;
    lm_code rc;

    *held = m->held == t;
    if (*held || lm_bundle_random(m->b))
        return LM_OK;
    if (i + 1 < m->taken || m->ended)
        return lm_fail(e, LM_EUSAGE, m->path, "give the model as a file",
                       "tensor '%s' was read already", lm_st_show(t->name, show));
    if (i > m->taken)
        return lm_bundle_spool(m->b, e);
    rc = i == m->taken ? step(m, &now, e) : LM_OK;
    if (!rc)
        rc = make_window(m, t, e);
    if (!rc)
        rc = lm_st_stream_read(m->stream, m->window, (size_t)t->bytes, e);
    *held = !rc;
    if (!rc)
        m->held = t;
    return rc;
}

/* The same where an .lmz is decoded; the lock is held. */
static lm_code decode(lm_model_source *m, const lm_source_weights *w, const lm_st_tensor *t,
                      lm_err *e)
{
    if (m->held == t)
        return LM_OK;
    const void *data = NULL;
    lm_code rc = make_window(m, t, e);
    if (!rc && w)
        rc = lm_st_read(w->st, t, 0, m->window, (size_t)t->bytes, e);
    else if (!rc && !(rc = m->by->load(m->ctx, t, &data, e)))
        memcpy(m->window, data, (size_t)t->bytes);
    if (!rc)
        m->held = t;
    return rc;
}

/* Load t into the window, and keep it there until release: the lock is held for reading. */
static lm_code hold(const lm_model_source *cm, const lm_source_weights *w, const lm_st_tensor *t,
                    bool *held, lm_err *e)
{
    lm_model_source *m = mutable(cm);
    lm_code rc = LM_OK;

    for (;;) {
        pthread_rwlock_rdlock(&m->lock);
        *held = m->held == t;
        if (rc || *held || (!w && !m->by && lm_bundle_random(m->b)))
            return rc;
        pthread_rwlock_unlock(&m->lock);
        pthread_rwlock_wrlock(&m->lock);
        rc = w || m->by ? decode(m, w, t, e) : read_streamed(m, t, held, e);
        pthread_rwlock_unlock(&m->lock);
    }
}

static void release(const lm_model_source *m)
{
    pthread_rwlock_unlock(&mutable(m)->lock);
}

/* ---- In any order ---- */

const void *lm_model_source_data(const lm_model_source *m, const lm_st_tensor *t)
{
    const lm_source_weights *w = lm_source_file_of(m, t);
    const uint8_t *p;
    uint64_t at;

    if (w)
        return lm_st_data(w->st, t);
    if (!lm_source_of_stream(m, t) || !lm_bundle_random(m->b))
        return NULL;
    at = lm_st_stream_data_at(m->stream) + t->offset;
    p = lm_bundle_map(m->b, m->streamed);
    return p && at >= ((const lm_bundle_entry *)m->streamed)->from ? p + at : NULL;
}

bool lm_model_source_aligned(const lm_model_source *m, const lm_st_tensor *t)
{
    const void *p = lm_model_source_data(m, t);
    return p && (uintptr_t)p % (t->dtype == LM_DTYPE_NONE ? 8 : lm_dtype_size(t->dtype)) == 0;
}

void lm_model_source_forget(const lm_model_source *m, const lm_st_tensor *t)
{
    const lm_bundle_file *f = m->stream ? m->streamed : NULL;
    const lm_source_weights *w = lm_source_file_of(m, t);
    const uint8_t *p = lm_model_source_data(m, t), *from;

    if (w)
        f = lm_bundle_find(m->b, w->name);
    from = p && f ? lm_bundle_map(m->b, f) : NULL;
    if (from)
        lm_bundle_forget(m->b, f, (uint64_t)(p - from), t->bytes);
}

lm_code lm_model_source_read(const lm_model_source *m, const lm_st_tensor *t, uint64_t from,
                             void *dst, size_t bytes, lm_err *e)
{
    const lm_source_weights *w = lm_source_file_of(m, t);
    char show[LM_ST_SHOWN];
    bool held = false;
    lm_code rc;

    if (!w && !lm_source_of_stream(m, t) && !lm_source_is_made(m, t))
        return foreign(m, e);
    if (from > t->bytes || bytes > t->bytes - from)
        return lm_fail(e, LM_EUSAGE, m->path, NULL,
                       "bytes %" PRIu64 " to %" PRIu64
                       " requested from tensor '%s', which has %" PRIu64,
                       from, from + bytes, lm_st_show(t->name, show), t->bytes);
    /* Mapped, or decoded once as a whole: the window is not needed. */
    if (w && (lm_st_data(w->st, t) || bytes == t->bytes))
        return lm_st_read(w->st, t, from, dst, bytes, e);
    rc = hold(m, w, t, &held, e);
    if (!rc && held && bytes)
        memcpy(dst, m->window + from, bytes);
    release(m);
    return rc || held ? rc : read_spooled(m, t, from, dst, bytes, e);
}

lm_code lm_model_source_peek(const lm_model_source *m, const lm_st_tensor *t, uint64_t from,
                             void *dst, size_t bytes, lm_err *e)
{
    const lm_source_weights *w = lm_source_file_of(m, t);

    return w ? lm_st_read(w->st, t, from, dst, bytes, e)
             : lm_model_source_read(m, t, from, dst, bytes, e);
}

lm_code lm_model_source_borrow(const lm_model_source *m, const lm_st_tensor *t, const void **data,
                               lm_err *e)
{
    bool held = false;
    lm_code rc;

    *data = lm_model_source_data(m, t);
    if (*data || !lm_source_of_stream(m, t) || !forward(m))
        return LM_OK;
    rc = hold(m, NULL, t, &held, e);
    *data = !rc && held ? m->window : NULL;
    release(m);
    return rc;
}

/* From memory, or in pieces from the spooled file. */
static lm_code convert(const lm_model_source *m, const lm_st_tensor *t, const uint8_t *src,
                       lm_dtype to, void *dst, lm_err *e)
{
    _Alignas(64) uint8_t buf[65536];
    size_t size = lm_dtype_size(t->dtype), out_size = lm_dtype_size(to);
    int64_t step_n = (int64_t)(sizeof buf / size);

    for (int64_t i = 0; i < t->count; i += step_n) {
        int64_t n = t->count - i < step_n ? t->count - i : step_n;
        lm_code rc = LM_OK;
        if (src)
            memcpy(buf, src + (size_t)i * size, (size_t)n * size);
        else
            rc = read_spooled(m, t, (uint64_t)i * size, buf, (size_t)n * size, e);
        if (rc)
            return rc;
        lm_convert(t->dtype, buf, to, (uint8_t *)dst + (size_t)i * out_size, n);
    }
    return LM_OK;
}

lm_code lm_model_source_load(const lm_model_source *m, const lm_st_tensor *t, lm_dtype to,
                             void *dst, lm_err *e)
{
    const lm_source_weights *w = lm_source_file_of(m, t);
    char show[LM_ST_SHOWN];
    bool held = false;
    lm_code rc;

    if (!w && !lm_source_of_stream(m, t) && !lm_source_is_made(m, t))
        return foreign(m, e);
    if (t->dtype == LM_DTYPE_NONE)
        return lm_fail(e, LM_EUSAGE, m->path, NULL,
                       "tensor '%s' has dtype %s, which has no values here",
                       lm_st_show(t->name, show), t->dtype_name);
    if (t->dtype == to)
        return lm_model_source_read(m, t, 0, dst, (size_t)t->bytes, e);
    if (w && lm_st_data(w->st, t))
        return lm_st_load(w->st, t, to, dst, e);
    rc = hold(m, w, t, &held, e);
    if (!rc && held)
        rc = convert(m, t, m->window, to, dst, e);
    release(m);
    return rc || held ? rc : convert(m, t, NULL, to, dst, e);
}

const lm_format *lm_model_source_format(const lm_model_source *m, const lm_st_tensor *t,
                                        bool *turned)
{
    *turned = false;
    return m->by ? m->by->format(m->ctx, t, turned) : lm_format_of_dtype(t->dtype);
}

lm_code lm_model_source_codes(const lm_model_source *m, const lm_st_tensor *t, void *dst, lm_err *e)
{
    lm_code rc;

    if (!m->by)
        return lm_model_source_read(m, t, 0, dst, t->bytes, e);
    pthread_rwlock_wrlock(&mutable(m)->lock);
    rc = m->by->codes(m->ctx, t, dst, e);
    pthread_rwlock_unlock(&mutable(m)->lock);
    return rc;
}

const void *lm_model_source_codes_in_file(const lm_model_source *m, const lm_st_tensor *t)
{
    if (!m->by)
        return lm_model_source_data(m, t);
    return m->by->codes_in_file ? m->by->codes_in_file(m->ctx, t) : NULL;
}
