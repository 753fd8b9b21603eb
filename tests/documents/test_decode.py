"""Decoding documents: one line for every fault, upgrades of older versions, limits, and current JSON Schemas."""

from __future__ import annotations

import importlib.util
import json
import math

import jsonschema
import msgspec
import pytest
from paths import DATA, ROOT, TINY_ANNIE

from annie_quant import checkpoint, documents, quantize
from annie_quant.core import files
from annie_quant.core.errors import EnvironmentFault, UsageError
from annie_quant.documents import (
    Bench,
    Identity,
    Inputs,
    Run,
    WorkloadSummary,
    decode,
    limited_identity,
)
from annie_quant.documents.records import RECORD_GROUPS
from annie_quant.judge.metrics import METRICS

RUNS = sorted((DATA / "runs").iterdir())


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b"[1]", "expected object, got array"),
        (b"3", "expected object, got int"),
        (b"", "not JSON: input data was truncated"),
        (b'{"argv"', "not JSON: input data was truncated"),
        (b'{"argv":\n [],\n bad}', "not JSON: object keys must be strings in line 3"),
        (b"\xff\xfe", "not JSON"),
        (b'{"argv": [1]}', "argv[0]: expected str, got int"),
        (b'{"stages": [{"seconds": 1}]}', "stages[0]: object missing required field 'name'"),
        (
            b'{"aggregates": {"served": {"a": {"errors": "x"}}}}',
            "aggregates.served[...].errors: expected int, got str",
        ),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"config":' * 200_000, "nested too deeply"),
        (b'{"schema_version": 99}', "was written by a newer annie-quant"),
    ],
)
def test_every_fault_is_one_line_that_names_the_field(text, fault):
    with pytest.raises(EnvironmentFault) as caught:
        decode(Run, text, "some/run.json")
    message = caught.value.message
    assert message.startswith("some/run.json") and fault in message and "\n" not in message


def test_the_class_of_the_error_can_be_chosen_and_a_missing_file_is_named(tmp_path):
    with pytest.raises(UsageError, match="cannot be read: No such file") as caught:
        decode(Run, tmp_path / "none.json", error=UsageError, hint="annie-quant demo")
    assert "none.json" in caught.value.message and caught.value.hint == "annie-quant demo"


def test_a_types_own_check_names_the_file():
    with pytest.raises(
        EnvironmentFault, match=r"inputs.json: concurrency must be 1 or more, got 0"
    ):
        decode(Inputs, b'{"config": {"loads": [{"concurrency": 0}]}}', "inputs.json")


@pytest.mark.parametrize("folder", RUNS, ids=lambda p: p.name)
def test_runs_of_every_version_are_read(folder):
    run, bench = decode(Run, folder / "run.json"), documents.read_bench(folder)
    assert run.schema_version == bench.schema_version == documents.SCHEMA_VERSION
    assert run.aggregates == bench.aggregates and run.verdict == bench.verdict
    assert bench.aggregates.served["a"].gates["factual"].passes == 3
    assert decode(Inputs, folder / "inputs.json").config == bench.config


def test_aggregates_are_stored_once(tmp_path):
    bench = documents.read_bench(RUNS[0])
    documents.write(tmp_path / "bench.json", bench)
    assert documents.read_bench(tmp_path) == bench
    documents.write_run(tmp_path, Run(aggregates=bench.aggregates, verdict=bench.verdict))
    stored = json.loads((tmp_path / "bench.json").read_text())
    assert "aggregates" not in stored and "verdict" not in stored and stored["backends"]
    assert documents.read_bench(tmp_path) == bench


def test_what_a_server_reports_is_limited():
    """Long texts are cut, values of another type are left out."""
    hostile = {
        "name": "a",
        "model": "m" * 10_000,
        "version": {"x": 1},
        "model_meta": {"n_params": 9e9, "n_vocab": "many", "junk": ["x"] * 1000},
        "sampling_defaults": {f"k{i}": "v" * 5000 for i in range(1000)},
        "meta": {"source": ["x"], "pid": 3},
    }
    identity = limited_identity(hostile)
    assert (
        len(identity.model) == 200
        and identity.version is None
        and identity.model_meta.n_params == 9e9
    )
    assert identity.model_meta.n_vocab is None and len(identity.sampling_defaults) == 100
    assert decode(Identity, documents.encode(identity)) == identity
    with pytest.raises(EnvironmentFault, match=r"model: expected str of length <= 200"):
        decode(Identity, json.dumps({"name": "a", "model": "m" * 201}).encode(), "x")


def test_unknown_fields_are_ignored():
    record = documents.decode_record(
        b'{"id": "1", "backend": "a", "workload": "w", "case": "c", "new": [1]}', "x"
    )
    assert record.prompt == ("w", "c", 0)


@pytest.mark.parametrize("folder", RUNS, ids=lambda folder: folder.name)
def test_stored_records_are_read_into_groups_and_written_flat(folder):
    """records.jsonl of 0.1 and 0.2 has the fields of all groups next to each other, and so have new lines."""
    lines = (folder / "records.jsonl").read_bytes().splitlines()
    for line in lines:
        stored, record = json.loads(line), documents.decode_record(line, "x")
        written = json.loads(documents.encode_record(record))
        assert {name: written[name] for name in stored if name in written} == {
            name: value for name, value in stored.items() if name in written
        }
        assert record.timings.e2e_ms == stored["e2e_ms"] and record.answer.text == stored["text"]
        assert (
            record.tokens.usage == stored["usage"] and record.judgement.checks == stored["checks"]
        )
        assert documents.salvage_record(line) == record
    assert lines


def test_a_field_of_a_record_is_in_one_group():
    groups = [set(kind.__struct_fields__) for kind in RECORD_GROUPS.values()]
    own = set(documents.RequestRecord.__struct_fields__) - set(RECORD_GROUPS)
    assert len(own) + sum(map(len, groups)) == len(own.union(*groups))


def test_each_metric_has_a_field_in_a_summary():
    assert set(METRICS) == set(WorkloadSummary.__struct_fields__) - {"n"}


GATE = documents.GateResult(passes=2, n=3, low=0.2, high=0.94, threshold=0.9)
NUMERICS = documents.NumericsResult(
    gates={"factual": GATE}, kl=None, kl_conversations=None, kl_text=None, perplexity=None, perplexity_reference=None,
    same_answers=documents.SameAnswers(3, 2), verbosity_ratio=1.0, paired={"factual": documents.PairedGate(3, 1, 0, 1.0)},
    cases=[], seconds=1.0,
)  # fmt: skip
EXAMPLES = {
    "evaluation": documents.Evaluation(
        schema_version=documents.SCHEMA_VERSION, version="0", model="m", reference="r", reference_sha256="", dtype="bfloat16",
        device="cpu", workloads={"factual": documents.EvaluatedWorkload("", 3)}, n_answers=3, n_conversation_answers=0,
        n_text_tokens=0, notes=[], reference_gates={"factual": GATE}, numerics={"w4a4": NUMERICS}, seconds=2.0,
    ),
    "sensitivity": documents.Sensitivity(
        model="m", numerics="w4a4", key=documents.SensitivityKey("", "", "w4a4", [5]),
        alone={"layers.0.mlp": documents.LayerDivergence(0.01, 0.2, 0.99, 1, 100)},
    ),
    "search": documents.SearchResult(
        chosen=None, stopped="bf16 fails", required=["w4a4"], command="", where="", n=3, notes=[],
        reference={"factual": GATE}, strategies=[], seconds=1.0,
    ),
}  # fmt: skip


FIGURES = documents.KLSummary(
    *([3] + [float("nan")] * 5), 2, float("inf"), *([float("nan")] * 6)
)  # of a broken model
BROKEN = msgspec.structs.replace(
    EXAMPLES["evaluation"],
    numerics={"w4a4": msgspec.structs.replace(NUMERICS, kl=FIGURES, perplexity=float("nan"))},
)


def test_figures_that_are_not_numbers_are_null_in_json_and_nan_in_python(tmp_path):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    for write in (files.write_json, documents.write):
        write(tmp_path / "x.json", BROKEN.to_dict() if write is files.write_json else BROKEN)
        document = json.loads((tmp_path / "x.json").read_text(), parse_constant=refuse)
        assert (
            document["numerics"]["w4a4"]["kl"]["mean"] is None
            and document["numerics"]["w4a4"]["kl"]["n_tokens"] == 3
        )
        side = documents.Evaluation.load(tmp_path / "x.json").numerics["w4a4"]
        assert (
            math.isnan(side.kl.mean) and math.isnan(side.kl.flips_predicted) and side.kl.flips == 2
        )
        assert side.perplexity is None, "this figure may be missing"
    (tmp_path / "old.json").write_text(
        json.dumps(msgspec.to_builtins(BROKEN))
    )  # as version 0.2.0 wrote it
    assert "NaN" in (tmp_path / "old.json").read_text()
    assert math.isnan(documents.Evaluation.load(tmp_path / "old.json").numerics["w4a4"].kl.mean)
    search = msgspec.structs.replace(EXAMPLES["search"], seconds=float("nan"))
    files.write_json(tmp_path / "search.json", msgspec.to_builtins(search))
    json.loads((tmp_path / "search.json").read_text(), parse_constant=refuse)
    assert math.isnan(decode(documents.SearchResult, tmp_path / "search.json").seconds)


def test_null_for_what_is_not_a_number_is_still_refused():
    document = documents.encode(EXAMPLES["evaluation"]).replace(
        b'"n_answers":3', b'"n_answers":null'
    )
    with pytest.raises(EnvironmentFault, match="n_answers: expected int, got null"):
        decode(documents.Evaluation, document, "x.json")


@pytest.mark.parametrize("kind", [Run, Bench, documents.Evaluation, documents.SearchResult])
def test_one_version_rule_for_runs_evaluations_and_searches(kind):
    example = {
        documents.Evaluation: EXAMPLES["evaluation"],
        documents.SearchResult: EXAMPLES["search"],
    }.get(kind) or kind()
    document = msgspec.to_builtins(example)
    assert document["schema_version"] == documents.SCHEMA_VERSION
    for older in ({"schema_version": 1}, {}):
        rest = (
            {k: v for k, v in document.items() if k != "schema_version"} if not older else document
        )
        assert (
            decode(kind, json.dumps(rest | older).encode()).schema_version
            == documents.SCHEMA_VERSION
        )
    newer = document | {
        "schema_version": documents.SCHEMA_VERSION + 1,
        "version": "0.9.1",
        "unknown": 1,
    }
    with pytest.raises(
        EnvironmentFault, match=r"x\.json was written by a newer annie-quant"
    ) as caught:
        decode(kind, json.dumps(newer).encode(), "x.json")
    assert caught.value.hint == "pip install --upgrade 'annie-quant>=0.9.1'"
    with pytest.raises(EnvironmentFault) as caught:
        decode(kind, json.dumps(newer | {"version": "1; rm -rf"}).encode(), "x.json")
    assert caught.value.hint == "pip install --upgrade annie-quant", (
        "text of the file is not a command"
    )


def test_the_json_schemas_are_current_and_hold(tmp_path):
    quantize.run("direct", TINY_ANNIE, tmp_path / "out")
    spec = importlib.util.spec_from_file_location("make_schemas", ROOT / "tools/make_schemas.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = ROOT / "docs/reference/schemas"
    assert {p.name: p.read_text() for p in folder.iterdir()} == module.texts(), (
        "run python tools/make_schemas.py"
    )
    for name, kind in module.DOCUMENTS.items():
        checker = jsonschema.Draft202012Validator(json.loads(module.texts()[f"{name}.json"]))
        if name == "record":
            texts = (RUNS[-1] / "records.jsonl").read_text().splitlines()
        elif name == "workload":
            texts = [
                path.read_text() for path in (ROOT / "annie_quant/assets/workloads").glob("*.json")
            ]
        elif name == "audit":
            texts = [
                json.dumps(checkpoint.audit(f, source=TINY_ANNIE).to_dict())
                for f in (TINY_ANNIE, tmp_path / "out")
            ]
        elif name == "recipe":
            texts = [(tmp_path / "out" / documents.RECIPE_FILE).read_text()]
        elif name in EXAMPLES:
            texts = [documents.encode(EXAMPLES[name]).decode()]
        else:
            texts = [(RUNS[-1] / f"{name}.json").read_text()]
        for text in texts:
            checker.validate(json.loads(text))
            assert msgspec.json.decode(documents.encode(decode(kind, text.encode())))


def test_one_bad_entry_does_not_remove_the_others():
    """Also of a list with limits; one that is too long is left out, as before."""
    identity = documents.salvage_value(
        documents.Identity, {"name": "a", "caveats": ["no /props", 5, "x" * 201]}
    )
    assert identity.caveats == ["no /props"]
    assert (
        documents.salvage_value(documents.Identity, {"name": "a", "caveats": ["x"] * 21}).caveats
        == []
    )
