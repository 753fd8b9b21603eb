"""Evaluate an NVFP4 checkpoint without a server: python examples/evaluate_offline.py MODEL_DIR BF16_DIR [PROMPTS_PER_GATE]"""

import sys

import annie_quant as aq

model = sys.argv[1]
reference = sys.argv[2]
n = int(sys.argv[3]) if len(sys.argv) > 3 else 100
workloads = aq.judge.sample(aq.judge.load_workloads(["factual", "tool_memory"]), n)
result = aq.runtime.evaluate(model, reference, workloads)

for numerics, side in result["numerics"].items():
    kl = side["kl"]
    print(
        f"{numerics}: mean KL {kl['mean']:.4f} nats over {kl['n_tokens']} tokens, same top token {kl['same_top']:.1%}"
    )
    for gate, row in side["gates"].items():
        print(
            f"  {gate:14} {row['passes']}/{row['n']}  {row['low']:.2f} to {row['high']:.2f}  {row['verdict']}"
        )
