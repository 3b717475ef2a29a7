/* SPDX-License-Identifier: Apache-2.0 */
/* libarchive.h -- libarchive, loaded when the first archive is opened.
 *
 * With the libraries that it needs (XML, Unicode tables, seven decoders) it takes as long to load as all
 * else that a tool does before its work, and no tool needs it for --help.  Its functions are called through
 * one table, under their names without "archive_".  Private to lib/format. */
#ifndef LM_FORMAT_LIBARCHIVE_H
#define LM_FORMAT_LIBARCHIVE_H

#include <archive.h>
#include <archive_entry.h>

#include "base/err.h"

/* clang-format off */
#define LM_LIBARCHIVE(X)                                                                                \
    X(read_data) X(read_data_block) X(read_free) X(read_new) X(read_next_header) X(read_open)           \
    X(read_open1) X(read_open_memory) X(read_set_callback_data) X(read_set_read_callback)               \
    X(read_set_seek_callback)                                                                           \
    X(read_support_filter_bzip2) X(read_support_filter_compress) X(read_support_filter_gzip)            \
    X(read_support_filter_lz4) X(read_support_filter_lzip) X(read_support_filter_lzma)                  \
    X(read_support_filter_xz) X(read_support_filter_zstd) X(read_support_format_7zip)                   \
    X(read_support_format_cab) X(read_support_format_empty) X(read_support_format_iso9660)              \
    X(read_support_format_rar) X(read_support_format_rar5) X(read_support_format_raw)                   \
    X(read_support_format_tar) X(read_support_format_xar) X(read_support_format_zip)                    \
    X(entry_filetype) X(entry_free) X(entry_hardlink) X(entry_is_data_encrypted) X(entry_new)           \
    X(entry_pathname) X(entry_pathname_utf8) X(entry_set_filetype) X(entry_set_mtime)                   \
    X(entry_set_pathname) X(entry_set_perm) X(entry_set_size) X(entry_size) X(entry_size_is_set)        \
    X(entry_sparse_count) X(entry_symlink)                                                              \
    X(write_add_filter_by_name) X(write_close) X(write_data) X(write_free) X(write_header) X(write_new) \
    X(write_open) X(write_set_bytes_in_last_block) X(write_set_bytes_per_block)                         \
    X(write_set_filter_option) X(write_set_format_pax_restricted)                                       \
    X(error_string) X(filter_bytes) X(filter_count) X(format) X(set_error)
/* clang-format on */

typedef struct {
#define LM_MEMBER(f) __typeof__(archive_##f) *f;
    LM_LIBARCHIVE(LM_MEMBER)
#undef LM_MEMBER
    __typeof__(archive_errno) *error_number; /* errno is a macro */
} lm_libarchive;
extern lm_libarchive lm_la; /* whole when one of the functions below has succeeded */

/* A reader without filter, format and callbacks.  Fails: LM_EIO when there is no library, LM_ELIMIT for
 * memory. */
lm_code lm_reader_new(const char *where, struct archive **out, lm_err *e);
/* Every filter that libarchive has in itself: it starts no other program. */
void lm_reader_filters(struct archive *a);
void lm_reader_free(struct archive *a); /* may be NULL */
/* A writer without format and filter.  Fails: as above. */
lm_code lm_writer_new(const char *where, struct archive **out, lm_err *e);

#endif
