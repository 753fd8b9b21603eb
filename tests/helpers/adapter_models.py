"""Adapters that peft makes on small random models, and peft's own merge of them in float32."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
}  # fmt: skip
DELTANET = {
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 2,
}  # fmt: skip
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-bias": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen3.5": ("Qwen3_5TextConfig", DELTANET),
    "qwen3.5-moe": (
        "Qwen3_5MoeTextConfig",
        DELTANET | MIXTURE | {"shared_expert_intermediate_size": 32},
    ),
    "qwen3-moe": ("Qwen3MoeConfig", MIXTURE),
}


def save_base(folder: Path, kind: str, seed: int = 0) -> Path:
    """Write a random bf16 model with the modules' own names; its norms and biases are not constant."""
    import torch
    import transformers
    from safetensors.torch import save_file

    class_name, settings = CLASSES[kind]
    untied = {"tie_word_embeddings": False}
    config = getattr(transformers, class_name)(**SIZES | untied | settings)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", ".bias")):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.to(torch.bfloat16).save_pretrained(folder)
    # save_pretrained gives every expert a name; published checkpoints have the modules' own, merged ones.
    tensors = {n: t.clone().contiguous() for n, t in model.state_dict().items()}
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@dataclass(frozen=True)
class Form:
    """A form of adapter.

    kind: of model. settings: of LoraConfig. tokens: rows of the embedding after tokens were added.
    """

    kind: str
    settings: dict[str, Any]
    tokens: int = 0


def load_float32(base: Path) -> Any:
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def trained(base: Path, form: Form, seed: int = 1) -> Any:
    """Return a peft model in float32 whose trainable parameters have random values."""
    import torch
    from peft import LoraConfig, get_peft_model

    model = load_float32(base)
    torch.manual_seed(seed)
    if form.tokens:
        model.resize_token_embeddings(form.tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 6} | form.settings))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad and "magnitude" in name:
                parameter.mul_(1 + 0.1 * torch.rand_like(parameter))
            elif parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return adapted


def save_adapter(adapted: Any, folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted.save_pretrained(folder)
    return folder


def merged_by_peft(adapted: Any) -> dict[str, Any]:
    """Return the state dict of peft's merge in float32, rounded once to bf16. It changes `adapted`."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merged = adapted.merge_and_unload()
    return {name: t.detach().to(torch.bfloat16) for name, t in merged.state_dict().items()}


def rewrite(
    folder: Path,
    rename: Callable[[str], str] = str,
    change: Callable[[dict[str, Any]], None] | None = None,
    **settings: object,
) -> Path:
    """Change a saved adapter: the names of its tensors, the tensors, and fields of its settings."""
    from safetensors.torch import load_file, save_file

    file = folder / "adapter_model.safetensors"
    tensors = {rename(name): tensor for name, tensor in load_file(file).items()}
    if change is not None:
        change(tensors)
    save_file(tensors, file, {"format": "pt"})
    config = folder / "adapter_config.json"
    content = json.loads(config.read_text()) | settings
    config.write_text(json.dumps(content))
    return folder
