"""Conversations from what production leaves behind, one at a time, whatever the size of the file.

    OpenAI chat       JSON lines with `messages` (and `tools`), or a request with its `response`, as proxies and batches log them
    ShareGPT, Hermes  `conversations` of {from, value}; tools in the system prompt, calls and results in tags
    OpenClaw          session transcripts: one event per line, tool calls as content blocks
    vLLM, llama.cpp   the servers' own request logs (text), with the prompt after the chat template
    datasets          Parquet, Arrow and JSON files of Hugging Face chat datasets, and folders of all of these

read_logs(paths, problems) yields Conversation objects; what cannot be used is counted in `problems`, with the first place.
"""

from __future__ import annotations

from annie_quant.data.logs.conversation import Conversation, Problems
from annie_quant.data.logs.files import read_logs

__all__ = ["Conversation", "Problems", "read_logs"]
