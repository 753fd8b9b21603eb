"""Move AWQ's input scales, as ModelOpt leaves them in a model, to where every server computes with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from annie_quant.models import Family, in_layer
from annie_quant.models.formats import E2M1_BITS

MAX_SCALE_ERROR = 1.05  # between AWQ's scale of a channel and the one that a norm's weight can hold
MAX_ROW_SCALE = 8.0  # of a linear's row


def fold_scales(model: Any, family: Family) -> None:
    """Move AWQ's input scales into what produces the input, where no server has to know them.

    ModelOpt itself folds them into norms (as if none computed 1 + w, and without the linears that it leaves in 16 bits)
    and for some model types into the linear before; others stay tensors that only TensorRT-LLM reads. Where nothing can
    hold a scale (grouped value heads, DeltaNet's output) it is taken back.
    """
    from modelopt.torch.quantization import model_calib

    modules = dict(model.named_modules())
    layers = [name.removesuffix(in_layer(name)) for name in modules if in_layer(name)]
    for layer in dict.fromkeys(layers):
        for entry in family.inputs:
            readers = [modules.get(layer + linear) for linear in entry.linears]
            producer = modules.get(layer + entry.producer)
            if entry.searched and not entry.per_head and producer is not None:
                one = family.adds_one(f"{layer}{entry.producer}.weight")
                fold_into(producer, [r for r in readers if r is not None], float(one))
    for module in modules.values():
        if has_scale(module):
            model_calib.disable_pre_quant_scale_and_resmooth(module, True)


def is_nvfp4(module: Any) -> bool:
    """Return whether a module is a linear whose weight ModelOpt rounds to NVFP4, without a low-rank part."""
    quantizer = getattr(module, "weight_quantizer", None)
    if quantizer is None or not getattr(quantizer, "is_enabled", False):
        return False
    return quantizer.num_bits == E2M1_BITS and not hasattr(quantizer, "svdquant_lora_a")


def has_scale(module: Any) -> bool:
    """Return whether a linear in NVFP4 has an input scale of AWQ."""
    return is_nvfp4(module) and hasattr(module.input_quantizer, "_pre_quant_scale")


def fold_into(producer: Any, readers: Sequence[Any], one: float) -> None:
    """Move the mean of the readers' input scales into the module that produces their input.

    one: 1.0 for a norm that computes (1 + w). The readers' columns are divided by what the producer's weight holds after its
    rounding. A factor that all channels share is left out: AWQ's scales may be around 0.01, and a norm that computes 1 + w has
    no digits left there. A channel keeps no scale where the producer cannot hold it: a norm whose gain is about 0, or rows that
    would leave the range of block scales.
    """
    scaled = [reader for reader in readers if has_scale(reader)]
    if not scaled:
        return
    scales = [r.input_quantizer._pre_quant_scale.flatten().float() for r in scaled]
    mean = torch.stack(scales).mean(0)
    mean = mean / mean.median()
    weight = producer.weight
    shape = [-1] + [1] * (weight.dim() - 1)
    gain = weight.float() + one
    held = (gain * mean.reshape(shape) - one).to(weight.dtype)
    factor = mean
    if weight.dim() == 1:
        factor = (held.float() + one) / gain
    usable = (factor >= mean / MAX_SCALE_ERROR) & (factor <= mean * MAX_SCALE_ERROR)
    if weight.dim() == 2:
        usable &= (mean >= 1 / MAX_ROW_SCALE) & (mean <= MAX_ROW_SCALE)
    factor = torch.where(usable, factor, torch.ones_like(factor))
    weight.copy_(torch.where(usable.reshape(shape), held, weight))
    if getattr(producer, "bias", None) is not None:
        producer.bias.copy_(producer.bias.float() * factor)
    if is_nvfp4(producer):
        measure_weight(producer)
    for reader in readers:
        if not hasattr(reader, "weight"):
            continue
        old = torch.ones_like(factor)
        if has_scale(reader):
            quantizer = reader.input_quantizer
            old = quantizer._pre_quant_scale.flatten().float()
            del quantizer._pre_quant_scale
            quantizer._enable_pre_quant_scale = False
            if quantizer.amax is not None:
                largest = quantizer._amax_for_smoothing.to(factor.device).flatten() * factor
                quantizer.amax = largest.amax().to(quantizer.amax.dtype)
        reader.weight.copy_(reader.weight.float() * old / factor)
        if is_nvfp4(reader):
            measure_weight(reader)


def measure_weight(linear: Any) -> None:
    """Let ModelOpt measure a weight that was changed. Its calibration would also measure the input, from what it saw before."""
    from modelopt.torch.quantization import model_calib

    largest_input = linear.input_quantizer.amax
    linear.weight_quantizer.reset_amax()
    model_calib.max_calibrate(linear, lambda module: module.weight_quantizer(module.weight))
    if largest_input is not None:
        linear.input_quantizer.amax = largest_input
