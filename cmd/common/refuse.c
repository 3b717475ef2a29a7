/* SPDX-License-Identifier: Apache-2.0 */
/* refuse.c -- refuses an output that is an input: it would be lost before it is read, or read while
 * it grows. */
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/stream.h"
#include "base/text.h"
#include "common/frame.h"
#include "common/tool.h"
#include "format/bundle.h"
#include "format/folder.h"
#include "format/input_files.h"

typedef struct {
    const char *name;  /* for messages */
    const char *where; /* a path; for standard output that in /proc */
    struct stat st;
} target;

static bool examine(const char *path, int fd, struct stat *st)
{
    return !(strcmp(path, "-") ? stat(path, st) : fstat(fd, st)) &&
           (S_ISREG(st->st_mode) || S_ISDIR(st->st_mode));
}

static bool same_file(const struct stat *a, const struct stat *b)
{
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

/* True if the folder holds the file `path`, at any depth. */
static bool folder_holds(const struct stat *folder, const char *path)
{
    char *real = realpath(path, NULL), *slash;
    struct stat up;
    bool holds = false;

    while (real && !holds && (slash = strrchr(real, '/')) && slash > real) {
        *slash = 0;
        holds = !stat(real, &up) && same_file(&up, folder);
    }
    free(real);
    return holds;
}

/* A report may be written beside a model (run/eval.json), but must not replace a file of the
 * model. */
static bool of_a_model(const char *name)
{
    return lm_bundle_own_checkpoint(NULL, name) || lm_text_ends(name, ".safetensors") ||
           lm_text_ends(name, ".safetensors.index.json") || !strcmp(name, "adapter_config.json");
}

static bool of_a_dataset(const char *name)
{
    return lm_text_ends(name, ".bin") || lm_text_ends(name, ".idx");
}

/* True if the target is a file of the folder that belongs to an input.  prefix: of the names of
 * such files; "" if all files are inputs. */
static bool is_in(const target *t, const char *folder, const char *prefix)
{
    char **names = NULL;
    size_t n = 0;
    bool in = false;

    if (lm_dir_list(folder, &names, &n, NULL))
        return false;
    for (size_t i = 0; i < n && !in; i++) {
        char *path = NULL;
        struct stat st;
        bool part = !strncmp(names[i], prefix, strlen(prefix)) &&
                    (of_a_dataset(names[i]) || (!*prefix && of_a_model(names[i])));

        in = part && !lm_path_join(&path, folder, names[i], NULL) && !stat(path, &st) &&
             same_file(&st, &t->st);
        lm_free(path);
    }
    lm_names_free(names, n);
    return in;
}

/* True for a shard of the dataset named `input`: data/train.bin for data/train. */
static bool is_shard(const target *t, const char *input)
{
    char *folder = NULL, *slash = NULL;
    const char *base = lm_path_base(input);
    bool is = false;

    if (!lm_strdup(&folder, input, NULL) && (slash = strrchr(folder, '/')))
        slash[1] = 0;
    if (folder && *base)
        is = is_in(t, slash ? folder : ".", base);
    lm_free(folder);
    return is;
}

static void refuse(lm_tool *t, const target *out, const char *input)
{
    const char *from = strcmp(input, "-") ? input : "/proc/self/fd/0";
    struct stat in;

    if (!examine(input, STDIN_FILENO, &in)) {
        if (strcmp(input, "-") != 0 && is_shard(out, input))
            lm_misuse(t, out->name, "write to another file", "it is a shard of the input %s",
                      input);
        return;
    }
    if (same_file(&in, &out->st))
        lm_misuse(t, out->name, "write to another file", "is both an input and the output");
    if (S_ISDIR(out->st.st_mode) && folder_holds(&out->st, from))
        lm_misuse(t, out->name, "write to another folder",
                  "it holds the input %s, which would be replaced with it", input);
    if (S_ISDIR(in.st_mode) && (is_in(out, from, "") || (of_a_model(lm_path_base(out->where)) &&
                                                         folder_holds(&in, out->where))))
        lm_misuse(t, out->name, "write to another folder", "it is a part of the input %s", input);
}

static void refuse_stdout(lm_tool *t, const char *input)
{
    target out = { .name = "standard output" };
    char *real = realpath("/proc/self/fd/1", NULL);

    out.where = real ? real : "-";
    if (examine("-", STDOUT_FILENO, &out.st))
        refuse(t, &out, input);
    free(real);
}

void lm_refuse_same(lm_tool *t, const char *output, const char *input)
{
    target out = { .name = output, .where = output };

    if (output && strcmp(output, "-") != 0 && examine(output, -1, &out.st))
        refuse(t, &out, input);
    refuse_stdout(t, input);
}

/* The path of `output` with links resolved; if it does not exist, that of its folder. */
static char *resolve(const char *output)
{
    char *path = NULL, *real = NULL, *slash;

    if (lm_strdup(&path, output, NULL))
        return NULL;
    while (!(real = realpath(path, NULL)) && (slash = strrchr(path, '/')) && slash > path)
        *slash = 0;
    lm_free(path);
    return real ? real : realpath(*output == '/' ? "/" : ".", NULL);
}

void lm_refuse_inside(lm_tool *t, const char *output, const char *input)
{
    char *out, *dir;
    size_t n;

    if (!output || !strcmp(output, "-") || !strcmp(input, "-") || !lm_path_is_dir(input))
        return;
    out = resolve(output);
    dir = realpath(input, NULL);
    n = dir ? strlen(dir) : 0;
    if (out && dir && !strncmp(out, dir, n) && (out[n] == '/' || !out[n] || n == 1))
        lm_misuse(t, output, "write to another folder", "it lies in the input %s", input);
    free(out);
    free(dir);
}

void lm_refuse_twice(lm_tool *t, const char *const *more, int n)
{
    const char **all = NULL;
    int k = 0;
    lm_err e = { 0 };

    if (!lm_alloc_n(&all, (size_t)t->argc + (size_t)n + 1, sizeof *all, "names of inputs", &e)) {
        all[k++] = lm_the_frame.config;
        for (int i = 0; i < t->argc; i++)
            all[k++] = t->argv[i];
        for (int i = 0; i < n; i++)
            all[k++] = more[i];
        lm_streams_once(all, k, &e);
    }
    lm_free(all);
    if (e.code == LM_EUSAGE)
        lm_misuse(t, e.where, e.todo, "%s", e.what);
    if (e.code) {
        lm_complain(t, &e);
        exit(lm_end(t));
    }
}

void lm_refuse_run_link(lm_tool *t, const char *output)
{
    static const char checkpoint[] = "latest/";
    char to[sizeof checkpoint];

    if (output && readlink(output, to, sizeof to) >= (ssize_t)sizeof to - 1 &&
        !memcmp(to, checkpoint, sizeof checkpoint - 1))
        lm_misuse(t, output, "write to another file",
                  "is a link of a run, and the file of its newest checkpoint would be replaced");
}

void lm_refuse_text(lm_tool *t, const char *output, const char *operand)
{
    lm_input_files files;
    lm_err ignored = { 0 }; /* reported when the operand is opened */

    lm_refuse_same(t, output, operand);
    if (!lm_input_files_find(&operand, 1, &files, &ignored))
        for (size_t i = 0; i < files.n; i++)
            lm_refuse_same(t, output, files.path[i]);
    lm_input_files_fini(&files);
}
