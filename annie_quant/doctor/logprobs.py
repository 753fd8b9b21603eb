"""Greedy answers of a server with the log-probabilities of its best tokens, in vLLM's and llama.cpp's formats.

Prompts are sent as token ids, so neither the server's tokenizer nor its chat template takes part.
"""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from annie_quant.errors import ServerError, UsageError
from annie_quant.stream.client import Request, run
from annie_quant.stream.record import transport_fault

TIMEOUT_S = 120.0
MAX_BYTES = 16 << 20
NATIVE, OPENAI = "/completion", "/v1/completions"  # llama.cpp's own path; vLLM's, SGLang's and llama.cpp's


@dataclass(frozen=True)
class ServedAnswer:
    """Tokens that a server chose, and per token the log-probabilities of the best ones: {token id: natural logarithm}."""

    tokens: list[int]
    logprobs: list[dict[int, float]]


@dataclass(frozen=True)
class Served:
    """Answers of one server. family: "llama.cpp" where it has that server's own path, else "vllm"."""

    family: str
    answers: list[ServedAnswer]


def served_answers(
    url: str, prompts: Sequence[Sequence[int]], n_tokens: int, n_best: int, headers: Mapping[str, str] | None = None
) -> Served:
    """Return a server's greedy answer of at most n_tokens tokens to each prompt (token ids).

    Raises ServerError where the server does not answer or returns no log-probabilities with token ids, UsageError for a URL that
    is not an HTTP URL.
    """
    root = check_url(url)
    native = [
        {"prompt": list(p), "n_predict": n_tokens, "temperature": 0, "n_probs": n_best, "return_tokens": True,
         "cache_prompt": False}
        for p in prompts
    ]  # fmt: skip
    first = post(root + NATIVE, native[:1], headers)
    if first[0].status == 200:
        replies, path = [*first, *post(root + NATIVE, native[1:], headers)], NATIVE
    else:
        model = model_name(root, headers)
        bodies = [
            {"model": model, "prompt": list(p), "max_tokens": n_tokens, "temperature": 0, "logprobs": n_best,
             "return_tokens_as_token_ids": True}
            for p in prompts
        ]  # fmt: skip
        replies, path = post(root + OPENAI, bodies, headers), OPENAI
    answers = []
    for reply in replies:
        if reply.status != 200:
            raise ServerError(
                f"{root}{path}: status {reply.status} {reply.fault or ''}".rstrip(),
                "pass the server's root as --server",
            )
        answers.append(read_answer(reply.json, root + path))
    return Served("llama.cpp" if path == NATIVE else "vllm", answers)


def check_url(url: str) -> str:
    """Return a server's root, without /v1. Raises UsageError for a URL that is not an HTTP URL."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UsageError(f"{url!r} is not an HTTP URL", "write it as http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1")


@dataclass(frozen=True)
class Reply:
    status: int
    json: Any
    fault: str | None


def post(url: str, bodies: Sequence[Mapping[str, Any]], headers: Mapping[str, str] | None) -> list[Reply]:
    """POST the bodies one after another."""
    if not bodies:
        return []
    requests = [Request(url, json=dict(body), headers=headers, timeout_s=TIMEOUT_S) for body in bodies]
    timings = run(requests, 1, max_event_bytes=MAX_BYTES, max_answer_bytes=MAX_BYTES)
    replies = []
    for i in range(len(bodies)):
        fault = transport_fault(timings, i)
        replies.append(Reply(int(timings.requests["status"][i]), decoded(timings.body(i)), fault[1] if fault else None))
    return replies


def decoded(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None


def model_name(root: str, headers: Mapping[str, str] | None) -> str:
    """Return the name of the first model that the server lists, which vLLM needs in a request."""
    from annie_quant.stream.fetch import fetch

    reply = fetch(root + "/v1/models", headers)
    if reply.status == 0:
        raise ServerError(
            f"{root} does not answer: {reply.fault or 'no connection'}", "start the server, or check --server"
        )
    listed = decoded(reply.body)
    rows = listed.get("data") if isinstance(listed, dict) else None
    name = rows[0].get("id") if isinstance(rows, list) and rows and isinstance(rows[0], dict) else None
    if not isinstance(name, str):
        raise ServerError(f"{root}/v1/models lists no model (status {reply.status})", "check --server and the key")
    return name


def read_answer(body: Any, where: str) -> ServedAnswer:
    """Return the tokens and log-probabilities of one reply.

    Three formats: llama.cpp's `completion_probabilities` and its /v1/completions (`logprobs.content`), both lists of
    {"id", "logprob", "top_logprobs": [{"id", "logprob"}]}; vLLM's `logprobs` with "token_id:N" as tokens.
    """
    try:
        if "completion_probabilities" in body:
            return from_steps(body["completion_probabilities"])
        logprobs = body["choices"][0]["logprobs"]
        if "content" in logprobs:
            return from_steps(logprobs["content"])
        tokens = [token_id(t) for t in logprobs["tokens"]]
        rows = [{token_id(t): float(v) for t, v in row.items()} for row in logprobs["top_logprobs"]]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise ServerError(
            f"{where}: the answer has no log-probabilities with token ids",
            "vLLM: do not start it with --max-logprobs 0; other servers are not supported",
        ) from None
    return ServedAnswer(tokens[: len(rows)], rows[: len(tokens)])


def from_steps(steps: Sequence[Mapping[str, Any]]) -> ServedAnswer:
    rows = [{int(t["id"]): float(t["logprob"]) for t in step["top_logprobs"]} for step in steps]
    return ServedAnswer([int(step["id"]) for step in steps], rows)


def token_id(text: str) -> int:
    """ "token_id:42" → 42."""
    prefix, _, number = text.partition(":")
    if prefix != "token_id":
        raise ValueError(text)
    return int(number)
