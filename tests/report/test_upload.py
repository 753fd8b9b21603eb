"""Uploads to a local Hub: what is uploaded, what never is, broken transfers, refusals."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import fake_hub
import pytest
import report_fixture

from annie_quant.core.errors import EnvironmentFault, ServerError, UsageError
from annie_quant.report import publishing

pytest.importorskip("huggingface_hub", reason="huggingface_hub makes the upload")
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
REPO = "owner/Tiny-NVFP4"
SECRET = "hf_" + "abcdefghijklmnopqrstuvwxyzABCDEFGH"


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Waits of the upload take at most 0.02 seconds, not none: idle workers would spin. Plain LFS, no Xet."""
    from huggingface_hub import _upload_large_folder as large
    from huggingface_hub.utils import _http

    patch, sleep = pytest.MonkeyPatch(), time.sleep
    patch.setattr(large, "is_xet_available", lambda: False)
    patch.setattr("huggingface_hub._commit_api.is_xet_available", lambda: False, raising=False)
    patch.setattr(_http.time, "sleep", lambda seconds: sleep(min(seconds, 0.02)))
    yield
    patch.undo()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return report_fixture.make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model")


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    return report_fixture.make_run(tmp_path_factory.mktemp("upload") / "run", n=10, hostile=False)


@pytest.fixture
def run(whole_run, checkpoint, tmp_path):
    folder = Path(shutil.copytree(whole_run, tmp_path / "run"))
    report_fixture.record_hash(folder, "mlp_only", checkpoint)
    return folder


def prepare(run, checkpoint, **options):
    report_fixture.record_hash(run, options.get("model", "mlp_only"), checkpoint)
    return publishing.prepare(
        run,
        REPO,
        **{"model": "mlp_only", "checkpoint": checkpoint, "base_model": "owner/tiny"} | options,
    )


def contents(checkpoint: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in checkpoint.iterdir()}


def test_everything_arrives_and_the_repository_is_private(run, checkpoint):
    plan = prepare(run, checkpoint)
    with fake_hub.FakeHub() as hub:
        done = publishing.upload(plan, endpoint=hub.url, token="t" * 20)
        assert hub.repos[REPO]["private"] is True and hub.tokens == {"Bearer " + "t" * 20, ""}, (
            "storage needs none"
        )
        assert hub.committed[REPO] == contents(checkpoint) | {"README.md": plan.card.encode()}
    assert done.url == f"{hub.url}/{REPO}" and done.files == len(plan.files)


def test_a_transfer_that_breaks_is_repeated(run, checkpoint):
    with fake_hub.FakeHub() as hub:
        hub.break_puts = 2
        publishing.upload(prepare(run, checkpoint), endpoint=hub.url, token="t" * 20)
        assert (
            hub.committed[REPO]["model.safetensors"]
            == (checkpoint / "model.safetensors").read_bytes()
        )
        assert hub.puts() >= 3


def test_an_upload_that_keeps_failing_ends_and_the_next_resumes(run, checkpoint):
    with fake_hub.FakeHub() as hub:
        hub.break_puts = -1
        with pytest.raises(ServerError, match="upload failed"):
            publishing.upload(prepare(run, checkpoint), endpoint=hub.url, token="t" * 20)
        assert "model.safetensors" not in hub.committed.get(REPO, {})
        hub.break_puts = 0
        publishing.upload(prepare(run, checkpoint), endpoint=hub.url, token="t" * 20)
        assert hub.committed[REPO] == contents(checkpoint) | {
            "README.md": hub.committed[REPO]["README.md"]
        }
        sent = dict(hub.put_bytes)
        before = len(hub.requests)
        publishing.upload(prepare(run, checkpoint), endpoint=hub.url, token="t" * 20)
        assert hub.put_bytes == sent, "nothing is sent twice"
        assert not [
            path for method, path in hub.requests[before:] if method == "PUT" or "/commit/" in path
        ]


def test_parts_of_a_large_file_are_put_together(run, checkpoint):
    with fake_hub.FakeHub(part_bytes=1_000_000) as hub:
        hub.break_puts = 1
        publishing.upload(prepare(run, checkpoint), endpoint=hub.url, token="t" * 20)
        assert (
            hub.committed[REPO]["model.safetensors"]
            == (checkpoint / "model.safetensors").read_bytes()
        )
        assert hub.puts() > (checkpoint / "model.safetensors").stat().st_size // 1_000_000


COMMAND = """
import sys
from huggingface_hub import _upload_large_folder as large
large.WAITING_TIME_IF_NO_TASKS = 0.2
from annie_quant.cli import main
sys.argv = ["annie-quant", *sys.argv[1:]]
main()
"""


def command(hub_url, *arguments):
    environment = os.environ | {
        "HF_ENDPOINT": hub_url,
        "HF_TOKEN": "t" * 20,
        "HF_HUB_DISABLE_XET": "1",
    }
    return [sys.executable, "-c", COMMAND, "publish", *map(str, arguments)], environment


def test_a_killed_command_resumes(run, checkpoint):
    """SIGKILL in the middle of a transfer of parts; the same command then finishes the upload."""
    arguments = [
        run,
        "--repo",
        REPO,
        "--model",
        "mlp_only",
        "--checkpoint",
        checkpoint,
        "--base-model",
        "owner/tiny",
    ]
    with fake_hub.FakeHub() as hub:
        hub.break_puts = -1
        words, environment = command(hub.url, *arguments)
        process = subprocess.Popen(
            words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        give_up = time.monotonic() + 60
        while not hub.puts() and time.monotonic() < give_up:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        hashed = sum("/preupload/" in path for _, path in hub.requests)
        assert hub.puts() and hashed
        hub.break_puts = 0
        ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=90)
        assert ended.returncode == 0, ended.stderr
        assert set(contents(checkpoint)) | {"README.md"} == set(hub.committed[REPO])
        assert (
            hub.committed[REPO]["model.safetensors"]
            == (checkpoint / "model.safetensors").read_bytes()
        )
        assert "model.safetensors" in ended.stdout and f"uploaded: {hub.url}/{REPO}" in ended.stderr


def test_a_dry_run_lists_and_sends_nothing(run, checkpoint):
    with fake_hub.FakeHub() as hub:
        words, environment = command(
            hub.url, run, "--repo", REPO, "--model", "mlp_only", "--checkpoint", checkpoint, "--base-model", "owner/tiny",
            "--dry-run", "--json",
        )  # fmt: skip
        ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 0, ended.stderr
        printed = json.loads(ended.stdout)
        assert hub.requests == []
    sizes = {f["path"]: f["size_bytes"] for f in printed["files"]}
    assert {k: v for k, v in sizes.items() if k != "README.md"} == {
        k: len(v) for k, v in contents(checkpoint).items()
    }
    assert printed["private"] is True and printed["size_bytes"] == sum(sizes.values())


def test_other_files_are_not_uploaded(run, checkpoint, tmp_path):
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    for name in (".env", "train.log", "optimizer.pt", "notes.txt", "id_rsa", "server.log"):
        (folder / name).write_text(f"TOKEN={SECRET}")
    (folder / "checkpoint-1").mkdir()
    plan = prepare(run, folder)
    assert {f.path for f in plan.files} == set(contents(checkpoint)) | {"README.md"}
    assert "train.log" in plan.left_out and "checkpoint-1" in plan.left_out
    assert SECRET not in "".join(
        p.read_text("latin-1") for p in plan.folder.rglob("*") if p.is_file()
    )
    more = {f.path for f in prepare(run, folder, with_report=True, with_records=True).files}
    assert {"evidence/records.jsonl", "evidence/inputs.json"} <= more and not any(
        "stream" in n for n in more
    )
    assert {f.path for f in prepare(run, folder).files} == {f.path for f in plan.files}, (
        "evidence is removed when it is no longer an option"
    )


@pytest.mark.parametrize("place", ["config.json", "header", "report.md"])
def test_a_secret_in_a_file_stops_everything(run, checkpoint, tmp_path, place):
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    if place == "config.json":
        config = json.loads((folder / place).read_text())
        (folder / place).write_text(json.dumps(config | {"token": SECRET}))
    elif place == "header":
        raw = (folder / "model.safetensors").read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length]) | {"__metadata__": {"token": SECRET}}
        text = json.dumps(header).encode()
        (folder / "model.safetensors").write_bytes(
            len(text).to_bytes(8, "little") + text + raw[8 + length :]
        )
    else:
        (run / place).write_text(f"Authorization: Bearer {SECRET}")
    with pytest.raises(UsageError, match=r"token|authorization"):
        prepare(run, folder, with_report=True, forced="I insist")


def test_failed_gates_refuse_unless_a_reason_is_given(run, checkpoint):
    plan = prepare(run, checkpoint, model="naive")
    assert any("50 of 120" in line for line in plan.objections) and plan.refused
    with fake_hub.FakeHub() as hub:
        with pytest.raises(UsageError, match="not published"):
            publishing.upload(plan, endpoint=hub.url, token="t" * 20)
        assert hub.requests == []
        forced = prepare(
            run, checkpoint, model="naive", forced="shows what naive quantization does"
        )
        publishing.upload(forced, endpoint=hub.url, token="t" * 20)
        assert b"shows what naive quantization does" in hub.committed[REPO]["README.md"]


def test_audit_faults_and_changed_figures_refuse(run, checkpoint, tmp_path):
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-1000])
    assert any(line.startswith("audit: ") for line in prepare(run, folder).objections)
    document = json.loads((run / "run.json").read_text())
    row = document["aggregates"]["served"]["mlp_only"]["gates"]["factual"]
    row["passes"] -= 1
    (run / "run.json").write_text(json.dumps(document))
    assert any("differ from the records" in line for line in prepare(run, checkpoint).objections)


def test_another_checkpoint_than_the_measured_one_is_refused_also_with_force(
    run, checkpoint, tmp_path
):
    """The card showed the other folder's hash next to the good one's gates."""
    other = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    settings = json.loads((other / "generation_config.json").read_text())
    (other / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": [3]}))
    offline = json.loads((run / "run.json").read_text())["aggregates"]["offline"]["mlp_only"]
    for recorded in ("run.json", "eval/mlp_only.json"):
        report_fixture.record_hash(run, "mlp_only", checkpoint if recorded == "run.json" else other)
        evaluated = checkpoint if recorded == "eval/mlp_only.json" else None
        report_fixture.write_evaluation(run / "eval/mlp_only.json", offline, evaluated)
        with pytest.raises(
            UsageError, match=f"is not the checkpoint that was measured: .*{recorded}"
        ) as caught:
            publishing.prepare(
                run,
                REPO,
                model="mlp_only",
                checkpoint=other,
                base_model="owner/tiny",
                forced="I know",
            )
        assert "\n" not in caught.value.message
        assert not (run / "publish").exists()


def test_a_checkpoint_of_which_no_hash_is_on_record_is_an_objection(
    whole_run, checkpoint, tmp_path
):
    folder = Path(shutil.copytree(whole_run, tmp_path / "run"))
    plan = publishing.prepare(
        folder, REPO, model="mlp_only", checkpoint=checkpoint, base_model="owner/tiny"
    )
    assert (
        len(plan.objections) == 1
        and "does not record the SHA-256" in plan.objections[0]
        and plan.refused
    )


def test_the_audit_compares_with_the_source_where_the_evaluation_names_it(
    run, checkpoint, tmp_path
):
    """A temperature that the source does not have is a fault that only a comparison with the source shows."""
    source = Path(shutil.copytree(report_fixture.TINY, tmp_path / "source"))
    changed = Path(shutil.copytree(checkpoint, tmp_path / "changed"))
    settings = json.loads((changed / "generation_config.json").read_text())
    (changed / "generation_config.json").write_text(json.dumps(settings | {"temperature": 5.0}))
    offline = json.loads((run / "run.json").read_text())["aggregates"]["offline"]["mlp_only"]
    origin = {"reference": str(source), "reference_sha256": report_fixture.model_sha256(source)}
    report_fixture.write_evaluation(run / "eval/mlp_only.json", offline, changed, **origin)
    plan = prepare(run, changed)
    assert len(plan.objections) == 1 and "temperature is 5.0" in plan.objections[0]
    (source / "generation_config.json").unlink()  # not the source any more
    plan = prepare(run, changed)
    assert plan.objections == [] and "without its source" in plan.card


def edit(path: Path, *keys, value) -> None:
    """Change one value of a JSON document by hand."""
    document = json.loads(path.read_text())
    part = document
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    path.write_text(json.dumps(document))


EDITS = {
    "passes of a gate": ("eval", ("numerics", "w4a4", "gates", "tool_call", "passes"), 120),
    "outcomes of a gate": ("eval", ("numerics", "w4a4", "outcomes", "tool_call"), "1" * 120),
    "the verdict": ("eval", ("verdict", "verdict"), "loses"),
    "the sentence": ("eval", ("verdict", "sentence"), "Keeps every gate under w4a4."),
    "the checkpoint's hash": ("eval", ("reference_sha256",), "0" * 64),
    "an export that is not broken any more": ("eval", ("blocking",), ["nothing"]),
    "passes in run.json": (
        "run",
        ("aggregates", "offline", "naive", "w4a4", "gates", "tool_call", "passes"),
        120,
    ),
    "a digest that is not there": ("eval", ("evidence_sha256",), ""),
}


def test_without_an_edit_every_evaluation_holds(run, checkpoint):
    assert not any(
        "does not hold" in line for line in prepare(run, checkpoint, model="naive").objections
    )


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_by_hand_is_an_objection_and_a_line_of_the_report(run, checkpoint, name):
    """Outcomes were in the file and nobody counted them again."""
    from annie_quant import report

    file, keys, value = EDITS[name]
    edit(run / ("run.json" if file == "run" else "eval/naive.json"), *keys, value=value)
    lines = [
        line
        for line in prepare(run, checkpoint, model="naive").objections
        if "does not hold" in line
    ]
    assert (
        len(lines) == 1
        and lines[0].startswith("eval/naive.json does not hold: ")
        and "\n" not in lines[0]
    )
    text = report.compose(run)["report.md"]
    assert text.count("eval/naive.json does not hold") == 1


def test_an_evaluation_that_is_gone_is_an_objection(run, checkpoint):
    (run / "eval/mlp_only.json").unlink()
    assert ["eval/mlp_only.json" in line for line in prepare(run, checkpoint).objections] == [True]


def test_a_broken_export_is_not_published(run, checkpoint):
    offline = json.loads((run / "run.json").read_text())["aggregates"]["offline"]["mlp_only"]
    reason = "BROKEN EXPORT: its codes are shuffled"
    report_fixture.write_evaluation(
        run / "eval/mlp_only.json", offline, checkpoint, blocking=[reason]
    )
    assert prepare(run, checkpoint).objections == [reason]


def test_a_model_without_gates_is_refused(run, checkpoint):
    document = json.loads((run / "run.json").read_text())
    del document["aggregates"]["offline"]["mlp_only"], document["aggregates"]["served"]["mlp_only"]
    (run / "run.json").write_text(json.dumps(document))
    (run / "eval" / "mlp_only.json").unlink()
    assert prepare(run, checkpoint).objections == ["no gate was measured for this model"]


def test_a_public_repository_is_not_filled_by_mistake(run, checkpoint):
    with fake_hub.FakeHub() as hub:
        hub.repos[REPO], hub.committed[REPO] = {"private": False}, {}
        with pytest.raises(UsageError, match="public"):
            publishing.upload(prepare(run, checkpoint), endpoint=hub.url, token="t" * 20)
        assert hub.committed[REPO] == {}
        publishing.upload(prepare(run, checkpoint, private=False), endpoint=hub.url, token="t" * 20)
        assert "model.safetensors" in hub.committed[REPO]


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_of_the_hub_is_one_clear_line(run, checkpoint, status):
    with fake_hub.FakeHub() as hub:
        hub.status = status
        with pytest.raises((ServerError, UsageError), match=r"Hub refused|upload failed"):
            publishing.upload(prepare(run, checkpoint), endpoint=hub.url, token="t" * 20)


def test_a_missing_token_is_reported_before_any_request(run, checkpoint, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with fake_hub.FakeHub() as hub:
        with pytest.raises(EnvironmentFault, match="token"):
            publishing.upload(prepare(run, checkpoint), endpoint=hub.url)
        assert hub.requests == []


def test_what_the_hub_lost_is_noticed(run, checkpoint):
    """Negative control for the check after the upload."""
    plan = prepare(run, checkpoint)
    with fake_hub.FakeHub() as hub:
        publishing.upload(plan, endpoint=hub.url, token="t" * 20)
        hub.committed[REPO]["config.json"] = b"{}"
        with pytest.raises(ServerError, match=r"lacks config\.json"):
            publishing.upload(plan, endpoint=hub.url, token="t" * 20)
        publishing.upload(plan, endpoint=hub.url, token="t" * 20)
        assert hub.committed[REPO]["config.json"] == (checkpoint / "config.json").read_bytes()


def test_what_a_search_chose_is_published_from_its_folder(whole_run, checkpoint, tmp_path):
    """A search leaves evaluations, models and search.json; no server was measured."""
    offline = json.loads((whole_run / "run.json").read_text())["aggregates"]["offline"]
    (tmp_path / "eval").mkdir()
    for name in ("naive", "mlp_only"):
        shutil.copytree(checkpoint, tmp_path / "models" / name)
        report_fixture.write_evaluation(tmp_path / f"eval/{name}.json", offline[name], checkpoint)
    rows = [{"strategy": "naive"}, {"strategy": "mlp_only"}]
    (tmp_path / "search.json").write_text(json.dumps({"chosen": "mlp_only", "strategies": rows}))
    plan = publishing.prepare(tmp_path, REPO, base_model="owner/tiny")
    assert not plan.objections and plan.folder.is_dir() and "speed is unknown" in plan.card
    (tmp_path / "search.json").write_text(json.dumps({"chosen": None, "strategies": rows}))
    with pytest.raises(UsageError, match="no candidate is named among"):
        publishing.prepare(tmp_path, REPO, base_model="owner/tiny")


def test_a_benchmark_and_an_evaluation_are_one_model(whole_run, checkpoint, tmp_path):
    """As the how-to has it: eval --output RUN/eval/BACKEND.json, then bench --output RUN, then publish."""
    document = json.loads((whole_run / "run.json").read_text())
    aggregates = document["aggregates"]
    report_fixture.write_evaluation(
        tmp_path / "eval/nvfp4.json", aggregates["offline"]["mlp_only"], checkpoint
    )
    aggregates["served"] = {"nvfp4": aggregates["served"]["mlp_only"] | {"model": "mine-NVFP4"}}
    aggregates |= {"models": [], "offline": {}, "comparisons": []}
    document["verdict"] |= {"candidate": "nvfp4", "incumbent": None}
    (tmp_path / "run.json").write_text(json.dumps(document))
    plan = publishing.prepare(tmp_path, REPO, checkpoint=checkpoint, base_model="owner/tiny")
    assert not plan.objections
    assert {"W4A4 offline", "W4A16 offline", "llama.cpp served"} <= set(
        re.findall(r"workloads, ([^\n]+)", plan.card)
    )
