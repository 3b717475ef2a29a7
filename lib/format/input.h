/* SPDX-License-Identifier: Apache-2.0 */
/* input.h -- documents from files, archives and pipes, in memory bounded by the largest document.
 *
 * Two layers of decoding, both chosen by content, not by name:
 * - A file may be compressed (gzip, bzip2, xz, lzma, lzip, zstd, lz4, compress) and may be an
 *   archive (tar, zip, 7zip, rar, cab, xar, iso9660); members may be compressed once more.
 *   Members are only read, in the order of the archive; their names appear only in messages, and their sizes are not used.
 * - The bytes inside are JSONL (one object a line, the text in one field) or plain text (one
 *   document a file, or cut at blank lines or at a separator).  AUTO takes .jsonl and .ndjson as
 *   JSONL, .txt and .text as text, and everything else by its first byte: '{' means JSONL.
 *
 * Reading is split in two so that the costly half can run on many threads:
 * - lm_input_next, serial: cuts the next raw document out of the stream;
 * - lm_doc_decode, any thread: checks UTF-8, parses JSON, finds the text.
 * lm_input_read does both and skips documents that are to be skipped. */
#ifndef LM_FORMAT_INPUT_H
#define LM_FORMAT_INPUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/err.h"
#include "format/input_files.h"

typedef enum { LM_INPUT_AUTO, LM_INPUT_JSONL, LM_INPUT_TEXT } lm_input_kind;
typedef enum { LM_UTF8_FAIL, LM_UTF8_SKIP, LM_UTF8_REPLACE } lm_utf8_policy;
typedef enum { LM_SPLIT_NONE, LM_SPLIT_BLANK, LM_SPLIT_STRING } lm_split;

/* Damaged parts that were skipped: records of JSONL, and parts of compressed files and archives.
 * Zero-initialise; documents are decoded on many threads. */
typedef struct {
    int64_t records; /* counted by all threads */
    int64_t parts;
    bool taken;    /* guards the fields below */
    int64_t index; /* of the first bad record in the stream */
    lm_err record; /* what is wrong with it */
    lm_err part;   /* and with the first bad part */
} lm_input_bad;

typedef struct {
    lm_input_kind kind;
    /* invalid UTF-8: fail with the offset, skip the document, or write U+FFFD */
    lm_utf8_policy utf8;
    lm_split split;        /* plain text only */
    const char *separator; /* LM_SPLIT_STRING: split at these bytes; not empty */
    /* JSONL: the keys of the text, joined with a newline; a key of the top level, or A.B for the key B of the object
     * under A; none: "text" */
    const char *const *field;
    int fields;
    size_t max_doc;    /* most bytes of one raw document (LM_ELIMIT); 0 = 4 GiB */
    lm_input_bad *bad; /* damage is skipped and counted here; NULL: it is a failure */
} lm_input_opts;       /* all zero is the default */

/* One document.  Zero-initialise, reuse for many, then lm_doc_fini.  Everything in it stays valid
 * until the next call with the same lm_doc. */
typedef struct {
    const char *text; /* valid UTF-8, may hold NUL bytes; NULL before lm_doc_decode */
    size_t len;       /* bytes of text */
    /* bytes as read: the JSON line without its newline, or the piece of plain text */
    lm_buf raw;
    lm_buf own;  /* memory of text that had to be unescaped */
    lm_buf name; /* memory of source */
    /* JSONL: raw[val_at..val_end) is the string with its quotes; else, and of several fields, 0,
     * 0 */
    size_t val_at;
    size_t val_end;
    bool jsonl;
    bool skip;          /* set by lm_doc_decode: invalid UTF-8 under LM_UTF8_SKIP; text is NULL */
    bool broken;        /* skipped, because it is not a record, under lm_input_opts.bad */
    int64_t bad;        /* invalid UTF-8 sequences found (0 or 1 when skipped) */
    const char *source; /* "a.jsonl.zst", "standard input", "b.tar:dir/c.txt" */
    int operand;        /* index into the operands given to lm_input_open */
    int64_t index;      /* number of the document in the whole stream, from 0 */
    int64_t line;       /* line of its first byte in its source, from 1 */
    int64_t offset;     /* byte offset of its first byte in its decompressed source */
} lm_doc;

typedef struct lm_input lm_input;

/* Open a stream over n operands: paths of files, of folders, and patterns (see input_files.h); "-"
 * is standard input, at most once.  Every file is checked to be readable before any is read.  The
 * operands and *o are copied, but not the memory that *o points to.  Fails: LM_EIO if a file cannot
 * be opened, LM_EUSAGE if a folder or pattern gives no text, or the options are inconsistent. */
lm_code lm_input_open(const lm_input_opts *o, const char *const *paths, int n, lm_input **out,
                      lm_err *e);
void lm_input_close(lm_input *in);
/* The files of the operands; borrowed. */
const lm_input_files *lm_input_file_list(const lm_input *in);

/* The next raw document; *got is false at the end.  Blank lines of JSONL and empty pieces of plain
 * text are skipped.  One thread at a time.  Fails: LM_EIO, LM_EFORMAT for damaged archives (name
 * and the decoder's message), LM_ELIMIT. */
lm_code lm_input_next(lm_input *in, lm_doc *doc, bool *got, lm_err *e);

/* Find doc->text.  Any thread, different documents at once.  Fails: LM_EFORMAT naming "source:line"
 * for a line that is not a JSON object, lacks the field (with the names of its fields), or whose
 * field is not a string; for invalid UTF-8 with the byte offset in the source. */
lm_code lm_doc_decode(const lm_input_opts *o, lm_doc *doc, lm_err *e);

/* lm_input_next and lm_doc_decode until a document is not skipped. */
lm_code lm_input_read(lm_input *in, lm_doc *doc, bool *got, lm_err *e);

/* Append the document as one line of JSONL, newline included: the raw line with its text replaced
 * by text[0..len) (bytes kept as they are when it is doc->text itself), or {"text": ...} for plain
 * text and for a text of several fields. */
lm_code lm_doc_write(const lm_input_opts *o, const lm_doc *doc, const char *text, size_t len,
                     lm_buf *out, lm_err *e);
void lm_doc_fini(lm_doc *doc);

typedef struct {
    int64_t docs;          /* documents returned by lm_input_next */
    int64_t skipped, bad;  /* skipped / replaced sequences, counted by lm_input_read only */
    uint64_t bytes, total; /* compressed bytes read so far, and in total (0 = unknown, a pipe) */
} lm_input_stats;
/* Any thread. */
lm_input_stats lm_input_stat(const lm_input *in);

/* XXH3-64 of the bytes of operand i as stored (compressed), for several files, of their digests;
 * valid after the end of the stream. */
uint64_t lm_input_digest(const lm_input *in, int i);

#endif
