"""How much earlier the first token of NVFP4 can be than that of Q4_K_M in llama.cpp, by their kernels alone, on a GB10."""

from __future__ import annotations

from dataclasses import dataclass, replace

from annie_quant.checkpoint import decode_speed, first_token
from annie_quant.checkpoint.first_token import NoRate, Prompt, prefill
from annie_quant.checkpoint.prompt_work import PromptWork, Sizes

KNOWN_MODEL = "Qwen3.5-9B"  # stands for a model that is not known
MIN_LINEAR_WEIGHTS = 1e9  # the smallest model that was measured has 1.4 billion
BASE_KERNEL = "q4"
BASE_SERVER = "llama.cpp"
PROMPT_TOKENS = 2048
# Server → kernels of NVFP4 there and their names.
NVFP4_KERNELS = {
    "vllm": {"w4a4": "W4A4", "w4a16": "W4A16"},
    "llama.cpp": {"nvfp4": "NVFP4"},
}


@dataclass(frozen=True)
class KernelRatios:
    """Time to the first token of Q4_K_M over that of NVFP4.

    model: whose linears were counted.
    ratios: format → ratio.
    largest: with the errors of both predictions.
    """

    model: str
    tokens: int
    ratios: dict[str, float]
    error_90: float

    @property
    def largest(self) -> float:
        return max(self.ratios.values()) * (1 + self.error_90) / (1 - self.error_90)


def kernel_ratios(server: str, work: PromptWork | None = None, name: str = "") -> KernelRatios:
    """Return the ratios of a checkpoint in a server; of all NVFP4 formats of KNOWN_MODEL where it has none.

    work: of the checkpoint in that server.  name: the checkpoint's.
    """
    is_measured = work is not None and _weights(work.linears) >= MIN_LINEAR_WEIGHTS
    if work is not None and is_measured:
        try:
            ratio = _ms(_in_one_kernel(work, BASE_KERNEL), BASE_SERVER)
            ratio /= _ms(work, server)
            shares = {first_token.shares_of(work): ratio}
            return KernelRatios(name, PROMPT_TOKENS, shares, prefill().error_90)
        except NoRate:
            pass  # a format, or experts, without a rate
    known = _known_work()
    base_ms = _ms(_in_one_kernel(known, BASE_KERNEL), BASE_SERVER)
    ratios = {}
    for kernel, title in NVFP4_KERNELS.get(server, NVFP4_KERNELS["vllm"]).items():
        place = server if server in NVFP4_KERNELS else "vllm"
        ratios[title] = base_ms / _ms(_in_one_kernel(known, kernel), place)
    return KernelRatios(KNOWN_MODEL, PROMPT_TOKENS, ratios, prefill().error_90)


def _ms(work: PromptWork, server: str) -> float:
    device = decode_speed.DEVICES["gb10"]
    return first_token.predict(work, server, device, Prompt(PROMPT_TOKENS)).ms


def _known_work() -> PromptWork:
    shape = prefill().models[KNOWN_MODEL]
    linears: Sizes = {BASE_KERNEL: (shape.linear_weights, 0.0)}
    return PromptWork(shape, linears, head_bytes=2.0 * shape.head_weights)


def _weights(sizes: Sizes) -> float:
    return sum(weights for weights, _ in sizes.values())


def _in_one_kernel(work: PromptWork, kernel: str) -> PromptWork:
    """Return the work with all linears in one format, and the same head."""
    size = prefill().bytes_per_weight[kernel]
    linears = _weights(work.linears)
    experts = _weights(work.experts)
    return replace(
        work,
        linears={kernel: (linears, linears * size)},
        experts={kernel: (experts, experts * size)} if experts else {},
    )
