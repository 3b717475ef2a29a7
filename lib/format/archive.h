/* archive.h -- members of archives and compressed files through libarchive, and tar streams out.
 *
 * Any filter (gzip, xz, zstd, lz4, bzip2) and format (tar, zip, cpio, 7z ...) that libarchive
 * reads; a file that is no archive, compressed or not, is one member with an empty name.  Nothing
 * is ever extracted to disk here, so a member's name is only text; names that would leave a folder
 * are reported by lm_ar_name_safe. */
#ifndef LM_FORMAT_ARCHIVE_H
#define LM_FORMAT_ARCHIVE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

typedef struct lm_ar lm_ar;
/* Open `path` ("-": standard input).  Fails: LM_EIO, LM_EFORMAT. */
lm_code lm_ar_open(const char *path, lm_ar **out, lm_err *e);
void lm_ar_close(lm_ar *a);
/* Go to the next regular file; *name is borrowed until the next call, NULL at the end, "" for the
 * one member of a plain file.  *size is -1 when unknown; may be NULL.  Folders, links and devices
 * are passed over. */
lm_code lm_ar_next(lm_ar *a, const char **name, int64_t *size, lm_err *e);
/* Bytes of the current member; *got = 0 at its end.  Has the shape of lm_read_fn with ctx = lm_ar.
 */
lm_code lm_ar_read(void *ar, void *dst, size_t cap, size_t *got, lm_err *e);
/* Relative, no ".." part, no control bytes, not empty. */
bool lm_ar_name_safe(const char *name);

/* A tar stream (pax) onto a file descriptor.  Members carry mode 0644, owner 0, time 0: same
 * members, same bytes. */
typedef struct lm_tar lm_tar;
lm_code lm_tar_open(int fd, const char *where, lm_tar **out, lm_err *e);
/* Begin a member of exactly `bytes` bytes; the one before must be complete. */
lm_code lm_tar_member(lm_tar *t, const char *name, uint64_t bytes, lm_err *e);
lm_code lm_tar_write(void *tar, const void *data, size_t bytes, lm_err *e); /* an lm_write_fn */
lm_code lm_tar_close(lm_tar *t,
                     lm_err *e); /* ends the archive; t is gone; the descriptor stays open */
void lm_tar_drop(lm_tar *t);

#endif
