#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# BERT: masked language modelling, and what else the tools do with an encoder.
bats_require_minimum_version 1.5.0

load cuda

setup_file() {
    cd "$BATS_FILE_TMPDIR"
    for i in {1..120}; do
        echo "{\"text\":\"the river ran by the old bridge $i and the stones lay in the water under it\"}"
    done > t.jsonl
    train-tokenizer -q -m wordpiece -V 64 -o tok/tokenizer.json t.jsonl
    shard-data -q --tokenizer tok --add-special --val-fraction 0.1 -o data t.jsonl
    init-model -q bert-4m -t tok --set hidden_size=32 --set intermediate_size=64 --set num_hidden_layers=2 \
        --set max_position_embeddings=64 -o m0
}

setup() {
    cd "$BATS_TEST_TMPDIR"
    ln -s "$BATS_FILE_TMPDIR"/{data,m0,tok,t.jsonl} .
}

T=(train -q --peak-tflops 0 --seq-len 32 --batch-size 4 --lr 1e-2 --lr-schedule constant)

# field FILE KEY: the values of a key, a line each
field() {
    sed -nE "s/.*\"$2\":([^,}]*).*/\1/p" "$1"
}

loss() {
    eval-model -q "$@" data/val --json > loss.json
    field loss.json loss
}

same_loss() {
    local a b
    a=$(loss "$1") && b=$(loss "$2") && [ -n "$a" ] && [ "$a" = "$b" ]
}

tensors() {
    tail -c +$((9 + $(od -An -t u8 -N 8 "$1"))) "$1"
}

same_bits() {
    cmp <(tensors "$1/latest/model.safetensors") <(tensors "$2/latest/model.safetensors")
    cmp "$1/latest/optimizer.safetensors" "$2/latest/optimizer.safetensors"
}

@test "mlm: an encoder learns, and the loss is that of masked tokens" {
    "${T[@]}" m0 data -o run --objective mlm --steps 150 --eval-every 150 --metrics m.jsonl
    a=$(loss m0) b=$(loss run)
    awk -v a="$a" -v b="$b" 'BEGIN { exit !(a > 3.5 && b < a - 1) }'
    [ "$(field loss.json task)" = '"mlm"' ]
    grep -q '"pseudo_perplexity"' loss.json
    run ! grep -E '"perplexity"|bits_per_byte' loss.json m.jsonl
    inspect-model --verify run > said
    run ! grep -E "tokenizer|fault:" said
    # 4 windows of 32 a step, of which 15 % of the tokens that are not special
    field m.jsonl tokens | sort -n | tail -1 | awk '{ exit !($1 > 150 * 128 * 0.10 && $1 < 150 * 128 * 0.17) }'
}

@test "mlm: the objective of an encoder without --objective; share and whole words" {
    "${T[@]}" m0 data -o a --steps 3
    "${T[@]}" m0 data -o b --steps 3 --objective mlm
    same_bits a b
    "${T[@]}" m0 data -o c --steps 3 --objective mlm:share=0.5 --metrics c.jsonl
    [ "$(field c.jsonl tokens | tail -1)" -gt 130 ]
    "${T[@]}" m0 data -o d --steps 3 --objective mlm:whole_words=on
    run ! same_bits a d
}

@test "mlm: resumes to the bit, also in other micro-batches' places" {
    "${T[@]}" m0 data -o whole --steps 8
    "${T[@]}" m0 data -o part --steps 5
    train -q --resume part --steps 8
    same_bits whole part
    "${T[@]}" -j 1 m0 data -o one --steps 8
    same_bits whole one
}

@test "mlm: micro-batches count the masked tokens of the whole step" {
    "${T[@]}" m0 data -o a --steps 2 --batch-size 4 --metrics a.jsonl
    "${T[@]}" m0 data -o b --steps 2 --batch-size 1 --gradient-accumulation-steps 4 --metrics b.jsonl
    [ "$(field a.jsonl tokens)" = "$(field b.jsonl tokens)" ]
    paste <(field a.jsonl loss) <(field b.jsonl loss) |
        awk '{ d = $1 - $2; exit !(d < 1e-4 && d > -1e-4) }'
}

@test "mlm: next sentences: pairs train their head, resume to the bit, on ranks and in BF16" {
    args=(--objective mlm:next_sentence=on)
    "${T[@]}" m0 data -o whole --steps 8 "${args[@]}" --metrics m.jsonl --eval-every 4
    [ "$(grep -c next_sentence_loss m.jsonl)" -eq 8 ]
    grep -q '"event":"eval".*"pseudo_perplexity"' m.jsonl
    # what is evaluated are the weights that train: ln 64 = 4.16 at first
    grep '"event":"eval"' m.jsonl | tail -1 > last.jsonl
    field last.jsonl loss | awk '{ exit !($1 < 4) }'
    "${T[@]}" m0 data -o part --steps 5 "${args[@]}"
    train -q --resume part --steps 8
    same_bits whole part
    "${T[@]}" m0 data -o ranks --steps 3 "${args[@]}" --batch-size 2 --gradient-accumulation-steps 2 --leaves 2 --ranks 2
    "${T[@]}" m0 data -o alone --steps 3 "${args[@]}" --batch-size 2 --gradient-accumulation-steps 2 --leaves 2
    same_bits ranks alone
    pp=(--batch-size 2 --gradient-accumulation-steps 2 --leaves 1 --eval-every 3)
    "${T[@]}" m0 data -o staged --steps 3 "${args[@]}" "${pp[@]}" --mesh pp=2
    "${T[@]}" m0 data -o whole3 --steps 3 "${args[@]}" "${pp[@]}" --tied-apart
    same_bits staged whole3
    "${T[@]}" m0 data -o low --steps 3 "${args[@]}" --dtype bf16 --recompute full
    grep -q '"BertForPreTraining"' whole/latest/config.json
    inspect-model --verify whole > said
    grep -q '46 tensors: 0 faults' said
}

@test "mlm: next sentences: the head is found in any folder, kept without the objective, and read nowhere else" {
    "${T[@]}" m0 data -o run --steps 150 --objective mlm:next_sentence=on --metrics m.jsonl --log-every 1
    field m.jsonl next_sentence_loss | awk 'NR <= 10 { a += $1 } NR > 140 { b += $1 } END { exit !(b < a) }'
    cp -rL run/latest named
    sed -i 's/BertForPreTraining/BertForMaskedLM/' named/config.json
    "${T[@]}" run data -o a --steps 2 --objective mlm:next_sentence=on
    "${T[@]}" named data -o b --steps 2 --objective mlm:next_sentence=on
    same_bits a b
    "${T[@]}" run data -o kept --steps 2
    inspect-model --check --only '*pooler*' run kept > said
    inspect-model --check --only '*seq_relationship*' run kept >> said
    [ "$(grep -c '2 of 2 tensors are the same' said)" -eq 2 ]
    grep -q '"BertForPreTraining"' kept/latest/config.json
    "${T[@]}" named data -o without --steps 2
    [ "$(inspect-model without | grep -c pooler)" -eq 0 ]
    same_loss run named
    merge-models -q --method linear run run -o mean
    inspect-model --check run mean > said
    convert-model -q run -o bf16 --dtype bf16
    [ "$(inspect-model bf16 | grep -c pooler)" -eq 2 ]
    sed 's/BertForMaskedLM/BertForPreTraining/' m0/config.json > c.json
    init-model -q c.json -t tok -o fresh
    inspect-model --verify fresh > said
    train --dry-run --objective mlm:next_sentence=on bert-base --seq-len 512 | grep -q 'parameters 110106428'
}

@test "mlm: next sentences: a device has the losses of the CPU" {
    use_module
    for d in cpu cuda; do
        "${T[@]}" m0 data -o $d --steps 3 --objective mlm:next_sentence=on --device $d --metrics $d.jsonl
        paste <(field $d.jsonl loss) <(field $d.jsonl next_sentence_loss) > $d.losses
    done
    paste cpu.losses cuda.losses | awk '{ a = $1 - $3; b = $2 - $4; if (a * a > 1e-10 || b * b > 1e-10) exit 1 }
        END { exit NR != 3 }'
}

@test "mlm: next sentences: what has no pairs is refused in one line" {
    refuse() {
        run "${T[@]}" "$2" data -o bad --objective mlm:next_sentence=on "${@:3}"
        [ "$status" -eq 2 ]
        [ "${#lines[@]}" -eq 1 ]
        [[ "$output" == *"$1"* ]] || { echo "$output"; false; }
    }
    refuse "train: --seq-len: 6 tokens, but a pair has at least 8" m0 --seq-len 6
    init-model -q bert-4m -t tok --set hidden_size=32 --set intermediate_size=64 --set num_hidden_layers=1 \
        --set type_vocab_size=1 -o one
    refuse "has 1 type of tokens, but the texts of a pair are of two" one
    cp -rL m0 other
    sed -i '/"pair"/,/"A"/s/\[CLS\]/[SEP]/' other/tokenizer.json
    refuse "does not join two texts as [CLS] A [SEP] B [SEP]" other --no-check-tokenizer
}

@test "mlm: an evaluation does not depend on batch and threads" {
    a=$(loss m0 -b 1 -j 1) b=$(loss m0 -b 7)
    awk -v a="$a" -v b="$b" 'BEGIN { exit !(a - b < 1e-5 && b - a < 1e-5) }'
    text=$(eval-model -q m0 t.jsonl | sed -E 's/.*"tokens":([0-9]+).*/\1/')
    [ "$text" -gt 200 ]
    run ! eval-model m0 data/val --max-loss 1
}

@test "mlm: plans, conversions, copies and averages of encoders" {
    train --dry-run bert-base --seq-len 512 --batch-size 4 | grep -q 'parameters 109514298'
    convert-model -q m0 -o low --dtype bf16
    a=$(loss m0) b=$(loss low)
    awk -v a="$a" -v b="$b" 'BEGIN { exit !(a - b < 0.02 && b - a < 0.02) }'
    convert-model -q low -o back --dtype f32
    inspect-model --verify back > /dev/null
    merge-models -q --method linear m0 m0 -o mean
    same_loss m0 mean
    compress-ckpt -q m0 -o m0.lmz
    same_loss m0 m0.lmz
}

@test "mlm: old names are read, other heads are passed over and named" {
    convert-model -q m0 -o old
    python3 - <<'END' || skip "no python3"
import json, struct
path = "old/model.safetensors"
b = open(path, "rb").read()
n = struct.unpack("<Q", b[:8])[0]
head, data = json.loads(b[8:8 + n]), b[8 + n:]
out = {}
for k, v in head.items():
    if "LayerNorm" in k:
        k = k.replace(".weight", ".gamma").replace(".bias", ".beta")
    out[k] = v
end = len(data)
for k, shape in (("bert.pooler.dense.weight", [32, 32]), ("cls.seq_relationship.bias", [2]),
                 ("cls.predictions.decoder.bias", [2])):
    size = 4
    for d in shape:
        size *= d
    out[k] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
    end += size
data += b"\0" * (end - len(data))
head = json.dumps(out).encode()
open(path, "wb").write(struct.pack("<Q", len(head)) + head + data)
END
    same_loss m0 old
    inspect-model --verify old > said || true
    grep -q 'bert.pooler.dense.weight.*is not read' said
    run ! grep -q 'gamma' said
}

@test "mlm: GGUF and back without the head, which a warning names" {
    convert-model m0 -o m.gguf 2> said
    grep -q "'cls.predictions.*and . more: left out: GGUF has no head of such a model" said
    grep -q "bert computes GELU by its tanh form" said
    convert-model -q m.gguf -o back
    grep -q '"BertModel"' back/config.json
    cmp tok/tokenizer.json back/tokenizer.json
    inspect-model --check m0 back > differ || true
    [ "$(grep -c 'cls.predictions' differ)" -gt 0 ]
    run ! grep -q 'encoder.layer' differ
    run -2 --separate-stderr eval-model -q back data/val --json
    [[ $stderr == *"cls.predictions"* ]]
    convert-model -q back -o again.gguf
    convert-model -q m0 -o bare.gguf --no-originals
    convert-model -q bare.gguf -o made
    grep -q '"type_vocab_size": 2' made/config.json
    for i in a z; do
        printf '{"text":"the river ran %s by 12 bridges"}\n' $i
    done > text.jsonl
    shard-data -q --tokenizer made --add-special -o new text.jsonl
    shard-data -q --tokenizer tok --add-special -o old text.jsonl
    cmp new/*.bin old/*.bin
}

@test "mlm: what an encoder is not for is refused in one line" {
    init-model -q llama-1m -t tok --set hidden_size=32 --set intermediate_size=64 --set num_hidden_layers=1 -o causal
    declare -A no=(
        ["train m0 data -o x --objective clm"]='give --objective mlm'
        ["train causal data -o x --objective mlm"]='a llama model sees no later tokens'
        ["train m0 data -o x --objective mlm:share=2"]='share of mlm is a number from'
        ["train m0 data -o x --objective span"]='a bert model has no encoder'
        ["eval-model causal data/val --task mlm"]='a llama model sees no later tokens'
        ["eval-model m0 data/val --task perplexity"]='give --task mlm'
        ["eval-model m0 data/val --stride 4"]='leave it out'
        ["peft-tune m0 t.jsonl -o x"]='train fills its masks'
        ["generate m0 t.jsonl"]='generate: m0: a bert model sees the tokens on both sides'
        ["quantize-kv -q --evaluate m0 t.jsonl"]='predicts no next one'
        ["quantize-kv -q --calibrate --method fp8 m0 t.jsonl --seq-len 32 -o x"]='predicts no next one'
    )
    for c in "${!no[@]}"; do
        run -2 --separate-stderr $c
        echo "$c: $stderr"
        [ "${#stderr_lines[@]}" -eq 1 ]
        [[ $stderr == *"${no[$c]}"* ]]
        [ ! -e x ]
    done
}

@test "mlm: a tokenizer without a mask token, and none, are refused" {
    train-tokenizer -q -V 300 -o bpe/tokenizer.json t.jsonl
    shard-data -q --tokenizer bpe -o bytes t.jsonl
    init-model -q bert-4m -t bpe --set hidden_size=32 --set intermediate_size=64 --set num_hidden_layers=1 -o none
    run -2 --separate-stderr train none bytes -o x
    [[ $stderr == *'none: its tokenizer has no mask token'* ]]
    cp -rL m0 bare && rm bare/tokenizer*
    run -2 --separate-stderr train bare data -o x
    [[ $stderr == *'has no tokenizer, which names the mask token'* ]]
}

@test "mlm: data of one window are enough" {
    head -n 1 t.jsonl > one.jsonl
    shard-data -q --tokenizer tok --add-special -o one one.jsonl
    n=$(sed -nE 's/.*"tokens": ([0-9]+).*/\1/p' one/meta.json | head -n 1)
    "${T[@]}" m0 one -o run --steps 1 --seq-len "$n" --batch-size 1
    run -2 --separate-stderr "${T[@]}" m0 one -o more --steps 1 --seq-len $((n + 1)) --batch-size 1
    [[ $stderr == *"a sequence needs $((n + 1))"* ]]
}

@test "mlm: virtual tokens have no place among masked ones" {
    init-model -q llama-1m -t tok --set hidden_size=32 --set intermediate_size=64 --set num_hidden_layers=2 \
        --set num_attention_heads=4 --set num_key_value_heads=4 -o causal
    peft-tune -q causal t.jsonl -o a --method prompt --steps 1 --seq-len 32
    run -2 --separate-stderr eval-model m0 t.jsonl --adapter a --seq-len 32
    [[ $stderr == *"has virtual tokens, which windows of masked tokens do not have"* ]]
}

@test "mlm: merging by tokens moves the bias of the predictions with the embedding" {
    "${T[@]}" m0 data -o run --steps 20
    cp -rL run/latest a && cp -r a b
    python3 - <<'END' || skip "no python3"
import json
t = json.load(open("a/tokenizer.json"))
v = t["model"]["vocab"]
x, y = sorted(v, key=v.get)[40:42]
v[x], v[y] = v[y], v[x]
json.dump(t, open("b/tokenizer.json", "w"))
END
    merge-models -q --method linear a:1 b:0 --tokenizer b -o c
    bias() {
        python3 - "$1" <<'END'
import json, struct, sys
b = open(sys.argv[1] + "/model.safetensors", "rb").read()
n = struct.unpack("<Q", b[:8])[0]
x, y = json.loads(b[8:8 + n])["cls.predictions.bias"]["data_offsets"]
v = struct.unpack(f"<{(y - x) // 4}f", b[8 + n + x:8 + n + y])
print(v[40], v[41], v[39])
END
    }
    read -r x y z <<< "$(bias a)"
    [ "$x" != "$y" ]
    [ "$(bias c)" = "$y $x $z" ]
}
