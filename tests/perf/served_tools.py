"""Does a checkpoint lose tool calls in the real vLLM? Paired counts of its answers and bf16's to all tool prompts of the personas.

    python tests/perf/served_tools.py --python build/vllm/bin/python --work build/served_tools BF16 CHECKPOINT...

vLLM on a CPU answers greedily, 16 prompts at a time (vllm_answers.py): the tool workloads of annie, home and support, one call and
two calls in an answer, prompts up to --longest tokens. Per checkpoint and gate: passes of bf16 and of the checkpoint, lost and won
prompts, and the exact one-sided p of McNemar's test. Finished answers are not asked for again. The table is in
training/tiny_annie/README.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from predict_server import ask_vllm, without_end, write_prompts

from annie_quant import files, judge
from annie_quant.evaluate.prompts import Request, Template
from annie_quant.judge.gates import checks
from annie_quant.judge.paired import mcnemar

GATES = ("tool_call", "tool_arguments", "tool_selection", "tool_values")
ANNIE = ("tool_memory", "tool_web", "tool_surface")
OTHERS = tuple(f"{p}/{n}.json" for p in ("home", "support") for n in ("tool_calls", "parallel_calls"))


def requests_of(template: Template, longest: int) -> list[Request]:
    names = [*ANNIE, *(str(files.ASSETS / "workloads" / name) for name in OTHERS)]
    requests = (template.request(w, c) for w in judge.load_workloads(names) for c in w.cases)
    return [r for r in requests if len(r.prompt) <= longest]


def passes(template: Template, requests: Sequence[Request], answers: Path) -> list[dict[str, bool]]:
    """Return the gates of each answer of a file of vllm_answers.py."""
    rows = next(iter(files.read_json(answers)["cuts"].values()))
    ends = template.end_tokens
    pairs = ((r, template.answer(r, without_end(row[0], row[1], ends))) for r, row in zip(requests, rows, strict=True))
    return [checks(answer, r.case, r.workload) for r, answer in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bf16", type=Path)
    parser.add_argument("checkpoints", type=Path, nargs="+")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument(
        "--python", type=Path, required=True, help="of vLLM's environment (tests/integration/vllm_cpu.py)"
    )
    parser.add_argument("--longest", type=int, default=1500, help="prompt, in tokens")
    args = parser.parse_args()
    template = Template(args.bf16)
    requests = requests_of(template, args.longest)
    prompts = args.work / "prompts.json"
    write_prompts(prompts, requests, template.end_tokens)
    judged: list[list[dict[str, bool]]] = []
    for folder in (args.bf16, *args.checkpoints):
        answers = args.work / f"{folder.name}.json"
        if not answers.exists():
            ask_vllm(args.python, folder, prompts, answers, "16")
        judged.append(passes(template, requests, answers))
        for gate in GATES if len(judged) > 1 else ():
            pairs = [(a[gate], b.get(gate, False)) for a, b in zip(judged[0], judged[-1], strict=True) if gate in a]
            lost, won = sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
            counts = f"bf16 {sum(a for a, _ in pairs)}, {folder.name} {sum(b for _, b in pairs)} of {len(pairs)}"
            print(f"{gate}: {counts}; lost {lost}, won {won}, p {mcnemar(lost, won):.1g}", flush=True)


if __name__ == "__main__":
    main()
