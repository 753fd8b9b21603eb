"""Print the size of the package and of its parts, and how densely it is written.

    python tools/count_code.py [FOLDER]             FOLDER: another checkout
    python tools/count_code.py --names [FOLDER]     public names that two or more modules define

Statements and AST nodes measure size; lines do not, because they can be packed. Code lines are
those without docstrings, comments and blanks. A chain counts modules that import each other when
they are loaded.
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
    nodes = [node for annotation in stated for node in ast.walk(annotation)]
    return any(isinstance(node, ast.Name) and node.id == "Any" for node in nodes)


def public_names(tree: ast.Module) -> set[str]:
    """Return the public functions, classes and constants that a module defines."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, *FUNCTIONS)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_")}


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
    arguments = [argument for argument in sys.argv[1:] if argument != "--names"]
    root = Path(arguments[0] if arguments else ".")
    trees: dict[str, ast.Module] = {}
    nodes: dict[str, int] = defaultdict(int)
    statements: dict[str, int] = defaultdict(int)
    lines: dict[str, int] = defaultdict(int)
    n_any = 0
    for path in sorted((root / "annie_quant").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        parts = path.relative_to(root).with_suffix("").parts
        part = parts[1] if len(parts) > 2 else "."
        lines[part] += code_lines(source, tree)
        nodes[part] += sum(1 for _ in ast.walk(tree))
        statements[part] += sum(isinstance(node, ast.stmt) for node in ast.walk(tree))
        n_any += sum(isinstance(node, FUNCTIONS) and has_any(node) for node in ast.walk(tree))
        trees[".".join(parts).removesuffix(".__init__")] = tree
    modules = set(trees)
    definers: dict[str, list[str]] = defaultdict(list)
    importers: dict[str, set[str]] = defaultdict(set)
    for name, tree in trees.items():
        for public in public_names(tree):
            definers[public].append(name.removeprefix("annie_quant."))
        for other in imported(list(ast.walk(tree)), modules):
            importers[other].add(name)
    repeated = {name: where for name, where in definers.items() if len(where) > 1}
    if "--names" in sys.argv:
        for name, where in sorted(repeated.items()):
            print(f"{name:24} {', '.join(where)}")
        return

    @cache
    def chain(name: str) -> int:
        return 1 + max((chain(x) for x in imported(trees[name].body, modules) - {name}), default=0)

    one = [
        m for m in modules if len(importers[m]) == 1 and not (root / m.replace(".", "/")).is_dir()
    ]
    for part in sorted(nodes, key=lambda part: -nodes[part]):
        density = nodes[part] / lines[part]
        print(
            f"{part:12} {statements[part]:6,} statements {nodes[part]:8,} nodes {density:6.1f} per line"
        )
    total = sum(nodes.values())
    n_lines = sum(lines.values())
    print(
        f"{'all':12} {sum(statements.values()):6,} statements {total:8,} nodes {total / n_lines:6.1f} per line"
    )
    print(
        f"code lines {n_lines:,}; modules {len(modules)}; functions with Any {n_any}; modules with one importer {len(one)}"
    )
    print(
        f"longest chain of imports {max(map(chain, modules))}; public names in two or more modules {len(repeated)}"
    )


if __name__ == "__main__":
    main()
