/* SPDX-License-Identifier: Apache-2.0 */
/* bundle.c -- the files of a model read from a folder, a file or a stream: one list of entries,
 * backed by a map for random access, or by a container's reader. */
#include "format/bundle.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/text.h"
#include "format/bundle_impl.h"
#include "format/folder.h"
#include "format/foreign.h"
#include "format/safetensors_table.h"

static const char name_model[] = "it is a token dataset: name the model first";

/* A compressed tar of a megabyte can hold millions of empty files: each costs memory, and time to
 * compare its name.  The largest models published have some hundred shards. */
enum { MOST_FILES = 16384 };

enum { LOOK = 16, LOOK_FOREIGN = 4096 }; /* first bytes of a stream, which identify its kind */

/* ---- Entries ---- */

lm_code lm_bundle_add(lm_bundle *b, const char *name, uint64_t bytes, lm_bundle_entry **out,
                      lm_err *e)
{
    char show[LM_ST_SHOWN];
    lm_bundle_entry *x = NULL;
    char *copy = NULL;
    lm_code rc;

    if (b->n >= MOST_FILES)
        return lm_fail(e, LM_EFORMAT, b->path, "give the folder of a model",
                       "it has more than %d files", MOST_FILES);
    if (!lm_name_ok(name))
        return lm_fail(e, LM_EFORMAT, b->path, NULL, "'%s' cannot be the name of a model's file",
                       lm_st_show(name, show));
    for (size_t i = 0; i < b->n; i++)
        if (!strcmp(b->entry[i]->f.name, name))
            return lm_fail(e, LM_EFORMAT, b->path, "make the archive again",
                           "it has the file '%s' twice", lm_st_show(name, show));
    rc = lm_grow(&b->entry, &b->cap, b->n + 1, sizeof(lm_bundle_entry *), "list of files", e);
    if (!rc)
        rc = lm_alloc_n(&x, 1, sizeof *x, "list of files", e);
    if (!rc && (rc = lm_strdup(&copy, name, e)))
        lm_free(x);
    if (rc)
        return rc;
    *x = (lm_bundle_entry){ .f = { copy, bytes }, .b = b, .map = { .fd = -1 }, .number = b->n };
    b->entry[b->n++] = *out = x;
    return LM_OK;
}

lm_code lm_bundle_pass(lm_bundle *b, const char *name, size_t n, lm_err *e)
{
    char *copy = NULL;
    lm_code rc;

    if (b->left_last && strlen(b->left_last) == n && !memcmp(b->left_last, name, n))
        return LM_OK;
    if ((rc = lm_asprintf(&copy, e, "%.*s", (int)n, name)))
        return rc;
    if (!b->left)
        rc = lm_strdup(&b->left, copy, e);
    else
        b->left_others++;
    lm_free(b->left_last);
    b->left_last = copy;
    return rc;
}

const char *lm_bundle_left_out(const lm_bundle *b, size_t *others)
{
    *others = b->left_others;
    return b->left;
}

static lm_bundle_entry *entry_of(const lm_bundle_file *f)
{
    return (lm_bundle_entry *)(uintptr_t)f;
}

const char *lm_bundle_where(const lm_bundle *b, const lm_bundle_file *f, char buf[256])
{
    size_t n = strlen(b->path);

    if (b->kind == LM_BUNDLE_FILE)
        snprintf(buf, 256, "%s", b->path);
    else if (b->dir)
        snprintf(buf, 256, "%s%s%s", b->dir, b->dir[strlen(b->dir) - 1] == '/' ? "" : "/", f->name);
    else
        snprintf(buf, 256, "%s%.120s: %.120s", n > 120 ? "..." : "",
                 b->path + (n > 120 ? n - 120 : 0), f->name);
    return buf;
}

const char *lm_bundle_forms(const lm_bundle *b, const char *folder, char out[160])
{
    const char *also = b ? b->o.also : NULL;

    snprintf(out, 160, "give %s, a .safetensors file, a tar%s an .lmz%s%s", folder,
             also ? "," : " or", also ? " or " : "", also ? also : "");
    return out;
}

/* ---- Opening ---- */

static lm_code open_folder(lm_bundle *b, lm_err *e)
{
    char **names = NULL;
    size_t n = 0;
    lm_code rc = lm_strdup(&b->dir, b->path, e);

    b->kind = LM_BUNDLE_FOLDER;
    b->random = true;
    if (!rc)
        rc = lm_dir_list(b->path, &names, &n, e);
    for (size_t i = 0; !rc && i < n; i++) {
        lm_bundle_entry *x;
        struct stat st;
        char *path = NULL;
        rc = lm_path_join(&path, b->path, names[i], e);
        if (!rc && names[i][0] != '.' && !stat(path, &st) && S_ISREG(st.st_mode))
            rc = lm_bundle_add(b, names[i], (uint64_t)st.st_size, &x, e);
        else if (!rc)
            rc = lm_bundle_pass(b, names[i], strlen(names[i]), e);
        lm_free(path);
    }
    lm_names_free(names, n);
    return rc;
}

/* The length of a header, then its '{', or only white space in the bytes at hand: no tar and no
 * filter begins so. */
static bool is_safetensors(const uint8_t *p, size_t n)
{
    uint64_t header = 0;
    size_t at = 8;

    for (size_t i = 0; n > 8 && i < 8; i++)
        header |= (uint64_t)p[i] << (8 * i);
    while (at < n && at < LOOK && memchr(" \t\n\r", p[at], 4))
        at++;
    return n > 8 && (at == n || at == LOOK || p[at] == '{') && header && header <= LM_ST_MAX_HEADER;
}

static lm_code open_lone(lm_bundle *b, lm_err *e)
{
    lm_bundle_entry *x;

    b->kind = LM_BUNDLE_FILE;
    b->random = true;
    return lm_bundle_add(b, b->std ? "model.safetensors" : lm_path_base(b->path), b->map.size, &x,
                         e);
}

/* From now on the file is read as a stream. */
static void unmap(lm_bundle *b)
{
    b->raw = (lm_bundle_raw){ .fd = b->map.fd, .own = true, .where = b->path };
    if (b->map.size)
        munmap((void *)(uintptr_t)b->map.data, b->map.size);
    b->map = (lm_map){ .fd = -1 };
}

/* A file: its content determines its kind, except for the name .safetensors. */
static lm_code open_file(lm_bundle *b, lm_err *e)
{
    bool plain = false;
    char forms[160];
    lm_code rc;

    if (lm_text_ends(b->path, ".safetensors") || is_safetensors(b->map.data, b->map.size))
        return open_lone(b, e);
    if (lm_text_ends(b->path, ".lmz") || lm_bundle_is_lmz(b->map.data, b->map.size)) {
        if (b->std) {
            unmap(b);
            return lm_bundle_lmz_stream(b, e);
        }
        lm_map_close(&b->map);
        return lm_bundle_lmz_open(b, e);
    }
    if (!b->map.size)
        return lm_fail(e, LM_EFORMAT, b->path, lm_bundle_forms(b, "a model folder", forms),
                       "it is empty");
    b->kind = LM_BUNDLE_TAR;
    rc = lm_bundle_tar_map(b, &plain, e);
    b->random = plain;
    if (rc || plain)
        return rc;
    unmap(b);
    return lm_bundle_tar_stream(b, e);
}

/* For the message in case that no reader recognises the stream. */
static void tell_foreign(lm_bundle *b, const uint8_t *p, size_t n)
{
    b->foreign = lm_foreign_bytes(p, n, &b->remedy);
    if (b->o.also && n >= 4 && !memcmp(p, "GGUF", 4))
        b->remedy = "give it as a file or on standard input";
}

static lm_code open_stream(lm_bundle *b, int fd, bool own, lm_err *e)
{
    const uint8_t *p;
    char forms[160];
    size_t n = 0;
    lm_code rc;

    b->raw = (lm_bundle_raw){ .fd = fd, .own = own, .where = b->path };
    if (isatty(fd))
        return lm_fail(e, LM_EUSAGE, b->path, "pipe a model into it", "is a terminal");
    fcntl(fd, F_SETPIPE_SZ, 1 << 20); /* a larger pipe buffer: fewer, longer reads */
    rc = lm_bundle_raw_look(&b->raw, LOOK, &p, &n, e);
    if (rc)
        return rc;
    if (!n)
        return lm_fail(e, LM_EFORMAT, b->path, lm_bundle_forms(b, "a model folder", forms),
                       "it is empty");
    if (lm_bundle_is_lmz(p, n))
        return lm_bundle_lmz_stream(b, e);
    if (is_safetensors(p, n))
        return lm_bundle_st_stream(b, e);
    if (lm_bundle_raw_look(&b->raw, LOOK_FOREIGN, &p, &n, e))
        return e->code;
    tell_foreign(b, p, n);
    return lm_bundle_tar_stream(b, e);
}

/* Standard input that is a file at its beginning is treated as that file. */
static lm_code open_stdin(lm_bundle *b, lm_err *e)
{
    struct stat st;
    int fd;

    if (fstat(STDIN_FILENO, &st) || !S_ISREG(st.st_mode) || !st.st_size ||
        lseek(STDIN_FILENO, 0, SEEK_CUR) != 0)
        return open_stream(b, STDIN_FILENO, false, e);
    if ((fd = fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 3)) < 0)
        return lm_fail(e, LM_EIO, b->path, NULL, "cannot read");
    lm_code rc = lm_map_fd(fd, b->path, &b->map, e);
    return rc ? rc : open_file(b, e);
}

static lm_code fail_absent(const lm_bundle *b, const char *path, lm_err *e)
{
    char forms[160];
    lm_bundle_forms(b, "a model folder", forms);
    return lm_fail(e, LM_EIO, path, lm_foreign_dataset(path) ? name_model : forms, "cannot open");
}

lm_code lm_bundle_there(const char *path, lm_err *e)
{
    struct stat st;
    return strcmp(path, "-") && stat(path, &st) ? fail_absent(NULL, path, e) : LM_OK;
}

static lm_code open_path(lm_bundle *b, const char *path, lm_err *e)
{
    struct stat st;

    if (!strcmp(path, "-"))
        return open_stdin(b, e);
    if (stat(path, &st))
        return fail_absent(b, path, e);
    if (S_ISDIR(st.st_mode))
        return open_folder(b, e);
    if (!S_ISREG(st.st_mode)) {
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        return fd < 0 ? lm_fail(e, LM_EIO, path, NULL, "cannot open") : open_stream(b, fd, true, e);
    }
    lm_code rc = lm_map_open(path, &b->map, e);
    if (rc) {
        b->map = (lm_map){ .fd = -1 };
        return rc;
    }
    return open_file(b, e);
}

lm_code lm_bundle_open(const char *path, const lm_bundle_opts *o, lm_bundle **out, lm_err *e)
{
    lm_bundle *b = NULL;
    lm_code rc = lm_alloc_n(&b, 1, sizeof *b, "model", e);

    *out = NULL;
    if (rc)
        return rc;
    b->map.fd = b->raw.fd = -1;
    pthread_mutex_init(&b->lock, NULL);
    if (o)
        b->o = *o;
    b->std = !strcmp(path, "-");
    rc = lm_strdup(&b->path, b->std ? "standard input" : path, e);
    if (!rc)
        rc = open_path(b, path, e);
    if (rc) {
        lm_bundle_close(b);
        return rc;
    }
    *out = b;
    return LM_OK;
}

lm_code lm_bundle_none(const char *path, lm_bundle **out, lm_err *e)
{
    lm_bundle *b = NULL;

    *out = NULL;
    if (lm_alloc_n(&b, 1, sizeof *b, "model", e))
        return e->code;
    b->kind = LM_BUNDLE_FILE;
    b->random = b->ended = true;
    b->raw.fd = -1;
    pthread_mutex_init(&b->lock, NULL);
    if (lm_strdup(&b->path, path, e)) {
        lm_bundle_close(b);
        return e->code;
    }
    *out = b;
    return LM_OK;
}

static void close_stream(lm_bundle *b)
{
    if (b->ops)
        b->ops->close(b);
    b->ops = NULL;
    if (b->raw.own && b->raw.fd >= 0)
        close(b->raw.fd);
    b->raw.fd = -1;
    lm_buf_fini(&b->raw.head);
}

void lm_bundle_close(lm_bundle *b)
{
    if (!b)
        return;
    close_stream(b);
    for (size_t i = 0; i < b->n; i++) {
        lm_map_close(&b->entry[i]->map);
        lm_free((char *)(uintptr_t)b->entry[i]->f.name);
        lm_free(b->entry[i]);
    }
    lm_free(b->entry);
    lm_map_close(&b->map);
    pthread_mutex_destroy(&b->lock);
    lm_free(b->left);
    lm_free(b->left_last);
    lm_free(b->dir);
    lm_free(b->path);
    lm_free(b);
}

lm_bundle_kind lm_bundle_kind_of(const lm_bundle *b)
{
    return b->kind;
}

const char *lm_bundle_path(const lm_bundle *b)
{
    return b->path;
}

const char *lm_bundle_dir(const lm_bundle *b)
{
    return b->dir;
}

bool lm_bundle_random(const lm_bundle *b)
{
    return b->random;
}

size_t lm_bundle_count(const lm_bundle *b)
{
    return b->n;
}

const lm_bundle_file *lm_bundle_at(const lm_bundle *b, size_t i)
{
    return &b->entry[i]->f;
}

const lm_bundle_file *lm_bundle_find(const lm_bundle *b, const char *name)
{
    for (size_t i = 0; i < b->n; i++)
        if (!strcmp(b->entry[i]->f.name, name))
            return b->entry[i]->gone ? NULL : &b->entry[i]->f;
    return NULL;
}

/* ---- Random access ---- */

/* The map that holds x; a file of a folder is mapped at its first use. */
static lm_code map_of(const lm_bundle *b, lm_bundle_entry *x, const lm_map **map, lm_err *e)
{
    lm_code rc = LM_OK;

    *map = &b->map;
    if (!b->dir)
        return LM_OK;
    *map = &x->map;
    pthread_mutex_lock((pthread_mutex_t *)(uintptr_t)&b->lock);
    if (!x->map.data) {
        char *path = NULL;
        rc = lm_path_join(&path, b->dir, x->f.name, e);
        if (!rc && !(rc = lm_map_open(path, &x->map, e)) && x->map.size != x->f.bytes) {
            rc = lm_fail(e, LM_EIO, path, "wait until it is complete",
                         "it has changed its size while it was read");
            lm_map_close(&x->map);
        }
        lm_free(path);
    }
    pthread_mutex_unlock((pthread_mutex_t *)(uintptr_t)&b->lock);
    return rc;
}

static lm_code read_at(int fd, uint64_t at, void *dst, size_t bytes, const char *where, lm_err *e)
{
    uint8_t *to = dst;

    while (bytes) {
        ssize_t n = pread(fd, to, bytes, (off_t)at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return lm_fail(e, LM_EIO, where, NULL, "cannot read");
        if (n == 0)
            return lm_fail(e, LM_EFORMAT, where, NULL, "it was truncated while it was read");
        to += n;
        at += (uint64_t)n;
        bytes -= (size_t)n;
    }
    return LM_OK;
}

lm_code lm_bundle_pread(const lm_bundle *b, const lm_bundle_file *f, uint64_t from, void *dst,
                        size_t bytes, lm_err *e)
{
    lm_bundle_entry *x = entry_of(f);
    const lm_map *map;
    char where[256];

    lm_bundle_where(b, f, where);
    if (!b->random || x->gone || from < x->from)
        return lm_fail(e, LM_EUSAGE, where, "give the model as a file",
                       "its bytes were already read and are gone");
    if (from > f->bytes || bytes > f->bytes - from)
        return lm_fail(e, LM_EUSAGE, where, NULL,
                       "%zu byte%s from %" PRIu64 " on requested from %" PRIu64, bytes,
                       lm_plural(bytes), from, f->bytes);
    if (b->ops && b->ops->pread)
        return b->ops->pread(b, x, from, dst, bytes, e);
    lm_code rc = map_of(b, x, &map, e);
    return rc ? rc : read_at(map->fd, x->at + from, dst, bytes, where, e);
}

const uint8_t *lm_bundle_map(const lm_bundle *b, const lm_bundle_file *f)
{
    lm_bundle_entry *x = entry_of(f);
    const lm_map *map;
    lm_err ignored = { 0 };

    if (!b->random || x->gone || (b->ops && b->ops->pread) || map_of(b, x, &map, &ignored))
        return NULL;
    return map->data + x->at;
}

void lm_bundle_forget(const lm_bundle *b, const lm_bundle_file *f, uint64_t from, uint64_t bytes)
{
    const uint8_t *p = lm_bundle_map(b, f);
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), lo, hi;

    if (!p || from > f->bytes || bytes > f->bytes - from)
        return;
    lo = ((uintptr_t)(p + from) + page - 1) / page * page; /* whole pages inside the range */
    hi = (uintptr_t)(p + from + bytes) / page * page;
    if (hi > lo)
        madvise((void *)lo, hi - lo, MADV_DONTNEED);
}

static lm_code st_pread(void *ctx, uint64_t from, void *dst, size_t bytes, lm_err *e)
{
    lm_bundle_entry *x = ctx;
    return lm_bundle_pread(x->b, &x->f, from, dst, bytes, e);
}

lm_code lm_bundle_st(lm_bundle *b, const char *name, lm_st **out, lm_err *e)
{
    const lm_bundle_file *f = lm_bundle_find(b, name);
    const lm_map *map;
    char where[256], show[LM_ST_SHOWN];

    *out = NULL;
    if (!f || !b->random)
        return lm_fail(e, LM_EFORMAT, b->path, NULL, "it has no %s", lm_st_show(name, show));
    if (b->dir && map_of(b, entry_of(f), &map, e)) /* for its message */
        return e->code;
    lm_st_io io = { st_pread, entry_of(f), f->bytes, lm_bundle_map(b, f) };
    return lm_st_open_on(&io, lm_bundle_where(b, f, where), out, e);
}

/* ---- Forward ---- */

lm_code lm_bundle_next(lm_bundle *b, const lm_bundle_file **f, lm_err *e)
{
    const char *name = NULL;
    uint64_t bytes = 0;
    lm_code rc;

    *f = NULL;
    if (b->random) {
        b->cur = b->next < b->n ? b->entry[b->next++] : NULL;
        b->cur_done = b->cur ? b->cur->from : 0;
        *f = b->cur ? &b->cur->f : NULL;
        return LM_OK;
    }
    if (b->ended)
        return LM_OK;
    if (b->cur)
        b->cur->gone = true;
    b->cur = NULL;
    rc = b->ops->next(b, &name, &bytes, e);
    if (rc)
        return rc;
    b->ended = !name;
    if (!name)
        return LM_OK;
    b->cur_done = 0;
    rc = lm_bundle_add(b, name, bytes, &b->cur, e);
    if (!rc)
        *f = &b->cur->f;
    return rc;
}

lm_code lm_bundle_read(void *bundle, void *dst, size_t cap, size_t *got, lm_err *e)
{
    lm_bundle *b = bundle;
    uint64_t left = b->cur ? b->cur->f.bytes - b->cur_done : 0;
    lm_code rc;

    *got = 0;
    if (!left || !cap)
        return LM_OK;
    size_t n = left < cap ? (size_t)left : cap;
    if (b->random) {
        rc = lm_bundle_pread(b, &b->cur->f, b->cur_done, dst, n, e);
        *got = rc ? 0 : n;
    } else {
        rc = b->ops->read(b, dst, n, got, e);
    }
    b->cur_done += *got;
    if (!rc && !*got) {
        char where[256];
        b->cut = true;
        rc = lm_fail(e, LM_EFORMAT, lm_bundle_where(b, &b->cur->f, where),
                     "it is truncated: fetch or write it again", "it ends %" PRIu64 " byte%s early",
                     left, lm_plural(left));
    }
    return rc;
}

lm_code lm_bundle_load(lm_bundle *b, const char *name, size_t limit, lm_buf *out, lm_err *e)
{
    const lm_bundle_file *f = lm_bundle_find(b, name);
    char where[256], show[LM_ST_SHOWN];
    lm_code rc = LM_OK;

    if (!f || (!b->random && (f != &b->cur->f || b->cur_done)))
        return lm_fail(e, LM_EFORMAT, b->path, NULL, "it %s %s", f ? "no longer has" : "has no",
                       lm_st_show(name, show));
    if (f->bytes > limit)
        return lm_fail(e, LM_EFORMAT, lm_bundle_where(b, f, where), NULL,
                       "is larger than the limit of %zu bytes", limit);
    size_t left = (size_t)f->bytes;
    /* In steps, so that a false size in a stream does not allocate memory. */
    for (size_t got; !rc && left; left -= got) {
        size_t step = left < 1u << 20 ? left : 1u << 20;
        got = 0;
        rc = lm_buf_room(out, step, e);
        if (!rc && b->random) {
            rc = lm_bundle_pread(b, f, f->bytes - left, out->data + out->len, step, e);
            got = step;
        } else if (!rc) {
            rc = lm_bundle_read(b, out->data + out->len, step, &got, e);
        }
        out->len += rc ? 0 : got;
    }
    if (!rc)
        rc = lm_buf_room(out, 1, e);
    if (out->data)
        out->data[out->len] = 0;
    return rc;
}
