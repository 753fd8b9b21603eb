"""Exports a tiny random model with the ModelOpt that is on the path, by recipes that a CPU can calibrate.

    PYTHONPATH=FOLDER_OF_THAT_VERSION python tests/data/dialects/make_modelopt.py OUTPUT    (a folder for each recipe)

One layer of 64 x 64, so that a sample is some kilobytes. Kept in tests/data/dialects/modelopt-VERSION-RECIPE.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

RECIPES = {
    "nvfp4": ("NVFP4_DEFAULT_CFG", None),
    "mlp_only": ("NVFP4_MLP_ONLY_CFG", None),
    "fp8": ("FP8_DEFAULT_CFG", None),
    "nvfp4_kv8": ("NVFP4_DEFAULT_CFG", "FP8_KV_CFG"),
}


def tiny():
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    config.architectures = ["Qwen3ForCausalLM"]
    return transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).eval()


def with_kv_cache(config, kv):
    """Older releases keep settings as a mapping and have no helper for this; newer ones keep a list."""
    both = config["quant_cfg"] | kv if isinstance(kv, dict) else [*config["quant_cfg"], *kv]
    return {**config, "quant_cfg": both}


def main(output: Path) -> None:
    import modelopt
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint

    if not torch.cuda.is_available():
        # The exporter asks the GPU's generation in order to choose between two ways of rounding to the same codes.
        torch.cuda.get_device_capability = lambda *device: (8, 0)
        torch.cuda.get_device_properties = lambda *device: types.SimpleNamespace(major=8, minor=0)
    for recipe, (name, kv) in RECIPES.items():
        if not hasattr(mtq, name):
            print(modelopt.__version__, recipe, f"has no {name}")
            continue
        config = getattr(mtq, name)
        if kv:
            config = with_kv_cache(config, getattr(mtq, kv)["quant_cfg"])
        model = tiny()
        model = mtq.quantize(model, config, lambda m: m(torch.arange(32)[None]))
        target = output / f"modelopt-{modelopt.__version__}-{recipe}"
        with torch.inference_mode():
            export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=target)
        print(modelopt.__version__, recipe, sorted(f.name for f in target.iterdir()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
