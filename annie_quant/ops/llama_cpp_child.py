"""The llama.cpp server process. Started by llama_cpp.py with one argument, a JSON object.

It ends on SIGTERM, which supervisor.py sends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterable
from pathlib import Path


def main() -> None:
    options = json.loads(sys.argv[1])
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = options["model"]
    params.model_alias = {Path(options["model"]).stem}
    params.port = options["port"]
    params.n_ctx = options["context"] * options["parallel"]
    params.n_parallel = options["parallel"]
    params.fit_params = False
    params.ui = False
    params.use_jinja = True
    params.endpoint_metrics = True
    params.reasoning_format = xllamacpp.common_reasoning_format.COMMON_REASONING_FORMAT_DEEPSEEK
    params.force_pure_content_parser = not options["parse_calls"]
    params.cache_type_k = params.cache_type_v = kv_type(xllamacpp.ggml_type, options["kv_type"])
    params.chat_template = options["template"]
    if options["threads"]:
        params.cpuparams.n_threads = options["threads"]
        params.cpuparams_batch.n_threads = options["threads"]
    if options["drafts"]:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_MTP]
        params.speculative.draft.n_max = options["drafts"]
        params.speculative.draft.p_min = 0.0
    server = xllamacpp.Server(params)
    address = Path(options["address_file"])
    part = address.with_suffix(".part")
    part.write_text(server.listening_address)
    part.replace(address)
    threading.Event().wait()


def kv_type(types: Iterable[object], name: str) -> object:
    """Return a member of ggml's types by its short name. Ends the process for a name that is not among them."""
    members = {str(getattr(t, "name", t)).removeprefix("GGML_TYPE_").lower(): t for t in types}
    if name not in members:
        sys.exit(f"error: unknown type of cached keys and values {name!r}, expected one of: {', '.join(members)}")
    return members[name]


if __name__ == "__main__":
    main()
