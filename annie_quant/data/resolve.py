"""Which prompts a model is judged with: one resolver of --persona and --workloads for every command and function.

resolve()                                   Annie's workloads
resolve(persona="home")                     a built-in persona and its workloads
resolve(persona="mine/")                    a folder from `annie-quant init`: persona.json and workloads/
resolve(persona="mine.json")                the workloads/ next to the file; without one, prompts made from its tools
resolve(workloads="factual,mine/workloads") names, JSON files and folders, with the persona that each names, or none
resolve(persona, workloads)                 these workloads with this persona's system prompt and tools
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from annie_quant import judge
from annie_quant.errors import UsageError
from annie_quant.files import is_folder, sha256_text
from annie_quant.judge.library import FOLDER, build_workload
from annie_quant.judge.workloads import Workload
from annie_quant.persona import Persona, load_persona
from annie_quant.schema import WorkloadFile

PathLike = str | os.PathLike[str]
WORKLOADS = "workloads"  # the folder next to a persona's file
N_GENERATED = 120  # cases per kind of prompt made from a persona's tools


def resolve(
    persona: PathLike | Persona | None = None,
    workloads: PathLike | Iterable[PathLike | Workload] | None = None,
) -> list[Workload]:
    """Return the workloads that are meant. persona: a name, a JSON file or a folder. workloads: names (also bfcl), JSON
    files or folders, as a list or comma-separated; Workload objects are used as they are.

    Raises UsageError for a name or path that does not exist, and where two workloads have the same name.
    """
    who = None if persona is None else persona if isinstance(persona, Persona) else load_persona(str(persona))
    chosen = default_workloads(who) if workloads is None else [w for item in _items(workloads) for w in _load(item)]
    if who is not None and workloads is not None:
        chosen = [with_persona(w, who) for w in chosen]
    names = [w.name for w in chosen]
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"two workloads are called {duplicates[0]!r}", "give each its own name")
    return chosen


def default_workloads(persona: Persona | None) -> list[Workload]:
    """Return a persona's own workloads: stored ones, else ones made from its tools. None: Annie's."""
    return stored_workloads(persona) or generated_workloads(persona) if persona else judge.load_workloads()


def stored_workloads(persona: Persona) -> list[Workload]:
    """Return the workloads that are stored for a persona; [] where there are none."""
    if persona.is_built_in:
        folder = FOLDER if persona.source == "annie" else FOLDER / persona.source
    elif persona.folder is not None:
        folder = persona.folder / WORKLOADS
    else:
        return []
    return [with_persona(w, persona) for w in judge.load_workloads(folder=folder)] if folder.is_dir() else []


def generated_workloads(persona: Persona, n: int = N_GENERATED, seed: int = 0) -> list[Workload]:
    """Return workloads made from a persona's tools by the offline teacher's gate templates, the same for the same seed."""
    from annie_quant.data.generated import documents

    return [with_persona(_built(document), persona) for document in documents(persona, n, seed)]


def _built(document: WorkloadFile) -> Workload:
    content = msgspec.to_builtins(document)
    return replace(build_workload(content), sha256=sha256_text(json.dumps(content, sort_keys=True)))


def with_persona(workload: Workload, persona: Persona) -> Workload:
    """Return the workload with the persona's system prompt, unless it has its own, and with its tools where it has none."""
    if workload.system is not None or not persona.source:
        return workload
    return replace(workload, persona=persona.source)


def personas_of(workloads: Sequence[Workload]) -> list[str]:
    """Return the names or files of the personas whose system prompts are used."""
    return sorted({w.persona for w in workloads if w.persona and w.system is None})


def _items(workloads: PathLike | Iterable[PathLike | Workload]) -> list[PathLike | Workload]:
    if isinstance(workloads, str) and workloads.startswith("bfcl:"):
        return [workloads]  # its categories have commas
    if isinstance(workloads, str):
        return [part.strip() for part in workloads.split(",") if part.strip()]
    return [workloads] if isinstance(workloads, os.PathLike) else list(workloads)


def _load(item: PathLike | Workload) -> list[Workload]:
    if isinstance(item, Workload):
        return [item]
    path = Path(item)
    if not is_folder(path):
        return judge.load_workloads([str(item)])
    inner = path / WORKLOADS
    folder = inner if inner.is_dir() else path
    result = judge.load_workloads(folder=folder)
    if not result:
        raise UsageError(f"{path} has no workloads (*.json)", "annie-quant init makes them")
    own = inner.is_dir() and (path / "persona.json").is_file()
    return [with_persona(w, load_persona(path)) for w in result] if own else result
