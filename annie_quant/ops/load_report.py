"""What vLLM did with a checkpoint while it loaded it, from the report of our plug-in (vllm_report), as findings of the doctor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from annie_quant import models
from annie_quant.checkpoint import ModelFolder, dialects
from annie_quant.checkpoint.dialects import QuantizedFolder
from annie_quant.core.errors import UsageError
from annie_quant.documents import LoadedModel, decode
from annie_quant.ops.doctor import CheckResult, fault, note, ok

TENSORS, FORMATS = "tensors", "formats"
AGAIN = "start vLLM again with ANNIE_QUANT_VLLM_REPORT=FILE and this package installed next to it"
# Parameters that vLLM makes for every attention, whether the checkpoint has scales of a KV cache or not.
OPTIONAL = (".k_scale", ".v_scale", ".q_scale", ".prob_scale")
OTHER = {"nvfp4": "fp8", "fp8": "fp4"}  # format of a linear → part of the names of classes for another format
SHOWN = 3


def read_report(path: Path) -> list[LoadedModel]:
    """Return the lines of the newest start of the server: one per model (also a draft's) and rank."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"{path}: {str(error.strerror).lower()}", AGAIN) from None
    loads = [decode(LoadedModel, line, f"{path}, line {i + 1}", hint=AGAIN) for i, line in enumerate(lines)]
    if not loads:
        raise UsageError(f"{path} is empty", AGAIN)
    return [load for load in loads if load.start == loads[-1].start]


def check_load(checkpoint: Path, loads: list[LoadedModel]) -> list[CheckResult]:
    """Compare what was loaded with a checkpoint: each tensor's use, each parameter's values, each linear's format."""
    model = dialects.read(ModelFolder(checkpoint))
    return [*check_tensors(model, loads), check_formats(model, loads)]


def check_tensors(model: QuantizedFolder, loads: list[LoadedModel]) -> Iterator[CheckResult]:
    family, used = model.folder.family, {name for load in loads for name in load.used}
    dropped = [name for name in model.folder if name not in used]
    optional = [n for n in dropped if family.is_auxiliary(n) or n.endswith(OPTIONAL)]
    lost = [n for n in dropped if n not in optional]
    unknown = sorted(used - set(model.folder))
    incomplete = sorted({n for load in loads for n in load.incomplete if not n.endswith(OPTIONAL)})
    fix = f"another version of vLLM (this is {loads[-1].vllm}), or annie-quant audit {model.folder.path}"
    if unknown:
        why = "the server loaded another folder than --checkpoint"
        yield fault(TENSORS, f"{count(unknown, 'loaded tensor')} not in the checkpoint", why, "compare the two folders")
    if lost:
        yield fault(
            TENSORS, f"{count(lost, 'tensor')} written into no parameter", "vLLM drops them without an error", fix
        )
    if incomplete:
        why = "they have whatever was in memory, or an initial value"
        yield fault(TENSORS, f"{count(incomplete, 'parameter')} without all of their values", why, fix)
    if not (unknown or lost or incomplete):
        yield ok(TENSORS, f"all {len(used)} loaded, and every parameter has its values")
    if optional:
        why = "a head for drafts, a vision tower or scales of a KV cache is not part of a server that was started without it"
        yield note(TENSORS, f"{count(optional, 'tensor')} not loaded", why)


def check_formats(model: QuantizedFolder, loads: list[LoadedModel]) -> CheckResult:
    kernels = Counter(" ".join(scheme) for load in loads for scheme in load.linears.values())
    listed = ", ".join(f"{n} x {scheme}" for scheme, n in kernels.most_common())
    linears = {models.short_name(name): x.format for name, x in model.linears.items()}
    plain = {models.short_name(name.removesuffix(".weight")) for name in model.unowned}
    wrong = []
    for load in loads:
        for module, scheme in load.linears.items():
            formats = {linears.get(m, "") for m in members(model, module) if m in linears or m in plain}
            if len(formats) == 1 and is_other(formats.pop(), scheme):
                wrong.append(f"{module} by {scheme[0]}")
    if wrong:
        return fault(FORMATS, f"{count(wrong, 'linear')} of another format; {listed}", "it is not what the checkpoint holds",
                     "start the server without an option that quantizes")  # fmt: skip
    return ok(FORMATS, listed)


def is_other(stored: str, scheme: list[str]) -> bool:
    """Return whether the classes of a linear are for another format than the checkpoint's ("" for 16 bits).

    From vLLM 0.30 on ModelOptLinearMethod has several formats, and the kernel's class tells them apart.
    """
    names = " ".join(scheme).lower()
    if not stored or "unquantized" in names:
        return (not stored) != ("unquantized" in names)
    return OTHER[stored] in names and ("fp4" if stored == "nvfp4" else "fp8") not in names


def members(model: QuantizedFolder, module: str) -> list[str]:
    """Return the checkpoint's linears that one of vLLM's modules holds, without the prefix of their form."""
    short = models.short_name(module)
    layer, name = models.layer_of(short), short.rpartition(".")[2]
    if not layer or name not in model.folder.family.fused:
        return [short]
    return [f"{layer}.{member}" for member in model.folder.family.fused[name]]


def count(names: Iterable[str], what: str) -> str:
    """Return "3 tensors, such as a, b": the number and the first names."""
    names = list(names)
    return f"{len(names)} {what}{'s' if len(names) > 1 else ''} ({', '.join(names[:SHOWN])}{' ...' if len(names) > SHOWN else ''})"
