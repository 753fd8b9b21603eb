"""`python -m annie_quant.cli`: the command, as `python -m annie_quant` starts it."""

from annie_quant.__main__ import main

main()
