/* SPDX-License-Identifier: Apache-2.0 */
/* gguf_keys.h -- keys of an architecture in GGUF, "llama.context_length", one by one.  Private to lib/convert. */
#ifndef LM_CONVERT_GGUF_KEYS_H
#define LM_CONVERT_GGUF_KEYS_H

#include "convert/gguf_meta.h"

enum { LM_GGUF_KEY = 96 };

/* "llama.context_length"; returns buf. */
const char *lm_gguf_key_of(char buf[LM_GGUF_KEY], const char *arch, const char *rest);
/* True if the architecture has this key in GGUF. */
bool lm_gguf_has_key(const lm_arch *a, const char *gguf);
/* Fails with LM_EUSAGE: GGUF's architecture has no `what`. */
lm_code lm_gguf_no_words(const lm_import *m, const char *what, lm_err *e);

/* ---- Reading ---- */

typedef struct {
    const lm_gguf *g;
    const char *arch;      /* as GGUF calls it */
    char key[LM_GGUF_KEY]; /* the latest */
    json_t *o;             /* the config.json that is made */
    bool untruncated;      /* lm_arch.gguf_untruncated */
    lm_err *e;
} lm_gguf_reader;

/* The whole number under a key.  dflt < 0: the file must have it.  given: whether it has; may be NULL.  Fails: LM_EFORMAT
 * naming the key. */
lm_code lm_gguf_whole(lm_gguf_reader *r, const char *rest, int64_t dflt, int64_t *out, bool *given);
/* Set a key of config.json. */
void lm_gguf_set_int(lm_gguf_reader *r, const char *key, int64_t v);

#endif
