/* SPDX-License-Identifier: Apache-2.0 */
/* gguf_encoders.h -- GGUF's keys of models with an encoder: "t5", an encoder beside a decoder, and "bert", one alone.
 *
 * llama.cpp's "t5" (src/models/t5.cpp) has ReLU or, with a gate, GELU by its tanh form, tells 128 distances apart at most, and
 * has no scale in front of a tied head.  Its "bert" gives states, not probabilities of masked tokens.
 * Private to lib/convert. */
#ifndef LM_CONVERT_GGUF_ENCODERS_H
#define LM_CONVERT_GGUF_ENCODERS_H

#include "convert/gguf_meta.h"

/* All hyper-parameters of an encoder and its decoder. */
void lm_gguf_put_stacks(lm_gguf_plan *p, const lm_config *c);
/* Report what llama.cpp would compute differently: refused, or warned of. */
lm_code lm_gguf_check_stacks(const lm_import *m, lm_err *e);
void lm_gguf_check_masked(const lm_import *m);

/* Keys of config.json that have no key of their own in GGUF, added to `out`.  Fails: LM_EUSAGE for what such a config cannot
 * represent, LM_EFORMAT. */
lm_code lm_gguf_get_stacks(const lm_gguf *g, const lm_arch *a, json_t *out, lm_err *e);
lm_code lm_gguf_get_masked(const lm_gguf *g, const lm_arch *a, json_t *out, lm_err *e);
#endif
