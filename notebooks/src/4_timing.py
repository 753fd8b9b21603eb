# %% [markdown]
# # 4. Timing a stream: three clocks
#
# A token is sent by the server (its clock), reaches this machine (the kernel's timestamp of the packet) and is read by the
# client (user space). A client that uses only the last one counts its own delays as the server's.

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import annie_quant as aq

folder = Path(tempfile.mkdtemp())
tiny = Path(aq.__file__).parent / "assets" / "tiny-annie"
aq.checkpoint.convert(tiny, to="gguf", output=folder / "tiny.gguf", type="Q4_K_M")
server = aq.serve.start(folder / "tiny.gguf", runtime="llama.cpp", log=folder / "server.log")

# %%
persona = aq.data.load_persona("annie")
questions = [
    "Hello, how are you?",
    "What is the capital of Japan?",
    "Write a long story about a robot.",
]
requests = [
    aq.stream.chat(
        server.url,
        None,
        [{"role": "system", "content": persona.system_prompt}, {"role": "user", "content": q}],
        tag=f"{i + 1}",
        max_tokens=80,
        temperature=0,
        chat_template_kwargs={"enable_thinking": False},
    )
    for i, q in enumerate(questions)
]
timings = aq.stream.run(requests, concurrency=1, warmup=requests[:1])
server.stop()
timings.to_pandas("records")[
    ["tag", "first_content_ms", "tpot_ms", "e2e_ms", "completion_tokens", "finish_reason"]
]

# %% [markdown]
# ## Kernel and user
# How long each event waited in the kernel until this process read it. On a busy machine the long tail comes from the machine,
# not from the server.

# %%
events = timings.events[timings.events["kernel_ns"] > 0]
if len(events):
    waited_us = (events["user_ns"] - events["kernel_ns"]) / 1e3
    plt.figure(figsize=(7, 2.8), layout="constrained")
    plt.hist(np.clip(waited_us, 0.1, None), bins=np.geomspace(0.1, max(1e3, waited_us.max()), 40))
    plt.xscale("log")
    plt.xlabel("microseconds from the kernel's stamp to the client")
    plt.title(f"n = {len(events)} events, median {np.median(waited_us):.0f} µs")
    plt.show()
else:
    print("this kernel has no timestamps for this connection")

# %% [markdown]
# ## The server's own timing
# llama.cpp reports its computing time. If a request is shorter than that, a clock is wrong.

# %%
for by_kernel, by_user in zip(
    timings.records(clock="kernel"), timings.records(clock="user"), strict=True
):
    own = by_kernel["server_timings"] or {}
    worked = own.get("prompt_ms", 0) + own.get("predicted_ms", 0)
    print(
        f"request {by_kernel['tag']}: server {worked:.1f} ms, kernel {by_kernel['e2e_ms']:.1f} ms, "
        f"user {by_user['e2e_ms']:.1f} ms, text: {by_kernel['text'][:50]!r}"
    )

# %% [markdown]
# Raw frames with their timestamps can be saved and decoded again, so that a figure can be checked years later.

# %%
timings.save(folder / "raw")
again = aq.stream.Timings.load(folder / "raw")
assert [r["first_content_ms"] for r in again.records()] == [
    r["first_content_ms"] for r in timings.records()
]
