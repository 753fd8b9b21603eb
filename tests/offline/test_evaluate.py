"""evaluate() as a whole: its result, its cache on disk, and that planted faults change the figures."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip(
    "torch", reason="the runtime needs torch: pip install annie-quant[quantize]"
)
pytest.importorskip(
    "transformers", reason="the runtime needs transformers: pip install annie-quant[quantize]"
)
pytest.importorskip(
    "modelopt", reason="ModelOpt makes the checkpoints: pip install annie-quant[quantize]"
)
pytest.importorskip("annie_quant.nvfp4", reason="the runtime needs the codec")

from paths import TINY_ANNIE  # noqa: E402
from runtime_models import export_nvfp4, save_reference  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from annie_quant import nvfp4, runtime  # noqa: E402
from annie_quant.checkpoint.shards import model_sha256  # noqa: E402
from annie_quant.core.errors import UsageError  # noqa: E402
from annie_quant.core.progress import Lines  # noqa: E402
from annie_quant.data.rows import read_conversations  # noqa: E402
from annie_quant.judge import Case, Workload  # noqa: E402
from annie_quant.offline.answers import default_cache  # noqa: E402
from annie_quant.offline.decoding import Completion  # noqa: E402
from annie_quant.offline.evaluation import evaluate_pair  # noqa: E402
from annie_quant.offline.pair import EvaluationJob, open_pair  # noqa: E402
from annie_quant.offline.prompts import CLASSES, Template, conversation_answers  # noqa: E402

TOOL = {"type": "function", "function": {"name": "search_memory", "parameters": {
    "type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}}}  # fmt: skip


def workloads(n: int = 4, limit: int = 10, temperature: float = 0) -> list[Workload]:
    cases = tuple(
        Case(f"c{i}", ({"role": "user", "content": f"What is {i} and {i + 3}?"},)) for i in range(n)
    )
    talk = (Case("t", (), ("Hello there!", "What did I say?")),)
    gates = ("non_empty", "no_markdown", "thinking_leak")
    return [
        Workload("plain", "", None, "Be brief.", None, False, limit, temperature, gates, cases),
        Workload("talk", "", None, None, (TOOL,), False, limit, 0, gates, talk),
    ]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reference(tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def naive(reference: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_nvfp4(reference, tmp_path_factory.mktemp("naive"))


@pytest.fixture(scope="module")
def result(reference: Path, naive: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    messages: list[str] = []
    cache = tmp_path_factory.mktemp("cache")
    result = runtime.evaluate(
        naive, reference, workloads(), cache=cache, progress=Lines(messages.append)
    )
    assert any("checking answers" in m for m in messages)
    return result


def test_the_result_has_all_parts(result: dict) -> None:
    json.dumps(result)
    assert set(result["numerics"]) == {"w4a4", "w4a16"}
    assert result["n_answers"] == 6 and result["dtype"] == "float32"
    for side in result["numerics"].values():
        assert side["gates"].keys() == result["reference_gates"].keys()
        assert side["gates"]["non_empty"]["n"] == 6
        assert side["kl"]["mean"] > 0 and side["kl"]["n_tokens"] > 0
        assert (
            sum(c["n_tokens"] for c in side["kl"]["by_category"].values()) == side["kl"]["n_tokens"]
        )
        assert sum(c["n_tokens"] for c in side["kl"]["by_class"].values()) == side["kl"]["n_tokens"]
        assert set(side["kl"]["by_class"]) <= set(CLASSES)
        # Of each answer its first token.
        assert (
            side["same_answers"]["n"]
            <= side["kl"]["decisions"]["n_tokens"]
            < side["kl"]["n_tokens"]
        )
        assert side["same_answers"]["n"] == 6
        assert len(side["cases"]) == 6 - side["same_answers"]["same"]
        for gate, row in side["paired"].items():
            before, after = result["reference_gates"][gate]["passes"], side["gates"][gate]["passes"]
            assert after - before == row["won"] - row["lost"] and 0 <= row["p"] <= 1


def test_activations_cost_more_than_weights_alone(result: dict) -> None:
    assert (
        result["numerics"]["w4a4"]["kl"]["mean"] > 1.1 * result["numerics"]["w4a16"]["kl"]["mean"]
    )


def test_the_reference_against_itself_differs_nowhere(reference: Path, tmp_path: Path) -> None:
    side = runtime.evaluate(reference, reference, workloads(), cache=tmp_path)["numerics"]["bf16"]
    assert side["kl"]["max"] < 1e-9 and side["kl"]["flips"] == 0
    assert side["same_answers"] == {"n": 6, "same": 6} and side["cases"] == []
    assert side["perplexity"] == pytest.approx(side["perplexity_reference"], rel=1e-9)


def test_the_references_answers_are_cached_and_a_killed_run_resumes(
    reference: Path, naive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from annie_quant.offline import answers as module
    from annie_quant.offline.linears import NVFP4Linear

    generated: list[int] = []
    plain = module.generate

    def counted(engine, prompts, *more, **named):
        if not any(
            isinstance(layer, NVFP4Linear) for layer in engine.model.modules()
        ):  # the reference's
            generated.append(len(prompts))
        return plain(engine, prompts, *more, **named)

    monkeypatch.setattr(module, "generate", counted)
    first = runtime.evaluate(
        naive, reference, workloads(), ["w4a16"], cache=tmp_path, with_ensemble=False
    )
    assert sum(generated) == 6
    generated.clear()
    again = runtime.evaluate(
        naive, reference, workloads(), ["w4a16"], cache=tmp_path, with_ensemble=False
    )
    assert generated == []
    (cache,) = tmp_path.glob("answers-*-float32.jsonl")
    lines = cache.read_text().splitlines(keepends=True)
    cache.write_text(
        "".join(lines[:3]) + lines[3][: len(lines[3]) // 2]
    )  # killed in the middle of a line
    resumed = runtime.evaluate(
        naive, reference, workloads(), ["w4a16"], cache=tmp_path, with_ensemble=False
    )
    assert sum(generated) == 3
    for other in (again, resumed):
        for r in (first, other):
            r.pop("seconds", None)
            r["numerics"]["w4a16"].pop("seconds", None)
        assert other == first


def test_the_cache_is_in_the_users_cache_folder(
    reference: Path, naive: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "reference"
    shutil.copytree(reference, folder)
    before = sorted(p.name for p in folder.rglob("*"))
    runtime.evaluate(naive, folder, workloads(1, 3), ["w4a16"], with_ensemble=False)
    assert sorted(p.name for p in folder.rglob("*")) == before, (
        "nothing is written into a model's folder"
    )
    assert list((tmp_path / "cache/annie_quant").glob("answers-*.jsonl"))


def test_without_a_writable_cache_folder_a_temporary_one_is_used(
    tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file/below"))
    cache = default_cache()
    assert cache.is_dir() and tmp_path not in cache.parents


def test_one_weight_changes_the_hash(reference: Path, tmp_path: Path) -> None:
    folder = tmp_path / "reference"
    shutil.copytree(reference, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert model_sha256(folder) != model_sha256(reference)


def test_a_change_in_place_anywhere_changes_the_hash(tmp_path: Path) -> None:
    """A file above 256 MB, sparse: its content is hashed in pieces."""
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.truncate(257 << 20)
    before = model_sha256(tmp_path)
    assert model_sha256(tmp_path) == before
    with path.open("r+b") as file:
        file.seek((128 << 20) + 300_000)
        file.write(b"changed")
    assert model_sha256(tmp_path) != before


def divergence(folder: Path, reference: Path, cache: Path, numerics: str = "w4a16") -> float:
    result = runtime.evaluate(
        folder, reference, workloads(), [numerics], cache=cache, with_ensemble=False
    )
    return result["numerics"][numerics]["kl"]["mean"]


def edited(source: Path, target: Path, change) -> Path:
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def fold(tensors: dict, plus_one: bool) -> None:
    """Move a factor of 1.5 from gate and up into the norm before them, for a norm that computes (1 + w) or w."""
    for layer in range(4):
        norm = f"model.layers.{layer}.post_attention_layernorm.weight"
        w = tensors[norm].float()
        tensors[norm] = ((1 + w) * 1.5 - 1 if plus_one else w * 1.5).bfloat16()
        for part in ("gate_proj", "up_proj"):
            tensors[f"model.layers.{layer}.mlp.{part}.weight_scale_2"] /= 1.5


def swap_gate_and_up(tensors: dict) -> None:
    for layer in range(4):
        gate, up = (f"model.layers.{layer}.mlp.{p}.weight_scale" for p in ("gate_proj", "up_proj"))
        tensors[gate], tensors[up] = tensors[up].clone(), tensors[gate].clone()


def quantize_head(tensors: dict) -> None:
    packed = nvfp4.pack(tensors["lm_head.weight"].float().numpy())
    tensors["lm_head.weight"] = torch.from_numpy(packed.codes)
    tensors["lm_head.weight_scale"] = torch.from_numpy(packed.block_scale.view(np.uint8)).view(
        torch.float8_e4m3fn
    )
    tensors["lm_head.weight_scale_2"] = torch.tensor(packed.tensor_scale, dtype=torch.float32)


def test_planted_faults_raise_the_divergence_and_a_correct_fold_does_not(
    reference: Path, naive: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    sound = divergence(naive, reference, cache)
    right = divergence(edited(naive, tmp_path / "right", lambda t: fold(t, True)), reference, cache)
    wrong = divergence(
        edited(naive, tmp_path / "wrong", lambda t: fold(t, False)), reference, cache
    )
    swapped = divergence(edited(naive, tmp_path / "swapped", swap_gate_and_up), reference, cache)
    head = edited(naive, tmp_path / "head", quantize_head)
    assert right == pytest.approx(sound, rel=0.1)
    assert wrong > 1.5 * sound
    assert swapped > 1.5 * sound
    result = runtime.evaluate(
        head, reference, workloads(), ["w4a16"], cache=cache, with_ensemble=False
    )
    assert any("lm_head is quantized" in note for note in result["notes"])
    assert result["numerics"]["w4a16"]["kl"]["mean"] > sound


def test_invalid_requests_are_refused(reference: Path, naive: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="greedy"):
        runtime.evaluate(naive, reference, workloads(temperature=0.7), cache=tmp_path)
    with pytest.raises(UsageError, match="bf16 checkpoint"):
        runtime.evaluate(naive, naive, workloads(1, 2), cache=tmp_path)
    weights_only = edited(
        naive, tmp_path / "w", lambda t: [t.pop(k) for k in list(t) if k.endswith("input_scale")]
    )
    result = runtime.evaluate(
        weights_only, reference, workloads(1, 2), cache=tmp_path, with_ensemble=False
    )
    assert list(result["numerics"]) == ["w4a16"] and "w4a4 does not apply" in result["notes"][0]
    with pytest.raises(UsageError, match="does not support w4a4"):
        runtime.evaluate(weights_only, reference, workloads(1, 2), ["w4a4"], cache=tmp_path)


def test_conversations_are_scored_message_by_message(
    reference: Path, naive: Path, tmp_path: Path
) -> None:
    call = {
        "type": "function",
        "function": {"name": "search_memory", "arguments": '{"query": "cats"}'},
    }
    rows = [
        {"id": "a", "category": "memory", "tools": [TOOL], "thinking": False, "messages": [
            {"role": "user", "content": "What did I say about cats?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "They sleep."},
            {"role": "assistant", "content": "That they sleep."}]},
        {"id": "b", "category": "greeting", "messages": [
            {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello!"}]},
    ]  # fmt: skip
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    template = Template(reference)
    answers = conversation_answers(template, read_conversations(path))
    texts = [template.tokenizer.decode(list(a.target)) for a in answers]
    assert [a.category for a in answers] == ["memory", "memory", "greeting"]
    assert (
        "search_memory" in texts[0] and "<tool_call>" in texts[0] and "That they sleep." in texts[1]
    )
    assert texts[2] == "Hello!" + template.tokenizer.decode([answers[2].target[-1]])
    assert all(a.target[-1] in template.end_tokens for a in answers)
    kinds = template.classes(answers[0].target, False)
    assert CLASSES[kinds[0]] == "tool_markup" and CLASSES[kinds[-1]] == "end_of_turn"
    assert {CLASSES[k] for k in template.classes(answers[2].target, False)} == {
        "content",
        "end_of_turn",
    }
    result = runtime.evaluate(
        naive,
        reference,
        workloads(1, 3),
        ["w4a16"],
        conversations=path,
        cache=tmp_path / "c",
        with_ensemble=False,
    )
    kl = result["numerics"]["w4a16"]["kl_conversations"]
    assert kl["n_tokens"] == sum(len(a.target) for a in answers)
    assert set(kl["by_category"]) == {"memory", "greeting"}


def test_thinking_tokens_have_their_own_class(reference: Path) -> None:
    template = Template(reference)
    ids = [*template.ids("Let me see.\n</think>\n\nYes."), template.end_tokens[0]]
    names = [CLASSES[k] for k in template.classes(ids, True)]
    assert names[0] == "thinking" and names[-1] == "end_of_turn" and "content" in names
    assert names.index("content") > names.index("thinking")


def test_a_finished_answer_ends_with_the_token_that_ends_a_turn(tmp_path: Path) -> None:
    """generation_config.json lists two end tokens, and the model chooses <|im_end|>, whose number is the larger one."""
    template = Template(TINY_ANNIE)
    assert len(template.end_tokens) == 2
    assert template.tokenizer.decode(template.target(Completion([5], True))[1:]) == "<|im_end|>"
    plain = workloads(1, 100)[:1]
    result = runtime.evaluate(TINY_ANNIE, TINY_ANNIE, plain, cache=tmp_path, with_ensemble=False)
    end = result["numerics"]["bf16"]["kl"]["by_class"]["end_of_turn"]
    assert end["n_tokens"] > 0 and 1 <= end["perplexity_reference"] < 2


def test_a_case_s_own_token_limit_holds_offline_too(
    reference: Path, naive: Path, tmp_path: Path
) -> None:
    """The benchmark's requests have it; verification is exact under it, and the model is random, so it does not stop."""
    plain = workloads(2, 10)[0]
    mixed = replace(plain, cases=(replace(plain.cases[0], max_tokens=3), plain.cases[1]))
    job = EvaluationJob(
        checkpoint=naive,
        reference=reference,
        numerics=["w4a4"],
        ensemble=False,
        cache=tmp_path,
        dtype="float32",
    )
    with open_pair(job) as pair:
        answered = pair.reference.answer([mixed])
        assert all(len(c.tokens) <= limit for (_, c), limit in zip(answered, (3, 10), strict=True))
        assert len(answered[0].completion.tokens) == 3 and len(answered[1].completion.tokens) > 3
        result = evaluate_pair(pair, [mixed])
    assert result.numerics["w4a4"].kl.n_tokens == sum(
        len(pair.template.target(c)) for _, c in answered
    )
    assert all(
        case.agreed_tokens <= 3
        for case in result.numerics["w4a4"].cases
        if case.case.endswith("c0")
    )


def test_an_unknown_dtype_is_named(reference: Path, naive: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'fp16'"):
        runtime.evaluate(naive, reference, workloads(), dtype="fp16", cache=tmp_path / "cache")


@pytest.mark.parametrize("line", ["{", "[1, 2"])
def test_a_broken_conversations_file_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n' + line + "\n")
    with pytest.raises(UsageError, match="line 2"):
        read_conversations(path)
    with pytest.raises(UsageError, match="does not exist"):
        read_conversations(tmp_path / "none.jsonl")
