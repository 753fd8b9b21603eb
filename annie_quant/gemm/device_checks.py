"""What a GPU has for our kernels: machine code, and shared memory for the plans of a 9B's products and of experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from annie_quant.gemm.arrays import native

Limits = tuple[int, int, int, bool, bool]  # of _gemm: SMs, shared memory per block, major capability, wgmma, native FP4
SPARK = (48, 101376, 12, False, True)  # of a GB10
SHAPES = ((24576, 4096), (4096, 12288), (8192, 4096), (248320, 4096))  # [N, K] of a 9B, its head last
TOKENS = (1, 8, 16, 64, 256, 4096)


def machine_code(architectures: str, capability: str) -> tuple[bool | None, str]:
    """Return whether the module has native FP4 code for a GPU of SM12x, and in words; None on other GPUs, which cannot run it.

    architectures: of _gemm.ARCHS; capability: of the GPU, as "12.1".
    """
    built = [a for a in architectures.split(",") if a.startswith("12")]
    listed = f"built for {', '.join(built) or 'no SM12x'}"
    if not capability.startswith("12."):
        return None, f"{listed}; not run: this GPU is {capability}"
    exact = capability.replace(".", "")
    return any(a.startswith((exact, "120f")) for a in built), listed


def largest_need(limits: Limits) -> int:
    """Return the most shared memory per block of the plans for a 9B's products. Raises CudaError where a product has none."""
    module, most = native(), 0
    for n, k in SHAPES:
        for m in TOKENS:
            path, fields = module.plan(m, n, k, "auto", limits)
            most = max(most, module.plan_needs(m, n, k, path, fields, limits)[0])
    for pairs in TOKENS:
        shape = (pairs * 8, 256, 8, 1024, 2048)
        most = max(most, module.grouped_needs(shape, module.plan_grouped(shape, 0, limits), limits)[0])
    return most


def checks(info: Mapping[str, int | str]) -> Iterator[tuple[str, bool, str]]:
    """Yield (name, whether it is right, detail). info: of _gemm.device_info."""
    module = native()
    limits: Limits = module.limits()
    capability = f"{info['major']}.{info['minor']}"
    present, detail = machine_code(module.ARCHS, capability)
    if present is not None:
        yield f"machine code for {capability}", present and limits[4], detail
    try:
        need = largest_need(limits)
        yield "shared memory", need <= limits[1], f"{need} of {limits[1]} bytes per block"
    except module.CudaError as error:
        yield "shared memory", False, str(error.args[0])
