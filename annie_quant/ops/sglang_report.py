"""What a running SGLang reports of itself: GET /server_info, before SGLang 0.5.6 /get_server_info.

The page has the server's arguments as it resolved them, its version, and a state per data-parallel rank. Form:
sglang/srt/entrypoints/http_server.py and managers/scheduler_components/internal_state.py in the wheels of 0.5.6 and 0.5.23.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from annie_quant.checkpoint import ModelFolder, dialects
from annie_quant.core.text import printable
from annie_quant.ops.doctor import CheckResult, fault, note, ok

SHOWN = (
    "quantization", "dtype", "kv_cache_dtype", "attention_backend", "fp4_gemm_runner_backend", "moe_runner_backend",
    "speculative_algorithm",
)  # fmt: skip
OF_NVFP4 = ("fp4", "modelopt", "compressed")  # parts of the names of its methods that read NVFP4
MOST_TOKENS = 1000  # per step: more is not a rate
Info = Mapping[str, object]


def _text(info: Info, name: str) -> str:
    """Return a field's text; "" where it is none."""
    value = info.get(name)
    return printable(value, 200) if isinstance(value, str) else ""


def check_info(info: Info, checkpoint: Path | None = None) -> Iterator[CheckResult]:
    """Yield what the server's arguments say about its kernels and parsers, and whether they fit a checkpoint."""
    listed = ", ".join(f"{name} {value}" for name in SHOWN if (value := _text(info, name)))
    stored = {x.format for x in dialects.read(ModelFolder(checkpoint)).linears.values()} if checkpoint else set()
    used, path = _text(info, "quantization"), Path(_text(info, "model_path") or "/nowhere")
    if checkpoint and path.is_dir() and not path.samefile(checkpoint):
        yield fault("checkpoint", f"the server loaded {path}", "it is not --checkpoint", "compare the two folders")
    right = any(part in used for part in OF_NVFP4) if "nvfp4" in stored else bool(stored)
    if checkpoint and used and not right:
        what = " and ".join(sorted(stored)) or "16 bits"
        why = f"the checkpoint is in {what}"
        yield fault("formats", listed, why, "start the server without --quantization, or with modelopt_fp4 for NVFP4")
    else:
        yield ok("formats", listed)
    parsers = {f"--{name.replace('_', '-')}": _text(info, name) for name in ("tool_call_parser", "reasoning_parser")}
    if missing := [flag for flag, value in parsers.items() if not value]:
        why = "tool calls stay in the text, or thinking leaks: a fault of the server, not of the model"
        fix = "start it with --reasoning-parser qwen3 --tool-call-parser qwen3_coder, or its family's"
        yield fault("parsers", f"the server runs without {', '.join(missing)}", why, fix)
    else:
        yield ok("parsers", ", ".join(" ".join(parser) for parser in parsers.items()))


def check_accepted(info: Info, why_none: str) -> CheckResult:
    """Return how many tokens per step the server's drafts gave since its start."""
    states = info.get("internal_states")
    found = [s.get("avg_spec_accept_length") for s in states if isinstance(s, dict)] if isinstance(states, list) else []
    rates = [rate for rate in found if isinstance(rate, (int, float)) and 0 <= rate < MOST_TOKENS]
    algorithm = _text(info, "speculative_algorithm")
    if not algorithm or not rates:
        return note("drafts", "the server drafts nothing", "it was started without drafts, or has not drafted yet")
    message = f"{sum(rates) / len(rates):.2f} tokens per step since the server's start ({algorithm})"
    return ok("drafts", message) if max(rates) > 1 else fault("drafts", message, why_none)
