"""csrc/gemm/ptx.cuh has all inline assembly of the kernels, one wrapper per instruction, and none that is unused."""

import re
from collections import Counter

import pytest
from paths import ROOT

FOLDER = ROOT / "csrc" / "gemm"
PTX = FOLDER / "ptx.cuh"
pytestmark = pytest.mark.skipif(not PTX.exists(), reason="needs the source tree")


def sources():
    return {p.name: p.read_text() for p in sorted(FOLDER.iterdir()) if p.suffix in (".cu", ".cuh")}


def test_no_other_file_has_inline_assembly():
    assert [name for name, text in sources().items() if re.search(r"\basm\b", text)] == ["ptx.cuh"]


def test_every_wrapper_is_used():
    text = PTX.read_text()
    names = re.findall(r"__device__ __forceinline__ \w+ (\w+)\(", text)
    assert len(names) > 40
    rest = "\n".join(text for name, text in sources().items() if name != "ptx.cuh")
    assert [name for name in set(names) if not re.search(rf"\b{name}\b", rest)] == []


def test_every_instruction_has_one_wrapper():
    """Forms with other operands (a cache hint, another type or width) are other instructions."""
    strings = re.findall(r'asm(?: volatile)?\(\s*((?:"[^\n]*"\s*)+)', PTX.read_text())
    counts = Counter()
    for text in strings:
        joined = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', text))
        for name in re.findall(
            r"(?:^|[ {;n])((?:mbarrier|cp|fence|ld|st|barrier|mapa|griddepcontrol|mma|wgmma|setmaxnreg|stmatrix|fma|cvt)\.[\w.:]+)",
            joined,
        ):
            counts[name] += 1
    assert len(counts) > 30
    # mbarrier_wait, and mbarrier_wait_hidden_loop
    waits = {"mbarrier.try_wait.parity.shared.b64": 2}
    assert {name: count for name, count in counts.items() if count > 1} == waits


def test_statuses_are_cleared_in_one_place():
    """A CUDA error that is returned must be cleared (status_of), and errors of other libraries must not be returned."""
    text = sources()
    assert [name for name, code in text.items() if "cudaGetLastError" in code] == ["device.cu"]
    assert text["device.cu"].count("cudaGetLastError()") == 1
    assert not any("<<<" in code for code in text.values()), "launch through launch.cuh"
    unchecked = [
        line.strip()
        for code in text.values()
        for line in code.splitlines()
        if re.search(r"\(int\)cuda[A-Z]", line) and "cudaErrorInvalidValue" not in line
    ]
    assert unchecked == []
