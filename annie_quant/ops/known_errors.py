"""Known errors of serving runtimes, recognised in a server's log and reported with their fix (R20), and its start phases.

Errors of SM121's kernels are in annie_quant/gemm/known_failures.py.
"""

from __future__ import annotations

import re

from annie_quant.gemm.known_failures import KnownFailure, find_failure

PARSER_FLAGS = "--reasoning-parser qwen3 --enable-auto-tool-choice --tool-call-parser qwen3_coder"
COMMON = (
    KnownFailure(
        r"qwen3_5\w*.*(not recogni[sz]ed|unrecognized)|does not recognize this architecture|model type `?qwen3_5",
        "the server's transformers is too old for Qwen3.5",
        'an image with transformers 5.3 or newer, or pip install --no-deps "transformers>=5.3" inside it',
    ),
    KnownFailure(
        r"tool choice requires|auto.*tool.choice.*(requires|needs)|400 Bad Request.*tool",
        "the server was started without a tool-call parser",
        f"start it with {PARSER_FLAGS}",
    ),
    KnownFailure(
        r"cudnn.*(compatib|version|mismatch)",
        "the versions of cuDNN and torch are not compatible",
        "pip install nvidia-cudnn-cu12==9.16.0.29, or SGLANG_DISABLE_CUDNN_CHECK=1",
    ),
    KnownFailure(
        r"conv3d|preprocessor_config\.json|image processor|AutoProcessor",
        "the server loads the visual part, and the checkpoint has text only",
        "start it with --language-model-only, or annie-quant audit DIR --repair (writes preprocessor_config.json)",
    ),
    KnownFailure(
        r"out of memory|CUDA error: out of memory|oom-kill|Killed$|exit(ed)? (with )?code 137|No available memory for the cache",
        "not enough memory: unified memory holds the model, the cache and everything else",
        "stop other models, free the page cache (sync; echo 3 | sudo tee /proc/sys/vm/drop_caches), lower --gpu-memory-utilization",
    ),
    KnownFailure(
        r"(quantization|quant).*(not supported|unknown|unsupported)|NVFP4_AWQ|MIXED_PRECISION",
        "the server cannot load this checkpoint's format",
        "annie-quant audit DIR lists the servers that can; annie-quant audit DIR --repair writes plain NVFP4",
    ),
    KnownFailure(
        r"failed to create MTP context",
        "the GGUF file has no MTP head to draft with",
        "start without drafts, or annie-quant convert --to gguf a checkpoint that has mtp.* tensors",
    ),
    KnownFailure(
        r"address already in use|port is already allocated",
        "another server uses the port",
        "choose another --port",
    ),
    KnownFailure(
        r"permission denied.*docker|docker\.sock",
        "this user may not use docker",
        "sudo usermod -aG docker $USER, then log in again",
    ),
    KnownFailure(
        r"could not select device driver.*gpu|nvidia-container|unknown or invalid runtime name: nvidia",
        "docker has no NVIDIA runtime",
        "sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker",
    ),
    KnownFailure(
        r"no matching manifest|exec format error",
        "the image is for another processor",
        "an image with an arm64 variant (a Spark is aarch64)",
    ),
)
PHASES = (
    (r"pulling from|download(ing|ed)", "fetching the image or the model"),
    (r"initializing a v1 llm engine|server_args|starting", "starting the engine"),
    (r"loading (safetensors|weights|checkpoint)|load_model|loading model", "loading weights"),
    (r"torch\.compile|captur|graph", "compiling and capturing graphs"),
    (r"warm.?up|kv cache|available (kv|memory)", "setting up the cache"),
    (r"startup complete|server is listening|fired up", "ready"),
)


def find_error(log: str) -> KnownFailure | None:
    """Return the known error of the first line that has one, or None."""
    for line in log.splitlines():
        if known := find_failure(line, COMMON) or find_failure(line):
            return known
    return None


def phase(log: str) -> str:
    """Return the phase of a starting server from the newest line of its log that shows one."""
    for line in reversed(log.splitlines()[-400:]):
        for pattern, title in reversed(PHASES):
            if re.search(pattern, line, re.IGNORECASE):
                return title
    return "starting"
