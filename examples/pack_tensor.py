"""Pack a matrix to NVFP4 and print size and error: python examples/pack_tensor.py"""

import numpy as np

import annie_quant as aq

rng = np.random.default_rng(0)
w = rng.normal(0, 0.02, (4096, 4096)).astype(np.float32)

print(f"bf16    {w.size * 2 / 1e6:6.1f} MB")
for scale in ("amax", "four_over_six", "sweep"):
    t = aq.nvfp4.pack(w, scale=scale)
    back = aq.nvfp4.unpack(t, dtype="float32")
    error = np.linalg.norm(back - w) / np.linalg.norm(w)
    print(f"NVFP4   {t.nbytes / 1e6:6.1f} MB  relative error {error:.4f}  ({scale})")

raw = aq.kquant.quantize(w, "Q4_K")
error = np.linalg.norm(aq.kquant.dequantize(raw, "Q4_K") - w) / np.linalg.norm(w)
print(f"Q4_K    {raw.nbytes / 1e6:6.1f} MB  relative error {error:.4f}")
