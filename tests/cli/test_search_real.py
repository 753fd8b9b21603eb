"""The search on tiny-annie: the three negative controls with real models and data, and an interrupted search."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from command_line import annie_quant
from paths import TINY_ANNIE
from tiny_variants import save_variant

from annie_quant.cli.pipeline import search, search_diagnosis
from annie_quant.cli.pipeline.run_directory import RunDirectory
from annie_quant.core.errors import UsageError
from annie_quant.core.progress import SilentConsole
from annie_quant.data import generate, load_persona
from annie_quant.documents.persona import PERSONAS_FOLDER

torch = pytest.importorskip(
    "torch", reason="the search needs torch: pip install annie-quant[quantize]"
)
pytest.importorskip(
    "transformers", reason="the search needs transformers: pip install annie-quant[quantize]"
)


WORKLOADS = "factual,tool_web"  # the rest of Annie's are more of the same work


@pytest.fixture(scope="module")
def calibration(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "annie.jsonl"
    generate("annie", n=24, output=path)
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_variant("base", tmp_path_factory.mktemp("base") / "tiny-base")


@pytest.fixture(autouse=True)
def few_hardened(monkeypatch):
    """Two prompts under the hardened system prompt and two conversations for the divergence, where a search takes 40 and 60.

    What follows from them: test_search_decide.py.
    """
    monkeypatch.setattr(search_diagnosis, "HARDENED_N", 2)
    monkeypatch.setattr(search, "KL_CONVERSATIONS", 2)


def test_a_base_model_instead_of_the_fine_tune_stops_the_search(base, calibration, tmp_path):
    settings = search.SearchSettings(
        model=base, calib_data=calibration, output=tmp_path / "s", n=2, strategies=["direct"], required=["w4a16"],
        workloads=WORKLOADS,
    )  # fmt: skip
    result = search.run(settings, SilentConsole())
    assert (
        result.stopped.startswith("WRONG MODEL")
        and result.chosen is None
        and result.strategies == []
    )
    assert result.reference["tool_call"].passes == 0
    page = (tmp_path / "s" / "search.md").read_text()
    assert "WRONG MODEL" in page and "└── NO →" in page
    again = search.run(replace(settings, anyway=True), SilentConsole())
    assert len(again.strategies) == 1 and not again.strategies[0].passed


def test_a_stale_system_prompt_stops_the_search_unless_allowed(tmp_path):
    persona = tmp_path / "annie.json"
    data = json.loads((PERSONAS_FOLDER / "annie.json").read_text())
    persona.write_text(json.dumps(data))
    generate(load_persona(persona), n=20, output=tmp_path / "d.jsonl")
    persona.write_text(json.dumps(data | {"system_prompt": "You are Annie, as of today."}))
    settings = search.SearchSettings(
        model=TINY_ANNIE, calib_data=tmp_path / "d.jsonl", output=tmp_path / "s", n=5, strategies=[], required=["w4a16"],
        workloads="factual",
    )  # fmt: skip
    with pytest.raises(UsageError, match="stale prompt"):
        search.run(settings, SilentConsole())
    result = search.run(replace(settings, allow_prompt_mismatch=True), SilentConsole())
    assert (
        any("stale prompt" in note for note in result.notes)
        and "stale prompt" in (tmp_path / "s" / "search.md").read_text()
    )


def test_an_interrupted_search_resumes_and_gives_the_same_result(
    calibration, tmp_path, monkeypatch
):
    def words(output):
        return ["search", "--model", str(TINY_ANNIE), "--calib-data", str(calibration), "--output", str(output), "--n", "2",
                "--strategies", "direct", "--require", "w4a16", "--workloads", "factual"]  # fmt: skip

    broken, whole = tmp_path / "broken", tmp_path / "whole"
    stage = RunDirectory.stage

    def interrupted(self, name, *rest):
        finished = stage(self, name, *rest)
        if name == "eval-bf16":
            raise KeyboardInterrupt
        return finished

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "stage", interrupted)
        done = annie_quant(*words(broken))
    assert (
        done.returncode == 130 and "resume" in done.stderr and not (broken / "search.json").exists()
    )
    first = (broken / "stages/eval-bf16.json").stat().st_mtime_ns
    for output in (broken, whole):
        annie_quant(*words(output))
    assert (broken / "stages/eval-bf16.json").stat().st_mtime_ns == first, (
        "a finished stage is not done again"
    )
    tables = [json.loads((output / "search.json").read_text()) for output in (broken, whole)]
    rows = [
        [(r["strategy"], r["outcome"], r["why"], r["size_bytes"]) for r in table["strategies"]]
        for table in tables
    ]
    assert rows[0] == rows[1] and tables[0]["chosen"] == tables[1]["chosen"]
