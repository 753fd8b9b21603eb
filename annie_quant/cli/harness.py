"""`annie-quant lm-eval`: lm-eval's own command line, which knows the model annie_quant."""

from __future__ import annotations

import importlib
import sys

import click

from annie_quant.cli.common import quiet_engines
from annie_quant.errors import need


@click.command(
    name="lm-eval", context_settings={"ignore_unknown_options": True, "help_option_names": []}, add_help_option=False
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def lm_eval(arguments: tuple[str, ...]) -> None:
    """Run lm-eval with the model annie_quant: NVFP4 on any machine, under a numerics profile.

    All arguments are lm-eval's: --model annie_quant --model_args pretrained=DIR,profile=w4a4 --tasks ... --log_samples
    --output_path RUN; `annie-quant lm-eval run --help` lists them. `annie-quant retention` compares two such runs.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        click.echo(click.get_current_context().get_help())
        return
    need("lm_eval", "lm-eval")
    quiet_engines()
    importlib.import_module("annie_quant.evaluate.harness_model")  # registers the model
    command = importlib.import_module("lm_eval.__main__")

    sys.argv = ["lm_eval", *arguments]
    command.cli_evaluate()
