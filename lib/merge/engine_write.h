/* SPDX-License-Identifier: Apache-2.0 */
/* engine_write.h -- a thread that writes one tensor while the next is merged.
 * Private to lib/merge. */
#ifndef LM_MERGE_ENGINE_WRITE_H
#define LM_MERGE_ENGINE_WRITE_H

#include <pthread.h>
#include <stdbool.h>

#include "format/folder.h"

typedef struct {
    lm_folder *folder;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t change;
    bool running, quit; /* running: the thread exists; without it submit itself writes */
    const void *data;   /* NULL: nothing to do */
    size_t bytes;
    lm_err err;
} lm_merge_writer;

/* `apart` requests the thread. */
lm_code lm_merge_writer_init(lm_merge_writer *w, lm_folder *f, bool apart, lm_err *e);
/* Waits for the previous submission, then takes `data`, which must remain valid until the next
 * wait. */
lm_code lm_merge_writer_submit(lm_merge_writer *w, const void *data, size_t bytes, lm_err *e);
lm_code lm_merge_writer_wait(lm_merge_writer *w, lm_err *e);
void lm_merge_writer_fini(lm_merge_writer *w);

#endif
