"""Linears that round weights and inputs while they train, and the distillation that trains them.

FakeLinear computes what a served NVFP4 linear will, and lets gradients through as if nothing had been rounded. Its two
scales are buffers, so they are saved and restored with the weights; the export uses the very same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from annie_quant.quantize import calibration_samples, fake_quant
from annie_quant.quantize.calibration_samples import Text


class FakeLinear(nn.Linear):
    """nn.Linear under NVFP4: weight_amax sets the tensor scale, input_amax the inputs' (0: inputs stay as they are)."""

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
            rounded = fake_quant.nvfp4_weight(self.weight.detach(), float(self.weight_amax) / fake_quant.LARGEST_NVFP4)
        weight = self.weight + (rounded - self.weight).detach()
        top = float(self.input_amax)
        return nn.functional.linear(fake_quant.nvfp4_input(x, top) if top else x, weight, self.bias)


def insert(model: nn.Module, weight_amax: Mapping[str, float], input_amax: Mapping[str, float]) -> None:
    """Put a FakeLinear wherever weight_amax names a linear (names as in the model)."""
    for name, top in weight_amax.items():
        parent, _, leaf = name.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, leaf, FakeLinear.of(getattr(owner, leaf), top, input_amax.get(name, 0.0)))


class Distillation(Trainer):
    """HF's Trainer with the loss of distillation: mean KL(teacher || student) over the weighted response tokens."""

    def __init__(self, teacher: nn.Module, by_mark: Mapping[int, float], **more: Any) -> None:
        super().__init__(**more)
        self.teacher = teacher.eval().requires_grad_(False)
        self.table = torch.tensor([by_mark.get(m, 0.0) for m in range(calibration_samples.END_OF_TURN + 1)] + [0.0])

    def compute_loss(self, model: nn.Module, inputs: Mapping[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        ids, marks = inputs["input_ids"], inputs["marks"]
        weight = self.table.to(ids.device)[marks]  # padding is -1, the table's last place
        places = (weight > 0).any(0).nonzero().squeeze(-1)
        used = weight[:, places] > 0
        ask = {"input_ids": ids, "use_cache": False, "logits_to_keep": places}
        with torch.no_grad():
            p = torch.log_softmax(self.teacher(**ask).logits[used].float(), -1)
        q = torch.log_softmax(model(**ask).logits[used].float(), -1)
        kl = (p.exp() * (p - q)).sum(-1)
        counts = weight[:, places][used]
        return (kl * counts).sum() / counts.sum()


def collate(rows: Sequence[Text]) -> dict[str, torch.Tensor]:
    batch = calibration_samples.padded(rows)
    return {"input_ids": torch.from_numpy(batch.ids), "marks": torch.from_numpy(batch.marks)}


def arguments(folder: Path, options: Mapping[str, Any], seed: int) -> TrainingArguments:
    """The Trainer's arguments; FSDP, where a launcher asks for it, comes from accelerate's own configuration."""
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
