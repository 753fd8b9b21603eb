"""The framer's fuzzer (tests/fuzz/fuzz_sse.c) under ASan and UBSan, briefly; and that it finds a broken framer."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
needs_gcc = pytest.mark.skipif(not shutil.which("gcc"), reason="the fuzzer is compiled here, and gcc is not")


def fuzz(folder: Path, framer: str, executions: int, *flags: str) -> subprocess.CompletedProcess:
    (folder / "stream").mkdir()
    shutil.copy(ROOT / "csrc/stream/sse.h", folder / "stream")
    (folder / "stream/sse.c").write_text(framer)
    sources = [str(ROOT / "tests/fuzz/fuzz_sse.c"), str(folder / "stream/sse.c")]
    subprocess.run(["gcc", "-O1", "-g", *flags, f"-I{folder}", *sources, "-o", str(folder / "fuzz")], check=True)
    return subprocess.run([str(folder / "fuzz"), str(executions), "3"], capture_output=True, text=True, timeout=60)


@needs_gcc
def test_the_framer_under_sanitizers(tmp_path) -> None:
    framer = (ROOT / "csrc/stream/sse.c").read_text()
    done = fuzz(tmp_path, framer, 200_000, "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    assert done.returncode == 0, done.stderr


BREAKS = {
    "forgets a CR between reads": ("s->after_cr = true;", "s->after_cr = false;"),
    "loses what is held": ("s->held_size -= used;", "s->held_size -= used + (s->held_size > used);"),
    "takes a byte order mark anywhere": ("s->first_line = false;", "s->first_line = s->held_size > 8;"),
}


@needs_gcc
@pytest.mark.parametrize("change", BREAKS.values(), ids=BREAKS.keys())
def test_the_fuzzer_finds_a_broken_framer(tmp_path, change: tuple[str, str]) -> None:
    framer = (ROOT / "csrc/stream/sse.c").read_text()
    assert change[0] in framer
    done = fuzz(tmp_path, framer.replace(*change), 200_000)
    assert done.returncode != 0 and "broken" in done.stderr
