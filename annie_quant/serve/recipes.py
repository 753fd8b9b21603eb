"""Recipes: dated ways of serving, kept as data (assets/recipes); here they become a command, a file or a process.

A recipe with an image runs in a container, one without runs the program that is installed here ("bare"). Each says when
and where it was seen to work.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from annie_quant.errors import EnvironmentFault, UsageError
from annie_quant.files import ASSETS, read_json, write_text
from annie_quant.serve import server as process

RECIPES = ASSETS / "recipes"
PROGRAMS = {"vllm": ["vllm", "serve"], "sglang": []}
HEALTH = "/health"


class Runtime:
    """A runtime that is run by recipes. Its module offers `start`, `command` and `write` from here."""

    def __init__(self, name: str) -> None:
        self.name = name

    def recipe(self, name: str | None) -> dict[str, Any]:
        """A recipe by its name; by default the newest dated one."""
        known = read_json(RECIPES / f"{self.name}.json")
        chosen = name or max(n for n in known if n.replace("-", "").isdigit())
        if chosen not in known:
            raise UsageError(f"{self.name} has no recipe {chosen!r}", f"choose one of: {', '.join(sorted(known))}")
        return known[chosen]

    def arguments(self, model: Path, port: int, name: str | None = None) -> list[str]:
        """The whole command: `docker run …` in the foreground (ending it ends the container), or the program itself."""
        parts, model = self.recipe(name), model.resolve()
        contained = "image" in parts
        fill = {"{port}": str(port), "{name}": model.name, "{model}": "/model" if contained else str(model)}
        words = [fill.get(word, word) for word in parts["command"]]
        if not contained:
            return [*self._program(), *self._positional(words)]
        published = [] if "--network" in parts["docker"] else ["-p", f"{port}:{port}"]
        return [
            "docker",
            "run",
            "--rm",
            *parts["docker"],
            *published,
            "-v",
            f"{model}:/model:ro",
            parts["image"],
            *words,
        ]

    def _program(self) -> list[str]:
        """vLLM's program: beside this Python, on the PATH, or where ANNIE_QUANT_VLLM says."""
        program = os.environ.get(f"ANNIE_QUANT_{self.name.upper()}") or PROGRAMS[self.name][0]
        return [program, *PROGRAMS[self.name][1:]]

    @staticmethod
    def _positional(words: list[str]) -> list[str]:
        """`vllm serve MODEL …` takes the model as its first word."""
        place = words.index("--model")
        return [words[place + 1], *words[:place], *words[place + 2 :]]

    def command(self, model: Path, port: int = 8000, recipe: str | None = None) -> str:
        env = [f"{key}={value}" for key, value in self.recipe(recipe).get("env", {}).items()]
        return shlex.join([*env, *self.arguments(model, port, recipe)])

    def write(self, model: Path, path: Path, port: int = 8000, recipe: str | None = None) -> Path:
        """The recipe as a YAML file that sparkrun and spark-vllm-docker read (recipe_version 1)."""
        parts, model = self.recipe(recipe), model.resolve()
        if "image" not in parts:
            raise UsageError("a recipe without a container cannot be written for sparkrun", "choose a dated recipe")
        fill = {"{name}": model.name, "{model}": str(model)}
        words = [shlex.quote(fill.get(word, word)) if word != "{port}" else word for word in parts["command"]]
        words = [word.replace("{", "{{").replace("}", "}}") if word.startswith("'{") else word for word in words]
        start = "vllm serve" if self.name == "vllm" else ""
        line = " ".join([start, *(self._positional(words) if start else words)]).strip()
        nodes = parts.get("nodes", 1)
        fields: dict[str, Any] = {
            "recipe_version": "1",
            "name": f"{model.name}-{self.name}",
            "description": parts["note"],
            "model": str(model),
            "runtime": self.name,
            "container": parts["image"],
            ("cluster_only" if nodes > 1 else "solo_only"): True,
            "defaults": {"port": port, "host": "0.0.0.0", "tensor_parallel": nodes},  # noqa: S104 - inside a container
            "command": line,
        }
        text = f"# {parts['note']}\n# seen: {parts['seen']}\n"
        # JSON is YAML: every value is written so, which needs no YAML library and quotes what must be quoted.
        write_text(path, text + "".join(f"{key}: {json.dumps(value)}\n" for key, value in fields.items()))
        return path

    def start(
        self,
        model: Path,
        port: int = 0,
        log: str | os.PathLike | None = None,
        timeout_s: float = 900.0,
        recipe: str | None = None,
        say: Callable[[str], None] | None = None,
    ) -> process.Server:
        """Run it and wait for /health. Raises EnvironmentFault where docker or the program is missing."""
        if not (model / "config.json").is_file():
            raise UsageError(f"{model} is no model folder", f"{self.name} serves a safetensors checkpoint")
        parts, port = self.recipe(recipe), port or 8000
        words = self.arguments(model, port, recipe)
        if shutil.which(words[0]) is None:
            told = f"{self.name} is run from a container, and docker" if "image" in parts else f"the program {words[0]}"
            raise EnvironmentFault(
                f"{told} is not installed here",
                f"annie-quant serve {shlex.quote(str(model))} --runtime {self.name} --dry-run",
            )
        process.check_port(port)
        server = process.spawn(words, log, self.name, env={**os.environ, **parts.get("env", {})})
        process.wait_ready(server, lambda: f"http://127.0.0.1:{port}", HEALTH, timeout_s, say)
        return server
