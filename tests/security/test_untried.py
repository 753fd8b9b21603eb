# ruff: noqa: E501
"""What the adversarial run of 0.1 did not try: GPTQ in several threads, and the vLLM plug-in's product with a hostile checkpoint's
tensors."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from annie_quant import nvfp4


def solve(seed: int) -> tuple[bytes, bytes]:
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((48, 64)).astype(np.float32)
    x = rng.standard_normal((200, 64))
    upper = np.linalg.cholesky(np.linalg.inv(x.T @ x + np.eye(64))).T.astype(np.float32)
    packed = nvfp4.gptq(w, np.ascontiguousarray(upper), np.float32(0.002))
    return np.asarray(packed.codes).tobytes(), np.asarray(packed.block_scale).tobytes()


def test_gptq_in_threads_equals_gptq_alone():
    alone = [solve(seed) for seed in range(16)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(solve, list(range(16)) * 8)) == alone * 8


HOSTILE = """
import itertools, sys
import torch
from annie_quant.ops.vllm_plugin import multiply
ended = 0
x = torch.randn(3, 64)
codes = [torch.zeros(32, 32, dtype=torch.uint8), torch.zeros(32, 8, dtype=torch.uint8), torch.zeros(0, 32, dtype=torch.uint8),
         torch.zeros(32, 64, dtype=torch.uint8), torch.full((32, 32), 255, dtype=torch.uint8), torch.zeros(32, 32),
         torch.zeros(64, 32, dtype=torch.uint8)[::2], torch.zeros(32, dtype=torch.uint8)]
scales = [torch.ones(32, 4).to(torch.float8_e4m3fn), torch.full((32, 4), float("nan")).to(torch.float8_e4m3fn),
          torch.ones(32, 1).to(torch.float8_e4m3fn), torch.ones(1, 4).to(torch.float8_e4m3fn), torch.ones(32, 4),
          torch.ones(0, 0).to(torch.float8_e4m3fn), torch.ones(32, 8).to(torch.float8_e4m3fn)[:, ::2]]
for c, s, t, i, rows in itertools.product(codes, scales, (1.0, float("nan"), float("inf"), 0.0, -1.0, 1e38), (0.0, 0.01, float("nan"), -1.0), (3, 64)):
    try:
        multiply(torch.randn(rows, 64), c, s, t, i)
    except (ValueError, RuntimeError, TypeError, IndexError) as error:
        pass
    ended += 1
print(ended)
"""


def test_the_vllm_product_checks_shapes_and_types():
    """Each combination returns or raises an ordinary error: no crash."""
    pytest.importorskip("torch", reason="the quantize extra is not installed")
    done = subprocess.run(
        [sys.executable, "-c", HOSTILE], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-1000:]
    assert int(done.stdout) == 8 * 7 * 6 * 4 * 2
