"""The servers of `annie-quant attribute`'s arms: started by a runtime or by a user's command, or running already.

Each target has `varied`, the factors that it can vary, with their two values; `fixed`, those that cannot be changed here, with the
reason; `constant`, stated values that are the same in all arms, and what else its servers depend on; and `serve`, a context with
the URL of a server that has an arm's values. Only a server that was started here is stopped.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from annie_quant.core.errors import UsageError, need
from annie_quant.core.files import sha256_text, write_text
from annie_quant.core.progress import Progress
from annie_quant.ops import attribution_factors as factors
from annie_quant.ops import server as process
from annie_quant.ops import serving
from annie_quant.ops.serving import RecipeRuntime, template_of

Choices = factors.Choices
Sides = tuple[Choices, Choices]  # of the trusted side and of the suspect
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
        self, runtime: str, models: tuple[Path, Path | None], choices: Sides, folder: Path, recipe: str | None = None
    ) -> None:
        (checkpoint, reference), (trusted, suspect) = models, choices
        self.runtime, self.recipe, self.checkpoint = serving.find_runtime(runtime), recipe, checkpoint
        known = {"weights", "prefix", "batch", "sampling", *factors.SETTINGS.get(self.runtime.name, factors.LLAMA_CPP)}
        reason = f"{runtime} has no option for it here"
        self.fixed = factors.fixed_factors(known, [*trusted, *suspect], f"for {runtime}", reason)
        defaults = {"weights": str(checkpoint)}
        if reference is None:
            self.fixed["weights"] = "there is no --reference to compare with"
        trusted = {"weights": str(reference or checkpoint), **trusted}
        if isinstance(self.runtime, RecipeRuntime):
            words = self.runtime.arguments(checkpoint, 0, recipe)
            defaults |= {"batch": BATCH, **factors.as_served(runtime, words)}
        else:
            defaults["prefix"] = factors.ON
        if reference is not None and "template" not in {**trusted, **suspect}:
            good, bad = _templates(reference, checkpoint, folder)
            trusted, suspect = {**trusted, **good}, {**suspect, **bad}
        self.varied, self.constant = factors.vary(trusted, suspect, defaults, runtime=runtime, recipe=recipe or "")

    @contextmanager
    def serve(self, values: Choices, log: Path, progress: Progress) -> Iterator[str]:
        model = Path(values.get("weights", self.checkpoint))
        if isinstance(self.runtime, RecipeRuntime):
            # bf16 weights have no 4-bit activations, and no kernel for them.
            arm = {k: v for k, v in values.items() if k != "activations" or model == self.checkpoint}
            change = partial(factors.changed_command, self.runtime.name, values=arm)
            options: dict[str, object] = {"recipe": self.recipe, "change": change, "port": process.free_port()}
        else:
            options = factors.llama_cpp_options(values)
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
        known, reason = names | factors.IN_REQUESTS, "--server-cmd has no placeholder for it"
        self.fixed = factors.fixed_factors(known, [*trusted, *suspect], "by --server-cmd", reason)
        if missing := sorted(names - {"port", *trusted, *suspect}):
            stated = f"--trusted {missing[0]}=VALUE --suspect {missing[0]}=VALUE"
            raise UsageError(f"--server-cmd has {{{missing[0]}}}, which has no values", f"add {stated}")
        self.timeout_s = timeout_s
        trusted = {name: "" for name in suspect if name in names} | dict(trusted)
        self.varied, self.constant = factors.vary(trusted, suspect, {}, command=sha256_text(line))

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
        where, reason = "at servers that run already", "part of what differs between the servers"
        self.fixed = factors.fixed_factors(factors.IN_REQUESTS, [*trusted, *suspect], where, reason)
        defaults = {"server": suspect_url, "prefix": factors.ON}
        self.varied, self.constant = factors.vary({"server": trusted_url, **trusted}, suspect, defaults)
        self.trusted_url = trusted_url

    @contextmanager
    def serve(self, values: Choices, log: Path, progress: Progress) -> Iterator[str]:
        yield values.get("server", self.trusted_url)


Target = RuntimeTarget | CommandTarget | UrlTarget
