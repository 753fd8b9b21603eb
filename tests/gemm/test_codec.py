"""The NumPy encoder that the GPU's bytes are compared with (tests/gemm/test_gpu.py) gives the C codec's bytes."""

import ml_dtypes
import numpy as np
import pytest
from gemm_cases import adversarial, encode, underflowing

nvfp4 = pytest.importorskip(
    "annie_quant.nvfp4", reason="needs annie_quant._nvfp4", exc_type=ImportError
)


@pytest.mark.parametrize(
    ("make", "factor"), [(adversarial, 1), (underflowing, 1), (underflowing, 1e34)]
)
@pytest.mark.parametrize(
    "dtype", [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
)
def test_the_numpy_encoder_is_the_c_codec(dtype, make, factor):
    x = make(dtype)
    ts = np.float32(np.abs(x.astype(np.float32)).max() / np.float32(2688)) * np.float32(factor)
    codes, scales, values, fake = encode(x, ts)
    packed = nvfp4.pack(x, tensor_scale=float(ts))
    assert (packed.codes == codes).all()
    assert (packed.block_scale.view(np.uint8) == scales).all()
    back = nvfp4.unpack(packed, dtype=dtype.name)
    assert (back.view(np.uint8) == values.astype(dtype).view(np.uint8)).all()
    actual = nvfp4.fake_quant(x, tensor_scale=float(ts))
    assert (actual.view(np.uint8) == fake.astype(dtype).view(np.uint8)).all()
