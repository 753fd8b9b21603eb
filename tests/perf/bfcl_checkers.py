"""Our checker of BFCL's calls next to the leaderboard's own: the same verdict on the same answers?

    python tests/perf/bfcl_checkers.py                          # answers made from the recorded ones (needs bfcl-eval, --no-deps)
    python tests/perf/bfcl_checkers.py --answers answers.jsonl  # a model's: {"id": ..., "calls": [[name, arguments], ...]} per line

Ours is the gate tool_values (annie_quant/judge/checks/calls.py); theirs is bfcl_eval's ast_checker with dots of names replaced, as
for models that call functions natively. Without --answers each recorded answer is changed in the ways of CHANGES, so both verdicts
occur. Prints a table per change (or category) and the first cases where the two differ. Results: bfcl.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from annie_quant.documents import Answer
from annie_quant.judge import bfcl
from annie_quant.judge.checks.calls import values_fault

Calls = list[tuple[str, dict[str, Any]]]
MODEL = "native"


def leaderboard() -> Callable[[Any, Any, Any, str], dict[str, Any]]:
    """Return their checker. Its table of models imports a client per vendor, so a table of one model replaces it."""
    table = ModuleType("bfcl_eval.constants.model_config")
    table.MODEL_CONFIG_MAPPING = {MODEL: SimpleNamespace(underscore_to_dot=True)}  # type: ignore[attr-defined]
    sys.modules[table.__name__] = table
    for name in ("java", "js"):  # of other languages' categories; they need tree_sitter
        stub = ModuleType(f"bfcl_eval.eval_checker.ast_eval.type_convertor.{name}_type_converter")
        setattr(stub, f"{name}_type_converter", None)
        sys.modules[stub.__name__] = stub
    from bfcl_eval.constants.enums import Language
    from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker

    return lambda functions, calls, truth, category: ast_checker(
        functions, calls, truth, Language.PYTHON, category, MODEL
    )


def recorded(truth: list[dict[str, Any]]) -> Calls:
    """Return the recorded answer with the first allowed value of each argument that has one."""
    return [
        (bfcl._name(name), {k: first(v) for k, v in values.items() if v and v[0] != ""})
        for call in truth
        for name, values in call.items()
    ]


def first(allowed: list[Any]) -> Any:
    return plain(allowed[0])


def plain(value: Any) -> Any:
    """Return a value of an answer; objects in it have lists of allowed values themselves."""
    if isinstance(value, dict):
        return {
            k: plain(v[0]) for k, v in value.items() if isinstance(v, list) and v and v[0] != ""
        }
    return [plain(v) for v in value] if isinstance(value, list) else value


def each_value(change: Callable[[Any], Any]) -> Callable[[Calls], Calls]:
    return lambda calls: [(name, {k: change(v) for k, v in a.items()}) for name, a in calls]


def without_last(calls: Calls) -> Calls:
    return [(name, dict(list(a.items())[:-1])) for name, a in calls]


CHANGES: dict[str, Callable[[Calls], Calls]] = {
    "as recorded": lambda calls: calls,
    "upper case": each_value(lambda v: v.upper() if isinstance(v, str) else v),
    "hyphens for spaces": each_value(lambda v: v.replace(" ", "-") if isinstance(v, str) else v),
    "an integer as float": each_value(lambda v: float(v) if type(v) is int else v),
    "a whole float as integer": each_value(
        lambda v: int(v) if type(v) is float and v.is_integer() else v
    ),
    "a number as text": each_value(lambda v: str(v) if type(v) in (int, float) else v),
    "true as 1": each_value(lambda v: int(v) if type(v) is bool else v),
    "a value in a list": each_value(lambda v: [v]),
    "another number": each_value(lambda v: v + 1 if type(v) in (int, float) else v),
    "a word more": each_value(lambda v: v + " x" if isinstance(v, str) else v),
    "last argument missing": without_last,
    "an unknown argument": lambda calls: [(n, a | {"no_such_argument": 1}) for n, a in calls],
    "another function": lambda calls: [("no_such_function", a) for _, a in calls],
    "one call more": lambda calls: calls + calls[:1],
    "reversed": lambda calls: calls[::-1],
    "no call": lambda calls: [],
}


def answers_of(rows: dict[str, Any], file: Path | None) -> Iterator[tuple[str, str, Calls]]:
    """Yield (label, id, calls)."""
    if file is not None:
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["id"] in rows:
                yield rows[row["id"]][2].category, row["id"], [(n, a) for n, a in row["calls"]]
        return
    for name, (_, truth, _) in rows.items():
        calls = recorded(truth)
        for label, change in CHANGES.items():
            changed = change(copy.deepcopy(calls))
            if (
                json.dumps(changed) != json.dumps(calls) or label == "as recorded"
            ):  # 1 == 1.0 == True in Python
                yield label, name, changed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--categories", default="simple_python,multiple,parallel,parallel_multiple")
    parser.add_argument("--show", type=int, default=2, help="differing cases per label")
    a = parser.parse_args()
    theirs, root = leaderboard(), bfcl._package_data()
    rows: dict[str, Any] = {}
    for category in a.categories.split(","):
        file = f"BFCL_v4_{category}.json"
        truth = {r["id"]: r["ground_truth"] for r in bfcl._rows(root / "possible_answer" / file)}
        functions = {r["id"]: r["function"] for r in bfcl._rows(root / file)}
        rows |= {c.id: (functions[c.id], truth[c.id], c) for c in bfcl.load(category).cases}
    table: dict[str, Counter[tuple[bool, bool]]] = defaultdict(Counter)
    shown: dict[str, list[str]] = defaultdict(list)
    for label, name, calls in answers_of(rows, a.answers):
        functions, truth, case = rows[name]
        answer = Answer(tool_calls=[{"name": n, "arguments": json.dumps(v)} for n, v in calls])
        fault = values_fault(answer, case.expect["calls"])
        result = theirs(
            copy.deepcopy(functions),
            [{n: v} for n, v in calls],
            copy.deepcopy(truth),
            case.category,
        )
        table[label][not fault, result["valid"]] += 1
        if (not fault) != result["valid"] and len(shown[label]) < a.show:
            shown[label].append(
                f"{name}: ours {fault or 'right'!r}, theirs {result.get('error') or 'right'!r}"[
                    :300
                ]
            )
    print(
        "| answers | n | both right | both wrong | only ours right | only theirs right |\n|---|---|---|---|---|---|"
    )
    total: Counter[tuple[bool, bool]] = Counter()
    for label, counts in table.items():
        total += counts
        print(line(label, counts))
    print(line("all", total))
    for label, cases in shown.items():
        print(f"\n{label}\n  " + "\n  ".join(cases))


def line(label: str, counts: Counter[tuple[bool, bool]]) -> str:
    figures = (
        sum(counts.values()),
        *(counts[k] for k in ((True, True), (False, False), (True, False), (False, True))),
    )
    return f"| {label} | " + " | ".join(f"{f:,}" for f in figures) + " |"


if __name__ == "__main__":
    main()
