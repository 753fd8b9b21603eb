"""Which tensor of the base each tensor of an adapter changes.

Every tensor of the adapter is used exactly once. Names are compared without the prefix of the text
or the multimodal class, never by their end: layers of the vision tower and of the head for
multi-token prediction have the same numbers as those of the decoder.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from typing import NoReturn

import numpy as np

from annie_quant.checkpoint.adapters.adapter import FLOATS, Adapter
from annie_quant.checkpoint.adapters.keys import AdapterKey, Part
from annie_quant.checkpoint.adapters.settings import EXPERTS_OUT_FIRST, LAYOUTS
from annie_quant.checkpoint.adapters.updates import LowRankUpdate, TensorUpdate
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import CheckpointError
from annie_quant.models import short_name

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
RESIZED = (EMBEDDING, HEAD)  # have more rows after tokens were added
MAX_EXAMPLES = 3
Parts = dict[Part, AdapterKey]


class Matching:
    """The updates of a base's tensors by an adapter, by the tensor's short name.

    updates: short name → update; the head of a tied model has its own.
    unmatched: names of the adapter's tensors that fit no tensor of the base.
    zero: modules whose product is zero.
    """

    def __init__(self, adapter: Adapter, base: ModelFolder) -> None:
        self.adapter = adapter
        self.base = base
        self.updates: dict[str, TensorUpdate] = {}
        self.unmatched: list[str] = []
        self.zero: list[str] = []
        self.products = 0
        self._names = {short_name(name): name for name in base}
        modules: dict[str, dict[int, Parts]] = defaultdict(lambda: defaultdict(dict))
        whole: dict[str, list[AdapterKey]] = defaultdict(list)
        for key in adapter.keys:
            adapter_is_zero = adapter.is_zero(key)
            if key.part in ("tensor", "original"):
                whole[short_name(key.path)].append(key)
                continue
            parts = modules[key.path][key.depth]
            if key.part in parts:
                self._fail(f"both {parts[key.part].key} and {key.key}: one module, two tensors")
            parts[key.part] = key
            if adapter_is_zero and key.part != "tokens":
                self.zero.append(key.path)
        for name, keys in whole.items():
            self._replace(name, keys)
        for path, wrapped in modules.items():
            self._module(path, wrapped)
        self._check_unmatched()

    def _fail(self, reason: str, hint: str = "") -> NoReturn:
        trained_on = self.adapter.settings.base_model_name_or_path
        given = f"give --model the base that it was trained on: {trained_on}"
        raise CheckpointError(f"{self.adapter.path.name}: {reason}", hint or given)

    def _check_unmatched(self) -> None:
        if not self.unmatched:
            return
        total = len(self.adapter.keys)
        examples = ", ".join(self.unmatched[:MAX_EXAMPLES])
        self._fail(
            f"{len(self.unmatched)} of {total} tensors match nothing in {self.base.path.name}, "
            f"such as {examples}"
        )

    # ---- the base

    @cached_property
    def is_tied(self) -> bool:
        """Whether the base's embedding is also its head."""
        has_head = HEAD in self._names
        return EMBEDDING in self._names and (bool(self.base.ties_embedding) or not has_head)

    @cached_property
    def _merged_experts(self) -> dict[str, str]:
        """Linear of one expert → the merged tensor of the base that has it."""
        return {part: name for name in self.base for part in self.base.parts_of(name)}

    def _find(self, name: str) -> str | None:
        """Return the base's tensor of a name in any form of the model, also of a single expert."""
        found = self._names.get(short_name(name))
        return found if found is not None else self.base.find(name)

    def _update(self, name: str) -> TensorUpdate:
        """Return the update of a tensor of the base, or of the head of a tied model."""
        short = short_name(name)
        if short not in self.updates:
            source = self._names[EMBEDDING] if short == HEAD and self.is_tied else name
            info = self.base.info(source)
            if info.dtype not in FLOATS:
                self._fail(f"{name} of the base is {info.dtype}", "give --model the 16-bit base")
            kind = self.base.family.kind_of(name)
            self.updates[short] = TensorUpdate(name, source, info.dtype, info.shape, kind)
        return self.updates[short]

    def head_of_embedding(self) -> TensorUpdate:
        """Return the update of a tied model's head, which starts from the base's embedding."""
        return self._update(HEAD)

    # ---- whole tensors

    def _replace(self, short: str, keys: list[AdapterKey]) -> None:
        """Take a whole tensor of the adapter: modules_to_save, a bias, a resized embedding."""
        used = [key for key in keys if key.part == "tensor"]
        name = self._names.get(short)
        if name is None and short == HEAD and self.is_tied:
            name = HEAD
        if name is None or not used:
            self.unmatched += [key.key for key in keys]
            return
        first = self.adapter.tensor(used[0])
        for other in used[1:]:
            if not np.array_equal(first, self.adapter.tensor(other)):
                self._fail(f"{used[0].key} and {other.key} are one tensor with different values")
        update = self._update(name)
        is_resized = short in RESIZED and first.shape[1:] == update.shape[1:]
        if first.shape != update.shape and not (is_resized and len(first) > update.shape[0]):
            self._wrong_shape(used[0], first.shape, update)
        update.replacement = first
        update.shape = first.shape

    def _wrong_shape(
        self, key: AdapterKey, shape: tuple[int, ...], update: TensorUpdate
    ) -> NoReturn:
        self._fail(
            f"{key.key} {list(shape)} does not fit {update.name} {list(update.shape)}: "
            "an adapter of another base"
        )

    # ---- modules

    def _module(self, path: str, wrapped: dict[int, Parts]) -> None:
        """Take the tensors of one module. wrapped: depth → its tensors."""
        experts = self.base.family.experts
        merged = experts.merged_part(path) if experts else None
        if experts and short_name(path).endswith(f".{experts.module}"):
            self._expert_module(path, wrapped)
        elif merged and list(wrapped) == [0]:
            self._expert_parameter(path.rpartition(".")[0], merged[1], wrapped[0])
        elif list(wrapped) == [0]:
            self._plain_module(path, wrapped[0])
        else:
            for parts in wrapped.values():
                self.unmatched += [key.key for key in parts.values()]

    def _plain_module(self, path: str, parts: Parts) -> None:
        name = self._find(f"{path}.weight")
        if name is None and short_name(f"{path}.weight") == HEAD and self.is_tied:
            name = HEAD
        if name is None:
            self.unmatched += [key.key for key in parts.values()]
            return
        remaining = dict(parts)
        tokens = remaining.pop("tokens", None)
        if tokens is not None:
            self._tokens(tokens, name)
        if "lora_embedding_A" in remaining or "lora_embedding_B" in remaining:
            self._embedding(path, name, remaining)
        elif remaining:
            self._linear(path, name, remaining)

    def _pair(self, path: str, parts: Parts, first: Part, second: Part) -> tuple[np.ndarray, ...]:
        """Return a module's two matrices. Raises CheckpointError where one is missing."""
        for part in (first, second):
            if part not in parts:
                present = next(iter(parts.values())).key
                self._fail(f"{present} has no {part} next to it", "save the adapter again")
        a = self.adapter.tensor(parts[first])
        b = self.adapter.tensor(parts[second])
        if a.ndim != 2 or b.ndim != 2:
            self._fail(f"{parts[first].key} {list(a.shape)}: a LoRA of a convolution is not merged")
        self.products += 1
        return a, b

    def _scale(self, path: str, rank: int, key: AdapterKey) -> float:
        """Return a module's scale. rank: of its matrices, which must be that of the settings."""
        expected = self.adapter.settings.rank(path)
        if rank != expected:
            self._fail(
                f"{key.key} has rank {rank}, and r or rank_pattern of adapter_config.json gives "
                f"{expected}",
                "restore the adapter_config.json that was saved with these tensors",
            )
        return self.adapter.settings.scale(path)

    def _linear(self, path: str, name: str, parts: Parts) -> None:
        a, b = self._pair(path, parts, "lora_A", "lora_B")
        settings = self.adapter.settings
        parameter = f"{path}.weight"
        is_parameter = settings.targets_parameter(parameter)
        scale = self._scale(parameter if is_parameter else path, len(a), parts["lora_A"])
        magnitude = self._magnitude(parts)
        merged = self._merged_experts.get(name)
        update = self._update(merged or name)
        shape = self.base.info(name).shape if merged else update.shape
        if len(shape) != 2:
            self._fail(f"{parts['lora_A'].key}: {name} {list(shape)} is not a linear")
        if b.shape[0] > shape[0] and short_name(name) == HEAD:
            self._fail(
                f"{parts['lora_B'].key} is for {b.shape[0]} tokens and {name} has {shape[0]} rows: "
                "an added token has no row",
                "save the adapter with save_embedding_layers=True",
            )
        if (b.shape[0], a.shape[1]) != tuple(shape) or b.shape[1] != len(a):
            self._wrong_shape(parts["lora_A"], (b.shape[0], a.shape[1]), update)
        if magnitude is not None and magnitude.shape != (shape[0],):
            self._wrong_shape(parts["lora_magnitude_vector"], magnitude.shape, update)
        first_row = self._first_row(merged, name) if merged else 0
        update.low_rank.append(LowRankUpdate(first_row, b, a, scale, magnitude))
        self._bias(path, parts, scale)

    def _first_row(self, merged: str, name: str) -> int:
        """Return where a single expert's linear starts in the rows of the merged tensor."""
        whole = self.base.info(merged)
        part = self.base.info(name)
        return (part.offset - whole.offset) // (part.size_bytes // part.shape[0])

    def _magnitude(self, parts: Parts) -> np.ndarray | None:
        key = parts.get("lora_magnitude_vector")
        if (key is not None) != self.adapter.settings.use_dora:
            shown = (key or parts["lora_A"]).key
            state = "no magnitude vector" if key is None else "a magnitude vector"
            self._fail(
                f"{shown}: {state}, and use_dora is {self.adapter.settings.use_dora}",
                "restore the adapter_config.json that was saved with these tensors",
            )
        return None if key is None else self.adapter.tensor(key).reshape(-1)

    def _bias(self, path: str, parts: Parts, scale: float) -> None:
        """Add the bias of lora_B to that of the base."""
        key = parts.get("lora_B.bias")
        if (key is not None) != self.adapter.settings.lora_bias:
            shown = (key or parts["lora_B"]).key
            self._fail(
                f"{shown}: lora_bias is {self.adapter.settings.lora_bias}",
                "restore the adapter_config.json that was saved with these tensors",
            )
        if key is None:
            return
        name = self._find(f"{path}.bias")
        if name is None:
            self.unmatched.append(key.key)
            return
        update = self._update(name)
        bias = self.adapter.tensor(key).reshape(-1, 1)
        if (len(bias),) != update.shape:
            self._wrong_shape(key, (len(bias),), update)
        one = np.ones((1, 1), np.float32)
        update.low_rank.append(LowRankUpdate(0, bias, one, scale))

    def _embedding(self, path: str, name: str, parts: Parts) -> None:
        a, b = self._pair(path, parts, "lora_embedding_A", "lora_embedding_B")
        if self.adapter.settings.use_dora:
            self._fail(f"{path}: DoRA on an embedding is not merged here")
        update = self._update(name)
        key = parts["lora_embedding_A"]
        scale = self._scale(path, len(a), key)
        shape = (a.shape[1], b.shape[0])
        if shape[0] > update.shape[0]:
            self._fail(
                f"{key.key} is for {shape[0]} tokens and {name} has {update.shape[0]} rows: "
                "an added token has no row",
                "save the adapter with save_embedding_layers=True",
            )
        if shape != update.shape or b.shape[1] != len(a):
            self._wrong_shape(key, shape, update)
        update.low_rank.append(LowRankUpdate(0, a.T, b.T, scale))

    def _tokens(self, key: AdapterKey, name: str) -> None:
        """Replace the rows of trainable_token_indices."""
        numbers = self.adapter.settings.token_indices(key.path)
        values = self.adapter.tensor(key)
        update = self._update(name)
        if numbers is None or values.shape != (len(numbers), update.columns):
            count = len(numbers or ())
            self._fail(
                f"{key.key} {list(values.shape)}: trainable_token_indices has {count} tokens and "
                f"{name} {update.columns} columns",
                "restore the adapter_config.json that was saved with these tensors",
            )
        beyond = [number for number in numbers if not 0 <= number < update.shape[0]]
        if beyond:
            self._fail(
                f"{key.key}: token {beyond[0]} has no row in {name}, which has {update.shape[0]}",
                "save the adapter with save_embedding_layers=True",
            )
        rows = np.array(numbers, np.int64)
        update.rows.append((rows, values))

    # ---- experts

    def _expert_module(self, path: str, wrapped: dict[int, Parts]) -> None:
        """Take the wrappers of an experts module, whose names do not say which parameter is theirs.

        The parameter that the module declares first has the innermost wrapper.
        """
        experts = self.base.family.experts
        assert experts is not None
        targets = self.adapter.settings.targets_parameter
        parameters = [part for part in experts.merged if targets(f"{path}.{part}")]
        depths = sorted(wrapped, reverse=True)
        if len(parameters) != len(depths):
            self._fail(
                f"{path} has {len(depths)} products, and target_parameters of adapter_config.json "
                f"names {len(parameters)} parameters of it",
                "restore the adapter_config.json that was saved with these tensors",
            )
        for parameter, depth in zip(parameters, depths, strict=True):
            self._expert_parameter(path, parameter, wrapped[depth])

    def _expert_parameter(self, path: str, parameter: str, parts: Parts) -> None:
        """Add to one parameter of all experts, merged or one by one in the base."""
        a, b = self._pair(path, parts, "lora_A", "lora_B")
        if set(parts) != {"lora_A", "lora_B"}:
            extra = next(key for part, key in parts.items() if part not in ("lora_A", "lora_B"))
            self._fail(f"{extra.key}: only plain products of experts are merged here")
        targets = self._expert_tensors(path, parameter)
        if not targets:
            self.unmatched += [key.key for key in parts.values()]
            return
        key = parts["lora_A"]
        count = len(targets)
        rows = sum(height for _, _, height in targets[0])
        columns = self._update(targets[0][0][0]).columns
        if len(a) % count or b.shape[1] != len(a):
            shown = list(a.shape)
            self._fail(f"{key.key} {shown}: its rows are not a multiple of {count} experts")
        rank = len(a) // count
        scale = self._scale(f"{path}.{parameter}", rank, key)
        is_swapped = self._is_swapped(key, a.shape[1], b.shape[0], rows, columns)
        grouped = self._is_grouped(key, count, rank)
        for number, linears in enumerate(targets):
            own = slice(number * rank, (number + 1) * rank)
            expert_b = b[:, own] if grouped else b[:, number::count]
            left = a[own].T if is_swapped else expert_b
            right = expert_b.T if is_swapped else a[own]
            start = 0
            for name, first_row, height in linears:
                product = LowRankUpdate(first_row, left[start : start + height], right, scale)
                self._update(name).low_rank.append(product)
                start += height

    def _expert_tensors(self, path: str, parameter: str) -> list[list[tuple[str, int, int]]]:
        """Return per expert the base's tensors with a parameter's rows: (name, first row, rows)."""
        experts = self.base.family.experts
        assert experts is not None
        merged = self._find(f"{path}.{parameter}") or self._find(f"{path}.{parameter}.weight")
        if merged is not None:
            shape = self.base.info(merged).shape
            if len(shape) != 3:
                self._fail(f"{merged} {list(shape)} of the base is not a tensor of experts")
            count = shape[0]
            height = shape[1]
            return [[(merged, number * height, height)] for number in range(count)]
        found: list[list[tuple[str, int, int]]] = []
        while True:
            linears = experts.merged[parameter]
            names = [self._find(f"{path}.{len(found)}.{linear}.weight") for linear in linears]
            present = [name for name in names if name is not None]
            if len(present) != len(linears):
                return found
            found.append([(name, 0, self.base.info(name).shape[0]) for name in present])

    def _is_swapped(
        self, key: AdapterKey, a_columns: int, b_rows: int, rows: int, columns: int
    ) -> bool:
        """Return whether lora_A is over the outputs, as peft wrote it before 0.19."""
        is_plain = (a_columns, b_rows) == (columns, rows)
        is_swapped = (a_columns, b_rows) == (rows, columns)
        if is_plain and is_swapped:
            version = self.adapter.settings.version
            if version is None:
                self._fail(
                    f"{key.key}: with {rows} rows and columns its orientation depends on the "
                    "version of peft, which adapter_config.json does not name",
                    "set peft_version in adapter_config.json to the version that trained it",
                )
            return version < EXPERTS_OUT_FIRST
        if not is_plain and not is_swapped:
            self._fail(
                f"{key.key}: a product of [{b_rows}, {a_columns}] does not fit experts of "
                f"[{rows}, {columns}]: an adapter of another base"
            )
        return is_swapped

    def _is_grouped(self, key: AdapterKey, count: int, rank: int) -> bool:
        """Return whether an expert's columns of lora_B are next to each other.

        peft reads every count-th column as one expert's. Unsloth trained with groups of columns
        until September 2026, and notes the order since then.
        """
        layout = self.adapter.settings.expert_layout
        if layout is None and count > 1 and rank > 1 and self.adapter.is_from_unsloth:
            self._fail(
                f"{key.key}: Unsloth ordered the experts in lora_B in two ways, and "
                "adapter_config.json does not name this adapter's",
                'add "lora_B_layout": "grouped_by_expert" to adapter_config.json if it was trained '
                'before unsloth_zoo#1269 (September 2026), else "rank_major"',
            )
        return layout == LAYOUTS[1]
