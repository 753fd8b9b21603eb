"""Qwen3, dense: attention with normed queries and keys, plain norms, text only.

Sources: transformers' modeling_qwen3.py; llama.cpp's names from gguf's tensor_mapping.
"""

from __future__ import annotations

from annie_quant.models._dense import dense

FAMILY = dense("Qwen3", "Qwen3ForCausalLM", "qwen3")
