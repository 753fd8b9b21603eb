"""Predict the milliseconds to the first token (TTFT) of one stream, from the FLOPs of each format.

    ms = request + layers * step + root(reads^2 + products^2) + attention + DeltaNet + norms + head

    reads: bytes of the linears / bandwidth, once per chunk of the prompt
    products: sum over formats of 2 * weights * tokens / rate of the format's kernel
    attention: 4 * heads * size of a head * causal pairs / rate, cached tokens included
    DeltaNet, norms: time per token, by value heads and by hidden elements
    head: bytes of the head / bandwidth, once

Constants are fitted to published measurements (assets/prefill.json has them with their sources).
The interval is the error that 90 % of the rows have when their model is left out of the fit.
tests/perf/first_token.py fits and has the table of errors in first_token.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from annie_quant.checkpoint import decode_speed
from annie_quant.checkpoint.header import ShardError
from annie_quant.checkpoint.linears import read_struct
from annie_quant.checkpoint.prompt_work import ModelShape, PromptWork, Sizes, work_of
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.size import AttentionShape
from annie_quant.core.errors import UsageError
from annie_quant.core.files import ASSETS
from annie_quant.documents import Device, PredictedFirstToken, decode

_PROMPT_TOKENS = 2048
BANDWIDTH = decode_speed.DEVICES["gb10"].read_bytes_s
# Tokens of a prompt that a server computes at once, by its defaults.
CHUNK_TOKENS = {"vllm": 8192, "sglang": 8192, "trtllm": 8192, "llama-bench": 2048, "llama.cpp": 512}
_LLAMA_CPP = ("llama.cpp", "llama-bench")
SERVERS = {"vllm": "vLLM", "llama.cpp": "llama.cpp"}  # of which the rates are known
# A format with a smaller share of the FLOPs may have no rate; the slowest known one counts then.
SMALL_SHARE = 0.01


class NoRate(UsageError):
    """No prefill rate is known for a device, a server or a format there."""


class Prefill(msgspec.Struct, frozen=True, kw_only=True):
    """assets/prefill.json without its rows.

    error_90: 90 % of the rows are predicted within this relative error, with their model left out.
    constants: fitted or published; TFLOP/s, ms, ns and ps as prompt_time uses them.
    """

    device: str
    error_90: float
    constants: dict[str, float]
    bytes_per_weight: dict[str, float]
    models: dict[str, ModelShape]


@dataclass(frozen=True)
class PrefillRates:
    """A server's constants on a device.

    constants: see Prefill.
    error_90: None where no measured time of that device is known.
    """

    device: str
    read_bytes_s: float
    constants: Mapping[str, float]
    error_90: float | None = None


@dataclass(frozen=True)
class Prompt:
    """tokens: of the whole prompt; None: 2,048, or the context.  cached: of these, not computed."""

    tokens: int | None = None
    cached: int = 0

    def within(self, folder: ModelFolder | None) -> Prompt:
        """Return the prompt with its tokens. Raises UsageError where it exceeds a model's context."""
        context = None
        if folder is not None:
            settings = read_struct(AttentionShape, folder.text_config)
            context = settings.max_position_embeddings
        tokens = self.tokens or min(_PROMPT_TOKENS, context or _PROMPT_TOKENS)
        if folder is not None and context and tokens > context:
            message = (
                f"{folder.path.name}: its context is {context:,}, not {tokens:,} prompt tokens"
            )
            raise UsageError(message, f"--prompt-tokens {context}, or fewer")
        if self.cached >= tokens:
            message = f"{self.cached:,} cached of {tokens:,} prompt tokens: expected fewer"
            raise UsageError(message, f"--cached-tokens {tokens - 1}, or fewer")
        return Prompt(tokens, self.cached)


@functools.cache
def prefill() -> Prefill:
    return decode(Prefill, ASSETS / "prefill.json")


# ---- the formula


def causal_pairs(tokens: float, cached: float, window: int) -> float:
    """Return the pairs of a new token and a token that it sees."""
    if not window:
        return tokens * cached + tokens * (tokens + 1) / 2
    seen = window if cached + tokens >= window else cached + tokens / 2
    return tokens * min(window, seen)


@dataclass(frozen=True)
class PromptTime:
    """The parts of a prediction. All but rest_ms are sums over linears, so they can be added.

    rest_ms: what does not depend on the formats of linears.
    reads_s, products_s: of the linears; the longer one hides most of the other.
    head_s: reading the head.
    """

    rest_ms: float = 0.0
    reads_s: float = 0.0
    products_s: float = 0.0
    head_s: float = 0.0

    @property
    def ms(self) -> float:
        return self.rest_ms + 1e3 * (math.hypot(self.reads_s, self.products_s) + self.head_s)


def prompt_time(
    work: PromptWork,
    server: str,
    tokens: int,
    cached: int,
    rates: PrefillRates,
    prompts: int = 1,
) -> PromptTime:
    """Return the time to the first token in parts. tokens: computed, of `prompts` equal prompts."""
    shape = work.shape
    constants = rates.constants
    source = "llama.cpp" if server in _LLAMA_CPP else "vllm"
    chunks = math.ceil(tokens / CHUNK_TOKENS[server])
    reads = chunks * sum(size for _, size in work.linears.values())
    products_s = _products_s(work.linears, tokens, f"{source}.linear", rates)
    if work.experts:
        spread = constants[f"{source}.experts.spread"]  # tokens of a chunk share experts
        used = 1 - (1 - shape.active_share) ** (tokens / chunks * spread)
        reads += chunks * used * sum(size for _, size in work.experts.values())
        computed = tokens * shape.active_share
        products_s += _products_s(work.experts, computed, f"{source}.experts", rates)
    attention_s = 0.0
    for layers, heads, head_size, window in shape.attention:
        pairs = prompts * causal_pairs(tokens / prompts, cached, window)
        rate = constants[f"{source}.attention.{_head_class(head_size)}"]
        attention_s += layers * 4 * heads * head_size * pairs / (rate * 1e12)
    deltanet_layers, value_heads = shape.deltanet
    fixed_ms = constants[f"{server}.request_ms"] + shape.layers * constants[f"{server}.layer_ms"]
    deltanet_ms = tokens * deltanet_layers * value_heads * constants[f"{source}.deltanet_ns"] * 1e-6
    norms_ms = tokens * shape.layers * shape.hidden * constants["norms_ps"] * 1e-9
    return PromptTime(
        rest_ms=fixed_ms + attention_s * 1e3 + deltanet_ms + norms_ms,
        reads_s=reads / rates.read_bytes_s,
        products_s=products_s,
        head_s=work.head_bytes / rates.read_bytes_s,
    )


def _head_class(size: int) -> int:
    """Return the size of a head whose attention rate is known."""
    return next((known for known in (128, 256) if size <= known), 512)


def _products_s(sizes: Sizes, tokens: float, prefix: str, rates: PrefillRates) -> float:
    total = sum(weights for weights, _ in sizes.values())
    start = f"{prefix}."
    known = {name: rate for name, rate in rates.constants.items() if name.startswith(start)}
    known.pop(f"{prefix}.spread", None)
    seconds = 0.0
    for name, (weights, _) in sizes.items():
        rate = known.get(f"{prefix}.{name}")
        if rate is None and weights > SMALL_SHARE * total:
            where = " experts" if prefix.endswith("experts") else ""
            server = SERVERS[prefix.rpartition(".")[0]]
            message = f"no prefill rate is known for {name}{where} in {server} on {rates.device}"
            raise NoRate(message, "bench measures it")
        slowest = min(known.values(), default=1.0)
        seconds += 2 * weights * tokens / ((rate or slowest) * 1e12)
    return seconds


# ---- predictions


def rates_of(server: str, device: Device) -> PrefillRates:
    """Return the rates of a server on a device. Raises NoRate where there are none.

    A device file has the rates of products that it measured. Attention is then scaled by the rate
    of bf16, DeltaNet and norms by bandwidth, and a request's and a layer's time are those of the
    fit: no server was measured there.
    """
    known = prefill()
    if server not in SERVERS:
        raise NoRate(f"no prefill rate is known for {server}", f"known: {', '.join(SERVERS)}")
    if device.prefill_tflop_s and server == "vllm":
        return PrefillRates(device.name, device.read_bytes_s, _scaled(known.constants, device))
    if device.name != known.device:
        hint = f"--device gb10 has one, or {decode_speed.MEASURE}"
        raise NoRate(f"no prefill rate is known for {device.name}", hint)
    return PrefillRates("a GB10", BANDWIDTH, known.constants, known.error_90)


def _scaled(constants: Mapping[str, float], device: Device) -> dict[str, float]:
    """Return a device's constants from the rates of products that it measured, and from the fit."""
    measured = device.prefill_tflop_s
    products = measured.get("bf16", 0.0) / constants["vllm.linear.bf16"] or 1.0
    reads = device.read_bytes_s / BANDWIDTH
    scaled = {}
    for name, value in constants.items():
        if ".linear." in name or (".experts." in name and not name.endswith("spread")):
            continue
        if ".attention." in name:
            scaled[name] = value * products
        elif name.endswith(("deltanet_ns", "norms_ps")):
            scaled[name] = value / reads
        else:
            scaled[name] = value
    return scaled | {f"vllm.linear.{kernel}": rate for kernel, rate in measured.items()}


def predict(work: PromptWork, server: str, device: Device, prompt: Prompt) -> PredictedFirstToken:
    """Return the predicted time to the first token and the ends of its 90 % interval.

    prompt: with its tokens.  Raises NoRate where the device, the server or a format has no rate.
    """
    rates = rates_of(server, device)
    computed = (prompt.tokens or 0) - prompt.cached
    ms = prompt_time(work, server, computed, prompt.cached, rates).ms
    return with_interval(ms, server, device, prompt)


def with_interval(ms: float, server: str, device: Device, prompt: Prompt) -> PredictedFirstToken:
    """Return predicted milliseconds with the ends of their 90 % interval. prompt: with its tokens."""
    error = rates_of(server, device).error_90
    return PredictedFirstToken(
        device=device.name,
        server=server,
        prompt_tokens=prompt.tokens or 0,
        cached_tokens=prompt.cached,
        ms=ms,
        low_ms=None if error is None else ms / (1 + error),
        high_ms=None if error is None else ms / (1 - error),
    )


def predict_folder(
    folder: ModelFolder, device: Device | None = None, prompt: Prompt = Prompt()
) -> PredictedFirstToken | None:
    """Return the prediction for a model folder in vLLM; None where no rate is known or it is damaged."""
    device = device or decode_speed.default_device()
    try:
        return predict(work_of(folder), "vllm", device, prompt.within(folder))
    except (NoRate, ShardError):
        return None


def interval_text(predicted: PredictedFirstToken) -> str:
    """Return "about 430 ms (350 to 560)".

    Without an interval the products alone were measured there. Servers took longer on an H200 in
    all cells (tests/perf/first_token_gpu.md), so the prediction is a lower bound.
    """
    if predicted.low_ms is None or predicted.high_ms is None:
        return f"at least {predicted.ms:,.0f} ms (no server was measured there)"
    return f"about {predicted.ms:,.0f} ms ({predicted.low_ms:,.0f} to {predicted.high_ms:,.0f})"


def describe(
    works: Mapping[str, PromptWork], server: str, device: Device | None, prompt: Prompt
) -> str:
    """Return the prediction as one line, or that no rate is known.

    works: description of an alternative → its work.  prompt: with its tokens.
    """
    device = device or decode_speed.default_device()
    alternatives = []
    try:
        for name, work in works.items():
            predicted = predict(work, server, device, prompt)
            alternatives.append(f"{interval_text(predicted)}{name}")
    except NoRate as reason:
        return f"first token: {reason.message}"
    shares = f"; FLOPs of the linears {shares_of(work)}" if len(works) == 1 else ""
    where = prompt_text(server, device, prompt)
    return f"first token after {' or '.join(alternatives)}: {where}{shares}"


def prompt_text(server: str, device: Device, prompt: Prompt) -> str:
    """Return "2,048 prompt tokens, vLLM on NVIDIA GB10"."""
    cached = f", {prompt.cached:,} of them cached" if prompt.cached else ""
    return f"{prompt.tokens:,} prompt tokens{cached}, {SERVERS[server]} on {device.name}"


def flops_of(work: PromptWork) -> dict[str, float]:
    """Return kernel → weights that a token multiplies."""
    flops = {kernel: weights for kernel, (weights, _) in work.linears.items()}
    for kernel, (weights, _) in work.experts.items():
        flops[kernel] = flops.get(kernel, 0.0) + weights * work.shape.active_share
    return flops


def flops_share(work: PromptWork, kernel: str) -> float:
    """Return a kernel's share of the linears' FLOPs."""
    flops = flops_of(work)
    return flops.get(kernel, 0.0) / sum(flops.values())


def shares_of(work: PromptWork) -> str:
    """Return the share of the linears' FLOPs per kernel as text, the largest first."""
    flops = flops_of(work)
    total = sum(flops.values())
    largest_first = sorted(flops, key=lambda kernel: -flops[kernel])
    shown = [kernel for kernel in largest_first if flops[kernel] >= 0.005 * total]
    return ", ".join(f"{kernel} {flops[kernel] / total:.0%}" for kernel in shown)


def describe_folder(
    folder: ModelFolder,
    server: str = "vllm",
    device: Device | None = None,
    prompt: Prompt = Prompt(),
) -> str:
    """Return the prediction for a model folder as one line. Raises UsageError for a bad prompt."""
    checked = prompt.within(folder)
    try:
        work = work_of(folder, server)
    except ShardError as error:
        return f"first token: not predicted, because {error.message}"
    return describe({"": work}, server, device, checked)
