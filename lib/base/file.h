/* SPDX-License-Identifier: Apache-2.0 */
/* file.h -- files: mapped inputs, outputs that appear whole or not at all, folders, paths.
 *
 * An output is a temporary beside its target, named after its process and locked by it (owner.h),
 * until lm_out_commit: write, fflush, fsync, close, rename, fsync of the folder.  An output that is
 * not committed is removed by lm_out_drop, or by lm_out_drop_all when the tool ends; the temporary
 * of a killed process is removed when the next process opens an output in that folder.  An existing
 * target is refused unless `force`; its group and permissions are kept.  "-" is standard output;
 * pipes and devices are written in place. */
#ifndef LM_BASE_FILE_H
#define LM_BASE_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "base/buf.h"
#include "base/err.h"

/* A file mapped read-only. */
typedef struct {
    const uint8_t *data;
    size_t size;
    int fd;
} lm_map;
lm_code lm_map_open(const char *path, lm_map *out,
                    lm_err *e); /* an empty file gives data != NULL, size 0 */
/* The same for an open descriptor, which this call owns whatever the result; `path` is for
 * messages. */
lm_code lm_map_fd(int fd, const char *path, lm_map *out, lm_err *e);
void lm_map_close(lm_map *m);
/* The path of the file that the address `at` is mapped from; false, and "", if there is none.
 * Async-signal-safe. */
bool lm_map_name(const void *at, char *out, size_t room);

/* A whole small file (at most `limit` bytes, else LM_EFORMAT); NUL-terminated, owned by the
 * caller. */
lm_code lm_file_read(const char *path, size_t limit, lm_buf *out, lm_err *e);

/* A new file in the folder without a name, for reading and writing, which ends with its descriptor;
 * -1 with errno. */
int lm_file_unnamed(const char *dir);

typedef struct lm_out lm_out;
/* Open an output file; a name of standard output is written in place.  Fails at once (missing
 * folder, not writable, exists and !force). */
lm_code lm_out_open(const char *path, bool force, lm_out **out, lm_err *e);
/* Fails as lm_out_open would now, and leaves nothing: for outputs that are written behind long work. */
lm_code lm_out_try(const char *path, bool force, lm_err *e);
FILE *lm_out_file(lm_out *o); /* buffered stream on it; borrowed */
int lm_out_fd(lm_out *o);
const char *lm_out_path(const lm_out *o); /* the final path, for messages */
/* Flush all data to disk and close the stream; commit is then only the rename.  Lets several
 * outputs that belong together be complete before the first is published. */
lm_code lm_out_finish(lm_out *o, lm_err *e);
lm_code lm_out_commit(lm_out *o, lm_err *e); /* frees o, whatever the result */
void lm_out_drop(lm_out *o);

/* True if `name` is a file that the new folder may replace. */
typedef bool (*lm_own_fn)(const void *ctx, const char *name);
/* A folder that appears complete or not at all: build it under lm_outdir_path, then publish it.
 * With force an existing folder is exchanged (renameat2) and the old one removed afterwards, if
 * `own` accepts every file in it (NULL accepts no file); otherwise LM_EUSAGE names a file that
 * would be lost, here or, when the file was added later, at commit. */
typedef struct lm_outdir lm_outdir;
/* Check that it could be made, and that an existing folder of the name could be exchanged. */
bool lm_outdir_fits(const char *path, bool force, lm_own_fn own, const void *ctx);
lm_code lm_outdir_open(const char *path, bool force, lm_own_fn own, const void *ctx,
                       lm_outdir **out, lm_err *e);
const char *lm_outdir_path(const lm_outdir *d); /* the temporary folder */
/* LM_EUSAGE naming a file in the folder `path` that `own` does not accept. */
lm_code lm_dir_check_own(const char *path, lm_own_fn own, const void *ctx, lm_err *e);
lm_code lm_outdir_commit(lm_outdir *d, lm_err *e); /* fsyncs every file and the folder */
void lm_outdir_drop(lm_outdir *d);
/* Replace the path of the temporary folder in an error by the final path. */
void lm_outdir_blame(const lm_outdir *d, lm_err *e);
void lm_out_drop_all(void); /* remove every temporary that is still open */
/* The same in a signal handler (all signals blocked) just before the process ends.  The list stays
 * locked: a thread that opens or ends an output then waits until the end, so it leaves no new
 * temporary. */
void lm_out_drop_last(void);

lm_code lm_path_join(char **out, const char *dir, const char *name, lm_err *e);
const char *lm_path_base(const char *path); /* after the last '/' */
/* The name of an input in messages: "standard input" for "-". */
const char *lm_path_shown(const char *path);
/* The folder that the file `path` lies in, without links; the file need not be there yet.  "-" and
 * NULL: the current folder.  `out` has PATH_MAX bytes. */
lm_code lm_path_folder(const char *path, char *out, lm_err *e);
bool lm_path_exists(const char *path);
bool lm_path_is_dir(const char *path);
/* True if the path is standard output by any name ("-", /dev/stdout, /dev/fd/1): the file behind it
 * is written to, never replaced. */
bool lm_path_is_stdout(const char *path);
bool lm_path_same(const char *a, const char *b); /* same device and inode */
lm_code lm_mkdir_p(const char *path, lm_err *e);
lm_code lm_rm_rf(const char *path, lm_err *e); /* does not follow links */
/* Names in a folder, sorted bytewise, without . and ..; free with lm_names_free. */
lm_code lm_dir_list(const char *path, char ***names, size_t *n, lm_err *e);
void lm_names_free(char **names, size_t n);
/* "cannot write" with errno, and the remedy for a full disk.  EFAULT means that the bytes came from
 * a mapped input that was truncated: the error then names "an input". */
lm_code lm_fail_write(const char *where, lm_err *e);
/* write(2) until all bytes are written; an input that was truncated is named. */
lm_code lm_write_all(int fd, const void *data, size_t len, const char *where, lm_err *e);
/* The same from byte `at` of the file on. */
lm_code lm_write_at(int fd, const void *data, size_t len, uint64_t at, const char *where,
                    lm_err *e);

#endif
