"""vLLM by a dated recipe: assets/recipes/vllm.json."""

from __future__ import annotations

from annie_quant.ops.recipes import RecipeRuntime

NAME = "vllm"
_runtime = RecipeRuntime(NAME)
start, command, write = _runtime.start, _runtime.command, _runtime.write
