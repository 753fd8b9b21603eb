"""`annie-quant record`: an OpenAI-compatible proxy that records chats in the form that `annie-quant init` reads.

    proxy      passes every request on to one server and its answer back, unchanged; keeps copies of chat completions
    exchange   a request and its answer, as bytes → one line of JSON without secrets
    log_file   the file of lines: appended to, never above its limit

What is sent and received is not changed, except for headers that belong to one connection, and Accept-Encoding, which names only
codings that can be read here.
"""

from __future__ import annotations

from annie_quant.data.record.proxy import Recorded, Recorder, Settings, record

__all__ = ["Recorded", "Recorder", "Settings", "record"]
