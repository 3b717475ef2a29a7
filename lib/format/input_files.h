/* SPDX-License-Identifier: Apache-2.0 */
/* input_files.h -- expands the operands of a tool that reads text to files.
 *
 * A file, or "-", stands for itself.  A folder is the text in it and in its folders, sorted
 * bytewise by name: files ending in .jsonl, .ndjson, .txt, .text, .md or .rst, compressed or not,
 * and archives; names that begin with a dot, and links to folders, are skipped.  An operand that is
 * not a file and holds '*', '?', '[' or '{' is a pattern of glob(3), with braces, in the order of
 * the names. */
#ifndef LM_FORMAT_INPUT_FILES_H
#define LM_FORMAT_INPUT_FILES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/progress.h"

typedef struct {
    char **path;
    int *operand; /* the operand of each file */
    size_t n, cap_path, cap_operand;
    int64_t other;    /* files in folders whose ending is not that of text */
    char *other_name; /* the first of them; NULL: none */
    int64_t twice;    /* files named more than once, by any name */
    char *twice_name; /* one of them; NULL: none */
} lm_input_files;

/* Fails: LM_EUSAGE for a folder or a pattern without text, naming the content, and for a pipe with
 * two names; LM_EIO. */
lm_code lm_input_files_find(const char *const *operand, int n, lm_input_files *out, lm_err *e);
void lm_input_files_fini(lm_input_files *f);
/* Report to `sink` the skipped files of folders, and files that are read more than once. */
void lm_input_files_warn(const lm_input_files *f, lm_sink *sink);

/* True if `path` has an ending of text, by which files in folders are selected. */
bool lm_input_is_text_name(const char *path);
/* For an operand that may be text or a token dataset: true if it is text.  These are "-", a file
 * without the ending .bin or .idx, a folder without datasets (lm_tokens_in_folder), and a
 * pattern. */
bool lm_input_is_text(const char *path);

#endif
