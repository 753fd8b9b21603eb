"""The promises of SECURITY.md about code from data, secrets, paths and sizes, checked in the code and in the output of runs."""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import re
import shutil

import checkpoint_zoo as zoo
import make_run_sample as sample
import numpy as np
import pytest
from command_line import CliRunner
from fake_server import FakeServer, Script
from paths import ROOT
from planted_secrets import HUB, KEY, PASSWORD, where

from annie_quant.checkpoint import ModelFolder, ShardError, audit, header, shards
from annie_quant.cli import app as cli
from annie_quant.judge import Case, Workload

FOLDERS = ("annie_quant", "examples", "training")
SOURCES = sorted(
    [*(path for folder in FOLDERS for path in (ROOT / folder).glob("**/*.py")), ROOT / "setup.py"]
)
RUNS_CODE = {"eval", "exec", "compile", "__import__"}
LOADERS = {
    "from_pretrained",
    "from_config",
}  # without an explicit value transformers asks on the terminal, and "y" runs the code
FROM_BYTES = {
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "telnetlib",
    "xml",
}


def faults_of(tree: ast.AST) -> list[str]:
    """Return calls and imports by which data could become code, with their lines."""
    result = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
            )
            result += [f"{node.lineno} import {n}" for n in names if n.split(".")[0] in FROM_BYTES]
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        inputs = {k.arg: k.value for k in node.keywords}

        def message(key: str, value: object, inputs=inputs) -> bool:
            return isinstance(inputs.get(key), ast.Constant) and inputs[key].value is value

        wrong = (
            name in RUNS_CODE
            or name
            in (
                "os.system",
                "os.popen",
                "tempfile.mktemp",
                "subprocess.getoutput",
                "torch.hub.load",
            )
            or (name.startswith("os.exec") or name.startswith("os.spawn"))
            or ("shell" in inputs and not message("shell", False))
            or ("trust_remote_code" in inputs and not message("trust_remote_code", False))
            or (name.rpartition(".")[2] in LOADERS and not message("trust_remote_code", False))
            or (name == "torch.load" and not message("weights_only", True))
            or (name in ("np.load", "numpy.load") and not message("allow_pickle", False))
            or (name in ("np.save", "numpy.save") and not message("allow_pickle", False))
            or name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load")
            or ("verify" in inputs and message("verify", False))
            or name == "ssl._create_unverified_context"
        )
        if wrong:
            result.append(f"{node.lineno} {name}")
    return result


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_data_never_becomes_code(path):
    assert faults_of(ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from marshal import loads",
        "eval('1')",
        "subprocess.run('x', shell=True)",
        "subprocess.run('x', shell=yes)",
        "M.from_pretrained(p, trust_remote_code=True)",
        "M.from_pretrained(p)",
        "M.from_config(c)",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "np.load(f)",
        "os.system('x')",
        "yaml.load(f)",
    ],
)
def test_the_check_of_the_code_finds_faults(code):
    assert faults_of(ast.parse(code))


def test_c_sources_start_no_programs_and_limit_every_copy():
    """strcpy and similar functions have no length; system() and popen() use a shell."""
    banned = re.compile(
        r"\b(strcpy|strcat|sprintf|vsprintf|gets|system|popen|alloca|tmpnam|mktemp)\s*\("
    )
    for path in sorted(
        [*ROOT.glob("csrc/**/*.c"), *ROOT.glob("csrc/**/*.h"), *ROOT.glob("csrc/**/*.cu")]
    ):
        code = re.sub(r"/\*.*?\*/|//[^\n]*", "", path.read_text(), flags=re.DOTALL)
        assert not banned.findall(code), path


# ---- secrets


def repeating_server(body: dict) -> Script:
    """A server that repeats the key it received, in an error and in an answer."""
    requests = body["messages"][-1]["content"]
    if "Peru" in requests:
        return Script(status=401, error=f"Incorrect API key provided: {KEY}")
    return sample.answer(body)


def test_planted_secrets_are_in_no_artefact(tmp_path, monkeypatch):
    """A key in the environment that the server repeats, and a token for the Hub: benchmark, report, card, dry upload."""
    monkeypatch.setenv("PLANTED_KEY", KEY)
    monkeypatch.setenv("HF_TOKEN", HUB)
    run, printed = tmp_path / "run", []
    workload = tmp_path / "capitals.json"
    workload.write_text(json.dumps(sample.WORKLOAD))
    with FakeServer(repeating_server) as a, FakeServer(sample.answer) as b:
        words = ["bench", "--backend-a", "a", a.url, "--backend-b", "b", b.url, "--runs", "1", "--warmup", "0",
                 "--workloads", str(workload), "--key-env", "PLANTED_KEY", "--output", str(run)]  # fmt: skip
        done = CliRunner().invoke(cli, words)
        printed += [done.output, str(done.exception)]
    assert b"Incorrect API key" in (run / "records.jsonl").read_bytes(), done.exception
    for words in (
        ["report", str(run)],
        ["publish", str(run), "--repo", "me/x", "--model", "a", "--checkpoint", str(zoo.bf16(tmp_path / "ckpt")),
         "--base-model", "Qwen/Qwen3.5-9B", "--dry-run", "--with-records", "--with-report"],
    ):  # fmt: skip
        done = CliRunner().invoke(cli, words)
        printed += [done.output, str(done.exception)]
    assert (run / "report.html").exists()
    assert where(run, *printed) == []


def respond(body: dict) -> Script:
    """Return a teacher's answer to one prompt; the first conversation repeats the key, as a proxy's debug text may."""
    prompt, conversations = body["messages"][-1]["content"], []
    expected = int(re.search(r"Write (\d+) different", prompt)[1])
    turns = int(re.search(r"exactly (\d+) turn", prompt)[1])
    tool = re.search(r"calls (\w+) without any other text", prompt)
    for i in range(expected):
        word = hashlib.sha256(f"{prompt}{i}".encode()).hexdigest()[:12]
        talk = [
            {"user": f"Please {word}{t} it", "assistant": f"That is {word}, gladly."}
            for t in range(turns)
        ]
        talk[0]["assistant"] += f" Bearer {KEY}" * (i == 0)
        if tool:
            talk[0] |= {
                "call": {"name": tool[1], "arguments": {"query": word}},
                "result": f"{word} was found.",
            }
        conversations.append({"turns": talk})
    return Script(content=[json.dumps({"conversations": conversations})])


def test_planted_secrets_are_in_no_artefact_of_a_teacher(tmp_path, monkeypatch):
    """A teacher's server that repeats the key in an error and in an answer; a `claude` that prints it on stderr."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    faults, printed = (
        [Script(status=500, error=f"broken for {KEY}"), Script(status=401, error=f"not {KEY}")],
        [],
    )
    with FakeServer(lambda body: faults.pop(0) if faults else respond(body)) as server:
        words = [
            "data",
            "--teacher",
            "openai",
            "--teacher-model",
            "m",
            "--url",
            server.url,
            "--n",
            "5",
        ]
        for _ in range(2):  # the 401 ends the first one
            done = CliRunner().invoke(cli, [*words, "--output", str(tmp_path / "out/d.jsonl")])
            printed += [done.output, str(done.exception)]
        assert (
            len(server.bodies) > 5 and len((tmp_path / "out/d.jsonl").read_text().splitlines()) == 5
        ), printed
    program = tmp_path / "bin/claude"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\n[ "$1" = --help ] && echo "--print --model --output-format" && exit\n'
                       'echo "Invalid API key: $ANTHROPIC_API_KEY" >&2; exit 1\n')  # fmt: skip
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    done = CliRunner().invoke(
        cli,
        ["data", "--teacher", "claude-cli", "--n", "5", "--output", str(tmp_path / "out/c.jsonl")],
    )
    printed += [done.output, str(done.exception)]
    assert "not logged in: Invalid API key: [redacted]" in printed[-1], printed[-2:]
    assert where(tmp_path / "out", *printed) == []


def test_planted_secrets_are_in_no_artefact_of_an_evaluation(tmp_path, monkeypatch):
    """Keys of the environment are not in eval's result, its report, or its files next to a checkpoint."""
    pytest.importorskip("torch", reason="evaluation needs torch: pip install annie-quant[quantize]")
    pytest.importorskip(
        "transformers", reason="evaluation needs transformers: pip install annie-quant[quantize]"
    )
    monkeypatch.setenv("PLANTED_KEY", KEY)
    monkeypatch.setenv("HF_TOKEN", HUB)
    cases = tuple(
        Case(f"c{i}", ({"role": "user", "content": f"What is {i} and 3?"},)) for i in range(2)
    )
    load = Workload(
        "plain", "", None, "Be brief.", None, False, 8, 0, ("non_empty", "no_markdown"), cases
    )
    monkeypatch.setattr("annie_quant.judge.load_workloads", lambda *_, **__: [load])
    tiny = shutil.copytree(ROOT / "annie_quant/assets/tiny-annie", tmp_path / "tiny")
    words = [
        "eval",
        str(tiny),
        "--reference",
        str(tiny),
        "--n",
        "2",
        "--output",
        str(tmp_path / "eval.json"),
    ]
    printed = [CliRunner().invoke(cli, [*words, *more]) for more in ([], ["--json"])]
    assert (
        "KL mean" in printed[0].output
        and json.loads((tmp_path / "eval.json").read_text())["numerics"]
    )
    assert where(tmp_path, *(f"{done.output} {done.exception}" for done in printed)) == []


def test_an_address_with_a_password_is_refused_without_repeating_it(tmp_path):
    for url in (f"http://annie:{PASSWORD}@127.0.0.1:9", f"http://127.0.0.1:9/?key={PASSWORD}"):
        done = CliRunner().invoke(
            cli, ["bench", "--backend-a", "a", url, "--output", str(tmp_path / "run")]
        )
        text = f"{done.exception} {getattr(done.exception, 'hint', '')}"
        assert "127.0.0.1:9" in text and "--key-env" in text
        assert where(tmp_path, done.output, text) == []


def test_the_search_for_secrets_finds_them(tmp_path):
    (tmp_path / "a.json").write_text(f'{{"headers": "Bearer {KEY}"}}')
    np.savez_compressed(tmp_path / "b.npz", plan=np.frombuffer(HUB.encode(), np.uint8))
    assert len(where(tmp_path, PASSWORD)) == 3


# ---- sizes and paths from outside


def test_an_enormous_json_file_is_refused_before_it_is_read(tmp_path, monkeypatch):
    folder = zoo.bf16(tmp_path / "m")
    monkeypatch.setattr(shards, "MAX_JSON_BYTES", 1000)
    (folder / "config.json").write_text(json.dumps({"padding": "x" * 1000}))
    with pytest.raises(ShardError, match=r"config.json: 1\d\d\d bytes, expected at most 1000"):
        _ = ModelFolder(folder).config
    assert "config_unreadable" in {f.code for f in audit(folder).findings}


def test_a_header_larger_than_its_limit_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes((100_000_001).to_bytes(8, "little") + b"{")
    with path.open("ab") as file:
        file.truncate(200_000_000)
    with pytest.raises(ShardError, match="header too large"):
        header.read_header(path)


def test_links_to_files_outside_are_not_read(tmp_path):
    """Each file of a checkpoint in turn is a link to a file outside: refused, or not read."""
    secret = tmp_path / "outside.json"
    secret.write_text(json.dumps({"planted": HUB}))
    for name in (
        "config.json",
        "model.safetensors",
        "tokenizer_config.json",
        "generation_config.json",
    ):
        folder = zoo.bf16(tmp_path / f"m-{name}")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(secret)
        done = CliRunner().invoke(
            cli,
            [
                "convert",
                str(folder),
                "--to",
                "gguf",
                "--type",
                "BF16",
                "--output",
                str(tmp_path / "o.gguf"),
            ],
        )
        out = (tmp_path / "o.gguf").read_bytes() if (tmp_path / "o.gguf").exists() else b""
        assert HUB.encode() not in out and HUB not in done.output + str(done.exception), name
        shutil.rmtree(folder)


def test_names_from_a_server_are_not_used_as_paths(tmp_path):
    """A model named ../../x, or with a name of a megabyte: no file outside the run, and a readable page."""
    for name in ("../../escaped<script>alert(1)</script>", "/etc/\x00" + "x" * 1_000_000):
        run, workload = tmp_path / "deep/run", tmp_path / "capitals.json"
        shutil.rmtree(run, ignore_errors=True)
        workload.write_text(json.dumps(sample.WORKLOAD))
        with FakeServer(sample.answer, model=name) as a:
            words = [
                "bench",
                "--backend-a",
                "a",
                a.url,
                "--runs",
                "1",
                "--warmup",
                "0",
                "--workloads",
                str(workload),
            ]
            done = CliRunner().invoke(cli, [*words, "--output", str(run)])
        assert done.exception is None or isinstance(done.exception, SystemExit), (
            name[:20],
            done.exception,
        )
        assert {p.name for p in tmp_path.iterdir()} == {"deep", "capitals.json"}
        assert {p.name for p in (tmp_path / "deep").iterdir()} == {"run"}
        page = (run / "report.html").read_text()
        assert "<script>alert" not in page and len(page) < 3_000_000


def test_exceptions_from_ruffs_security_rules_have_a_reason():
    """Each exception from the S rules has its code and a reason."""
    for path in ROOT.glob("annie_quant/**/*.py"):
        for line in io.StringIO(path.read_text()):
            if "noqa" in line:
                assert re.search(r"noqa: [A-Z]+\d+", line), (path, line)
