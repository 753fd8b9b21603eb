"""The frontier between all inputs in 4 bits (W4A4) and in 16 (W4A16): divergence, time to the first token, speed, bytes.

    python tests/perf/input_frontier.py MODEL --calib-data rows.jsonl
    python tests/perf/input_frontier.py MODEL --calib-data rows.jsonl --bands 32 --trial-tokens 2048 --answers given    # quick

MODEL is a bf16 folder. Weights are NVFP4 by GPTQ on the conversations that are not held out, the head stays in bf16. Every group of
linears is measured in both formats; the planner then chooses the least divergence under limits of the predicted time to the first
token, and each choice is evaluated as a whole on the held-out answers. The last rows are `best` without limits and its two ends.
--checkpoints DIR writes every choice as a folder, for `annie-quant eval`. A killed run continues in --work.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from annie_quant.checkpoint import ModelFolder, decode_speed, first_token
from annie_quant.checkpoint.first_token import Prompt
from annie_quant.checkpoint.linears import HEAD
from annie_quant.checkpoint.prompt_work import PromptWork
from annie_quant.core.progress import as_progress
from annie_quant.models.formats import NVFP4, W4A16, Format
from annie_quant.quantize import frontier_plan, held_out, mixed_formats
from annie_quant.quantize.calibration_text import read_answers
from annie_quant.quantize.format_planner import FormatPlanner
from annie_quant.quantize.formats import choose
from annie_quant.quantize.frontier import Limits
from annie_quant.quantize.plan import export
from annie_quant.quantize.rounding import round_model
from annie_quant.quantize.runner import copy_companions
from annie_quant.quantize.strategy import Job, Method, StrategyOptions

KNOWN = "Qwen3.5-9B"  # whose time with the same share of FLOPs is predicted, too


def settings() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--calib-data", type=Path, required=True)
    parser.add_argument("--calib-samples", type=int, default=512)
    parser.add_argument("--answers", choices=("own", "given"), default="own")
    parser.add_argument("--points", type=int, default=9)
    parser.add_argument("--prompt-tokens", type=int)
    parser.add_argument("--device", default="gb10")
    parser.add_argument("--bands", type=int, help="groups at most; default: all on a GPU, else 32")
    parser.add_argument("--trial-tokens", type=int, help="of answers in each trial")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--json", type=Path, help="file of the rows")
    return parser.parse_args()


def known_ms(share: float, device: str) -> float:
    """Return the milliseconds of a 9B whose linears have this share of their FLOPs in W4A4, the others in W4A16."""
    shape = first_token.prefill().models[KNOWN]
    parts = {"w4a4": share, "w4a16": 1.0 - share}
    linears = {
        kernel: (part * shape.linear_weights, 0.5625 * part * shape.linear_weights)
        for kernel, part in parts.items()
    }
    work = PromptWork(shape, linears, 2.0 * shape.head_weights)
    return first_token.predict(work, "vllm", decode_speed.find_device(device), Prompt(2048)).ms


def row_of(
    planner: FormatPlanner, kinds: Mapping[str, Format], whole: np.ndarray, name: str, device: str
) -> dict[str, object]:
    """Return the figures of a choice. whole: of FormatTrials.measure."""
    groups = planner.groups
    choices = [group.formats.index(kinds[unit]) for unit, group in groups.items()]
    total = sum(group.weights for group in groups.values())
    share = sum(groups[unit].weights for unit, kind in kinds.items() if kind == NVFP4) / total
    kl, decisions, flips = whole.sum(0)
    _, noise = held_out.sum_and_standard_error(whole[:, 0].tolist())
    ms = planner.ttft_ms(choices)
    assert ms is not None
    predicted = first_token.with_interval(ms, "vllm", planner.limits.device, planner.prompt)
    return {
        "name": name,
        "share": share,
        "kl": float(kl),
        "kl_error": noise,
        "decisions": float(decisions),
        "flips": float(flips),
        "ms": ms,
        "low_ms": predicted.low_ms,
        "high_ms": predicted.high_ms,
        "known_ms": known_ms(share, device),
        "tok_s": planner.tok_s(choices),
        "mb": planner.bytes_of(choices, "size") / 1e6,
    }


def table(rows: list[dict], prompt: str) -> str:
    lines = [
        f"| choice | FLOPs in W4A4 | KL, 1e-3 nats | at decisions | flips | first token, ms: {prompt} | "
        f"{KNOWN} with that share, ms | tok/s | MB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        interval = "" if r["low_ms"] is None else f" ({r['low_ms']:.4g} to {r['high_ms']:.4g})"
        kl = f"{1e3 * r['kl']:.3g} ± {1e3 * r['kl_error']:.1g}"
        lines.append(
            f"| {r['name']} | {r['share']:.0%} | {kl} | {1e3 * r['decisions']:.3g} | {r['flips']:.2%} | "
            f"{r['ms']:.5g}{interval} | {r['known_ms']:.0f} | {r['tok_s']:.4g} | {r['mb']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    options = settings()
    start = time.monotonic()
    if options.bands:
        served = mixed_formats.served_units
        mixed_formats.units_of = lambda folder, chosen: mixed_formats.bands_of(
            served(folder.family, chosen), options.bands
        )
    if options.trial_tokens:
        for device in held_out.TRIAL_TOKENS:
            held_out.TRIAL_TOKENS[device] = options.trial_tokens
            held_out.TRIAL_POSITIONS[device] = held_out.MAX_POSITIONS[device] = 1 << 17
    progress = as_progress(lambda line: print(f"  {time.monotonic() - start:.0f} s: {line}"))
    work = options.work or Path(tempfile.mkdtemp())
    job: Job[StrategyOptions] = Job(
        options.model,
        work / "out",
        calib_data=options.calib_data,
        calib_samples=options.calib_samples,
        answers=options.answers,
        exclude=(HEAD,),
        scale="sweep",
        work=work,
    )
    folder = ModelFolder(options.model)
    linears = choose(folder, ())
    prompt = Prompt(options.prompt_tokens)
    limits = Limits(decode_speed.find_device(options.device), max_ttft_ms=1e12, prompt=prompt)
    planner = frontier_plan.planner_of(job, limits, dict.fromkeys(linears, (NVFP4, W4A16)))
    text = read_answers(job, progress)
    learned, held = held_out.hold_out(text.samples)
    four_bit = dict.fromkeys(linears, NVFP4)
    rounded = round_model(job, four_bit, learned, Method(), progress, "layers-learned")
    trials = held_out.FormatTrials(job, held or text.samples, rounded)
    planner.measure(trials, progress)
    least, most = (planner.ttft_ms(planner.with_inputs(kind)) or 0.0 for kind in (NVFP4, W4A16))
    chosen: dict[str, dict[str, Format]] = {}
    for i, limit in enumerate(np.linspace(least, most, options.points)):
        planner.limits = replace(limits, max_ttft_ms=float(limit) * (1 + 1e-9))
        choices = planner.solve(float("inf"))
        assert choices is not None
        name = {0: "all W4A4", options.points - 1: "least divergence"}.get(i, f"planned {i}")
        chosen[name] = planner.kinds_of(choices)
    chosen["all W4A16"] = planner.kinds_of(planner.with_inputs(W4A16))
    by_harm = mixed_formats.formats_of_inputs(job, linears, text.samples, progress, 0.05)
    chosen["`best` without limits"] = {
        unit: by_harm[group.members[0]] for unit, group in planner.groups.items()
    }
    rows = []
    for name, kinds in chosen.items():
        formats = planner.formats(kinds)
        rows.append(row_of(planner, kinds, trials.measure(formats), name, options.device))
        if options.checkpoints:
            target = options.checkpoints / name.replace("`", "").replace(" ", "-")
            target.mkdir(parents=True, exist_ok=True)
            export(folder, target, trials.plan_of(formats))
            copy_companions(options.model, target)
    if options.json:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokens = sum(len(a.row.target) for a in trials.answers)
    conversations = len({a.conversation for a in trials.answers})
    print(f"\n{table(rows, planner.prompt_text)}\n")
    print(
        f"{options.model.name}: {len(planner.groups)} groups; divergence over {tokens:,} tokens of "
        f"{len(trials.answers)} held-out answers ({conversations} conversations); {time.monotonic() - start:.0f} s"
    )


if __name__ == "__main__":
    main()
