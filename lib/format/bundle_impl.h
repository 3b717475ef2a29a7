/* SPDX-License-Identifier: Apache-2.0 */
/* bundle_impl.h -- shared by the parts of bundle.c; private to lib/format. */
#ifndef LM_FORMAT_BUNDLE_IMPL_H
#define LM_FORMAT_BUNDLE_IMPL_H

#include <pthread.h>

#include "base/file.h"
#include "format/bundle.h"

typedef struct lm_bundle_entry {
    /* first, so that the returned pointer is that of the entry; f.name is owned here */
    lm_bundle_file f;
    lm_bundle *b;
    lm_map map;    /* a folder's file, opened when first needed */
    uint64_t at;   /* of its first byte in the bundle's own map */
    uint64_t from; /* bytes before this offset were read before the stream was spooled */
    size_t number; /* for the reader of the container */
    bool gone;     /* already read from a stream */
} lm_bundle_entry;

/* A container that is read member by member; `state` in lm_bundle belongs to it. */
typedef struct {
    /* The next file, skipping the rest of this one; *name = NULL at the end, which is complete. */
    lm_code (*next)(lm_bundle *b, const char **name, uint64_t *bytes, lm_err *e);
    lm_code (*read)(lm_bundle *b, void *dst, size_t cap, size_t *got, lm_err *e);
    /* Random access without a map; NULL: by the map. */
    lm_code (*pread)(const lm_bundle *b, const lm_bundle_entry *f, uint64_t from, void *dst,
                     size_t bytes, lm_err *e);
    void (*close)(lm_bundle *b);
} lm_bundle_ops;

/* A file descriptor read forward; bytes that were inspected are read again. */
typedef struct {
    int fd;
    bool own; /* to be closed */
    const char *where;
    lm_buf head; /* inspected bytes; those from head_at on are still to be read */
    size_t head_at;
    uint8_t tail[512]; /* the last bytes read: a ring, byte i at i mod its size */
    uint64_t total;
} lm_bundle_raw;

struct lm_bundle {
    lm_bundle_kind kind;
    char *path, *dir;
    lm_bundle_opts o;
    lm_bundle_entry **entry;
    size_t n, cap;
    bool random, ended;
    bool std;                 /* standard input */
    bool cut;                 /* a stream ended inside a file */
    const char *foreign;      /* what the first bytes of a stream are, if no model (foreign.h), */
    const char *remedy;       /* and the remedy */
    lm_map map;               /* of one file, of a tar, of what was spooled */
    pthread_mutex_t lock;     /* of the maps of a folder */
    const lm_bundle_ops *ops; /* NULL: a folder or a map */
    void *state;
    lm_bundle_raw raw;
    lm_bundle_entry *cur;
    size_t next;            /* random: entry that lm_bundle_next gives */
    uint64_t cur_done;      /* bytes read of cur */
    char *left, *left_last; /* skipped entries: the first, and the last one counted */
    size_t left_others;     /* number, without the first */
};

/* Append a file; LM_EFORMAT for a name that exists already or is not plain. */
lm_code lm_bundle_add(lm_bundle *b, const char *name, uint64_t bytes, lm_bundle_entry **out,
                      lm_err *e);
/* Count the entry `name` (n bytes: its name at the top of the bundle) as skipped; the same entry
 * twice in a row counts once. */
lm_code lm_bundle_pass(lm_bundle *b, const char *name, size_t n, lm_err *e);
/* An lm_read_fn on the raw bytes (ctx = lm_bundle_raw); and the next `want` bytes without consuming
 * them, *have fewer only at the end. */
lm_code lm_bundle_raw_read(void *raw, void *dst, size_t cap, size_t *got, lm_err *e);
lm_code lm_bundle_raw_look(lm_bundle_raw *r, size_t want, const uint8_t **p, size_t *have,
                           lm_err *e);
/* Read to the end; *zeros: the last 512 bytes are zeros. */
lm_code lm_bundle_raw_drain(lm_bundle_raw *r, bool *zeros, lm_err *e);

/* An unlinked file in `dir`; and LM_ELIMIT if it has no room for `bytes` more. */
lm_code lm_bundle_spool_open(const char *dir, int *fd, lm_err *e);
lm_code lm_bundle_spool_room(int fd, uint64_t bytes, const char *where, lm_err *e);

/* True if a file of this name is written or begun. */
bool lm_bundle_has(const lm_bundle_out *b, const char *name);

/* The kinds of bundles.  b->raw is open for a stream, b->map holds a whole file; each function sets
 * up b->ops or the entries. */
lm_code lm_bundle_tar_map(lm_bundle *b, bool *plain, lm_err *e); /* *plain false: under a filter */
lm_code lm_bundle_tar_stream(lm_bundle *b, lm_err *e);
lm_code lm_bundle_st_stream(lm_bundle *b, lm_err *e);
bool lm_bundle_is_lmz(const uint8_t *p, size_t n);
lm_code lm_bundle_lmz_open(lm_bundle *b, lm_err *e); /* by its path */
lm_code lm_bundle_lmz_stream(lm_bundle *b, lm_err *e);

/* An .lmz being written, and its base.  Zero-initialise. */
typedef struct {
    struct lm_lmz_writer *w;
    lm_bundle *base;
    char *base_name;
} lm_bundle_lmz_out;
lm_code lm_bundle_lmz_create(const lm_bundle_opts *o, lm_write_fn write, void *ctx,
                             const char *where, lm_bundle_lmz_out *out, lm_err *e);
lm_code lm_bundle_lmz_commit(lm_bundle_lmz_out *out, lm_err *e);
void lm_bundle_lmz_drop(lm_bundle_lmz_out *out);

/* The accepted inputs, for hints: `folder`, a .safetensors, ... and the other inputs of the caller.
 * b may be NULL. */
const char *lm_bundle_forms(const lm_bundle *b, const char *folder, char out[160]);

#endif
