"""Other people's FP4 GEMMs over our oracle: which backends of an installed serving stack are right, wrong or
missing on this GPU.

A backend is a function (case) -> array [M, N]; `judge` compares it with the float64 product of the same bytes, by the
bound that fp32 accumulation allows (times a small factor for other orders of scaling and a bf16 alpha), so a fault
that a loose tolerance lets through (a swapped nibble, a neighbour's scale, a dropped tail) is seen. Each backend runs
in a process of its own: an illegal instruction or a crash in one ends that process and says nothing of the others.
Run inside a container: python -m annie_quant.gemm.stack_check all
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from annie_quant.errors import UsageError
from annie_quant.gemm import known_failures, oracle

STACKS = ("torch", "vllm", "flashinfer")
SWITCHES = {  # the server's switch that takes a backend
    "vllm cutlass_scaled_fp4_mm": "--linear-backend cutlass",
    "vllm marlin (W4A16)": "--linear-backend marlin",
    "flashinfer mm_fp4 cutlass": "--linear-backend flashinfer_cutlass",
    "flashinfer mm_fp4 cudnn": "--linear-backend flashinfer_cudnn",
    "flashinfer mm_fp4 trtllm": "--linear-backend flashinfer_trtllm",
}
SLACK = 4.0  # over the bound of our own kernels: one more rounding of scales or alpha in bf16 output


@dataclass(frozen=True)
class Case:
    """One product: codes uint8 [., K/2], linear scale bytes uint8 [., K/16], alpha = product of the tensor scales."""

    name: str
    a: np.ndarray
    a_scale: np.ndarray
    w: np.ndarray
    w_scale: np.ndarray
    alpha: float

    def exact(self) -> tuple[np.ndarray, np.ndarray]:
        left, right = oracle.dequantize(self.a, self.a_scale), oracle.dequantize(self.w, self.w_scale)
        return left @ right.T * self.alpha, np.abs(left) @ np.abs(right).T * self.alpha


def cases() -> list[Case]:
    """Varied data everywhere: uniform weights hide a swapped fragment. Small, large, padded, and one token."""
    found = []
    for m, n, k in ((1, 256, 256), (16, 256, 512), (33, 384, 768), (128, 128, 1024), (150, 128, 128), (128, 128, 192)):
        a, sa = oracle.random_weight(m, k, m + 1)
        w, sw = oracle.random_weight(n, k, n + k)
        found.append(Case(f"M={m} N={n} K={k}", a, sa, w, sw, float(np.float32(2.0**-7 * 1.1))))
    return found


def judge(name: str, call: Callable[[Case], Any], given: list[Case] | None = None) -> dict[str, Any]:
    """{"backend", "verdict": right | wrong | failed, "worst", "cases", "cause", "remedy"} of one backend.

    One wrong case makes it wrong, whatever the others do: an error shows by itself, a wrong result does not.
    """
    rows, verdict = [], "right"
    cause = remedy = ""
    for case in given or cases():
        row: dict[str, Any] = {"case": case.name}
        try:
            seen = np.asarray(call(case)).astype(np.float64)
            exact, magnitude = case.exact()
            if seen.shape != exact.shape:
                raise ValueError(f"gave shape {list(seen.shape)}, expected {list(exact.shape)}")
            limit = oracle.bound(exact, magnitude, case.a.shape[1] * 2, "bfloat16") * SLACK
            row["worst"] = oracle.worst(seen, exact, limit)
            row["ok"] = row["worst"] <= 1
            if not row["ok"]:
                verdict, (cause, remedy) = "wrong", known_failures.WRONG
        except Exception as error:
            row.update(ok=False, error=f"{type(error).__name__}: {error}"[:300])
            if verdict == "right":
                verdict, (cause, remedy) = "failed", known_failures.recognise(str(error)) or ("", "")
        rows.append(row)
    worst = max((r.get("worst", 0.0) for r in rows), default=0.0)
    return {"backend": name, "verdict": verdict, "worst": worst, "cases": rows, "cause": cause, "remedy": remedy}


def swizzled(scales: np.ndarray) -> np.ndarray:
    """Scale bytes in the 128x4 tile order of CUTLASS and cuBLASLt, rows padded to 128 and columns to 4 with zeros."""
    rows, cols = scales.shape
    m, c = -(-rows // 128) * 128, -(-cols // 4) * 4
    padded = np.zeros((m, c), np.uint8)
    padded[:rows, :cols] = scales
    return np.ascontiguousarray(padded.reshape(m // 128, 4, 32, c // 4, 4).transpose(0, 3, 2, 1, 4)).reshape(m, c)


def backends(stack: str) -> Iterator[tuple[str, Callable[[Case], Any] | None, str]]:
    """(name, call or None, why it is missing) for every FP4 GEMM that the stack offers."""
    if stack not in STACKS:
        raise UsageError(f"there is no stack called {stack!r}", f"choose one of: {', '.join(STACKS)}, all")
    yield from {"torch": _torch, "vllm": _vllm, "flashinfer": _flashinfer}[stack]()


def _tensors(case: Case) -> tuple[Any, ...]:
    """Codes and scales of both sides as W4A4 kernels take them: codes as they are, scales swizzled."""
    import torch

    e4m3 = torch.float8_e4m3fn
    sa, sw = (_there(swizzled(scales)).view(e4m3) for scales in (case.a_scale, case.w_scale))
    return _there(case.a), sa, _there(case.w), sw


def _there(array: np.ndarray) -> Any:
    """The array as a tensor on the GPU; on the CPU where there is none, for stand-ins of the kernels."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(array)).to("cuda" if torch.cuda.is_available() else "cpu")


def _host(tensor: Any) -> np.ndarray:
    return tensor.float().cpu().numpy()


def _torch() -> Iterator[tuple[str, Callable[[Case], Any] | None, str]]:
    name = "torch._scaled_mm"
    try:
        import torch
    except ImportError as error:
        yield name, None, str(error)
        return
    if not hasattr(torch, "float4_e2m1fn_x2"):
        yield name, None, f"torch {torch.__version__} has no float4_e2m1fn_x2"
        return

    def call(case: Case) -> Any:
        a, sa, w, sw = _tensors(case)
        fp4 = torch.float4_e2m1fn_x2
        out = torch._scaled_mm(a.view(fp4), w.view(fp4).t(), sa.flatten(), sw.flatten(), out_dtype=torch.bfloat16)
        return _host(out) * case.alpha

    yield name, call, ""


def _vllm() -> Iterator[tuple[str, Callable[[Case], Any] | None, str]]:
    cutlass, marlin = "vllm cutlass_scaled_fp4_mm", "vllm marlin (W4A16)"
    try:
        from vllm import _custom_ops as ops
    except Exception as error:
        why = f"{type(error).__name__}: {error}"[:200]
        yield from ((cutlass, None, why), (marlin, None, why))
        return

    def call(case: Case) -> Any:
        import torch

        a, sa, w, sw = _tensors(case)
        alpha = torch.tensor([case.alpha], dtype=torch.float32, device=a.device)
        return _host(ops.cutlass_scaled_fp4_mm(a, w, sa, sw, alpha, torch.bfloat16))

    has = hasattr(ops, "cutlass_scaled_fp4_mm")
    yield cutlass, call if has else None, "" if has else "this vLLM has no such op"
    try:
        from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4 as utils
    except Exception as error:
        yield marlin, None, f"{type(error).__name__}: {error}"[:200]
        return
    yield marlin, lambda case: _marlin(utils, case), ""


def _marlin(utils: Any, case: Case) -> Any:
    """vLLM's weight-only kernel through its own preparation of a layer; the activations' values are exact in bf16."""
    import torch

    layer: Any = torch.nn.Module()
    new = "weight_global_scale" in inspect.signature(utils.apply_fp4_marlin_linear).parameters
    name = "weight_global_scale" if new else "weight_scale_2"
    layer.weight = torch.nn.Parameter(_there(case.w), requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(_there(case.w_scale).view(torch.float8_e4m3fn), requires_grad=False)
    one = _there(np.ones(1, np.float32))  # alpha comes last, in float64: older versions would round it to bf16
    setattr(layer, name, torch.nn.Parameter(one, requires_grad=False))
    layer.output_size_per_partition, layer.input_size_per_partition = case.w.shape[0], case.w.shape[1] * 2
    layer.params_dtype = torch.bfloat16
    utils.prepare_fp4_layer_for_marlin(layer)
    x = _there(oracle.dequantize(case.a, case.a_scale).astype(np.float32)).to(torch.bfloat16)
    out = utils.apply_fp4_marlin_linear(
        x, layer.weight, layer.weight_scale, getattr(layer, name), layer.workspace, case.w.shape[0], x.shape[1]
    )
    return _host(out) * case.alpha


def _flashinfer() -> Iterator[tuple[str, Callable[[Case], Any] | None, str]]:
    try:
        import flashinfer
        import torch
    except Exception as error:
        yield "flashinfer mm_fp4", None, f"{type(error).__name__}: {error}"[:200]
        return
    for backend in ("cutlass", "cudnn", "trtllm"):

        def call(case: Case, backend: str = backend) -> Any:
            a, sa, w, sw = _tensors(case)
            alpha = torch.tensor([case.alpha], dtype=torch.float32, device="cuda")
            return _host(flashinfer.mm_fp4(a, w.T, sa, sw.T, alpha, torch.bfloat16, backend=backend))

        yield f"flashinfer mm_fp4 {backend}", call, ""


def examine(stack: str, timeout_s: float = 600.0) -> dict[str, Any]:
    """Every backend of `stack` (or of all stacks) over the oracle cases, and which to choose."""
    rows: list[dict[str, Any]] = []
    for each in STACKS if stack == "all" else (stack,):
        for name, call, missing in backends(each):
            if call is None:
                rows.append({"backend": name, "verdict": "missing", "cause": missing, "remedy": "", "cases": []})
            else:
                rows.append(_apart(each, name, timeout_s))
    right = [str(r["backend"]) for r in rows if r["verdict"] == "right"]
    weights_only = [name for name in right if "W4A16" in name]
    note = (
        known_failures.NOT_NATIVE if right and right == weights_only else known_failures.RANKED if weights_only else ""
    )
    return {
        "backends": rows,
        "choose": right[0] if right else None,
        "switch": SWITCHES.get(right[0], "") if right else "",
        "note": note,
        "wrong": any(r["verdict"] == "wrong" for r in rows),
    }


def _apart(stack: str, name: str, timeout_s: float) -> dict[str, Any]:
    """`judge` of one backend in a process of its own; failed, with its last words, if that ended without a result."""
    paths = os.pathsep.join(path for path in sys.path if path)
    argv = [sys.executable, "-m", "annie_quant.gemm.stack_check", stack, name]
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=timeout_s, env={**os.environ, "PYTHONPATH": paths}
        )
    except subprocess.TimeoutExpired:
        return _failed(name, f"no result within {timeout_s:.0f} s", "")
    for line in reversed(done.stdout.splitlines()):  # the stack's own imports may print before it
        if line.startswith("{"):
            row: dict[str, Any] = json.loads(line)
            return row
    code = done.returncode
    end = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    last = done.stderr.strip().splitlines()[-20:]
    return _failed(name, f"{end}: {last[-1][:200]}" if last else end, "\n".join(last))


def _failed(name: str, why: str, said: str) -> dict[str, Any]:
    cause, remedy = known_failures.recognise(said) or (why, "")
    row = {"case": "all", "ok": False, "error": why}
    return {"backend": name, "verdict": "failed", "worst": 0.0, "cases": [row], "cause": cause, "remedy": remedy}


def main(argv: list[str]) -> None:
    """One line of JSON: `examine` of the stack named first, or `judge` of its one backend named second."""
    stack = argv[0] if argv else "all"
    if len(argv) < 2:
        print(json.dumps(examine(stack)))
        return
    call = next(call for name, call, _ in backends(stack) if name == argv[1])
    assert call is not None
    print(json.dumps(judge(argv[1], call)))


if __name__ == "__main__":
    main(sys.argv[1:])
