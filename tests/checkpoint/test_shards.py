"""Shards: written ones are read back, by us and by the safetensors library; invalid ones are refused with one line."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import checkpoint_zoo as zoo
import ml_dtypes
import numpy as np
import pytest
import safetensors

from annie_quant.checkpoint import ModelFolder, ShardError, header, planned, write
from annie_quant.checkpoint.shards import INDEX
from annie_quant.core.errors import CheckpointError, EnvironmentFault

FUZZ = int(os.environ.get("ANNIE_QUANT_FUZZ", "20000"))


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "a": rng.standard_normal((3, 5)).astype(np.float32),
        "b": rng.integers(0, 255, (7,), dtype=np.uint8),
        "c": rng.standard_normal((2, 2, 2)).astype(ml_dtypes.bfloat16),
        "d": np.array(1.5, np.float32),
        "e": np.zeros((0, 4), np.float16),
        "f": rng.standard_normal((4, 4)).astype(ml_dtypes.float8_e4m3fn),
    }


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("shard_bytes", [1 << 40, 40, 1])
def test_written_tensors_are_read_back(tmp_path, shard_bytes):
    out = arrays()
    files = write(tmp_path, [planned(n, t) for n, t in out.items()], shard_bytes)
    folder = ModelFolder(tmp_path)
    assert list(folder) == list(out) and all(same(folder.tensor(n), t) for n, t in out.items())
    assert (tmp_path / INDEX).exists() == (len(files) > 1)
    assert not list(tmp_path.glob(".*"))


def test_the_safetensors_library_reads_ours_and_we_read_its(tmp_path):
    torch = pytest.importorskip("torch", reason="the quantize extra is not installed")
    from safetensors.torch import save_file

    out = arrays()
    (file,) = write(tmp_path, [planned(n, t) for n, t in out.items()])
    with safetensors.safe_open(file, "pt") as opened:
        assert set(opened.keys()) == set(out)
        for name, array in out.items():
            theirs = opened.get_tensor(name)
            assert list(theirs.shape) == list(array.shape)
            assert (
                theirs.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                == array.tobytes()
            )
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    save_file(
        {"x": torch.arange(6).reshape(2, 3).to(torch.bfloat16), "y": torch.ones(1)},
        theirs / "model.safetensors",
    )
    assert ModelFolder(theirs).tensor("x").astype(np.float32).tolist() == [[0, 1, 2], [3, 4, 5]]


def one(tmp_path: Path) -> tuple[Path, bytearray]:
    (file,) = write(tmp_path, [planned(n, t) for n, t in arrays().items()])
    return file, bytearray(file.read_bytes())


def with_header(raw: bytes, change) -> bytes:
    size = int.from_bytes(raw[:8], "little")
    table = json.loads(raw[8 : 8 + size])
    change(table)
    text = json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text + raw[8 + size :]


INVALID = {
    "offsets swapped": (lambda t: t["a"].update(data_offsets=[60, 0]), "invalid_header"),
    "offsets beyond the file": (
        lambda t: t["f"].update(shape=[1 << 40, 4], data_offsets=[87, 87 + (1 << 42)]),
        "shard_truncated",
    ),
    "negative offset": (lambda t: t["a"].update(data_offsets=[-60, 0]), "invalid_header"),
    "huge shape": (lambda t: t["a"].update(shape=[1 << 61, 1 << 61]), "invalid_header"),
    "shape of booleans": (lambda t: t["a"].update(shape=[True, 15]), "invalid_header"),
    "shape of floats": (lambda t: t["a"].update(shape=[3.0, 5.0]), "invalid_header"),
    "wrong size": (lambda t: t["a"].update(shape=[3, 4]), "invalid_header"),
    "overlap": (lambda t: t["b"].update(data_offsets=[59, 66]), "invalid_header"),
    "unknown dtype": (lambda t: t["a"].update(dtype="F4_ODD"), "invalid_header"),
    "entry is a list": (lambda t: t.update(a=[1, 2]), "invalid_header"),
    "metadata of numbers": (lambda t: t.update(__metadata__={"x": 1}), "invalid_header"),
    "a tensor less": (lambda t: t.pop("f"), "invalid_header"),
    "a hole": (lambda t: t.pop("b"), "invalid_header"),
}


@pytest.mark.parametrize("fault", INVALID)
def test_an_invalid_header_is_refused(tmp_path, fault):
    change, code = INVALID[fault]
    file, raw = one(tmp_path)
    file.write_bytes(with_header(bytes(raw), change))
    with pytest.raises(ShardError) as caught:
        ModelFolder(tmp_path)
    assert (
        caught.value.code == code
        and "\n" not in caught.value.message
        and "model.safetensors" in caught.value.message
    )


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "not_safetensors"),
        (b"abc", "not_safetensors"),
        (b"\xff" * 100, "not_safetensors"),
        (b"PK\x03\x04" + b"\0" * 60, "not_safetensors"),
        ((50).to_bytes(8, "little") + b"{}", "shard_truncated"),
        ((2).to_bytes(8, "little") + b"[]", "invalid_header"),
        ((14).to_bytes(8, "little") + b'{"a":1,"a":2 }', "invalid_header"),
        ((200_000).to_bytes(8, "little") + b"[" * 200_000, "invalid_header"),
    ],
)
def test_another_file_format_is_refused(tmp_path, content, code):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ShardError) as caught:
        ModelFolder(tmp_path)
    assert caught.value.code == code


def test_a_truncated_shard_is_reported(tmp_path):
    file, raw = one(tmp_path)
    file.write_bytes(raw[:-1])
    with pytest.raises(
        CheckpointError, match=r"model.safetensors: truncated: the header describes \d+ bytes"
    ):
        ModelFolder(tmp_path)


def test_missing_shards_and_folders_are_reported(tmp_path):
    with pytest.raises(CheckpointError, match="not there, expected a model folder"):
        ModelFolder(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors file"):
        ModelFolder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin: .* which is not safetensors"):
        ModelFolder(tmp_path)
    files = write(tmp_path, [planned(n, t) for n, t in arrays().items()], 40)
    files[1].unlink()
    with pytest.raises(CheckpointError, match=f"shard {files[1].name} is missing"):
        ModelFolder(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"shard 2 of .* is missing"):
        ModelFolder(tmp_path)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "a\\b", "a\0b"]
)
def test_an_index_with_a_path_in_it_is_refused(tmp_path, name):
    one(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ShardError) as caught:
        ModelFolder(tmp_path)
    assert caught.value.code == "path_escapes"


def test_a_link_out_of_the_folder_is_refused_and_a_hub_cache_is_not(tmp_path):
    snapshot, blobs = tmp_path / "models--x/snapshots/abc", tmp_path / "models--x/blobs"
    snapshot.mkdir(parents=True)
    write(blobs, [planned("a", np.zeros(3, np.float32))])
    (blobs / "model.safetensors").rename(blobs / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    assert list(ModelFolder(snapshot)) == ["a"]
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.safetensors").symlink_to(blobs / "0123")
    with pytest.raises(ShardError, match="a link that leaves the folder"):
        ModelFolder(other)


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {}}',
        "{",
        "\xff",
    ],
)
def test_a_broken_index_is_refused(tmp_path, content):
    one(tmp_path)
    (tmp_path / INDEX).write_text(content, encoding="latin-1")
    with pytest.raises(ShardError):
        ModelFolder(tmp_path)


def test_an_index_with_a_missing_tensor_is_refused(tmp_path):
    one(tmp_path)
    (tmp_path / INDEX).write_text(
        json.dumps({"weight_map": {"a": "model.safetensors", "zz": "model.safetensors"}})
    )
    with pytest.raises(ShardError, match=r"lists zz in model.safetensors, which does not have it"):
        ModelFolder(tmp_path)


def test_fuzzed_headers_only_ever_raise_shard_errors(tmp_path):
    """Flipped, cut, repeated and spliced headers: a ShardError, or tensors that are inside the file."""
    file, raw = one(tmp_path)
    size = int.from_bytes(raw[:8], "little")
    head = bytes(raw[8 : 8 + size])
    rng = random.Random(7)
    words = [
        b"data_offsets",
        b"shape",
        b"dtype",
        b"F32",
        b"BF16",
        b"null",
        b"true",
        b"-1",
        b"1e999",
        b"[",
        b"]",
        b"{",
        b"}",
        b'"',
        b"9" * 30,
        b"\\u0000",
        b"\\n",
        b"\\ud800",
        b"\xff",
        b"NaN",
        b",",
        b"__metadata__",
        b"9" * 5000,
    ]
    accepted = 0
    for _ in range(FUZZ):
        text = bytearray(head)
        for _ in range(rng.randint(1, 4)):
            at, kind = rng.randrange(len(text) + 1), rng.randrange(5)
            if kind == 0 and at < len(text):
                text[at] = rng.randrange(256)
            elif kind == 1:
                del text[at : at + rng.randint(1, 20)]
            elif kind == 2:
                text[at:at] = rng.choice(words)
            elif kind == 3:
                end = rng.randrange(at, len(text) + 1)
                text[at:at] = text[at:end]
            elif at < len(text) and 48 <= text[at] <= 57:
                text[at] = rng.choice(b"0123456789-.")
        file_size = len(raw) - size + len(text)
        file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])
        try:
            infos, _ = header.read_header(file)
        except ShardError as error:
            assert "\n" not in error.message and len(error.message) < 600
        else:
            accepted += 1
            assert all(
                8 + len(text) <= i.offset and i.offset + i.size_bytes <= file_size
                for i in infos.values()
            )
    assert accepted  # names and metadata may change without harm


def test_a_full_disk_is_reported_before_writing(tmp_path, monkeypatch):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda p: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(EnvironmentFault, match="GB to write"):
        write(tmp_path, [planned(n, t) for n, t in arrays().items()])
    assert not list(tmp_path.iterdir())


def test_a_failure_leaves_complete_shards_only_and_a_rerun_keeps_them(tmp_path):
    calls = []

    def load(name: str, array: np.ndarray, fail: bool):
        def inner():
            calls.append(name)
            if fail:
                raise RuntimeError("power cut")
            return array

        return inner

    def plan(fail: bool) -> list:
        from annie_quant.checkpoint import Planned

        return [
            Planned(n, header.DTYPE_NAMES[t.dtype], t.shape, load(n, t, fail and n == "c"))
            for n, t in arrays().items()
        ]

    with pytest.raises(RuntimeError):
        write(tmp_path, plan(True), 64)
    whole = sorted(p.name for p in tmp_path.iterdir())
    assert whole and all(not n.startswith(".") for n in whole) and INDEX not in whole
    calls.clear()
    write(tmp_path, plan(False), 64, resume=True)
    assert "a" not in calls and "c" in calls
    assert all(same(ModelFolder(tmp_path).tensor(n), t) for n, t in arrays().items())


def test_an_array_that_differs_from_its_plan_is_an_error(tmp_path):
    from annie_quant.checkpoint import Planned

    with pytest.raises(ValueError, match="were planned"):
        write(tmp_path, [Planned("a", "F32", (4,), lambda: np.zeros(3, np.float32))])
    with pytest.raises(ValueError, match="was planned"):
        write(tmp_path, [Planned("a", "F32", (4,), lambda: np.zeros(4, np.float64))])
    assert not list(tmp_path.iterdir())


WRITER = """
import sys, numpy as np
from annie_quant.checkpoint import Planned, write
def load(i):
    return np.full((64, 1024), i, np.float32)
write(sys.argv[1], [Planned(f"t{i}", "F32", (64, 1024), lambda i=i: load(i)) for i in range(24)], 1 << 20, resume=True)
"""


def test_a_kill_at_any_moment_leaves_complete_shards_only(tmp_path):
    """kill -9 at random moments: a shard under its final name is complete, and the last run completes the output."""
    env = {**os.environ, "PYTHONPATH": str(Path(zoo.__file__).parent.parent)}
    rng = random.Random(3)
    for _ in range(12):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], env=env, stderr=subprocess.DEVNULL
        )
        time.sleep(rng.uniform(0.1, 0.5))
        child.kill()
        child.wait()
        for file in tmp_path.glob("model-*.safetensors"):
            from annie_quant.checkpoint.shards import Shard

            shard = Shard(file)
            assert all((shard.tensor(i) == int(n[1:])).all() for n, i in shard.tensors.items())
    subprocess.run([sys.executable, "-c", WRITER, str(tmp_path)], env=env, check=True)
    folder = ModelFolder(tmp_path)
    assert len(folder.tensors) == 24 and all((folder.tensor(n) == int(n[1:])).all() for n in folder)
