"""The mistakes of the original benchmarks v1, v2 and v3, replayed by scripted servers: each is detected and named."""

from __future__ import annotations

import itertools

import pytest
from bench_cases import TOOLS, ask, workload
from fake_server import FakeServer, Script, words

from annie_quant import bench

GATES = ["non_empty", "no_markdown", "thinking_leak", "repetition"]
FACTS = workload(
    "factual",
    [
        {
            "id": f"f{i}",
            "messages": ask(f"capital of Japan ({i})?"),
            "expect": {"contains": ["Tokyo"]},
        }
        for i in range(8)
    ],
    gates=[*GATES, "factual"],
)
SUMS = workload(
    "reasoning",
    [
        {
            "id": f"r{i}",
            "messages": ask(f"3 boxes, 5 balls each ({i})?"),
            "expect": {"contains": ["15"]},
        }
        for i in range(8)
    ],
    gates=[*GATES, "reasoning"],
)
MEMORY = workload(
    "tool_memory",
    [
        {"id": f"m{i}", "messages": ask(f"my robot ({i})?"), "expect": {"tool": "search_memory"}}
        for i in range(10)
    ],
    tools=TOOLS,
    gates=["tool_call", "tool_call_raw"],
)
GIBBERISH = ".isantts E_OVER\n S copr; '...CSiscoslmogn不辞 продать / '^当 /M刘邦opIS ( S Z-s优化e'"


def production(body):
    """The Q4_K_M side, which answers correctly."""
    question = body["messages"][-1]["content"]
    if body.get("tools"):
        return Script(tools=[("search_memory", '{"query": "robot"}')])
    return words(
        "It is Tokyo, of course." if "capital" in question else "That makes 15 balls in all."
    )


@pytest.fixture
def measure(tmp_path):

    def go(nvfp4, workloads=(FACTS, SUMS, MEMORY), meta_a=None, meta_b=None, **server):
        with (
            FakeServer(nvfp4, style="vllm", model="AxionML/Qwen3.5-9B-NVFP4", **server) as a,
            FakeServer(production) as b,
        ):
            sides = [
                bench.Backend("nvfp4_vllm", a.url, meta=meta_a or {}),
                bench.Backend("q4km_llama", b.url, meta=meta_b or {}),
            ]
            return bench.run(sides, list(workloads), tmp_path, warmup=1, runs=1)

    return go


def codes(result):
    """Codes of all findings but those about the machine that runs the tests."""
    return {f.code for f in result.aggregates.confounds} - {"busy_machine", "normal_priority"}


def text_of(result):
    verdict = result.verdict
    return " ".join([verdict.sentence, *verdict.reasons, *verdict.caveats])


def test_v1_thinking_as_content_no_parser_no_usage_and_cold_starts(measure):
    count = itertools.count()

    def v1(body):
        if body.get("tools"):
            return Script(
                status=400,
                error='"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser',
            )
        # One request stalls, like a server that compiles late (9.3 s and 110 s in the original data).
        return words(
            "Thinking Process: 1. **Analyze the Request:** the user asks. So Tokyo, 15.",
            usage=False,
            first_s=1.3 if next(count) == 9 else 0.0,
        )

    result = measure(v1)
    assert codes(result) >= {
        "thinking_as_content",
        "tool_parser_missing",
        "tokens_estimated",
        "cold_start",
        "different_answers",
        "smoke",
    }
    verdict = result.verdict
    assert verdict.passed is False and verdict.comparable is False
    assert verdict.sentence.startswith("CONFOUNDED") and "thinking as content" in verdict.sentence
    for words_ in (
        "time to the first thinking token",
        "--tool-call-parser",
        "not the model's fault",
        "no usage",
        "cold starts",
        "different models",
    ):
        assert words_ in text_of(result), words_
    side = result.aggregates.served["nvfp4_vllm"]
    # Estimated counts give no decode speed, and the stall is not in the average.
    assert (
        side.workloads["factual"].decode_tok_s is None
        and side.workloads["factual"].completion_tokens is None
    )
    assert side.left_out_of_timings == 10 + 1
    assert max(w.ttft_content_ms.p99 for w in side.workloads.values()) < 1000
    assert side.gates["tool_call"].passes == 0 and side.gates["thinking_leak"].passes == 0


def test_one_leaked_thought_in_many_answers_confounds_no_times(measure):
    def leaks_once(body):
        if (
            body["messages"][-1]["content"].endswith("(3)?")
            and "balls" in body["messages"][-1]["content"]
        ):
            return words("Thinking Process: 1. **Analyze the Request:** so 15.")
        return production(body)

    result = measure(leaks_once)
    finding = next(f for f in result.aggregates.confounds if f.code == "thinking_as_content")
    assert finding.severity == "note" and "1 of 26 answers: too few" in finding.message
    assert result.verdict.comparable is True and not result.verdict.sentence.startswith(
        "CONFOUNDED"
    )


def test_v2_hidden_thinking_with_empty_content(measure):
    def v2(body):
        if body.get("tools"):
            return Script(reasoning=["hm "] * 20, tools=[("search_memory", '{"query": "robot"}')])
        return Script(reasoning=["Let ", "me ", "see "] * 16, finish="length")

    result = measure(v2)
    assert codes(result) >= {"hidden_thinking", "empty_after_thinking"}
    verdict = result.verdict
    assert verdict.passed is False and "hidden thinking" in verdict.sentence
    assert "showed nothing in 16 of" in text_of(
        result
    ) and "thinks although thinking is off" in text_of(result)
    gates = result.aggregates.served["nvfp4_vllm"].gates
    assert gates["non_empty"].passes == 0 and gates["tool_call"].passes == 10
    # Without content, content TTFT is not reported; the first thinking token has its own metric.
    shown = result.aggregates.served["nvfp4_vllm"].workloads["factual"]
    assert shown.ttft_content_ms is None and shown.ttft_reasoning_ms.p50 > 0


def test_v3_a_base_model_that_needs_thinking(measure):
    def v3(body):
        smoke = body["messages"][-1]["content"] == "What is the capital of Japan?"
        return words("It is a city." if smoke else GIBBERISH)

    result = measure(
        v3,
        meta_a={"source": "base"},
        meta_b={"source": "opus-distilled"},
    )
    assert codes(result) >= {"different_weights", "different_answers", "smoke"}
    gates = result.aggregates.served["nvfp4_vllm"].gates
    for gate in ("factual", "reasoning", "tool_call", "repetition"):
        assert gates[gate].passes == 0 and gates[gate].verdict == "fail", gate
    assert "different source weights: base and opus-distilled" in text_of(result)
    assert result.verdict.comparable is False and result.verdict.passed is False


def test_thinking_that_a_server_removes(measure):
    """Neither content nor reasoning is sent, and usage reports 300 tokens."""
    result = measure(lambda body: Script(completion_tokens=300, finish="length"), workloads=[FACTS])
    assert "empty_after_thinking" in codes(result) and "median 300" in text_of(result)


def test_unparsed_tool_calls_are_a_fault_of_the_server(measure):
    call = "<tool_call>\n<function=search_memory>\n<parameter=query>\nrobot\n</parameter>\n</function>\n</tool_call>"
    result = measure(lambda body: words(call) if body.get("tools") else production(body))
    gates = result.aggregates.served["nvfp4_vllm"].gates
    assert gates["tool_call"].passes == 0 and gates["tool_call_raw"].passes == 10
    assert "the server's parser is at fault" in text_of(result)


def test_a_different_chat_template_is_detected_by_prompt_tokens(measure):
    def chatty(body):
        script = production(body)
        script.prompt_tokens = 99
        return script

    result = measure(chatty, workloads=[FACTS])
    assert "different_prompts" in codes(result) and "chat template or tokenizer differ" in text_of(
        result
    )


def test_two_correct_sides_have_no_confound(measure):
    same = {"source": "sha256 of the bf16 weights"}
    result = measure(production, meta_a=same, meta_b=same)
    assert codes(result) == {"different_engines"}
    assert result.verdict.comparable is True
    assert "operational change: llama.cpp → vllm" in text_of(result)
