/* SPDX-License-Identifier: Apache-2.0 */
/* archive.h -- tar archives of models: reading and writing members with libarchive.
 *
 * Reading takes tar in its dialects (ustar, pax, GNU), plain or under any filter that libarchive
 * decodes itself (gzip, bzip2, xz, lzma, lzip, zstd, lz4, compress), forward, from any stream of
 * bytes; for an uncompressed one in memory it returns the addresses of members.  Nothing is
 * extracted to disk here.  A name that would leave the folder (absolute, a ".." part) or that holds
 * control bytes fails, and so do devices, sparse members, and links unless requested; folders are
 * skipped unless requested, and so are the members that macOS adds for its attributes
 * ("._config.json"). */
#ifndef LM_FORMAT_ARCHIVE_H
#define LM_FORMAT_ARCHIVE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "format/safetensors.h"

typedef struct lm_ar lm_ar;
/* Open the archive that `read` delivers; `where` names it in messages.  Fails: LM_EFORMAT if it is
 * not a tar archive, and as `read` does. */
lm_code lm_ar_open(lm_read_fn read, void *ctx, const char *where, lm_ar **out, lm_err *e);
/* Open an archive in memory, under no filter. */
lm_code lm_ar_open_map(const uint8_t *data, size_t bytes, const char *where, lm_ar **out,
                       lm_err *e);
void lm_ar_close(lm_ar *a);
/* Go to the next regular file, skipping the rest of this one; *name (without a leading "./") is
 * borrowed until the next call, NULL at the end.  *size may be NULL. */
lm_code lm_ar_next(lm_ar *a, const char **name, uint64_t *size, lm_err *e);
/* Return folders too from now on: a name with a '/' at its end, size 0. */
void lm_ar_want_folders(lm_ar *a);
/* Return symbolic links too from now on, with size 0.  lm_ar_link: the target of the current
 * member, NULL if it is not a link (borrowed until the next call). */
void lm_ar_want_links(lm_ar *a);
const char *lm_ar_link(const lm_ar *a);
/* Return hard links too from now on, with size 0.  lm_ar_hard: the member that the current one is a
 * link to, without a leading "./"; NULL if it is not a link (borrowed until the next call). */
void lm_ar_want_hard(lm_ar *a);
const char *lm_ar_hard(const lm_ar *a);
/* The folder that the first entry is or lies in, with its '/'; "" for none; NULL while no entry has
 * been seen.  Until lm_ar_close. */
const char *lm_ar_root(const lm_ar *a);
bool lm_ar_filtered(const lm_ar *a); /* after the first lm_ar_next */
/* For an archive in memory: the bytes of the current member, in one piece.  LM_EFORMAT if the
 * archive ends before they do. */
lm_code lm_ar_place(lm_ar *a, const uint8_t **data, lm_err *e);
/* Bytes of the current member; *got = 0 at its end.  An lm_read_fn with ctx = lm_ar. */
lm_code lm_ar_read(void *ar, void *dst, size_t cap, size_t *got, lm_err *e);
/* True for a name that is relative, without empty, "." or ".." parts, no backslash, no control
 * bytes, at most 4096 bytes. */
bool lm_ar_name_safe(const char *name);

/* A tar stream (pax where ustar is too small) onto a file descriptor.  Members carry mode 0644,
 * owner 0, time 0: same members, same bytes.  `filter`: NULL or from lm_tar_name; `level`: its
 * effort, 0: its default. */
typedef struct lm_tar lm_tar;
lm_code lm_tar_open(int fd, const char *where, const char *filter, int level, lm_tar **out,
                    lm_err *e);
/* True if the name has the ending of a tar.  *filter is NULL for a plain .tar. */
bool lm_tar_name(const char *path, const char **filter);
/* Begin a member of exactly `bytes` bytes.  Fails: LM_EBUG if the previous one is not complete,
 * LM_EUSAGE for an unsafe name, LM_EIO. */
lm_code lm_tar_member(lm_tar *t, const char *name, uint64_t bytes, lm_err *e);
lm_code lm_tar_write(void *tar, const void *data, size_t bytes, lm_err *e); /* an lm_write_fn */
/* End the archive; t is freed whatever the result; the descriptor stays open. */
lm_code lm_tar_close(lm_tar *t, lm_err *e);
void lm_tar_drop(lm_tar *t);

#endif
