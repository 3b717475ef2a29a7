/* SPDX-License-Identifier: Apache-2.0 */
/* lmz_impl.h -- an opened .lmz, shared by its readers; private to lib/format. */
#ifndef LM_FORMAT_LMZ_IMPL_H
#define LM_FORMAT_LMZ_IMPL_H

#include <pthread.h>

#include "format/lmz_base.h"

/* The buffers with which a thread decodes: taken for one call; they keep the chunk decoded last. */
typedef struct {
    lm_lmz_coder *coder;
    uint8_t *record; /* a chunk's record and coded bytes */
    uint8_t *raw;    /* LM_LMZ_CHUNK */
    uint8_t *base;   /* the same size, allocated when a delta needs it */
    uint64_t held;   /* 1 + index of the chunk in raw; 0: none */
    uint64_t used;   /* when it was last released */
    bool taken;
} lmz_desk;

typedef struct lmz_stream lmz_stream;

struct lm_lmz {
    char *where;
    int fd; /* -1: a stream */
    uint64_t size;
    lmz_header header; /* its base_name points into `head` */
    lm_buf head;
    lmz_footer footer;
    lmz_table table;
    lm_lmz_info info;
    lm_bundle *base;
    lm_par *par;
    bool damaged; /* opened by salvage, without index */

    pthread_mutex_t lock; /* of the desks */
    pthread_cond_t free_desk;
    lmz_desk *desks;
    int n_desks;
    uint64_t clock;

    lmz_stream *stream;
    size_t next_file;    /* reading forward by the index: the next file */
    uint64_t forward_at; /* in the current file */
};

/* A zeroed reader with a name, a lock and its desks. */
lm_code lmz_new(const char *where, const lm_bundle_opts *o, lm_lmz **out, lm_err *e);
/* Check that the first LMZ_HEADER bytes are those of an .lmz in a supported version. */
lm_code lmz_check_version(const char *where, const uint8_t *p, lm_err *e);
/* Check the header's bytes at p (n = lmz_header_size), keep them and fill in info. */
lm_code lmz_keep_header(lm_lmz *z, const uint8_t *p, size_t n, lm_err *e);
lm_code lmz_pread_all(const lm_lmz *z, uint64_t at, void *dst, size_t bytes, lm_err *e);
/* Open the file and note its size. */
lm_code lmz_open_fd(lm_lmz *z, const char *path, lm_err *e);

/* Wait for a desk, preferably the one that holds `chunk`; and release it. */
lm_code lmz_desk_take(const lm_lmz *z, uint64_t chunk, lmz_desk **out, lm_err *e);
void lmz_desk_give(const lm_lmz *z, lmz_desk *d);
lm_code lmz_desk_init(lmz_desk *d, lm_err *e);
void lmz_desk_fini(lmz_desk *d);

/* Decode `coded` (described by its record) to dst and compare its checksum; the base's bytes come
 * from part p.  The error has a cause, but no place. */
lm_code lmz_decode(lmz_desk *d, const lm_bundle *base, const lmz_chunk_rec *r,
                   const char *base_file, uint64_t base_from, const uint8_t *coded, uint8_t *dst,
                   lm_err *e);
/* Read and decode chunk c to dst; with `coded` its coded bytes are checked too (for bits that
 * decoding ignores).  The error has a cause, but no place. */
lm_code lmz_try_chunk(const lm_lmz *z, lmz_desk *d, const lmz_chunk *c, uint8_t *dst, bool coded,
                      lm_err *why);
/* A failure with its place in the .lmz; file and p may be NULL, chunk UINT64_MAX.  The second adds
 * the place to an error that has none. */
lm_code lmz_fail_at(const lm_lmz *z, const char *file, const lm_lmz_part *p, uint64_t chunk,
                    lm_code code, const char *what, lm_err *e);
lm_code lmz_fail_in(const lm_lmz *z, const char *file, const lm_lmz_part *p, uint64_t chunk,
                    const lm_err *why, lm_err *e);

lm_code lmz_stream_next(lm_lmz *z, const lm_bundle_file **f, lm_err *e);
lm_code lmz_stream_read(lm_lmz *z, void *dst, size_t cap, size_t *got, lm_err *e);
void lmz_stream_free(lmz_stream *s);

#define LMZ_DAMAGED "salvage its intact parts"

#endif
