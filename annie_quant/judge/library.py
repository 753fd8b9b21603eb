"""Workloads by name: the built-in folder, a folder or file of the user, and the cases of other packages."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from annie_quant import documents
from annie_quant.core.errors import UsageError
from annie_quant.core.files import ASSETS
from annie_quant.core.untrusted import JsonObject
from annie_quant.documents import CaseFile, ContextFile, Expect, WorkloadFile
from annie_quant.judge import bfcl, tool_eval
from annie_quant.judge.answers import Tool
from annie_quant.judge.gates import GATES, check_names
from annie_quant.judge.workloads import RESERVED, Case, Message, Workload

FOLDER = ASSETS / "workloads"


class _Parameters(msgspec.Struct):
    properties: dict[str, Any] = {}


class _Function(msgspec.Struct):
    """What the checks read of a tool on offer."""

    name: str
    parameters: _Parameters | None = None


class _Tools(msgspec.Struct):
    tools: list[_Function]


def load_workloads(
    names: Iterable[str] | None = None, folder: str | Path | None = None
) -> list[Workload]:
    """Load workloads by name, in the same order; for None all default ones of the folder, sorted.

    A name that ends in .json is a path. Raises UsageError for an unknown name, a broken file or an
    unknown gate.
    """
    root = Path(folder) if folder is not None else FOLDER
    files = {path.stem: path for path in sorted(root.glob("*.json"))}
    if names is None:
        return [w for w in map(read_workload, files.values()) if w.default]
    return [_load(name, root, files) for name in ([names] if isinstance(names, str) else names)]


def _load(name: str, root: Path, files: Mapping[str, Path]) -> Workload:
    if name.endswith(".json"):
        return read_workload(name)
    if name == "bfcl" or name.startswith("bfcl:"):
        return bfcl.load(name.partition(":")[2])
    if name == tool_eval.NAME:
        return tool_eval.load()
    if name not in files:
        hint = (
            f"choose one of: {', '.join(files) or '(the folder is empty)'}, bfcl, {tool_eval.NAME}"
        )
        raise UsageError(f"unknown workload {name!r} in {root.name}/", hint)
    return read_workload(files[name])


def read_workload(path: str | Path) -> Workload:
    """Read a workload file. Raises UsageError that names the file and the field."""
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"workload file {path} cannot be read: {error.strerror}") from error
    document = documents.decode(WorkloadFile, raw, path.name, error=UsageError)
    workload = _checked(document, path.name, hashlib.sha256(raw).hexdigest(), str(path))
    _check_labels(document, path.name)
    return workload


def _check_labels(document: WorkloadFile, where: str) -> None:
    """Raise UsageError for a workload whose cases have labels that none of its gates judges."""
    turns = [turn for case in document.cases for turn in (case.expect or {}).get("turns") or ()]
    labels = {
        name for row in (*(case.expect or {} for case in document.cases), *turns) for name in row
    } - {"turns"}
    if labels and not any(GATES[gate].basis == "label" for gate in document.gates if gate in GATES):
        raise UsageError(
            f"{where}: no gate judges what its cases expect ({', '.join(sorted(labels))})",
            "add one to 'gates', such as tool_call, tool_arguments, abstention or factual (docs/reference/documents.md)",
        )


def build_workload(data: object, path: str = "") -> Workload:
    """Return a workload from the content of its file, as JSON decodes it."""
    where = Path(path).name or "workload"
    return _checked(documents.convert(WorkloadFile, data, where, error=UsageError), where, "", path)


def _checked(document: WorkloadFile, where: str, sha256: str, path: str) -> Workload:
    check_names(document.gates, where)
    check_names(document.informative, f"{where}: informative")
    tools = document.tools
    extra = document.extra or {}
    if isinstance(tools, str) and tools != "persona":
        raise UsageError(f"{where}: tools: expected a list, null or 'persona', got {tools!r}")
    if tools == "persona" and not document.persona:
        raise UsageError(f"{where}: 'tools' is 'persona' and no persona is named")
    reserved = [key for key in RESERVED if key in extra]
    if reserved:
        raise UsageError(
            f"{where}: 'extra' must not contain {reserved[0]!r}: the workload has its own field for it"
        )
    own_tools = tools if isinstance(tools, list) else []
    _check_tools(where, own_tools)
    cases = tuple(_case(where, case, own_tools) for case in document.cases)
    if not cases:
        raise UsageError(f"{where}: there are no cases")
    duplicates = [name for name, n in Counter(case.id for case in cases).items() if n > 1]
    if duplicates:
        raise UsageError(f"{where}: there are two cases with the id {duplicates[0]!r}")
    context = document.context
    if context is None and any(case.prompt_tokens for case in cases):
        context = ContextFile(tokens=0)
    fields = msgspec.structs.asdict(document) | {
        "context": context,
        "persona": _persona_path(document.persona, path),
        "tools": tuple(tools) if isinstance(tools, list) else tools,
        "gates": tuple(document.gates),
        "informative": tuple(document.informative),
        "extra": extra,
        "cases": cases,
    }
    return Workload(**fields, sha256=sha256, path=path)


def _check_tools(where: str, tools: Iterable[Tool]) -> None:
    functions = [tool.get("function", tool) for tool in tools]
    documents.convert(_Tools, {"tools": functions}, where, error=UsageError)


def _case(where: str, case: CaseFile, own_tools: list[JsonObject]) -> Case:
    contents = [case.messages, case.turns, case.prompt_tokens]
    if sum(map(bool, contents)) != 1:
        raise UsageError(
            f"{where}: case {case.id!r} needs one of 'messages', 'turns' and 'prompt_tokens'"
        )
    if case.follow_up_tokens and not case.prompt_tokens:
        raise UsageError(
            f"{where}: case {case.id!r} has 'follow_up_tokens' without 'prompt_tokens'"
        )
    if case.expect:
        documents.convert(
            Expect, case.expect, f"{where}: case {case.id!r}: expect", error=UsageError
        )
    for index, turn in enumerate(case.turns or ()):
        if not isinstance(turn, str):
            _check_results(f"{where}: case {case.id!r}, turns[{index}]", index, turn)
    tools = case.tools
    if isinstance(tools, int):
        if not 0 <= tools <= len(own_tools):
            raise UsageError(
                f"{where}: case {case.id!r} needs {tools} tools, the workload has {len(own_tools)}"
            )
        tools = own_tools[:tools]
    if tools:
        _check_tools(f"{where}: case {case.id!r}", tools)
    return Case(
        id=str(case.id),
        messages=tuple(case.messages or ()),
        turns=tuple(case.turns or ()),
        expect=case.expect or {},
        tools=tuple(tools) if tools is not None else None,
        system=case.system,
        max_tokens=case.max_tokens,
        arrival_s=case.arrival_s,
        prompt_tokens=case.prompt_tokens,
        follow_up_tokens=case.follow_up_tokens,
    )


def _persona_path(persona: str | None, path: str) -> str | None:
    """Return a persona that is given relative to the workload's file ("..", "./mine.json") as a path."""
    if persona is None or not persona.startswith("."):
        return persona
    return os.path.normpath(Path(path).parent / persona)


def _check_results(where: str, index: int, turn: Message) -> None:
    results = turn.get("results")
    if not isinstance(results, list) or not all(
        isinstance(r, Mapping)
        and isinstance(r.get("name"), str)
        and isinstance(r.get("content"), str)
        for r in results
    ):
        raise UsageError(
            f'{where}: expected a text or {{"results": [{{"name", "content", "arguments"}}]}}'
        )
    if index == 0:
        raise UsageError(
            f"{where}: the first turn is the user's, there is no call to return a result to yet"
        )
