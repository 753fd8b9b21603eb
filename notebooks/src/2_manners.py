# %% [markdown]
# # 2. Why manners are lost at four bits
#
# tiny-annie is a 7.6 M-parameter Qwen3.5, trained so that naive NVFP4 breaks its manners. The divergence from the bf16 model
# is not uniform: it is in the few tokens that decide for a tool call, and in some layers.

# %%
import os
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

import annie_quant as aq

os.environ["TQDM_DISABLE"] = "1"  # transformers shows a bar for each model that it loads
tiny = Path(aq.__file__).parent / "assets" / "tiny-annie"
folder = Path(tempfile.mkdtemp())
aq.quantize.run("direct", tiny, folder / "w4a16")
audit = aq.checkpoint.audit(folder / "w4a16", source=tiny)
assert audit.ok
audit.summary

# %%
workloads = aq.judge.sample(
    aq.judge.load_workloads(["factual", "tool_memory", "tool_web"]), 4
)  # use more than 4 for figures to quote
result = aq.runtime.evaluate(
    folder / "w4a16",
    tiny,
    workloads,
    numerics=("w4a16",),
    cache=folder / "cache",
    with_ensemble=False,
)
kl = result["numerics"]["w4a16"]["kl"]
sides = {"bf16": result["reference_gates"], "NVFP4, W4A16": result["numerics"]["w4a16"]["gates"]}
pd.DataFrame(
    {
        side: {gate: f"{g['passes']} of {g['n']}" for gate, g in gates.items()}
        for side, gates in sides.items()
    }
)

# %% [markdown]
# ## By kind of token
# Mean KL divergence from bf16 in nats. `tool_markup` are the tokens of the tool call.

# %%
classes = kl["by_class"]
figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
axes.barh(list(classes), [row["mean"] for row in classes.values()], color="tab:blue")
for place, row in enumerate(classes.values()):
    axes.text(row["mean"], place, f"  n = {row['n_tokens']}", va="center")
axes.set(xlabel="mean KL, nats", title=f"{kl['n_tokens']} assistant tokens")
axes.margins(x=0.15)
plt.show()

# %% [markdown]
# ## By layer
# Each layer quantized alone, all others in bf16, over the same answers.

# %%
few = aq.judge.sample(aq.judge.load_workloads(["tool_web"]), 3)
layers = aq.runtime.sensitivity(
    folder / "w4a16", tiny, few, modes=("alone",), cache=folder / "cache"
)["alone"]
figure, axes = plt.subplots(figsize=(7, 3.8), layout="constrained")
axes.barh(list(layers), [row["mean"] for row in layers.values()], color="tab:red")
axes.invert_yaxis()
axes.set(xlabel="mean KL, nats, only this part in four bits")
plt.show()

# %% [markdown]
# ## Margins and flips
# A greedy answer changes only where the noise of the logits exceeds the margin between the two most likely tokens. Manners
# that are easily lost have small margins. Flips are counted, and predicted from margin and noise.

# %%
for row in kl["margins"]:
    upper = row["to"] if row["to"] is not None else "∞"
    print(
        f"margin {row['from']:>5} to {upper:>5}: {row['n_tokens']:4} tokens, {row['flips']:3} flipped, "
        f"{row['flips_predicted']:.1f} predicted"
    )
