/* SPDX-License-Identifier: Apache-2.0 */
/* bundle_links.c -- see bundle_links.h. */
#include "format/bundle_links.h"

#include <string.h>
#include <unistd.h>

#include "base/hash.h"
#include "base/mem.h"
#include "format/bundle_run.h"
#include "format/folder.h"
#include "format/safetensors_table.h"

/* Each link is a search through all members. */
enum { MOST_MEMBERS = 65536, MOST_LINKS = 16384, BLOCK = 1 << 20 };

lm_code lm_bundle_links_add(lm_bundle_links *l, const char *name, uint64_t at, uint64_t bytes,
                            bool has_bytes, lm_err *e)
{
    lm_bundle_target t = {
        .hash = lm_hash_str(name), .at = at, .bytes = bytes, .has_bytes = has_bytes
    };
    if (l->n >= MOST_MEMBERS) /* links to later ones fail */
        return LM_OK;
    if (lm_grow(&l->v, &l->cap, l->n + 1, sizeof *l->v, "members of a tar", e) ||
        lm_strdup(&t.name, name, e))
        return e->code;
    l->v[l->n++] = t;
    return LM_OK;
}

/* True for a file of a checkpoint that the run has by another name, too. */
static bool has_names(const char *below)
{
    const char *slash = strchr(below, '/');
    bool step = lm_bundle_run_is_file(below) || !strncmp(below, "latest/", 7) ||
                !strncmp(below, "best/", 5);
    return step && slash[1] != '.' && lm_name_ok(slash + 1) && strncmp(slash + 1, "optimizer", 9) &&
           strcmp(slash + 1, "state.json");
}

static lm_code copy(lm_bundle_links *l, lm_ar *a, uint64_t bytes, const char *dir, lm_err *e)
{
    uint8_t *block = NULL;
    size_t got = 1;
    lm_code rc = lm_bundle_spool_room(l->fd, bytes, dir, e);

    rc = rc ? rc : lm_alloc_n(&block, BLOCK, 1, "a buffer", e);
    while (!rc && got) {
        rc = lm_ar_read(a, block, BLOCK, &got, e);
        rc = rc ? rc : lm_write_all(l->fd, block, got, dir, e);
        l->end += got;
    }
    lm_free(block);
    return rc;
}

lm_code lm_bundle_links_pass(lm_bundle_links *l, const lm_bundle *b, lm_ar *a, const char *name,
                             const char *below, uint64_t bytes, lm_err *e)
{
    const char *dir = b->o.tmpdir ? b->o.tmpdir : "/var/tmp";
    bool copied = has_names(below);

    if (lm_bundle_links_add(l, name, l->end, bytes, copied, e) || !copied ||
        (l->fd < 0 && lm_bundle_spool_open(dir, &l->fd, e)))
        return e->code;
    return copy(l, a, bytes, dir, e);
}

lm_code lm_bundle_links_find(lm_bundle_links *l, const lm_bundle *b, const char *name,
                             const char *target, const lm_bundle_target **out, lm_err *e)
{
    char show[LM_ST_SHOWN], of[LM_ST_SHOWN];
    uint64_t hash = lm_hash_str(target);

    *out = NULL;
    if (++l->asked > MOST_LINKS)
        return lm_fail(e, LM_EFORMAT, b->path, "make an archive of the model alone",
                       "it has more than %d links", MOST_LINKS);
    for (size_t i = 0; !*out && i < l->n; i++)
        if (l->v[i].hash == hash && !strcmp(l->v[i].name, target))
            *out = &l->v[i];
    if (!*out)
        return lm_fail(e, LM_EFORMAT, b->path, "make the archive again with both files",
                       "its member '%s' is a link to '%s', which is not before it",
                       lm_st_show(name, show), lm_st_show(target, of));
    if (!(*out)->has_bytes)
        return lm_fail(e, LM_EUSAGE, b->path,
                       "name the uncompressed tar as a file, or store both files whole",
                       "its member '%s' is a link to '%s', whose bytes have passed in the stream",
                       lm_st_show(name, show), lm_st_show(target, of));
    return LM_OK;
}

lm_code lm_bundle_links_read(const lm_bundle_links *l, const lm_bundle_target *t, uint64_t from,
                             void *dst, size_t cap, size_t *got, lm_err *e)
{
    uint64_t left = t->bytes - from;
    ssize_t n = pread(l->fd, dst, left < cap ? (size_t)left : cap, (off_t)(t->at + from));

    *got = n > 0 ? (size_t)n : 0;
    return n < 0 ? lm_fail(e, LM_EIO, t->name, NULL, "cannot read its copy") : LM_OK;
}

void lm_bundle_links_fini(lm_bundle_links *l)
{
    for (size_t i = 0; i < l->n; i++)
        lm_free(l->v[i].name);
    lm_free(l->v);
    if (l->fd >= 0)
        close(l->fd);
    *l = (lm_bundle_links){ .fd = -1 };
}
