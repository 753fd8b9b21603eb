"""Workloads by name: the built-in folder, a user's own folder or file, and the cases of other people's packages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from annie_quant.errors import UsageError
from annie_quant.files import ASSETS
from annie_quant.judge import bfcl
from annie_quant.judge.workloads import Workload, read_workload

FOLDER = ASSETS / "workloads"


def load_workloads(names: Iterable[str] | None = None, folder: str | Path | None = None) -> list[Workload]:
    """Workloads by name, in the order asked for; when `names` is None all of the folder that are default, sorted.

    A name that ends in .json is a path. Raises UsageError for an unknown name, a broken file or an unknown gate.
    """
    root = Path(folder) if folder is not None else FOLDER
    files = {path.stem: path for path in sorted(root.glob("*.json"))}
    if names is None:
        return [w for w in map(read_workload, files.values()) if w.default]
    return [_named(name, root, files) for name in ([names] if isinstance(names, str) else names)]


def _named(name: str, root: Path, files: Mapping[str, Path]) -> Workload:
    if name.endswith(".json"):
        return read_workload(name)
    if name == "bfcl" or name.startswith("bfcl:"):
        return bfcl.load(name.partition(":")[2])
    if name not in files:
        raise UsageError(
            f"there is no workload called {name!r} in {root.name}/",
            f"choose one of: {', '.join(files) or '(the folder holds none)'}, bfcl",
        )
    return read_workload(files[name])
