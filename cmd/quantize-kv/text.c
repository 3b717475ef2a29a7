/* SPDX-License-Identifier: Apache-2.0 */
/* text.c -- see text.h. */
#include "quantize-kv/text.h"

#include <stdio.h>

#include "base/file.h"

lm_code kv_write_text(const char *path, bool force, const lm_buf *text, lm_err *e)
{
    lm_out *out;
    if (lm_out_open(path, force, &out, e))
        return e->code;
    if (fwrite(text->data, 1, text->len, lm_out_file(out)) != text->len) {
        lm_fail_write(lm_out_path(out), e);
        lm_out_drop(out);
        return e->code;
    }
    return lm_out_commit(out, e);
}
