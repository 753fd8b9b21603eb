"""A real llama.cpp server's greedy answer to token ids."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from typing import Any


def complete(
    url: str, prompt: Sequence[int], limit: int, timeout_s: float, **fields: Any
) -> dict[str, Any]:
    """Return the server's document for a prompt of token ids. limit: tokens. fields: further ones of the request."""
    body = {
        "prompt": list(prompt),
        "n_predict": limit,
        "temperature": 0,
        "return_tokens": True,
        **fields,
    }
    request = urllib.request.Request(
        url + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as reply:
        document: dict[str, Any] = json.loads(reply.read())
    return document
