"""A strategy is one file: it is listed, run, estimated and searched without a change anywhere else."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from paths import ROOT, TINY_ANNIE

from annie_quant import quantize
from annie_quant.core.errors import UsageError
from annie_quant.quantize import estimates, runner, strategies
from annie_quant.quantize.rates import SPARK_RATES

NEW_STRATEGY = '''
"""new: every linear in FP8, with input scales of 1."""
from typing import Annotated

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.models.formats import FP8
from annie_quant.quantize.formats import choose
from annie_quant.quantize.plan import PlannedLinear, QuantizationPlan, announce_size
from annie_quant.quantize.strategy import Cost, StrategyOptions, Strategy, described


class NewOptions(StrategyOptions, frozen=True):
    scale: Annotated[float, described("of the inputs")] = 1.0


def plan(job, progress):
    folder = ModelFolder(job.model)
    formats = dict.fromkeys(choose(folder, job.exclude), FP8)
    announce_size(folder, formats, progress)
    amax = 448 * job.options.scale
    return QuantizationPlan({name: PlannedLinear(FP8, input_amax=amax) for name in formats})


STRATEGY = Strategy("new", "every linear in FP8", dict.fromkeys(("mlp", "attention", "deltanet"), FP8),
                    Cost(rank=15, layerwise=True), plan, NewOptions, requires=())
'''


@pytest.fixture
def new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "strategies").mkdir()
    (tmp_path / "strategies/new.py").write_text(NEW_STRATEGY)
    monkeypatch.setattr(
        strategies, "__path__", [*strategies.__path__, str(tmp_path / "strategies")]
    )
    return "new"


def test_a_new_strategy_is_one_file(new: str, tmp_path: Path) -> None:
    assert quantize.available()[new] == "every linear in FP8"
    lines: list[str] = []
    result = quantize.run(new, TINY_ANNIE, tmp_path / "out", report=lines.append, scale=None)
    assert result.expected_bytes == pytest.approx(result.size_bytes, rel=0.01) and "FP8" in lines[0]
    expected = estimates.estimate(TINY_ANNIE, new, rates=SPARK_RATES)
    assert expected.size_bytes == pytest.approx(result.size_bytes, rel=0.03)
    assert [s.name for s in strategies.by_rank()][:4] == ["naive", "best", "new", "direct"]


def test_the_order_of_a_search_is_that_of_the_ranks() -> None:
    ranks = [s.cost.rank for s in strategies.by_rank()]
    assert ranks == sorted(ranks) and len(set(ranks)) == len(ranks)
    assert [s.name for s in strategies.by_rank() if s.conservative] == ["auto_mixed"]


def test_an_option_is_converted_once_and_explains_itself() -> None:
    gptq = strategies.find("gptq")
    assert msgspec.structs.asdict(gptq.settings({"damping": "0.1"})) == {
        "damping": 0.1,
        "prompt": 0.1,
        "norms": None,
        "activations": 4,
    }
    assert gptq.settings({"activations": "16"}) == gptq.settings({"activations": 16})
    with pytest.raises(UsageError, match=r"damping=much: Expected float, got str") as refused:
        gptq.settings({"damping": "much"})
    assert "diagonal" in refused.value.hint
    with pytest.raises(UsageError, match="gptq has no setting 'damp'") as refused:
        gptq.settings({"damp": 1})
    assert "damping: added to" in refused.value.hint and "(default 0.05)" in refused.value.hint
    with pytest.raises(UsageError, match="activations=8") as refused:
        gptq.settings({"activations": 8})
    assert "4 (W4A4) or 16" in refused.value.hint


@pytest.mark.parametrize(
    ("name", "replacement"), [("qad", "gptq"), ("sensitivity", "best --max-gb")]
)
def test_a_removed_strategy_names_its_replacement(name: str, replacement: str) -> None:
    with pytest.raises(UsageError, match=f"'{name}' was removed") as refused:
        strategies.find(name)
    assert replacement in refused.value.hint


def test_no_module_but_its_own_knows_a_strategy_s_name() -> None:
    """The demo chooses strategies to show, its report their order, and the command line names three as examples."""
    allowed = {
        "cli/pipeline/demo.py",
        "report/run.py",
        "cli/quantize.py",
        "nvfp4.py",
    }  # nvfp4.gptq is the algorithm
    package = ROOT / "annie_quant"
    # "direct" and "best" are words, and "modelopt" is also a dialect and an option's value.
    names = [n for n in strategies.available() if n not in ("direct", "best", "modelopt")]
    uses = [
        f"{file.relative_to(package)}: {name}"
        for file in package.rglob("*.py")
        if "strategies" not in file.parts and str(file.relative_to(package)) not in allowed
        for name in names
        if f'"{name}"' in file.read_text()
    ]
    assert uses == []


@pytest.mark.parametrize("name", [n for n, s in strategies.available().items() if s.cost.passes])
def test_missing_conversations_are_reported_before_libraries_are_loaded(
    name, tmp_path, monkeypatch
):
    monkeypatch.setattr(runner, "need", lambda *_: pytest.fail("a library was loaded"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="needs conversations"):
        runner.run(name, tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_gets_every_small_file_of_its_source(tmp_path: Path) -> None:
    """tokenizer.model is SentencePiece's (Gemma, Llama 2), chat_template.json that of older processors."""
    names = [
        "tokenizer.json",
        "tokenizer.model",
        "chat_template.json",
        "preprocessor_config.json",
        "LICENSE",
    ]
    source, target = tmp_path / "source", tmp_path / "target"
    for folder in (source, target):
        folder.mkdir()
    for name in [*names, "config.json", "README.md"]:
        (source / name).write_text(name)
    runner.copy_companions(source, target)
    assert {f.name: f.read_text() for f in target.iterdir()} == {name: name for name in names}
