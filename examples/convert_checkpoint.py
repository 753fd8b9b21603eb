"""bf16 → NVFP4 → GGUF, straight from the shards: python examples/convert_checkpoint.py BF16_DIR OUTPUT_DIR"""

import sys
from pathlib import Path

import annie_quant as aq

source = Path(sys.argv[1])
output = Path(sys.argv[2])
result = aq.quantize.run("direct", source, output / "nvfp4", scale="sweep")
print(f"NVFP4: {result.size_bytes / 1e6:.1f} of {result.source_bytes / 1e6:.1f} MB")
assert aq.checkpoint.audit(output / "nvfp4", source=source).ok

for name, folder, kind in (("nvfp4", output / "nvfp4", None), ("q4_k_m", source, "Q4_K_M")):
    file = aq.checkpoint.convert(folder, to="gguf", output=output / f"{name}.gguf", type=kind)
    print(f"{file.path}: {file.size_bytes / 1e6:.1f} MB")
