"""Drafts of tiny-annie's MTP head in llama.cpp: before and after tuning, grafted from `base`, and predicted against served.

    python tests/perf/drafts.py --work DIR [--cases 60] [--stage own|graft|served|equal]

Every second case of the workloads is tuned on, the others are served. The target is tiny-annie in NVFP4 (naive). Answers and
hidden states are computed as llama.cpp on a processor computes them. A stage whose output is in DIR is not done again. Prints the
rows of drafts.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import msgspec
import numpy as np
import torch
from paths import TINY_ANNIE
from safetensors.torch import load_file, save_file
from tiny_variants import save_variant, save_with_head

import annie_quant as aq
from annie_quant import judge, offline
from annie_quant.checkpoint import ModelFolder
from annie_quant.checkpoint.draft_heads import head_tensors
from annie_quant.checkpoint.draft_speed import StepSeconds, speeds_of
from annie_quant.documents.drafts import DraftPrediction
from annie_quant.offline.decoding import generate
from annie_quant.offline.draft_prediction import predict_drafts
from annie_quant.offline.emulation import emulate
from annie_quant.offline.engine import Engine
from annie_quant.offline.hidden_states import DraftedAnswer
from annie_quant.offline.profiles import find_profile
from annie_quant.offline.prompts import Template
from annie_quant.ops.served_drafts import DraftedSteps, count_positions, drafted_steps
from annie_quant.quantize.draft import run as draft

NUMERICS = "llama.cpp-cpu"
WORKLOADS = (
    "conversational",
    "factual",
    "long_response",
    "reasoning",
    "tool_memory",
    "tool_web",
)
LIMIT = 120  # tokens per answer
DRAFTS = (0, 1, 2, 3)
CALIBRATION = Path(__file__).resolve().parents[1] / "data" / "calibration.jsonl"
Prompts = list[tuple[str, tuple[int, ...]]]  # workload, tokens


def tuning_rows(path: Path) -> Path:
    """Write every second case of the default workloads as a conversation; the model writes the answers itself."""
    with path.open("w", encoding="utf-8") as file:
        for workload in judge.load_workloads():
            for case in [] if workload.name == "briefing" else workload.cases[1::2]:
                messages = [dict(message) for message in workload.messages(case, 0, ())]
                row = {
                    "id": f"{workload.name}-{case.id}",
                    "category": workload.name,
                    "messages": [*messages, {"role": "assistant", "content": "Yes."}],
                    "tools": workload.tools_for(case),
                    "thinking": bool(workload.thinking),
                }
                file.write(json.dumps(row) + "\n")
    return path


def served_prompts(cases: int) -> Prompts:
    template = Template(TINY_ANNIE)
    prompts = []
    for workload in judge.load_workloads(list(WORKLOADS)):
        for case in workload.cases[::2][:cases]:
            prompts.append((workload.name, template.request(workload, case).prompt))
    return prompts


def quantized(work: Path, name: str, source: Path) -> Path:
    folder = work / name
    if not folder.is_dir():
        aq.quantize.run("naive", source, folder, calib_data=CALIBRATION)
    return folder


def tuned(work: Path, name: str, model: Path, base: Path | None, numerics: str | None) -> Path:
    folder = work / name
    if not folder.is_dir():
        rows = tuning_rows(work / "rows.jsonl")
        start = (time.monotonic(), time.process_time())
        result = draft(model, folder, rows, base=base, numerics=numerics)
        wall = time.monotonic() - start[0]
        cpu = time.process_time() - start[1]
        print(f"{name}: tuned in {wall:.0f} s, {cpu:.0f} s of processor time", flush=True)
        for line in result.lines():
            print(f"  {line}", flush=True)
    return folder


def with_head_of(work: Path, name: str, model: Path, head: Path) -> Path:
    """Save `model` with the head of another folder."""
    folder = work / name
    if not folder.is_dir():
        source = ModelFolder(head)
        tensors = load_file(model / "model.safetensors")
        stored = load_file(head / "model.safetensors")
        tensors |= {new: stored[old] for new, old in head_tensors(source).items()}
        folder.mkdir()
        for file in model.iterdir():
            if file.suffix == ".json" or file.suffix == ".jinja":
                (folder / file.name).write_bytes(file.read_bytes())
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        config["mtp_num_hidden_layers"] = 1
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def predicted(folder: Path, prompts: Prompts) -> dict[str, DraftPrediction]:
    """Return the prediction from the checkpoint's own answers; no server runs. All targets here have the same decoder."""
    model = offline.load(folder, dtype=torch.float32)
    engine = Engine(model)
    template = Template(folder)
    stored = folder.with_name(f"answers-{len(prompts)}.json")
    with emulate(model, find_profile(NUMERICS)):
        if not stored.is_file():
            tokens = [prompt for _, prompt in prompts]
            completions = generate(engine, tokens, [LIMIT] * len(tokens), template.end_tokens)
            stored.write_text(json.dumps([template.target(c) for c in completions]))
        answers = [
            DraftedAnswer(workload, prompt, answer)
            for (workload, prompt), answer in zip(
                prompts, json.loads(stored.read_text()), strict=True
            )
        ]
        return predict_drafts(engine, ModelFolder(folder), answers, max(DRAFTS))


def serve(folder: Path, prompts: Prompts) -> dict[int, list[DraftedSteps]]:
    """Return llama.cpp's answers by drafts per step."""
    file = folder.with_suffix(".gguf")
    if not file.is_file():
        aq.checkpoint.convert(folder, "gguf", file)
    tokens = [prompt for _, prompt in prompts]
    answers = {}
    for drafts in DRAFTS:
        stored = folder.with_name(f"{folder.name}-{drafts}-{len(prompts)}.json")
        if not stored.is_file():
            with aq.serve.start(file, drafts=drafts) as server:
                served = drafted_steps(server.url, tokens, LIMIT, None, {"cache_prompt": True})
            stored.write_bytes(msgspec.json.encode(served))
        answers[drafts] = msgspec.json.decode(stored.read_bytes(), type=list[DraftedSteps])
    return answers


def step_seconds(answers: Sequence[DraftedSteps], drafts: int) -> float:
    """Return the seconds per step that a tenth of the answers do not exceed: a shared processor disturbs the others."""
    each = []
    for answer in answers:
        steps = len(answer.steps) if drafts else len(answer.tokens) - 1
        if steps:
            each.append(answer.seconds / steps)
    return sorted(each)[len(each) // 10]


def fit(seconds: Mapping[int, float]) -> StepSeconds:
    """Return the steps of a measured server, T(n) = first + n * draft. seconds: of steps, by their number of drafts."""
    counts = [n for n in seconds if n]
    draft_s, first_s = np.polyfit(counts, [seconds[n] for n in counts], 1)
    print(f"constants: {seconds[0]:.3g} s without, {first_s:.3g} s and {draft_s:.3g} s per draft")
    return lambda drafts: first_s + drafts * draft_s if drafts else seconds[0]


def compare(folder: Path, prompts: Prompts) -> None:
    """Print predicted and served acceptance and speed per workload, and how many answers drafts change."""
    answers = serve(folder, prompts)
    prediction = predicted(folder, prompts)
    groups = {
        name: [i for i, (kind, _) in enumerate(prompts) if kind == name] for name in WORKLOADS
    }
    groups["all"] = list(range(len(prompts)))
    # The constants of the machine and server come from one workload and two numbers of drafts.
    fitted = [i for i in groups["conversational"]]
    seconds = fit({n: step_seconds([answers[n][i] for i in fitted], n) for n in (0, 1, 3)})
    for name, indices in groups.items():
        speeds = speeds_of(prediction[name], seconds)
        best = max(DRAFTS, key=lambda n: served_speed([answers[n][i] for i in indices], n))
        for drafts in DRAFTS[1:]:
            own = [answers[drafts][i] for i in indices]
            counts = count_positions(own)
            shares = " ".join(f"{100 * share:.1f}" for share in counts.shares)
            steps = prediction[name].of(drafts)
            expected = " ".join(f"{100 * share.value:.1f}" for share in steps.accepted)
            rate = served_speed(own, drafts)
            print(
                f"| {name} | {drafts} | {sum(counts.offered)} | {expected} | {shares} | "
                f"{steps.tokens_per_step.value:.2f} | {tokens_per_step(own):.2f} | "
                f"{speeds[drafts]:.0f} | {rate:.0f} |",
                flush=True,
            )
        plain = served_speed([answers[0][i] for i in indices], 0)
        print(
            f"{name}: {plain:.0f} tok/s without; best n predicted {speeds.index(max(speeds))}, served {best}"
        )
    for drafts in DRAFTS[1:]:
        pairs = zip(answers[0], answers[drafts], strict=True)
        equal = sum(a.tokens == b.tokens for a, b in pairs)
        print(f"n = {drafts}: {equal} of {len(prompts)} answers equal those without drafts")


def tokens_per_step(answers: Sequence[DraftedSteps]) -> float:
    tokens = sum(len(answer.tokens) - 1 for answer in answers)
    return tokens / max(1, sum(len(answer.steps) for answer in answers))


def served_speed(answers: Sequence[DraftedSteps], drafts: int) -> float:
    """Return tokens per second: tokens per step, by the undisturbed seconds per step."""
    per_step = tokens_per_step(answers) if drafts else 1.0
    return per_step / step_seconds(answers, drafts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--cases", type=int, default=60, help="served per workload")
    parser.add_argument("--stages", default="own,graft,before,after")
    options = parser.parse_args()
    torch.set_num_threads(1)
    work = options.work
    work.mkdir(parents=True, exist_ok=True)
    stages = options.stages.split(",")
    with_head = work / "bf16"
    if not with_head.is_dir():
        save_with_head(with_head)
    target = quantized(work, "nvfp4", with_head)
    prompts = served_prompts(options.cases)
    if "before" in stages:
        print("## before", flush=True)
        compare(target, prompts)
    if "own" in stages or "after" in stages:
        own = tuned(work, "tuned", target, None, NUMERICS)
    if "after" in stages:
        print("## after", flush=True)
        compare(own, prompts)
    if "graft" in stages:
        base = work / "base"
        if not base.is_dir():
            save_variant("base", base)
        started = with_head_of(work, "base-start", base, with_head)
        base_head = tuned(work, "base-tuned", started, None, None)
        headless = quantized(work, "headless", TINY_ANNIE)
        grafted = tuned(work, "grafted", headless, base_head, NUMERICS)
        print("## graft", flush=True)
        for name, folder in {
            "the base's head": with_head_of(work, "untuned", headless, base_head),
            "grafted and tuned": grafted,
            "trained for it": tuned(work, "tuned", target, None, NUMERICS),
        }.items():
            steps = predicted(folder, prompts)["all"].of(3)
            shares = " ".join(f"{100 * share.value:.1f}" for share in steps.accepted)
            print(f"| {name} | {shares} | {steps.tokens_per_step.value:.2f} |", flush=True)


if __name__ == "__main__":
    main()
