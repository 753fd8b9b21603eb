"""Simulate the statistical rules of a benchmark: noise floor, state of the machine, cliffs.

    python tests/perf/bench_rules.py [--runs 400] [--only noise|machine|cliff]

Times are log-normal with a spread per prompt and per request; correlated noise is AR(1) over the requests, as bursts of other
work make it. Every rule is run as the benchmark calls it.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "helpers"))

from flat_records import record_of

from annie_quant.bench import cliffs, machine, noise
from annie_quant.documents import Comparison
from annie_quant.judge.statistics import compare, wilson


def correlated(rng, n, sigma, phi):
    """AR(1) noise with standard deviation sigma."""
    steps = rng.normal(size=n) * sigma * math.sqrt(1 - phi * phi)
    values = np.empty(n)
    value = rng.normal() * sigma
    for i in range(n):
        value = phi * value + steps[i]
        values[i] = value
    return values


def records_of(
    backend,
    rng,
    prompts,
    repeats,
    sigma,
    phi=0.0,
    workload="w",
    level=20.0,
    factor=None,
    depth_tokens=None,
    again=0,
    common=None,
):
    """Records of one backend in random order, one second apart. factor(index, count) multiplies the times.

    again: prompts that are measured once more. common: (order, noise) that another backend has as well: what the machine does.
    """
    base = np.exp(np.random.default_rng(7).normal(0, 0.5, prompts)) * level
    order = rng.permutation([*np.repeat(np.arange(prompts), repeats), *range(again)])
    noise = correlated(rng, len(order), sigma, phi)
    if common is not None:
        order, noise = common[0], common[1] + rng.normal(0, sigma / 2, len(order))
    times = np.exp(noise) * base[order]
    return [
        record_of(
            id=f"{backend}/{workload}/{i}",
            backend=backend,
            workload=workload,
            case=str(prompt),
            started_unix_s=1000.0 + i,
            tpot_ms=float(value * (factor(i, len(order)) if factor else 1.0)),
            first_content_ms=float(5 * value * (factor(i, len(order)) if factor else 1.0)),
            usage={"prompt_tokens": depth_tokens or 100},
            completion_tokens=20,
        )
        for i, (prompt, value) in enumerate(zip(order, times, strict=True))
    ]


def rate(hits, n):
    low, high = wilson(hits, n)
    return f"{hits / n:6.1%} [{low:.1%}, {high:.1%}]"


def simulate_noise(runs):
    print("noise floor: how often the difference of two equal sides exceeds it (target: about 5 %)")
    for prompts, repeats, share, sigma, phi in (
        (25, 5, 0.0, 0.05, 0.0),
        (100, 5, 0.0, 0.05, 0.0),
        (100, 5, 0.0, 0.2, 0.6),
        (10, 2, 0.0, 0.2, 0.0),
        (100, 1, 0.1, 0.1, 0.0),
        (200, 1, 0.1, 0.1, 0.6),
    ):
        exceeded = covered = 0
        for run in range(runs):
            rng = np.random.default_rng([run, prompts, repeats])
            again = int(prompts * share)
            common = None
            if phi:  # both sides are measured in turns on one machine
                order = rng.permutation([*np.repeat(np.arange(prompts), repeats), *range(again)])
                common = order, correlated(rng, len(order), sigma, phi)
            sides = {
                name: records_of(name, rng, prompts, repeats, sigma, again=again, common=common)
                for name in "ab"
            }
            floors = {
                name: noise.noise_floors(rows, {"w": rows}, run) for name, rows in sides.items()
            }
            a, b = (noise.measured_values(rows, "tpot_ms") for rows in sides.values())
            result = compare(a, b)
            row = Comparison(
                a="a", b="b", workload="w", metric="tpot_ms", n_prompts=result.n_prompts
            )
            noise.set_noise([row], floors)
            covered += row.noise is not None
            exceeded += row.noise is not None and abs(result.median_difference) > row.noise
        print(
            f"  {prompts:4} prompts x {repeats} (+{share:.0%}), sigma {sigma}, phi {phi}: {rate(exceeded, covered)}, n = {covered}"
        )


def simulate_machine(runs):
    print("machine: two hours, a sample every 2 s; marked while quiet; 15 % slower for 20 s found")
    for sigma, phi, bursts in (
        (0.01, 0.0, 0.0),
        (0.02, 0.0, 0.02),
        (0.02, 0.6, 0.02),
        (0.03, 0.3, 0.02),
    ):
        marked = found = 0
        for run in range(runs):
            rng = np.random.default_rng([run, 7])
            values = np.exp(correlated(rng, 3600, sigma, phi))
            values[rng.random(3600) < bursts] *= 1.5
            samples = [
                machine.Sample(time_unix_s=2.0 * i, probe="p", probe_ms=float(v))
                for i, v in enumerate(values)
            ]
            marked += bool(machine.unsteady(samples))
            at = int(rng.integers(50, 3500))
            for sample in samples[at : at + 10]:
                sample.probe_ms *= 1.15
            spans = machine.unsteady(samples)
            found += any(s.start_unix_s <= 2 * at + 18 and s.end_unix_s >= 2 * at for s in spans)
        print(
            f"  sigma {sigma}, AR(1) {phi}, bursts {bursts:.0%}: {rate(marked, runs)}; {rate(found, runs)}"
        )


def simulate_cliff(runs):
    print("cliff: nine levels; shown, and the step in the interval where it is shown")
    for before, after, prompts in (
        (0.8, 0.8, 12),
        (1.0, 0.0, 8),
        (0.9, 0.5, 12),
        (0.9, 0.5, 25),
        (0.9, 0.75, 25),
    ):
        shown = held = 0
        for run in range(runs):
            rng = np.random.default_rng([run, 8])
            at = int(rng.integers(2, 8))
            rows = [
                record_of(id=f"{level}/{i}", backend="a", workload=f"ladder_tools_{level}", case=str(i), right=bool(
                    rng.random() < (before if level < at else after)))
                for level in range(9) for i in range(prompts)
            ]  # fmt: skip
            cliff = cliffs.measured_ladders(rows)[0].ladder.cliff
            shown += cliff is not None
            held += cliff is not None and cliff.earliest <= at <= cliff.latest
        print(
            f"  {before:.0%} to {after:.0%}, {prompts} prompts: {rate(shown, runs)}; {held} of {shown}"
        )


SIMULATIONS = {
    "noise": simulate_noise, "machine": simulate_machine, "cliff": simulate_cliff,
}  # fmt: skip

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--only", choices=SIMULATIONS)
    options = parser.parse_args()
    for title, simulate in SIMULATIONS.items():
        if options.only in (None, title):
            start = time.monotonic()
            simulate(options.runs)
            print(f"  ({time.monotonic() - start:.0f} s, {options.runs} runs each)", flush=True)
