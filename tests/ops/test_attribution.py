"""`annie-quant attribute` with scripted servers, two running servers, servers that die, and the embedded llama.cpp server."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest
from command_line import annie_quant
from fake_server import FakeServer, Script, words
from flat_records import record_of
from paths import HELPERS, TINY_ANNIE

import annie_quant as aq
from annie_quant.core.errors import ServerError, UsageError
from annie_quant.core.files import write_json
from annie_quant.data.workloads import resolve
from annie_quant.documents import RequestRecord
from annie_quant.ops.attribution import AttributionRun, compare_answers
from annie_quant.ops.attribution_servers import (
    REPORTS_HITS,
    SERVED,
    CommandTarget,
    RuntimeTarget,
    UrlTarget,
    changed_command,
    request_settings,
)

pytest.importorskip("annie_quant.stream", reason="the client is not built")

N = 9
ALL_OFF = {"kv": "off", "mtp": "0"}
ALL_ON = {"kv": "fp8", "mtp": "2", "prefix": "on", "batch": "4"}


@pytest.fixture
def workload(tmp_path) -> Path:
    """A workload of N prompts whose right answer is "yes"."""
    cases = [
        {
            "id": f"c{i}",
            "messages": [{"role": "user", "content": f"question {i}"}],
            "expect": {"contains": ["yes"]},
        }
        for i in range(N)
    ]
    path = tmp_path / "facts.json"
    fields = {"max_tokens": 8, "temperature": 0, "thinking": False, "system": "Say yes."}
    write_json(
        path, {"name": "facts", "description": "d", "gates": ["factual"], "cases": cases} | fields
    )
    return path


def scripted(tmp_path: Path, rules: str, **changes: str) -> CommandTarget:
    line = f"{sys.executable} {HELPERS}/scripted_server.py {{port}} {rules!r} {tmp_path}/asked kv={{kv}} mtp={{mtp}}"
    return CommandTarget(line, ALL_OFF, ALL_ON | changes, 30.0)


def prompts_sent(tmp_path: Path) -> int:
    return len((tmp_path / "asked").read_text().splitlines())


def is_open(url: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) == 0


def test_an_interaction_of_two_settings_is_named(tmp_path, workload):
    run = AttributionRun(
        scripted(tmp_path, "break:mtp+prefix"), resolve(None, workload), tmp_path / "run"
    )
    result = run.run()
    assert result.conclusion.causes == (("mtp", "prefix"),) and result.guilty
    assert result.sentence.startswith(f"prefix cache with MTP breaks {N} of {N} answers")
    assert all(a.valid for a in result.arms)
    # A second call measures nothing again.
    sent = prompts_sent(tmp_path)
    again = AttributionRun(
        scripted(tmp_path, "break:mtp+prefix"), resolve(None, workload), tmp_path / "run"
    ).run()
    assert again == result and prompts_sent(tmp_path) == sent
    # Another command is another experiment.
    other = AttributionRun(scripted(tmp_path, ""), resolve(None, workload), tmp_path / "run").run()
    assert not other.guilty and len(other.arms) == 3 and prompts_sent(tmp_path) > sent


def test_a_prefix_cache_without_hits_makes_an_arm_invalid(tmp_path, workload):
    run = AttributionRun(
        scripted(tmp_path, "break:prefix,cold"), resolve(None, workload), tmp_path / "run"
    )
    result = run.run()
    assert "no prompt tokens from the prefix cache" in result.conclusion.untested["prefix"]
    assert not result.conclusion.causes and not result.guilty
    assert result.sentence.startswith("nobody is to blame: all tested factors together break 0 of")
    assert result.sentence.endswith("; not tested: prefix cache")


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ("die:kv", "went away"),
        ("refuse:kv", "not supported"),
        ("hang:kv", "in a row had no answer"),
        ("fail:kv", "request has an answer: HTTP 500"),
    ],
)
def test_a_server_that_fails_is_reported_and_the_rest_goes_on(tmp_path, workload, rule, reason):
    run = AttributionRun(
        scripted(tmp_path, f"{rule},break:mtp"),
        resolve(None, workload),
        tmp_path / "run",
        timeout_s=0.7,
    )
    result = run.run()
    assert reason in result.conclusion.untested["kv"]
    assert result.conclusion.causes == (("mtp",),)


def test_a_value_with_which_requests_are_refused_breaks_answers(tmp_path, workload):
    """As vLLM refuses tools without a parser. An arm without answers says nothing about its other factors."""
    result = AttributionRun(
        scripted(tmp_path, "reject:kv"), resolve(None, workload), tmp_path / "run"
    ).run()
    assert result.conclusion.causes == (("kv",),) and not result.conclusion.untested


def test_a_base_that_does_not_start_is_an_error(tmp_path, workload):
    target = CommandTarget(
        f"{sys.executable} -c 'exit(3)' {{port}} {{kv}}", {"kv": "a"}, {"kv": "b"}, 30.0
    )
    with pytest.raises(ServerError, match="stopped while starting"):
        AttributionRun(target, resolve(None, workload), tmp_path / "run").run()


def test_two_servers_that_run_already(tmp_path, workload):
    """The factors that requests cannot set are named as one, and no server is stopped."""

    def answer(text: str):
        def script(body: dict):
            return words(
                text, cached_tokens=3 if body.get("cache_prompt", True) else 0, prompt_tokens=9
            )

        return script

    with FakeServer(answer("yes")) as good, FakeServer(answer("no")) as bad:
        output = tmp_path / "run"
        done = annie_quant(
            "attribute",
            "--urls",
            good.url,
            bad.url,
            "--workloads",
            workload,
            "--n",
            0,
            "--output",
            output,
            "--json",
        )
        assert done.returncode == 1, done.stderr
        result = json.loads(done.stdout)
        assert result["conclusion"]["causes"] == [["server"]]
        assert {"weights", "kv", "mtp", "parser", "template"} <= {
            *result["fixed"]
        } and "prefix" not in result["fixed"]
        assert is_open(good.url) and is_open(bad.url)
        same = annie_quant(
            "attribute",
            "--urls",
            good.url,
            good.url + "/",
            "--workloads",
            workload,
            "--n",
            0,
            "--output",
            tmp_path / "b",
        )
        assert same.returncode == 0 and "nobody is to blame" in same.stdout
        assert "cannot be changed: weights" in " ".join(same.stdout.split())
    stopped = annie_quant(
        "attribute",
        "--urls",
        good.url,
        bad.url,
        "--workloads",
        workload,
        "--n",
        0,
        "--output",
        tmp_path / "c",
    )
    assert stopped.returncode == 4 and "no server answers" in stopped.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "give one of"),
        (
            ("--urls", "http://a", "http://b", "--suspect", "kv=fp8"),
            "kv cannot be set at servers that run already",
        ),
        (("--server-cmd", "serve"), "no {port}"),
        (("--server-cmd", "serve {port} {kv}"), "{kv}, which has no values"),
        (("--server-cmd", "serve {port} {kv}", "--suspect", "kv"), "has no value"),
        (
            ("--server-cmd", "serve {port} {kv}", "--trusted", "kv=a", "--suspect", "kv=a"),
            "no factor has two values",
        ),
        (
            ("--server-cmd", "serve {port}", "--suspect", "mtp=1"),
            "mtp cannot be set by --server-cmd",
        ),
        (
            ("--urls", "http://a", "http://b", "--suspect", "batch=many"),
            "batch=many: expected a number",
        ),
        (
            ("--urls", "http://a", "http://b", "--suspect", "sampling=hot"),
            "expected fields of a request",
        ),
        (("--checkpoint", "x.gguf", "--runtime", "none"), "no runtime called 'none'"),
        (
            ("--checkpoint", "x.gguf", "--suspect", "graphs=on"),
            "graphs cannot be set for llama.cpp",
        ),
    ],
)
def test_invalid_options(tmp_path, workload, options, message):
    done = annie_quant("attribute", *options, "--workloads", workload, "--output", tmp_path / "run")
    assert done.returncode == 2 and message in " ".join(done.stderr.split())


def test_a_recipe_is_the_suspect_and_trusted_values_replace_its_options(tmp_path):
    target = RuntimeTarget(
        "vllm", (TINY_ANNIE, None), ({}, {"kv": "fp8"}), tmp_path, "2026-07-35b-a3b"
    )
    assert {v.name: (v.trusted, v.suspect) for v in target.varied} == {
        "activations": ("w4a16", SERVED),
        "kv": ("auto", "fp8"),
        "mtp": ("0", SERVED),
        "graphs": ("off", SERVED),
        "batch": ("1", "8"),
    }
    assert "weights" in target.fixed
    words = [
        "--kv-cache-dtype",
        "fp8",
        "--speculative-config",
        "{}",
        "--enable-prefix-caching",
        "--port",
        "1",
    ]
    trusted = {"kv": "auto", "mtp": "0", "prefix": "off", "graphs": "off"}
    hits = REPORTS_HITS["vllm"]
    assert changed_command("vllm", words, dict.fromkeys(trusted, SERVED)) == [*words, hits]
    off = ["--no-enable-prefix-caching", "--enforce-eager"]
    assert changed_command("vllm", words, trusted) == ["--port", "1", hits, *off]
    # vLLM does not start with --enable-auto-tool-choice alone.
    parser = [
        "serve",
        "M",
        "--enable-auto-tool-choice",
        "--tool-call-parser",
        "qwen3_coder",
        "--port",
        "1",
    ]
    assert changed_command("vllm", parser, {"parser": "none"}) == [
        "serve",
        "M",
        "--port",
        "1",
        hits,
    ]
    assert changed_command("vllm", parser, {"parser": "hermes"})[-2:] == [
        "--tool-call-parser",
        "hermes",
    ]
    # A recipe without CUDA graphs has nothing to compare.
    cpu = RuntimeTarget("vllm", (TINY_ANNIE, TINY_ANNIE), ({}, {}), tmp_path, "cpu")
    assert {v.name for v in cpu.varied} == {"activations", "prefix", "batch"}


def test_a_base_without_any_answer_is_an_error(tmp_path, workload):
    """Nothing can be lost against a server that refuses each request, so nobody would be to blame."""
    with FakeServer(lambda body: Script(status=400, error="refused")) as bad:
        run = AttributionRun(
            UrlTarget(bad.url, bad.url + "/", {}, {}), resolve(None, workload), tmp_path / "run"
        )
        with pytest.raises(ServerError, match=r"no request has an answer: .*refused"):
            run.run()


def test_request_settings():
    settings = request_settings({"prefix": "off", "batch": "3", "sampling": '{"top_k": 1}'})
    assert (settings.prefix_cache, settings.concurrency, settings.fields) == (
        "off",
        3,
        {"top_k": 1},
    )
    assert request_settings({"prefix": "on"}).prefix_cache == "warm"


def test_answers_without_a_label_are_compared_with_the_base_and_its_noise(tmp_path):
    """Half of the prompts change when the base is repeated: an arm that changes as many is not worse, one that changes all is."""
    cases = [{"id": f"c{i}", "messages": [{"role": "user", "content": f"{i}"}]} for i in range(40)]
    fields = {"max_tokens": 8, "temperature": 0, "thinking": False, "gates": ["same_text"]}
    write_json(tmp_path / "w.json", {"name": "w", "description": "d", "cases": cases} | fields)
    workloads = resolve(None, tmp_path / "w.json")

    def answers(changed) -> list[RequestRecord]:
        texts = ["seven other words" if changed(i) else "harbour lights again" for i in range(40)]
        return [
            record_of(
                id=f"s/w/c{i}/0/0",
                backend="s",
                workload="w",
                case=f"c{i}",
                text=t,
                finish_reason="stop",
            )
            for i, t in enumerate(texts)
        ]

    base, noisy = answers(lambda i: False), answers(lambda i: i % 2)
    like_noise = compare_answers(
        workloads, base, answers(lambda i: i % 2), answers(lambda i: i // 2 % 2)
    )
    assert not compare_answers(workloads, base, base, base).lost
    assert like_noise.lost == like_noise.won == 10 and not like_noise.broken
    assert compare_answers(workloads, base, noisy, answers(lambda i: True)).broken


def test_an_answer_that_did_not_arrive_is_lost(tmp_path, workload):
    workloads = resolve(None, workload)

    def answers(error: str | None) -> list[RequestRecord]:
        rows = []
        for i in range(N):
            row = record_of(
                id=f"s/facts/c{i}/0/0", backend="s", workload="facts", case=f"c{i}", text="yes"
            )
            row.answer.finish_reason, row.answer.error, row.judgement.checks = (
                "stop",
                error,
                {"factual": True},
            )
            rows.append(row)
        return rows

    effect = compare_answers(workloads, answers(None), answers(None), answers("reset"))
    assert (effect.n, effect.lost, effect.won) == (N, N, 0) and effect.broken


def test_the_embedded_server_with_a_template_without_tools(tmp_path):
    """The real llama.cpp server: two models with different templates, the prefix cache with its own count of hits."""
    pytest.importorskip("xllamacpp", reason="the serve extra is not installed")
    pytest.importorskip("gguf", reason="the serve extra is not installed")
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(TINY_ANNIE, broken)
    template = broken / "chat_template.jinja"
    template.write_text(template.read_text().replace("{%- if tools", "{%- if false and tools"))
    files = [
        Path(aq.checkpoint.convert(source, "gguf", tmp_path / f"{name}.gguf", type=kind).path)
        for name, source, kind in (("right", TINY_ANNIE, "BF16"), ("wrong", broken, "Q8_0"))
    ]
    workloads = aq.judge.sample(resolve(None, "tool_web"), 10)
    target = RuntimeTarget("llama.cpp", (files[1], files[0]), ({}, {"kv": "q8_0"}), tmp_path, None)
    assert [v.name for v in target.varied] == ["weights", "template", "kv", "prefix"]
    result = AttributionRun(target, workloads, tmp_path / "run").run()
    assert result.conclusion.causes == (("template",),) and not result.conclusion.untested
    assert len(result.arms) <= 8
    bench = json.loads((tmp_path / "run/arms/base/bench.json").read_text())
    assert not is_open(bench["backends"]["server"]["url"])


def test_an_unknown_kv_type_is_refused_by_the_server(tmp_path):
    pytest.importorskip("xllamacpp", reason="the serve extra is not installed")
    file = Path(aq.checkpoint.convert(TINY_ANNIE, "gguf", tmp_path / "x.gguf", type="BF16").path)
    with pytest.raises(ServerError, match="unknown type of cached keys and values 'fp8'"):
        aq.serve.start(file, kv_type="fp8")


def test_no_prompts_are_an_error(tmp_path):
    with pytest.raises(UsageError, match="no prompts"):
        AttributionRun(UrlTarget("http://a", "http://b", {}, {}), [], tmp_path).run()
