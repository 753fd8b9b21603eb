"""Which arithmetic a running server computes (`annie-quant doctor --server`).

It is named from the log-probabilities of the server's greedy answers, in the forms of vLLM, SGLang and llama.cpp.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from annie_quant.core.errors import ServerError, UsageError
from annie_quant.core.progress import SILENT, Progress
from annie_quant.core.untrusted import JsonObject, decode_json
from annie_quant.ops.doctor import CheckResult, fault, note, ok
from annie_quant.stream.client import HttpReply, Request, fetch, first_model, http_reply, run

if TYPE_CHECKING:
    from annie_quant.offline.fingerprint import Fingerprint, GreedyTokens

TIMEOUT_S = 120.0
MAX_BYTES = 16 << 20
# llama.cpp's and SGLang's own path
NATIVE = "/completion"
SGLANG = "/generate"
OPENAI = "/v1/completions"


@dataclass(frozen=True)
class ServedAnswer:
    """Tokens that a server chose, and per token the log-probabilities of the best ones: {token id: natural logarithm}.

    text: the answer of a server that returns no log-probabilities with token ids; then the lists are empty.
    """

    tokens: list[int]
    logprobs: list[dict[int, float]]
    text: str = ""


@dataclass(frozen=True)
class Served:
    """Answers of one server to prompts of token ids.

    family: "llama.cpp" where it has that server's own path, else "vllm", whose kernels SGLang has too.
    """

    family: str
    answers: list[ServedAnswer]
    prompts: list[Sequence[int]]


def served_answers(
    url: str,
    prompts: Sequence[Sequence[int]],
    n_tokens: int,
    n_best: int,
    headers: Mapping[str, str] | None = None,
) -> Served:
    """Return a server's greedy answer of at most n_tokens tokens to each prompt (token ids).

    Raises ServerError where the server does not answer or returns no log-probabilities with token ids, UsageError for a URL that
    is not an HTTP URL.
    """
    root = check_url(url)
    # Drafted tokens of llama.cpp have no log-probabilities.
    more = {"n_probs": n_best, "return_tokens": True, "speculative.n_max": 0}
    native = [native_body(p, n_tokens) | more for p in prompts]
    sampling = {"temperature": 0, "max_new_tokens": n_tokens}
    sglang = {"sampling_params": sampling, "return_logprob": True, "top_logprobs_num": n_best}
    own = {NATIVE: native, SGLANG: [{"input_ids": list(p)} | sglang for p in prompts]}
    for path, bodies in own.items():
        replies = post(root + path, bodies[:1], headers)
        if replies[0].status == 200:
            replies += post(root + path, bodies[1:], headers)
            break
    else:
        path = OPENAI
        model = model_name(root, headers)
        more = {"logprobs": n_best, "return_tokens_as_token_ids": True}
        replies = post(
            root + path, [openai_body(model, p, n_tokens) | more for p in prompts], headers
        )
    answers = []
    for reply in replies:
        if reply.status != 200:
            problem = f"{root}{path}: status {reply.status} {reply.fault or ''}".rstrip()
            raise ServerError(problem, "pass the server's root as --server")
        answers.append(read_answer(reply.body, root + path))
    return Served("llama.cpp" if path == NATIVE else "vllm", answers, list(prompts))


def native_body(prompt: Sequence[int], n_tokens: int) -> JsonObject:
    """Return a request of llama.cpp's /completion for a greedy answer."""
    return {"prompt": list(prompt), "n_predict": n_tokens, "temperature": 0, "cache_prompt": False}


def openai_body(model: str, prompt: Sequence[int], n_tokens: int) -> JsonObject:
    """Return a request of /v1/completions for a greedy answer."""
    return {"model": model, "prompt": list(prompt), "max_tokens": n_tokens, "temperature": 0}


def check_url(url: str) -> str:
    """Return a server's root, without /v1. Raises UsageError for a URL that is not an HTTP URL."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UsageError(f"{url!r} is not an HTTP URL", "write it as http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1")


def post(
    url: str, bodies: Sequence[Mapping[str, object]], headers: Mapping[str, str] | None
) -> list[HttpReply]:
    """POST the bodies one after another."""
    if not bodies:
        return []
    requests = [
        Request(url, json=dict(body), headers=headers, timeout_s=TIMEOUT_S) for body in bodies
    ]
    timings = run(requests, 1, max_event_bytes=MAX_BYTES, max_answer_bytes=MAX_BYTES)
    return [http_reply(timings, i) for i in range(len(bodies))]


def model_name(root: str, headers: Mapping[str, str] | None) -> str:
    """Return the name of the first model that the server lists, which vLLM needs in a request."""
    reply = fetch(root + "/v1/models", headers)
    if reply.status == 0:
        problem = f"{root} does not answer: {reply.fault or 'no connection'}"
        raise ServerError(problem, "start the server, or check --server")
    name = first_model(reply.body)
    if name is None:
        raise ServerError(
            f"{root}/v1/models lists no model (status {reply.status})", "check --server and the key"
        )
    return name


def read_answer(reply: bytes, where: str) -> ServedAnswer:
    """Return the tokens and log-probabilities of one reply.

    A server may return neither: then only the text. Four formats: llama.cpp's `completion_probabilities` and its /v1/completions
    (`logprobs.content`), both lists of {"id", "logprob", "top_logprobs": [{"id", "logprob"}]}; vLLM's `logprobs` with
    "token_id:N" as tokens; SGLang's `meta_info` with lists of [logprob, id, text].
    """
    try:
        body = decode_json(reply, lenient=True)
        if "completion_probabilities" in body:
            return from_steps(body["completion_probabilities"])
        if "meta_info" in body:
            steps = body["meta_info"]["output_top_logprobs"]
            chosen = [int(id_) for _, id_, _ in body["meta_info"]["output_token_logprobs"]]
            return ServedAnswer(chosen, list(map(logprobs_of_step, steps)))
        logprobs = body["choices"][0]["logprobs"]
        if not logprobs and body["choices"][0]["text"]:
            return ServedAnswer([], [], str(body["choices"][0]["text"]))
        if "content" in logprobs:
            return from_steps(logprobs["content"])
        tokens = [token_id(t) for t in logprobs["tokens"]]
        rows = list(map(logprobs_by_id, logprobs["top_logprobs"]))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise ServerError(
            f"{where}: the answer has no log-probabilities with token ids",
            "vLLM: do not start it with --max-logprobs 0; other servers are not supported",
        ) from None
    return ServedAnswer(tokens[: len(rows)], rows[: len(tokens)])


def from_steps(steps: Sequence[JsonObject]) -> ServedAnswer:
    rows = []
    for step in steps:
        rows.append({int(t["id"]): float(t["logprob"]) for t in step["top_logprobs"]})
    return ServedAnswer([int(step["id"]) for step in steps], rows)


def logprobs_of_step(step: Sequence[Sequence[object]]) -> dict[int, float]:
    """Return token id → log-probability of SGLang's triples (log-probability, id, text)."""
    return {int(id_): float(value) for value, id_, _ in step}  # type: ignore[call-overload, arg-type]


def logprobs_by_id(step: Mapping[str, float]) -> dict[int, float]:
    """Return token id → log-probability of vLLM's object with "token_id:N" as names."""
    return {token_id(text): float(value) for text, value in step.items()}


def token_id(text: str) -> int:
    """Return the id in a token of the form "token_id:42"."""
    prefix, _, number = text.partition(":")
    if prefix != "token_id":
        raise ValueError(text)
    return int(number)


ARITHMETIC = "served arithmetic"
COMPARE = "compare the served folder with --checkpoint"
ANOTHER = "the server computes something else than this checkpoint: another checkpoint, or a faulty kernel"
N_PROMPTS = 20
N_TOKENS = 12
N_BEST = 5


def check_server(
    url: str,
    checkpoint: Path,
    reference: Path | None = None,
    headers: Mapping[str, str] | None = None,
    progress: Progress = SILENT,
) -> tuple[CheckResult, Served, Fingerprint | GreedyTokens]:
    """Compare about 20 short answers with the checkpoint's own log-probabilities, and name the numerics profile that is served.

    A server that returns no log-probabilities with token ids is judged by its greedy tokens, which show gross faults only.
    """
    progress.message("loading torch and the prompts")
    from annie_quant.offline import fingerprint as offline
    from annie_quant.offline.prompts import Template

    prompts = offline.prompts(reference or checkpoint, N_PROMPTS)
    progress.message(f"the server answers {len(prompts)} prompts")
    served = served_answers(url, prompts, N_TOKENS, N_BEST, headers)
    progress.message("loading the checkpoint")
    if not any(a.text for a in served.answers):
        tokens = [a.tokens for a in served.answers]
        logprobs = [a.logprobs for a in served.answers]
        result = offline.compare_with_server(
            checkpoint,
            reference,
            prompts,
            tokens,
            logprobs,
            served.family,
            progress=progress,
        )
        return finding(result, checkpoint, reference, offline.REFERENCE_NAME), served, result
    template = Template(reference or checkpoint)
    # The last token of a text may have been cut in the middle of another one.
    greedy = offline.compare_tokens(
        checkpoint, prompts, [template.ids(a.text)[:-1] for a in served.answers]
    )
    return greedy_finding(greedy, checkpoint), served, greedy


def greedy_finding(result: GreedyTokens, checkpoint: Path) -> CheckResult:
    """Return the finding for greedy tokens."""
    message = (
        f"no log-probabilities are returned; of {result.n} greedy tokens {result.differing} differ from the checkpoint's "
        f"({result.name}), by {result.margin:.3g} nats at most, where its arithmetic explains {result.limit:.3g}"
    )
    if result.margin > result.limit:
        return fault(ARITHMETIC, message, ANOTHER, COMPARE)
    why = "greedy tokens show gross faults only; which arithmetic is served is not known"
    return note(ARITHMETIC, message, why, "vLLM: start it without --max-logprobs 0")


def finding(
    result: Fingerprint, checkpoint: Path, reference: Path | None, reference_name: str
) -> CheckResult:
    """Return the finding for a fingerprint."""
    from annie_quant.offline.profiles import find_profile

    best = result.candidates[0]
    figures = (
        f"mean difference {best.difference:.3g} nats over {result.n_values} log-probabilities of {result.n_prompts} answers, "
        f"expected {best.noise:.3g}; {result.equal_tokens:.0%} of tokens equal"
    )
    if result.name is None:
        message = f"none of these: {', '.join(c.name for c in result.candidates)}; closest {best.name}, {figures}"
        return fault(
            ARITHMETIC, message, ANOTHER, f"annie-quant validate-gpu --stack all, and {COMPARE}"
        )
    also = f"; cannot be distinguished from {', '.join(result.also)}" if result.also else ""
    message = f"{best.name} ({best.arithmetic}); {figures}{also}"
    if best.name == reference_name:
        why = "the server serves the bf16 model, not the checkpoint"
        return fault(ARITHMETIC, message, why, "serve the checkpoint's folder")
    if result.is_doubtful:
        why = "two noisy computations of one checkpoint differ by 1.4 times the expected at most"
        return note(
            ARITHMETIC,
            message,
            f"{why}: the server may have another checkpoint of this model",
            COMPARE,
        )
    w4a4 = any(c.name == "vllm-cutlass" for c in result.candidates)
    if w4a4 and not find_profile(best.name).needs_input_scale:
        why = "the checkpoint has scales for 4-bit activations, and this server does not use them"
        fix = f"annie-quant eval {checkpoint} --reference {reference or 'BF16'} --numerics {best.name}"
        return note(ARITHMETIC, message, why, fix)
    return ok(ARITHMETIC, message)
