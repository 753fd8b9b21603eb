"""The package as a whole: light to import, its names are there, files are never half written, runs resume."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import annie_quant
from annie_quant import files
from annie_quant.errors import EnvironmentFault, UsageError, need
from annie_quant.rundir import RunDirectory


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_the_package_loads_no_heavy_library() -> None:
    loaded = python(
        "import sys, annie_quant; print(','.join(m for m in ('torch','transformers','modelopt','scipy','rich','click',"
        "'pydantic','jinja2','matplotlib','xllamacpp') if m in sys.modules))"
    )
    assert loaded.strip() == ""


def test_the_bench_and_the_judge_never_import_torch() -> None:
    assert (
        python("import sys, annie_quant.bench, annie_quant.judge, annie_quant.report; print('torch' in sys.modules)")
        == "False\n"
    )


@pytest.mark.parametrize("name", annie_quant._PARTS)
def test_every_public_part_is_there(name: str) -> None:
    try:
        part = getattr(annie_quant, name)
    except EnvironmentFault as missing:  # a C module that is not built here says so and names the mend
        assert missing.hint
        return
    assert part is importlib.import_module(f"annie_quant.{name}")


def test_an_unknown_part_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        annie_quant.nonsense  # noqa: B018


def test_a_missing_library_names_its_extra() -> None:
    with pytest.raises(EnvironmentFault) as refused:
        need("no_such_library_here", "quantize")
    assert "no_such_library_here" in refused.value.message
    assert refused.value.hint == 'pip install "annie-quant[quantize]"'


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    files.write_json(target, {"old": True})
    with pytest.raises(RuntimeError), files.replacing(target, "w") as file:
        file.write("half")
        raise RuntimeError
    assert json.loads(target.read_text()) == {"old": True}
    assert [f.name for f in tmp_path.iterdir()] == ["run.json"]


def test_a_finished_stage_is_not_done_again_until_its_inputs_change(tmp_path: Path) -> None:
    run, calls = RunDirectory(tmp_path / "run"), []

    def work() -> dict:
        calls.append(1)
        (run / "out.bin").write_bytes(b"x")
        return {"n": len(calls)}

    first, before = run.stage("quantize", {"seed": 0}, ["out.bin"], work)
    assert not before and first["result"] == {"n": 1}
    again, before = run.stage("quantize", {"seed": 0}, ["out.bin"], work)
    assert before and again["result"] == {"n": 1}
    _, before = run.stage("quantize", {"seed": 1}, ["out.bin"], work)
    assert not before
    (run / "out.bin").unlink()
    _, before = run.stage("quantize", {"seed": 1}, ["out.bin"], work)
    assert not before and len(calls) == 3


def test_a_stage_that_fails_leaves_no_stamp(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        run.stage("bench", {}, [], lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert run.finished("bench", "") is None and not list((tmp_path / "run/stages").iterdir())


def test_two_commands_in_one_run_directory_are_refused(tmp_path: Path) -> None:
    first, second = RunDirectory(tmp_path), RunDirectory(tmp_path)
    with first.locked(), pytest.raises(UsageError, match="another annie-quant"), second.locked():
        pass


def test_a_run_directory_under_a_file_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match="cannot be made"):
        RunDirectory(tmp_path / "file" / "run")
