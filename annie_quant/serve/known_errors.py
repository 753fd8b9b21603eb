"""Why a server did not start: its log's telling line against the known errors, each with its remedy.

The table is the founding documents' "common errors and fixes", and what is known of SM121 (annie_quant/gemm/known_failures.py).
"""

from __future__ import annotations

import re

from annie_quant.gemm import known_failures

PARSERS = "--reasoning-parser qwen3 --enable-auto-tool-choice --tool-call-parser qwen3_coder"
COMMON = (
    (
        r"qwen3_5\w*.*(not recogni[sz]ed|unrecognized)|does not recognize this architecture|model type `?qwen3_5",
        "the server's transformers is too old for Qwen3.5",
        'an image with transformers 5.3 or newer, or pip install --no-deps "transformers>=5.3" inside it',
    ),
    (
        r"tool choice requires|auto.*tool.choice.*(requires|needs)|400 Bad Request.*tool",
        "the server was started without a tool-call parser",
        f"start it with {PARSERS}",
    ),
    (
        r"cudnn.*(compatib|version|mismatch)",
        "cuDNN and torch do not fit each other",
        "pip install nvidia-cudnn-cu12==9.16.0.29, or SGLANG_DISABLE_CUDNN_CHECK=1",
    ),
    (
        r"conv3d|preprocessor_config\.json|image processor|AutoProcessor",
        "the server looks for the visual part of a text-only checkpoint",
        "start it with --language-model-only, or annie-quant audit DIR --repair (writes the stub)",
    ),
    (
        r"out of memory|CUDA error: out of memory|oom-kill|Killed$|exit(ed)? (with )?code 137|No available memory for the cache",
        "not enough memory: unified memory holds the model, the cache and everything else",
        "stop other models, free the page cache (sync; echo 3 | sudo tee /proc/sys/vm/drop_caches), lower --gpu-memory-utilization",
    ),
    (
        r"(quantization|quant).*(not supported|unknown|unsupported)|NVFP4_AWQ|MIXED_PRECISION",
        "the server cannot load this checkpoint's format",
        "annie-quant audit DIR says which servers can; annie-quant audit DIR --repair writes plain NVFP4",
    ),
    (
        r"address already in use|port is already allocated",
        "another server holds the port",
        "choose another --port",
    ),
    (
        r"permission denied.*docker|docker\.sock",
        "this user may not use docker",
        "sudo usermod -aG docker $USER, then log in again",
    ),
    (
        r"could not select device driver.*gpu|nvidia-container|unknown or invalid runtime name: nvidia",
        "docker has no NVIDIA runtime",
        "sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker",
    ),
    (
        r"no matching manifest|exec format error",
        "the image is for another processor",
        "an image with an arm64 variant (a Spark is aarch64)",
    ),
)


def recognise(text: str) -> tuple[str, str] | None:
    """(cause, remedy) of the first line that is known, or None."""
    for line in text.splitlines():
        if found := next((row[1:] for row in COMMON if re.search(row[0], line, re.IGNORECASE)), None):
            return found
        if found := known_failures.recognise(line):
            return found
    return None


PHASES = (
    (r"pulling from|download(ing|ed)", "fetching the image or the model"),
    (r"initializing a v1 llm engine|server_args|starting", "starting the engine"),
    (r"loading (safetensors|weights|checkpoint)|load_model|loading model", "loading weights"),
    (r"torch\.compile|captur|graph", "compiling and capturing graphs"),
    (r"warm.?up|kv cache|available (kv|memory)", "setting up the cache"),
    (r"startup complete|server is listening|fired up", "ready"),
)


def phase(log: str) -> str:
    """Where a starting server stands, from its log's newest telling line."""
    for line in reversed(log.splitlines()[-400:]):
        for pattern, title in reversed(PHASES):
            if re.search(pattern, line, re.IGNORECASE):
                return title
    return "starting"
