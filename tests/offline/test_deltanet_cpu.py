"""DeltaNet as vLLM's CPU kernels round it, compared with loops over rows in numpy, whose bfloat16 is ml_dtypes'."""

import functools

import numpy as np
import pytest

torch = pytest.importorskip(
    "torch", reason="the runtime needs torch: pip install annie-quant[quantize]"
)
pytest.importorskip(
    "transformers", reason="the runtime needs transformers: pip install annie-quant[quantize]"
)
ml_dtypes = pytest.importorskip("ml_dtypes")

from annie_quant.offline import (  # noqa: E402
    deltanet,
    profiles,
)
from annie_quant.offline.deltanet import RaggedBatch  # noqa: E402
from annie_quant.offline.deltanet_cpu import (  # noqa: E402
    gated_delta_rule_cpu,
    normalized_as_on_a_cpu,
    rounded_inverse,
)


def bf16(x):
    return np.asarray(x).astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def to_bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().to(x.dtype)


def approximate_exp(x):
    """e^x as 2^n (1 + f) for x log2(e) less a cubic of its fraction: Malossi et al., 2015."""
    y = np.asarray(x) * np.log2(np.e)
    y = y - np.polyval(
        [-0.079204240219773236, -0.22433836478672356, 0.30354260500649682, 0.00010703434948458272],
        y % 1,
    )
    return 2 ** np.floor(y) * (1 + y % 1)


def row_by_row(q, k, v, g, beta, state, size: int = 64, exp=approximate_exp, epsilon: float = 1e-5):
    """One sequence and head [T, D], chunks of `size`: sums in float64, operands rounded in the order of the CPU's kernel."""
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + epsilon) for x in (q, k))
    q, k, out = bf16(q / np.sqrt(q.shape[-1])), bf16(k), np.zeros_like(v)
    for start in range(0, len(k), size):
        rows = range(start, min(start + size, len(k)))
        n, decay = len(rows), np.cumsum(g[rows])
        inverse = np.eye(n)
        for i in range(n):
            own = [
                bf16((k[rows[i]] @ k[rows[j]]) * beta[rows[i]] * exp(decay[i] - decay[j]))
                for j in range(i)
            ]
            for j in range(i):
                inverse[i, j] = bf16(-own[j] - sum(own[m] * inverse[m, j] for m in range(j + 1, i)))
        weighted = np.array([bf16(k[t] * beta[t] * exp(decay[i])) for i, t in enumerate(rows)])
        w, u = bf16(inverse @ weighted), bf16(inverse @ bf16(v[rows] * beta[rows, None]))
        new = bf16(u - w @ bf16(state))
        for i, t in enumerate(rows):
            inner = [bf16((q[t] @ k[rows[j]]) * exp(decay[i] - decay[j])) for j in range(i + 1)]
            out[t] = bf16(q[t] * exp(decay[i])) @ bf16(state) + inner @ new[: i + 1]
        state = state * np.exp(decay[-1])
        for i, t in enumerate(rows):
            state = state + np.outer(bf16(k[t] * exp(decay[-1] - decay[i])), new[i])
    return out, state


def inputs(batch: int, steps: int, heads: int = 2, dk: int = 16, dv: int = 12, seed: int = 0):
    rng = np.random.default_rng(seed)
    q, k = bf16(rng.standard_normal((2, batch, steps, heads, dk)))
    v = bf16(rng.standard_normal((batch, steps, heads, dv)))
    return [
        q,
        k,
        v,
        -rng.exponential(0.1, (batch, steps, heads)),
        bf16(rng.random((batch, steps, heads))),
    ]


def run(rule, arrays, state=None):
    q, k, v, g, beta = (torch.from_numpy(a).float() for a in arrays)
    state = None if state is None else torch.from_numpy(state).float()
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    out, after = rule(q, k, v, g=g, beta=beta, **options)
    return out.double().numpy(), after.double().numpy()


def distance(one, other) -> float:
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


@pytest.mark.parametrize("steps", [1, 2, 63, 64, 65, 150])
def test_roundings_are_those_of_the_cpus_kernel(steps: int) -> None:
    """The GPU's order of roundings is several times farther away."""
    arrays, start = (
        inputs(2, steps, seed=steps),
        np.random.default_rng(9).standard_normal((2, 2, 16, 12)),
    )
    own = run(functools.partial(gated_delta_rule_cpu, to_operand=to_bf16), arrays, start)
    gpu = run(functools.partial(deltanet.gated_delta_rule, to_operand=to_bf16), arrays, start)
    expected = np.zeros_like(own[0]), np.zeros_like(own[1])
    for row, head in np.ndindex(2, 2):
        one = [a[row, :, head] for a in arrays]
        expected[0][row, :, head], expected[1][row, head] = row_by_row(*one, start[row, head])
    assert distance(own[0], expected[0]) < 6e-4 and distance(own[1], expected[1]) < 6e-4
    if steps > 1:
        assert distance(gpu[0], expected[0]) > 3 * distance(own[0], expected[0])
        assert distance(gpu[0], expected[0]) > 1e-3


@pytest.mark.parametrize("steps", [1, 40, 150])
def test_without_rounding_it_is_the_rule(steps: int) -> None:
    arrays, start = (
        inputs(2, steps, seed=steps),
        np.random.default_rng(9).standard_normal((2, 2, 16, 12)),
    )
    own = run(functools.partial(gated_delta_rule_cpu, to_operand=lambda x: x), arrays, start)
    for actual, expected in zip(own, run(deltanet.gated_delta_rule, arrays, start), strict=True):
        np.testing.assert_allclose(
            actual, expected, atol=5e-4, rtol=1e-3
        )  # the exponentials are 1e-4 off


@pytest.mark.parametrize("other", [{"exp": np.exp}, {"epsilon": 1e-6}])
def test_the_exponential_and_the_epsilon_are_the_kernels(other: dict) -> None:
    """Keys that are alike, whose products depend on each other, and queries so short that the epsilon is seen."""
    arrays, start = inputs(1, 64, seed=5), np.zeros((1, 2, 16, 12))
    arrays[1] = bf16(arrays[1] * 0.3 + arrays[1][:, :1])
    arrays[0] = bf16(arrays[0] * 0.01)
    own, _ = run(functools.partial(gated_delta_rule_cpu, to_operand=to_bf16), arrays, start)
    one = [a[0, :, 1] for a in arrays]
    kernel, changed = (row_by_row(*one, start[0, 1], **options)[0] for options in ({}, other))
    assert 4 * distance(own[0, :, 1], kernel) < distance(own[0, :, 1], changed)


def test_the_initial_state_is_not_changed() -> None:
    state = np.ones((1, 2, 16, 12), dtype=np.float32)
    run(functools.partial(gated_delta_rule_cpu, to_operand=to_bf16), inputs(1, 5), state)
    assert (state == 1).all()


def test_the_unrounded_inverse_is_the_inverse() -> None:
    lower = (torch.randn(3, 24, 24, dtype=torch.float64) * 0.3).tril(-1)
    matrix = lower + torch.eye(24, dtype=torch.float64)
    np.testing.assert_allclose(
        rounded_inverse(lower, lambda x: x), np.linalg.inv(matrix.numpy()), atol=1e-9
    )


def decoded(q, k, v, g, beta, state, epsilon: float):
    """One sequence and head, one step after the other, in float64."""
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + epsilon) for x in (q, k))
    out = np.zeros_like(v)
    for t in range(len(k)):
        state = state * np.exp(g[t])
        state = state + np.outer(k[t], (v[t] - state.T @ k[t]) * beta[t])
        out[t] = state.T @ q[t] / np.sqrt(q.shape[-1])
    return out, state


def test_decoded_tokens_have_the_kernels_epsilon() -> None:
    """Queries and keys so short that 1e-5 is a tenth of their squared length."""
    arrays, start = inputs(1, 20, heads=1), np.random.default_rng(9).standard_normal((1, 1, 16, 12))
    arrays[0], arrays[1] = arrays[0] * 2.5e-3, arrays[1] * 2.5e-3
    out, state = run(normalized_as_on_a_cpu(deltanet.gated_delta_rule), arrays, start)
    one = [a[0, :, 0] for a in arrays]
    expected, after = decoded(*one, start[0, 0], 1e-5)
    np.testing.assert_allclose(out[0, :, 0], expected, atol=2e-5, rtol=2e-4)
    np.testing.assert_allclose(state[0, 0], after, atol=2e-5, rtol=2e-4)
    assert distance(out[0, :, 0], decoded(*one, start[0, 0], 1e-6)[0]) > 1e-2


class TinyGatedDeltaNet(torch.nn.Module):
    """A layer with the functions that are replaced; the rules are transformers'."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.models.qwen3_5 import modeling_qwen3_5 as source

        self.layer_idx = 0
        self.chunk_gated_delta_rule = source.torch_chunk_gated_delta_rule
        self.recurrent_gated_delta_rule = source.torch_recurrent_gated_delta_rule
        self.causal_conv1d_fn, self.causal_conv1d_update = None, source.torch_causal_conv1d_update


@pytest.mark.parametrize("name", ["vllm-cpu", "vllm-cpu-w4a16", "vllm-cutlass", "float32"])
def test_layers_have_the_kernels_of_their_profile(name: str) -> None:
    """A prompt of 70 steps, 10 steps of its answer in the same pass, and one more that is decoded alone."""
    layer, batch = TinyGatedDeltaNet(), RaggedBatch()
    arrays = inputs(1, 81, heads=1, seed=4)
    arrays[0], arrays[1] = arrays[0] * 0.01, arrays[1] * 0.01
    head, middle, last = (
        [a[:, span] for a in arrays] for span in (slice(70), slice(70, 80), slice(80, 81))
    )
    on_cpu = name.startswith("vllm-cpu")
    rule = gated_delta_rule_cpu if on_cpu else deltanet.gated_delta_rule
    rule = rule if name == "float32" else functools.partial(rule, to_operand=to_bf16)
    first, state = run(rule, head)
    one = [[a[0, :, 0] for a in part] for part in (middle, last)]
    second, state = decoded(*one[0], state[0, 0], 1e-5 if on_cpu else 1e-6)
    third, _ = decoded(*one[1], state, 1e-5 if on_cpu else 1e-6)
    batch.set(None, 80, None, torch.tensor([70]))
    with deltanet.ragged_layers([layer], profiles.find_profile(name), batch):
        out, state = run(
            layer.chunk_gated_delta_rule,
            [np.concatenate(p, 1) for p in zip(head, middle, strict=True)],
        )
        alone, _ = run(layer.recurrent_gated_delta_rule, last, state)
    expected = np.concatenate((first[0, :, 0], second, third))
    expected = expected if name == "float32" else bf16(expected)
    assert distance(np.concatenate((out[0, :, 0], alone[0, :, 0])), expected) < 2e-4
    assert layer.chunk_gated_delta_rule.__name__ == "torch_chunk_gated_delta_rule"
    assert layer.recurrent_gated_delta_rule.__name__ == "torch_recurrent_gated_delta_rule"
