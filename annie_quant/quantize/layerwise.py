"""Run calibration text through a model one decoder layer at a time, with one layer's weights in memory.

    for layer in DecoderLayers(folder, batches, progress):
        layer.observe({"mlp.down_proj": f})     # f(x [n, K], kinds [n]) gets the inputs; the layer's outputs are dropped
        layer.linears["mlp.down_proj"].weight   # may be changed: later layers then get the changed layer's outputs
        layer.advance({...})                    # the same, and the outputs become the next layer's inputs

Padding never reaches an observer. The outputs equal the whole model's (tests/quantize/test_layerwise.py).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transformers

from annie_quant.checkpoint.chat_template import refusing_own_code
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import CheckpointError
from annie_quant.core.progress import SILENT, Progress
from annie_quant.models.family import MULTIMODAL_PREFIX, TEXT_PREFIX
from annie_quant.offline import deltanet
from annie_quant.offline.codec import to_torch
from annie_quant.offline.linears import SingleExperts, separate
from annie_quant.quantize.backend import device_and_dtype, has_triton
from annie_quant.quantize.calibration_samples import PADDING, TokenBatch
from annie_quant.quantize.continuation import (
    CONTINUED_ATTENTION,
    ContinuedLayer,
    KeyObserver,
    Piece,
    additive,
)

Observer = Callable[[torch.Tensor, torch.Tensor], None]


def decoder_prefix(folder: ModelFolder) -> str:
    """Return the prefix of the decoder's tensor names, before "layers.0."."""
    for prefix in (TEXT_PREFIX, MULTIMODAL_PREFIX):
        if any(name.startswith(f"{prefix}layers.0.") for name in folder):
            return prefix
    raise CheckpointError(
        f"{folder.path}: it has no decoder layers", f"annie-quant audit {folder.path}"
    )


def real_inputs(
    x: torch.Tensor, kinds: torch.Tensor, experts: SingleExperts | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs [n, K] of a linear without those of padding, and their kinds [n].

    kinds: of the batch [B, T].
    experts: those that the linear belongs to; they get only some of the positions.
    """
    of_tokens = kinds.reshape(-1)
    if experts is not None and experts.rows is not None:
        of_tokens = of_tokens[experts.rows]
    real = of_tokens != PADDING
    return x.reshape(-1, x.shape[-1])[real], of_tokens[real]


class LinearReached(Exception):
    """The forward pass has reached the linear that it stops at. The argument is the linear's input."""


def inputs_of(linear: torch.nn.Module, work: Callable[[], object]) -> torch.Tensor:
    """Return the input of a linear in `work`, which ends there. Raises RuntimeError where `work` does not reach it."""

    def stop(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        raise LinearReached(args[0])

    handle = linear.register_forward_pre_hook(stop)
    try:
        work()
    except LinearReached as reached:
        return reached.args[0]
    finally:
        handle.remove()
    raise RuntimeError("the forward pass ended before the linear")


class DecoderLayer:
    """One decoder layer with its weights. name: "model.layers.3".  linears: by their name inside the layer."""

    def __init__(self, model: DecoderLayers, index: int, module: torch.nn.Module) -> None:
        self.model = model
        self.index = index
        self.module = module
        self.name = f"{model.prefix}layers.{index}"
        self.linears = {n: m for n, m in module.named_modules() if isinstance(m, torch.nn.Linear)}
        self.experts = {n: m for n, m in module.named_modules() if isinstance(m, SingleExperts)}

    @property
    def last(self) -> bool:
        return self.index + 1 == len(self.model.model.layers)

    def groups(self) -> list[list[str]]:
        """Return the layer's linears, grouped by the input that they read; those of each expert by themselves."""
        groups = []
        for read in self.model.folder.family.inputs:
            present = [name for name in read.linears if name in self.linears]
            if present:
                groups.append(present)
        return groups + self.expert_groups()

    def chosen_groups(self, chosen: Container[str]) -> list[list[str]]:
        """Return groups() without the linears whose full names are not chosen."""
        groups = []
        for group in self.groups():
            names = [name for name in group if f"{self.name}.{name}" in chosen]
            if names:
                groups.append(names)
        return groups

    def expert_groups(self) -> list[list[str]]:
        """Return the linears of the routed experts, grouped by the input that they read."""
        family = self.model.folder.family.experts
        if family is None:
            return []
        groups = []
        for name, module in self.experts.items():
            for i in range(module.count):
                for linears in family.inputs:
                    groups.append([f"{name}.{i}.{linear}" for linear in linears])
        return groups

    def experts_of(self, linear: str) -> SingleExperts | None:
        """Return the experts that a linear belongs to, or None for any other linear."""
        return next((m for n, m in self.experts.items() if linear.startswith(f"{n}.")), None)

    def observe(self, observers: Mapping[str, Observer]) -> None:
        """Run the layer and drop its outputs. observers: name of a linear → function that gets its inputs."""
        for _ in self.outputs(observers):
            pass

    def advance(self, observers: Mapping[str, Observer] | None = None) -> None:
        """Run the layer; its outputs become the next layer's inputs."""
        for i, out in enumerate(self.outputs(observers or {})):
            self.model.states[i] = out

    def outputs(self, observers: Mapping[str, Observer]) -> Iterator[torch.Tensor]:
        """Yield the layer's output for each batch."""
        layer = ContinuedLayer(self.model, self.index)
        for i, (state, batch) in enumerate(zip(self.model.states, self.model.batches, strict=True)):
            kinds = torch.from_numpy(batch.kinds).to(self.model.device)
            with self.observed(observers, kinds), torch.inference_mode():
                out = self.model.forward(self.module, state, layer.piece(i))
            yield out

    @contextlib.contextmanager
    def observed(self, observers: Mapping[str, Observer], kinds: torch.Tensor) -> Iterator[None]:
        """Give observers the inputs of their linears in a forward pass of tokens of these kinds."""

        def before(
            observer: Observer,
            experts: SingleExperts | None,
            module: torch.nn.Module,
            args: tuple[torch.Tensor, ...],
        ) -> None:
            observer(*real_inputs(args[0], kinds, experts))

        handles = [
            self.linears[name].register_forward_pre_hook(
                functools.partial(before, f, self.experts_of(name))
            )
            for name, f in observers.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class DecoderLayers:
    """Iterates over the decoder layers of a checkpoint and keeps every batch's hidden states between them.

    title: name of the work, for progress.
    """

    def __init__(
        self,
        folder: ModelFolder,
        batches: Sequence[TokenBatch],
        progress: Progress = SILENT,
        title: str = "reading",
    ) -> None:
        self.folder = folder
        self.batches = batches
        self.progress = progress
        self.title = title
        self.device, self.dtype = device_and_dtype(folder)
        self.prefix = decoder_prefix(folder)
        with refusing_own_code(folder.path), torch.device("meta"):
            config = transformers.AutoConfig.from_pretrained(
                folder.path, trust_remote_code=False
            ).get_text_config()
            config.use_cache = False
            self.model: Any = transformers.AutoModel.from_config(
                config, dtype=self.dtype, trust_remote_code=False
            )
        self.model.config.annie_quant_piece = None  # that continuation.attend computes
        if self.model.config._attn_implementation == "sdpa":
            self.model.config._attn_implementation_internal = CONTINUED_ATTENTION
        separate(self.model, folder.family)
        self.check_tensors()
        self.ragged = deltanet.RaggedBatch()
        use_own_delta_rule(self.model, self.device, self.ragged)
        self.rotary = type(self.model.rotary_emb)(config).to(self.device)
        embedding = f"{self.prefix}embed_tokens.weight"
        ids = [b.ids for b in batches]
        used = np.unique(np.concatenate([i.reshape(-1) for i in ids]))
        table = self.to_device(np.ascontiguousarray(folder.tensor(embedding)[used]))
        # Gemma's embeddings are scaled where they are read.
        table = table * torch.tensor(
            getattr(self.model.embed_tokens, "scalar_embed_scale", 1.0)
        ).to(table)
        self.types = (
            getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        )
        self.key_observer: KeyObserver | None = None
        self.layer_type = self.types[0]  # of the layer that is computed
        self.states = [
            table[torch.from_numpy(np.searchsorted(used, i)).to(self.device)] for i in ids
        ]
        folder.release(embedding)

    @contextlib.contextmanager
    def observed_keys(self, observer: KeyObserver) -> Iterator[None]:
        """Give an observer the keys and values of attention layers."""
        self.key_observer = observer
        try:
            yield
        finally:
            self.key_observer = None

    def check_tensors(self) -> None:
        """Raise CheckpointError where the layers' tensors are not those that config.json describes."""
        layers = f"{self.prefix}layers."
        expected = {
            f"{layers}{name}": list(tensor.shape)
            for name, tensor in self.model.layers.state_dict().items()
        }
        differences = []
        for name, shape in expected.items():
            is_stored = self.folder.find(name) == name
            stored = list(self.folder.info(name).shape) if is_stored else "none"
            if stored != shape:
                differences.append(f"needs {name} {shape}, got {stored}")
        for name in self.folder:
            is_bias = name.startswith(layers) and name.endswith("_proj.bias")
            if is_bias and name not in expected:
                differences.append(f"excludes {name}")
        if differences:
            raise CheckpointError(
                f"{self.folder.path.name}: config.json does not fit the tensors: it {differences[0]}",
                f"annie-quant audit {self.folder.path}",
            )

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        return to_torch(np.array(array)).to(self.device, self.dtype)

    def forward(
        self, module: torch.nn.Module, state: torch.Tensor, piece: Piece | None = None
    ) -> torch.Tensor:
        """Return a layer's output [B, T, hidden] for hidden states [B, T, hidden].

        piece: what the rows continue; None: they begin.
        """
        positions = torch.arange(state.shape[1], device=self.device).expand(state.shape[0], -1)
        cache = None
        if piece is not None:
            positions = positions + torch.from_numpy(piece.begins).to(self.device)[:, None]
            cache = piece.cache
        axes = self.folder.family.position_axes
        # A rotary base per type of layer.
        by_type = (self.layer_type,) if hasattr(self.rotary, "layer_types") else ()
        angles = self.rotary(
            state, positions if axes == 1 else positions.expand(axes, -1, -1), *by_type
        )
        mask = None
        if self.layer_type == "sliding_attention":
            mask = self.window_mask(state.shape[1])
        options: dict[str, Any] = {} if cache is None else {"past_key_values": cache}
        self.model.config.annie_quant_piece = piece
        try:
            out = module(
                state,
                position_embeddings=angles,
                attention_mask=mask,
                position_ids=positions,
                use_cache=cache is not None,
                **options,
            )
        finally:
            self.model.config.annie_quant_piece = None
        return out[0] if isinstance(out, tuple) else out

    def window(self, index: int) -> int | None:
        """Return how many tokens a token of a sliding layer sees, itself included; None in other layers."""
        if self.types[index] != "sliding_attention":
            return None
        window: int | None = self.model.config.sliding_window
        return window

    def window_mask(self, steps: int) -> torch.Tensor | None:
        """Return what a sliding layer's attention adds, [1, 1, T, T]; None where its window holds all tokens."""
        window = self.model.config.sliding_window
        if window is None or steps <= window:
            return None
        ones = torch.ones(steps, steps, dtype=torch.bool, device=self.device)
        return additive((ones.tril() & ones.triu(1 - window))[None], self.dtype)

    def __iter__(self) -> Iterator[DecoderLayer]:
        count = len(self.model.layers)
        for index in range(count):
            self.progress.update(index, count, f"{self.title}: layer {index + 1} of {count}")
            module = self.model.layers[index]
            self.layer_type = self.types[index]
            stored = {n: f"{self.prefix}layers.{index}.{n}" for n in module.state_dict()}
            weights = {n: self.to_device(self.folder.tensor(t)) for n, t in stored.items()}
            module.load_state_dict(weights, assign=True)
            yield DecoderLayer(self, index, module.eval())
            module.to("meta")
            for tensor in stored.values():
                self.folder.release(tensor)


def use_own_delta_rule(model: torch.nn.Module, device: str, running: deltanet.RaggedBatch) -> None:
    """Let DeltaNet layers keep the states of each row of the running batch after its own last token.

    Without flash-linear-attention they also compute faster: on a CPU as in evaluation, in half the time.
    """
    for layer in deltanet.delta_layers(model):
        rule: Callable[..., Any] = layer.chunk_gated_delta_rule
        conv: Callable[..., Any] | None = layer.causal_conv1d_fn
        if rule.__name__ == "torch_chunk_gated_delta_rule":
            if device == "cpu":
                rule = deltanet.rule_on_cpu
                conv = deltanet.conv_on_cpu
            elif has_triton():
                from annie_quant.quantize import triton_kernels

                rule = triton_kernels.gated_delta_rule
                conv = conv or triton_kernels.causal_conv
            else:
                rule = deltanet.gated_delta_rule
        layer.chunk_gated_delta_rule = deltanet.ragged_rule(rule, running)
        conv = conv or deltanet.causal_conv
        layer.causal_conv1d_fn = deltanet.ragged_conv(conv, running, layer.layer_idx)
