"""Acceptance of an MTP head's drafts: against models whose answers are known, and transformers' own layer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

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
from annie_quant.offline.decoding import Drafted, DraftHead, draft_acceptance, spread_answers  # noqa: E402
from annie_quant.offline.engine import Engine  # noqa: E402

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


@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_the_head_computes_what_transformers_layer_computes(
    home: Path, tmp_path: Path, kind: str
) -> None:
    """Its layer is the model's own layer 3: transformers computes it with eager attention and an explicit mask."""
    folder = with_head(home / kind, tmp_path / "model", "both", bigram=False)
    model = offline.load(folder, dtype=torch.float32)
    ids = torch.randint(3, 200, (12,), generator=torch.Generator().manual_seed(2))
    text, n = model.model, len(ids) - 1
    with torch.inference_mode():
        hidden = text(ids[None]).last_hidden_state[0]
        ours = DraftHead(ModelFolder(folder), model)(hidden[:-1], ids[1:])
        norm = text.norm  # the head's norms are copies of it
        both = torch.cat([norm(text.embed_tokens(ids[1:])), norm(hidden[:-1])], -1)
        x = (both @ load_file(folder / "model.safetensors")["mtp.fc.weight"].float().T)[None]
        mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
        model.config._attn_implementation = "eager"
        positions = text.rotary_emb(x, torch.arange(n)[None])
        x = text.layers[3](x, position_embeddings=positions, attention_mask=mask)
        expected = model.lm_head(norm(x[0] if isinstance(x, tuple) else x))[0]
    assert float((ours - expected).abs().max()) < 1e-4 * float(expected.abs().max())


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
            answers.append(Drafted("chains", prompt, answer))
    assert len(answers) > 1
    figures = draft_acceptance(Engine(model), ModelFolder(folder), answers)["chains"]
    assert figures.n == 12 * len(answers)
    assert figures.accepted == figures.n if share == 1 else figures.accepted <= share * figures.n
    assert figures.low <= figures.accepted / figures.n <= figures.high


def test_a_checkpoint_without_a_head_has_no_figures(home: Path) -> None:
    model = offline.load(home / "dense", dtype=torch.float32)
    assert (
        draft_acceptance(Engine(model), ModelFolder(home / "dense"), [Drafted("x", [1, 2], [3, 4])])
        == {}
    )


def test_answers_are_spread_and_bounded() -> None:
    answers = [Drafted(w, [1], [i] * k) for w in "ab" for i in range(100) for k in (1, 2)]
    chosen = spread_answers(answers)
    assert [sum(a.workload == w for a in chosen) for w in "ab"] == [32, 32]
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
    assert (
        side["drafts"]["sums"]["n"] > 0
        and side["drafts"]["sums"]["accepted"] == side["drafts"]["sums"]["n"]
    )
    assert result["reference_drafts"]["sums"]["accepted"] == result["reference_drafts"]["sums"]["n"]
    assert bool(result.get("members")) == merged
