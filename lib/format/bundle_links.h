/* SPDX-License-Identifier: Apache-2.0 */
/* bundle_links.h -- the members of a tar that later hard links name; private to lib/format.
 *
 * tar stores a file that it meets once more as a hard link: in `tar -ch RUN`, each file of the newest
 * checkpoint stands under the first of its names, and its other names are links.  A link has the
 * bytes of the member that it names, which must stand before it in the same archive; nothing outside
 * of the archive is ever opened.
 *
 * In a mapped tar these are places.  In a stream the bytes have passed: those of files in
 * checkpoints of a run are copied to an unlinked file as they pass (not its states, for which a run
 * has no other names), and links to other members fail. */
#ifndef LM_FORMAT_BUNDLE_LINKS_H
#define LM_FORMAT_BUNDLE_LINKS_H

#include "format/archive.h"
#include "format/bundle_impl.h"

typedef struct {
    char *name; /* in the archive */
    uint64_t hash;
    uint64_t at, bytes; /* in the map, or in the file of copies */
    bool has_bytes;     /* false: a member of a stream that was not copied */
} lm_bundle_target;

/* Zero-initialise, with fd -1. */
typedef struct {
    lm_bundle_target *v;
    size_t n, cap, asked;
    int fd; /* of the copies; -1: none yet */
    uint64_t end;
} lm_bundle_links;

/* Record a member; and the current member `name` of a stream, copied if a link may need it.
 * `below`: its name without the common folder. */
lm_code lm_bundle_links_add(lm_bundle_links *l, const char *name, uint64_t at, uint64_t bytes,
                            bool has_bytes, lm_err *e);
lm_code lm_bundle_links_pass(lm_bundle_links *l, const lm_bundle *b, lm_ar *a, const char *name,
                             const char *below, uint64_t bytes, lm_err *e);
/* The member that the link `name` is to.  Fails: LM_EFORMAT if none of that name stands before it;
 * LM_EUSAGE if its bytes have passed. */
lm_code lm_bundle_links_find(lm_bundle_links *l, const lm_bundle *b, const char *name,
                             const char *target, const lm_bundle_target **out, lm_err *e);
/* Bytes of a copied member from `from` on, at most `cap`; *got 0 at its end. */
lm_code lm_bundle_links_read(const lm_bundle_links *l, const lm_bundle_target *t, uint64_t from,
                             void *dst, size_t cap, size_t *got, lm_err *e);
void lm_bundle_links_fini(lm_bundle_links *l);

#endif
