"""A tiny random model compressed by the compressed-tensors that is on the path, as nvfp4-pack-quantized.

    PYTHONPATH=FOLDER_OF_THAT_VERSION python tests/data/dialects/make_compressed_tensors.py OUTPUT

Scales are calibrated here by the format's rule (amax of a block over 6, global scale 448 * 6 / amax, as a divisor, of the
whole model so that fused matrices share it); packing, names and configuration are the library's.
"""

from __future__ import annotations

import sys
from pathlib import Path

from make_modelopt import tiny

PRESETS = {"NVFP4": "nvfp4", "NVFP4A16": "nvfp4a16"}


def calibrate(module, divisor, torch) -> None:
    weight = module.weight.data.float()
    blocks = weight.reshape(weight.shape[0], -1, 16).abs().amax(-1)
    module.weight_global_scale.data = divisor.clone()  # safetensors refuses shared memory
    module.weight_scale.data = (
        (blocks / 6.0 * divisor).to(torch.float8_e4m3fn).to(module.weight_scale.dtype)
    )
    if hasattr(module, "input_global_scale"):
        module.input_global_scale.data = torch.tensor([448.0 * 6.0 / 4.0])


def main(output: Path) -> None:
    import compressed_tensors
    import torch
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    for preset, name in PRESETS.items():
        model = tiny()
        asked = {
            "config_groups": {preset: ["Linear"]},
            "ignore": ["lm_head"],
            "quant_method": "compressed-tensors",
        }
        config = QuantizationConfig(
            **asked, format="nvfp4-pack-quantized", quantization_status="calibration"
        )
        apply_quantization_config(model, config)
        modules = [m for m in model.modules() if hasattr(m, "weight_global_scale")]
        divisor = (448.0 * 6.0 / max(m.weight.abs().max().float() for m in modules)).reshape(1)
        for module in modules:
            calibrate(module, divisor, torch)
        compressor = ModelCompressor.from_pretrained_model(
            model, quantization_format="nvfp4-pack-quantized"
        )
        target = output / f"compressed-tensors-{compressed_tensors.__version__}-{name}"
        compressor.compress_model(model)
        model.save_pretrained(target)
        compressor.update_config(target)
        print(compressed_tensors.__version__, name, sorted(f.name for f in target.iterdir()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
