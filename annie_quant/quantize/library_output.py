"""Keep the output of transformers, ModelOpt and their relatives off the terminal."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Iterator

import transformers

from annie_quant.core.progress import SILENT, Progress


@contextlib.contextmanager
def quiet(progress: Progress = SILENT) -> Iterator[None]:
    """Keep the libraries' output, progress bars and warnings off the terminal; report the last line if they raise."""
    output = io.StringIO()
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        with contextlib.redirect_stdout(output), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception:
        last = output.getvalue().strip().splitlines()[-1:]
        if last:
            progress.message(last[0])
        raise
    finally:
        transformers.logging.set_verbosity(before)
