"""Writes torchao_nvfp4.npz: what torchao's own packing makes of awkward weights.

    python tests/data/make_torchao.py      (torchao 0.18.0, installed apart: pip install --no-deps --target DIR torchao==0.18.0)

Keys `<case>/<dtype>/<what>`: x as bit patterns, tensor_scale float32, codes and block_scale uint8.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "helpers"), str(HERE.parent.parent)]
from nvfp4_cases import BFLOAT16, adversarial, bits, in_dtype  # noqa: E402


def main() -> None:
    import torch
    import torchao
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    kept: dict[str, np.ndarray] = {
        "made_by": np.array(f"torchao {torchao.__version__}, torch {torch.__version__}")
    }
    for dtype in (np.dtype(np.float32), BFLOAT16):
        for name, w in adversarial(8, 256, 53):
            if name not in ("gaussian", "heavy tails", "ties", "near ties", "sparse", "minus zero"):
                continue
            x = in_dtype(w, dtype)
            xt = torch.from_numpy(x.astype(np.float32)).to(
                torch.bfloat16 if dtype == BFLOAT16 else torch.float32
            )
            scale = xt.abs().amax().float() / (6 * 448) if x.any() else torch.tensor(1.0)
            block_scale, codes = nvfp4_quantize(xt, 16, scale)
            kept[f"{name}/{dtype}/x"] = bits(x)
            kept[f"{name}/{dtype}/tensor_scale"] = scale.numpy()
            kept[f"{name}/{dtype}/codes"] = codes.view(torch.uint8).numpy().reshape(8, 128)
            kept[f"{name}/{dtype}/block_scale"] = (
                block_scale.view(torch.uint8).numpy().reshape(8, 16)
            )
    np.savez_compressed(HERE / "torchao_nvfp4.npz", **kept)


if __name__ == "__main__":
    main()
