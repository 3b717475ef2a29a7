/* archive.h -- tar archives as a model travels in them: members in, members out, through
 * libarchive.
 *
 * Reading takes tar in its dialects (ustar, pax, GNU), plain or compressed (gzip, bzip2, xz, zstd,
 * lz4), from a file or a pipe, forward only.  Nothing is extracted to disk here.  A name that would
 * leave the folder (absolute, a ".." part) or that holds control bytes fails; folders, links and
 * devices are passed over. */
#ifndef LM_FORMAT_ARCHIVE_H
#define LM_FORMAT_ARCHIVE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

typedef struct lm_ar lm_ar;
/* Open `path` ("-": standard input).  Fails: LM_EIO, LM_EFORMAT if it is no tar archive. */
lm_code lm_ar_open(const char *path, lm_ar **out, lm_err *e);
void lm_ar_close(lm_ar *a);
/* Go to the next regular file, over what is left of this one; *name (a leading "./" taken off) is
 * borrowed until the next call, NULL at the end.  *size may be NULL. */
lm_code lm_ar_next(lm_ar *a, const char **name, uint64_t *size, lm_err *e);
/* Bytes of the current member; *got = 0 at its end.  An lm_read_fn with ctx = lm_ar. */
lm_code lm_ar_read(void *ar, void *dst, size_t cap, size_t *got, lm_err *e);
/* Relative, no empty, "." or ".." part, no backslash, no control bytes, at most 4096 bytes. */
bool lm_ar_name_safe(const char *name);

/* A tar stream (pax where ustar is too small) onto a file descriptor.  Members carry mode 0644,
 * owner 0, time 0: same members, same bytes. */
typedef struct lm_tar lm_tar;
lm_code lm_tar_open(int fd, const char *where, lm_tar **out, lm_err *e);
/* Begin a member of exactly `bytes` bytes.  Fails: LM_EBUG if the one before is not complete,
 * LM_EUSAGE for an unsafe name, LM_EIO. */
lm_code lm_tar_member(lm_tar *t, const char *name, uint64_t bytes, lm_err *e);
lm_code lm_tar_write(void *tar, const void *data, size_t bytes, lm_err *e); /* an lm_write_fn */
/* End the archive; t is gone whatever the result; the descriptor stays open. */
lm_code lm_tar_close(lm_tar *t, lm_err *e);
void lm_tar_drop(lm_tar *t);

#endif
