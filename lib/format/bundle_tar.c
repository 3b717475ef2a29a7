/* SPDX-License-Identifier: Apache-2.0 */
/* bundle_tar.c -- the files of a tar: with random access in an uncompressed, mapped file, otherwise
 * member by member. */
#include <stdio.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/text.h"
#include "format/archive.h"
#include "format/bundle_impl.h"
#include "format/bundle_links.h"
#include "format/bundle_run.h"
#include "format/foreign.h"
#include "format/safetensors_table.h"

/* A walk over the members: the current file, and what is known of those before it. */
typedef struct {
    const char *name; /* NULL: the end */
    uint64_t at;      /* of its bytes in the map */
    uint64_t bytes;
    lm_bundle_run *run; /* NULL: a stream */
    lm_bundle_links *links;
    const lm_bundle_target *hard; /* of a link in a stream */
} walk;

static lm_code refuse_link(const lm_bundle *b, const char *name, lm_err *e)
{
    char show[LM_ST_SHOWN];
    return lm_fail(e, LM_EFORMAT, b->path, "make the archive again with tar -h",
                   "its member '%s' is a link or a device", lm_st_show(name, show));
}

/* A link in the folder of a run.  A run cannot be read as a stream, because its newest checkpoint
 * is known only after the last member. */
static lm_code take_link(const lm_bundle *b, const lm_ar *a, const char *name, lm_bundle_run *run,
                         lm_err *e)
{
    if (!lm_bundle_run_link(name, lm_ar_link(a)))
        return refuse_link(b, name, e);
    if (!run)
        return lm_fail(e, LM_EUSAGE, b->path,
                       "name the uncompressed tar as a file, or one checkpoint",
                       "holds a run, whose newest checkpoint cannot be found in a stream");
    return lm_bundle_run_note(run, name, lm_ar_link(a), e);
}

/* The plain name of a member; NULL: it is skipped, because it is hidden, a folder, in a subfolder,
 * or a link of a run.  Records files of checkpoints. */
static lm_code plain_name(lm_bundle *b, lm_ar *a, const char *member, walk *w, lm_err *e)
{
    const char *root = lm_ar_root(a);
    size_t n = strlen(root), len = strlen(member);

    w->name = NULL;
    if (len <= n && !strncmp(member, root, len) && member[len - 1] == '/')
        return LM_OK; /* the folder itself, or its parent */
    if (strncmp(member, root, n))
        return lm_fail(e, LM_EFORMAT, b->path, "make the archive again from one folder",
                       "its files lie in different folders");
    if (lm_ar_link(a))
        return take_link(b, a, member + n, w->run, e);
    len = strcspn(member + n, "/");
    if (w->run && lm_bundle_run_is_file(member + n))
        return lm_bundle_run_add(w->run, member + n, w->at, w->bytes, e);
    if (w->run && member[n + len] == '/' && !member[n + len + 1] &&
        lm_bundle_run_is_folder(member + n))
        return LM_OK; /* the folder's files follow */
    if (member[n + len] || member[n] == '.')
        return lm_bundle_pass(b, member + n, len, e);
    w->name = member + n;
    return LM_OK;
}

static bool is_file(const lm_ar *a, const char *member)
{
    return !lm_ar_link(a) && member[strlen(member) - 1] != '/';
}

/* False for a member that plain_name skips. */
static bool is_read(const lm_ar *a, const char *member)
{
    size_t n = strlen(lm_ar_root(a));
    const char *below;

    if (strncmp(member, lm_ar_root(a), n))
        return false;
    below = member + n;
    return (*below != '.' && !strchr(below, '/')) || lm_bundle_run_is_file(below);
}

/* The bytes of a member in the map: its own, or those of the member that it is a link to. */
static lm_code place_in_map(lm_bundle *b, lm_ar *a, const char *member, walk *w, lm_err *e)
{
    const lm_bundle_target *of;
    const uint8_t *data;

    if (!is_file(a, member) || (lm_ar_hard(a) && !is_read(a, member)))
        return LM_OK;
    if (lm_ar_hard(a)) {
        if (lm_bundle_links_find(w->links, b, member, lm_ar_hard(a), &of, e))
            return e->code;
        w->at = of->at;
        w->bytes = of->bytes;
        return LM_OK;
    }
    if (lm_ar_place(a, &data, e))
        return e->code;
    w->at = w->bytes ? (uint64_t)(data - b->map.data) : 0;
    return lm_bundle_links_add(w->links, member, w->at, w->bytes, true, e);
}

/* Records a member of a stream, and finds the bytes of a link. */
static lm_code place_in_stream(lm_bundle *b, lm_ar *a, const char *member, walk *w, lm_err *e)
{
    w->hard = NULL;
    if (!is_file(a, member) || (lm_ar_hard(a) && !w->name))
        return LM_OK;
    if (!lm_ar_hard(a))
        return w->name ? lm_bundle_links_add(w->links, member, 0, w->bytes, false, e)
                       : lm_bundle_links_pass(w->links, b, a, member,
                                              member + strlen(lm_ar_root(a)), w->bytes, e);
    if (lm_bundle_links_find(w->links, b, member, lm_ar_hard(a), &w->hard, e))
        return e->code;
    w->bytes = w->hard->bytes;
    return LM_OK;
}

static lm_code not_whole(const lm_bundle *b, lm_err *e)
{
    return lm_fail(e, LM_EFORMAT, b->path, "it is truncated: fetch or write it again",
                   "it has no end mark");
}

/* For a name such as x.gguf.gz: what x.gguf is, and the remedy; NULL: an unknown name. */
static const char *inner_kind(const char *path, char hint[160])
{
    static const char *const packed[] = { ".gz", ".zst", ".xz", ".bz2", ".lz4", ".lz", ".lzma" };
    const char *kind = NULL, *todo;
    char *inner = NULL;
    size_t n = strlen(path);

    for (size_t i = 0; !kind && i < sizeof packed / sizeof *packed; i++) {
        if (!lm_text_ends(path, packed[i]) || lm_strdup(&inner, path, NULL))
            continue;
        inner[n - strlen(packed[i])] = 0;
        if ((kind = lm_foreign_name(inner, &todo)))
            snprintf(hint, 160, "decompress it to %.60s first; %s", lm_path_base(inner), todo);
        lm_free(inner);
    }
    return kind;
}

/* An input that the decoder does not recognise as a tar is not a model. */
static lm_code no_model(const lm_bundle *b, lm_err *e)
{
    const char *kind, *todo;
    char hint[160];

    if (!strstr(e->what, "Unrecognized"))
        return e->code;
    *e = (lm_err){ 0 };
    kind = b->foreign;
    todo = b->remedy;
    if (b->map.data)
        kind = lm_foreign_bytes(b->map.data, b->map.size, &todo);
    if (!kind && lm_foreign_dataset(b->path)) {
        kind = "a token dataset";
        todo = "name the model first: train MODEL DATA, eval-model MODEL DATA";
    }
    if (kind)
        return lm_fail(e, LM_EUSAGE, b->path, todo, "is not a model: it is %s", kind);
    if ((kind = inner_kind(b->path, hint)))
        return lm_fail(e, LM_EUSAGE, b->path, hint, "is not a model: it is %s, compressed", kind);
    return lm_fail(e, LM_EUSAGE, b->path, lm_bundle_forms(b, "a folder", hint),
                   "is not a model: neither .safetensors nor tar nor .lmz");
}

static void want_all(lm_ar *a)
{
    lm_ar_want_folders(a);
    lm_ar_want_links(a);
    lm_ar_want_hard(a);
}

static lm_code next_member(lm_bundle *b, lm_ar *a, walk *w, lm_err *e)
{
    const char *member = NULL;
    lm_code rc;

    do {
        w->name = NULL;
        rc = lm_ar_next(a, &member, &w->bytes, e);
        if (!rc && member && w->run)
            rc = place_in_map(b, a, member, w, e);
        if (!rc && member)
            rc = plain_name(b, a, member, w, e);
        if (!rc && member && !w->run)
            rc = place_in_stream(b, a, member, w, e);
    } while (!rc && member && !w->name);
    return rc;
}

/* ---- Mapped ---- */

/* First bytes of compressed files, enough to distinguish them from a tar's first name. */
static bool looks_filtered(const uint8_t *p, size_t n)
{
    static const struct {
        uint8_t n, byte[6];
    } magic[] = {
        { 2, { 0x1f, 0x8b } },
        { 4, { 0x28, 0xb5, 0x2f, 0xfd } },
        { 6, { 0xfd, '7', 'z', 'X', 'Z', 0 } },
        { 3, { 'B', 'Z', 'h' } },
        { 4, { 0x04, 0x22, 0x4d, 0x18 } },
        { 4, { 'L', 'Z', 'I', 'P' } },
        { 2, { 0x1f, 0x9d } },
        { 3, { 0x5d, 0, 0 } },
    };

    if (n > 262 && !memcmp(p + 257, "ustar", 5))
        return false;
    for (size_t i = 0; i < sizeof magic / sizeof *magic; i++)
        if (n >= magic[i].n && !memcmp(p, magic[i].byte, magic[i].n))
            return true;
    return false;
}

lm_code lm_bundle_tar_map(lm_bundle *b, bool *plain, lm_err *e)
{
    const uint8_t *p = b->map.data;
    size_t n = b->map.size;
    lm_bundle_entry *x;
    lm_bundle_run run = { 0 };
    lm_bundle_links links = { .fd = -1 };
    walk w = { .run = &run, .links = &links };
    lm_ar *a = NULL;
    lm_code rc;

    *plain = !looks_filtered(p, n);
    if (!*plain)
        return LM_OK;
    rc = lm_ar_open_map(p, n, b->path, &a, e);
    if (!rc)
        want_all(a);
    if (!rc)
        rc = next_member(b, a, &w, e);
    if (rc && (!a || !lm_ar_root(a)))
        rc = no_model(b, e);
    for (; !rc && w.name; rc = next_member(b, a, &w, e)) {
        if ((rc = lm_bundle_add(b, w.name, w.bytes, &x, e)))
            break;
        x->at = w.at;
    }
    for (size_t i = 0; !rc && i < 512; i++)
        if (p[n - 512 + i])
            rc = not_whole(b, e);
    if (!rc)
        rc = lm_bundle_run_choose(&run, b, e);
    lm_bundle_links_fini(&links);
    lm_bundle_run_fini(&run);
    lm_ar_close(a);
    return rc;
}

/* ---- Forward ---- */

typedef struct {
    lm_ar *a;
    lm_bundle_links links;
    lm_bundle_target hard; /* the member that the current one is a link to; no name: none */
    uint64_t done;         /* bytes read of it */
} stream;

static lm_code tar_next(lm_bundle *b, const char **name, uint64_t *bytes, lm_err *e)
{
    stream *s = b->state;
    walk w = { .links = &s->links };
    bool zeros = false;
    lm_code rc = next_member(b, s->a, &w, e);

    *name = w.name;
    *bytes = w.bytes;
    s->hard = w.hard ? *w.hard : (lm_bundle_target){ .name = NULL };
    s->done = 0;
    if (rc && !lm_ar_root(s->a))
        rc = no_model(b, e);
    if (rc || *name)
        return rc;
    /* Under a filter the decoder has checked the end mark. */
    rc = lm_bundle_raw_drain(&b->raw, &zeros, e);
    return !rc && !zeros && !lm_ar_filtered(s->a) ? not_whole(b, e) : rc;
}

static lm_code tar_read(lm_bundle *b, void *dst, size_t cap, size_t *got, lm_err *e)
{
    stream *s = b->state;

    if (!s->hard.name)
        return lm_ar_read(s->a, dst, cap, got, e);
    if (lm_bundle_links_read(&s->links, &s->hard, s->done, dst, cap, got, e))
        return e->code;
    s->done += *got;
    return LM_OK;
}

static void tar_close(lm_bundle *b)
{
    stream *s = b->state;
    if (s) {
        lm_ar_close(s->a);
        lm_bundle_links_fini(&s->links);
    }
    lm_free(s);
    b->state = NULL;
}

lm_code lm_bundle_tar_stream(lm_bundle *b, lm_err *e)
{
    static const lm_bundle_ops ops = { tar_next, tar_read, NULL, tar_close };
    stream *s = NULL;

    b->kind = LM_BUNDLE_TAR;
    if (lm_alloc_n(&s, 1, sizeof *s, "a stream", e))
        return e->code;
    *s = (stream){ .links.fd = -1 };
    if (lm_ar_open(lm_bundle_raw_read, &b->raw, b->path, &s->a, e)) {
        lm_free(s);
        return no_model(b, e);
    }
    want_all(s->a);
    b->state = s;
    b->ops = &ops;
    return LM_OK;
}
