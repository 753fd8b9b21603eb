"""tests/perf/gpu_rows.py: order, memory, resuming, failures; and its plan can be read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

PERF = ROOT / "tests" / "perf"
PLAN = """# a comment
note = echo $(date +%s%N)
first | 10 | | {note} first >>{out}/order; sleep .3; {note} end >>{out}/order
second | 10 | | {note} second >>{out}/order; sleep .3
!large | 25 | first | {note} large >>{out}/order
later | 1 | | {note} later >>{out}/order
fails | 1 | | echo why; exit 3
never | 1 | fails | {note} never >>{out}/order
"""
IMPORTANT = """a | 20 | | sleep .5
!large | 20 | | echo large >>{out}/order
small | 5 | | echo small >>{out}/order
"""


def run(out, *options):
    command = [sys.executable, PERF / "gpu_rows.py", out, out, "--gb", "30", *options]
    return subprocess.run([str(c) for c in command], capture_output=True, text=True)


def test_jobs_run_side_by_side_as_far_as_memory_allows_and_are_not_repeated(tmp_path):
    plan = tmp_path / "plan.txt"
    plan.write_text(PLAN)
    done = run(tmp_path, "--plan", plan)
    assert done.returncode == 1
    assert "end   fails, exit 3" in done.stdout and ": why" in done.stdout
    assert "left out: never (fails is missing)" in done.stdout
    lines = [line.split() for line in (tmp_path / "order").read_text().splitlines()]
    times = {name: int(time) for time, name in lines}
    assert times["second"] < times["end"], "both fit"
    assert times["large"] > max(times["second"], times["end"]), "it does not fit next to them"
    assert "never" not in times
    (tmp_path / "order").unlink()
    plan.write_text(PLAN.replace("exit 3", "exit 0"))
    again = run(tmp_path, "--plan", plan)
    assert again.returncode == 0
    assert [line.split()[1] for line in (tmp_path / "order").read_text().splitlines()] == ["never"]


def test_an_important_job_keeps_the_memory_that_it_waits_for(tmp_path):
    (tmp_path / "plan.txt").write_text(IMPORTANT)
    done = run(tmp_path, "--plan", tmp_path / "plan.txt")
    assert done.returncode == 0
    assert re.findall(r"start (\w+)", done.stdout) == ["a", "large", "small"]
    (tmp_path / "plan.txt").write_text(IMPORTANT.replace("!", ""))
    passed = run(tmp_path / "second", "--plan", tmp_path / "plan.txt")
    assert re.findall(r"start (\w+)", passed.stdout) == ["a", "small", "large"]


def test_with_two_gpus_a_job_goes_where_most_memory_is_free(tmp_path):
    line = "{} | {} | | sleep .5; echo {} $CUDA_VISIBLE_DEVICES >>{{out}}/where\n"
    (tmp_path / "plan.txt").write_text(
        "".join(line.format(n, gb, n) for n, gb in zip("abc", (20, 15, 12), strict=True))
    )
    done = run(tmp_path, "--plan", tmp_path / "plan.txt", "--gpus", "4,7")
    assert done.returncode == 0
    where = dict(line.split() for line in (tmp_path / "where").read_text().splitlines())
    assert where == {"a": "4", "b": "7", "c": "7"}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("a | 1 | echo", "line 1 of the plan: expected name"),
        ("a | much | | echo", "line 1 of the plan: expected name"),
        ("a | 1 | | echo\na | 1 | | echo", "line 2 of the plan, a: its name is taken"),
        ("a | 1 | b | echo\nb | 1 | | echo", "line 1 of the plan, a: no job before it is b"),
        ("a | 31 | | echo", "left out: a (too large)"),
    ],
)
def test_a_plan_that_cannot_run_is_named(tmp_path, plan, message):
    (tmp_path / "plan.txt").write_text(plan)
    done = run(tmp_path, "--plan", tmp_path / "plan.txt")
    assert done.returncode == 1 and message in done.stdout + done.stderr


def test_the_plan_of_the_real_models_names_scripts_that_are_there(tmp_path):
    done = run(tmp_path, "--list")
    assert done.returncode == 0, done.stderr
    assert "{" not in done.stdout
    scripts = set(re.findall(r"(/\S+\.py)", done.stdout))
    assert len(scripts) >= 8 and all(Path(s).exists() for s in scripts)
    only = run(tmp_path, "--list", "--only", "vllm-bf16").stdout
    names = ["split", "annie-rows", "annie-train", "annie-prompts", "vllm-bf16"]
    assert [line.split(":")[0] for line in only.splitlines()] == names
