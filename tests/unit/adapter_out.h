/* SPDX-License-Identifier: Apache-2.0 */
/* adapter_out.h -- for tests and drivers that write adapters: a folder that is replaced.
 *
 *     finished(lm_tune_to_lora(f, base, &o, onto("dir"), &report, &e)) */
#ifndef LM_TESTS_ADAPTER_OUT_H
#define LM_TESTS_ADAPTER_OUT_H

#include <stdio.h>
#include <stdlib.h>

#include "format/bundle.h"

static lm_bundle_out *the_adapter;

static inline bool is_any_file(const void *none, const char *name)
{
    (void)none;
    return *name;
}

static inline lm_bundle_out *onto(const char *dir)
{
    static const lm_bundle_opts how = { .own = is_any_file };
    lm_err e = { 0 };
    if (lm_bundle_create(dir, true, &how, &the_adapter, &e)) {
        fprintf(stderr, "%s: %s\n", e.where, e.what);
        exit(1);
    }
    return the_adapter;
}

/* Publishes what onto() began, if it was written. */
static inline lm_code finished(lm_code rc)
{
    lm_err e = { 0 };
    if (!rc)
        return lm_bundle_commit(the_adapter, &e);
    lm_bundle_drop(the_adapter);
    return rc;
}

#endif
