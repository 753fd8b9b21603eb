"""qad (strategy E): quantization-aware distillation, the bf16 model teaching its own rounded copy.

The loss covers only what the assistant answers, in the calibration conversations with the production system prompt. All
weights of the quantized linears train; the rest stays the source's (so the audit can compare it with the source) unless
--set train=all asks for a full fine-tune. A killed run resumes from its last saved step. On several GPUs:
    accelerate launch --config_file annie_quant/assets/recipes/qad_fsdp.yaml -m annie_quant quantize ...
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from annie_quant.checkpoint.remote_code import refused
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.progress import Progress
from annie_quant.quantize.formats import NVFP4, W4A16
from annie_quant.quantize.job import Job
from annie_quant.quantize.plan import Plan, announce_size
from annie_quant.quantize.select import choose
from annie_quant.quantize.strategy import ACTIVATIONS, ALL_NVFP4, Cost, Option, Strategy

if TYPE_CHECKING:
    import numpy as np


def quantize(job: Job, progress: Progress) -> None:
    import torch
    import transformers

    from annie_quant.offline.experts import separate
    from annie_quant.quantize import calibration_samples, training
    from annie_quant.quantize.export import export
    from annie_quant.quantize.input_stats import collect_stats
    from annie_quant.quantize.layerwise import device_and_dtype
    from annie_quant.quantize.library_output import quiet

    folder = ModelFolder(job.model)
    family = folder.family
    chosen = choose(folder, job.exclude)
    kind = W4A16 if job.options["activations"] == 16 else NVFP4
    formats = dict.fromkeys(chosen, kind)
    announce_size(folder, formats, job, progress)
    samples = calibration_samples.read_samples(job)
    stats = collect_stats(folder, samples, calibration_samples.RESPONSE, progress)
    stats.coverage.report(job.output, progress)
    inputs = family.largest_of_input(stats.amax)
    device, dtype = device_and_dtype(folder)
    with quiet(progress), refused(job.model):
        load: Any = transformers.AutoModelForCausalLM
        teacher = load.from_pretrained(job.model, dtype=dtype, trust_remote_code=False).to(device)
        student = load.from_pretrained(job.model, dtype=torch.float32, trust_remote_code=False)
        separate(student, family)
    names = {family.in_form(n, multimodal=False): n for n in chosen}
    weights = {n: float(student.get_submodule(n).weight.detach().abs().max()) for n in names}
    training.insert(
        student, family.largest_of_group(weights), {m: inputs[n] for m, n in names.items()} if kind == NVFP4 else {}
    )
    if job.options["train"] != "all":
        student.requires_grad_(False)
        for name in names:
            student.get_submodule(name).weight.requires_grad_(True)
    checkpoints = job.work_folder() / "trainer"
    trainer = training.Distillation(
        teacher,
        calibration_samples.MANNERS_RESPONSE,
        model=student,
        args=training.arguments(checkpoints, job.options, job.seed),
        train_dataset=samples,
        data_collator=training.collate,
        callbacks=[training.loss_callback(progress, job.options["steps"])],
    )
    saved = transformers.trainer_utils.get_last_checkpoint(str(checkpoints)) if checkpoints.is_dir() else None
    if saved:
        progress.message(f"resuming from {Path(saved).name}")
    with quiet(progress):
        trainer.train(resume_from_checkpoint=saved)
    state = trainer.accelerator.get_state_dict(trainer.model)
    if trainer.accelerator.is_main_process:
        export(folder, job, plan_of(folder, state, formats, inputs))


def plan_of(folder: ModelFolder, state: dict[str, Any], formats: dict[str, str], inputs: dict[str, float]) -> Plan:
    """Return every tensor of the trained model, and the scales that it was trained with."""
    weights: dict[str, np.ndarray] = {}
    tops: dict[str, float] = {}
    for name in (part for tensor in folder for part in folder.parts_of(tensor) or [tensor]):
        stored = folder.family.in_form(name, multimodal=False)
        if (tensor := state.get(stored)) is not None:
            weights[name] = tensor.detach().float().cpu().numpy()
        if (top := state.get(f"{stored}_amax")) is not None:
            tops[name.removesuffix(".weight")] = float(top)
    return Plan(formats, inputs, weights=weights, tensor_amax=tops)


STRATEGY = Strategy(
    name="qad",
    summary="E: distillation from the bf16 model with quantizers on, on the assistant's answers; W4A4 (--set steps=300)",
    formats=ALL_NVFP4,
    # The student, its gradients, two moments and master weights in fp32, and the frozen teacher; 4 epochs, and a backward
    # pass takes twice as long as a forward pass.
    cost=Cost(rank=100, passes=16, bytes_per_weight=18.0),
    quantize=quantize,
    options={
        "train": Option("linears", "what is trained: the quantized linears, or all weights", ("linears", "all")),
        "steps": Option(300, "training steps"),
        "lr": Option(1e-5, "learning rate"),
        "batch": Option(8, "answers per step and process"),
        "accumulate": Option(1, "steps whose gradients are added up"),
        "save": Option(50, "steps between checkpoints"),
        "checkpointing": Option(1, "recompute activations (1) or keep them (0)"),
        "activations": ACTIVATIONS,
    },
    requires=("torch", "transformers", "accelerate"),
)
