"""The founding decision tree, executable: strategies cheapest first, the first that passes every gate is chosen.

Each strategy is quantized, audited and evaluated without a server, under both numerics; the table of all that was
tried is kept. A finished step is not done again: the output is a run directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from annie_quant import __version__, checkpoint, judge, quantize, runtime
from annie_quant.files import read_json, write_json
from annie_quant.rundir import RunDirectory

# Cheapest first: what costs no more bits than naive, then what costs size.
ORDER = ("naive", "direct", "mlp_only")
NUMERICS = ("w4a4", "w4a16")
WEIGHT_ONLY = ("direct",)


def run(model: Path, calib_data: Path, output: Path, n: int, every: bool, console: Any) -> dict[str, Any]:
    """Returns {"chosen", "strategies": [{"strategy", "size_bytes", "audit", "numerics", "passed", "failed"}]}."""
    directory = RunDirectory(output)
    rows: list[dict[str, Any]] = []
    with directory.locked():
        for strategy in ORDER:
            row = try_one(strategy, model, calib_data, directory, n, console)
            rows.append(row)
            chosen = next((r["strategy"] for r in rows if r["passed"]), None)
            write_json(directory / "search.json", {"chosen": chosen, "strategies": rows})
            if row["passed"] and not every:
                break
    return {"chosen": chosen, "strategies": rows}


def try_one(
    strategy: str, model: Path, calib_data: Path, directory: RunDirectory, n: int, console: Any
) -> dict[str, Any]:
    target = directory / f"models/{strategy}"
    inputs = {"version": __version__, "model": str(model.resolve()), "calib": str(calib_data.resolve()), "n": n}

    def quantized() -> dict[str, Any]:
        with console.task(f"quantize {strategy}") as step:
            return quantize.run(strategy, model, target, calib_data=calib_data, force=True, report=step.say)

    def evaluated() -> dict[str, Any]:
        numerics = ("w4a16",) if strategy in WEIGHT_ONLY else NUMERICS
        workloads = judge.sample(judge.load_workloads(), n)
        with console.task(f"evaluate {strategy}") as step:
            result = runtime.evaluate(
                target,
                model,
                workloads,
                numerics=numerics,
                conversations=calib_data,
                cache=directory / "eval",
                progress=step,
            )
        write_json(directory / f"eval/{strategy}.json", result)
        return {}

    made, _ = directory.stage(f"quantize-{strategy}", inputs, [f"models/{strategy}/config.json"], quantized)
    audit = checkpoint.audit(target, source=model)
    directory.stage(f"eval-{strategy}", inputs, [f"eval/{strategy}.json"], evaluated)
    numerics = read_json(directory / f"eval/{strategy}.json")["numerics"]
    failed = [
        f"{gate} under {kind}"
        for kind, side in numerics.items()
        for gate, row in side["gates"].items()
        if row["verdict"] != "pass" and not row.get("advisory")
    ]
    return {
        "strategy": strategy,
        "size_bytes": made["result"]["size_bytes"],
        "audit": "sound" if audit.ok else [f.message for f in audit.findings],
        "numerics": numerics,
        "failed": failed,
        "passed": audit.ok and not failed,
    }
