"""Other people's FP4 GEMMs over our oracle: which backends of an installed serving stack are right, wrong or
missing on this GPU.

A backend is a function (case) -> array [M, N]; `judge` compares it with the float64 product of the same bytes, by the
bound that fp32 accumulation allows (times a small factor for other orders of scaling and a bf16 alpha), so a fault
that a loose tolerance lets through (a swapped nibble, a neighbour's scale, a dropped tail) is seen. Run inside a
container: python -m annie_quant.gemm.stack all
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from annie_quant.errors import UsageError
from annie_quant.gemm import known, oracle

STACKS = ("torch", "vllm", "flashinfer")
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
    """{"backend", "verdict": right | wrong | failed, "worst", "cases", "cause", "remedy"} of one backend."""
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
            if not row["ok"] and verdict == "right":
                verdict, (cause, remedy) = "wrong", known.WRONG
        except Exception as error:
            row.update(ok=False, error=f"{type(error).__name__}: {error}"[:300])
            hint = known.recognise(str(error))
            verdict = "failed"
            cause, remedy = hint or ("", "")
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
    import torch

    def cuda(array: np.ndarray) -> Any:
        return torch.from_numpy(np.ascontiguousarray(array)).cuda()

    e4m3 = torch.float8_e4m3fn
    return cuda(case.a), cuda(swizzled(case.a_scale)).view(e4m3), cuda(case.w), cuda(swizzled(case.w_scale)).view(e4m3)


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
    try:
        import torch
        from vllm import _custom_ops as ops
    except Exception as error:
        yield "vllm cutlass_scaled_fp4_mm", None, f"{type(error).__name__}: {error}"[:200]
        return
    if not hasattr(ops, "cutlass_scaled_fp4_mm"):
        yield "vllm cutlass_scaled_fp4_mm", None, "this vLLM has no such op"
        return

    def call(case: Case) -> Any:
        a, sa, w, sw = _tensors(case)
        alpha = torch.tensor([case.alpha], dtype=torch.float32, device="cuda")
        return _host(ops.cutlass_scaled_fp4_mm(a, w, sa, sw, alpha, torch.bfloat16))

    yield "vllm cutlass_scaled_fp4_mm", call, ""


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


def examine(stack: str) -> dict[str, Any]:
    """Every backend of `stack` (or of all stacks) over the oracle cases, and which to choose."""
    rows = []
    for each in STACKS if stack == "all" else (stack,):
        for name, call, missing in backends(each):
            if call is None:
                rows.append({"backend": name, "verdict": "missing", "cause": missing, "remedy": "", "cases": []})
            else:
                rows.append(judge(name, call))
    right = [r["backend"] for r in rows if r["verdict"] == "right"]
    return {
        "backends": rows,
        "choose": right[0] if right else None,
        "wrong": any(r["verdict"] == "wrong" for r in rows),
    }


if __name__ == "__main__":
    print(json.dumps(examine(sys.argv[1] if len(sys.argv) > 1 else "all")))
