# SPDX-License-Identifier: Apache-2.0
# peft-tune: adapters and parts of a model, resumes, adapters without training, and what is refused; loss marks of shards.

bats_require_minimum_version 1.5.0

setup_file() {
    cd "$BATS_FILE_TMPDIR" || exit 1
    seq 300 | awk '{ print "{\"text\": \"The river number " $1 " walks under the old bridge of stones.\"}" }' > text.jsonl
    seq 60 | awk '{ print "{\"prompt\": \"The river number " $1 "\", \"completion\": \" walks under the bridge.\"}" }' > qa.jsonl
    seq 60 | awk '{ print "{\"messages\": [{\"role\": \"user\", \"content\": \"river " $1 "\"}, {\"role\": \"assistant\", \"content\": \"bridge\"}]}" }' > chat.jsonl
    train-tokenizer -q -V 320 -o tok/tokenizer.json text.jsonl
    cat > config.json <<END
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320, "hidden_size": 64,
 "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
 "hidden_act": "silu", "max_position_embeddings": 128, "initializer_range": 0.02, "rms_norm_eps": 1e-05,
 "rope_theta": 10000.0, "tie_word_embeddings": true, "eos_token_id": 0}
END
    init-model -q config.json --tokenizer tok/tokenizer.json -o m
}

setup() {
    cd "$BATS_FILE_TMPDIR" || exit 1
    how=(--seq-len 64 --batch-size 4 --dtype f32 --lr 1e-3)
}

# The numbers of a file of tensors, without its header.
numbers() { # FILE
    local n
    n=$(od -An -tu8 -N8 "$1")
    tail -c +$((n + 9)) "$1" | cksum
}

loss_of() { # head or tail: of the first or the last step
    grep '"event":"step"' a.jsonl | "$1" -n 1 | sed 's/.*"loss":\([0-9.]*\).*/\1/'
}

@test "peft-tune: an adapter learns, is a folder of PEFT, and merges" {
    peft-tune -q m qa.jsonl -o a "${how[@]}" --rank 4 --epochs 8 --metrics a.jsonl
    grep -q '"r": 4' a/adapter_config.json
    grep -q '"lora_alpha": 8' a/adapter_config.json
    grep -q '"peft_type": "LORA"' a/adapter_config.json
    [ -s a/adapter_model.safetensors ]
    [ ! -e a/config.json ]
    awk -v first="$(loss_of head)" -v last="$(loss_of tail)" 'BEGIN { exit !(last > 0 && last < first - 0.1) }'
    merge-models -q --method passthrough m+a -o merged
    run cmp m/model.safetensors merged/model.safetensors
    [ "$status" -ne 0 ]
}

@test "peft-tune: a frozen weight that is not a number is named, in panels too" {
    for tensor in model.layers.1.self_attn.q_proj.weight model.layers.0.mlp.down_proj.weight; do
        rm -rf spoiled
        cp -r m spoiled
        file=spoiled/model.safetensors
        n=$(od -An -t u8 -N 8 $file)
        at=$(head -c $((n + 8)) $file | grep -ao "\"$tensor\":{[^}]*" | sed 's/.*"data_offsets":\[\([0-9]*\),.*/\1/')
        printf '\0\0\300\177' | dd of=$file bs=1 seek=$((8 + n + at + 400)) conv=notrunc status=none
        for type in bf16 f32; do
            run -4 --separate-stderr peft-tune -q spoiled qa.jsonl -o none --seq-len 64 --batch-size 4 --dtype $type --steps 2
            [ "$stderr" = "peft-tune: spoiled: tensor \"$tensor\" holds a NaN: begin with another copy of the model" ]
        done
    done
}

@test "peft-tune: gradients of a swish of large negative numbers are finite" {
    peft-tune -q m qa.jsonl -o steep "${how[@]}" --steps 1 --method houlsby
    file=steep/adapter_model.safetensors
    n=$(od -An -t u8 -N 8 $file)
    for bias in $(head -c $((n + 8)) $file | grep -ao '"[^"]*adapter_down.0.bias":{[^}]*' | sed 's/.*"data_offsets":\[\([0-9]*\),.*/\1/'); do
        printf '\0\0\310\302' | dd of=$file bs=1 seek=$((8 + n + bias)) conv=notrunc status=none # -100
    done
    peft-tune -q m qa.jsonl -o on "${how[@]}" --steps 2 --init-adapter steep
}

@test "peft-tune: an existing run is refused before anything is read" {
    peft-tune -q m qa.jsonl -o taken --steps 1 --batch-size 1 --seq-len 32
    run peft-tune m qa.jsonl -o taken --steps 1 --batch-size 1 --seq-len 32
    [ "$status" -eq 2 ]
    [ "$output" = "peft-tune: taken: holds a run already (step-000001): go on from there with peft-tune --resume taken, choose another folder, or replace the run with -f" ]
    peft-tune -q m qa.jsonl -o taken --steps 1 --batch-size 1 --seq-len 32 -f
}

@test "peft-tune: a run that is killed and resumed has the same bits" {
    peft-tune -q m qa.jsonl -o whole "${how[@]}" --epochs 12 --save-every 5 --adapter-dropout 0.1
    (exec peft-tune -q m qa.jsonl -o part "${how[@]}" --epochs 12 --save-every 5 --adapter-dropout 0.1) 3>&- &
    p=$!
    for _ in $(seq 600); do
        [ -e part/step-000010 ] && break
        sleep 0.02
    done
    kill -9 $p || true
    wait $p || true
    [ -e part/step-000010 ]
    peft-tune -q --resume part
    for f in adapter_model.safetensors optimizer.safetensors; do
        [ "$(numbers whole/latest/$f)" = "$(numbers part/latest/$f)" ]
    done
}

# The same run, and from its checkpoint of step 5 on again.
same_from_5() { # NAME OPTION...
    local name=$1
    shift
    peft-tune -q m qa.jsonl -o "$name" "${how[@]}" --steps 12 --save-every 5 --keep 0 "$@"
    peft-tune -q --resume "$name/step-000005" -o "$name-again"
    for f in adapter_model.safetensors optimizer.safetensors; do
        [ "$(numbers "$name/latest/$f")" = "$(numbers "$name-again/latest/$f")" ]
    done
    cmp "$name/adapter_config.json" "$name-again/adapter_config.json"
}

@test "peft-tune: adalora distributes its ranks, and files have those that are left" {
    local ranks=(--set target_r=2 --set tinit=1 --set tfinal=2 --set lora_dropout=0.1)
    same_from_5 ada --method adalora --rank 6 "${ranks[@]}"
    grep -q '"total_step": 12' ada/adapter_config.json
    [ "$(grep -c '^      true' ada/adapter_config.json)" -eq 28 ] # of 14 modules
    [ "$(grep -c '^      false' ada/adapter_config.json)" -eq 56 ]
    loss() { eval-model -q "$@" text.jsonl --seq-len 64 --json | sed 's/.*"loss":\([0-9.]*\).*/\1/'; }
    merge-models -q --method passthrough m+ada -o ada-merged
    paste <(loss m --adapter ada) <(loss ada-merged) <(loss m) > losses
    awk '{ exit !($1 > 0 && $1 - $2 < 1e-5 && $2 - $1 < 1e-5 && $1 != $3) }' losses
    peft-tune -q m qa.jsonl -o ada-on "${how[@]}" --init-adapter ada --method adalora --steps 2
    [ "$(grep -c '^      true' ada-on/adapter_config.json)" -eq 28 ]
    run peft-tune -q m qa.jsonl -o no "${how[@]}" --method adalora --steps 3 --set tinit=3
    [ "$status" -eq 2 ]
    [ "${#lines[@]}" -eq 1 ]
    [[ "$output" == *"none of 3 steps to distribute ranks in"* ]]
}

@test "peft-tune: adapters of indices train, and resume with them" {
    same_from_5 places --method shira --rank 2
    same_from_5 largest --method supertuning --set sparsity=0.9
    same_from_5 shared --method unilora --rank 2
    same_from_5 clusters --method adamss --set r=24 # which follow from the base
    eval-model -q m --adapter places text.jsonl --seq-len 64 > measured
    merge-models -q --method passthrough m+shared -o shared-merged
    peft-tune -q m qa.jsonl -o places-on "${how[@]}" --init-adapter places --method shira --steps 1 --lr 0
    [ "$(numbers places/adapter_model.safetensors)" = "$(numbers places-on/adapter_model.safetensors)" ]
}

@test "peft-tune: pvera draws in training, the same after a resume and on one thread, and its mean is merged" {
    same_from_5 noisy --method pvera --rank 6 --lr 1e-1
    peft-tune -q m qa.jsonl -o noisy-1 "${how[@]}" --method pvera --rank 6 --lr 1e-1 --steps 2 -j 1
    peft-tune -q m qa.jsonl -o noisy-2 "${how[@]}" --method pvera --rank 6 --lr 1e-1 --steps 2 -j 2
    [ "$(numbers noisy-1/adapter_model.safetensors)" = "$(numbers noisy-2/adapter_model.safetensors)" ]
    merge-models -q --method passthrough m+noisy -o noisy-merged
    loss() { eval-model -q "$@" text.jsonl --seq-len 64 --json | sed 's/.*"loss":\([0-9.]*\).*/\1/'; }
    paste <(loss m --adapter noisy) <(loss noisy-merged) <(loss m) > losses
    awk '{ exit !($1 > 0 && $1 - $2 < 1e-5 && $2 - $1 < 1e-5 && $1 != $3) }' losses
    # an evaluation in the run is that of the result, without noise
    peft-tune -q m qa.jsonl -o noisy-3 "${how[@]}" --method pvera --rank 6 --lr 1e-1 --steps 2 --val text.jsonl --eval-every 2 \
        --loss-on all --metrics a.jsonl -f
    awk -v a="$(grep '"event":"eval"' a.jsonl | sed 's/.*"loss":\([0-9.]*\).*/\1/')" -v b="$(loss m --adapter noisy-3)" \
        'BEGIN { exit !(a > 0 && a - b < 2e-2 && b - a < 2e-2) }'
}

@test "peft-tune: the LSTM of p-tuning trains, resumes, and leaves the rows that it makes" {
    same_from_5 lstm --method p-tuning --set num_virtual_tokens=4 --set encoder_hidden_size=24 \
        --set encoder_reparameterization_type=LSTM --set encoder_num_layers=3
    grep -q '"encoder_reparameterization_type": "LSTM"' lstm/adapter_config.json
    head -c 20000 lstm/adapter_model.safetensors | grep -aq '"prompt_embeddings"'
    eval-model -q m --adapter lstm text.jsonl --seq-len 64 > measured
    peft-tune -q m qa.jsonl -o low "${how[@]}" --dtype bf16 --method p-tuning --steps 2 -f \
        --set encoder_reparameterization_type=LSTM
}

@test "peft-tune: rows of the embedding train, alone and beside lora" {
    same_from_5 rows --method tokens --set 'token_indices=[3,270,300]'
    same_from_5 beside --rank 2 --set 'trainable_token_indices=[3,270]'
    loss() { eval-model -q "$@" text.jsonl --seq-len 64 --json | sed 's/.*"loss":\([0-9.]*\).*/\1/'; }
    for name in rows beside; do
        merge-models -q --method passthrough m+$name -o $name-merged
        paste <(loss m --adapter $name) <(loss $name-merged) <(loss m) > losses
        awk '{ exit !($1 > 0 && $1 - $2 < 1e-5 && $2 - $1 < 1e-5 && $1 != $3) }' losses
    done
    run peft-tune -q m qa.jsonl -o no "${how[@]}" --method tokens --set 'token_indices=[320]'
    [ "$status" -eq 1 ]
    [[ "$output" == *"not a token of the base"* ]]
}

@test "peft-tune: changed data end a resume, unless they are named" {
    cp qa.jsonl moving.jsonl
    peft-tune -q m moving.jsonl -o moved "${how[@]}" --epochs 1
    sed -i 1d moving.jsonl
    run peft-tune --resume moved --epochs 2
    [ "$status" -eq 2 ]
    [[ "$output" == *"are no longer those of the run"* ]]
    peft-tune -q --resume moved --epochs 2 moving.jsonl
}

@test "shard-data: a conversation of very many turns is refused where they are found by comparison" {
    awk 'BEGIN {
        printf "{\"messages\": ["
        for (i = 0; i < 20000; i++) printf "%s{\"role\": \"%s\", \"content\": \"a\"}", i ? ", " : "", i % 2 ? "assistant" : "user"
        print "]}"
    }' > turns.jsonl
    shard-data -q --chat --chat-template chatml -t tok/tokenizer.json -o turns turns.jsonl 2> err && false
    grep -qE '^shard-data: turns.jsonl:1: chatml: message 3[0-9]{3}: too many turns to find this answer by comparison: use a template that marks' err
    [ ! -e turns ]
}

@test "peft-tune: a run on standard input is resumed when the data are named" {
    peft-tune -q m - -o stream "${how[@]}" --steps 4 --save-every 2 < qa.jsonl
    peft-tune --resume stream/step-000002 -o rest 2> err && false
    grep -qE '^peft-tune: .*stream/step-000002: its data came from standard input: name the data: peft-tune --resume RUN DATA$' err
    peft-tune -q --resume stream/step-000002 -o rest - < qa.jsonl
    [ "$(numbers rest/adapter_model.safetensors)" = "$(numbers stream/adapter_model.safetensors)" ]
}

@test "peft-tune: conversations need a template, and train the assistant's turns" {
    run peft-tune m chat.jsonl -o c "${how[@]}"
    [ "$status" -eq 2 ]
    [[ "$output" == *"chat.jsonl:1"*"--chat-template"* ]]
    [ ! -e c ]
    run peft-tune m chat.jsonl -o c "${how[@]}" --chat-template chatml --steps 1
    [ "$status" -eq 0 ]
    [[ "$output" == *"60 records (messages): 60 examples"* ]]
    assistant=$(sed -n 's/.* \([0-9.]*\) % of .* tokens train.*/\1/p' <<< "$output")
    run peft-tune m chat.jsonl -o c -f "${how[@]}" --chat-template chatml --steps 1 --loss-on all
    all=$(sed -n 's/.* \([0-9.]*\) % of .* tokens train.*/\1/p' <<< "$output")
    awk -v a="$assistant" -v b="$all" 'BEGIN { exit !(a > 0 && a < 70 && b > 95) }'
}

@test "peft-tune: several methods train and go on from a saved adapter" {
    for method in qlora rslora dora loraplus ia3 ln_tuning; do
        peft-tune -q m qa.jsonl -o "by-$method" "${how[@]}" --method $method --steps 2
        [ -s "by-$method/adapter_model.safetensors" ]
    done
    peft-tune -q m qa.jsonl -o again "${how[@]}" --init-adapter by-rslora --steps 1 --lr 0
    cmp by-rslora/adapter_config.json again/adapter_config.json
    [ "$(numbers by-rslora/adapter_model.safetensors)" = "$(numbers again/adapter_model.safetensors)" ]
}

@test "peft-tune: a part of the model trains alone, and what changed becomes an adapter" {
    peft-tune -q m qa.jsonl -o part-of "${how[@]}" --method full --train '*mlp*' --steps 3
    inspect-model --diff m part-of 2> /dev/null > diff || true
    peft-tune -q --unmerge m part-of --rank 2 -o small
    grep -q '"r": 2' small/adapter_config.json
    grep -q 'down_proj' small/adapter_config.json
    run grep -q 'q_proj' small/adapter_config.json
    [ "$status" -ne 0 ]
    peft-tune -q m qa.jsonl -o one "${how[@]}" --steps 2 --rank 2
    peft-tune -q --combine cat m one small:0.5 -o two
    grep -q 'down_proj": 4' two/adapter_config.json
    peft-tune -q --to-lora m one --rank 1 -o less
    grep -q '"r": 1' less/adapter_config.json
}

@test "peft-tune: an adapter that is not trained goes to standard output as a tar" {
    peft-tune -q m qa.jsonl -o one -f "${how[@]}" --steps 2 --rank 2
    merge-models -q --method passthrough m+one -o tuned-by-one
    for way in "--unmerge m tuned-by-one --rank 1" "--combine cat m one one:0.5" "--to-lora m one --rank 1"; do
        read -ra way <<< "$way"
        rm -rf folder stream
        peft-tune -q "${way[@]}" -o folder
        mkdir stream
        peft-tune -q "${way[@]}" -o - | tar xf - -C stream
        diff -r folder stream
    done
    generate -q m --adapter folder -p 'The river' -n 8 -T 0 --ignore-eos > folder.txt
    peft-tune -q "${way[@]}" -o - | generate -q m --adapter - -p 'The river' -n 8 -T 0 --ignore-eos > stream.txt
    cmp folder.txt stream.txt
    run -2 peft-tune -q --json --to-lora m one -o -
    [ "$output" = "peft-tune: --json: standard output holds the adapter: write the adapter to a folder" ]
    run -2 peft-tune -q --unmerge m m -o -
    [ "$output" = "peft-tune: adapter: no module changes: give a model or an adapter that differs from the base" ]
}

@test "peft-tune: all linear layers of some of the layers are changed, and no others" {
    peft-tune -q m qa.jsonl -o some "${how[@]}" --steps 1 --layers 1
    head -c 20000 some/adapter_model.safetensors | grep -aq 'layers\.1\.mlp\.down_proj'
    run grep -aq 'layers\.0\.' some/adapter_model.safetensors
    [ "$status" -eq 1 ]
    run grep -q 'all-linear' some/adapter_config.json # PEFT reads layers only beside names
    [ "$status" -eq 1 ]
    grep -q 'gate_proj' some/adapter_config.json
}

@test "peft-tune: the plan has frozen and trained weights, and nothing is written" {
    peft-tune -q m qa.jsonl --dry-run "${how[@]}" > plan
    grep -q '^frozen' plan
    grep -q '^trained' plan
    [ ! -e plan-run ]
    peft-tune --list-methods | grep -q '^qlora '
    peft-tune --list-optimizers | grep -q '^adamw '
    peft-tune --list-optimizers --json | grep -q '"adamw": {'
    peft-tune --list-methods --json | grep -q '"peft_type":"LORA"'
}

# Every method but parts of the model, and what needs a file or keys.
adapters() {
    peft-tune --list-methods | sed -nE 's/^([a-z][^ ]*) .*/\1/p' | grep -vxE 'full|bitfit|tokens|frod'
}

# Options of a method for sizes that suit a base of 64 columns, or of a multiple of them.
keys_of() { # METHOD
    keys=()
    case $1 in
    adamss) keys=(--set r=24) ;;
    c3a) keys=(--set block_size=32) ;;
    road) keys=(--set group_size=32) ;;
    shira) keys=(--set r=4) ;;
    vblora) keys=(--set vector_length=32) ;;
    waveft) keys=(--set n_frequency=64) ;;
    esac
}

@test "peft-tune: every method trains in BF16 on a base in NF4" {
    for method in $(adapters); do
        keys_of "$method"
        peft-tune -q m qa.jsonl -o low -f "${how[@]}" --dtype bf16 --base-format nf4 --method "$method" --steps 2 \
            --metrics low.jsonl "${keys[@]}" 2> err || {
            echo "$method: $(cat err)"
            false
        }
        grep -q '"event":"step","step":2,.*"loss":[0-9]' low.jsonl
    done
}

# The base knows the data and is wide: a matrix of an adapter that is wrong, or made of sums of packed products that
# several threads put into the same memory, moves its loss.
@test "peft-tune: a new adapter has the loss of its base in BF16, with activations kept and computed again" {
    first=(--seq-len 64 --batch-size 4 --lr 1e-3 --threads 4 -f)
    sed -E 's/"(hidden|intermediate)_size": [0-9]+/"\1_size": 384/g; s/"num_hidden_layers": 2/"num_hidden_layers": 1/' \
        config.json > wide.json
    init-model -q wide.json --tokenizer tok/tokenizer.json -o wide0
    peft-tune -q wide0 qa.jsonl -o wide --method full --dtype f32 --steps 10 "${first[@]}"
    peft-tune -q wide qa.jsonl -o fresh --method full --dtype bf16 --steps 1 --metrics a.jsonl "${first[@]}"
    base=$(loss_of head)
    awk -v base="$base" 'BEGIN { exit !(base > 0 && base < 1) }'
    for method in $(adapters); do
        near=1e-3
        keys_of "$method"
        case $method in
        prompt | p-tuning | prefix) continue ;; # tokens that are drawn
        adalora) keys+=(--set orth_reg_weight=1e-9) ;; # a penalty is part of the loss
        fourierft) keys+=(--set scaling=1e-3) ;; # coefficients that are drawn
        qlora | loftq) near=5e-2 ;; # weights of 4 bits
        esac
        for mode in none full; do
            peft-tune -q wide qa.jsonl -o fresh --method "$method" --dtype bf16 --recompute "$mode" --steps 1 \
                --metrics a.jsonl "${keys[@]}" "${first[@]}"
            awk -v base="$base" -v loss="$(loss_of head)" -v near=$near \
                'BEGIN { d = loss - base; exit !(loss > 0 && d < near * base && d > -near * base) }' || {
                echo "$method, --recompute $mode: $(loss_of head), the base has $base"
                false
            }
        done
    done
}

@test "peft-tune: qlora encodes layers and embedding, and computes activations again; each can be chosen" {
    plan() { peft-tune --dry-run m "${how[@]}" "$@" 2>/dev/null; }
    plan --method qlora > q
    grep -q '^frozen (nf4_dq)' q
    grep -q '^frozen (q8_0)' q
    plan --method qlora --embed-format nf4_dq > q4
    [ "$(grep -c q8_0 q4)" -eq 0 ]
    plan --method qlora --embed-format f32 | grep -q '^frozen (f32) *8[0-9]\.[0-9] KiB'
    # the same numbers, whatever is kept of the activations
    for how_much in none full; do
        peft-tune -q m qa.jsonl -o $how_much "${how[@]}" --method qlora --steps 3 --recompute $how_much
    done
    [ "$(numbers none/adapter_model.safetensors)" = "$(numbers full/adapter_model.safetensors)" ]
    # an embedding that trains is kept as it is, and is not if that was asked for
    plan --method qlora --modules-to-save embed_tokens > q
    [ "$(grep -c q8_0 q)" -eq 0 ]
    peft-tune --dry-run m "${how[@]}" --modules-to-save embed_tokens --embed-format q8_0 2> err && false
    grep -q '^peft-tune: --embed-format: nothing here can be kept in q8_0' err
}

@test "peft-tune: values that exclude each other, or that nothing uses, are as PEFT reads them" {
    value() { sed -n "s/^ *\"$2\": \([^,]*\),*$/\1/p" "$1/adapter_config.json"; }
    peft-tune -q m qa.jsonl -o largest-alone "${how[@]}" --method supertuning --steps 1
    [ "$(value largest-alone r) $(value largest-alone lora_alpha)" = "null null" ]
    peft-tune -q m qa.jsonl -o largest-both "${how[@]}" --method supertuning --rank 2 --steps 1
    [ "$(value largest-both r) $(value largest-both lora_alpha)" = "2 4" ]
    peft-tune -q m qa.jsonl -o turned "${how[@]}" --method oft --rank 4 --steps 1
    [ "$(value turned r) $(value turned oft_block_size)" = "4 0" ]
    peft-tune -q m qa.jsonl -o butterfly "${how[@]}" --method boft --set boft_block_num=8 --steps 1
    [ "$(value butterfly boft_block_num) $(value butterfly boft_block_size)" = "8 0" ]
}

@test "peft-tune: --method beside a saved adapter is its own, or refused" {
    peft-tune -q m qa.jsonl -o saved "${how[@]}" --steps 1 --rank 2
    for method in vera ia3 prompt houlsby; do
        run -2 peft-tune m qa.jsonl -o no "${how[@]}" --steps 1 --init-adapter saved --method $method
        [ "$output" = "peft-tune: --method: '$method' is not the method of the saved adapter, whose configuration says it: leave it out" ]
        [ ! -e no ]
    done
    peft-tune -q m qa.jsonl -o of-its-kind "${how[@]}" --steps 1 --init-adapter saved --method qlora
    peft-tune -q m qa.jsonl -o neck "${how[@]}" --steps 1 --method houlsby
    peft-tune -q m qa.jsonl -o neck-on "${how[@]}" --steps 1 --init-adapter neck --method houlsby
}

@test "peft-tune: --list-methods has every key that --set takes, with its default" {
    local method key
    peft-tune --list-methods --json > methods.json
    run grep -c '"help":""' methods.json
    [ "$output" = 0 ]
    for method in lora fourierft prompt p-tuning houlsby; do
        peft-tune -q m qa.jsonl -o "keys-$method" "${how[@]}" --steps 1 --method "$method"
        sed "s/.*\"name\":\"$method\"//; s/\"name\":\"[a-z0-9-]*\",\"peft_type\".*//" methods.json > of-it
        for key in $(grep -o '"[a-zA-Z0-9_]*":' "keys-$method/adapter_config.json" | sort -u); do
            case $key in '"peft_type":' | '"config":') continue ;; esac
            grep -q "$key{\"value\":" of-it
        done
    done
    peft-tune --list-methods > methods
    [ "$(grep -c 'saved by PEFT alone' methods)" -eq 1 ]
    [ "$(grep -o '"begins":false' methods.json | wc -l)" -eq 1 ]
    [[ $(sed -n '/^lora /,/^qlora /p' methods) == *init_lora_weights*"[true]"* ]]
    grep -Eq '^  r  *rank .*\[16\]$' methods # the default of peft-tune, not PEFT's
    peft-tune -q m qa.jsonl -o set "${how[@]}" --steps 1 --set init_lora_weights=gaussian
    run peft-tune m qa.jsonl -o no --method pfeifer
    [[ $output == *"did you mean 'pfeiffer'"* ]]
}

@test "peft-tune: names of a saved adapter may match nothing, as in PEFT; the tied head may be excluded" {
    peft-tune -q m qa.jsonl -o named "${how[@]}" --steps 1 --target q_proj,v_proj --exclude lm_head
    sed -i 's/"q_proj"/"q_proj", "qkv_proj"/; s/"lm_head"/"lm_head", "vision"/' named/adapter_config.json
    grep -q vision named/adapter_config.json
    peft-tune -q m qa.jsonl -o next "${how[@]}" --steps 1 --init-adapter named
}

@test "peft-tune: --resume names the tool that goes on, and finds the template from another folder" {
    run peft-tune --resume m
    [[ $output == *": start a run with peft-tune m DATA -o RUN" ]]
    printf '{%% for m in messages %%}{%% generation %%}{{ m.content }}{%% endgeneration %%}{%% endfor %%}' > own.jinja
    peft-tune -q m chat.jsonl -o ours "${how[@]}" --steps 1 --chat-template own.jinja
    run peft-tune -q m chat.jsonl -o ours "${how[@]}" --chat-template own.jinja
    [[ $output == *"go on from there with peft-tune --resume ours,"* ]]
    run train --resume ours
    [ "$output" = "train: ours: is a run of peft-tune: go on with peft-tune --resume ours" ]
    mkdir elsewhere
    (cd elsewhere && peft-tune -q --resume ../ours --steps 2)
}

@test "peft-tune, align-model: one name for what both have; other names are read, in saved runs too" {
    for tool in peft-tune align-model; do
        "$tool" m qa.jsonl --print-config --lora-alpha 8 --truncation end --max-examples 3 > now
        "$tool" m qa.jsonl --print-config --lora_alpha 8 --truncation-mode end --limit 3 > former
        cmp now former
    done
    peft-tune m qa.jsonl --print-config --lora-alpha 8 --truncation end --max-examples 3 > now
    peft-tune m qa.jsonl --print-config --alpha 8 --truncate end --max-samples 3 > former
    cmp now former
    peft-tune -q m qa.jsonl -o few "${how[@]}" --steps 1 --max-examples 30
    sed -i 's/"max-examples"/"limit"/' few/latest/state.json
    peft-tune -q --resume few --steps 2 # the digest of the data is that of 30 records
}

@test "peft-tune: --init-adapter of another base names the tensor, its shape and the base's" {
    sed 's/"hidden_size": 64/"hidden_size": 32/' config.json > narrow.json
    sed 's/"num_hidden_layers": 2/"num_hidden_layers": 1/' config.json > short.json
    init-model -q narrow.json --tokenizer tok/tokenizer.json -o narrow
    init-model -q short.json --tokenizer tok/tokenizer.json -o short
    peft-tune -q m qa.jsonl -o of-m "${how[@]}" --steps 1
    peft-tune -q short qa.jsonl -o of-short "${how[@]}" --steps 1
    other() { # BASE ADAPTER STATUS WORDS
        run peft-tune -q "$1" qa.jsonl -o no --init-adapter "$2"
        [ "$status" -eq "$3" ]
        [ "${#lines[@]}" -eq 1 ]
        [[ $output == "peft-tune: $2"*"on which "*"was trained" ]]
        [[ $output == *"$4"* ]]
        [ ! -e no ]
    }
    other narrow of-m 2 "'base_model.model.model.layers.0.mlp.down_proj.lora_B.weight' is [64,16], where the base and adapter_config.json have [32,16]"
    other short of-m 2 "short has no module for 'base_model.model.model.layers.1.mlp.down_proj.lora_A.weight'"
    other m of-short 2 'layers.1.self_attn.q_proj.lora_A.weight", which the base requires, is missing'
}

@test "peft-tune: bad input is one line" {
    bad() { # WORDS ARGUMENT...
        local words=$1
        shift
        run peft-tune "$@" -o no
        [ "$status" -eq 2 ] || [ "$status" -eq 1 ]
        [ "${#lines[@]}" -eq 1 ]
        [[ "$output" == *"$words"* ]]
        [ ! -e no ]
    }
    bad "did you mean 'lora'" m qa.jsonl --method loora
    bad "matches 'q_projj': did you mean 'q_proj'" m qa.jsonl --target q_projj
    bad "matches 'v_prj', 'norm': did you mean 'v_proj'" m qa.jsonl --target q_proj,v_prj,norm
    bad "matches 'v_prj'" m qa.jsonl --method ia3 --set 'target_modules=["k_proj", "v_prj"]'
    bad "'lm_head' is the embedding" m qa.jsonl --target q_proj,lm_head
    bad "is no key" m qa.jsonl --set lora_aplha=3
    bad "has no adapter" m qa.jsonl --method full --rank 4
    bad "peft-tune: --train: no tensor of the model matches" m qa.jsonl --method full --train '*moe*'
    bad "peft-tune: --method: 'bitfit' trains tensors named *bias, of which the model has none: choose another method" m qa.jsonl --method bitfit
    bad "serves --unmerge" m qa.jsonl --share 0.5
    bad "no module of m matches 'nosuch'" m qa.jsonl --modules-to-save nosuch
    bad "did you mean 'embed_tokens'" m qa.jsonl --modules-to-save embed_tokns
    bad "no module of m matches 'mlpp'" m qa.jsonl --exclude mlpp
    bad "no module of m matches 'q_prj': did you mean 'q_proj'" m qa.jsonl --exclude v_proj,q_prj
    bad "no layer 7: its layers are 0 to 1" m qa.jsonl --layers 7
    bad "no layer 7, 9: its layers are 0 to 1" m qa.jsonl --layers 0,7,9 --target q_proj
    bad "no layer 2: its layers" m qa.jsonl --set layers_to_transform=2 --set layers_pattern=layers
    bad "is not a list of layers" m qa.jsonl --layers 99999999999999999999
    bad "is not a list of layers" m qa.jsonl --layers 0-99999999999999999999
    bad "is not a list of layers" m qa.jsonl --layers 3-1
    bad "write the layers into the expression" m qa.jsonl --layers 1 --target '.*q_proj'
    bad "peft-tune: --set bias: bias is 'most', which names no set of biases: write none, all or lora_only" m qa.jsonl --set bias=most
    bad "choose another method" m qa.jsonl --set peft_type=OFT
    bad "--target: '(' is not a valid regular expression: correct it, or name modules" m qa.jsonl --target '('
    [ "$status" -eq 2 ]
    bad "--set foo: is no key of the method: --list-methods shows its keys" m qa.jsonl --set foo=1
    # the option that was given, not its key, and before the data are read
    bad "peft-tune: --lora-alpha: method 'ia3' has none: leave it out" m qa.jsonl --method ia3 --lora-alpha 8
    bad "peft-tune: --rank: method 'prompt' has none: leave it out" m qa.jsonl --method prompt --rank 4
    bad "peft-tune: --adapter-dropout: method 'ia3' has none: leave it out" m qa.jsonl --method ia3 --adapter-dropout 0.1
    bad "peft-tune: --target: no module of m matches 'q_prj': did you mean 'q_proj'" m qa.jsonl --target q_prj
    bad "peft-tune: --set target_modules: no module of m matches 'q_prj'" m qa.jsonl --set 'target_modules=["q_prj"]'
    bad "peft-tune: --set use_asa: subspaces are not dropped in training here: set it to false" m qa.jsonl --method adamss --set use_asa=true
    [[ $output != *qa.jsonl* ]]
    bad "--method: an adapter of 'frod' cannot be begun here: make it with PEFT" m qa.jsonl --method frod
    bad "adamss of rank 64 for 64 outputs clusters rows that are equally far apart, so that rounding decides: use an r of at most 63" m qa.jsonl --method adamss --set r=64
    bad "peft-tune: --adapter-dropout: pvera trains without dropout: set it to 0" -q m qa.jsonl --method pvera --adapter-dropout 0.1
    bad "peft-tune: --set pvera_dropout: pvera trains without dropout: set it to 0" -q m qa.jsonl --method pvera --set pvera_dropout=0.1
    bad "peft-tune: --rank: r is 2.5, not a whole number: choose from 1 to 1000000" m qa.jsonl --rank 2.5
    bad "peft-tune: --set r: r is 2.5, not a whole number: " m qa.jsonl --set r=2.5
    bad "peft-tune: --set lora_dropout: lora_dropout is 2, out of range: choose from 0 to 1" m qa.jsonl --set lora_dropout=2
    bad "peft-tune: --set use_dora: use_dora of lora is one of: false true; not 'maybe'" m qa.jsonl --set use_dora=maybe
    bad "peft-tune: --target: no module of m matches '.*q_prj': did you mean 'q_proj'? it has embed_tokens, q_proj" m qa.jsonl --target '.*q_prj'
    bad "peft-tune: --target: no module of m matches '.*\\.(q_prj|upproj)': did you mean 'q_proj', 'up_proj'? it has" m qa.jsonl --target '.*\.(q_prj|upproj)'
    bad "r is 4 and oft_block_size is 16" -q m qa.jsonl --method oft --rank 4 --set oft_block_size=16
    bad "a new adapter has no indices" m qa.jsonl --method vblora --set vector_length=32 --set save_only_topk_weights=true
    bad "give --val FILE too" m qa.jsonl --eval-every 3
    bad "no column" m qa.jsonl --map text=body
    bad "plain text" m text.jsonl --loss-on assistant
    echo '{"prompt": "a", "completion": 3}' > broken.jsonl
    bad "broken.jsonl:1" m broken.jsonl
}

@test "shard-data: loss marks of records go to train, eval-model and new shards" {
    shard-data -q --chat -t tok -o marked qa.jsonl
    [ "$(stat -c %s marked/train.mask)" -eq "$(($(stat -c %s marked/train.bin) / 2))" ]
    some=$(eval-model -q m marked/train | sed 's/.*"tokens":\([0-9]*\).*/\1/')
    marks=$(tr -d '\0' < marked/train.mask | wc -c)
    [ "$some" -eq "$marks" ]
    shard-data -q -o again marked/train
    [ "$(tr -d '\0' < again/train.mask | wc -c)" -eq "$marks" ]
    train -q m marked -o t --steps 2 --seq-len 32 --batch-size 2
    run train m marked -o t -f --steps 16 --seq-len 2 --batch-size 1 --metrics t.jsonl
    [ "$status" -eq 0 ]
    [[ "$output" == *"has no token that trains: it is skipped"* ]]
    grep -q '"event":"step".*"loss":null' t.jsonl
    run shard-data --chat -t tok --format nanogpt -o none qa.jsonl
    [ "$status" -eq 2 ]
    truncate -s -1 marked/train.mask
    run eval-model m marked/train
    [ "$status" -eq 1 ]
    [[ "$output" == *"train.mask"*"loss marks"* ]]
}

@test "peft-tune: a signal while records are read ends the run, which says nothing of them and makes nothing" {
    local pid
    mkfifo slow.jsonl
    (cat qa.jsonl && sleep 2 && cat qa.jsonl) > slow.jsonl 3>&- &
    peft-tune m slow.jsonl -o stopped "${how[@]}" 2> stopped.err 3>&- &
    pid=$!
    sleep 1
    kill -TERM $pid
    status=0
    wait $pid || status=$?
    [ "$status" -eq 143 ]
    run grep -E "record|null|nan" stopped.err
    [ "$status" -ne 0 ]
    [ ! -e stopped ]
}
