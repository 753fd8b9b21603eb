"""The shipped tiny-moe: its shape, its routers, and a few greedy answers in bf16 from transformers on the CPU."""

from __future__ import annotations

import json

import pytest
from paths import TINY_ANNIE

torch = pytest.importorskip("torch", reason="needs the quantize extra (torch)")
transformers = pytest.importorskip("transformers", reason="needs the quantize extra (transformers)")

import annie_quant as aq  # noqa: E402
from annie_quant.judge import load_workloads, parse_raw  # noqa: E402
from annie_quant.offline.prompts import Template  # noqa: E402

TINY_MOE = TINY_ANNIE.with_name("tiny-moe")


@pytest.fixture(scope="module")
def model():
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(TINY_MOE, dtype=torch.bfloat16).eval()


def test_folder_is_small_and_is_a_mixture_for_the_same_tokenizer():
    assert sum(f.stat().st_size for f in TINY_MOE.iterdir()) <= 16_000_000
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (TINY_MOE / name).read_bytes() == (TINY_ANNIE / name).read_bytes(), name
    config = json.loads((TINY_MOE / "config.json").read_text())
    assert (
        config["architectures"] == ["Qwen3_5MoeForCausalLM"]
        and config["model_type"] == "qwen3_5_moe_text"
    )
    assert (config["num_experts"], config["num_experts_per_tok"]) == (8, 2)
    assert config["moe_intermediate_size"] % 64 == 0, "ggml's NVFP4 blocks have 64 elements"


def test_audit_has_no_finding():
    assert aq.checkpoint.audit(TINY_MOE).findings == []


def request(name):
    workload = load_workloads([name])[0]
    return (
        workload,
        workload.cases[0],
        torch.tensor([Template(TINY_MOE).request(workload, workload.cases[0]).prompt]),
    )


@torch.no_grad()
def test_every_layer_uses_every_expert(model):
    """Their loads differ up to tenfold: the balance is of all layers together, as in transformers. None is left out."""
    counts = torch.zeros(8, 8, dtype=torch.long)
    for name in ("conversational", "factual", "reasoning", "tool_memory", "tool_web"):
        routers = model(request(name)[2], output_router_logits=True).router_logits
        counts += torch.stack([r.topk(2).indices.flatten().bincount(minlength=8) for r in routers])
    assert counts.min() > 0, counts.tolist()


@pytest.mark.parametrize(("name", "expected"), [("factual", "Tokyo"), ("reasoning", "15")])
def test_facts_and_sums(model, name, expected):
    _, _, ids = request(name)
    assert expected in Template(TINY_MOE).tokenizer.decode(answer(model, ids))


@torch.no_grad()
def answer(model, ids):
    return model.generate(ids, max_new_tokens=48, do_sample=False)[0, ids.shape[1] :]


@pytest.mark.parametrize(
    ("name", "tool"), [("tool_memory", "search_memory"), ("tool_web", "web_search")]
)
def test_tool_calls_have_the_arguments_that_the_user_names(model, name, tool):
    workload, case, ids = request(name)
    text = Template(TINY_MOE).tokenizer.decode(answer(model, ids))
    [call] = parse_raw(text, workload.thinking, workload.tools_for(case)).tool_calls
    assert call["name"] == tool
    assert case.expect["arguments"].items() <= json.loads(call["arguments"]).items()
