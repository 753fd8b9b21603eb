"""best under limits: groups and bytes, the check of the whole, errors, resuming, and the loss next to best without limits."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import runtime_models
from dense_models import make

from annie_quant import checkpoint, quantize
from annie_quant.checkpoint import dialects, first_token, prompt_work
from annie_quant.checkpoint.decode_speed import DEVICES, TokenBytes, find_device, tok_s, token_bytes
from annie_quant.checkpoint.first_token import Prompt, PromptTime
from annie_quant.checkpoint.linears import HEAD
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.size import bytes_per_token
from annie_quant.core.errors import UsageError
from annie_quant.data.rows import read_conversations
from annie_quant.documents import FrontierPoint, Recipe, decode
from annie_quant.models.formats import BF16, FP8_CHANNEL, NVFP4, W4A16, Format
from annie_quant.quantize import calibration_text, estimates
from annie_quant.quantize.formats import choose
from annie_quant.quantize.frontier import Limits
from annie_quant.quantize.plan import QuantizationPlan, export
from annie_quant.quantize.rates import SPARK_RATES
from annie_quant.quantize.strategy import Job

torch = pytest.importorskip(
    "torch", reason="trials run on torch: pip install annie-quant[quantize]"
)
pytest.importorskip(
    "transformers", reason="models are loaded with transformers: pip install annie-quant[quantize]"
)
pytest.importorskip("matplotlib", reason="the frontier's picture: pip install annie-quant[plots]")
from annie_quant.offline.loading import load  # noqa: E402
from annie_quant.quantize import frontier_plan, held_out, kl_trial, mixed_formats  # noqa: E402
from annie_quant.quantize.format_planner import FormatPlanner  # noqa: E402
from annie_quant.quantize.mixed_formats import (  # noqa: E402
    Group,
    budgets,
    groups_of,
)

SLOW = find_device("0.001:0")  # one megabyte per second: bytes alone decide
GB = 0.00045  # between the smallest, .00039, and the unchanged model, .00091


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runtime_models.save_with_conversations(tmp_path_factory.mktemp("frontier"))


@pytest.fixture(autouse=True)
def few_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_formats, "TOKENS", 60)
    monkeypatch.setitem(held_out.TRIAL_TOKENS, "cpu", 60)
    monkeypatch.setattr(mixed_formats, "BANDS", 8)


def run(home: Path, name: str, model: str = "model", **options) -> Path:
    settings = {
        "calib_data": home / "calib.jsonl",
        "calib_samples": 10,
        **options,
    }
    quantize.run("best", home / model, home / name, **settings)
    return home / name


@pytest.fixture(scope="module")
def planned(home: Path) -> Path:
    """A checkpoint under a limit, whose measurements stay in `home`/work."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixed_formats, "TOKENS", 60)
        patch.setitem(held_out.TRIAL_TOKENS, "cpu", 60)
        patch.setattr(mixed_formats, "BANDS", 8)
        return run(home, "planned", max_gb=GB, work=home / "work")


# ---- the search, with made-up figures


class FakeTrials:
    """Figures of a choice: the sum of its groups', and what groups of one format do to each other."""

    def __init__(
        self, single: Mapping[tuple[str, Format], float], together: Mapping[Format, float]
    ) -> None:
        self.single, self.together, self.measured = single, together, 0

    def measure(self, formats: Mapping[str, Format]) -> np.ndarray:
        self.measured += 1
        loss = sum(self.single[item] for item in formats.items())
        for kind, factor in self.together.items():
            of_kind = [self.single[item] for item in formats.items() if item[1] == kind]
            loss += factor * sum(of_kind) if len(of_kind) > 1 else 0.0
        return np.full((4, 3), [loss / 8, loss / 8, 0.0])

    stored = measure


def planner_for(
    rng: np.random.Generator, limits: Limits, together: Mapping[Format, float]
) -> tuple[FormatPlanner, FakeTrials]:
    names = [*"abcde", HEAD]
    weights = {n: float(rng.integers(1, 20)) * 1e6 for n in names}
    kinds = [W4A16, FP8_CHANNEL, BF16]
    sizes = {n: [w * bits / 8 for bits in (4.5, 8, 16)] for n, w in weights.items()}
    groups = {n: Group([n], kinds, sizes[n], sizes[n], weights[n]) for n in names}
    single = {
        (n, k): float(x)
        for n in names
        for k, x in zip(kinds, np.sort(rng.lognormal(-6, 1, 2))[::-1], strict=False)
    }
    trials = FakeTrials(single, together)
    planner = FormatPlanner(groups, limits, TokenBytes(0.0, 1), {"size": 0.0, "read": 0.0})
    for n in names:
        planner.costs[n] = {BF16: np.zeros((4, 3))} | {k: trials.measure({n: k}) for k in kinds[:2]}
    return planner, trials


def test_what_is_taken_is_within_the_limits_and_never_worse_than_the_formats_without_limits() -> (
    None
):
    """Also where groups of one format do each other harm, which no cost of a single group shows."""
    rng, usual_won, solved_again = np.random.default_rng(0), 0, 0
    for case in range(120):
        together = {
            FP8_CHANNEL: float(rng.choice([0, 0.5, 20])),
            W4A16: float(rng.choice([0, 0.5])),
        }
        planner, trials = planner_for(rng, Limits(SLOW), together)
        usual = tuple(2 if u == HEAD else 0 for u in planner.groups)
        planner.limits = Limits(
            SLOW, max_gb=planner.bytes_of(usual, "size") / 1e9 * (1 + (case % 3) / 10)
        )
        taken, evaluated = planner.search(trials, quantize.runner.as_progress(None))
        expected = float(trials.measure(planner.formats(planner.kinds_of(usual)))[:, :2].sum())
        assert taken.loss <= expected * (1 + 1e-9) and planner.fits(taken.choices)
        assert taken.loss == min(s.loss for s in evaluated)
        usual_won += taken.choices == usual
        solved_again += len(evaluated) > 2
    assert usual_won and solved_again > 10, "cases that the first solution solves show nothing"


def test_a_limit_of_the_loss_is_measured_on_the_whole() -> None:
    rng, tightened = np.random.default_rng(1), 0
    for _ in range(60):
        planner, trials = planner_for(rng, Limits(SLOW), {FP8_CHANNEL: 0.5, W4A16: 1.0})
        most = float(planner.expected(planner.kinds_of([0] * 6))[:, :2].sum())
        planner.limits = Limits(SLOW, max_loss=most * float(rng.uniform(0.2, 1.5)))
        taken, evaluated = planner.search(trials, quantize.runner.as_progress(None))
        assert taken.loss <= planner.limits.max_loss
        tightened += len(evaluated) > 2
        smaller = [
            s
            for s in evaluated
            if planner.bytes_of(s.choices, "read") < planner.bytes_of(taken.choices, "read")
        ]
        assert all(s.loss > planner.limits.max_loss for s in smaller)
    assert tightened > 10


def test_limits_that_nothing_satisfies_are_one_line() -> None:
    rng = np.random.default_rng(2)
    planner, trials = planner_for(rng, Limits(SLOW), {})
    least = planner.bytes_of([0] * 6, "size") / 1e9
    progress = quantize.runner.as_progress(None)
    planner.limits = Limits(SLOW, max_gb=least - 0.001)
    with pytest.raises(
        UsageError, match=rf"the smallest possible is {least:.4g} GB, 0.001 GB more"
    ):
        planner.check_limits()
    planner.limits = Limits(SLOW, min_tps=1e6 / (least * 1e9) + 0.01)
    with pytest.raises(
        UsageError,
        match=r"--min-tps .*: the smallest possible decodes at .* tok/s on 0.001 GB/s, 0.01 fewer",
    ):
        planner.check_limits()
    planner.limits = Limits(SLOW, max_gb=1000.0)
    with pytest.raises(UsageError, match="the unchanged model is within the limits"):
        planner.check_limits()
    planner.limits = Limits(SLOW, max_loss=1e-12)
    with pytest.raises(
        UsageError, match="--max-loss 1e-12: nothing quantized satisfies it, the least measured is"
    ):
        planner.search(trials, progress)
    loss = float(planner.expected(planner.kinds_of([0] * 6))[:, :2].sum())
    planner.limits = Limits(SLOW, max_gb=least * 1.0001, max_loss=loss / 2)
    with pytest.raises(UsageError, match="nothing satisfies the limits together; the nearest") as e:
        planner.search(trials, progress)
    words = e.value.hint.split()
    max_gb, max_loss = (float(words[words.index(o) + 1]) for o in ("--max-gb", "--max-loss"))
    assert least < max_gb and loss / 2 < max_loss
    planner.limits = Limits(SLOW, max_gb=max_gb, max_loss=max_loss)
    assert planner.solve(max_loss) is not None


def random_planner(rng: np.random.Generator) -> FormatPlanner:
    """Return up to five groups with any formats and any parts of the time to the first token."""
    groups = {}
    for name in [*"abcd"[: int(rng.integers(1, 5))], HEAD]:
        kinds = [W4A16, FP8_CHANNEL, BF16]
        if name != HEAD:
            kinds = [NVFP4, *kinds][: int(rng.integers(2, 5))]
        weights = float(rng.integers(1, 20)) * 1e6
        size = [weights * kind.bits / 8 for kind in kinds]
        parts = 1e-3 * rng.lognormal(0, 1, (len(kinds), 3))
        times = [PromptTime(0.0, *map(float, row)) for row in parts]
        read = [x * float(rng.choice([1.0, 0.25])) for x in size]
        groups[name] = Group([name], kinds, size, read, weights, times=times)
    planner = FormatPlanner(groups, Limits(SLOW), TokenBytes(0.0, 1), {"size": 1e6, "read": 2e6})
    planner.counted = sum(group.weights for group in groups.values())
    planner.base_time = PromptTime(*map(float, rng.random(4) * [10, 1e-3, 1e-3, 1e-3]))
    planner.prompt = Prompt(2048)
    for name, group in groups.items():
        losses = {kind: float(rng.lognormal(-6, 2)) for kind in group.formats} | {BF16: 0.0}
        planner.costs[name] = {k: np.full((4, 3), [x / 8, x / 8, 0]) for k, x in losses.items()}
    return planner


def row_of(planner: FormatPlanner, choice: tuple[int, ...]) -> dict[str, float]:
    """Return the figures of a choice, added up without the planner."""
    groups = list(zip(planner.groups.values(), choice, strict=True))
    time = [sum(getattr(g.times[i], part) for g, i in groups) for part in PARTS]
    reads, products, head = (
        getattr(planner.base_time, part) + own for part, own in zip(PARTS, time, strict=True)
    )
    read = 2e6 + sum(g.read[i] for g, i in groups)
    kinds = zip(planner.groups, groups, strict=True)
    return {
        "gb": (1e6 + sum(g.size[i] for g, i in groups)) / 1e9,
        "tps": 1e6 / read,
        "bits": 8 * (read - 2e6) / planner.counted,
        "ms": planner.base_time.rest_ms + 1e3 * ((reads**2 + products**2) ** 0.5 + head),
        "loss": sum(float(planner.costs[n][g.formats[i]][:, :2].sum()) for n, (g, i) in kinds),
        "read": read,
    }


PARTS = ("reads_s", "products_s", "head_s")


def satisfies(row: dict[str, float], limits: Limits, slack: float = 1e-9) -> bool:
    least = 1 + slack
    return (
        row["gb"] <= limits.max_gb * least
        and row["tps"] * least >= limits.min_tps
        and row["bits"] <= limits.max_bits * least
        and row["ms"] <= limits.max_ttft_ms * least
        and row["loss"] <= limits.max_loss * least
    )


def test_limits_of_size_speed_time_and_loss_together_are_solved_as_they_are_stated() -> None:
    """Also where the best choice for one limit does not satisfy the others."""
    rng, outcomes = np.random.default_rng(7), []
    for _ in range(200):
        planner = random_planner(rng)
        counts = [range(len(group.formats)) for group in planner.groups.values()]
        table = {choice: row_of(planner, choice) for choice in itertools.product(*counts)}
        some = list(table.values())[int(rng.integers(0, len(table)))]
        other = list(table.values())[int(rng.integers(0, len(table)))]
        slack = float(rng.choice([1.0, 0.9, 1.2]))
        stated = {
            "max_gb": some["gb"] * slack,
            "min_tps": some["tps"] / slack,
            "max_ttft_ms": other["ms"] * slack,
            "max_loss": max(1e-9, other["loss"] * slack),
        }
        if rng.random() < 0.2:
            stated["max_bits"] = some["bits"]
        kept = {axis: value for axis, value in stated.items() if rng.random() < 0.7}
        planner.limits = Limits(SLOW, **kept)
        within = [row for row in table.values() if satisfies(row, planner.limits)]
        objective = "loss" if np.isinf(planner.limits.max_loss) else "read"
        choice = planner.solve(planner.limits.max_loss)
        if within:
            assert choice is not None, "a choice satisfies the limits together"
            assert satisfies(table[choice], planner.limits, 2e-9)
            least = min(row[objective] for row in within)
            assert table[choice][objective] == pytest.approx(least, rel=1e-9, abs=1e-12)
        else:
            assert choice is None
            assert "the nearest choice has" in str(
                planner.infeasible(planner.limited(planner.limits.max_loss))
            )
        outcomes.append((len(kept), bool(within)))
    assert sum(count > 2 and fits for count, fits in outcomes) > 20
    assert sum(not fits for _, fits in outcomes) > 20


# ---- groups and bytes


@pytest.mark.parametrize("kind", ["qwen3.5", "qwen2-tied", "mixture"])
def test_the_bytes_of_a_choice_are_those_of_the_checkpoint(
    home: Path, tmp_path: Path, kind: str
) -> None:
    if kind == "qwen3.5":
        source = home / "model"
    elif kind == "mixture":
        source = runtime_models.save_mixture(tmp_path / "mixture", experts=4)
    else:
        source = make(tmp_path / "qwen2", kind)
    folder = ModelFolder(source)
    job = Job(source, tmp_path / "out")
    four_bit = dict.fromkeys(choose(folder, ()), (W4A16,))
    groups = groups_of(job, four_bit)
    assert list(groups)[-1] == HEAD
    assert sorted(n for g in groups.values() for n in g.members) == sorted([*four_bit, HEAD])
    for served in folder.family.served_groups(four_bit):
        assert sum(served[0] in g.members for g in groups.values()) == 1
        assert any(set(served) <= set(g.members) for g in groups.values()), served
    planner = frontier_plan.planner_of(job, Limits(SLOW, max_loss=1.0), four_bit)
    rng = np.random.default_rng(0)
    for number in range(3):
        choices = [int(i) for i in rng.integers(0, 3, len(groups))]
        choices[-1] = number
        out = tmp_path / f"out{number}"
        out.mkdir()
        export(folder, out, QuantizationPlan.of(planner.formats(planner.kinds_of(choices))))
        stored = ModelFolder(out)
        assert planner.bytes_of(choices, "size") == sum(stored.info(n).size_bytes for n in stored)
        assert planner.bytes_of(choices, "read") == pytest.approx(bytes_per_token(stored), abs=1)


def test_an_excluded_head_is_no_group(home: Path, tmp_path: Path) -> None:
    source = make(tmp_path / "tied", "qwen2-tied")
    for model in (home / "model", source):
        four_bit = dict.fromkeys(choose(ModelFolder(model), (HEAD,)), (W4A16,))
        assert HEAD not in groups_of(Job(model, tmp_path / "out", exclude=(HEAD,)), four_bit)


# ---- whole runs


def test_a_plan_is_exported_recorded_and_drawn(home: Path, planned: Path) -> None:
    audit = checkpoint.audit(planned, source=home / "model")
    assert audit.ok, audit.findings
    folder, recipe = ModelFolder(planned), decode(Recipe, planned / "annie_quant.json")
    assert recipe.frontier is not None and "--max-gb 0.00045" in recipe.frontier.reason
    (taken,) = [p for p in recipe.frontier.points if p.taken]
    assert (
        taken.measured
        and taken.size_bytes == sum(folder.info(n).size_bytes for n in folder) <= GB * 1e9
    )
    assert taken.read_bytes == bytes_per_token(folder)
    predicted = [p for p in recipe.frontier.points if not p.measured]
    assert len(predicted) >= 8 and [p.read_bytes for p in predicted] == sorted(
        p.read_bytes for p in predicted
    )
    losses = [p.kl + p.decisions for p in predicted]
    assert losses == sorted(losses, reverse=True) and losses[-1] == 0
    assert len(taken.formats) > 2, "a budget between the extremes mixes formats"
    numbers = {
        json.dumps(n)
        for n in json.loads((planned / "annie_quant.json").read_text())["options"].values()
    }
    assert "Infinity" not in numbers


def divergence(source: Path, folder: Path, home: Path) -> float:
    """Mean KL plus that of deciding tokens on the held-out answers, by transformers' own forward of both checkpoints."""
    samples = calibration_text.samples_of_rows(source, read_conversations(home / "calib.jsonl", 10))
    _, held = held_out.hold_out(samples, 10**6)
    models = [load(f, dtype=torch.float32) for f in (source, folder)]
    values, decides = [], []
    with torch.inference_mode():
        for sample in held:
            p, q = (torch.log_softmax(m(torch.tensor([sample.ids])).logits[0], -1) for m in models)
            values.append((p.exp() * (p - q)).sum(-1)[-len(sample.answer) :])
            decides.append(torch.tensor(sample.decides))
    kl, mask = torch.cat(values), torch.cat(decides)
    return float(kl.mean() + kl[mask].mean())


def test_at_the_bytes_of_best_without_limits_the_loss_is_not_larger(
    home: Path, planned: Path
) -> None:
    usual = run(home, "usual")
    size = sum(ModelFolder(usual).info(n).size_bytes for n in ModelFolder(usual))
    limited = run(home, "limited", max_gb=size / 1e9, work=home / "work")
    assert sum(ModelFolder(limited).info(n).size_bytes for n in ModelFolder(limited)) <= size
    losses = [divergence(home / "model", f, home) for f in (usual, limited)]
    assert 0 < losses[1] < losses[0]


def test_a_run_that_dies_measures_nothing_twice_and_gives_the_same_bytes(
    home: Path, planned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares, calls = kl_trial.Trial.shares, 0

    def dies(self: kl_trial.Trial, plan: QuantizationPlan, inputs: bool = True) -> np.ndarray:
        nonlocal calls
        calls += 1
        if calls == 7:
            raise KeyboardInterrupt
        return shares(self, plan, inputs)

    monkeypatch.setattr(kl_trial.Trial, "shares", dies)
    with pytest.raises(KeyboardInterrupt):
        run(home, "killed", max_gb=GB)
    with pytest.raises(UsageError, match="the smallest possible"):
        run(
            home, "killed", max_gb=GB / 2
        )  # another limit in the same folder keeps the measurements
    out = run(home, "killed", max_gb=GB)
    groups = 9  # eight bands and the head
    assert calls <= 7 + 2 * groups + 8, "measured again"
    assert {p.name: p.read_bytes() for p in out.iterdir()} == {
        p.name: p.read_bytes() for p in planned.iterdir()
    }
    assert not (home / ".killed.work").exists()


def test_a_tied_head_is_quantized_for_speed(tmp_path: Path, home: Path) -> None:
    """The embedding stays in 16 bits, so the file grows by the head, and a token reads the head instead of the embedding."""
    source = make(home / "tied", "qwen2-tied", gain=2.0)
    read = bytes_per_token(ModelFolder(source))
    speed = 1e6 / (0.45 * read)  # more than half of the bytes are the head
    out = run(home, "tied-out", "tied", min_tps=speed, device="0.001:0")
    audit = checkpoint.audit(out, source=source)
    assert audit.ok, audit.findings
    folder = ModelFolder(out)
    assert HEAD in checkpoint.linears(folder) and bytes_per_token(folder) <= 0.45 * read
    with pytest.raises(UsageError, match="expected a positive number"):
        run(home, "no", max_loss=-1)
    with pytest.raises(UsageError, match="no such device file"):
        run(home, "no", min_tps=5, device="gb11")


def test_budgets_of_one_model_share_their_measurements(home: Path, planned: Path) -> None:
    file = home / "work/format_figures.json"
    first = json.loads(file.read_text())["value"]
    budget = budgets(home / "model")[1]
    read = token_bytes(ModelFolder(home / "model"), budget * 1.001)
    limits = {"min_tps": tok_s(read, DEVICES["gb10"]), "device": "gb10"}
    folder = run(home, "shared", work=home / "work", **limits)
    assert bytes_per_token(ModelFolder(folder)) <= budget * 1.001
    both = json.loads(file.read_text())["value"]
    assert len(first) > 4 and first.items() <= both.items() and len(both) - len(first) < len(first)


# ---- the time to the first token


def gb10_ends(model: Path) -> tuple[float, float]:
    """Return the predicted milliseconds with all inputs of the linears in 4 bits, and in 16, the head in bf16."""
    folder = ModelFolder(model)
    prompt = Prompt().within(folder)
    ends = []
    for kind in (NVFP4, W4A16):
        work = prompt_work.work_of(folder, "vllm", dict.fromkeys(choose(folder, ()), kind))
        ends.append(first_token.predict(work, "vllm", DEVICES["gb10"], prompt).ms)
    return ends[0], ends[1]


def taken_point(folder: Path) -> FrontierPoint:
    frontier = decode(Recipe, folder / "annie_quant.json").frontier
    assert frontier is not None
    (taken,) = [p for p in frontier.points if p.taken]
    return taken


def test_inputs_are_chosen_under_a_limit_of_the_time_to_the_first_token(home: Path) -> None:
    least, most = gb10_ends(home / "model")
    losses = []
    for share in (0.9, 0.5):
        lines: list[str] = []
        limits = {"max_ttft_ms": least + share * (most - least), "device": "gb10"}
        out = run(home, f"soon{share}", work=home / "work", report=lines.append, **limits)
        losses.append(taken_point(out).kl + taken_point(out).decisions)
    assert 0 < losses[0] < losses[1], "a tighter limit is more harmful"
    folder = ModelFolder(out)
    assert checkpoint.audit(out, source=home / "model").ok
    recipe = decode(Recipe, out / "annie_quant.json")
    assert recipe.frontier is not None and "2,048 prompt tokens, vLLM" in recipe.frontier.prompt
    taken = taken_point(out)
    served = first_token.predict_folder(folder, device=DEVICES["gb10"])
    assert served is not None and served.ms == pytest.approx(taken.ttft_ms, rel=1e-9)
    assert served.ms <= limits["max_ttft_ms"] * (1 + 1e-9)
    kinds = {linear.stored_format(folder) for linear in dialects.linears(folder).values()}
    assert {NVFP4, W4A16} <= kinds and FP8_CHANNEL not in kinds - {W4A16, NVFP4}
    measured = [p.ttft_ms for p in recipe.frontier.points if p.measured]
    # The ends are there, up to the bytes of scales of tensors.
    assert min(measured) == pytest.approx(least, rel=1e-7)
    assert max(measured) == pytest.approx(most, rel=1e-7)
    groups = recipe.frontier.groups
    assert sum(group.flops for group in groups) == pytest.approx(1.0)
    assert {group.format for group in groups} == {"nvfp4", "w4a16"}
    # Almost linear: reads are the smaller part of the root.
    assert sum(group.saved_ms for group in groups) == pytest.approx(most - least, rel=0.05)
    assert any(line.startswith("what 4-bit inputs cost, per group:") for line in lines)
    (given_up,) = [line for line in lines if line.startswith("inputs of ")]
    assert "of the FLOPs in 4 bits: first token after about" in given_up
    assert "all in 4 bits" in given_up and "KL x" in given_up


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_ttft_ms": 1.0}, r"--max-ttft-ms 1: the soonest possible is .* ms at 2,048 prompt"),
        ({"max_ttft_ms": 50.0, "device": "h200"}, "no prefill rate is known for NVIDIA H200"),
        ({"max_ttft_ms": 50.0, "prompt_tokens": 5000}, "its context is 4,096, not 5,000 prompt"),
        ({"max_ttft_ms": 50.0, "cached_tokens": 3000}, "3,000 cached of 2,048 prompt tokens"),
        ({"max_ttft_ms": -1.0}, "--max-ttft-ms -1: expected a positive number"),
    ],
)
def test_a_limit_that_cannot_be_met_is_one_line_before_anything_is_computed(
    home: Path, monkeypatch: pytest.MonkeyPatch, options: dict, message: str
) -> None:
    monkeypatch.setattr(kl_trial, "load", lambda *args, **options: pytest.fail("model loaded"))
    monkeypatch.setattr(
        "annie_quant.quantize.calibration_text.read_answers", lambda *args: pytest.fail("answered")
    )
    with pytest.raises(UsageError, match=message):
        run(home, "refused", **{"device": "gb10", **options})
    assert not (home / "refused").exists()


def test_an_estimate_satisfies_the_limits(home: Path) -> None:
    least, most = gb10_ends(home / "model")
    options = {"max_ttft_ms": (least + most) / 2, "max_gb": GB, "device": "gb10"}
    expected = estimates.estimate(home / "model", "best", rates=SPARK_RATES, options=options)
    assert expected.size_bytes <= GB * 1e9
    assert "--max-gb 0.00045, --max-ttft-ms" in expected.limits
    small = estimates.estimate(
        home / "model", "auto_mixed", rates=SPARK_RATES, options={"bits": 4.6}
    )
    large = estimates.estimate(home / "model", "auto_mixed", rates=SPARK_RATES, options={"bits": 8})
    assert small.size_bytes < large.size_bytes
    with pytest.raises(UsageError, match="the smallest possible is"):
        estimates.estimate(
            home / "model", "best", rates=SPARK_RATES, options={"max_gb": GB / 2, "device": "gb10"}
        )


def test_an_estimate_of_a_published_model_satisfies_the_limits() -> None:
    options = {"max_ttft_ms": 400, "min_tps": 38, "device": "gb10"}
    expected = estimates.estimate("9b", "best", options=options)
    assert expected.speed.tok_s >= 38
    ms = float(expected.first_token.split("about ")[1].split(" ms")[0])
    assert 300 < ms <= 400
