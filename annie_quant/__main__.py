"""Entry point of `annie-quant` and `python -m annie_quant`: what must be set before the first import of NumPy."""

from __future__ import annotations

import os
import resource
import sys


def main() -> None:
    """Run the command line. Exit codes are listed in annie_quant.core.errors."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        # Under ulimit -v a second OpenBLAS thread that gets no memory spins, or sends SIGINT to its own process.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        from annie_quant import cli
    except KeyboardInterrupt:
        sys.exit(130)
    except (ImportError, MemoryError, SystemError) as error:
        sys.stderr.write(
            f"annie-quant: a library cannot be loaded ({error})\n  → free some memory, or reinstall it\n"
        )
        sys.exit(3)
    cli.main()


if __name__ == "__main__":
    main()
