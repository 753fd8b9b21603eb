"""Compare forms of one model, tensor by tensor: python examples/compare_checkpoints.py BF16_DIR FORM [FORM …] (folders or GGUF)"""

import sys
from pathlib import Path

import annie_quant as aq

source, *forms = sys.argv[1:]
comparison = aq.checkpoint.compare(source, {Path(form).name: form for form in forms})
for form, summary in comparison.summary.items():
    matrices = sum(row.form == form for row in comparison.rows)
    print(f"{form}: {matrices} matrices, {summary.bits_per_weight:.2f} bits per weight")
    for row in comparison.worst(form, 3):
        print(f"  worst: {row.tensor} as {row.format}, relative error {row.rel_l2:.4f}")
