"""What a server reports of itself: /v1/models, /props, /version, /server_info. Every PER_BENCH-th case is a whole benchmark."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import msgspec
from fuzz.boundaries.grammar import Hostile, encode
from fuzz.boundaries.harness import KEY, Finding, Sandbox, check_text, limited_time
from stream_server import RawServer

PER_BENCH = 100
MAX_BYTES = 100_000
MODELS = {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "llamacpp", "max_model_len": 4096, "meta": {
    "n_params": 1000, "n_vocab": 100, "n_embd": 64, "n_ctx_train": 4096, "size": 1000, "vocab_type": 2}}]}  # fmt: skip
PAGES = {
    b"/v1/models": MODELS,
    b"/props": {
        "build_info": "b1", "chat_template": "{{ x }}", "total_slots": 1,
        "default_generation_settings": {"n_ctx": 4096, "params": {"temperature": 0.8, "top_k": 40, "samplers": ["top_k"]}},
    },
    b"/version": {"version": "0.26"},
    b"/server_info": {
        "model_path": "/m", "quantization": "modelopt_fp4", "tool_call_parser": None, "version": "0.5.23",
        "speculative_algorithm": "EAGLE", "internal_states": [{"avg_spec_accept_length": 2.5}],
    },
}  # fmt: skip
STREAM = (
    b'data: {"choices": [{"index": 0, "delta": {"content": "Tokyo"}, "finish_reason": "stop"}]}\n\n'
    + b"data: [DONE]\n\n"
)


@contextlib.contextmanager
def opened(sandbox: Sandbox) -> Iterator[Any]:
    from annie_quant.bench.backend import Backend, identity, sglang_page
    from annie_quant.ops import served_model

    state: dict[str, Any] = {}
    cases = [{"id": "c", "messages": [{"role": "user", "content": "Hi"}]}]
    workload = sandbox.inputs / "one.json"
    workload.write_text(
        json.dumps({"name": "one", "max_tokens": 20, "gates": ["non_empty"], "cases": cases})
    )

    def respond(connection: Any, request: bytes) -> None:
        if request.startswith(b"POST"):
            head = (
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n"
            )
            connection.sendall(head % len(STREAM) + STREAM)
            return
        path = request.split(b" ", 2)[1]
        body = state["pages"].get(path, b"{}")
        connection.sendall(
            b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (state["status"], len(body), body)
        )

    with RawServer(respond) as server:
        url = server.url.removesuffix("/v1/chat/completions")

        def case(seed: str, left: int) -> int:
            hostile = Hostile(seed)
            sglang = hostile.random.random() < 0.3
            first = (
                json.loads(json.dumps(MODELS).replace("llamacpp", "sglang")) if sglang else MODELS
            )
            state["pages"] = {
                path: page(hostile, content)
                for path, content in (PAGES | {b"/v1/models": first}).items()
            }
            state["status"] = hostile.random.choice(
                (*[b"200 OK"] * 9, b"404 No", b"500 X", b"302 F\r\nLocation: http://evil/")
            )
            if int(seed.partition("/")[2]) % PER_BENCH == 0:
                sandbox.clear_output()
                output = sandbox.output / "run"
                options = (
                    "--workloads",
                    workload,
                    "--warmup",
                    0,
                    "--runs",
                    1,
                    "--n",
                    0,
                    "--key-env",
                    "ANNIE_FUZZ_KEY",
                )
                sandbox.run(
                    "bench", "--backend-a", "a", url, *options, "--output", output, codes=(0, 1)
                )
                size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
                if size > 20 * MAX_BYTES + (1 << 20):
                    raise Finding(f"a run directory of {size} bytes")
                return 1
            with limited_time("identity"):
                backend = Backend("a", url, headers={"Authorization": f"Bearer {KEY}"})
                stored, info = msgspec.json.encode(identity(backend)), sglang_page(backend)
                for finding in (
                    *served_model.check_info(info),
                    served_model.check_accepted(info, ""),
                ):
                    check_text(finding.message.replace(KEY, ""))
            if len(stored) > MAX_BYTES or KEY.encode() in stored:
                raise Finding(f"an identity of {len(stored)} bytes, or one with the key")
            return 1

        yield case


def page(hostile: Hostile, content: Any) -> bytes:
    kind = hostile.random.random()
    if kind < 0.1:
        return encode(content)
    if kind < 0.15:
        return encode(content).replace(b'"m"', b'"' + KEY.encode() + b'"')
    return hostile.damaged(encode(hostile.changed(content) if kind < 0.9 else hostile.value(3)))
