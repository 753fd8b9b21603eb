# %% [markdown]
# # 7. Your own model: from checkpoint to verdict
#
# Set `model` to the folder of your bf16 checkpoint and `n` to 100 or more. Nothing else changes.

# %%
import os
import tempfile
from pathlib import Path

import annie_quant as aq
from annie_quant import notebook

notebook.register()
os.environ["TQDM_DISABLE"] = "1"  # transformers shows a bar for each model that it loads
model = Path(aq.__file__).parent / "assets" / "tiny-annie"
n = 3
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## 1. Conversations of your assistant
# A teacher answers as the persona should: `openai` or `claude-cli` use a language model, `offline` uses templates.

# %%
generation = aq.data.generate("annie", teacher="offline", n=40, output=folder / "calibration.jsonl", seed=0)
print(generation)

# %% [markdown]
# ## 2. Quantize and audit
# `naive` quantizes every linear but the head; `mlp_only` does not quantize attention.

# %%
audits = {}
for strategy in ("naive", "mlp_only"):
    aq.quantize.run(strategy, model, folder / strategy, calib_data=folder / "calibration.jsonl", calib_samples=8)
    audits[strategy] = aq.checkpoint.audit(folder / strategy, source=model)
assert all(a.ok for a in audits.values())
audits["mlp_only"]

# %% [markdown]
# ## 3. Evaluate without a server
# Greedy answers with the arithmetic of servers: W4A4 (activations quantized too) and W4A16 (weights only).

# %%
workloads = aq.judge.sample(aq.judge.load_workloads(["factual", "tool_memory", "abstention"]), n)
sides, results = {}, {}
for strategy in audits:
    results[strategy] = aq.runtime.evaluate(
        folder / strategy, model, workloads, numerics=("w4a4",), cache=folder / "cache"
    )
    sides["bf16"] = results[strategy]["reference_gates"]
    sides[f"{strategy} W4A4"] = results[strategy]["numerics"]["w4a4"]["gates"]
notebook.Gates(sides)

# %% [markdown]
# ## 4. The verdict, and the report
# With n this small gates may stay undecided, which the verdict reports. `annie-quant search` does all of this for every strategy.

# %%
from annie_quant.files import write_json

for strategy, result in results.items():
    write_json(folder / "run" / "eval" / f"{strategy}.json", result)
verdict = aq.judge.verdict({"offline": {s: r["numerics"] for s, r in results.items()}, "served": {}})
print(verdict.sentence)
for path in aq.report.build(folder / "run"):
    print(path.name, path.stat().st_size, "bytes")
