# SPDX-License-Identifier: Apache-2.0
# tune.mk -- one base, adapted to other text by many methods.  Meant to be read, copied, changed.
#
#   make -f tune.mk                             some minutes on two cores
#   make -f tune.mk METHODS='full lora qlora'   peft-tune --list-methods names them; METHODS=every: all of these
#   make -f tune.mk MODEL=first-light/run OLD=bible     a base that is there already: here that of `make demo`
#   make -f tune.mk FROM='my text' OLD=news NEW=law     text of your own: my text/news.jsonl, my text/law.jsonl
#
# A small model is trained on OLD, English prose and C headers; then it is adapted to NEW, written sums, which it has
# never met, by each method with the same data and the same number of steps.  METHOD+embed trains the embedding and the
# last norm beside the adapter, as text with other words needs.
#
# Where LoRA is as good as full fine-tuning: the base knows the characters of NEW (digits, from the headers), so that
# its embedding can stay; NEW has a form of its own that a small change teaches; every linear layer has an adapter; and
# each method has the rate that suits it, LoRA 2 to 5 times that of full.  Text that differs in all its words, after few
# steps, is where LoRA stays behind: METHODS='full lora lora+embed' OLD=bible NEW=code.
#
# Where memory is saved: the weights are in BF16, and what trains has a master copy, gradients and states in F32 beside
# them, 18 bytes a parameter; a micro-batch is one window, and layers are computed again in the backward, for all
# methods alike, so that activations do not hide the difference.
#
# It makes table.txt: parameters that train, peak memory, its share of full fine-tuning's, and of this the copies that
# training adds (master copies, gradients, states), seconds, bytes of the result, the loss on held-out text of both
# kinds (nan: the method diverged), and the share of full fine-tuning's gain on NEW; methods.svg, the last losses of all methods, the lowest on NEW
# first; and loss.svg, the loss by step of the SHOWN methods that are the best on NEW (more lines cannot be told apart).
#
# The tools must be on PATH.  Everything is made in the folder WORK; existing results are not made again.
# `make -f tune.mk clean` removes the folder.

WORK    ?= tune
FROM    ?= #             folder with a file NAME.jsonl for each of OLD and NEW; empty: dem-corpus makes them
MODEL   ?= #             folder of a base with a tokenizer; empty: one is trained
OLD     ?= bible code#   what the base knows; one name or several
NEW     ?= numbers
SIZE    ?= 1#            megabytes of text of each kind
HELD    ?= 40000#        bytes of held-out text of each kind, at most
METHODS ?= full lora qlora dora houlsby ia3 prefix prompt
PRESET  ?= llama-5m#     see share/models
# keys of the shape in which the base differs from PRESET
SHAPE   ?= $(if $(filter llama-5m,$(PRESET)),hidden_size=384 intermediate_size=1024 num_hidden_layers=6 \
    num_attention_heads=6 num_key_value_heads=6)
VOCAB   ?= 512#          few tokens, so that none is rare
DTYPE   ?= bf16#         of the weights in the computation
SEQ     ?= 256#          tokens in a window
BATCH   ?= 4#            windows in a step, each a micro-batch
RECOMPUTE ?= full#       layers are computed again in the backward; none: their activations are kept
LENGTH  ?= 400#          characters of NEW, at least, in a piece, which is an example
BASE    ?= 300#          steps of the base
BASE_RATE ?= 3e-3#       of its embedding and norms; its matrices train by Muon, in fewer steps than by AdamW
STEPS   ?= 100#          steps of each method
RANK    ?= 16#           of LoRA's kind
RATE    ?= 5e-3#         learning rate of adapters, and of others:
RATE_full      ?= 2e-3
RATE_ia3       ?= 2e-2
RATE_ln_tuning ?= 2e-2
RATE_prefix    ?= 1e-1
RATE_prompt    ?= 1
RATE_loraplus  ?= 1e-3
# few numbers, each of which changes the weights little
RATE_c3a       ?= 1
RATE_fourierft ?= 5
RATE_pvera     ?= 2e-1
RATE_unilora   ?= 5e-1
RATE_vera      ?= 2e-1
# keys of methods whose defaults do not divide the layers of PRESET
SET_adamss ?= r=16
SET_c3a    ?= block_size=32
# its coefficients are drawn: with a scale of 150, as for large models, they change so small a base beyond use
SET_fourierft ?= scaling=10
SET_shira  ?= r=4
SET_vblora ?= vector_length=32
SET_waveft ?= n_frequency=512
SHOWN   ?= 8#            methods in loss.svg, at most; 0: no such picture
SEED    ?= 1

.DELETE_ON_ERROR:
.NOTPARALLEL:
.PRECIOUS: runs/%/done
.PHONY: all clean

ifndef RECIPE_HOME # called by the user: make the same goals in WORK
GOALS := $(filter-out clean,$(or $(MAKECMDGOALS),all))
.PHONY: $(GOALS)
export WORK FROM
override export PRESET := $(or $(strip $(MODEL)),$(PRESET))
export RECIPE := $(MAKEFILE_LIST)
$(GOALS):
	@recipe="$${RECIPE# }" && bash "$$(dirname "$$recipe")/enter" "$(MAKE)" "$$recipe" $@
# a separate rule without $(MAKE): make runs lines with $(MAKE), like the one above, also with -n and -t
clean:
	@recipe="$${RECIPE# }" && bash "$$(dirname "$$recipe")/enter" '' "$$recipe" $@
else

# Not these: bitfit needs biases, tokens rows to be named, frod an adapter to begin with.
override METHODS := $(patsubst every,$(filter-out bitfit tokens frod,$(shell peft-tune --list-methods | sed -nE 's/^([a-z][^ ]*) .*/\1/p')),$(METHODS))
OLD := $(strip $(OLD))
NEW := $(strip $(NEW))

all: table.txt methods.svg $(if $(filter-out 0,$(strip $(SHOWN))),loss.svg)
	@cat table.txt

# 1. Text of all kinds, of which every tenth document is held out; of long ones, as many as HELD allows.
text/done:
	@mkdir -p $(@D)
ifeq ($(strip $(FROM)),)
	bash "$$RECIPE_HOME/dem-corpus" text $(strip $(SIZE))
else
	for t in $(OLD) $(NEW); do cp "$$RECIPE_FROM/$$t.jsonl" $(@D) || exit 1; done
endif
	for t in $(OLD) $(NEW); do \
	    awk 'NR % 10' text/$$t.jsonl > text/$$t.train.jsonl && \
	    awk 'NR % 10 == 0 && (!n || n + length($$0) <= $(strip $(HELD))) { n += length($$0); print }' text/$$t.jsonl > text/$$t.held.jsonl; \
	done
	cat $(OLD:%=text/%.held.jsonl) > text/old.held
	mv text/$(NEW).held.jsonl text/new.held
	bash "$$RECIPE_HOME/tune-report" pieces $(strip $(LENGTH)) < text/$(NEW).train.jsonl > text/$(NEW).pieces.jsonl
	touch $@

# 2. A base that knows OLD.
ifeq ($(strip $(MODEL)),)
tok/tokenizer.json: text/done
	@mkdir -p $(@D)
	train-tokenizer -q --vocab-size $(strip $(VOCAB)) -f -o $@ $(OLD:%=text/%.train.jsonl)
data/train.bin: tok/tokenizer.json
	shard-data -q --tokenizer $< --seed $(strip $(SEED)) -f -o $(@D) $(OLD:%=text/%.train.jsonl)
m0/config.json: tok/tokenizer.json
	init-model -q "$$RECIPE_PRESET" $(addprefix --set ,$(SHAPE)) --tokenizer $< --dtype $(strip $(DTYPE)) --seed $(strip $(SEED)) \
	    -f -o $(@D)
base/config.json: m0/config.json data/train.bin
	train -q m0/ data/ --steps $(strip $(BASE)) --batch-size $(strip $(BATCH)) --seq-len $(strip $(SEQ)) --dtype $(strip $(DTYPE)) \
	    --optimizer 'muon;embed|head|norm|bias=adamw:lr=$(strip $(BASE_RATE))' --warmup 20 --seed $(strip $(SEED)) -f -o $(@D)
else
base/config.json: | text/done
	ln -sfn "$$RECIPE_PRESET" base
	@test -e $@ || { echo "tune.mk: MODEL: $$RECIPE_PRESET: has no config.json: name the folder of a model" >&2; rm base; false; }
endif

# 3. Each method on NEW.  What has no rank takes none.  One that diverges (status 4) has no result, and does not stop the others.
method = $(firstword $(subst +, ,$1))
rank   = $(if $(filter lora rslora loraplus pissa olora qlora dora,$(method)),--rank $(strip $(RANK)))
rate   = $(strip $(or $(RATE_$(method)),$(RATE)))
saved  = $(if $(findstring +embed,$1),--modules-to-save embed_tokens$(,)norm)
, := ,
keys   = $(addprefix --set ,$(SET_$(method)))
tune   = peft-tune base/ text/$(NEW).pieces.jsonl --method $(method) $(rank) $(saved) $(keys) --lr $(rate) --steps $(strip $(STEPS)) \
    --batch-size 1 --gradient-accumulation-steps $(strip $(BATCH)) --seq-len $(strip $(SEQ)) --dtype $(strip $(DTYPE)) \
    --recompute $(strip $(RECOMPUTE)) --seed $(strip $(SEED)) --warmup 5
runs/%/done: base/config.json
	@mkdir -p $(@D)
	$(call tune,$*) --dry-run --json -o runs/$*/adapter > runs/$*/plan.json 2> runs/$*/log || { cat runs/$*/log >&2; false; }
	rm -f runs/$*/diverged
	$(call tune,$*) --json --metrics runs/$*/metrics.jsonl -f -o runs/$*/adapter > runs/$*/result.json 2> runs/$*/log || \
	    { [ $$? -eq 4 ] && tail -n 1 runs/$*/log >&2 && touch runs/$*/diverged; } || { cat runs/$*/log >&2; false; }
	touch $@

# 4. What became of it.
measure = bash "$$RECIPE_HOME/tune-report" loss $(strip $(SEQ)) $(strip $(DTYPE)) base/ '$1' text/old.held text/new.held
loss/base: base/config.json
	@mkdir -p $(@D)
	$(measure) > $@
loss/%: runs/%/done
	@mkdir -p $(@D)
	$(call measure,runs/$*/adapter) > $@
table.txt: loss/base $(METHODS:%=loss/%)
	bash "$$RECIPE_HOME/tune-report" table $(METHODS) > $@
methods.svg: loss/base $(METHODS:%=loss/%)
	bash "$$RECIPE_HOME/tune-report" picture $(METHODS) > $@
loss.svg: $(METHODS:%=loss/%)
	set -f && best=$$(bash "$$RECIPE_HOME/tune-report" best $(strip $(SHOWN)) $(METHODS)) && \
	    plot-run -q -f -o $@ $$(printf -- '--name %s ' $$best) $$(printf 'runs/%s/metrics.jsonl ' $$best)

endif
