/* SPDX-License-Identifier: Apache-2.0 */
/* pack_report.c -- reports on a model that was packed or unpacked. */
#include "base/json.h"
#include "base/mem.h"
#include "compress/pack.h"
#include "compress/unpack.h"

void lm_pack_report_fini(lm_pack_report *r)
{
    for (size_t i = 0; i < r->n_loss; i++) {
        lm_free(r->loss[i].file);
        lm_free(r->loss[i].tensor);
    }
    lm_free(r->loss);
    *r = (lm_pack_report){ 0 };
}

static void add_loss(lm_jw *w, const lm_pack_loss *l)
{
    lm_jw_obj(w, NULL);
    lm_jw_str(w, "file", l->file);
    lm_jw_str(w, "tensor", l->tensor);
    lm_jw_str(w, "codec", l->codec);
    lm_jw_int(w, "elements", l->count);
    lm_jw_int(w, "raw", (int64_t)l->before);
    lm_jw_int(w, "coded", (int64_t)l->after);
    lm_jw_f64(w, "max_abs", l->err.max_abs);
    lm_jw_f64(w, "rel_l2", l->err.rel_l2);
    lm_jw_f64(w, "bound", l->err.bound);
    lm_jw_close_obj(w);
}

lm_code lm_pack_report_json(const lm_pack_report *r, const char *input, const char *output,
                            lm_buf *out, lm_err *e)
{
    lm_jw w;
    lm_jw_begin(&w, out, 0, e);
    lm_jw_obj(&w, NULL);
    lm_jw_str(&w, "input", input);
    lm_jw_str(&w, "output", output);
    lm_jw_int(&w, "files", (int64_t)r->files);
    lm_jw_int(&w, "raw", (int64_t)r->raw);
    lm_jw_int(&w, "coded", (int64_t)r->coded);
    lm_jw_f64(&w, "ratio", r->raw ? (double)r->coded / (double)r->raw : 1);
    lm_jw_arr(&w, "lossy");
    for (size_t i = 0; i < r->n_loss; i++)
        add_loss(&w, &r->loss[i]);
    lm_jw_close_arr(&w);
    lm_jw_close_obj(&w);
    return lm_jw_end(&w) || lm_buf_add(out, "\n", 1, e) ? e->code : LM_OK;
}

lm_code lm_unpack_report_json(const lm_unpack_report *r, const char *input, const char *output,
                              uint64_t lost, lm_buf *out, lm_err *e)
{
    lm_jw w;
    lm_jw_begin(&w, out, 0, e);
    lm_jw_obj(&w, NULL);
    lm_jw_str(&w, "input", input);
    lm_jw_str(&w, "output", output);
    lm_jw_int(&w, "files", (int64_t)r->files);
    lm_jw_int(&w, "bytes", (int64_t)r->bytes);
    lm_jw_int(&w, "lost", (int64_t)lost);
    lm_jw_close_obj(&w);
    return lm_jw_end(&w) || lm_buf_add(out, "\n", 1, e) ? e->code : LM_OK;
}
