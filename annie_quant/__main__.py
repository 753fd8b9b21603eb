"""`annie-quant`, `python -m annie_quant`: what must be settled before anything is imported, and what can end it that early."""

from __future__ import annotations

import os
import resource
import sys


def main() -> None:
    """Load the command line and run it. Exit codes are in annie_quant.errors."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        # A second OpenBLAS thread that finds no room under ulimit -v spins, or sends SIGINT to its own process.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        from annie_quant import cli
    except KeyboardInterrupt:
        sys.exit(130)
    except (ImportError, MemoryError, SystemError) as error:
        sys.stderr.write(
            f"annie-quant: a library cannot be loaded ({error})\n  → free some memory, or install it anew\n"
        )
        sys.exit(3)
    cli.main()


if __name__ == "__main__":
    main()
