/* SPDX-License-Identifier: Apache-2.0 */
/* source_impl.h -- shared by the files source*.c: the state of a source, and its lower half, the
 * current file and the decoder on it.  Private to lib/format. */
#ifndef LM_FORMAT_SOURCE_IMPL_H
#define LM_FORMAT_SOURCE_IMPL_H

#include <stdatomic.h>
#include <sys/types.h>
#include <xxhash.h>

#include "base/buf.h"
#include "format/gunzip.h"
#include "format/libarchive.h"
#include "format/source.h"

enum { LM_SOURCE_BLOCK = 256 * 1024 };

struct lm_source {
    lm_input_files files;
    uint64_t *digests; /* by file */
    int n_operands;
    int at; /* the file being read, -1 before the first */
    int fd;
    bool seeked; /* the hash over read() is incomplete: hash the file again at its end */
    XXH3_state_t *hash;
    char *block;
    struct archive *outer, *inner;
    lm_gunzip *gz, *inner_gz;
    uint64_t given, inner_given; /* bytes consumed by the two readers */
    lm_err fail;                 /* failure of a callback: libarchive only keeps a text */
    size_t most; /* most bytes behind an archive that are read to reach the end of a pipe */
    bool skip_bad, cut, resumed;
    int64_t bad;
    lm_err first_bad;
    bool in_member;
    bool is_archive;
    int64_t member_at; /* bytes of the outer member returned so far */
    lm_buf name;
    _Atomic uint64_t bytes;
    uint64_t total;
};

/* A reader through which text comes: every filter, and the format of what is no archive. */
lm_code lm_source_reader(const char *where, struct archive **out, lm_err *e);
/* Keep the failure of a read callback for lm_source_decoder_failed; returns the callback's return
 * value. */
la_ssize_t lm_source_callback_failed(lm_source *s, struct archive *a, const lm_err *e);
/* The failure of a decoder: that of its callback, or its own. */
lm_code lm_source_decoder_failed(lm_source *s, struct archive *a, lm_err *e);
/* With skip_bad, record the damage; true if reading may continue.  When stopping, nothing counts as
 * damaged. */
bool lm_source_note_bad(lm_source *s, lm_code rc, lm_err *e);

/* Open the file `at` with the outer reader; open a new reader on the rest of it; read it to its
 * end, compute its digest and close it. */
lm_code lm_source_open_outer(lm_source *s, lm_err *e);
lm_code lm_source_new_outer(lm_source *s, lm_err *e);
lm_code lm_source_close_outer(lm_source *s, lm_err *e);

#endif
