"""Does a perturbation change an answer that the ensemble calls certain? All prompts are computed by all members.

    python tests/perf/certain_answers.py --work build/certain --n 30 naive:w4a4 naive:w4a16 mlp_only:w4a4

Each row is STRATEGY or FOLDER, and a numerics. The table: answers equal to bf16's, the noise of the margins, how many answers the
rule of annie_quant/offline/ensemble.py calls uncertain, and by member the answers that it changed, with those of certain ones.
The table is in tests/perf/numerics.md. A strategy is quantized with 128 of 500 conversations of the offline teacher (seed 0).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from annie_quant import data, judge, quantize  # noqa: E402
from annie_quant.offline import ensemble  # noqa: E402
from annie_quant.offline.answers import AnswerOutcome  # noqa: E402
from annie_quant.offline.decoding import Completion  # noqa: E402
from annie_quant.offline.evaluation import evaluate_pair  # noqa: E402
from annie_quant.offline.pair import EvaluationJob, open_pair  # noqa: E402

MODEL = ROOT / "annie_quant/assets/tiny-annie"


def checkpoint_of(strategy: str, work: Path, model: Path) -> Path:
    """Return the model quantized with a strategy; an existing one is reused."""
    rows, folder = work / "calibration.jsonl", work / strategy
    if not rows.exists():
        data.generate("annie", teacher="offline", n=500, output=rows, seed=0)
    if not folder.exists():
        quantize.run(strategy, model, folder, calib_data=rows, calib_samples=128)
    return folder


def measure(folder: Path, model: Path, numerics: str, n: int, cache: Path) -> str:
    """Return the row of one checkpoint under one numerics."""
    uncertain: list[int] = []
    rule = ensemble.uncertain_answers

    def everything(base: Any, other: Any, noise: float) -> list[int]:
        if len(other) < len(
            base
        ):  # the sample's: what the rule takes without the answers that it leaves out
            uncertain[:] = sorted({*rule(base, other, noise), *other})
        return list(range(len(base)))

    answers: dict[str, list[Completion]] = {}
    usual = ensemble.member_answers

    def recorded(*inputs: Any) -> list[AnswerOutcome]:
        outcomes = usual(*inputs)
        if (member := inputs[-1]).partition("+")[0] == numerics:
            answers[member] = [outcome.completion for outcome in outcomes]
        return outcomes

    ensemble.uncertain_answers, ensemble.member_answers = everything, recorded
    try:
        job = EvaluationJob(checkpoint=folder, reference=model, numerics=[numerics], cache=cache)
        with open_pair(job) as pair:
            workloads = judge.sample(judge.load_workloads(), n)
            result = evaluate_pair(pair, workloads)
            reference = [a.completion for a in pair.reference.answer(workloads)]
    finally:
        ensemble.uncertain_answers, ensemble.member_answers = rule, usual
    own = answers.pop(numerics)
    equal = sum(a == b for a, b in zip(own, reference, strict=True))
    changed = {
        name: {i for i, (a, b) in enumerate(zip(own, other, strict=True)) if a != b}
        for name, other in answers.items()
    }
    members = "; ".join(
        f"{name.partition('+')[2]} {len(i)} ({len(i - set(uncertain))})"
        for name, i in changed.items()
    )
    tools = [
        row.gates["tool_call"] for row in (result.numerics[numerics], *result.members.values())
    ]
    calls = ", ".join(str(row.passes) for row in tools)
    noise = result.ensemble[numerics].noise
    return (
        f"| {folder.name}, {numerics} | {equal} of {len(own)} | {noise:.2g} | {len(uncertain)} | {members} | "
        f"{calls} of {tools[0].n} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="+", metavar="CHECKPOINT:NUMERICS")
    parser.add_argument("--work", type=Path, default=Path("build/certain"))
    parser.add_argument("--model", type=Path, default=MODEL, help="the bf16 model")
    parser.add_argument("--n", type=int, default=30, help="prompts per gate")
    options = parser.parse_args()
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    print(
        "| checkpoint, numerics | as bf16 | noise | uncertain | changed by member (certain ones) | tool calls |"
    )
    print("|---|---|---|---|---|---|")
    for row in options.rows:
        name, _, numerics = row.rpartition(":")
        folder = (
            Path(name).resolve()
            if Path(name).is_dir()
            else checkpoint_of(name, work, options.model)
        )
        print(measure(folder, options.model, numerics, options.n, work / "cache"), flush=True)


if __name__ == "__main__":
    main()
