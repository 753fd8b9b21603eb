"""Calibration rows: read evenly, refused with file and line."""

import json
from pathlib import Path

import pytest

from annie_quant.core.errors import UsageError
from annie_quant.data.rows import read_conversations


def write(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def test_a_sample_reaches_over_the_whole_file(tmp_path: Path) -> None:
    rows = [{"id": i, "messages": [{"role": "user", "content": "hi"}]} for i in range(500)]
    picked = [r["id"] for r in read_conversations(write(tmp_path / "c.jsonl", rows), 5)]
    assert picked == [0, 100, 200, 300, 400]


def test_a_broken_row_is_named_by_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n{"messages": [\n')
    with pytest.raises(UsageError, match=r"c\.jsonl, line 2"):
        read_conversations(path)


@pytest.mark.parametrize("row", [{"messages": []}, {"text": "x"}, [1], {"messages": ["hi"]}])
def test_a_row_that_is_not_a_conversation_is_refused(tmp_path: Path, row: object) -> None:
    with pytest.raises(UsageError, match="line 1"):
        read_conversations(write(tmp_path / "c.jsonl", [row]))


def test_a_missing_file_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        read_conversations(tmp_path / "none.jsonl")
    assert "annie-quant data" in refused.value.hint
