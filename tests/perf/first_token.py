"""Fit the predictor of the time to the first token to the published rows, and print its errors.

    python tests/perf/first_token.py               the tables of first_token.md
    python tests/perf/first_token.py --write       constants and error_90 into assets/prefill.json

Rows are groups of points [computed tokens, cached tokens, ms] in annie_quant/assets/prefill.json.
"fit": false where the shape, a format's share or the kernel is not known well enough.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from annie_quant.checkpoint import first_token
from annie_quant.checkpoint.first_token import (
    BANDWIDTH,
    NoRate,
    PrefillRates,
    prefill,
    prompt_time,
)
from annie_quant.checkpoint.prompt_work import PromptWork
from annie_quant.core.files import ASSETS

ASSET = ASSETS / "prefill.json"
# Published: FA2 in bf16 (flashinfer#3897), DeltaNet of FLA and llama.cpp (mudler/LocalAI, parity
# report). A step without launches has no cost.
PUBLISHED = {
    "vllm.attention.128": 93.0,
    "vllm.deltanet_ns": 38.0,
    "llama.cpp.deltanet_ns": 100.0,
    "trtllm.layer_ms": 0.0,
    "llama-bench.layer_ms": 0.0,
    "llama.cpp.experts.spread": 1.0,
}
START = {
    "vllm.request_ms": 10.0,
    "vllm.layer_ms": 0.3,
    "trtllm.request_ms": 1.0,
    "llama-bench.request_ms": 2.0,
    "vllm.linear.bf16": 75.0,
    "vllm.linear.w4a4": 200.0,
    "vllm.linear.w4a16": 52.0,
    "vllm.linear.fp8_marlin": 30.0,
    "vllm.linear.fp8": 100.0,
    "vllm.experts.spread": 0.3,
    "vllm.attention.256": 45.0,
    "vllm.attention.512": 15.0,
    "norms_ps": 150.0,
    "vllm.experts.bf16": 20.0,
    "vllm.experts.fp8_marlin": 25.0,
    "vllm.experts.w4a16": 30.0,
    "llama.cpp.linear.q8": 32.0,
    "llama.cpp.linear.q4": 45.0,
    "llama.cpp.linear.nvfp4": 75.0,
    "llama.cpp.attention": 40.0,
    "llama.cpp.experts.q8": 15.0,
    "llama.cpp.experts.mxfp4_q8": 20.0,
}
# Keeps constants that few rows show near their start. With .05 the errors of models that are left
# out are 10.2 % (median) and 24.4 %, with .2 they are 9.6 and 22.0 %.
PRIOR = 0.1
LLAMA_HEAD_BYTES = 0.82  # per weight, Q6_K
LLAMA_SERVER_MS = 8.0  # of llama-server over llama-bench, assumed
LENGTHS = (128, 512, 2048, 8192)


@dataclass(frozen=True)
class Row:
    group: dict
    work: PromptWork
    tokens: int
    cached: int
    ms: float

    @property
    def model(self) -> tuple[str, str]:
        return self.group["server"], self.group["model"]

    def predict(self, constants: dict[str, float]) -> float:
        server = self.group["server"].replace("sglang", "vllm")
        prompts = self.group.get("batch", 1)
        rates = PrefillRates("a GB10", BANDWIDTH, constants)
        return prompt_time(self.work, server, self.tokens, self.cached, rates, prompts).ms

    def error(self, constants: dict[str, float]) -> float:
        return self.predict(constants) / self.ms - 1


def work_of(
    model: str, share: dict[str, float], experts: str | None = None, llama: bool = False
) -> PromptWork:
    """Return the work of a published model. share: format → part of the linears' weights."""
    shape = prefill().models[model]
    per_weight = prefill().bytes_per_weight
    linears = {
        name: (part * shape.linear_weights, part * shape.linear_weights * per_weight[name])
        for name, part in share.items()
    }
    routed = experts or next(iter(share))
    total = shape.expert_weights
    sizes = {routed: (float(total), total * per_weight[routed])} if total else {}
    head_bytes = shape.head_weights * (LLAMA_HEAD_BYTES if llama else 2)
    return PromptWork(shape, linears, head_bytes, sizes)


def rows() -> list[Row]:
    """Return all rows of models whose shape is known."""
    found = []
    for group in groups():
        if group["model"] not in prefill().models:
            continue
        llama = group["server"] == "llama-bench"
        work = work_of(group["model"], group["share"], group.get("experts"), llama)
        found += [Row(group, work, *point) for point in group["points"]]
    return found


def groups() -> list[dict]:
    return json.loads(ASSET.read_text())["rows"]


def constants_of(logs: np.ndarray) -> dict[str, float]:
    fitted = dict(zip(START, np.exp(logs).tolist(), strict=True)) | PUBLISHED
    attention = fitted.pop("llama.cpp.attention")
    fitted |= {f"llama.cpp.attention.{size}": attention for size in (128, 256, 512)}
    fitted["llama.cpp.request_ms"] = fitted["llama-bench.request_ms"] + LLAMA_SERVER_MS
    fitted["llama.cpp.layer_ms"] = 0.0
    return fitted


def fit(known: list[Row]) -> dict[str, float]:
    """Return the constants with the least (soft) logarithmic errors of the rows."""
    start = np.log(list(START.values()))

    def residuals(logs: np.ndarray) -> np.ndarray:
        constants = constants_of(logs)
        errors = [np.log(row.predict(constants) / row.ms) for row in known]
        return np.append(errors, PRIOR * (logs - start))

    return constants_of(least_squares(residuals, start, loss="soft_l1", f_scale=0.1).x)


def fitted_rows() -> list[Row]:
    return [row for row in rows() if row.group.get("fit", True)]


def errors_left_out() -> list[tuple[Row, float]]:
    """Return each fitted row with its relative error by a fit without its model."""
    known = fitted_rows()
    errors = []
    for model in sorted({row.model for row in known}):
        constants = fit([row for row in known if row.model != model])
        errors += [(row, row.error(constants)) for row in known if row.model == model]
    return errors


def summary(errors: list[float]) -> str:
    sizes = np.abs(errors)
    return (
        f"{len(sizes)} | {np.median(sizes):.1%} | {np.quantile(sizes, 0.9):.1%} | {sizes.max():.1%}"
    )


def models_table(errors: list[tuple[Row, float]]) -> list[str]:
    lines = ["| server, model | rows | median | 90 % within | largest |", "|---|---|---|---|---|"]
    for model in dict.fromkeys(row.model for row, _ in errors):
        own = [error for row, error in errors if row.model == model]
        lines.append(f"| {', '.join(model)} | {summary(own)} |")
    total = summary([error for _, error in errors])
    return [*lines, f"| **all** | {total} |"]


def rows_table(errors: list[tuple[Row, float]]) -> list[str]:
    """Return a line per group of rows: computed tokens (+ cached), ms, error."""
    left_out = {(json.dumps(row.group), row.tokens, row.cached, row.ms): e for row, e in errors}
    lines = ["| server, model, formats | kernel | tokens: ms (error) |", "|---|---|---|"]
    constants = prefill().constants
    all_rows = rows()
    for group in groups():
        name = json.dumps(group)
        known = [row for row in all_rows if json.dumps(row.group) == name]
        formats = [f"{part:.0%} {kind}" for kind, part in group["share"].items()]
        formats += [f"experts {group['experts']}"] if "experts" in group else []
        cells = []
        for i, (tokens, cached, ms) in enumerate(group["points"]):
            error = left_out.get((name, tokens, cached, ms))
            text = "no shape"
            if error is not None:
                text = f"{error:+.0%}"
            elif known:
                text = _outside(known[i], constants)
            depth = f" + {cached:,}" if cached else ""
            cells.append(f"{tokens:,}{depth}: {ms:,.0f} ({text})")
        what = f"{group['server']}, {group['model']}, {', '.join(formats)}"
        lines.append(f"| {what} | {group['kernel']} | {'; '.join(cells)} |")
    return lines


def _outside(row: Row, constants: dict[str, float]) -> str:
    try:
        return f"{row.error(constants):+.0%}, not in the fit"
    except NoRate:
        return "no rate"


ANSWERS = {
    "bf16": {"bf16": 1.0},
    "all W4A4": {"w4a4": 1.0},
    "all W4A16 (Marlin)": {"w4a16": 1.0},
    "MLP W4A4, rest FP8": {"w4a4": 0.698, "fp8": 0.302},
    "MLP W4A4, rest Marlin": {"w4a4": 0.698, "w4a16": 0.302},
    "`w4a16_mixed`": {"w4a16": 0.698, "fp8": 0.302},
    "Q4_K_M, llama-server": {"q4": 1.0},
}


def answers() -> dict[str, list[float]]:
    """Return the milliseconds of Qwen3.5-9B per format and number of tokens."""
    table = {}
    for name, share in ANSWERS.items():
        llama = "q4" in share
        server = "llama.cpp" if llama else "vllm"
        work = work_of("Qwen3.5-9B", share, llama=llama)
        rates = PrefillRates("a GB10", BANDWIDTH, prefill().constants)
        table[name] = [prompt_time(work, server, n, 0, rates).ms for n in LENGTHS]
    return table


def answers_table() -> list[str]:
    lines = [
        f"| prompt tokens | {' | '.join(f'{n:,}' for n in LENGTHS)} |",
        "|---|---|---|---|---|",
    ]
    for name, cells in answers().items():
        lines.append(f"| {name} | {' | '.join(f'{ms:,.0f}' for ms in cells)} |")
    return lines


def write(constants: dict[str, float], error_90: float) -> None:
    """Replace constants and error_90 in the asset, one line each."""
    rounded = {name: float(f"{value:.5g}") for name, value in sorted(constants.items())}
    lines = ASSET.read_text().splitlines()
    for i, line in enumerate(lines):
        if line.startswith('"error_90"'):
            lines[i] = f'"error_90": {error_90:.4g},'
        elif line.startswith('"constants"'):
            lines[i] = f'"constants": {json.dumps(rounded)},'
    ASSET.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="replace the fitted constants")
    arguments = parser.parse_args()
    errors = errors_left_out()
    sizes = np.abs([error for _, error in errors])
    if arguments.write:
        write(fit(fitted_rows()), float(np.quantile(sizes, 0.9)))
        first_token.prefill.cache_clear()
    tables = (answers_table(), models_table(errors), rows_table(errors))
    print("\n\n".join("\n".join(lines) for lines in tables))


if __name__ == "__main__":
    main()
