"""Does a checkpoint lose tool calls in the real vLLM? Paired counts of its answers and bf16's to all tool prompts of the personas.

    python tests/perf/served_tools.py --python build/vllm/bin/python --work build/served_tools BF16 CHECKPOINT...

vLLM on a CPU answers greedily, 16 prompts at a time (vllm_answers.py): the tool workloads of annie, home and support, one call and
two calls in an answer, prompts up to --longest tokens. --kinds w4a4,w4a16 also serves each checkpoint declared weight-only. Per
checkpoint and gate, over all prompts and over those of annie that search judges by (the 240 of the gate tool_call): passes of
bf16 and of the checkpoint, lost and won prompts, the exact one-sided p of McNemar's test, and the verdict by the rule of
docs/method.md. --others also asks the other single-turn prompts of a search with n = 100 and prints the verdict over all gates
of the search's prompts. Finished answers are not asked for again. Tables: training/tiny_annie/README.md, tests/perf/search.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from predict_server import (
    ask_vllm,
    has_mixed_formats,
    quantizes_activations,
    read,
    weight_only,
    without_end,
    write_prompts,
)

from annie_quant import judge
from annie_quant.core import files
from annie_quant.documents import PairedGate
from annie_quant.judge.decision import judge_members
from annie_quant.judge.decision.wording import points
from annie_quant.judge.gates import checks, decides
from annie_quant.offline.prompts import OfflineRequest, Template

Gates = Sequence[dict[str, bool]]  # of each answer: gate → whether it passes
GATES = ("tool_call", "tool_arguments", "tool_selection", "tool_values")
ANNIE = ("tool_memory", "tool_web", "tool_surface")
SEARCHED = (
    "tool_memory",
    "tool_web",
)  # those with the gate tool_call in a search's default workloads
OTHERS = tuple(
    f"{p}/{n}.json" for p in ("home", "support") for n in ("tool_calls", "parallel_calls")
)


def requests_of(template: Template, longest: int) -> list[OfflineRequest]:
    names = [*ANNIE, *(str(files.ASSETS / "workloads" / name) for name in OTHERS)]
    requests = (template.request(w, c) for w in judge.load_workloads(names) for c in w.cases)
    return [r for r in requests if len(r.prompt) <= longest]


def passes(
    template: Template, requests: Sequence[OfflineRequest], answers: Path
) -> list[dict[str, bool]]:
    """Return the gates of each answer of a file of vllm_answers.py."""
    rows, ends = next(iter(read(answers).values())), template.end_tokens
    pairs = (
        (r, template.answer(r, without_end(*rows[i][:2], ends))) for i, r in enumerate(requests)
    )
    return [checks(answer, r.case, r.workload) for r, answer in pairs]


def other_requests(template: Template) -> list[OfflineRequest]:
    """Return the single-turn prompts of a search's default workloads that ask for no tool call, 100 per gate."""
    workloads = [w for w in judge.sample(judge.load_workloads(), 100) if not w.cases[0].turns]
    return [template.request(w, c) for w in workloads if w.name not in SEARCHED for c in w.cases]


def pair_of(gate: str, before: Gates, after: Gates) -> PairedGate:
    """Return one gate's counts over the prompts that it applies to in `before`."""
    pairs = [(a[gate], b.get(gate, False)) for a, b in zip(before, after, strict=True) if gate in a]
    return PairedGate(
        len(pairs), sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
    )


def comparison(gate: str, before: Gates, after: Gates) -> str:
    """Return one gate's counts and, if it decides, its verdict."""
    pair = pair_of(gate, before, after)
    verdict = judge_members({"served": {gate: pair}}).verdict
    passed = sum(a.get(gate, False) for a in before)
    counts = f"bf16 {passed}, checkpoint {passed + pair.won - pair.lost} of {pair.n}"
    interval = f"{points(pair.difference)} points (90 % {points(pair.low)} to {points(pair.high)})"
    judged = f", {verdict}" if decides(gate) else ""
    return f"{gate}: {counts}; lost {pair.lost}, won {pair.won}, p {pair.p:.1g}; {interval}{judged}"


def verdict_of_search(before: Gates, after: Gates) -> str:
    """Return the verdict over all deciding gates, with its reasons."""
    names = dict.fromkeys(gate for row in before for gate in row if decides(gate))
    verdict = judge_members({"served": {gate: pair_of(gate, before, after) for gate in names}})
    return "; ".join([f"{len(before)} prompts of a search: {verdict.verdict}", *verdict.reasons])


def served_forms(folder: Path, kinds: Sequence[str], work: Path) -> Iterator[tuple[str, Path]]:
    """Yield (label, folder) of the forms of a checkpoint to serve: as it is (W4A4), and declared W4A16."""
    if "w4a4" in kinds:
        yield folder.name, folder
    if "w4a16" in kinds and has_mixed_formats(folder):
        print(
            f"{folder.name}: one declaration of W4A16 does not cover its other formats; left out",
            flush=True,
        )
    elif "w4a16" in kinds and quantizes_activations(folder):
        yield f"{folder.name}-w4a16", weight_only(folder, work)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bf16", type=Path)
    parser.add_argument("checkpoints", type=Path, nargs="+")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument(
        "--python",
        type=Path,
        required=True,
        help="of vLLM's environment (tests/integration/vllm_cpu.py)",
    )
    parser.add_argument("--kinds", default="w4a4", help="w4a4, w4a16 or both, comma-separated")
    parser.add_argument(
        "--others", action="store_true", help="also ask the other single-turn prompts of a search"
    )
    parser.add_argument("--longest", type=int, default=1500, help="prompt, in tokens")
    args = parser.parse_args()
    template = Template(args.bf16)
    requests = {"": requests_of(template, args.longest)} | (
        {".others": other_requests(template)} if args.others else {}
    )
    for part, rows in requests.items():
        write_prompts(args.work / f"prompts{part}.json", rows, template.end_tokens)

    def served(name: str, folder: Path, part: str = "") -> list[dict[str, bool]]:
        answers = args.work / f"{name}{part}.jsonl"
        ask_vllm(args.python, folder, args.work / f"prompts{part}.json", answers, "16")
        return passes(template, requests[part], answers)

    def of_search(gates: Gates) -> list[dict[str, bool]]:
        return [g for g, r in zip(gates, requests[""], strict=True) if r.workload.name in SEARCHED]

    forms = [
        form for c in args.checkpoints for form in served_forms(c, args.kinds.split(","), args.work)
    ]
    before = served(args.bf16.name, args.bf16)
    for label, folder in forms:
        after = served(label, folder)
        for gate in GATES:
            print(f"{label}, {comparison(gate, before, after)}", flush=True)
        print(
            f"{label}, annie's alone, {comparison('tool_call', of_search(before), of_search(after))}",
            flush=True,
        )
        if args.others:
            others = [
                served(name, path, ".others")
                for name, path in ((args.bf16.name, args.bf16), (label, folder))
            ]
            print(
                f"{label}, {verdict_of_search(of_search(before) + others[0], of_search(after) + others[1])}",
                flush=True,
            )


if __name__ == "__main__":
    main()
