# %% [markdown]
# # 6. Roofline of GB10, and the kernels' figures
#
# One stream decodes no faster than the weights can be read: bandwidth divided by bytes per token. GB10 (DGX Spark) has LPDDR5X
# with 273 GB/s nominal; measured reads reach 232 GB/s. The rest is arithmetic.

# %%
import re
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

READ_GB_S = 232.0
bits = {"bf16": 16.0, "FP8": 8.0, "Q4_K_M": 4.85, "NVFP4": 4.5}
linears, head = (
    6.95e9,
    248_320 * 4096,
)  # Qwen3.5-9B: weights of its linears, and of its vocabulary head
gigabytes = {k: (linears * b + head * b) / 8e9 for k, b in bits.items()}
gigabytes["NVFP4, head bf16"] = (linears * 4.5 + head * 16) / 8e9
for form, size in gigabytes.items():
    print(
        f"{form:>17}: {size:5.2f} GB per token, at most {READ_GB_S / size:5.1f} tok/s for one stream"
    )

# %% [markdown]
# ## The roof
# With 500 dense TFLOP/s in FP4 and a quarter of it in bf16, arithmetic is the limit above about 600 tokens at once. A voice
# assistant's single stream is on the left slope, where only the size of the format determines the speed.

# %%
tokens = np.geomspace(1, 8192, 100)
figure, axes = plt.subplots(figsize=(7.5, 3.6), layout="constrained")
for form, peak, css in (("bf16", 125e12, "tab:gray"), ("NVFP4", 500e12, "tab:blue")):
    intensity = 2 * tokens / (bits[form] / 8)
    axes.loglog(tokens, np.minimum(peak, intensity * READ_GB_S * 1e9) / 1e12, color=css, label=form)
axes.set(
    xlabel="tokens at once",
    ylabel="TFLOP/s, at most",
    title="GB10 on paper: nothing here was run on one",
)
axes.legend()
plt.show()

# %% [markdown]
# ## Measured kernels
# tests/perf/gemm.md has the measured table of the W4A16 kernels on an H200, with its command. Speed-up over cuBLAS bf16;
# the limit is 16 / 4.5 = 3.56.

# %%
root = next(p for p in (Path.cwd(), *Path.cwd().parents) if (p / "tests/perf/gemm.md").is_file())
text = (root / "tests/perf/gemm.md").read_text()
lines = text[text.index("| N x K") :].split("\n\n")[0].splitlines()  # the first table
header = [c.strip() for c in lines[0].strip("|").split("|")]
sizes = [int(c.removeprefix("M = ")) for c in header[1:]]
figure, axes = plt.subplots(figsize=(7.5, 3.6), layout="constrained")
for line in lines[2:]:
    cells = [c.strip() for c in line.strip("|").split("|")]
    best = [
        max(map(float, re.search(r"\(([\d.]+) / ([\d.]+)x\)", c).groups())) if "(" in c else np.nan
        for c in cells[1:]
    ]
    axes.semilogx(sizes, best, marker=".", base=2, label=cells[0])
axes.axhline(16 / 4.5, color="0.6", linestyle=":")
axes.axhline(1, color="0.8")
axes.set(xlabel="tokens at once (M)", ylabel="times cuBLAS bf16", title="W4A16 kernels, one H200")
axes.legend(fontsize=7, ncols=2)
plt.show()
