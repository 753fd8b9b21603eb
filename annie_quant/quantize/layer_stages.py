"""Round a decoder layer in stages, so that each linear multiplies each token once, with its rounded weight.

    for stage in stages(layer, advance=True):
        stage.observe({"mlp.down_proj": f})     # f(x [n, K], kinds [n]) gets inputs that earlier stages' rounded linears put out
        layer.linears["mlp.down_proj"].weight   # may be changed before the next stage begins
    # the outputs of the changed layer are now the next layer's inputs

A layer of most families is two residual blocks, x + block(norm(x)): a token mixer (attention or DeltaNet) and an MLP. A block's
first linears read the norm's outputs. The inputs of its last linear are stored when the block runs up to it, and are multiplied
when it is rounded. A layer of any other shape has one stage: one pass to observe, and one to advance.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from annie_quant.quantize.backend import device_kind
from annie_quant.quantize.calibration_samples import PADDING
from annie_quant.quantize.continuation import ContinuedLayer
from annie_quant.quantize.layerwise import DecoderLayer, Observer, inputs_of
from annie_quant.quantize.strategy import KEPT_INPUTS

MLP_TOKENS = {
    "cpu": 1024,
    "cuda": 16384,
}  # tokens of one pass through an MLP: on a CPU its activations stay in the caches
PROBE = 64  # tokens by which a layer is recognised as such a chain of blocks
CHAIN_TOLERANCE = {
    torch.float32: 1e-4,
    torch.bfloat16: 3e-2,
}  # of their outputs, relative to the largest one


@dataclass(frozen=True)
class RoundingStage:
    """Some linears that are observed and then rounded.

    linears: their names inside the layer.
    observe: gives observers their inputs.
    """

    linears: Sequence[str]
    observe: Callable[[Mapping[str, Observer]], None] = field(repr=False)


@dataclass(frozen=True)
class ResidualBlock:
    """A residual block, by names inside the layer.

    name: its module.
    norm: its norm.
    inputs: the linears that read the norm.
    output: the linear whose outputs are the block's; "" where it has no such linear, as in a mixture of experts.
    """

    name: str
    norm: str
    inputs: Sequence[str]
    output: str


def stages(layer: DecoderLayer, advance: bool = True) -> Iterator[RoundingStage]:
    """Yield the layer's stages. advance: after the last one, the layer's outputs become the next layer's inputs."""
    blocks = blocks_of(layer)
    if blocks is None:
        yield RoundingStage(list(layer.linears), layer.observe)
        if advance:
            layer.advance()
        return
    mixer, mlp = blocks
    text = RealTokens(layer)
    yield RoundingStage(mixer.inputs, partial(text.observe_norm, mixer.norm))
    last = LastInputs(text, layer.linears[mixer.output], partial(text.run_mixer, mixer))
    yield RoundingStage([mixer.output], partial(last.observe, mixer.output))
    last.add_outputs()
    if mlp.output:
        yield RoundingStage(mlp.inputs, partial(text.observe_norm, mlp.norm))
        last = LastInputs(text, layer.linears[mlp.output], partial(text.run_mlp, mlp))
        yield RoundingStage([mlp.output], partial(last.observe, mlp.output))
        if advance:
            last.add_outputs()
    else:
        inside = [n for n in layer.linears if n.startswith(f"{mlp.name}.")]
        yield RoundingStage(inside, partial(text.observe_mixture, mlp))
        if advance:
            text.add_mixture(mlp)
    if advance:
        text.store()


def blocks_of(layer: DecoderLayer) -> tuple[ResidualBlock, ResidualBlock] | None:
    """Return the mixer and the MLP of a layer that is x + mixer(norm(x)) and then x + mlp(norm(x)); None of any other layer."""
    family = layer.model.folder.family
    blocks = []
    for read in family.inputs:
        inputs = [n for n in read.linears if n in layer.linears]
        if read.fold == "norm" and not read.per_head and inputs:
            name = inputs[0].partition(".")[0]
            ends = [
                f"{name}{end}" for end in family.row_parallel if f"{name}{end}" in layer.linears
            ]
            blocks.append(
                ResidualBlock(name, read.producer, inputs, ends[0] if len(ends) == 1 else "")
            )
    order = [name for name, _ in layer.module.named_children()]
    blocks.sort(key=lambda block: order.index(block.norm))
    if len(blocks) != 2 or not blocks[0].output or not is_chain(layer, *blocks):
        return None
    return blocks[0], blocks[1]


def is_chain(layer: DecoderLayer, mixer: ResidualBlock, mlp: ResidualBlock) -> bool:
    """Return whether the two blocks, one after the other, compute what the layer computes for a few tokens of the first batch."""
    module = layer.module
    state = layer.model.states[0][:1, :PROBE]
    run = partial(layer.model.forward, module)
    with torch.inference_mode():
        try:
            expected = run(state)
            output = layer.linears[mixer.output]
            state = state + output(inputs_of(output, partial(run, state)))
            if mlp.output:
                output = layer.linears[mlp.output]
                state = state + output(inputs_of(output, partial(mlp_outputs, module, mlp, state)))
            else:
                state = state + mlp_outputs(module, mlp, state)
        except (TypeError, RuntimeError):
            return False
        error = (state - expected).abs().max()
        return bool(error <= CHAIN_TOLERANCE[layer.model.dtype] * expected.abs().max())


def mlp_outputs(module: torch.nn.Module, block: ResidualBlock, state: torch.Tensor) -> torch.Tensor:
    """Return the MLP's outputs for hidden states [B, T, hidden]."""
    out = module.get_submodule(block.name)(module.get_submodule(block.norm)(state))
    return out[0] if isinstance(out, tuple) else out


Part = tuple[slice, torch.Tensor]  # a slice of a text's real tokens, and their rows [n, K]


class RealTokens:
    """The real tokens inside one layer, all batches in turn. rows: their hidden states [n, hidden].  kinds: int64 [n]."""

    def __init__(self, layer: DecoderLayer) -> None:
        self.layer = layer
        self.model = layer.model
        self.module = layer.module
        kinds = [
            torch.from_numpy(b.kinds.reshape(-1)).to(self.model.device) for b in self.model.batches
        ]
        self.real = [(k != PADDING).nonzero()[:, 0] for k in kinds]
        self.kinds = torch.cat([k[r] for k, r in zip(kinds, self.real, strict=True)])
        ends = itertools.accumulate(map(len, self.real))
        self.parts = [slice(end - len(r), end) for end, r in zip(ends, self.real, strict=True)]
        self.rows = torch.cat([self.of_real(i, state) for i, state in enumerate(self.model.states)])
        size = MLP_TOKENS[device_kind()]
        self.chunks = [slice(i, i + size) for i in range(0, len(self.rows), size)]

    def of_real(self, batch: int, x: torch.Tensor) -> torch.Tensor:
        """Return the rows [n, K] of a batch's real tokens in [B, T, K]."""
        x, real = x.reshape(-1, x.shape[-1]), self.real[batch]
        return x if len(real) == len(x) else x.index_select(0, real)

    def store(self) -> None:
        """Let the hidden states be the next layer's inputs."""
        with torch.inference_mode():
            for batch, part in enumerate(self.parts):
                state = self.model.states[batch]
                new = state.reshape(-1, state.shape[-1]).clone()
                new[self.real[batch]] = self.rows[part]
                self.model.states[batch] = new.view_as(state)

    def observe_norm(self, norm: str, observers: Mapping[str, Observer]) -> None:
        """Give observers the outputs of a norm."""
        for part in self.chunks if observers else ():
            with torch.inference_mode():
                x = self.module.get_submodule(norm)(self.rows[part])
            for observer in observers.values():
                observer(x, self.kinds[part])

    def run_mixer(self, block: ResidualBlock) -> Iterator[Part]:
        """Yield the inputs of the mixer's last linear. Its other linears run."""
        layer = ContinuedLayer(self.model, self.layer.index)
        for batch, state in enumerate(self.model.states):
            work = partial(self.model.forward, self.module, state, layer.piece(batch))
            yield (
                self.parts[batch],
                self.of_real(batch, inputs_of(self.layer.linears[block.output], work)),
            )

    def run_mlp(self, block: ResidualBlock) -> Iterator[Part]:
        """Yield the inputs of the MLP's last linear. Its other linears run."""
        for part in self.chunks:
            work = partial(self.mlp, block, part)
            yield part, inputs_of(self.layer.linears[block.output], work)[0]

    def mlp(self, block: ResidualBlock, part: slice) -> torch.Tensor:
        """Return the outputs [1, n, hidden] of an MLP."""
        return mlp_outputs(self.module, block, self.rows[None, part])

    def observe_mixture(self, block: ResidualBlock, observers: Mapping[str, Observer]) -> None:
        """Run a mixture of experts, and give observers the inputs of its linears."""
        for part in self.chunks:
            with self.layer.observed(observers, self.kinds[part]), torch.inference_mode():
                self.mlp(block, part)

    def add_mixture(self, block: ResidualBlock) -> None:
        """Add the outputs of a mixture of experts to the hidden states."""
        with torch.inference_mode():
            for part in self.chunks:
                self.rows[part] += self.mlp(block, part)[0]


class LastInputs:
    """The inputs of a block's last linear: stored where they have at most KEPT_INPUTS bytes, else computed at each use.

    run: yields them, computed with the present weights of the linears before.
    """

    def __init__(
        self, text: RealTokens, linear: torch.nn.Linear, run: Callable[[], Iterator[Part]]
    ) -> None:
        self.text = text
        self.linear = linear
        self.run = run
        size = len(text.rows) * linear.in_features * text.rows.element_size()
        self.stored: list[Part] | None = None
        self.keep = size <= KEPT_INPUTS

    def parts(self) -> Iterator[Part]:
        """Yield the inputs, a slice of the tokens at a time."""
        if self.stored is not None:
            yield from self.stored
            return
        stored = []
        with torch.inference_mode():
            for part in self.run():
                if self.keep:
                    stored.append(part)
                yield part
        self.stored = stored if self.keep else None

    def observe(self, name: str, observers: Mapping[str, Observer]) -> None:
        """Give the observer of linear `name` its inputs."""
        if name in observers:
            for part, x in self.parts():
                observers[name](x, self.text.kinds[part])

    def add_outputs(self) -> None:
        """Add the linear's outputs to the hidden states."""
        with torch.inference_mode():
            for part, x in self.parts():
                self.text.rows[part] += self.linear(x)
        self.stored = None
