"""What `annie-quant attribute` varies, and the servers of its arms.

One entry per factor, and how each runtime is told its value. Adding a factor: one entry of FACTORS, and of SETTINGS for each
runtime whose servers have an option for it. `server` and names that are in nobody's table (a placeholder of a user's own
command) are factors without a proof.

Servers are started for each arm by a runtime or by a user's command, or run already. A target has the factors that it can vary with
their two values, and `serve`, a context with the URL of a server that has an arm's values. Only a server that was started here is
stopped.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from annie_quant.core.errors import UsageError, need
from annie_quant.core.files import sha256_text, write_text
from annie_quant.core.progress import Progress
from annie_quant.core.untrusted import JsonObject
from annie_quant.documents import RequestRecord
from annie_quant.ops import server as process
from annie_quant.ops import serving
from annie_quant.ops.serving import RecipeRuntime, template_of

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
    counts = [r.tokens.cached_tokens for r in records if r.tokens.cached_tokens is not None]
    if not suspect:
        return f"{sum(counts)} prompt tokens came from the prefix cache, which should be off" if sum(counts) else ""
    if not counts:
        return "the server reports no cached tokens, so nothing proves that its prefix cache was used"
    return "" if sum(counts) else "no prompt token came from the prefix cache"


def _drafts(suspect: bool, records: Sequence[RequestRecord]) -> str:
    counts = [r.tokens.drafted_tokens for r in records if r.tokens.drafted_tokens is not None]
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


# ---- servers

Choices = Mapping[str, str]  # factor → value that the user stated
Sides = tuple[Choices, Choices]  # of the trusted side and of the suspect
BATCH = "8"  # requests in flight of the suspect, where a server takes several
IN_REQUESTS = {name for name, factor in FACTORS.items() if factor.in_requests}
_PLACEHOLDER = re.compile(r"\{([a-z_]\w*)\}")


class Target(Protocol):
    """Servers with an arm's values.

    fixed: factors that cannot be changed here, with the reason.
    constant: stated values that are the same in all arms, and what else its servers depend on.
    """

    varied: list[Varied]
    fixed: dict[str, str]
    constant: dict[str, str]

    def serve(self, values: Choices, log: Path, progress: Progress) -> AbstractContextManager[str]: ...


def check_names(names: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise UsageError for a factor that cannot be set."""
    if unknown := sorted({*names} - {*known}):
        raise UsageError(f"{unknown[0]} cannot be set {where}", f"choose one of: {', '.join(ordered([*known]))}")


def vary(trusted: Choices, suspect: Choices, defaults: Choices, **constant: str) -> tuple[list[Varied], dict[str, str]]:
    """Return the factors with two different values, and the values of the others together with `constant`.

    Values are those that were stated, else `defaults` for the suspect and those of FACTORS for the trusted side. Raises UsageError
    where only one value is known, and where no factor has two.
    """
    varied = []
    for name in ordered([*{**defaults, **trusted, **suspect}]):
        good = trusted.get(name, FACTORS[name].trusted if name in FACTORS else "")
        bad = suspect.get(name, defaults.get(name, good))
        if not good and name not in trusted:
            raise UsageError(f"{name} has one value only, {bad!r}", f"add --trusted {name}=VALUE")
        if good == bad:
            constant[name] = good
        else:
            varied.append(Varied(name, good, bad))
    if not varied:
        raise UsageError("no factor has two values, so there is nothing to compare", "add --suspect NAME=VALUE")
    return varied, constant


class RuntimeTarget:
    """Servers of one runtime. A factor that a recipe states is as the recipe has it in the suspect's arms.

    models: the checkpoint and its reference. choices: stated values of the trusted side and of the suspect. folder: for templates.
    """

    def __init__(
        self, runtime: str, models: tuple[Path, Path | None], choices: Sides, folder: Path, recipe: str | None = None
    ) -> None:
        (checkpoint, reference), (trusted, suspect) = models, choices
        self.runtime, self.recipe, self.checkpoint = serving.find_runtime(runtime), recipe, checkpoint
        known = {"weights", "prefix", "batch", "sampling", *SETTINGS.get(self.runtime.name, LLAMA_CPP)}
        check_names([*trusted, *suspect], known, f"for {runtime}")
        self.fixed = {name: f"{runtime} has no option for it here" for name in FACTORS if name not in known}
        defaults = {"weights": str(checkpoint)}
        if reference is None:
            self.fixed["weights"] = "there is no --reference to compare with"
        trusted = {"weights": str(reference or checkpoint), **trusted}
        if isinstance(self.runtime, RecipeRuntime):
            words = self.runtime.arguments(checkpoint, 0, recipe)
            defaults |= {"batch": BATCH, **{n: SERVED for n in SETTINGS[runtime] if self.differs(words, n)}}
        else:
            defaults["prefix"] = ON
        if reference is not None and "template" not in {**trusted, **suspect}:
            good, bad = _templates(reference, checkpoint, folder)
            trusted, suspect = {**trusted, **good}, {**suspect, **bad}
        self.varied, self.constant = vary(trusted, suspect, defaults, runtime=runtime, recipe=recipe or "")

    def differs(self, words: Sequence[str], name: str) -> bool:
        """Return whether the trusted value of a factor is another command than the recipe's."""
        trusted = FACTORS[name].trusted
        return bool(trusted) and sorted(changed_command(self.runtime.name, words, {name: trusted})) != sorted(words)

    @contextmanager
    def serve(self, values: Choices, log: Path, progress: Progress) -> Iterator[str]:
        model = Path(values.get("weights", self.checkpoint))
        options: dict[str, object] = {}
        if isinstance(self.runtime, RecipeRuntime):
            # bf16 weights have no 4-bit activations, and no kernel for them.
            arm = {k: v for k, v in values.items() if k != "activations" or model == self.checkpoint}
            name, port = self.runtime.name, process.free_port()
            change = lambda words: [*changed_command(name, words, arm), REPORTS_HITS[name]]  # noqa: E731
            options = {"recipe": self.recipe, "change": change, "port": port}
        else:
            options = dict(LLAMA_CPP[n](value) for n, value in values.items() if n in LLAMA_CPP and value != SERVED)
        with self.runtime.start(model, log=log, progress=progress, **options) as server:
            yield server.url


def _templates(reference: Path, checkpoint: Path, folder: Path) -> Sides:
    """Return the factor `template` of both sides where their models' templates differ: else it would be the weights' fault."""
    good, bad = template_text(reference), template_text(checkpoint)
    if not good or not bad or good == bad:
        return {}, {}
    paths = [folder / "templates" / f"{side}.jinja" for side in ("trusted", "suspect")]
    for path, text in zip(paths, (good, bad), strict=True):
        write_text(path, text)
    return {"template": str(paths[0])}, {"template": str(paths[1])}


def template_text(model: Path) -> str:
    """Return the chat template of a model folder or a GGUF file; "" without one."""
    if model.is_dir():
        return template_of(model)
    from annie_quant.checkpoint.gguf.reader import check_header

    check_header(model)
    field = need("gguf", "serve").GGUFReader(model).get_field("tokenizer.chat_template")
    return str(field.contents()) if field else ""


class CommandTarget:
    """Servers that a command starts, with {port} and the names of factors in it replaced by an arm's values.

    A placeholder that is a whole word is replaced by the words of the value, none for an empty one.
    """

    def __init__(self, line: str, trusted: Choices, suspect: Choices, timeout_s: float = 900.0) -> None:
        try:
            self.words = shlex.split(line)
        except ValueError as error:
            raise UsageError(f"--server-cmd cannot be split into words: {error}", "quote it for a shell") from None
        names = {*_PLACEHOLDER.findall(line)}
        if "port" not in names:
            raise UsageError("--server-cmd has no {port}", "add it, for example: --port {port}")
        check_names([*trusted, *suspect], names | IN_REQUESTS, "by --server-cmd: it has no placeholder for it")
        if missing := sorted(names - {"port", *trusted, *suspect}):
            stated = f"--trusted {missing[0]}=VALUE --suspect {missing[0]}=VALUE"
            raise UsageError(f"--server-cmd has {{{missing[0]}}}, which has no values", f"add {stated}")
        self.timeout_s = timeout_s
        self.fixed = {n: "--server-cmd has no placeholder for it" for n in FACTORS if n not in names | IN_REQUESTS}
        trusted = {name: "" for name in suspect if name in names} | dict(trusted)
        self.varied, self.constant = vary(trusted, suspect, {}, command=sha256_text(line))

    @contextmanager
    def serve(self, values: Choices, log: Path, progress: Progress) -> Iterator[str]:
        port = process.free_port()
        fill = {**values, "port": str(port)}
        words: list[str] = []
        for word in self.words:
            filled = _PLACEHOLDER.sub(lambda match: fill.get(match[1], match[0]), word)
            words += shlex.split(filled) if _PLACEHOLDER.fullmatch(word) else [filled]
        with process.start_at(port, words, log, "server", None, self.timeout_s, progress) as server:
            yield server.url


class UrlTarget:
    """Two servers that run already: what differs between them is one factor, and requests set the others."""

    def __init__(self, trusted_url: str, suspect_url: str, trusted: Choices, suspect: Choices) -> None:
        check_names([*trusted, *suspect], IN_REQUESTS, "at servers that run already")
        self.fixed = {name: "part of what differs between the servers" for name in FACTORS if name not in IN_REQUESTS}
        defaults = {"server": suspect_url, "prefix": ON}
        self.varied, self.constant = vary({"server": trusted_url, **trusted}, suspect, defaults)
        self.trusted_url = trusted_url

    @contextmanager
    def serve(self, values: Choices, log: Path, progress: Progress) -> Iterator[str]:
        yield values.get("server", self.trusted_url)
