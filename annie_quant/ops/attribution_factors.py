"""What `annie-quant attribute` varies: one entry per factor, and how each runtime is told its value.

Adding a factor: one entry of FACTORS, and of SETTINGS for each runtime whose servers have an option for it. `server` and names that
are in nobody's table (a placeholder of a user's own command) are factors without a proof.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from annie_quant.core.errors import UsageError
from annie_quant.core.untrusted import JsonObject
from annie_quant.documents import RequestRecord

SERVED = "as served"  # the value that a recipe has, or leaves to the server
OFF, ON = "off", "on"


class Varied(msgspec.Struct, frozen=True):
    """A factor with its two values."""

    name: str
    trusted: str
    suspect: str


class RequestSettings(msgspec.Struct, frozen=True):
    """What the requests of an arm set. fields: of each body, where they replace the workloads' own (temperature, top_k ...)."""

    concurrency: int = 1
    prefix_cache: Literal["warm", "off"] = "warm"
    fields: JsonObject = {}


@dataclass(frozen=True)
class ServedFactor:
    """One thing that can be to blame.

    title: as sentences have it.
    trusted: the value that is taken for right; "": the user has to state it.
    in_requests: the requests can set it, at any server.
    proof: gets whether the value is the suspect's, and the answers; returns why it did not take effect, else "".
    """

    name: str
    title: str
    trusted: str = ""
    in_requests: bool = False
    proof: Callable[[bool, Sequence[RequestRecord]], str] = lambda suspect, records: ""


def _prefix_hits(suspect: bool, records: Sequence[RequestRecord]) -> str:
    counts = [r.cached_tokens for r in records if r.cached_tokens is not None]
    if not suspect:
        return f"{sum(counts)} prompt tokens came from the prefix cache, which should be off" if sum(counts) else ""
    if not counts:
        return "the server reports no cached tokens, so nothing proves that its prefix cache was used"
    return "" if sum(counts) else "no prompt token came from the prefix cache"


def _drafts(suspect: bool, records: Sequence[RequestRecord]) -> str:
    counts = [r.drafted_tokens for r in records if r.drafted_tokens is not None]
    if not suspect:
        return f"{sum(counts):.0f} tokens were drafted, and none should be" if sum(counts) else ""
    return "" if sum(counts) else "the server reports no drafted tokens"


# In the order of their names in an arm. Halves of the list are the first arms.
FACTORS: dict[str, ServedFactor] = {
    factor.name: factor
    for factor in (
        ServedFactor("weights", "weights"),
        ServedFactor("activations", "activations", "w4a16"),
        ServedFactor("template", "chat template"),
        ServedFactor("parser", "tool parser"),
        ServedFactor("kv", "KV cache type", "auto"),
        ServedFactor("mtp", "MTP", "0", proof=_drafts),
        ServedFactor("prefix", "prefix cache", OFF, in_requests=True, proof=_prefix_hits),
        ServedFactor("graphs", "CUDA graphs", OFF),
        ServedFactor("batch", "batching", "1", in_requests=True),
        ServedFactor("sampling", "sampling", '{"temperature": 0}', in_requests=True),
    )
}


def title(name: str) -> str:
    return FACTORS[name].title if name in FACTORS else name


def ordered(names: Sequence[str]) -> list[str]:
    """Return names in the order of FACTORS, unknown ones last."""
    known = list(FACTORS)
    return sorted(names, key=lambda name: (known.index(name) if name in known else len(known), name))


def ineffective(names: Sequence[str], suspects: Sequence[str], records: Sequence[RequestRecord]) -> dict[str, str]:
    """Return the factors whose values did not take effect in an arm, with the reason. suspects: with the suspect's values."""
    reasons = {name: FACTORS[name].proof(name in suspects, records) for name in names if name in FACTORS}
    return {name: reason for name, reason in reasons.items() if reason}


def number(name: str, value: str, least: int) -> int:
    """Return a value as a number. Raises UsageError for what is not one, or is below `least`."""
    if not value.isdigit() or int(value) < least:
        raise UsageError(f"{name}={value}: expected a number from {least} on", f"--suspect {name}=2")
    return int(value)


def request_settings(values: Mapping[str, str]) -> RequestSettings:
    """Return the settings of the requests for the values of an arm. Raises UsageError for a value that is not one."""
    try:
        fields = json.loads(values.get("sampling", "{}"))
    except ValueError:
        fields = None
    if not isinstance(fields, dict) or not isinstance(fields.get("temperature", 0), (int, float)):
        raise UsageError(
            f"sampling={values['sampling']}: expected fields of a request as a JSON object",
            """--suspect 'sampling={"temperature": 0.7}'""",
        )
    return RequestSettings(
        number("batch", values.get("batch", "1"), 1), "off" if values.get("prefix") == OFF else "warm", fields
    )


# ---- how vLLM and SGLang are told


@dataclass(frozen=True)
class Flags:
    """options: those of the factor, with their number of words; they are taken out of a recipe's command. words: of a value."""

    options: Mapping[str, int]
    words: Callable[[str], list[str]]


def _valued(option: str, default: str = "") -> Flags:
    return Flags({option: 2}, lambda value: [] if value == default else [option, value])


def _switched(off: str, on: str = "") -> Flags:
    options = {option: 1 for option in (off, on) if option}
    return Flags(options, lambda value: [off] if value == OFF else [on] if on else [])


def _vllm_draft(value: str) -> list[str]:
    settings = {"method": "mtp", "num_speculative_tokens": number("mtp", value, 0)}
    return ["--speculative-config", json.dumps(settings)] if value != "0" else []


def _sglang_draft(value: str) -> list[str]:
    steps = ["--speculative-num-steps", value, "--speculative-num-draft-tokens", str(number("mtp", value, 0) + 1)]
    return ["--speculative-algorithm", "NEXTN", *steps, "--speculative-eagle-topk", "1"] if value != "0" else []


def _marlin(value: str) -> list[str]:
    return ["--linear-backend", "marlin"] if value == "w4a16" else []


SETTINGS: dict[str, dict[str, Flags]] = {
    "vllm": {
        "activations": Flags({"--linear-backend": 2}, _marlin),
        # As text: a container does not see the file.
        "template": Flags({"--chat-template": 2}, lambda value: ["--chat-template", Path(value).read_text("utf-8")]),
        "parser": _valued("--tool-call-parser", "none"),
        "kv": _valued("--kv-cache-dtype", "auto"),
        "mtp": Flags({"--speculative-config": 2}, _vllm_draft),
        "prefix": _switched("--no-enable-prefix-caching", "--enable-prefix-caching"),
        "graphs": _switched("--enforce-eager"),
    },
    "sglang": {
        "template": _valued("--chat-template"),
        "parser": _valued("--tool-call-parser", "none"),
        "kv": _valued("--kv-cache-dtype", "auto"),
        "mtp": Flags(
            {"--speculative-algorithm": 2, "--speculative-num-steps": 2, "--speculative-num-draft-tokens": 2,
             "--speculative-eagle-topk": 2},
            _sglang_draft,
        ),
        "prefix": _switched("--disable-radix-cache"),
        "graphs": _switched("--disable-cuda-graph"),
    },
}  # fmt: skip
# Without these a server does not report cached tokens, which prove that its prefix cache was used.
REPORTS_HITS = {"vllm": "--enable-prompt-tokens-details", "sglang": "--enable-cache-report"}


def changed_command(runtime: str, words: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Return a recipe's command with the values of an arm; a factor that is as served keeps the recipe's words."""
    result = list(words)
    for name, flags in SETTINGS[runtime].items():
        if (value := values.get(name, SERVED)) == SERVED:
            continue
        for option, count in flags.options.items():
            while option in result:
                at = result.index(option)
                del result[at : at + count]
        result += flags.words(value)
    return result


# ---- how the embedded llama.cpp is told: arguments of LlamaCpp.start

LLAMA_CPP: dict[str, Callable[[str], tuple[str, object]]] = {
    "template": lambda value: ("template", Path(value)),
    "parser": lambda value: ("parse_calls", value != "none"),
    "kv": lambda value: ("kv_type", "f16" if value == "auto" else value),
    "mtp": lambda value: ("drafts", number("mtp", value, 0)),
    "batch": lambda value: ("parallel", number("batch", value, 1)),
}
