/* SPDX-License-Identifier: Apache-2.0 */
/* kv_passkey.h -- tasks of retrieval (kv_retrieve.h): records "The key of amber is 325." between
 * pieces of other text, and a question for one of them.
 *
 * The text is that of share/recipes/kv-text, on which the recipe's model is trained; models that
 * were trained on much text answer it as well. */
#ifndef LM_COMPRESS_KV_PASSKEY_H
#define LM_COMPRESS_KV_PASSKEY_H

#include "compress/kv_retrieve.h"
#include "text/tokenizer.h"

enum { LM_KV_PASSKEY_NAMES = 64, LM_KV_PASSKEY_VALUES = 64 };

typedef struct {
    const int64_t *length; /* [lengths]: tokens before the answer */
    int64_t lengths;
    int64_t depths;  /* places of the record asked for, evenly from the beginning to the end of the
                        other text; 1: in its middle */
    int64_t repeats; /* tasks of each length and depth */
    int64_t records; /* in a task: the one asked for and others with other names at random places; 1
                        to LM_KV_PASSKEY_NAMES */
    uint64_t seed;
} lm_kv_passkey_opts;

typedef struct {
    /* depth by depth, lengths within, repeats within; the cell is that of [depths, lengths] */
    lm_kv_task *task;
    int64_t n;
    int64_t longest; /* tokens of the longest task */
    uint32_t *ids;
} lm_kv_passkeys; /* zero-initialise */

/* Make the tasks.  filler [n]: ids of any text, from which pieces are taken.  Fails: LM_EUSAGE when
 * the shortest length has no room for the records, or the filler is shorter than the longest. */
lm_code lm_kv_passkeys_make(const lm_tokenizer *t, const uint32_t *filler, int64_t n,
                            const lm_kv_passkey_opts *o, lm_kv_passkeys *out, lm_err *e);
void lm_kv_passkeys_fini(lm_kv_passkeys *p);

#endif
