"""The fuzzers of the SSE framer and of requests (tests/fuzz): short runs under ASan and UBSan, the inputs stored from long runs,
and planted faults, which each fuzzer finds."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import shared
from paths import ROOT

CORPUS = ROOT / "tests/fuzz/corpus"
PARTS = ("sse", "request")
SANITIZERS = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
needs_gcc = pytest.mark.skipif(
    not shutil.which("gcc"), reason="the fuzzer is compiled here, and gcc is not"
)


def gcc(*arguments: object) -> None:
    subprocess.run(["gcc", "-O1", *map(str, arguments)], check=True)


def stored(name: str, own: tuple[str, ...], make: Callable[[Path], None]) -> Path:
    """Return a folder with programs that were compiled in this run or an earlier one. own: what else they depend on."""
    return shared.stored(
        name, shared.c_sources("csrc/stream", "tests/fuzz") + repr(own).encode(), make
    )


def build(part: str, source: str, fuzzer: Path, *flags: str) -> str:
    """Compile a fuzzer, its source or its object file, with the source of the part that it runs."""

    def make(folder: Path) -> None:
        (folder / "stream").mkdir()
        for header in (f"{part}.h", "text.h", "vector.h"):
            shutil.copy(ROOT / f"csrc/stream/{header}", folder / "stream")
        (folder / f"stream/{part}.c").write_text(source)
        files = (fuzzer, folder / f"stream/{part}.c")
        gcc(*flags, f"-I{folder}", *files, "-o", folder / "fuzz")

    return str(stored(f"fuzz_{part}", (source, *flags), make) / "fuzz")


@pytest.fixture(scope="module")
def fuzzers() -> dict[str, Path]:
    """The object file of each fuzzer, which the programs with planted faults share."""

    def make(folder: Path) -> None:
        for part in PARTS:
            gcc(
                f"-I{ROOT}/csrc",
                "-c",
                ROOT / f"tests/fuzz/fuzz_{part}.c",
                "-o",
                folder / f"{part}.o",
            )

    folder = stored("fuzzers", (), make)
    return {part: folder / f"{part}.o" for part in PARTS}


def original(part: str) -> str:
    return (ROOT / f"csrc/stream/{part}.c").read_text()


@needs_gcc
@pytest.mark.parametrize("part", PARTS)
def test_under_sanitizers(part: str) -> None:
    fuzz = build(part, original(part), ROOT / f"tests/fuzz/fuzz_{part}.c", *SANITIZERS)
    corpus = sorted(map(str, (CORPUS / part).iterdir()))
    for command in ([fuzz, "50000", "3"], [fuzz, "--replay", *corpus]):
        process = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert process.returncode == 0, process.stderr
    assert f"{len(corpus)} inputs" in process.stdout and len(corpus) > 50


BREAKS = {
    "sse": {
        "forgets a CR between reads": ("s->after_cr = true;", "s->after_cr = false;"),
        "loses pending bytes": (
            "s->pending.size -= used;",
            "s->pending.size -= used + (s->pending.size > used);",
        ),
        "ends a line of JSON at a CR": ("s->lines ? NULL : memchr(", "memchr("),
        "counts a blank line as JSON": (
            "if (start == end)\n        return false;",
            "if (start > end)\n        return false;",
        ),
        "accepts a byte order mark anywhere": (
            "s->first_line = false;",
            "s->first_line = s->pending.size > 8;",
        ),
    },
    "request": {
        "does not check the method": ("if (!is_token(q->method))", "if (!q->method.size)"),
        "allows LF in a value": (
            "(c < ' ' && !(c == '\\t' && tab_is_allowed))",
            "(c < ' ' && c != '\\n' && !tab_is_allowed)",
        ),
        "does not check names": ("if (!is_token(name))", "if (!name.size)"),
        "ignores the end of a name": (
            "if (text_is(name, names[i]))",
            "if (text_begins((struct text){names[i], strlen(names[i])}, name.at))",
        ),
        "adds the caller's length": (
            'if (!text_is(q->fields[i].name, "Content-Length"))',
            "if (true)",
        ),
        "allows a coding": ('"Transfer-Encoding",\n', '"Upgrade",\n'),
        "refuses a usual name": ("return t.size > 0;", "return t.size > 1;"),
    },
}
CASES = [(part, *change) for part, changes in BREAKS.items() for change in changes.values()]


@needs_gcc
@pytest.mark.parametrize(
    ("part", "right", "wrong"), CASES, ids=[n for changes in BREAKS.values() for n in changes]
)
def test_the_fuzzer_finds_planted_faults(part: str, right: str, wrong: str, fuzzers) -> None:
    source = original(part)
    assert source.count(right) == 1
    fuzz = build(part, source.replace(right, wrong), fuzzers[part])
    process = subprocess.run([fuzz, "200000"], capture_output=True, text=True, timeout=60)
    assert process.returncode != 0 and (
        "broken" in process.stderr or process.returncode == -signal.SIGSEGV
    )
