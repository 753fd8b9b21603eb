"""Serving runtimes: start a server and wait until it is ready, stop it, or print the command that starts it.

server = start("model.gguf", runtime="llama.cpp")     a process; server.url, server.pid, server.stop()
print(command(model, runtime="vllm"))                 the recipe as a shell command; nothing is started
check(model, runtime="vllm")                          an error if the runtime does not load the model
write_recipe(model, "annie.yaml", runtime="vllm")     the recipe as a file for sparkrun and spark-vllm-docker

Recipes are data in assets/recipes. One with an image runs in a container; one without runs the program that is installed on this
machine. Each recipe states when and by whom it was tested (R17).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from annie_quant import checkpoint
from annie_quant.checkpoint import ModelFolder, ShardError, dialects, loader_support
from annie_quant.core import host
from annie_quant.core.errors import CheckpointError, EnvironmentFault, UsageError
from annie_quant.core.files import ASSETS, read_json, write_text
from annie_quant.core.progress import SILENT, Progress
from annie_quant.documents import salvage_or_default
from annie_quant.models.server_parsers import PLACEHOLDER, notes_for, parsers_for
from annie_quant.ops import server as process
from annie_quant.ops.llama_cpp import LlamaCpp
from annie_quant.ops.server import Server

__all__ = ["Server", "check", "command", "start", "write_recipe"]

# ---- the parsers that a checkpoint's chat template needs


class TokenizerConfig(msgspec.Struct):
    """tokenizer_config.json; chat_template is a text or a list of named ones."""

    chat_template: object = msgspec.UNSET


def template_of(model: Path) -> str:
    """Return the source of a checkpoint's chat template, of all of them where they are several; "" without one."""
    try:
        return (model / "chat_template.jinja").read_text(encoding="utf-8", errors="replace")
    except OSError:
        named = salvage_or_default(TokenizerConfig, model / "tokenizer_config.json").chat_template
    templates = named if isinstance(named, list) else [{"template": named}]
    texts = [t.get("template") for t in templates if isinstance(t, Mapping)]
    return "\n".join(text for text in texts if isinstance(text, str))


def with_parsers(words: list[str], template: str, server: str) -> list[str]:
    """Return a recipe's command with a server's parsers for a chat template in place of PLACEHOLDER."""
    result = []
    for word in words:
        if word == PLACEHOLDER:
            result += parsers_for(server, template).flags(server)
        else:
            result.append(word)
    return result


def remove(words: list[str], option: str, count: int) -> None:
    """Take an option out of a command, if it is there. count: of its words, the value included."""
    if option in words:
        at = words.index(option)
        del words[at : at + count]


# ---- recipes

RECIPES = ASSETS / "recipes"


class ServingRecipe(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One way to serve a model. {model}, {name}, {port} and {parsers} in `command` are replaced.

    note     what it is for
    source   date and origin: who ran it, or which public notes it follows
    command  arguments of the container or of the program
    image    container image; None: the installed program
    docker   options of `docker run`
    env      environment variables
    nodes    machines that share the model
    """

    note: str
    source: str
    command: list[str]
    image: str | None = None
    docker: list[str] = []
    env: dict[str, str] = {}
    nodes: int = 1

    @property
    def tag_moves(self) -> bool:
        """Whether the image's name may refer to another image later: it has neither a digest nor a version as its tag."""
        image = self.image or ""
        return "@sha256:" not in image and not re.search(r":v?\d+\.\d+[^/]*$", image)


def load_recipes(runtime: str) -> dict[str, ServingRecipe]:
    """Return all recipes of a runtime by name."""
    return msgspec.json.decode(
        (RECIPES / f"{runtime}.json").read_bytes(), type=dict[str, ServingRecipe]
    )


def _choose(runtime: str, recipe: str | None = None) -> tuple[str, ServingRecipe]:
    """Return a recipe and its name; None: the newest dated one. Raises UsageError for an unknown name."""
    known = load_recipes(runtime)
    name = recipe or max(n for n in known if n.replace("-", "").isdigit())
    if name not in known:
        raise UsageError(
            f"{runtime} has no recipe {name!r}", f"choose one of: {', '.join(sorted(known))}"
        )
    return name, known[name]


@dataclass(frozen=True)
class RecipeRuntime:
    """A runtime that is started from recipes. `recipe` in its methods is a recipe's name; None: the newest dated one.

    name: value of --runtime; its recipes are in assets/recipes/NAME.json, and its rule in checkpoint/loader_support.py, if it
        has one, has this name in any case.
    title: its name in reports.
    program: the words that start the installed program, for recipes without an image.
    """

    name: str
    title: str
    program: tuple[str, ...] = ()

    def find(self, recipe: str | None) -> ServingRecipe:
        return _choose(self.name, recipe)[1]

    def check_folder(self, model: Path) -> None:
        if not (model / "config.json").is_file():
            raise UsageError(
                f"{model} is not a model folder", f"{self.name} serves a safetensors checkpoint"
            )

    def words_for(self, model: Path, recipe: ServingRecipe) -> list[str]:
        """Return a recipe's command for one model.

        It has the parsers for the model's chat template, and no --quantization where the model's settings are of another format.
        Recipes name ModelOpt's plain NVFP4. A folder that cannot be read keeps the option.
        """
        words = with_parsers(recipe.command, template_of(model), self.name)
        try:
            settings = dialects.config(ModelFolder(model))
        except ShardError:
            return words
        if not loader_support.fits_modelopt_option(settings.method, settings.algo):
            remove(words, "--quantization", 2)
        return words

    def arguments(self, model: Path, port: int, recipe: str | None = None) -> list[str]:
        """Return the whole command: `docker run …` in the foreground, or the program itself."""
        chosen, model = self.find(recipe), model.resolve()
        fill = {
            "{port}": str(port),
            "{name}": model.name,
            "{model}": "/model" if chosen.image else str(model),
        }
        words = [fill.get(word, word) for word in self.words_for(model, chosen)]
        if chosen.image is None:
            program = os.environ.get(f"ANNIE_QUANT_{self.name.upper()}") or self.program[0]
            return [program, *self.program[1:], *_model_first(words)]
        published = [] if "--network" in chosen.docker else ["-p", f"{port}:{port}"]
        mount = ["-v", f"{model}:/model:ro"]
        return ["docker", "run", "--rm", *chosen.docker, *published, *mount, chosen.image, *words]

    def command(self, model: Path, port: int = 8000, recipe: str | None = None) -> str:
        """Return the command as one line for a shell."""
        env = [f"{key}={value}" for key, value in self.find(recipe).env.items()]
        return shlex.join([*env, *self.arguments(model, port, recipe)])

    def check(self, model: Path, recipe: str | None = None) -> list[str]:
        """Audit a model folder, which reads every tensor, and return notes for the user.

        The notes are the recipe with its date and who ran it, and findings that the server tolerates. Raises CheckpointError where
        the server does not load the checkpoint (annie_quant.checkpoint.loader_support); a server without a rule there is a note.
        """
        name, chosen = _choose(self.name, recipe)
        quoted = shlex.quote(str(model))
        self.check_folder(model)
        audit = checkpoint.audit(model)
        support = next((s for s in audit.summary.servers if s.server.lower() == self.name), None)
        if not audit.summary.servers:  # its files cannot be read
            first = f": {audit.findings[0].message}" if audit.findings else ""
            raise CheckpointError(f"{model} cannot be served{first}", f"annie-quant audit {quoted}")
        if support and support.loads == "no":
            raise CheckpointError(
                f"{self.name} does not load {model}: {support.note}", f"annie-quant audit {quoted}"
            )
        folder = dialects.read(ModelFolder(model))
        version = self.version(chosen)
        problem = loader_support.too_old(folder, self.name, version) if version else ""
        if problem:
            raise CheckpointError(
                f"{model}: {problem}", "update the server, or quantize to other formats"
            )
        loading = loader_support.versions(folder)
        for versions in loading:
            if versions.since is None and versions.server.lower() == self.name:
                others = (
                    ", ".join(v.server for v in loading if v.since)
                    or "no server that is known here"
                )
                raise CheckpointError(
                    f"{versions} loads {model}", f"loaded by {others}; or quantize to other formats"
                )
        notes = [f"recipe {self.name} {name}: {chosen.note} (source: {chosen.source})"]
        if chosen.image and chosen.tag_moves:
            notes.append(
                f"the tag of {chosen.image} moves to newer images; the one that is here: "
                f"docker inspect --format '{{{{index .RepoDigests 0}}}}' {chosen.image}"
            )
        if support is None:
            notes.append(
                f"whether {self.title} loads it is not checked: this package has no rule for {self.title}"
            )
        elif support.note:
            notes.append(f"{self.name} loads it: {str(support).partition(': ')[2]}")
        notes += [f"versions that load it: {versions}" for versions in loading]
        notes += [f"parsers: {note}" for note in notes_for(self.name, template_of(model))]
        if audit.template is not None:
            notes += [str(fault) for fault in audit.template.faults]
        if audit.findings:
            notes.append(f"{len(audit.findings)} findings in {model}: annie-quant audit {quoted}")
        return notes

    def version(self, recipe: ServingRecipe) -> str | None:
        """Return the version that a recipe starts: of its image's tag, else of the installed package; None where it is not known.

        A program that ANNIE_QUANT_NAME points to may be another version than the installed package.
        """
        if recipe.image is not None:
            tag = re.fullmatch(r"v?(\d+\.\d+\.\d+)\b.*", recipe.image.rpartition(":")[2])
            return tag[1] if tag else None
        if os.environ.get(f"ANNIE_QUANT_{self.name.upper()}"):
            return None
        return host.package_version(self.name)

    def write(self, model: Path, path: Path, port: int = 8000, recipe: str | None = None) -> Path:
        """Write the recipe as YAML for sparkrun and spark-vllm-docker (recipe_version 1)."""
        chosen, model = self.find(recipe), model.resolve()
        if chosen.image is None:
            raise UsageError(
                "a recipe without a container cannot be written for sparkrun",
                "choose a dated recipe",
            )
        fill = {"{name}": model.name, "{model}": str(model)}
        command = self.words_for(model, chosen)
        words = [
            shlex.quote(fill.get(word, word)) if word != "{port}" else word for word in command
        ]
        words = [
            word.replace("{", "{{").replace("}", "}}") if word.startswith("'{") else word
            for word in words
        ]
        line = " ".join([*self.program, *_model_first(words)] if self.program else words)
        fields: dict[str, object] = {
            "recipe_version": "1",
            "name": f"{model.name}-{self.name}",
            "description": chosen.note,
            "model": str(model),
            "runtime": self.name,
            "container": chosen.image,
            ("cluster_only" if chosen.nodes > 1 else "solo_only"): True,
            "defaults": {"port": port, "host": "0.0.0.0", "tensor_parallel": chosen.nodes},  # noqa: S104 - in a container
            "command": line,
            "benchmark": read_json(RECIPES / "benchmark" / "sparkrun.json"),
        }
        text = f"# {chosen.note}\n# source: {chosen.source}\n"
        # JSON is valid YAML, so values are written as JSON: no YAML library, and correct quoting.
        write_text(
            path, text + "".join(f"{key}: {json.dumps(value)}\n" for key, value in fields.items())
        )
        return path

    def start(
        self,
        model: Path,
        port: int = 0,
        log: str | os.PathLike | None = None,
        timeout_s: float = 900.0,
        recipe: str | None = None,
        progress: Progress = SILENT,
        change: Callable[[list[str]], list[str]] = list,
        guard: process.Guard = process.NO_GUARD,
    ) -> Server:
        """Start the server and wait for /health. Raises EnvironmentFault if docker or the program is not installed.

        change: returns the command to run instead of the recipe's.
        guard: kills the server where the machine's memory runs out.
        """
        self.check_folder(model)
        chosen, port = self.find(recipe), port or 8000
        words = change(self.arguments(model, port, recipe))
        if shutil.which(words[0]) is None:
            missing = (
                f"{self.name} runs in a container, and docker"
                if chosen.image
                else f"the program {words[0]}"
            )
            raise EnvironmentFault(
                f"{missing} is not installed here",
                f"annie-quant serve {shlex.quote(str(model))} --runtime {self.name} --dry-run",
            )
        process.check_port(port)
        return process.start_at(
            port, words, log, self.name, {**os.environ, **chosen.env}, timeout_s, progress, guard
        )


def _model_first(words: list[str]) -> list[str]:
    """Move the value of --model to the front, as `vllm serve MODEL …` expects it."""
    index = words.index("--model")
    return [words[index + 1], *words[:index], *words[index + 2 :]]


# ---- runtimes


class Runtime(Protocol):
    """A program that serves models.

    start    (model, port, *, log, progress, **options of the runtime) -> the server, when it responds
    command  (model, port, **options of the runtime) -> one line for a shell
    """

    @property
    def name(self) -> str: ...

    @property
    def start(self) -> Callable[..., Server]: ...

    @property
    def command(self) -> Callable[..., str]: ...

    def check(self, model: Path, recipe: str | None = None) -> list[str]: ...

    def write(
        self, model: Path, path: Path, port: int = 8000, recipe: str | None = None
    ) -> Path: ...


# Another runtime is one row here, a file of recipes, and its parsers in assets/server_parsers.json.
RECIPE_RUNTIMES = (
    RecipeRuntime("vllm", "vLLM", ("vllm", "serve")),
    RecipeRuntime("sglang", "SGLang"),
)
RUNTIMES: dict[str, Runtime] = {r.name: r for r in (LlamaCpp(), *RECIPE_RUNTIMES)}


def start(
    model_path: str | os.PathLike,
    runtime: str = "llama.cpp",
    port: int = 0,
    log: str | os.PathLike | None = None,
    timeout_s: float | None = None,
    progress: Progress = SILENT,
    **options: object,
) -> Server:
    """Start a server and return it when it responds.

    port       0: a free one
    log        file for the server's own output; None: a temporary file
    timeout_s  None: the runtime's default (two minutes for llama.cpp, fifteen for a container)
    progress   gets a message per start phase

    Raises ServerError (port in use, ended while starting, not ready in time) with the log line that has the cause.
    """
    if timeout_s is not None:
        options["timeout_s"] = timeout_s
    return find_runtime(runtime).start(
        Path(model_path), port=port, log=log, progress=progress, **options
    )


def command(
    model_path: str | os.PathLike, runtime: str = "llama.cpp", port: int = 8000, **options: object
) -> str:
    """Return the shell command that serves this model."""
    return find_runtime(runtime).command(Path(model_path), port=port, **options)


def check(
    model_path: str | os.PathLike, runtime: str = "llama.cpp", recipe: str | None = None
) -> list[str]:
    """Check a model for one runtime; a model folder is audited, which reads every tensor. Returns notes for the user.

    recipe: its name; None: the newest. llama.cpp has none.

    Raises UsageError where the model is not what the runtime serves, CheckpointError where the runtime does not load it.
    """
    return find_runtime(runtime).check(Path(model_path), recipe)


def write_recipe(
    model_path: str | os.PathLike,
    path: str | os.PathLike,
    runtime: str = "vllm",
    port: int = 8000,
    recipe: str | None = None,
) -> Path:
    """Write the recipe as YAML. Raises UsageError for a runtime without such recipes (llama.cpp)."""
    return find_runtime(runtime).write(Path(model_path), Path(path), port, recipe)


def find_runtime(name: str) -> Runtime:
    """Return a runtime; "llama_cpp" is llama.cpp too. Raises UsageError for an unknown one, with the names there are."""
    runtime = RUNTIMES.get(name.replace("_", "."))
    if runtime is None:
        raise UsageError(
            f"there is no runtime called {name!r}", f"choose one of: {', '.join(sorted(RUNTIMES))}"
        )
    return runtime
