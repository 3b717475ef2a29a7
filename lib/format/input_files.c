/* SPDX-License-Identifier: Apache-2.0 */
/* input_files.c -- see input_files.h. */
#include "format/input_files.h"

#include <glob.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/stream.h"
#include "base/text.h"
#include "format/tokens.h"

enum { DEPTH_MAX = 64 };

static const char name_them[] = "name the files, or a pattern in quotes, such as 'FOLDER/*'";

bool lm_input_is_text_name(const char *path)
{
    static const char *const packed[] = { ".zst",  ".gz", ".xz", ".bz2", ".lz4",
                                          ".lzma", ".lz", ".Z",  NULL };
    static const char *const text[] = { ".jsonl", ".ndjson", ".txt", ".text", ".md",   ".rst",
                                        ".tar",   ".tgz",    ".txz", ".tbz2", ".tzst", ".zip",
                                        ".7z",    ".rar",    ".cab", ".xar",  NULL };
    const char *name = lm_path_base(path);
    size_t n = strlen(name);
    for (size_t k = 0; packed[k]; k++)
        if (lm_text_ends(name, packed[k])) {
            n -= strlen(packed[k]);
            break;
        }
    for (size_t k = 0; text[k]; k++) {
        size_t t = strlen(text[k]);
        if (n > t && memcmp(name + n - t, text[k], t) == 0)
            return true;
    }
    return false;
}

/* True if it is a pattern and not a file. */
static bool is_pattern(const char *path)
{
    return strpbrk(path, "*?[{") && !lm_path_exists(path);
}

static bool holds_datasets(const char *dir)
{
    char *train = NULL, *val = NULL;
    lm_err e = { 0 };
    bool there = lm_tokens_in_folder(dir, &train, &val, &e) == LM_EUSAGE || train || val;
    lm_free(train);
    lm_free(val);
    return there;
}

bool lm_input_is_text(const char *path)
{
    if (!strcmp(path, "-"))
        return true;
    if (lm_path_is_dir(path))
        return !holds_datasets(path);
    return (lm_path_exists(path) || is_pattern(path)) && !lm_text_ends(path, ".bin") &&
           !lm_text_ends(path, ".idx");
}

static lm_code add(lm_input_files *f, const char *path, int operand, lm_err *e)
{
    lm_code rc = lm_grow(&f->path, &f->cap_path, f->n + 1, sizeof *f->path, "paths", e);
    if (!rc)
        rc = lm_grow(&f->operand, &f->cap_operand, f->n + 1, sizeof *f->operand, "paths", e);
    if (!rc)
        rc = lm_strdup(&f->path[f->n], path, e);
    if (!rc)
        f->operand[f->n++] = operand;
    return rc;
}

static lm_code leave_out(lm_input_files *f, const char *path, lm_err *e)
{
    f->other++;
    return f->other_name ? LM_OK : lm_strdup(&f->other_name, path, e);
}

static lm_code walk(lm_input_files *f, const char *dir, int operand, int depth, lm_err *e)
{
    char **names = NULL;
    size_t n = 0;
    if (depth > DEPTH_MAX)
        return lm_fail(e, LM_EUSAGE, dir, name_them, "its subfolders are nested deeper than %d",
                       DEPTH_MAX);
    lm_code rc = lm_dir_list(dir, &names, &n, e);
    for (size_t i = 0; i < n && !rc; i++) {
        char *path = NULL;
        struct stat st;
        if (names[i][0] == '.')
            continue;
        rc = lm_path_join(&path, dir, names[i], e);
        if (!rc && !lstat(path, &st) && S_ISDIR(st.st_mode))
            rc = walk(f, path, operand, depth + 1, e);
        else if (!rc && !stat(path, &st) && S_ISREG(st.st_mode))
            rc = lm_input_is_text_name(names[i]) ? add(f, path, operand, e) : leave_out(f, path, e);
        lm_free(path);
    }
    lm_names_free(names, n);
    return rc;
}

static lm_code add_folder(lm_input_files *f, const char *dir, int operand, lm_err *e)
{
    size_t before = f->n;
    int64_t others = f->other;
    lm_code rc = walk(f, dir, operand, 0, e);
    if (rc || f->n > before)
        return rc;
    if (f->other == others)
        return lm_fail(e, LM_EUSAGE, dir, name_them, "a folder without files");
    return lm_fail(e, LM_EUSAGE, dir, name_them,
                   "a folder without text: %lld file%s not called .jsonl, .txt or the like (%s)",
                   (long long)(f->other - others), lm_plural((uint64_t)(f->other - others)),
                   lm_path_base(f->other_name));
}

static lm_code add_pattern(lm_input_files *f, const char *pattern, int operand, lm_err *e)
{
    glob_t found = { 0 };
    if (strstr(pattern, "**")) /* glob(3) would take it for '*', one folder deep */
        return lm_fail(e, LM_EUSAGE, pattern, "name the folder: its subfolders are read too",
                       "'**' is not supported in patterns");
    int r = glob(pattern, GLOB_BRACE | GLOB_ERR, NULL, &found);
    lm_code rc = LM_OK;
    if (r == GLOB_ABORTED)
        rc = lm_fail(e, LM_EIO, pattern, NULL, "cannot read a folder of the pattern");
    else if (r == GLOB_NOSPACE)
        rc = lm_fail(e, LM_ELIMIT, pattern, NULL, "no memory for the files of the pattern");
    else if (r)
        rc = lm_fail(e, LM_EUSAGE, pattern, "check the path", "no file matches the pattern");
    for (size_t i = 0; !rc && i < found.gl_pathc; i++)
        rc = lm_path_is_dir(found.gl_pathv[i]) ? add_folder(f, found.gl_pathv[i], operand, e)
                                               : add(f, found.gl_pathv[i], operand, e);
    globfree(&found);
    return rc;
}

typedef struct {
    dev_t dev;
    ino_t ino;
    const char *path;
    bool stream; /* a pipe or a socket, which can be read only once */
} identity;

static int by_inode(const void *a, const void *b)
{
    const identity *x = a, *y = b;
    if (x->dev != y->dev)
        return x->dev < y->dev ? -1 : 1;
    return (x->ino > y->ino) - (x->ino < y->ino);
}

/* False for inputs that are neither files nor streams, such as /dev/null. */
static bool identify(const char *path, identity *out)
{
    struct stat st;
    bool is_stdin = !strcmp(path, "-");
    if (is_stdin ? fstat(STDIN_FILENO, &st) : stat(path, &st))
        return false;
    *out = (identity){ st.st_dev, st.st_ino, path, S_ISFIFO(st.st_mode) || S_ISSOCK(st.st_mode) };
    return out->stream || (S_ISREG(st.st_mode) && !is_stdin);
}

/* A stream read by a second name would be empty or incomplete. */
static lm_code note_twice(lm_input_files *f, const identity *a, const identity *b, lm_err *e)
{
    if (a->stream)
        return lm_stream_twice(a->path, b->path, e);
    return f->twice++ ? LM_OK : lm_strdup(&f->twice_name, b->path, e);
}

static lm_code find_twice(lm_input_files *f, lm_err *e)
{
    identity *id = NULL;
    size_t n = 0;
    lm_code rc = lm_alloc_n(&id, f->n, sizeof *id, "files", e);
    for (size_t i = 0; !rc && i < f->n; i++)
        n += identify(f->path[i], &id[n]);
    if (n > 1)
        qsort(id, n, sizeof *id, by_inode);
    for (size_t i = 1; !rc && i < n; i++)
        if (by_inode(&id[i - 1], &id[i]) == 0)
            rc = note_twice(f, &id[i - 1], &id[i], e);
    lm_free(id);
    return rc;
}

lm_code lm_input_files_find(const char *const *operand, int n, lm_input_files *out, lm_err *e)
{
    lm_code rc = LM_OK;
    *out = (lm_input_files){ 0 };
    for (int i = 0; i < n && !rc; i++) {
        if (strcmp(operand[i], "-") != 0 && lm_path_is_dir(operand[i]))
            rc = add_folder(out, operand[i], i, e);
        else if (strcmp(operand[i], "-") != 0 && is_pattern(operand[i]))
            rc = add_pattern(out, operand[i], i, e);
        else
            rc = add(out, operand[i], i, e);
    }
    if (!rc)
        rc = find_twice(out, e);
    if (rc)
        lm_input_files_fini(out);
    return rc;
}

void lm_input_files_fini(lm_input_files *f)
{
    for (size_t i = 0; i < f->n; i++)
        lm_free(f->path[i]);
    lm_free(f->path);
    lm_free(f->operand);
    lm_free(f->other_name);
    lm_free(f->twice_name);
    *f = (lm_input_files){ 0 };
}

void lm_input_files_warn(const lm_input_files *f, lm_sink *sink)
{
    if (f->other)
        lm_log(sink, LM_LOG_WARN,
               "skipped %lld file%s in folders without the ending .jsonl, .txt or similar, "
               "such as %s",
               (long long)f->other, lm_plural(f->other), f->other_name);
    if (f->twice)
        lm_log(sink, LM_LOG_WARN, "%lld file%s given more than once, such as %s",
               (long long)f->twice, lm_plural((uint64_t)f->twice), f->twice_name);
}
