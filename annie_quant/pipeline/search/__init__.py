"""The founding decision tree, executable: strategies cheapest first, the first that passes every gate is chosen.

    bf16 holds the gates? → quantize → audit → smoke → early look → all prompts → passed, or explained and the next one

The output is a run directory: a finished step is not done again. search.json and search.md hold all that was tried.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from annie_quant import judge, quantize
from annie_quant.data import check_prompt_hash
from annie_quant.errors import AnnieError, NoRoom, UsageError
from annie_quant.files import write_json, write_text
from annie_quant.judge import decision
from annie_quant.judge.sample import answers_per_gate
from annie_quant.pipeline.run_directory import RunDirectory
from annie_quant.pipeline.search import explain, table
from annie_quant.pipeline.stages import Stages, gates_of, offline_prompts, weight_sizes
from annie_quant.quantize import estimate
from annie_quant.quantize.strategies import by_rank, find

NUMERICS = ("w4a4", "w4a16")
SAMPLES = 128


def run(
    model: Path,
    calib_data: Path,
    output: Path,
    n: int,
    every: bool,
    console: Any,
    *,
    strategies: Sequence[str] | None = None,
    required: Sequence[str] = NUMERICS,
    samples: int = SAMPLES,
    allow_prompt_mismatch: bool = False,
    anyway: bool = False,
) -> dict[str, Any]:
    """Returns {"chosen", "stopped", "notes", "reference", "labels", "strategies": [a row each], "seconds", ...}.

    required: the numerics under which every gate must pass. anyway: go on with a model that fails the gates in bf16.
    Raises UsageError for a stale system prompt in the calibration data, unless allow_prompt_mismatch.
    """
    directory = RunDirectory(output)
    stale = check_prompt_hash(calib_data, allow=allow_prompt_mismatch)
    with directory.locked():
        stages = Stages(directory, model, calib_data, samples, console)
        search = Search(stages, n, required, every, chosen_order(strategies), console)
        search.found["notes"] += [stale] if stale else []
        search.look_at_reference(anyway)
        if not search.found["stopped"]:
            search.walk()
        search.save()
    return search.found


def chosen_order(strategies: Sequence[str] | None) -> list[str]:
    """The names of the strategies to try: by default all, cheapest first (Cost.rank)."""
    have = list(quantize.available())
    if strategies is None:
        return [s.name for s in by_rank()]
    for name in strategies:
        if name not in have:
            raise UsageError(f"there is no strategy called {name!r}", f"choose from: {', '.join(have)}")
    return list(strategies)


class Search:
    """One walk through the tree; `found` is what search.json holds."""

    def __init__(
        self, stages: Stages, n: int, required: Sequence[str], every: bool, order: list[str], console: Any
    ) -> None:
        self.stages, self.n, self.required, self.every, self.order = stages, n, tuple(required), every, order
        self.console, self.start = console, time.monotonic()
        self.workloads = judge.load_workloads()
        self.asked = offline_prompts(n)
        self.counts = answers_per_gate(self.asked)
        self.found: dict[str, Any] = {
            "chosen": None,
            "stopped": None,
            "required": list(self.required),
            "command": shlex.join(["annie-quant", *sys.argv[1:]]),
            "where": table.where(n),
            "n": n,
            "notes": [],
            "reference": {},
            "labels": {},
            "strategies": [],
            "seconds": 0.0,
        }

    def look_at_reference(self, anyway: bool) -> None:
        """The bf16 model's own gates, and whether the calibration answers belong to their questions."""
        made = self.stages.evaluate("bf16", self.stages.model, self.asked)
        self.found["reference"] = made["reference_gates"]
        meaning = explain.reference_report(made["reference_gates"])
        if meaning:
            self.found["notes"].append(meaning)
            self.found["stopped"] = None if anyway else meaning
        labels = explain.labels(self.stages, self.workloads)
        self.found["labels"] = labels
        if not labels["belong"]:
            seen = "; ".join(
                f"{which} answers {labels[which]['given']:.2f} nats a token as given, {labels[which]['dealt_anew']:.2f} dealt anew"
                for which in ("first", "last")
            )
            self.found["notes"].append(
                f"SHUFFLED LABELS: the calibration answers do not belong to their questions ({seen}). "
                "Make the data again (annie-quant data)"
            )
        for note in self.found["notes"]:
            self.console.note(note)

    def walk(self) -> None:
        waiting = list(self.order)
        while waiting:
            row = self.attempt(waiting.pop(0))
            self.found["strategies"].append(row | self.of_a_9b(row["strategy"]))
            self.console.note(f"{row['strategy']}: {row['outcome']}")
            if row["passed"] and self.found["chosen"] is None:
                self.found["chosen"] = row["strategy"]
                self.found["seconds"] = self.spent()
            self.save()
            if row["passed"] and not self.every:
                return
            if row["outcome"] == "gibberish":
                waiting.sort(key=lambda name: not find(name).conservative)
        if self.found["chosen"] is None:
            self.found["seconds"] = self.spent()

    def spent(self) -> float:
        """Seconds of all stages so far, those of earlier, ended runs included."""
        return round(sum(s["seconds"] for s in self.stages.stamps), 1)

    def attempt(self, strategy: str) -> dict[str, Any]:
        """One strategy through the tree: its row of the table."""
        stages, before = self.stages, self.spent()
        row: dict[str, Any] = {"strategy": strategy, "passed": False, "why": [], "path": [], "numerics": {}}
        try:
            stages.quantize(strategy)
            audit = stages.audit(strategy)
        except NoRoom:
            raise
        except AnnieError as error:
            return row | {
                "error": error.message,
                "outcome": "could not be made",
                "path": [f"quantize → {error.message}"],
            }
        row |= self.sizes(strategy) | {"audit": audit["summary"], "loads": audit["audit"]["summary"].get("loads", [])}
        if not audit["audit"]["ok"]:
            row |= {"outcome": "unsound checkpoint", "why": [audit["summary"]]}
            row["path"].append(f"audit → {audit['summary']}")
        else:
            self.judge(strategy, row)
        return row | {"seconds": round(self.spent() - before, 1)}

    def sizes(self, strategy: str) -> dict[str, Any]:
        folder = self.stages.checkpoint(strategy)
        size = sum(size for _, size in weight_sizes(folder).values())
        weights = sum(elements for elements, _ in weight_sizes(self.stages.model).values())
        return {"size_bytes": size, "bits_per_weight": table.bits(size, weights)} | table.weight_traffic(folder)

    @staticmethod
    def of_a_9b(strategy: str) -> dict[str, Any]:
        """What the strategy makes of Qwen3.5-9B, by count."""
        expected = estimate.estimate("9b", strategy)
        ceiling = estimate.GB10_READ / expected.read_bytes
        return {"of_9b": {"size_bytes": expected.size_bytes, "ceiling_tok_s": ceiling}}

    def judge(self, strategy: str, row: dict[str, Any]) -> None:
        """Smoke, early look, all prompts; fills in numerics, why, path, outcome, passed."""
        folder = self.stages.checkpoint(strategy)
        smoke = self.stages.evaluate(f"{strategy}-smoke", folder, explain.smoke(self.workloads))
        row["numerics"] = smoke["numerics"]
        gibberish = {
            kind: [g for g, r in side["gates"].items() if r["passes"] < r["n"] and not r["advisory"]]
            for kind, side in smoke["numerics"].items()
        }
        if any(gibberish.values()):
            lost = "; ".join(f"{kind.upper()} {', '.join(gates)}" for kind, gates in gibberish.items() if gates)
            row |= {"outcome": "gibberish", "why": [f"the smoke question fails: {lost}"]}
            row["path"].append(f"smoke → {lost}; bf16 answers it, so the quantization is too aggressive")
            return
        row["path"].append("smoke → coherent")
        missing = decision.missing_numerics(gates_of(smoke), self.required)
        if missing and not self.every:
            row |= {"outcome": missing[0], "why": missing}
            row["path"].append(f"servers → {'; '.join(missing)}")
            return
        # The whole table is for comparing, so all of it rests on the same prompts.
        steps = [self.n] if self.every else decision.looks(self.n)
        for look in steps[:-1]:
            result = self.stages.evaluate(f"{strategy}-n{look}", folder, judge.sample(self.asked, look))
            row["numerics"] = result["numerics"]
            why = decision.early_reasons(gates_of(result), self.counts, len(steps))
            if why:
                row |= {"outcome": f"dropped at n = {look}", "why": why}
                row["path"].append(f"gates at n = {look} → dropped: {'; '.join(why)}")
                self.explain(strategy, row)
                return
            row["path"].append(f"gates at n = {look} → still open")
        result = self.stages.evaluate(
            strategy, folder, self.asked, conversations=self.stages.conversations, n_conversations=60
        )
        row["numerics"] = result["numerics"]
        why = decision.final_reasons(gates_of(result), self.required)
        row |= {"why": why, "passed": not why, "outcome": "passes every gate" if not why else self.short(why)}
        row["path"].append(f"gates at n = {steps[-1]} → {'PASS: ship it' if not why else '; '.join(why)}")
        if why:
            self.explain(strategy, row)

    @staticmethod
    def short(why: list[str]) -> str:
        return why[0] if len(why) == 1 else f"fails {len(why)} gates"

    def explain(self, strategy: str, row: dict[str, Any]) -> None:
        found = [said for said in (explain.by_activations(row["numerics"]),) if said]
        test = explain.hardened(self.stages, strategy, self.workloads, row["numerics"])
        if test:
            row["hardened"] = test
            for gate, seen in test["gates"].items():
                parts = [f"{k} {seen[k][0]}/{seen[k][1]}" for k in ("before", "after", "reference")]
                found.append(f"hardened prompt, {gate}: {', '.join(parts)} (bf16 under it)")
            found.append(test["reading"])
        row["explained"] = found

    def save(self) -> None:
        """search.json and search.md, after every strategy."""
        slim = dict(self.found)
        slim["strategies"] = [
            r | {"numerics": {k: {f: s[f] for f in KEPT if f in s} for k, s in r["numerics"].items()}}
            for r in self.found["strategies"]
        ]
        self.found = slim
        write_json(self.stages.dir / "search.json", slim)
        write_text(self.stages.dir / "search.md", table.render(slim))


KEPT = ("gates", "kl", "kl_conversations", "paired", "same_answers", "verbosity_ratio", "seconds")
