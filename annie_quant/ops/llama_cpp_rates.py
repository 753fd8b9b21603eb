"""Measure what a token costs in llama.cpp on this processor: small files of random weights, served and timed.

Products: per type a wide and a narrow file, so that costs per weight and per row differ. Attention: per size of the key heads
two depths, and two numbers of query heads per size; for one size also DEEP tokens, whose keys do not stay in a core's cache
between query heads. Every file has more weights than a cache holds, so that weights and keys come from memory as in a real
model. Files are removed after their measurement.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec.structs import replace

from annie_quant import kquant
from annie_quant.checkpoint.llama_cpp_speed import DEEP, Product, attention_seconds
from annie_quant.checkpoint.size import AttentionShape
from annie_quant.core import host
from annie_quant.core.errors import EnvironmentFault, need
from annie_quant.core.progress import SILENT, Progress
from annie_quant.documents import AttentionRate, LlamaCppRates, ProductRate
from annie_quant.ops import serving
from annie_quant.stream.client import fetch

if TYPE_CHECKING:
    from gguf import GGUFWriter

TYPES = ("BF16", "Q8_0", "Q4_1", "Q5_0", "Q4_K", "Q6_K", "NVFP4")
# (head size, key heads, query heads). Few key heads: where rows are short, their cost is not in proportion to their number.
ATTENTION = (
    (64, 1, 4),
    (64, 2, 8),
    (64, 2, 16),
    (64, 3, 12),
    (64, 4, 16),
    (64, 8, 16),
    (128, 2, 8),
    (128, 2, 16),
    (128, 4, 16),
    (128, 8, 16),
)
DEPTHS = (0, 512, 1536)
TOKENS = 16
REPEATS = 4
ROUNDS = 2  # of the products, because a machine's bandwidth changes over seconds
SEED = 0


class Probe(NamedTuple):
    """A model of random weights. The head is also the embedding."""

    type: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    head: str = ""

    def linears(self) -> list[tuple[str, Product]]:
        """Return the linears of a layer by llama.cpp's names."""
        queries = self.heads * self.head_dim
        keys = self.kv_heads * self.head_dim
        shapes = {
            "attn_q": (queries, self.hidden),
            "attn_k": (keys, self.hidden),
            "attn_v": (keys, self.hidden),
            "attn_output": (self.hidden, queries),
            "ffn_gate": (self.inner, self.hidden),
            "ffn_up": (self.inner, self.hidden),
            "ffn_down": (self.hidden, self.inner),
        }
        return [(name, Product(self.type, *shape)) for name, shape in shapes.items()]

    def products(self) -> list[Product]:
        """Return what a token reads."""
        each = [product for _, product in self.linears()]
        return [*each * self.layers, Product(self.head or self.type, self.vocabulary, self.hidden)]


# The last has many layers with little in them, which separates their cost from that of rows.
PRODUCT_PROBES = [
    *(Probe(kind, 16, 512, 4096, 8, 2, 64, 32768) for kind in TYPES),
    *(Probe(kind, 4, 2048, 4096, 32, 2, 64, 8192) for kind in TYPES),
    Probe("BF16", 128, 128, 128, 2, 1, 64, 8192),
]
ATTENTION_PROBES = [
    Probe("Q8_0", 12, 256, 256, n, kv, dim, 131072, "BF16") for dim, kv, n in ATTENTION
]
DEEP_PROBE = Probe(
    "Q8_0", 2, 256, 256, 16, 2, 64, 65536, "BF16"
)  # few layers: a prompt of DEEP tokens takes seconds
DEEP_SHAPE = AttentionShape(
    num_hidden_layers=DEEP_PROBE.layers,
    num_attention_heads=DEEP_PROBE.heads,
    num_key_value_heads=DEEP_PROBE.kv_heads,
    head_dim=DEEP_PROBE.head_dim,
)


def measure(progress: Progress = SILENT) -> LlamaCppRates:
    """Return the rates of this machine, in about a minute. Raises EnvironmentFault without llama.cpp."""
    need("xllamacpp", "serve")
    need("gguf", "serve")
    with tempfile.TemporaryDirectory(prefix="annie-quant-rates-") as name:
        folder = Path(name)
        progress.message("measuring llama.cpp: products per type")
        rounds = [
            [time_probe(probe, DEPTHS[:1], folder) for probe in PRODUCT_PROBES]
            for _ in range(ROUNDS)
        ]
        products = [
            statistics.median(t for times in each for t in times[0])
            for each in zip(*rounds, strict=True)
        ]
        progress.message("measuring llama.cpp: attention")
        times = [time_probe(probe, DEPTHS, folder) for probe in ATTENTION_PROBES]
        times.append(time_probe(DEEP_PROBE, (0, DEEP), folder, 2 * REPEATS))
        *attention, deep = ([statistics.median(t) for t in each] for each in times)
        return fit(products, attention, deep)


def time_probe(
    probe: Probe, depths: Sequence[int], folder: Path, repeats: int = REPEATS
) -> list[list[float]]:
    """Return the seconds of a token in each request, per depth."""
    file = folder / "probe.gguf"
    write_probe(probe, file)
    # A small file has one thread by default, the models that are predicted have all.
    server = serving.start(file, log=folder / "log", threads=host.cores(), context=depths[-1] + 256)
    try:
        url = server.url.removesuffix("/v1")
        return [token_seconds(url, depth, repeats=repeats) for depth in depths]
    finally:
        server.stop()
        file.unlink()


def token_seconds(
    url: str, depth: int, tokens: int = TOKENS, repeats: int = REPEATS
) -> list[float]:
    """Return the seconds of a token in each request, by the server's clock, after `depth` tokens. A first request warms up."""
    prompt = np.random.default_rng(SEED).integers(10, 1000, max(1, depth)).tolist()
    body = {
        "prompt": prompt,
        "n_predict": tokens,
        "cache_prompt": True,
        "ignore_eos": True,
        "temperature": 0,
    }
    times: list[float] = []
    for _ in range(repeats + 1):
        reply = fetch(f"{url}/completion", json=body, timeout_s=900)
        if reply.status != 200 or reply.fault:
            raise EnvironmentFault(
                f"llama.cpp did not answer: HTTP {reply.status} {reply.fault or ''}".rstrip()
            )
        times.append(json.loads(reply.body)["timings"]["predicted_per_token_ms"] / 1e3)
    return times[1:]


# ---- files


def random_rows(kind: str, columns: int) -> np.ndarray:
    """Return 64 rows of random weights in a ggml type."""
    random = np.random.default_rng(SEED)
    if kind == "NVFP4":
        blocks = random.integers(0, 256, (64, columns // 64, 36), np.uint8)
        blocks[..., :4] = random.integers(
            0x08, 0x18, blocks[..., :4].shape
        )  # scales that are numbers
        return blocks.reshape(64, -1)
    weights = 0.02 * random.standard_normal((64, columns), np.float32)
    if kind in kquant.BLOCKS:
        return kquant.quantize(weights, kind)  # type: ignore[arg-type]
    import gguf

    return gguf.quants.quantize(weights, gguf.GGMLQuantizationType[kind])


def write_probe(probe: Probe, path: Path) -> None:
    """Write a probe as a GGUF file of the Llama family."""
    import gguf

    writer: GGUFWriter = gguf.GGUFWriter(path, "llama")

    def add(name: str, product: Product) -> None:
        rows = np.tile(random_rows(product.type, product.columns), (-(-product.rows // 64), 1))[
            : product.rows
        ]
        writer.add_tensor(f"{name}.weight", rows, raw_dtype=gguf.GGMLQuantizationType[product.type])

    for setting, value in (
        (writer.add_block_count, probe.layers),
        (writer.add_context_length, 32768),
        (writer.add_embedding_length, probe.hidden),
        (writer.add_feed_forward_length, probe.inner),
        (writer.add_head_count, probe.heads),
        (writer.add_head_count_kv, probe.kv_heads),
        (writer.add_key_length, probe.head_dim),
        (writer.add_value_length, probe.head_dim),
        (writer.add_rope_dimension_count, probe.head_dim),
        (writer.add_vocab_size, probe.vocabulary),
        (writer.add_bos_token_id, 0),
        (writer.add_eos_token_id, 0),
    ):
        setting(value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([f"t{i}" for i in range(probe.vocabulary)])
    writer.add_token_types([1] * probe.vocabulary)
    writer.add_token_merges(["t 0"])
    add("token_embd", probe.products()[-1])
    ones = np.ones(probe.hidden, np.float32)
    writer.add_tensor("output_norm.weight", ones)
    for layer in range(probe.layers):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", ones)
        for name, product in probe.linears():
            add(f"blk.{layer}.{name}", product)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ---- fit


def fit(
    products: Sequence[float], attention: Sequence[Sequence[float]], deep: Sequence[float]
) -> LlamaCppRates:
    """Return the rates from the seconds of PRODUCT_PROBES, those of ATTENTION_PROBES at each of DEPTHS, and DEEP_PROBE's."""
    names = ["layer", *(f"{kind} {what}" for kind in TYPES for what in ("weight", "row"))]
    rows = []
    for probe in PRODUCT_PROBES:
        row = dict.fromkeys(names, 0.0) | {"layer": float(probe.layers)}
        for product in probe.products():
            row[f"{product.type} row"] += product.rows
            row[f"{product.type} weight"] += product.rows * product.columns
        rows.append(list(row.values()))
    cost = dict(zip(names, nonnegative_fit(np.array(rows), np.array(products)), strict=True))

    layers = ATTENTION_PROBES[0].layers
    rates = []
    slopes = [(many - some) / (DEPTHS[2] - DEPTHS[1]) / layers for _, some, many in attention]
    starts = [
        (t[1] - t[0]) / layers - DEPTHS[1] * slope
        for t, slope in zip(attention, slopes, strict=True)
    ]
    for dim in sorted({dim for dim, _, _ in ATTENTION}):
        chosen = [i for i, (size, _, _) in enumerate(ATTENTION) if size == dim]
        sizes = sorted({ATTENTION[i][1] for i in chosen})
        design = [
            [ATTENTION[i][2], *(float(ATTENTION[i][1] == kv) for kv in sizes)] for i in chosen
        ]
        head, *keys = nonnegative_fit(np.array(design), np.array([slopes[i] for i in chosen]))
        rates += [
            AttentionRate(head_dim=dim, kv_heads=kv, head_s=head, keys_s=s)
            for kv, s in zip(sizes, keys, strict=True)
        ]
    fitted = LlamaCppRates(
        layer_s=cost["layer"],
        depth_s=max(0.0, statistics.median(starts)),
        products={
            k: ProductRate(weight_s=cost[f"{k} weight"], row_s=cost[f"{k} row"]) for k in TYPES
        },
        attention=rates,
    )
    more = deep[1] - deep[0] - attention_seconds(DEEP_SHAPE, fitted, DEEP)
    return replace(fitted, deep_s=max(0.0, more / DEEP_PROBE.layers / DEEP))


def nonnegative_fit(design: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Return the costs of least relative error, none of them negative."""
    from scipy.optimize import nnls

    relative = design / seconds[:, None]
    scale = np.abs(relative).max(axis=0)
    return [float(c) for c in nnls(relative / scale, np.ones(len(seconds)))[0] / scale]
