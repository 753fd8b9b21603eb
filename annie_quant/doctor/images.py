"""Does a server see images? (`annie-quant doctor --server URL --images`)

The same question is asked about two generated PNGs of one colour each. A model that sees them names both colours; one without a
working vision tower answers both alike, and a server for text alone refuses the message.
"""

from __future__ import annotations

import base64
import re
import struct
import zlib
from collections.abc import Mapping
from typing import Any

from annie_quant.doctor.logprobs import TIMEOUT_S, check_url, model_name
from annie_quant.doctor.probe import Finding, fault, note, ok
from annie_quant.errors import ServerError
from annie_quant.stream.client import chat, run

CHECK = "images"
PIXELS = 64  # a side: two patches of Qwen3.5's tower after its merge of 2 x 2 patches of 16
COLOURS = {"red": (255, 0, 0), "blue": (0, 0, 255)}
QUESTION = "Which colour fills this image? Answer with one word."
MAX_TOKENS = 256  # a model that thinks first has room for its answer


def check_images(url: str, headers: Mapping[str, str] | None = None) -> Finding:
    """Ask a server for the colours of two images.

    Raises ServerError where it does not answer a question without an image, UsageError for a URL that is not an HTTP URL.
    """
    root = check_url(url)
    model = model_name(root, headers)
    messages: list[Any] = ["Answer with one word: yes.", *(message(colour) for colour in COLOURS.values())]
    requests = [
        chat(root, model, [{"role": "user", "content": content}], max_tokens=MAX_TOKENS, temperature=0, headers=headers,
             timeout_s=TIMEOUT_S)
        for content in messages
    ]  # fmt: skip
    plain, *records = run(requests, 1).records()
    if plain["error"]:
        raise ServerError(f"{root} does not answer a question without an image: {plain['error']}", "check --server")
    refusal = next((r["error"] for r in records if r["error"]), None)
    if refusal:
        why = (
            "it serves a text model, or was started without images (--language-model-only, llama.cpp without --mmproj)"
        )
        return note(CHECK, f"the server refuses a message with an image: {refusal}", why)
    answers = [str(r["text"]).strip() for r in records]
    listed = ", ".join(f"{name}: {answer[:60]!r}" for name, answer in zip(COLOURS, answers, strict=True))
    if all(names_only(name, answer) for name, answer in zip(COLOURS, answers, strict=True)):
        return ok(CHECK, f"the server names the colours of two images ({listed})")
    if answers[0] == answers[1]:
        return fault(
            CHECK,
            f"the answer is the same for two images ({listed})",
            "the server accepts images and the model does not see them: a lost or faulty vision tower",
            "annie-quant audit DIR --source BF16",
        )
    return fault(CHECK, f"the server names another colour than an image has ({listed})", "the vision tower may be faulty",
                 "ask the bf16 checkpoint the same, and annie-quant audit DIR --source BF16")  # fmt: skip


def names_only(colour: str, answer: str) -> bool:
    """Return whether an answer has the word for this colour and for no other."""
    words = set(re.findall(r"[a-z]+", answer.lower()))
    return words & COLOURS.keys() == {colour}


def message(colour: tuple[int, int, int]) -> list[dict[str, Any]]:
    """Return the content of a message with an image of one colour and the question."""
    data = base64.b64encode(png(colour)).decode()
    return [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        {"type": "text", "text": QUESTION},
    ]


def png(colour: tuple[int, int, int], side: int = PIXELS) -> bytes:
    """Return a PNG of one colour (W3C PNG, chunks IHDR, IDAT and IEND; 8 bits, colour type 2)."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + bytes(colour) * side) * side  # a byte for the filter, 0: none
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
