# %% [markdown]
# # 3. Choosing the scale
#
# The format leaves one choice: the scale of a block. ModelOpt uses the block's largest element divided by 6; four-over-six
# also tries 4 instead of 6; a sweep tries all 126 scales. Q4_K, with 4.5 bits per weight, is the comparison.

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy, which safetensors returns
import numpy as np
from safetensors import safe_open

import annie_quant as aq

tiny = Path(aq.__file__).parent / "assets" / "tiny-annie" / "model.safetensors"
with safe_open(tiny, "numpy") as file:
    names = [
        k
        for k in file.keys()
        if k.endswith(("gate_proj.weight", "q_proj.weight", "in_proj_qkv.weight"))
    ]
    weights = {k: file.get_tensor(k).astype(np.float32) for k in names}
print(len(weights), "matrices,", sum(w.size for w in weights.values()), "weights")


# %%
def relative(w, back):
    return float(np.linalg.norm(back - w) / np.linalg.norm(w))


errors = {rule: [] for rule in ("amax", "four_over_six", "sweep", "Q4_K")}
for w in weights.values():
    for rule in ("amax", "four_over_six", "sweep"):
        errors[rule].append(
            relative(w, aq.nvfp4.unpack(aq.nvfp4.pack(w, scale=rule), dtype="float32"))
        )
    errors["Q4_K"].append(relative(w, aq.kquant.dequantize(aq.kquant.quantize(w, "Q4_K"), "Q4_K")))

figure, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
for rule, values in errors.items():
    axes.plot(values, [rule] * len(values), "|", markersize=16)
axes.set(xlabel="relative L2 error of the weights", title=f"{len(weights)} matrices of tiny-annie")
plt.show()
for rule, values in errors.items():
    print(f"{rule:>14}: median {np.median(values):.4f}")
assert np.median(errors["sweep"]) <= np.median(errors["four_over_six"]) <= np.median(errors["amax"])

# %% [markdown]
# A lower error of the weights does not mean better manners: notebook 7 evaluates the model. With importances (mean square of
# each input) the sweep minimises the error of the layer's output.

# %%
w = next(iter(weights.values()))
importance = np.random.default_rng(0).lognormal(0, 1.5, w.shape[1]).astype(np.float32)
for title, weighting in (("plain", None), ("weighted", importance)):
    back = aq.nvfp4.unpack(aq.nvfp4.pack(w, scale="sweep", importance=weighting), dtype="float32")
    print(f"{title:>9}: weighted squared error {float((importance * (back - w) ** 2).sum()):.4f}")
