# SPDX-License-Identifier: Apache-2.0
# first-light.mk -- from raw text to a trained and evaluated model that generates text.  Meant to be read, copied, changed.
#
#   make -f first-light.mk                              the text of a Debian package, some minutes
#   make -f first-light.mk CORPUS='a.txt b.jsonl.zst'   your own text: plain, JSONL, compressed, archives
#   make -f first-light.mk CORPUS="'my text.txt' b.txt" names with spaces in quotes; one file alone needs none
#
# The tools must be on PATH.  Everything is made in the folder WORK; existing results are not made again, so that a
# second call continues where the first one ended.  `make -f first-light.mk clean` removes the folder.

WORK    ?= first-light
CORPUS  ?=
PRESET  ?= llama-5m#     see share/models
VOCAB   ?= 4096
RULES   ?= $(if $(CORPUS),none,gopher,c4,fineweb)
LANGUAGE ?= $(if $(CORPUS),none,en)# language of the stop words and word lengths; see clean-data(1)
SPLIT   ?= blank#        plain text is split into documents at empty lines; file: a document per file
BATCH   ?= 16#           sequences per step
SEQ     ?= 256#          tokens per sequence
LR      ?= 3e-3
BUDGET  ?= 165#          seconds of training; the number of steps follows from the speed of the machine
EPOCHS  ?= 10#           maximum number of passes over the text
SEED    ?= 1

comma := ,
RAW   := $(if $(strip $(CORPUS)),corpus.list $(sort $(wildcard corpus/*)),raw.jsonl)
TRAIN := --batch-size $(strip $(BATCH)) --seq-len $(strip $(SEQ)) --lr $(LR) --dtype bf16 --seed $(SEED)
CLEAN := clean-data --rules $(RULES) $(if $(filter gopher% all,$(RULES)),--language $(LANGUAGE)) --dedup minhash

.DELETE_ON_ERROR:
.PHONY: all report clean

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

all: report

# 1. Text: a document for each chapter.
raw.jsonl:
	@date +%s > started
	bash "$$RECIPE_HOME/fetch-corpus" . > $@

# 2. Clean it.  If the text has hardly any empty lines, each file is a document.
clean.jsonl: $(RAW)
	@test -e started || date +%s > started
	$(CLEAN) --split $(strip $(SPLIT)) $(filter-out corpus.list,$(RAW)) > $@
	@test "$$(wc -l < $@)" -ge 20 || $(CLEAN) --split file $(filter-out corpus.list,$(RAW)) > $@

# 3. Hold out every fortieth document for the last measurement; training does not use it.  If there are fewer than
# 20 documents, the last tenth of each is held out, as in nanoGPT.
train.jsonl: clean.jsonl
	perl "$$RECIPE_HOME/hold-out" $< $@ held-out.jsonl > held-out.how
held-out.jsonl held-out.how: train.jsonl ;
held-out.txt: held-out.jsonl
	perl "$$RECIPE_HOME/jsonl2text" $< > $@

# 4. Learn a tokenizer, turn text into token shards.
tok/tokenizer.json: train.jsonl
	@mkdir -p $(@D)
	train-tokenizer --vocab-size $(VOCAB) --pattern llama3 -f -o $@ $<
data/train.bin: tok/tokenizer.json train.jsonl clean.jsonl held-out.how
	case $$(cat held-out.how) in \
	documents) shard-data --tokenizer $< --val-fraction 0.01 --seed $(SEED) -f -o data/ train.jsonl ;; \
	ends) shard-data --tokenizer $< --split contiguous --val-fraction 0.1 -f -o data/ clean.jsonl ;; \
	esac

# 5. A model with random weights, and its loss on the held-out text.  The windows are as long as those of the training,
# a length that the trained model records itself.
m0/config.json: tok/tokenizer.json
	init-model "$$RECIPE_PRESET" --tokenizer $< --seed $(SEED) -f -o m0/
before.json: m0/config.json held-out.jsonl
	eval-model --seq-len $(strip $(SEQ)) m0/ held-out.jsonl > $@

# 6. The number of steps that fit into BUDGET, measured by a short run.
steps: m0/config.json data/train.bin
	rm -rf probe probe.jsonl
	train m0/ data/ -o probe/ --steps 12 $(TRAIN) --metrics probe.jsonl
	@speed=$$(sed -n 's/.*"tokens_per_second":\([0-9.e+]*\).*/\1/p' probe.jsonl | tail -n 1) && \
	bytes=$$(wc -c < data/train.bin) && \
	awk -v speed="$$speed" -v bytes="$$bytes" 'BEGIN { \
	    step = $(BATCH) * $(SEQ); most = $(EPOCHS) * bytes / 2 / step; n = $(BUDGET) * speed / step; \
	    printf "%d\n", (n > most ? most + 1 : n < 20 ? 20 : n) }' > $@
	@rm -rf probe

# 7. Train.
trained: steps before.json
	rm -rf run run.jsonl
	train m0/ data/ -o run/ --steps $$(cat steps) --warmup $$(($$(cat steps) / 20 + 1)) \
	    $(TRAIN) --metrics run.jsonl
	@touch $@

# 8. The loss after training, generated samples, and the plots.
after.json: trained
	eval-model run/ held-out.jsonl > $@
samples.txt: trained held-out.txt
	@rm -f $@.new
	awk 'NR == FNR { n++; next } \
	    { k = int(n / 3) + 1 } FNR % k == 1 % k { print $$1, $$2, $$3, $$4 }' held-out.txt held-out.txt | while read -r prompt; do \
	    generate run/ -p "$$prompt" -n 120 --temperature 0.8 --top-p 0.95 --seed $(SEED) < /dev/null >> $@.new && \
	    printf '\n\n' >> $@.new || exit 1; \
	done
	@mv $@.new $@
loss.svg: trained
	plot-run --smooth 0.9 -f -o $@ run.jsonl
loss.png: trained
	plot-run --smooth 0.9 -f -o $@ run.jsonl

report: before.json after.json samples.txt loss.svg loss.png held-out.txt
	@bash "$$RECIPE_HOME/first-light-report" "$$RECIPE_WORK"
	@rm -f started

endif
