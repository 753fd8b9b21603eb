"""The audit from afar, against servers that speak the Hub's API or offer plain folders.

Expected are the findings of the local audit of the same folder without those that only values show.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import checkpoint_zoo as zoo
import expert_zoo
import pytest
from checkpoint_faults import FAULTS, GATE
from command_line import CliRunner
from folder_hub import FolderHub

pytest.importorskip("huggingface_hub", reason="huggingface_hub reads from the Hub")
pytest.importorskip("annie_quant.nvfp4", reason="the C codec is not built")

import huggingface_hub.constants
import sparse_checkpoints

import annie_quant as aq
from annie_quant.checkpoint import ShardError, remote
from annie_quant.checkpoint.checks import OF_SOURCE_VALUES, OF_VALUES
from annie_quant.checkpoint.shards import INDEX, ModelFolder, ValuesUnread
from annie_quant.cli import app as cli
from annie_quant.core.errors import (
    CheckpointError,
    EnvironmentFault,
    ServerError,
    UsageError,
)
from annie_quant.documents import Audit, Finding

NAME = "model.safetensors"
TOKEN = "hf_" + "a" * 34


@pytest.fixture(scope="module")
def server() -> Iterator[FolderHub]:
    with FolderHub() as hub:
        yield hub


@pytest.fixture
def hub(server, monkeypatch) -> FolderHub:
    """The server as the Hub of this process, without a token and with short waits."""
    template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.utils._headers.get_token", lambda: None)
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.01)
    servers = server.servers
    server.__init__()
    server.servers = servers
    return server


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> tuple[Path, Path]:
    return zoo.source_and_nvfp4(tmp_path_factory.mktemp("checkpoints"))


def weightless(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.code not in OF_VALUES | OF_SOURCE_VALUES]


def same_from_afar(hub: FolderHub, folder: Path, source: Path | None = None) -> Audit:
    """Audit a folder here and from afar, and compare."""
    hub.add("me/bad", folder)
    here = aq.checkpoint.audit(folder, source=source)
    there = aq.checkpoint.audit("hf:me/bad", source=source)
    # Messages about the folder itself name it by its path or address
    expected = [
        Finding(f.code, f.tensor, f.message.replace(str(folder), there.path))
        for f in weightless(here.findings)
    ]
    assert there.findings == expected
    assert [(row.name, row.format, row.shape) for row in there.tensors] == [
        (row.name, row.format, row.shape) for row in here.tensors
    ]
    if not here.findings:
        assert there.summary == here.summary
    return there


@pytest.mark.parametrize("fault", FAULTS)
def test_the_findings_are_those_of_the_local_audit_without_values(
    hub, checkpoints, tmp_path, fault
):
    change, code, _ = FAULTS[fault]
    audit = same_from_afar(hub, zoo.spoil(checkpoints[1], tmp_path / "bad", change))
    assert (code in {f.code for f in audit.findings}) == (code not in OF_VALUES)
    assert code in audit.remote.not_checked or code not in OF_VALUES


@pytest.mark.parametrize("fault", expert_zoo.FAULTS)
def test_the_same_for_a_mixture_of_experts(hub, tmp_path_factory, tmp_path, fault):
    home = tmp_path_factory.mktemp("experts")
    sound = expert_zoo.nvfp4(home / "nvfp4", expert_zoo.per_expert(home / "bf16"))
    same_from_afar(hub, zoo.spoil(sound, tmp_path / "bad", expert_zoo.FAULTS[fault][0]))


def cut(folder: Path) -> None:
    with (folder / NAME).open("r+b") as file:
        file.truncate((folder / NAME).stat().st_size - 1000)


def pointer(folder: Path) -> None:
    (folder / NAME).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


def foreign_index(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x.weight": "other.safetensors"}}))


FILE_FAULTS = {
    "truncated": (cut, "shard_truncated"),
    "a git-lfs pointer": (pointer, "lfs_pointer"),
    "not safetensors": (lambda f: (f / NAME).write_bytes(b"PK" * 500), "not_safetensors"),
    "an empty shard": (lambda f: (f / NAME).write_bytes(b""), "not_safetensors"),
    "a header beyond the file": (
        lambda f: (f / NAME).write_bytes((10**6).to_bytes(8, "little") + b"{" * 500),
        "shard_truncated",
    ),
    "no weights": (lambda f: (f / NAME).unlink(), "no_weights"),
    "a missing shard": (foreign_index, "shard_missing"),
    "pickled weights": (lambda f: (f / NAME).rename(f / "pytorch_model.bin"), "no_weights"),
    "a shard of five": (
        lambda f: (f / NAME).rename(f / "model-00002-of-00005.safetensors"),
        "shard_missing",
    ),
    "no config.json": (lambda f: (f / "config.json").unlink(), "config_missing"),
    "config.json is a list": (lambda f: (f / "config.json").write_text("[]"), "config_unreadable"),
    "an index of another model": (
        lambda f: (f / INDEX).write_text(json.dumps({"weight_map": {"x": NAME}})),
        "tensor_missing",
    ),
    "a shard in a folder": (
        lambda f: (f / INDEX).write_text(json.dumps({"weight_map": {"x": f"../{NAME}"}})),
        "path_escapes",
    ),
    "a second copy": (lambda f: shutil.copy(f / NAME, f / "z.safetensors"), "file_unread"),
    "a token beyond the embedding": (
        lambda f: (f / "added_tokens.json").write_text('{"<new>": 9999}'),
        "vocab_size",
    ),
}


@pytest.mark.parametrize("place", ["hub", "folder", "folder without a page"])
@pytest.mark.parametrize("fault", FILE_FAULTS)
def test_faults_of_files_are_the_same(hub, checkpoints, tmp_path, fault, place):
    change, code = FILE_FAULTS[fault]
    bad = tmp_path / "bad"
    shutil.copytree(checkpoints[1], bad)
    change(bad)
    here = aq.checkpoint.audit(bad)
    assert code in {f.code for f in here.findings}
    if place == "hub":
        same_from_afar(hub, bad)
        return
    hub.folders["bad"] = bad
    hub.lists = place == "folder"
    there = aq.checkpoint.audit(f"{hub.store_url}/folder/bad")
    unseen = ("pickled weights", "a shard of five", "a second copy")  # where no page lists files
    if hub.lists or fault not in unseen:
        texts = [f.message.replace(str(bad), there.path) for f in weightless(here.findings)]
        assert [f.message for f in there.findings] == texts


def test_the_source_is_compared_as_far_as_headers_and_small_files_go(hub, checkpoints, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(checkpoints[0], source)
    config = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "<other>"}))

    def change(t: dict, c: dict) -> None:
        t["model.norm.weight"] = t["model.norm.weight"][:100]
        t["model.layers.0.input_layernorm.weight"] *= 3  # a value, which is not seen

    bad = zoo.spoil(checkpoints[1], tmp_path / "bad", change)
    audit = same_from_afar(hub, bad, source)
    codes = {f.code for f in audit.findings}
    assert {"source_shape", "end_tokens_differ"} <= codes
    assert set(audit.remote.not_checked) == OF_VALUES | OF_SOURCE_VALUES
    hub.add("me/source", source)
    assert aq.checkpoint.audit("hf:me/bad", source="hf:me/source").findings == audit.findings
    with pytest.raises(UsageError, match="compared by its values") as caught:
        aq.checkpoint.audit(bad, source="hf:me/source")
    assert "download" in caught.value.hint


def test_a_published_size_transfers_little_and_no_weights(hub, tmp_path):
    """Counted at the server: a 27B of 22 GB in NVFP4 and FP8, whose files are sparse."""
    folder = sparse_checkpoints.published("nvidia/Qwen3.6-27B-NVFP4", tmp_path / "27b")
    hub.add("nvidia/27b", folder)
    audit = aq.checkpoint.audit("hf:nvidia/27b")
    assert audit.ok and len(audit.tensors) > 1000
    total = sum(path.stat().st_size for path in folder.iterdir())
    sent = sum(hub.sent.values())
    assert audit.remote.size_bytes == total > 2e10
    assert sent == audit.remote.received_bytes < 0.01 * total
    weights = {path: n for path, n in hub.sent.items() if path.endswith(".safetensors")}
    assert len(weights) == len(list(folder.glob("*.safetensors")))
    # A shard's header, or the first bytes in which it was looked for
    for path, n in weights.items():
        file = folder / Path(path).name
        header = 8 + int.from_bytes(file.open("rb").read(8), "little")
        assert n == max(header, remote.FIRST_BYTES)


def test_a_server_without_ranges_is_not_read_to_the_end(hub, tmp_path):
    table = {"model.embed_tokens.weight": ("BF16", (250_000, 4096))}  # 2 GB
    folder = sparse_checkpoints.write(tmp_path / "big", table, {"model_type": "unknown"})
    hub.folders["big"] = folder
    hub.ranges = False
    audit = aq.checkpoint.audit(f"{hub.store_url}/folder/big")
    assert [row.shape for row in audit.tensors] == [[250_000, 4096]]
    shard = next(n for path, n in hub.sent.items() if path.endswith(".safetensors"))
    assert shard < 2e7  # what the sockets hold


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_failing_server_is_asked_again(hub, checkpoints, status):
    hub.add("me/model", checkpoints[1])
    hub.statuses = {NAME: [status, status], "config.json": [status], "me/model": [status]}
    assert aq.checkpoint.audit("hf:me/model").ok
    assert not any(hub.statuses.values())


def test_a_broken_answer_is_asked_for_again(hub, checkpoints):
    hub.add("me/model", checkpoints[1])
    hub.cuts.update({NAME: 2, "tokenizer.json": 1})
    assert aq.checkpoint.audit("hf:me/model").ok
    assert not any(hub.cuts.values())


def test_a_server_that_keeps_failing_is_named(hub, checkpoints):
    hub.add("me/model", checkpoints[1])
    hub.statuses = {NAME: [503] * 99}
    with pytest.raises(ServerError, match="hf:me/model: the server answers 503"):
        aq.checkpoint.audit("hf:me/model")
    assert sum(path.endswith(NAME) for path in hub.paths()) <= 2 * remote.ATTEMPTS


def test_what_is_not_there_is_not_asked_for_again(hub):
    with pytest.raises(CheckpointError, match="hf:me/nothing: no such repository"):
        aq.checkpoint.audit("hf:me/nothing")
    assert len(hub.paths()) == 1
    with pytest.raises(ShardError, match=r"no config\.json there"):
        aq.checkpoint.audit(f"{hub.store_url}/folder/nothing")


def test_a_revision_is_read_at_its_commit(hub, checkpoints, tmp_path):
    other = zoo.spoil(checkpoints[1], tmp_path / "other", lambda t, c: t.pop(f"{GATE}.weight"))
    old = hub.add("me/model", other)
    new = hub.add("me/model", checkpoints[1])
    assert aq.checkpoint.audit("hf:me/model").remote.commit == new
    audit = aq.checkpoint.audit(f"hf:me/model@{old}")
    assert "orphan_scale" in {f.code for f in audit.findings} and audit.remote.commit == old
    page = aq.checkpoint.audit(f"{hub.url}/me/model/tree/{old}")
    assert page.path == f"hf:me/model@{old}" and page.findings == audit.findings
    with pytest.raises(CheckpointError, match="no such revision"):
        aq.checkpoint.audit("hf:me/model@v9")


def test_a_commit_that_arrives_under_way_changes_nothing(hub, checkpoints, tmp_path):
    bad = zoo.spoil(checkpoints[1], tmp_path / "bad", lambda t, c: t.pop(f"{GATE}.weight"))
    first = hub.add("me/model", checkpoints[1])

    def push(path: str) -> None:
        if "/resolve/" in path and hub.heads["me/model"] == first:
            hub.add("me/model", bad)

    hub.before = push
    audit = aq.checkpoint.audit("hf:me/model")
    assert audit.ok and audit.remote.commit == first != hub.heads["me/model"]
    assert all(f"/{first}/" in path for path in hub.paths() if "/resolve/" in path)
    assert sum(path.startswith("/api/") for path in hub.paths()) == 1


def test_a_commit_that_goes_under_way_is_named(hub, checkpoints):
    hub.add("me/model", checkpoints[1])
    hub.before = lambda path: "/resolve/" in path and hub.commits["me/model"].clear()
    with pytest.raises(CheckpointError, match="no such revision, or no longer"):
        aq.checkpoint.audit("hf:me/model")


def test_a_file_that_changes_between_its_ranges_is_named(hub, tmp_path):
    table = {f"model.layers.{n}.x.weight": ("BF16", (1, 4)) for n in range(3000)}
    folder = sparse_checkpoints.write(tmp_path / "long", table, {"model_type": "unknown"})
    shard = next(folder.glob("*.safetensors"))
    hub.folders["long"] = folder

    def touch(path: str) -> None:
        if path.endswith(shard.name) and hub.paths().count(path) == 2:
            os.utime(shard, ns=(1, 1))

    hub.before = touch
    with pytest.raises(ServerError, match="changed while it was read"):
        aq.checkpoint.audit(f"{hub.store_url}/folder/long")
    hub.before = lambda path: None
    assert len(aq.checkpoint.audit(f"{hub.store_url}/folder/long").tensors) == 3000


@pytest.mark.parametrize("status", [401, 403])
def test_a_gated_repository_is_named(hub, checkpoints, status):
    hub.add("me/gated", checkpoints[1])
    hub.gated.add("me/gated")
    hub.gated_status = status
    with pytest.raises(CheckpointError, match="hf:me/gated: gated") as caught:
        aq.checkpoint.audit("hf:me/gated")
    assert "hf auth login" in caught.value.hint


def test_the_token_goes_to_the_hub_and_to_no_other_host(hub, checkpoints, monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._headers.get_token", lambda: TOKEN)
    hub.add("me/gated", checkpoints[1])
    hub.gated.add("me/gated")
    hub.folders["model"] = checkpoints[1]
    assert aq.checkpoint.audit("hf:me/gated").ok
    sent = {server: {key for s, _, key in hub.asked if s == server} for server in ("hub", "store")}
    assert sent == {"hub": {f"Bearer {TOKEN}"}, "store": {""}}
    assert aq.checkpoint.audit(f"{hub.store_url}/folder/model").ok
    assert all(TOKEN not in key for server, _, key in hub.asked if server == "store")


@pytest.mark.parametrize("name", ["../x.json", "/etc/x.json", "a\\b.json", "a/../../x.json"])
def test_a_name_outside_of_the_folder_is_refused(hub, checkpoints, monkeypatch, name):
    hub.add("me/model", checkpoints[1])
    info = huggingface_hub.hf_api.ModelInfo(
        id="me/model", sha="0" * 40, siblings=[{"rfilename": name, "size": 3}], tags=[]
    )
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *a, **k: info)
    with pytest.raises(ShardError, match="not the name of a file") as caught:
        aq.checkpoint.audit("hf:me/model")
    assert caught.value.code == "path_escapes"
    assert not hub.asked


def test_no_value_can_be_read_by_mistake(hub, checkpoints):
    hub.add("me/model", checkpoints[1])
    with remote.opened("hf:me/model") as place:
        folder = ModelFolder(place.path, headers_only=True)
        for read in (folder.tensor, folder.scalar):
            with pytest.raises(ValuesUnread):
                read(f"{GATE}.weight_scale_2")
        with pytest.raises(ValuesUnread):
            list(folder.pieces("lm_head.weight"))
        assert place.path.exists()
    assert not place.path.exists()


@pytest.mark.parametrize(
    ("address", "error", "text"),
    [
        ("hf:a b/c", UsageError, "not the name of a repository"),
        ("hf:", UsageError, "not the name of a repository"),
        ("http://user:pw@127.0.0.1:9/x", UsageError, "has a user, password or query"),
        ("https://127.0.0.1:9/x?key=1", UsageError, "has a user, password or query"),
        ("http://127.0.0.1:9/x", ServerError, "cannot be read"),
    ],
)
def test_an_address_that_cannot_be_read_is_one_line(hub, address, error, text):
    with pytest.raises(error, match=text) as caught:
        aq.checkpoint.audit(address)
    assert "pw" not in caught.value.message


def test_offline_mode_is_named(hub, checkpoints, monkeypatch):
    hub.add("me/model", checkpoints[1])
    monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: True)
    with pytest.raises(EnvironmentFault, match="HF_HUB_OFFLINE"):
        aq.checkpoint.audit("hf:me/model")


def test_the_command_says_what_it_did_not_check(hub, checkpoints, tmp_path):
    hub.add("me/model", checkpoints[1])
    sound = CliRunner().invoke(cli, ["audit", "hf:me/model"])
    assert sound.exit_code == 0, sound.output
    output = " ".join(sound.output.split())
    commit = hub.heads["me/model"]
    assert "sound, as far as the headers show" in output and "18 codes such as" in output
    assert f"hf download me/model --revision {commit} --local-dir DIR" in output
    bad = zoo.spoil(checkpoints[1], tmp_path / "bad", lambda t, c: t.pop(f"{GATE}.weight"))
    hub.folders["bad"] = bad
    broken = CliRunner().invoke(cli, ["audit", f"{hub.store_url}/folder/bad", "--json"])
    result = json.loads(broken.stdout)
    assert broken.exit_code == 1 and not result["ok"] and "nan" in str(result["remote"])
    refused = CliRunner().invoke(cli, ["audit", "hf:me/model", "--repair"])
    assert isinstance(refused.exception, UsageError)
    assert "a repair needs the weights" in refused.exception.message


def test_hf_endpoint_names_another_hub(hub, checkpoints):
    hub.add("me/model", checkpoints[1])
    command = [sys.executable, "-m", "annie_quant", "audit", "hf:me/model", "--json"]
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": home, "HF_TOKEN": TOKEN}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["path"] == f"hf:me/model@{hub.heads['me/model']}"
    asked = [row for row in hub.asked if row[0] == "hub" and "me/model" in row[1]]
    assert len(asked) > 3 and {key for _, _, key in asked} == {f"Bearer {TOKEN}"}
