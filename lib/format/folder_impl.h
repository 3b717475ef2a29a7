/* SPDX-License-Identifier: Apache-2.0 */
/* folder_impl.h -- shared by folder_source.c, source_files.c, source_data.c and folder_write.c;
 * private to lib/format. */
#ifndef LM_FORMAT_FOLDER_IMPL_H
#define LM_FORMAT_FOLDER_IMPL_H

#include "format/bundle_impl.h"
#include "format/folder.h"
#include "format/source_made.h"

typedef struct {
    lm_st *st;
    const char *name;
} lm_source_weights;

struct lm_model_source {
    char *path;
    lm_bundle *b;
    json_t *config;
    lm_source_weights *file; /* sorted by name; none on a stream */
    size_t n_files;
    size_t *first;              /* [n_files + 1]: number of tensors in the files before */
    lm_source_weights **placed; /* files with tensors, sorted by the addresses of their tables */
    size_t n_placed;
    size_t next;               /* the last tensor that lm_model_source_next returned */
    const lm_st_tensor **cell; /* index by name, if there are several files */
    size_t n_cells;

    lm_st_stream *stream; /* the weights are read forward, or were until they were spooled */
    const lm_bundle_file *streamed; /* in this file */
    size_t taken;                   /* tensors of it begun so far */
    bool ended;                     /* the stream was read to its end */
    lm_folder_files small;          /* small files of a stream */
    size_t small_bytes;
    char **missed; /* files reported absent before the end of the stream */
    size_t n_missed, cap_missed;

    const lm_st_plan *plan; /* made (source_made.h): the tensors */
    const lm_source_maker *by;
    void *ctx;
    lm_model_source *below; /* that it was put over; NULL: none */

    pthread_rwlock_t lock;    /* protects the window and the position of the stream */
    const lm_st_tensor *held; /* the tensor whose bytes are in `window` */
    uint8_t *window;
    size_t window_bytes;

    lm_par *par;        /* of digests */
    uint8_t digest[16]; /* of the weights, once it is computed */
    bool has_digest;
};

/* The file of t, which points into its table.  NULL: t belongs to a stream, or to another model. */
/* The cell of the table of names that holds `name`, or the free one where it belongs. */
const lm_st_tensor **lm_source_cell(const lm_model_source *m, const char *name);
/* Is t one of a made source's? */
bool lm_source_is_made(const lm_model_source *m, const lm_st_tensor *t);
/* A small file in memory. */
lm_code lm_source_put(lm_model_source *m, const char *name, const void *data, size_t bytes,
                      lm_err *e);
const lm_source_weights *lm_source_file_of(const lm_model_source *m, const lm_st_tensor *t);
bool lm_source_of_stream(const lm_model_source *m, const lm_st_tensor *t);
/* "dir/x" or "m.tar: x", also for a missing file. */
const char *lm_source_where(const lm_model_source *m, const char *name, char buf[256]);
/* Read the current file of a stream into memory, if it is small; and find a file that was kept
 * so. */
const struct lm_folder_file *lm_source_kept(const lm_model_source *m, const char *name);
lm_code lm_source_keep(lm_model_source *m, const lm_bundle_file *f, lm_err *e);
/* The tokenizer's files and generation_config.json, those that exist (lm_model_source_tokenizer). */
lm_code lm_source_take_small(lm_model_source *m, lm_folder_files *out, lm_err *e);
/* lm_model_source_file_now without recording that the file was reported absent.  LM_ELIMIT for a
 * file of a stream that was too large to be kept. */
lm_code lm_source_seen(lm_model_source *m, const char *name, size_t limit, lm_buf *out, bool *found,
                       lm_err *e);
/* The same as a tree; NULL if absent. */
lm_code lm_source_json(lm_model_source *m, const char *name, size_t limit, json_t **out, lm_err *e);

#endif
