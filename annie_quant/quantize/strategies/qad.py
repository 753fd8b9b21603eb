"""qad (the founding strategy E): quantization-aware distillation, the bf16 model teaching its own rounded copy.

Loss on what the assistant says alone, on the calibration conversations, which hold the production system prompt. All
weights of the quantized linears train; the rest stays the source's (so the audit can hold it against the source) unless
--set train=all asks for a full fine-tune. A killed run goes on from its last saved step. On several GPUs:
    accelerate launch --config_file annie_quant/assets/recipes/qad_fsdp.yaml -m annie_quant quantize ...
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from annie_quant.checkpoint.remote_code import refused
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.errors import UsageError, need
from annie_quant.quantize import calibration_samples, kl_trial
from annie_quant.quantize.export import NVFP4, W4A16, Decided, choose, export, say_size, shared
from annie_quant.quantize.input_stats import gather
from annie_quant.quantize.job import Job, Report
from annie_quant.quantize.modelopt import quiet
from annie_quant.quantize.strategies.manners import BY_MARK

NAME = "qad"
SUMMARY = (
    "E: distillation from the bf16 model with quantizers on, what the assistant says alone; W4A4 (--set steps=300)"
)
# train: linears (those that are quantized) or all. batch: answers a step and process. save: steps between checkpoints.
# checkpointing: recompute activations (1) or not. activations: 4 (W4A4) or 16 (weights alone).
OPTIONS = {
    "train": "linears",
    "steps": 300,
    "lr": 1e-5,
    "batch": 8,
    "accumulate": 1,
    "save": 50,
    "checkpointing": 1,
    "activations": 4,
}  # fmt: skip
SCORED = {m: w for m, w in BY_MARK.items() if m != calibration_samples.PROMPT}


def quantize(job: Job, report: Report) -> None:
    torch, transformers = need("torch", "quantize"), need("transformers", "quantize")
    need("accelerate", "quantize")
    from annie_quant.quantize import training
    from annie_quant.quantize.layerwise import device_and_dtype

    folder = ModelFolder(job.model)
    if job.options["train"] not in ("linears", "all"):
        raise UsageError(f"train={job.options['train']}", "choose linears or all")
    chosen = choose(folder, job)
    kind = W4A16 if job.options["activations"] == 16 else NVFP4
    formats = dict.fromkeys(chosen, kind)
    say_size(folder, formats, job, report)
    conversations = calibration_samples.read(job)
    inputs = shared(gather(folder, conversations, calibration_samples.RESPONSE, report).amax)
    device, dtype = device_and_dtype(folder)
    with quiet(report), refused(job.model):
        load = transformers.AutoModelForCausalLM
        teacher = load.from_pretrained(job.model, dtype=dtype, trust_remote_code=False).to(device)
        student = load.from_pretrained(job.model, dtype=torch.float32, trust_remote_code=False)
    names = {kl_trial.in_model(n): n for n in chosen}
    weights = {n: float(student.get_submodule(n).weight.detach().abs().max()) for n in names}
    training.insert(student, shared(weights), {m: inputs[n] for m, n in names.items()} if kind == NVFP4 else {})
    if job.options["train"] != "all":
        student.requires_grad_(False)
        for name in names:
            student.get_submodule(name).weight.requires_grad_(True)
    kept = job.kept() / "trainer"
    trainer = training.Distillation(
        teacher,
        SCORED,
        model=student,
        args=training.arguments(kept, job.options, job.seed),
        train_dataset=conversations,
        data_collator=training.collate,
        callbacks=[tell(report, job.options["steps"])],
    )
    saved = transformers.trainer_utils.get_last_checkpoint(str(kept)) if kept.is_dir() else None
    if saved:
        report(f"going on from {Path(saved).name}")
    with quiet(report):
        trainer.train(resume_from_checkpoint=saved)
    state = trainer.accelerator.get_state_dict(trainer.model)
    if trainer.accelerator.is_main_process:
        export(folder, job, decided_by(folder, state, formats, inputs))


def decided_by(
    folder: ModelFolder, state: dict[str, Any], formats: dict[str, str], inputs: dict[str, float]
) -> Decided:
    """What training left: every tensor of the model, and the scales it was trained under."""
    weights: dict[str, np.ndarray] = {}
    tops: dict[str, float] = {}
    for name in folder:
        tensor = state.get(kl_trial.in_model(name))
        if tensor is not None:
            weights[name] = tensor.detach().float().cpu().numpy()
        top = state.get(kl_trial.in_model(name.removesuffix(".weight")) + ".weight_amax")
        if top is not None:
            tops[name.removesuffix(".weight")] = float(top)
    return Decided(formats, inputs, weights=weights, tensor_amax=tops)


def tell(report: Report, steps: int) -> Any:
    from transformers import TrainerCallback

    class Tell(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
            if logs and "loss" in logs:
                report(f"distilling: step {state.global_step} of {steps}, loss {float(logs['loss']):.4g}")

    return Tell()
