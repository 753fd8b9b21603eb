"""Fuzz targets in Python: all readers of files and answers that others write, with their seeds.

A target takes bytes and returns. An AnnieError with a one-line message is a valid outcome; any other exception is a finding.
`python tests/fuzz/run.py` runs the targets, tests/fuzzing/test_corpus_replay.py replays the stored inputs.
"""

from __future__ import annotations

import dataclasses
import io
import json
import re
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from annie_quant.core.errors import AnnieError

SHARED = "/dev/shm"  # in memory, because each input is written to a file
FOLDER = Path(
    tempfile.mkdtemp(prefix="annie_quant_fuzz_", dir=SHARED if Path(SHARED).is_dir() else None)
)
DATA = Path(__file__).resolve().parent.parent / "data"
ROOT = DATA.parent.parent
TOOL = {
    "type": "function",
    "function": {
        "name": "search_memory",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "n": {"type": "integer"},
                "x": {"type": "object"},
            },
        },
    },
}


@dataclass(frozen=True)
class Target:
    """`run(bytes)` raises nothing but AnnieError; `seeds()` yields whole inputs to start from."""

    run: Callable[[bytes], None]
    seeds: Callable[[], Iterable[bytes]]


def one_line(target: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """Wrap a target: an AnnieError must have a one-line message of limited length."""

    def run(raw: bytes) -> None:
        try:
            target(raw)
        except AnnieError as error:
            assert "\n" not in error.message and len(error.message) < 2000, error.message

    return run


def text_of(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def as_json(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def safetensors(raw: bytes) -> None:
    """A shard's header: all tensors are inside the file."""
    from annie_quant.checkpoint import header

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        path.write_bytes(raw)
        infos, metadata = header.read_header(path)
    start = header.PREFIX_BYTES + int.from_bytes(raw[: header.PREFIX_BYTES], "little")
    position = start
    for info in infos.values():
        assert info.offset == position and int(np.prod(info.shape, dtype=object)) == info.elements
        position += info.size_bytes
    assert position == len(raw)
    assert all(isinstance(v, str) for v in metadata.values())


def safetensors_seeds() -> Iterable[bytes]:
    from annie_quant.checkpoint import header

    table = [
        ("a.weight", "U8", (2, 8)),
        ("a.weight_scale", "F8_E4M3", (2, 1)),
        ("b", "F32", ()),
        ("c", "BF16", (0, 3)),
    ]
    for entries in ([], table[:1], table):
        head = header.build(
            [(n, d, s) for n, d, s in entries], {"format": "pt"} if len(entries) > 1 else {}
        )
        yield head + bytes(sum(header.DTYPES[d].itemsize * int(np.prod(s)) for _, d, s in entries))


def gguf(raw: bytes) -> None:
    """A GGUF file: all tensors are inside the file."""
    from annie_quant.checkpoint.gguf.reader import open_gguf

    path = FOLDER / "x.gguf"
    path.write_bytes(raw)
    assert all(t.data.nbytes <= len(raw) for t in open_gguf(path).values())


def gguf_seeds() -> Iterable[bytes]:
    import gguf as peer

    path = FOLDER / "seed.gguf"
    out = peer.GGUFWriter(path, "qwen35")
    out.add_name("x")
    out.add_array("some.array", ["a", "b", "c"])
    out.add_float32("some.number", 1.5)
    out.add_tensor("a.weight", np.arange(64, dtype=np.float32).reshape(2, 32))
    out.add_tensor("b.weight", np.arange(32, dtype=np.float16))
    for step in (
        out.write_header_to_file,
        out.write_kv_data_to_file,
        out.write_tensors_to_file,
        out.close,
    ):
        step()
    yield path.read_bytes()


def quant_config(raw: bytes) -> None:
    """quantization_config of every dialect, as any JSON object."""
    from annie_quant.checkpoint.dialects import compressed_tensors, fp8, modelopt

    value = as_json(raw)
    if not isinstance(value, dict):
        return
    assert (block := fp8.block_size(value)) is None or min(block) > 0
    for dialect in (modelopt, compressed_tensors, fp8):
        config = dialect.read(value)
        assert isinstance(config.algo, str) and (config.group is None or config.group > 0)
        assert all(isinstance(e, str) for e in config.excluded)


def quant_config_seeds() -> Iterable[bytes]:
    from annie_quant.checkpoint.dialects import compressed_tensors, modelopt
    from annie_quant.models.formats import FP8, NVFP4

    for dialect in (modelopt, compressed_tensors):
        settings = dialect.settings({"a": NVFP4, "b": FP8}, ["lm_head", "x*"], 16)
        yield json.dumps(settings.quantization_config).encode()
        for value in settings.files.values():
            yield json.dumps(value.get("quantization", value)).encode()
    yield b'{"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}'


def tool_calls(raw: bytes) -> None:
    """A model's raw text: parsing always returns an answer, the same twice, with calls only if the text has them."""
    from annie_quant import judge

    text = text_of(raw)
    for thinking in (False, True):
        answer = judge.parse_raw(text, thinking, [TOOL])
        openings = ("<tool_call>", "<function=", '"name"')
        assert len(answer.tool_calls) <= sum(text.count(opening) for opening in openings)
        assert judge.parse_raw(text, thinking, [TOOL]) == answer
        for call in answer.tool_calls:
            json.loads(call["arguments"])


def tool_call_seeds() -> Iterable[bytes]:
    call = (
        "<tool_call>\n<function=search_memory>\n<parameter=query>\nred\n</parameter>\n"
        "<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>"
    )
    for text in (
        "Hello.",
        f"<think>\nhm\n</think>\n\n{call}",
        f"a {call}{call}<|im_end|>",
        '<tool_call>{"name": "search_memory", "arguments": {"query": "x"}}</tool_call>',
    ):
        yield text.encode()


def records(raw: bytes) -> None:
    """A records.jsonl, read for a report and for resuming."""
    from annie_quant.bench.run_folder import RecordLog, read_records
    from annie_quant.report import run

    folder = FOLDER / "run"
    folder.mkdir(exist_ok=True)
    (folder / "records.jsonl").write_bytes(raw)
    run.load(folder)
    read_records(folder / "records.jsonl")
    RecordLog(folder / "records.jsonl").close()


def record_seeds() -> Iterable[bytes]:
    row = {"id": "1", "backend": "a", "model": "m", "workload": "w", "case": "c", "turn": 0, "repeat": 0, "block": 0,
           "warmup": False, "cold": False, "started_at": "2026-11-21T05:00:00Z",
           "error": None, "text": "x", "reasoning": "", "tool_calls": [],
           "finish_reason": "stop", "usage": {"completion_tokens": 3}, "first_content_ms": 1.0, "e2e_ms": 9.0, "tpot_ms": 1.0,
           "itl_ms": [1.0, 2.0], "decode_tok_s": 100.0, "completion_tokens": 3, "checks": {"non_empty": True}}  # fmt: skip
    yield json.dumps(row).encode() + b"\n"
    yield (
        b"".join(
            json.dumps(row | {"id": str(i), "backend": "ab"[i % 2]}).encode() + b"\n"
            for i in range(4)
        )
        + b'{"id'
    )


def run_json(raw: bytes) -> None:
    """A run.json of another time or hand, as the report reads it."""
    from annie_quant import report

    folder = FOLDER / "document"
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_bytes(raw)
    report.compose(folder)


def run_json_seeds() -> Iterable[bytes]:
    for path in sorted(DATA.glob("runs/*/run.json")):
        yield path.read_bytes()
    gate = {
        "passes": 3,
        "n": 4,
        "low": 0.3,
        "high": 0.9,
        "threshold": 0.9,
        "rule": "r",
        "verdict": "fail",
        "n_to_decide": 9,
    }
    spread = {"p50": 1.0, "p90": 2.0, "p99": 3.0, "mean": 1.2, "low": 1.0, "high": 1.5}
    times = {
        "n": 4,
        "ttft_content_ms": spread,
        "itl_ms": spread,
        "e2e_ms": spread,
        "decode_tok_s": spread,
    }
    served = {
        "a": {
            "model": "naive",
            "runtime": "vllm",
            "gates": {"tool_call": gate},
            "workloads": {"w": times},
            "memory_bytes": {"idle": 1},
        }
    }
    offline = {
        "naive": {
            "w4a4": {"gates": {"tool_call": gate}, "kl": {"mean": 0.1, "p99": 1.0, "n_tokens": 9}}
        }
    }
    models = [
        {"name": "naive", "label": "n", "format": "nvfp4", "size_bytes": 9, "bits_per_weight": 4.5}
    ]
    aggregates = {
        "models": models,
        "offline": offline,
        "served": served,
        "comparisons": [],
        "turns": {"a": []},
    }
    verdict = {"sentence": "s", "passed": False, "reasons": [], "caveats": []}
    plain: dict = {"schema_version": 1, "argv": [], "environment": {}, "config": {}, "stages": []}
    yield json.dumps(plain | {"aggregates": aggregates, "verdict": verdict}).encode()


def recording(raw: bytes) -> None:
    """A recording of streams (timings.npz), and the records decoded from it."""
    from annie_quant import stream

    path = FOLDER / "timings.npz"
    path.write_bytes(raw)
    timings = stream.Timings.load(path)
    for clock in ("kernel", "user"):
        assert len(timings.records(clock)) == len(timings)


def recording_seeds() -> Iterable[bytes]:
    for path in sorted(DATA.rglob("timings.npz"))[:1]:
        with np.load(path) as held:
            arrays = dict(held)
        plain = io.BytesIO()
        np.savez(plain, **arrays)  # not compressed: a changed byte changes a number
        if len(plain.getvalue()) < 1 << 17:
            yield plain.getvalue()
    yield tiny_recording()


def tiny_recording() -> bytes:
    """Return a recording of one request with three events."""
    from annie_quant import _stream as native

    frames = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\ndata: [DONE]\n\n'
    events = np.zeros(2, native.EVENT_ROW)
    events["user_ns"] = (2, 3)
    events["offset"], events["size"] = (0, 47), (47, 14)
    events["data_start"], events["data_size"], events["data_lines"], events["kind"] = (
        6,
        (39, 6),
        1,
        (1, 2),
    )
    requests = np.zeros(1, native.REQUEST_ROW)
    requests["status"], requests["event_stream"], requests["started_ns"], requests["ended_ns"] = (
        200,
        1,
        1,
        4,
    )
    plan = {
        "schema_version": 1,
        "origin_ns": 1,
        "origin_realtime_ns": 1,
        "realtime": False,
        "asked": [{"tag": "t", "url": "u"}],
    }
    out = io.BytesIO()
    np.savez(
        out,
        plan=np.frombuffer(json.dumps(plan).encode(), np.uint8),
        requests=requests,
        events=events,
        reads=np.zeros(1, native.READ_ROW),
        frames=np.frombuffer(frames, np.uint8),
        notes=np.zeros(0, np.uint8),
    )
    return out.getvalue()


def chunks(raw: bytes) -> None:
    """A stream's events from any server, as server-sent events: there is always a record, text fields are text."""
    from annie_quant import _stream as native
    from annie_quant.stream import answer as answers
    from annie_quant.stream import decode

    frames = []
    for kind, flags, lines, start, size, frame in native.cut((raw,), 1 << 20):
        data = frame[start : start + size] if lines <= 1 else answers.joined_data(frame, start)
        frames.append(decode.Frame(len(frames) + 1, kind, flags, 0, frame, data))
    answer = decode.read_answer(frames)
    assert all(isinstance(t, str) for t in (*answer.text, *answer.reasoning))
    calls = [[c.id, c.name, c.arguments] for c in answer.calls.values()]
    json.dumps([calls, answer.usage, answer.server_timings, answer.model, answer.warnings])
    decode.token_times(answer, 0)


def chunk_seeds() -> Iterable[bytes]:
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}
    deltas: list[dict] = [
        {"role": "assistant"},
        {"content": "a"},
        {"reasoning_content": "r"},
        {"tool_calls": [call]},
    ]
    rows = [{"choices": [{"index": 0, "delta": d}], "model": "m"} for d in deltas]
    rows += [
        {
            "choices": [{"delta": {}, "finish_reason": "stop"}],
            "usage": {"completion_tokens": 3},
            "timings": {"predicted_n": 3},
        }
    ]
    rows += [{"error": {"message": "m", "code": 500}}]
    for row in rows:
        yield f"data: {json.dumps(row)}\n\ndata: [DONE]\n\n".encode()
    yield (
        "".join(f"data: {json.dumps(r)}\r\n\r\n" for r in rows[:5]).encode()
        + b": ping\n\nevent: error\ndata: x\ndata: y\n\n"
    )
    usage = {"input_tokens": 9, "output_tokens": 3, "cache_read_input_tokens": 2}
    events: list[dict] = [
        {"type": "message_start", "message": {"model": "m", "usage": usage}},
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "tool_use", "id": "t", "name": "f", "input": {}},
        },
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "input_json_delta", "partial_json": "{}"},
        },
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": usage},
        {"type": "message_stop"},
        {
            "type": "response.output_item.added",
            "output_index": 1,
            "item": {"type": "function_call", "name": "f"},
        },
        {"type": "response.output_text.delta", "delta": "a"},
        {"type": "response.completed", "response": {"usage": usage, "status": "completed"}},
        {"type": "response.failed", "response": {"error": {"message": "m"}}},
        {
            "message": {
                "content": "a",
                "tool_calls": [{"function": {"name": "f", "arguments": {}}}],
            },
            "done": False,
        },
        {
            "response": "a",
            "done": True,
            "eval_count": 3,
            "eval_duration": 9,
            "done_reason": "length",
        },
    ]
    for event in events:
        yield f"event: x\ndata: {json.dumps(event)}\n\n".encode()
        yield f"{json.dumps(event)}\n".encode()


def server_log(raw: bytes) -> None:
    """A server's log, as doctor reads it: one line with the cause, one phase, a known error or none."""
    from annie_quant.ops import doctor

    path = FOLDER / "server.log"
    path.write_bytes(raw)
    values = dataclasses.astuple(doctor.check_log(path))
    assert all("\n" not in value for value in values), values
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "".join(values)), (
        "terminal escape sequences"
    )


def log_seeds() -> Iterable[bytes]:
    yield b"INFO 01-01 10:00:00 starting\nRuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    yield b"pulling from vllm/vllm-openai\nloading safetensors 3/4\nCapturing graphs\n"
    yield b'Traceback (most recent call last):\n  File "x"\nValueError: no kernel image is available\nexec format error'


def conversations(raw: bytes) -> None:
    """A conversation file, as data, quantize and eval read it."""
    from annie_quant.data.rows import read_rows

    path = FOLDER / "rows.jsonl"
    path.write_bytes(raw)
    assert all(isinstance(row["messages"], list) for row in read_rows(path))


def conversation_seeds() -> Iterable[bytes]:
    with (DATA / "calibration.jsonl").open("rb") as file:
        yield file.readline()
        yield file.readline() + file.readline()


TARGETS = {
    "safetensors": Target(one_line(safetensors), safetensors_seeds),
    "gguf": Target(one_line(gguf), gguf_seeds),
    "quant_config": Target(one_line(quant_config), quant_config_seeds),
    "tool_calls": Target(one_line(tool_calls), tool_call_seeds),
    "records": Target(one_line(records), record_seeds),
    "run_json": Target(one_line(run_json), run_json_seeds),
    "recording": Target(one_line(recording), recording_seeds),
    "chunks": Target(one_line(chunks), chunk_seeds),
    "server_log": Target(one_line(server_log), log_seeds),
    "conversations": Target(one_line(conversations), conversation_seeds),
}
