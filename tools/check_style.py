"""Refuse lines that hold more than one thought (CONTRIBUTING.md, "Language").

    python tools/check_style.py [PATH ...]        PATH: files or folders, default annie_quant tools examples setup.py

Refused are:

several values   `a, b = x, y`: assign one value per line. Swaps, and values that use the old ones
                 (`a, b = b, a + b`), are fine.
comprehension    two `for` in one comprehension (nested ones count), unless it only filters or
                 flattens: `[x for row in rows for x in row]`
conditional      a conditional expression inside another one
walrus           `if (x := f()):`, where `x = f()` on the line above says the same. Behind `elif`,
                 `and`, `or` and in loops it is fine.

Prints one line per violation (file:line: what is wrong) and exits with 1 if there is any.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECKED = ("annie_quant", "tools", "examples", "setup.py")
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def names_in(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def assigns_several(node: ast.AST) -> bool:
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    targets = [target for target in node.targets if isinstance(target, ast.Tuple)]
    if not targets or any(isinstance(value, ast.Starred) for value in node.value.elts):
        return False
    elements = [element for target in targets for element in target.elts]
    assigned = set(map(ast.unparse, elements))
    used = {ast.unparse(child) for child in ast.walk(node.value) if isinstance(child, ast.expr)}
    return not assigned & used


def is_plain(node: Comprehension) -> bool:
    """Return whether a comprehension only filters or flattens: what it yields is a loop variable."""
    elements = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
    return all(isinstance(element, (ast.Name, ast.Tuple)) for element in elements)


def loops_twice(node: ast.AST) -> bool:
    if not isinstance(node, COMPREHENSIONS):
        return False
    elements = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
    inner = [child for e in elements for child in ast.walk(e) if isinstance(child, COMPREHENSIONS)]
    if inner:
        return True
    return len(node.generators) > 1 and not is_plain(node)


def chains_conditionals(node: ast.AST) -> bool:
    if not isinstance(node, ast.IfExp):
        return False
    return any(isinstance(child, ast.IfExp) for child in ast.walk(node) if child is not node)


def first_evaluated(test: ast.expr) -> ast.expr:
    """Return the part of a condition that is always evaluated, and first."""
    while True:
        if isinstance(test, ast.BoolOp):
            test = test.values[0]
        elif isinstance(test, ast.Compare):
            test = test.left
        elif isinstance(test, ast.UnaryOp):
            test = test.operand
        else:
            return test


def walruses(tree: ast.AST) -> Iterator[ast.If]:
    """Yield the `if` statements, but no `elif`, whose first operand is an assignment."""
    elifs: set[int] = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.If)
            and len(node.orelse) == 1
            and isinstance(node.orelse[0], ast.If)
        ) and node.orelse[0].col_offset == node.col_offset:
            elifs.add(id(node.orelse[0]))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.If)
            and id(node) not in elifs
            and isinstance(first_evaluated(node.test), ast.NamedExpr)
        ):
            yield node


def violations(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if assigns_several(node):
            yield line, "several values in one assignment; assign one per line"
        elif loops_twice(node):
            yield line, "two loops in one comprehension; name the inner one, or write a loop"
        elif chains_conditionals(node):
            yield line, "a conditional expression inside another one; use if statements"
    for node in walruses(tree):
        yield node.lineno, "`:=` in an if that saves one line; assign above it"


def files(arguments: list[str]) -> Iterator[Path]:
    for argument in arguments or [str(ROOT / name) for name in CHECKED]:
        path = Path(argument)
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def main() -> int:
    count = 0
    for path in files(sys.argv[1:]):
        found = sorted(set(violations(ast.parse(path.read_text(encoding="utf-8")))))
        for line, message in found:
            print(f"{path}:{line}: {message}")
        count += len(found)
    print(f"{count} violations" if count else "no line holds two thoughts", file=sys.stderr)
    return int(bool(count))


if __name__ == "__main__":
    sys.exit(main())
