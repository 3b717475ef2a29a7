# SPDX-License-Identifier: Apache-2.0
# optimizers.mk -- every optimiser of train(1) on the same model and equal tokens: a table of held-out losses, bytes
# of state and step times, and plots of the losses.  Meant to be read, copied, changed.
#
#   make -f optimizers.mk                                     all of `train --list-optimizers`, most of an hour
#   make -f optimizers.mk CORPUS=text.txt STEPS=1000          your own text, longer
#   make -f optimizers.mk OPTIMIZERS='muon soap' RATES='muon=0.02 soap=3e-3'     some, with rates of your own
#   make -f optimizers.mk KEYS_muon=ns=polar,scaling=moonlight                   hyper-parameters of your own
#
# It makes table.txt, table.tsv, and loss-1.svg, loss-2.svg ...: the losses from the best to the worst, seven in a
# picture with AdamW's beside them.  Data, their order, initial weights, warm-up and schedule are the same for all; the
# schedule-free optimiser has only the warm-up.
#
# The tools must be on PATH.  Everything is made in the folder WORK; existing results are not made again.
# `make -f optimizers.mk clean` removes the folder.  Do not use -j, because steps are timed.

WORK       ?= optimizers
CORPUS     ?= #             plain text or JSONL; empty: that of fetch-corpus
SPLIT      ?= blank#        plain text is split into documents at empty lines; file: a document per file
OPTIMIZERS ?= #             names; empty: all.  AdamW is always included, because the others are compared with it
RATES      ?= #             NAME=RATE ...: given rates, without a search
PRESET     ?= llama-5m#     see share/models
VOCAB      ?= 4096
BATCH      ?= 8#            sequences per step
SEQ        ?= 128#          tokens per sequence
STEPS      ?= 250
SEARCH     ?= 80#           steps of each trial of a rate; fewer steps find higher rates; 0: the rates below
ROUNDS     ?= 2#            timed runs of each, with one of AdamW before each
TIMED      ?= 21#           steps of the timed runs
SEED       ?= 1

# Initial rates of the search, which multiplies by 3, or else divides by 3, while losses fall.  The first rate is for
# optimisers that divide a gradient by the root of its mean square, so that each weight changes by about the rate, and
# for those without an own line.  Found with the sizes above: more steps, and larger batches, need other rates.
RATE                := 3e-3
# One divisor for a whole row, in particular of the embedding: some of its weights change by more.
RATE_adam-mini      := 1e-3
# The average in its divisor begins at 0 and takes thousands of steps to rise; until then steps are larger.
RATE_came           := 3e-4
# The sign of the gradient changes each weight by the full rate.
RATE_lion           := 1e-3
# Steps in proportion to the root mean square of a tensor, which is 0.02 for new matrices.
RATE_lamb           := 3e-2
RATE_adafactor      := 3e-2
# The divisor is a sum or its bound: it grows, so steps become smaller.
RATE_adagrad        := 1e-2
RATE_sm3            := 1e-1
# Steps as large as the gradient, which clipping keeps below 1 for all weights together.
RATE_sgd            := 1
RATE_momentum       := 3e-1
# Orthogonal steps: their largest singular value is about the rate.
RATE_muon           := 6e-2
RATE_normuon        := 6e-2
RATE_soap-muon      := 6e-2
# Steps of low rank are multiplied by 0.25.
RATE_galore         := 1e-2

# Optimisers with nearly the steps of another one have the rate that was found for that one.
AS_adam             := adamw
AS_amsgrad          := adamw
AS_adamw8bit        := adamw
AS_q-galore         := galore
AS_nesterov         := momentum

# SGD's decay is a part of the gradient: at rates near 1 the usual decay of 0.1 would shrink all weights to 0.
KEYS_sgd            ?= momentum=0,weight_decay=0
KEYS_momentum       ?= weight_decay=0
KEYS_nesterov       ?= weight_decay=0
# Options of single optimisers: schedule-free has an average instead of a schedule.
OPTIONS_schedule-free := --lr-schedule constant

TRAIN := --batch-size $(strip $(BATCH)) --seq-len $(strip $(SEQ)) --dtype bf16 --seed $(strip $(SEED)) --min-lr-ratio 0
NAMES := $(strip $(OPTIMIZERS))

.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: all clean

ifndef RECIPE_HOME # called by the user: make the same goals in WORK
GOALS := $(filter-out clean,$(or $(MAKECMDGOALS),all))
.PHONY: $(GOALS)
export WORK CORPUS PRESET
export RECIPE := $(MAKEFILE_LIST)
$(GOALS):
	@recipe="$${RECIPE# }" && bash "$$(dirname "$$recipe")/enter" "$(MAKE)" "$$recipe" $@
# a separate rule without $(MAKE): make runs lines with $(MAKE), like the one above, also with -n and -t
clean:
	@recipe="$${RECIPE# }" && bash "$$(dirname "$$recipe")/enter" '' "$$recipe" $@
else

ALL := adamw $(filter-out adamw,$(or $(NAMES),$(shell train --list-optimizers | awk '/^[^ ]/ { print $$1 }')))
RAW := $(if $(strip $(CORPUS)),corpus.list $(sort $(wildcard corpus/*)),raw.jsonl)

all: table.txt
	@cat $<

# 1. Text, a tokenizer, token shards with a validation split, a model with random weights.
raw.jsonl:
	bash "$$RECIPE_HOME/fetch-corpus" . > $@
text.jsonl: $(RAW)
	clean-data -q --rules none --split $(strip $(SPLIT)) $(filter-out corpus.list,$(RAW)) > $@
tok/tokenizer.json: text.jsonl
	@mkdir -p $(@D)
	train-tokenizer -q --vocab-size $(strip $(VOCAB)) --pattern llama3 -f -o $@ $<
data/train.bin: tok/tokenizer.json text.jsonl
	if [ "$$(wc -l < text.jsonl)" -ge 100 ]; then how='--val-fraction 0.015'; \
	else how='--split contiguous --val-fraction 0.1'; fi; \
	shard-data -q --tokenizer $< $$how --seed $(strip $(SEED)) -f -o $(@D) text.jsonl
m0/config.json: tok/tokenizer.json
	init-model -q "$$RECIPE_PRESET" --tokenizer $< --seed $(strip $(SEED)) -f -o $(@D)

# 2. A rate for each.  Tensors that an optimiser for hidden matrices trains with AdamW have the rate found for AdamW.
rates/adamw: m0/config.json data/train.bin
$(filter-out rates/adamw,$(ALL:%=rates/%) rates/momentum rates/galore): rates/adamw
rates/nesterov: rates/momentum
rates/q-galore: rates/galore
rates/%:
	@mkdir -p $(@D)
	$(if $(filter $*=%,$(RATES)),echo $(patsubst $*=%,%,$(lastword $(filter $*=%,$(RATES)))),$(if $(AS_$*),tail -n 1 \
	    rates/$(AS_$*),bash "$$RECIPE_HOME/optimizers-rate" $* '$(KEYS_$*)' $(or $(RATE_$*),$(RATE)) $(strip $(SEARCH)) \
	    $(TRAIN) $(OPTIONS_$*))) > $@

# 3. The run of each, with its metrics and its loss on the whole validation split.
losses/%: rates/%
	@mkdir -p $(@D) runs
	bash "$$RECIPE_HOME/optimizers-try" $* '$(KEYS_$*)' "$$(tail -n 1 $<)" $(strip $(STEPS)) runs/$*.jsonl \
	    $(TRAIN) $(OPTIONS_$*) > $@

# 4. Steps timed alternately with AdamW's, so that other work on the machine affects both.
timed = bash "$$RECIPE_HOME/optimizers-try" $1 '$(KEYS_$1)' "$$(tail -n 1 rates/$1)" $(strip $(TIMED)) time.jsonl \
	$(TRAIN) --eval-every 0 > time.loss && bash "$$RECIPE_HOME/optimizers-report" step $1 time.jsonl >> $@.new
times/%: losses/%
	@mkdir -p $(@D)
	rm -f $@.new
	for i in $$(seq $(strip $(ROUNDS))); do \
	    $(call timed,adamw) && \
	    $(call timed,$*) || exit 1; \
	done
	mv $@.new $@

# 5. Bytes of state, from the plan of a run.
plans/%.json: m0/config.json
	@mkdir -p $(@D)
	train --dry-run --json m0/ --optimizer '$*$(if $(KEYS_$*),:$(KEYS_$*))' $(TRAIN) > $@

table.tsv: $(ALL:%=losses/%) $(ALL:%=times/%) $(ALL:%=plans/%.json)
	bash "$$RECIPE_HOME/optimizers-report" table $(ALL) > $@
table.txt: table.tsv
	rm -f loss-*.svg
	bash "$$RECIPE_HOME/optimizers-report" curves < $<
	bash "$$RECIPE_HOME/optimizers-report" text < $< > $@

endif
