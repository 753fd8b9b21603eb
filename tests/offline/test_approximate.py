"""The approximate functions of vLLM's CPU kernels, against their documented bounds and the processor's own instruction."""

import numpy as np
import pytest
import vrcp14

torch = pytest.importorskip(
    "torch", reason="the runtime needs torch: pip install annie-quant[quantize]"
)

from annie_quant.offline.deltanet_cpu import exp_u20, fast_exp, reciprocal  # noqa: E402


def mantissas() -> torch.Tensor:
    """All float32 of [1, 2)."""
    return torch.from_numpy((np.arange(1 << 23, dtype=np.int32) | 0x3F800000).view(np.float32))


def test_the_exponential_is_as_far_off_as_its_paper_states():
    """Malossi et al., 2015: a cubic correction leaves a relative error of about 1e-4 at most; without it 6 %."""
    x = torch.linspace(-20, 20, 1_000_001)
    error = (fast_exp(x).double() / x.double().exp() - 1).abs().max()
    assert 2e-5 < error < 1.2e-4
    assert float(fast_exp(torch.zeros(1))) == pytest.approx(
        1 - 0.00010703434948458272 / 2, abs=1e-5
    )
    assert fast_exp(torch.tensor([-88.0, -200.0, -1e30])).tolist() == [0, 0, 0]


def test_the_other_exponential_is_within_20_units_in_the_last_place():
    x = torch.linspace(-87, 88, 1_000_001)
    exact = x.double().exp()
    units = (exp_u20(x).double() - exact).abs() / torch.from_numpy(
        np.spacing(exact.float().numpy())
    ).double()
    assert 1 < units.max() <= 20
    assert exp_u20(torch.zeros(1)).item() == 1


def test_the_reciprocal_is_as_far_off_as_the_instruction_may_be():
    """Intel's manual: the relative error of VRCP14PS is below 2^-14."""
    x = mantissas()
    error = (reciprocal(x).double() * x.double() - 1).abs().max()
    assert 2**-15 < error < 2**-14


def test_the_reciprocal_of_a_power_of_two_is_exact_and_scales_with_it():
    powers = 2.0 ** torch.arange(-20.0, 100.0)
    assert torch.equal(reciprocal(powers), 1 / powers)
    x = mantissas()[::4099]
    assert torch.equal(reciprocal(x * 2.0**40), reciprocal(x) * 2.0**-40)
    assert reciprocal(torch.tensor([3e38])).item() == 0


VENDOR, FEATURES = vrcp14.processor()


@pytest.mark.skipif(
    VENDOR != "AuthenticAMD" or "avx512f" not in FEATURES or vrcp14.compiler() is None,
    reason="the table is of AMD's processors with AVX-512; this one is another, or has no C compiler",
)
def test_the_reciprocal_is_the_instructions_bit_for_bit():
    x = mantissas()
    assert np.array_equal(reciprocal(x).numpy(), vrcp14.instruction(x.numpy()))
    wide = torch.exp(torch.linspace(-80, 80, 1 << 16))
    assert np.array_equal(reciprocal(wide).numpy(), vrcp14.instruction(wide.numpy()))
