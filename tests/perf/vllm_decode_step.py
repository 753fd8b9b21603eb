"""Which part of DeltaNet's decode step on a CPU costs tool calls? vLLM's answers with that step replaced, part by part.

    export PYTHONPATH=. VLLM_CPU_OMP_THREADS_BIND=nobind
    build/vllm/bin/python tests/perf/vllm_decode_step.py CHECKPOINT PROMPTS.json

PROMPTS.json: of predict_server.py (WORK/prompts.N.json); the prompts with tools are asked, 16 at a time. For each variant it prints
how many answers open a call, how many of them do not close it, and which prompts these are. vLLM computes everything else.
  vllm       its own kernel, fused_sigmoid_gating_delta_rule_update_cpu: beta = 1 / (1 + e^-b) in bfloat16, each of the three
             operations rounded; queries and keys normalized with an epsilon of 1e-5
  same       the same written with torch
  beta once  beta is computed in float32 and rounded to bfloat16 once (SGLang; vLLM on a GPU before vllm-project/vllm #53877)
  beta       beta in float32
  gpu        beta in float32 and an epsilon of 1e-6: what vLLM 0.32 computes on a GPU
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import vllm_answers
from torch.nn import functional


def sigmoid_in_steps(b: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-b))  # b is bfloat16, so every operation is rounded


def sigmoid_once(b: torch.Tensor) -> torch.Tensor:
    return b.float().sigmoid().bfloat16()


def sigmoid_exact(b: torch.Tensor) -> torch.Tensor:
    return b.float().sigmoid()


def decode_step(
    sigmoid: Callable[[torch.Tensor], torch.Tensor], epsilon: float
) -> Callable[..., torch.Tensor]:
    """Return a replacement of vLLM's kernel: one step of the recurrence in float32. q, k, v: [1, B, heads, D]."""

    def step(
        *,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        initial_state_source: torch.Tensor,
        initial_state_indices: torch.Tensor,
        **_: Any,
    ) -> torch.Tensor:
        slots, size, heads = initial_state_indices.long(), q.shape[-1], v.shape[-2]
        query, key = (x.float().reshape(-1, x.shape[-2], size) for x in (q, k))
        query, key = (x / (x.square().sum(-1, keepdim=True) + epsilon).sqrt() for x in (query, key))
        query, key = (x.repeat_interleave(heads // x.shape[1], 1) for x in (query, key))
        decay = torch.exp(-A_log.float().exp() * functional.softplus(a.float() + dt_bias.float()))
        state = initial_state_source[slots] * decay[:, :, None, None]
        error = v.float().reshape(-1, heads, v.shape[-1]) - torch.einsum(
            "nhkv,nhk->nhv", state, key
        )
        state = state + key.unsqueeze(-1) * (error * sigmoid(b).float().unsqueeze(-1)).unsqueeze(-2)
        initial_state_source[slots] = state
        return (torch.einsum("nhkv,nhk->nhv", state, query) * size**-0.5).to(q.dtype).unsqueeze(1)

    return step


VARIANTS: dict[str, Callable[..., torch.Tensor] | None] = {
    "vllm": None,
    "same": decode_step(sigmoid_in_steps, 1e-5),
    "beta once": decode_step(sigmoid_once, 1e-5),
    "beta": decode_step(sigmoid_exact, 1e-5),
    "gpu": decode_step(sigmoid_exact, 1e-6),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    arguments = parser.parse_args()
    added = json.loads((arguments.checkpoint / "tokenizer.json").read_text())["added_tokens"]
    ids = {entry["content"]: entry["id"] for entry in added}
    opens, closes = ids["<tool_call>"], ids["</tool_call>"]
    rows = [row for row in json.loads(arguments.prompts.read_text()) if opens in row["prompt"]]
    llm = vllm_answers.start(str(arguments.checkpoint), "auto", 16, True)
    from vllm import _custom_ops as kernels

    own = kernels.fused_sigmoid_gating_delta_rule_update_cpu
    for name in arguments.variants.split(","):
        kernels.fused_sigmoid_gating_delta_rule_update_cpu = VARIANTS[name] or own
        answers = [answer[0] for _, answer in sorted(vllm_answers.answers(llm, rows, 16))]
        unclosed = [
            i for i, tokens in enumerate(answers) if opens in tokens and closes not in tokens
        ]
        n_opened = sum(opens in tokens for tokens in answers)
        print(
            f"{name}: {len(rows)} prompts, {n_opened} calls, {len(unclosed)} not closed: {unclosed}",
            flush=True,
        )


if __name__ == "__main__":
    main()
