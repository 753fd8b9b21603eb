"""The plan of a merge: every tensor's update, the head of a tied model, and what is to be said.

Nothing is written before the plan is complete.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from annie_quant.checkpoint.adapters.adapter import Adapter, read_adapter
from annie_quant.checkpoint.adapters.matching import EMBEDDING, HEAD, Matching
from annie_quant.checkpoint.adapters.tokenizer import PromptFiles, choose_prompt_files
from annie_quant.checkpoint.adapters.updates import LowRankUpdate, TensorUpdate
from annie_quant.checkpoint.shards import QUANTIZATION_NAMES, ModelFolder, read_object
from annie_quant.core.errors import CheckpointError
from annie_quant.core.files import is_folder
from annie_quant.core.untrusted import JsonObject
from annie_quant.documents import RECIPE_FILE, AdapterRecord, salvage_or_default

# Ends of the names of repositories that hold a model in 4 bits, as QLoRA loads it.
FOUR_BIT_ENDS = ("-unsloth-bnb-4bit", "-bnb-4bit", "-4bit")


@dataclass(frozen=True)
class MergePlan:
    """What a merge writes.

    updates: name in the merged model → what becomes of the tensor; others keep their bytes.
    left_out: tensors of the base that the merged model does not have.
    config: config.json of the merged model.
    prompt_files: which tokenizer, template and generation settings it has.
    products: number of low-rank products.
    notes: one sentence each.
    """

    adapter: Adapter
    base: ModelFolder
    updates: dict[str, TensorUpdate]
    left_out: list[str]
    config: JsonObject
    prompt_files: PromptFiles
    products: int
    notes: list[str]

    @property
    def size_bytes(self) -> int:
        """The size of the merged model's weights."""
        size = self.base.weight_bytes - sum(self.base.info(n).size_bytes for n in self.left_out)
        for name, update in self.updates.items():
            info = self.base.info(update.source)
            elements = int(np.prod(update.shape, dtype=object))
            size += elements * info.numpy_dtype.itemsize
            size -= self.base.info(name).size_bytes if name in self.base else 0
        return size

    def line(self) -> str:
        """Return one line: the adapter, and how much of it and of the base is concerned."""
        count = len(self.adapter.keys)
        return (
            f"adapter {self.adapter.path.name}: {self.adapter.settings.summary}; {count} of "
            f"{count} tensors used, {len(self.updates)} of {len(self.base.tensors)} tensors of "
            f"the base change"
        )


def plan_merge(base: Path, adapter: Path) -> MergePlan:
    """Return the plan of a merge.

    Raises CheckpointError or UsageError, with one line, for an adapter that cannot be merged into
    this base.
    """
    loaded = read_adapter(adapter)
    folder = ModelFolder(base)
    _check_base(folder, loaded)
    matching = Matching(loaded, folder)
    notes = [*_base_notes(folder, loaded), *_zero_notes(matching), *_head_notes(matching)]
    config = copy.deepcopy(folder.config)
    left_out = _settle_head(matching, config, notes)
    updates = {u.name: u for u in matching.updates.values() if u.changes()}
    rows = _vocabulary_rows(matching, config)
    embedding = updates.get(_embedding_name(folder))
    files = choose_prompt_files(loaded.path, folder, rows, _trained_tokens(embedding))
    notes += files.notes
    return MergePlan(loaded, folder, updates, left_out, config, files, matching.products, notes)


def _check_base(folder: ModelFolder, adapter: Adapter) -> None:
    """Raise CheckpointError for a base in fewer than 16 bits, or one that has the adapter."""
    if folder.quantization:
        method = folder.quantization.get("quant_method", "quantized")
        raise CheckpointError(
            f"{folder.path}: the base is quantized ({method}); an adapter is merged into 16 bits",
            "give --model the bf16 checkpoint of the same model",
        )
    record = salvage_or_default(AdapterRecord, folder.path / RECIPE_FILE)
    if any(one.weights_sha256 == adapter.weights_sha256 for one in record.adapters):
        raise CheckpointError(
            f"{folder.path}: this adapter is merged into it already ({RECIPE_FILE})",
            "leave out --adapter, or give --model the original base",
        )


def _base_notes(folder: ModelFolder, adapter: Adapter) -> list[str]:
    """Return what is to be said about the base that the adapter was trained on."""
    settings = adapter.settings
    name = settings.base_name
    notes = []
    end = next((end for end in FOUR_BIT_ENDS if name.lower().endswith(end)), "")
    trained_on = name[: len(name) - len(end)] if end else name
    if (
        end
        or _is_quantized_folder(settings.base_model_name_or_path)
        or "load_in_4bit: true" in adapter.card.lower()
    ):
        notes.append(
            f"QLoRA: the adapter was trained on {name or 'its base'} in 4 bits; it is merged into "
            f"the 16-bit weights of {folder.path.name}"
        )
    known = {folder.path.resolve().name, Path(str(folder.config.get("_name_or_path", ""))).name}
    if folder.path.resolve().parent.name == "snapshots":
        known.add(folder.path.resolve().parents[1].name.rpartition("--")[2])
    if trained_on and trained_on.lower() not in {one.lower() for one in known}:
        notes.append(
            f"the adapter names {settings.base_model_name_or_path} as its base, and --model is "
            f"{folder.path.name}: all names and shapes fit, which does not prove that they are "
            "the same model"
        )
    return notes


def _is_quantized_folder(path: str | None) -> bool:
    """Return whether a path that an adapter names is a folder with a quantized model here."""
    if not path or not is_folder(Path(path)):
        return False
    with contextlib.suppress(CheckpointError, OSError):
        config = read_object(Path(path) / "config.json") or {}
        return any(config.get(field) for field in QUANTIZATION_NAMES)
    return False


def _zero_notes(matching: Matching) -> list[str]:
    """Return a note on products that are zero. Raises CheckpointError where the adapter is."""
    zero = sorted(set(matching.zero))
    if not zero:
        return []
    others = [u for u in matching.updates.values() if u.replacement is not None or u.rows]
    if len(zero) >= matching.products and not others:
        raise CheckpointError(
            f"{matching.adapter.path}: all {matching.products} products are zero, so the merged "
            "model would be the base",
            "give --adapter the folder of a later checkpoint: this one is not trained",
        )
    return [f"{len(zero)} of {matching.products} products are zero, such as that of {zero[0]}"]


def _head_notes(matching: Matching) -> list[str]:
    """Return a note on a head for multi-token prediction that the adapter did not train."""
    in_mtp = matching.base.family.in_mtp
    is_trained = any(in_mtp(name) for name in matching.updates)
    if is_trained or not any(in_mtp(name) for name in matching.base):
        return []
    return [
        "the head for multi-token prediction (mtp.*) is the base's, so its drafts are accepted "
        "less often than the base's: annie-quant draft tunes it"
    ]


# ---- embedding and head


def _embedding_name(folder: ModelFolder) -> str:
    return folder.find(f"model.{EMBEDDING}") or EMBEDDING


def _settle_head(matching: Matching, config: JsonObject, notes: list[str]) -> list[str]:
    """Decide whether a tied head stays tied, and return the tensors that are not written.

    In training an adapter changes the module that it wraps, and not the other one that has the same
    weight; rows of trained tokens are in both.
    """
    embedding = matching.updates.get(EMBEDDING)
    head = matching.updates.get(HEAD)
    if not matching.is_tied or (embedding is None and head is None):
        return []
    settings = matching.adapter.settings
    stored_head = [HEAD] if HEAD in matching.base else []
    if head is None:
        assert embedding is not None
        saved = any(f".{embedding.name}".endswith(f".{name}.weight") for name in _saved(matching))
        is_own = bool(embedding.low_rank) or (embedding.replacement is not None and saved)
        if not is_own or settings.ensure_weight_tying:
            return stored_head
        head = matching.head_of_embedding()
        head.replacement = embedding.replacement if embedding.low_rank else None
        head.shape = head.shape if head.replacement is None else embedding.shape
    elif embedding is not None:
        head.rows = head.rows or embedding.rows
        if _same_update(embedding, head):
            del matching.updates[HEAD]
            return stored_head
    # The head is written even where only the embedding changes.
    if not head.changes():
        head.replacement = matching.base.tensor(head.source)
    for settings_of in (config, config.get("text_config")):
        if isinstance(settings_of, dict):
            settings_of["tie_word_embeddings"] = False
    notes.append(
        "the base ties its output layer to the embedding, and the adapter changes only one of "
        f"them: the merged model has its own {HEAD}"
    )
    return []


def _saved(matching: Matching) -> list[str]:
    return matching.adapter.settings.modules_to_save or []


def _same_update(embedding: TensorUpdate, head: TensorUpdate) -> bool:
    """Return whether embedding and head get the same values."""
    if embedding.shape != head.shape:
        return False
    if not _same_arrays(embedding.replacement, head.replacement):
        return False
    if len(embedding.rows) != len(head.rows):
        return False
    for (numbers, values), (others, other_values) in zip(embedding.rows, head.rows, strict=True):
        if not (np.array_equal(numbers, others) and np.array_equal(values, other_values)):
            return False
    pairs = list(zip(embedding.low_rank, head.low_rank, strict=False))
    same_number = len(embedding.low_rank) == len(head.low_rank)
    return same_number and all(_same_product(one, other) for one, other in pairs)


def _same_arrays(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    if one is None or other is None:
        return one is other
    return np.array_equal(one, other)


def _same_product(one: LowRankUpdate, other: LowRankUpdate) -> bool:
    same_factors = np.array_equal(one.left, other.left) and np.array_equal(one.right, other.right)
    return same_factors and one.scale == other.scale


def _vocabulary_rows(matching: Matching, config: JsonObject) -> int:
    """Return the rows of the merged embedding, and write them into the settings.

    Raises CheckpointError where embedding and head differ in rows.
    """
    base = matching.base
    rows = {}
    for short in (EMBEDDING, HEAD):
        update = matching.updates.get(short)
        name = base.find(f"model.{short}") or (short if short in base else None)
        if update is not None:
            rows[short] = update.shape[0]
        elif name is not None and not (short == HEAD and matching.is_tied):
            rows[short] = base.info(name).shape[0]
    if len(set(rows.values())) > 1:
        raise CheckpointError(
            f"{matching.adapter.path.name}: {rows[EMBEDDING]} rows in the embedding and "
            f"{rows[HEAD]} in {HEAD}: an added token has no row in one of them",
            "save the adapter with save_embedding_layers=True",
        )
    count = rows.get(EMBEDDING, 0)
    name = base.find(f"model.{EMBEDDING}")
    if name is not None and count != base.info(name).shape[0]:
        for settings in (config, config.get("text_config")):
            if isinstance(settings, dict) and "vocab_size" in settings:
                settings["vocab_size"] = count
    return count


def _trained_tokens(embedding: TensorUpdate | None) -> set[int] | None:
    """Return the tokens whose embedding the adapter changes; None: all of them."""
    if embedding is None:
        return set()
    if embedding.replacement is not None or embedding.low_rank:
        return None
    tokens: set[int] = set()
    for numbers, _ in embedding.rows:
        tokens.update(numbers.tolist())
    return tokens
