"""Print the size of the package: code lines, modules, `Any` in signatures, modules with one importer, the longest chain of imports.

    python tools/count_code.py [FOLDER]         FOLDER: another checkout

Code lines are those without docstrings, comments and blanks. A chain counts modules that import each other when they are loaded.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import defaultdict
from functools import cache
from pathlib import Path

NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(source: str, tree: ast.Module) -> int:
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS))
            and ast.get_docstring(node, clean=False) is not None
        ):
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def has_any(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    a = function.args
    arguments = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
    stated = filter(None, [*(x.annotation for x in arguments), function.returns])
    return any(
        isinstance(n, ast.Name) and n.id == "Any"
        for annotation in stated
        for n in ast.walk(annotation)
    )


def imported(nodes: list[ast.stmt] | list[ast.AST], modules: set[str]) -> set[str]:
    """Return the package's modules that statements import by absolute names."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & modules
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & modules or {node.module} & modules
    return found


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    trees: dict[str, ast.Module] = {}
    lines = n_any = 0
    for path in sorted((root / "annie_quant").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        lines += code_lines(source, tree)
        n_any += sum(isinstance(node, FUNCTIONS) and has_any(node) for node in ast.walk(tree))
        trees[".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")] = (
            tree
        )
    modules = set(trees)
    importers: dict[str, set[str]] = defaultdict(set)
    for name, tree in trees.items():
        for other in imported(list(ast.walk(tree)), modules):
            importers[other].add(name)

    @cache
    def chain(name: str) -> int:
        return 1 + max((chain(x) for x in imported(trees[name].body, modules) - {name}), default=0)

    one = [
        m for m in modules if len(importers[m]) == 1 and not (root / m.replace(".", "/")).is_dir()
    ]
    print(
        f"code lines {lines:,}; modules {len(modules)}; functions with Any {n_any}; modules with one importer {len(one)}"
    )
    print(f"longest chain of imports {max(map(chain, modules))}")


if __name__ == "__main__":
    main()
