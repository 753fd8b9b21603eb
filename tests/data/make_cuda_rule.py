"""Writes modelopt_cuda_rule.npz: what ModelOpt itself makes of awkward weights on a GPU.

    python tests/data/make_cuda_rule.py [OUTPUT]      (needs a GPU of compute capability >= 8.9, nvidia-modelopt 0.47, triton)

Keys are `<case>/<dtype>/<what>`; inputs are kept as bit patterns, since random streams differ between NumPy's versions.
    x                        uint16 or uint32 [rows, columns]
    scale_2                  float32, weight_scale_2 as torch computes it on the GPU (absent where it was given: `given`)
    codes, block_scale       uint8, NVFP4QTensor.quantize on the GPU
    fake                     bits of dynamic_block_quantize_op with the tensor's amax, its Triton kernel for activations
    amax                     float32, what was passed to it
    sweep_amax, sweep_scale  float32 amax of each block that nvfp4_fp8_scale_sweep chose, uint8 scale bytes of its static export
    static_448, static_256   uint8 scale bytes of the static export of each block's own amax, F = 448 and 256
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "helpers"))
from nvfp4_cases import DTYPES, adversarial, bits, in_dtype, near_ties_of_steps  # noqa: E402

# A tensor scale that is no power of two, given to quantize and to the near ties around its steps.
GIVEN = np.float32(0.000731)
E4M3_STEPS = np.arange(8, 127, 5, dtype=np.uint8)


def cases() -> list[tuple[str, np.ndarray, np.float32 | None]]:
    """(name of case and dtype, weights, tensor scale or None)."""
    found = []
    for dtype in DTYPES:
        for name, w in adversarial(8, 256, 47):
            x = in_dtype(w, dtype)
            if x.any():
                found.append((f"{name}/{dtype}", x, None))
        steps = E4M3_STEPS.astype(np.int64)
        values = (
            np.where(steps >= 8, (1 + steps % 8 / 8) * 2.0 ** (steps // 8 - 7), 0).astype(
                np.float32
            )
            * GIVEN
        )
        near = near_ties_of_steps(values, dtype).reshape(len(values), -1, 7)
        top = np.repeat((6 * values).astype(dtype)[:, None, None], near.shape[1], 1)
        blocks = np.concatenate([top, near, -near, top], -1)
        found.append((f"near steps/{dtype}", blocks.reshape(len(values), -1), GIVEN))
    return found


def main() -> None:
    import modelopt
    import torch
    from modelopt.torch.kernels.quantization.gemm import fp4_fake_quant_block, nvfp4_fp8_scale_sweep
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import (
        NVFP4QTensor,
        _cast_per_block_scale_to_fp8,
    )
    from modelopt.torch.quantization.tensor_quant import dynamic_block_quantize_op
    from modelopt.torch.quantization.utils import reduce_block_amax

    assert callable(fp4_fake_quant_block)
    name_of = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    kept: dict[str, np.ndarray] = {}
    for case, x, given in cases():
        dtype = name_of[str(x.dtype)]
        pattern = bits(x)
        whole = torch.int16 if x.dtype.itemsize == 2 else torch.int32
        xt = (
            torch.from_numpy(pattern.view(np.int16 if x.dtype.itemsize == 2 else np.int32).copy())
            .cuda()
            .view(dtype)
        )
        kept[f"{case}/x"] = pattern
        s2 = None if given is None else torch.tensor(given, dtype=torch.float32, device="cuda")
        q, scale, s2 = NVFP4QTensor.quantize(xt.clone(), 16, None, s2)
        kept[f"{case}/{'scale_2' if given is None else 'given'}"] = s2.float().cpu().numpy()
        kept[f"{case}/codes"] = q._quantized_data.cpu().numpy()
        kept[f"{case}/block_scale"] = scale.view(torch.uint8).cpu().numpy()
        amax = xt.abs().amax().float()
        kept[f"{case}/amax"] = amax.cpu().numpy()
        fake = dynamic_block_quantize_op(xt, 16, amax, 4, 2, 8, 4)
        kept[f"{case}/fake"] = fake.view(whole).cpu().numpy().view(pattern.dtype)
        # As get_weights_scaling_factor_from_quantizer does it for a static quantizer, on the GPU.
        block = reduce_block_amax(xt, block_sizes={-1: 16}).float()
        sweep = nvfp4_fp8_scale_sweep(xt, amax).view_as(block)
        kept[f"{case}/sweep_amax"] = sweep.cpu().numpy()
        for what, chosen, largest in (
            ("sweep_scale", sweep, 448),
            ("static_448", block, 448),
            ("static_256", block, 256),
        ):
            ratio = chosen / 6.0
            ratio[ratio == 0] = 1.0
            byte = _cast_per_block_scale_to_fp8(
                ratio, amax / 6.0, fp8_max_for_normalization=largest
            )
            kept[f"{case}/{what}"] = byte.view(torch.uint8).cpu().numpy()
    made_by = {
        "modelopt": modelopt.__version__, "torch": torch.__version__, "numpy": np.__version__,
        "device": torch.cuda.get_device_name(), "capability": torch.cuda.get_device_capability(),
    }  # fmt: skip
    kept["made_by"] = np.array(json.dumps(made_by))
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "modelopt_cuda_rule.npz"
    np.savez_compressed(target, **kept)
    print(made_by, target, target.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
