"""An MTP head and the prediction of its drafts: against transformers' own layer, a server's loop, and known answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip(
    "torch", reason="the runtime needs torch: pip install annie-quant[quantize]"
)
pytest.importorskip(
    "transformers", reason="the runtime needs transformers: pip install annie-quant[quantize]"
)

from runtime_models import save_mixture, save_reference, single_names  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from annie_quant import offline, quantize, runtime  # noqa: E402
from annie_quant.checkpoint import ModelFolder  # noqa: E402
from annie_quant.judge import Case, Workload  # noqa: E402
from annie_quant.offline import draft_diagnosis  # noqa: E402
from annie_quant.offline.draft_head import DraftHead, DraftInputs  # noqa: E402
from annie_quant.offline.draft_prediction import (  # noqa: E402
    predict_drafts,
    predictions,
    right_drafts,
    simulate,
    spread_answers,
)
from annie_quant.offline.engine import Engine  # noqa: E402
from annie_quant.offline.hidden_states import DraftedAnswer, answer_states  # noqa: E402

ZERO = (
    "o_proj.weight",
    "out_proj.weight",
    "down_proj.weight",
    "experts.down_proj",
)  # outputs of a layer's parts


def with_head(source: Path, folder: Path, fc: str, bigram: bool) -> Path:
    """Copy a model and give it an MTP head whose layer is its attention layer 3.

    fc: what the head passes on: "embedding", "hidden", "nothing" or "both" (random). bigram: the model's and the head's layers
    add nothing, so that the next token depends on the last one alone; a head that passes the embedding on is then perfect.
    """
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    h = tensors["model.norm.weight"].shape[0]
    if bigram:
        tensors |= {n: torch.zeros_like(t) for n, t in tensors.items() if n.endswith(ZERO)}
        generator = torch.Generator().manual_seed(5)
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = torch.randn(tensors[name].shape, generator=generator).bfloat16()
    layer = {n: t for n, t in tensors.items() if n.startswith("model.layers.3.")}
    tensors |= {n.replace("model.layers.3.", "mtp.layers.0."): t.clone() for n, t in layer.items()}
    eye, zero = torch.eye(h), torch.zeros(h, h)
    halves = {"embedding": (eye, zero), "hidden": (zero, eye), "nothing": (zero, zero)}
    random = tuple(torch.randn(2, h, h, generator=torch.Generator().manual_seed(1)) / h**0.5)
    tensors["mtp.fc.weight"] = torch.cat(halves.get(fc, random), 1).bfloat16()
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{name}.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}))
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("heads")
    save_reference(home / "dense")
    save_mixture(home / "mixture")
    return home


def served_drafts(model: Any, fc: Any, ids: Any, t: int, steps: int) -> list[Any]:
    """Return the draft logits of each step after position t, as a server computes them one after the other.

    Its sequence is that of all verified pairs, then of the head's own states. The layer is the model's layer 3, and the norms are
    copies of the model's last one. transformers computes it with eager attention and an explicit mask.
    """
    text = model.model
    hidden = text(ids[None]).last_hidden_state[0, : t + 1]
    model.config._attn_implementation = "eager"
    tokens = ids[1 : t + 2]
    logits = []
    for step in range(1, steps + 1):
        both = torch.cat([text.norm(text.embed_tokens(tokens)), text.norm(hidden)], -1)
        x = (both @ fc.T)[None]
        n = len(tokens)
        mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
        positions = text.rotary_emb(x, torch.arange(n)[None])
        x = text.layers[3](x, position_embeddings=positions, attention_mask=mask)
        state = text.norm((x[0] if isinstance(x, tuple) else x)[:, -1])
        hidden = torch.cat([hidden, state.reshape(1, -1)])
        tokens = torch.cat([tokens, ids[t + 1 + step : t + 2 + step]])
        logits.append(model.lm_head(state).flatten())
    model.config._attn_implementation = "sdpa"
    return logits


@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_the_head_computes_what_a_server_computes_step_by_step(
    home: Path, tmp_path: Path, kind: str
) -> None:
    folder = with_head(home / kind, tmp_path / "model", "both", bigram=False)
    model = offline.load(folder, dtype=torch.float32)
    ids = torch.randint(3, 200, (12,), generator=torch.Generator().manual_seed(2))
    fc = load_file(folder / "model.safetensors")["mtp.fc.weight"].float()
    head = DraftHead(ModelFolder(folder), model)
    with torch.inference_mode():
        hidden = model.model(ids[None]).last_hidden_state
        prefix = DraftInputs(hidden[:, 3:8], ids[None, 4:], 2, hidden[0, :3], ids[1:4])
        for inputs, begin in ((DraftInputs(hidden[:, :8], ids[None, 1:], 5), 0), (prefix, 3)):
            states = head(inputs, 3)
            for t in (5, 6, 7):
                for step, expected in enumerate(served_drafts(model, fc, ids, t, 3)):
                    ours = model.lm_head(states[step])[0, t - begin - inputs.first]
                    assert float((ours - expected).abs().max()) < 1e-4 * float(expected.abs().max())


def test_shared_prefixes_do_not_change_which_drafts_are_right(home: Path, tmp_path: Path) -> None:
    """Three answers after one prompt, and one after another: as each alone, and by a server's loop."""
    folder = with_head(home / "dense", tmp_path / "model", "embedding", bigram=False)
    model = offline.load(folder, dtype=torch.float32)
    engine = Engine(model)
    head = DraftHead(ModelFolder(folder), model)
    generator = torch.Generator().manual_seed(3)
    prefix = torch.randint(3, 199, (600,), generator=generator).tolist()
    prompts = [prefix + [7 + i] * (i + 1) for i in range(3)] + [[199, 8, 7]]
    answers = []
    for prompt in prompts:
        tokens: list[int] = []
        while len(tokens) < 8:
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *tokens]])).logits
            tokens.append(int(logits[0, -1].argmax()))
        answers.append(DraftedAnswer("x", prompt, tokens))
    together: dict[int, list[int]] = {}
    shared = set()
    for states in answer_states(engine, answers):
        shared.add(len(states.prefix_ids))
        together |= zip(states.rows, right_drafts(engine, head, states, 3), strict=True)
    assert max(shared) == 600
    fc = load_file(folder / "model.safetensors")["mtp.fc.weight"].float()
    for i, answer in enumerate(answers):
        (alone,) = answer_states(engine, [answer])
        (run,) = right_drafts(engine, head, alone, 3)
        assert together[i] == run
        ids = torch.tensor(answer.tokens)
        for at in (0, 3):
            with torch.inference_mode():
                drafts = served_drafts(model, fc, ids, len(answer.prompt) + at - 1, 3)
            right = [int(d.argmax()) == answer.answer[at + 1 + k] for k, d in enumerate(drafts)]
            assert run[at] == [*right, False].index(False)


def test_steps_are_those_of_a_server_that_goes_on_after_the_first_wrong_draft() -> None:
    """Drafts 1 and 2 are right after the first token, then none, then one."""
    steps = simulate([2, 9, 9, 0, 1, 0, 0], 2)
    assert [tuple(step) for step in steps] == [(2, 2, 3), (2, 0, 1), (1, 1, 2)]
    (row,) = predictions(["x"], [[2, 9, 9, 0, 1, 0, 0]], 2).values()
    two = row.of(2)
    assert two.tokens_per_step.value == 2
    assert [share.value for share in two.accepted] == pytest.approx([2 / 3, 1 / 2])


def test_drafts_of_the_last_token_and_after_it_do_not_count() -> None:
    """All drafts are right: the last step of six tokens after the first has two left, of which the last one does not count."""
    steps = simulate([6, 5, 4, 3, 2, 1, 0], 3)
    assert [tuple(step) for step in steps] == [(3, 3, 4), (1, 1, 2)]


@pytest.mark.parametrize(("fc", "share"), [("embedding", 1.0), ("hidden", 0.1), ("nothing", 0.1)])
def test_acceptance_of_heads_with_known_drafts(
    home: Path, tmp_path: Path, fc: str, share: float
) -> None:
    """In a bigram model a head that reads the last token drafts every token; one that reads the state before it, none."""
    folder = with_head(home / "dense", tmp_path / "model", fc, bigram=True)
    model = offline.load(folder, dtype=torch.float32)
    answers = []
    for start in range(7, 57, 10):
        prompt, answer = [start, start + 1, start + 2], []
        for _ in range(12):
            with torch.inference_mode():
                answer.append(int(model(torch.tensor([[*prompt, *answer]])).logits[0, -1].argmax()))
        if len(set(answer)) == len(
            answer
        ):  # without a cycle, so that the token before is never the right draft
            answers.append(DraftedAnswer("chains", prompt, answer))
    assert len(answers) > 1
    figures = predict_drafts(Engine(model), ModelFolder(folder), answers)["chains"]
    assert figures.prompts == len(answers)
    first = figures.of(1).accepted[0]
    assert first.value == 1 if share == 1 else first.value <= share
    assert first.low <= first.value <= first.high
    steps = figures.of(1).steps
    assert steps == 6 * len(answers) if share == 1 else steps > 10 * len(answers)


def test_a_checkpoint_without_a_head_has_no_figures(home: Path) -> None:
    model = offline.load(home / "dense", dtype=torch.float32)
    assert (
        predict_drafts(
            Engine(model), ModelFolder(home / "dense"), [DraftedAnswer("x", [1, 2], [3, 4])]
        )
        == {}
    )


def test_answers_are_spread_and_bounded() -> None:
    answers = [DraftedAnswer(w, [1], [i] * k) for w in "ab" for i in range(100) for k in (1, 2)]
    chosen = spread_answers(answers)
    assert [sum(a.kind == w for a in chosen) for w in "ab"] == [64, 64]
    assert all(len(a.answer) == 2 for a in chosen) and max(a.answer[0] for a in chosen) > 90


def workload() -> Workload:
    cases = tuple(
        Case(f"c{i}", ({"role": "user", "content": f"What is {i} and {i + 3}?"},)) for i in range(2)
    )
    return Workload(
        "sums", "", None, "Be brief.", None, False, 8, 0, ("non_empty", "no_markdown"), cases
    )


@pytest.mark.parametrize("merged", [True, False])
def test_the_evaluation_of_a_mixture_reports_acceptance(
    home: Path, tmp_path: Path, merged: bool
) -> None:
    """The whole evaluation of a mixture: gates, KL, ensemble and drafts; experts merged or single in the checkpoint."""
    source = with_head(home / "mixture", tmp_path / "bf16", "embedding", bigram=True)
    if not merged:
        source = single_names(source, tmp_path / "single")
    quantize.run("direct", source, tmp_path / "nvfp4")
    arguments = {"workloads": [workload()], "numerics": ["w4a16"], "cache": tmp_path / "cache"}
    result = runtime.evaluate(tmp_path / "nvfp4", source, **arguments, with_ensemble=merged)
    side = result["numerics"]["w4a16"]
    assert side["kl"]["n_tokens"] > 0 and set(side["gates"]) >= {"non_empty", "no_markdown"}
    for drafts in (side["drafts"]["sums"], result["reference_drafts"]["sums"]):
        assert drafts["by_drafts"][0]["steps"] > 0
        assert drafts["by_drafts"][0]["accepted"][0]["value"] == 1
    assert bool(result.get("members")) == merged


@pytest.mark.parametrize("fault", ["", "exchanged", "random"])
def test_a_fault_of_a_checkpoints_own_head_is_named(home: Path, tmp_path: Path, fault: str) -> None:
    """A head that reads the embedding is perfect in a bigram model; with its halves exchanged it reads the hidden state."""
    head = {"": "embedding", "exchanged": "hidden", "random": "both"}[fault]
    folder = with_head(home / "dense", tmp_path / "model", head, bigram=True)
    model = offline.load(folder, dtype=torch.float32)
    answers = []
    for start in range(7, 57, 10):
        answer: list[int] = []
        for _ in range(8):
            with torch.inference_mode():
                logits = model(torch.tensor([[start, start + 1, *answer]])).logits
            answer.append(int(logits[0, -1].argmax()))
        answers.append(DraftedAnswer("chains", [start, start + 1], answer))
    cause = {"": "", "exchanged": draft_diagnosis.EXCHANGED, "random": draft_diagnosis.RANDOM}
    named = draft_diagnosis.fault_of_checkpoint(Engine(model), ModelFolder(folder), answers)
    assert named == cause[fault]
