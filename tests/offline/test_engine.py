"""Batching does not change results: scores and greedy answers equal those of transformers on one row at a time."""

import pytest

torch = pytest.importorskip(
    "torch", reason="the runtime needs torch: pip install annie-quant[quantize]"
)
transformers = pytest.importorskip(
    "transformers", reason="the runtime needs transformers: pip install annie-quant[quantize]"
)
pytest.importorskip("annie_quant.nvfp4", reason="the runtime needs the codec")
pytest.importorskip("hypothesis")

import copy  # noqa: E402
import random  # noqa: E402

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from runtime_models import save_reference  # noqa: E402

from annie_quant import runtime  # noqa: E402
from annie_quant.core.errors import UsageError  # noqa: E402
from annie_quant.offline import decoding, deltanet  # noqa: E402
from annie_quant.offline.caches import common_prefix  # noqa: E402
from annie_quant.offline.decoding import generate  # noqa: E402
from annie_quant.offline.emulation import emulate  # noqa: E402
from annie_quant.offline.engine import (  # noqa: E402
    CPU_FORWARD_TOKENS,
    GROUP_COST,
    MAX_FORWARD_TOKENS,
    MIN_FORWARD_TOKENS,
    MIN_SHARED,
    Engine,
    Row,
    batches,
    group_by_prefix,
    split_by_size,
    tokens_per_launch,
)
from annie_quant.offline.loading import share_equal_tensors  # noqa: E402
from annie_quant.offline.profiles import UNQUANTIZED, in_bfloat16  # noqa: E402

END = 7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    return runtime.load(save_reference(tmp_path_factory.mktemp("model")), dtype=torch.float32)


def prompts() -> list[list[int]]:
    """Two long prefixes with short and long tails, a prompt that is a prefix of another, and very short ones."""
    rng = random.Random(0)
    words = lambda n: [rng.randrange(20, 1200) for _ in range(n)]  # noqa: E731
    first, second = words(60), words(90)
    many = [first + words(n) for n in (1, 2, 3, 17, 40)] + [
        second + words(n) for n in (1, 5, 33, 34)
    ]
    return [*many, first + many[4][60:80], words(1), words(2), words(5)]


def plain_answer(model, prompt: list[int], limit: int) -> tuple[list[int], bool]:
    """Greedy decoding by transformers' own generate, one prompt at a time."""
    ids = torch.tensor([prompt])
    new = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=limit,
        do_sample=False,
        eos_token_id=END,
        pad_token_id=0,
    )[0, len(prompt) :].tolist()
    return (new[: new.index(END)], True) if END in new else (new, False)


@pytest.mark.parametrize(("tokens", "rows"), [(4096, 128), (64, 3), (4096, 1)])
def test_scores_are_those_of_each_row_alone(model, tokens: int, rows: int) -> None:
    cases = [Row(p, [t % 1200 for t in p[: 1 + i % 5]]) for i, p in enumerate(prompts())]
    scores = {i: logits.clone() for i, logits in Engine(model, tokens, rows).scores(cases)}
    assert sorted(scores) == list(range(len(cases)))
    for i, row in enumerate(cases):
        ids = torch.tensor([[*row.prompt, *row.target[:-1]]])
        with torch.inference_mode():
            alone = model(ids).logits[0, len(row.prompt) - 1 :]
        torch.testing.assert_close(scores[i], alone, atol=5e-4, rtol=1e-3)


def test_a_prefix_is_computed_once_per_arithmetic(model, monkeypatch) -> None:
    cases = [Row(p, p[:2]) for p in prompts()[:5]]  # 60 tokens are shared

    def scores(engine: Engine) -> list[torch.Tensor]:
        return [logits.clone() for _, logits in engine.scores(cases)]

    plain = scores(engine := Engine(model))
    with emulate(model, in_bfloat16(UNQUANTIZED)):
        rounded = scores(engine)
        widths: list[int] = []
        step = engine.step
        monkeypatch.setattr(
            engine, "step", lambda ids, *rest: widths.append(len(ids)) or step(ids, *rest)
        )
        assert all(map(torch.equal, rounded, scores(engine)))
    n_again = len(widths)
    with emulate(model, UNQUANTIZED):
        assert all(map(torch.equal, plain, scores(engine))), (
            "a prefix of the rounded arithmetic was used"
        )
    assert not any(map(torch.equal, plain, rounded))
    assert n_again < len(widths) - n_again, "the second pass computed its prefixes again"


@pytest.mark.parametrize("rows", [128, 4])
def test_greedy_answers_are_transformers_own(model, rows: int) -> None:
    requests = prompts()
    limits = [1 + 3 * (i % 6) for i in range(len(requests))]
    ended = []
    answers = generate(Engine(model, rows=rows), requests, limits, [END], ended.append)
    assert sum(ended) == len(requests)
    for prompt, limit, answer in zip(requests, limits, answers, strict=True):
        assert (answer.tokens, answer.finished) == plain_answer(model, prompt, limit)


def test_batches_have_room_for_the_keys_and_values_of_all_their_tokens(model) -> None:
    requests = prompts()
    limits = [6] * len(requests)
    engine = Engine(model)
    engine.cache_columns = 3 * (max(map(len, requests)) + 6)
    batches = list(decoding.decoded_together(engine, requests, limits))
    assert sorted(i for batch in batches for i in batch) == list(range(len(requests)))
    for batch in batches:
        assert len(batch) * max(len(requests[i]) + 6 for i in batch) <= engine.cache_columns
    answers = generate(engine, requests, limits, [END])
    for prompt, answer in zip(requests, answers, strict=True):
        assert (answer.tokens, answer.finished) == plain_answer(model, prompt, 6)


def test_equal_parameters_are_in_memory_once(model) -> None:
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.norm.weight.add_(1)
    expected = {name: p.clone() for name, p in other.named_parameters()}
    share_equal_tensors(other, model)
    own = dict(model.named_parameters())
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, expected[name])
        assert (parameter.data_ptr() == own[name].data_ptr()) == (name != "model.norm.weight")


@pytest.mark.parametrize(("rows", "recut"), [(128, 4096), (4, 4096), (128, 20), (128, 0)])
def test_steps_in_buffers_of_fixed_size_give_the_same_answers(
    model, rows: int, recut: int, monkeypatch
) -> None:
    monkeypatch.setattr(decoding, "RECUT_ROW_STEPS", recut)
    monkeypatch.setattr(
        decoding, "SPARE_COLUMNS", 5
    )  # so that the batch is cut again while rows run
    requests = prompts()
    limits = [1 + 3 * (i % 6) for i in range(len(requests))]
    engine = Engine(model, rows=rows)
    assert not engine.fixed_buffers, "a CPU's steps stay as they are"
    assert Engine(model).rows == 128
    usual = generate(engine, requests, limits, [END])
    engine.fixed_buffers = True
    written = []
    compute = decoding.compute_step
    monkeypatch.setattr(
        decoding,
        "compute_step",
        lambda e, running: (written.append(int(running.column)), compute(e, running)),
    )
    assert generate(engine, requests, limits, [END]) == usual
    assert written, "no step was computed in fixed buffers"


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_steps_in_buffers_of_fixed_size_without_deltanet(family: str, monkeypatch) -> None:
    monkeypatch.setattr(decoding, "SPARE_COLUMNS", 5)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    torch.manual_seed(0)
    engine = Engine(getattr(transformers, f"{family}ForCausalLM")(config).eval())
    requests = [[t % 100 for t in p] for p in prompts()]
    usual = generate(engine, requests, [17] * len(requests), [END])
    engine.fixed_buffers = True
    assert generate(engine, requests, [17] * len(requests), [END]) == usual


def test_batches_join_consecutive_rows() -> None:
    rows = [(i, torch.full((n, 2), i), torch.full((n,), -i)) for i, n in enumerate((3, 4, 0, 9, 1))]
    parts = list(batches(rows, 5))
    assert [indices for indices, *_ in parts] == [(0, 1), (2, 3), (4,)]
    assert [x[:, 0].tolist() for _, x, _ in parts] == [[0] * 3 + [1] * 4, [3] * 9, [4]]
    assert [y.tolist() for *_, y in parts] == [[0] * 3 + [-1] * 4, [-3] * 9, [-4]]
    assert [indices for indices, *_ in batches(rows, 1)] == [(0,), (1,), (2, 3), (4,)]


@pytest.mark.gpu
@pytest.mark.parametrize("rounded", [False, True])
def test_captured_steps_give_the_same_answers(model, rounded: bool) -> None:
    on_gpu = copy.deepcopy(model).to("cuda")
    requests = prompts()
    limits = [1 + 7 * (i % 6) for i in range(len(requests))]
    engine = Engine(on_gpu, rows=4)
    profile = in_bfloat16(UNQUANTIZED) if rounded else UNQUANTIZED
    with emulate(on_gpu, profile):
        captured = generate(engine, requests, limits, [END])
        assert engine.fixed_buffers and engine.captures, "the capture failed"
        engine.captures = False
        assert generate(engine, requests, limits, [END]) == captured
        if not rounded:
            engine.fixed_buffers = False
            assert generate(engine, requests, limits, [END]) == captured


@pytest.mark.gpu
def test_a_step_that_cannot_be_captured_is_computed_directly(model) -> None:
    on_gpu = copy.deepcopy(model).to("cuda")
    expected = generate(Engine(on_gpu), prompts(), [9] * 13, [END])
    engine = Engine(on_gpu)
    hook = on_gpu.base_model.layers[0].register_forward_hook(
        lambda module, args, output: output.sum().item() and None
    )
    try:
        assert generate(engine, prompts(), [9] * 13, [END]) == expected
    finally:
        hook.remove()
    assert not engine.captures


@pytest.mark.gpu
@pytest.mark.parametrize("size", [32, 64])
def test_the_inverse_of_a_gpu_is_that_of_forward_substitution(size: int) -> None:
    lower = (
        torch.randn(300, size, size, generator=torch.Generator().manual_seed(0)).mul(0.2).tril(-1)
    )
    exact = torch.linalg.inv(lower.double() + torch.eye(size, dtype=torch.float64))
    error = deltanet.unit_lower_inverse(lower.cuda()).cpu() - exact
    assert error.norm() < 1e-5 * exact.norm()


def test_a_gpu_gets_larger_batches_of_a_small_model_only(model) -> None:
    small = model.config.get_text_config()
    large = copy.copy(small)
    large.hidden_size, large.num_hidden_layers = 4096, 32
    assert (
        tokens_per_launch(large)
        < MIN_FORWARD_TOKENS
        < tokens_per_launch(small)
        <= MAX_FORWARD_TOKENS
    )
    assert (
        Engine(model).tokens == CPU_FORWARD_TOKENS["cpu"] and Engine(model).group_cost == GROUP_COST
    )


def test_answers_end_at_any_end_token(model) -> None:
    requests = prompts()
    free = generate(Engine(model), requests, [12] * len(requests), [-1])  # no end
    ends = sorted({a.tokens[3] for a in free} | {a.tokens[8] for a in free})
    for open_ended, answer in zip(
        free, generate(Engine(model, rows=5), requests, [12] * len(requests), ends), strict=True
    ):
        stop = next(i for i, t in enumerate(open_ended.tokens) if t in ends)
        assert answer.finished and answer.tokens == open_ended.tokens[:stop]


def test_a_limit_of_zero_gives_no_tokens(model) -> None:
    nothing, something = generate(Engine(model), [[30, 31], [40]], [0, 2], [END])
    assert nothing.tokens == [] and something.tokens


def test_the_models_own_layers_are_restored(model) -> None:
    before = [
        (m.chunk_gated_delta_rule, m.causal_conv1d_fn)
        for m in model.modules()
        if hasattr(m, "causal_conv1d_fn")
    ]
    generate(Engine(model), prompts(), [2] * 13, [END])
    after = [
        (m.chunk_gated_delta_rule, m.causal_conv1d_fn)
        for m in model.modules()
        if hasattr(m, "causal_conv1d_fn")
    ]
    assert before == after and model.config._attn_implementation == "sdpa"


def test_other_attention_is_refused(model) -> None:
    config = model.config
    kinds = config.layer_types
    try:
        config.layer_types = ["chunked_attention", *kinds[1:]]
        with pytest.raises(UsageError, match="chunked_attention"):
            Engine(model)
    finally:
        config.layer_types = kinds


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=60), min_size=1, max_size=12),
    st.integers(0, 59),
)
def test_groups_cover_all_rows_and_share_their_prefix(rows: list[list[int]], cut: int) -> None:
    caps = [min(cut, len(r) - 1) for r in rows]
    groups = group_by_prefix(rows, caps)
    assert sorted(i for g in groups for i in g.rows) == list(range(len(rows)))
    for group in groups:
        assert group.shared == 0 or group.shared >= MIN_SHARED
        head = rows[group.rows[0]][: group.shared]
        assert all(rows[i][: group.shared] == head and group.shared <= caps[i] for i in group.rows)


def test_a_common_system_prompt_is_computed_once() -> None:
    rows = [[*range(300), 1000 + i, i] for i in range(50)] + [
        [*range(500, 900), 1000 + i, i] for i in range(50)
    ]
    groups = group_by_prefix(rows, [len(r) - 1 for r in rows])
    assert sorted((g.shared, len(g.rows)) for g in groups) == [(300, 50), (400, 50)]


@given(st.lists(st.integers(1, 20)), st.integers(1, 30))
def test_parts_are_in_order_and_within_the_limit(sizes: list[int], limit: int) -> None:
    parts = list(split_by_size(sizes, limit))
    assert [i for p in parts for i in p] == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in p) <= limit or len(p) == 1 for p in parts)


def test_common_prefix() -> None:
    assert [common_prefix([1, 2, 3], x) for x in ([], [1], [1, 2, 3], [1, 2, 4], [2])] == [
        0,
        1,
        3,
        2,
        0,
    ]
