/* SPDX-License-Identifier: Apache-2.0 */
/* engine_write.c -- writes one tensor while the next is merged. */
#include "merge/engine_write.h"

#include <string.h>

static void *run(void *arg)
{
    lm_merge_writer *w = arg;

    pthread_mutex_lock(&w->lock);
    for (;;) {
        lm_err e = { 0 };

        while (!w->data && !w->quit)
            pthread_cond_wait(&w->change, &w->lock);
        if (!w->data)
            break;
        pthread_mutex_unlock(&w->lock);
        lm_folder_write(w->folder, w->data, w->bytes, &e);
        pthread_mutex_lock(&w->lock);
        if (!w->err.code)
            w->err = e;
        w->data = NULL;
        pthread_cond_broadcast(&w->change);
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

lm_code lm_merge_writer_init(lm_merge_writer *w, lm_folder *f, bool apart, lm_err *e)
{
    memset(w, 0, sizeof *w);
    w->folder = f;
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->change, NULL);
    if (apart) {
        int bad = pthread_create(&w->thread, NULL, run, w);

        if (bad)
            return lm_fail(e, LM_ELIMIT, "writer", NULL, "cannot start a thread: %s",
                           strerror(bad));
        w->running = true;
    }
    return LM_OK;
}

lm_code lm_merge_writer_wait(lm_merge_writer *w, lm_err *e)
{
    if (w->running) {
        pthread_mutex_lock(&w->lock);
        while (w->data)
            pthread_cond_wait(&w->change, &w->lock);
        pthread_mutex_unlock(&w->lock);
    }
    if (w->err.code)
        *e = w->err;
    return w->err.code;
}

lm_code lm_merge_writer_submit(lm_merge_writer *w, const void *data, size_t bytes, lm_err *e)
{
    lm_code rc = lm_merge_writer_wait(w, e);

    if (rc || !bytes)
        return rc;
    if (!w->running)
        return lm_folder_write(w->folder, data, bytes, e);
    pthread_mutex_lock(&w->lock);
    w->data = data;
    w->bytes = bytes;
    pthread_cond_broadcast(&w->change);
    pthread_mutex_unlock(&w->lock);
    return LM_OK;
}

void lm_merge_writer_fini(lm_merge_writer *w)
{
    if (w->running) {
        pthread_mutex_lock(&w->lock);
        while (w->data)
            pthread_cond_wait(&w->change, &w->lock);
        w->quit = true;
        pthread_cond_broadcast(&w->change);
        pthread_mutex_unlock(&w->lock);
        pthread_join(w->thread, NULL);
    }
    pthread_mutex_destroy(&w->lock);
    pthread_cond_destroy(&w->change);
}
