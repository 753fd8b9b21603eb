"""What vLLM does with a checkpoint's tensors, one line per model and rank, for `annie-quant doctor --load-report`.

    ANNIE_QUANT_VLLM_REPORT=load.jsonl vllm serve CHECKPOINT

vLLM compares the parameters that it loaded with those that it has only for models without quantization
(DefaultModelLoader.load_weights), and by name only: a parameter that three tensors share counts as loaded after the first. Here
every write into a parameter is counted while weights are loaded, with the tensor of the checkpoint that it came from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from torch.utils._python_dispatch import TorchDispatchMode

from annie_quant.documents import LoadedModel
from annie_quant.ops.vllm_layers import VllmObject

if TYPE_CHECKING:
    from torch import Tensor, nn


def install(path: Path) -> None:
    """Let vLLM's loader append its report to a file. Raises what a vLLM with other names gives; later calls do nothing."""
    import vllm
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    load = BaseModelLoader.load_model
    load_weights = DefaultModelLoader.load_weights
    weights = DefaultModelLoader.get_all_weights
    if hasattr(load, "annie_quant"):
        return

    def get_all_weights(
        self: VllmObject, *arguments: object, **options: object
    ) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights(self, *arguments, **options):
            if hasattr(self, "annie_writes"):
                self.annie_writes.read(name, tensor)
            yield name, tensor

    def counted(
        self: VllmObject, model: nn.Module, *arguments: object, **options: object
    ) -> object:
        with Writes(model) as self.annie_writes:
            return load_weights(self, model, *arguments, **options)

    def load_model(
        self: VllmObject, vllm_config: VllmObject, *arguments: object, **options: object
    ) -> nn.Module:
        model: nn.Module = load(self, vllm_config, *arguments, **options)
        writes = getattr(
            self, "annie_writes", None
        )  # other loaders, such as that of dummy weights, have none
        if writes is not None:
            write(path, writes, model, vllm_config, str(vllm.__version__))
        return model

    load_model.annie_quant = True  # type: ignore[attr-defined]
    BaseModelLoader.load_model = load_model
    DefaultModelLoader.load_weights = counted
    DefaultModelLoader.get_all_weights = get_all_weights


def write(
    path: Path, writes: Writes, model: nn.Module, vllm_config: VllmObject, version: str
) -> None:
    """Append the line of one model."""
    line = LoadedModel(
        start=str(vllm_config.instance_id),
        rank=int(vllm_config.parallel_config.rank),
        model=type(model).__name__,
        vllm=version,
        linears={
            name: scheme(m)
            for name, m in model.named_modules()
            if getattr(m, "quant_method", None) is not None
        },
        used=sorted(writes.used),
        unread=sorted(writes.names - writes.used),
        incomplete=sorted(writes.incomplete()),
    )
    with path.open(
        "ab", buffering=0
    ) as file:  # one write, so that lines of several ranks do not mix
        file.write(msgspec.json.encode(line) + b"\n")


def scheme(module: VllmObject) -> list[str]:
    """Return the class of a module's quantization method, or of compressed-tensors' scheme, and that of its kernel."""
    method = getattr(module, "scheme", None) or module.quant_method
    kernels = [
        type(v) for v in vars(method).values() if type(v).__name__.endswith(("Kernel", "Experts"))
    ]
    if (
        kernels and getattr(module, "annie_scale", True) is None
    ):  # our class on a layer that stays on Marlin
        kernels = [kernels[0].__mro__[1]]
    return [type(method).__name__, *(kernel.__name__ for kernel in kernels[:1])]


class Writes(TorchDispatchMode):
    """Counts what is written into a model's parameters while it is active, and which tensors of a checkpoint it came from.

    names: of the tensors that were read; used: of those whose values, or values made from them, were written.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.used: set[str] = set()
        self._reading = ""
        self._sources: dict[int, str] = {}  # storage of a tensor that was read → its name
        self._parameters = {name: (_storage(p), p.numel()) for name, p in model.named_parameters()}
        self._written: dict[int, dict[tuple[object, ...], int]] = {
            s: {} for s, _ in self._parameters.values()
        }

    def read(self, name: str, tensor: Tensor) -> None:
        """Note that the loader got this tensor; what is written next comes from it unless its own memory says otherwise."""
        self.names.add(name)
        self._reading = self._sources[_storage(tensor)] = name

    def incomplete(self) -> list[str]:
        """Return the parameters that were not written, or only in part."""
        return [
            n
            for n, (storage, size) in self._parameters.items()
            if sum(self._written[storage].values()) < size
        ]

    def __torch_dispatch__(
        self,
        func: VllmObject,
        types: object,
        args: tuple[VllmObject, ...] = (),
        kwargs: Mapping[str, VllmObject] | None = None,
    ) -> VllmObject:
        result = func(*args, **(kwargs or {}))
        written = func._schema.arguments[0].alias_info if args and func._schema.is_mutable else None
        if (
            written is not None
            and written.is_write
            and (regions := self._written.get(_storage(args[0]))) is not None
        ):
            target = args[0]
            regions[target.storage_offset(), target.shape, target.stride()] = target.numel()
            own = (
                self._sources.get(_storage(args[1]))
                if len(args) > 1 and hasattr(args[1], "untyped_storage")
                else None
            )
            self.used |= {own or self._reading} & self.names
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
