"""What `annie-quant attribute` varies, the factors, and the servers of its arms: started here, or running already.

Adding a factor: one entry of FACTORS, and of SETTINGS for each runtime whose servers have an option for it. `server` and names that
are in nobody's table (a placeholder of a user's own command) are factors without a proof.

Each target has `varied`, the factors that it can vary, with their two values; `fixed`, those that cannot be changed here, with the
reason; `constant`, stated values that are the same in all arms, and what else its servers depend on; and `serve`, a context with
the URL of a server that has an arm's values. Only a server that was started here is stopped.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from annie_quant.core.errors import UsageError
from annie_quant.core.files import sha256_text, write_text
from annie_quant.core.progress import Progress
from annie_quant.core.untrusted import JsonObject
from annie_quant.documents import RequestRecord
from annie_quant.ops import server as process
from annie_quant.ops import serving
from annie_quant.ops.serving import RecipeRuntime, template_of

SERVED = "as served"  # the value that a recipe has, or leaves to the server
OFF = "off"
ON = "on"


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


def _reported(
    what: str, count: Callable[[RequestRecord], float | None]
) -> Callable[[bool, Sequence[RequestRecord]], str]:
    """Return the proof of a factor that the server counts for each answer."""

    def proof(suspect: bool, records: Sequence[RequestRecord]) -> str:
        total = sum(count(record) or 0 for record in records)
        if suspect:
            return (
                "" if total else f"the server reports no {what}, so nothing proves that it was used"
            )
        return f"the server reports {total:.0f} {what}, and there should be none" if total else ""

    return proof


_HITS = _reported("prompt tokens from the prefix cache", lambda record: record.tokens.cached_tokens)

# In the order of their names in an arm. Halves of the list are the first arms.
FACTORS: dict[str, ServedFactor] = {
    factor.name: factor
    for factor in (
        ServedFactor("weights", "weights"),
        ServedFactor("activations", "activations", "w4a16"),
        ServedFactor("template", "chat template"),
        ServedFactor("parser", "tool parser"),
        ServedFactor("kv", "KV cache type", "auto"),
        ServedFactor(
            "mtp",
            "MTP",
            "0",
            proof=_reported("drafted tokens", lambda record: record.tokens.drafted_tokens),
        ),
        ServedFactor("prefix", "prefix cache", OFF, in_requests=True, proof=_HITS),
        ServedFactor("graphs", "CUDA graphs", OFF),
        ServedFactor("batch", "batching", "1", in_requests=True),
        ServedFactor("sampling", "sampling", '{"temperature": 0}', in_requests=True),
    )
}


def title(name: str) -> str:
    return FACTORS[name].title if name in FACTORS else name


def ineffective(
    names: Sequence[str], suspects: Sequence[str], records: Sequence[RequestRecord]
) -> dict[str, str]:
    """Return the factors whose values did not take effect in an arm, with the reason. suspects: with the suspect's values."""
    reasons = {
        name: FACTORS[name].proof(name in suspects, records) for name in names if name in FACTORS
    }
    return {name: reason for name, reason in reasons.items() if reason}


def number(name: str, value: str, least: int) -> int:
    """Return a value as a number. Raises UsageError for what is not one, or is below `least`."""
    if not value.isdigit() or int(value) < least:
        raise UsageError(
            f"{name}={value}: expected a number from {least} on", f"--suspect {name}=2"
        )
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
        number("batch", values.get("batch", "1"), 1),
        "off" if values.get("prefix") == OFF else "warm",
        fields,
    )


# ---- how vLLM and SGLang are told


@dataclass(frozen=True)
class Flags:
    """options: those of the factor, which are taken out of a recipe's command with their values. words: of a value."""

    options: tuple[str, ...]
    words: Callable[[str], list[str]]


def _valued(option: str, default: str = "") -> Flags:
    return Flags((option,), lambda value: [] if value == default else [option, value])


def _switched(off: str, on: str = "") -> Flags:
    def words(value: str) -> list[str]:
        if value == OFF:
            return [off]
        return [on] if on else []

    return Flags((off, on) if on else (off,), words)


def _vllm_parser(value: str) -> list[str]:
    # vLLM does not start with the first option alone.
    return ["--enable-auto-tool-choice", "--tool-call-parser", value] if value != "none" else []


def _vllm_draft(value: str) -> list[str]:
    settings = {"method": "mtp", "num_speculative_tokens": number("mtp", value, 0)}
    return ["--speculative-config", json.dumps(settings)] if value != "0" else []


def _sglang_draft(value: str) -> list[str]:
    steps = [
        "--speculative-num-steps",
        value,
        "--speculative-num-draft-tokens",
        str(number("mtp", value, 0) + 1),
    ]
    return (
        ["--speculative-algorithm", "NEXTN", *steps, "--speculative-eagle-topk", "1"]
        if value != "0"
        else []
    )


SETTINGS: dict[str, dict[str, Flags]] = {
    "vllm": {
        "activations": Flags(
            ("--linear-backend",), lambda value: ["--linear-backend", "marlin"] * (value == "w4a16")
        ),
        # As text: a container does not see the file.
        "template": Flags(
            ("--chat-template",), lambda value: ["--chat-template", Path(value).read_text("utf-8")]
        ),
        "parser": Flags(("--enable-auto-tool-choice", "--tool-call-parser"), _vllm_parser),
        "kv": _valued("--kv-cache-dtype", "auto"),
        "mtp": Flags(("--speculative-config",), _vllm_draft),
        "prefix": _switched("--no-enable-prefix-caching", "--enable-prefix-caching"),
        "graphs": _switched("--enforce-eager"),
    },
    "sglang": {
        "template": _valued("--chat-template"),
        "parser": _valued("--tool-call-parser", "none"),
        "kv": _valued("--kv-cache-dtype", "auto"),
        "mtp": Flags(
            (
                "--speculative-algorithm",
                "--speculative-num-steps",
                "--speculative-num-draft-tokens",
                "--speculative-eagle-topk",
            ),
            _sglang_draft,
        ),
        "prefix": _switched("--disable-radix-cache"),
        "graphs": _switched("--disable-cuda-graph"),
    },
}
# Without these a server does not report cached tokens, which prove that its prefix cache was used.
REPORTS_HITS = {"vllm": "--enable-prompt-tokens-details", "sglang": "--enable-cache-report"}


def changed_command(runtime: str, words: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Return a recipe's command with the values of an arm; a factor that is as served keeps the recipe's words."""
    result = [*words, REPORTS_HITS[runtime]]
    for name, flags in SETTINGS[runtime].items():
        value = values.get(name, SERVED)
        if value == SERVED:
            continue
        kept = []
        option = ""
        for word in result:
            option = word if word.startswith("--") else option
            if option not in flags.options:
                kept.append(word)
        result = [*kept, *flags.words(value)]
    return result


def as_served(runtime: str, words: Sequence[str]) -> dict[str, str]:
    """Return {factor: SERVED} for those whose trusted value is another command than the recipe's."""
    trusted = {name: FACTORS[name].trusted for name in SETTINGS[runtime] if FACTORS[name].trusted}
    served = sorted(changed_command(runtime, words, {}))
    return {
        n: SERVED
        for n, value in trusted.items()
        if sorted(changed_command(runtime, words, {n: value})) != served
    }


# ---- how the embedded llama.cpp is told: arguments of LlamaCpp.start

_LLAMA_CPP: dict[str, Callable[[str], tuple[str, object]]] = {
    "template": lambda value: ("template", Path(value)),
    "parser": lambda value: ("parse_calls", value != "none"),
    "kv": lambda value: ("kv_type", "f16" if value == "auto" else value),
    "mtp": lambda value: ("drafts", number("mtp", value, 0)),
    "batch": lambda value: ("parallel", number("batch", value, 1)),
}


def llama_cpp_options(values: Mapping[str, str]) -> dict[str, object]:
    return dict(_LLAMA_CPP[name](value) for name, value in values.items() if name in _LLAMA_CPP)


# ---- the values of a user

Choices = Mapping[str, str]  # factor → value that the user stated
IN_REQUESTS = {name for name, factor in FACTORS.items() if factor.in_requests}


def fixed_factors(
    known: set[str], stated: Iterable[str], where: str, reason: str
) -> dict[str, str]:
    """Return the factors that are not in `known`, with the reason. Raises UsageError where the user stated another one."""
    unknown = sorted({*stated} - known)
    if unknown:
        raise UsageError(
            f"{unknown[0]} cannot be set {where}", f"choose one of: {', '.join(sorted(known))}"
        )
    return {name: reason for name in FACTORS if name not in known}


def vary(
    trusted: Choices, suspect: Choices, defaults: Choices, **constant: str
) -> tuple[list[Varied], dict[str, str]]:
    """Return the factors with two different values, and the values of the others together with `constant`.

    Values are those that were stated, else `defaults` for the suspect and those of FACTORS for the trusted side. Raises UsageError
    where only one value is known, and where no factor has two.
    """
    varied = []
    stated = {**defaults, **trusted, **suspect}
    for name in [name for name in dict.fromkeys([*FACTORS, *stated]) if name in stated]:
        good = trusted.get(name, FACTORS[name].trusted if name in FACTORS else "")
        bad = suspect.get(name, defaults.get(name, good))
        if not good and name not in trusted:
            raise UsageError(f"{name} has one value only, {bad!r}", f"add --trusted {name}=VALUE")
        if good == bad:
            constant[name] = good
        else:
            varied.append(Varied(name, good, bad))
    if not varied:
        raise UsageError(
            "no factor has two values, so there is nothing to compare", "add --suspect NAME=VALUE"
        )
    return varied, constant


# ---- servers

_Sides = tuple[Choices, Choices]  # of the trusted side and of the suspect
BATCH = "8"  # requests in flight of the suspect, where a server takes several
_PLACEHOLDER = re.compile(r"\{([a-z_]\w*)\}")


class RuntimeTarget:
    """Servers of one runtime. A factor that a recipe states is as the recipe has it in the suspect's arms.

    runtime: its name.
    models: the checkpoint and its reference, if there is one.
    choices: stated values of the trusted side and of the suspect.
    folder: for chat templates.
    recipe: its name; None: the newest dated one.
    """

    def __init__(
        self,
        runtime: str,
        models: tuple[Path, Path | None],
        choices: _Sides,
        folder: Path,
        recipe: str | None = None,
    ) -> None:
        checkpoint, reference = models
        trusted, suspect = choices
        self.runtime = serving.find_runtime(runtime)
        self.recipe = recipe
        self.checkpoint = checkpoint
        known = {
            "weights",
            "prefix",
            "batch",
            "sampling",
            *SETTINGS.get(self.runtime.name, _LLAMA_CPP),
        }
        reason = f"{runtime} has no option for it here"
        self.fixed = fixed_factors(known, [*trusted, *suspect], f"for {runtime}", reason)
        defaults = {"weights": str(checkpoint)}
        if reference is None:
            self.fixed["weights"] = "there is no --reference to compare with"
        trusted = {"weights": str(reference or checkpoint), **trusted}
        if isinstance(self.runtime, RecipeRuntime):
            words = self.runtime.arguments(checkpoint, 0, recipe)
            defaults |= {"batch": BATCH, **as_served(runtime, words)}
        else:
            defaults["prefix"] = ON
        if reference is not None and "template" not in {**trusted, **suspect}:
            good, bad = _templates(reference, checkpoint, folder)
            trusted, suspect = {**trusted, **good}, {**suspect, **bad}
        self.varied, self.constant = vary(
            trusted, suspect, defaults, runtime=runtime, recipe=recipe or ""
        )

    @contextmanager
    def serve(self, values: Choices, log: Path, progress: Progress) -> Iterator[str]:
        model = Path(values.get("weights", self.checkpoint))
        if isinstance(self.runtime, RecipeRuntime):
            # bf16 weights have no 4-bit activations, and no kernel for them.
            arm = {
                k: v for k, v in values.items() if k != "activations" or model == self.checkpoint
            }
            change = partial(changed_command, self.runtime.name, values=arm)
            options: dict[str, object] = {
                "recipe": self.recipe,
                "change": change,
                "port": process.free_port(),
            }
        else:
            options = llama_cpp_options(values)
        with self.runtime.start(model, log=log, progress=progress, **options) as server:
            yield server.url


def _templates(reference: Path, checkpoint: Path, folder: Path) -> _Sides:
    """Return the factor `template` of both sides where their models' templates differ: else it would be the weights' fault."""
    good = template_text(reference)
    bad = template_text(checkpoint)
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
    from annie_quant.checkpoint.gguf.reader import gguf_value, open_reader

    return str(gguf_value(open_reader(model), "tokenizer.chat_template", ""))


class CommandTarget:
    """Servers that a command starts, with {port} and the names of factors in it replaced by an arm's values.

    A placeholder that is a whole word is replaced by the words of the value, none for an empty one.
    """

    def __init__(
        self, line: str, trusted: Choices, suspect: Choices, timeout_s: float = 900.0
    ) -> None:
        try:
            self.words = shlex.split(line)
        except ValueError as error:
            raise UsageError(
                f"--server-cmd cannot be split into words: {error}", "quote it for a shell"
            ) from None
        names = {*_PLACEHOLDER.findall(line)}
        if "port" not in names:
            raise UsageError("--server-cmd has no {port}", "add it, for example: --port {port}")
        known = names | IN_REQUESTS
        reason = "--server-cmd has no placeholder for it"
        self.fixed = fixed_factors(known, [*trusted, *suspect], "by --server-cmd", reason)
        missing = sorted(names - {"port", *trusted, *suspect})
        if missing:
            stated = f"--trusted {missing[0]}=VALUE --suspect {missing[0]}=VALUE"
            raise UsageError(
                f"--server-cmd has {{{missing[0]}}}, which has no values", f"add {stated}"
            )
        self.timeout_s = timeout_s
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

    def __init__(
        self, trusted_url: str, suspect_url: str, trusted: Choices, suspect: Choices
    ) -> None:
        where = "at servers that run already"
        reason = "part of what differs between the servers"
        self.fixed = fixed_factors(IN_REQUESTS, [*trusted, *suspect], where, reason)
        defaults = {"server": suspect_url, "prefix": ON}
        self.varied, self.constant = vary({"server": trusted_url, **trusted}, suspect, defaults)
        self.trusted_url = trusted_url

    @contextmanager
    def serve(self, values: Choices, log: Path, progress: Progress) -> Iterator[str]:
        yield values.get("server", self.trusted_url)


Target = RuntimeTarget | CommandTarget | UrlTarget
