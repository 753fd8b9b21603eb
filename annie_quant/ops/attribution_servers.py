"""The servers of an attribution: started for each arm by a runtime or by a user's command, or running already.

A target has the factors that it can vary with their two values, and `serve`, a context with the URL of a server that has an arm's
values. Only a server that was started here is stopped.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from annie_quant.core.errors import UsageError, need
from annie_quant.core.files import sha256_text, write_text
from annie_quant.core.progress import Progress
from annie_quant.ops import server as process
from annie_quant.ops import serving
from annie_quant.ops.attribution_factors import (
    FACTORS,
    LLAMA_CPP,
    ON,
    REPORTS_HITS,
    SERVED,
    SETTINGS,
    Varied,
    changed_command,
    ordered,
)
from annie_quant.ops.recipes import HEALTH, RecipeRuntime, template_of

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
    texts = {"trusted": template_text(reference), "suspect": template_text(checkpoint)}
    if not all(texts.values()) or len({*texts.values()}) == 1:
        return {}, {}
    for side, text in texts.items():
        write_text(folder / "templates" / f"{side}.jinja", text)
    trusted, suspect = ({"template": str(folder / "templates" / f"{side}.jinja")} for side in texts)
    return trusted, suspect


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
            whole = _PLACEHOLDER.fullmatch(word)
            if whole and whole[1] in fill:
                words += shlex.split(fill[whole[1]])
            else:
                words.append(_PLACEHOLDER.sub(lambda match: fill.get(match[1], match[0]), word))
        server = process.spawn(words, log, "server", container_file=process.name_container(words))
        with server:
            process.wait_ready(server, lambda: f"http://127.0.0.1:{port}", HEALTH, self.timeout_s, progress)
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
