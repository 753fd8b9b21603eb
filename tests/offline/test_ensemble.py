"""The ensemble of arithmetics: its members, its rule of certain answers, ties, and the dtype that both devices get."""

from collections.abc import Iterator, Sequence
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

from runtime_models import export_nvfp4, save_reference  # noqa: E402

from annie_quant.documents import Evaluation  # noqa: E402
from annie_quant.judge import Case, Workload  # noqa: E402
from annie_quant.judge.gates import REFERENCE_GATES  # noqa: E402
from annie_quant.offline import (  # noqa: E402
    ensemble,
    linears,
    pair,
)
from annie_quant.offline.answers import FirstDifference, TokenChoices, choices_of  # noqa: E402
from annie_quant.offline.emulation import USUAL, SumOrder, emulate  # noqa: E402
from annie_quant.offline.engine import Engine, Row  # noqa: E402
from annie_quant.offline.evaluation import evaluate_pair  # noqa: E402
from annie_quant.offline.linears import nvfp4_linears  # noqa: E402
from annie_quant.offline.pair import EvaluationJob, ModelPair, open_pair  # noqa: E402
from annie_quant.offline.profiles import find_profile  # noqa: E402


def workloads(n: int = 12, limit: int = 8) -> list[Workload]:
    cases = tuple(
        Case(f"c{i}", ({"role": "user", "content": f"What is {i} and {i + 3}?"},)) for i in range(n)
    )
    talk = (Case("t", (), ("Hello there!", "What did I say?")),)
    gates = ("non_empty", "no_markdown", "thinking_leak")
    return [
        Workload("plain", "", None, "Be brief.", None, False, limit, 0, gates, cases),
        Workload("talk", "", None, None, None, False, limit, 0, gates, talk),
    ]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    reference = save_reference(tmp_path_factory.mktemp("reference"), layers=2)
    return export_nvfp4(reference, tmp_path_factory.mktemp("naive")), reference


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference's answers, which the tests of this file share."""
    return tmp_path_factory.mktemp("cache")


def evaluated(
    models: tuple[Path, Path], cache: Path, numerics: tuple[str, ...], **more
) -> Evaluation:
    job = EvaluationJob(
        checkpoint=models[0],
        reference=models[1],
        numerics=numerics,
        cache=cache,
        device="cpu",
        **more,
    )
    with open_pair(job) as loaded:
        return evaluate_pair(loaded, workloads())


@pytest.fixture(scope="module")
def two_numerics(models: tuple[Path, Path], cache: Path) -> tuple[Evaluation, set[int]]:
    """An evaluation, and into how many parts the sums were split that scored answers in it."""
    parts, scores = set(), Engine.scores

    def recorded(self: Engine, rows: Sequence[Row]) -> Iterator[tuple[int, torch.Tensor]]:
        parts.update(linear.parts for linear in nvfp4_linears(self.model).values())
        return scores(self, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "scores", recorded)
        return evaluated(models, cache, ("w4a4", "vllm-cutlass")), parts


def test_members_and_their_outcomes(two_numerics: tuple[Evaluation, set[int]]) -> None:
    result, _ = two_numerics
    assert list(result.numerics) == ["w4a4", "vllm-cutlass"]
    suffixes = {"w4a4": ("bf16", "perm1", "cut16"), "vllm-cutlass": ("float32", "perm1", "cut16")}
    assert list(result.members) == [f"{name}+{s}" for name, own in suffixes.items() for s in own]
    for side in (result.numerics | result.members).values():
        for gate, row in side.paired.items():
            before = result.floor_outcomes if gate in REFERENCE_GATES else result.reference_outcomes
            pairs = zip(
                result.reference_outcomes[gate], before[gate], side.outcomes[gate], strict=True
            )
            changes = [(old == "1", new == "1") for counts, old, new in pairs if counts in "01"]
            assert (len(changes), changes.count((True, False)), changes.count((False, True))) == (
                row.n,
                row.lost,
                row.won,
            )
    assert len(result.prompts["non_empty"]) == 14 and result.prompts["non_empty"][-1] == "talk/t/2"
    for name, figures in result.ensemble.items():
        assert figures.n == 14 and figures.noise > 0
        assert result.members[f"{name}+perm1"].n_computed == figures.n_uncertain
        assert result.members[f"{name}+{suffixes[name][0]}"].n_computed == 14
    # A bfloat16 stream rounds DeltaNet's beta in some servers and not in others: both are computed.
    assert "beta in bfloat16" in result.members["w4a4+bf16"].arithmetic
    assert "beta" not in result.numerics["vllm-cutlass"].arithmetic
    assert "beta in bfloat16" in result.members["vllm-cutlass+cut16"].arithmetic
    assert result.members["vllm-cutlass+float32"].outcomes == result.numerics["w4a4"].outcomes
    assert "float32" in result.numerics["w4a4"].arithmetic


def test_without_the_ensemble_there_are_no_members(models: tuple[Path, Path], cache: Path) -> None:
    result = evaluated(models, cache, ("w4a16",), ensemble=False)
    assert not result.members and not result.ensemble and result.numerics["w4a16"].outcomes


def test_certain_answers_are_those_that_no_member_changes(
    models: tuple[Path, Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    itself = (models[1], models[1])  # a random model's NVFP4 answers all differ, its own agree
    usual = evaluated(itself, cache, ("w4a16",))
    monkeypatch.setattr(ensemble, "MARGIN_FACTOR", 1e9)
    everything = evaluated(itself, cache, ("w4a16",))
    assert list(usual.numerics) == ["bf16"] and 0 < usual.ensemble["bf16"].n_uncertain < 14
    for name, member in everything.members.items():
        assert member.n_computed == 14
        assert (
            member.outcomes == usual.members[name].outcomes
            and member.n_changed == usual.members[name].n_changed
        )


@pytest.mark.parametrize("k", [128, 256, 512, 768, 1024])
def test_a_split_sum_is_another_sum(k: int) -> None:
    """Two halves of K = 256 gave the product's own bits, so cut16 changed nothing in a model of that width."""
    generator = torch.Generator().manual_seed(k)
    x, weight = torch.randn(64, k, generator=generator), torch.randn(96, k, generator=generator)
    usual, split = (
        torch.nn.functional.linear(x, weight),
        linears.sum_of_parts(x, weight, ensemble.SPLIT_SUMS.parts),
    )
    assert (usual != split).float().mean() > 1 / 3
    torch.testing.assert_close(usual, split, rtol=1e-4, atol=1e-4)


def test_the_small_batches_decode_from_the_prompt_and_score_nothing(
    two_numerics: tuple[Evaluation, set[int]],
) -> None:
    """cut16 used to score the reference's answers first, of which only the choice of the first token was used."""
    result, parts = two_numerics
    assert result.members["w4a4+cut16"].n_computed > 0
    assert parts and ensemble.SPLIT_SUMS.parts not in parts


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return request.param


def logits_of(pair: ModelPair, order: SumOrder, name: str) -> list[torch.Tensor]:
    answered = pair.reference.answer(workloads())
    rows = [Row(s.prompt, s.target) for s in pair.scored(answered)]
    profile = find_profile(name if nvfp4_linears(pair.model) else "bf16")
    with emulate(pair.model, profile, order):
        return [
            logits.clone()
            for _, logits in sorted(pair.engine.scores(rows), key=lambda item: item[0])
        ]


@pytest.mark.parametrize("weights", ["packed", "float32"])
@pytest.mark.parametrize("order", [ensemble.PERMUTED, ensemble.SPLIT_SUMS], ids=["perm1", "cut16"])
def test_every_perturbation_changes_low_bits_and_no_more(
    models: tuple[Path, Path], cache: Path, order: SumOrder, weights: str, device: str
) -> None:
    """cut16 used to be a smaller batch alone, which changes nothing where a row's product does not depend on its neighbours."""
    for folder, profile in ((models[1], "bf16"), (models[0], "float32"), (models[0], "w4a4")):
        job = EvaluationJob(
            checkpoint=folder, reference=models[1], cache=cache, device=device, dtype="float32"
        )
        with open_pair(job) as pair:
            for linear in nvfp4_linears(pair.model).values():
                linear.set_cache(weights)
            usual, again, other = (logits_of(pair, o, profile) for o in (USUAL, USUAL, order))
            repeated = logits_of(pair, order, profile)
        assert all(torch.equal(a, b) for a, b in zip(usual, again, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(other, repeated, strict=True)), (
            "a perturbation must be deterministic"
        )
        changed = [not torch.equal(a, b) for a, b in zip(usual, other, strict=True)]
        assert all(changed), f"{profile}: {sum(changed)} of {len(changed)} answers' logits change"
        if (
            profile != "w4a4"
        ):  # where activations are rounded to 4 bits, a change of the last bit may become a whole code
            largest = max(float((a - b).abs().max()) for a, b in zip(usual, other, strict=True))
            assert largest < 1e-5 * max(float(a.abs().max()) for a in usual)


def test_a_reordered_model_is_unchanged_afterwards(models: tuple[Path, Path], cache: Path) -> None:
    with open_pair(
        EvaluationJob(checkpoint=models[0], reference=models[1], cache=cache, device="cpu")
    ) as pair:
        before = logits_of(pair, USUAL, "w4a4")
        logits_of(pair, SumOrder(permutation=3, parts=3), "w4a4")
        assert not any("forward" in m.__dict__ for m in pair.model.modules())
        assert all(
            torch.equal(a, b) for a, b in zip(before, logits_of(pair, USUAL, "w4a4"), strict=True)
        )


def test_decoding_token_by_token_gives_the_verified_answers(
    models: tuple[Path, Path], cache: Path
) -> None:
    result = evaluated(models, cache, ("w4a16",))
    assert result.members["w4a16+cut16"].n_computed > 0
    assert result.members["w4a16+cut16"].n_changed <= 1  # of 14: float32 sums in another order


def choices(margins: list[float], difference: FirstDifference | None = None) -> TokenChoices:
    return TokenChoices(
        difference, np.zeros((len(margins), 2), np.int64), np.array(margins, np.float32)
    )


def test_an_answer_is_uncertain_by_margin_or_difference() -> None:
    base = {i: choices([5.0, 4.0]) for i in range(8)}
    other = dict(base)
    assert ensemble.uncertain_answers(base, other, 1.0) == []
    base[0] = choices([5.0, 2.9])
    other[2] = choices([5.0, 4.0], FirstDifference(0, 7))
    base[7] = choices([5.0, 4.0], FirstDifference(1, 7))
    assert ensemble.uncertain_answers(base, other, 1.0) == [0, 2, 7]
    del other[2]
    assert ensemble.uncertain_answers(base, other, 1.0) == [0, 7], (
        "not computed in the second arithmetic"
    )


def test_noise_is_robust_against_a_few_large_changes() -> None:
    rng = np.random.default_rng(0)
    base = {0: choices(list(rng.standard_normal(1000)))}
    changed = base[0].margins + 0.1 * rng.standard_normal(1000).astype(np.float32)
    changed[:20] += 50
    assert ensemble.margin_noise(base, {0: choices(list(changed))}) == pytest.approx(0.1, rel=0.15)
    assert ensemble.margin_noise({}, {}) == 0
    assert ensemble.margin_noise(base | {1: choices([9.0])}, {0: choices(list(changed))}) > 0, (
        "of a sample alone"
    )


def test_equal_logits_give_the_lowest_token() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, 3.0], [2.0, 0.0, 2.0, 1.0, 2.0]])
    [result] = choices_of(logits, [[1, 0]], [4])
    assert (
        result.difference is None
        and result.best.tolist() == [[1, 3], [0, 2]]
        and result.margins.tolist() == [0, 0]
    )
    assert [c.difference for c in choices_of(logits, [[3], [0]], [4])] == [
        FirstDifference(0, 1),
        None,
    ]
    [of_pairs] = choices_of(logits, [[1, 0]], [4], [np.array([[1, 2], [3, 0]])])
    assert of_pairs.margins.tolist() == [2, -1], "the margins of the pairs"


def test_both_devices_compute_in_the_same_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 10**9))
    assert (
        pair.working_dtype([tmp_path], "cuda") == pair.working_dtype([tmp_path], "cpu") == "float32"
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (9000, 10**9))
    assert pair.working_dtype([tmp_path], "cuda") == "bfloat16"
