"""`annie-quant retention`: a quantized model's scores next to bf16's, from two runs of lm-eval."""

from __future__ import annotations

from pathlib import Path

import click

from annie_quant.cli.common import PATH, console, emit, json_option


@click.command()
@click.argument("bf16_run", type=PATH)
@click.argument("quantized_run", type=PATH)
@click.option("--seed", default=0, show_default=True, help="Of the bootstrap.")
@json_option
def retention(bf16_run: Path, quantized_run: Path, seed: int, as_json: bool) -> None:
    """Compare two lm-eval runs sample by sample: what the quantized model keeps of bf16's scores.

    The runs are folders of lm-eval's --output_path, made with --log_samples (annie-quant lm-eval --model annie_quant ...).
    """
    from annie_quant.judge import retention as table

    result = table.retention(bf16_run, quantized_run, seed)
    if as_json:
        emit(result)
        return
    console.print_lines(list(table.lines(result)))
    for line in table.summary(result):
        console.note(line)
