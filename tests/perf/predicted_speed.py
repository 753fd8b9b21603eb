"""Predicted and measured speed of llama.cpp's server on this machine's processor, per GGUF file and depth.

    annie-quant doctor --measure                                       # this machine's device file, on an idle machine
    python tests/perf/predicted_speed.py FOLDER FILE.gguf ... --depths 0,4096

FOLDER is the model's folder (layers and caches); the bytes that a token reads are those of the file's tensors without the
embedding, or with it where the head is tied. Measured: llama.cpp's own time per token over --tokens tokens after a prompt of
`depth` tokens, the median of --repeats requests that share the prompt. The prediction is decode_speed.py's with the device file;
"bytes alone" are the bytes per second that the measured time means. Results: decode_speed.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import gguf

from annie_quant.checkpoint import ModelFolder, decode_speed
from annie_quant.checkpoint.linears import read_struct
from annie_quant.checkpoint.llama_cpp_speed import Product, Work
from annie_quant.checkpoint.size import AttentionShape
from annie_quant.ops import serving
from annie_quant.ops.llama_cpp_rates import token_seconds


def products(file: Path) -> list[Product]:
    """Return the weights of the file that every token reads."""
    tensors = [t for t in gguf.GGUFReader(file).tensors if len(t.shape) > 1]
    untied = any(t.name == "output.weight" for t in tensors)
    return [
        Product(t.tensor_type.name, int(t.n_elements // t.shape[0]), int(t.shape[0]))
        for t in tensors
        if not (untied and t.name == "token_embd.weight")
    ]


def bytes_per_token(file: Path) -> float:
    """Return the bytes of the tensors that every token reads."""
    sizes = {t.name: int(t.n_bytes) for t in gguf.GGUFReader(file).tensors}
    untied = "output.weight" in sizes
    return float(
        sum(n for name, n in sizes.items() if not (untied and name == "token_embd.weight"))
    )


def read_again(file: Path) -> None:
    """Drop the file from the page cache and read it: what was cached while memory was in pieces is up to 15 % slower."""
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while opened.read(1 << 20):
            pass


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--depths", default="0,4096")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    a = parser.parse_args()
    depths = sorted(map(int, a.depths.split(",")))
    device = decode_speed.default_device()
    print(
        f"device: {device.name}, {device.read_bytes_s / 1e9:.1f} GB/s, {1e6 * device.layer_s:.0f} us per layer\n"
    )
    print(
        "| file | depth | MB per token | predicted, ms | measured, ms (range) | error | bytes alone, GB/s |"
        "\n|---|---|---|---|---|---|---|"
    )
    for file in a.files:
        folder = ModelFolder(a.folder)
        read = decode_speed.token_bytes(folder, bytes_per_token(file))
        read = replace(
            read, work=Work(products(file), read_struct(AttentionShape, folder.text_config))
        )
        read_again(file)
        server = serving.start(
            file,
            runtime="llama.cpp",
            log=Path(tempfile.mkdtemp()) / "log",
            context=depths[-1] + a.tokens + 64,
        )
        try:
            for depth in depths:
                predicted = 1e3 / decode_speed.tok_s(read, device, depth)
                times = token_seconds(server.url.removesuffix("/v1"), depth, a.tokens, a.repeats)
                measured = 1e3 * statistics.median(times)
                print(
                    f"| {file.name} | {depth:,} | {read.at(depth) / 1e6:.0f} | {predicted:.1f} | {measured:.1f} "
                    f"({1e3 * min(times):.1f} to {1e3 * max(times):.1f}) "
                    f"| {100 * (predicted / measured - 1):+.0f} % | {read.at(depth) / measured / 1e6:.1f} |",
                    flush=True,
                )
        finally:
            server.stop()


if __name__ == "__main__":
    main()
