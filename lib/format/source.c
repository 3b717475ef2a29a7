/* SPDX-License-Identifier: Apache-2.0 */
/* source.c -- see source.h.
 *
 * Two libarchive readers are stacked: `outer` reads the file through its own callback (which also
 * counts and hashes), and for members of archives `inner` reads the member, so that a .jsonl.zst
 * inside a .tar is decoded as well.  Each reads through a layer of gunzip.h.  Sparse members are
 * refused: a hole of a terabyte takes no space in the file.
 *
 * Damage is a failure.  With skip_bad it ends the member (lm_source_cut), and reading continues
 * with the next member that can be found: in gzip behind the damage, in an archive the next one
 * when the damage is inside a member, otherwise in the next operand. */
#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/hash.h"
#include "base/mem.h"
#include "base/stream.h"
#include "format/source_impl.h"

/* ---- members ---- */

static lm_code outer_block(lm_source *s, const void **p, size_t *n, lm_err *e)
{
    la_int64_t at;
    *n = 0;
    for (;;) {
        int r = lm_la.read_data_block(s->outer, p, n, &at);
        if (r == ARCHIVE_EOF) {
            *n = 0;
            return LM_OK;
        }
        if (r != ARCHIVE_OK && r != ARCHIVE_WARN)
            return lm_source_decoder_failed(s, s->outer, e);
        if (*n == 0)
            continue;
        if (at != s->member_at)
            return lm_fail(e, LM_EFORMAT, s->name.data, "store it without holes",
                           "a sparse member (bytes expected at %lld, found at %lld)",
                           (long long)s->member_at, (long long)at);
        s->member_at += (int64_t)*n;
        return LM_OK;
    }
}

static lm_code member_block(void *ctx, const void **p, size_t *n, lm_err *e)
{
    return outer_block(ctx, p, n, e);
}

static la_ssize_t read_member(struct archive *a, void *ctx, const void **out)
{
    lm_source *s = ctx;
    lm_err e = { 0 };
    size_t n;
    if (lm_gunzip_block(s->inner_gz, out, &n, &e))
        return lm_source_callback_failed(s, a, &e);
    s->inner_given += n;
    return (la_ssize_t)n;
}

/* No bytes may follow the end of a compressed file, because some decoders treat a damaged header of
 * the next part as the end. */
static lm_code check_end(lm_source *s, struct archive *a, lm_gunzip *gz, uint64_t given, lm_err *e)
{
    const void *p;
    size_t n = 0;
    int64_t used = lm_la.filter_bytes(a, -1);
    lm_code rc = LM_OK;
    if (lm_la.format(a) != ARCHIVE_FORMAT_RAW || lm_la.filter_count(a) <= 1)
        return LM_OK;
    if (gz)
        rc = lm_gunzip_block(gz, &p, &n, e);
    if (rc || (given == (uint64_t)used && !n))
        return rc;
    return lm_fail(e, LM_EFORMAT, s->name.data, "fetch or compress it again",
                   "damaged: the compressed data cannot be decoded behind byte %lld",
                   (long long)used);
}

static lm_code name_member(lm_source *s, struct archive_entry *entry, lm_err *e)
{
    const char *member = lm_la.entry_pathname(entry);
    if (!member)
        member = lm_la.entry_pathname_utf8(entry);
    s->name.len = 0;
    lm_code rc = lm_buf_addf(&s->name, e, "%s:%s", lm_path_shown(s->files.path[s->at]),
                             member ? member : "?");
    for (size_t i = 0; !rc && i < s->name.len; i++)
        if ((unsigned char)s->name.data[i] < 0x20 || s->name.data[i] == 0x7f)
            s->name.data[i] = '?'; /* the name appears in messages */
    return rc;
}

/* A file whose name, but not its content, is that of a compressed file was truncated or exchanged:
 * read as text, its bytes would become documents. */
static lm_code check_name(struct archive *a, const lm_gunzip *gz, const char *name, lm_err *e)
{
    static const char *const packed[] = { "zst", "zstd", "gz",  "xz",  "bz2", "lz4", "lzma", "lz",
                                          "Z",   "tar",  "tgz", "txz", "zip", "7z",  "rar" };
    const char *dot = strrchr(lm_path_base(name), '.');
    bool bare = lm_la.filter_count(a) <= 1 && lm_la.format(a) == ARCHIVE_FORMAT_RAW;
    if ((gz && lm_gunzip_is_gzip(gz)) || (!bare && lm_la.filter_bytes(a, -1) > 0))
        return LM_OK;
    for (size_t i = 0; dot && i < sizeof packed / sizeof *packed; i++)
        if (strcmp(dot + 1, packed[i]) == 0)
            return lm_fail(e, LM_EFORMAT, name, "fetch it again, or rename it if it is plain text",
                           "its name ends in .%s, but its content is of another kind", packed[i]);
    return LM_OK;
}

static void close_inner(lm_source *s)
{
    lm_reader_free(s->inner);
    s->inner = NULL;
    lm_gunzip_free(s->inner_gz);
    s->inner_gz = NULL;
}

/* Start a second reader on the current member of outer. *got is false when it is empty. */
static lm_code open_inner(lm_source *s, bool *got, lm_err *e)
{
    struct archive_entry *entry;
    *got = false;
    s->inner_given = 0;
    lm_code rc = lm_gunzip_new(member_block, s, s->name.data, false, &s->inner_gz, e);
    if (rc)
        return rc;
    if (lm_source_reader(s->name.data, &s->inner, e))
        return e->code;
    lm_la.read_set_read_callback(s->inner, read_member);
    lm_la.read_set_callback_data(s->inner, s);
    int r = lm_la.read_open1(s->inner);
    if (r == ARCHIVE_OK)
        r = lm_la.read_next_header(s->inner, &entry);
    if (r != ARCHIVE_EOF && r != ARCHIVE_OK && r != ARCHIVE_WARN)
        return lm_source_decoder_failed(s, s->inner, e);
    *got = r != ARCHIVE_EOF;
    return check_name(s->inner, s->inner_gz, s->name.data, e);
}

/* The only member of a file that is not an archive. */
static lm_code begin_plain(lm_source *s, lm_err *e)
{
    s->name.len = 0;
    s->in_member = true;
    lm_code rc = lm_buf_addf(&s->name, e, "%s%s", lm_path_shown(s->files.path[s->at]),
                             s->resumed ? " (behind damage)" : "");
    return rc || s->resumed ? rc : check_name(s->outer, s->gz, s->name.data, e);
}

/* The next member of the current operand. */
static lm_code next_member(lm_source *s, bool *got, lm_err *e)
{
    struct archive_entry *entry;
    *got = false;
    for (;;) {
        close_inner(s);
        s->in_member = false;
        int r = lm_la.read_next_header(s->outer, &entry);
        if (r == ARCHIVE_EOF)
            return lm_la.filter_bytes(s->outer, -1) || s->resumed
                       ? LM_OK
                       : check_name(s->outer, s->gz, lm_path_shown(s->files.path[s->at]), e);
        if (r == ARCHIVE_RETRY)
            continue;
        if (r != ARCHIVE_OK && r != ARCHIVE_WARN)
            return lm_source_decoder_failed(s, s->outer, e);
        s->member_at = 0;
        s->is_archive = lm_la.format(s->outer) != ARCHIVE_FORMAT_RAW;
        if (!s->is_archive) {
            *got = true;
            return begin_plain(s, e);
        }
        if (lm_la.entry_filetype(entry) != AE_IFREG || lm_la.entry_hardlink(entry))
            continue;
        lm_code rc = name_member(s, entry, e);
        s->in_member = true;
        if (!rc && lm_la.entry_is_data_encrypted(entry))
            rc = lm_fail(e, LM_EFORMAT, s->name.data, "decrypt it first",
                         "it is encrypted and needs a passphrase");
        if (!rc)
            rc = open_inner(s, got, e);
        if (rc || *got)
            return rc;
    }
}

/* A gzip file that is not an archive may have intact parts behind the damage: a new reader
 * continues there. */
static lm_code resume(lm_source *s, bool *more, lm_err *e)
{
    lm_err why = { 0 };
    *more = s->gz && lm_gunzip_resume(s->gz, &why);
    if (*more)
        lm_source_note_bad(s, LM_EFORMAT, &why);
    *more &= !s->is_archive;
    if (!*more)
        return LM_OK;
    lm_reader_free(s->outer);
    s->resumed = true;
    return lm_source_new_outer(s, e);
}

/* After damage: skip the rest of the operand, or of the member if only that is damaged. */
static void give_up(lm_source *s)
{
    if (s->inner) {
        close_inner(s);
        return;
    }
    lm_reader_free(s->outer);
    s->outer = NULL;
    lm_gunzip_free(s->gz);
    s->gz = NULL;
}

lm_code lm_source_next(lm_source *s, bool *got, lm_err *e)
{
    lm_code rc = LM_OK;
    bool more;
    *got = s->cut = false;
    while (!rc && !*got) {
        if (!s->outer) {
            if (s->fd >= 0 && (rc = lm_source_close_outer(s, e))) /* no more data */
                break;
            if (s->at + 1 >= (int)s->files.n)
                return LM_OK;
            s->at++;
            rc = lm_source_open_outer(s, e);
        }
        if (!rc)
            rc = next_member(s, got, e);
        if (!rc && !*got && !(rc = resume(s, &more, e)) && !more)
            rc = lm_source_close_outer(s, e);
        if (lm_source_note_bad(s, rc, e)) {
            rc = LM_OK;
            *got = false;
            if (s->outer)
                give_up(s);
        }
    }
    return rc;
}

static lm_code inner_block(lm_source *s, const void **p, size_t *n, lm_err *e)
{
    la_int64_t at;
    int r;
    do
        r = lm_la.read_data_block(s->inner, p, n, &at);
    while ((r == ARCHIVE_OK || r == ARCHIVE_WARN) && *n == 0);
    if (r == ARCHIVE_EOF) {
        *n = 0;
        return check_end(s, s->inner, s->inner_gz, s->inner_given, e);
    }
    return r == ARCHIVE_OK || r == ARCHIVE_WARN ? LM_OK : lm_source_decoder_failed(s, s->inner, e);
}

lm_code lm_source_block(lm_source *s, const char **p, size_t *n, lm_err *e)
{
    const void *data = NULL;
    *n = 0;
    *p = NULL;
    if (!s->in_member)
        return LM_OK;
    lm_code rc = s->inner ? inner_block(s, &data, n, e) : outer_block(s, &data, n, e);
    if (!rc && !*n && !s->inner) {
        s->cut = s->gz && lm_gunzip_resume(s->gz, NULL);
        rc = s->cut ? LM_OK : check_end(s, s->outer, s->gz, s->given, e);
    }
    if (lm_source_note_bad(s, rc, e)) {
        rc = LM_OK;
        *n = 0;
        s->cut = true;
        give_up(s);
    }
    if (*n == 0)
        s->in_member = false;
    *p = data;
    return rc;
}

bool lm_source_cut(const lm_source *s)
{
    return s->cut;
}

bool lm_source_resumed(const lm_source *s)
{
    return s->resumed;
}

bool lm_source_pass(lm_source *s, lm_err *e)
{
    return lm_source_note_bad(s, LM_EFORMAT, e);
}

int lm_source_file(const lm_source *s)
{
    return s->at;
}

int64_t lm_source_bad(const lm_source *s, lm_err *first)
{
    *first = s->first_bad;
    return s->bad;
}

/* ---- life ---- */

/* Check that `path` exists and is readable, and add its size to the total. */
static lm_code check_path(const char *path, uint64_t *total, bool *unknown, lm_err *e)
{
    struct stat st;
    bool std_in = strcmp(path, "-") == 0;
    if (std_in ? fstat(STDIN_FILENO, &st) : stat(path, &st))
        return lm_fail(e, LM_EIO, lm_path_shown(path), "check the path", "cannot open");
    if (S_ISDIR(st.st_mode)) /* as standard input */
        return lm_fail(e, LM_EUSAGE, lm_path_shown(path), "name the folder", "it is a folder");
    if (!std_in && access(path, R_OK))
        return lm_fail(e, LM_EIO, path, "check its permissions", "cannot open");
    if (S_ISREG(st.st_mode))
        *total += (uint64_t)st.st_size;
    else
        *unknown = true;
    return LM_OK;
}

lm_code lm_source_there(const char *const *paths, int n, lm_err *e)
{
    lm_input_files files;
    uint64_t total = 0;
    bool unknown = false;
    lm_code rc = lm_input_files_find(paths, n, &files, e);
    for (size_t i = 0; !rc && i < files.n; i++)
        rc = check_path(files.path[i], &total, &unknown, e);
    lm_input_files_fini(&files);
    return rc;
}

static lm_code check_files(lm_source *s, lm_err *e)
{
    bool unknown = false;
    int standard = 0;
    lm_code rc = LM_OK;
    for (size_t i = 0; !rc && i < s->files.n; i++) {
        rc = check_path(s->files.path[i], &s->total, &unknown, e);
        standard += strcmp(s->files.path[i], "-") == 0;
    }
    if (!rc && standard > 1)
        rc = lm_stream_twice("-", "-", e);
    if (unknown)
        s->total = 0;
    return rc;
}

lm_code lm_source_open(const char *const *paths, int n, bool skip_bad, size_t most, lm_source **out,
                       lm_err *e)
{
    lm_source *s;
    lm_code rc = lm_alloc_n(&s, 1, sizeof *s, "an input", e);
    if (rc)
        return rc;
    s->at = s->fd = -1;
    s->skip_bad = skip_bad;
    s->most = most;
    s->n_operands = n;
    rc = lm_input_files_find(paths, n, &s->files, e);
    if (!rc)
        rc = lm_alloc_n(&s->digests, s->files.n, sizeof *s->digests, "digests", e);
    if (!rc)
        rc = lm_alloc_n(&s->block, LM_SOURCE_BLOCK, 1, "a block of input", e);
    if (!rc)
        rc = check_files(s, e);
    if (!rc && !(s->hash = XXH3_createState()))
        rc = lm_fail(e, LM_ELIMIT, "input", NULL, "out of memory for a hash state");
    if (rc) {
        lm_source_close(s);
        return rc;
    }
    *out = s;
    return LM_OK;
}

void lm_source_close(lm_source *s)
{
    if (!s)
        return;
    close_inner(s);
    lm_reader_free(s->outer);
    lm_gunzip_free(s->gz);
    if (s->fd > STDIN_FILENO)
        close(s->fd);
    lm_input_files_fini(&s->files);
    XXH3_freeState(s->hash);
    lm_free(s->digests);
    lm_free(s->block);
    lm_buf_fini(&s->name);
    lm_free(s);
}

const char *lm_source_name(const lm_source *s)
{
    return s->name.data ? s->name.data : "";
}

int lm_source_operand(const lm_source *s)
{
    return s->at < 0 ? 0 : s->files.operand[s->at];
}

const lm_input_files *lm_source_files(const lm_source *s)
{
    return &s->files;
}

uint64_t lm_source_bytes(const lm_source *s)
{
    return atomic_load_explicit(&s->bytes, memory_order_relaxed);
}

uint64_t lm_source_total(const lm_source *s)
{
    return s->total;
}

uint64_t lm_source_digest(const lm_source *s, int operand)
{
    lm_hash128 all;
    size_t n = 0, last = 0;
    lm_hash128_init(&all);
    for (size_t i = 0; i < s->files.n; i++)
        if (s->files.operand[i] == operand) {
            lm_hash128_add(&all, &s->digests[i], sizeof s->digests[i]);
            last = i;
            n++;
        }
    return n == 1 ? s->digests[last] : n ? lm_hash128_end64(&all) : 0;
}
