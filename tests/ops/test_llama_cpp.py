"""The real llama.cpp server with small random models: it answers as the source does, and it always ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import checkpoint_zoo as zoo
import numpy as np
import psutil
import pytest

import annie_quant as aq
from annie_quant.core.errors import AnnieError, CheckpointError, ServerError
from annie_quant.ops import llama_cpp

pytest.importorskip("xllamacpp", reason="the serve extra is not installed")
pytest.importorskip("gguf", reason="the serve extra is not installed")
pytest.importorskip("annie_quant.nvfp4", reason="the C codec is not built")

TEXTS = [
    "What is the capital of Japan?",
    "Hello there, how are you today?\n\n1. one\n2. two",
    "x" * 40 + " straße 東京 ½ 12345",
]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("models")
    folders = {"bf16": zoo.bf16(home / "bf16")}
    folders["nvfp4"] = zoo.nvfp4(home / "nvfp4", folders["bf16"])
    folders["mlp_only"] = zoo.nvfp4(home / "mlp_only", folders["bf16"], lambda n: ".mlp." in n)
    files = {
        k: Path(aq.checkpoint.convert(v, "gguf", home / f"{k}.gguf").path)
        for k, v in folders.items()
    }
    files["q4_k_m"] = Path(
        aq.checkpoint.convert(folders["bf16"], "gguf", home / "q4.gguf", type="Q4_K_M").path
    )
    return files | {"folder": folders["bf16"], "nvfp4_folder": folders["nvfp4"]}


def post(url: str, path: str, body: dict) -> dict:
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def stream(url: str, body: dict) -> list[dict]:
    request = urllib.request.Request(
        url + "/v1/chat/completions",
        json.dumps(body | {"stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = [line.decode().strip() for line in answer]
    assert lines[-2] == "data: [DONE]" or lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize("kind", ["bf16", "nvfp4", "mlp_only", "q4_k_m"])
def test_serves_a_streamed_chat(models, kind):
    with aq.serve.start(models[kind]) as server:
        body = {
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 8,
            "temperature": 0,
            "stream_options": {"include_usage": True},
            "chat_template_kwargs": {"enable_thinking": False},
        }
        chunks = stream(server.url, body)
        usage = [c["usage"] for c in chunks if c.get("usage")]
        assert usage and 1 <= usage[-1]["completion_tokens"] <= 8
        assert any(c["choices"] and c["choices"][0]["delta"].get("content") for c in chunks)
    assert not server.alive


def test_template_and_tokens_are_those_of_the_source(models):
    transformers = pytest.importorskip("transformers", reason="the quantize extra is not installed")
    tokenizer = transformers.AutoTokenizer.from_pretrained(models["folder"])
    with aq.serve.start(models["bf16"]) as server:
        for text in TEXTS:
            ids = post(server.url, "/tokenize", {"content": text})["tokens"]
            assert ids == tokenizer(text)["input_ids"]
            for thinking in (True, False):
                messages = [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": text},
                ]
                ours = post(
                    server.url,
                    "/apply-template",
                    {"messages": messages, "chat_template_kwargs": {"enable_thinking": thinking}},
                )["prompt"]
                assert ours == tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
                )


def greedy_hf(
    folder: Path, prompts: list[list[int]], n: int, weights: dict[str, np.ndarray] | None = None
):
    """Return greedy tokens and their logits in float32, without a cache."""
    import torch
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

    model = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if weights:
        state = model.state_dict()
        for name, value in weights.items():
            state[name].copy_(torch.from_numpy(np.ascontiguousarray(value, np.float32)))
    outputs = []
    with torch.no_grad():
        for prompt in prompts:
            ids, rows = list(prompt), []
            for _ in range(n):
                rows.append(model(torch.tensor([ids])).logits[0, -1].numpy())
                ids.append(int(rows[-1].argmax()))
            outputs.append((ids[len(prompt) :], np.array(rows)))
    return outputs


def next_token(url: str, prompt: list[int]) -> tuple[int, list[dict]]:
    """Return llama.cpp's greedy token after `prompt` and its log probabilities (none for half a character)."""
    answer = post(
        url,
        "/completion",
        {
            "prompt": prompt,
            "n_predict": 1,
            "temperature": 0,
            "n_probs": 5,
            "return_tokens": True,
            "ignore_eos": False,
        },
    )
    steps = answer.get("completion_probabilities") or [{"top_logprobs": []}]
    return answer["tokens"][0], steps[0]["top_logprobs"]


@pytest.mark.parametrize(("kind", "typical"), [("bf16", 0.05), ("nvfp4", 0.1)])
def test_greedy_answers_are_those_of_the_source(models, kind, typical):
    """The same tokens until a step that is nearly undecided in float32; log probabilities that differ only by rounding.

    llama.cpp rounds activations to bf16 (to 8 bits for NVFP4) before each product, transformers here does not.
    """
    pytest.importorskip("transformers", reason="the quantize extra is not installed")
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 1270, size).tolist() for size in (3, 30)]
    weights = None
    if kind == "nvfp4":
        folder = aq.checkpoint.ModelFolder(models["nvfp4_folder"])
        weights = {
            f"{m}.weight": x.dequantize(folder) for m, x in aq.checkpoint.linears(folder).items()
        }
    expected = greedy_hf(models["folder"], prompts, 8, weights)
    agreed, off = 0, []
    with aq.serve.start(models[kind]) as server:
        for prompt, (tokens, logits) in zip(prompts, expected, strict=True):
            for step, required in enumerate(tokens):
                peak = logits[step].max()
                log_p = logits[step] - peak - np.log(np.exp(logits[step] - peak).sum())
                got, top = next_token(server.url, prompt + tokens[:step])
                off += [abs(c["logprob"] - log_p[c["id"]]) for c in top]
                agreed += got == required
                assert got == required or log_p[required] - log_p[got] < 10 * typical
    assert np.median(off) < typical
    assert agreed >= 13  # of 16


def test_wrong_head_order_changes_the_answers(models, tmp_path, monkeypatch):
    """Negative control of the test above: value heads in the checkpoint's order change the answers."""
    from annie_quant.checkpoint.gguf import layout as names

    monkeypatch.setattr(names.Heads, "order", lambda self, width: np.arange(self.values * width))
    wrong = aq.checkpoint.convert(models["folder"], "gguf", tmp_path / "wrong.gguf").path
    top = {}
    for name, path in {"right": models["bf16"], "wrong": wrong}.items():
        with aq.serve.start(path) as server:
            top[name] = next_token(server.url, list(range(5, 30)))
    assert (
        top["right"][0] != top["wrong"][0]
        or abs(top["right"][1][0]["logprob"] - top["wrong"][1][0]["logprob"]) > 0.3
    )


def test_port_in_use_is_one_clear_line(models):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ServerError, match=f"port {port} cannot be used: address already in use"
        ):
            aq.serve.start(models["bf16"], port=port)


def test_a_broken_model_is_reported_and_no_process_remains(models, tmp_path):
    """A file whose header is sound: one of its tensors has another name than the architecture needs."""
    broken, raw = tmp_path / "broken.gguf", models["bf16"].read_bytes()
    assert raw.count(b"output_norm.weight") == 1
    broken.write_bytes(raw.replace(b"output_norm.weight", b"output_nork.weight"))
    before = {p.pid for p in psutil.Process().children()}
    with pytest.raises(ServerError, match=r"stopped while starting: .*(tensor|GGUF|gguf|corrupt)"):
        aq.serve.start(broken)
    assert {p.pid for p in psutil.Process().children()} <= before


def test_never_ready_is_reported_and_stopped(models):
    started = time.monotonic()
    with pytest.raises(ServerError, match=r"was not ready in 0\.01 s"):
        aq.serve.start(models["bf16"], timeout_s=0.01)
    assert time.monotonic() - started < 25


def test_serve_says_that_blackwell_rounds_the_inputs_of_a_w4a16_file(models, tmp_path) -> None:
    aq.quantize.run("direct", models["folder"], tmp_path / "w4a16")
    file = Path(aq.checkpoint.convert(tmp_path / "w4a16", "gguf", tmp_path / "w4a16.gguf").path)
    (note,) = aq.serve.check(file, runtime="llama.cpp")
    assert "have 4 bits in prompts" in note and "llama.cpp-blackwell" in note
    assert aq.serve.check(models["nvfp4"], runtime="llama.cpp") == []
    assert aq.serve.check(models["q4_k_m"], runtime="llama.cpp") == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "none.gguf", "no such file"),
        (lambda p: p, "is a folder, llama.cpp needs a GGUF file"),
        (lambda p: (p / "x.gguf").write_text("hello") and p / "x.gguf", "is not a GGUF file"),
    ],
)
def test_other_files_than_gguf_are_refused(tmp_path, make, message):
    with pytest.raises(AnnieError, match=message):
        aq.serve.start(make(tmp_path))


@pytest.mark.parametrize("share", [0.0001, 0.5])
def test_a_file_that_was_cut_is_refused_before_its_command_is_printed(models, tmp_path, share):
    """In the header, and in the tensors, as a download that stopped."""
    whole = models["bf16"].read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(CheckpointError, match="not a GGUF file that can be read"):
        llama_cpp.check_file(tmp_path / "cut.gguf")
    llama_cpp.check_file(models["bf16"])


def test_stop_twice_is_fine(models):
    server = aq.serve.start(models["bf16"])
    server.stop()
    server.stop()
    assert (
        not psutil.pid_exists(server.pid)
        or psutil.Process(server.pid).status() == psutil.STATUS_ZOMBIE
    )


PARENT = """
import sys, time, annie_quant as aq
server = aq.serve.start(sys.argv[1])
print(server.pid, flush=True)
{then}
"""


@pytest.mark.parametrize(
    ("then", "number"),
    [
        ("time.sleep(60)", signal.SIGKILL),
        ("time.sleep(60)", signal.SIGINT),
        ("time.sleep(60)", signal.SIGTERM),
        ("raise SystemExit(0)", None),
    ],
)
def test_the_server_ends_with_its_parent(models, then, number):
    """However the parent ends, the server ends soon after."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(then=then), str(models["bf16"])],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(aq.__file__).parent.parent)},
    )
    pid = int(parent.stdout.readline())
    if number:
        parent.send_signal(number)
    parent.wait(20)
    deadline = time.monotonic() + 5
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the server outlived its parent"
        time.sleep(0.02)


def test_a_thread_may_start_it_and_end(models):
    """The server continues when the thread that started it ends (a parent-death signal would end it)."""
    import threading

    built = []
    thread = threading.Thread(target=lambda: built.append(aq.serve.start(models["bf16"])))
    thread.start()
    thread.join()
    time.sleep(0.3)
    with built[0] as server:
        assert server.alive
        assert post(server.url, "/tokenize", {"content": "hi"})["tokens"]


def test_command_is_printed_and_nothing_started(models):
    line = aq.serve.command(models["bf16"], runtime="llama.cpp", port=8123)
    assert "llama-server" in line and "--port 8123" in line and "--jinja" in line


@pytest.mark.parametrize(
    ("size", "threads", "expected"), [(1000, 0, 1), (1000, 2, 2), (64_000_000, 0, 0)]
)
def test_a_small_model_gets_one_thread_by_default(tmp_path, monkeypatch, size, threads, expected):
    file = tmp_path / "model.gguf"
    with file.open("wb") as out:
        out.write(b"GGUF")
        out.truncate(size)
    started = []

    def spawn(command, *_, **options):
        started.append(json.loads(command[-1]))
        raise ServerError("not started in this test")

    monkeypatch.setattr(llama_cpp.process, "spawn", spawn)
    with pytest.raises(ServerError):
        aq.serve.start(file, threads=threads)
    assert [options["threads"] for options in started] == [expected]
