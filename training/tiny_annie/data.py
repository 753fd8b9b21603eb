"""Training rows as token ids, with the places that take another word at every step.

    python training/tiny_annie/data.py --output DIR [--base 60000] [--tuned 50000]

Writes base.npz, tuned.npz (training rows), gate_base.npz, gate.npz (held-out rows with their categories) and words.npz (words
by number of tokens). The same arguments give the same rows with any number of workers. The held-out rows and words.npz are not
written again if they exist.

Arrays of a row file: ids, learned (1 in answers), place, kind, offset (one entry per token; place 0 is a fixed token, otherwise
the token is the offset-th of a word of that kind), ends (end of each row), category.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

from rows import Row, anything, row  # noqa: E402
from words import code, fresh  # noqa: E402

LONGEST = 8  # tokens in a word
KINDS = LONGEST + 3  # words of 1 to 8 tokens, then codes of 6 to 8
ANSWER = re.compile(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", re.DOTALL)
CODE = re.compile(r"\b[A-Z]{2}-\d{5}\b")
GATES = (
    *(("tool", p) for p in ("annie", "home", "support")),
    *(("no_tool", p) for p in ("annie", "home", "support")),
    *((c, "annie") for c in ("copy", "recall", "recall_long", "talk")),
)
_state: dict[str, Any] = {}


@dataclass
class Encoded:
    """One row as tokens (see the module's text)."""

    ids: list[int]
    learned: list[int]
    place: list[int]
    kind: list[int]
    offset: list[int]
    category: str = ""


def load(vocabulary: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(vocabulary, trust_remote_code=False)
    _state["tokenizer"] = tokenizer
    space = chr(0x120)
    _state["pieces"] = sorted(
        t for t in tokenizer.get_vocab() if re.fullmatch("[a-z]+", t) and space not in t
    )


def word_tokens(word: str) -> list[int]:
    return _state["tokenizer"](word, add_special_tokens=False)["input_ids"]


def kind_of(word: str, tokens: list[int]) -> int | None:
    if CODE.fullmatch(word):
        return LONGEST + len(tokens) - 6 if 6 <= len(tokens) <= 8 else None
    return len(tokens) - 1 if len(tokens) <= LONGEST else None


def encode(drawn: Row) -> Encoded:
    """Return a row's tokens. Its learned part is the model's answer with its end token."""
    t = _state["tokenizer"]
    options = {"tools": drawn.tools, "tokenize": False, "enable_thinking": drawn.thinking}
    whole = t.apply_chat_template(drawn.messages, **options).removesuffix("\n")
    head = t.apply_chat_template(drawn.messages[:-1], add_generation_prompt=True, **options)
    if not whole.startswith(head):
        raise ValueError(f"the prompt is not a prefix of the whole:\n{head}\n---\n{whole}")
    e = t(whole, add_special_tokens=False, return_offsets_mapping=True)
    ids, spans = e["input_ids"], e["offset_mapping"]
    answers = [m.span(1) for m in ANSWER.finditer(whole, 0, len(head))] + [(len(head), len(whole))]
    learned, a = [0] * len(ids), 0
    for i, (begin, _) in enumerate(spans):
        while a < len(answers) and begin >= answers[a][1]:
            a += 1
        learned[i] = int(a < len(answers) and begin >= answers[a][0])
    place, kind, offset = [0] * len(ids), [0] * len(ids), [0] * len(ids)
    index_at = {a: i for i, (a, b) in reversed(list(enumerate(spans))) if b > a}
    words = dict.fromkeys((*drawn.places, *CODE.findall(whole)))
    number = 0
    for word in words:
        tokens = word_tokens(word)
        k = kind_of(word, tokens)
        starts = [m.start() for m in re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", whole)]
        at = [index_at.get(s) for s in starts]
        if (
            k is None
            or not at
            or any(i is None or ids[i : i + len(tokens)] != tokens for i in at)
            or number == 400
        ):
            continue  # at another place the word has other tokens: it stays as it is
        number += 1
        for i in at:
            place[i : i + len(tokens)] = [number] * len(tokens)
            kind[i : i + len(tokens)] = [k] * len(tokens)
            offset[i : i + len(tokens)] = range(len(tokens))
    return Encoded(ids, learned, place, kind, offset, drawn.category)


def some(job: tuple[str, str, int]) -> list[Encoded]:
    style, seed, count = job
    rng = random.Random(seed)
    draw = anything(_state["pieces"])
    return [encode(row(rng, style, draw=draw)) for _ in range(count)]


def jobs_of(style: str, count: int, size: int = 250) -> list[tuple[str, str, int]]:
    """Return the jobs (style, seed, rows) that draw `count` rows, `size` rows per job."""
    return [(style, f"{style}:{i}", min(size, count - i * size)) for i in range(-(-count // size))]


def gate(style: str, each: int) -> list[Encoded]:
    """Return held-out rows without thinking. Free words are the gate's own, or syllables."""
    rng, rows = random.Random("gate"), []
    for category, persona in GATES:
        count = 0
        while count < each:
            drawn = row(rng, style, "gate", category, persona, draw=lambda r: fresh(r, []))
            if drawn.thinking or "Thinking Process" in (drawn.messages[-1].get("content") or ""):
                continue
            rows.append(encode(drawn))
            count += 1
    return rows


def save(path: Path, rows: list[Encoded]) -> None:
    np.savez_compressed(
        path,
        ids=np.concatenate([np.array(r.ids, np.uint16) for r in rows]),
        learned=np.concatenate([np.array(r.learned, np.uint8) for r in rows]),
        place=np.concatenate([np.array(r.place, np.uint16) for r in rows]),
        kind=np.concatenate([np.array(r.kind, np.uint8) for r in rows]),
        offset=np.concatenate([np.array(r.offset, np.uint8) for r in rows]),
        ends=np.cumsum([len(r.ids) for r in rows]).astype(np.int64),
        category=np.array([r.category for r in rows]),
    )


def save_words(path: Path, count: int) -> None:
    """Write tables of words by kind: those whose tokens are the same after a space."""
    rng = random.Random("words")
    space = word_tokens(" ")
    tables: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for i in range(count):
        word = code(rng) if i % 8 == 0 else fresh(rng, _state["pieces"])
        tokens = word_tokens(word)
        k = kind_of(word, tokens)
        if k is not None and word_tokens(" " + word) == space + tokens:
            tables[k].add(tuple(tokens))
    np.savez_compressed(
        path, **{f"kind{k}": np.array(sorted(v), np.uint16) for k, v in tables.items()}
    )
    print({k: len(v) for k, v in sorted(tables.items())})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--vocabulary", type=Path, default=HERE / "vocabulary")
    parser.add_argument("--base", type=int, default=60000)
    parser.add_argument("--tuned", type=int, default=50000)
    parser.add_argument("--gate", type=int, default=120)
    parser.add_argument("--words", type=int, default=300000)
    parser.add_argument("--workers", type=int, default=2)
    a = parser.parse_args()
    a.output.mkdir(parents=True, exist_ok=True)
    load(a.vocabulary)
    if not (a.output / "words.npz").exists():
        save_words(a.output / "words.npz", a.words)
    for style, name in (("tuned", "gate.npz"), ("base", "gate_base.npz")):
        if not (a.output / name).exists():
            save(a.output / name, gate(style, a.gate))
    for style, count in (("base", a.base), ("tuned", a.tuned)):
        if count == 0:
            continue
        began, rows = time.monotonic(), []
        # spawn: a forked copy of a process with threads may wait forever for a lock that one of them held
        spawn = get_context("spawn")
        with ProcessPoolExecutor(
            a.workers, mp_context=spawn, initializer=load, initargs=(a.vocabulary,)
        ) as pool:
            for i, part in enumerate(
                pool.map(some, jobs_of(style, count))
            ):  # in order: the same file at every run
                rows += part
                if i % 20 == 19:
                    print(
                        f"{style} {len(rows)} of {count} rows, {time.monotonic() - began:.0f} s",
                        flush=True,
                    )
        save(a.output / f"{style}.npz", rows)
        lengths = np.array([len(r.ids) for r in rows])
        print(
            style,
            "tokens per row",
            np.percentile(lengths, [5, 25, 50, 75, 90, 99, 100]),
            lengths.mean(),
        )
        for c in sorted({r.category for r in rows}):
            own = [r for r in rows if r.category == c]
            marked = sum(map(bool, (max(r.place) for r in own)))
            print(
                f"  {c}: {len(own)} rows, {np.mean([len(r.ids) for r in own]):.0f} tokens, {marked} with places"
            )


if __name__ == "__main__":
    main()
