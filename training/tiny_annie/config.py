"""tiny-annie's shape: a Qwen3.5 text model that llama.cpp and vLLM take, with K-quant rows (multiples of 256)."""

from __future__ import annotations

from typing import Any

from tokenizer import MARKS, MODEL_VOCABULARY, SPECIAL, VOCABULARY

FIRST_SPECIAL = VOCABULARY - len(SPECIAL) - len(MARKS)


def configuration() -> Any:
    """Return the transformers configuration."""
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(
        vocab_size=MODEL_VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        full_attention_interval=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        # llama.cpp needs equal key and value head dims in the linear attention.
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
        mamba_ssm_dtype="float32",  # as Qwen3.5 publishes it: without it vLLM keeps DeltaNet's state in bfloat16 on a GPU
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        rms_norm_eps=1e-6,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
        },
        eos_token_id=FIRST_SPECIAL + SPECIAL.index("<|im_end|>"),
        pad_token_id=FIRST_SPECIAL,
        bos_token_id=None,
        dtype="bfloat16",
    )


def mixture_configuration() -> Any:
    """Return the transformers configuration of tiny-moe; its sizes are those of forward.Mixture."""
    from forward import Mixture
    from transformers import Qwen3_5MoeTextConfig

    c = Mixture()
    fields = configuration().to_dict()
    for name in ("model_type", "architectures", "intermediate_size"):
        del fields[name]
    return Qwen3_5MoeTextConfig(
        **fields,
        num_experts=c.num_experts,
        num_experts_per_tok=c.num_experts_per_tok,
        moe_intermediate_size=c.moe_intermediate_size,
        shared_expert_intermediate_size=c.shared_expert_intermediate_size,
    )


def write_folder(
    state: dict[str, Any], output: Any, tokenizer_folder: Any, config: Any = None
) -> None:
    """Write a complete bf16 checkpoint folder: weights, configurations, tokenizer, chat template.

    config: of transformers; default: tiny-annie's.
    """
    import json
    import shutil
    from pathlib import Path

    import torch
    from safetensors.torch import save_file

    output, source = Path(output), Path(tokenizer_folder)
    output.mkdir(parents=True, exist_ok=True)
    config = config or configuration()
    config.architectures = [
        {"qwen3_5_text": "Qwen3_5ForCausalLM"}.get(config.model_type, "Qwen3_5MoeForCausalLM")
    ]
    config.save_pretrained(output)
    save_file(
        {k: v.detach().to(torch.bfloat16).cpu().contiguous() for k, v in state.items()},
        output / "model.safetensors",
        metadata={"format": "pt"},
    )
    generation = {
        "eos_token_id": [config.eos_token_id, FIRST_SPECIAL],
        "pad_token_id": FIRST_SPECIAL,
        "do_sample": False,
    }
    (output / "generation_config.json").write_text(
        json.dumps(generation, indent=1) + "\n", encoding="utf-8"
    )
    if source.resolve() != output.resolve():
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copyfile(source / name, output / name)
