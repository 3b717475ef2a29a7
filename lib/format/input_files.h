/* SPDX-License-Identifier: Apache-2.0 */
/* input_files.h -- operands of a tool that reads text to the files that they mean.
 *
 * A file, or "-", is itself.  A folder is the text in it and in its folders, sorted bytewise by name: files called
 * .jsonl, .ndjson, .txt, .text, .md or .rst, compressed or not, and archives; names that begin with a dot are passed
 * over, and folders that are links.  What is no file and holds '*', '?', '[' or '{' is a pattern of glob(3), with
 * braces, in the order of the names. */
#ifndef LM_FORMAT_INPUT_FILES_H
#define LM_FORMAT_INPUT_FILES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/progress.h"

typedef struct {
    char **path;
    int *operand; /* which each came from */
    size_t n, cap_path, cap_operand;
    int64_t other;    /* files of folders that are not called as text is */
    char *other_name; /* the first of them; NULL: none */
    int64_t twice;    /* files that are there more than once, by whatever name */
    char *twice_name; /* one of them; NULL: none */
} lm_input_files;

/* Fails: LM_EUSAGE for a folder or a pattern without text, saying what is there, and for a pipe of two names;
 * LM_EIO. */
lm_code lm_input_files_find(const char *const *operand, int n, lm_input_files *out, lm_err *e);
void lm_input_files_fini(lm_input_files *f);
/* Say to `sink` which files of folders are passed over, and that files are read more than once. */
void lm_input_files_warn(const lm_input_files *f, lm_sink *sink);

/* Is `path` called as text is: the name of a file that a folder gives? */
bool lm_input_is_text_name(const char *path);
/* Of an operand that may be text or a token dataset: is it text?  So are "-", a file that is not called .bin or
 * .idx, a folder without datasets (lm_tokens_in_folder), and a pattern. */
bool lm_input_is_text(const char *path);
/* Is it a pattern, and no file? */
bool lm_input_is_pattern(const char *path);

#endif
