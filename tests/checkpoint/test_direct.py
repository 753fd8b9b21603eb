"""direct at scale: it resumes, reports progress, never leaves a wrong output, and bounds its memory."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import checkpoint_zoo as zoo
import pytest
from paths import CALIBRATION, ROOT

import annie_quant as aq
from annie_quant.checkpoint import writer
from annie_quant.core.errors import CheckpointError, EnvironmentFault, UsageError
from annie_quant.core.progress import ByteProgress, Lines
from annie_quant.quantize.strategies import direct
from annie_quant.quantize.strategy import Job

KILLS = int(os.environ.get("ANNIE_QUANT_KILLS", "4"))
RUN = """
import sys
from pathlib import Path
from annie_quant import checkpoint, quantize
how, source, output = sys.argv[1:]
if how == "direct":
    quantize.run("direct", source, output, shard_size="2MB")
else:
    checkpoint.convert(source, how, output, shard_bytes=2_000_000)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return zoo.bf16(
        tmp_path_factory.mktemp("source") / "bf16", hidden_size=512, intermediate_size=2048
    )


def files(folder: Path) -> dict[str, bytes]:
    """Return the files that a server reads; annie_quant.json has the options, the cluster's address among them."""
    return {f.name: f.read_bytes() for f in folder.iterdir() if f.name != "annie_quant.json"}


def test_shards_have_the_chosen_size(source, tmp_path):
    aq.quantize.run("direct", source, tmp_path / "one")
    aq.quantize.run("direct", source, tmp_path / "many", shard_size="2MB")
    shards = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 3 and all(s.stat().st_size < 2_100_000 for s in shards)
    a, b = zoo.read(tmp_path / "one"), zoo.read(tmp_path / "many")
    assert {n: t.tobytes() for n, t in a.items()} == {n: t.tobytes() for n, t in b.items()}
    assert aq.checkpoint.audit(tmp_path / "many", source=source).ok


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "5 parsecs", "0", "1e9"])
def test_an_invalid_shard_size_is_refused(source, tmp_path, text):
    with pytest.raises(UsageError, match="expected a size"):
        aq.quantize.run("direct", source, tmp_path / "x", shard_size=text)
    assert list(tmp_path.iterdir()) == []


def test_sizes_are_parsed():
    assert [direct.parse_size(t) for t in ("7", "500MB", "1.5 GB", "2GiB")] == [
        7,
        500_000_000,
        1_500_000_000,
        1 << 31,
    ]


def stop_after(n: int, monkeypatch, error: BaseException) -> None:
    """Write n shards, then raise an error."""
    written = []
    whole = writer.write_shard

    def limited(folder, shard, *rest):
        if len(written) == n:
            raise error
        written.append(shard.name)
        whole(folder, shard, *rest)

    monkeypatch.setattr(writer, "write_shard", limited)


def test_a_rerun_resumes_after_the_last_complete_shard(source, tmp_path, monkeypatch):
    lines: list[str] = []
    aq.quantize.run("direct", source, tmp_path / "undisturbed", shard_size="2MB")
    with monkeypatch.context() as patched:
        stop_after(2, patched, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            aq.quantize.run("direct", source, tmp_path / "out", shard_size="2MB")
    assert not (tmp_path / "out").exists()
    left = {f.name: f.stat().st_mtime_ns for f in (tmp_path / ".out.part").glob("*.safetensors")}
    assert len(left) == 2
    aq.quantize.run("direct", source, tmp_path / "out", shard_size="2MB", report=lines.append)
    assert files(tmp_path / "out") == files(tmp_path / "undisturbed")
    assert all((tmp_path / "out" / n).stat().st_mtime_ns == t for n, t in left.items())
    assert "were finished by an earlier run" in lines[0] and lines[-1].endswith(" 0 s left")
    assert {f.name for f in tmp_path.iterdir()} == {"out", "undisturbed"}


@pytest.mark.parametrize(
    "change", [{"scale": "four_over_six"}, {"exclude": "layers.0"}, {"shard_size": "3MB"}]
)
def test_shards_of_other_settings_are_not_kept(source, tmp_path, monkeypatch, change):
    with monkeypatch.context() as patched:
        stop_after(2, patched, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            aq.quantize.run("direct", source, tmp_path / "out", shard_size="2MB")
    settings = {"shard_size": "2MB"} | change
    lines: list[str] = []
    aq.quantize.run("direct", source, tmp_path / "out", report=lines.append, **settings)
    aq.quantize.run("direct", source, tmp_path / "fresh", **settings)
    assert files(tmp_path / "out") == files(tmp_path / "fresh") and "earlier run" not in lines[0]


def test_shards_of_another_source_are_not_kept(tmp_path, monkeypatch):
    model = zoo.bf16(tmp_path / "model", hidden_size=512)
    with monkeypatch.context() as patched:
        stop_after(2, patched, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            aq.quantize.run("direct", model, tmp_path / "out", shard_size="1MB")
    shutil.rmtree(model)
    zoo.bf16(model, seed=3, hidden_size=512)
    aq.quantize.run("direct", model, tmp_path / "out", shard_size="1MB")
    assert aq.checkpoint.audit(tmp_path / "out", source=model).ok


def test_a_fault_of_the_source_leaves_no_files(source, tmp_path, monkeypatch):
    stop_after(1, monkeypatch, CheckpointError("a tensor holds NaN"))
    with pytest.raises(CheckpointError):
        aq.quantize.run("direct", source, tmp_path / "out", shard_size="2MB")
    assert list(tmp_path.iterdir()) == []


def test_two_runs_do_not_write_one_output(tmp_path):
    with (
        writer.staged(tmp_path / "out", {"a": 1}),
        pytest.raises(EnvironmentFault, match="another run is writing out"),
    ):
        writer.staged(tmp_path / "out", {"a": 1}).__enter__()
    assert [f.name for f in tmp_path.iterdir()] == ["out"]


def test_only_force_replaces_an_output(source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("keep me")
    with pytest.raises(UsageError, match="exists and is not empty"):
        aq.quantize.run("direct", source, tmp_path / "out")
    assert [f.name for f in (tmp_path / "out").iterdir()] == ["mine.txt"]
    aq.quantize.run("direct", source, tmp_path / "out", force=True)
    assert not (tmp_path / "out/mine.txt").exists() and aq.checkpoint.audit(tmp_path / "out").ok
    for nameless in (".", "..", "/"):
        with pytest.raises(UsageError, match="expected the name of a folder"):
            aq.quantize.run("direct", source, nameless)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file or a link"):
        aq.quantize.run("direct", source, tmp_path / "file", force=True)


def test_force_never_replaces_what_is_read(source, tmp_path):
    """The model itself by any name, a folder that contains it or the calibration data; for every command that writes a folder."""
    model = tmp_path / "models/mine"
    shutil.copytree(source, model)
    (tmp_path / "link").symlink_to(model)
    (tmp_path / "data").mkdir()
    rows = tmp_path / "data/rows.jsonl"
    rows.write_bytes(CALIBRATION.read_bytes())
    before = {f: f.read_bytes() for f in model.iterdir()}
    for output in (
        model,
        tmp_path / "models",
        tmp_path / "link/../mine",
        model.parent / "x/../mine",
    ):
        with pytest.raises(
            UsageError, match=r"is the checkpoint itself|contains mine, which is read"
        ):
            aq.quantize.run("direct", model, output, force=True)
    with pytest.raises(UsageError, match=r"contains rows.jsonl, which is read"):
        aq.quantize.run(
            "direct",
            model,
            tmp_path / "data",
            calib_data=rows,
            force=True,
            allow_prompt_mismatch=True,
        )
    nvfp4 = tmp_path / "quantized/nvfp4"
    aq.quantize.run("direct", model, nvfp4)
    with pytest.raises(UsageError, match="contains nvfp4"):
        aq.checkpoint.convert(nvfp4, "compressed-tensors", tmp_path / "quantized", force=True)
    with pytest.raises(UsageError, match="contains mine"):
        aq.checkpoint.repair(nvfp4, source=model, output=tmp_path / "models", force=True)
    with pytest.raises(UsageError, match="is the checkpoint itself"):
        aq.checkpoint.convert(nvfp4, "gguf", nvfp4 / "model.safetensors")
    assert {f: f.read_bytes() for f in model.iterdir()} == before and rows.exists()


def test_a_full_disk_is_reported_before_writing(source, tmp_path, monkeypatch):
    monkeypatch.setattr(
        shutil, "disk_usage", lambda p: shutil._ntuple_diskusage(10**9, 10**9 - 10**6, 10**6)
    )
    with pytest.raises(EnvironmentFault, match=r"GB to write and 0\.00 GB free"):
        aq.quantize.run("direct", source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_progress_reports_amount_speed_and_remaining_time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    lines: list[str] = []
    progress = ByteProgress(Lines(lines.append), 1_000_000_000, done_before=200_000_000)
    now[0] += 2
    progress.add(400_000_000)
    assert lines[-1] == "600 of 1,000 MB, 200 MB/s, 2 s left"


# -- killed


def start(how: str, source: Path, output: Path) -> subprocess.Popen:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    return subprocess.Popen(
        [sys.executable, "-c", RUN, how, source, output], env=env, stderr=subprocess.PIPE
    )


def finish(how: str, source: Path, output: Path) -> float:
    begin = time.monotonic()
    child = start(how, source, output)
    error = child.communicate()[1]
    assert child.returncode == 0, error.decode()
    return time.monotonic() - begin


def test_a_kill_at_any_moment_leaves_a_right_output_or_none(source, tmp_path):
    """kill -9 at random moments of whole conversions; a rerun completes them. ANNIE_QUANT_KILLS sets how many."""
    rng = random.Random(11)
    quantized = tmp_path / "quantized"
    finish("direct", source, quantized)
    begins = {"direct": source, "compressed-tensors": quantized}
    undisturbed, seconds, resumed = {}, {}, 0
    for how, begin in begins.items():
        seconds[how] = finish(how, begin, tmp_path / f"{how}-whole")
        undisturbed[how] = files(tmp_path / f"{how}-whole")
    for i in range(KILLS):
        how = list(begins)[i % 2]
        output = tmp_path / f"out-{i}"
        child = start(how, begins[how], output)
        time.sleep(rng.uniform(0, seconds[how]))
        child.kill()
        child.communicate()
        if output.exists():
            assert files(output) == undisturbed[how]
            shutil.rmtree(output)
        resumed += bool(list(tmp_path.glob(f".out-{i}.part/*.safetensors")))
        finish(how, begins[how], output)
        assert files(output) == undisturbed[how]
        assert not list(tmp_path.glob(f".out-{i}*"))
        shutil.rmtree(output)
    if KILLS >= 20:
        assert resumed >= KILLS // 10  # some of the kills came during writing


def test_the_resume_key_has_what_changes_the_bytes(source, tmp_path):
    """Every setting that changes the bytes is in the key."""
    job = Job(source, tmp_path, options=direct.DirectOptions(shard_size="1GB"))
    base = direct.resume_key(job)
    assert direct.resume_key(replace(job, scale="sweep")) != base
