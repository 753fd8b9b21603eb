"""False "keeps" and false "loses": damaged and harmless variants of a model, judged on few prompts, and the truth on many others.

    python tests/perf/false_keeps.py run MODEL --workloads W --n 100 --output runs/false_keeps.jsonl
    python tests/perf/false_keeps.py run MODEL --checkpoint NVFP4 --numerics w4a4,w4a16 --output runs/exports.jsonl
    python tests/perf/false_keeps.py table runs/*.jsonl

MODEL: a bf16 folder, the reference. --workloads, --persona: as for `annie-quant eval`; --n: prompts per gate of the verdict. All
other prompts are the truth of a damaged variant, computed in the same arithmetic. With --checkpoint, an NVFP4 folder of any
quantizer is judged as it is, once per numerics. Without, a variant is the model with its weights changed in memory:

harmless  rounding noise of 2^-9 of each weight, the channels of each MLP in another order (the same function, other sums)
damaged   noise on all linears, on one layer, on the head's rows of the tokens that open calls; block scales off by a
          factor of two; one layer's output scaled; rows of a layer set to zero; half of the layers rounded to NVFP4 with
          noise; experts exchanged. The strength of each kind follows its earlier results, so that true losses between 10 and 40
          points are frequent

--share I/N: this process computes every N-th variant from I on, so that several share one GPU (each with its own --output).
One JSON line per variant, written at once; a killed run resumes. A line has the counts that its verdict is made from, so that
`table` can apply a newer rule. The true loss is the largest of (lost - won) / n over the gates with a label or a rule that bf16
passes in at least 52 of the other prompts, and of the change of the call rate. A false "keeps" has a true loss of 10 points or
more. --trials: a damaged variant is also judged on that many other choices of --n
prompts per gate from all of them, each without the further arithmetics, which could only add losses.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

import torch
from scipy.stats import spearmanr
from torch import nn

from annie_quant import judge
from annie_quant.data.workloads import resolve
from annie_quant.documents import Evaluation, NumericsResult, PairedGate, PairedVerdict
from annie_quant.judge import Workload, evidence, pairing
from annie_quant.judge.decision import RULE
from annie_quant.judge.gates import GATES, REFERENCE_GATES
from annie_quant.judge.pairing import MIN_ANSWERS_TO_KEEP
from annie_quant.offline.evaluation import evaluate_pair
from annie_quant.offline.pair import EvaluationJob, ModelPair, open_pair

TRUE_LOSS = 0.10
OPENING = ("<tool_call>", "</tool_call>", "<|im_end|>", "{", "<function", "name")
AIMED_LOSS = (0.10, 0.40)  # where a kind's strength stays
LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # E2M1's
MIDPOINTS = (LEVELS[1:] + LEVELS[:-1]) / 2
Damage = Callable[[nn.Module, random.Random], None]


class Counts(TypedDict):
    """gates: n, lost, won, passed of each. changes: how many answers changed in one way, and pairing.Change."""

    gates: dict[str, list[int]]
    changes: list[list[Any]]


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    return list(
        next(
            m
            for name, m in model.named_modules()
            if name.endswith("layers") and isinstance(m, nn.ModuleList)
        )
    )


def linears(module: nn.Module) -> list[nn.Linear]:
    return [m for m in module.modules() if isinstance(m, nn.Linear)]


def add_noise(weight: torch.Tensor, share: float, seed: int) -> None:
    """Add normal noise with this share of the weight's root mean square."""
    generator = torch.Generator(device=weight.device).manual_seed(seed)
    noise = torch.randn(weight.shape, generator=generator, device=weight.device)
    weight.add_((noise * weight.float().pow(2).mean().sqrt() * share).to(weight.dtype))


def all_noise(share: float) -> Damage:
    def apply(model: nn.Module, rng: random.Random) -> None:
        for layer in decoder_layers(model):
            for linear in linears(layer):
                add_noise(linear.weight, share, rng.getrandbits(31))

    return apply


def layer_noise(share: float) -> Damage:
    def apply(model: nn.Module, rng: random.Random) -> None:
        for linear in linears(rng.choice(decoder_layers(model))):
            add_noise(linear.weight, share * 8, rng.getrandbits(31))

    return apply


def block_scales(share: float) -> Damage:
    """Double or halve blocks of 16 weights in a share of all rows of one kind of linear."""

    def apply(model: nn.Module, rng: random.Random) -> None:
        kind = rng.choice(["o_proj", "down_proj", "up_proj", "q_proj", "out_proj"])
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and name.endswith(kind):
                rows, columns = module.weight.shape
                blocks = torch.rand(
                    rows,
                    columns // 16,
                    generator=torch.Generator().manual_seed(rng.getrandbits(31)),
                )
                factor = torch.where(blocks < share, rng.choice([0.5, 2.0]), 1.0).repeat_interleave(
                    16, 1
                )
                module.weight[:, : factor.shape[1]].mul_(factor.to(module.weight))

    return apply


def scaled_layer(share: float) -> Damage:
    def apply(model: nn.Module, rng: random.Random) -> None:
        layer = rng.choice(decoder_layers(model))
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear) and name.endswith(("o_proj", "down_proj", "out_proj")):
                module.weight.mul_(1 + rng.choice([-2.5, 5]) * share)

    return apply


def zero_rows(share: float) -> Damage:
    def apply(model: nn.Module, rng: random.Random) -> None:
        layer = rng.choice(decoder_layers(model))
        for linear in linears(layer):
            picked = torch.rand(
                linear.weight.shape[0], generator=torch.Generator().manual_seed(rng.getrandbits(31))
            )
            linear.weight[(picked < share).to(linear.weight.device)] = 0

    return apply


def rounded(share: float) -> Damage:
    """Round a random half of the layers to NVFP4 (block and tensor maximum), with noise of this share of each block's step."""

    def apply(model: nn.Module, rng: random.Random) -> None:
        layers = decoder_layers(model)
        for layer in rng.sample(layers, math.ceil(len(layers) / 2)):
            for linear in linears(layer):
                weight = linear.weight.float()
                rows, columns = weight.shape
                if columns % 16:
                    continue
                generator = torch.Generator(device=weight.device).manual_seed(rng.getrandbits(31))
                blocks = weight.reshape(rows, -1, 16)
                step = blocks.abs().amax(-1, keepdim=True) / 6
                noise = (
                    (torch.rand(blocks.shape, generator=generator, device=weight.device) - 0.5)
                    * 8
                    * share
                )
                scaled = (blocks / step.clamp_min(1e-12)).add_(noise).clamp_(-6, 6)
                place = torch.bucketize(scaled.abs(), MIDPOINTS.to(weight.device))
                values = LEVELS.to(weight.device)[place] * scaled.sign() * step
                linear.weight.copy_(values.reshape(rows, columns))

    return apply


def head_rows(tokens: list[int], share: float) -> Damage:
    """Shrink the head's rows of the tokens that open and close calls; a tied embedding is untied first."""

    def apply(model: nn.Module, rng: random.Random) -> None:
        head = model.get_output_embeddings()  # type: ignore[operator]
        if head.weight is model.get_input_embeddings().weight:  # type: ignore[operator]
            head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        head.weight[tokens] *= 1 - share
        for token in tokens:
            add_noise(head.weight[token], share, rng.getrandbits(31))

    return apply


def exchanged_experts(share: float) -> Damage:
    def apply(model: nn.Module, rng: random.Random) -> None:
        groups: dict[str, list[nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            if "experts" in name:
                groups.setdefault(re.sub(r"\.\d+\.(?=[^.]*\.weight$)", ".*.", name), []).append(
                    parameter
                )
        for parameters in groups.values():
            if len(parameters) == 1 and parameters[0].ndim == 3:  # all experts in one tensor
                count = parameters[0].shape[0]
                a, b = rng.sample(range(count), 2)
                if rng.random() < share * 3:
                    parameters[0][[a, b]] = parameters[0][[b, a]].clone()

    return apply


def rounding(model: nn.Module, rng: random.Random) -> None:
    for layer in decoder_layers(model):
        for linear in linears(layer):
            weight = linear.weight
            generator = torch.Generator(device=weight.device).manual_seed(rng.getrandbits(31))
            factor = (
                1
                + (torch.rand(weight.shape, generator=generator, device=weight.device) - 0.5)
                * 2**-8
            )
            weight.copy_(
                weight.float() * factor
            )  # of a model in bfloat16: half of its last digit at most


def permuted_mlp(model: nn.Module, rng: random.Random) -> None:
    for layer in decoder_layers(model):
        mlp: Any = getattr(layer, "mlp", None)
        if mlp is None or not all(hasattr(mlp, n) for n in ("gate_proj", "up_proj", "down_proj")):
            continue
        order = torch.randperm(
            mlp.up_proj.weight.shape[0],
            generator=torch.Generator().manual_seed(rng.getrandbits(31)),
        )
        order = order.to(mlp.up_proj.weight.device)
        for linear in (mlp.gate_proj, mlp.up_proj):
            linear.weight.copy_(linear.weight[order])
        mlp.down_proj.weight.copy_(mlp.down_proj.weight[:, order])


def kinds_of(pair: ModelPair) -> dict[str, tuple[float, Callable[[float], Damage]]]:
    """Return the kinds of damage that the model can have, each with its first strength."""
    tokens = sorted({t for text in OPENING for t in pair.template.ids(text)[:1]})
    kinds: dict[str, tuple[float, Callable[[float], Damage]]] = {
        "noise": (0.12, all_noise),
        "layer": (0.12, layer_noise),
        "scales": (0.12, block_scales),
        "head": (0.12, lambda share: head_rows(tokens, share)),
        "scaled": (0.2, scaled_layer),
        "zero": (0.12, zero_rows),
        "rounded": (0.1, rounded),
    }
    if any("experts" in name for name, _ in pair.model.named_parameters()):
        kinds["experts"] = (0.3, exchanged_experts)
    return kinds


def strength(first: float, losses: list[float], rng: random.Random) -> float:
    """Return the next strength of a kind whose variants had these true losses: more after a small one, less after a large one."""
    share = first
    for loss in losses:
        share *= 1.5 if loss < AIMED_LOSS[0] else 0.7 if loss > AIMED_LOSS[1] else 1
    return round(min(share, 1.0) * rng.uniform(0.85, 1.15), 4)


def split(workloads: list[Workload], n: int, truth: int) -> tuple[list[Workload], list[Workload]]:
    """Return the verdict's prompts, and up to `truth` others per gate."""
    test = judge.sample(workloads, n)
    used = {(w.name, case.id) for w in test for case in w.cases}
    rest = [
        replace(w, cases=tuple(c for c in w.cases if (w.name, c.id) not in used)) for w in workloads
    ]
    return [w for w in test if w.cases], judge.sample([w for w in rest if w.cases], truth)


def true_losses(side: NumericsResult) -> dict[str, float]:
    losses = {}
    for name, gate in side.paired.items():
        if name in REFERENCE_GATES or GATES[name].advisory:
            continue
        if GATES[name].two_sided:
            losses[name] = abs(gate.lost - gate.won) / gate.n
        elif (gate.passed or 0) >= MIN_ANSWERS_TO_KEEP and (gate.passed or 0) >= gate.n / 10:
            losses[name] = (gate.lost - gate.won) / gate.n
    return losses


def figures(evaluation: Evaluation) -> dict[str, Any]:
    verdict = evaluation.verdict
    assert verdict is not None
    side = next(iter(evaluation.numerics.values()))
    decisions = getattr(side.kl, "decisions", None)
    return {
        "verdict": verdict.verdict,
        "not_tested": verdict.not_tested,
        "loses": sorted({gate for member in verdict.members.values() for gate in member.loses}),
        "kl": side.kl.mean if side.kl else None,
        "flips": side.kl.flips if side.kl else None,
        "kl_decisions": decisions.mean if decisions else None,
        "flips_decisions": decisions.flips if decisions else None,
    }


def counts_of(evaluation: Evaluation) -> dict[str, Counts]:
    """Return per arithmetic what its verdict is made from: counts per gate, and the changes of the answers."""
    counts: dict[str, Counts] = {}
    for name, side in evidence.sides(evaluation).items():
        changes = Counter(
            json.dumps(change)
            for old, new in evidence.pairs(evaluation, name)
            if (change := pairing.change_of(old, new)) is not None
        )
        counts[name] = {
            "gates": {
                gate: [row.n, row.lost, row.won, row.passed] for gate, row in side.paired.items()
            },
            "changes": [[times, *json.loads(change)] for change, times in changes.items()],
        }
    return counts


def judged_again(counts: dict[str, Counts]) -> PairedVerdict:
    """Return the verdict of today's rule about stored counts."""
    gates, pooled = {}, {}
    for name, side in counts.items():
        gates[name] = {
            gate: PairedGate(n, lost, won, passed=passed)
            for gate, (n, lost, won, passed) in side["gates"].items()
        }
        changes = [
            (whole, change) for times, whole, change in side["changes"] for _ in range(times)
        ]
        pooled[name] = pairing.pool(changes) if changes else None
    return judge.judge_members(gates, pooled)


def resampled(
    parts: list[Evaluation], workloads: list[Workload], n: int, trials: int
) -> Counter[str]:
    """Return how often each verdict is the result for other choices of n prompts per gate, in one arithmetic.

    parts: evaluations of one variant over different prompts of the workloads.
    """
    whole = copy.deepcopy(parts[0])
    (side,) = whole.numerics.values()
    whole.members, whole.ensemble, results = {}, {}, Counter()
    for part in parts[1:]:
        (other,) = part.numerics.values()
        pairs = ((whole.prompts, part.prompts), (side.outcomes, other.outcomes))
        for mine, more in (
            *pairs,
            (whole.reference_outcomes, part.reference_outcomes),
            (whole.floor_outcomes, part.floor_outcomes),
        ):
            for gate, values in more.items():
                mine[gate] = mine[gate] + values if gate in mine else values  # type: ignore[operator, assignment]
    for seed in range(1, trials + 1):
        cases = {(w.name, case.id) for w in judge.sample(workloads, n, seed) for case in w.cases}
        trial = copy.deepcopy(whole)
        for gate, prompts in whole.prompts.items():
            picked = [
                i for i, prompt in enumerate(prompts) if tuple(prompt.split("/")[:2]) in cases
            ]
            trial.prompts[gate] = [prompts[i] for i in picked]
            for outcomes in (
                trial.reference_outcomes,
                trial.floor_outcomes,
                next(iter(trial.numerics.values())).outcomes,
            ):
                if gate in outcomes:
                    outcomes[gate] = "".join(outcomes[gate][i] for i in picked)
        verdict = evidence.recounted(trial).verdict
        assert verdict is not None
        results[verdict.verdict] += 1
    return results


def run(arguments: argparse.Namespace) -> None:
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    rows = read_rows(arguments.output) if arguments.output.exists() else []
    done = {row["variant"] for row in rows}
    everything = resolve(arguments.persona, arguments.workloads)
    test, truth = split(everything, arguments.n, arguments.truth)
    if arguments.max_tokens:
        test, truth = (
            [replace(w, max_tokens=min(w.max_tokens, arguments.max_tokens)) for w in part]
            for part in (test, truth)
        )
    end = time.monotonic() + arguments.seconds
    label = (
        arguments.label
        or f"{arguments.model.name}-{arguments.persona or arguments.workloads or 'annie'}"
    )
    job = EvaluationJob(
        checkpoint=arguments.checkpoint or arguments.model,
        reference=arguments.model,
        cache=arguments.cache,
        dtype=arguments.dtype,
        rows=arguments.rows,
    )

    def measure(pair: ModelPair, variant: str, harmless: bool, numerics: str) -> None:
        start = time.monotonic()
        judged = evaluate_pair(replace(pair, job=replace(job, numerics=[numerics])), test)
        row = {
            "variant": variant,
            "harmless": harmless,
            "rule": RULE,
            "n_test": judged.n_answers,
            **figures(judged),
        }
        row["counts"] = counts_of(judged)
        if not harmless:
            actual = evaluate_pair(
                replace(pair, job=replace(job, numerics=[numerics], ensemble=False)), truth
            )
            losses = true_losses(next(iter(actual.numerics.values())))
            row["n_truth"] = actual.n_answers
            row["losses"] = {gate: round(value, 4) for gate, value in losses.items()}
            row["true_loss"] = round(max(losses.values(), default=0.0), 4)
            if arguments.trials:
                row["trials"] = resampled(
                    [judged, actual], everything, arguments.n, arguments.trials
                )
        row["seconds"] = round(time.monotonic() - start, 1)
        rows.append(row)
        with arguments.output.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(
            f"{variant}: {row['verdict']}, true loss {row.get('true_loss')}, {row['seconds']} s",
            flush=True,
        )

    with torch.no_grad(), open_pair(job) as pair:
        if arguments.checkpoint:
            for numerics in arguments.numerics.split(","):
                if (variant := f"{label}/{arguments.checkpoint.name}-{numerics}") not in done:
                    measure(pair, variant, False, numerics)
            return
        saved = {
            name: parameter.detach().clone() for name, parameter in pair.model.named_parameters()
        }
        head = pair.model.get_output_embeddings().weight  # type: ignore[operator]
        kinds = kinds_of(pair)
        first, step = map(int, arguments.share.split("/"))
        count = max(arguments.damaged, arguments.harmless)
        every = [(i, harmless) for i in range(count) for harmless in (True, False)]
        selected = [
            (i, h) for i, h in every if i < (arguments.harmless if h else arguments.damaged)
        ]
        for i, harmless in selected[first::step]:
            kind = ("rounding", "permuted")[i // 2 % 2] if harmless else list(kinds)[i % len(kinds)]
            variant = f"{label}/{'harmless-' * harmless}{kind}-{i}"
            if variant in done:
                continue
            if time.monotonic() > end:
                break
            rng = random.Random(variant)
            if harmless:
                (rounding if kind == "rounding" else permuted_mlp)(pair.model, rng)
            else:
                start, damage = kinds[kind]
                losses = [
                    r["true_loss"] for r in rows if r["variant"].startswith(f"{label}/{kind}-")
                ]
                damage(strength(start, losses, rng))(pair.model, rng)
            measure(pair, variant, harmless, "bf16")
            pair.model.get_output_embeddings().weight = head  # type: ignore[operator]
            for key, parameter in pair.model.named_parameters():
                parameter.copy_(saved[key])


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def table(arguments: argparse.Namespace) -> int:
    rows = [row for file in arguments.files for row in read_rows(file)]
    for row in rows:
        if row["rule"] != RULE and "counts" in row:
            row |= {"rule": RULE, "verdict": judged_again(row["counts"]).verdict}
    if other := {r["rule"] for r in rows} - {RULE}:
        sys.exit(
            f"verdicts of rule {', '.join(map(str, other))}, this is rule {RULE}: run those variants again"
        )
    damaged = [r for r in rows if not r["harmless"]]
    lossy = [r for r in damaged if r["true_loss"] >= TRUE_LOSS]
    false_keeps = [r for r in lossy if r["verdict"] == "keeps"]
    harmless = [r for r in rows if r["harmless"]]
    alarms = [r for r in harmless if r["verdict"] in ("loses", "fragile")]
    print("| | n | keeps | undecided | loses or fragile |\n|---|---|---|---|---|")
    for title, group in (
        ("harmless", harmless),
        ("damaged, true loss below 5 points", [r for r in damaged if r["true_loss"] < 0.05]),
        ("damaged, 5 to 10 points", [r for r in damaged if 0.05 <= r["true_loss"] < TRUE_LOSS]),
        ("damaged, 10 points or more", lossy),
    ):
        counts = [
            sum(r["verdict"] in words for r in group)
            for words in (("keeps",), ("undecided",), ("loses", "fragile"))
        ]
        print(f"| {title} | {len(group)} | {' | '.join(map(str, counts))} |")
    print(
        f"\nfalse keeps: {len(false_keeps)} of {len(lossy)}; false loses: {len(alarms)} of {len(harmless)}"
    )
    if arguments.earlier:
        older = [
            r
            for r in read_rows(arguments.earlier)
            if not r["harmless"] and r["true_loss"] >= TRUE_LOSS
        ]
        verdicts = {(r["variant"], f"{r['kl']:.3g}"): r["verdict"] for r in (*older, *lossy)}
        print(
            f"with earlier rules: {Counter(verdicts.values())['keeps']} of {len(verdicts)} different damaged checkpoints keep"
        )
    trials = sum((Counter(r.get("trials", {})) for r in lossy), Counter())
    print(
        f"other choices of prompts for damage of 10 points or more: {trials['keeps']} of {trials.total()} keep"
    )
    for row in (*false_keeps, *alarms):
        worst = max(row.get("losses", {}).items(), key=lambda loss: loss[1], default="")
        print(f"  {row['variant']}: {row['verdict']}, {worst}, loses {', '.join(row['loses'])}")
    for name in ("kl", "flips", "kl_decisions", "flips_decisions"):
        known = [r for r in damaged if r.get(name) is not None]
        if len(known) > 5:
            rho = spearmanr([r[name] for r in known], [r["true_loss"] for r in known]).statistic
            print(f"rank correlation of {name} with the true loss: {rho:.2f} (n = {len(known)})")
    return 1 if false_keeps else 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run", help="judge variants of one model")
    one.add_argument("model", type=Path)
    one.add_argument("--checkpoint", type=Path)
    one.add_argument("--workloads")
    one.add_argument("--persona")
    one.add_argument("--numerics", default="w4a4,w4a16", help="of --checkpoint")
    one.add_argument(
        "--trials",
        type=int,
        default=20,
        help="further choices of prompts that a damaged variant is judged on",
    )
    one.add_argument("--dtype", choices=["float32", "bfloat16"])
    one.add_argument("--rows", type=int, default=128, help="answers per batch")
    one.add_argument("--max-tokens", type=int, help="per answer, at most")
    one.add_argument("--share", default="0/1", help="I/N: every N-th variant from I on")
    one.add_argument("--n", type=int, default=100, help="prompts per gate of the verdict")
    one.add_argument("--truth", type=int, default=500, help="further prompts per gate, at most")
    one.add_argument("--damaged", type=int, default=36)
    one.add_argument("--harmless", type=int, default=12)
    one.add_argument("--seconds", type=float, default=1e9, help="start no variant after this time")
    one.add_argument("--label")
    one.add_argument("--cache", type=Path)
    one.add_argument("--output", type=Path, required=True)
    one.set_defaults(work=run)
    two = commands.add_parser("table", help="print the table of one or more files")
    two.add_argument("files", type=Path, nargs="+")
    two.add_argument(
        "--earlier",
        type=Path,
        help="rows of an older rule that keeps whatever today's keeps; a checkpoint of both counts once",
    )
    two.set_defaults(work=table)
    arguments = parser.parse_args()
    sys.exit(arguments.work(arguments))


if __name__ == "__main__":
    main()
