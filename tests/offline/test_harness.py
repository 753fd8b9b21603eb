"""The model for lm-eval: log-likelihoods against transformers' own forward, the interface, and lm-eval itself where installed."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from types import SimpleNamespace

import command_line
import pytest
from paths import TESTS, TINY_ANNIE

torch = pytest.importorskip(
    "torch", reason="scoring needs torch: pip install annie-quant[quantize]"
)
transformers = pytest.importorskip(
    "transformers", reason="scoring needs transformers: pip install annie-quant[quantize]"
)
pytest.importorskip("annie_quant.nvfp4", reason="NVFP4 linears need the codec")

import annie_quant  # noqa: E402
from annie_quant.core.errors import UsageError  # noqa: E402

REAL = importlib.util.find_spec("lm_eval") is not None
STAND_IN = str(TESTS / "helpers" / "lm_eval_stand_in")
TEXTS = [
    ("What is the capital of Japan?", " Tokyo"),
    ("What is the capital of Japan? ", "It is Paris."),
    ("", "Hello"),
    (
        "Here is one long context with a number of words in it, and then",
        " some more words than before, all scored",
    ),
]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    folder = tmp_path_factory.mktemp("q") / "nvfp4"
    annie_quant.quantize.run("direct", TINY_ANNIE, folder)
    return folder


@pytest.fixture(scope="module")
def harness():
    """The module, with lm-eval or its stand-in, because lm-eval brings 30 packages and is an optional extra."""
    if not REAL:
        sys.path.insert(0, STAND_IN)
    yield importlib.import_module("annie_quant.offline.harness_model")
    if not REAL:
        sys.path.remove(STAND_IN)
        for name in [
            n for n in sys.modules if n.split(".")[0] == "lm_eval" or n.endswith("harness_model")
        ]:
            del sys.modules[name]


@pytest.fixture(scope="module")
def bf16(harness):
    return harness.AnnieQuantLM(
        pretrained=str(TINY_ANNIE), max_length="64", batch_size=1, device="cpu"
    )


def plain(pairs, length=64):
    """Return the log-likelihoods by transformers alone, one sequence at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        TINY_ANNIE, dtype=torch.float32
    ).eval()
    results = []
    for context, target in pairs:
        tokens = [*context, *target][-(length + 1) :]
        with torch.inference_mode():
            logits = model(torch.tensor([tokens[:-1]])).logits[0, -len(target) :].log_softmax(-1)
        index = torch.tensor(list(target))
        results.append(
            (
                float(logits.gather(-1, index[:, None]).sum()),
                bool((logits.argmax(-1) == index).all()),
            )
        )
    return results


def likelihoods(model, pairs):
    return model._loglikelihood_tokens([(None, context, target) for context, target in pairs])


def test_likelihoods_are_those_of_transformers(bf16):
    ids = bf16.tokenizer.encode
    pairs = [(ids(c) or [bf16.tokenizer.eos_token_id], ids(t)) for c, t in TEXTS]
    pairs += [
        (ids(TEXTS[3][0] * 9), ids(" Tokyo")),
        (ids("a"), ids("b " * 64)[:64]),
    ]  # longer than the model
    question = bf16.template.render(
        [{"role": "user", "content": "What is the capital of Japan?"}],
        None,
        True,
        enable_thinking=False,
    )
    (answer,) = bf16.generate_until(requests((question, {"max_gen_toks": 6})))
    pairs.append((ids(question), ids(answer)))
    got = likelihoods(bf16, pairs)
    for (own, own_greedy), (value, is_greedy) in zip(got, plain(pairs), strict=True):
        assert own == pytest.approx(value, abs=2e-3, rel=1e-5) and own_greedy == is_greedy
    assert got[-1][1] and not got[0][1]
    for context, target in (([], [1]), ([1], []), ([1], [1] * 65)):
        with pytest.raises(UsageError, match="cannot be scored"):
            likelihoods(bf16, [(context, target)])


def test_nvfp4_under_each_profile(harness, quantized, bf16):
    pairs = [(bf16.tokenizer.encode(c), bf16.tokenizer.encode(t)) for c, t in TEXTS if c]
    own = harness.AnnieQuantLM(str(quantized))
    values = {"bf16": likelihoods(bf16, pairs), own.profile.name: likelihoods(own, pairs)}
    with pytest.raises(UsageError, match="does not support"):
        harness.AnnieQuantLM(str(quantized), profile="bf16")
    assert len({tuple(v) for v in values.values()}) == 2
    # rounding weights to 4 bits changes each likelihood by little, on this model
    assert all(
        abs(a - b) < 0.2 * abs(a) + 2 for (a, _), (b, _) in zip(*values.values(), strict=True)
    )


def test_text_ends_before_the_first_stop_string(harness):
    assert [
        harness.until("a b\nc.", stops) for stops in (["\n"], [".", "\n"], [], [""], ["x"])
    ] == [
        "a b",
        "a b",
        "a b\nc.",
        "a b\nc.",
        "a b\nc.",
    ]


def requests(*arguments):
    return [SimpleNamespace(args=a) for a in arguments]


def test_the_interface(bf16):
    pairs = [(bf16.tokenizer.encode(c.rstrip()) or [bf16.prefix_token_id]) for c, _ in TEXTS]
    whole = [bf16.tokenizer.encode(c + t) for c, t in TEXTS]
    expected = plain(
        [(p, w[len(p) if c else 0 :]) for p, w, (c, _) in zip(pairs, whole, TEXTS, strict=True)]
    )
    got = bf16.loglikelihood(requests(*TEXTS))
    assert [v for v, _ in got] == pytest.approx([v for v, _ in expected], abs=2e-3)
    text = "one two three " * 40  # three windows of 64 tokens
    tokens = bf16.tokenizer.encode(text)
    (total,) = bf16.loglikelihood_rolling(requests((text,)))
    parts, done = [], 0
    while done < len(tokens):
        end = min(len(tokens), done + 64)
        context = tokens[end - 65 : done] if done else [bf16.prefix_token_id]
        parts.append((context or tokens[done - 1 : done], tokens[done:end]))
        done = end
    assert total == pytest.approx(sum(v for v, _ in plain(parts)), rel=1e-4)
    settings = {"until": ["."], "max_gen_toks": 8, "do_sample": False}
    question = bf16.apply_chat_template(
        [{"role": "user", "content": "What is the capital of Japan?"}]
    )
    assert question.rstrip().endswith("</think>")
    (answer,) = bf16.generate_until(requests((question, settings)))
    assert "." not in answer and answer
    with pytest.raises(UsageError, match="greedily"):
        bf16.generate_until(requests((question, {"temperature": 0.7})))
    with pytest.raises(UsageError, match="do not fit"):
        bf16.generate_until(requests((question, {"max_gen_toks": 4096})))
    assert bf16.get_model_info()["profile"] == "bf16"


def test_without_lm_eval_the_command_names_the_extra(monkeypatch):
    if REAL:
        pytest.skip("lm-eval is installed here, so nothing is missing")
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != STAND_IN])
    for name in [n for n in sys.modules if n.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    done = command_line.annie_quant("lm-eval", "--model", "annie_quant")
    assert (
        done.returncode == 3
        and "annie-quant[lm-eval]" in done.stderr
        and "Traceback" not in done.stderr
    )


@pytest.mark.skipif(
    not REAL,
    reason="the comparison with lm-eval's own hf model needs lm-eval: pip install annie-quant[lm-eval]",
)
def test_lm_evals_own_hf_model_has_the_same_likelihoods(tmp_path, harness):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    rows = [
        {"q": c or "Hello", "choices": [t, " no", " and so on"], "label": i % 3}
        for i, (c, t) in enumerate(TEXTS)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "local",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}],
    }
    os.environ["HF_DATASETS_OFFLINE"] = "1"
    likelihoods = {}
    for name, arguments in (("annie_quant", ""), ("hf", ",dtype=float32")):
        done = simple_evaluate(
            name, f"pretrained={TINY_ANNIE}{arguments}", tasks=[task], device="cpu", log_samples=True,
            task_manager=TaskManager(include_defaults=False),
        )  # fmt: skip
        likelihoods[name] = [float(r[0][0]) for s in done["samples"]["local"] for r in s["resps"]]
    assert len(likelihoods["hf"]) == 12
    assert likelihoods["annie_quant"] == pytest.approx(likelihoods["hf"], abs=2e-3)
