"""Which linears' inputs carry the harm of 4-bit activations? By layer and block: its share of the divergence and of the weights.

    python tests/perf/input_harm.py annie_quant/assets/tiny-annie --conversations calibration.jsonl

Trials as of `best` (quantize/mixed_formats.py): the source answers with the inputs of one group of linears rounded at a time. The
last line compares their sum with the divergence when all inputs are rounded at once, which shows how well they add up.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from pathlib import Path

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.progress import SILENT
from annie_quant.data.rows import read_conversations
from annie_quant.models import in_layer, layer_of
from annie_quant.models.formats import NVFP4
from annie_quant.quantize import calibration_text, mixed_formats
from annie_quant.quantize.formats import active_weights, choose
from annie_quant.quantize.kl_trial import Trial, answers_to_score
from annie_quant.quantize.plan import QuantizationPlan
from annie_quant.quantize.strategy import Job


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--conversations", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=64, help="conversations")
    arguments = parser.parse_args()
    folder = ModelFolder(arguments.model)
    chosen = choose(folder, ())
    samples = calibration_text.samples_of_rows(
        arguments.model, read_conversations(arguments.conversations, arguments.samples)
    )
    with tempfile.TemporaryDirectory() as work:
        job = Job(arguments.model, Path(work) / "out", work=Path(work))
        units = mixed_formats.units_of(folder, chosen)
        harm = mixed_formats.measure_inputs(job, units, samples, SILENT)
    weights = active_weights(folder, chosen)
    total, size = sum(harm.values()), sum(weights.values())
    by_block: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for unit, nats in harm.items():
        row = by_block[layer_of(unit), in_layer(unit).partition(".")[0]]
        row[0] += nats
        row[1] += sum(weights[n] for n in units[unit])
    print(
        "| block | 1e-3 nats | share of the divergence | share of the weights |\n|---|---|---|---|"
    )
    for (layer, block), (nats, count) in by_block.items():
        print(
            f"| {layer.rpartition('.')[2]} {block} | {1e3 * nats:.3f} | {nats / total:.1%} | {count / size:.1%} |"
        )
    trial = Trial(folder, answers_to_score(samples, mixed_formats.TOKENS))
    plans = (
        QuantizationPlan.of(dict.fromkeys(chosen, NVFP4), trial.largest_inputs(chosen)),
        QuantizationPlan(),
    )
    together, unchanged = (float(trial.shares(plan)[:, :2].sum()) for plan in plans)
    print(
        f"sum {1e3 * total:.2f}, all at once {1e3 * (together - unchanged):.2f}, 1e-3 nats per token"
    )


if __name__ == "__main__":
    main()
