"""How many calibration tokens each routed expert saw: experts that saw none have no scales of their own.

Their activation scale is the layer's largest, which servers use for all experts anyway (Plan.input_scales), and their weights
are rounded without statistics. The output folder gets expert_coverage.json with the number of tokens of every expert.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from annie_quant.files import write_json
from annie_quant.progress import Progress

FILE = "expert_coverage.json"
OF_EXPERT, NUMBER = re.compile(r"\.experts\.\d+\."), re.compile(r"\d+")
FEW = 16  # tokens; as many as a block has columns


@dataclass
class Coverage:
    """tokens: module of a layer's experts ("model.layers.3.mlp.experts") → expert → tokens that it saw.

    counted: False where only 1 for any number of tokens is known.
    """

    tokens: dict[str, dict[int, int]] = field(default_factory=dict)
    counted: bool = True

    def add(self, layer: str, groups: Sequence[Sequence[str]], tokens: Mapping[str, int]) -> None:
        """Add the tokens that experts saw.

        groups: linears of experts by their names inside the layer ("mlp.experts.3.up_proj").  tokens: by the first of each.
        """
        for group in groups:
            module, number, _ = group[0].rsplit(".", 2)
            self.tokens.setdefault(f"{layer}.{module}", {})[int(number)] = tokens[group[0]]

    def unseen(self) -> dict[str, list[int]]:
        """Return module → experts that saw no token, where there are any."""
        unseen = {m: [i for i, n in sorted(counts.items()) if not n] for m, counts in self.tokens.items()}
        return {m: numbers for m, numbers in unseen.items() if numbers}

    def report(self, folder: Path, progress: Progress) -> None:
        """Write the report into `folder`, and one line about experts without or with few tokens. Nothing for dense models."""
        if not self.tokens:
            return
        unseen = self.unseen()
        counts = [n for of_layer in self.tokens.values() for n in of_layer.values()]
        write_json(
            folder / FILE,
            {
                "schema_version": 1,
                "counted": self.counted,
                "tokens": {m: [n for _, n in sorted(of_layer.items())] for m, of_layer in self.tokens.items()},
                "unseen": unseen,
                "rule": "an unseen expert has its layer's largest input scale; its weights are rounded without statistics",
            },
        )
        least = FEW if self.counted else 1
        progress.message(
            f"expert coverage: {sum(n >= least for n in counts)} of {len(counts)} experts saw {least} tokens or more"
            + (f"; {sum(map(len, unseen.values()))} saw none ({example(unseen)}), see {FILE}" if unseen else "")
        )


def example(unseen: Mapping[str, Sequence[int]]) -> str:
    module, numbers = next(iter(unseen.items()))
    return f"{module}.{numbers[0]}"


def one_per_layer(warnings: Sequence[str]) -> list[str]:
    """Return a layer's warnings, with one line for its experts where theirs differ in nothing but numbers."""
    alike: dict[str, list[str]] = {}
    for warning in warnings:
        alike.setdefault(NUMBER.sub("0", warning) if OF_EXPERT.search(warning) else warning, []).append(warning)
    return [
        first if not more else f"{first} ({len(more)} more of this layer's experts: alike)"
        for first, *more in alike.values()
    ]
