"""Linears that round weights and inputs while they train, and the distillation that trains them.

FakeLinear computes what a served NVFP4 linear computes; gradients pass as if nothing was rounded. Its two scales are
buffers, so they are saved and restored with the weights, and the export uses the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from annie_quant.checkpoint.dialects.modelopt import LARGEST_NVFP4
from annie_quant.core.progress import Progress
from annie_quant.quantize import calibration_samples, fake_quant
from annie_quant.quantize.calibration_samples import KINDS, PADDING, Sample, TokenWeights


class FakeLinear(nn.Linear):
    """nn.Linear in NVFP4. weight_amax sets the tensor scale, input_amax that of the inputs (0: they are not rounded)."""

    weight_amax: torch.Tensor
    input_amax: torch.Tensor

    @classmethod
    def of(cls, linear: nn.Linear, weight_amax: float, input_amax: float) -> FakeLinear:
        new = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        new.weight, new.bias = linear.weight, linear.bias
        device = linear.weight.device
        new.register_buffer("weight_amax", torch.tensor(weight_amax, dtype=torch.float32, device=device))
        new.register_buffer("input_amax", torch.tensor(input_amax, dtype=torch.float32, device=device))
        return new

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            rounded = fake_quant.nvfp4_weight(self.weight.detach(), float(self.weight_amax) / LARGEST_NVFP4)
        weight = self.weight + (rounded - self.weight).detach()
        top = float(self.input_amax)
        return nn.functional.linear(fake_quant.nvfp4_input(x, top) if top else x, weight, self.bias)


def insert(model: nn.Module, weight_amax: Mapping[str, float], input_amax: Mapping[str, float]) -> None:
    """Replace the linears that weight_amax names by FakeLinear. Names are those of the model."""
    for name, top in weight_amax.items():
        parent, _, leaf = name.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, leaf, FakeLinear.of(getattr(owner, leaf), top, input_amax.get(name, 0.0)))


class Distillation(Trainer):
    """HF's Trainer with the distillation loss: weighted mean KL(teacher || student) over response tokens."""

    def __init__(self, teacher: nn.Module, token_weights: TokenWeights, **more: Any) -> None:
        super().__init__(**more)
        self.teacher = teacher.eval().requires_grad_(False)
        self.table = torch.tensor([token_weights.get(k, 0.0) for k in (*range(KINDS), PADDING)])

    def compute_loss(self, model: nn.Module, inputs: Mapping[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        ids, kinds = inputs["input_ids"], inputs["kinds"]
        weight = self.table.to(ids.device)[kinds]  # PADDING is -1, the table's last element
        positions = (weight > 0).any(0).nonzero().squeeze(-1)
        used = weight[:, positions] > 0
        arguments = {"input_ids": ids, "use_cache": False, "logits_to_keep": positions}
        with torch.no_grad():
            p = torch.log_softmax(self.teacher(**arguments).logits[used].float(), -1)
        q = torch.log_softmax(model(**arguments).logits[used].float(), -1)
        kl = (p.exp() * (p - q)).sum(-1)
        counts = weight[:, positions][used]
        return (kl * counts).sum() / counts.sum()


def collate(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Return a batch as the Trainer passes it on: input_ids and kinds, int64 [B, T]."""
    batch = calibration_samples.padded(samples)
    return {"input_ids": torch.from_numpy(batch.ids), "kinds": torch.from_numpy(batch.kinds)}


def loss_callback(progress: Progress, steps: int) -> TrainerCallback:
    """Return a callback that reports the loss whenever the Trainer logs it."""

    class LossCallback(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
            if logs and "loss" in logs:
                done = state.global_step
                progress.update(done, steps, f"distilling: step {done} of {steps}, loss {float(logs['loss']):.4g}")

    return LossCallback()


def arguments(folder: Path, options: Mapping[str, Any], seed: int) -> TrainingArguments:
    """Return the Trainer's arguments. FSDP comes from accelerate's own configuration, if a launcher sets one."""
    cuda = torch.cuda.is_available()
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=options["steps"],
        learning_rate=options["lr"],
        per_device_train_batch_size=options["batch"],
        gradient_accumulation_steps=options["accumulate"],
        gradient_checkpointing=bool(options["checkpointing"]),
        gradient_checkpointing_kwargs={"use_reentrant": False},
        lr_scheduler_type="cosine",
        warmup_steps=options["steps"] // 20,
        weight_decay=0.0,
        bf16=cuda,
        use_cpu=not cuda,
        seed=seed,
        data_seed=seed,
        save_steps=options["save"],
        save_total_limit=2,
        logging_steps=10,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=cuda,
    )
