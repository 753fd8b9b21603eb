"""A server under test: what it reports about itself (models, properties, version, metrics), and requests within a time budget.

The client opens each connection first, as a client in daily use has it open already, and then sends the requests together or at
their start times.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from annie_quant.bench.weight_format import served_format
from annie_quant.core.errors import UsageError
from annie_quant.core.files import sha256_text
from annie_quant.core.host import is_local
from annie_quant.core.secrets import refuse_secrets_in, safe_url
from annie_quant.core.untrusted import JsonObject, decode_json, limited
from annie_quant.documents import (
    BackendSettings,
    BenchConfig,
    Identity,
    limited_identity,
)
from annie_quant.stream.client import fetch

if TYPE_CHECKING:
    from annie_quant.stream import Timings


PROBE_TIMEOUT_S = 5.0
PROBE_BYTES = 1 << 20
MAX_ID_CHARACTERS = 200  # characters of a model's id

_T = TypeVar("_T")


@dataclass(frozen=True)
class Backend:
    """One side of a comparison.

    url: the server's root, with or without /v1.
    model: the name sent in requests (None: the first of /v1/models).
    meta: what is known beforehand; it is stored with the results: "pid" (of the server, for memory), "source" (a hash of
        the fine-tuned weights that both sides should share), "format" (of its weights: "BF16"), "runtime".
    headers: sent, never stored.
    """

    name: str
    url: str
    model: str | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        hint = "write it as http://127.0.0.1:8000"
        problem = f"backend {self.name!r}: {safe_url(self.url)!r}"
        try:
            parts = urllib.parse.urlsplit(self.url)
            port = parts.port
        except ValueError as error:  # brackets without an IPv6 address; a port that is none
            raise UsageError(f"{problem} is not an HTTP URL: {error}", hint) from None
        if port == 0:
            raise UsageError(f"{problem} has the port 0", hint)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise UsageError(f"{problem} is not an HTTP URL", hint)
        refuse_secrets_in(self.url, f"backend {self.name!r}")
        if not self.name or "/" in self.name:
            raise UsageError(
                f"a backend's name must not be empty or contain a slash, got {self.name!r}"
            )

    @property
    def settings(self) -> BackendSettings:
        """What a run records of this backend."""
        source = self.meta.get("source")
        source = source if isinstance(source, (int, float, type(None))) else str(source)[:1000]
        return BackendSettings(
            name=self.name,
            model=self.model,
            source=source,
        )

    @property
    def root(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def completions_url(self) -> str:
        return f"{self.root}/v1/chat/completions"

    @property
    def is_local(self) -> bool:
        """Whether the server is on this machine."""
        return is_local(urllib.parse.urlsplit(self.url).hostname or "")

    @property
    def public_url(self) -> str:
        """The URL without user, password or query."""
        parts = urllib.parse.urlsplit(self.root)
        port = f":{parts.port}" if parts.port else ""
        return f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"


def key_headers(variable: str | None) -> dict[str, str]:
    """Return the Authorization header with the key in an environment variable; {} for None."""
    if variable is None:
        return {}
    key = os.environ.get(variable)
    if not key:
        raise UsageError(
            f"the environment variable {variable} is not set", f"export {variable}=..."
        )
    return {"Authorization": f"Bearer {key}"}


def get_json(backend: Backend, path: str, timeout_s: float = PROBE_TIMEOUT_S) -> object:
    """Return the decoded body of GET `path`, limited as `untrusted.limited`; None where the server has no such page.

    Raises ConnectionError when no HTTP server answers, ValueError for a page that cannot be read.
    """
    reply = fetch(backend.root + path, backend.headers, timeout_s=timeout_s, max_bytes=PROBE_BYTES)
    if reply.status == 0:
        raise ConnectionError(reply.fault or "no answer")
    if reply.status != 200:
        return None
    if reply.fault:
        raise ValueError(reply.fault)
    return decode_json(reply.body)


def alive(backend: Backend) -> bool:
    """Return whether an HTTP server answers at the URL, with any status."""
    url = f"{backend.root}/v1/models"
    return fetch(url, backend.headers, timeout_s=PROBE_TIMEOUT_S).status != 0


def identity(backend: Backend, timeout_s: float = PROBE_TIMEOUT_S) -> Identity:
    """Ask the server for its models, properties and version, each within timeout_s. Raises OSError when nothing answers.

    What is not of the expected type, or larger than a limit, is left out or cut, and named in `caveats`.
    """
    caveats: list[str] = []
    models = _page(backend, "/v1/models", timeout_s, caveats)
    listed = (
        _field(
            models,
            "data",
            list,
            "/v1/models",
            caveats,
        )
        or []
    )
    entries = [model for model in listed if isinstance(model, dict)]
    if len(entries) < len(listed):
        caveats.append(f"/v1/models: {len(listed) - len(entries)} entries of data are not objects")
    first = entries[0] if entries else {}
    props = _page(backend, "/props", timeout_s, caveats)
    template = _field(
        props,
        "chat_template",
        str,
        "/props",
        caveats,
    )
    settings = (
        _field(
            props,
            "default_generation_settings",
            dict,
            "/props",
            caveats,
        )
        or {}
    )
    sampling = (
        _field(
            settings,
            "params",
            dict,
            "/props",
            caveats,
        )
        or {}
    )
    build = _field(
        props,
        "build_info",
        str,
        "/props",
        caveats,
    )
    owner = (
        _field(
            first,
            "owned_by",
            str,
            "/v1/models",
            caveats,
        )
        or ""
    )
    version: Mapping[str, object] = sglang_page(backend, timeout_s) if owner == "sglang" else {}
    if not props and not version:
        version = _page(backend, "/version", timeout_s, caveats)
    model = _field(
        first,
        "id",
        str,
        "/v1/models",
        caveats,
    )
    if model is not None and len(model) > MAX_ID_CHARACTERS:
        caveats.append(
            f"/v1/models: the model's id has {len(model)} characters, {MAX_ID_CHARACTERS} are kept"
        )
    return limited_identity(
        {
            "name": backend.name,
            "url": backend.public_url,
            "model": backend.model or model,
            "runtime": backend.meta.get("runtime") or _runtime(owner, bool(build), bool(version)),
            "version": build
            or _field(
                version,
                "version",
                str,
                "/version",
                caveats,
            ),
            "models_sha256": _sha256([limited(entry.get("id")) for entry in entries]),
            "model_meta": limited(
                _field(
                    first,
                    "meta",
                    dict,
                    "/v1/models",
                    caveats,
                )
            ),
            "chat_template_sha256": _sha256(template) if template else None,
            "sampling_defaults": {k: limited(v) for k, v in sampling.items() if k in _SAMPLING},
            "format": backend.meta.get("format")
            or served_format(backend.url, version or props, first),
            "max_model_len": first.get("max_model_len") or settings.get("n_ctx"),
            "meta": {
                k: v
                for k, v in backend.meta.items()
                if "key" not in k.lower() and "token" not in k.lower()
            },
            "caveats": caveats,
        }
    )


def sglang_page(backend: Backend, timeout_s: float = PROBE_TIMEOUT_S) -> dict[str, object]:
    """Return an SGLang server's arguments and version; {} for another server."""
    for path in ("/server_info", "/get_server_info"):  # the second one before SGLang 0.5.6
        with contextlib.suppress(OSError, ValueError):
            page = get_json(backend, path, timeout_s)
            if isinstance(page, dict) and "model_path" in page and "internal_states" in page:
                return page
    return {}


def _page(
    backend: Backend, path: str, timeout_s: float, caveats: list[str]
) -> Mapping[str, object]:
    """Return the JSON object at `path`; {} with a caveat for anything else that a server sends with status 200."""
    try:
        return msgspec.convert(get_json(backend, path, timeout_s), dict[str, object] | None) or {}
    except ValueError as error:  # also ValidationError
        caveats.append(f"{path}: {error}")
        return {}


def _field(
    page: Mapping[str, object], name: str, kind: type[_T], path: str, caveats: list[str]
) -> _T | None:
    """Return page[name] if it has the expected type; None, with a caveat, for another type."""
    try:
        return msgspec.convert(page.get(name), kind | None)
    except msgspec.ValidationError as error:
        caveats.append(f"{path}: {name}: {error}")
        return None


_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "dry_multiplier",
    "samplers",
)


def _runtime(owner: str, has_build: bool, has_version: bool) -> str | None:
    if has_build or owner == "llamacpp":
        return "llama.cpp"
    if owner == "sglang":
        return "sglang"
    return "vllm" if owner == "vllm" or has_version else None


def _sha256(value: object) -> str:
    return sha256_text(value if isinstance(value, str) else json.dumps(value, sort_keys=True))


# ---- requests within the time budget

# far above 32,768 tokens with their log probabilities
MAX_STREAM_BYTES = 64_000_000
MAX_STREAM_EVENTS = 1 << 18
CONNECT_S = 0.2  # connections are opened this long before the first arrival of an open loop


class BudgetEnded(Exception):
    """The time budget ended before a request was complete. It is not in records.jsonl, so a resumed run sends it again.

    waited_s: how long the first of the requests in flight had waited; None where the budget ended before they were sent.
    """

    def __init__(self, waited_s: float | None = None) -> None:
        super().__init__("the time budget ended")
        self.waited_s = waited_s


@dataclass
class ServerRequest:
    """One request to a server.

    tag: its name in the answers.
    body: of a chat completion.
    start_s: when it is sent, in seconds after the first arrival of an open loop; None in a closed loop.
    """

    tag: str
    body: JsonObject
    start_s: float | None = None


class Sender:
    """Send requests until the time budget of one execution ends.

    config: the benchmark's settings.
    session: number of the execution; no prompt of an earlier one is in a server's prefix cache.
    identities: what each server reports about itself, by backend; filled as the servers are identified.
    """

    def __init__(
        self, config: BenchConfig, session: int, identities: Mapping[str, Identity]
    ) -> None:
        self.config = config
        self.session = session
        self.identities = identities
        self.deadline = None if config.budget_s is None else time.monotonic() + config.budget_s

    def left_s(self) -> float | None:
        """Return what is left of the time budget; None without one. Raises BudgetEnded when nothing is."""
        if self.deadline is None:
            return None
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise BudgetEnded
        return left_s

    def timeout_s(self, longest_s: float) -> float:
        """Return `longest_s`, or what is left of the time budget where that is less."""
        left_s = self.left_s()
        return longest_s if left_s is None else min(longest_s, left_s)

    def send(self, backend: Backend, requests: Sequence[ServerRequest]) -> Timings:
        """Send the requests to a server, all at once or at their start times. Raises BudgetEnded."""
        from annie_quant import stream

        headers = dict(backend.headers)
        left_s = self.left_s()
        models_url = f"{backend.root}/v1/models"
        probe_s = min(self.config.timeout_s, PROBE_TIMEOUT_S)
        opening = [stream.Request(models_url, headers=headers, timeout_s=probe_s) for _ in requests]
        starts_s: dict[str, float | None] = {}
        measured = []
        for r in requests:
            starts_s[r.tag] = None if r.start_s is None else CONNECT_S + r.start_s
            request = stream.Request(
                backend.completions_url,
                json=r.body | self._cache_fields(backend.name, r.tag),
                headers=headers,
                timeout_s=self.config.timeout_s,
                start_s=starts_s[r.tag],
                tag=r.tag,
            )
            measured.append(request)
        sent_s = time.monotonic()
        timings = stream.run(
            [*opening, *measured],
            concurrency=len(measured) if None in starts_s.values() else None,
            deadline_s=left_s,
            max_answer_bytes=MAX_STREAM_BYTES,
            max_answer_events=MAX_STREAM_EVENTS,
        )
        if left_s is None:
            return timings
        # Without the openings of connections, which have no tag.
        causes = {a["tag"]: a["cause"] for a in timings.records() if a["tag"] is not None}
        if "deadline" in causes.values() or "not_started" in causes.values():
            stopped = [tag for tag, cause in causes.items() if cause == "deadline"]
            first_s = min((starts_s[tag] or 0.0 for tag in stopped), default=math.inf)
            raise BudgetEnded(time.monotonic() - sent_s - first_s)
        return timings

    def _cache_fields(self, name: str, tag: str) -> dict[str, bool | str]:
        """Return the request fields that keep a server from reusing earlier prompts."""
        if self.config.prefix_cache == "warm":
            return {}
        runtime = self.identities[name].runtime
        if runtime == "llama.cpp":
            return {"cache_prompt": False}
        if runtime != "vllm":
            return {}
        # vLLM refuses a salt with "/" and some other characters that are in tags.
        return {"cache_salt": sha256_text(f"{self.session}/{tag}")}
