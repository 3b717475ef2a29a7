/* SPDX-License-Identifier: Apache-2.0 */
/* lmz_open.c -- opening an .lmz by its index: footer, index, header, and then its base. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zstd.h>

#include "base/hash.h"
#include "base/text.h"
#include "format/lmz_impl.h"

lm_code lmz_new(const char *where, const lm_bundle_opts *o, lm_lmz **out, lm_err *e)
{
    lm_lmz *z = NULL;
    lm_code rc = lm_alloc_n(&z, 1, sizeof *z, "an .lmz", e);

    *out = NULL;
    if (rc)
        return rc;
    z->fd = -1;
    z->par = o ? o->par : NULL;
    z->n_desks = lm_par_threads(z->par) + 1;
    pthread_mutex_init(&z->lock, NULL);
    pthread_cond_init(&z->free_desk, NULL);
    rc = lm_strdup(&z->where, where, e);
    rc = rc ? rc : lm_alloc_n(&z->desks, (size_t)z->n_desks, sizeof *z->desks, "decoders", e);
    if (rc)
        lm_lmz_free(z);
    else
        *out = z;
    return rc;
}

void lm_lmz_free(lm_lmz *z)
{
    if (!z)
        return;
    lmz_stream_free(z->stream);
    for (int i = 0; z->desks && i < z->n_desks; i++)
        lmz_desk_fini(&z->desks[i]);
    lm_free(z->desks);
    pthread_cond_destroy(&z->free_desk);
    pthread_mutex_destroy(&z->lock);
    lm_bundle_close(z->base);
    lmz_table_fini(&z->table);
    lm_buf_fini(&z->head);
    if (z->fd >= 0)
        close(z->fd);
    lm_free(z->where);
    lm_free(z);
}

lm_code lmz_fail_at(const lm_lmz *z, const char *file, const lm_lmz_part *p, uint64_t chunk,
                    lm_code code, const char *what, lm_err *e)
{
    char show[LMZ_SHOWN];

    return lm_fail(e, code, lmz_show(show, z->where, file, p, chunk),
                   code == LM_EFORMAT ? LMZ_DAMAGED : NULL, "%s", what);
}

lm_code lmz_fail_in(const lm_lmz *z, const char *file, const lm_lmz_part *p, uint64_t chunk,
                    const lm_err *why, lm_err *e)
{
    char show[LMZ_SHOWN];

    lmz_show(show, z->where, file, p, chunk);
    if (why->where[0]) /* the base is shown separately */
        return lm_fail(e, why->code, show, why->todo, "%s: %s", why->where, why->what);
    return lm_fail(e, why->code, show, why->todo[0] ? why->todo : LMZ_DAMAGED, "%s", why->what);
}

lm_code lmz_open_fd(lm_lmz *z, const char *path, lm_err *e)
{
    struct stat st;

    z->fd = open(path, O_RDONLY | O_CLOEXEC);
    if (z->fd < 0 || fstat(z->fd, &st))
        return lm_fail(e, LM_EIO, path, NULL, "cannot open");
    if (!S_ISREG(st.st_mode))
        return lm_fail(e, LM_EUSAGE, path, "read it from standard input",
                       "it is not a regular file, so its index cannot be read");
    z->size = (uint64_t)st.st_size;
    return LM_OK;
}

lm_code lmz_pread_all(const lm_lmz *z, uint64_t at, void *dst, size_t bytes, lm_err *e)
{
    uint8_t *to = dst;

    while (bytes) {
        ssize_t n = pread(z->fd, to, bytes, (off_t)at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return lm_fail(e, LM_EIO, z->where, NULL, "cannot read");
        if (!n)
            return lm_fail(e, LM_EFORMAT, z->where, "it is truncated: fetch or write it again",
                           "it ends %zu byte%s too early", bytes, lm_plural(bytes));
        to += n;
        at += (uint64_t)n;
        bytes -= (size_t)n;
    }
    return LM_OK;
}

lm_code lmz_keep_header(lm_lmz *z, const uint8_t *p, size_t n, lm_err *e)
{
    lm_code rc = lm_buf_add(&z->head, p, n, e);

    if (rc)
        return rc;
    if (!lmz_get_header((const uint8_t *)z->head.data, n, &z->header))
        return lm_fail(e, LM_EFORMAT, z->where, LMZ_DAMAGED, "its header is damaged");
    z->info.delta = z->header.delta;
    z->info.chain = z->header.chain;
    if (z->header.delta) {
        char *name;

        rc = z->table.arena ? LM_OK : lm_arena_new(&z->table.arena, 4096, e);
        rc = rc ? rc
                : lm_arena_strdup(z->table.arena, &name, z->header.base_name.p,
                                  z->header.base_name.n, e);
        if (rc)
            return rc;
        z->info.base_name = name;
        lm_hash128_hex(z->header.base_digest, z->info.base_digest);
    }
    return LM_OK;
}

lm_code lmz_check_version(const char *where, const uint8_t *p, lm_err *e)
{
    int version = lmz_header_version(p);

    if (!version)
        return lm_fail(e, LM_EFORMAT, where, "check that it is an .lmz file",
                       "it does not begin like an .lmz");
    if (version > LMZ_VERSION)
        return lm_fail(e, LM_EFORMAT, where, "a newer compress-ckpt may read it",
                       "it is in version %d of the format, this reads up to version %d", version,
                       LMZ_VERSION);
    return LM_OK;
}

static lm_code read_header(lm_lmz *z, lm_err *e)
{
    uint8_t p[LMZ_HEADER + LMZ_BASE_NAME];
    size_t n = 0;
    lm_code rc;

    if (z->size < LMZ_HEADER)
        return lm_fail(e, LM_EFORMAT, z->where, "check that it is an .lmz file",
                       "it has %" PRIu64 " byte%s, an .lmz has at least %d", z->size,
                       lm_plural(z->size), LMZ_HEADER + LMZ_INDEX_RECORD + LMZ_FOOTER);
    if ((rc = lmz_pread_all(z, 0, p, LMZ_HEADER, e)))
        return rc;
    if ((rc = lmz_check_version(z->where, p, e)))
        return rc;
    n = lmz_header_size(p);
    if (!n || n > z->size)
        return lm_fail(e, LM_EFORMAT, z->where, LMZ_DAMAGED, "its header is damaged");
    rc = lmz_pread_all(z, LMZ_HEADER, p + LMZ_HEADER, n - LMZ_HEADER, e);
    return rc ? rc : lmz_keep_header(z, p, n, e);
}

static lm_code read_footer(lm_lmz *z, lm_err *e)
{
    uint8_t p[LMZ_FOOTER];
    lmz_footer *f = &z->footer;
    uint64_t least = z->head.len + LMZ_INDEX_RECORD + LMZ_FOOTER;
    lm_code rc = LM_OK;

    if (z->size >= least)
        rc = lmz_pread_all(z, z->size - LMZ_FOOTER, p, LMZ_FOOTER, e);
    if (rc)
        return rc;
    if (z->size < least || !lmz_get_footer(p, LMZ_FOOTER, f))
        return lm_fail(e, LM_EFORMAT, z->where, LMZ_DAMAGED,
                       "its footer is missing or damaged: it is truncated, or bytes follow it");
    if (f->bytes != z->size || f->index_bytes < LMZ_INDEX_RECORD ||
        f->index_bytes > z->size - LMZ_FOOTER - z->head.len ||
        f->index_at != z->size - LMZ_FOOTER - f->index_bytes)
        return lm_fail(e, LM_EFORMAT, z->where, LMZ_DAMAGED,
                       "its footer is that of a file of %" PRIu64 " bytes, it has %" PRIu64,
                       f->bytes, z->size);
    z->info.raw = f->raw;
    z->info.coded = z->size;
    lm_hash128_hex(f->content, z->info.digest);
    return LM_OK;
}

/* Check the index's coded bytes at `coded` and decode them to the table. */
static lm_code unpack_index(lm_lmz *z, const lmz_index_rec *r, const uint8_t *coded, lm_err *e)
{
    uint8_t *raw = NULL, content[16];
    lm_code rc;

    if (lm_hash64(coded, (size_t)r->coded, 0) != r->coded_check)
        return lm_fail(e, LM_EFORMAT, z->where, LMZ_DAMAGED, "its index is damaged");
    if (r->raw > z->footer.index_at ||
        r->raw > LMZ_INDEX_MOST) /* an entry is never longer than its record */
        return lm_fail(e, LM_EFORMAT, z->where, LMZ_DAMAGED,
                       "its index claims %" PRIu64 " byte%s, more than is possible", r->raw,
                       lm_plural(r->raw));
    rc = lm_realloc_n(&raw, (size_t)r->raw, 1, "the index of an .lmz", e);
    if (rc)
        return rc;
    if (ZSTD_decompress(raw, (size_t)r->raw, coded, (size_t)r->coded) != r->raw)
        rc = lm_fail(e, LM_EFORMAT, z->where, LMZ_DAMAGED, "its index does not decompress");
    rc = rc ? rc
            : lmz_table_from_index(&z->table, raw, (size_t)r->raw, z->head.len, z->footer.index_at,
                                   z->where, e);
    lm_free(raw);
    rc = rc ? rc : lmz_table_digest(&z->table, content, e);
    if (!rc && (z->table.raw != z->footer.raw || z->table.files != z->footer.files ||
                memcmp(content, z->footer.content, 16)))
        rc = lm_fail(e, LM_EFORMAT, z->where, LMZ_DAMAGED, "its index and its footer disagree");
    return rc;
}

static lm_code read_index(lm_lmz *z, lm_err *e)
{
    uint8_t *p = NULL;
    size_t n = (size_t)z->footer.index_bytes;
    lmz_index_rec r = { 0 };
    lm_code rc;

    if (n > LMZ_INDEX_MOST)
        return lm_fail(e, LM_EFORMAT, z->where, LMZ_DAMAGED, "its index claims %zu byte%s", n,
                       lm_plural(n));
    rc = lm_realloc_n(&p, n, 1, "the index of an .lmz", e);

    rc = rc ? rc : lmz_pread_all(z, z->footer.index_at, p, n, e);
    if (!rc && (!lmz_get_index(p, LMZ_INDEX_RECORD, &r) || r.coded != n - LMZ_INDEX_RECORD))
        rc = lm_fail(e, LM_EFORMAT, z->where, LMZ_DAMAGED, "its index is damaged");
    rc = rc ? rc : unpack_index(z, &r, p + LMZ_INDEX_RECORD, e);
    lm_free(p);
    return rc;
}

lm_code lm_lmz_open_index(const char *path, const lm_bundle_opts *o, lm_lmz **out, lm_err *e)
{
    lm_lmz *z = NULL;
    lm_code rc = lmz_new(path, o, &z, e);

    *out = NULL;
    rc = rc ? rc : lmz_open_fd(z, path, e);
    rc = rc ? rc : read_header(z, e);
    rc = rc ? rc : read_footer(z, e);
    rc = rc ? rc : read_index(z, e);
    if (rc)
        lm_lmz_free(z);
    else
        *out = z;
    return rc;
}

lm_code lm_lmz_open(const char *path, const lm_bundle_opts *o, lm_lmz **out, lm_err *e)
{
    lm_code rc = lm_lmz_open_index(path, o, out, e);

    if (!rc && (*out)->header.delta)
        rc = lmz_base_open(path, path, &(*out)->header, o, &(*out)->base, e);
    if (rc) {
        lm_lmz_free(*out);
        *out = NULL;
    }
    return rc;
}

/* ---- Contents ---- */

const lm_lmz_info *lm_lmz_about(const lm_lmz *z)
{
    return &z->info;
}

size_t lm_lmz_files(const lm_lmz *z)
{
    return z->table.files;
}

const lm_bundle_file *lm_lmz_file(const lm_lmz *z, size_t i)
{
    return z->table.file[i].pub;
}

size_t lm_lmz_parts(const lm_lmz *z)
{
    return z->table.parts;
}

const lm_lmz_part *lm_lmz_part_at(const lm_lmz *z, size_t i)
{
    return &z->table.part[i].pub;
}
