"""The model that a running server has: the file that llama.cpp loaded, and what drafts of a small model or head are worth.

llama.cpp names its file in /props. Where that can be read here, each tensor is compared with the checkpoint's. llama.cpp itself ends
with "wrong number of tensors" where it did not use all of a file (src/llama-model-loader.cpp, done_getting_tensors), except for a
file that two models share.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from annie_quant.checkpoint import ModelFolder
from annie_quant.checkpoint.gguf.equality import FileContent, compare_file
from annie_quant.checkpoint.linears import label_of
from annie_quant.documents import salvage_line
from annie_quant.ops.doctor import CheckResult, fault, note, ok
from annie_quant.ops.load_report import FORMATS, SHOWN, TENSORS, count
from annie_quant.ops.server_checks import NATIVE, OPENAI, TIMEOUT_S, completion_bodies, post
from annie_quant.stream.client import fetch


class Props(msgspec.Struct):
    """llama.cpp's /props."""

    model_path: str = ""
    build_info: str = ""


class Timings(msgspec.Struct):
    """Of one answer of llama.cpp. predicted_n: tokens; draft_n: of them drafted, where the server drafts."""

    predicted_n: int = 0
    draft_n: int = 0
    draft_n_accepted: int = 0


class TimedAnswer(msgspec.Struct):
    """An answer of llama.cpp's /completion."""

    timings: Timings = msgspec.field(default_factory=Timings)


def check_file(root: str, checkpoint: Path, headers: Mapping[str, str] | None = None) -> list[CheckResult]:
    """Compare the file that llama.cpp serves with a checkpoint, tensor by tensor."""
    reply = fetch(root + "/props", headers)
    try:
        props = salvage_line(Props, reply.body)
    except (ValueError, msgspec.MsgspecError):
        props = Props()
    path = Path(props.model_path)
    if reply.status != 200 or not props.model_path or not path.is_file():
        message = f"not compared: the server's file {props.model_path or '(no /props)'} is not on this machine"
        return [note(TENSORS, message, "only the answers show what it has loaded", "run the doctor on the server's machine")]
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
        worst = sorted(wrong, key=lambda t: -t.error)[:SHOWN]
        listed = ", ".join(f"{t.name} {t.format} {t.error:.2g}" for t in worst)
        message = f"{len(wrong)} of {len(content.tensors)} tensors have other values than the checkpoint's ({listed}: relative L2)"
        findings.append(fault(TENSORS, message, f"{path} was not made from it, or was quantized again", convert))
    for names, what in ((missing, "tensor"), (content.unknown, "further tensor")):
        if names:
            where = "not in the file" if names is missing else "only in the file"
            findings.append(fault(TENSORS, f"{count(names, what)} {where}", "the server computes another model", convert))
    if not findings:
        message = f"all {len(content.tensors)} of the file that is served have the checkpoint's values"
        findings.append(ok(TENSORS, message))
    if near:
        listed = ", ".join(f"{t.name} {t.format}" for t in near[:SHOWN])
        findings.append(note(TENSORS, f"{len(near)} are stored in another format, within its rounding ({listed})"))
    if auxiliary:
        findings.append(note(TENSORS, f"{count(auxiliary, 'tensor')} not in the file", "it drafts and sees nothing without them"))
    formats: dict[str, Counter[str]] = {}
    for t in content.tensors:
        formats.setdefault(t.format, Counter())[label_of(t.name.removesuffix(".weight"))] += 1
    listed = "; ".join(f"{name}: {', '.join(f'{n} x {x}' for x, n in c.items())}" for name, c in formats.items())
    return [*findings, ok(FORMATS, listed)]


DRAFTS = "drafts"
N_DRAFTED = 32  # tokens per answer
COUNTER = re.compile(r"^vllm:spec_decode_num_(drafts|draft_tokens|accepted_tokens)(?:_total)?(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


def check_drafts(
    root: str, family: str, prompts: Sequence[Sequence[int]], headers: Mapping[str, str] | None, model: str = ""
) -> CheckResult:
    """Return how many drafted tokens a server accepts while it answers prompts (token ids).

    family: as of server_checks.Served; model: its name, which vLLM needs.
    """
    if family == "llama.cpp":
        bodies = [{"prompt": list(p), "n_predict": N_DRAFTED, "temperature": 0, "cache_prompt": False} for p in prompts]
        answers = [salvage_line(TimedAnswer, reply.body).timings for reply in post(root + NATIVE, bodies, headers)]
        drafted, accepted = sum(a.draft_n for a in answers), sum(a.draft_n_accepted for a in answers)
        steps = sum(a.predicted_n - a.draft_n_accepted for a in answers)
    else:
        before = counters(root, headers)
        bodies = completion_bodies(model, prompts, N_DRAFTED)
        post(root + OPENAI, bodies, headers)
        after = counters(root, headers)
        steps, drafted, accepted = (
            after.get(n, 0) - before.get(n, 0) for n in ("drafts", "draft_tokens", "accepted_tokens")
        )
    if not drafted:
        return note(DRAFTS, "the server drafts nothing", "it was started without speculative decoding, or reports none")
    message = f"{accepted} of {drafted} drafted tokens accepted, {1 + accepted / max(1, steps):.2f} tokens per step"
    if accepted:
        return ok(DRAFTS, message)
    why = "drafting costs time and gives nothing: a lost or faulty head, or another model's"
    return fault(DRAFTS, message, why, "compare its mtp.* tensors with the source: annie-quant audit DIR --source BF16")


def counters(root: str, headers: Mapping[str, str] | None) -> dict[str, int]:
    """Return vLLM's counters of speculative decoding, summed over its engines."""
    sums: Counter[str] = Counter()
    for name, value in COUNTER.findall(fetch(root + "/metrics", headers).body.decode(errors="replace")):
        sums[name] += int(float(value))
    return sums
