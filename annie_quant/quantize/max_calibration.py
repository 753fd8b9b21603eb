"""ModelOpt's max calibration without ModelOpt: scales from the largest weight and the largest input of each linear.

Weights, block scales and tensor scales are ModelOpt's bytes (its CPU arithmetic). Input scales come from the same text. They differ
by the rounding of ModelOpt's bf16 forward pass where layerwise.py computes in float32 (tests/quantize/test_max_calibration.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import transformers

from annie_quant import models
from annie_quant.checkpoint.remote_code import loading_tokenizer, refused
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import CheckpointError
from annie_quant.core.progress import Progress
from annie_quant.data.rows import read_conversations
from annie_quant.offline.experts import separate
from annie_quant.offline.loading import check_names
from annie_quant.quantize import shared_text
from annie_quant.quantize.calibration_samples import CONTENT, Sample, token_ids
from annie_quant.quantize.export import export
from annie_quant.quantize.formats import NVFP4
from annie_quant.quantize.input_stats import Coverage, LargestInput
from annie_quant.quantize.job import Job
from annie_quant.quantize.layerwise import DecoderLayers
from annie_quant.quantize.library_output import quiet
from annie_quant.quantize.plan import Plan, announce_size


def quantize(job: Job, folder: ModelFolder, linears: Sequence[str], progress: Progress) -> None:
    """Write job.output with these linears in NVFP4 (W4A4), calibrated on whole conversations."""
    plan = Plan(dict.fromkeys(linears, NVFP4), scale=job.scale)
    announce_size(folder, plan.formats, job, progress)
    rows = read_conversations(job.conversations, job.calib_samples)
    with loading_tokenizer(job.model):
        tokenizer = transformers.AutoTokenizer.from_pretrained(job.model, trust_remote_code=False)
    ids = [row for row in token_ids(tokenizer, rows) if row]
    progress.message(f"calibrating on {len(rows)} conversations, {sum(map(len, ids))} tokens")
    coverage = Coverage()
    if models.is_known(folder.config):
        plan.amax = largest_inputs(folder, linears, ids, coverage, progress)
    else:
        plan.amax = largest_inputs_of_whole_model(folder, linears, ids, progress)
    coverage.report(job.output, progress)
    export(folder, job, plan)


def largest_inputs(
    folder: ModelFolder, linears: Iterable[str], ids: Sequence[Sequence[int]], coverage: Coverage, progress: Progress
) -> dict[str, float]:
    """Return the largest |input| of linears in the decoder's layers, by full name; 0 for an expert that saw no token.

    ids: tokens of each conversation.  coverage: gets the tokens of each expert.
    """
    samples = [Sample("", tuple(row), (CONTENT,) * len(row), ()) for row in ids]
    text = shared_text.arrange(samples, share=shared_text.can_share(folder))
    model = DecoderLayers(folder, text.batches, progress, "calibrating")
    chosen, amax = set(linears), dict[str, float]()
    for layer in model:
        groups = [[n for n in group if f"{layer.name}.{n}" in chosen] for group in layer.groups()]
        observers = {g[0]: LargestInput(f"{layer.name}.{g[0]}") for g in groups if g}
        layer.advance(observers)
        amax |= {f"{layer.name}.{n}": observers[g[0]].amax() for g in groups for n in g}
        experts = [g for g in groups if g and layer.experts_of(g[0])]
        coverage.add(layer.name, experts, {g[0]: observers[g[0]].tokens for g in experts})
    return amax


def largest_inputs_of_whole_model(
    folder: ModelFolder, linears: Iterable[str], ids: Sequence[Sequence[int]], progress: Progress
) -> dict[str, float]:
    """Return the largest |input| of linears of a family that is not known: transformers computes it, one conversation at a time."""
    model = load(folder)
    modules: dict[str, Any] = dict(model.named_modules())
    observers = {name: LargestInput(name) for name in linears if name in modules}

    def before(observer: LargestInput, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        observer.add(args[0].reshape(-1, args[0].shape[-1]))

    for name, observer in observers.items():
        modules[name].register_forward_pre_hook(partial(before, observer))
    with torch.inference_mode():
        for number, row in enumerate(ids, 1):
            model(torch.tensor([row], device=model.device), use_cache=False)
            progress.update(number, len(ids), f"calibrating: conversation {number} of {len(ids)}")
    return {name: observer.amax() for name, observer in observers.items()}


def load(folder: ModelFolder) -> Any:
    """Return the source model in bfloat16, on a GPU where there is one."""
    try:
        with quiet(), refused(folder.path):
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                folder.path, dtype=torch.bfloat16, output_loading_info=True, trust_remote_code=False
            )
        model, info = loaded
        check_names(folder.path, info)
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{folder.path}: transformers cannot load it: {str(error).splitlines()[0]}",
            f"annie-quant audit {folder.path}",
        ) from error
    separate(model, folder.family)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
