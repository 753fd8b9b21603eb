"""qad (strategy E): quantization-aware distillation, the bf16 model teaching its own rounded copy.

The loss covers only what the assistant answers, in the calibration conversations with the production system prompt. A killed run
resumes from its last saved step. On several GPUs:
    accelerate launch --config_file annie_quant/assets/recipes/qad_fsdp.yaml -m annie_quant quantize ...
"""

from __future__ import annotations

from dataclasses import dataclass

from annie_quant.core.progress import Progress
from annie_quant.quantize.plan import QuantizationPlan
from annie_quant.quantize.strategy import ALL_NVFP4, Cost, Job, Strategy, StrategyOptions, activations_option, option


@dataclass(frozen=True)
class QadOptions(StrategyOptions):
    steps: int = option(300, "training steps")
    lr: float = option(1e-5, "learning rate")
    batch: int = option(8, "answers per step and process")
    save: int = option(50, "steps between checkpoints")
    checkpointing: int = option(1, "recompute activations (1) or keep them (0)", (0, 1))
    activations: str = activations_option()


def plan(job: Job[QadOptions], progress: Progress) -> QuantizationPlan:
    from annie_quant.quantize.distillation import distilled

    return distilled(job, progress)


STRATEGY = Strategy(
    name="qad",
    summary="E: distillation from the bf16 model with quantizers on, on the assistant's answers; W4A4 (--set steps=300)",
    formats=ALL_NVFP4,
    # The student, its gradients, two moments and master weights in fp32, and the frozen teacher; 4 epochs, and a backward
    # pass takes twice as long as a forward pass.
    cost=Cost(rank=100, passes=16, bytes_per_weight=18.0),
    plan=plan,
    options=QadOptions,
    requires=("torch", "transformers", "accelerate"),
)
