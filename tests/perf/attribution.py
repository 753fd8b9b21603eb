"""Does `annie-quant attribute` name a planted fault, and nobody without one? Writes tests/perf/attribution.md.

    python tests/perf/attribution.py WORK [--only NAME ...] [--healthy 5] [--simulated 1000]

Real runs: the embedded llama.cpp server with tiny-annie and its MTP head, behind a proxy that plants what a server cannot be
asked for (tests/helpers/faulty_server.py). Eight factors have two values in every run, of which all but the faulty one are
harmless: weights in Q8_0, a template with a comment more, keys and values in q8_0, two drafted tokens, the prefix cache, two
requests in flight, top-k 1. An arm that an earlier run has measured with the same command and values is not measured again. A run
that was stopped goes on. Simulated runs: the planner with answers drawn at the rates that are stated.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import random
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/helpers"))

import tiny_variants  # noqa: E402

import annie_quant  # noqa: E402
from annie_quant.core.files import read_json, write_json, write_text  # noqa: E402
from annie_quant.data.workloads import resolve  # noqa: E402
from annie_quant.judge.statistics import mcnemar  # noqa: E402
from annie_quant.ops.attribution import (  # noqa: E402
    ArmResult,
    AttributionRun,
    Conclusion,
    Effect,
    pairs_of,
    plan,
)
from annie_quant.ops.attribution_servers import CommandTarget  # noqa: E402

REPORT = ROOT / "tests/perf/attribution.md"
VLLM = "## The real vLLM on a CPU"
N = 14


def change_weights(folder: Path, target: Path, change: Callable[[dict], None]) -> Path:
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, target)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def drop_tensor(tensors: dict) -> None:
    tensors["model.layers.3.self_attn.o_proj.weight"].zero_()


def wrong_scale(tensors: dict) -> None:
    tensors["model.layers.3.self_attn.o_proj.weight_scale_2"] *= 16


def coarse_head(tensors: dict) -> None:
    """Round the head to five values with one scale for the whole tensor."""
    head = tensors["lm_head.weight"].float()
    step = head.abs().max() / 2
    tensors["lm_head.weight"] = ((head / step).round() * step).to(tensors["lm_head.weight"].dtype)


def damage(tensors: dict) -> None:
    import torch

    generator = torch.Generator().manual_seed(0)
    for name in sorted(n for n in tensors if ".mlp." in n and n.endswith("_proj.weight")):
        noise = (
            torch.randn(tensors[name].shape, generator=generator)
            * tensors[name].float().std()
            * 0.8
        )
        tensors[name] = (tensors[name].float() + noise).to(tensors[name].dtype)


class Files:
    """Models and templates of the runs, made when they are first asked for."""

    def __init__(self, work: Path) -> None:
        self.work = work

    def gguf(self, name: str) -> str:
        path = self.work / f"{name}.gguf"
        if not path.exists():
            kind = {"q8": "Q8_0", "damaged": "Q4_K_M", "scale": None}.get(name, "BF16")
            annie_quant.checkpoint.convert(self.folder(name), "gguf", path, type=kind)
        return str(path)

    def folder(self, name: str) -> Path:
        base = self.work / "bf16"
        if not base.exists():
            tiny_variants.save_with_head(base)
        target = self.work / name
        if name in ("bf16", "q8"):
            return base
        if target.exists():
            return target
        changes = {"dropped": drop_tensor, "head": coarse_head, "damaged": damage}
        if name in changes:
            return change_weights(base, target, changes[name])
        if name == "nvfp4":
            annie_quant.quantize.run("direct", base, target)
            return target
        assert name == "scale"
        return change_weights(self.folder("nvfp4"), target, wrong_scale)

    def template(self, name: str) -> str:
        text = (self.folder("bf16") / "chat_template.jinja").read_text()
        if name == "no-tools":
            text = text.replace("{%- if tools", "{%- if false and tools")
        path = self.work / f"{name}.jinja"
        write_text(path, text + ("{#- harmless -#}" if name == "comment" else ""))
        return str(path)


# name → (what is planted, values of the suspect that differ from the harmless ones, fault of the proxy, culprits)
FAULTS: dict[str, tuple[str, dict[str, str], str, tuple[str, ...]]] = {
    "dropped": ("a dropped tensor: layer 3's o_proj is zero", {"weights": "dropped"}, "", ("weights",)),
    "scale": ("an NVFP4 tensor scale 16 times too large, in layer 3's o_proj", {"weights": "scale"}, "", ("weights",)),
    "head": ("a head in five values", {"weights": "head"}, "", ("weights",)),
    "damaged": ("Q4_K_M made from damaged weights", {"weights": "damaged"}, "", ("weights",)),
    "template": ("a chat template without tools", {"template": "no-tools"}, "", ("template",)),
    "parser": ("the tool parser is off", {"parser": "none"}, "", ("parser",)),
    "sampling": ("temperature 4 instead of top-k 1", {"sampling": '{"temperature": 4, "top_k": 0, "top_p": 1, "min_p": 0}'}, "",
                 ("sampling",)),
    "kv": ("keys and values of another type are read with wrong scales (proxy)", {}, "kv", ("kv",)),
    "prefix": ("the prefix cache returns another conversation's beginning (proxy)", {}, "prefix", ("prefix",)),
    "draft": ("drafts are trusted (proxy)", {}, "draft", ("mtp",)),
    "batch": ("a request gets the question of another in flight (proxy)", {}, "batch", ("batch",)),
    "mtp-prefix": ("MTP with the prefix cache (proxy)", {}, "mtp-prefix", ("mtp", "prefix")),
}  # fmt: skip


def real_run(files: Files, folder: Path, changed: dict[str, str], fault: str, seed: int) -> dict:
    """Return attribution.json and the seconds of one real run."""
    if (folder / "row.json").exists():
        return read_json(folder / "row.json")
    suspect = {
        "weights": "q8", "kv": "q8_0", "mtp": "2", "prefix": "on", "batch": "2", "template": "comment", "parser": "usual",
        "sampling": '{"temperature": 0, "top_k": 1}',
    } | changed  # fmt: skip
    suspect |= {
        "weights": files.gguf(suspect["weights"]),
        "template": files.template(suspect["template"]),
    }
    trusted = {
        "weights": files.gguf("bf16"),
        "kv": "f16",
        "parser": "auto",
        "template": files.template("plain"),
    }
    program = shlex.join([sys.executable, str(ROOT / "tests/helpers/faulty_server.py")])
    line = f"{program} {{port}} {{weights}} --kv {{kv}} --mtp {{mtp}} --template {{template}} --parser {{parser}}"
    line += f" --fault {fault}" if fault else ""
    target = CommandTarget(line, {**trusted, "mtp": "0"}, suspect, 120.0)
    workloads = annie_quant.judge.sample(resolve(None, "tool_web"), N, seed)
    # The same command with the same values is the same arm, which an earlier run has measured.
    for arm in folder.parent.glob("*/arms/*"):
        if (
            not {*arm.name.split("+")} & {*changed}
            and not fault
            and not seed
            and (arm / "bench.json").exists()
        ):
            shutil.copytree(arm, folder / "arms" / arm.name, dirs_exist_ok=True)
    start = time.monotonic()
    result = AttributionRun(target, workloads, folder, seed=seed).run()
    row = {
        "causes": [list(c) for c in result.conclusion.causes],
        "arms": len(result.arms),
        "sentence": result.sentence,
        "unfinished": result.conclusion.unfinished,
        "seconds": round(time.monotonic() - start),
    }
    write_json(folder / "row.json", row)
    return row


# ---- the planner with drawn answers

FACTORS = (
    "weights",
    "activations",
    "template",
    "parser",
    "kv",
    "mtp",
    "prefix",
    "graphs",
    "batch",
    "sampling",
)


def simulate(
    causes: Sequence[tuple[str, ...]], n: int, broken: float, noise: float, seed: int
) -> tuple[Conclusion, int]:
    """Return the conclusion and the number of arms. broken: share of answers that a cause breaks; noise: that flips in any arm."""
    rng = random.Random(seed)
    right = [rng.random() < 0.9 for _ in range(n)]

    def answers(factors: tuple[str, ...]) -> list[bool]:
        result = [r != (rng.random() < noise) for r in right]
        for cause in causes:
            if {*cause} <= {*factors}:
                result = [r and rng.random() >= broken for r in result]
        return result

    results: list[ArmResult] = []
    base = answers(())
    while not isinstance(step := plan(FACTORS, results), Conclusion):
        arm = answers(step.factors)
        lost = sum(a and not b for a, b in zip(base, arm, strict=True))
        won = sum(b and not a for a, b in zip(base, arm, strict=True))
        measured = step.factors or step.again
        results.append(
            ArmResult(
                step.factors,
                step.again,
                Effect(n, lost, won, mcnemar(lost, won)) if measured else None,
            )
        )
    return step, len(results)


def simulated_rows(runs: int) -> list[str]:
    cases: dict[str, list[list[tuple[str, ...]]]] = {
        "no fault": [[]],
        "one factor": [[(f,)] for f in FACTORS],
        "a pair": [[pair] for pair in pairs_of(FACTORS)],
        "two factors": [[(a,), (b,)] for a, b in itertools.combinations(FACTORS, 2)],
    }
    rows = []
    for (name, causes), (broken, noise) in itertools.product(
        cases.items(), ((0.15, 0.01), (0.15, 0.03), (0.3, 0.05))
    ):
        named = partly = innocent = arms = most = 0
        for seed in range(runs):
            planted = causes[seed % len(causes)]
            end, n_arms = simulate(planted, 200, broken, noise, seed)
            guilty = {f for cause in planted for f in cause}
            named += {frozenset(c) for c in end.causes} == {frozenset(c) for c in planted}
            partly += bool(end.causes) and {frozenset(c) for c in end.causes} < {
                frozenset(c) for c in planted
            }
            innocent += bool({f for c in end.causes for f in c} - guilty)
            arms, most = arms + n_arms, max(most, n_arms)
        rows.append(
            f"| {name} | {'–' if not planted else f'{broken:.0%}'} | {noise:.0%} | {runs} | {named} | {partly} | {innocent} "
            f"| {arms / runs:.1f} | {most} |"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=Path)
    parser.add_argument("--only", nargs="*", default=list(FAULTS))
    parser.add_argument("--healthy", type=int, default=5, help="real runs without a fault")
    parser.add_argument("--simulated", type=int, default=1000, help="simulated runs per row")
    args = parser.parse_args()
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    files, rows, right = Files(work), [], 0
    for name in args.only:
        planted, changed, fault, culprits = FAULTS[name]
        row = real_run(files, work / "runs" / name, changed, fault, 0)
        ok = row["causes"] == [list(culprits)]
        right += ok
        rows.append(
            f"| {planted} | {'yes' if ok else 'no'} | {row['arms']} | {row['seconds']} | {row['sentence']} |"
        )
        print(rows[-1], flush=True)
    healthy = [
        real_run(files, work / "runs" / f"healthy-{seed}", {}, "", seed)
        for seed in range(args.healthy)
    ]
    for row in healthy:
        print(json.dumps(row), flush=True)
    accused = sum(bool(row["causes"]) for row in healthy)
    command = "python tests/perf/attribution.py WORK " + " ".join(sys.argv[2:])
    text = f"""# Does `annie-quant attribute` name a planted fault?

{datetime.date.today():%Y-%m-%d}, two cores under other load, `{command.strip()}`.
{N} prompts of tool_web, eight factors with two values each, at most 12 arms. An arm that an earlier row has measured with the same
command and values is not measured again.

**{right} of {len(rows)} planted faults named rightly, {accused} of {len(healthy)} real runs without a fault named anybody.**
A row without "(proxy)" is the real server's own behaviour; the proxy is tests/helpers/faulty_server.py.

| planted | named rightly | arms | seconds | sentence |
|---|---|---|---|---|
{chr(10).join(rows)}

Without a fault: {"; ".join(f"{row['arms']} arms, {row['sentence']}" for row in healthy) or "no real run"}.

## The planner with drawn answers

{datetime.date.today():%Y-%m-%d}.
Ten factors, 200 prompts of which the base answers 90 % rightly. "breaks": share of the answers that each cause breaks; "noise":
share that changes in any arm; "innocent": runs that name a factor which is not in the fault; "partly": some of two causes.

| fault | breaks | noise | runs | named | partly | innocent | arms, mean | arms, most |
|---|---|---|---|---|---|---|---|---|
{chr(10).join(simulated_rows(args.simulated))}
"""
    _, heading, vllm = REPORT.read_text().partition(VLLM)  # written by attribution_vllm.py
    write_text(REPORT, f"{text}\n{heading}{vllm}" if heading else text)


if __name__ == "__main__":
    main()
