"""KL divergence on response tokens between a model and itself with some linears rounded: what a format would cost.

The bf16 model is loaded once. Its logits for the scored answers are kept; a trial rounds some linears' weights and
inputs as a server would, runs the same answers, and puts everything back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from annie_quant.errors import need
from annie_quant.quantize import fake_quant
from annie_quant.quantize.calibration_samples import Text
from annie_quant.quantize.export import FP8, NVFP4, shared


class Trial:
    """One model and its own logits as the reference.

    by_mark: how much a token counts, by what it is. tokens: of answers, scored at most; a trial is a pass over them,
    and their logits stay in memory.
    """

    def __init__(self, model: Any, conversations: Sequence[Text], by_mark: Mapping[int, float], tokens: int) -> None:
        from annie_quant.evaluate.engine import Engine, Row

        torch = need("torch", "quantize")
        self.model, self.engine = model, Engine(model)
        total = 0
        chosen: list[Text] = []
        for text in spread(conversations):
            if total + len(text.answer) <= tokens:
                total += len(text.answer)
                chosen.append(text)
        self.rows = [Row(t.prompt, t.answer) for t in chosen]
        device = next(model.parameters()).device
        self.weight = [
            torch.tensor([by_mark.get(m, 0.0) for m in t.marks[len(t.prompt) - 1 :]], device=device) for t in chosen
        ]
        # Half the memory for large vocabularies; the reference is compared with its own rounded self, too.
        self.reference = {i: torch.log_softmax(logits, -1).half() for i, logits in self.engine.scores(self.rows)}

    def divergence(self) -> float:
        """Weighted mean KL(reference || model as it is now), nats."""
        torch = need("torch", "quantize")
        total = weight = 0.0
        for i, logits in self.engine.scores(self.rows):
            p, q = self.reference[i].float(), torch.log_softmax(logits, -1)
            kl = (p.exp() * (p - q)).sum(-1).clamp_min(0)
            total += float((kl * self.weight[i]).sum())
            weight += float(self.weight[i].sum())
        return total / max(weight, 1e-30)

    def cost(self, formats: Mapping[str, str], amax: Mapping[str, float], scale: Any, importance: Mapping) -> float:
        with rounded(self.model, formats, amax, scale, importance):
            return self.divergence()


def spread(conversations: Sequence[Text]) -> Iterator[Text]:
    """Texts in an order whose every beginning holds all categories alike."""
    by_category: dict[str, list[Text]] = {}
    for text in conversations:
        by_category.setdefault(text.category, []).append(text)
    for index in range(max(map(len, by_category.values()))):
        yield from (rows[index] for rows in by_category.values() if index < len(rows))


@contextlib.contextmanager
def rounded(
    model: Any, formats: Mapping[str, str], amax: Mapping[str, float], scale: Any, importance: Mapping[str, Any]
) -> Iterator[None]:
    """The model with these linears' weights, and where the format says so their inputs, rounded."""
    torch = need("torch", "quantize")
    linears = {n: find(model, n) for n in formats}
    top = shared({n: float(m.weight.detach().abs().max()) for n, m in linears.items()})
    inputs = shared({n: amax[n] for n, f in formats.items() if f in (NVFP4, FP8)})
    undo: list[Callable[[], None]] = []
    try:
        for name, linear in linears.items():
            kind, before = formats[name], linear.weight.data
            if kind == FP8:
                linear.weight.data = fake_quant.fp8(before, top[name])
            else:
                step = top[name] / fake_quant.LARGEST_NVFP4
                linear.weight.data = fake_quant.nvfp4_weight(before, step, scale, importance.get(name))
            undo.append(partial(setattr, linear.weight, "data", before))
            if name in inputs:
                rounder = fake_quant.fp8 if kind == FP8 else fake_quant.nvfp4_input
                undo.append(linear.register_forward_pre_hook(hook(rounder, inputs[name])).remove)
        with torch.inference_mode():
            yield
    finally:
        for back in undo:
            back()


def hook(rounder: Callable[[Any, float], Any], amax: float) -> Callable[..., tuple[Any, ...]]:
    def before(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (rounder(args[0], amax), *args[1:])

    return before


def find(model: Any, name: str) -> Any:
    """The module that a checkpoint calls `name`; a text model calls model.language_model.x model.x."""
    return model.get_submodule(in_model(name))


def in_model(name: str) -> str:
    from annie_quant.quantize.layerwise import LAYERS

    return LAYERS.sub("model.layers.", name)


def load(folder: Any) -> Any:
    """The source model for trials: a GPU in bfloat16 where there is one, else the CPU."""
    from annie_quant.hf.loading import load as load_model
    from annie_quant.quantize.layerwise import device_and_dtype

    device, dtype = device_and_dtype(folder)
    return load_model(folder.path, dtype=dtype, device=device)
