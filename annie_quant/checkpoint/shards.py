"""A model folder on disk: its shards, mapped into memory, and its small files.

Writing is in writer.py.

Tensors are views of the mapped files, so a model larger than memory can be read; `release` gives
their pages back.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from annie_quant import models
from annie_quant.checkpoint import header, other_formats
from annie_quant.checkpoint.header import Shard, ShardError, TensorInfo
from annie_quant.core.files import exists, sha256_file
from annie_quant.core.untrusted import JsonObject

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Of an index or a config; the index of a model of 400 B parameters has about 10 MB.
MAX_JSON_BYTES = 100_000_000
PIECE_BYTES = 1 << 25
ROWS_ELEMENTS = 1 << 24
# The small files of a model folder in addition to config.json: those that make prompts and end
# answers, those that name Python classes, and all that a copy of the model needs.
GENERATION = "generation_config.json"
TEMPLATE = "chat_template.jinja"
TOKENIZER = "tokenizer.json"
TOKENIZER_SETTINGS = "tokenizer_config.json"
PROMPT_FILES = (GENERATION, TEMPLATE, TOKENIZER, TOKENIZER_SETTINGS)
# Read where tokenizer.json, or the newer form of the template, is missing; some loaders prefer them.
VOCABULARY_FILES = (
    "chat_template.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "tokenizer.model",
)
CLASS_FILES = (
    TOKENIZER_SETTINGS,
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
COMPANIONS = tuple(dict.fromkeys((*PROMPT_FILES, *CLASS_FILES, *VOCABULARY_FILES, "LICENSE")))
QUANTIZATION_NAMES = ("quantization_config", "compression_config")  # of config.json
OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack")
MAX_EXPERTS = 1 << 14  # in one tensor; models have up to 512
# Returns the JSON object of a file, None where it is missing: read_object, or one that keeps what it read.
JsonReader = Callable[[Path], JsonObject | None]
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.safetensors$")


class ValuesUnread(Exception):
    """The values of a tensor are needed, and only the headers of the checkpoint are here.

    A check that needs them is left out, so it never reaches a user.
    """


class ModelFolder:
    """A checkpoint folder: config.json, safetensors shards, and the small files.

    The shards are one file, listed in an index, or numbered.

    headers_only: the shards are holes of their real sizes behind their headers (remote.py); reading
        a tensor raises ValuesUnread.

    Raises ShardError for a missing folder or shard, an invalid or truncated file, an index that
    does not match the files, a shard name with a path in it, and a link that leaves the folder.
    """

    def __init__(self, path: str | os.PathLike, headers_only: bool = False) -> None:
        self.path = Path(path)
        self.headers_only = headers_only
        if not self.path.is_dir():
            kind, hint = other_formats.describe_file(self.path)
            raise ShardError("no_folder", f"{self.path}: {kind}, expected a model folder", hint)
        self.shards: dict[str, Shard] = {}
        self.tensors: dict[str, TensorInfo] = {}
        # (tensor, file) where the index lists the tensor in another file, or not at all
        self.unlisted: list[tuple[str, str]] = []
        # File of weights that is not read → the reason
        self.unread: dict[str, str] = {}
        weight_map = self._weight_map()
        for file in sorted(set(weight_map.values())) if weight_map else self._files():
            self._read(file, weight_map)
        for name, file in weight_map.items():
            if name not in self.tensors:
                message = f"{INDEX} lists {name} in {file}, which does not have it"
                raise ShardError("tensor_missing", message, tensor=name)
        for file in sorted(f.name for f in self.path.glob("*.safetensors")):
            if file not in self.shards:
                self._read_further(file, has_index=bool(weight_map))

    def _read(self, file: str, weight_map: Mapping[str, str]) -> None:
        """Read one shard. weight_map: of the index; empty without one."""
        shard = Shard(self._checked(file))
        self.shards[file] = shard
        for name, info in shard.tensors.items():
            if weight_map and weight_map.get(name) != file:
                self.unlisted.append((name, file))
                continue
            if name in self.tensors:
                message = f"{name}: both in {self.tensors[name].file} and in {file}"
                raise ShardError("duplicate_tensor", message, tensor=name)
            self.tensors[name] = info

    def _read_further(self, file: str, has_index: bool) -> None:
        """Read a file that neither the index nor its name makes a shard, or note why not.

        Without an index vLLM and SGLang load every file, such as mtp.safetensors; with one they
        load those that it lists (vLLM's filter_duplicate_safetensors_files).
        """
        separate = other_formats.separate_file(file)
        if separate is not None:
            self.unread[file] = separate
            return
        try:
            shard = Shard(self._checked(file))
        except ShardError as error:
            self.unread[file] = error.message
            return
        count = f"{len(shard.tensors)} tensors"
        repeated = [name for name in shard.tensors if name in self.tensors]
        if has_index:
            self.unread[file] = f"{count}, and {INDEX} does not list the file"
        elif repeated:
            where = self.tensors[repeated[0]].file
            self.unread[file] = f"{count}, of which {where} has {len(repeated)}: {repeated[0]}"
        else:
            self.shards[file] = shard
            self.tensors |= shard.tensors

    # ---- tensors

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        """Tensor names in file order, which is the fastest order to read them."""
        return iter(self.tensors)

    @functools.cached_property
    def _merged(self) -> dict[str, dict[str, TensorInfo]]:
        """Merged tensor of experts, without ".weight" → the linears of single experts in it."""
        experts = self.family.experts
        merged = dict[str, dict[str, TensorInfo]]()
        if experts is None:
            return merged
        for name, info in self.tensors.items():
            part = experts.merged_part(name)
            is_plain = info.dtype in ("BF16", "F16", "F32")
            if not part or len(info.shape) != 3 or not info.elements or not is_plain:
                continue
            layer, kind = part
            linears = experts.merged[kind]
            count, rows, columns = info.shape
            if rows % len(linears) or count > MAX_EXPERTS:
                continue
            shape = (rows // len(linears), columns)
            size = info.size_bytes // (count * len(linears))
            offset = info.offset
            parts: dict[str, TensorInfo] = {}
            merged[name.removesuffix(".weight")] = parts
            for number in range(count):
                for linear in linears:
                    single = f"{layer}.{experts.module}.{number}.{linear}.weight"
                    parts[single] = TensorInfo(single, info.dtype, shape, info.file, offset, size)
                    offset += size
        return merged

    @functools.cached_property
    def expert_parts(self) -> dict[str, TensorInfo]:
        """The linears of single experts inside the merged tensors on disk, as views of their bytes.

        `find`, `info`, `tensor`, `pieces`, `rows` and `release` take their names
        ("mlp.experts.7.up_proj.weight"). Iteration and `in` have only the merged names, which are
        those of the files.
        """
        return {name: info for parts in self._merged.values() for name, info in parts.items()}

    def parts_of(self, name: str) -> list[str]:
        """Return the names of the single experts' linears in a merged tensor, in its order.

        [] for any other tensor.
        """
        return list(self._merged.get(name.removesuffix(".weight"), ()))

    def info(self, name: str) -> TensorInfo:
        if name not in self.tensors and name in self.expert_parts:
            return self.expert_parts[name]
        if name not in self.tensors:
            raise ShardError(
                "tensor_missing", f"{self.path.name}: tensor {name} is missing", tensor=name
            )
        return self.tensors[name]

    def find(self, name: str) -> str | None:
        """Return this folder's name of a tensor, or None. name: in any form of the model."""
        names = models.aliases(name)
        for known in (self.tensors, self.expert_parts):
            for alias in names:
                if alias in known:
                    return alias
        return None

    def tensor(self, name: str) -> np.ndarray:
        """Return one tensor as a read-only array in its own dtype (bfloat16 and float8 from ml_dtypes)."""
        info = self.info(name)
        if self.headers_only:
            raise ValuesUnread(name)
        return self.shards[info.file].tensor(info)

    def pieces(self, name: str) -> Iterator[np.ndarray]:
        """Yield one tensor's elements in order, PIECE_BYTES at a time.

        Their pages are released after each piece.
        """
        flat = self.tensor(name).reshape(-1)
        step = max(1, PIECE_BYTES // flat.itemsize)
        for start in range(0, flat.size, step):
            yield flat[start : start + step]
            self.release(name, start * flat.itemsize, min(start + step, flat.size) * flat.itemsize)

    def rows(self, name: str, elements: int = ROWS_ELEMENTS) -> Iterator[np.ndarray]:
        """Yield a matrix's rows in order, about `elements` at a time.

        Their pages are released after each piece.
        """
        matrix = self.tensor(name)
        width = max(1, matrix[:1].size)
        step = max(1, elements // width)
        for start in range(0, matrix.shape[0], step):
            yield matrix[start : start + step]
            stop = min(start + step, matrix.shape[0])
            self.release(name, start * width * matrix.itemsize, stop * width * matrix.itemsize)

    def scalar(self, name: str) -> np.float32:
        """Return a tensor of one element as float32."""
        info = self.info(name)
        if info.elements != 1:
            raise ShardError(
                "scale_shape", f"{name}: shape {list(info.shape)}, expected one number", tensor=name
            )
        return np.float32(self.tensor(name).reshape(())[()])

    def release(self, name: str, begin: int = 0, end: int | None = None) -> None:
        """Release the mapped pages of a tensor, all or those of its bytes begin..end."""
        info = self.info(name)
        self.shards[info.file].release(info, begin, end)

    @property
    def weight_bytes(self) -> int:
        return sum(info.size_bytes for info in self.tensors.values())

    # ---- the small files

    def json(self, name: str) -> JsonObject | None:
        """Return the JSON object of a file in this folder, or None if the file is missing."""
        return read_object(self.path / name)

    @functools.cached_property
    def config(self) -> JsonObject:
        """config.json, which every model folder has, as it was when it was first read."""
        config = self.json("config.json")
        if config is None:
            raise ShardError(
                "config_missing",
                f"{self.path}: no config.json",
                "copy it from the source checkpoint",
            )
        return config

    @property
    def quantization(self) -> JsonObject:
        """The quantization settings of config.json; {} where there are none.

        They are at the top or in text_config, as vLLM reads them.
        """
        config = self.config
        outer = [config.get(name) for name in QUANTIZATION_NAMES]
        text = config.get("text_config")
        inner = [text.get(name) for name in QUANTIZATION_NAMES] if isinstance(text, dict) else []
        quant = next((value for value in (*outer, *inner) if isinstance(value, dict)), {})
        # ModelOpt's older form: hf_quant_config.json's content inside config.json
        nested = quant.get("quantization")
        return {**quant, **nested} if isinstance(nested, dict) else quant

    @property
    def text_config(self) -> JsonObject:
        """The language model's settings of config.json: those of `text_config` where there is one."""
        merged = text_settings(self.config)
        experts = self.family.experts
        return experts.with_count(merged) if experts else merged

    @property
    def active_share(self) -> float:
        """The share of the experts that a token passes; 1 for a dense model."""
        experts = self.family.experts
        return experts.active_share(self.text_config) if experts else 1.0

    @property
    def ties_embedding(self) -> object:
        """tie_word_embeddings of config.json: whether the embedding is also the head; None: not given."""
        config = self.config
        return config.get("tie_word_embeddings", self.text_config.get("tie_word_embeddings"))

    @functools.cached_property
    def family(self) -> models.Family:
        """The model family that config.json names, or the default for an unknown one."""
        return models.family_or_default(self.config)

    def small_files(self) -> list[Path]:
        """Return the tokenizer, template, processor and licence files.

        Everything but the weights and their index.
        """
        skipped = (".safetensors", ".safetensors.index.json", *OTHER_FORMATS)
        return sorted(
            inside(self.path, f)
            for f in self.path.iterdir()
            if f.is_file() and not f.name.endswith(skipped) and not f.name.startswith(".")
        )

    def left_out_files(self) -> list[str]:
        """Return the files of weights that are not read, each with the reason."""
        others = sorted(f.name for f in self.path.iterdir() if f.suffix in OTHER_FORMATS)
        unread = [f"{file} ({reason})" for file, reason in self.unread.items()]
        return [*unread, *(f"{file} (not safetensors)" for file in others)]

    # ---- the shards' names

    def _weight_map(self) -> dict[str, str]:
        index = self.json(INDEX)
        if index is None:
            return {}
        weights = index.get("weight_map")
        if not isinstance(weights, dict) or not all(isinstance(v, str) for v in weights.values()):
            raise ShardError(
                "index_mismatch", f"{INDEX}: weight_map must map tensor names to file names"
            )
        if not weights:
            raise ShardError("index_mismatch", f"{INDEX}: weight_map is empty")
        invalid = next(
            (n for n in weights if not n.isprintable() or len(n) > header.MAX_NAME_LENGTH), None
        )
        if invalid is not None:
            raise ShardError("index_mismatch", f"{INDEX}: {invalid[:120]!a} is not a tensor name")
        return weights

    def _files(self) -> list[str]:
        files = sorted(f.name for f in self.path.glob("*.safetensors"))
        files = [file for file in files if other_formats.separate_file(file) is None]
        if SINGLE in files:
            return [SINGLE]
        if not files:
            nothing = "it holds no .safetensors file", "give a checkpoint saved as safetensors"
            content, hint = other_formats.describe_folder(self.path) or nothing
            raise ShardError("no_weights", f"{self.path}: {content}", hint)
        matches = {file: _PART.search(file) for file in files}
        numbered = {file: match for file, match in matches.items() if match}
        if not numbered:
            return files
        total = int(next(iter(numbered.values()))[2])
        present = {int(match[1]) for match in numbered.values()}
        missing = sorted(set(range(1, total + 1)) - present)
        if missing and total < 100_000:
            message = f"{self.path.name}: shard {missing[0]} of {total} is missing"
            raise ShardError("shard_missing", message)
        return list(numbered)

    def _checked(self, file: str) -> Path:
        """Return a shard's path.

        A plain name, inside the folder (or a hub cache's blobs, where its links point).
        """
        if (
            Path(file).name != file
            or file in ("", ".", "..")
            or not file.isprintable()
            or "\\" in file
        ):
            message = f"{INDEX}: {file[:120]!r} is not a plain file name"
            raise ShardError("path_escapes", message, "do not trust this folder")
        path = self.path / file
        if not exists(path):
            raise ShardError("shard_missing", f"{self.path.name}: shard {file[:120]} is missing")
        return inside(self.path, path)


def read_object(path: Path) -> JsonObject | None:
    """Return the JSON object of a file, or None if the file is missing.

    Raises ShardError for other content.
    """
    if not path.is_file():
        return None
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise ShardError(
            "config_unreadable", f"{path.name}: {size} bytes, expected at most {MAX_JSON_BYTES}"
        )
    raw = path.read_bytes()
    header.refuse_lfs_pointer(raw, path)
    try:
        value = json.loads(raw)
        # Half of a surrogate pair is not text: it could be stored nowhere.
        if b"\\ud" in raw.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        message = f"{path.name}: not JSON ({str(error)[:80]})"
        raise ShardError("config_unreadable", message, "restore the file") from None
    if not isinstance(value, dict):
        raise ShardError("config_unreadable", f"{path.name}: not a JSON object", "restore the file")
    return value


def without_quantization(config: JsonObject) -> JsonObject:
    """Return a config.json without quantization settings, also those in text_config."""
    plain = {k: v for k, v in config.items() if k not in QUANTIZATION_NAMES}
    if isinstance(plain.get("text_config"), dict):
        plain["text_config"] = without_quantization(plain["text_config"])
    return plain


def text_settings(config: JsonObject) -> JsonObject:
    """Return the language model's settings of a config.json.

    Those of `text_config`, where there is one, before the others.
    """
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config


def inside(folder: Path, path: Path) -> Path:
    """Return `path`.

    Raises ShardError where it is a link that leaves the folder, other than to a hub cache's blobs.
    """
    real = path.resolve()
    home = folder.resolve()
    if real.parent != home and real.parent != home.parent.parent / "blobs":
        raise ShardError(
            "path_escapes",
            f"{path.name}: a link that leaves the folder",
            "do not trust this folder",
        )
    return path


# ---- the hash of a model: of every byte that determines its answers

# Versions up to 0.2 hashed these and the weights only.
FIRST_HASHED_FILES = ("config.json", *PROMPT_FILES)
HASHED_FILES = (*FIRST_HASHED_FILES, *VOCABULARY_FILES, "hf_quant_config.json")
# The content of larger files is hashed in parallel, and enters the model's hash by its own.
DIRECT_BYTES = 256 << 20


def model_sha256(folder: str | os.PathLike, names: Sequence[str] = HASHED_FILES) -> str:
    """Return the SHA-256 of everything that determines a model's answers.

    These are config, templates, tokenizer, vocabulary and weights. Every byte is read, once per
    version of a large file and process: about 2 s per GB and core.

    names: the files that are hashed in addition to the weights.
    """
    digest = hashlib.sha256()
    folder = Path(folder)
    small = [folder / name for name in names if (folder / name).is_file()]
    paths = small + sorted(folder.glob("*.safetensors"))
    with ThreadPoolExecutor() as pool:
        large = {
            p: pool.submit(_file_sha256, p, *_version(p))
            for p in paths
            if p.stat().st_size > DIRECT_BYTES
        }
        for path in paths:
            digest.update(f"{path.name}:{path.stat().st_size}\n".encode())
            digest.update(large[path].result() if path in large else path.read_bytes())
    return digest.hexdigest()


def is_model(folder: str | os.PathLike, sha256: str) -> bool:
    """Return whether a stored hash is that of a model folder.

    A hash that an older version stored does not cover the vocabulary's own files, older templates
    and hf_quant_config.json: it shows only that the other files are the same.
    """
    return sha256 in (model_sha256(folder), model_sha256(folder, FIRST_HASHED_FILES))


def _version(path: Path) -> tuple[int, ...]:
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


@functools.lru_cache(1024)
def _file_sha256(path: Path, *version: int) -> bytes:
    return bytes.fromhex(sha256_file(path))
