/* SPDX-License-Identifier: Apache-2.0 */
/* bundle.h -- the files of a model in a folder, file, archive or stream: one interface for reading,
 * one for writing.
 *
 * A bundle is a sequence of files with plain names: config.json, model.safetensors, tokenizer.json.
 * Read from                                        random access
 *   a folder (its regular files; not recursive)    yes, mapped
 *   one .safetensors file (a bundle of one)        yes, mapped
 *   a tar archive, not compressed, in a file       yes, mapped
 *   an .lmz file (lmz.h)                           yes, decoded
 *   a tar archive under any libarchive filter      no
 *   "-": a tar, an .lmz or a lone .safetensors on  no
 *   standard input (its kind is detected)
 * A bundle without random access is read forward, file by file; the first request out of order spools the rest to an
 * unlinked file in the folder for temporaries (disk, not memory), and from then on the bundle has random access to the
 * current and all later files.
 *
 * The uncompressed tar of a run's folder (folder_run.h), in a file, is read as the files of its
 * newest checkpoint.
 *
 * Archives and streams are hostile until checked: names are plain (lm_name_ok; one common leading
 * folder is removed), no file occurs twice, there are at most 16384, sizes are checked against the
 * data.  A hard link has the bytes of the member before it that it names (bundle_links.h), so that
 * `tar -ch` of a run can be read, in a stream too; other links and devices fail.  Hidden files (".gitattributes",
 * temporaries) and files in subfolders are skipped, in folders and archives. */
#ifndef LM_FORMAT_BUNDLE_H
#define LM_FORMAT_BUNDLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/par.h"
#include "base/progress.h"
#include "format/safetensors.h"

typedef enum {
    LM_BUNDLE_FOLDER,
    LM_BUNDLE_FILE, /* one .safetensors */
    LM_BUNDLE_TAR,
    LM_BUNDLE_LMZ,
} lm_bundle_kind;

/* How to read or write; all zero is the default.  Borrowed until the bundle is closed. */
typedef struct {
    const char *tmpdir; /* where streams are spooled; NULL: /var/tmp */
    /* reading or writing an .lmz delta: its base; NULL: reading: the base that the .lmz names;
     * writing: not a delta */
    const char *base;
    int level; /* writing .lmz and compressed tars: effort; 0: the default */
    /* .lmz files are coded on it; NULL: on the calling thread.  A loop on the same pool may read
     * (the inner loop then runs in its caller). */
    lm_par *par;
    lm_sink *sink; /* reports when a stream is spooled, and how much */
    /* Writing with force: the files of an existing folder that may be replaced; NULL: those of a
     * model (lm_bundle_own). */
    lm_own_fn own;
    const void *own_ctx;
    /* Writing a folder of which several ranks write the .safetensors files (safetensors.h).  Rank 0 makes it and all
     * other files; the others join it by share->folder, and what they write to other files is left out.  NULL: alone */
    lm_st_share *share;
    /* other inputs that the caller reads as files and on standard input, for hints ("a .gguf"); NULL: none */
    const char *also;
} lm_bundle_opts;

typedef struct {
    const char *name;
    uint64_t bytes;
} lm_bundle_file;

/* ---- Reading ---- */

typedef struct lm_bundle lm_bundle;

/* Open `path` ("-": standard input, which is read with random access when it is a file).  Fails:
 * LM_EIO; LM_EUSAGE if it is none of the above (names what was expected), or a terminal;
 * LM_EFORMAT. */
lm_code lm_bundle_open(const char *path, const lm_bundle_opts *o, lm_bundle **out, lm_err *e);
/* Fails as lm_bundle_open when `path` does not exist: checks inputs before long work begins. */
lm_code lm_bundle_there(const char *path, lm_err *e);
/* A bundle without files, for a model whose files are elsewhere; `path` is for messages. */
lm_code lm_bundle_none(const char *path, lm_bundle **out, lm_err *e);
void lm_bundle_close(lm_bundle *b);
lm_bundle_kind lm_bundle_kind_of(const lm_bundle *b);
const char *lm_bundle_path(const lm_bundle *b); /* as given; "standard input" for "-" */
const char *lm_bundle_dir(const lm_bundle *b);  /* the folder; NULL for every other kind */
/* The .lmz that was opened by its index (lmz.h: digest, chain, parts); otherwise NULL. */
const struct lm_lmz *lm_bundle_lmz(const lm_bundle *b);

/* Forward: go to the next file (*f = NULL at the end, which for a stream means that it was read to
 * its end and is complete), and read it; an lm_read_fn with ctx = lm_bundle. */
lm_code lm_bundle_next(lm_bundle *b, const lm_bundle_file **f, lm_err *e);
lm_code lm_bundle_read(void *bundle, void *dst, size_t cap, size_t *got, lm_err *e);

/* True with random access: also for a stream that was spooled. */
bool lm_bundle_random(const lm_bundle *b);
/* Provide random access from the current file on. */
lm_code lm_bundle_spool(lm_bundle *b, lm_err *e);
/* The files, all files with random access; otherwise those read so far. */
size_t lm_bundle_count(const lm_bundle *b);
const lm_bundle_file *lm_bundle_at(const lm_bundle *b, size_t i);
const lm_bundle_file *lm_bundle_find(const lm_bundle *b, const char *name); /* NULL if absent */
/* The first skipped entry (a hidden or special file, a subfolder), and the number of others; NULL:
 * none.  Final with random access, and at the end of a stream. */
const char *lm_bundle_left_out(const lm_bundle *b, size_t *others);
/* The name of f for messages: "dir/config.json", "m.tar: config.json". */
const char *lm_bundle_where(const lm_bundle *b, const lm_bundle_file *f, char buf[256]);
/* Bytes [from, from + bytes) of file f.  Any thread.  LM_EUSAGE outside of it, and for bytes of a
 * stream that were read before it was spooled. */
lm_code lm_bundle_pread(const lm_bundle *b, const lm_bundle_file *f, uint64_t from, void *dst,
                        size_t bytes, lm_err *e);
/* The bytes of f in memory, borrowed until the bundle is closed; NULL where nothing is mapped (an
 * .lmz). */
const uint8_t *lm_bundle_map(const lm_bundle *b, const lm_bundle_file *f);
/* Drop these mapped bytes from this process's resident set: they are not needed soon. */
void lm_bundle_forget(const lm_bundle *b, const lm_bundle_file *f, uint64_t from, uint64_t bytes);
/* A whole small file, at most `limit` bytes; NUL-terminated, appended to `out`.  On a stream it must
 * be the current file (lm_bundle_next).  LM_EFORMAT if it is absent or larger. */
lm_code lm_bundle_load(lm_bundle *b, const char *name, size_t limit, lm_buf *out, lm_err *e);
/* A .safetensors file of a random bundle; close it before the bundle. */
lm_code lm_bundle_st(lm_bundle *b, const char *name, lm_st **out, lm_err *e);

/* ---- Writing ---- */

typedef struct lm_bundle_out lm_bundle_out;

/* True if the tools write a file of this name in a model: configuration, weights, tokenizer. */
bool lm_bundle_own(const char *name);
/* The same, or a file of a checkpoint: an lm_own_fn. */
bool lm_bundle_own_checkpoint(const void *none, const char *name);

/* Create the kind of output that `path` names: "-" and NAME.tar a tar, NAME.tar.gz .tar.zst .tar.xz
 * .tar.bz2 .tar.lz4 a compressed one, NAME.lmz, NAME.safetensors (files other than the weights are
 * left out), anything else a folder; pipes and devices are written in place as a tar.  Files and
 * folders appear whole or not at all; standard output (also as /dev/stdout) is written in place
 * too.  LM_EUSAGE for a terminal, and with force for a folder with files that o->own does not
 * accept. */
lm_code lm_bundle_create(const char *path, bool force, const lm_bundle_opts *o, lm_bundle_out **out,
                         lm_err *e);
lm_bundle_kind lm_bundle_out_kind(const lm_bundle_out *b);
/* LM_ELIMIT if the file system of the output has fewer than `bytes` bytes free (not checked for a
 * compressed output). */
lm_code lm_bundle_room(const lm_bundle_out *b, uint64_t bytes, lm_err *e);
/* Begin a file of exactly `bytes` bytes; the previous one must be complete. */
lm_code lm_bundle_begin(lm_bundle_out *b, const char *name, uint64_t bytes, lm_err *e);
lm_code lm_bundle_write(void *bundle_out, const void *data, size_t bytes,
                        lm_err *e); /* lm_write_fn */
/* Begin a .safetensors file that will hold `plan` (borrowed); to be committed before the next. */
lm_code lm_bundle_st_create(lm_bundle_out *b, const char *name, const lm_st_plan *plan,
                            lm_st_writer **out, lm_err *e);
/* The same in a shared folder, once rank 0 has reserved the file: this rank's part of it.  All ranks call both. */
lm_code lm_bundle_reserve(lm_bundle_out *b, const char *name, const lm_st_plan *plan, lm_err *e);
/* Flush what this rank has written to the reserved files to disk. */
lm_code lm_bundle_sync(lm_bundle_out *b, lm_err *e);
/* The folder in which the output is made; NULL for other kinds. */
const char *lm_bundle_folder(const lm_bundle_out *b);
/* A whole small file. */
lm_code lm_bundle_put(lm_bundle_out *b, const char *name, const void *data, size_t bytes,
                      lm_err *e);
/* Publish all or nothing; b is freed whatever the result. */
lm_code lm_bundle_commit(lm_bundle_out *b, lm_err *e);
void lm_bundle_drop(lm_bundle_out *b);

#endif
