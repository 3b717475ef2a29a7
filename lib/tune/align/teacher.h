/* SPDX-License-Identifier: Apache-2.0 */
/* teacher.h -- a model whose distributions a student learns: its last states for the rows of a
 * micro-batch.
 *
 * The student's graph has a loss of its own and the teacher's last states (lm_build.teacher), so
 * that logits of the whole vocabulary are never in memory.  The teacher may have another shape and
 * any format that the backend reads; it has the student's vocabulary.  Its activations lie in the
 * arena of the training.
 *
 *     lm_loaded_open(path, NULL, &t.weights, e), lm_teacher_check(&t, path, &config, tokenizer, e)
 *     lm_teacher_build(&t, &how, beta, temperature, e)    options.build.teacher = &t.as
 *     lm_teacher_load(&t, site, e)                        when the trainer is ready
 *     lm_teacher_run(&t, batch, e)                        before each micro-batch
 */
#ifndef LM_TUNE_ALIGN_TEACHER_H
#define LM_TUNE_ALIGN_TEACHER_H

#include "model/loaded.h"
#include "text/tokenizer.h"
#include "train/evaluate.h"
#include "train/objective.h"

typedef struct {
    lm_loaded weights; /* opened by the caller, and then owned */
    lm_model *model;
    lm_plan plan;
    lm_evaluator eval;
    bool made;           /* eval is */
    lm_model_teacher as; /* for lm_build.teacher */
    void *states;        /* of the backend: those of the rows, outside the arena */
    size_t bytes;        /* of them */
} lm_teacher;

/* Check that the open model t->weights can teach a student with that config and tokenizer (NULL:
 * not known yet).  The rest of *t is zero.  Fails: LM_EUSAGE for another vocabulary or other
 * tokens, or a model of scores; as lm_tokenizer_of. */
lm_code lm_teacher_check(const lm_teacher *t, const char *path, const lm_config *student,
                         const lm_tokenizer *tok, lm_err *e);
/* Its graph for windows of that shape, precision and backend.  Fails: LM_EUSAGE for windows longer
 * than its positions. */
lm_code lm_teacher_build(lm_teacher *t, const lm_build *how, double beta, double temperature,
                         lm_err *e);
/* Bytes of weights and states; and of activations, where they need more than an arena of `arena`
 * bytes. */
size_t lm_teacher_bytes(const lm_teacher *t, size_t arena);
/* Load the weights, and bind what the student's graphs read. */
lm_code lm_teacher_load(lm_teacher *t, const lm_objective_site *site, lm_err *e);
/* The states of the rows of b. */
lm_code lm_teacher_run(lm_teacher *t, const lm_batch *b, lm_err *e);
/* After the student's graphs are released. */
void lm_teacher_close(lm_teacher *t);

#endif
