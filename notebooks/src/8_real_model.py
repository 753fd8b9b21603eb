# %% [markdown]
# # 8. What quantizing costs a real model
#
# Qwen2.5-Coder-0.5B-Instruct, quantized by seven recipes of four libraries to the same 746 MB,
# answers the 940 prompts of BFCL that need a call. The leaderboard's own checker counts the right
# ones. The figures were measured on an H200 on 28 and 29 November 2026, with one calibration
# (tests/perf/bfcl.md has the commands, intervals and other draws); this notebook only shows them.

# %%
import sys

import pandas as pd

sys.path.insert(0, "../tools")
import make_pictures

rows = pd.read_json(make_pictures.ROWS, lines=True)
rows

# %% [markdown]
# ## The chart
#
# Every checkpoint has the same bytes, so all decode equally fast. Red is the checkpoint as it is
# stored, blue the same weights with 16-bit inputs. `best` was made twice from the same calibration,
# so it has two red dots.

# %%
figure = make_pictures.draw_chart()

# %% [markdown]
# ## What `best` gives up
#
# Four-bit inputs make long prompts fast on Blackwell. `best` rounds the inputs of few linears only,
# so its first token comes later. Which of the two matters depends on your prompts: `annie-quant
# quantize --strategy gptq` rounds all inputs.

# %%
table = pd.DataFrame(
    {
        "lost calls, as stored": make_pictures.BF16_CALLS - rows["w4a4_calls"].map(max),
        "lost calls, W4A16": make_pictures.BF16_CALLS - rows["w4a16_calls"].map(max),
        "linears with 4-bit inputs": rows["inputs_in_4_bits"] / make_pictures.LINEARS,
    }
)
table.set_index(rows["library"] + ": " + rows["recipe"])
