"""`python -m annie_quant.cli`: the same as `python -m annie_quant`."""

from annie_quant.__main__ import main

main()
