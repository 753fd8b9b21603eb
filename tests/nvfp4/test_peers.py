"""Compared with stored output of peers: ModelOpt's GPU quantizer (H200) and torchao's packing (tests/data/make_*.py)."""

from __future__ import annotations

import numpy as np
import pytest
from nvfp4_cases import DTYPES, MIDPOINTS, bits
from paths import DATA

from annie_quant import nvfp4

DTYPE_OF = {str(d): d for d in DTYPES}


def stored(name: str) -> dict[str, dict[str, np.ndarray]]:
    """Return {"case/dtype": {array name: array}} of a stored file, x as numbers."""
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{name} is not here; tests/data/make_*.py writes it on a machine with a GPU")
    cases: dict[str, dict[str, np.ndarray]] = {}
    with np.load(path) as arrays:
        for key in arrays.files:
            if "/" in key:
                case, what = key.rsplit("/", 1)
                cases.setdefault(case, {})[what] = arrays[key]
    for case, arrays in cases.items():
        arrays["x"] = arrays["x"].view(DTYPE_OF[case.split("/")[1]])
    assert cases
    return cases


def near(quotients: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Whether values are within four last bits of one of the midpoints."""
    distance = np.abs(quotients[..., None].astype(np.float64) - places)
    return (distance <= places * 2.0**-21).any(-1)


def near_scale_ties(ratio: np.ndarray) -> np.ndarray:
    codes = nvfp4.E4M3_VALUES[:127].astype(np.float64)
    return near(ratio, (codes[1:] + codes[:-1]) / 2)


def test_gpu_exports_of_modelopt_are_equal():
    """The CUDA rule: tensor scale times a reciprocal; then all codes and block scales are as on the CPU."""
    scales_differ = 0
    for case, a in stored("modelopt_cuda_rule.npz").items():
        scale = a.get("given", a.get("scale_2"))
        if "scale_2" in a:
            assert nvfp4.tensor_scale(float(a["amax"]), "modelopt-cuda") == a["scale_2"], case
            scales_differ += int(nvfp4.tensor_scale(float(a["amax"])) != a["scale_2"])
            assert nvfp4.pack(a["x"], encoding="modelopt-cuda").tensor_scale == a["scale_2"], case
        for variant in nvfp4.variants():
            nvfp4.set_variant(variant)
            t = nvfp4.pack(a["x"], tensor_scale=float(scale), encoding="modelopt-cuda")
            np.testing.assert_array_equal(t.block_scale.view(np.uint8), a["block_scale"], case)
            np.testing.assert_array_equal(t.codes, a["codes"], case)
            static = nvfp4.pack(a["x"], encoding="modelopt-static", tensor_amax=float(a["amax"]))
            np.testing.assert_array_equal(static.block_scale.view(np.uint8), a["static_448"], case)
    nvfp4.set_variant("auto")
    assert scales_differ, "the CPU's rule would have passed too"


def usable(case: str, a: dict[str, np.ndarray]) -> bool:
    return not case.startswith("random bits") and 1e-3 < float(a["amax"]) < 1e6


def test_gpu_exports_with_room_for_four_over_six():
    """static_256 is each block's amax with F = 256; ours is that code, or the one of 1.5 amax if its error is lower."""
    taken = 0
    for case, a in stored("modelopt_cuda_rule.npz").items():
        if not usable(case, a):
            continue
        t = nvfp4.pack(
            a["x"], encoding="modelopt-static", scale="four_over_six", tensor_amax=float(a["amax"])
        )
        got, six = t.block_scale.view(np.uint8), a["static_256"]
        blocks = np.abs(a["x"].astype(np.float32)).reshape(*six.shape, 16)
        ratio = blocks.max(-1) * np.float32(1.5) / np.float32(6)
        ratio = (
            np.where(ratio == 0, np.float32(1), ratio)
            * np.float32(256)
            / (np.float32(a["amax"]) / np.float32(6))
        )
        four = np.clip(ratio, np.float32(2**-9), np.float32(448)).astype(nvfp4.E4M3).view(np.uint8)
        lower = squared_errors(blocks, four, t.tensor_scale) < squared_errors(
            blocks, six, t.tensor_scale
        )
        np.testing.assert_array_equal(got, np.where(lower & (blocks.max(-1) > 0), four, six), case)
        taken += int((got != six).sum())
    assert taken


def test_a_gpu_sweeps_amax_becomes_its_scale_byte():
    """The static rule again, with amaxes that no weight has: those that the GPU's sweep chose."""
    for case, a in stored("modelopt_cuda_rule.npz").items():
        chosen = a["sweep_amax"]
        if not usable(case, a) or not (chosen > 0).all():
            continue
        lone = np.zeros((*chosen.shape, 16), np.float32)
        lone[..., 5] = chosen
        t = nvfp4.pack(
            lone.reshape(len(chosen), -1), encoding="modelopt-static", tensor_amax=float(a["amax"])
        )
        np.testing.assert_array_equal(t.block_scale.view(np.uint8), a["sweep_scale"], case)


def squared_errors(blocks: np.ndarray, codes: np.ndarray, scale: np.float32) -> np.ndarray:
    """Return the errors of magnitudes [..., 16] with the steps codes [...] * scale, in float64 and in column order."""
    step = (nvfp4.E4M3_VALUES[codes] * np.float32(scale)).astype(np.float64)[..., None]
    distance = np.abs(
        blocks.astype(np.float64)[..., None]
        - np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]) * step[..., None]
    )
    return np.add.accumulate(distance.min(-1) ** 2, -1)[..., -1]


def test_activations_on_a_gpu_differ_only_on_near_ties():
    """The op divides approximately on the GPU. If no quotient is near a tie, all bits are equal, including signs of zeros."""
    same = total = 0
    for case, a in stored("modelopt_cuda_rule.npz").items():
        x, scale = a["x"], nvfp4.tensor_scale(float(a["amax"]), "modelopt-cuda")
        wrong = bits(nvfp4.fake_quant(x, float(scale))) != a["fake"]
        with np.errstate(all="ignore"):
            blocks = np.abs(x.astype(np.float32)).reshape(*x.shape[:-1], -1, 16)
            ratio = blocks.max(-1) / (np.float32(6) * scale)
            step = np.minimum(ratio, np.float32(448)).astype(nvfp4.E4M3).astype(np.float32) * scale
            step = np.where(step >= np.float32(1e-5), step, np.float32(1))
            tied = (
                near(blocks / step[..., None], MIDPOINTS.astype(np.float64))
                | near_scale_ties(ratio)[..., None]
            )
        assert not (wrong & ~tied.reshape(x.shape)).any(), case
        same += int((~wrong).sum())
        total += wrong.size
    assert same / total > 0.98


def test_a_gpu_sweep_has_no_lower_error_than_ours():
    """Its errors are float32 sums of approximate quotients, ours are exact: if the codes differ, ours has no larger error."""
    for case, a in stored("modelopt_cuda_rule.npz").items():
        x, amax = a["x"].astype(np.float32), np.float32(a["amax"])
        if not usable(case, a):
            continue
        scale = amax / np.float32(2688)
        ours = nvfp4.pack(x, tensor_scale=float(scale), scale="sweep")

        def error(codes: np.ndarray, x=x, scale=scale) -> np.ndarray:
            step = nvfp4.E4M3_VALUES[codes].astype(np.float64)[..., None] * np.float64(scale)
            blocks = np.abs(x.astype(np.float64)).reshape(*codes.shape, 16)
            grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]) * step[..., None]
            return (np.abs(blocks[..., None] - grid).min(-1) ** 2).sum(-1)

        mine, theirs = error(ours.block_scale.view(np.uint8)), error(a["sweep_scale"])
        assert (mine <= theirs * (1 + 1e-6) + 1e-30).all(), case


def test_torchao_differs_only_by_reciprocals_and_the_sign_of_zero():
    """torchao divides amax by 6 first, clamps block scales to 2^-6, multiplies by reciprocals and preserves -0.0; nothing else."""
    for case, a in stored("torchao_nvfp4.npz").items():
        x, scale = a["x"].astype(np.float32), np.float32(a["tensor_scale"])
        t = nvfp4.pack(a["x"], tensor_scale=float(scale))
        blocks = x.reshape(8, 16, 16)
        amax = np.abs(blocks).max(-1)
        wrong_scale = (t.block_scale.view(np.uint8) != a["block_scale"]) & (
            amax > 0
        )  # a zero block has any scale
        ratio = amax / (np.float32(6) * scale)
        small = (
            ratio < 2.0**-6
        )  # its smallest block scale is the smallest normal number; in ModelOpt and here it is 2^-9
        assert (a["block_scale"][small & (amax > 0)] == 0x08).all(), case
        assert not (wrong_scale & ~small & ~near_scale_ties(ratio)).any(), case
        nibbles = [np.stack([c & 15, c >> 4], -1).reshape(8, 16, 16) for c in (t.codes, a["codes"])]
        quotient = np.abs(blocks) / (t.block_scale.astype(np.float32) * scale)[..., None]
        explained = (
            near(quotient, MIDPOINTS.astype(np.float64)) | wrong_scale[..., None] | (quotient == 0)
        )
        wrong = nibbles[0] != nibbles[1]
        assert not (wrong & ~explained).any(), case
        assert ((nibbles[0] & 7)[quotient == 0] == (nibbles[1] & 7)[quotient == 0]).all(), case
        if case.startswith("gaussian"):
            assert not wrong_scale.any() and not wrong.any(), case
        if case.startswith("minus zero"):
            assert (nibbles[1] == 8).all() and not nibbles[0].any()
