"""Evaluation by two processes over gloo: counts and figures equal those of one process. With GPUs, each process uses its own."""

import json
import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

torch = pytest.importorskip("torch", reason="the runtime needs torch: pip install annie-quant[quantize]")
pytest.importorskip("transformers", reason="the runtime needs transformers: pip install annie-quant[quantize]")
pytest.importorskip("modelopt", reason="ModelOpt makes the checkpoints: pip install annie-quant[quantize]")
pytest.importorskip("annie_quant.nvfp4", reason="the runtime needs the codec")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from runtime_models import export_nvfp4, save_reference  # noqa: E402

SCRIPT = """
import json, sys
import torch
torch.set_num_threads(1)
from annie_quant import runtime
from annie_quant.judge import Case, Workload
from annie_quant.offline.process_group import join_group, leave_group

model, reference, out, cache = sys.argv[1:]
cases = tuple(Case(f"c{i}", ({"role": "user", "content": f"What is {i} and {i + 3}?"},)) for i in range(5))
talk = tuple(Case(f"t{i}", (), ("Hello there!", "What did I say?")) for i in range(2))
gates = ("non_empty", "no_markdown", "thinking_leak")
loads = [Workload("plain", "", None, "Be brief.", None, False, 8, 0, gates, cases),
         Workload("talk", "", None, None, None, False, 8, 0, gates, talk)]
result = runtime.evaluate(model, reference, loads, cache=cache, rows=4, text=__file__)
layers = runtime.sensitivity(model, reference, loads, modes=("alone",), cache=cache, rows=4)
me = join_group()
from pathlib import Path
Path(out, f"{me.rank}-of-{me.size}.json").write_text(json.dumps([result, layers]))
leave_group()
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    reference = save_reference(tmp_path_factory.mktemp("reference"))
    return export_nvfp4(reference, tmp_path_factory.mktemp("naive")), reference


def test_two_processes_count_as_one_does(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = torch.get_num_threads()
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    arguments = [str(script), *map(str, folders), str(tmp_path)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # as torchrun sets them
    environment = {
        **os.environ,
        **group,
        "RANK": "1",
        "LOCAL_RANK": "1",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    with (tmp_path / "two.err").open("w") as errors:
        command = [sys.executable, *arguments, str(tmp_path / "two")]
        second_process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=errors)
    try:
        # Here: another process would import torch and transformers again.
        monkeypatch.setattr(sys, "argv", [*arguments, str(tmp_path / "one")])
        runpy.run_path(str(script))
        assert second_process.poll() is None, (tmp_path / "two.err").read_text()[-2000:]
        for name, value in {**group, "RANK": "0", "LOCAL_RANK": "0"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", [*arguments, str(tmp_path / "two")])
        runpy.run_path(str(script))
        assert second_process.wait(timeout=300) == 0, (tmp_path / "two.err").read_text()[-2000:]
    finally:
        torch.set_num_threads(threads)
        second_process.kill()
    alone, first, second = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("0-of-1", "0-of-2", "1-of-2"))
    for result in (alone, first, second):
        forget_time(result)
    assert first == second, "each process has the whole result"
    assert first == alone
    assert first[0]["device"] == ("cuda" if torch.cuda.is_available() else "cpu")
    side = first[0]["numerics"]["w4a4"]
    assert side["gates"]["non_empty"]["n"] == 7 and side["kl_text"]["n_tokens"] > 300
    assert 0 < side["same_answers"]["same"] < 7 or side["cases"]
    lines = [(tmp_path / c).glob("answers-*.jsonl") for c in ("one", "two")]
    assert len({frozenset(next(files).read_text().splitlines()) for files in lines}) == 1, "one process writes"


def forget_time(value) -> None:
    if isinstance(value, dict):
        value.pop("seconds", None)
        for v in value.values():
            forget_time(v)
    elif isinstance(value, list):
        for v in value:
            forget_time(v)
