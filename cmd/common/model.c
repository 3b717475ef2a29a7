/* SPDX-License-Identifier: Apache-2.0 */
/* model.c -- see model.h. */
#include "common/model.h"

#include "compress/coded_source.h"
#include "convert/convert_source.h"

lm_code lm_open_model(lm_tool *t, const char *path, const char *tokenizer, lm_par *par,
                      lm_loaded *out, lm_err *e)
{
    const lm_bundle_opts how = lm_tool_bundle(t, par);
    lm_model_source *src = NULL;
    lm_code rc;

    *out = (lm_loaded){ 0 };
    if (lm_is_gguf(path))
        rc = lm_gguf_source_open(path, !tokenizer, par, &t->sink, &src, e);
    else if (!(rc = lm_model_source_open(path, &how, &src, e)) &&
             (rc = lm_coded_source_over(&src, e)))
        lm_model_source_close(src);
    if (!rc)
        rc = lm_loaded_take(src, out, e);
    out->par = par;
    return rc;
}
