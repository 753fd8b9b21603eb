"""Resuming: what was stored under another key is never used, torn files count as missing; reports reach any receiver."""

from __future__ import annotations

from pathlib import Path

from annie_quant.progress import SILENT, Lines, as_progress
from annie_quant.resume import KEY_FILE, JsonLines, KeyedJson, keyed_folder


def test_a_folder_is_emptied_for_another_key(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    (keyed_folder(folder, {"seed": 1, "path": tmp_path}) / "state").write_text("x")
    assert (keyed_folder(folder, {"path": str(tmp_path), "seed": 1}) / "state").exists(), "a Path equals its text"
    assert {f.name for f in keyed_folder(folder, {"seed": 2}).iterdir()} == {KEY_FILE}


def test_a_process_that_waits_gets_the_folder_in_the_end(tmp_path: Path) -> None:
    assert keyed_folder(tmp_path / "work", ["a"], wait_s=0.01).is_dir()


def test_a_value_is_valid_for_its_key_only(tmp_path: Path) -> None:
    file = KeyedJson(tmp_path / "scores.json", {"seed": 1})
    assert file.load({}) == {}
    file.save({"a": 0.1})
    assert KeyedJson(file.path, {"seed": 1}).load() == {"a": 0.1}
    assert KeyedJson(file.path, {"seed": 2}).load("none") == "none"
    for torn in ("", '{"key": {"seed": 1}', "[]", '{"a": 0.1}'):
        file.path.write_text(torn)
        assert file.load("none") == "none"


def test_a_log_drops_the_line_that_a_kill_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": 2}\n{"n"')
    with JsonLines(path) as log:
        assert list(log.lines()) == [(1, b'{"n": 1}'), (2, b'{"n": 2}')]
        log.append(b'{"n": 3}')
    assert path.read_bytes() == b'{"n": 1}\n{"n": 2}\n{"n": 3}\n'


def test_a_report_may_be_a_function_a_progress_or_nothing() -> None:
    lines: list[str] = []
    progress = as_progress(lines.append)
    progress.update(1, 2, "layer 1 of 2")
    progress.update(2, 2)
    progress.message("done")
    assert lines == ["layer 1 of 2", "done"]
    assert as_progress(None) is SILENT
    already = Lines(lines.append)
    assert as_progress(already) is already
