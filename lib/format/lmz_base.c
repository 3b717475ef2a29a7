/* SPDX-License-Identifier: Apache-2.0 */
/* lmz_base.c -- finds the base of a delta, and in it the tensor that corresponds to one of the
 * delta. */
#include "format/lmz_base.h"
#include "base/file.h"

#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/hash.h"
#include "format/safetensors_table.h"

typedef struct {
    const char *file;
    uint64_t data; /* where its data begins */
    lm_st_table table;
} base_file;

struct lmz_bases {
    base_file *file;
    size_t n;
};

/* ---- Writing ---- */

static bool is_safetensors(const char *name)
{
    size_t n = strlen(name);
    return n > 12 && !strcmp(name + n - 12, ".safetensors");
}

/* Read the header of one file; one that does not parse leaves an empty table, without failure. */
static lm_code read_table(lm_bundle *base, const lm_bundle_file *f, base_file *out, lm_err *e)
{
    uint8_t field[8];
    uint64_t n = 0;
    char *text = NULL;
    lm_err ignored = { 0 };

    if (f->bytes < 8)
        return LM_OK;
    lm_code rc = lm_bundle_pread(base, f, 0, field, 8, e);
    if (rc || lm_st_header_length(field, f->name, &n, &ignored) || n > f->bytes - 8)
        return rc;
    rc = lm_alloc_n(&text, n, 1, "a safetensors header", e);
    if (!rc)
        rc = lm_bundle_pread(base, f, 8, text, n, e);
    if (!rc && lm_st_table_parse(&out->table, text, n, f->bytes - 8 - n, f->name, &ignored))
        lm_st_table_fini(&out->table);
    lm_free(text);
    out->file = f->name;
    out->data = 8 + n;
    return rc;
}

lm_code lmz_bases_new(lm_bundle *base, lmz_bases **out, lm_err *e)
{
    lmz_bases *b = NULL;
    size_t n = lm_bundle_count(base);
    lm_code rc = lm_alloc_n(&b, 1, sizeof *b, "tensors of the base", e);

    *out = NULL;
    if (!rc)
        rc = lm_alloc_n(&b->file, n, sizeof *b->file, "tensors of the base", e);
    for (size_t i = 0; i < n && !rc; i++) {
        const lm_bundle_file *f = lm_bundle_at(base, i);
        if (is_safetensors(f->name))
            rc = read_table(base, f, &b->file[b->n++], e);
    }
    if (rc)
        lmz_bases_free(b);
    else
        *out = b;
    return rc;
}

void lmz_bases_free(lmz_bases *b)
{
    if (!b)
        return;
    for (size_t i = 0; i < b->n; i++)
        lm_st_table_fini(&b->file[i].table);
    lm_free(b->file);
    lm_free(b);
}

bool lmz_bases_find(const lmz_bases *b, const char *file, const char *tensor, const char *dtype,
                    uint64_t bytes, const char **found, uint64_t *from)
{
    for (int same = 1; same >= 0; same--)
        for (size_t i = 0; i < b->n; i++) {
            const base_file *f = &b->file[i];
            if (!f->file || (strcmp(f->file, file) == 0) != same)
                continue;
            const lm_st_tensor *t = lm_st_table_find(&f->table, tensor);
            if (!t || strcmp(t->dtype_name, dtype) || t->bytes != bytes)
                continue;
            *found = f->file;
            *from = f->data + t->offset;
            return true;
        }
    return false;
}

/* A base is read in any order, and again whenever the delta is read: a stream cannot be one. */
static lm_code check_kept(const char *base, lm_err *e)
{
    struct stat st;

    if (!strcmp(base, "-"))
        return lm_fail(e, LM_EUSAGE, "base of a delta", "write it to a file first, and name that",
                       "standard input cannot be a base, which must be a file or a folder");
    if (!stat(base, &st) && !S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode))
        return lm_fail(e, LM_EUSAGE, base, "write it to a file first, and name that",
                       "a pipe or a device cannot be a base, which must be a file or a folder");
    return LM_OK;
}

lm_code lm_lmz_base_name(const char *path, const char *base, char **out, lm_err *e)
{
    char here[PATH_MAX], there[PATH_MAX];
    lm_buf name = { 0 };
    size_t common = 0, i = 0;
    lm_code rc = check_kept(base, e);

    *out = NULL;
    rc = rc ? rc : lm_path_folder(path, here, e);
    if (!rc && !realpath(base, there))
        rc = lm_fail(e, LM_EIO, base, NULL, "cannot open");
    if (rc)
        return rc;
    if (!here[1])
        here[0] = 0; /* the root: all absolute paths begin with it */
    for (;; i++) {   /* the common folders */
        if ((!here[i] || here[i] == '/') && (!there[i] || there[i] == '/'))
            common = i;
        if (here[i] != there[i] || !here[i])
            break;
    }
    for (const char *p = here + common; !rc && *p; p++)
        if (*p == '/')
            rc = lm_buf_add(&name, "../", 3, e);
    rc = rc ? rc : lm_buf_addf(&name, e, "%s", there[common] ? there + common + 1 : "");
    while (name.len && name.data[name.len - 1] == '/') /* go one folder up */
        name.data[--name.len] = 0;
    rc = rc ? rc : lm_strdup(out, name.len ? name.data : ".", e);
    lm_buf_fini(&name);
    return rc;
}

/* ---- Both ---- */

lm_code lmz_base_bytes(const lm_bundle *base, const char *file, uint64_t from, size_t bytes,
                       uint8_t *room, const uint8_t **out, lm_err *e)
{
    const lm_bundle_file *f = lm_bundle_find(base, file);
    const uint8_t *map;

    if (!f || from > f->bytes || bytes > f->bytes - from)
        return lm_fail(e, LM_EFORMAT, lm_bundle_path(base), NULL,
                       "it has no bytes %" PRIu64 " to %" PRIu64 " of '%s', which the delta needs",
                       from, from + bytes, file);
    map = lm_bundle_map(base, f);
    *out = map ? map + from : room;
    return map ? LM_OK : lm_bundle_pread(base, f, from, room, bytes, e);
}

void lmz_base_forget(const lm_bundle *base, const char *file, uint64_t from, size_t bytes)
{
    const lm_bundle_file *f = lm_bundle_find(base, file);

    if (f && lm_bundle_map(base, f))
        lm_bundle_forget(base, f, from, bytes);
}

/* ---- Reading ---- */

/* Length of the chain of the .lmz at `path`; 0 if it is whole or not an .lmz. */
static int chain_of(const char *path)
{
    uint8_t head[LMZ_HEADER + LMZ_BASE_NAME];
    lmz_header h;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : pread(fd, head, sizeof head, 0);

    if (fd >= 0)
        close(fd);
    if (n < LMZ_HEADER)
        return 0;
    size_t size = lmz_header_size(head);
    return size && size <= (size_t)n && lmz_get_header(head, size, &h) ? h.chain : 0;
}

/* The path of the base: as given, or as recorded, relative to the .lmz. */
static lm_code base_path(const char *path, const lmz_header *h, const lm_bundle_opts *o, char **out,
                         lm_err *e)
{
    const char *slash = path ? strrchr(path, '/') : NULL;

    if (o && o->base)
        return lm_strdup(out, o->base, e);
    if (slash && h->base_name.p[0] != '/')
        return lm_asprintf(out, e, "%.*s/%.*s", (int)(slash - path), path, (int)h->base_name.n,
                           h->base_name.p);
    return lm_asprintf(out, e, "%s%.*s", h->base_name.p[0] == '/' ? "" : "./", /* never "-" */
                       (int)h->base_name.n, h->base_name.p);
}

/* An .lmz from elsewhere may name anything: a pipe or a device is refused instead of waiting for
 * it. */
static lm_code check_path(const char *where, const char *base, lm_err *e)
{
    struct stat st;

    if (stat(base, &st))
        return lm_fail(e, LM_EUSAGE, where, "give its base",
                       "it is a delta against '%s', which does not exist", base);
    if (!S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode))
        return lm_fail(e, LM_EUSAGE, where, "give its base",
                       "it is a delta against '%s', which is neither file nor folder", base);
    return LM_OK;
}

static lm_code compare_digest(const char *where, const char *path, const lmz_header *h,
                              lm_bundle *base, lm_sink *sink, lm_err *e)
{
    char wanted[33], found[33];
    lm_code rc = lm_bundle_digest(base, found, sink, e);

    lm_hash128_hex(h->base_digest, wanted);
    if (!rc && strcmp(wanted, found))
        rc = lm_fail(e, LM_EUSAGE, where, "give the base from which it was made",
                     "it is a delta against content %s, '%s' is %s", wanted, path, found);
    return rc;
}

lm_code lmz_base_open(const char *path, const char *where, const lmz_header *h,
                      const lm_bundle_opts *o, lm_bundle **out, lm_err *e)
{
    lm_bundle_opts deeper = o ? *o : (lm_bundle_opts){ 0 };
    char *base = NULL;
    int chain;
    lm_code rc = base_path(path, h, o, &base, e);

    *out = NULL;
    deeper.base = NULL; /* the base given is that of this file only */
    if (!rc && o && o->base)
        rc = check_kept(base, e);
    rc = rc ? rc : check_path(where, base, e);
    if (!rc && (chain = chain_of(base)) >= h->chain)
        rc = lm_fail(e, LM_EFORMAT, where, "give the base from which it was made",
                     "it is step %d of a chain, and its base '%s' is step %d", h->chain, base,
                     chain);
    if (!rc)
        rc = lm_bundle_open(base, &deeper, out, e);
    if (!rc && !lm_bundle_random(*out))
        rc = lm_bundle_spool(*out, e);
    if (!rc)
        rc = compare_digest(where, base, h, *out, o ? o->sink : NULL, e);
    if (rc) {
        lm_bundle_close(*out);
        *out = NULL;
    }
    lm_free(base);
    return rc;
}
