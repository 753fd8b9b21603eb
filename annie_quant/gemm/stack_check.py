"""Checks of other libraries' FP4 GEMMs.

Which backends of an installed serving stack are right, wrong or missing on this GPU.

A backend is a function (case) -> array [M, N]. `judge` compares it with the float64 product of the
same bytes within the bound that fp32 accumulation allows (times a small factor for other orders of
scaling and a bf16 alpha), so that faults which a loose tolerance hides (swapped nibbles, a
neighbouring scale, a dropped tail) are found. Each backend runs in a separate process: an illegal
instruction or a crash ends that process only.
"""

from __future__ import annotations

import base64
import inspect
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from annie_quant.core.errors import EnvironmentFault, UsageError
from annie_quant.gemm import known_failures, oracle, torch_op
from annie_quant.gemm.arrays import device_count, native, need_device

if TYPE_CHECKING:
    from torch import Tensor

    from annie_quant.core.untrusted import JsonObject

Product = Callable[["GemmCase"], np.ndarray]
GemmBackend = tuple[str, Product | None, str]  # its name, its product, and why it is missing
STACKS = ("torch", "vllm", "flashinfer")
SWITCHES = {  # the server's option that selects a backend
    "vllm cutlass_scaled_fp4_mm": "--linear-backend cutlass",
    "vllm marlin (W4A16)": "--linear-backend marlin",
    "vllm annie_quant (W4A16)": "ANNIE_QUANT_VLLM_KERNEL=1 vllm serve … --linear-backend marlin",
    "flashinfer mm_fp4 cutlass": "--linear-backend flashinfer_cutlass",
    "flashinfer mm_fp4 cudnn": "--linear-backend flashinfer_cudnn",
    "flashinfer mm_fp4 trtllm": "--linear-backend flashinfer_trtllm",
}
SLACK = (
    4.0  # factor on the bound of our own kernels: one more rounding of scales or of alpha in bf16
)


@dataclass(frozen=True)
class CaseResult:
    """One case of one backend.

    worst: largest error in units of the bound; None where the backend raised `error`.
    """

    case: str
    ok: bool
    worst: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class BackendResult:
    """verdict: right, wrong, failed (an error) or missing (not installed)."""

    backend: str
    verdict: str
    cause: str = ""
    remedy: str = ""
    cases: list[CaseResult] = field(default_factory=list)
    worst: float = 0.0


@dataclass(frozen=True)
class StackResult:
    """All backends, and advice: the one to choose, the server's option for it, a note.

    container: where it was run.
    """

    backends: list[BackendResult]
    choose: str | None
    switch: str = ""
    note: str = ""
    wrong: bool = False
    container: str | None = None

    @classmethod
    def from_dict(cls, fields: JsonObject) -> StackResult:
        return cls(**{**fields, "backends": [_backend_result(row) for row in fields["backends"]]})


def _backend_result(fields: JsonObject) -> BackendResult:
    return BackendResult(**{**fields, "cases": [CaseResult(**case) for case in fields["cases"]]})


@dataclass(frozen=True)
class GemmCase:
    """One product of two NVFP4 operands.

    Codes are uint8 [rows, K/2], linear scale bytes uint8 [rows, K/16]; alpha is the product of the
    tensor scales.
    """

    name: str
    a: np.ndarray
    a_scale: np.ndarray
    w: np.ndarray
    w_scale: np.ndarray
    alpha: float

    def exact(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the float64 product and the product of the magnitudes."""
        left = oracle.dequantize(self.a, self.a_scale)
        right = oracle.dequantize(self.w, self.w_scale)
        exact, magnitude = oracle.linear(left, right)
        return exact * self.alpha, magnitude * self.alpha


def cases() -> list[GemmCase]:
    """Return cases of random data (uniform weights would hide a swapped fragment).

    Small, large, padded, one token.
    """
    result = []
    for m, n, k in (
        (1, 256, 256),
        (16, 256, 512),
        (33, 384, 768),
        (128, 128, 1024),
        (150, 128, 128),
        (128, 128, 192),
    ):
        a, sa = oracle.random_weight(m, k, m + 1)
        w, sw = oracle.random_weight(n, k, n + k)
        result.append(
            GemmCase(f"M={m} N={n} K={k}", a, sa, w, sw, float(np.float32(2.0**-7 * 1.1)))
        )
    return result


def judge(name: str, call: Product, only: list[GemmCase] | None = None) -> BackendResult:
    """Run one backend over the cases (all, or `only` these) and return its verdict.

    One wrong case makes the backend wrong whatever the others give: an error is visible to a user,
    a wrong result is not.
    """
    rows = []
    failure = None
    for case in only or cases():
        try:
            rows.append(_compare(call, case))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            rows.append(CaseResult(case.name, False, error=text[:300]))
            failure = failure or known_failures.find_failure(str(error))
    verdict = "right"
    if any(row.error for row in rows):
        verdict = "failed"
    if any(row.worst is not None and not row.ok for row in rows):
        verdict = "wrong"
        failure = known_failures.WRONG_RESULT
    worst = max((row.worst or 0.0 for row in rows), default=0.0)
    if failure is None:
        return BackendResult(name, verdict, cases=rows, worst=worst)
    return BackendResult(name, verdict, failure.cause, failure.fix, rows, worst)


def _compare(call: Product, case: GemmCase) -> CaseResult:
    result = np.asarray(call(case)).astype(np.float64)
    exact, magnitude = case.exact()
    if result.shape != exact.shape:
        raise ValueError(f"got shape {list(result.shape)}, expected {list(exact.shape)}")
    limit = oracle.bound(exact, magnitude, case.a.shape[1] * 2, "bfloat16") * SLACK
    worst = oracle.worst(result, exact, limit)
    return CaseResult(case.name, worst <= 1, worst)


def swizzled(scales: np.ndarray) -> np.ndarray:
    """Return scale bytes in the 128x4 tile order of CUTLASS and cuBLASLt.

    Rows are padded to 128 and columns to 4 with zeros.
    """
    rows, columns = scales.shape
    padded = np.pad(scales, ((0, -rows % 128), (0, -columns % 4)))
    tiles = padded.reshape(-1, 4, 32, padded.shape[1] // 4, 4).transpose(0, 3, 2, 1, 4)
    return np.ascontiguousarray(tiles).reshape(padded.shape)


def backends(stack: str) -> Iterator[GemmBackend]:
    """Yield (name, call or None, reason why it is missing) of each FP4 GEMM in the stack."""
    yield from {"torch": _torch, "vllm": _vllm, "flashinfer": _flashinfer}[stack]()


def stack_names(name: str) -> tuple[str, ...]:
    """Return the stacks of a name, which may be "all". Raises UsageError for an unknown one."""
    if name not in (*STACKS, "all"):
        raise UsageError(
            f"there is no stack called {name!r}", f"choose one of: {', '.join(STACKS)}, all"
        )
    return STACKS if name == "all" else (name,)


def _tensors(case: GemmCase) -> tuple[Tensor, ...]:
    """Return codes and scales of both operands as W4A4 kernels take them.

    Codes unchanged, scales swizzled.
    """
    import torch

    e4m3 = torch.float8_e4m3fn
    sa, sw = (
        _device_tensor(swizzled(scales)).view(e4m3) for scales in (case.a_scale, case.w_scale)
    )
    return _device_tensor(case.a), sa, _device_tensor(case.w), sw


def _device_tensor(array: np.ndarray) -> Tensor:
    """Return the array as a tensor on the GPU, or on the CPU if there is none.

    Tests replace the kernels.
    """
    import torch

    return torch.from_numpy(np.ascontiguousarray(array)).to(
        "cuda" if torch.cuda.is_available() else "cpu"
    )


def _host(tensor: Tensor) -> np.ndarray:
    return tensor.float().cpu().numpy()


def _torch() -> Iterator[GemmBackend]:
    name = "torch._scaled_mm"
    try:
        import torch
    except ImportError as error:
        yield name, None, str(error)
        return
    if not hasattr(torch, "float4_e2m1fn_x2"):
        yield name, None, f"torch {torch.__version__} has no float4_e2m1fn_x2"
        return

    def call(case: GemmCase) -> np.ndarray:
        a, sa, w, sw = _tensors(case)
        fp4 = torch.float4_e2m1fn_x2
        out = torch._scaled_mm(
            a.view(fp4), w.view(fp4).t(), sa.flatten(), sw.flatten(), out_dtype=torch.bfloat16
        )
        return _host(out) * case.alpha

    yield name, call, ""


def _vllm() -> Iterator[GemmBackend]:
    cutlass = "vllm cutlass_scaled_fp4_mm"
    marlin = "vllm marlin (W4A16)"
    ours = "vllm annie_quant (W4A16)"
    try:
        from vllm import _custom_ops as ops
    except Exception as error:
        why = f"{type(error).__name__}: {error}"[:200]
        yield from ((cutlass, None, why), (ours, None, why), (marlin, None, why))
        return

    def call(case: GemmCase) -> np.ndarray:
        import torch

        a, sa, w, sw = _tensors(case)
        alpha = torch.tensor([case.alpha], dtype=torch.float32, device=a.device)
        return _host(ops.cutlass_scaled_fp4_mm(a, w, sa, sw, alpha, torch.bfloat16))

    has = hasattr(ops, "cutlass_scaled_fp4_mm")
    yield cutlass, call if has else None, "" if has else "this vLLM has no such op"
    missing = _operator_missing()
    yield (
        ours,
        None if missing else _annie_quant,
        missing,
    )  # before Marlin, whose place it takes and which is slower
    try:
        from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4 as utils
    except Exception as error:
        yield marlin, None, f"{type(error).__name__}: {error}"[:200]
        return
    yield marlin, lambda case: _marlin(utils, case), ""


def _operator_missing() -> str:
    """Return why the operator of our plug-in for vLLM cannot run here, "" if it can."""
    try:
        need_device()
    except EnvironmentFault as fault:
        return str(fault)
    return ""


def _annie_quant(case: GemmCase) -> np.ndarray:
    """Run the operator that our plug-in gives vLLM."""
    import torch

    torch_op.register()
    weight = torch_op.prepare(_device_tensor(case.w), _device_tensor(case.w_scale), 1.0)
    x = _activations(case)
    return _host(torch.ops.annie_quant.nvfp4_linear(x, *weight)) * case.alpha


def _activations(case: GemmCase) -> Tensor:
    """Return A as a weight-only kernel takes it: exact in bf16."""
    values = oracle.dequantize(case.a, case.a_scale).astype(np.float32)
    return _device_tensor(values).bfloat16()


def _marlin(utils: ModuleType, case: GemmCase) -> np.ndarray:
    """Run vLLM's weight-only kernel after its own preparation of a layer.

    The activations are exact in bf16.
    """
    import torch

    layer: Any = torch.nn.Module()
    new = "weight_global_scale" in inspect.signature(utils.apply_fp4_marlin_linear).parameters
    name = "weight_global_scale" if new else "weight_scale_2"
    layer.weight = torch.nn.Parameter(_device_tensor(case.w), requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(
        _device_tensor(case.w_scale).view(torch.float8_e4m3fn), requires_grad=False
    )
    one = _device_tensor(
        np.ones(1, np.float32)
    )  # alpha is applied last in float64: older versions round it to bf16
    setattr(layer, name, torch.nn.Parameter(one, requires_grad=False))
    layer.output_size_per_partition = case.w.shape[0]
    layer.input_size_per_partition = case.w.shape[1] * 2
    layer.params_dtype = torch.bfloat16
    utils.prepare_fp4_layer_for_marlin(layer)
    x = _activations(case)
    out = utils.apply_fp4_marlin_linear(
        x,
        layer.weight,
        layer.weight_scale,
        getattr(layer, name),
        layer.workspace,
        case.w.shape[0],
        x.shape[1],
    )
    return _host(out) * case.alpha


def _flashinfer() -> Iterator[GemmBackend]:
    try:
        import flashinfer
        import torch
    except Exception as error:
        yield "flashinfer mm_fp4", None, f"{type(error).__name__}: {error}"[:200]
        return
    for backend in ("cutlass", "cudnn", "trtllm"):

        def call(case: GemmCase, backend: str = backend) -> np.ndarray:
            a, sa, w, sw = _tensors(case)
            alpha = torch.tensor([case.alpha], dtype=torch.float32, device="cuda")
            return _host(
                flashinfer.mm_fp4(a, w.T, sa, sw.T, alpha, torch.bfloat16, backend=backend)
            )

        yield f"flashinfer mm_fp4 {backend}", call, ""


def has_fp4_units() -> bool:
    """Return whether the first GPU is of Blackwell's generation or later.

    True where none can be queried.
    """
    try:
        return device_count() == 0 or int(native().device_info(0)["major"]) >= 10
    except EnvironmentFault:  # without _gemm
        return True


def examine(stack: str, timeout_s: float = 600.0) -> StackResult:
    """Check all backends of `stack`, or of all stacks, and advise which one to choose."""
    rows: list[BackendResult] = []
    for each in stack_names(stack):
        for name, call, reason in backends(each):
            if call is None:
                rows.append(BackendResult(name, "missing", cause=reason))
            else:
                rows.append(_judge_in_process(each, name, timeout_s))
    right = [r.backend for r in rows if r.verdict == "right"]
    choice = right[0] if right else None
    return StackResult(
        rows,
        choose=choice,
        switch=SWITCHES.get(choice or "", ""),
        note=_advice(right),
        wrong=any(r.verdict == "wrong" for r in rows),
    )


def _advice(right: list[str]) -> str:
    """Return what to know about the choice among the backends that are right."""
    weight_only = [name for name in right if "W4A16" in name]
    if not weight_only:
        return ""
    if not has_fp4_units():
        return known_failures.NO_FP4_UNITS
    if right == weight_only:
        return known_failures.NOT_NATIVE
    return known_failures.WEIGHT_ONLY_FIRST


def run_module(module: str, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a module in another process that finds the modules of this one."""
    paths = os.pathsep.join(path for path in sys.path if path)
    argv = [sys.executable, "-m", module, *arguments]
    return subprocess.run(
        argv,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "PYTHONPATH": paths},
    )


def last_json_line(output: str) -> str | None:
    """Return the last line that holds a JSON object, or None.

    The imports of a stack may print around it.
    """
    return next((line for line in reversed(output.splitlines()) if line.startswith("{")), None)


def _judge_in_process(stack: str, name: str, timeout_s: float) -> BackendResult:
    """`judge` one backend in a separate process.

    If that gives no result: failed, with the last line of its output.
    """
    try:
        process = run_module("annie_quant.gemm.stack_check", stack, name, timeout_s=timeout_s)
    except subprocess.TimeoutExpired:
        return _failed(name, f"no result within {timeout_s:.0f} s", [])
    result = last_json_line(process.stdout)
    if result is not None:
        return _backend_result(json.loads(result))
    code = process.returncode
    reason = (
        f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    )
    return _failed(name, reason, process.stderr.strip().splitlines()[-20:])


def _failed(name: str, reason: str, output: list[str]) -> BackendResult:
    """Return the result of a backend whose process gave none. output: its last lines."""
    if output:
        reason = f"{reason}: {output[-1][:200]}"
    row = CaseResult("all", False, error=reason)
    known = known_failures.find_failure("\n".join(output))
    if known is None:
        return BackendResult(name, "failed", reason, cases=[row])
    return BackendResult(name, "failed", known.cause, known.fix, [row])


# ---- in a container: one command as a list of arguments, the code on its standard input
#
# A running container is entered (`docker exec`); any other name is an image that is started for the
# check (`docker run --rm`). Nothing is mounted or installed there: the few pure Python files that
# this module needs are a zip archive in the script that Python reads. It needs Python 3.10 with
# NumPy, which all serving stacks have.

PROGRAMS = ("docker", "podman")
PACKAGE = Path(__file__).parents[1]
# Of annie_quant.gemm in the rest of the package.
DEPENDENCIES = ("__init__", "core/__init__", "core/errors", "core/native", "core/text")
SCRIPT = """import base64, os, runpy, sys, tempfile
folder = tempfile.mkdtemp()
archive = os.path.join(folder, "annie.zip")
with open(archive, "wb") as f:
    f.write(base64.b64decode("{archive}"))
sys.path.insert(0, archive)
sys.argv = ["stack", "{stack}"]
runpy.run_module("annie_quant.gemm.stack_check", run_name="__main__")
"""


def container_script(stack: str) -> str:
    """Return the program for the container's Python: the archive, then the check of `stack`."""
    stack_names(stack)
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in [
            *(PACKAGE / f"{name}.py" for name in DEPENDENCIES),
            *sorted((PACKAGE / "gemm").glob("*.py")),
        ]:
            archive.write(path, Path("annie_quant") / path.relative_to(PACKAGE))
    return SCRIPT.format(archive=base64.b64encode(content.getvalue()).decode("ascii"), stack=stack)


def container_command(target: str, program: str, running: bool) -> list[str]:
    """Return the command as a list of arguments (no shell).

    target: a running container's name or an image.
    """
    if not target or target.startswith("-"):
        raise UsageError(
            f"{target!r} is not the name of a container or an image", "docker ps; docker images"
        )
    if running:
        return [program, "exec", "-i", target, "python3", "-"]
    return [program, "run", "--rm", "-i", "--gpus", "all", "--entrypoint", "python3", target, "-"]


def plan_container(target: str, stack: str) -> list[str]:
    """Return the command for `target` on this machine.

    Runs the container program only to check what is running.
    """
    stack_names(stack)
    program = next((p for p in PROGRAMS if shutil.which(p)), None)
    start = container_command(target, program or PROGRAMS[0], running=False)
    if program is None:
        return start
    question = [program, "container", "inspect", "--format", "{{.State.Running}}", target]
    state = subprocess.run(question, capture_output=True, text=True)
    if state.stdout.strip() != "true":
        return start
    return container_command(target, program, running=True)


def examine_container(target: str, stack: str, timeout_s: float = 1800.0) -> StackResult:
    """Run `examine` in the container.

    EnvironmentFault: no result, with the last line of its output.
    """
    argv = plan_container(target, stack)
    if shutil.which(argv[0]) is None:
        raise EnvironmentFault(
            "neither docker nor podman is on the PATH", "validate-gpu --stack without --container"
        )
    try:
        process = subprocess.run(
            argv, input=container_script(stack), capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFault(
            f"{target} gave no result within {timeout_s:.0f} s", "docker logs"
        ) from error
    result = last_json_line(process.stdout)
    if result is not None:
        return replace(StackResult.from_dict(json.loads(result)), container=target)
    output = (process.stderr or process.stdout).strip().splitlines()
    last = output[-1] if output else f"exit code {process.returncode} without output"
    known = known_failures.find_failure(process.stderr)
    raise EnvironmentFault(
        f"{target}: {last[:300]}", known.fix if known else "docker run --gpus all … nvidia-smi"
    )


def main(argv: list[str]) -> None:
    """Print one line of JSON: `examine` for the stack argv[0], or `judge` for its backend argv[1]."""
    stack = argv[0] if argv else "all"
    if len(argv) < 2:
        print(json.dumps(asdict(examine(stack))))
        return
    call = next(call for name, call, _ in backends(stack) if name == argv[1])
    assert call is not None
    print(json.dumps(asdict(judge(argv[1], call))))


if __name__ == "__main__":
    main(sys.argv[1:])
