"""tiny-annie's MTP head: llama.cpp drafts with it, most drafts are accepted, and the answers stay the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from draft_server import Served, served
from paths import TINY_ANNIE
from tiny_variants import save_with_head

import annie_quant as aq
from annie_quant.checkpoint import ModelFolder, writer
from annie_quant.core.errors import ServerError
from annie_quant.judge import load_workloads

pytest.importorskip("xllamacpp", reason="the serve extra is not installed")
pytest.importorskip("gguf", reason="the serve extra is not installed")
pytest.importorskip("transformers", reason="the prompts need a tokenizer")

from annie_quant.offline.prompts import Template


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_head(tmp_path_factory.mktemp("head") / "bf16")


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[Served]:
    return answers(folder, 0)


def answers(folder: Path, drafts: int) -> list[Served]:
    template = Template(folder)
    workloads = load_workloads(["factual", "reasoning", "tool_memory", "tool_web"])
    prompts = [template.request(w, c).prompt for w in workloads for c in w.cases[:1]]
    file = Path(aq.checkpoint.convert(folder, "gguf", folder.with_suffix(f".{drafts}.gguf")).path)
    return served(file, prompts, drafts, 32)


def test_audit_counts_the_head(folder: Path) -> None:
    audit = aq.checkpoint.audit(folder)
    assert audit.findings == [] and audit.summary.mtp == "15 BF16"


def test_most_drafts_are_accepted_and_answers_stay(folder: Path, plain: list[Served]) -> None:
    drafted = answers(folder, 1)
    assert [a.tokens for a in drafted] == [a.tokens for a in plain]
    assert not any(a.drafts for a in plain)
    drafts, accepted = sum(a.drafts for a in drafted), sum(a.accepted for a in drafted)
    assert drafts > 25 and accepted >= 0.85 * drafts


def test_drafts_of_a_damaged_head_are_refused_and_answers_stay(
    folder: Path, plain: list[Served], tmp_path: Path
) -> None:
    """Negative control: acceptance measures the head."""
    good, bad = ModelFolder(folder), tmp_path / "bad"
    bad.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (bad / file.name).write_bytes(file.read_bytes())
    tensors = {n: good.tensor(n) for n in good}
    tensors["mtp.fc.weight"] = np.ascontiguousarray(tensors["mtp.fc.weight"][::-1])
    writer.write(bad, [writer.planned(n, t) for n, t in tensors.items()], 1 << 40)
    drafted = answers(bad, 1)
    assert [a.tokens for a in drafted] == [a.tokens for a in plain]
    assert sum(a.accepted for a in drafted) < 0.3 * sum(a.drafts for a in drafted)


def test_a_file_without_a_head_is_refused_with_its_reason(tmp_path: Path) -> None:
    file = aq.checkpoint.convert(TINY_ANNIE, "gguf", tmp_path / "plain.gguf").path
    with pytest.raises(ServerError, match="failed to create MTP context") as raised:
        aq.serve.start(file, drafts=1)
    assert "has no MTP head" in raised.value.hint
    assert "--spec-type draft-mtp --spec-draft-n-max 2" in aq.serve.command(file, drafts=2)
    assert "spec" not in aq.serve.command(file)
