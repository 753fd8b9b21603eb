"""What a strategy computes and holds in memory, by the shape of the model and of the calibration text.

Times are operations divided by the rates of a machine (rates.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from annie_quant.checkpoint.linears import read_struct
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.size import AttentionShape, caches_of
from annie_quant.models.family import ModelSize
from annie_quant.quantize.rates import Rates
from annie_quant.quantize.strategy import (
    TRIAL_POSITIONS,
    TRIAL_TOKENS,
    TUNING_NUMBERS,
    TUNING_PASSES,
    TUNING_STEPS,
    TUNING_TOKENS,
    Cost,
    in_float32,
)

# ---- constants of times: shares of the matmul rate, measured on a CPU with SmolLM2-135M (tests/perf/strategies.md) and consistent
# with an H200 (tests/quantize/test_estimates.py has both measurements)

FORWARD_SHARE = 0.6
HESSIAN_SHARE = 0.9
# On a CPU; on a GPU, of its float32 rate and with the copy to the host.
FACTOR_SHARE = {"cpu": 0.45, "cuda": 0.01}
COLUMNS_SHARE = 0.75
PER_COLUMN = 1500  # operations per weight that the rounding of columns takes at any width
HESSIAN_TOKENS = 0.6  # share of the tokens that a Hessian multiplies (gptq.Sampling)
# Imports and tokenizer; on a GPU also CUDA: naive of Coder-0.5B takes 5 s after its imports (tests/perf/long_prompts.md).
START_S = {"cpu": 8.0, "cuda": 8.0}
ROW_S = 0.01  # template and tokens of a conversation
BATCH_S = 2e-3  # of one layer and batch
DISK = 1e9  # bytes per second, assumed
TOKENIZED_S = 2e6  # tokens per second, of which most belong to a prompt that was tokenized before
CHARACTERS = 6  # of a conversation's JSON per token

# ---- constants of memory, set by the peaks in tests/perf/long_prompts.md: on a CPU the process's largest resident set, on a GPU
# torch's largest allocation

PROCESS_BYTES = 0.4e9  # Python, torch and this package; on a GPU what a forward pass computes
BF16_BYTES = 2  # of a weight
TEXT_BYTES = 24  # of a token's number and kind, in the samples of all answers
# Of the text's hidden states: a layer's inputs and outputs, and the gathered inputs or the second stream.
HIDDEN_COPIES = 3
# Numbers per token that a forward pass through one layer has in memory on a CPU: this many hidden states and MLP inputs.
PASS_HIDDEN = 12
PASS_INTERMEDIATE = 4
PASS_TOKENS = {"cpu": 4096, "cuda": 32768}  # of a pass through one layer (shared_text.PASS_COSTS)
# Tokens that a trial's forward pass adds to the prompt that they share, and of an estimate's batch (offline/engine.py).
BATCH_TOKENS = 4096
TRIAL_CACHES = 2  # keys and values of the batch that is scored and of the one that is computed
# Of the own answers of a batch (own_answers.py): decode steps, and seconds of one on a GPU, as 256 prompts of Coder-0.5B took on an
# H200; on a CPU the tokens of an answer are computed at a share of the matmul rate, because a step has few rows.
DECODED_COLUMNS = 1 << 19  # engine.MAX_DECODED_COLUMNS
DECODED_ROWS = {"cpu": 128, "cuda": 512}
DECODE_STEPS = 512
STEP_S = 0.02
ANSWER_TOKENS = 60
DECODE_SHARE = 0.3
# float32 scores of a head for a batch and all earlier tokens, on a GPU.
SCORE_COPIES = 4
# Of a step that tunes norms (norm_tuning.py): forward passes that it takes as long as, the second one for the gradient included,
# and bytes of the logits that are compared at once, per token of the vocabulary.
STEP_PASSES = 4
TUNING_LOGITS = 6 * 4 * 512


@dataclass(frozen=True)
class TextSize:
    """The calibration text.

    conversations: number of them.
    tokens: of all conversations.
    computed: of these tokens, where a prefix that several rows share counts once.
    prefix: tokens that most conversations share, which each trial computes.
    answers: number of answers.
    line: describes it.
    behaviours: describes what the answers do; "" where that is not known.
    """

    conversations: int = 0
    tokens: int = 0
    computed: int = 0
    prefix: int = 0
    answers: int = 0
    line: str = ""
    behaviours: str = ""


@dataclass(frozen=True)
class AttentionSize:
    """The shape of attention, which decides the memory and time of long prompts.

    layers: number of layers whose attention sees all earlier tokens.
    heads: of the queries.
    position: elements of keys and values of a token in all layers.
    """

    layers: float
    heads: int
    position: float

    @classmethod
    def of(cls, size: ModelSize, folder: ModelFolder | None) -> AttentionSize:
        """Return the shape of a folder's model; of a published one what models of its kind have."""
        layers = size.layers / 4 if size.counts.get("deltanet") else size.layers
        heads = max(1, size.hidden_size // 128)
        if folder is None:
            return cls(layers, heads, 2 * layers * size.hidden_size / 4)
        shape = read_struct(AttentionShape, folder.text_config)
        position = caches_of(shape, element=1).position
        return cls(layers, shape.num_attention_heads or heads, position)


@dataclass(frozen=True)
class WorkEstimate:
    """What a strategy computes, for its memory and time.

    rounded: number of weights that are rounded.
    size_bytes: of the result.
    own_answers: the model answers the prompts first.
    """

    cost: Cost
    size: ModelSize
    attention: AttentionSize
    text: TextSize
    rates: Rates
    rounded: int
    size_bytes: float
    own_answers: bool = False

    @property
    def device(self) -> str:
        return "cpu" if self.rates.on_cpu else "cuda"

    @property
    def weights(self) -> int:
        return sum(self.size.counts.values())

    @property
    def body(self) -> int:
        """Number of weights in the decoder's layers."""
        counts = self.size.counts
        return self.weights - counts.get("embedding", 0) - counts.get("head", 0)

    @property
    def vocabulary(self) -> float:
        counts = self.size.counts
        return max(counts["head"], counts["embedding"]) / self.size.hidden_size

    @property
    def in_float32(self) -> bool:
        return in_float32(BF16_BYTES * self.weights, self.rates.on_cpu)

    @property
    def width(self) -> int:
        """Bytes of a number that is computed."""
        return 4 if self.in_float32 else 2

    # ---- memory

    def peak_bytes(self, layerwise: bool) -> float:
        """Return the most memory in use. layerwise: one layer at a time; else the whole model."""
        if not layerwise:
            logits = 4 * min(self.text.computed, BATCH_TOKENS) * self.vocabulary
            return PROCESS_BYTES + BF16_BYTES * self.weights + logits
        results = self.size_bytes if self.cost.trials else 0.0
        peaks = [self.layerwise_bytes() + results]
        if self.cost.trials:
            peaks.append(self.trial_bytes())
        if self.tunes_norms:
            peaks.append(self.tuning_bytes())
        if self.own_answers:
            peaks.append(self.answer_bytes())
        return max(peaks)

    def layerwise_bytes(self) -> float:
        """Return the memory of one layer, its Hessians and the states of the text."""
        hidden = self.size.hidden_size
        intermediate = self.size.intermediate_size
        total = PROCESS_BYTES + self.cost.hessians * 4 * intermediate**2
        if not self.cost.passes:
            return total
        layer = self.body / max(1, self.size.layers)
        total += (self.cost.bytes_per_layer_weight + self.width - BF16_BYTES) * layer
        tokens = self.text.computed
        total += HIDDEN_COPIES * tokens * hidden * self.width + TEXT_BYTES * self.text.tokens
        # The inputs of a block's last linear.
        inputs = [self.width * tokens * n for n in (hidden, intermediate)]
        total += max((stored for stored in inputs if stored <= self.cost.kept_inputs), default=0)
        return total + self.pass_bytes(PASS_TOKENS["cpu"])

    def pass_bytes(self, tokens: int) -> float:
        """Return what a forward pass through one layer computes, on a CPU; on a GPU it is part of PROCESS_BYTES."""
        if not self.rates.on_cpu:
            return 0.0
        of_token = PASS_HIDDEN * self.size.hidden_size
        of_token += PASS_INTERMEDIATE * self.size.intermediate_size
        return min(tokens, self.text.computed) * of_token * self.width

    def trial_bytes(self) -> float:
        """Return the memory of trials: the whole model, the reference's logits, keys and values of a batch, and its scores."""
        new = max(1, self.text.computed // max(1, self.text.conversations))
        row = self.text.prefix + new
        rows = max(1, min(self.text.conversations, BATCH_TOKENS // new))
        caches = TRIAL_CACHES * rows * row * self.attention.position * self.width
        answers = min(self.text.computed, TRIAL_TOKENS[self.device])
        logits = 2 * answers * self.vocabulary
        scores = 0.0
        if not self.rates.on_cpu:
            scores = SCORE_COPIES * 4 * rows * new * row * self.attention.heads
        model = self.width * self.weights
        computed = self.pass_bytes(max(BATCH_TOKENS, self.text.prefix))
        return PROCESS_BYTES + model + logits + caches + scores + computed

    def tuning_bytes(self) -> float:
        """Return the memory of tuning norms: the whole model, rounded and as it was, and what the gradient of a step needs."""
        of_token = (TUNING_NUMBERS + self.size.layers) * self.size.hidden_size * self.width
        tokens = min(self.text.computed, TUNING_TOKENS[self.device])
        model = 2 * self.width * self.weights
        return PROCESS_BYTES + model + of_token * tokens + TUNING_LOGITS * self.vocabulary

    def answer_bytes(self) -> float:
        """Return the memory of answering the prompts: the whole model, and keys and values of a batch of rows."""
        conversations = max(1, self.text.conversations)
        row = self.text.prefix + self.text.computed // conversations
        columns = min(conversations * row, DECODED_COLUMNS)
        caches = columns * self.attention.position * self.width
        computed = self.pass_bytes(max(BATCH_TOKENS, self.text.prefix))
        return PROCESS_BYTES + self.width * self.weights + caches + computed

    @property
    def tunes_norms(self) -> bool:
        return self.cost.tunes_norms and not self.rates.on_cpu

    # ---- time

    def seconds(self) -> dict[str, float]:
        """Return step → duration."""
        seconds = {
            "read": BF16_BYTES * self.weights / DISK,
            "encode": self.cost.encode * BF16_BYTES * self.rounded / self.rates.encode,
            "write": self.size_bytes / DISK,
        }
        if self.cost.passes:
            seconds |= self.text_seconds()
        if self.own_answers:
            seconds["own answers"] = self.answer_seconds()
        if self.cost.passes and self.cost.column_feedback:
            seconds |= self.column_seconds()
        if self.tunes_norms:
            tokens = min(
                TUNING_STEPS["cuda"] * TUNING_TOKENS["cuda"], TUNING_PASSES * self.text.computed
            )
            work = STEP_PASSES * 2 * self.body * tokens
            seconds["norms"] = work / (self.rates.flop_s * FORWARD_SHARE)
        return seconds

    @property
    def few_trials(self) -> bool:
        """Whether trials have few tokens, so that `passes` does not hold: on a CPU."""
        return self.cost.held_out_look and self.rates.on_cpu

    def passed_tokens(self) -> float:
        """Return how many tokens go through the whole model."""
        positions = self.text.computed
        if not self.few_trials:
            return self.cost.passes * positions
        from annie_quant.quantize import mixed_formats

        of_inputs = self.text.prefix + min(positions, mixed_formats.POSITIONS)
        of_formats = self.text.prefix + min(positions, TRIAL_POSITIONS["cpu"])
        return mixed_formats.BANDS * of_inputs + 4 * of_formats + 2 * positions

    def text_seconds(self) -> dict[str, float]:
        """Return the durations of the start and of the text's forward passes."""
        size = self.size
        text = self.text
        tokens = self.passed_tokens()
        rate = self.rates.float32_flop_s if self.in_float32 else self.rates.flop_s
        linears = 2 * self.body * tokens
        # Scores and values of all earlier tokens.
        earlier = text.tokens / max(1, text.conversations)
        attended = 2 * tokens * earlier * size.hidden_size * self.attention.layers
        # Bytes that norms, attention and gates read and write.
        of_token = 20 * size.hidden_size + 6 * size.intermediate_size
        activations = 4 * tokens * size.layers * of_token
        batches = self.cost.passes + tokens / BATCH_TOKENS
        reading = ROW_S * text.conversations + text.tokens / TOKENIZED_S
        computing = (linears + attended) / (rate * FORWARD_SHARE)
        computing += activations / self.rates.copy + size.layers * batches * BATCH_S
        return {"start": START_S[self.device] + reading, "text": computing}

    def answer_seconds(self) -> float:
        """Return the duration of the model's own answers where none is stored."""
        conversations = self.text.conversations
        rate = self.rates.float32_flop_s if self.in_float32 else self.rates.flop_s
        # A given answer is scored first, and where another one is decoded, its prompt is read again.
        reading = 2 * 2 * self.body * self.text.computed / (rate * FORWARD_SHARE)
        if self.rates.on_cpu:
            tokens = ANSWER_TOKENS * self.text.answers
            return reading + 2 * self.body * tokens / (rate * DECODE_SHARE)
        row = self.text.prefix + self.text.computed // max(1, conversations)
        answers = self.text.answers
        by_memory = math.ceil(answers * row / DECODED_COLUMNS)
        batches = max(by_memory, math.ceil(answers / DECODED_ROWS[self.device]))
        return reading + batches * DECODE_STEPS * STEP_S

    def column_seconds(self) -> dict[str, float]:
        """Return the durations of GPTQ's Hessians, their factors and the rounding of columns."""
        hidden = self.size.hidden_size
        width = self.size.intermediate_size
        layers = self.size.layers
        mlp = self.size.counts.get("mlp", 0)
        rounds = 2 if self.few_trials else 1
        groups = layers * (3 * hidden**2 + width**2)
        experts = max(layers, mlp / (3 * hidden * width))
        cubes = layers * 2 * hidden**3 + experts * (hidden**3 + width**3)
        outputs = mlp / 3  # weights of the MLPs' last linears
        columns = outputs * (width + PER_COLUMN) + (self.rounded - outputs) * (hidden + PER_COLUMN)
        hessians = 2 * HESSIAN_TOKENS * self.text.computed * groups
        float32 = self.rates.float32_flop_s
        return {
            "Hessians": rounds * hessians / (float32 * HESSIAN_SHARE),
            "factors": rounds * 4 / 3 * cubes / (float32 * FACTOR_SHARE[self.device]),
            "columns": rounds * columns / (self.rates.cpu_flop_s * COLUMNS_SHARE),
        }
