# %% [markdown]
# # 7. Your own model: from a log to a verdict
#
# Set `model` to the folder of your bf16 checkpoint, `logs` to your chat log and `n` to 100 or more. Nothing else changes.

# %%
import json
import os
import tempfile
from pathlib import Path

import pandas as pd

import annie_quant as aq

os.environ["TQDM_DISABLE"] = "1"  # transformers shows a bar for each model that it loads
model = Path(aq.__file__).parent / "assets" / "tiny-annie"
n = 6
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## 1. A log
# A log of a home controller with twelve tools stands for yours: one chat per line, with a key in one of them. `annie-quant record
# --upstream URL` records such a file from real traffic; `init` also reads ShareGPT, agent transcripts, Parquet and the logs of
# vLLM and llama.cpp.

# %%
generation = aq.data.generate(
    "home", teacher="offline", n=150, output=folder / "rows.jsonl", seed=0
)
rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
tools = list(aq.data.load_persona("home").tools)
chats = [{"messages": row["messages"], "tools": row.get("tools", tools)} for row in rows]
key = "sk-proj-0123456789abcdefghijkl"
secret = [
    {"role": "user", "content": f"My key is {key}, is it on?"},
    {"role": "assistant", "content": "Yes."},
]
chats.append({"messages": chats[0]["messages"][:1] + secret, "tools": tools})
logs = folder / "chats.jsonl"
logs.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
generation

# %% [markdown]
# ## 2. Persona, gate prompts and calibration data
# What cannot be used is named with its reason, secrets are masked, and a conversation is either for calibration or for gates.

# %%
from annie_quant.data.init_folder import Sources, initialize

mine = initialize(Sources(logs=[logs], name="Home"), folder / "mine")
print(mine.cases)
print("\n".join(line for line in mine.lines if not line.endswith("may stay undecided")))
assert not any(key in path.read_text() for path in (folder / "mine").rglob("*") if path.is_file())

# %% [markdown]
# ## 3. Quantize and audit
# `naive` quantizes every linear but the head; `mlp_only` does not quantize attention.

# %%
calibration = folder / "mine" / "calibration.jsonl"
audits = {}
for strategy in ("naive", "mlp_only"):
    aq.quantize.run(strategy, model, folder / strategy, calib_data=calibration, calib_samples=8)
    audits[strategy] = aq.checkpoint.audit(folder / strategy, source=model)
assert all(a.ok for a in audits.values())
audits["mlp_only"].summary

# %% [markdown]
# ## 4. Evaluate without a server
# No labels are needed: bf16 answers each prompt once, and the quantized model must call the same tools with the same arguments,
# and keep format, language and length. The arithmetic here is W4A4 (activations quantized too); docs/numerics.md has the others.

# %%
sides, results = {}, {}
for strategy in audits:
    results[strategy] = aq.runtime.evaluate(
        folder / strategy,
        model,
        persona=folder / "mine",
        numerics=("w4a4",),
        n_per_gate=n,
        cache=folder / "cache",
        with_ensemble=False,
    )
    sides["bf16"] = results[strategy]["reference_gates"]
    sides[f"{strategy} W4A4"] = results[strategy]["numerics"]["w4a4"]["gates"]
pd.DataFrame(
    {
        side: {gate: f"{g['passes']} of {g['n']}" for gate, g in gates.items()}
        for side, gates in sides.items()
    }
)

# %% [markdown]
# ## 5. The verdict, and the report
# With n this small most gates stay undecided, which the verdict reports. The notes name what bf16 itself does not do: nothing
# about it can be lost. `annie-quant search --persona mine` does all of this for `best`, from the fewest bytes up.

# %%
from annie_quant.core.files import write_json

for strategy, result in results.items():
    write_json(folder / "run" / "eval" / f"{strategy}.json", result)
    print(f"{strategy}: {result['verdict']['verdict']}. {result['verdict']['sentence']}")
print("\n".join(results["naive"]["notes"]))
for path in aq.report.build(folder / "run"):
    print(path.name, path.stat().st_size, "bytes")
