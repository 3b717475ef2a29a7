/* SPDX-License-Identifier: Apache-2.0 */
/* archive.c -- see archive.h.  libarchive decodes and encodes; names and sizes are checked here. */
#include "format/archive.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/text.h"
#include "format/gunzip.h"
#include "format/libarchive.h"
#include "format/safetensors_table.h"

enum { BLOCK = 1 << 20 }; /* bytes of one read or write */

bool lm_ar_name_safe(const char *name)
{
    size_t len = strlen(name), part = 0;

    if (!len || len > 4096)
        return false;
    for (size_t i = 0; i <= len; i++) {
        unsigned char c = (unsigned char)name[i];
        if (c && c != '/') {
            if (c < 0x20 || c == 0x7f || c == '\\')
                return false;
            continue;
        }
        size_t n = i - part;
        if (!n || (n == 1 && name[part] == '.') || (n == 2 && !memcmp(name + part, "..", 2)))
            return false;
        part = i + 1;
    }
    return true;
}

/* ---- Reading ---- */

struct lm_ar {
    struct archive *a;
    char *where, *root;
    const char *name; /* of the current member: the decoder's */
    lm_read_fn read;
    void *ctx;
    uint8_t *block;
    lm_gunzip *gz;      /* for streams: compares gzip's checksums, which the decoder does not */
    const uint8_t *map; /* NULL: a stream */
    size_t map_bytes;
    uint64_t size, left;        /* of the current member */
    bool folders, links, hards; /* are returned too */
    const char *link, *hard;    /* of the current member: the decoder's */
    lm_err err;                 /* of the read callback */
};

static lm_code raw_block(void *ctx, const void **p, size_t *n, lm_err *e)
{
    lm_ar *r = ctx;

    *p = r->block;
    *n = 0;
    return r->read(r->ctx, r->block, BLOCK, n, e);
}

static la_ssize_t read_block(struct archive *a, void *ctx, const void **out)
{
    lm_ar *r = ctx;
    size_t got = 0;

    if (!lm_gunzip_block(r->gz, out, &got, &r->err))
        return (la_ssize_t)got;
    lm_la.set_error(a, r->err.sys ? r->err.sys : EIO, "read failed");
    return -1;
}

static lm_code decoder_failed(const lm_ar *a, lm_err *e)
{
    const char *why = lm_la.error_string(a->a);

    if (a->err.code) {
        if (!e->code)
            *e = a->err;
        return a->err.code;
    }
    return lm_fail(e, LM_EFORMAT, a->where, "check that it is a complete tar archive",
                   "the decoder reports '%s'", why ? why : "no reason given");
}

static lm_code new_reader(const char *where, lm_ar **out, lm_err *e)
{
    lm_ar *a = NULL;
    lm_code rc = lm_alloc_n(&a, 1, sizeof *a, "archive", e);

    *out = a;
    if (!rc)
        rc = lm_strdup(&a->where, where, e);
    if (!rc)
        rc = lm_reader_new(where, &a->a, e);
    if (!rc)
        lm_la.read_support_format_tar(a->a);
    return rc;
}

static lm_code opened(lm_ar *a, lm_code rc, lm_ar **out)
{
    *out = rc ? NULL : a;
    if (rc)
        lm_ar_close(a);
    return rc;
}

lm_code lm_ar_open(lm_read_fn read, void *ctx, const char *where, lm_ar **out, lm_err *e)
{
    lm_ar *a;
    lm_code rc = new_reader(where, &a, e);

    if (!rc)
        rc = lm_alloc_n(&a->block, BLOCK, 1, "a buffer", e);
    if (!rc)
        rc = lm_gunzip_new(raw_block, a, where, false, &a->gz, e);
    if (!rc) {
        a->read = read;
        a->ctx = ctx;
        lm_reader_filters(a->a);
        if (lm_la.read_open(a->a, a, NULL, read_block, NULL) != ARCHIVE_OK)
            rc = decoder_failed(a, e);
    }
    return opened(a, rc, out);
}

lm_code lm_ar_open_map(const uint8_t *data, size_t bytes, const char *where, lm_ar **out, lm_err *e)
{
    lm_ar *a;
    lm_code rc = new_reader(where, &a, e);

    if (!rc) {
        a->map = data;
        a->map_bytes = bytes;
        if (lm_la.read_open_memory(a->a, data, bytes) != ARCHIVE_OK)
            rc = decoder_failed(a, e);
    }
    return opened(a, rc, out);
}

void lm_ar_close(lm_ar *a)
{
    if (!a)
        return;
    lm_reader_free(a->a);
    lm_gunzip_free(a->gz);
    lm_free(a->block);
    lm_free(a->root);
    lm_free(a->where);
    lm_free(a);
}

/* "./m/x" -> "m/x". */
static const char *without_dot(const char *path)
{
    while (path && path[0] == '.' && path[1] == '/')
        path += 2;
    return path;
}

/* The member that macOS adds before each file and folder with attributes. */
static bool is_apple_double(const char *path)
{
    const char *slash = path ? strrchr(path, '/') : NULL;
    const char *base = slash ? slash + 1 : path;

    return base && base[0] == '.' && base[1] == '_';
}

/* The first entry names the folder of the others: "m/", "./m/" or "m/config.json".  "./m/x" does
 * not, because the list of files below "." begins so too. */
static lm_code find_root(lm_ar *a, const char *path, bool folder, lm_err *e)
{
    const char *plain = without_dot(path);
    const char *slash = plain && (plain == path || folder) ? strchr(plain, '/') : NULL;
    size_t n = slash ? (size_t)(slash - plain) + 1 : 0;

    lm_code rc = lm_alloc_n(&a->root, n + 1, 1, "archive", e);
    if (!rc && n)
        memcpy(a->root, plain, n);
    return rc;
}

static lm_code check_kind(const lm_ar *a, const char *path, struct archive_entry *entry, lm_err *e)
{
    char show[LM_ST_SHOWN];

    lm_st_show(path, show);
    if (lm_la.entry_filetype(entry) != AE_IFREG || lm_la.entry_hardlink(entry))
        return lm_fail(e, LM_EFORMAT, a->where, "make the archive again with tar -h",
                       "its member '%s' is a link or a device", show);
    if (!lm_la.entry_size_is_set(entry) || lm_la.entry_size(entry) < 0)
        return lm_fail(e, LM_EFORMAT, a->where, NULL, "its member '%s' has no size", show);
    if (lm_la.entry_sparse_count(entry) >
        0) /* a hole of a terabyte takes no space in the archive */
        return lm_fail(e, LM_EFORMAT, a->where, "make the archive again without sparse files",
                       "its member '%s' is sparse", show);
    return LM_OK;
}

/* The checksum of gzip follows the end of the archive. */
static lm_code finish_gzip(lm_ar *a, lm_err *e)
{
    const void *p;
    size_t n = 1;
    lm_code rc = LM_OK;

    while (!rc && n && a->gz && lm_gunzip_is_gzip(a->gz))
        rc = lm_gunzip_block(a->gz, &p, &n, e);
    return rc;
}

lm_code lm_ar_next(lm_ar *a, const char **name, uint64_t *size, lm_err *e)
{
    struct archive_entry *entry;
    const char *path;
    char show[LM_ST_SHOWN];
    lm_code rc = LM_OK;

    *name = a->link = a->hard = NULL;
    for (;;) {
        int r = lm_la.read_next_header(a->a, &entry);
        if (r == ARCHIVE_EOF)
            return finish_gzip(a, e);
        if (r != ARCHIVE_OK && r != ARCHIVE_WARN)
            return decoder_failed(a, e);
        bool folder = lm_la.entry_filetype(entry) == AE_IFDIR;
        path = lm_la.entry_pathname(entry);
        if (!folder && is_apple_double(path))
            continue;
        if (!a->root && (rc = find_root(a, path, folder, e)))
            return rc;
        if (!folder)
            break;
        const char *below = without_dot(path);
        size_t n = below && strcmp(below, ".") ? strlen(below) : 0;
        if (a->folders && n && below[n - 1] == '/') {
            a->size = a->left = 0;
            if (size)
                *size = 0;
            *name = a->name = below;
            return LM_OK;
        }
    }
    path = without_dot(path);
    if (!path || !lm_ar_name_safe(path))
        return lm_fail(e, LM_EFORMAT, a->where, "make the archive again with relative names",
                       "its member '%s' has an unsafe or unreadable name",
                       lm_st_show(path ? path : "?", show));
    if (a->links && lm_la.entry_filetype(entry) == AE_IFLNK && !lm_la.entry_hardlink(entry))
        a->link = lm_la.entry_symlink(entry);
    if (a->hards && (!lm_la.entry_size_is_set(entry) || lm_la.entry_size(entry) <= 0))
        a->hard = without_dot(lm_la.entry_hardlink(entry));
    if (!a->link && !a->hard && (rc = check_kind(a, path, entry, e)))
        return rc;
    if (a->link || a->hard)
        lm_la.entry_set_size(entry, 0);
    a->size = a->left = (uint64_t)lm_la.entry_size(entry);
    if (size)
        *size = a->left;
    *name = a->name = path;
    return LM_OK;
}

void lm_ar_want_folders(lm_ar *a)
{
    a->folders = true;
}

void lm_ar_want_links(lm_ar *a)
{
    a->links = true;
}

const char *lm_ar_link(const lm_ar *a)
{
    return a->link;
}

void lm_ar_want_hard(lm_ar *a)
{
    a->hards = true;
}

const char *lm_ar_hard(const lm_ar *a)
{
    return a->hard;
}

const char *lm_ar_root(const lm_ar *a)
{
    return a->root;
}

bool lm_ar_filtered(const lm_ar *a)
{
    return lm_la.filter_count(a->a) > 1 || (a->gz && lm_gunzip_is_gzip(a->gz));
}

/* The decoder returns pointers into the mapped archive: one piece is the whole member. */
lm_code lm_ar_place(lm_ar *a, const uint8_t **data, lm_err *e)
{
    const void *p = a->map;
    char show[LM_ST_SHOWN];
    size_t n = 0;
    la_int64_t at = 0;
    int r = a->size ? lm_la.read_data_block(a->a, &p, &n, &at) : ARCHIVE_OK;
    uintptr_t from = (uintptr_t)p - (uintptr_t)a->map;

    if (r != ARCHIVE_OK && r != ARCHIVE_WARN)
        return decoder_failed(a, e);
    if (a->size > n && from <= a->map_bytes && n == a->map_bytes - from)
        return lm_fail(e, LM_EFORMAT, a->where, "it is truncated: fetch or write it again",
                       "its member '%s' has %zu byte%s of %" PRIu64, lm_st_show(a->name, show), n,
                       lm_plural(n), a->size);
    if (at || n != a->size || from > a->map_bytes || n > a->map_bytes - from)
        return lm_fail(e, LM_EBUG, a->where, NULL, "a member is not in one piece");
    *data = p;
    return LM_OK;
}

lm_code lm_ar_read(void *ar, void *dst, size_t cap, size_t *got, lm_err *e)
{
    lm_ar *a = ar;
    la_ssize_t n = cap ? lm_la.read_data(a->a, dst, cap) : 0;

    *got = 0;
    if (n < 0)
        return decoder_failed(a, e);
    *got = (size_t)n;
    a->left -= (uint64_t)n < a->left ? (uint64_t)n : a->left;
    return LM_OK;
}

/* ---- Writing ---- */

struct lm_tar {
    struct archive *a;
    char *where;
    int fd;
    uint64_t left; /* bytes of the current member still to come */
    lm_err err;    /* of the write callback */
    bool dropped;  /* nothing may be written after a failure */
};

static la_ssize_t write_block(struct archive *a, void *ctx, const void *data, size_t n)
{
    lm_tar *t = ctx;

    if (!t->dropped && !lm_write_all(t->fd, data, n, t->where, &t->err))
        return (la_ssize_t)n;
    lm_la.set_error(a, t->err.sys ? t->err.sys : EIO, "write failed");
    return -1;
}

static lm_code encoder_failed(const lm_tar *t, lm_err *e)
{
    const char *why = lm_la.error_string(t->a);

    if (t->err.code) {
        if (!e->code)
            *e = t->err;
        return t->err.code;
    }
    return lm_fail(e, LM_EIO, t->where, NULL, "cannot write a tar stream ('%s')",
                   why ? why : "no reason given");
}

static const struct {
    const char *end, *filter; /* libarchive's name */
} tar_names[] = {
    { ".tar", NULL },     { ".tar.gz", "gzip" }, { ".tgz", "gzip" }, { ".tar.zst", "zstd" },
    { ".tzst", "zstd" },  { ".tar.xz", "xz" },   { ".txz", "xz" },   { ".tar.bz2", "bzip2" },
    { ".tbz2", "bzip2" }, { ".tar.lz4", "lz4" },
};

bool lm_tar_name(const char *path, const char **filter)
{
    size_t n = strlen(path);

    for (size_t i = 0; i < sizeof tar_names / sizeof *tar_names; i++) {
        size_t k = strlen(tar_names[i].end);
        *filter = tar_names[i].filter;
        if (n > k && !strcmp(path + n - k, tar_names[i].end))
            return true;
    }
    *filter = NULL;
    return false;
}

static lm_code set_filter(lm_tar *t, const char *filter, int level, lm_err *e)
{
    char number[16];

    if (!filter)
        return LM_OK;
    if (lm_la.write_add_filter_by_name(t->a, filter) != ARCHIVE_OK)
        return lm_fail(e, LM_EUSAGE, t->where, "choose another ending",
                       "libarchive cannot write %s here", filter);
    lm_la.write_set_filter_option(t->a, "gzip", "timestamp", NULL); /* no clock in the bytes */
    snprintf(number, sizeof number, "%d", level);
    if (level && lm_la.write_set_filter_option(t->a, filter, "compression-level", number))
        return lm_fail(e, LM_EUSAGE, t->where, NULL, "%s has no level %d", filter, level);
    return LM_OK;
}

lm_code lm_tar_open(int fd, const char *where, const char *filter, int level, lm_tar **out,
                    lm_err *e)
{
    lm_tar *t = NULL;
    lm_code rc = lm_alloc_n(&t, 1, sizeof *t, "tar stream", e);

    *out = NULL;
    if (rc)
        return rc;
    t->fd = fd;
    rc = lm_strdup(&t->where, where, e);
    if (!rc)
        rc = lm_writer_new(where, &t->a, e);
    if (!rc)
        rc = set_filter(t, filter, level, e);
    if (!rc && (lm_la.write_set_format_pax_restricted(t->a) != ARCHIVE_OK ||
                lm_la.write_set_bytes_per_block(t->a, BLOCK) != ARCHIVE_OK ||
                lm_la.write_set_bytes_in_last_block(t->a, filter ? 1 : 512) != ARCHIVE_OK ||
                lm_la.write_open(t->a, t, NULL, write_block, NULL) != ARCHIVE_OK))
        rc = encoder_failed(t, e);
    if (rc) {
        lm_tar_drop(t);
        return rc;
    }
    *out = t;
    return LM_OK;
}

static lm_code check_complete(const lm_tar *t, lm_err *e)
{
    return t->left ? lm_fail(e, LM_EBUG, t->where, NULL,
                             "a member of the archive is short of %" PRIu64 " byte%s", t->left,
                             lm_plural(t->left))
                   : LM_OK;
}

lm_code lm_tar_member(lm_tar *t, const char *name, uint64_t bytes, lm_err *e)
{
    struct archive_entry *entry;
    lm_code rc = check_complete(t, e);

    if (!rc && (!lm_ar_name_safe(name) || bytes > INT64_MAX))
        rc = lm_fail(e, LM_EUSAGE, t->where, NULL, "'%s' cannot be a member of an archive", name);
    if (rc)
        return rc;
    if (!(entry = lm_la.entry_new()))
        return lm_fail(e, LM_ELIMIT, t->where, NULL, "no memory for an entry");
    lm_la.entry_set_pathname(entry, name);
    lm_la.entry_set_filetype(entry, AE_IFREG);
    lm_la.entry_set_perm(entry, 0644);
    lm_la.entry_set_size(entry, (int64_t)bytes);
    lm_la.entry_set_mtime(entry, 0, 0);
    if (lm_la.write_header(t->a, entry) != ARCHIVE_OK)
        rc = encoder_failed(t, e);
    else
        t->left = bytes;
    lm_la.entry_free(entry);
    return rc;
}

lm_code lm_tar_write(void *tar, const void *data, size_t bytes, lm_err *e)
{
    lm_tar *t = tar;
    const char *p = data;

    if (bytes > t->left)
        return lm_fail(e, LM_EBUG, t->where, NULL,
                       "%zu byte%s for a member that has room for %" PRIu64, bytes,
                       lm_plural(bytes), t->left);
    while (bytes) {
        la_ssize_t n = lm_la.write_data(t->a, p, bytes);
        if (n <= 0)
            return encoder_failed(t, e);
        p += n;
        bytes -= (size_t)n;
        t->left -= (uint64_t)n;
    }
    return LM_OK;
}

lm_code lm_tar_close(lm_tar *t, lm_err *e)
{
    lm_code rc = check_complete(t, e);

    if (!rc && lm_la.write_close(t->a) != ARCHIVE_OK)
        rc = encoder_failed(t, e);
    lm_tar_drop(t);
    return rc;
}

void lm_tar_drop(lm_tar *t)
{
    if (!t)
        return;
    t->dropped = true; /* write_free would still write the end */
    if (t->a)
        lm_la.write_free(t->a);
    lm_free(t->where);
    lm_free(t);
}
