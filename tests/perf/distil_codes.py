"""Mean KL on held-out answers before and after `best`'s distillation, from a checkpoint that exists: one JSON line per seed.

    python tests/perf/distil_codes.py CHECKPOINT --seeds 0,1,2 --steps 48
    python tests/perf/distil_codes.py CHECKPOINT --source MODEL --learn scales
    python tests/perf/distil_codes.py CHECKPOINT --seeds "" --floor 0.7071,1,4

CHECKPOINT is plain NVFP4 of SOURCE without folds, from any tool. Each seed draws other calibration conversations; held-out
answers are those of tests/perf/ablate_best.py. Weights and inputs are rounded in transformers in float32.
--floor: the same for the source's weights and the checkpoint's input scales, times each of these factors.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from ablate_best import TINY, HeldOut

from annie_quant import nvfp4
from annie_quant.checkpoint import dialects
from annie_quant.checkpoint.quantized_tensors import LARGEST_NVFP4
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.data import generate
from annie_quant.data.rows import read_conversations
from annie_quant.quantize import calibration_samples, distillation, kl_trial
from annie_quant.quantize.plan import Plan


def plan_of(checkpoint: Path) -> Plan:
    """Return the codes and input scales of a checkpoint."""
    folder, plan = ModelFolder(checkpoint), Plan({})
    for linear in dialects.linears(folder).values():
        scale = linear.input_scale(folder)
        plan.formats[linear.name], plan.packed[linear.name] = "w4a16" if scale is None else "nvfp4", linear.load(folder)
        if scale is not None:
            plan.amax[linear.name] = float(scale.multiplier) * LARGEST_NVFP4
    return plan


def divergences(held_out: HeldOut, plan: Plan) -> dict[str, float]:
    """Return the mean KL of a plan under both numerics; the model is as before at the end."""
    trial, before, hooks = held_out.trial, {}, []
    for name, packed in plan.packed.items():
        linear = trial.model.get_submodule(name)
        before[name] = linear.weight.data
        linear.weight.data = torch.from_numpy(nvfp4.unpack(packed, "float32")).to(linear.weight)
    with torch.inference_mode():
        figures = {"w4a16": round(trial.divergence(), 5)}
        for name, top in plan.amax.items():
            hook = kl_trial.input_hook(distillation.fake_quant.nvfp4_input, top)
            hooks.append(trial.model.get_submodule(name).register_forward_pre_hook(hook))
        figures["w4a4"] = round(trial.divergence(), 5)
    for hook in hooks:
        hook.remove()
    for name, weight in before.items():
        trial.model.get_submodule(name).weight.data = weight
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--source", type=Path, default=TINY)
    parser.add_argument("--persona", default="annie")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--learn", choices=("scales", "rounding"), default="rounding")
    parser.add_argument("--samples", type=int, default=256, help="calibration conversations")
    parser.add_argument("--answers", type=int, default=150, help="held-out answers")
    parser.add_argument("--floor", help="factors of the input scales, with weights that are not rounded")
    arguments = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="distil-"))
    held_out = HeldOut(arguments.source, arguments.persona, arguments.answers, work)
    before = divergences(held_out, plan_of(arguments.checkpoint))
    print(json.dumps({"checkpoint": arguments.checkpoint.name, **before}), flush=True)
    for factor in map(float, arguments.floor.split(",") if arguments.floor else ()):
        amax = {name: top * factor for name, top in plan_of(arguments.checkpoint).amax.items()}
        print(json.dumps({"factor": factor, "w4a4": divergences(held_out, Plan({}, amax))["w4a4"]}), flush=True)
    for seed in map(int, arguments.seeds.split(",") if arguments.seeds else ()):
        calibration = work / f"calibration{seed}.jsonl"
        generate(arguments.persona, teacher="offline", n=500, output=calibration, seed=seed)
        rows = read_conversations(calibration, arguments.samples)
        samples = calibration_samples.samples_of_rows(arguments.source, rows)
        plan, start, used = plan_of(arguments.checkpoint), time.monotonic(), time.process_time()
        learned = distillation.distil(
            ModelFolder(arguments.source), plan, samples, calibration_samples.RESPONSE, arguments.steps,
            rounding=arguments.learn == "rounding", seed=seed,
        )  # fmt: skip
        row = {"seed": seed, **divergences(held_out, plan), "seconds": round(time.monotonic() - start, 1)}
        row |= {"cpu_seconds": round(time.process_time() - used, 1), "judged": [round(x, 5) for x in learned.losses]}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
