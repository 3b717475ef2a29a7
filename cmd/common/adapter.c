/* SPDX-License-Identifier: Apache-2.0 */
/* adapter.c -- see adapter.h. */
#include "common/adapter.h"

lm_code lm_open_adapter(lm_tool *t, const char *path, lm_par *par, lm_loaded *l, lm_tune_use *out,
                        lm_err *e)
{
    lm_bundle_opts how = lm_tool_bundle(t, par);
    *out = (lm_tune_use){ 0 };
    if (!path)
        return LM_OK;
    if (lm_tune_use_open(path, &how, l, out, e))
        return e->code;
    lm_say(t, LM_LOG_INFO, "adapter %s: %s on %zu modules", path,
           lm_attach_method(out->attach) ? lm_attach_method(out->attach)->name : "of tokens",
           lm_attach_modules(out->attach));
    return LM_OK;
}
