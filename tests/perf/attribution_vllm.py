"""Does `annie-quant attribute` name a fault in the real vLLM on a CPU, and nobody without one? Writes a part of attribution.md.

    python tests/perf/attribution_vllm.py WORK --vllm build/vllm/bin/vllm [--only NAME ...] [--healthy 5]

Each row is the command itself, `annie-quant attribute --runtime vllm --use cpu`, with eight factors of two values each, of which
all but the faulty one are harmless. Checkpoints are tiny-annie's naive (W4A4) and best (W4A16); the reference is bf16. Faults that
a server cannot be asked for are planted by a plug-in (tests/helpers/vllm_faults.py). It is idle without the value to blame, so an
arm without that value is taken from an earlier row that has measured it with the same values. tests/integration/vllm_cpu.py makes
the environment. A row is written as soon as it is measured; a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers"), str(ROOT / "tests/perf")]

import attribution  # noqa: E402
import vllm_faults  # noqa: E402

import annie_quant  # noqa: E402
from annie_quant.core.files import read_json, write_json, write_text  # noqa: E402
from annie_quant.data.workloads import resolve  # noqa: E402

HEADING = attribution.VLLM
N = 14
HOT = '{"temperature": 2, "top_k": 0}'  # vLLM refuses a higher one
# An exchange before the question: with it, prompts share a block of the prefix cache, which has up to 384 tokens.
EARLIER = (
    ("Good morning, Annie. Good to talk to you.", "Good morning! It is lovely to hear from you."),
    ("Hi Annie. How are you doing?", "I am doing well, thank you. How is your day going?"),
    ("It is going well so far.", "I am glad to hear that. What would you like to do today?"),
    (
        "I have some time before lunch.",
        "That sounds nice. Is there anything that I can help you with?",
    ),
)
# name → (what is planted, stated values of the suspect, fault of the plug-in, culprits)
FAULTS: dict[str, tuple[str, dict[str, str], str, tuple[str, ...]]] = {
    "dropped": ("the loader drops a tensor: layer 3's o_proj is zero (plug-in)", {}, "dropped", ("weights",)),
    "scales": ("the loader swaps layer 3's o_proj's tensor scale and input scale (plug-in)", {}, "scales", ("weights",)),
    "activations": ("W4A4 with input scales 64 times too small (plug-in)", {}, "activations", ("activations",)),
    "template": ("a chat template without tools", {"template": "no-tools"}, "", ("template",)),
    "parser": ("another format's tool parser (hermes)", {"parser": "hermes"}, "", ("parser",)),
    "kv": ("FP8 values with a scale of 4096 (plug-in)", {}, "kv", ("kv",)),
    "prefix": ("the prefix cache returns another conversation's beginning (plug-in)", {}, "prefix", ("prefix",)),
    "batch": ("each sequence of a batch gets the next one's logits (plug-in)", {}, "batch", ("batch",)),
    "sampling": ("temperature 2 instead of top-k 1", {"sampling": HOT}, "", ("sampling",)),
    "head": ("a head in five values", {"weights": "head"}, "", ("weights",)),
    "no-parser": ("no tool parser: vLLM refuses requests with tools", {"parser": "none"}, "", ("parser",)),
    "kv-prefix": ("FP8 keys and values with the prefix cache: another conversation's beginning (plug-in)", {}, "kv_prefix",
                  ("kv", "prefix")),
    "mtp": ("MTP: the server dies at the first request", {"mtp": "2"}, "", ("mtp",)),
}  # fmt: skip
DIES = "mtp"  # no planted fault: this build's own
HEALTHY = tuple((checkpoint, seed) for seed in range(8) for checkpoint in ("naive", "best"))


class VllmFiles(attribution.Files):
    """The checkpoints, templates and prompts of the runs."""

    def folder(self, name: str) -> Path:
        target = self.work / name
        if name in ("naive", "best") and not target.exists():
            rows = self.work / "calibration.jsonl"
            if not rows.exists():
                annie_quant.data.generate("annie", teacher="offline", n=500, output=rows, seed=0)
            annie_quant.quantize.run(
                name, super().folder("bf16"), target, calib_data=rows, calib_samples=48
            )
        if name == "head" and not target.exists():
            return attribution.change_weights(self.folder("naive"), target, attribution.coarse_head)
        return target if target.exists() else super().folder(name)

    def workload(self) -> Path:
        """tool_web's prompts after an exchange."""
        path = self.work / "tool_web.json"
        if not path.exists():
            (source,) = resolve(None, "tool_web")
            roles = ("user", "assistant")
            earlier = [
                {"role": role, "content": text}
                for pair in EARLIER
                for role, text in zip(roles, pair, strict=True)
            ]
            cases = [
                {
                    "id": c.id,
                    "messages": [*earlier, *c.messages],
                    "expect": dataclasses.asdict(c)["expect"],
                }
                for c in source.cases
            ]
            file = {
                "name": "tool_web",
                "description": source.description,
                "persona": source.persona,
                "tools": "persona",
            }
            file |= {
                "thinking": False,
                "max_tokens": 80,
                "temperature": 0,
                "gates": [*source.gates],
                "cases": cases,
            }
            write_json(path, file)
        return path


def run(
    files: VllmFiles,
    name: str,
    vllm: Path,
    checkpoint: str,
    stated: dict[str, str],
    fault: str,
    seed: int,
) -> dict:
    """Return the row of one attribution: attribution.json and the seconds that it took."""
    folder = files.work / "runs" / name
    if (folder / "row.json").exists():
        return read_json(folder / "row.json")
    suspect = {
        "template": "comment",
        "parser": "qwen3_xml",
        "kv": "fp8",
        "prefix": "on",
        "sampling": '{"temperature": 0, "top_k": 1}',
    }
    suspect |= stated
    suspect["template"] = files.template(suspect["template"])
    trusted = {"template": files.template("plain"), "parser": "qwen3_coder"}
    model = files.folder(suspect.pop("weights", checkpoint))
    command = [
        sys.executable,
        "-m",
        "annie_quant",
        "attribute",
        "--checkpoint",
        model,
        "--reference",
        files.folder("bf16"),
    ]
    command += [
        "--runtime",
        "vllm",
        "--use",
        "cpu",
        "--workloads",
        files.workload(),
        "--n",
        N,
        "--seed",
        seed,
    ]
    command += [
        word for factor, value in suspect.items() for word in ("--suspect", f"{factor}={value}")
    ]
    command += [
        word for factor, value in trusted.items() for word in ("--trusted", f"{factor}={value}")
    ]
    for arm in (files.work / "runs").glob("*/arms/*"):
        target, blamed = (
            folder / "arms" / arm.name,
            {*culprits_of(name), *culprits_of(arm.parents[1].name)},
        )
        if (
            not blamed & {*arm.name.split("+")}
            and (arm / "bench.json").exists()
            and not (target / "bench.json").exists()
        ):
            key = read_json(arm / "key.json")
            if key["seed"] == seed and key["values"]["weights"] in (
                str(model),
                str(files.folder("bf16")),
            ):
                shutil.copytree(arm, target, dirs_exist_ok=True)
    env = os.environ | vllm_faults.install(files.work / "plug-in") | {"ANNIE_QUANT_VLLM": str(vllm)}
    env |= {vllm_faults.SWITCH: fault}
    start = time.monotonic()
    done = subprocess.run(
        [*map(str, command), "--output", folder, "--json"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    write_text(folder / "command.log", done.stderr)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    row = json.loads(done.stdout) | {"seconds": round(time.monotonic() - start), "name": name}
    write_json(folder / "row.json", row)
    return row


def culprits_of(name: str) -> tuple[str, ...]:
    return FAULTS[name][3] if name in FAULTS else ()


def faulty_rows(files: VllmFiles, names: list[str], vllm: Path) -> Iterator[str]:
    for name in names:
        planted, stated, fault, culprits = FAULTS[name]
        row = run(files, name, vllm, "naive", stated, fault, 0)
        end = row["conclusion"]
        # A server that dies with a value does not make answers wrong: the value is named as one that cannot be tested.
        ok = end["causes"] == [list(culprits)] or (
            not end["causes"] and list(end["untested"]) == list(culprits)
        )
        sentence = "; ".join(
            [
                row["sentence"],
                *(f"not tested: {name}: {why}" for name, why in end["untested"].items()),
            ]
        )
        yield f"| {planted} | {'yes' if ok else 'no'} | {len(row['arms'])} | {row['seconds']} | {sentence} |"


def healthy_rows(files: VllmFiles, runs: Sequence[tuple[str, int]], vllm: Path) -> Iterator[str]:
    for checkpoint, seed in runs:
        row = run(files, f"healthy-{checkpoint}-{seed}", vllm, checkpoint, {}, "", seed)
        nobody = "yes" if not row["guilty"] else "no"
        yield f"| {checkpoint}, seed {seed} | {nobody} | {len(row['arms'])} | {row['seconds']} | {row['sentence']} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=Path)
    parser.add_argument("--vllm", type=Path, required=True, help="the program")
    parser.add_argument("--only", nargs="*", default=list(FAULTS))
    parser.add_argument("--healthy", type=int, default=len(HEALTHY), help="runs without a fault")
    args = parser.parse_args()
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    files, vllm, rows = (
        VllmFiles(work),
        args.vllm.absolute(),
        {"healthy": [], "faulty": [], "dying": []},
    )
    # The first run without a fault has arms that many rows need.
    for kind, row in itertools.chain(
        (("healthy", row) for row in healthy_rows(files, HEALTHY[:1], vllm)),
        (
            ("faulty", row)
            for row in faulty_rows(files, [name for name in args.only if name != DIES], vllm)
        ),
        (
            ("dying", row)
            for row in faulty_rows(files, [name for name in args.only if name == DIES], vllm)
        ),
        (("healthy", row) for row in healthy_rows(files, HEALTHY[1 : args.healthy], vllm)),
    ):
        print(row, flush=True)
        rows[kind].append(row)
        report(**rows)


def report(faulty: list[str], healthy: list[str], dying: list[str]) -> None:
    """Replace the part of the page from HEADING on."""
    named, nobody = (
        sum(row.split(" | ")[1] == "yes" for row in rows) for rows in (faulty, healthy)
    )
    table = "| named rightly | arms | seconds | sentence |\n|---|---|---|---|---|\n"
    text = f"""{HEADING}

{datetime.date.today():%Y-%m-%d}, vllm-cpu 0.32.0, two cores under other load,
`python tests/perf/attribution_vllm.py WORK --vllm build/vllm/bin/vllm`.
The command of each row is `annie-quant attribute --runtime vllm --use cpu`. {N} prompts of tool_web after four exchanges, eight
factors with two values each, at most 12 arms. An arm without the value to blame that an earlier row has measured with the same
command and values is not measured again. vLLM forks its processes here instead of importing everything in each, which saves time.
Input scales that are 64 times too large broke 1 of 14 answers (NVFP4's block scales make up for them), and nobody was named. vLLM
refuses a temperature of 4 with HTTP 400, and sampling was named. The plug-in has no fault of drafts, because this build's server
dies with MTP (the last table). Prompts without tools are shorter than a block of the prefix cache.

**{named} of {len(faulty)} planted faults named rightly; {nobody} of {len(healthy)} runs without a fault named nobody.**

| planted {table}{chr(10).join(faulty)}

| no fault {table.replace("named rightly", "nobody named")}{chr(10).join(healthy)}

| a value with which the server dies {table.replace("named rightly", "named as not tested")}{chr(10).join(dying)}
"""
    before = attribution.REPORT.read_text().partition(HEADING)[0].rstrip()
    write_text(attribution.REPORT, f"{before}\n\n{text}")


if __name__ == "__main__":
    main()
