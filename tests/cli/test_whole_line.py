"""The whole pipeline on tiny-annie with small n: every stage's outputs exist, the report agrees with the records, and a second
run repeats nothing."""

import json
import resource
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

pytestmark = pytest.mark.line

SIDES = ("bf16", "naive", "mlp_only", "q4_k_m")


def demo(output: Path, timeout: float = 1200) -> subprocess.CompletedProcess[str]:
    """Run the demo with three workloads: words with and without earlier turns, and tools; the others are the same work again."""
    command = [sys.executable, "-m", "annie_quant", "demo", "--output", str(output), "--n-offline", "3", "--n-served", "3",
               "--workloads", "factual,multi_turn,tool_web"]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=ROOT)


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    for package in ("torch", "transformers", "modelopt", "xllamacpp", "gguf"):
        pytest.importorskip(package, reason=f"the pipeline needs {package}: pip install annie-quant[quantize,serve]")
    output = tmp_path_factory.mktemp("line") / "demo"
    return output, demo(output)


def records(run: Path) -> list[dict]:
    return [json.loads(row) for row in (run / "records.jsonl").read_text().splitlines()]


def test_every_stage_finishes(line) -> None:
    run, done = line
    assert done.returncode == 0, done.stderr[-3000:]
    for name in (
        "run.json",
        "records.jsonl",
        "inputs.json",
        "results.csv",
        "report.html",
        "report.md",
        "calibration.jsonl",
    ):
        assert (run / name).stat().st_size > 0, name
    assert all((run / f"gguf/{side}.gguf").is_file() for side in SIDES)
    assert not list(run.rglob("*.part")), "no partial files are left"
    assert all((run / f"eval/{side}.json").is_file() for side in ("naive", "mlp_only"))


def test_the_output_ends_with_verdict_report_and_next_command(line) -> None:
    run, done = line
    sentence = json.loads((run / "run.json").read_text())["verdict"]["sentence"]
    assert " ".join(done.stdout.split()).endswith(" ".join(sentence.split()))
    assert max(map(len, done.stdout.splitlines())) <= 80
    report, following = done.stderr.splitlines()[-2:]
    assert report == f"report: {run / 'report.html'}" and "annie-quant init" in following


def test_both_checkpoints_are_judged_with_the_prompts_of_the_servers(line) -> None:
    run, _ = line
    aggregates = json.loads((run / "run.json").read_text())["aggregates"]
    for side in ("naive", "mlp_only"):
        for kind in ("w4a4", "w4a16"):
            gates = aggregates["offline"][side][kind]["gates"]
            assert gates["tool_call"]["n"] == aggregates["served"][side]["gates"]["tool_call"]["n"], (side, kind)


def test_the_four_sides_answered_the_same_prompts(line) -> None:
    run, _ = line
    prompts = {
        side: sorted(
            (r["workload"], r["case"], r["turn"]) for r in records(run) if r["backend"] == side and not r["warmup"]
        )
        for side in SIDES
    }
    assert prompts["bf16"] and all(prompts[side] == prompts["bf16"] for side in SIDES)


def test_the_gates_in_run_json_are_a_recount_of_the_records(line) -> None:
    run, _ = line
    served = json.loads((run / "run.json").read_text())["aggregates"]["served"]
    for side in SIDES:
        rows = [r for r in records(run) if r["backend"] == side and not r["warmup"]]
        for gate, row in served[side]["gates"].items():
            verdicts = [r["checks"][gate] for r in rows if gate in r["checks"]]
            assert (row["passes"], row["n"]) == (sum(verdicts), len(verdicts)), (side, gate)


def test_the_median_ttft_is_a_recount_of_the_records(line) -> None:
    run, _ = line
    served = json.loads((run / "run.json").read_text())["aggregates"]["served"]
    for side in SIDES:
        values = [
            r["first_content_ms"]
            for r in records(run)
            if r["backend"] == side
            and r["workload"] == "factual"
            and not r["warmup"]
            and not r["cold"]
            and not r["error"]
        ]
        stored = served[side]["workloads"]["factual"]["ttft_content_ms"]
        if stored["n"] == len(values):
            assert stored["p50"] == pytest.approx(statistics.median(values))
        else:
            assert stored["n"] < len(values), "a stall may be excluded, never added"


def test_quantized_sides_are_smaller_and_sound_nvfp4(line) -> None:
    from annie_quant import checkpoint

    run, _ = line
    models = {m["name"]: m for m in json.loads((run / "run.json").read_text())["aggregates"]["models"]}
    assert models["naive"]["size_bytes"] < models["mlp_only"]["size_bytes"] < models["bf16"]["size_bytes"]
    for strategy in ("naive", "mlp_only"):
        audit = checkpoint.audit(run / f"models/{strategy}")
        assert audit.ok, [f.message for f in audit.findings]


def processor_seconds() -> float:
    """Return the processor time of all child processes so far, which other work on the machine does not change."""
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def test_a_second_run_repeats_nothing(line) -> None:
    run, _ = line
    before = {f: f.stat().st_mtime_ns for f in [*run.glob("gguf/*"), *run.glob("stages/*"), run / "records.jsonl"]}
    start = processor_seconds()
    done = demo(run)
    assert done.returncode == 0 and processor_seconds() - start < 60
    assert {f: f.stat().st_mtime_ns for f in before} == before


def test_only_a_stage_with_lost_outputs_is_repeated(line, tmp_path: Path) -> None:
    run = tmp_path / "again"
    shutil.copytree(line[0], run)
    (run / "gguf/mlp_only.gguf").unlink()
    untouched = (run / "models/naive/model.safetensors").stat().st_mtime_ns
    assert demo(run).returncode == 0
    assert (run / "gguf/mlp_only.gguf").read_bytes() == (line[0] / "gguf/mlp_only.gguf").read_bytes()
    assert (run / "models/naive/model.safetensors").stat().st_mtime_ns == untouched
