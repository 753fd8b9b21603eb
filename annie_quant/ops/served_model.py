"""The model that a running server has: what it loaded, and what drafts of a small model or head are worth.

vLLM's loads are in the report of our plug-in (vllm_report). llama.cpp names its file in /props: where that can be read here, each
tensor is compared with the checkpoint's. llama.cpp itself ends with "wrong number of tensors" where it did not use all of a file
(src/llama-model-loader.cpp, done_getting_tensors), except for a file that two models share.

SGLang reports its arguments as it resolved them, its version, and a state per data-parallel rank: GET /server_info, before SGLang
0.5.6 /get_server_info. Form: sglang/srt/entrypoints/http_server.py and managers/scheduler_components/internal_state.py in the
wheels of 0.5.6 and 0.5.23.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from annie_quant import models
from annie_quant.bench.backend import Backend, identity, sglang_page
from annie_quant.checkpoint import ModelFolder, dialects, loader_support
from annie_quant.checkpoint.comparison import FileContent, compare_file
from annie_quant.checkpoint.dialects import QuantizedFolder
from annie_quant.checkpoint.linears import label_of
from annie_quant.core.errors import UsageError
from annie_quant.core.progress import SILENT, Progress
from annie_quant.core.text import printable
from annie_quant.documents import LoadedModel, decode, salvage_line
from annie_quant.models.server_parsers import parser_hint, parsers_for, row_of
from annie_quant.ops import known_faults, served_drafts, server_checks
from annie_quant.ops.doctor import (
    WHY_NO_REASONING,
    CheckResult,
    Probe,
    fault,
    gpu_capability,
    note,
    notes_on,
    ok,
)
from annie_quant.ops.serving import template_of
from annie_quant.stream.client import fetch

if TYPE_CHECKING:
    from annie_quant.documents import Identity
    from annie_quant.models import Family
    from annie_quant.offline.fingerprint import Fingerprint, GreedyTokens


TENSORS = "tensors"
FORMATS = "formats"
AGAIN = "start vLLM again with ANNIE_QUANT_VLLM_REPORT=FILE and this package installed next to it"
# Parameters that vLLM makes for every attention, whether the checkpoint has scales of a KV cache or not.
OPTIONAL = (".k_scale", ".v_scale", ".q_scale", ".prob_scale")
OTHER = {
    "nvfp4": "fp8",
    "fp8": "fp4",
}  # format of a linear → part of the names of classes for another format
_MAX_SHOWN = 3


class Props(msgspec.Struct):
    """llama.cpp's /props."""

    model_path: str = ""
    build_info: str = ""


def check_served(
    url: str,
    checkpoint: Path,
    reference: Path | None = None,
    load_report: Path | None = None,
    headers: Mapping[str, str] | None = None,
    progress: Progress = SILENT,
) -> tuple[list[CheckResult], Fingerprint | GreedyTokens]:
    """Check what a running server made of a checkpoint: its tensors and formats, its answers, its drafts, its version.

    load_report: of our vLLM plug-in.
    """
    answers, served, result = server_checks.check_server(
        url, checkpoint, reference, headers, progress
    )
    progress.message("comparing what the server loaded")
    root = server_checks.check_url(url)
    server = Backend("server", root, headers=headers or {})
    who = identity(server)
    info = sglang_page(server)
    if load_report is not None:
        loaded = check_load(checkpoint, read_report(load_report))
    elif served.family == "llama.cpp":
        loaded = check_file(root, checkpoint, headers)
    else:
        loaded = [
            note(TENSORS, "not compared", "only the answers show what the server has loaded", AGAIN)
        ]
    if not info:
        drafts = served_drafts.check_drafts(root, checkpoint, served, headers, result.name)
        loaded += served_drafts.check_template(root, checkpoint, headers)
    else:
        loaded += check_info(info, checkpoint)
        drafts = check_accepted(info, NOT_ACCEPTED)
    versions = version_findings(who, checkpoint)
    faults = _faults_of(who, ModelFolder(checkpoint).family)
    return [*loaded, *versions, answers, drafts, *faults], result


# ---- what vLLM loaded


def read_report(path: Path) -> list[LoadedModel]:
    """Return the lines of the newest start of the server: one per model (also a draft's) and rank."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"{path}: {str(error.strerror).lower()}", AGAIN) from None
    loads = [
        decode(LoadedModel, line, f"{path}, line {i + 1}", hint=AGAIN)
        for i, line in enumerate(lines)
    ]
    if not loads:
        raise UsageError(f"{path} is empty", AGAIN)
    return [load for load in loads if load.start == loads[-1].start]


def check_load(checkpoint: Path, loads: list[LoadedModel]) -> list[CheckResult]:
    """Compare what was loaded with a checkpoint: each tensor's use, each parameter's values, each linear's format."""
    model = dialects.read(ModelFolder(checkpoint))
    return [*check_tensors(model, loads), check_formats(model, loads)]


def check_tensors(model: QuantizedFolder, loads: list[LoadedModel]) -> Iterator[CheckResult]:
    family = model.folder.family
    used = {name for load in loads for name in load.used}
    dropped = [name for name in model.folder if name not in used]
    optional = [n for n in dropped if family.is_auxiliary(n) or n.endswith(OPTIONAL)]
    lost = [n for n in dropped if n not in optional]
    unknown = sorted(used - set(model.folder))
    incomplete = sorted({n for load in loads for n in load.incomplete if not n.endswith(OPTIONAL)})
    fix = f"another version of vLLM (this is {loads[-1].vllm}), or annie-quant audit {model.folder.path}"
    if unknown:
        why = "the server loaded another folder than --checkpoint"
        yield fault(
            TENSORS,
            f"{_count(unknown, 'loaded tensor')} not in the checkpoint",
            why,
            "compare the two folders",
        )
    if lost:
        yield fault(
            TENSORS,
            f"{_count(lost, 'tensor')} written into no parameter",
            "vLLM drops them without an error",
            fix,
        )
    if incomplete:
        why = "they have whatever was in memory, or an initial value"
        yield fault(
            TENSORS, f"{_count(incomplete, 'parameter')} without all of their values", why, fix
        )
    if not (unknown or lost or incomplete):
        yield ok(TENSORS, f"all {len(used)} loaded, and every parameter has its values")
    if optional:
        why = "a head for drafts, a vision tower or scales of a KV cache is not part of a server that was started without it"
        yield note(TENSORS, f"{_count(optional, 'tensor')} not loaded", why)


def check_formats(model: QuantizedFolder, loads: list[LoadedModel]) -> CheckResult:
    schemes = [scheme for load in loads for scheme in load.linears.values()]
    kernels = Counter(" ".join(scheme) for scheme in schemes)
    listed = ", ".join(f"{n} x {scheme}" for scheme, n in kernels.most_common())
    linears = {models.short_name(name): x.format for name, x in model.linears.items()}
    plain = {models.short_name(name.removesuffix(".weight")) for name in model.unowned}
    wrong = []
    for load in loads:
        for module, scheme in load.linears.items():
            formats = {
                linears.get(m, "") for m in members(model, module) if m in linears or m in plain
            }
            if len(formats) == 1 and is_other(formats.pop(), scheme):
                wrong.append(f"{module} by {scheme[0]}")
    if wrong:
        return fault(
            FORMATS,
            f"{_count(wrong, 'linear')} of another format; {listed}",
            "it is not what the checkpoint holds",
            "start the server without an option that quantizes",
        )
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
    layer = models.layer_of(short)
    name = short.rpartition(".")[2]
    if not layer or name not in model.folder.family.fused:
        return [short]
    return [f"{layer}.{member}" for member in model.folder.family.fused[name]]


def _count(names: Iterable[str], what: str) -> str:
    """Return "3 tensors, such as a, b": the number and the first names."""
    names = list(names)
    plural = "s" if len(names) > 1 else ""
    more = " ..." if len(names) > _MAX_SHOWN else ""
    return f"{len(names)} {what}{plural} ({', '.join(names[:_MAX_SHOWN])}{more})"


# ---- the file that llama.cpp loaded


def check_file(
    root: str, checkpoint: Path, headers: Mapping[str, str] | None = None
) -> list[CheckResult]:
    """Compare the file that llama.cpp serves with a checkpoint, tensor by tensor."""
    reply = fetch(root + "/props", headers)
    try:
        props = salvage_line(Props, reply.body)
    except (ValueError, msgspec.MsgspecError):
        props = Props()
    path = Path(props.model_path)
    if reply.status != 200 or not props.model_path or not path.is_file():
        message = f"not compared: the server's file {props.model_path or '(no /props)'} is not on this machine"
        return [
            note(
                TENSORS,
                message,
                "only the answers show what it has loaded",
                "run the doctor on the server's machine",
            )
        ]
    return findings_of(compare_file(checkpoint, path), checkpoint, path)


def findings_of(content: FileContent, checkpoint: Path, path: Path) -> list[CheckResult]:
    family = ModelFolder(checkpoint).family
    wrong = [t for t in content.tensors if not t.is_near]
    near = [t for t in content.tensors if t.is_near and not t.is_same]
    auxiliary = [n for n in content.missing if family.is_auxiliary(n)]
    missing = [n for n in content.missing if n not in auxiliary]
    convert = f"annie-quant convert {checkpoint} --to gguf"
    findings = []
    if wrong:
        worst = sorted(wrong, key=lambda t: -t.error)[:_MAX_SHOWN]
        listed = ", ".join(f"{t.name} {t.format} {t.error:.2g}" for t in worst)
        message = f"{len(wrong)} of {len(content.tensors)} tensors have other values than the checkpoint's ({listed}: relative L2)"
        findings.append(
            fault(TENSORS, message, f"{path} was not made from it, or was quantized again", convert)
        )
    for names, what in ((missing, "tensor"), (content.unknown, "further tensor")):
        if names:
            where = "not in the file" if names is missing else "only in the file"
            findings.append(
                fault(
                    TENSORS,
                    f"{_count(names, what)} {where}",
                    "the server computes another model",
                    convert,
                )
            )
    if not findings:
        message = (
            f"all {len(content.tensors)} of the file that is served have the checkpoint's values"
        )
        findings.append(ok(TENSORS, message))
    if near:
        listed = ", ".join(f"{t.name} {t.format}" for t in near[:_MAX_SHOWN])
        findings.append(
            note(
                TENSORS, f"{len(near)} are stored in another format, within its rounding ({listed})"
            )
        )
    if auxiliary:
        findings.append(
            note(
                TENSORS,
                f"{_count(auxiliary, 'tensor')} not in the file",
                "it drafts and sees nothing without them",
            )
        )
    formats: dict[str, Counter[str]] = {}
    for t in content.tensors:
        formats.setdefault(t.format, Counter())[label_of(t.name.removesuffix(".weight"))] += 1
    lines = []
    for name, labels in formats.items():
        counts = ", ".join(f"{n} x {label}" for label, n in labels.items())
        lines.append(f"{name}: {counts}")
    return [*findings, ok(FORMATS, "; ".join(lines))]


NOT_ACCEPTED = "drafting costs time and gives nothing: a lost or faulty head, or another model's"


def describe_server(url: str, headers: Mapping[str, str] | None = None) -> list[CheckResult]:
    """Return what a running server reports of itself, and the known faults of its version; nothing is compared."""
    root = server_checks.check_url(url)
    server_checks.model_name(root, headers)  # raises where nothing answers
    server = Backend("server", root, headers=headers or {})
    who = identity(server)
    info = sglang_page(server)
    message = (
        f"{who.runtime or 'unknown software'} {who.version or ''}".rstrip() + f" serves {who.model}"
    )
    what = f"{message}, weights in {who.format}" if who.format else message
    add = "add --checkpoint DIR, the folder that it serves"
    findings = [ok("server", what), *_faults_of(who, None)]
    if info:
        findings += [*check_info(info), check_accepted(info, NOT_ACCEPTED)]
    return [*findings, note(TENSORS, "not compared", "no checkpoint is named", add)]


def version_findings(who: Identity, checkpoint: Path) -> list[CheckResult]:
    """Return a finding where the server's version is older than the first one that loads the checkpoint's formats."""
    if who.runtime not in ("vllm", "sglang") or not who.version:
        return []
    model = dialects.read(ModelFolder(checkpoint))
    problem = loader_support.too_old(model, who.runtime, who.version[:40])
    if not problem:
        return []
    effect = "older versions refuse such a checkpoint, or read it as another format"
    return [fault("version", problem, effect, f"update {who.runtime}, then start it again")]


def _faults_of(who: Identity, family: Family | None) -> list[CheckResult]:
    """Return the known faults of a running server's version with this kind of model, and with this machine's GPU if it has one."""
    if who.runtime not in ("vllm", "sglang") or not who.version:
        return []
    return notes_on(
        known_faults.faults_of([(who.runtime, who.version[:40])], gpu_capability(Probe()), family)
    )


# ---- what SGLang reports of itself

REPORTED = (
    "quantization",
    "dtype",
    "kv_cache_dtype",
    "attention_backend",
    "fp4_gemm_runner_backend",
    "moe_runner_backend",
    "speculative_algorithm",
)
OF_NVFP4 = ("fp4", "modelopt", "compressed")  # parts of the names of its methods that read NVFP4
MOST_TOKENS = 1000  # per step: more is not a rate
Info = Mapping[str, object]


def _text(info: Info, name: str) -> str:
    """Return a field's text; "" where it is none."""
    value = info.get(name)
    return printable(value, 200) if isinstance(value, str) else ""


def check_info(info: Info, checkpoint: Path | None = None) -> Iterator[CheckResult]:
    """Yield what the server's arguments say about its kernels and parsers, and whether they fit a checkpoint."""
    listed = ", ".join(f"{name} {value}" for name in REPORTED if (value := _text(info, name)))
    stored = (
        {x.format for x in dialects.read(ModelFolder(checkpoint)).linears.values()}
        if checkpoint
        else set()
    )
    used = _text(info, "quantization")
    path = Path(_text(info, "model_path") or "/nowhere")
    if checkpoint and path.is_dir() and not path.samefile(checkpoint):
        yield fault(
            "checkpoint",
            f"the server loaded {path}",
            "it is not --checkpoint",
            "compare the two folders",
        )
    right = any(part in used for part in OF_NVFP4) if "nvfp4" in stored else bool(stored)
    if checkpoint and used and not right:
        what = " and ".join(sorted(stored)) or "16 bits"
        why = f"the checkpoint is in {what}"
        yield fault(
            "formats",
            listed,
            why,
            "start the server without --quantization, or with modelopt_fp4 for NVFP4",
        )
    else:
        yield ok("formats", listed)
    folder = checkpoint
    if folder is None and path.is_dir():
        folder = path
    yield from check_parsers(info, template_of(folder) if folder else "")


# Other names of SGLang for a parser that reads the same form.
SAME_FORM = {"qwen25": ("qwen25", "qwen", "hermes"), "glm45": ("glm45", "glm")}
READS_TEMPLATE = "auto"  # SGLang from 0.5.13 takes the parser that the chat template needs


def check_parsers(info: Info, template: str) -> Iterator[CheckResult]:
    """Yield whether SGLang's parsers are those of a chat template; "" for one that cannot be read here."""
    tool = _text(info, "tool_call_parser")
    reasoning = _text(info, "reasoning_parser")
    row = row_of(template)
    fix = parser_hint("sglang")
    if row is None:
        if not tool:
            why = "tool calls stay in the text: a fault of the server, not of the model"
            yield fault("parsers", "the server runs without --tool-call-parser", why, fix)
        if not reasoning:
            yield note("parsers", "the server runs without --reasoning-parser", WHY_NO_REASONING)
        if tool and reasoning:
            names = f"--tool-call-parser {tool}, --reasoning-parser {reasoning}"
            yield ok("parsers", names)
        return
    expected = parsers_for("sglang", template)
    flags = " ".join(expected.flags("sglang")) or "no parser"
    fix = f"start it with {flags}, as the chat template of {row.family} needs"
    is_right = True
    if tool not in (READS_TEMPLATE, *SAME_FORM.get(expected.tool, (expected.tool,))):
        is_right = False
        what = f"--tool-call-parser {tool}" if tool else "no --tool-call-parser"
        why = "tool calls stay in the text or vanish: a fault of the server, not of the model"
        yield fault("parsers", f"the server runs with {what}", why, fix)
    if reasoning not in (READS_TEMPLATE, expected.reasoning):
        is_right = False
        what = f"--reasoning-parser {reasoning}" if reasoning else "no --reasoning-parser"
        why = "thinking is in the answers" if expected.reasoning else "it empties content"
        yield fault("parsers", f"the server runs with {what}", why, fix)
    if is_right:
        yield ok("parsers", f"those of {row.family}: {flags}")


def check_accepted(info: Info, why_none: str) -> CheckResult:
    """Return how many tokens per step the server's drafts gave since its start."""
    states = info.get("internal_states")
    found = (
        [s.get("avg_spec_accept_length") for s in states if isinstance(s, dict)]
        if isinstance(states, list)
        else []
    )
    rates = [rate for rate in found if isinstance(rate, (int, float)) and 0 <= rate < MOST_TOKENS]
    algorithm = _text(info, "speculative_algorithm")
    if not algorithm or not rates:
        return note(
            "drafts",
            "the server drafts nothing",
            "it was started without drafts, or has not drafted yet",
        )
    message = (
        f"{sum(rates) / len(rates):.2f} tokens per step since the server's start ({algorithm})"
    )
    return ok("drafts", message) if max(rates) > 1 else fault("drafts", message, why_none)
