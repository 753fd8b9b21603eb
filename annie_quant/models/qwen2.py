"""Qwen2 and Qwen2.5, dense: biases on queries, keys and values, plain norms, text only; small ones tie the head.

Sources: transformers' modeling_qwen2.py; llama.cpp's names from gguf's tensor_mapping.
"""

from __future__ import annotations

from annie_quant.models._dense import dense

FAMILY = dense("Qwen2", "Qwen2ForCausalLM", "qwen2", tensor_scales=False)
