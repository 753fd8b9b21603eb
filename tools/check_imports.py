"""Check that the package's modules import lower layers only, without cycles (CONTRIBUTING.md, "Import layers").

    python tools/check_imports.py [FOLDER]        FOLDER: the package, default annie_quant

Prints one line per violation (file:line: what is wrong) and exits with 1 if there is any. Imports for type checking
(`if TYPE_CHECKING:`) are ignored; imports inside functions count.
"""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# From low to high. A part (package or module of annie_quant) may import parts of lower layers and of its own.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("core",),
    (
        "nvfp4",
        "kquant",
        "stream",
        "models",
        "documents",
    ),  # nvfp4, kquant, stream: the Python side of the C modules
    ("gemm", "checkpoint", "judge"),
    ("data",),
    ("offline",),
    ("quantize", "bench", "ops"),
    ("report", "runtime"),
    ("cli", "pytest_plugin"),
    ("__main__",),  # prepares the process, then starts cli
)
# Libraries that a part may not import, because it must start fast and run where they are not installed.
FORBIDDEN = {
    part: {"torch", "transformers", "modelopt"}
    for part in ("bench", "judge", "stream", "checkpoint", "report")
}


@dataclass(frozen=True)
class Import:
    """One import statement of a module, with absolute module names without the leading `annie_quant.`."""

    importer: str
    imported: str
    path: Path
    line: int


def modules(package: Path) -> dict[str, Path]:
    """Return the files of all modules by name: {"judge.gates": annie_quant/judge/gates.py}. A package has its folder's name."""
    files = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def imports(name: str, path: Path, known: dict[str, Path]) -> Iterator[Import]:
    """Return the imports of one module: of this package's modules (`known`), and of other libraries by their first name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    blocks = [node for node in ast.walk(tree) if _is_type_checking(node)]
    ignored = set(map(id, itertools.chain.from_iterable(map(ast.walk, blocks))))
    for node in ast.walk(tree):
        if id(node) in ignored:
            continue
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            module = node.module or ""
            targets = (
                [f"{module}.{alias.name}" for alias in node.names]
                if module.startswith("annie_quant")
                else [module]
            )
        for target in targets:
            first, _, rest = target.partition(".")
            while first == "annie_quant" and rest and rest not in known:
                rest = rest.rpartition(".")[0]  # a name inside a module
            yield Import(
                name,
                rest if first == "annie_quant" else f"{first}:",
                path,
                getattr(node, "lineno", 1),
            )


def missing(known: dict[str, Path]) -> Iterator[tuple[Import, str]]:
    """Return the imports from modules of this package that do not exist, which mypy takes for those of a missing library."""
    for name, path in known.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom):
                continue
            first, _, module = (node.module or "").partition(".")
            if (
                first == "annie_quant"
                and module
                and not any(f"{k}.".startswith(f"{module}.") for k in known)
            ):
                yield (
                    Import(name, module, path, node.lineno),
                    f"there is no module annie_quant.{module}",
                )


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def layer_violations(statements: list[Import]) -> Iterator[tuple[Import, str]]:
    level = {part: number for number, layer in enumerate(LAYERS) for part in layer}
    for item in statements:
        importer = item.importer.partition(".")[0]
        imported = item.imported.partition(".")[0]
        if not importer or not imported:
            continue  # annie_quant/__init__.py, which imports everything lazily, or its __version__
        if imported.endswith(":"):
            if imported[:-1] in FORBIDDEN.get(importer, ()):
                yield item, f"{importer} may not import {imported[:-1]}"
        elif importer not in level:
            yield item, f"{importer} is in no layer; add it to LAYERS"
        elif level.get(imported, -1) > level[importer]:
            yield item, f"{importer} may not import {imported}, which is in a higher layer"


def cycles(statements: list[Import]) -> Iterator[tuple[Import, str]]:
    """Return the import statements that are part of a cycle of modules, apart from imports by and of a package's __init__.

    An __init__ that shows its package's public names is imported by Python before the package's own modules, so these
    import each other by design.
    """
    packages = {item.importer.rpartition(".")[0] for item in statements}
    graph: dict[str, set[str]] = {}
    for item in statements:
        if not {item.importer, item.imported} & packages:
            graph.setdefault(item.importer, set()).add(item.imported)
    for item in statements:
        if item.imported in graph.get(item.importer, ()) and item.importer in reachable(
            graph, item.imported
        ):
            yield item, f"{item.importer} and {item.imported} import each other"


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    reached: set[str] = set()
    pending = [start]
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending += graph.get(name, ())
    return reached


def main() -> int:
    package = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "annie_quant").resolve()
    known = modules(package)
    statements = [item for name, path in known.items() for item in imports(name, path, known)]
    lines = {
        f"{item.path.relative_to(package.parent)}:{item.line}: {message}"
        for item, message in (*missing(known), *layer_violations(statements), *cycles(statements))
    }
    for line in sorted(lines):
        print(line)
    print(f"{len(lines)} violations" if lines else "the import layers are kept", file=sys.stderr)
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
