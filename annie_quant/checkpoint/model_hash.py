"""The hash of a model: of every byte that determines its answers."""

from __future__ import annotations

import functools
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from annie_quant.checkpoint.shards import PROMPT_FILES

FILES = ("config.json", *PROMPT_FILES)
DIRECT_BYTES = 256 << 20  # the content of larger files is hashed in parallel, and enters the model's hash by its own


def model_sha256(folder: str | os.PathLike) -> str:
    """Return the SHA-256 of everything that determines a model's answers: config, template, tokenizer and weights.

    Every byte is read, once per version of a large file and process: about 2 s per GB and core.
    """
    digest = hashlib.sha256()
    folder = Path(folder)
    paths = [folder / n for n in FILES if (folder / n).is_file()] + sorted(folder.glob("*.safetensors"))
    with ThreadPoolExecutor() as pool:
        large = {p: pool.submit(_file_sha256, p, *_version(p)) for p in paths if p.stat().st_size > DIRECT_BYTES}
        for path in paths:
            digest.update(f"{path.name}:{path.stat().st_size}\n".encode())
            digest.update(large[path].result() if path in large else path.read_bytes())
    return digest.hexdigest()


def _version(path: Path) -> tuple[int, ...]:
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


@functools.lru_cache(1024)
def _file_sha256(path: Path, *version: int) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.digest()
