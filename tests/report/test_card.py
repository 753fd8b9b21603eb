"""The model card: metadata that huggingface_hub accepts, every figure counted again from the records, nothing hidden."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import report_fixture

import annie_quant as aq
from annie_quant.core.errors import UsageError
from annie_quant.report import publishing

hub = pytest.importorskip(
    "huggingface_hub", reason="huggingface_hub makes and checks the card's metadata"
)
TINY = Path(aq.__file__).parent / "assets" / "tiny-annie"
BASE = "owner/tiny-annie"


def conversations() -> list[dict]:
    source = {
        "teacher": "offline",
        "model": "templates",
        "prompt_sha256": "ab" * 32,
        "persona_sha256": "cd" * 32,
    }
    return [
        {
            "id": f"row-{i}",
            "category": ("greeting", "factual", "tools")[i % 3],
            "messages": [
                {"role": "user", "content": "Hi."},
                {"role": "assistant", "content": "Hello."},
            ],
            "provenance": source | {"time": f"2026-11-{10 + i % 5}T05:00:00+00:00"},
            "split": "gate" if i % 10 == 9 else "calibration",
        }
        for i in range(40)
    ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return report_fixture.make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = report_fixture.make_run(tmp_path_factory.mktemp("card") / "run", n=25)
    (folder / "calibration.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in conversations())
    )
    return folder


@pytest.fixture(scope="module")
def plan(run, checkpoint):
    return publishing.prepare(
        run,
        "owner/Tiny-NVFP4",
        model="mlp_only",
        checkpoint=checkpoint,
        base_model=BASE,
        license="apache-2.0",
    )


def test_metadata_hold_what_the_hub_searches_for(plan):
    data = hub.ModelCard(plan.card).data
    assert (
        data.base_model == BASE
        and data.base_model_relation == "quantized"
        and data.license == "apache-2.0"
    )
    assert {"dgx-spark", "blackwell", "nvfp4", "qwen3.5"} <= set(data.tags)
    assert (
        data.quantization["format"] == "nvfp4" and data.quantization["algorithm"] == "W4A16_NVFP4"
    )
    assert data.library_name == "transformers" and data.pipeline_tag == "text-generation"
    again = hub.ModelCardData(**hub.metadata_load(plan.folder / "README.md"))
    assert len(again.eval_results) == len(data.eval_results) > 10


def test_the_card_predicts_both_halves_of_the_speed(plan):
    line = next(line for line in plan.card.splitlines() if "Predicted for one stream" in line)
    assert "tok/s on NVIDIA GB10; first token after about" in line and "prompt tokens" in line


def test_every_result_in_the_metadata_is_counted_again(plan, run):
    rows = [json.loads(line) for line in (run / "records.jsonl").open(encoding="utf-8")]
    document = json.loads((run / "run.json").read_text())
    served = 0
    for result in hub.ModelCard(plan.card).data.eval_results:
        gate, counts = result.metric_type, result.metric_args
        if result.dataset_config == "mlp_only":
            served += 1
            own = [r for r in rows if r["backend"] == "mlp_only" and not r["warmup"]]
            checks = [r["checks"][gate] for r in own if gate in r["checks"]]
            assert (counts["passes"], counts["n"]) == (sum(checks), len(checks)), gate
        else:
            numerics = result.dataset_config.split("/")[1]
            row = document["aggregates"]["offline"]["mlp_only"][numerics]["gates"][gate]
            assert (counts["passes"], counts["n"]) == (row["passes"], row["n"]), gate
        assert result.metric_value == pytest.approx(counts["passes"] / counts["n"], abs=1e-4)
        assert (
            counts["low"] <= result.metric_value + 1e-4
            and result.metric_value <= counts["high"] + 1e-4
        )
    assert served >= 5


def test_the_table_of_results_is_counted_again(plan, run):
    rows = [json.loads(line) for line in (run / "records.jsonl").open(encoding="utf-8")]
    table = plan.card.split("## Results")[1].split("## Serving")[0].splitlines()
    line = next(x for x in table if x.startswith("| tool call"))
    shown = re.findall(r"(\d+)/(\d+)", line)
    expected = []
    for backend in ("bf16", "mlp_only", "q4_k_m"):
        own = [
            r["checks"]["tool_call"]
            for r in rows
            if r["backend"] == backend and "tool_call" in r["checks"] and not r["warmup"]
        ]
        expected.append((str(sum(own)), str(len(own))))
    assert [c for c in shown if c in expected] and set(expected) <= set(shown)
    assert ("50", "120") not in shown, "naive's column is not this card's"


def prepared(run, checkpoint, folder, **record):
    """A card for a copy of the checkpoint whose own record (annie_quant.json) has `record` added; without `record` it has none."""
    copy = Path(shutil.copytree(checkpoint, folder / "model"))
    if record:
        known = (
            json.loads((copy / "annie_quant.json").read_text())
            if (copy / "annie_quant.json").exists()
            else {}
        )
        (copy / "annie_quant.json").write_text(json.dumps(known | record))
    else:
        (copy / "annie_quant.json").unlink(missing_ok=True)
    return publishing.prepare(
        run, "owner/x", model="mlp_only", checkpoint=copy, base_model=BASE
    ).card


def test_a_merged_adapter_is_named_with_its_hashes(run, checkpoint, tmp_path):
    adapter = {
        "name": "my-adapter",
        "summary": "LoRA, rank 16, alpha 32",
        "weights_sha256": "1a" * 32,
        "config_sha256": "2b" * 32,
        "base_sha256": "3c" * 32,
        "trained_on": "Qwen/Qwen3.5-9B",
        "trained_on_revision": None,
        "tensors": 8,
        "changed": 4,
        "relative_change": {"mlp": 0.01},
        "prompt_files": "tokenizer from the base",
    }
    card = prepared(run, checkpoint, tmp_path / "with", adapters=[adapter])
    (line,) = [line for line in card.splitlines() if "my-adapter" in line.replace("\\", "")]
    for text in ("LoRA, rank 16, alpha 32", "Qwen/Qwen3.5-9B", "1a" * 32, "2b" * 32, "3c" * 32):
        assert text in line.replace("\\", "")
    assert "adapter" not in prepared(run, checkpoint, tmp_path / "without")


def section(card: str) -> str:
    return card.split("## Calibration")[1].split("## Results")[0].replace("\\", "")


def test_calibration_states_its_origin(run, checkpoint, tmp_path):
    content = (run / "calibration.jsonl").read_bytes()
    rows = [json.loads(line) for line in content.splitlines()]
    digest = hashlib.sha256(content).hexdigest()
    part = section(prepared(run, checkpoint, tmp_path, calib_data_sha256=digest, calib_samples=24))
    used = sum(r["split"] == "calibration" for r in rows)
    assert used == 36 and "12 greeting" in part and "written 2026-11-10 to 2026-11-14" in part
    assert f"{used} conversations for calibration of {len(rows)}" in part and digest in part
    assert "teacher: offline" in part and rows[0]["provenance"]["persona_sha256"] in part
    assert "own record names this file, 24 conversations at most" in part


def test_calibration_of_another_file_is_stated(run, checkpoint, tmp_path):
    part = section(prepared(run, checkpoint, tmp_path, calib_data_sha256="ef" * 32))
    assert f"another file, SHA-256 {'ef' * 32}" in part


def test_without_calibration_data_the_card_states_it(run, checkpoint, tmp_path):
    assert "None: this strategy was given no calibration data" in section(
        prepared(run, checkpoint, tmp_path / "none", calib_data_sha256=None)
    )
    bare = tmp_path / "run"
    shutil.copytree(run, bare, ignore=shutil.ignore_patterns("calibration.jsonl", "publish"))
    assert "Not on record" in section(prepared(bare, checkpoint, tmp_path / "bare"))


def test_the_recipe_is_for_this_checkpoint(plan):
    part = plan.card.split("## Serving")[1].split("## Limits")[0]
    assert "hf download owner/Tiny-NVFP4 --local-dir Tiny-NVFP4" in part
    commands = [shlex.split(x) for x in part.splitlines() if x.startswith("    docker run")]
    assert len(commands) == 2
    for words in commands:
        assert "$PWD/Tiny-NVFP4:/model:ro" in words and str(Path.cwd()) not in " ".join(words)
        assert words[words.index("--tool-call-parser") + 1] == "qwen3_coder"


def test_the_strategy_is_that_of_the_checkpoint_s_own_record(run, checkpoint, tmp_path):
    """The names of models in a run are free."""
    card = prepared(run, checkpoint, tmp_path / "known", strategy="awq_lite", scale="sweep")
    assert "strategy awq" in card and "scale sweep" in card
    assert hub.ModelCard(card).data.quantization["strategy"] == "awq_lite"
    other = prepared(run, checkpoint, tmp_path / "unknown")
    assert "strategy" not in other.split("## Calibration")[0]


def test_the_recipe_that_held_out_conversations_chose_is_named(run, checkpoint, tmp_path):
    figures = {
        "kl": 0.01,
        "decisions": 0.02,
        "kl_w4a16": 0.01,
        "decisions_w4a16": 0.02,
        "change": -0.1,
        "noise": 0.01,
    }
    tried = [
        {"name": n, "used": u, **figures}
        for n, u in (("gptq", True), ("AWQ folds", False), ("prompt tokens", True))
    ]
    held_out = {"conversations": 51, "tokens": 2000, "decisions": 612}
    card = prepared(
        run, checkpoint, tmp_path / "best", strategy="best", held_out=held_out, ingredients=tried
    )
    line = "recipe gptq + prompt tokens, compared on 51 held-out conversations (612 tokens that decide); refused: AWQ folds"
    assert line in card


def test_a_runtime_that_cannot_load_it_gets_no_command(run, tmp_path):
    card = publishing.prepare(
        run, "owner/x", model="mlp_only", checkpoint=TINY, base_model=BASE
    ).card
    audit = aq.checkpoint.audit(TINY)
    for runtime in ("vLLM", "SGLang"):
        loads = any(x.startswith(f"{runtime}: yes") for x in audit.summary.loads)
        assert (f"{runtime}:\n" in card) == loads


def test_limits_name_what_failed_and_what_is_unknown(run, checkpoint):
    card = publishing.prepare(
        run, "owner/x", model="naive", checkpoint=checkpoint, base_model=BASE, forced="as a lesson"
    ).card
    limits = card.split("## Limits")[1]
    assert re.search(r"W4A4 offline: fails \(50 of 120", limits)
    assert "not measured on a DGX Spark" in limits and "Synthetic figures" in limits
    assert "Reason given: as a lesson" in card and "Published although" in card


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"repo_id": "a/b/c"}, "not valid"),
        ({"repo_id": "owner/..x"}, "not valid"),
        ({"base_model": "no spaces/here please"}, "not valid"),
        ({"base_model": None}, "add --base-model|Hub model"),
        ({"model": "unknown"}, "no model 'unknown'"),
    ],
)
def test_what_the_hub_would_refuse_is_refused_here(run, checkpoint, change, words):
    options = {
        "repo_id": "owner/x",
        "model": "mlp_only",
        "checkpoint": checkpoint,
        "base_model": BASE,
    } | change
    with pytest.raises(UsageError, match=words):
        publishing.prepare(run, **options)


def test_hostile_names_stay_inert(run, checkpoint, tmp_path):
    bad = tmp_path / "run"
    shutil.copytree(run, bad, ignore=shutil.ignore_patterns("publish"))
    document = json.loads((bad / "run.json").read_text())
    document["verdict"]["caveats"] = [
        "---\ntags: [evil]\n---\n# <script>alert(1)</script> [x](javascript:y)"
    ]
    (bad / "run.json").write_text(json.dumps(document))
    card = publishing.prepare(
        bad, "owner/x", model="mlp_only", checkpoint=checkpoint, base_model=BASE
    ).card
    assert (
        "<script>" not in card
        and "evil" not in hub.ModelCard(card).data.tags
        and "\n# \\<script" not in card
    )
