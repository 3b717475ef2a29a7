#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare our GGUF with the gguf package, transformers, tokenizers, and llama.cpp when there is one; speaks TAP.

Environment: LM_TEST_BUILD, a build folder with bin/; LLAMA_CPP, a llama.cpp with include/, ggml/include/ and its shared
libraries in LLAMA_CPP_LIB (default: $LLAMA_CPP/build/bin)."""
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import numpy as np
import torch
import transformers

try:
    import gguf
except ImportError:
    print("1..0 # SKIP the Python package gguf is not installed")
    sys.exit(0)
import tap
from tap import BUILD, HERE, check
from test_models import configs, make, pack_experts

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
IDS = list(range(5, 29))
TEXT = "The system's 1234 words:\n\n  don't   I'LL naïve €uro <|im_start|>x\ttab"
LLAMA_CPP = os.environ.get("LLAMA_CPP")
LLAMA_LIB = os.environ.get("LLAMA_CPP_LIB", os.path.join(LLAMA_CPP or "", "build", "bin"))
# Names in configs() that GGUF can represent completely.
WHOLE = ["gpt2", "llama", "llama-tied", "llama-bias", "llama-head-dim", "llama-linear", "llama-llama3", "llama-yarn",
         "llama-yarn-factor", "mistral-full", "qwen2", "qwen3", "olmo2", "olmo3", "gemma2", "gemma3",
         "olmo3-pattern", "gemma3-order", "gemma2-near", "mixtral", "mixtral-window", "qwen2-moe", "qwen3-moe",
         "bloom", "bloom-heads", "dots1", "deepseek-v2", "gpt-oss"]
# transformers' own GGUF reader does not support biases, scalings and head sizes, and needs a vocabulary for the others.
DIRECT = ["llama", "llama-tied", "qwen2"]
PURE = "f16 bf16 q8_0 q4_0 q4_1 q5_0 q5_1 q4_k q5_k q6_k".split()  # the others are mixtures
# exact GELU; no scale of attention; another scale, no caps; another scale and order of layers; layers without experts;
# weights of experts that do not add up to 1; widths and order of layers with states; biases of latent
# attention, factors of YaRN, rotation of halves; bounds of SwiGLU
REFUSED = ["gpt2-scaled", "gpt2-untied", "gemma2-plain", "gemma3-scaled", "qwen2-moe-some", "qwen3-moe-all", "qwen2-moe-balance",
           "qwen3-next", "qwen3-next-some",
           "qwen3_5", "deepseek-v2-groups", "deepseek-v3", "deepseek-v3-halves", "gpt-oss-bounds"]
# What GGUF has no place for: the head of masked models (llama.cpp reads encoders), modules that predict further on.  Tensors by
# the beginnings of their names, and how the config tells it.
HEADLESS = (("cls.",), (("BertForMaskedLM", "BertModel"),))
LEFT_OUT = {"bert": HEADLESS, "bert-types": HEADLESS,
            "deepseek-v3-ahead": (("model.layers.2.", "model.layers.3."),
                                  (('"num_nextn_predict_layers": 2', '"num_nextn_predict_layers": 0'),)),
            "deepseek-v3-tied": (("model.layers.2.",), (('"num_nextn_predict_layers": 1', '"num_nextn_predict_layers": 0'),))}


def convert(*args, ok=True):
    if os.path.isdir(args[2]):
        shutil.rmtree(args[2])  # files left by a failure must not be taken for its result
    r = subprocess.run([os.path.join(BUILD, "bin", "convert-model"), "-q", "-f", *args], capture_output=True, text=True)
    if ok and r.returncode:
        print("#", r.stderr.strip())
    return r


def logits(model):
    with torch.no_grad():
        return model.eval()(torch.tensor([IDS])).logits[0].float().numpy()


def close(a, b, tol):
    return a.shape == b.shape and np.linalg.norm(a - b) <= tol * np.linalg.norm(b)


def load(folder, **more):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more)


def same_tensors(a, b, without=()):
    """The folders have the same tensors; b those alone whose names do not begin with one of `without`."""
    from safetensors.torch import load_file
    x, y = (load_file(os.path.join(f, "model.safetensors")) for f in (a, b))
    kept = {k for k in x if not k.startswith(tuple(without))}
    return (kept < x.keys()) == bool(without) and kept == y.keys() and all(
        x[k].dtype == y[k].dtype and torch.equal(x[k], y[k]) for k in kept)


def same_config(a, b, turned=()):
    """The same text, each first of a pair in `turned` replaced by the second."""
    x, y = (open(os.path.join(f, "config.json")).read() for f in (a, b))
    for old, new in turned:
        x = x.replace(old, new)
    return x == y


def architectures(tmp):
    """Our GGUF in transformers, and the folder made from it without lmutils' keys."""
    for name, config in configs(vocab=96, wide=4):
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        config._experts_implementation = "eager"
        folder, file, back = (os.path.join(tmp, name + end) for end in ("", ".gguf", "-back"))
        model = make(config, 3)
        if name.startswith(("qwen", "gemma")):  # norms of Gemma are stored as 1 + w, which loses the last bits of F32
            model = model.to(torch.bfloat16)
        model.save_pretrained(folder)
        if name in REFUSED:
            check(convert(folder, "-o", file, ok=False).returncode == 2, f"{name}: refused")
            continue
        convert(folder, "-o", file)
        convert(file, "-o", back)
        without, turned = LEFT_OUT.get(name, ((), ()))
        check(same_tensors(folder, back, without) and same_config(folder, back, turned), f"{name}: exact there and back")
        if name not in WHOLE:
            continue
        want = logits(load(folder))
        convert(folder, "-o", file, "--no-originals")
        convert(file, "-o", back, "--dtype", "f32")
        check(close(logits(load(back)), want, 1e-5), f"{name}: a folder from the metadata alone computes the same")
        if name in DIRECT:
            check(close(logits(load(tmp, gguf_file=os.path.basename(file))), want, 1e-5), f"{name}: transformers loads it")
        if peer(tmp):
            got = run_peer(tmp, "logits", file, *map(str, IDS))
            check(close(np.frombuffer(got, np.float32).reshape(want.shape), want, 1e-2), f"{name}: llama.cpp computes the same")


def flat(tmp):
    """llama2.c's version 1 as written by its export.py, and llm.c's checkpoint as written by train_gpt2.py."""
    def permute(w, heads):  # to the pairs that run.c rotates
        return w.view(heads, 2, w.shape[0] // heads // 2, -1).transpose(1, 2).reshape(w.shape)

    folder, file, back = (os.path.join(tmp, "flat" + end) for end in ("", ".bin", "-back"))
    make(transformers.LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                  num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
                                  rms_norm_eps=1e-5), 2).save_pretrained(folder)
    m = load(folder)
    s, heads = m.state_dict(), {"self_attn.q_proj": 4, "self_attn.k_proj": 2}
    parts = [s[f"model.layers.{i}.{n}.weight"] for n in ("input_layernorm", "post_attention_layernorm") for i in range(2)]
    parts += [s["model.norm.weight"], s["model.embed_tokens.weight"]]
    for n in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
              "mlp.down_proj", "mlp.up_proj"):
        for i in range(2):
            w = s[f"model.layers.{i}.{n}.weight"]
            parts.append(permute(w, heads[n]) if n in heads else w)
    header = struct.pack("<Ii7iB", 0x616B3432, 1, 32, 48, 2, 4, 2, 96, 16, 0).ljust(256, b"\0")
    with open(file, "wb") as f:
        f.write(header + b"".join(p.contiguous().numpy().tobytes() for p in parts + [s["lm_head.weight"]]))
    convert(file, "-o", back)
    check(same_tensors(folder, back) and close(logits16(load(back)), logits16(m), 1e-6), "llama2.c: version 1 is read")

    make(transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=2, n_positions=16), 2).save_pretrained(folder)
    s = load(folder).state_dict()
    parts = [torch.nn.functional.pad(s["transformer.wte.weight"], (0, 0, 0, 128 - 96)), s["transformer.wpe.weight"]]
    for n in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"):
        for kind in ("weight", "bias"):
            for i in range(2):
                w = s[f"transformer.h.{i}.{n}.{kind}"]
                parts.append(w.t() if w.ndim == 2 else w)
    parts += [s["transformer.ln_f.weight"], s["transformer.ln_f.bias"]]
    want = struct.pack("<8i", 20240326, 3, 16, 96, 2, 2, 32, 128).ljust(1024, b"\0")
    want += b"".join(p.contiguous().numpy().tobytes() for p in parts)
    convert(folder, "-o", file)
    check(open(file, "rb").read() == want, "llm.c: the bytes of its own writer")


def logits16(model):
    with torch.no_grad():
        return model.eval()(torch.tensor([IDS[:16]])).logits[0].numpy()


def types(tmp):
    """The gguf package decodes blocks to the same numbers."""
    folder = os.path.join(tmp, "llama")
    config = transformers.LlamaConfig(vocab_size=96, hidden_size=256, intermediate_size=512, num_hidden_layers=1,
                                      num_attention_heads=4, num_key_value_heads=4)
    make(config, 1).save_pretrained(folder)
    from safetensors.torch import load_file
    for t in ["f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k", "q4_k_m", "q5_k_s",
              "q2_k", "q2_k_s", "q3_k_s", "q3_k_m", "q3_k_l", "iq4_nl", "iq4_xs"]:
        file, back = os.path.join(tmp, t + ".gguf"), os.path.join(tmp, t)
        convert(folder, "-o", file, "--type", t)
        convert(file, "-o", back, "--dtype", "f32")
        ours = load_file(os.path.join(back, "model.safetensors"))["model.layers.0.mlp.down_proj.weight"].numpy()
        theirs = {x.name: x for x in gguf.GGUFReader(file).tensors}["blk.0.ffn_down.weight"]
        check(np.array_equal(gguf.quants.dequantize(theirs.data, theirs.tensor_type), ours), f"{t}: decoded alike")
        if peer(tmp):
            ftype = {"f16": 1, "bf16": 32, "q8_0": 7, "q4_0": 2, "q4_1": 3, "q5_0": 8, "q5_1": 9, "q4_k": 14, "q5_k": 16,
                     "q6_k": 18, "q4_k_m": 15, "q5_k_s": 16, "q2_k": 10, "q2_k_s": 21, "q3_k_s": 11, "q3_k_m": 12,
                     "q3_k_l": 13, "iq4_nl": 25, "iq4_xs": 30}[t]
            whole, made = os.path.join(tmp, "whole.gguf"), os.path.join(tmp, "made.gguf")
            convert(folder, "-o", whole)
            run_peer(tmp, "quantize", whole, made, str(ftype), **({"PURE": "1"} if t in PURE else {}))
            a, b = ({x.name: (x.tensor_type, x.data.tobytes()) for x in gguf.GGUFReader(f).tensors} for f in (file, made))
            check(a == b, f"{t}: the same bytes as llama.cpp's")


def tokenizers(tmp):
    """Tokenizers of three patterns: in transformers, in llama.cpp, and generated from the metadata."""
    from tokenizers import Tokenizer
    corpus = os.path.join(tmp, "corpus.txt")
    with open(corpus, "w") as f:
        f.write("".join(f"The system's words {i % 37} and it'll write line {i} of the text.\n\n" for i in range(400)))
    for pattern, pre in [("gpt2", "gpt-2"), ("llama3", "smaug-bpe"), ("qwen", "qwen2"), ("cl100k", "smaug-bpe"),
                         ("o200k", "gpt-4o")]:
        folder, file, back = (os.path.join(tmp, pattern + end) for end in ("-tok", "-tok.gguf", "-tok-back"))
        # AutoTokenizer selects by the architecture if that has its own class.
        kind = transformers.Qwen2Config if pattern == "qwen" else transformers.LlamaConfig
        config = kind(vocab_size=420, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                      num_key_value_heads=2)
        make(config, 1).save_pretrained(folder)
        subprocess.run([os.path.join(BUILD, "bin", "train-tokenizer"), "-q", "-f", "-V", "400", "-p", pattern, "-s",
                        "<|endoftext|>", "-s", "<|im_start|>", corpus, "-o", folder + "/tokenizer.json"], check=True)
        want = Tokenizer.from_file(folder + "/tokenizer.json").encode(TEXT).ids
        convert(folder, "-o", file, "--no-originals")
        fields = gguf.GGUFReader(file).fields
        tokens = fields["tokenizer.ggml.tokens"].contents()
        check(fields["tokenizer.ggml.pre"].contents() == pre and len(tokens) == 420 and tokens[419] == "[PAD419]",
              f"{pattern}: the metadata say so")
        convert(file, "-o", back)
        check(Tokenizer.from_file(back + "/tokenizer.json").encode(TEXT).ids == want, f"{pattern}: made anew, the same ids")
        auto = transformers.AutoTokenizer.from_pretrained(back)
        check(auto(TEXT)["input_ids"] == want, f"{pattern}: AutoTokenizer takes it")
        if peer(tmp):
            got = run_peer(tmp, "tokenize", file, stdin=TEXT.encode())
            check([int(x) for x in got.split()] == want, f"{pattern}: llama.cpp gives the same ids")


def tokenizer_bin(tmp):
    """llama2.c's tokenizer.bin as written by its tokenizer.py, against SentencePiece itself."""
    try:
        import sentencepiece
    except ImportError:
        print("# tokenizer.bin is left out: no sentencepiece")
        return
    from tokenizers import Tokenizer
    corpus, file, folder = (os.path.join(tmp, n) for n in ("words.txt", "tokenizer.bin", "words"))
    with open(corpus, "w") as f:
        f.write("".join(f"The system's words {i % 37} and it'll write line {i} of the text.\n" for i in range(400)))
    sentencepiece.SentencePieceTrainer.train(
        input=corpus, model_prefix=os.path.join(tmp, "words"), vocab_size=400, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2)
    sp = sentencepiece.SentencePieceProcessor(model_file=os.path.join(tmp, "words.model"))
    pieces = [sp.id_to_piece(i) for i in range(400)]
    pieces[1:3] = ["\n<s>\n", "\n</s>\n"]
    with open(file, "wb") as f:
        f.write(struct.pack("I", max(len(p) for p in pieces)))
        for i, p in enumerate(pieces):
            b = p.replace("\u2581", " ").encode()
            f.write(struct.pack("fI", sp.get_score(i), len(b)) + b)
    make(transformers.LlamaConfig(vocab_size=400, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                                  num_attention_heads=2), 1).save_pretrained(folder)
    convert(folder, "-t", file, "-o", folder + "-tok")
    made = Tokenizer.from_file(folder + "-tok/tokenizer.json")
    texts = [TEXT, "  two  spaces 1234", "na\u00efve caf\u00e9 \u2603", "The words will write it."]
    check(all(made.encode(t, add_special_tokens=False).ids == sp.encode(t) for t in texts),
          "tokenizer.bin: the same ids as SentencePiece")


def foreign(tmp):
    """A file that the gguf package writes."""
    file, back = os.path.join(tmp, "foreign.gguf"), os.path.join(tmp, "foreign")
    rng, width, vocab = np.random.default_rng(0), 64, 5
    w = gguf.GGUFWriter(file, "llama")
    w.add_context_length(128)
    w.add_embedding_length(width)
    w.add_block_count(1)
    w.add_feed_forward_length(width)
    w.add_head_count(2)
    w.add_head_count_kv(1)
    w.add_layer_norm_rms_eps(1e-6)
    w.add_tokenizer_model("llama")
    w.add_token_list(["<unk>", "<s>", "</s>", "a", "\u2581a"])
    w.add_token_scores([0.0, 0.0, 0.0, -1.0, -2.0])
    w.add_token_types([2, 3, 3, 1, 1])
    shapes = {"token_embd": (vocab, width), "output": (vocab, width), "output_norm": (width,),
              "blk.0.attn_norm": (width,), "blk.0.ffn_norm": (width,), "blk.0.attn_q": (width, width),
              "blk.0.attn_k": (32, width), "blk.0.attn_v": (32, width), "blk.0.attn_output": (width, width),
              "blk.0.ffn_gate": (width, width), "blk.0.ffn_up": (width, width), "blk.0.ffn_down": (width, width)}
    for name, shape in shapes.items():
        x = rng.standard_normal(shape).astype(np.float32)
        if name.startswith("blk.0.ffn_g"):
            w.add_tensor(name + ".weight", gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q8_0),
                         raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            w.add_tensor(name + ".weight", x.astype(np.float16) if x.ndim == 2 else x)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    check(convert(file, "-o", back).returncode == 0, "foreign: converted")
    config = json.load(open(back + "/config.json"))
    check(config["rms_norm_eps"] == 1e-6 and config["num_key_value_heads"] == 1 and not config["tie_word_embeddings"],
          "foreign: config.json")
    with torch.no_grad():
        out = load(back)(torch.tensor([[1, 3, 4]])).logits
    check(bool(torch.isfinite(out).all()), "foreign: transformers runs it")


def experts(tmp):
    """Stacked experts in blocks against the package, and files that it writes: stacked, and one tensor for each expert."""
    from safetensors.torch import load_file
    folder, file, back = (os.path.join(tmp, "experts" + end) for end in ("", ".gguf", "-back"))
    config = transformers.Qwen2MoeConfig(vocab_size=96, hidden_size=256, intermediate_size=512, moe_intermediate_size=256,
                                         shared_expert_intermediate_size=512, num_hidden_layers=1, num_experts=5,
                                         num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=4)
    make(config, 1).save_pretrained(folder)
    stem = "model.layers.0.mlp."
    for t in ["bf16", "q8_0", "q4_k_m", "q2_k", "iq4_xs"]:
        convert(folder, "-o", file, "--type", t)
        convert(file, "-o", back, "--dtype", "f32")
        ours = load_file(os.path.join(back, "model.safetensors"))
        reader = gguf.GGUFReader(file)
        theirs = {x.name: gguf.quants.dequantize(x.data, x.tensor_type) for x in reader.tensors}
        same = all(np.array_equal(theirs[f"blk.0.ffn_{p}_exps.weight"][e], ours[f"{stem}experts.{e}.{p}_proj.weight"].numpy())
                   for p in ("gate", "up", "down") for e in range(5))
        same &= all(np.array_equal(theirs[f"blk.0.ffn_{p}_shexp.weight"], ours[f"{stem}shared_expert.{p}_proj.weight"].numpy())
                    for p in ("gate", "up", "down"))
        check(same, f"experts: {t}: decoded alike")
    kinds = {x.name: x.tensor_type.name for x in reader.tensors}
    check(kinds["blk.0.ffn_gate_inp.weight"] == kinds["blk.0.ffn_gate_inp_shexp.weight"] == "F32", "experts: routers are F32")
    check(theirs["blk.0.ffn_gate_inp_shexp.weight"].ndim == 1, "experts: the gate of the shared expert is a vector")

    rng, width, E = np.random.default_rng(0), 64, 3
    for split in (False, True):
        w = gguf.GGUFWriter(file, "llama")
        for add, v in ((w.add_context_length, 128), (w.add_embedding_length, width), (w.add_block_count, 1),
                       (w.add_feed_forward_length, 96), (w.add_head_count, 2), (w.add_head_count_kv, 1),
                       (w.add_layer_norm_rms_eps, 1e-6), (w.add_expert_count, E), (w.add_expert_used_count, 2)):
            add(v)
        shapes = {"token_embd": (5, width), "output": (5, width), "output_norm": (width,), "blk.0.attn_norm": (width,),
                  "blk.0.ffn_norm": (width,), "blk.0.attn_q": (width, width), "blk.0.attn_k": (32, width),
                  "blk.0.attn_v": (32, width), "blk.0.attn_output": (width, width), "blk.0.ffn_gate_inp": (E, width)}
        for name, shape in shapes.items():
            w.add_tensor(name + ".weight", rng.standard_normal(shape).astype(np.float32))
        want = {}
        for part, shape, name in (("gate", (E, 96, width), "w1"), ("up", (E, 96, width), "w3"), ("down", (E, width, 96), "w2")):
            q = gguf.quants.quantize(rng.standard_normal(shape).astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
            x = gguf.quants.dequantize(q, gguf.GGMLQuantizationType.Q8_0)
            for e in range(E):
                want[f"model.layers.0.block_sparse_moe.experts.{e}.{name}.weight"] = x[e]
                if split:
                    w.add_tensor(f"blk.0.ffn_{part}.{e}.weight", q[e], raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            if not split:
                w.add_tensor(f"blk.0.ffn_{part}_exps.weight", q, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()
        convert(file, "-o", back, "--dtype", "f32")
        ours = load_file(os.path.join(back, "model.safetensors"))
        check(all(np.array_equal(ours[k].numpy(), v) for k, v in want.items()),
              f"experts: a file of the package, {'one tensor for each' if split else 'stacked'}")
        check(json.load(open(back + "/config.json"))["model_type"] == "mixtral", "experts: llama with experts is Mixtral")


def known(reader):
    """All names of tensors are llama.cpp's for that architecture."""
    names = gguf.constants
    arch = next(a for a, n in names.MODEL_ARCH_NAMES.items() if n == reader.fields["general.architecture"].contents())
    keys = [reader.fields.get(names.MODEL_ARCH_NAMES[arch] + k) for k in (".block_count", ".decoder_block_count")]
    layers = max(k.contents() for k in keys if k)
    all_names = {names.TENSOR_NAMES[t].format(bid=i) + end for t in names.MODEL_TENSORS[arch] for i in range(layers)
                 for end in ("", ".weight", ".bias")}
    return all(t.name in all_names for t in reader.tensors)


def latents(tmp):
    """DeepSeek-V3: the halves of kv_b_proj, keys of the metadata, and files that have both in one tensor."""
    from safetensors.torch import load_file
    folder, file, back = (os.path.join(tmp, "latents" + end) for end in ("", ".gguf", "-back"))
    config = transformers.DeepseekV3Config(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        kv_lora_rank=32, q_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=20, n_routed_experts=8,
        num_experts_per_tok=2, n_group=4, topk_group=2, moe_intermediate_size=24, first_k_dense_replace=1,
        max_position_embeddings=256, pad_token_id=None, rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.8,
            "mscale_all_dim": 0.8})
    config._experts_implementation = "eager"
    make(config, 3).save_pretrained(folder)
    want = logits(load(folder))
    convert(folder, "-o", file, "--no-originals")
    reader = gguf.GGUFReader(file)
    data = {t.name: t.data for t in reader.tensors}
    kv_b = load_file(os.path.join(folder, "model.safetensors"))["model.layers.1.self_attn.kv_b_proj.weight"].view(4, 36, 32)
    k, v = kv_b.split([16, 20], dim=1)
    check(np.array_equal(data["blk.1.attn_k_b.weight"], k.transpose(1, 2).numpy()) and
          np.array_equal(data["blk.1.attn_v_b.weight"], v.numpy()), "latents: rows of keys turned, rows of values")
    field = {k.removeprefix("deepseek2."): f.contents() for k, f in reader.fields.items()}
    check(known(reader) and (field["attention.key_length"], field["attention.value_length"], field["attention.head_count_kv"],
                             field["attention.key_length_mla"], field["attention.value_length_mla"],
                             field["rope.dimension_count"], field["expert_gating_func"], field["leading_dense_block_count"],
                             field["expert_group_used_count"]) == (40, 32, 1, 24, 20, 8, 2, 1, 2) and
          abs(field["rope.scaling.yarn_log_multiplier"] - 0.08) < 1e-7, "latents: names and keys are llama.cpp's")
    convert(file, "-o", back)
    check(close(logits(load(back)), want, 1e-5), "latents: a folder from the metadata alone computes the same")
    old = os.path.join(tmp, "latents-old.gguf")  # as before 2025: one tensor, and sizes of heads
    w = gguf.GGUFWriter(old, "deepseek2")
    for key, f in reader.fields.items():
        if key.startswith("deepseek2.") and not key.endswith(("_mla", ".key_length", ".value_length", ".head_count_kv",
                                                              ".block_count")):
            w.add_key_value(key, f.contents(), f.types[0])
    w.add_block_count(3)  # with a layer that predicts tokens further on, as newer files have it
    w.add_nextn_predict_layers(1)
    w.add_tensor("blk.2.nextn.enorm.weight", np.ones(64, np.float32))
    w.add_key_length(24)
    w.add_value_length(20)
    w.add_head_count_kv(4)
    for name, x in data.items():
        if name.endswith("attn_k_b.weight"):
            x = np.concatenate([x.swapaxes(1, 2), data[name.replace("_k_b", "_v_b")]], 1).reshape(4 * 36, 32)
            name = name.replace("_k_b", "_kv_b")
        if not name.endswith("attn_v_b.weight"):
            w.add_tensor(name, np.ascontiguousarray(x))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    said = subprocess.run([os.path.join(BUILD, "bin", "convert-model"), "-f", old, "-o", back], capture_output=True, text=True)
    check("'blk.2.nextn.enorm.weight': left out: modules that predict" in said.stderr, "latents: layers further on are named")
    check(close(logits(load(back)), want, 1e-5), "latents: an older file with attn_kv_b")


def states(tmp):
    """Layers with states: Qwen3-Next's products in parts, or in one as older files have it, and Qwen3.5's order of value heads."""
    from safetensors.torch import load_file
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
             "linear_num_key_heads": 2, "linear_num_value_heads": 6, "max_position_embeddings": 64, "pad_token_id": None,
             "bos_token_id": 1, "eos_token_id": 2}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    folder, file, back = (os.path.join(tmp, "states" + end) for end in ("", ".gguf", "-back"))
    config = transformers.Qwen3NextConfig(**sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
                                          shared_expert_intermediate_size=48, rope_parameters=rope)
    config._experts_implementation = "eager"
    make(config, 3).to(torch.bfloat16).save_pretrained(folder)
    want = logits(load(folder))
    convert(folder, "-o", file)
    convert(file, "-o", back)
    mine, theirs = (load_file(os.path.join(x, "model.safetensors")) for x in (folder, back))
    check(mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine if "A_log" not in k),
          "states: exact there and back but for A_log")
    convert(folder, "-o", file, "--no-originals", "--type", "f32")  # llama.cpp rounds what BF16 weights multiply
    reader = gguf.GGUFReader(file)
    data = {t.name: t for t in reader.tensors}
    x = mine["model.layers.1.linear_attn.in_proj_qkvz.weight"].view(2, 16 + 16 + 48 + 48, 64)
    parts = [p.reshape(-1, 64) for p in x.split([16, 16, 48, 48], dim=1)]

    def values(name):
        t = data[name]
        return torch.from_numpy(np.array(gguf.quants.dequantize(t.data, t.tensor_type)))
    check(known(reader) and torch.equal(values("blk.1.attn_qkv.weight"), torch.cat(parts[:3]).float()) and
          torch.equal(values("blk.1.attn_gate.weight"), parts[3].float()), "states: attn_qkv and attn_gate are llama.cpp's")
    convert(file, "-o", back, "--dtype", "f32")
    check(close(logits(load(back)), want, 1e-5), "states: a folder from the metadata alone computes the same")
    if peer(tmp):
        got = np.frombuffer(run_peer(tmp, "logits", file, *map(str, IDS)), np.float32).reshape(want.shape)
        check(close(got, want, 1e-2), "states: llama.cpp computes the same")
    old = os.path.join(tmp, "states-old.gguf")
    w = gguf.GGUFWriter(old, "qwen3next")
    for key, f in reader.fields.items():
        if key.startswith("qwen3next."):
            w.add_key_value(key, f.contents(), f.types[0])
    for name in data:
        if name.endswith("attn_qkv.weight"):
            layer = int(name.split(".")[1])
            w.add_tensor(f"blk.{layer}.ssm_in.weight",
                         mine[f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight"].float().numpy())
        elif not name.endswith("attn_gate.weight"):
            w.add_tensor(name, values(name).numpy())
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    convert(old, "-o", back, "--dtype", "f32")
    check(close(logits(load(back)), want, 1e-5), "states: an older file with ssm_in")

    config = transformers.models.qwen3_5.Qwen3_5TextConfig(**sizes, rope_parameters={**rope, "mrope_section": [11, 11, 10],
                                                                                  "mrope_interleaved": True})
    make(config, 4).to(torch.bfloat16).save_pretrained(folder)
    want = logits(load(folder))
    convert(folder, "-o", file)
    convert(file, "-o", back)
    mine, theirs = (load_file(os.path.join(x, "model.safetensors")) for x in (folder, back))
    check(mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine if "A_log" not in k) and
          open(folder + "/config.json").read() == open(back + "/config.json").read(),
          "qwen35: exact there and back but for A_log")
    convert(folder, "-o", file, "--no-originals", "--type", "f32")  # llama.cpp rounds what BF16 weights multiply
    reader = gguf.GGUFReader(file)
    data = {t.name: t for t in reader.tensors}

    def tiled(t, width):  # [2 key heads][3 value heads] to [3][2]
        return t.reshape(2, 3, width, *t.shape[1:]).transpose(0, 1).reshape(t.shape)
    layer = {k.removeprefix("model.layers.1.linear_attn."): v.float() for k, v in mine.items()}
    q = layer["in_proj_qkv.weight"]
    conv = layer["conv1d.weight"].squeeze(1)
    same = {"attn_qkv.weight": torch.cat([q[:64], tiled(q[64:], 16)]), "attn_gate.weight": tiled(layer["in_proj_z.weight"], 16),
            "ssm_beta.weight": tiled(layer["in_proj_b.weight"], 1), "ssm_alpha.weight": tiled(layer["in_proj_a.weight"], 1),
            "ssm_conv1d.weight": torch.cat([conv[:64], tiled(conv[64:], 16)]), "ssm_dt.bias": tiled(layer["dt_bias"], 1),
            "ssm_out.weight": tiled(layer["out_proj.weight"].T.contiguous(), 16).T}
    check(known(reader) and all(torch.equal(values("blk.1." + k), v) for k, v in same.items()) and
          torch.allclose(values("blk.1.ssm_a"), tiled(-layer["A_log"].exp(), 1), rtol=1e-6),
          "qwen35: value heads are llama.cpp's")
    field = {k.removeprefix("qwen35."): f.contents() for k, f in reader.fields.items()}
    check((field["rope.dimension_sections"], field["rope.dimension_count"], field["ssm.state_size"], field["ssm.group_count"],
           field["ssm.time_step_rank"], field["ssm.inner_size"], field["full_attention_interval"]) ==
          ([11, 11, 10, 0], 16, 16, 2, 6, 96, 4), "qwen35: keys are llama.cpp's")
    convert(file, "-o", back, "--dtype", "f32")
    check(close(logits(load(back)), want, 1e-5), "qwen35: a folder from the metadata alone computes the same")
    if peer(tmp):
        got = np.frombuffer(run_peer(tmp, "logits", file, *map(str, IDS)), np.float32).reshape(want.shape)
        check(close(got, want, 1e-2), "qwen35: llama.cpp computes the same")
    convert(folder, "-o", file, "--type", "q8_0")
    convert(file, "-o", back, "--dtype", "f32")
    blocks = {t.name: t for t in gguf.GGUFReader(file).tensors}["blk.1.ssm_out.weight"]
    ours = load_file(os.path.join(back, "model.safetensors"))["model.layers.1.linear_attn.out_proj.weight"]
    theirs = torch.from_numpy(np.array(gguf.quants.dequantize(blocks.data, blocks.tensor_type)))
    check(torch.equal(tiled(ours.T.contiguous(), 16).T, theirs), "qwen35: columns in blocks are decoded alike")


def mapped(arch, layers, state):
    """Names of llama.cpp's conversion for tensors of Hugging Face's."""
    names = gguf.get_tensor_name_map(arch, layers)
    return {names.get_name(k, try_suffixes=(".weight", ".bias")): v for k, v in state.items()}


def stacks(tmp):
    """T5: tensors, keys and a SentencePiece vocabulary as llama.cpp's conversion has them, and back from these alone."""
    import sentencepiece
    from safetensors.torch import load_file
    from test_t5 import make as make_t5
    corpus = os.path.join(tmp, "spans.txt")
    with open(corpus, "w") as f:
        f.write("".join(f"The system's words {i % 37} and it'll write line {i} of the text.\n" for i in range(400)))
    sentencepiece.SentencePieceTrainer.train(
        input=corpus, model_prefix=os.path.join(tmp, "spiece"), vocab_size=70, model_type="unigram", pad_id=0, eos_id=1,
        unk_id=2, bos_id=-1, normalization_rule_name="nmt_nfkc", minloglevel=2)
    sp = sentencepiece.SentencePieceProcessor(model_file=os.path.join(tmp, "spiece.model"))
    for name, more in (("t5", {}), ("t5-gated", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
                                                 "num_decoder_layers": 1, "decoder_start_token_id": 5})):
        folder, file, back = (os.path.join(tmp, name + end) for end in ("", ".gguf", "-back"))
        model = make_t5(transformers.T5Config(vocab_size=192, d_model=32, d_kv=12, d_ff=48, num_layers=2, num_heads=3,
                                              relative_attention_num_buckets=16, dropout_rate=0.0,
                                              **{"decoder_start_token_id": 0, **more}), 5)
        model.save_pretrained(folder)
        shutil.copy(os.path.join(tmp, "spiece.model"), folder)
        said = convert(folder, "-o", file)
        convert(file, "-o", back)
        check(said.returncode == 0 and same_tensors(folder, back) and
              open(folder + "/config.json").read() == open(back + "/config.json").read() and
              open(folder + "/spiece.model", "rb").read() == open(back + "/spiece.model", "rb").read(),
              f"{name}: exact there and back")
        convert(folder, "-o", file, "--no-originals")
        reader = gguf.GGUFReader(file)
        state = load_file(os.path.join(folder, "model.safetensors"))
        want = mapped(gguf.MODEL_ARCH.T5, 3, state)
        have = {t.name: t.data for t in reader.tensors}
        check(known(reader) and have.keys() == want.keys() and
              all(np.array_equal(have[k], v.numpy()) for k, v in want.items()), f"{name}: tensors are llama.cpp's")
        field = {k: f.contents() for k, f in reader.fields.items()}
        keys = {"context_length": 512, "embedding_length": 32, "feed_forward_length": 48, "block_count": 2,
                "decoder_block_count": more.get("num_decoder_layers", 2), "attention.head_count": 3, "attention.key_length": 12,
                "attention.value_length": 12, "attention.relative_buckets_count": 16,
                "decoder_start_token_id": more.get("decoder_start_token_id", 0)}
        check(all(field["t5." + k] == v for k, v in keys.items()) and
              abs(field["t5.attention.layer_norm_rms_epsilon"] - 1e-6) < 1e-12, f"{name}: keys are llama.cpp's")
        kinds = [2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 1 for i in range(70)]
        check(field["tokenizer.ggml.model"] == "t5" and field["tokenizer.ggml.tokens"][:70] ==
              [sp.id_to_piece(i) for i in range(70)] and field["tokenizer.ggml.token_type"][:70] == kinds and
              np.allclose(field["tokenizer.ggml.scores"][:70], [sp.get_score(i) for i in range(70)]) and
              field["tokenizer.ggml.add_space_prefix"] and field["tokenizer.ggml.remove_extra_whitespaces"] and
              field["tokenizer.ggml.add_eos_token"] and field["tokenizer.ggml.eos_token_id"] == 1,
              f"{name}: the vocabulary is SentencePiece's")
        import sentencepiece.sentencepiece_model_pb2 as proto
        m = proto.ModelProto()
        m.ParseFromString(open(folder + "/spiece.model", "rb").read())
        check(bytes(field["tokenizer.ggml.precompiled_charsmap"]) == m.normalizer_spec.precompiled_charsmap,
              f"{name}: and so is the map of characters")
        convert(file, "-o", back, "--dtype", "f32")
        ids, start = torch.tensor([[7, 20, 41, 1]]), torch.tensor([[0, 9, 33]])
        with torch.no_grad():
            a, b = (x.eval()(input_ids=ids, decoder_input_ids=start).logits[0].numpy()
                    for x in (model, transformers.T5ForConditionalGeneration.from_pretrained(back)))
        check(close(b, a, 1e-5), f"{name}: a folder from the metadata alone computes the same")
        if peer(tmp):  # without the scale of a tied head
            got = np.frombuffer(run_peer(tmp, "decoded", file, "4", *map(str, ids[0].tolist() + start[0].tolist())), np.float32)
            check(close(got.reshape(-1, 192)[:3] * (1 if "gated" in name else 32 ** -0.5), a, 1e-2),
                  f"{name}: llama.cpp computes the same")
            got = run_peer(tmp, "tokenize", file, stdin="The words will write  it.".encode())
            check([int(x) for x in got.split()] == sp.encode("The words will write  it.") + [1],
                  f"{name}: llama.cpp cuts texts as SentencePiece")
        from tokenizers import Tokenizer
        made = Tokenizer.from_file(back + "/tokenizer.json")
        texts = [TEXT.replace("<|im_start|>", ""), "  two  spaces 1234", "na\u00efve \ufb01ne \u2460", "The words will write it."]
        check(all(made.encode(t).ids == sp.encode(t) + [1] for t in texts), f"{name}: and cuts texts as SentencePiece")


def masked(tmp):
    """BERT: tensors, keys and a WordPiece vocabulary as llama.cpp's conversion has them, and back without a head."""
    from safetensors.torch import load_file
    folder, file, back = (os.path.join(tmp, "bert" + end) for end in ("", ".gguf", "-back"))
    torch.manual_seed(1)
    config = transformers.BertConfig(vocab_size=80, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                     num_attention_heads=4, max_position_embeddings=40, hidden_dropout_prob=0.0,
                                     attention_probs_dropout_prob=0.0)
    model = transformers.BertForMaskedLM(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.3)
    model.save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "river", "##s", "##ing", "ran", "by", ".", "a", "b", "##b", "1", "##2"]
    with open(folder + "/vocab.txt", "w") as f:
        f.write("".join(w + "\n" for w in words))
    said = subprocess.run([os.path.join(BUILD, "bin", "convert-model"), "-f", folder, "-o", file, "--no-originals"],
                          capture_output=True, text=True).stderr
    check("left out: GGUF has no head" in said, "bert: the head is named")
    reader = gguf.GGUFReader(file)
    field = {k: f.contents() for k, f in reader.fields.items()}
    state = {k.removeprefix("bert."): v for k, v in load_file(folder + "/model.safetensors").items() if not k.startswith("cls.")}
    want = mapped(gguf.MODEL_ARCH.BERT, 2, state)
    have = {t.name: t.data for t in reader.tensors}
    check(known(reader) and have.keys() == want.keys() and
          all(np.array_equal(have[k], v.numpy()) for k, v in want.items()), "bert: tensors are llama.cpp's")
    keys = {"bert.context_length": 40, "bert.embedding_length": 32, "bert.feed_forward_length": 48, "bert.block_count": 2,
            "bert.attention.head_count": 4, "bert.attention.causal": False, "tokenizer.ggml.token_type_count": 2,
            "tokenizer.ggml.model": "bert", "tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.seperator_token_id": 3,
            "tokenizer.ggml.mask_token_id": 4, "tokenizer.ggml.unknown_token_id": 1, "tokenizer.ggml.padding_token_id": 0}
    check(all(field[k] == v for k, v in keys.items()) and abs(field["bert.attention.layer_norm_epsilon"] - 1e-12) < 1e-17,
          "bert: keys are llama.cpp's")
    phantom = [w if w[0] == "[" else w[2:] if w.startswith("##") else "\u2581" + w for w in words]
    check(field["tokenizer.ggml.tokens"][:17] == phantom and field["tokenizer.ggml.token_type"][:6] == [3, 3, 3, 3, 3, 1],
          "bert: tokens that begin a word are marked")
    convert(file, "-o", back, "--dtype", "f32")
    ids = torch.tensor([[2, 5, 6, 7, 9, 3]])
    with torch.no_grad():
        a, b = (m.eval()(ids).last_hidden_state[0].numpy() for m in (model.bert, transformers.AutoModel.from_pretrained(
            back, add_pooling_layer=False)))
    check(close(b, a, 1e-5), "bert: a folder from the metadata alone computes the same")
    if peer(tmp):
        got = np.frombuffer(run_peer(tmp, "states", file, *map(str, ids[0].tolist())), np.float32).reshape(a.shape)
        check(close(got, a, 1e-2), "bert: llama.cpp computes the same")
        got = run_peer(tmp, "tokenize", file, stdin="The rivers ran by 12.".encode())
        check([int(x) for x in got.split()] == transformers.BertTokenizer.from_pretrained(folder)("The rivers ran by 12.")["input_ids"],
              "bert: llama.cpp cuts texts alike")
    texts = ["The rivers ran by, na\u00efve 12.", "b\u00e0bb [MASK] \u7684 a"]
    theirs = transformers.BertTokenizer.from_pretrained(folder)
    ours = transformers.AutoTokenizer.from_pretrained(back)
    check(all(theirs(t)["input_ids"] == ours(t)["input_ids"] for t in texts), "bert: and cuts texts alike")


def mxfp4(tmp):
    """gpt-oss as published: the codes of its experts in llama.cpp's order of rows, and back to the same numbers."""
    from safetensors.torch import load_file, save_file
    folder, file, back = (os.path.join(tmp, "mxfp4" + end) for end in ("", ".gguf", "-back"))
    config = transformers.GptOssConfig(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=16,
                                       num_attention_heads=4, num_key_value_heads=2, num_local_experts=5, num_experts_per_tok=2,
                                       sliding_window=6, pad_token_id=None)
    model = make(config, 3).to(torch.bfloat16)
    packed, plain = pack_experts({k: v.contiguous() for k, v in model.state_dict().items()}, 4)
    model.config.save_pretrained(folder)
    save_file(packed, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    about = json.load(open(os.path.join(folder, "config.json")))
    json.dump({**about, "quantization_config": {"quant_method": "mxfp4"}}, open(os.path.join(folder, "config.json"), "w"))
    convert(folder, "-o", file)
    reader = gguf.GGUFReader(file)
    data = {t.name: t for t in reader.tensors}
    x = {n: gguf.quants.dequantize(data[f"blk.1.ffn_{n}_exps.weight"].data, data[f"blk.1.ffn_{n}_exps.weight"].tensor_type)
         for n in ("gate", "up", "down")}
    stem = "model.layers.1.mlp.experts."
    both, down = plain[stem + "gate_up_proj"].float().numpy(), plain[stem + "down_proj"].float().numpy()
    check(data["blk.1.ffn_up_exps.weight"].tensor_type.name == "MXFP4" and known(reader) and
          np.array_equal(x["gate"], both[:, :, ::2].swapaxes(1, 2)) and np.array_equal(x["up"], both[:, :, 1::2].swapaxes(1, 2)) and
          np.array_equal(x["down"], down.swapaxes(1, 2)), "mxfp4: gates, ups and downs as the package decodes them")
    bias = plain[stem + "gate_up_proj_bias"].float().numpy()
    check(np.array_equal(data["blk.1.ffn_gate_exps.bias"].data, bias[:, ::2]) and
          np.array_equal(data["blk.1.ffn_up_exps.bias"].data, bias[:, 1::2]), "mxfp4: their biases")
    convert(file, "-o", back)
    got = load_file(os.path.join(back, "model.safetensors"))
    check(got.keys() == plain.keys() and all(torch.equal(got[k], plain[k]) for k in plain), "mxfp4: back to the same numbers")


built = None


def peer(tmp):
    """The program gguf_peer, built once; None without llama.cpp."""
    global built
    if not LLAMA_CPP or built is False:
        return None
    if built is None:
        path = os.path.join(tmp, "gguf_peer")
        r = subprocess.run(["cc", "-O1", "-o", path, os.path.join(HERE, "gguf_peer.c"), f"-I{LLAMA_CPP}/include",
                            f"-I{LLAMA_CPP}/ggml/include", f"-L{LLAMA_LIB}", "-lllama", "-lggml", "-lggml-base",
                            f"-Wl,-rpath,{LLAMA_LIB}"], capture_output=True, text=True)
        built = path if r.returncode == 0 else False
        check(bool(built), "gguf_peer is built" + (": " + r.stderr[-300:].replace("\n", " ") if r.returncode else ""))
    return built or None


def run_peer(tmp, *args, stdin=None, **env):
    r = subprocess.run([peer(tmp), *args], capture_output=True, input=stdin, env={**os.environ, **env})
    if r.returncode:
        print("#", r.stderr.decode()[-300:].replace("\n", " "))
    return r.stdout


def main():
    with tempfile.TemporaryDirectory() as tmp:
        if not LLAMA_CPP:
            print("# llama.cpp itself is left out: LLAMA_CPP is not set")
        architectures(tmp)
        if not sys.argv[1:] or "latents" in sys.argv[1:]:
            latents(tmp)
            mxfp4(tmp)
        if not sys.argv[1:] or "encoders" in sys.argv[1:]:
            stacks(tmp)
            masked(tmp)
        if not sys.argv[1:] or "states" in sys.argv[1:]:
            states(tmp)
        if sys.argv[1:]:
            sys.exit(tap.finish())
        flat(tmp)
        types(tmp)
        tokenizers(tmp)
        tokenizer_bin(tmp)
        foreign(tmp)
        experts(tmp)
    sys.exit(tap.finish())


if __name__ == "__main__":
    main()
