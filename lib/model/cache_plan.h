/* SPDX-License-Identifier: Apache-2.0 */
/* cache_plan.h -- how the caches of a model are stored, from the text of a specification (kv/spec.h): the layers as
 * methods see them, the calibrations that the text names, and the plan. */
#ifndef LM_MODEL_CACHE_PLAN_H
#define LM_MODEL_CACHE_PLAN_H

#include "format/folder.h"
#include "kv/spec.h"
#include "model/config.h"

/* The attention of layer l of `c` with activations in `act`. */
lm_kv_site lm_cache_site(const lm_config *c, lm_dtype act, int64_t l);
/* That of all layers; the caller frees *out with lm_free. */
lm_code lm_cache_sites(const lm_config *c, lm_dtype act, lm_kv_site **out, lm_err *e);

typedef struct {
    lm_kv_plan *plan;
    lm_kv_site *site; /* of each layer */
    lm_kv_data *data[LM_KV_FILES];
} lm_cache_plan;

#define LM_CACHE_CALIBRATION "kv-calibration.safetensors"

/* Parse `spec`, read the calibrations that it names, and bind it to `c`.  Methods that read a calibration and name no file
 * read LM_CACHE_CALIBRATION in the folder that was named (a training run's), or else in that of the model.  src (may be
 * NULL): the model's weights, of which a calibration that names its weights must be.  Release with lm_cache_plan_fini, also
 * after a failure.  Fails: LM_EUSAGE as lm_kv_spec_parse and lm_kv_spec_bind, and for a calibration of other weights; as
 * lm_kv_data_read. */
lm_code lm_cache_plan_open(const char *spec, const lm_config *c, lm_dtype act, lm_model_source *src,
                           lm_cache_plan *out, lm_err *e);
/* The same for states of layers: a side K for each such layer, of as many heads of rows of a state; other layers plain.  Fails:
 * LM_EUSAGE, too, for a model without states, for methods that read a calibration, and for sides and policies. */
lm_code lm_cache_states_open(const char *spec, const lm_config *c, lm_cache_plan *out, lm_err *e);
void lm_cache_plan_fini(lm_cache_plan *p);

#endif
