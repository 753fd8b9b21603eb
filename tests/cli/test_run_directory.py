"""Run directories of other versions and users, locked by another command, and on full or read-only disks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import py_compile
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
from command_line import CliRunner
from flat_records import record_of
from paths import DATA, ROOT

from annie_quant import report
from annie_quant.bench.regressions import regression
from annie_quant.checkpoint.writer import check_free_space, staged
from annie_quant.cli import process
from annie_quant.cli.pipeline import search
from annie_quant.cli.pipeline.stages import RunDirectory
from annie_quant.core import files
from annie_quant.core.errors import DiskFull, EnvironmentFault, UsageError
from annie_quant.data.generation import Journal
from annie_quant.documents import SCHEMA_VERSION
from annie_quant.report import recheck
from annie_quant.stream import Timings

STORED = sorted((DATA / "runs").iterdir())


@pytest.fixture(params=STORED, ids=lambda p: p.name)
def stored(request, tmp_path) -> Path:
    """A writable copy of a run in a stored version of the layout."""
    return shutil.copytree(request.param, tmp_path / "run")


def annie_quant(*words: str, **more) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "annie_quant", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **more,
    )


def test_there_is_a_stored_run_of_every_version():
    assert [p.name for p in STORED] == [f"schema_{n}" for n in range(1, SCHEMA_VERSION + 1)]
    assert sum(
        f.stat().st_size for p in STORED for f in p.rglob("*") if f.is_file()
    ) < 100_000 * len(STORED)


def test_a_stored_run_is_reported_compared_and_replayed(stored):
    pages = report.compose(stored)
    assert re.search(r"\| factual +\| +3/3 ", pages["report.md"])
    comparison = regression(stored, stored)
    assert comparison.rows and not comparison.worse and not comparison.gates_lost
    recorded = Timings.load(sorted((stored / "streams").iterdir())[-1])
    assert recorded.records()[-1]["text"].startswith("It is ")


def test_a_search_of_version_0_1_0_is_reported_with_its_figures(tmp_path):
    """Made by `annie-quant search --n 1 --strategies direct --require w4a16` of that version; without models and labels' scores."""
    folder = shutil.copytree(DATA / "searches/version_0.1.0", tmp_path / "run")
    page = report.compose(folder)["report.md"]
    gates = json.loads((folder / "eval/direct.json").read_text())["numerics"]["w4a16"]["gates"]
    assert gates["no_markdown"]["passes"] == gates["no_markdown"]["n"] == 15
    assert re.search(r"\| no markdown +\| 15/15 ✓ [^|]+\| 15/15 \(", page)  # as it was stored
    assert re.search(r"\| direct +\| W4A16 +\| 0\.00352 \|", page)
    with RunDirectory(folder).locked():
        pass
    assert not any(f.is_file() and "report" in f.name for f in folder.iterdir()), (
        "composing writes nothing"
    )
    recheck.write_judgement(folder)  # by today's paired rule
    assert re.search(
        r"\| no markdown +\| 15/15 \? [^|]+\| 15/15 \(", report.compose(folder)["report.md"]
    )


def test_a_stored_run_is_resumed(stored):
    """With half of its records removed, the rest is requested again, and existing records are not changed."""
    lines = (stored / "records.jsonl").read_bytes().splitlines(keepends=True)
    first_half = b"".join(lines[: len(lines) // 2])
    (stored / "records.jsonl").write_bytes(first_half)
    assert sample.bench(stored, stored / "capitals.json") == 0
    after = (stored / "records.jsonl").read_bytes()
    assert after.startswith(first_half)
    rows = [[json.loads(line) for line in text.splitlines()] for text in (b"".join(lines), after)]
    ids = [
        sorted(row["id"] for row in side if not row["warmup"]) for side in rows
    ]  # warm-ups are repeated
    assert ids[0] == ids[1] and len(ids[0]) == 12


@pytest.mark.parametrize("name", ["run.json", "bench.json"])
def test_a_newer_run_is_refused_in_one_line_and_not_changed(stored, name):
    document = files.read_json(stored / name) | {"schema_version": SCHEMA_VERSION + 1}
    files.write_json(stored / name, document)
    if name == "bench.json":
        (stored / "run.json").unlink()
        with pytest.raises(EnvironmentFault, match="written by a newer"):
            regression(stored, stored)
    with pytest.raises(
        EnvironmentFault,
        match=rf"{name} was written by a newer annie-quant \(schema_version {SCHEMA_VERSION + 1}",
    ) as error:
        report.build(stored)
    assert "--upgrade" in error.value.hint
    before = {f: f.read_bytes() for f in stored.rglob("*") if f.is_file()}
    with pytest.raises(EnvironmentFault, match="written by a newer"), RunDirectory(stored).locked():
        pass
    assert before == {
        f: f.read_bytes() for f in stored.rglob("*") if f.is_file() and f.name != ".lock"
    }


@pytest.mark.parametrize("version", [None, "1", 0, [], {}])
def test_a_missing_or_invalid_version_counts_as_the_oldest(stored, version):
    files.write_json(
        stored / "run.json", files.read_json(stored / "run.json") | {"schema_version": version}
    )
    report.compose(stored)
    with RunDirectory(stored).locked():
        pass


def test_the_second_command_reports_which_process_holds_the_folder(tmp_path):
    code = (
        "import sys, time; from annie_quant.cli.pipeline.stages import RunDirectory\n"
        "with RunDirectory(sys.argv[1]).locked(): print('in', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "in\n"
        for _ in range(2):  # a refused command must not erase the name
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
    Journal(folder / "d.jsonl", {"n": 1}).close(finished=False)
    yield


WHO_LOCK = {
    "a run directory": lambda folder: RunDirectory(folder / "run").locked(),
    "a folder being made": lambda folder: staged(folder / "model"),
    "a journal": journal,
}


@pytest.mark.parametrize("lock", WHO_LOCK.values(), ids=WHO_LOCK)
def test_a_file_system_without_locks_is_used_with_a_warning(tmp_path, monkeypatch, caplog, lock):
    """NFS without its lock service: a second command could not be detected."""
    for number in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
        locks_raise(monkeypatch, number)
        with caplog.at_level(logging.WARNING), lock(tmp_path / str(number)):
            pass
        assert f"has no locks ({os.strerror(number)})" in caplog.messages[-1]
    assert len(caplog.messages) == 3


@pytest.mark.parametrize("lock", WHO_LOCK.values(), ids=WHO_LOCK)
def test_a_disk_error_is_not_reported_as_another_command(tmp_path, monkeypatch, lock):
    locks_raise(monkeypatch, errno.EIO)
    with (
        pytest.raises(EnvironmentFault, match=r"cannot be locked \(Input/output error\)"),
        lock(tmp_path / "x"),
    ):
        pass
    monkeypatch.undo()
    with lock(tmp_path / "x"):  # and nothing blocks a later command
        pass
    monkeypatch.setattr(
        fcntl, "flock", lambda *_: (_ for _ in ()).throw(BlockingIOError(errno.EAGAIN, ""))
    )
    with pytest.raises((UsageError, EnvironmentFault), match="another"), lock(tmp_path / "x"):
        pass


@pytest.mark.parametrize(
    "content",
    [
        b"{}",
        b"[]",
        b"\xff\xfe",
        b'{"key": "k", "value": {"outputs": [1]}}',
        b'{"key": "k", "value": {"result": {}}}',
    ],
)
def test_a_damaged_stamp_means_that_the_stage_is_done_again(tmp_path, content):
    run = RunDirectory(tmp_path)
    (tmp_path / "stages/audit.json").write_bytes(content)
    assert run.finished("audit", "k") is None


def test_a_damaged_output_means_that_the_stage_is_done_again(tmp_path):
    run, calls = RunDirectory(tmp_path), []

    def work():
        calls.append(1)
        files.write_json(tmp_path / "eval/direct.json", {"numerics": {}})

    for damage in (
        lambda f: None,
        lambda f: f.write_bytes(f.read_bytes()[:9]),
        lambda f: f.unlink(),
        lambda f: None,
    ):
        run.stage("eval-direct", {"n": 1}, ["eval/direct.json"], work)
        damage(tmp_path / "eval/direct.json")
    assert len(calls) == 3


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root to act as two users"
)
def test_files_of_root_are_named_with_their_owner():
    """A run directory of a container, then the same command as an ordinary user."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        with RunDirectory(folder).locked():
            pass
        done = as_nobody(folder)
    if "Error" in done.stderr:
        pytest.skip("another user may not read the interpreter or the package here")
    assert "belongs to user 0 and this is user 65534" in done.stdout and "sudo chown" in done.stdout


def as_nobody(folder: str) -> subprocess.CompletedProcess:
    code = (
        "import sys; from annie_quant.cli.pipeline.stages import RunDirectory\n"
        "try:\n with RunDirectory(sys.argv[1]).locked(): pass\nexcept Exception as e: print(e.message, '|', e.hint)"
    )
    as_other = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    return subprocess.run(
        [*as_other, sys.executable, "-c", code, folder], capture_output=True, text=True, check=False
    )


def test_errors_of_libraries_under_a_memory_limit_are_reported_as_memory_and_elsewhere_as_bugs(
    monkeypatch,
):
    onednn = RuntimeError("could not create a primitive")
    for limit, expected in ((1 << 30, True), (resource.RLIM_INFINITY, False)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        for error in (onednn, ImportError("x.so: failed to load")):
            description = process.describe(error)
            assert (description is not None and "not enough memory" in description[0]) is expected
    assert "not enough memory" in process.describe(RuntimeError("can't allocate memory"))[0]


def test_a_full_disk_ends_a_search_and_is_not_a_failure_of_the_strategy(tmp_path):
    """Otherwise the search would continue with a larger strategy and choose that one."""
    stages = SimpleNamespace(rows=[], quantize=lambda *_: check_free_space(tmp_path, 1 << 62))
    new = SimpleNamespace(stages=stages, spent_s=lambda: 0.0)
    with pytest.raises(DiskFull, match="GB to write and"):
        search.Search.attempt(new, "direct")

    def cannot(*_):
        raise EnvironmentFault("torch is needed here and is not installed")

    stages.quantize = cannot
    assert search.Search.attempt(new, "naive").outcome == "could not be made"


def test_a_full_disk_ends_a_report_in_one_line_and_keeps_the_old_one(stored):
    """RLIMIT_FSIZE acts as the disk: a file may not grow beyond 20 kB, and the report is larger. So are compiled modules."""
    (stored / "report.html").write_text("the old one")
    done = annie_quant(
        "report",
        str(stored),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 3 and "Traceback" not in done.stderr, done.stderr
    assert (stored / "report.html").read_text() == "the old one"
    assert not list(stored.rglob("*.part"))


def test_a_compiled_module_that_a_full_disk_has_cut_is_not_an_interrupt(tmp_path):
    """Python reports it as EOFError, which is not Ctrl-D. A module of the PYTHONPATH stands for the package's own."""
    (tmp_path / "cut.py").write_text("x = " + repr(list(range(100))))
    compiled = Path(py_compile.compile(str(tmp_path / "cut.py"), doraise=True))
    compiled.write_bytes(compiled.read_bytes()[:-20])
    code = (
        "import sys; from annie_quant import cli; from annie_quant.cli import app as group\n"
        "@group.command(name='read-cut')\ndef read_cut():\n    import cut\n"
        "sys.argv = ['annie-quant', 'read-cut']; cli.main()"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert (
        done.returncode == 3 and "interrupted" not in done.stderr and "Traceback" not in done.stderr
    ), done.stderr
    assert "ends too early" in done.stderr and "__pycache__" in done.stderr


def test_a_benchmark_whose_records_cannot_grow_keeps_them_and_can_be_resumed(stored):
    from annie_quant.bench.run_folder import RecordLog, read_records

    path, (soft, hard) = stored / "records.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    rows, size = len(read_records(path)), path.stat().st_size
    records = RecordLog(path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, hard))
    try:
        with pytest.raises(EnvironmentFault, match="all earlier lines are safe"):
            records.append(
                record_of(id="new", backend="a", workload="w", case="c", text="x" * 1000)
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(RecordLog(path).rows) == rows and path.stat().st_size == size


def test_watching_a_folder_without_a_run_is_refused_before_anything_is_measured(tmp_path):
    from annie_quant.cli import app as cli

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


def test_an_evaluation_is_refused_at_once_if_its_result_cannot_be_written(tmp_path):
    from annie_quant.core.files import check_writable

    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match="cannot be written"):
        check_writable(tmp_path / "file/eval.json")
    check_writable(tmp_path / "new/eval.json")
    assert not list((tmp_path / "new").iterdir())
