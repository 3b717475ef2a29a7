/* SPDX-License-Identifier: Apache-2.0 */
/* config_text.c -- the text of a --config file.  It is kept because it is inspected before it is
 * parsed, and a pipe can be read only once. */
#include <string.h>
#include <sys/stat.h>

#include "base/buf.h"
#include "base/mem.h"
#include "common/tool.h"

enum { MAX_TEXT = 16 << 20 };

static char *kept_path; /* text of the pipe read last, until the program ends */
static lm_buf kept;

static bool is_file(const char *path)
{
    struct stat st;

    return strcmp(path, "-") != 0 && !stat(path, &st) && S_ISREG(st.st_mode);
}

lm_code lm_config_text(const char *path, lm_buf *out, lm_err *e)
{
    lm_code rc = LM_OK;

    if (is_file(path))
        return lm_file_read(path, MAX_TEXT, out, e);
    if (!kept_path || strcmp(kept_path, path) != 0) {
        kept.len = 0;
        lm_free(kept_path);
        kept_path = NULL;
        rc = lm_file_read(path, MAX_TEXT, &kept, e);
        if (!rc)
            rc = lm_strdup(&kept_path, path, e);
    }
    return rc || !kept.len ? rc : lm_buf_add(out, kept.data, kept.len, e);
}
