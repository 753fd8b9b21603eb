# %% [markdown]
# # 1. The format by hand
#
# NVFP4 stores a weight in four bits: one of sixteen values (E2M1), with one eight-bit scale (E4M3) per 16 weights and one
# float32 scale per tensor. Here we quantize a block with NumPy alone, compare it with the codec byte by byte, and plot the error.

# %%
import matplotlib.pyplot as plt
import numpy as np

import annie_quant as aq

rng = np.random.default_rng(0)
w = rng.normal(0, 0.02, (64, 256)).astype(np.float32)
t = aq.nvfp4.pack(w)
t

# %% [markdown]
# The same block with NumPy: the tensor's scale puts the largest block scale at 448 (E4M3's largest) and the largest element
# at 6 (E2M1's largest); a block's scale is its largest element divided by 6; an element becomes the nearest of sixteen values.

# %%
tensor_scale = np.float32(np.abs(w).max()) / np.float32(6 * 448)
block = w[0, :16]
scale = (np.abs(block).max() / 6 / tensor_scale).astype(aq.nvfp4.E4M3)
values = block / (np.float32(scale) * tensor_scale)
grid = aq.nvfp4.E2M1_VALUES[:8]
nearest = np.sign(values) * grid[np.abs(np.abs(values)[:, None] - grid).argmin(1)]

packed = t.codes[0, :8]
ours = aq.nvfp4.E2M1_VALUES[np.stack([packed & 15, packed >> 4], -1).reshape(-1)]
assert np.float32(scale) == np.float32(t.block_scale[0, 0]) and np.array_equal(nearest, ours)
print("scale", np.float32(scale), "\nbefore", np.round(values, 2), "\nafter ", ours)

# %% [markdown]
# ## Ties
# Halfway between two values, the one with the even code is chosen, so that errors do not accumulate in one direction.

# %%
halfway = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2, np.float32)[None]
rounded = aq.nvfp4.unpack(aq.nvfp4.pack(halfway, tensor_scale=1.0), dtype="float32")
for before, after in zip(halfway[0, :7], rounded[0, :7], strict=True):
    print(f"{before:5.2f} → {after:g}")
assert rounded[0, :7].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]

# %% [markdown]
# ## The error
# Left: output over input for one block scale. Right: the relative error in a tensor by the size of the weight. Small weights
# of a block have the largest relative error: they share the scale of their largest neighbour.

# %%
x = np.linspace(-1, 1, 2001, dtype=np.float32)
blocks = np.zeros((x.size, 16), np.float32)
blocks[:, 0], blocks[:, 1] = x, 1.0
back = aq.nvfp4.unpack(aq.nvfp4.pack(blocks, tensor_scale=1 / 2688), dtype="float32")[:, 0]
whole = aq.nvfp4.unpack(t, dtype="float32")

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
left.plot(x, x, color="0.8")
left.plot(x, back, color="tab:blue")
left.set(
    xlabel="weight, over the block's largest",
    ylabel="after NVFP4",
    title="Sixteen values of one block",
)
relative = np.abs(whole - w) / np.abs(w)
right.scatter(np.abs(w).ravel(), relative.ravel(), s=2, alpha=0.3)
right.set(
    xscale="log",
    xlim=(1e-4, 0.1),
    ylim=(0, 1.05),
    xlabel="|weight|",
    ylabel="relative error",
    title="A tensor",
)
plt.show()
aq.nvfp4.error(w, t)
