"""The llama.cpp server process. Started by llama_cpp.py with one argument, a JSON object.

It ends on SIGTERM, which supervisor.py sends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
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
    kv_type = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{options['kv_type']}".upper(), None)
    if kv_type is None:
        sys.exit(
            f"error: unknown type of cached keys and values {options['kv_type']!r}, expected f16, bf16, q8_0, q4_0 ..."
        )
    params.cache_type_k = params.cache_type_v = kv_type
    params.chat_template = options["template"]
    if options["threads"]:
        params.cpuparams.n_threads = options["threads"]
        params.cpuparams_batch.n_threads = options["threads"]
    if options["drafts"]:
        params.speculative.types = [
            xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_MTP
        ]
        params.speculative.draft.n_max = options["drafts"]
        params.speculative.draft.p_min = 0.0
    server = xllamacpp.Server(params)
    address = Path(options["address_file"])
    part = address.with_suffix(".part")
    part.write_text(server.listening_address)
    part.replace(address)
    threading.Event().wait()


if __name__ == "__main__":
    main()
