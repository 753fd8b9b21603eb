"""Same seed, same bytes; an interrupted run resumes and gives the same result; stale prompts are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import runtime_models
from paths import CALIBRATION, TINY_ANNIE

from annie_quant import quantize
from annie_quant.core.errors import UsageError
from annie_quant.core.files import sha256_text
from annie_quant.core.resume import KEY_FILE, KeyedJson
from annie_quant.data.workloads import check_checkpoint, resolve

MAX_GB = 0.0007
PART = ",".join(f"layers.{i}" for i in range(6))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of four layers and conversations to calibrate it with."""
    pytest.importorskip(
        "torch", reason="the strategies run on torch: pip install annie-quant[quantize]"
    )
    return runtime_models.save_with_conversations(tmp_path_factory.mktemp("small"))


def make(strategy: str, small: Path, output: Path, **settings: object) -> dict[str, bytes]:
    quantize.run(
        strategy,
        small / "model",
        output,
        calib_data=small / "calib.jsonl",
        calib_samples=3,
        **settings,
    )
    return contents(output)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def test_measurements_before_an_interruption_are_not_repeated(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded inputs first, then formats."""
    from annie_quant.quantize.kl_trial import Trial

    measured: list[object] = []
    shares, save, saved = Trial.shares, KeyedJson.save, []
    monkeypatch.setattr(Trial, "shares", lambda *args: measured.append(args[1]) or shares(*args))

    def run(name: str) -> dict[str, bytes]:
        return make(
            "best", small, tmp_path / name, exclude="layers.0,layers.1,layers.2", max_gb=MAX_GB
        )

    whole, once = run("whole"), len(measured)

    def interrupted(self: KeyedJson, value: object) -> None:
        save(self, value)
        if self.path.name != KEY_FILE:  # of the work folder itself
            saved.append(self.path)
        if [p.name for p in saved].count("format_figures.json") == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(KeyedJson, "save", interrupted)
        run("out")
    assert (
        [p.name for p in saved[:2]] == ["affordable_positions.json", "input_shares.json"]
        and saved[-1].is_file()
        and not (tmp_path / "out").exists()
    )
    assert run("out") == whole
    assert once > 2 and len(measured) == 2 * once
    assert not saved[-1].exists(), "the work folder is removed after success"


@pytest.mark.parametrize("strategy", ["awq_lite", "gptq", "w4a16_mixed"])
def test_same_seed_same_bytes(strategy: str, small: Path, tmp_path: Path) -> None:
    assert make(strategy, small, tmp_path / "one") == make(strategy, small, tmp_path / "two")


def test_what_was_stored_for_other_settings_is_not_used(tmp_path: Path) -> None:
    job = quantize.Job(TINY_ANNIE, tmp_path / "out", CALIBRATION, work=tmp_path / "work")
    (job.work_folder() / "state").write_text("{}")
    job.measurements("scores.json").save({"a": 1})
    assert (job.work_folder() / "state").is_file() and job.measurements("scores.json").load() == {
        "a": 1
    }
    job = replace(job, seed=1)
    assert job.measurements("scores.json").load() is None
    assert not (job.work_folder() / "state").exists()


def other_prompt(path: Path) -> Path:
    rows = [json.loads(line) for line in CALIBRATION.read_text().splitlines()]
    for row in rows:
        row["messages"][0]["content"] = "You are someone else."
        row["provenance"] |= {
            "persona": "annie",
            "prompt_sha256": sha256_text("You are someone else."),
        }
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_stale_system_prompt_is_refused_unless_allowed(tmp_path: Path) -> None:
    pytest.importorskip(
        "torch", reason="the strategies run on torch: pip install annie-quant[quantize]"
    )
    stale = other_prompt(tmp_path / "stale.jsonl")
    with pytest.raises(UsageError, match="system prompt"):
        quantize.run("naive", TINY_ANNIE, tmp_path / "out", calib_data=stale, calib_samples=2)
    assert not (tmp_path / "out").exists()
    quantize.run(
        "naive",
        TINY_ANNIE,
        tmp_path / "out",
        calib_data=stale,
        calib_samples=2,
        allow_prompt_mismatch=True,
    )
    recipe = json.loads((tmp_path / "out/annie_quant.json").read_text())
    assert recipe["prompt_sha256"] == [sha256_text("You are someone else.")]
    assert "production" in recipe["prompt_mismatch"]


def test_a_checkpoint_made_for_another_prompt_is_not_judged_unless_allowed(tmp_path: Path) -> None:
    stale = other_prompt(tmp_path / "stale.jsonl")
    quantize.run(
        "direct", TINY_ANNIE, tmp_path / "out", calib_data=stale, allow_prompt_mismatch=True
    )
    with pytest.raises(UsageError, match="another system prompt"):
        check_checkpoint(tmp_path / "out", resolve())
    assert "annie" in (check_checkpoint(tmp_path / "out", resolve(), allow=True) or "")
    quantize.run("direct", TINY_ANNIE, tmp_path / "good", calib_data=CALIBRATION)
    assert check_checkpoint(tmp_path / "good", resolve()) is None
    assert check_checkpoint(TINY_ANNIE, resolve()) is None, (
        "a checkpoint without a hash cannot be compared"
    )


def test_the_named_persona_decides(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="system prompt"):
        quantize.run(
            "direct",
            TINY_ANNIE,
            tmp_path / "out",
            calib_data=other_prompt(tmp_path / "s.jsonl"),
            persona="annie",
        )


def test_unknown_settings_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        quantize.run("auto_mixed", TINY_ANNIE, tmp_path / "out", calib_data=CALIBRATION, bit=5)
    assert "bits" in refused.value.hint
    with pytest.raises(UsageError, match="bits=many"):
        quantize.run(
            "auto_mixed", TINY_ANNIE, tmp_path / "out", calib_data=CALIBRATION, bits="many"
        )


def test_a_size_that_cannot_be_reached_is_refused_with_one_that_can(tmp_path: Path) -> None:
    pytest.importorskip(
        "torch", reason="the strategies run on torch: pip install annie-quant[quantize]"
    )
    with pytest.raises(UsageError, match="less than") as refused:
        quantize.run(
            "auto_mixed",
            TINY_ANNIE,
            tmp_path / "out",
            calib_data=CALIBRATION,
            exclude=PART,
            bits=4.2,
        )
    assert "--set bits=" in refused.value.hint
