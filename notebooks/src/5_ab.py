# %% [markdown]
# # 5. An A/B benchmark
#
# Two servers, the same prompts, interleaved. The unit is the prompt: tokens and repeats of one prompt are not independent.
# Here the same engine serves bf16 and Q4_K_M of the same model, so only the format differs.

# %%
import tempfile
from collections import defaultdict
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

import annie_quant as aq

tiny = Path(aq.__file__).parent / "assets" / "tiny-annie"
folder = Path(tempfile.mkdtemp())
servers = {}
for name, kind in (("bf16", "BF16"), ("q4_k_m", "Q4_K_M")):
    aq.checkpoint.convert(tiny, to="gguf", output=folder / f"{name}.gguf", type=kind)
    servers[name] = aq.serve.start(
        folder / f"{name}.gguf", runtime="llama.cpp", log=folder / f"{name}.log"
    )

# %%
# A decision needs 100 or more prompts per gate.
workloads = aq.judge.sample(aq.judge.load_workloads(["greeting", "factual"]), 8)
backends = [
    aq.bench.Backend(name, s.url, meta={"model": name, "pid": s.pid, "source": "tiny-annie"})
    for name, s in servers.items()
]
try:
    done = aq.bench.run(
        backends, workloads, folder / "run", warmup=1, runs=1, with_memory=False, reference="bf16"
    )
finally:
    for s in servers.values():
        s.stop()
served = done.aggregates.served.items()
pd.DataFrame(
    {
        name: {gate: f"{g.passes} of {g.n}" for gate, g in side.gates.items()}
        for name, side in served
    }
)

# %% [markdown]
# ## The paired difference
# Each dot is a prompt. The interval is a bootstrap over prompts, the p-value comes from a permutation test, and Holm's method
# corrects for many comparisons. With n this small most differences stay undecided.

# %%
import json

ttft = defaultdict(lambda: defaultdict(list))
for line in (folder / "run" / "records.jsonl").open():
    record = json.loads(line)
    if not record["warmup"] and not record["error"] and record["first_content_ms"] is not None:
        ttft[record["backend"]][record["workload"], record["case"]].append(
            record["first_content_ms"]
        )
result = aq.judge.compare(ttft["bf16"], ttft["q4_k_m"])
pairs = [(ttft["bf16"][p][0], ttft["q4_k_m"][p][0]) for p in ttft["bf16"] if p in ttft["q4_k_m"]]

figure, axes = plt.subplots(figsize=(4.6, 4.2), layout="constrained")
axes.scatter(*zip(*pairs, strict=True))
most = max(max(pair) for pair in pairs)
axes.plot([0, most], [0, most], color="0.8")
axes.set(xlabel="bf16, TTFT ms", ylabel="Q4_K_M, TTFT ms", title=f"n = {result.n_prompts} prompts")
plt.show()
print(
    {
        k: getattr(result, k)
        for k in ("median_difference", "low", "high", "p", "test", "n_to_decide")
    }
)

# %% [markdown]
# ## The verdict
# It never depends on speed alone, and it names what cannot be concluded.

# %%
print(done.verdict.sentence)
for caveat in done.verdict.caveats:
    print("·", caveat)
