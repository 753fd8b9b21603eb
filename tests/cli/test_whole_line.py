"""The whole pipeline on tiny-annie with small n: every stage's outputs exist, the report agrees with the records, and a second
run repeats nothing but a stage whose output is lost."""

import contextlib
import json
import shutil
import statistics
import subprocess
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from command_line import annie_quant

from annie_quant.cli.pipeline import demo, stages

pytest.importorskip("torch", reason="the pipeline needs torch: pip install annie-quant[quantize]")
from annie_quant.quantize import mixed_formats

pytestmark = pytest.mark.line

SIDES = ("bf16", "best", "q4_k_m")  # served; naive is judged without a server


# Constants that no option sets. `best` holds out conversations from 8 on; its trials take most of the time of this file and
# are tested in quantize/test_held_out.py and quantize/test_mixed_formats.py.
SMALL = {
    (demo, "N_CONVERSATIONS"): 100,
    (demo, "CALIBRATION_ROWS"): 4,
    (mixed_formats, "POSITIONS"): 512,
    (mixed_formats, "TOKENS"): 64,
}


def make_small(patch: pytest.MonkeyPatch) -> None:
    for (module, name), value in SMALL.items():
        patch.setattr(module, name, value)


def words(output: Path) -> list[str]:
    """Return the command with words with and without earlier turns, and tools; the other workloads are the same work again."""
    return [
        "demo",
        "--output",
        str(output),
        "--n-offline",
        "2",
        "--n-served",
        "2",
        "--workloads",
        "factual,multi_turn,tool_web",
    ]


class Ended(NamedTuple):
    """What stands for an evaluation's process that has ended."""

    log: Path
    alive: bool = False

    def wait(self) -> int:
        return 0

    def stop(self) -> None:
        pass


def evaluate_here(patch: pytest.MonkeyPatch) -> None:
    """Compute all evaluations but that of `best` in this process, which has imported torch: another one needs seconds for that."""
    spawn = stages.server.spawn

    def spawn_others(
        command: list[str], log: Path, name: str, *rest: object, **options: object
    ) -> object:
        if name not in ("bf16-answers", "eval-naive"):
            return spawn(command, log, name, *rest, **options)
        job = msgspec.json.decode(command[-1], type=stages.ProcessJob)
        log.parent.mkdir(exist_ok=True)
        with log.open("w") as file, contextlib.redirect_stdout(file):
            stages.evaluate(job, stages._Log())
        return Ended(log)

    patch.setattr(stages.server, "spawn", spawn_others)


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    for package in ("torch", "transformers", "modelopt", "xllamacpp", "gguf"):
        pytest.importorskip(
            package, reason=f"the pipeline needs {package}: pip install annie-quant[quantize,serve]"
        )
    output = tmp_path_factory.mktemp("line") / "demo"
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        evaluate_here(patch)
        return output, annie_quant(*words(output))


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
    assert all((run / f"eval/{side}.json").is_file() for side in ("naive", "best"))


def test_the_last_screen_has_a_sentence_per_model_then_report_and_next_command(line) -> None:
    run, done = line
    lines, text = done.stdout.splitlines(), " ".join(done.stdout.split())
    assert len(lines) <= 23 and max(map(len, lines)) <= 80
    for model in json.loads((run / "run.json").read_text())["aggregates"]["models"]:
        assert f"{model['label']} ({model['size_bytes'] / 1e6:.1f} MB)" in text
    assert "tokens/s (Q4_K_M: " in text
    report, following = done.stderr.splitlines()[-2:]
    assert report == f"report: {run / 'report.html'}" and "annie-quant init" in following


def test_checkpoints_are_judged_as_a_gpu_computes_them_with_the_prompts_of_the_servers_and_more(
    line,
) -> None:
    run, _ = line
    aggregates = json.loads((run / "run.json").read_text())["aggregates"]
    served = aggregates["served"]["best"]["gates"]
    for side in ("naive", "best"):
        assert list(aggregates["offline"][side]) == ["vllm-cutlass"]
        gates = aggregates["offline"][side]["vllm-cutlass"]["gates"]
        assert gates["tool_call"]["n"] == served["tool_call"]["n"] == 2, side


def test_the_three_sides_answered_the_same_prompts(line) -> None:
    run, _ = line
    prompts = {
        side: sorted(
            (r["workload"], r["case"], r["turn"])
            for r in records(run)
            if r["backend"] == side and not r["warmup"]
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
    models = {
        m["name"]: m for m in json.loads((run / "run.json").read_text())["aggregates"]["models"]
    }
    assert models["best"]["size_bytes"] == pytest.approx(models["naive"]["size_bytes"], rel=0.02)
    assert models["best"]["size_bytes"] < models["bf16"]["size_bytes"] / 2
    for strategy in ("naive", "best"):
        audit = checkpoint.audit(run / f"models/{strategy}")
        assert audit.ok, [f.message for f in audit.findings]


def test_only_a_stage_with_lost_outputs_is_repeated(
    line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_small(monkeypatch)
    run = tmp_path / "again"
    shutil.copytree(line[0], run)
    (run / "gguf/best.gguf").unlink()
    files = [
        *run.glob("gguf/*"),
        *run.glob("models/*/*"),
        *run.glob("eval/*.json"),
        *run.glob("stages/*"),
        run / "records.jsonl",
    ]
    before = {f: f.stat().st_mtime_ns for f in files if f.name != "gguf-best.json"}
    done = annie_quant(*words(run))
    assert done.returncode == line[1].returncode, done.stderr
    assert (run / "gguf/best.gguf").read_bytes() == (line[0] / "gguf/best.gguf").read_bytes()
    assert {f: f.stat().st_mtime_ns for f in before} == before
