"""Batched forwards: shared prefixes are computed once, rows of unequal length together.

Rows are padded on the right, so no real token sees padding; attention masks padded columns in decoding, and DeltaNet's states
are those after each row's own last token (deltanet.py). In float32 the result depends on the batching only through the
rounding of sums; tests/offline/test_engine.py compares it with transformers' own generate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.cache_utils import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from annie_quant.core.errors import UsageError
from annie_quant.offline import caches, codec
from annie_quant.offline.codec import rounding
from annie_quant.offline.deltanet import RaggedBatch, delta_layers, ragged_layers
from annie_quant.offline.profiles import Profile, profile_of
from annie_quant.offline.prompt_positions import PromptPositions

ATTENTION_NAME = "annie_quant_grouped"


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return (outputs [B, T, H, D], None), as transformers' attention functions do.

    transformers' sdpa copies the keys and values of each key head for its query heads before every masked call, which takes most of
    the time in a decode step of many rows. Here the query heads of one key head are the rows of one matrix product.

    query: [B, H, T, D]. key, value: [B, Hkv, L, D]. attention_mask: bool [B, 1, T, L], True for visible columns.
    """
    batch, heads, steps, head_dim = query.shape
    if steps > 1 or (attention_mask is not None and attention_mask.dtype != torch.bool):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    per_key_head = (batch * key.shape[1], heads // key.shape[1], head_dim)
    scores = torch.bmm(
        (query * (scaling or head_dim**-0.5)).reshape(per_key_head),
        key.flatten(0, 1).transpose(1, 2),
    )
    scores = scores.view(batch, heads, -1).float()
    if attention_mask is not None:
        scores = scores.masked_fill_(~attention_mask[:, 0], -torch.inf)
    weights = scores.softmax(-1).to(value.dtype).view(per_key_head[0], per_key_head[1], -1)
    return torch.bmm(weights, value.flatten(0, 1)).view(batch, 1, heads, head_dim), None


def rounded_attention(profile: Profile) -> Callable[..., tuple[torch.Tensor, None]]:
    """Return grouped_attention with the roundings of a numerics profile; keys and values are rounded when they are stored."""
    stream = rounding(profile.stream)

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        output, _ = grouped_attention(module, stream(query), key, value, *args, **options)
        return stream(output), None

    return attention


def use_grouped_attention(
    config: PretrainedConfig, profile: Profile
) -> contextlib.AbstractContextManager[None]:
    """Let a model with this text config use grouped_attention instead of sdpa. Other implementations are unchanged.

    profile: where queries, keys, values and outputs are rounded.
    """
    if config._attn_implementation != "sdpa":
        return contextlib.nullcontext()
    name = f"{ATTENTION_NAME}_{profile.stream}"
    if name not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(
            name, rounded_attention(profile) if profile.rounds else grouped_attention
        )
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, sdpa_mask)
    return use_attention(config, name)


@contextlib.contextmanager
def use_attention(config: PretrainedConfig, name: str) -> Iterator[None]:
    """Let a model with this text config use a registered attention function."""
    before = config._attn_implementation
    config._attn_implementation_internal = name
    try:
        yield
    finally:
        config._attn_implementation_internal = before


MAX_LOGITS = 1 << 25  # logits in memory at one time
CPU_FORWARD_TOKENS = {
    "cpu": 1024
}  # per forward; on a CPU 512 to 2048 take 10 % less time than 4096 (tests/perf/runtime.md)
# Of the keys and values of all rows, which each have a copy of the prefix.
MAX_CACHE_COLUMNS = 1 << 18
CPU_CACHE_BYTES = 1 << 30
# Of a batch that is decoded: its rows times the tokens of its longest prompt and answer.
MAX_DECODED_COLUMNS = 1 << 19
COMPARED_TOKENS = 2048  # that a GPU compares at once; a CPU compares each answer alone
# What an H200 computes while the kernels of one forward through eight layers are launched.
LAUNCH_FLOP = 5e11
_BATCH_ROWS = 128
MAX_BATCH_ROWS = (
    512  # on a GPU, which computes a step of many rows in little more time than one of few
)
ROWS_SHARE = 0.2  # of the free memory, for the keys and values of a batch
ROW_TOKENS = 2048  # of a long prompt and its answer
# per forward on a GPU; the most are for a small model
MIN_FORWARD_TOKENS = 4096
MAX_FORWARD_TOKENS = 32768


@dataclass(frozen=True)
class Row:
    """A prompt and the tokens that are scored after it."""

    prompt: Sequence[int]
    target: Sequence[int]


@dataclass(frozen=True)
class Forward:
    """A computed batch: the rows' indices, hidden states [B, T, D] from token `shared` on, and the cache."""

    rows: list[int]
    hidden: torch.Tensor
    shared: int
    cache: DynamicCache


class Engine:
    """A model with its batching.

    tokens: most tokens (rows x length) per forward; None: CPU_FORWARD_TOKENS, on a GPU more for a small model.
    rows: most rows per batch; None: _BATCH_ROWS, on a GPU as many as fit, up to MAX_BATCH_ROWS.
    fixed_buffers: whether decode steps are computed in buffers of fixed size (decoding.advance_fixed).
    captures: whether those steps are captured as CUDA graphs, on the stream capture_stream.
    """

    def __init__(self, model: Any, tokens: int | None = None, rows: int | None = None) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.config = model.config.get_text_config()
        launched = tokens_per_launch(self.config) if self.device.type == "cuda" else 0
        self.tokens = tokens or max(
            CPU_FORWARD_TOKENS.get(self.device.type, MIN_FORWARD_TOKENS), launched
        )
        self.group_cost = max(GROUP_COST, launched)
        self.layer_types = getattr(self.config, "layer_types", None) or (
            ["full_attention"] * self.config.num_hidden_layers
        )
        self.rows = rows or self.rows_that_fit()
        self.cache_columns = MAX_CACHE_COLUMNS
        if self.device.type == "cpu":
            self.cache_columns = min(MAX_CACHE_COLUMNS, CPU_CACHE_BYTES // self.token_bytes())
        unsupported = set(self.layer_types) - {
            "full_attention",
            "linear_attention",
            "sliding_attention",
        }
        if unsupported:
            raise UsageError(
                f"layers of type {sorted(unsupported)[0]} are not supported by the offline evaluation"
            )
        self.batch = RaggedBatch()
        self.delta_layers = delta_layers(model)
        self.attention = {
            module.layer_idx: module
            for module in model.modules()
            if type(module).__name__.endswith("Attention") and hasattr(module, "layer_idx")
        }
        self.head = model.get_output_embeddings()
        self.vocabulary = int(getattr(self.head, "out_features", 0) or self.head.weight.shape[0])
        self.compared_tokens = (
            1 if self.device.type == "cpu" else min(COMPARED_TOKENS, MAX_LOGITS // self.vocabulary)
        )
        self.captures = self.device.type == "cuda"
        self.capture_stream = torch.cuda.Stream(self.device) if self.captures else None
        as_it_is = (
            self.config._attn_implementation == "sdpa"
        )  # the attention takes the mask as it is
        self.fixed_buffers = self.captures and as_it_is and hasattr(model.base_model, "layers")

    def rows_that_fit(self) -> int:
        """Return _BATCH_ROWS, on a GPU as many rows as a share of the free memory has room for, at most MAX_BATCH_ROWS."""
        if self.device.type != "cuda":
            return _BATCH_ROWS
        free = torch.cuda.mem_get_info(self.device)[0]
        fitting = int(ROWS_SHARE * free / (self.token_bytes() * ROW_TOKENS))
        return max(_BATCH_ROWS, min(MAX_BATCH_ROWS, fitting - fitting % _BATCH_ROWS))

    def decoded_rows(self, columns: int) -> int:
        """Return how many rows of `columns` tokens are decoded together."""
        fitting = min(self.rows * ROW_TOKENS, MAX_DECODED_COLUMNS) // max(1, columns)
        return max(1, min(self.rows, fitting))

    def token_bytes(self) -> int:
        """Return the bytes of one token's keys and values."""
        heads = getattr(self.config, "num_key_value_heads", self.config.num_attention_heads)
        width = getattr(self.config, "head_dim", None)
        width = width or self.config.hidden_size // self.config.num_attention_heads
        n_layers = sum(kind != "linear_attention" for kind in self.layer_types)
        return max(1, 2 * n_layers * heads * width * self.model.dtype.itemsize)

    def scores(self, rows: Sequence[Row]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (row index, logits float32 [len(target), V]) per row: the logits that each target token was chosen from.

        The order depends on the rows alone, so two models yield the same rows in step.
        """
        inputs = [[*row.prompt, *row.target[:-1]] for row in rows]
        firsts = [len(r.prompt) - 1 for r in rows]
        for forward in self.forwards(inputs, firsts, read=firsts):
            sizes = [len(rows[i].target) for i in forward.rows]
            for part in split_by_size(sizes, max(1, MAX_LOGITS // self.vocabulary)):
                firsts = [len(rows[forward.rows[j]].prompt) - 1 - forward.shared for j in part]
                states = torch.cat(
                    [forward.hidden[j, f : f + sizes[j]] for j, f in zip(part, firsts, strict=True)]
                )
                logits = self.logits(states).float()
                for j, row_logits in zip(part, logits.split([sizes[j] for j in part]), strict=True):
                    yield forward.rows[j], row_logits

    def forwards(
        self,
        inputs: Sequence[Sequence[int]],
        limits: Sequence[int],
        prompts: Sequence[int] | None = None,
        read: Sequence[int] | None = None,
    ) -> Iterator[Forward]:
        """Compute rows of tokens in batches.

        limits[i]: most tokens of row i that may be in a shared prefix. prompts[i]: first tokens of row i that are its prompt, more
        than limits[i]; a server decodes the others. None: limits[i] + 1. read[i]: the first token of row i whose hidden state
        the caller reads; None: 0.
        """
        prompts = [limit + 1 for limit in limits] if prompts is None else prompts
        for prefix_group in group_by_prefix(inputs, limits, self.group_cost):
            shared = prefix_group.shared
            prefix_cache = None
            waiting = sorted(prefix_group.rows, key=lambda i: -len(inputs[i]))
            while waiting:
                width = len(inputs[waiting[0]]) - shared
                rows_in_cache = self.cache_columns // (shared + width)
                count = max(1, min(self.rows, self.tokens // width, rows_in_cache))
                batch, waiting = waiting[:count], waiting[count:]
                if shared and prefix_cache is None:
                    prefix_cache = self.prefix(inputs[prefix_group.rows[0]][:shared])
                cache = self.new_cache()
                if prefix_cache is not None:
                    caches.repeat_row(prefix_cache, cache, len(batch))
                ids = torch.zeros(len(batch), width, dtype=torch.long)
                for j, i in enumerate(batch):
                    ids[j, : len(inputs[i]) - shared] = torch.tensor(inputs[i][shared:])
                # Compared on the CPU: a comparison of a GPU's tensors would wait for all steps before.
                lengths = torch.tensor([len(inputs[i]) - shared for i in batch])
                prefilled = torch.tensor([prompts[i] - shared for i in batch])
                ragged = int(lengths.min()) < width
                has_answers = bool((prefilled < lengths).any())
                self.batch.set(
                    lengths.to(self.device) if ragged else None,
                    width,
                    cache,
                    prefilled if has_answers else None,
                )
                firsts = [0 if read is None else read[i] - shared for i in batch]
                columns = torch.arange(width)
                mask = (columns >= torch.tensor(firsts)[:, None]) & (columns < lengths[:, None])
                with self.last_mlp_at(mask):
                    hidden = self.step(ids.to(self.device), cache, shared + width)
                self.batch.set(None, 0, None)
                yield Forward(batch, hidden, shared, cache)

    @contextlib.contextmanager
    def last_mlp_at(self, positions: torch.Tensor) -> Iterator[None]:
        """Let the MLP of the last layer compute these positions alone, bool [B, T]: no later layer reads the others.

        On a GPU, and in a mixture, it computes all: the selection would wait for the device, and experts get tokens together.
        """
        if self.device.type != "cpu" or bool(positions.all()):
            yield
            return
        prompts = self.prompt_positions
        mlp = getattr(self.model.base_model.layers[-1], "mlp", None)
        if mlp is None or not hasattr(mlp, "down_proj"):
            yield
            return
        # accelerate replaces it too
        forward = mlp.forward
        replaced = mlp.__dict__.get("forward")

        def at_positions(x: torch.Tensor) -> torch.Tensor:
            output = torch.zeros_like(x)
            chosen = x[positions]
            inside = prompts.positions
            inside = inside[positions] if isinstance(inside, torch.Tensor) else inside
            if len(chosen):
                with prompts.set(inside):
                    output[positions] = forward(chosen)
            return output

        mlp.forward = at_positions
        try:
            yield
        finally:
            del mlp.forward
            if replaced is not None:
                mlp.forward = replaced

    @property
    def prompt_positions(self) -> PromptPositions:
        """Return those that the model's linears read (emulation.emulate)."""
        return getattr(self.model, "annie_quant_prompts", None) or PromptPositions()

    def new_cache(self) -> DynamicCache:
        """Return an empty cache that holds keys and values as the model's profile does."""
        kind = profile_of(self.model).kv
        if kind == "float32":
            return caches.new_cache(self.model.config, self.layer_types)
        stored = codec.cache_rounding(kind)
        by_layer = {index: partial(stored, module) for index, module in self.attention.items()}
        return caches.new_cache(self.model.config, self.layer_types, by_layer)

    def prefix(self, tokens: Sequence[int]) -> DynamicCache:
        """Return the cache of one row with these tokens. Under emulate(), and for the reference, it is computed once."""
        computed = getattr(self.model, "annie_quant_prefixes", None)
        if computed is None:
            computed = {}
        key = tuple(tokens)
        if key not in computed:
            cache = self.new_cache()
            ids = torch.tensor([list(tokens)], device=self.device)
            with self.last_mlp_at(torch.zeros_like(ids, dtype=torch.bool)):
                self.step(ids, cache, len(tokens))
            computed[key] = cache
        return computed[key]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)

    def decode_masks(
        self, real: torch.Tensor, lengths: torch.Tensor
    ) -> dict[str, torch.Tensor | None]:
        """Return the visible columns of a decode step by type of layer, bool [B, 1, 1, L].

        real: bool [B, L], the columns with tokens.  lengths: positions [B] of the tokens that are computed. Padding lies between
        a row's prompt and its answer, so a window counts tokens and not columns.
        """
        visible = real[:, None, None, :]
        masks: dict[str, torch.Tensor | None] = {
            "full_attention": visible,
            "linear_attention": None,
        }
        if "sliding_attention" in self.layer_types:
            inside = real.cumsum(1) - 1 > (lengths - self.config.sliding_window)[:, None]
            masks["sliding_attention"] = visible & inside[:, None, None, :]
        return masks

    @torch.inference_mode()
    def step(
        self, ids: torch.Tensor, cache: DynamicCache, total: int, **options: Any
    ) -> torch.Tensor:
        """Return hidden states [B, T, D] after the final norm. total: columns of the cache after this step."""
        is_decoded = "position_ids" in options
        in_prompt: torch.Tensor | bool = not is_decoded
        if self.batch.prompts is not None and not is_decoded:
            steps = torch.arange(ids.shape[1], device=self.device)
            in_prompt = steps < self.batch.prompts.to(self.device).unsqueeze(1)
        if not is_decoded:
            options["position_ids"] = torch.arange(
                total - ids.shape[1], total, device=self.device
            ).expand(len(ids), -1)
        profile = profile_of(self.model)
        with (
            self.prompt_positions.set(in_prompt),
            ragged_layers(self.delta_layers, profile, self.batch),
            use_grouped_attention(self.config, profile),
        ):
            output = self.model.base_model(
                input_ids=ids, past_key_values=cache, use_cache=True, **options
            )
            return output.last_hidden_state


def tokens_per_launch(config: PretrainedConfig) -> int:
    """Return how many tokens a GPU computes in the time in which a forward is launched: the price of one more forward.

    From the text config alone, so that a checkpoint and its reference get the same batches.
    """
    weights = (
        12 * config.num_hidden_layers * config.hidden_size**2
    )  # of attention and MLP of the usual shape
    return min(MAX_FORWARD_TOKENS, int(LAUNCH_FLOP / (2 * weights)))


def batches(rows: Iterable[tuple[Any, ...]], least: int) -> Iterator[tuple[Any, ...]]:
    """Yield (row indices, their logits [n, V], ...) of rows (index, logits, ...), at least `least` tokens at a time.

    A GPU compares few tokens in the same time as many.
    """
    waiting: list[tuple[Any, ...]] = []
    n = 0
    for row in rows:
        waiting.append(row)
        n += len(row[1])
        if n >= least:
            yield _joined(waiting)
            waiting = []
            n = 0
    if waiting:
        yield _joined(waiting)


def _joined(rows: Sequence[Any]) -> tuple[Any, ...]:
    indices, *tensors = zip(*rows, strict=True)
    return indices, *(torch.cat(t) if len(t) > 1 else t[0] for t in tensors)


def split_by_size(sizes: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Yield consecutive indices of `sizes` in runs whose sum is at most `limit`, with at least one index per run."""
    run: list[int] = []
    total = 0
    for i, size in enumerate(sizes):
        if run and total + size > limit:
            yield run
            run = []
            total = 0
        run.append(i)
        total += size
    if run:
        yield run


GROUP_COST = 512  # one more forward pass, in tokens
MIN_SHARED = 16  # a shorter shared prefix does not pay for a separate forward


@dataclass(frozen=True)
class PrefixGroup:
    """Rows (indices) with the same first `shared` tokens; each row has at least one more token."""

    shared: int
    rows: tuple[int, ...]


def group_by_prefix(
    rows: Sequence[Sequence[int]],
    limits: Sequence[int],
    group_cost: int = GROUP_COST,
) -> list[PrefixGroup]:
    """Return groups that cover all rows with few computed tokens. limits[i]: most tokens of row i that may be shared.

    group_cost: of one more group, in tokens.

    Greedy over the rows in lexicographic order: a row joins the group while the shorter prefix costs less than a new group.
    """
    order = sorted(range(len(rows)), key=lambda i: list(rows[i]))
    groups: list[tuple[int, list[int]]] = []
    for i in order:
        if groups:
            shared, members = groups[-1]
            shorter = min(shared, limits[i], caches.common_prefix(rows[members[-1]], rows[i]))
            if (len(members) - 1) * (shared - shorter) <= shorter + group_cost:
                groups[-1] = shorter, members
                members.append(i)
                continue
        groups.append((limits[i], [i]))
    return [
        PrefixGroup(shared if shared >= MIN_SHARED else 0, tuple(members))
        for shared, members in groups
    ]
