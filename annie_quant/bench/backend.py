"""A server under test, and what it reports about itself: models, properties, version."""

from __future__ import annotations

import hashlib
import json
import os
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from annie_quant.errors import UsageError
from annie_quant.schema import Identity, limited_identity
from annie_quant.stream.fetch import fetch

PROBE_TIMEOUT_S = 5.0
PROBE_BYTES = 1 << 20


@dataclass(frozen=True)
class Backend:
    """One side of a comparison.

    url: the server's root, with or without /v1. model: the name sent in requests (None: the first of /v1/models).
    meta: what is known beforehand; it is stored with the results: "pid" (of the server, for memory), "source" (a hash of
    the fine-tuned weights that both sides should share), "format", "runtime". headers: sent, never stored.
    """

    name: str
    url: str
    model: str | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise UsageError(
                f"backend {self.name!r}: {self.url!r} is not an HTTP URL", "write it as http://127.0.0.1:8000"
            )
        if parts.username is not None or parts.password is not None or parts.query:
            # They would be stored in shell histories, process lists and run.json.
            raise UsageError(
                f"backend {self.name!r}: the URL {self.public_url} has a user, password or query",
                "remove them; keys come from the environment: --key-env NAME",
            )
        if not self.name or "/" in self.name:
            raise UsageError(f"a backend's name must not be empty or contain a slash, got {self.name!r}")

    @property
    def root(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def completions_url(self) -> str:
        return f"{self.root}/v1/chat/completions"

    @property
    def public_url(self) -> str:
        """The URL without user, password or query."""
        parts = urllib.parse.urlsplit(self.root)
        host = parts.hostname or ""
        return urllib.parse.urlunsplit(
            (parts.scheme, f"{host}:{parts.port}" if parts.port else host, parts.path, "", "")
        )


def key_headers(variable: str | None) -> dict[str, str]:
    """Return the Authorization header with the key in an environment variable; {} for None."""
    if variable is None:
        return {}
    key = os.environ.get(variable)
    if not key:
        raise UsageError(f"the environment variable {variable} is not set", f"export {variable}=...")
    return {"Authorization": f"Bearer {key}"}


def get_json(backend: Backend, path: str, timeout_s: float = PROBE_TIMEOUT_S) -> Any:
    """Return the decoded body of GET `path`; None where the server has none, or none that can be read in time.

    Raises ConnectionError when no HTTP server answers.
    """
    reply = fetch(backend.root + path, backend.headers, timeout_s=timeout_s, max_bytes=PROBE_BYTES)
    if reply.status == 0:
        raise ConnectionError(reply.fault or "no answer")
    if reply.status != 200 or reply.fault:
        return None
    try:
        return json.loads(reply.body)
    except (ValueError, RecursionError):
        return None


def alive(backend: Backend) -> bool:
    """Return whether an HTTP server answers at the URL, with any status."""
    try:
        get_json(backend, "/v1/models")
    except OSError:
        return False
    return True


def identity(backend: Backend) -> Identity:
    """Ask the server for its models, properties and version. Raises OSError when nothing answers."""
    models = get_json(backend, "/v1/models")
    listed = (models.get("data") or []) if isinstance(models, dict) else []
    listed = [model for model in listed if isinstance(model, dict)] if isinstance(listed, list) else []
    first = listed[0] if listed else {}
    props = get_json(backend, "/props")
    props = props if isinstance(props, dict) else {}
    version = get_json(backend, "/version") if not props else None
    template = props.get("chat_template")
    settings = props.get("default_generation_settings")
    settings = settings if isinstance(settings, dict) else {}
    sampling = settings.get("params")
    return limited_identity(
        {
            "name": backend.name,
            "url": backend.public_url,
            "model": backend.model or first.get("id"),
            "runtime": backend.meta.get("runtime") or _runtime(first, props, version),
            "version": props.get("build_info") or (version.get("version") if isinstance(version, dict) else None),
            "models_sha256": _sha256([model.get("id") for model in listed]),
            "model_meta": first.get("meta"),
            "chat_template_sha256": _sha256(template) if template else None,
            "sampling_defaults": {k: v for k, v in sampling.items() if k in _SAMPLING}
            if isinstance(sampling, dict)
            else {},
            "max_model_len": first.get("max_model_len") or settings.get("n_ctx"),
            "meta": {k: v for k, v in backend.meta.items() if "key" not in k.lower() and "token" not in k.lower()},
        }
    )


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


def _runtime(model: Mapping[str, Any], props: Mapping[str, Any], version: Any) -> str | None:
    owner = str(model.get("owned_by") or "")
    if props.get("build_info") or owner == "llamacpp":
        return "llama.cpp"
    if owner == "sglang":
        return "sglang"
    return "vllm" if owner == "vllm" or isinstance(version, dict) else None


def _sha256(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
