"""training/real_annie: its rows are apart, the loss is on answers alone, the written overlay is the merged one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter

import pytest
from paths import ROOT, TINY_ANNIE

torch = pytest.importorskip("torch", reason="needs the quantize extra (torch)")
transformers = pytest.importorskip("transformers", reason="needs the quantize extra (transformers)")
pytest.importorskip("peft", reason="needs peft, which trains the overlay")

from safetensors.torch import load_file, save_file  # noqa: E402

TRAINING = ROOT / "training" / "real_annie"
# Qwen2.5's form of calls, short.
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if loop.first and tools %}{% for t in tools %}{{ t | tojson }}
{% endfor %}{% endif %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture(autouse=True)
def training_modules(monkeypatch):
    monkeypatch.syspath_prepend(str(TRAINING))
    for name in ("train", "conversations"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    command = [sys.executable, TRAINING / "conversations.py", folder, "--n", "60", "--each", "20"]
    subprocess.run(command, check=True, cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random Qwen2 with tiny-annie's tokenizer and a template of Qwen2.5's form."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY_ANNIE)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.2,  # the frozen head can be steered
        tie_word_embeddings=True,
        eos_token_id=end,
        pad_token_id=end,
    )
    transformers.Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_held_out_prompts_and_words_are_in_no_training_row(rows):
    trained, held_out = lines(rows / "train.jsonl"), lines(rows / "held_out.jsonl")
    assert Counter(r["group"] for r in held_out).keys() == {"tool_call", "no_tool", "talk"}
    texts = {m["content"] for r in trained for m in r["messages"] if m["role"] == "user"}
    assert texts and not texts & {r["messages"][-1]["content"] for r in held_out}
    free = {
        (r["expect"]["tool"], name, value)
        for r in held_out
        if r["group"] == "tool_call"
        for name, value in r["expect"]["arguments"].items()
        for tool in r["tools"]
        if tool["function"]["name"] == r["expect"]["tool"]
        and tool["function"]["parameters"]["properties"][name] == {"type": "string"}
        and name != "time"  # any time of day may be in both
    }
    calls = [
        c["function"] for r in trained for m in r["messages"] for c in m.get("tool_calls") or ()
    ]
    values = {(c["name"], name, value) for c in calls for name, value in c["arguments"].items()}
    assert len(free) > 40 and values and not free & values


def test_only_answers_are_learned(model, rows):
    from train import sample_of

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    row = next(
        r for r in lines(rows / "train.jsonl") if any(m["role"] == "tool" for m in r["messages"])
    )
    ids, learned = sample_of(tokenizer, row)
    pieces, previous = [], False
    for token, on in zip(ids, learned, strict=True):
        if on and not previous:
            pieces.append([])
        if on:
            pieces[-1].append(token)
        previous = on
    expected = []
    for message in row["messages"]:
        if message["role"] == "assistant":
            calls = [c["function"] for c in message.get("tool_calls") or ()]
            bodies = [
                f'{{"name": "{c["name"]}", "arguments": {json.dumps(c["arguments"])}}}'
                for c in calls
            ]
            text = "".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)
            expected.append((message["content"] or "") + text + "<|im_end|>")
    assert [tokenizer.decode(p) for p in pieces] == expected


def test_a_template_without_calls_is_refused(model, rows):
    from train import sample_of

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE.replace("m.tool_calls or []", "[]")
    row = next(
        r for r in lines(rows / "train.jsonl") if any(m.get("tool_calls") for m in r["messages"])
    )
    with pytest.raises(SystemExit, match="--chat-template"):
        sample_of(tokenizer, row)


def test_a_tag_that_the_model_never_learned_is_refused_until_it_is_split(
    model, rows, tmp_path, monkeypatch
):
    import train

    monkeypatch.syspath_prepend(str(ROOT / "tests" / "real"))
    import split_tags

    copy = shutil.copytree(model, tmp_path / "model")
    before = split_tags.split_tags(copy)
    assert (
        before == []
        and (copy / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(copy)
    added, weights = tokenizer.get_added_vocab(), load_file(copy / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    embedding[[added[t] for t in ("<tool_call>", "</tool_call>")]] = embedding[
        added["<think>"]
    ].clone()
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    words = [
        "--model",
        copy,
        "--rows",
        rows,
        "--output",
        tmp_path / "out",
        "--steps",
        1,
        "--device",
        "cpu",
    ]
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, words)])
    # As folders of the hub do, other files of the tokenizer add the tags too.
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"] = {
        str(i): {"content": t, "special": False} for t, i in added.items()
    }
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    (copy / "added_tokens.json").write_text(json.dumps(added))
    with pytest.raises(
        SystemExit, match=r"never learned <tool_call>, </tool_call>, and .*split_tags.py"
    ):
        train.main()
    assert "<tool_call>" in split_tags.split_tags(copy)
    tokenizer = transformers.AutoTokenizer.from_pretrained(copy)
    ids = tokenizer("<tool_call>", add_special_tokens=False)["input_ids"]
    assert (
        len(ids) > 1 and tokenizer.decode(ids) == "<tool_call>" and added["<tool_call>"] not in ids
    )
    row = next(
        r for r in lines(rows / "train.jsonl") if any(m.get("tool_calls") for m in r["messages"])
    )
    own = transformers.AutoModelForCausalLM.from_pretrained(copy)
    assert train.never_learned(own, tokenizer, [train.sample_of(tokenizer, row)]) == []


@pytest.mark.parametrize(
    ("text", "correct"),
    [
        (
            '<tool_call>\n{"name": "set_light", "arguments": {"brightness": 1, "room": "den"}}\n</tool_call>',
            True,
        ),
        (
            '<tool_call>{"name": "set_light", "arguments": {"room": "den", "brightness": "1"}}</tool_call>',
            False,
        ),
        (
            '<tool_call>{"name": "set_light", "arguments": {"room": "den", "brightness": true}}</tool_call>',
            False,
        ),
        ('<tool_call>{"name": "set_light", "arguments": {"room": "den"}}</tool_call>', False),
        ('{"name": "set_light", "arguments": {"room": "den", "brightness": 1}}', False),
        ("<tool_call>{]}</tool_call>", False),
    ],
)
def test_a_call_is_correct_when_name_and_values_are_equal(text, correct):
    from train import judged

    case = {
        "group": "tool_call",
        "expect": {"tool": "set_light", "arguments": {"room": "den", "brightness": 1}},
    }
    assert judged(case, text, True)["correct"] is correct
    assert not judged(case, text, False)["correct"]
    assert not judged(case, text + text, True)["correct"]
    assert judged({"group": "no_tool"}, text, True)["correct"] == ("<tool_call>" not in text)


def test_markdown_and_thinking_are_recognized():
    from train import judged

    texts = ("Rome.", "**Rome**", "1. Rome\n2. Pisa", "<think>Rome</think>", "It is 3.5 km.")
    verdicts = [judged({"group": "talk"}, text, True) for text in texts]
    assert [v["markdown"] for v in verdicts] == [False, True, True, False, False]
    assert [v["thinking"] for v in verdicts] == [False, False, False, True, False]


def test_it_learns_and_the_written_overlay_makes_the_merged_model(
    model, rows, tmp_path, monkeypatch
):
    import train

    def run(output, *options):
        words = ["--model", model, "--rows", rows, "--held-out", 6, "--batch", 3, "--device", "cpu", "--output", output,
                 "--merged", output / "merged", *options]  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["train.py", *map(str, words)])
        train.main()  # in this process, which has imported torch, transformers and peft

    first, second = tmp_path / "first", tmp_path / "second"
    run(first, "--rank", 4, "--steps", 12, "--lr", 5e-2, "--tokens", 3000, "--shard-mb", 0.01)
    run(second, "--adapter", first)
    report = json.loads((first / "report.json").read_text())
    assert (
        len(report["losses"]) == 12 and sum(report["losses"][-3:]) < sum(report["losses"][:3]) - 0.6
    )
    assert sum(g["n"] for g in report["held_out"].values()) == 6
    assert report["held_out"] == json.loads((second / "report.json").read_text())["held_out"]
    shards = list(first.glob("adapter-*.safetensors"))
    assert len(shards) > 1 and max(s.stat().st_size for s in shards) <= 0.013 * 2**20
    weights = [
        transformers.AutoModelForCausalLM.from_pretrained(f, dtype=torch.bfloat16).state_dict()
        for f in (model, first / "merged", second / "merged")
    ]
    source, merged, again = weights
    assert all(torch.equal(merged[k], again[k]) for k in source)
    changed = {k for k in source if not torch.equal(source[k], merged[k])}
    linears = {f"model.layers.{n}.{p}.weight" for n in (0, 1) for p in LINEARS}
    assert changed == linears
    assert transformers.AutoTokenizer.from_pretrained(first / "merged").chat_template == TEMPLATE


LINEARS = [f"self_attn.{c}_proj" for c in "qkvo"] + [
    f"mlp.{c}_proj" for c in ("gate", "up", "down")
]
