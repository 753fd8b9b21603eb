"""The arithmetic in which the demo judges a checkpoint: that of servers that can run it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch", reason="the runtime needs torch: pip install annie-quant[quantize]")

from annie_quant.checkpoint import writer
from annie_quant.cli.pipeline.demo import Demo
from annie_quant.cli.pipeline.stages import ProcessJob


@pytest.mark.parametrize(
    ("scales", "expected"), [(["a.input_scale"], "vllm-cutlass"), ([], "vllm-marlin")]
)
def test_a_checkpoint_without_4_bit_inputs_is_judged_as_marlin_computes_it(
    tmp_path: Path, scales: list[str], expected: str
) -> None:
    folder = tmp_path / "best"
    writer.write(
        folder, [writer.planned(name, np.ones(1, np.float32)) for name in ["a.weight", *scales]]
    )
    (folder / "config.json").write_text('{"model_type": "qwen3_5_text"}')
    demo = object.__new__(Demo)
    demo.dir = tmp_path
    demo.stages = SimpleNamespace(checkpoint=lambda strategy: folder)  # type: ignore[assignment]
    demo.answers = ProcessJob(reference="bf16", cache=str(tmp_path), n_per_gate=1)
    assert demo.evaluation("best").numerics == (expected,)
