"""What a server's plug-in writes about the model that it loaded."""

from __future__ import annotations

import msgspec


class LoadedModel(msgspec.Struct, frozen=True, kw_only=True):
    """How vLLM loaded one model on one rank: a line of the file that ANNIE_QUANT_VLLM_REPORT names (ops/vllm_report.py).

    start: the same in all lines of one start of a server; rank: of the process; model: its class.
    linears: module → the class of its quantization method, then of its kernel where it has one.
    used: the checkpoint's tensors whose values were written into a parameter.
    unread: the checkpoint's tensors that were read and written nowhere.
    incomplete: parameters that were not written, or only in part.
    """

    start: str
    rank: int
    model: str
    vllm: str
    linears: dict[str, list[str]]
    used: list[str]
    unread: list[str]
    incomplete: list[str]
