#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare our chat templates with those of `transformers`: text byte for byte, what generation blocks mark, and the
errors (both refuse, or neither), over awkward conversations; and the ids that train, with a byte-level tokenizer.

    test_chat.py [--build DIR] [--templates DIR ...] [--driver FILE] [-v]

Templates are those of the package trl, which scripts/make-venv installs, and every *.jinja below each DIR: point it at the
templates of the models that you use.  Fewer than 30 published templates, or 10 with marks, are a failure.  Speaks TAP: one test for each template, for expressions, random templates and the
number of templates.
Exit 0: all equal; 1: differences, the first of each template shown."""
import argparse
import glob
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import warnings

warnings.filterwarnings("ignore")
from transformers.utils import chat_template_utils as peer  # noqa: E402
from transformers.utils import logging  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402

logging.set_verbosity_error()
HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
MANY, MARKED = 30, 10  # templates that a comparison has; of these, with marks of what trains
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


class Ours:
    """The driver process."""

    def __init__(self, driver, tokenizer):
        self.p = subprocess.Popen([driver, tokenizer], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")

    def ask(self, **request):
        self.p.stdin.write(json.dumps(request) + "\n")
        self.p.stdin.flush()
        line = self.p.stdout.readline()
        if not line:
            raise SystemExit("the driver ended early at " + json.dumps(request)[:2000])
        return json.loads(line)


def user(text, **more):
    return {"role": "user", "content": text, **more}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


def system(text):
    return {"role": "system", "content": text}


TOOLS = [{"type": "function", "function": {
    "name": "get_weather", "description": "Weather of a place.\nSecond line, \"quoted\" é",
    "parameters": {"type": "object", "properties": {
        "place": {"type": "string", "description": "A town"},
        "unit": {"type": "string", "enum": ["C", "F"], "description": "Unit"},
        "days": {"type": "array", "items": {"type": "integer"}, "default": [1, 2]},
        "deep": {"type": "object", "properties": {"x": {"type": "number"}}}},
        "required": ["place"]}}},
    {"type": "function", "function": {"name": "noop", "description": "", "parameters": {"type": "object", "properties": {}}}}]
CALL = [{"id": "call00001", "type": "function",
         "function": {"name": "get_weather", "arguments": {"place": "Zürich", "days": [1], "deep": {"x": 1.5}, "b": True,
                                                           "z": None}}}]
CALL_TEXT = [{"id": "call00001", "type": "function",
              "function": {"name": "get_weather", "arguments": "{\"place\": \"Zürich\"}"}}]


def conversations():
    """name -> (messages, further arguments)"""
    one = [user("Hi"), answer("Hello."), user("And?")]
    yield "one question", [user("Hi")], {}
    yield "three turns", one, {}
    yield "with an answer at the end", one + [answer("So.")], {}
    yield "system", [system("Be brief.")] + one, {}
    yield "empty texts", [system(""), user(""), answer(""), user("x")], {}
    yield "blanks", [system("  s \n"), user("\n a \n\n"), answer("\t b\n"), user("  ")], {}
    yield "unicode", [user("Grüße 日本語 😀 \u200b\u00a0 \u2028"), answer("naïve \U0001F468\u200d\U0001F469"), user("ß")], {}
    yield "special tokens inside", [user("<s>[INST] <|im_end|> </s> {{ x }} {% if %}"), answer("<|eot_id|>"), user("<think>")], {}
    yield "quotes", [user("it's \"x\" \\n & < >"), answer("'\\'"), user("`")], {}
    yield "two systems", [system("a"), system("b"), user("x"), answer("y"), user("z")], {}
    yield "late system", [user("x"), answer("y"), system("b"), user("z")], {}
    yield "two users", [user("a"), user("b")], {}
    yield "answer first", [answer("a"), user("b")], {}
    yield "only system", [system("a")], {}
    yield "unknown role", [user("a"), {"role": "narrator", "content": "x"}], {}
    yield "developer", [{"role": "developer", "content": "Do."}, user("a")], {}
    yield "no content", [user("a"), {"role": "assistant"}, user("b")], {}
    yield "reasoning", [user("2+2"), answer("4", reasoning_content="Two and\ntwo."), user("3+3"),
                        answer("6", reasoning_content="easy")], {}
    yield "thinking in text", [user("2+2"), answer("<think>\nTwo.\n</think>\n\n4"), user("3+3")], {}
    yield "thinking off", [user("2+2"), answer("4", thinking="x"), user("3")], {"enable_thinking": False, "thinking": False}
    yield "thinking on", [user("2+2")], {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}
    yield "tools offered", one, {"tools": TOOLS}
    yield "tools and system", [system("Use tools.")] + one, {"tools": TOOLS}
    yield "tool call", [user("Weather?"), answer("", tool_calls=CALL),
                        {"role": "tool", "name": "get_weather", "tool_call_id": "call00001", "content": "{\"t\": 3}"},
                        answer("3 degrees."), user("Thanks")], {"tools": TOOLS}
    yield "tool call, null content", [user("Weather?"), answer(None, tool_calls=CALL),
                                      {"role": "tool", "name": "get_weather", "tool_call_id": "call00001", "content": "cold"}], \
        {"tools": TOOLS}
    yield "tool call with text", [user("Weather?"), answer("I see.", tool_calls=CALL, reasoning_content="hm"),
                                  {"role": "tool", "name": "get_weather", "tool_call_id": "call00001", "content": "cold"},
                                  {"role": "tool", "name": "noop", "tool_call_id": "call00002", "content": "ok"}], {"tools": TOOLS}
    yield "tool call, arguments as text", [user("Weather?"), answer("", tool_calls=CALL_TEXT),
                                           {"role": "tool", "name": "get_weather", "tool_call_id": "call00001", "content": "cold"},
                                           answer("Cold.")], {"tools": TOOLS}
    yield "two calls", [user("Weather?"), answer("", tool_calls=CALL + [dict(CALL[0], id="call00002")]),
                        {"role": "tool", "tool_call_id": "call00001", "content": "a"},
                        {"role": "tool", "tool_call_id": "call00002", "content": "b"}, answer("ok")], {"tools": TOOLS}
    yield "parts", [user([{"type": "text", "text": "Look:"}, {"type": "text", "text": " here"}]),
                    answer([{"type": "text", "text": "Yes"}]), user("ok")], {}
    yield "image", [user([{"type": "image", "url": "x"}, {"type": "text", "text": "What?"}])], {}
    yield "documents", one, {"documents": [{"title": "T", "text": "Text é"}, {"title": "U", "text": ""}]}
    yield "long", [system("s" * 3000)] + [m for i in range(40) for m in (user(f"q{i} " * 30), answer(f"a{i}\n" * 30))], {}


def their_render(template, messages, more, prompt):
    """What apply_chat_template does before it tokenises."""
    chat = [{k: v for k, v in m.items() if v is not None} for m in messages]
    more = dict(more)
    try:
        text, spans = peer.render_jinja_template(
            conversations=[chat], tools=more.pop("tools", None), documents=more.pop("documents", None), chat_template=template,
            return_assistant_tokens_mask=True, add_generation_prompt=prompt, **{**TOKENS, **more})
        return {"text": text[0], "spans": [list(s) for s in spans[0]]}
    except Exception as e:  # templates fail in all ways
        return {"error": f"{type(e).__name__}: {e}"}


def bytes_of(text, spans):
    return [[len(text[:a].encode()), len(text[:b].encode())] for a, b in spans]


def make_tokenizer(path):
    """Byte-level BPE trained on the conversations, with special tokens of many templates."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False)
    tok.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|user|>",
               "<|assistant|>", "<|end|>", "<start_of_turn>", "<end_of_turn>", "<think>", "</think>", "[INST]", "[/INST]"]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  show_progress=False)
    tok.train_from_iterator([str(m) for _, m, _ in conversations()], trainer)
    tok.save(path)
    return tok


def their_mask(tok, text, spans):
    """assistant_masks of apply_chat_template: all tokens from that of the first character to that of the last one."""
    enc = tok.encode(text, add_special_tokens=False)
    mask = [0] * len(enc.ids)
    for start, end in spans:
        first, last = enc.char_to_token(start), enc.char_to_token(end - 1)
        if first is None:
            break
        while last is not None and last + 1 < len(mask) and enc.offsets[last + 1][0] < end:
            last += 1  # theirs leaves out the rest of a last character that is cut into several tokens
        for i in range(first, last + 1 if last else len(mask)):
            mask[i] = 1
    return {"ids": enc.ids, "trains": mask}


def same_ids(tok, ours, theirs):
    if "error" in theirs or "error" in ours:
        return True
    want = their_mask(tok, theirs["text"], [s for s in theirs["spans"] if s[1] > s[0]])
    return all(ours[k] == v for k, v in want.items())


def same(ours, theirs, marks):
    if "error" in ours or "error" in theirs:
        return "error" in ours and "error" in theirs
    if ours["text"] != theirs["text"]:
        return False
    return not marks or ours["spans"] == bytes_of(theirs["text"], theirs["spans"])


def compare(ours, tok, template, verbose):
    """Number of comparisons, list of differences."""
    n, bad, refused = 0, [], 0
    marks = "{% generation" in template or "{%- generation" in template
    for name, messages, more in conversations():
        for prompt in (False, True):
            parts = {k: more[k] for k in ("tools", "documents") if k in more}
            chat_vars = {k: v for k, v in more.items() if k not in parts}
            a = ours.ask(template=template, messages=messages, tokens=TOKENS, chat_vars=chat_vars, prompt=prompt,
                         marked=marks, encode=marks, **parts)
            b = their_render(template, messages, more, prompt)
            n += 1
            refused += "error" in b
            if not same(a, b, marks):
                bad.append(f"{name}, prompt {prompt}:\n  ours   {json.dumps(a)[:1500]}\n  theirs {json.dumps(b)[:1500]}")
            elif marks and not same_ids(tok, a, b):
                bad.append(f"{name}, prompt {prompt}: ids or mask\n  ours   {a}\n  theirs {their_mask(tok, b['text'], b['spans'])}"[:3000])
            elif verbose and "error" in b:
                print(f"# {name}: {a['error']} | {b['error'][:100]}")
    return n, bad, refused


def compare_expressions(ours):
    """Every line of chat_expressions.txt; lines with %% are whole templates, others expressions."""
    values = dict(s="Hello wörld", n=5, f=2.5, l=[3, 1, 2], d={"b": 1, "a": [1, "x"], "items": 9}, e="", z=None, t=True,
                  m=[user("hi"), answer("yo\n", x={"y": 1})])
    n, bad = 0, []
    with open(os.path.join(HERE, "chat_expressions.txt"), encoding="utf-8") as f:
        lines = [x.rstrip("\n") for x in f if x.strip() and not x.startswith("# ")]
    for line in lines:
        template = line[2:].replace("\\n", "\n") if line.startswith("%%") else "{{ " + line + " }}"
        a = ours.ask(template=template, vars=values)
        try:
            b = {"text": peer._compile_jinja_template(template).render(**values)}
        except Exception as e:
            b = {"error": f"{type(e).__name__}: {e}"}
        n += 1
        if not same(a, b, False):
            bad.append(f"{template!r}\n  ours   {a}\n  theirs {b}")
    return n, bad, 0


BLANKS = ["", " ", "  ", "\n", " \n", "\n  ", "\t", "\n\n", "\r\n", "x", "y ", "\n z", " \n \n", "\u00a0", "}}", "%}", "{", "#}"]


def random_template(rng, depth):
    """Tags of all kinds with every sign for white space, inside each other."""
    def tag(inside):
        return "{%" + rng.choice(["", "", "-", "+"]) + rng.choice([" ", "", "\n"]) + inside + rng.choice([" ", ""]) + \
            rng.choice(["", "", "-", "+"]) + "%}"

    def block(begin, end):
        return tag(begin) + random_template(rng, depth - 1) + tag(end)

    made = ""
    for _ in range(rng.randint(0, 4)):
        made += "".join(rng.choice(BLANKS) for _ in range(rng.randint(0, 2)))
        kinds = [lambda: "{{" + rng.choice(["", "-", "+"]) + " " + rng.choice(["n", "q", "'a\\n'", "{'a': {'b': 1}}", "l"]) +
                 rng.choice([" ", " -"]) + "}}",
                 lambda: "{#" + rng.choice(["", "-", "+"]) + " c " + rng.choice(["", "\n"]) + rng.choice(["", "-", "+"]) + "#}",
                 lambda: "{%" + rng.choice(["", "-", "+"]) + " raw " + rng.choice(["", "-"]) + "%}" +
                 rng.choice([" {{ n }} ", "\n {% x %}\n", "z"]) + tag("endraw"),
                 lambda: tag("set x = 1")]
        if depth:
            kinds += [lambda: block("if t", "else") + random_template(rng, depth - 1) + tag("endif"),
                      lambda: block("for x in l", "endfor"), lambda: block("set y", "endset") + "[{{ y }}]",
                      lambda: block("generation", "endgeneration"), lambda: block("filter upper", "endfilter")]
        made += rng.choice(kinds)()
    return made + rng.choice(BLANKS)


def compare_random(ours, rounds):
    rng, bad, refused = random.Random(1), [], 0
    values = {"n": 5, "t": True, "l": [3, 1], "q": "\u00e9"}
    for _ in range(rounds):
        template = random_template(rng, 3)
        a = ours.ask(template=template, vars=values)
        try:
            b = {"text": peer._compile_jinja_template(template).render(**values)}
        except Exception as e:
            b = {"error": f"{type(e).__name__}: {e}"}
            refused += 1
        if not same(a, b, False):
            bad.append(f"{template!r}\n  ours   {a}\n  theirs {b}")
    return rounds, bad, refused


def compile_driver(build, where):
    driver = os.path.join(where, "driver")
    subprocess.run(["cc", "-std=c17", "-O2", "-D_GNU_SOURCE", "-I" + os.path.join(ROOT, "lib"), "-o", driver,
                    os.path.join(HERE, "chat_driver.c"), os.path.join(build, "libcore.a"), "-larchive", "-lz", "-lzstd", "-lxxhash",
                    "-ljansson", "-lpcre2-8", "-lutf8proc", "-lm", "-lpthread", "-ldl"], check=True)
    return driver


def find_templates(folders):
    spec = importlib.util.find_spec("trl")
    if spec and spec.origin:
        folders = [os.path.join(os.path.dirname(spec.origin), "chat_templates")] + folders
    found = {}
    for folder in folders:
        for path in sorted(glob.glob(os.path.join(folder, "**", "*.jinja"), recursive=True)):
            with open(path, encoding="utf-8") as f:
                text = f.read()
            if text not in found.values():
                found[os.path.relpath(path, folder)[:-6]] = text
    return found


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--build", default=os.environ.get("LM_TEST_BUILD", os.path.join(ROOT, "build")))
    ap.add_argument("--templates", action="append", default=[], metavar="DIR")
    ap.add_argument("--driver", help="the compiled chat_driver (default: compile it)")
    ap.add_argument("-v", action="store_true", help="show the messages of what both refuse")
    opt = ap.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as where:
        path = os.path.join(where, "tokenizer.json")
        tok = make_tokenizer(path)
        ours = Ours(opt.driver or compile_driver(opt.build, where), path)
        found = find_templates(opt.templates)
        print(f"1..{len(found) + 3}")
        todo = [("expressions", compare_expressions), ("random templates", lambda o: compare_random(o, 1500))]
        todo += [(name, lambda o, t=text: compare(o, tok, t, opt.v)) for name, text in found.items()]
        for number, (name, work) in enumerate(todo, 1):
            n, bad, refused = work(ours)
            failed += bool(bad)
            print(f"{'not ok' if bad else 'ok'} {number} - {name}: {n} comparisons, {refused} refused by both, {len(bad)} differences",
                  flush=True)
            for text in bad[:3]:
                print("# " + text.replace("\n", "\n# "))
        marked = sum("{% generation" in t or "{%- generation" in t for t in found.values())
        enough = len(found) >= MANY and marked >= MARKED
        failed += not enough
        print(f"{'ok' if enough else 'not ok'} {len(found) + 3} - published templates: {len(found)} of at least {MANY}, "
              f"{marked} of at least {MARKED} with marks")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
