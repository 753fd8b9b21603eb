"""Arrays on a GPU as the kernels take them: pointer, shape and type.

Torch tensors, and plain device memory that needs no other library.

torch is not imported here.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Union

import numpy as np

from annie_quant.core.errors import EnvironmentFault, UsageError
from annie_quant.core.native import load

if TYPE_CHECKING:
    import torch

CODES = {
    "float32": 0,
    "float16": 1,
    "bfloat16": 2,
}  # as AQ_F32, AQ_F16, AQ_BF16 in csrc/gemm/gemm.h
MIN_CAPABILITY_MAJOR = 9
SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1, "float8_e4m3fn": 1}


def native() -> ModuleType:
    """Return the compiled module. Raises EnvironmentFault if it is not built."""
    return load("_gemm")


def device_count() -> int:
    """Return the number of usable CUDA GPUs; 0 without a driver."""
    module = native()
    try:
        return module.device_count()
    except module.CudaError:
        return 0


def need_device() -> None:
    """Raise EnvironmentFault if there is no CUDA GPU that has the kernels' instructions."""
    module = native()
    try:
        count = module.device_count()
    except module.CudaError as error:
        raise EnvironmentFault(
            f"no CUDA GPU can be used here: {error.args[0]}", "nvidia-smi"
        ) from error
    if count == 0:
        raise EnvironmentFault("no CUDA GPU can be used here: the driver lists none", "nvidia-smi")
    major = module.limits()[2]
    if major < MIN_CAPABILITY_MAJOR:
        raise EnvironmentFault(
            f"this GPU has compute capability {major}.x; the kernels need {MIN_CAPABILITY_MAJOR}.0 or later",
            "nvidia-smi",
        )


@dataclass(frozen=True)
class View:
    """An array as a kernel needs it. `owner` keeps the array alive.

    stream: the stream of the array's last write; None if there is nothing to wait for, or for
        torch, which orders its work by
    a current stream.
    """

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: str
    device: int
    owner: object
    stream: int | None = None

    @property
    def end(self) -> int:
        """The address after the last byte."""
        if 0 in self.shape:
            return self.ptr
        last = sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))
        return self.ptr + SIZES[self.dtype] * (1 + last)

    @property
    def contiguous(self) -> bool:
        strides = zip(self.shape, self.strides, _packed_strides(self.shape), strict=True)
        return all(stride == packed for size, stride, packed in strides if size != 1)


def _packed_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def view(array: object, name: str) -> View:
    """Return a View of an array on a GPU.

    UsageError: a host array, or a dtype that no kernel supports.
    """
    torch = sys.modules.get("torch")  # a tensor of torch was made by a torch that is imported
    if isinstance(array, View):
        result = array
    elif isinstance(array, DeviceArray):
        strides = _packed_strides(array.shape)
        result = View(
            array.ptr, array.shape, strides, array.dtype, array.device, array, array.stream
        )
    elif isinstance(array, np.ndarray):
        raise UsageError(
            f"{name} is in host memory (a NumPy array); a CUDA array is expected",
            "copy it to the GPU first",
        )
    elif torch is None or not isinstance(array, torch.Tensor):
        raise UsageError(
            f"{name} is a {type(array).__name__}; a tensor of torch or a DeviceArray is expected"
        )
    elif not array.is_cuda:
        raise UsageError(
            f"{name} is on {array.device}; a CUDA tensor is expected", f'{name}.to("cuda")'
        )
    else:
        dtype = str(array.dtype).removeprefix("torch.")
        shape = tuple(array.shape)
        result = View(array.data_ptr(), shape, array.stride(), dtype, array.device.index, array)
    if result.dtype not in SIZES:
        raise UsageError(f"{name} has dtype {result.dtype}; expected one of {', '.join(SIZES)}")
    return result


def launch_stream(views: Iterable[View], stream: int | None = None) -> int:
    """Return the stream of a launch that uses these arrays.

    It waits for the writes that each array announces.

    The stream is `stream`, or torch's current stream if an array is a torch tensor, or the stream
    of the first array that has one, or the default stream (0).
    """
    views = list(views)
    chosen = _default_stream(views) if stream is None else int(stream)
    for v in views:
        if v.stream is not None and v.stream != chosen:
            with CurrentDevice(v.device):
                native().stream_after(chosen, v.stream)
    return chosen


def _default_stream(views: list[View]) -> int:
    torch = sys.modules.get("torch")
    if torch is not None:
        for v in views:
            if isinstance(v.owner, torch.Tensor):
                return torch.cuda.current_stream(v.owner.device).cuda_stream
    return next((v.stream for v in views if v.stream is not None), 0)


class CurrentDevice:
    """Context manager: make a device current, then restore the previous one. None: change nothing."""

    def __init__(self, device: int | None) -> None:
        self.device = device

    def __enter__(self) -> None:
        if self.device is not None:
            self.previous = native().use_device(self.device)

    def __exit__(self, *unused: object) -> None:
        if self.device is not None and self.previous != self.device:
            native().use_device(self.previous)


class DeviceArray:
    """A contiguous array in device memory, freed with the object.

    stream: the stream of the last write to it by this package, which `fill` and `host` follow; None
        before the first one. That
    stream must exist as long as the array is used.
    """

    def __init__(self, shape: tuple[int, ...], dtype: str, device: int | None = None) -> None:
        module = native()
        self.shape = tuple(int(s) for s in shape)
        self.dtype = dtype
        self.nbytes = int(np.prod(self.shape, dtype=np.int64)) * SIZES[dtype]
        self.stream: int | None = None
        with CurrentDevice(device):
            self.ptr = module.malloc(max(self.nbytes, 16))
        self._finalizer = weakref.finalize(self, module.free, self.ptr)
        self._finalizer.atexit = (
            False  # at exit the driver may be unloaded already, and it frees everything itself
        )
        self.device = module.pointer_device(self.ptr)

    def fill(self, byte: int) -> DeviceArray:
        """Set every byte, after the last write to the array and on its stream."""
        self.stream = self.stream or 0
        with CurrentDevice(self.device):
            native().fill(self.ptr, byte, self.nbytes, self.stream)
        return self

    def host(self) -> np.ndarray:
        """Return a NumPy copy after the last write to the array.

        bfloat16 and float8_e4m3fn as ml_dtypes' types.
        """
        out = np.empty(self.shape, numpy_dtype(self.dtype))
        stream = self.stream or 0
        with CurrentDevice(self.device):
            native().copy(out.ctypes.data, self.ptr, self.nbytes, stream)
            native().stream_sync(stream)
        return out


def numpy_dtype(name: str) -> np.dtype:
    if name in ("bfloat16", "float8_e4m3fn"):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def to_device(array: np.ndarray, device: int | None = None) -> DeviceArray:
    """Copy a NumPy array (float32, float16, bfloat16, uint8, float8_e4m3fn) to the GPU."""
    array = np.ascontiguousarray(array)
    if array.dtype.name not in SIZES:
        raise UsageError(
            f"dtype {array.dtype.name} is not supported; expected one of {', '.join(SIZES)}"
        )
    out = DeviceArray(array.shape, array.dtype.name, device)
    with CurrentDevice(out.device):
        native().copy(out.ptr, array.ctypes.data, out.nbytes, 0)
        native().stream_sync(0)
    return out


CudaArray = Union[DeviceArray, View, "torch.Tensor"]
