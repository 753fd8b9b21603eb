"""Answers under W4A16 are those that the real llama.cpp server gives from the GGUF of the same NVFP4 checkpoint.

llama.cpp rounds activations to 8 bits (Q8) in front of its NVFP4 products and keeps keys and values in half precision,
so its logits are near ours and not equal: where an answer parts, our two best tokens must stand that near to each other,
and llama.cpp's must be the second of them.
"""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

import annie_quant as aq
from annie_quant import judge

torch = pytest.importorskip("torch", reason="the runtime needs torch: pip install annie-quant[quantize]")
pytest.importorskip("modelopt", reason="ModelOpt makes the checkpoints: pip install annie-quant[quantize]")
pytest.importorskip("xllamacpp", reason="the serve extra is not installed")
pytest.importorskip("gguf", reason="the serve extra is not installed")
pytest.importorskip("annie_quant.nvfp4", reason="the runtime needs the codec")

from paths import TINY_ANNIE  # noqa: E402
from runtime_models import export_nvfp4  # noqa: E402

from annie_quant import runtime  # noqa: E402
from annie_quant.evaluate.decoding import Decoded  # noqa: E402
from annie_quant.evaluate.engine import Engine, Row  # noqa: E402
from annie_quant.evaluate.prompts import Ask, Template  # noqa: E402
from annie_quant.evaluate.verification import first_difference, target_of  # noqa: E402

LIMIT, NEAR = 32, 0.15  # most tokens of an answer; in logits


def asks(template: Template) -> list[Ask]:
    """Two short prompts of each workload of one turn."""
    found = []
    for workload in judge.load_workloads():
        if not workload.cases[0].turns:
            made = [template.ask(workload, case) for case in workload.cases[:: len(workload.cases) // 2][:2]]
            found += [ask for ask in made if len(ask.prompt) < 600]
    return found


def served(url: str, ask: Ask) -> dict:
    """llama.cpp's greedy tokens after the prompt's own token ids, with the log probability of its two best at each."""
    body = {"prompt": list(ask.prompt), "n_predict": LIMIT, "temperature": 0, "return_tokens": True, "n_probs": 2}
    request = urllib.request.Request(
        url + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


@pytest.fixture(scope="module")
def naive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_nvfp4(TINY_ANNIE, tmp_path_factory.mktemp("naive"))


@pytest.fixture(scope="module")
def answered(naive: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Ask], list[dict]]:
    asked = asks(Template(TINY_ANNIE))
    file = aq.checkpoint.convert(naive, "gguf", tmp_path_factory.mktemp("gguf") / "naive.gguf").path
    with aq.serve.start(file) as server:
        return asked, [served(server.url, ask) for ask in asked]


def test_answers_are_llama_cpps(naive: Path, answered: tuple[list[Ask], list[dict]]) -> None:
    asked, theirs = answered
    assert len(asked) >= 20
    ends = Template(TINY_ANNIE).ends
    model = runtime.load(naive, cache="float32", dtype=torch.float32)
    plain = [Decoded([t for t in found["tokens"] if t not in ends], found["stop_type"] == "eos") for found in theirs]
    rows = [Row(ask.prompt, target_of(answer, ends)) for ask, answer in zip(asked, plain, strict=True)]
    equal, apart = {}, []  # apart: distances of log probabilities
    for numerics in ("w4a4", "w4a16"):
        runtime.set_numerics(model, numerics)
        equal[numerics] = 0
        for i, logits in Engine(model).scores(rows):
            difference = first_difference(logits.argmax(-1), rows[i].target, ends)
            equal[numerics] += difference is None
            if numerics == "w4a4":
                continue
            if difference is not None:
                best = logits[difference.at].topk(2)
                margin = float(best.values[0] - best.values[1])
                assert best.indices[1] == rows[i].target[difference.at] and margin < NEAR, asked[i].name
            steps = theirs[i]["completion_probabilities"][: len(rows[i].target)]
            for mine, step in zip(logits.log_softmax(-1), steps, strict=False):
                apart += [abs(float(mine[p["id"]]) - p["logprob"]) for p in step["top_logprobs"] if p["logprob"] > -5]
    assert equal["w4a16"] >= 0.9 * len(rows)
    assert len(apart) > 300 and max(apart) < 0.5 and sorted(apart)[len(apart) // 2] < 1e-3
    assert equal["w4a4"] < equal["w4a16"], "rounded activations must be felt, or the comparison says nothing"
