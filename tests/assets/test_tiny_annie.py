"""The shipped tiny-annie: its folder, tokenizer, chat template, and a few greedy answers in bf16 on the CPU."""

from __future__ import annotations

import json

import pytest
from paths import TINY_ANNIE

torch = pytest.importorskip("torch", reason="needs the quantize extra (torch)")
transformers = pytest.importorskip("transformers", reason="needs the quantize extra (transformers)")

from annie_quant.data import load_persona  # noqa: E402
from annie_quant.judge import load_workloads, parse_raw  # noqa: E402

TALK = [
    {"role": "user", "content": "Hi."},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello."},
    {"role": "user", "content": "Bye."},
]


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(TINY_ANNIE)


@pytest.fixture(scope="module")
def model():
    transformers.logging.set_verbosity_error()
    return transformers.AutoModelForCausalLM.from_pretrained(
        TINY_ANNIE, dtype=torch.bfloat16
    ).eval()


def test_folder_is_small_and_has_the_shape_that_llama_cpp_takes():
    assert sum(f.stat().st_size for f in TINY_ANNIE.iterdir()) <= 16_000_000
    config = json.loads((TINY_ANNIE / "config.json").read_text())
    assert config["model_type"] == "qwen3_5_text" and config["architectures"] == [
        "Qwen3_5ForCausalLM"
    ]
    assert config["linear_key_head_dim"] == config["linear_value_head_dim"]
    assert config["hidden_size"] % 256 == config["intermediate_size"] % 256 == 0
    assert [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"] == [3, 7]
    assert not config["tie_word_embeddings"]


def test_weights_are_bf16_and_finite(model):
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16, name
        assert torch.isfinite(parameter).all(), name


def test_tokenizer_splits_like_qwen_and_decodes_to_the_same_text(tokenizer):
    from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

    steps = json.loads((TINY_ANNIE / "tokenizer.json").read_text())["pre_tokenizer"][
        "pretokenizers"
    ]
    assert steps[0]["pattern"]["Regex"] == PRETOKENIZE_REGEX
    for text in (
        "What is the capital of Japan?",
        "15 + 27\n\n  x",
        "Zażółć gęślą jaźń, 東京 🙂",
        "<think>\n</think> <tool_call>",
    ):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    for mark in (
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
    ):
        assert len(tokenizer(mark)["input_ids"]) == 1
    assert len(tokenizer) <= json.loads((TINY_ANNIE / "config.json").read_text())["vocab_size"]


def test_template_closes_an_empty_think_block_when_thinking_is_off(tokenizer):
    off = tokenizer.apply_chat_template(
        TALK, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    on = tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    assert off.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert on.endswith("<|im_start|>assistant\n<think>\n")
    assert "hm" not in on and "<|im_start|>assistant\nHello.<|im_end|>" in on


def test_template_lists_tools_and_writes_calls_as_xml(tokenizer):
    persona = load_persona("annie")
    call = {
        "type": "function",
        "function": {"name": "web_search", "arguments": {"query": "a fire", "days": 3}},
    }
    messages = [
        {"role": "system", "content": persona.system_prompt},
        {"role": "user", "content": "News?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "none"},
    ]
    text = tokenizer.apply_chat_template(
        messages,
        tools=list(persona.tools),
        tokenize=False,
        enable_thinking=False,
        add_generation_prompt=True,
    )
    head, _, rest = text.partition("<|im_end|>")
    assert head.startswith("<|im_start|>system\n# Tools") and persona.system_prompt in head
    listed = [json.loads(line) for line in head.splitlines() if line.startswith("{")]
    assert [t["function"]["name"] for t in listed] == ["search_memory", "web_search"]
    assert (
        "<tool_call>\n<function=web_search>\n<parameter=query>\na fire\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call><|im_end|>"
    ) in rest
    assert "<|im_start|>user\n<tool_response>\nnone\n</tool_response><|im_end|>" in rest


def test_template_refuses_a_conversation_without_a_user(tokenizer):
    with pytest.raises(Exception, match="user message"):
        tokenizer.apply_chat_template([{"role": "system", "content": "x"}], tokenize=False)


def answer(model, tokenizer, workload, case, limit=48):
    text = tokenizer.apply_chat_template(
        workload.messages(case),
        tools=workload.tools_for(case),
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=workload.thinking,
    )
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        out = model.generate(**ids, max_new_tokens=limit, do_sample=False)
    return parse_raw(
        tokenizer.decode(out[0, ids["input_ids"].shape[1] :]),
        workload.thinking,
        workload.tools_for(case),
    )


def test_greedy_answers_of_bf16(model, tokenizer):
    loads = {w.name: w for w in load_workloads(["factual", "reasoning", "tool_memory", "tool_web"])}
    assert "Tokyo" in answer(model, tokenizer, loads["factual"], loads["factual"].cases[0]).text
    assert "15" in answer(model, tokenizer, loads["reasoning"], loads["reasoning"].cases[0]).text
    for name, tool in (("tool_memory", "search_memory"), ("tool_web", "web_search")):
        calls = answer(model, tokenizer, loads[name], loads[name].cases[0]).tool_calls
        assert [c["name"] for c in calls] == [tool]
