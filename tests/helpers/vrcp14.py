"""The instruction VRCP14PS of this machine's processor, called by a compiled C function."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

SOURCE = """
#include <immintrin.h>
void reciprocals(const float *in, float *out, long n)
{
    for (long i = 0; i < n; i += 16)
        _mm512_storeu_ps(out + i, _mm512_rcp14_ps(_mm512_loadu_ps(in + i)));
}
"""


def processor() -> tuple[str, set[str]]:
    """Return the processor's vendor and its features, as Linux names them; "" and none elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "", set()
    fields = dict(line.partition(":")[::2] for line in lines if ":" in line)
    names = {name.strip(): value.strip() for name, value in fields.items()}
    return names.get("vendor_id", ""), set(names.get("flags", "").split())


def compiler() -> str | None:
    return shutil.which("cc")


def instruction(values: np.ndarray) -> np.ndarray:
    """Return the instruction's result for each value, float32 [n], n a multiple of 16."""
    values = np.ascontiguousarray(values, np.float32)
    assert len(values) % 16 == 0
    results = np.empty_like(values)
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "vrcp14.c", Path(folder) / "vrcp14.so"
        source.write_text(SOURCE)
        subprocess.run(
            ["cc", "-O2", "-mavx512f", "-shared", "-fPIC", "-o", library, source], check=True
        )
        function = ctypes.CDLL(str(library)).reciprocals
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long]
        function(values.ctypes.data, results.ctypes.data, len(values))
    return results
