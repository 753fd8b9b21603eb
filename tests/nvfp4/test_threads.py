"""The codec's threads: fewer where the system refuses more, and as many as the environment says."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, resource, numpy as np
from annie_quant import kquant, nvfp4
w = np.random.default_rng(0).standard_normal((512, 1024)).astype(np.float32)
x = w[:2].copy()
square = np.eye(1024, dtype=np.float32)
def results():
    t = nvfp4.pack(w)
    rounded = nvfp4.gptq(w.copy(), square, 0.01)
    arrays = t.codes, nvfp4.unpack(t, "float32"), nvfp4.gemv(x, t), nvfp4.fake_quant(w), kquant.quantize(w, "Q4_K"), rounded.codes
    return [a.tobytes() for a in arrays]
nvfp4.set_threads(1)
expected = results()
largest = nvfp4.amax(w)
{limit}
nvfp4.set_threads(64)
assert nvfp4.amax(w) == largest
print(len(os.listdir("/proc/self/task")))
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
assert results() == expected
"""
# Memory for two stacks.
NO_MEMORY = """
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (5 << 20), resource.RLIM_INFINITY))
"""
# The limit does not apply to root.
NO_PROCESSES = """
os.setgid(65534), os.setuid(65534)
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
"""


def run(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={
            "PYTHONPATH": ":".join(filter(None, sys.path)),
            "OPENBLAS_NUM_THREADS": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("limit", [NO_MEMORY, NO_PROCESSES], ids=["memory", "processes"])
def test_threads_that_cannot_be_started_are_left_out(limit):
    """OpenMP's runtime ended the process: "Thread creation failed: Resource temporarily unavailable"."""
    assert int(run(PROGRAM.format(limit=limit))) < 4


def test_without_a_limit_all_threads_are_started():
    assert int(run(PROGRAM.format(limit=""))) == 8


@pytest.mark.parametrize(("setting", "expected"), [("3", "3"), ("2,1", "2"), ("5000", "1024")])
def test_the_number_of_threads_is_that_of_the_environment(setting, expected):
    program = "from annie_quant import nvfp4; print(nvfp4.threads())"
    assert run(program, OMP_NUM_THREADS=setting).split() == [expected]


@pytest.mark.parametrize("setting", ["", "0", "-1", "all"])
def test_without_a_number_all_usable_processors_are_used(setting):
    program = "import os; from annie_quant import nvfp4; assert nvfp4.threads() == len(os.sched_getaffinity(0))"
    run(program, OMP_NUM_THREADS=setting)
