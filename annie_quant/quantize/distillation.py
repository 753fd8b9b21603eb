"""Quantization-aware distillation: the bf16 model teaches its own rounded copy on the assistant's answers.

FakeLinear computes what a served NVFP4 linear computes; gradients pass as if nothing was rounded. Its two scales are buffers, so
they are saved and restored with the weights, and exported. Only the weights of the quantized linears are trained; all others
stay the source's, so that the audit can compare them with the source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers import PrinterCallback, Trainer, TrainingArguments

from annie_quant.checkpoint.chat_template import refusing_own_code
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.progress import Progress
from annie_quant.models.formats import LARGEST_NVFP4, NVFP4
from annie_quant.offline import codec
from annie_quant.offline.linears import separate
from annie_quant.quantize import calibration_samples as text
from annie_quant.quantize.backend import device_and_dtype
from annie_quant.quantize.calibration_samples import CalibrationSample
from annie_quant.quantize.calibration_text import read_answers
from annie_quant.quantize.formats import choose
from annie_quant.quantize.input_stats import calibrated
from annie_quant.quantize.plan import QuantizationPlan, announce_size
from annie_quant.quantize.strategy import Job, four_bit_format

if TYPE_CHECKING:
    from annie_quant.quantize.strategies.recipes import QadOptions


def distilled(job: Job[QadOptions], progress: Progress) -> QuantizationPlan:
    """Return the plan with the trained weights of all linears and the scales of their training."""
    folder = ModelFolder(job.model)
    options = job.options
    family = folder.family
    kind = four_bit_format(options.activations)
    names = {family.in_form(n, multimodal=False): n for n in choose(folder, job.exclude)}
    formats = dict.fromkeys(names.values(), kind)
    announce_size(folder, formats, progress)
    amax, tokens, _ = calibrated(job, list(formats), progress)
    answers = read_answers(job, progress)
    inputs = family.largest_of_input(amax)
    device, dtype = device_and_dtype(folder)
    with refusing_own_code(job.model):
        load: Any = transformers.AutoModelForCausalLM
        teacher = load.from_pretrained(job.model, dtype=dtype, trust_remote_code=False).to(device)
        student = load.from_pretrained(job.model, dtype=torch.float32, trust_remote_code=False)
        separate(student, family)
    student.requires_grad_(False)
    tops = {n: float(student.get_submodule(n).weight.detach().abs().max()) for n in names}
    insert(
        student,
        family.largest_of_group(tops),
        {m: inputs[n] for m, n in names.items()} if kind == NVFP4 else {},
    )
    checkpoints = job.work_folder() / "trainer"
    trainer = Distillation(
        teacher,
        progress,
        model=student,
        args=arguments(checkpoints, options, job.seed),
        train_dataset=answers.samples,
        data_collator=collate,
    )
    saved = (
        transformers.trainer_utils.get_last_checkpoint(str(checkpoints))
        if checkpoints.is_dir()
        else None
    )
    if saved:
        progress.message(f"resuming from {Path(saved).name}")
    trainer.train(resume_from_checkpoint=saved)
    state = trainer.accelerator.get_state_dict(trainer.model)
    plan = QuantizationPlan.of(formats, inputs, tokens)
    plan.calibration = answers.use
    if trainer.accelerator.is_main_process:  # the others may have parts of the weights only
        for module, name in names.items():
            weight = state[f"{module}.weight"].detach().float()
            plan.tensors[f"{name}.weight"] = weight.cpu().numpy()
            plan.linears[name].weight_amax = float(state[f"{module}.weight_amax"])
    return plan


class FakeLinear(nn.Linear):
    """nn.Linear in NVFP4, whose weight is trained.

    weight_amax: sets the tensor scale.
    input_amax: sets the scale of the inputs; 0: they are not rounded.
    """

    weight_amax: torch.Tensor
    input_amax: torch.Tensor

    @classmethod
    def of(cls, linear: nn.Linear, weight_amax: float, input_amax: float) -> FakeLinear:
        new = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        new.weight = linear.weight.requires_grad_(True)
        new.bias = linear.bias
        device = linear.weight.device
        new.register_buffer(
            "weight_amax", torch.tensor(weight_amax, dtype=torch.float32, device=device)
        )
        new.register_buffer(
            "input_amax", torch.tensor(input_amax, dtype=torch.float32, device=device)
        )
        return new

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            rounded = codec.round_weight(
                self.weight.detach(), float(self.weight_amax) / LARGEST_NVFP4
            )
        weight = self.weight + (rounded - self.weight).detach()
        top = float(self.input_amax)
        return nn.functional.linear(
            codec.fake_quant(x, top / LARGEST_NVFP4) if top else x, weight, self.bias
        )


def insert(
    model: nn.Module, weight_amax: Mapping[str, float], input_amax: Mapping[str, float]
) -> None:
    """Replace the linears that weight_amax names by FakeLinear. Names are those of the model."""
    for name, top in weight_amax.items():
        parent, _, leaf = name.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, leaf, FakeLinear.of(getattr(owner, leaf), top, input_amax.get(name, 0.0)))


class Distillation(Trainer):
    """HF's Trainer with the distillation loss: weighted mean KL(teacher || student) over response tokens."""

    def __init__(self, teacher: nn.Module, progress: Progress, **more: Any) -> None:
        super().__init__(**more)
        self.remove_callback(PrinterCallback)
        self.teacher = teacher.eval().requires_grad_(False)
        self.progress = progress
        self.table = torch.tensor(
            [text.MANNERS_RESPONSE.get(k, 0.0) for k in (*range(text.KINDS), text.PADDING)]
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Report the loss."""
        super().log(logs, start_time)
        if "loss" in logs:
            done = self.state.global_step
            steps = self.state.max_steps
            self.progress.update(
                done, steps, f"distilling: step {done} of {steps}, loss {float(logs['loss']):.4g}"
            )

    def compute_loss(
        self, model: nn.Module, inputs: Mapping[str, torch.Tensor], *args: object, **kwargs: object
    ) -> torch.Tensor:
        ids = inputs["input_ids"]
        kinds = inputs["kinds"]
        weight = self.table.to(ids.device)[kinds]  # text.PADDING is -1, the table's last element
        positions = (weight > 0).any(0).nonzero().squeeze(-1)
        used = weight[:, positions] > 0
        arguments = {"input_ids": ids, "use_cache": False, "logits_to_keep": positions}
        with torch.no_grad():
            p = torch.log_softmax(self.teacher(**arguments).logits[used].float(), -1)
        q = torch.log_softmax(model(**arguments).logits[used].float(), -1)
        kl = (p.exp() * (p - q)).sum(-1)
        counts = weight[:, positions][used]
        return (kl * counts).sum() / counts.sum()


def collate(samples: Sequence[CalibrationSample]) -> dict[str, torch.Tensor]:
    """Return a batch as the Trainer passes it on: input_ids and kinds, int64 [B, T]."""
    batch = text.padded(samples)
    return {"input_ids": torch.from_numpy(batch.ids), "kinds": torch.from_numpy(batch.kinds)}


def arguments(folder: Path, options: QadOptions, seed: int) -> TrainingArguments:
    """Return the Trainer's arguments. FSDP comes from accelerate's own configuration, if a launcher sets one."""
    cuda = torch.cuda.is_available()
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=options.steps,
        learning_rate=options.lr,
        per_device_train_batch_size=options.batch,
        gradient_checkpointing=bool(options.checkpointing),
        gradient_checkpointing_kwargs={"use_reentrant": False},
        lr_scheduler_type="cosine",
        warmup_steps=options.steps // 20,
        weight_decay=0.0,
        bf16=cuda,
        use_cpu=not cuda,
        seed=seed,
        data_seed=seed,
        save_steps=options.save,
        save_total_limit=2,
        logging_steps=10,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=cuda,
    )
