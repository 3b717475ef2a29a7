/* SPDX-License-Identifier: Apache-2.0 */
/* tokens_folder.c -- finds the datasets in a folder: train and val, or those with one prefix. */
#include <ctype.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/text.h"
#include "format/tokens.h"

enum { DIGITS = 6 }; /* of NAME_000000.bin */

/* Length of the dataset's name in that of its file: NAME.bin, NAME.idx, NAME_nnnnnn.bin; 0: no such file. */
static size_t stem(const char *name)
{
    size_t n = strlen(name), i;

    if (name[0] == '.' || n < 5 || !(lm_text_ends(name, ".bin") || lm_text_ends(name, ".idx")))
        return 0;
    n -= 4;
    for (i = n; i && n - i < DIGITS && isdigit((unsigned char)name[i - 1]);)
        i--;
    return n - i == DIGITS && i > 1 && name[i - 1] == '_' ? i - 1 : n;
}

/* True if the dataset's name of n characters is `split` or ends in '_' and `split`. */
static bool is_split(const char *name, size_t n, const char *split)
{
    size_t tail = strlen(split);
    return n >= tail && !memcmp(name + n - tail, split, tail) &&
           (n == tail || name[n - tail - 1] == '_');
}

typedef struct {
    const char *name; /* of the file; NULL: none */
    size_t n;         /* length of the dataset's name */
    bool several;
} found;

static bool same(const found *f, const char *name, size_t n)
{
    return f->name && f->n == n && !memcmp(f->name, name, n);
}

/* The dataset of this split; "train" itself is preferred to "fineweb_train". */
static found find_split(char *const *names, size_t count, const char *split)
{
    found f = { 0 };

    for (size_t i = 0; i < count; i++) {
        size_t n = stem(names[i]);
        if (!n || !is_split(names[i], n, split) || same(&f, names[i], n))
            continue;
        if (n == strlen(split))
            return (found){ names[i], n, false };
        if (f.name)
            f.several = true;
        else
            f = (found){ names[i], n, false };
    }
    return f;
}

/* The validation part of `train`: its name, with "val" in place of "train". */
static found find_partner(char *const *names, size_t count, const found *train)
{
    size_t front = train->n - strlen("train");

    for (size_t i = 0; i < count; i++) {
        size_t n = stem(names[i]);
        if (n == front + strlen("val") && !memcmp(names[i], train->name, front) &&
            is_split(names[i], n, "val"))
            return (found){ names[i], n, false };
    }
    return (found){ 0 };
}

static lm_code join(char **out, const char *dir, const found *f, lm_err *e)
{
    size_t n = strlen(dir);

    return f->name ? lm_asprintf(out, e, "%s%s%.*s", dir, n && dir[n - 1] == '/' ? "" : "/",
                                 (int)f->n, f->name)
                   : LM_OK;
}

lm_code lm_tokens_in_folder(const char *dir, char **train, char **val, lm_err *e)
{
    char **names = NULL;
    size_t count = 0;
    found t, v;
    lm_code rc = lm_dir_list(dir, &names, &count, e);

    *train = *val = NULL;
    t = find_split(names, count, "train");
    v = t.name ? find_partner(names, count, &t) : find_split(names, count, "val");
    if (!rc && (t.several || v.several))
        rc = lm_fail(e, LM_EUSAGE, dir, "name one of them",
                     "holds the datasets of several names, such as %.*s",
                     (int)(t.several ? t.n : v.n), t.several ? t.name : v.name);
    if (!rc)
        rc = join(train, dir, &t, e);
    if (!rc)
        rc = join(val, dir, &v, e);
    lm_names_free(names, count);
    return rc;
}
