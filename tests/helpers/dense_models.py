"""Small random models of the dense families, with tiny-annie's tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from paths import TINY_ANNIE

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
# Five layers with a window that the texts exceed, then one with full attention, as in llama.cpp.
GEMMA3 = {
    "num_hidden_layers": 6,
    "sliding_window": 16,
    "query_pre_attn_scalar": 32,
    "tie_word_embeddings": True,
}
# Name of the model here → class and settings. Qwen2's attention always has biases on q, k and v; Llama's has four if asked.
CLASSES = {
    "llama": ("LlamaConfig", {}),
    "llama-bias": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama3": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {}),
    "gemma3": ("Gemma3TextConfig", GEMMA3),
    "mistral": ("MistralConfig", {}),
}
KNOWN = [kind for kind in CLASSES if kind != "mistral"]


def make(folder: Path, kind: str, gain: float = 1.0) -> Path:
    """Write a small random model; activations lean on a few channels, as AWQ needs it.

    gain: factor on the linears' initial weights; it makes the answers varied.
    """
    import torch
    import transformers

    tiny = json.loads((TINY_ANNIE / "config.json").read_text())
    name, settings = CLASSES[kind]
    config = getattr(transformers, name)(**SIZES | settings, vocab_size=tiny["vocab_size"])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("layernorm.weight"):
                parameter[::16] = 6.0
            if parameter.dim() == 2 and "embed" not in name:
                parameter.mul_(gain)
            if name.endswith("_proj.bias"):
                parameter.normal_(0, 0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(TINY_ANNIE / name, folder / name)
    return folder
