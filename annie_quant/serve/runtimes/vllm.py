"""vLLM by a dated recipe: assets/recipes/vllm.json."""

from __future__ import annotations

from annie_quant.serve.recipes import Runtime

NAME = "vllm"
_runtime = Runtime(NAME)
start, command, write = _runtime.start, _runtime.command, _runtime.write
