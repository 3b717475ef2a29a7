/* SPDX-License-Identifier: Apache-2.0 */
/* folder.h -- models as the tools read and write them: tensors by name from any of the inputs
 * below, and the Hugging Face folder (or its tar, .lmz or stream) as output.
 *
 * Accepted as a model: a folder with config.json and model.safetensors, or
 * model.safetensors.index.json and its shards; a training run's folder (folder_run.h: the newest
 * whole checkpoint at the time of opening); one .safetensors file, alone; a tar or an .lmz of such
 * a folder; a stream of any of the last three (bundle.h).
 *
 * A stream with config.json before one file of weights is read forward: the last tensor that
 * lm_model_source_next returned is kept in memory and may be read in any way; earlier ones are
 * gone.  A request for more (a later tensor, a file behind the weights) spools the rest to disk.
 * Shards, and weights before config.json, are spooled at once.
 *
 * Any fault of a model is one error that names the file: a shard missing or truncated, a tensor
 * that the index lists and its shard lacks, a name in two shards, a file name with a path in it.  A
 * wrong total_size in the index is a warning. */
#ifndef LM_FORMAT_FOLDER_H
#define LM_FORMAT_FOLDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "format/bundle.h"
#include "format/safetensors.h"
#include "numeric/format.h"

/* Default size of a shard, as in Hugging Face libraries ("5GB"). */
#define LM_MAX_SHARD_BYTES 5000000000

/* ---- Reading ---- */

typedef struct lm_model_source lm_model_source;

/* Open a model; reads config.json and the headers, no data.  `o` (bundle.h; NULL: defaults) is
 * borrowed until the source is closed.  Fails: LM_EIO, LM_EFORMAT; LM_EUSAGE if `path` is not a
 * model (names what was expected), or if index and shards contradict each other. */
lm_code lm_model_source_open(const char *path, const lm_bundle_opts *o, lm_model_source **out,
                             lm_err *e);
void lm_model_source_close(lm_model_source *m);
const char *lm_model_source_path(const lm_model_source *m); /* as given; "standard input" for "-" */
/* The files of the source.  On a stream, those already read are gone. */
lm_bundle *lm_model_source_bundle(const lm_model_source *m);
/* The folder of the files: for a run, that of its newest checkpoint; NULL for other inputs
 * (lm_model_source_file reads tokenizer.json from all of them). */
const char *lm_model_source_dir(const lm_model_source *m);
/* config.json, borrowed; NULL for a lone file. */
const json_t *lm_model_source_config(const lm_model_source *m);
/* True if find, data, read and load work in any order at the same cost. */
bool lm_model_source_random(const lm_model_source *m);
/* Make it so: the rest of a stream is spooled to disk. */
lm_code lm_model_source_spool(lm_model_source *m, lm_err *e);
/* Read a stream to its end and check that it is complete; to be called after the last tensor,
 * before anything is published.  Does nothing for other sources. */
lm_code lm_model_source_finish(lm_model_source *m, lm_err *e);

/* A file beside the weights ("tokenizer.json"), at most `limit` bytes, NUL-terminated, appended to
 * `out`; *found = false (no failure) when there is none.  A stream is spooled if that is needed to
 * find out.  LM_ELIMIT for a file of a stream that was too large to be kept (64 MiB). */
lm_code lm_model_source_file(lm_model_source *m, const char *name, size_t limit, lm_buf *out,
                             bool *found, lm_err *e);
/* The same for files that may be missed: in a stream only those before the weights.  If the file
 * follows the weights, lm_model_source_finish fails and names it. */
lm_code lm_model_source_file_now(lm_model_source *m, const char *name, size_t limit, lm_buf *out,
                                 bool *found, lm_err *e);
/* Small files in memory: zero-initialise, release with lm_folder_files_fini. */
typedef struct {
    struct lm_folder_file {
        char *name;
        lm_buf data;
    } * v;
    size_t n, cap;
} lm_folder_files;
void lm_folder_files_fini(lm_folder_files *f);
/* The tokenizer's files (lm_tokenizer_files) of a model, those that exist; a stream in which
 * tokenizer.json does not precede the weights is spooled. */
lm_code lm_model_source_tokenizer(lm_model_source *m, lm_folder_files *out, lm_err *e);
/* A JSON file beside the weights as a tree, as lm_model_source_file_now; *out = NULL when there is
 * none. */
lm_code lm_model_source_json(lm_model_source *m, const char *name, json_t **out, lm_err *e);
/* Digest of the input for its product's history (provenance.h); 0 for a stream, which is not read
 * twice. */
lm_code lm_model_source_digest(const lm_model_source *m, uint64_t *out, lm_err *e);
/* XXH3-128 of all weights: of each tensor, in the order of names, its name, type and shape and the XXH3-128 of each 4 MiB
 * of its bytes.  The same for a folder, shards, a tar and an .lmz of it; another one for a GGUF file, of which codes
 * are read.  Computed once for each source, on the threads of lm_model_source_set_par.  A stream of which tensors are
 * left is spooled to disk; afterwards its tensors can be read in any order. */
lm_code lm_model_source_weights_digest(lm_model_source *m, uint8_t digest[16], lm_err *e);
/* Threads for digests; borrowed until the source is closed.  NULL, as it begins: the calling one. */
void lm_model_source_set_par(lm_model_source *m, lm_par *par);

/* Tensors in order: shards in the order of their names, each in the order of its data. */
size_t lm_model_source_count(const lm_model_source *m);
const lm_st_tensor *lm_model_source_at(const lm_model_source *m, size_t i);
const lm_st_tensor *lm_model_source_find(const lm_model_source *m,
                                         const char *name); /* NULL if absent */
const char *lm_model_source_file_of(const lm_model_source *m,
                                    const lm_st_tensor *t); /* file name, borrowed */
size_t lm_model_source_files(const lm_model_source *m);     /* number of weight files */
const char *lm_model_source_file_at(const lm_model_source *m, size_t i); /* name of the i-th */
uint64_t lm_model_source_bytes(const lm_model_source *m);                /* of all tensors */
int64_t lm_model_source_params(const lm_model_source *m); /* elements of all tensors */
/* __metadata__ of the first weight file; NULL if absent. */
const char *lm_model_source_meta(const lm_model_source *m, const char *key);
/* The same of the i-th weight file. */
const char *lm_model_source_meta_of(const lm_model_source *m, size_t i, const char *key);

/* Iterate in the order of lm_model_source_at; *t = NULL at the end.  Works on every source. */
lm_code lm_model_source_next(lm_model_source *m, const lm_st_tensor **t, lm_err *e);
/* Restart the iteration; LM_EUSAGE on a stream of which tensors are gone. */
lm_code lm_model_source_rewind(lm_model_source *m, lm_err *e);
/* As lm_st_data (NULL where nothing is mapped: use lm_model_source_read), true if these bytes are aligned to
 * the element, as lm_st_read and lm_st_load.  `t` must come from this source.  Any thread; on a stream one tensor at a
 * time. */
const void *lm_model_source_data(const lm_model_source *m, const lm_st_tensor *t);
bool lm_model_source_aligned(const lm_model_source *m, const lm_st_tensor *t);
lm_code lm_model_source_read(const lm_model_source *m, const lm_st_tensor *t, uint64_t from,
                             void *dst, size_t bytes, lm_err *e);
lm_code lm_model_source_load(const lm_model_source *m, const lm_st_tensor *t, lm_dtype to,
                             void *dst, lm_err *e);
/* As read, for a few bytes at scattered offsets: decodes only what is needed and keeps nothing. */
lm_code lm_model_source_peek(const lm_model_source *m, const lm_st_tensor *t, uint64_t from,
                             void *dst, size_t bytes, lm_err *e);
/* All of t without a copy: mapped, or the tensor of a stream in memory, until another tensor of m
 * is requested.  *data = NULL (no failure): neither applies, read it. */
lm_code lm_model_source_borrow(const lm_model_source *m, const lm_st_tensor *t, const void **data,
                               lm_err *e);
/* The format of the codes that the numbers of t are, or come from, and whether they have rows and columns
 * of t's transpose. */
const lm_format *lm_model_source_format(const lm_model_source *m, const lm_st_tensor *t,
                                        bool *turned);
/* All codes of t (as lm_tensor_bytes counts them) to dst. */
lm_code lm_model_source_codes(const lm_model_source *m, const lm_st_tensor *t, void *dst,
                              lm_err *e);
/* The same bytes without a copy, in the mapped file, until the source is closed; NULL: they must be read.
 * Aligned as in the file. */
const void *lm_model_source_codes_in_file(const lm_model_source *m, const lm_st_tensor *t);
/* Drop the mapped bytes of t from this process's resident set: they are not needed soon. */
void lm_model_source_forget(const lm_model_source *m, const lm_st_tensor *t);

/* ---- Writing ---- */

/* The contents of a folder to write.  Zero-initialise; all borrowed until commit or drop. */
typedef struct {
    /* config.json, keys in their order; NULL: the caller writes it with lm_folder_put */
    const json_t *config;
    const json_t *generation_config; /* generation_config.json; NULL: none */
    /* Folder from which the tokenizer's files are copied byte for byte (those of lm_tokenizer_files
     * that exist), or one file that becomes tokenizer.json; NULL: none. */
    const char *tokenizer;
    /* Or the model whose tokenizer files are copied; those behind the weights of a stream are
     * copied at commit, when it is read to its end. */
    lm_model_source *tokenizer_from;
    const lm_folder_files *files; /* more small files; NULL: none */
    /* all tensors and __metadata__; {"format":"pt"} is added when missing */
    const lm_st_plan *plan;
    /* 0: LM_MAX_SHARD_BYTES in a folder, one file elsewhere; a larger tensor gets a shard of its
     * own */
    uint64_t max_shard_bytes;
    const char *weights; /* name of the one file of tensors; NULL: model.safetensors, or shards */
    bool keep_order; /* files keep the plan's order; otherwise each is sorted by lm_st_plan_sort */
} lm_folder_spec;

/* Names of the tokenizer files of a model, NULL-terminated. */
extern const char *const lm_tokenizer_files[];

typedef struct lm_folder lm_folder;
/* Begin the model at `path`, in the form that its name selects (lm_bundle_create; `o` may be NULL).
 * The small files of the spec are written now; the weights begin with the first lm_folder_write, so
 * that in a stream all other files precede them. */
lm_code lm_folder_create(const char *path, bool force, const lm_bundle_opts *o,
                         const lm_folder_spec *spec, lm_folder **out, lm_err *e);
/* Write or copy one more small file; `name` is a plain name, checked by lm_name_ok.  Allowed at any
 * time: between tensors it is kept in memory until the weights are complete. */
lm_code lm_folder_put(lm_folder *f, const char *name, const void *data, size_t bytes, lm_err *e);
/* Tensors, as in safetensors.h: lm_folder_next returns the expected one (names are the plan's),
 * NULL after the last.  Shards are changed automatically; a chunk must not cross the end of a
 * tensor. */
const lm_st_tensor *lm_folder_next(const lm_folder *f);
lm_code lm_folder_write(lm_folder *f, const void *data, size_t bytes, lm_err *e);
lm_code lm_folder_write_as(lm_folder *f, lm_dtype from, const void *data, int64_t count, lm_err *e);
/* Another large file of tensors (optimizer.safetensors), before the weights are begun or after they are
 * complete: by a plan, with a writer to be committed before anything else is written. */
lm_code lm_folder_st_create(lm_folder *f, const char *name, const lm_st_plan *plan,
                            lm_st_writer **out, lm_err *e);
/* A folder that several ranks write (lm_bundle_opts.share): lm_folder_create reserves the weights, and lm_folder_reserve
 * another large file, before any tensor is written.  The next tensor of the weights as in safetensors.h. */
lm_code lm_folder_reserve(lm_folder *f, const char *name, const lm_st_plan *plan, lm_err *e);
lm_code lm_folder_pass(lm_folder *f, bool *passed, lm_err *e);
lm_code lm_folder_write_own(lm_folder *f, lm_dtype from, const void *data, int64_t count,
                            int64_t at, lm_err *e);
lm_code lm_folder_end_own(lm_folder *f, lm_err *e);
/* When this rank has written its tensors: flush them to disk. */
lm_code lm_folder_sync(lm_folder *f, lm_err *e);
/* The folder that is not published yet, for the other ranks. */
const char *lm_folder_made(const lm_folder *f);
/* Publish all or nothing; f is freed whatever the result.  Of several ranks rank 0 publishes, once all have synced. */
lm_code lm_folder_commit(lm_folder *f, lm_err *e);
void lm_folder_drop(lm_folder *f);

/* A plain file name from outside: not empty, no '/', no '\\', no control bytes, not "." or "..", at
 * most 255. */
bool lm_name_ok(const char *name);

#endif
