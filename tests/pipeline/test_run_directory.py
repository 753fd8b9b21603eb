"""Run directories of other versions, of other users, held by another command, and on disks that are full or read-only."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import make_run_sample as sample
import pytest
from click.testing import CliRunner
from paths import DATA

from annie_quant import files, report
from annie_quant.bench.regression import regression
from annie_quant.checkpoint.staging import staged
from annie_quant.checkpoint.writer import need_room
from annie_quant.cli import system_errors
from annie_quant.data.journal import Journal
from annie_quant.errors import EnvironmentFault, NoRoom, UsageError
from annie_quant.pipeline import search
from annie_quant.pipeline.run_directory import RunDirectory
from annie_quant.schema import SCHEMA_VERSION, RequestRecord
from annie_quant.stream import Timings

STORED = sorted((DATA / "runs").iterdir())


@pytest.fixture(params=STORED, ids=lambda p: p.name)
def stored(request, tmp_path) -> Path:
    """A writable copy of a run as some version of the layout has it."""
    return shutil.copytree(request.param, tmp_path / "run")


def annie_quant(*words: str, **more) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "annie_quant.cli", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **more,
    )


def test_there_is_a_stored_run_of_every_version():
    assert [p.name for p in STORED] == [f"schema_{n}" for n in range(1, SCHEMA_VERSION + 1)]
    assert sum(f.stat().st_size for p in STORED for f in p.rglob("*") if f.is_file()) < 100_000 * len(STORED)


def test_a_stored_run_is_reported_compared_and_replayed(stored):
    pages = report.compose(stored)
    assert re.search(r"\| factual +\| +3/3 ", pages["report.md"])
    found = regression(stored, stored)
    assert found.rows and not found.worse and not found.gates_lost
    recorded = Timings.load(sorted((stored / "streams").iterdir())[-1])
    assert recorded.records()[-1]["text"].startswith("It is ")


def test_a_stored_run_goes_on(stored):
    """Half of its records cut away: the rest is asked anew, and nothing that is there is touched."""
    lines = (stored / "records.jsonl").read_bytes().splitlines(keepends=True)
    kept = b"".join(lines[: len(lines) // 2])
    (stored / "records.jsonl").write_bytes(kept)
    assert sample.bench(stored, stored / "capitals.json") == 0
    after = (stored / "records.jsonl").read_bytes()
    assert after.startswith(kept)
    rows = [[json.loads(line) for line in text.splitlines()] for text in (b"".join(lines), after)]
    ids = [sorted(row["id"] for row in side if not row["warmup"]) for side in rows]  # warm-ups are asked again
    assert ids[0] == ids[1] and len(ids[0]) == 12


@pytest.mark.parametrize("name", ["run.json", "bench.json"])
def test_a_newer_run_is_one_line_and_stays_as_it_is(stored, name):
    document = files.read_json(stored / name) | {"schema_version": SCHEMA_VERSION + 1}
    files.write_json(stored / name, document)
    if name == "bench.json":
        (stored / "run.json").unlink()
        with pytest.raises(EnvironmentFault, match="written by a newer"):
            regression(stored, stored)
    with pytest.raises(
        EnvironmentFault, match=rf"{name} was written by a newer annie-quant \(schema_version {SCHEMA_VERSION + 1}"
    ) as said:
        report.build(stored)
    assert "--upgrade" in said.value.hint
    before = {f: f.read_bytes() for f in stored.rglob("*") if f.is_file()}
    with pytest.raises(EnvironmentFault, match="written by a newer"), RunDirectory(stored).locked():
        pass
    assert before == {f: f.read_bytes() for f in stored.rglob("*") if f.is_file() and f.name != ".lock"}


@pytest.mark.parametrize("version", [None, "1", 0, [], {}])
def test_a_version_that_is_missing_or_odd_is_read_like_the_oldest(stored, version):
    files.write_json(stored / "run.json", files.read_json(stored / "run.json") | {"schema_version": version})
    report.compose(stored)
    with RunDirectory(stored).locked():
        pass


def test_the_second_command_is_told_which_process_holds_the_folder(tmp_path):
    code = (
        "import sys, time; from annie_quant.pipeline.run_directory import RunDirectory\n"
        "with RunDirectory(sys.argv[1]).locked(): print('in', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "in\n"
        for _ in range(2):  # asking must not wipe out the name
            with (
                pytest.raises(UsageError, match=rf"process {holder.pid}: annie-quant"),
                RunDirectory(tmp_path).locked(),
            ):
                pass
    finally:
        holder.kill()
        holder.wait()


def locks_raise(monkeypatch, number: int) -> None:
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)


@contextlib.contextmanager
def journal(folder: Path) -> Iterator[None]:
    Journal(folder / "d.jsonl", {"n": 1}).close(done=False)
    yield


WHO_LOCK = {
    "a run directory": lambda folder: RunDirectory(folder / "run").locked(),
    "a folder being made": lambda folder: staged(folder / "model"),
    "a journal": journal,
}


@pytest.mark.parametrize("lock", WHO_LOCK.values(), ids=WHO_LOCK)
def test_a_file_system_without_locks_is_worked_on_with_a_warning(tmp_path, monkeypatch, caplog, lock):
    """NFS without its lock service: nobody else is working there, and nobody could be seen to."""
    for number in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
        locks_raise(monkeypatch, number)
        with caplog.at_level(logging.WARNING), lock(tmp_path / str(number)):
            pass
        assert f"has no locks ({os.strerror(number)})" in caplog.messages[-1]
    assert len(caplog.messages) == 3


@pytest.mark.parametrize("lock", WHO_LOCK.values(), ids=WHO_LOCK)
def test_an_error_of_the_disk_is_not_taken_for_another_command(tmp_path, monkeypatch, lock):
    locks_raise(monkeypatch, errno.EIO)
    with pytest.raises(EnvironmentFault, match=r"cannot be locked \(Input/output error\)"), lock(tmp_path / "x"):
        pass
    monkeypatch.undo()
    with lock(tmp_path / "x"):  # and nothing is left that would be in the way
        pass
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(BlockingIOError(errno.EAGAIN, "")))
    with pytest.raises((UsageError, EnvironmentFault), match="another"), lock(tmp_path / "x"):
        pass


@pytest.mark.parametrize(
    "content", [b"{}", b"[]", b"\xff\xfe", b'{"key": "k", "outputs": [1]}', b'{"key": "k", "result": {}}']
)
def test_a_stamp_that_is_spoilt_means_that_the_stage_is_done_again(tmp_path, content):
    run = RunDirectory(tmp_path)
    (tmp_path / "stages/audit.json").write_bytes(content)
    assert run.finished("audit", "k") is None


def test_an_output_that_is_torn_means_that_the_stage_is_done_again(tmp_path):
    run, made = RunDirectory(tmp_path), []

    def work():
        made.append(1)
        files.write_json(tmp_path / "eval/direct.json", {"numerics": {}})

    for spoil in (lambda f: None, lambda f: f.write_bytes(f.read_bytes()[:9]), lambda f: f.unlink(), lambda f: None):
        run.stage("eval-direct", {"n": 1}, ["eval/direct.json"], work)
        spoil(tmp_path / "eval/direct.json")
    assert len(made) == 3


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root to act as two users")
def test_what_root_left_behind_is_named_with_its_owner():
    """A container's run directory, then the same command as an ordinary user."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        with RunDirectory(folder).locked():
            pass
        done = as_nobody(folder)
    if "Error" in done.stderr:
        pytest.skip("the interpreter or the package lies where another user may not read")
    assert "belongs to user 0 and this is user 65534" in done.stdout and "sudo chown" in done.stdout


def as_nobody(folder: str) -> subprocess.CompletedProcess:
    code = (
        "import sys; from annie_quant.pipeline.run_directory import RunDirectory\n"
        "try:\n with RunDirectory(sys.argv[1]).locked(): pass\nexcept Exception as e: print(e.message, '|', e.hint)"
    )
    as_other = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    return subprocess.run([*as_other, sys.executable, "-c", code, folder], capture_output=True, text=True, check=False)


def test_what_libraries_say_under_a_limit_of_memory_is_memory_and_elsewhere_a_fault(monkeypatch):
    onednn = RuntimeError("could not create a primitive")
    for limit, expected in ((1 << 30, True), (resource.RLIM_INFINITY, False)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        for error in (onednn, ImportError("x.so: failed to load")):
            description = system_errors.describe(error)
            assert (description is not None and "not enough memory" in description[0]) is expected
    assert "not enough memory" in system_errors.describe(RuntimeError("can't allocate memory"))[0]


def test_a_full_disk_ends_a_search_and_is_no_fault_of_the_strategy(tmp_path):
    """It would go on to a larger strategy otherwise, and choose that one."""
    stages = SimpleNamespace(stamps=[], quantize=lambda _: need_room(tmp_path, 1 << 62))
    walk = SimpleNamespace(stages=stages, spent=lambda: 0.0)
    with pytest.raises(NoRoom, match="GB to write and"):
        search.Search.attempt(walk, "direct")

    def cannot(_):
        raise EnvironmentFault("torch is needed here and is not installed")

    stages.quantize = cannot
    assert search.Search.attempt(walk, "naive")["outcome"] == "could not be made"


def test_a_disk_that_fills_ends_in_one_line_and_keeps_the_old_report(stored):
    """RLIMIT_FSIZE stands for the disk: a file may not grow beyond 20 kB, and the report is larger."""
    (stored / "report.html").write_text("the old one")
    done = annie_quant(
        "report", str(stored), preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    )
    assert done.returncode == 3 and "Traceback" not in done.stderr, done.stderr
    assert (stored / "report.html").read_text() == "the old one"
    assert not list(stored.rglob("*.part"))


def test_a_benchmark_whose_records_cannot_grow_keeps_what_it_has_and_goes_on(stored):
    from annie_quant.bench.records import Records, read_records

    path, (soft, hard) = stored / "records.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    rows, size = len(read_records(path)), path.stat().st_size
    records = Records(path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, hard))
    try:
        with pytest.raises(EnvironmentFault, match="all earlier lines are safe"):
            records.append(RequestRecord(id="new", backend="a", workload="w", case="c", text="x" * 1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(Records(path).rows) == rows and path.stat().st_size == size


def test_watching_against_a_folder_that_is_no_run_is_said_before_anything_is_measured(tmp_path):
    from annie_quant.cli import cli

    words = [
        "bench",
        "--backend-a",
        "a",
        "http://127.0.0.1:9",
        "--output",
        str(tmp_path / "o"),
        "--watch",
        str(tmp_path),
    ]
    done = CliRunner().invoke(cli, words)
    assert isinstance(done.exception, UsageError) and "no bench.json" in done.exception.message


def test_an_evaluation_says_at_once_that_its_result_cannot_be_written(tmp_path):
    from annie_quant.evaluate import terminal

    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match="cannot be written"):
        terminal.writable(tmp_path / "file/eval.json")
    terminal.writable(tmp_path / "new/eval.json")
    assert not list((tmp_path / "new").iterdir())
