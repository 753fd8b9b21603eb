"""Run directories after a kill or on a full disk: partial files are removed, finished stages stay, and errors are one line."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from annie_quant import cli
from annie_quant.cli.pipeline.run_directory import RunDirectory
from annie_quant.core.errors import UsageError


def test_only_partial_files_of_a_killed_process_are_removed(tmp_path):
    run = RunDirectory(tmp_path)
    (tmp_path / "gguf").mkdir()
    (tmp_path / "models/.naive.part").mkdir(parents=True)
    partial = tmp_path / "gguf/.naive.gguf.4711.part"
    others = [
        tmp_path / "gguf/naive.gguf",
        tmp_path / "models/.naive.part/shard.part",
        tmp_path / "gguf/my.part",
    ]
    for file in (partial, *others):
        file.write_text("x")
    with run.locked():
        assert not partial.exists() and all(file.exists() for file in others)


def test_a_stage_is_done_once_per_inputs_and_again_when_they_or_its_outputs_change(tmp_path):
    run, done = RunDirectory(tmp_path), []

    def work():
        (tmp_path / "out").write_text("x")
        done.append(1)
        return {"summary": ""}

    assert [run.stage("a", {"n": n}, ["out"], work)[1] for n in (1, 1, 2, 2)] == [
        False,
        True,
        False,
        True,
    ]
    (tmp_path / "out").unlink()
    assert run.stage("a", {"n": 2}, ["out"], work)[1] is False
    (tmp_path / "stages/a.json").write_text('{"key": "torn')
    assert run.stage("a", {"n": 2}, ["out"], work)[1] is False
    assert len(done) == 4


def test_a_second_command_in_the_same_folder_is_refused(tmp_path):
    code = (
        "import sys, time; from annie_quant.cli.pipeline.run_directory import RunDirectory\n"
        "with RunDirectory(sys.argv[1]).locked(): print('in', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline() == "in\n"
        with (
            pytest.raises(UsageError, match="another annie-quant"),
            RunDirectory(tmp_path).locked(),
        ):
            pass
    finally:
        other.kill()
        other.wait()
    with RunDirectory(tmp_path).locked():
        pass  # the lock ended with the killed process


@pytest.mark.parametrize(
    "fault",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/somewhere"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_one_line_whichever_library_reports_it(monkeypatch, capsys, fault):
    def full(*words, **options):
        raise fault

    monkeypatch.setattr(cli, "app", full)
    monkeypatch.delenv("ANNIE_QUANT_TRACEBACK", raising=False)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    lines = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 3 and len(lines) == 2
    assert "the disk is full" in lines[0] and "the same command again" in lines[1]


def test_a_bug_is_not_hidden(monkeypatch):
    def broken(*words, **options):
        raise KeyError("x")

    monkeypatch.setattr(cli, "app", broken)
    with pytest.raises(KeyError):
        cli.main()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_data_on_a_full_disk_leaves_no_partial_files(tmp_path):
    """The whole demo on a growing disk: tests/perf/demo_faults.py."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    command = [sys.executable, "-m", "annie_quant", "data", "--output", str(disk / "d.jsonl")]
    try:
        first = subprocess.run(command, capture_output=True, text=True)
        assert (
            first.returncode == 3
            and "the disk is full" in first.stderr
            and "Traceback" not in first.stderr
        )
        assert not (disk / "d.jsonl").exists()
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        assert subprocess.run(command, capture_output=True).returncode == 0
        assert len((disk / "d.jsonl").read_text().splitlines()) == 500
        assert sorted(p.name for p in Path(disk).iterdir()) == ["d.jsonl"]
    finally:
        subprocess.run(["umount", str(disk)], check=False)
