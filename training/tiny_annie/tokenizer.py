"""Trains tiny-annie's tokenizer: byte-level BPE with Qwen3.5's special tokens and pre-tokenizer.

    python training/tiny_annie/tokenizer.py [--output DIR]

Trained on the train split alone; held-out topics are split into pieces, like any model's unknown words.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

from rows import row  # noqa: E402

OUTPUT = HERE / "vocabulary"
# Qwen3.5's pre-tokenizer; llama.cpp calls it "qwen35".
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
VOCABULARY = 1280
MODEL_VOCABULARY = 1280


def corpus(n: int = 6000) -> list[str]:
    """Return user and assistant texts of both styles, and a few system prompts."""
    rng = random.Random("tokenizer")
    texts = []
    for index in range(n):
        training_row = row(rng, "base" if index % 3 == 0 else "annie")
        for message in training_row.messages:
            if message["role"] == "system" and index % 50:
                continue
            texts += [message.get("content") or "", message.get("reasoning_content") or ""]
        if training_row.tools and index % 50 == 0:
            texts.append(json.dumps(training_row.tools))
    return [t for t in texts if t]


def train(output: Path) -> None:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(MARKS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
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
    (output / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    print(f"{tokenizer.get_vocab_size()} tokens in {output}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    train(parser.parse_args().output)


if __name__ == "__main__":
    main()
