/* SPDX-License-Identifier: Apache-2.0 */
/* model.c -- see model.h. */
#include "common/model.h"

#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "compress/coded_source.h"
#include "convert/convert_source.h"
#include "format/fp8_source.h"

lm_code lm_open_model(lm_tool *t, const char *path, const char *tokenizer, lm_par *par,
                      lm_loaded *out, lm_err *e)
{
    lm_bundle_opts how = lm_tool_bundle(t, par);
    lm_model_source *src = NULL;
    lm_code rc;

    how.also = "a .gguf";
    *out = (lm_loaded){ 0 };
    if (lm_is_gguf(path))
        rc = lm_gguf_source_open(path, !tokenizer, &how, &src, e);
    else if (!(rc = lm_fp8_source_open(path, &how, &src, e)) &&
             (rc = lm_coded_source_over(&src, e)))
        lm_model_source_close(src);
    if (!rc) {
        lm_model_source_set_par(src, par);
        rc = lm_loaded_take(src, out, e);
    }
    out->par = par;
    return rc;
}

const char *lm_advise_finite(const char *path)
{
    return lm_is_gguf(path)
               ? "convert-model makes a model folder of it, whose weights inspect-model "
                 "--stats checks"
               : "inspect-model --stats shows which weights are not finite";
}

const char *const lm_weights_places[] = { "auto", "memory", "file", NULL };

lm_code lm_place_weights(lm_tool *t, const char *where, lm_dtype precision, const lm_backend *b,
                         lm_loaded *l, lm_err *e)
{
    lm_place asked = LM_PLACE_AUTO;
    size_t available = lm_mem_available();
    char have[32];
    bool moved;

    while (strcmp(lm_weights_places[asked], where))
        asked++;
    lm_code rc = lm_loaded_place(l, asked, precision, b, available, &moved, e);
    if (rc)
        snprintf(e->todo, sizeof e->todo, "leave --weights-in out");
    else if (moved)
        lm_say(t, LM_LOG_NOTICE, "weights are read in the file, for %s of memory are available",
               lm_show_bytes((double)available, have));
    return rc;
}

void lm_say_weights(lm_tool *t, const lm_loaded *m)
{
    char text[LM_LOADED_TEXT];
    if (lm_loaded_text(m, text))
        lm_say(t, LM_LOG_INFO, "%s", text);
}
