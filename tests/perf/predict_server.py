"""Does the offline evaluation predict the answers of real servers? The same prompts offline under each profile and in a server.

    python tests/perf/predict_server.py offline --work build/predict --n 30 naive mlp_only gptq      (--device cuda on a GPU)
    python tests/perf/predict_server.py llama.cpp --work build/predict --n 30 naive
    python tests/perf/predict_server.py vllm --python build/vllm/bin/python --work build/predict --n 30 naive
    python tests/perf/predict_server.py transformers --work build/predict --n 30 naive
    python tests/perf/predict_server.py table --work build/predict --n 30
    ... --model MODEL --workloads bfcl:simple_python,multiple,irrelevance --max-tokens 128      (another bf16 model, in every part)

Checkpoints are folders, or strategies with which `--model` (tiny-annie) is quantized into the work folder. For each:
  offline    the answers under every profile and those of its ensemble's members (--alone: without them; after the
             server, whose answers it then verifies, it takes a third of the time), and bf16's in two arithmetics
                                                                                                     WORK/offline/NAME.N.json
  servers    greedy answers to the same token prompts under two batch cuts                          WORK/served/NAME.SERVER.N.json
             (transformers: its generate in bfloat16, W4A4, tool calls alone, one prompt at a time)
  table      A/A      the server with itself under another batch cut: no offline arithmetic can agree better
             offline  answers equal to the server's, under its profile and the members of its ensemble
             gates    how many answers pass in each of the server's runs, and the range over the ensemble
             verdict  by the rule of docs/method.md, of the served answers (each run) and offline (all members), and how they
                      agree (agreement()); exit code 1 if one is reversed
             parts    where the answers that differ part: tokens before the first difference
             agreed   the answers that all members give alike, and how many of these the server gives
A GPU's answers come from tests/perf/vllm_gpu.sh. A finished part (offline: a profile) is not done again.
The table is in tests/perf/verdict.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

from llama_cpp_answers import complete  # noqa: E402

from annie_quant import judge  # noqa: E402
from annie_quant.core import files  # noqa: E402
from annie_quant.judge import Workload  # noqa: E402
from annie_quant.judge.decision import judge_members  # noqa: E402
from annie_quant.judge.gates import REFERENCE_GATES  # noqa: E402
from annie_quant.judge.pairing import deciding_checks, pair_checks, with_floor  # noqa: E402
from annie_quant.judge.sampling import Judged  # noqa: E402
from annie_quant.offline import ensemble  # noqa: E402
from annie_quant.offline.decoding import Completion  # noqa: E402
from annie_quant.offline.emulation import emulate  # noqa: E402
from annie_quant.offline.evaluation import evaluate_pair, judged, with_references  # noqa: E402
from annie_quant.offline.loading import profiles_of  # noqa: E402
from annie_quant.offline.pair import EvaluationJob, ModelPair, open_pair  # noqa: E402
from annie_quant.offline.profiles import find_profile  # noqa: E402
from annie_quant.offline.prompts import Answered, Template, TurnRequest  # noqa: E402

MODEL = ROOT / "annie_quant" / "assets" / "tiny-annie"
GATES = (
    "tool_call", "factual", "reasoning", "abstention", "no_markdown", "tool_schema", "tool_selection", "tool_values",
)  # fmt: skip
SERVERS = {  # the server's name in files → the profile that predicts it
    "llama.cpp-cpu": "llama.cpp-cpu",
    "vllm-cpu-w4a4": "vllm-cpu",
    "vllm-cpu-w4a16": "vllm-cpu-w4a16",
    "vllm-gpu-marlin": "vllm-marlin",
    "vllm-gpu-ours": "vllm-marlin",
    "vllm-gpu-exact": "vllm-cutlass",
    "vllm-gpu-emulation": "vllm-emulation",
    "transformers": "vllm-cutlass",
}
TOOLS = ("tool_memory", "tool_web")
PROFILES = tuple(dict.fromkeys(SERVERS.values()))


class Sample(NamedTuple):
    """Which prompts are asked. n: per gate. workloads: names; None: the default ones. max_tokens: cap on every answer."""

    n: int
    workloads: tuple[str, ...] | None = None
    max_tokens: int | None = None

    def prompts(self, template: Template) -> tuple[list[Workload], list[TurnRequest]]:
        """Return the prompts of the single-turn workloads, and their requests."""
        loaded = judge.sample(judge.load_workloads(self.workloads), self.n)
        workloads = [self.capped(w) for w in loaded if not w.cases[0].turns]
        return workloads, [template.request(w, c) for w in workloads for c in w.cases]

    def capped(self, workload: Workload) -> Workload:
        if self.max_tokens is None:
            return workload
        cases = tuple(replace(c, max_tokens=min(self.max_tokens, workload.max_tokens_for(c))) for c in workload.cases)
        return replace(workload, cases=cases)


def write_prompts(path: Path, requests: Sequence[TurnRequest], ends: Sequence[int]) -> None:
    rows = [{"prompt": list(r.prompt), "max_tokens": r.max_tokens, "ends": list(ends)} for r in requests]
    files.write_json(path, rows)


def without_end(tokens: Sequence[int], stopped: bool, ends: Sequence[int]) -> Completion:
    tokens = list(tokens)
    return Completion(tokens[:-1] if stopped and tokens and tokens[-1] in ends else tokens, stopped)


def offline(
    work: Path, model: Path, folder: Path, sample: Sample, profiles: Sequence[str], device: str | None, alone: bool
) -> None:
    """Compute and store the answers of the profiles that are not stored yet. alone: without the ensembles' further members."""
    output = work / "offline" / f"{folder.name}.{sample.n}.json"
    stored = files.read_json(output) if output.exists() else {"members": {}, "noise": {}, "uncertain": {}, "seconds": 0}
    missing = [name for name in profiles if name not in stored["members"]]
    if not missing:
        return
    job = EvaluationJob(checkpoint=folder, reference=model, cache=work / "cache", dtype="float32", device=device)
    with open_pair(job) as pair:
        missing = [name for name in missing if name in profiles_of(pair.model)]
        if not missing:
            return
        workloads, requests = sample.prompts(pair.template)
        write_prompts(work / f"prompts.{sample.n}.json", requests, pair.template.end_tokens)
        reference = pair.reference.answer(workloads)
        completions: dict[str, list[Completion]] = {}
        start = time.monotonic()
        if alone:
            for name in missing:
                guess = served_answers(work, folder.name, sample.n, name, pair.template.end_tokens)
                answered = [Answered(r, c) for (r, _), c in zip(reference, guess, strict=True)] if guess else reference
                completions[name] = answers_alone(pair, name, answered)
        else:
            job = replace(job, numerics=missing)
            result = evaluate_pair(pair, job, workloads, lambda member, own: completions.update({member: own}))
            stored["noise"] |= {name: figures.noise for name, figures in result.ensemble.items()}
            stored["uncertain"] |= {name: figures.n_uncertain for name, figures in result.ensemble.items()}
        stored["members"] |= {key: [[c.tokens, c.finished] for c in own] for key, own in completions.items()}
        stored["seconds"] += time.monotonic() - start
        stored["device"] = pair.device
        stored["reference"] = [[c.tokens, c.finished] for _, c in reference]
        stored["floor"] = [[c.tokens, c.finished] for _, c in ensemble.second_answers(pair, reference)]
        files.write_json(output, stored)


def answers_alone(pair: ModelPair, name: str, guess: Sequence[Answered]) -> list[Completion]:
    """Return the checkpoint's own answers under one profile, without the reference's logits.

    guess: answers that are verified in one forward; decoded is what follows the first token that the profile chooses otherwise.
    """
    everything = range(len(guess))
    with emulate(pair.model, find_profile(name)):
        choices = ensemble.choose(pair, pair.engine.scores, guess, everything, name)
        differences = ensemble.differences_of(choices)
        outcomes = ensemble.answers_of(pair, pair.engine, guess, differences, name)
    return [outcomes[i].completion for i in everything]


def served_answers(work: Path, name: str, n: int, profile: str, ends: Sequence[int]) -> list[Completion]:
    """Return the stored answers of a server that the profile predicts, [] without one."""
    for server in (s for s, predicted in SERVERS.items() if predicted == profile):
        path = work / "served" / f"{name}.{server}.{n}.json"
        if path.exists():
            answers = next(iter(files.read_json(path)["cuts"].values()))
            return [without_end(a[0], a[1], ends) for a in answers] if None not in answers else []
    return []


def ask_llama_cpp(file: Path, rows: Sequence[Mapping[str, Any]], parallel: int) -> list[Any]:
    from concurrent.futures import ThreadPoolExecutor

    from annie_quant.ops import serving

    with serving.start(file, parallel=parallel) as server:

        def ask(row: Mapping[str, Any]) -> list[Any]:
            answer = complete(server.url, row["prompt"], row["max_tokens"], timeout_s=600, cache_prompt=False)
            return [answer["tokens"], answer["stop_type"] == "eos"]

        with ThreadPoolExecutor(parallel) as pool:
            return list(pool.map(ask, rows))


def serve_llama_cpp(work: Path, folder: Path, n: int, cuts: str) -> None:
    """Store the answers of llama.cpp with these numbers of slots."""
    from annie_quant import checkpoint

    output, file = work / "served" / f"{folder.name}.llama.cpp-cpu.{n}.json", work / f"{folder.name}.gguf"
    if output.exists():
        return
    if not file.exists():
        checkpoint.convert(folder, to="gguf", output=file, force=True)
    rows = files.read_json(work / f"prompts.{n}.json")
    files.write_json(output, {"cuts": {slots: ask_llama_cpp(file, rows, int(slots)) for slots in cuts.split(",")}})


def ask_vllm(python: Path, folder: Path, prompts: Path, output: Path, cuts: str) -> None:
    """Store vLLM's answers on this CPU (vllm_answers.py) and its log. cuts: numbers of prompts at a time."""
    output.parent.mkdir(parents=True, exist_ok=True)
    program = Path(__file__).with_name("vllm_answers.py")
    command: list[str | Path] = [python, program, folder, prompts, output, "--cuts", cuts]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with output.with_suffix(".log").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=log, env=environment)


def serve_vllm(work: Path, folder: Path, n: int, python: Path, kinds: Sequence[str], cuts: str) -> None:
    """Store the answers of vLLM on this CPU: the checkpoint's W4A4, and the same declared W4A16."""
    for kind in kinds:
        output = work / "served" / f"{folder.name}.vllm-cpu-{kind}.{n}.json"
        has_scales = quantizes_activations(folder)
        if output.exists() or (kind == "w4a4" and not has_scales):
            continue
        if kind == "w4a16" and has_mixed_formats(folder):
            print(f"{folder.name}: one declaration of W4A16 does not cover its FP8 linears; left out", flush=True)
            continue
        source = weight_only(folder, work) if kind == "w4a16" and has_scales else folder
        ask_vllm(python, source, work / f"prompts.{n}.json", output, cuts)


def serve_transformers(work: Path, folder: Path, template: Template, sample: Sample) -> None:
    """Store the answers of transformers' generate to the tool prompts; null for all others."""
    import torch

    from annie_quant.offline import load

    output = work / "served" / f"{folder.name}.transformers.{sample.n}.json"
    if output.exists():
        return
    model: Any = load(folder, cache="bf16", dtype=torch.bfloat16)
    answers: list[Any] = []
    for request in sample.prompts(template)[1]:
        if request.workload.name not in TOOLS:
            answers.append(None)
            continue
        ids = torch.tensor([list(request.prompt)])
        generated = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, eos_token_id=list(template.end_tokens),
            max_new_tokens=request.max_tokens,
        )[0, ids.shape[1]:].tolist()  # fmt: skip
        answers.append([generated, bool(generated) and generated[-1] in template.end_tokens])
    files.write_json(output, {"cuts": {"1": answers}})


def quantizes_activations(folder: Path) -> bool:
    from annie_quant import checkpoint

    return "input_scale" in str(list(checkpoint.ModelFolder(folder)))


def has_mixed_formats(folder: Path) -> bool:
    settings = files.read_json(folder / "config.json").get("quantization_config") or {}
    return settings.get("quant_algo") == "MIXED_PRECISION"


def weight_only(folder: Path, work: Path) -> Path:
    """Return the same checkpoint declared W4A16, without input scales: what vLLM serves with Marlin."""
    import shutil

    from safetensors.torch import load_file, save_file

    target = work / f"{folder.name}-w4a16"
    if not target.exists():
        shutil.copytree(folder, target)
        tensors = load_file(folder / "model.safetensors")
        weights_only = {k: v for k, v in tensors.items() if not k.endswith("input_scale")}
        save_file(weights_only, target / "model.safetensors", metadata={"format": "pt"})
        for path in (target / "config.json", target / "hf_quant_config.json"):
            files.write_text(path, declared_weight_only(path.read_text()))
    return target


def declared_weight_only(text: str) -> str:
    document = json.loads(text)
    settings = document.get("quantization_config") or document["quantization"]
    settings["quant_algo"] = "W4A16_NVFP4"
    for group in settings.get("config_groups", {}).values():
        group.pop("input_activations", None)
    return json.dumps(document, indent=2)


class Prompts:
    """The prompts of one sample size with bf16's answers: judges other answers to them."""

    def __init__(
        self,
        template: Template,
        sample: Sample,
        reference: Sequence[Completion],
        indices: Sequence[int],
        floor: Sequence[Completion] | None = None,
    ) -> None:
        self.template = template
        requests = sample.prompts(template)[1]
        self.requests = [with_reference_gates(requests[i]) for i in indices]
        self.before = with_references(judged(template, self.answered(reference)))
        self.floor = None if floor is None else self.judged(floor)

    def answered(self, completions: Sequence[Completion]) -> list[Answered]:
        return [Answered(r, c) for r, c in zip(self.requests, completions, strict=True)]

    def judged(self, completions: Sequence[Completion]) -> list[Judged]:
        rows = zip(judged(self.template, self.answered(completions)), self.before, strict=True)
        return [(w, replace(case, reference=reference), answer) for (w, case, answer), (_, _, reference) in rows]

    def counts(self, completions: Sequence[Completion]) -> dict[str, int]:
        table = judge.gate_table(self.judged(completions))
        return {gate: row.passes for gate, row in table.items() if gate in GATES}

    def verdict(self, members: Mapping[str, Sequence[Completion]]) -> str:
        """Return the rule's verdict over these members' answers."""
        paired, pooled = {}, {}
        for name, completions in members.items():
            paired[name], pooled[name] = pair_answers(self.before, self.judged(completions), self.floor)
        return judge_members(paired, pooled).verdict


def pair_answers(before: Sequence[Judged], after: Sequence[Judged], floor: Sequence[Judged] | None) -> tuple[dict, Any]:
    """Pair two models' answers to the same prompts, in the same order.

    before: the reference's. after: the checkpoint's. floor: the reference's in another arithmetic.
    """
    rows, noisy, others = ([deciding_checks(a, c, w) for w, c, a in side or ()] for side in (before, floor, after))
    if floor is not None:
        rows = [with_floor(*pair) for pair in zip(rows, noisy, strict=True)]
    return pair_checks(zip(rows, others, strict=True))


def with_reference_gates(request: TurnRequest) -> TurnRequest:
    """Return the request with the gates that compare with bf16's own answer, as an evaluation judges it."""
    gates = tuple(dict.fromkeys((*request.workload.gates, *REFERENCE_GATES)))
    return replace(request, workload=replace(request.workload, gates=gates))


def agreement(served: str, ensemble: str, members: Collection[str]) -> str:
    """Return how the verdict of one served run agrees with the offline one. members: the verdict of each member judged alone.

    A run is one arithmetic, so it can be compared with a member, but not with "fragile", which needs several.
    same          the ensemble's verdict
    member        the verdict of one of its members, judged alone as the run is
    by a degree   neither, and "undecided" is one of the two sides' verdicts or lies between them
    reversed      neither, and one side keeps what the other loses
    """
    if served == ensemble:
        return "same"
    if served in members:
        return "member"
    reverse = {"keeps": "loses", "loses": "keeps"}.get(served)
    return "reversed" if reverse in (ensemble, *members) else "by a degree"


def first_difference(one: Completion, other: Completion) -> int:
    """Return the number of tokens before two answers part."""
    pairs = zip(one.tokens, other.tokens, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one.tokens), len(other.tokens)))


def agreed(members: Sequence[Sequence[Completion]], served: Sequence[Completion]) -> tuple[int, int]:
    """Return how many answers all members give alike, and how many of these are the served ones."""
    alike = [all(a == own[0] for a in own) for own in zip(*members, strict=True)]
    right = [same and a == b for same, a, b in zip(alike, members[0], served, strict=True)]
    return sum(alike), sum(right)


def compare(work: Path, template: Template, sample: Sample, name: str, server: str) -> dict[str, Any]:
    """Return the row of one checkpoint in one server."""
    n = sample.n
    computed = files.read_json(work / "offline" / f"{name}.{n}.json")
    served = files.read_json(work / "served" / f"{name}.{server}.{n}.json")["cuts"]
    ends, profile = template.end_tokens, SERVERS[server]
    indices = [i for i, answer in enumerate(next(iter(served.values()))) if answer is not None]

    def chosen(rows: Sequence[Any]) -> list[Completion]:
        return [Completion(*rows[i]) for i in indices]

    runs = {cut: [without_end(answers[i][0], answers[i][1], ends) for i in indices] for cut, answers in served.items()}
    by_profile = {key: chosen(own) for key, own in computed["members"].items()}
    members = {k: v for k, v in by_profile.items() if k.partition("+")[0] == profile}
    first = next(iter(runs.values()))
    reference = chosen(computed["reference"])
    floor = chosen(computed["floor"]) if "floor" in computed else None
    everything = Prompts(template, sample, reference, indices, floor)
    served_verdicts = [everything.verdict({profile: run}) for run in runs.values()]
    offline_verdict = everything.verdict(members)
    alone = {key: everything.verdict({profile: own}) for key, own in members.items()}
    parted = [first_difference(a, b) for a, b in zip(members[profile], first, strict=True) if a != b]
    return {
        "checkpoint": name,
        "server": server,
        "profile": profile,
        "n": len(first),
        "a_a": [sum(a == b for a, b in zip(first, run, strict=True)) for run in list(runs.values())[1:]],
        "agree": {key: sum(a == b for a, b in zip(own, first, strict=True)) for key, own in by_profile.items()},
        "agreed": agreed(list(members.values()), first),
        "reference_gates": everything.counts(reference),
        "served_gates": [everything.counts(run) for run in runs.values()],
        "offline_gates": {key: everything.counts(own) for key, own in members.items()},
        "served_verdicts": served_verdicts,
        "offline_verdict": offline_verdict,
        "member_verdicts": alone,
        "agreement": [agreement(served, offline_verdict, alone.values()) for served in served_verdicts],
        "parted": sorted(parted),
        "parted_cases": [
            [i, r.name, first_difference(a, b)]
            for i, r, a, b in zip(indices, everything.requests, members[profile], first, strict=True)
            if a != b
        ],
    }


def line(row: Mapping[str, Any]) -> str:
    """Return one Markdown row of the table."""
    own = row["agree"][row["profile"]]
    rest = [v for k, v in row["agree"].items() if k.startswith(row["profile"] + "+")]
    gates = []
    for gate, n_passed in row["reference_gates"].items():
        offline_counts = [counts.get(gate, 0) for counts in row["offline_gates"].values()]
        served_counts = [counts.get(gate, 0) for counts in row["served_gates"]]
        low, high = min(offline_counts), max(offline_counts)
        inside = "" if low <= min(served_counts) and max(served_counts) <= high else " **outside**"
        span = f"{low}" if low == high else f"{low}–{high}"
        gates.append(f"{gate} {'/'.join(map(str, served_counts))} ({span}; bf16 {n_passed}){inside}")
    percent = f"{100 * own / row['n']:.1f} %"
    return (
        f"| {row['checkpoint']} | {row['server']} | {'/'.join(map(str, row['a_a']))} of {row['n']} | {own} ({percent}; "
        f"{min(rest, default=own)}–{max(rest, default=own)}) | {'; '.join(gates)} | {'/'.join(row['served_verdicts'])} | "
        f"{row['offline_verdict']} ({', '.join(dict.fromkeys(row['member_verdicts'].values()))}) | "
        f"{'/'.join(row['agreement'])} | {sum(p < 10 for p in row['parted'])} of {len(row['parted'])} | "
        f"{row['agreed'][1]} of {row['agreed'][0]} |"
    )


def checkpoint_of(strategy: str, work: Path, model: Path, samples: int) -> Path:
    """Return the model quantized with a strategy and so many calibration conversations; an existing one is reused."""
    from annie_quant import data, quantize

    rows, folder = work / "calibration.jsonl", work / strategy
    if folder.exists():
        return folder
    if not rows.exists():
        data.generate("annie", teacher="offline", n=500, output=rows, seed=0)
    quantize.run(strategy, model, folder, calib_data=rows, calib_samples=samples)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("offline", "llama.cpp", "vllm", "transformers", "table"))
    parser.add_argument("checkpoints", nargs="*", help="strategies, or folders of checkpoints")
    parser.add_argument("--work", type=Path, default=Path("build/predict"))
    parser.add_argument("--model", type=Path, default=MODEL, help="the bf16 model")
    parser.add_argument("--python", type=Path, help="the python of vLLM's environment (tests/integration/vllm_cpu.py)")
    parser.add_argument("--n", type=int, default=30, help="prompts per gate")
    parser.add_argument("--workloads", nargs="+", help="default: all single-turn ones of this package")
    parser.add_argument("--max-tokens", type=int, help="cap on every answer, of all parts")
    parser.add_argument("--alone", action="store_true", help="offline: the profiles without their ensembles")
    parser.add_argument("--kinds", default="w4a4,w4a16", help="of the checkpoint in vLLM on a CPU")
    parser.add_argument("--cuts", help="sequences at a time; default: 8,1 in llama.cpp, 16,1 in vLLM on a CPU")
    parser.add_argument("--profiles", default=",".join(PROFILES))
    parser.add_argument("--calib-samples", type=int, default=128, help="conversations, for strategies")
    parser.add_argument("--device", default=None, help="of the offline evaluation")
    arguments = parser.parse_intermixed_args()
    work, n = arguments.work.resolve(), arguments.n
    sample = Sample(n, tuple(arguments.workloads) if arguments.workloads else None, arguments.max_tokens)
    work.mkdir(parents=True, exist_ok=True)
    if arguments.part == "table":
        template = Template(
            arguments.model
        )  # the table is of one bf16 model's checkpoints, or of models with its template
        n_reversed = 0
        for path in sorted((work / "served").glob(f"*.{n}.json")):
            name, server = next((path.name[: -len(f".{s}.{n}.json")], s) for s in SERVERS if f".{s}." in path.name)
            computed = work / "offline" / f"{name}.{n}.json"
            if computed.exists() and SERVERS[server] in files.read_json(computed)["members"]:
                row = compare(work, template, sample, name, server)
                files.write_json(work / "rows" / f"{name}.{server}.{n}.json", row)
                print(line(row), flush=True)
                n_reversed += row["agreement"].count("reversed")
        sys.exit(1 if n_reversed else 0)
    for item in arguments.checkpoints:
        folder = Path(item).resolve()
        if not folder.is_dir():
            folder = checkpoint_of(item, work, arguments.model, arguments.calib_samples)
        if arguments.part == "offline":
            profiles = arguments.profiles.split(",")
            offline(work, arguments.model, folder, sample, profiles, arguments.device, arguments.alone)
        elif arguments.part == "llama.cpp":
            serve_llama_cpp(work, folder, n, arguments.cuts or "8,1")
        elif arguments.part == "transformers":
            serve_transformers(work, folder, Template(arguments.model), sample)
        else:
            serve_vllm(work, folder, n, arguments.python, arguments.kinds.split(","), arguments.cuts or "16,1")
        print(folder.name, arguments.part, "done", flush=True)


if __name__ == "__main__":
    main()
