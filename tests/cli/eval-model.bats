#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# eval-model: losses of text and shards, strides, multiple choice, limits, refusals.

setup() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    cd "$BATS_TEST_TMPDIR"
    sh "$root/tests/cli/examples/eval-model.sh"
}

# value KEY FILE
value() { grep -o "\"$1\":[-0-9.e+]*" "$2" | cut -d: -f2; }
near() { awk -v a="$1" -v b="$2" -v t="$3" 'BEGIN { d = a - b; exit !(d < t && -d < t) }'; }

@test "eval-model: loss, perplexity and bits per byte are consistent" {
    eval-model run/ data/val > a
    [ "$(wc -l < a)" -eq 1 ]
    [ "$(value tokens a)" -gt 100 ]
    grep -q '"dtype":"f32","device":"cpu"}$' a
    near "$(value loss a)" 6 0.5 # ln 400 = 5.99
    awk -v l="$(value loss a)" -v p="$(value perplexity a)" -v b="$(value bits_per_byte a)" -v n="$(value tokens a)" \
        -v y="$(value bytes a)" 'BEGIN { x = p / exp(l) - 1; z = b * y * log(2) / (l * n) - 1
        exit !(x < 1e-9 && x > -1e-9 && z < 1e-9 && z > -1e-9) }'
}

@test "eval-model: text and its shards give the same, except for the end-of-text tokens" {
    awk 'NR <= 3' held-out.txt > t.txt
    shard-data -q --tokenizer tok/tokenizer.json --no-eos -o shards/ t.txt
    eval-model run/ shards/train > a
    eval-model run/ t.txt > b
    eval-model run/ - < t.txt > c
    for key in loss bits_per_byte tokens bytes; do
        near "$(value $key a)" "$(value $key b)" 1e-6
        near "$(value $key a)" "$(value $key c)" 1e-6
    done
}

@test "eval-model: strides and batches change the context, not the count" {
    eval-model run/ held-out.txt --seq-len 64 --stride 64 > a
    eval-model run/ held-out.txt --seq-len 64 --stride 7 > b
    eval-model run/ held-out.txt --seq-len 64 --stride 7 --batch-size 3 -j 1 > c
    [ "$(value tokens a)" = "$(value tokens b)" ]
    [ "$(value loss a)" != "$(value loss b)" ]
    near "$(value loss b)" "$(value loss c)" 1e-6
}

@test "eval-model: without documents the first tokens have a context" {
    eval-model run/ data/val > a
    eval-model run/ data/val --no-documents > b
    [ "$(($(value tokens a) + $(value documents a) - 1))" -eq "$(value tokens b)" ]
}

@test "eval-model: bf16 is near f32" {
    eval-model run/ held-out.txt > a
    eval-model run/ held-out.txt --dtype bf16 > b
    near "$(value loss a)" "$(value loss b)" 0.01
}

@test "eval-model: multiple choice agrees with the losses" {
    eval-model run/ choices.jsonl -t multiple-choice > a
    [ "$(value questions a)" -eq 6 ]
    # evaluates each ending as a separate text: the most probable one must have been counted
    right=0
    for i in 0 1 2 3 4 5; do
        best=-1 lowest=1e9
        for k in 0 1 2 3; do
            case $k in 0) ending="word$i" ;; 1) ending="the text again and again" ;; 2) ending=line ;; 3) ending=of ;; esac
            printf 'The system reads %s' "$ending" > whole.txt
            printf 'The system reads' > part.txt
            eval-model run/ whole.txt > w
            eval-model run/ part.txt > p
            nll=$(awk -v a="$(value loss w)" -v b="$(value tokens w)" -v c="$(value loss p)" -v d="$(value tokens p)" \
                'BEGIN { printf "%.6f", a * b - c * d }')
            if awk -v a="$nll" -v b="$lowest" 'BEGIN { exit !(a < b) }'; then best=$k lowest=$nll; fi
        done
        right=$((right + (best == i % 4)))
    done
    near "$(value accuracy a)" "$(awk -v r=$right 'BEGIN { print r / 6 }')" 1e-6
}

@test "eval-model: a violated limit gives status 3 and still the results" {
    run eval-model run/ data/val --max-loss 1
    [ "$status" -eq 3 ]
    [[ "$output" == *'"loss":'* ]]
    run eval-model run/ data/val --max-perplexity 2
    [ "$status" -eq 3 ]
    run eval-model run/ choices.jsonl -t multiple-choice --min-accuracy 1
    [ "$status" -eq 3 ]
    run eval-model run/ data/val --max-loss 100
    [ "$status" -eq 0 ]
}

refuses() { # STATUS TEXT ARGUMENT ...
    local want=$1 text=$2
    shift 2
    run eval-model "$@"
    [ "$status" -eq "$want" ]
    [[ "$output" == *"$text"* ]]
    [ "${#lines[@]}" -eq 1 ]
}

@test "eval-model: data that do not fit" {
    shard-data -q --vocab-size 5000 -o other/ --no-eos data/val
    printf '\377\377' >> other/train.bin # the file is too long, whatever the index
    refuses 1 "other/train" run/ other/train
    awk 'BEGIN { for (i = 0; i < 500; i++) printf "w%dx%d ", i, i * i }' > odd.txt
    train-tokenizer -q --vocab-size 600 --pattern llama3 -o big/tokenizer.json odd.txt
    refuses 2 "it has 600 ids, the model's vocabulary is 400" run/ held-out.txt --tokenizer big
    shard-data -q --tokenizer big --no-shuffle -o big/ odd.txt
    refuses 2 "its vocabulary has 600 ids, that of run/ has 400" run/ big/train
    refuses 1 "does not fit a vocabulary of 400" run/ big/train --no-check-tokenizer
    : > empty.txt
    refuses 1 "nothing to evaluate" run/ empty.txt
    refuses 1 "nothing" run/ nothing
    printf 'a\377b' > bad.txt
    refuses 1 "UTF-8" run/ bad.txt
    refuses 2 "--stride" run/ held-out.txt --seq-len 8 --stride 9
    refuses 2 "--task multiple-choice" run/ held-out.txt --min-accuracy 0.5
    echo '{"prompt": "a"}' > q.jsonl
    refuses 1 'q.jsonl:1: "ctx" is missing or empty: write {"ctx": "...", ' --task multiple-choice run/ q.jsonl
    rm run/tokenizer.json
    refuses 2 "no tokenizer" run/ held-out.txt
    eval-model run/ data/val | grep -q '"bits_per_byte":null'
}

@test "eval-model: the default window is the length of the training, if the model records it" {
    eval-model run/ data/val | grep -q '"seq_len":1024,"stride":512,'
    train -q run/ data/ -o trained/ --steps 2 --batch-size 2 --seq-len 24 2> /dev/null
    eval-model trained/ data/val | grep -q '"seq_len":24,"stride":12,'
    eval-model trained/ data/val --seq-len 64 | grep -q '"seq_len":64,"stride":32,'
    # it is in the weights: also with their config alone, compressed, or merged
    mkdir copy && cp trained/step-000002/{config.json,model.safetensors,tokenizer.json} copy/
    eval-model copy/ data/val | grep -q '"seq_len":24,'
    compress-ckpt -q copy/ -o c.lmz
    eval-model c.lmz data/val | grep -q '"seq_len":24,'
    merge-models -q -m linear trained/ trained/ -o merged/
    eval-model merged/ data/val | grep -q '"seq_len":24,'
    convert-model -q --dtype bf16 trained/ -o half/
    eval-model half/ data/val | grep -q '"seq_len":24,'
    convert-model -q --no-history trained/ -o t.gguf
    convert-model -q t.gguf -o back/
    eval-model back/ data/val | grep -q '"seq_len":24,'
    sed 's/"lmutils.seq_len":"24"/"lmutils.seq_len":"2x"/' copy/model.safetensors > x && mv x copy/model.safetensors
    refuses 1 "lmutils.seq_len is '2x', not a length" copy/ data/val
}

@test "eval-model: HellaSwag's own fields are cleaned and joined" {
    cat > hella.jsonl << 'END'
{"ind": 1, "activity_label": "A word", "ctx_a": "The system [header] reads  word1.", "ctx_b": "THE text", "ctx": "x", "endings": ["[step] is the  text ", "reads word2"], "label": "1"}
{"ind": 2, "activity_label": "Line", "ctx_a": "The text [title] again", "ctx_b": "", "ctx": "x", "endings": ["of", "the [substeps]system"], "label": 0}
END
    cat > plain.jsonl << 'END'
{"ctx": "A word: The system reads word1. The text", "endings": [" is the text", "reads word2"], "label": "1"}
{"ctx": "Line: The text. again", "endings": ["of", "the system"], "label": 0}
END
    eval-model run/ hella.jsonl -t multiple-choice > a
    eval-model run/ plain.jsonl -t multiple-choice > b
    [ "$(value loss a)" = "$(value loss b)" ]
    [ "$(value tokens a)" = "$(value tokens b)" ]
}

@test "eval-model: invalid questions" {
    echo '{"ctx": "a", "endings": ["b"], "label": 0}' > q.jsonl
    refuses 1 'q.jsonl:1' run/ q.jsonl -t multiple-choice
    echo '{"ctx": "a", "endings": ["b", "c"], "label": 2}' > q.jsonl
    refuses 1 '"label" is 2' run/ q.jsonl -t multiple-choice
    echo '{"endings": ["b", "c"], "label": "1"}' > q.jsonl
    refuses 1 '"ctx"' run/ q.jsonl -t multiple-choice
}

@test "eval-model: weights with NaN are status 4, missing tensors 2" {
    dd if=/dev/zero bs=1 count=400 status=none | tr '\0' '\377' |
        dd of=run/model.safetensors bs=1 seek=$(($(stat -c %s run/model.safetensors) - 400)) conv=notrunc status=none
    refuses 4 "not a finite number" run/ data/val
    sed -i 's/"num_hidden_layers": 2/"num_hidden_layers": 3/' run/config.json
    refuses 2 "model.layers.2" run/ data/val
}

@test "eval-model: a report beside the model may be written again, the model's own files may not" {
    eval-model run/ data/val -o run/eval.json
    eval-model run/ data/val -f -o run/eval.json
    run -2 --separate-stderr eval-model run/ data/val -f -o run/config.json
    [[ $stderr == *"it is a part of the input run/"* ]]
}

@test "eval-model: --no-json: the same members, a line each" {
    eval-model --json run/ data/val > a
    eval-model --no-json run/ data/val > b
    [ "$(grep -o '"[a-z_]*":' a | tr -d '":')" = "$(awk '{ print $1 }' b)" ]
    grep -qE '^loss +[0-9]\.[0-9]+$' b
    grep -qE '^data +data/val$' b
}
