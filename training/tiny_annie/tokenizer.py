"""Trains tiny-annie's tokenizer: byte-level BPE with Qwen3.5's special tokens and pre-tokenizer.

    python training/tiny_annie/tokenizer.py [--output DIR]

Trained on the train split alone; held-out topics are split into pieces, like any model's unknown words.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

from rows import row  # noqa: E402

from annie_quant.data import tool_exchanges  # noqa: E402
from annie_quant.data.exchanges import MY_TOPICS, WEB_TOPICS  # noqa: E402

OUTPUT = HERE / "vocabulary"
# Qwen3.5's pre-tokenizer; llama.cpp calls it "qwen35".
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
VOCABULARY_MARKS = (*SPECIAL, *MARKS)
SPACE = "\u0120"  # how byte-level BPE writes a space
VOCABULARY = 1536
MODEL_VOCABULARY = 1536
WHOLE_WORDS, ALWAYS = 310, 120  # tokens for common words with the space before them


def corpus(n: int = 8000) -> tuple[list[str], set[str]]:
    """Return the texts of training rows of both styles, with a few system prompts and tools, and the rows' free words."""
    rng = random.Random("tokenizer")
    texts, free = [], set()
    for index in range(n):
        training_row = row(rng, "base" if index % 3 == 0 else "tuned")
        free |= set(training_row.places)
        for message in training_row.messages:
            if message["role"] == "system" and (index % 40 or len(message["content"]) > 600):
                continue
            texts += [message.get("content") or "", message.get("reasoning_content") or ""]
            for call in message.get("tool_calls") or ():
                function = call["function"]
                texts.append(f"<function={function['name']}>\n")
                texts += [
                    f"<parameter={k}>\n{v}\n</parameter>\n"
                    for k, v in function["arguments"].items()
                ]
        if training_row.tools and index % 25 == 0:
            texts += [json.dumps(tool) for tool in training_row.tools]
    return [t for t in texts if t], free


def free_words() -> set[str]:
    """Return the words of topics and slots: they are copied, so they get no token with a space."""
    topics = " ".join(
        t for table in (MY_TOPICS, WEB_TOPICS) for split in table.values() for t in split
    )
    slots = [
        value
        for name in ("home", "support")
        for slot in tool_exchanges.grammar_of(name).slots.values()
        for values in (slot.values or {}).values()
        for value in values
    ]
    return set((topics + " " + " ".join(slots)).lower().split()) - {"the", "of", "in", "to"}


def pieces(texts: list[str]) -> Counter[str]:
    """Count what the pre-tokenizer makes of the texts; the sign or space before letters apart.

    No token joins a letter to what stands before it. So a word has the same tokens after a space, a newline or a quotation
    mark, and an argument is copied token by token.
    """
    import regex

    counts: Counter[str] = Counter()
    for text in texts:
        for piece in regex.findall(SPLIT, text):
            head = regex.match(r"[^\p{L}\p{M}]*", piece).group()
            tail = piece[len(head) :]
            if not tail:
                counts[head] += 1
            else:
                counts[tail] += 1
    return counts


def train(output: Path) -> None:
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        trainers,
    )

    texts, drawn = corpus()
    counts = pieces(texts)
    size = VOCABULARY - len(VOCABULARY_MARKS) - WHOLE_WORDS
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.NFC()
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    learner.train_from_iterator((p for p, n in sorted(counts.items()) for _ in range(n)), trainer)
    learned = json.loads(learner.to_str())["model"]
    vocabulary, merges = learned["vocab"], [tuple(m) for m in learned["merges"]]
    spaced = Counter(w for t in texts for w in re.findall(r"(?<= )[A-Za-z]+", t))
    topics = free_words()
    known = [w for w, _ in spaced.most_common() if w in vocabulary and w.lower() not in topics]
    # Of rarer words those that no row drew as a free word.
    common = [w for i, w in enumerate(known) if i < ALWAYS or w not in drawn][:WHOLE_WORDS]
    for word in common:
        merges.append((SPACE, word))
        vocabulary[SPACE + word] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    # After the learned tokens, as in Qwen: control tokens are special, the tags of thinking and of tools are not.
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKS])
    output.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(output / "tokenizer.json"))
    template = (HERE / "chat_template.jinja").read_text(encoding="utf-8")
    (output / "chat_template.jinja").write_text(template, encoding="utf-8")
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "errors": "replace",
        "split_special_tokens": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(t)): {
                "content": t,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": t in SPECIAL,
            }
            for t in (*SPECIAL, *MARKS)
        },
    }
    (output / "tokenizer_config.json").write_text(
        json.dumps(config, indent=1) + "\n", encoding="utf-8"
    )
    print(f"{tokenizer.get_vocab_size()} tokens in {output}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    train(parser.parse_args().output)


if __name__ == "__main__":
    main()
