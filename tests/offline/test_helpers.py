"""Helper processes of one evaluation: what they exchange, how many there are, and what happens when one fails."""

from __future__ import annotations

import contextlib
import multiprocessing

import pytest

pytest.importorskip("torch", reason="the runtime needs torch: pip install annie-quant[quantize]")
pytest.importorskip("transformers", reason="the runtime needs transformers: pip install annie-quant[quantize]")

import torch

from annie_quant import judge
from annie_quant.core.errors import EnvironmentFault
from annie_quant.core.host import Memory
from annie_quant.offline import decoding, job, process_group
from annie_quant.offline.pair import EvaluationJob
from annie_quant.offline.process_group import SINGLE, ProcessGroup


def exchange(group: ProcessGroup) -> list[dict]:
    """Work of several processes: each computes its own batches, and some of it depends on what all computed before."""
    first = group.gather({n: n * n for n in range(7) if group.owns(n)})
    second = group.gather({n: (sum(first.values()), torch.get_num_threads()) for n in range(3) if group.owns(n)})
    return [first, second]


def fail_in_a_helper(group: ProcessGroup) -> dict:
    if not group.is_first:
        raise ValueError("no batch today")
    return group.gather({0: 0})


def test_each_process_has_all_parts_and_the_threads_are_shared():
    threads = torch.get_num_threads()
    with process_group.helped_by(exchange, 2) as group:
        first, second = exchange(group)
        assert group.is_first and (group.rank, group.size) == (0, 2)
    assert first == {n: n * n for n in range(7)}
    assert second == {n: (91, max(1, threads // 2)) for n in range(3)}, "the helpers had the merged first result"
    assert torch.get_num_threads() == threads


def test_a_helper_that_fails_is_one_error_with_a_way_out(monkeypatch):
    # It computes nothing, so it may be forked: a spawned one imports torch first.
    forked = multiprocessing.get_context("fork")
    monkeypatch.setattr(process_group.multiprocessing, "get_context", lambda method: forked)
    with (
        pytest.raises(EnvironmentFault, match="failed: ValueError: no batch today") as raised,
        process_group.helped_by(fail_in_a_helper, 2) as group,
    ):
        fail_in_a_helper(group)
    assert "--processes 1" in str(raised.value.hint)


def test_a_helper_that_ends_is_an_error():
    own, other = multiprocessing.Pipe()
    other.close()
    with pytest.raises(EnvironmentFault, match="ended"):
        ProcessGroup(0, 2, (own,)).gather({0: 0})


@pytest.mark.parametrize(("processes", "helped"), [(1, 1), (3, 3), (None, 2)])
def test_eval_works_in_the_group_of_its_helpers(processes, helped, monkeypatch, tmp_path):
    groups, sizes = [], []

    @contextlib.contextmanager
    def helped_by(work, size):
        sizes.append(size)
        yield ProcessGroup(0, size)

    monkeypatch.setattr(job.process_group, "helped_by", helped_by)
    monkeypatch.setattr(job.process_group, "automatic", lambda folders, n_answers: 2 if n_answers > 20 else 1)
    monkeypatch.setattr(job, "compute", lambda settings, group, progress: groups.append(group))
    settings = EvaluationJob(checkpoint=tmp_path, reference=tmp_path, workloads=judge.load_workloads(), n_per_gate=10)
    job.run(settings, processes=processes)
    assert sizes == [helped] and [g.size for g in groups] == [helped]


def test_only_small_models_with_many_prompts_get_helpers(tmp_path, monkeypatch):
    monkeypatch.setattr(process_group.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(process_group.host, "cores", lambda: 2)
    monkeypatch.setattr(process_group.host, "memory", lambda: Memory(64 << 30, 60 << 30, 0))
    weights = tmp_path / "model.safetensors"
    with weights.open("wb") as file:
        file.truncate(15 << 20)
    assert process_group.automatic([tmp_path, tmp_path], 505) == 2
    assert process_group.automatic([tmp_path, tmp_path], 50) == 1, "a process takes longer to start"
    monkeypatch.setattr(process_group.host, "cores", lambda: 64)
    assert process_group.automatic([tmp_path], 505) == process_group.MOST_PROCESSES
    with monkeypatch.context() as patch:
        patch.setattr(process_group.host, "memory", lambda: Memory(16 << 30, 5 << 30, 0))
        assert process_group.automatic([tmp_path], 505) == 2, "two gigabytes each"
    with weights.open("r+b") as file:
        file.truncate(2 << 30)  # sparse
    assert process_group.automatic([tmp_path], 505) == 1, "its products occupy all threads"


@pytest.mark.parametrize(("gpus", "processes"), [(0, 4), (1, 1), (4, 4)])
def test_processes_do_not_share_one_gpu(tmp_path, monkeypatch, gpus: int, processes: int):
    monkeypatch.setattr(process_group.host, "cores", lambda: 64)
    monkeypatch.setattr(process_group.host, "memory", lambda: Memory(64 << 30, 60 << 30, 0))
    monkeypatch.setattr(process_group.torch.cuda, "device_count", lambda: gpus)
    assert process_group.automatic([tmp_path], 505) == processes


def test_parts_on_a_cpu_do_not_depend_on_the_number_of_processes():
    class FakeEngine:
        device, rows, group = torch.device("cpu"), 128, SINGLE

    assert decoding.rows_per_part(FakeEngine, 505) == decoding.rows_per_part(FakeEngine, 60) == 128
    FakeEngine.group = ProcessGroup(0, 4)
    assert decoding.rows_per_part(FakeEngine, 60) == 128
    FakeEngine.device = torch.device("cuda")
    assert (
        decoding.rows_per_part(FakeEngine, 480) == 120 and decoding.rows_per_part(FakeEngine, 8) == decoding.LEAST_ROWS
    )
    FakeEngine.rows = 4
    assert decoding.rows_per_part(FakeEngine, 480) == 4
