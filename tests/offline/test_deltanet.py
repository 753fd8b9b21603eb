"""The gated delta rule in chunks, over rows of unequal length, compared with the plain recurrence in float64."""

import functools

import numpy as np
import pytest

torch = pytest.importorskip(
    "torch", reason="the runtime needs torch: pip install annie-quant[quantize]"
)
pytest.importorskip(
    "transformers", reason="the runtime needs transformers: pip install annie-quant[quantize]"
)
pytest.importorskip("annie_quant.nvfp4", reason="the runtime needs the codec")
pytest.importorskip("hypothesis")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from randomised import examples  # noqa: E402

from annie_quant.core.errors import EnvironmentFault  # noqa: E402
from annie_quant.offline import deltanet, profiles  # noqa: E402
from annie_quant.offline.deltanet import RaggedBatch  # noqa: E402


def recurrence(q, k, v, g, beta, state=None):
    """One step after the other: S <- S e^g; S <- S + k (beta (v - S^T k))^T; o = S^T q / sqrt(D)."""
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    batch, steps, heads, dk = k.shape
    state = np.zeros((batch, heads, dk, v.shape[-1])) if state is None else state.copy()
    out = np.zeros_like(v)
    for t in range(steps):
        state = state * np.exp(g[:, t])[..., None, None]
        error = (v[:, t] - np.einsum("bhkv,bhk->bhv", state, k[:, t])) * beta[:, t][..., None]
        state = state + np.einsum("bhk,bhv->bhkv", k[:, t], error)
        out[:, t] = np.einsum("bhkv,bhk->bhv", state, q[:, t]) / np.sqrt(dk)
    return out, state


def inputs(batch: int, steps: int, heads: int = 2, dk: int = 8, dv: int = 12, seed: int = 0):
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, batch, steps, heads, dk))
    v = rng.standard_normal((batch, steps, heads, dv))
    return [
        q,
        k,
        v,
        -rng.exponential(0.5, (batch, steps, heads)),
        rng.random((batch, steps, heads)),
    ]


def run(arrays, state=None, rule=deltanet.gated_delta_rule):
    q, k, v, g, beta = (torch.from_numpy(a).float() for a in arrays)
    state = None if state is None else torch.from_numpy(state).float()
    out, after = rule(
        q,
        k,
        v,
        g=g,
        beta=beta,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out.numpy(), after.numpy()


@pytest.mark.parametrize("steps", [1, 2, 31, 32, 33, 64, 100])
@pytest.mark.parametrize("started", [False, True])
def test_chunks_are_the_recurrence(steps: int, started: bool) -> None:
    arrays = inputs(3, steps, seed=steps)
    state = np.random.default_rng(1).standard_normal((3, 2, 8, 12)) if started else None
    for actual, expected in zip(run(arrays, state), recurrence(*arrays, state), strict=True):
        np.testing.assert_allclose(actual, expected, atol=2e-5, rtol=2e-4)


def test_one_step_is_the_recurrence_and_updates_the_state() -> None:
    arrays = inputs(3, 1, seed=5)
    state = np.random.default_rng(1).standard_normal((3, 2, 8, 12)).astype(np.float32)
    expected = recurrence(*arrays, state.astype(np.float64))
    for actual, wanted in zip(run(arrays, state, deltanet.gated_delta_step), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, atol=2e-5, rtol=2e-4)
    np.testing.assert_allclose(state, expected[1], atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("steps", [5, 64, 150])
def test_operands_are_rounded_as_servers_kernels_do(steps: int) -> None:
    """Rounding is of bfloat16's size, and without rounding the chunks of 64 give the same numbers as those of 32."""
    arrays = inputs(2, steps, seed=steps)
    expected, state = recurrence(*arrays)

    def error(to_operand) -> tuple[float, float]:
        rounded = functools.partial(deltanet.gated_delta_rule, to_operand=to_operand)
        out, after = run(arrays, rule=rounded)
        return tuple(
            float(np.linalg.norm(a - b) / np.linalg.norm(b))
            for a, b in ((out, expected), (after, state))
        )

    assert max(error(lambda x: x)) < 1e-5
    assert all(1e-3 < e < 2e-2 for e in error(lambda x: x.bfloat16().float()))


def test_the_initial_state_is_not_changed() -> None:
    state = torch.ones(1, 2, 8, 12)
    q, k, v, g, beta = (torch.from_numpy(a).float() for a in inputs(1, 5))
    deltanet.gated_delta_rule(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True)
    assert (state == 1).all()


def test_repeated_keys_keep_their_digits() -> None:
    """All keys the same, beta 1, no decay: powers of the chunk's matrix reach 1e8, substitution stays exact."""
    q, k, v, g, beta = inputs(1, 64)
    k[:] = k[:, :1]
    g[:], beta[:] = 0, 1
    out, state = run((q, k, v, g, beta))
    expected, after = recurrence(q, k, v, g, beta)
    np.testing.assert_allclose(out, expected, atol=1e-4)
    np.testing.assert_allclose(state, after, atol=1e-4)


@settings(max_examples=examples(25), deadline=None)
@given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_padding_changes_neither_outputs_nor_states(lengths: list[int], seed: int) -> None:
    steps = max(lengths)
    arrays = inputs(len(lengths), steps, seed=seed)
    batch = RaggedBatch()
    batch.set(torch.tensor(lengths), steps, None)
    out, state = run(arrays, rule=deltanet.ragged_rule(deltanet.gated_delta_rule, batch))
    for row, length in enumerate(lengths):
        alone, after = recurrence(*(a[row : row + 1, :length] for a in arrays))
        np.testing.assert_allclose(out[row, :length], alone[0], atol=2e-5, rtol=2e-4)
        np.testing.assert_allclose(state[row], after[0], atol=2e-5, rtol=2e-4)


def test_answers_are_decoded_in_float32_after_a_rounded_prompt() -> None:
    """Rows whose prompts end at different steps: each answer is the plain recurrence from the state of its prompt alone."""
    rounds = functools.partial(deltanet.gated_delta_rule, to_operand=lambda x: x.bfloat16().float())
    lengths, prompts = [70, 41, 90], [30, 40, 90]
    arrays = inputs(3, 90, seed=5)
    start = np.random.default_rng(2).standard_normal((3, 2, 8, 12))
    batch = RaggedBatch()
    batch.set(torch.tensor(lengths), 90, None, torch.tensor(prompts))
    out, state = run(arrays, start, deltanet.ragged_rule(rounds, batch, deltanet.gated_delta_rule))
    for row, (length, prompt) in enumerate(zip(lengths, prompts, strict=True)):
        one = slice(row, row + 1)
        head, middle = run([a[one, :prompt] for a in arrays], start[one], rounds)
        np.testing.assert_allclose(
            out[row, :prompt], head[0], atol=2e-2, rtol=2e-2
        )  # chunks end elsewhere
        tail, after = recurrence(
            *(a[one, prompt:length] for a in arrays), middle.astype(np.float64)
        )
        exact, _ = recurrence(*(a[one, :length] for a in arrays), start[one])
        np.testing.assert_allclose(out[row, prompt:length], tail[0], atol=2e-2, rtol=2e-2)
        np.testing.assert_allclose(state[row], after[0], atol=2e-2, rtol=2e-2)
        assert np.abs(out[row, :length] - exact[0]).max() > 1e-4, "the prompt is rounded"


def test_an_answer_alone_is_not_rounded() -> None:
    rounds = functools.partial(deltanet.gated_delta_rule, to_operand=lambda x: x.bfloat16().float())
    arrays = inputs(2, 40, seed=6)
    batch = RaggedBatch()
    batch.set(None, 40, None, torch.tensor([1, 1]))
    out, state = run(arrays, rule=deltanet.ragged_rule(rounds, batch, deltanet.gated_delta_rule))
    first, middle = run([a[:, :1] for a in arrays], rule=rounds)
    rest, after = recurrence(*(a[:, 1:] for a in arrays), middle.astype(np.float64))
    np.testing.assert_allclose(out, np.concatenate((first, rest), 1), atol=2e-5, rtol=2e-4)
    np.testing.assert_allclose(state, after, atol=2e-5, rtol=2e-4)


def test_unit_lower_inverse_is_the_inverse() -> None:
    lower = torch.randn(5, 3, 24, 24, dtype=torch.float64) * 0.3
    inverse = deltanet.unit_lower_inverse(lower)
    matrix = lower.tril(-1) + torch.eye(24, dtype=torch.float64)
    np.testing.assert_allclose(inverse.numpy(), np.linalg.inv(matrix.numpy()), atol=1e-9)


@pytest.mark.parametrize("bias", [False, True])
def test_convolution_steps_are_the_convolution(bias: bool) -> None:
    x, weight = torch.randn(2, 6, 9), torch.randn(6, 4)
    offset = torch.randn(6) if bias else None
    whole = deltanet.causal_conv(x, weight, offset, "silu")
    padded = torch.nn.functional.pad(x, (3, 0)).numpy()
    sums = sum(padded[:, :, i : i + 9] * weight.numpy()[:, i, None] for i in range(4)) + (
        0 if offset is None else offset.numpy()[:, None]
    )
    np.testing.assert_allclose(whole.numpy(), sums / (1 + np.exp(-sums)), atol=1e-5)
    state = torch.zeros(2, 6, 4)
    steps = [
        deltanet.causal_conv_step(x[:, :, t : t + 1], state, weight, offset, "silu")
        for t in range(9)
    ]
    torch.testing.assert_close(torch.cat(steps, -1), whole)


class FutureGatedDeltaNet(torch.nn.Module):
    """A layer without functions to replace, as in transformers 5.15 and later."""


def test_layers_whose_functions_cannot_be_replaced_are_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), FutureGatedDeltaNet())
    with pytest.raises(EnvironmentFault, match="DeltaNet layers") as fault:
        deltanet.delta_layers(model)
    assert "transformers" in fault.value.hint
    assert deltanet.delta_layers(torch.nn.Sequential(torch.nn.Linear(2, 2))) == []


class TinyGatedDeltaNet(torch.nn.Module):
    """A layer with the functions that are replaced; the rules are transformers'."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.models.qwen3_5 import modeling_qwen3_5 as source

        self.layer_idx = 0
        self.chunk_gated_delta_rule = source.torch_chunk_gated_delta_rule
        self.recurrent_gated_delta_rule = source.torch_recurrent_gated_delta_rule
        self.causal_conv1d_fn = None
        self.causal_conv1d_update = source.torch_causal_conv1d_update


@pytest.mark.parametrize("name", ["vllm-cutlass", "float32"])
def test_layers_round_as_their_profile(name: str) -> None:
    """A prompt of 70 steps, 10 steps of its answer in the same pass, and one more that is decoded alone."""
    layer = TinyGatedDeltaNet()
    batch = RaggedBatch()
    arrays = inputs(1, 81, seed=4)
    spans = (slice(70), slice(70, 80), slice(80, 81))
    head, middle, last = ([a[:, span] for a in arrays] for span in spans)
    rule = deltanet.gated_delta_rule
    if name != "float32":
        rule = functools.partial(rule, to_operand=lambda x: x.bfloat16().float())
    first, state = run(head, rule=rule)
    second, state = recurrence(*middle, state.astype(np.float64))
    third, _ = recurrence(*last, state)
    batch.set(None, 80, None, torch.tensor([70]))
    with deltanet.ragged_layers([layer], profiles.find_profile(name), batch):
        both = [np.concatenate(pair, 1) for pair in zip(head, middle, strict=True)]
        out, after = run(both, rule=layer.chunk_gated_delta_rule)
        alone, _ = run(last, after, rule=layer.recurrent_gated_delta_rule)
    own = np.concatenate((out, alone), 1)
    expected = np.concatenate((first, second, third), 1)
    tolerance = {"vllm-cutlass": 1e-2, "float32": 2e-5}[name]  # of one rounding to bfloat16
    np.testing.assert_allclose(own, expected, atol=tolerance, rtol=tolerance)
    is_bfloat16 = np.array_equal(own, torch.from_numpy(own).bfloat16().float().numpy())
    assert is_bfloat16 == (name == "vllm-cutlass")
    assert layer.chunk_gated_delta_rule.__name__ == "torch_chunk_gated_delta_rule"
    assert layer.recurrent_gated_delta_rule.__name__ == "torch_recurrent_gated_delta_rule"
