/* SPDX-License-Identifier: Apache-2.0 */
/* trie.h -- a set of byte strings with ids, for all strings that a text begins with: a double-array
 * trie (Aoe, 1989) whose child of a node is one load and one comparison away.
 *
 * Cell n holds a node's base and the node's parent; its child for byte b is cell base ^ b, if this
 * cell names n as its parent. */
#ifndef LM_TEXT_TRIE_H
#define LM_TEXT_TRIE_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

enum { LM_TRIE_LONGEST = 4096 }; /* bytes of a string: bounds the time of a look-up */
#define LM_TRIE_NONE UINT32_MAX
#define LM_TRIE_ROOT 0u

typedef struct {
    struct {
        uint32_t base, parent, id; /* id: LM_TRIE_NONE if no string ends here */
    } * cell;
    size_t n; /* a multiple of 256; base < n for every cell */
} lm_trie;    /* zero-initialise */

typedef struct {
    const char *text; /* borrowed */
    uint32_t len, id;
} lm_trie_string;

/* Build from v[0..n), which is sorted here; empty strings are left out, and of equal strings the
 * one with the highest id is kept.  Fails: LM_EFORMAT for a string longer than LM_TRIE_LONGEST. */
lm_code lm_trie_build(lm_trie *t, lm_trie_string *v, size_t n, const char *where, lm_err *e);
void lm_trie_fini(lm_trie *t);

/* The child of `node` for byte b, or LM_TRIE_NONE. */
static inline uint32_t lm_trie_step(const lm_trie *t, uint32_t node, uint8_t b)
{
    uint32_t child = t->cell[node].base ^ b;
    return t->cell[child].parent == node ? child : LM_TRIE_NONE;
}

#endif
