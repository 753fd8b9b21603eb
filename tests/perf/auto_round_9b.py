"""Time AutoRound on the layers of a 9B's shape that best_9b.py makes.

    python tests/perf/best_9b.py DIR --layers 4 --set effort=normal             # writes model and text, and times ours
    PEER_VENV/bin/python tests/perf/auto_round_9b.py DIR --steps 100            # one JSON line

The same text, cut into sequences of 2,048 tokens, and the same linears: all but in_proj_a and in_proj_b. AutoRound's scheme NVFP4
with its defaults (its learning rate, batches of 8 sequences unless --batch). A machine without flash-linear-attention would run
DeltaNet in transformers' torch form, which takes most of the time: both sides get quantize/delta_rule.py's. AutoRound's integer
attention masks are causal ones (peer_recipes.py).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from peer_recipes import use_causal_attention, use_faster_deltanet

from annie_quant.quantize import delta_rule


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=2048, help="of a sequence")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    arguments = parser.parse_args()
    import transformers
    from auto_round import AutoRound
    from transformers.models.qwen3_5 import modeling_qwen3_5

    use_causal_attention()
    use_faster_deltanet()
    modeling_qwen3_5.causal_conv1d_fn = delta_rule.conv_in_torch
    path, device = arguments.folder / "model", "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    rows = [json.loads(line) for line in (arguments.folder / "calibration.jsonl").read_text().splitlines()]
    text = [token for row in rows for m in row["messages"] for token in tokenizer(m["content"])["input_ids"]]
    count = min(arguments.samples, len(text) // arguments.tokens) // arguments.batch * arguments.batch
    ids = torch.tensor(text[: count * arguments.tokens]).view(count, arguments.tokens)
    start = time.monotonic()
    batches = [{"input_ids": batch, "attention_mask": torch.ones_like(batch)} for batch in ids.split(arguments.batch)]
    rounder = AutoRound(
        model,
        tokenizer,
        scheme="NVFP4",
        dataset=batches,
        iters=arguments.steps,
        nsamples=len(ids),
        seqlen=arguments.tokens,
        batch_size=arguments.batch,
        device_map=0 if device == "cuda" else "cpu",
        ignore_layers="lm_head,in_proj_a,in_proj_b",
    )
    rounder.quantize()
    layers = model.config.num_hidden_layers
    row = {
        "steps": arguments.steps,
        "batch": arguments.batch,
        "sequences": len(ids),
        "layers": layers,
        "seconds": round(time.monotonic() - start, 1),
        "seconds_per_layer": round((time.monotonic() - start) / layers, 1),
        "gpu_peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if device == "cuda" else None,
    }
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
