/* SPDX-License-Identifier: Apache-2.0 */
/* cache.h -- generate --save-cache, --load-cache and --deadline: caches in files (kv-cache(5)). */
#ifndef LM_CMD_GENERATE_CACHE_H
#define LM_CMD_GENERATE_CACHE_H

#include "generate/work.h"

/* Rows of the option table. */
#define GENERATE_CACHE_OPTIONS(a)                                                            \
    LM_GROUP("Caches in files"),                                                             \
        LM_STR(0, "save-cache", &(a).save, "FILE",                                           \
               "write the cache of the text; with -n 0: of the prompt"),                     \
        LM_STR(0, "load-cache", &(a).load, "FILE", "prompts follow the text of this cache"), \
        LM_TIME(0, "deadline", &(a).deadline, "TIME", 1e-6, 1e9,                             \
                "levels of the cache for a first token by then [best]"),                     \
        LM_FLAG(0, "unverified", &(a).unverified, "load the state of a sequence of llama.cpp")

/* Refuse options that do not fit together, before anything is read. */
void generate_check_cache(void);
/* Open the file of --load-cache and check its header.  Nothing without the option. */
lm_code generate_open_cache(generate_work *w, lm_err *e);
/* Tokens in front of each prompt. */
int64_t generate_cache_tokens(const generate_work *w);
/* The type of its numbers; NONE without one. */
lm_dtype generate_cache_type(const generate_work *w);
/* Check that it is of this model, when the context is known; set the forms of caches (NULL: plain) in *plan, unless
 * one is set. */
lm_code generate_match_cache(generate_work *w, lm_dtype type, const lm_kv_plan **plan, lm_err *e);
/* Read it, for the generator. */
lm_code generate_read_cache(generate_work *w, const lm_kv_plan *plan, lm_err *e);
/* The hook of lm_complete_run that begins a prompt: behind the cache. */
lm_code generate_begin(void *ctx, lm_generator *g, int64_t slot, const uint32_t *ids, int64_t n,
                       lm_err *e);
/* Put the tokens of the cache in front of ids. */
lm_code generate_add_cache(const generate_work *w, lm_ids *ids, lm_err *e);
/* With -n 0: run the prompt. */
lm_code generate_only_prompt(generate_work *w, lm_err *e);
/* Write the file of --save-cache, if it was given. */
lm_code generate_save_cache(generate_work *w, lm_err *e);
void generate_close_cache(generate_work *w);

#endif
