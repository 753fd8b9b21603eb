"""Batches on the GPU: rows in buckets by length, with another word at every free place at every step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from forward import DEVICE

EDGES = (192, 448, 1088, 2176)  # multiples of forward.CHUNK
PLACES = 401  # data.encode numbers the words of a row from 1 to 400; 0 is a fixed token
KINDS = 11  # data.KINDS


class Words:
    """Words by kind as one flat table: begin, count and length of each kind."""

    def __init__(self, path: Path) -> None:
        tables = np.load(path, allow_pickle=False)
        flat, begin, count, length = [], [0] * KINDS, [1] * KINDS, [1] * KINDS
        at = 0
        for k in range(KINDS):
            if f"kind{k}" in tables:
                t = tables[f"kind{k}"].astype(np.int64)
                begin[k], count[k], length[k] = at, len(t), t.shape[1]
                flat.append(t.reshape(-1))
                at += t.size
        self.flat = torch.from_numpy(np.concatenate(flat)).to(DEVICE)
        self.begin, self.count, self.length = (
            torch.tensor(x, device=DEVICE) for x in (begin, count, length)
        )


@dataclass
class Bucket:
    """Rows up to one length: [N, T] each; learned: 0 padding, 1 prompt, 2 answer. rows: per batch. index: in the file."""

    ids: torch.Tensor
    learned: torch.Tensor
    place: torch.Tensor
    kind: torch.Tensor
    offset: torch.Tensor
    rows: int
    index: np.ndarray


class Rows:
    """A file of rows (data.py) on the device. Rows longer than EDGES[-1] are left out.

    tokens: per batch. without: rows with this token in an answer are left out.
    """

    def __init__(
        self, path: Path, tokens: int, words: Words | None = None, without: int | None = None
    ) -> None:
        z = np.load(path, allow_pickle=False)
        ends = z["ends"]
        begins = np.concatenate([[0], ends[:-1]])
        lengths = ends - begins
        if without is not None:
            has = np.add.reduceat((z["ids"] == without) & (z["learned"] > 0), begins) > 0
            lengths = np.where(has, 0, lengths)  # in no bucket
        self.words, self.category, self.buckets = words, z["category"], list[Bucket]()
        arrays = {k: z[k] for k in ("ids", "place", "kind", "offset")} | {
            "learned": z["learned"] + 1
        }
        types = {
            "ids": np.int16,
            "place": np.int16,
            "kind": np.uint8,
            "offset": np.uint8,
            "learned": np.uint8,
        }
        for low, high in zip((0, *EDGES), EDGES, strict=False):
            index = np.nonzero((lengths > low) & (lengths <= high))[0]
            cut = {k: np.zeros((len(index), high), types[k]) for k in arrays}
            for j, i in enumerate(index):
                for k, a in arrays.items():
                    cut[k][j, : lengths[i]] = a[begins[i] : ends[i]]
            on = {k: torch.from_numpy(a).to(DEVICE) for k, a in cut.items()}
            self.buckets.append(Bucket(**on, rows=max(1, tokens // high), index=index))
        share = np.array([len(b.ids) / b.rows for b in self.buckets])
        self.share = share / share.sum()

    def batch(
        self, k: int, generator: torch.Generator, prompt: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and weights [rows, T] of bucket k. prompt: weight of the prompt's tokens."""
        b = self.buckets[k]
        i = torch.randint(0, len(b.ids), (b.rows,), device=DEVICE, generator=generator)
        ids, learned = b.ids[i].long(), b.learned[i]
        if self.words is not None:
            place, kind = b.place[i].long(), b.kind[i].long()
            draw = torch.rand(b.rows, PLACES, device=DEVICE, generator=generator).gather(1, place)
            w = self.words
            which = (draw * w.count[kind]).long().clamp(max=w.count[kind] - 1)
            other = w.flat[
                (w.begin[kind] + which * w.length[kind] + b.offset[i].long()).clamp(
                    max=len(w.flat) - 1
                )
            ]
            ids = torch.where(place > 0, other, ids)
        return ids, (learned == 2).float() + prompt * (learned == 1).float()

    def repeats(
        self, k: int, generator: torch.Generator, vocabulary: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows of random tokens that come twice; the second time is learned. They teach to copy anything."""
        n, t = self.buckets[k].rows, self.buckets[k].ids.shape[1]
        once = torch.randint(0, vocabulary, (n, t // 2), device=DEVICE, generator=generator)
        weight = torch.zeros(n, t, device=DEVICE)
        weight[:, t // 2 + 1 :] = 1.0
        return torch.cat([once, once], 1), weight
