"""Resuming: values under a key, and logs that a kill cut short, that another process writes, or that start again."""

from __future__ import annotations

import errno
import os

import pytest

from annie_quant.core.errors import EnvironmentFault, UsageError
from annie_quant.core.resume import JsonLines, KeyedJson, keyed_folder


def test_a_value_is_valid_for_its_key_alone(tmp_path):
    path = tmp_path / "value.json"
    KeyedJson(path, {"n": (1, 2)}).save({"x": 1})
    assert KeyedJson(path, {"n": [1, 2]}).load() == {"x": 1}, "a tuple and a list are the same key"
    assert KeyedJson(path, {"n": 3}).load(default="none") == "none"
    path.write_text(path.read_text()[:20])
    assert KeyedJson(path, {"n": [1, 2]}).load() is None


def test_a_folder_is_emptied_for_another_key(tmp_path):
    (keyed_folder(tmp_path / "f", "a") / "part").write_text("x")
    assert (keyed_folder(tmp_path / "f", "a") / "part").exists()
    assert not (keyed_folder(tmp_path / "f", "b") / "part").exists()


def test_a_partial_last_line_is_dropped_and_the_log_continues(tmp_path):
    path = tmp_path / "log.jsonl"
    with JsonLines(path) as log:
        log.append(b'{"n":1}', b'{"n":2}')
    path.write_bytes(path.read_bytes() + b'{"n":')
    with JsonLines(path, sync=True) as log:
        assert log.values(lambda *line: line) == [
            (b'{"n":1}', f"{path}: line 1"),
            (b'{"n":2}', f"{path}: line 2"),
        ]
        log.append(b'{"n":3}')
    assert path.read_bytes() == b'{"n":1}\n{"n":2}\n{"n":3}\n'
    with JsonLines(path, restart=True) as log:
        assert log.values(lambda *line: line) == []


def test_an_exclusive_log_is_refused_to_a_second_writer(tmp_path):
    with (
        JsonLines(tmp_path / "log.jsonl", exclusive=True),
        pytest.raises(UsageError, match="another annie-quant writes there"),
    ):
        JsonLines(tmp_path / "log.jsonl", exclusive=True)
    JsonLines(tmp_path / "log.jsonl", exclusive=True).close()


def test_a_full_disk_is_named_and_nothing_of_the_line_stays(tmp_path, monkeypatch):
    write = os.write

    def half(file, data):
        if len(data) < 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[: len(data) // 2])

    with JsonLines(tmp_path / "log.jsonl") as log:
        log.append(b"{}")
        monkeypatch.setattr(os, "write", half)
        with pytest.raises(EnvironmentFault, match="the disk is full; all earlier lines are safe"):
            log.append(b'{"n":123456789}')
        monkeypatch.undo()
    assert (tmp_path / "log.jsonl").read_bytes() == b"{}\n"
