"""What a running SGLang reports of itself: GET /server_info, before SGLang 0.5.6 /get_server_info.

The page has the server's arguments as it resolved them, its version, and a state per data-parallel rank. Form:
sglang/srt/entrypoints/http_server.py and managers/scheduler_components/internal_state.py in the wheels of 0.5.6 and 0.5.23.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from annie_quant.bench.backend import Backend, sglang_page
from annie_quant.checkpoint import ModelFolder, dialects
from annie_quant.ops.doctor import CheckResult, fault, note, ok

SHOWN = (
    "quantization", "dtype", "kv_cache_dtype", "attention_backend", "fp4_gemm_runner_backend", "moe_runner_backend",
    "speculative_algorithm",
)  # fmt: skip
OF_NVFP4 = ("fp4", "modelopt", "compressed")  # parts of the names of its methods that read NVFP4


class RankState(msgspec.Struct):
    """State of one data-parallel rank. avg_spec_accept_length: tokens per step since the server's start."""

    avg_spec_accept_length: float | None = None


class ServerInfo(msgspec.Struct):
    """The fields of /server_info that are used here."""

    model_path: str = ""
    quantization: str | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    attention_backend: str | None = None
    fp4_gemm_runner_backend: str | None = None
    moe_runner_backend: str | None = None
    speculative_algorithm: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    internal_states: list[RankState] = []


def read_info(server: Backend) -> ServerInfo | None:
    """Return what the server reports; None where it reports nothing that can be read."""
    try:
        return msgspec.convert(sglang_page(server) or None, ServerInfo)
    except ValueError:
        return None


def check_info(info: ServerInfo, checkpoint: Path | None = None) -> Iterator[CheckResult]:
    """Yield what the server's arguments say about its kernels and parsers, and whether they fit a checkpoint."""
    listed = ", ".join(f"{name} {value}" for name in SHOWN if (value := getattr(info, name)))
    stored = {x.format for x in dialects.read(ModelFolder(checkpoint)).linears.values()} if checkpoint else set()
    used, path = info.quantization or "", Path(info.model_path)
    if checkpoint and path.is_dir() and not path.samefile(checkpoint):
        yield fault("checkpoint", f"the server loaded {path}", "it is not --checkpoint", "compare the two folders")
    right = any(part in used for part in OF_NVFP4) if "nvfp4" in stored else bool(stored)
    if checkpoint and used and not right:
        what = " and ".join(sorted(stored)) or "16 bits"
        why = f"the checkpoint is in {what}"
        yield fault("formats", listed, why, "start the server without --quantization, or with modelopt_fp4 for NVFP4")
    else:
        yield ok("formats", listed)
    parsers = {"--tool-call-parser": info.tool_call_parser, "--reasoning-parser": info.reasoning_parser}
    if missing := [flag for flag, value in parsers.items() if not value]:
        why = "tool calls stay in the text, or thinking leaks: a fault of the server, not of the model"
        fix = "start it with --reasoning-parser qwen3 --tool-call-parser qwen3_coder, or its family's"
        yield fault("parsers", f"the server runs without {', '.join(missing)}", why, fix)
    else:
        yield ok("parsers", f"tool calls {info.tool_call_parser}, thinking {info.reasoning_parser}")


def check_accepted(info: ServerInfo, why_none: str) -> CheckResult:
    """Return how many tokens per step the server's drafts gave since its start."""
    rates = [s.avg_spec_accept_length for s in info.internal_states if s.avg_spec_accept_length is not None]
    if not info.speculative_algorithm or not rates:
        return note(
            "drafts", "the server drafts nothing", "it was started without speculative decoding, or has not drafted yet"
        )
    message = f"{sum(rates) / len(rates):.2f} tokens per step since the server's start ({info.speculative_algorithm})"
    return ok("drafts", message) if max(rates) > 1 else fault("drafts", message, why_none)
