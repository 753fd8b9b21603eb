"""Attacks whose verdict was "keeps every gate" with exit code 0: none of them keeps."""

from __future__ import annotations

import json

import pytest
from bench_cases import TOOLS, ask, workload
from command_line import CliRunner
from fake_server import FakeServer, Script, words
from stream_server import RawServer

from annie_quant import bench, documents, judge
from annie_quant.bench import reference_answers
from annie_quant.cli import app as cli
from annie_quant.core.errors import UsageError
from annie_quant.documents import Aggregates, MemoryBytes, Roles, ServedSide
from annie_quant.judge.pairing import checks_by_prompt

N = 60


def calls(n=N, text="Find note {}", **more):
    cases = [
        {"id": f"c{i}", "messages": ask(text.format(i)), "expect": {"tool": "search_memory"}}
        for i in range(n)
    ]
    return workload("calls", cases, tools=TOOLS, gates=["tool_call", "non_empty"], **more)


def right(body):
    return Script(tools=[("search_memory", '{"query": "note"}')])


def silent(body):
    return words("I cannot do that.")


def after_smoke(answer):
    """Return a model that answers the smoke question, and all others by `answer`."""
    return lambda body: words("It is Tokyo.") if "Japan" in str(body["messages"]) else answer(body)


broken = after_smoke(lambda body: Script(status=500, error="out of memory"))
moved = after_smoke(lambda body: Script(status=302, error="moved"))


def number(body):
    last = body["messages"][-1]["content"].split()[-1]
    return int(last) if last.isdigit() else 1  # 1: of the smoke question


def measure(folder, a, b, cases=None, **more):
    """Measure a candidate and a bf16 reference, all prompts at once: a third of the processor time of one after the other."""
    roles = {"candidate": "a", "reference": "b"} | more.pop("roles", {})
    with FakeServer(a) as left, FakeServer(b) as right_:
        sides = [bench.Backend("a", left.url), bench.Backend("b", right_.url)]
        settings = {"warmup": 0, "runs": 1, "concurrency": N, "with_memory": False} | roles | more
        return bench.run(sides, [cases or calls()], folder, **settings)


def not_kept(verdict):
    return (
        verdict.outcome != "keeps"
        and not verdict.passed
        and "keeps every gate" not in verdict.sentence
    )


# ---- row 1


def test_two_servers_that_answer_nothing_keep_nothing(tmp_path):
    done = measure(tmp_path, broken, broken)
    assert done.aggregates.served["a"].errors == N
    assert not_kept(done.verdict) and "no answers" in done.verdict.sentence


def test_the_exit_code_of_two_broken_servers(tmp_path):
    (tmp_path / "w.json").write_text(
        json.dumps(
            {
                "name": "w",
                "max_tokens": 20,
                "gates": ["non_empty"],
                "cases": [{"id": "a", "messages": ask("Hi")}],
            }
        )
    )
    with FakeServer(broken) as a, FakeServer(broken) as b:
        words_ = [
            "bench",
            "--backend-a",
            "a",
            a.url,
            "--backend-b",
            "b",
            b.url,
            "--runs",
            "1",
            "--warmup",
            "0",
        ]
        done = CliRunner().invoke(
            cli,
            [
                *words_,
                "--workloads",
                str(tmp_path / "w.json"),
                "--output",
                str(tmp_path / "r"),
                "--json",
            ],
        )
    assert done.exit_code == 1 and json.loads(done.stdout)["outcome"] != "keeps"


# ---- row 6: incomplete answers


@pytest.mark.parametrize("finish", ["length", None])
def test_an_answer_that_is_cut_fails_each_gate(tmp_path, finish):
    """Ten in sixty answers are cut, or have no finish reason; what arrived of them looks right."""

    def respond(connection, request):
        if not request.startswith(b"POST"):
            body = b'{"data": [{"id": "m"}]}'
            connection.sendall(
                b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
            )
            return
        text = json.loads(request.partition(b"\r\n\r\n")[2])["messages"][-1]["content"]
        reason = finish if text.startswith("Say") and int(text.split()[-1]) < 10 else "stop"
        choice = {"index": 0, "delta": {"content": "A plain sentence."}, "finish_reason": reason}
        body = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\ndata: [DONE]\n\n"
        head = (
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n"
            % len(body)
        )
        connection.sendall(head + body)

    cases = [{"id": f"c{i}", "messages": ask(f"Say {i}")} for i in range(N)]
    gates = ["no_markdown", "non_empty", "repetition", "stop"]
    with RawServer(respond) as cut, FakeServer(lambda body: words("A plain sentence.")) as whole:
        sides = [bench.Backend("a", f"http://127.0.0.1:{cut.port}"), bench.Backend("b", whole.url)]
        done = bench.run(
            sides,
            [workload("say", cases, gates=gates)],
            tmp_path,
            warmup=0,
            runs=1,
            with_memory=False,
            reference="b",
        )
    side = done.aggregates.served["a"]
    assert {gate: (row.passes, row.n) for gate, row in side.gates.items()} == dict.fromkeys(
        sorted(gates), (50, 60)
    )
    assert {gate: pair.lost for gate, pair in side.paired.items()} == dict.fromkeys(gates, 10)
    assert done.verdict.outcome == "loses"


def test_a_cut_answer_is_not_a_reference():
    """What bf16 was cut in is not a property to keep, and a cut answer fails what bf16's complete answer has."""
    from bench_cases import row

    one = workload(
        "talk",
        [{"id": "a", "messages": ask("x")}, {"id": "b", "messages": ask("y")}],
        gates=["same_markdown"],
    )
    fields = {"workload": "talk", "text": "Plain words."}
    cut = {**fields, "finish_reason": "length"}
    rows = [
        row("bf16", case="a", **cut),
        row("q", case="a", **fields),
        row("bf16", case="b", **fields),
        row("q", case="b", **cut),
    ]
    reference_answers.mark(rows, [one], [r for r in rows if r.backend == "bf16"])
    assert [r.judgement.checks.get("same_markdown") for r in rows] == [None, None, True, False]


# ---- row 7


def test_a_candidate_that_hangs_until_the_budget_ends(tmp_path):
    """It hung from its 41st request on; the run ended there, and the 40 answers before it kept every gate."""
    count = [0]

    def hanging(body):
        count[0] += 1  # with the smoke question
        return Script(first_s=60.0) if count[0] > 41 else right(body)

    done = measure(tmp_path, hanging, right, budget_s=9.0, concurrency=1)
    side = done.aggregates.served["a"]
    assert (side.gates["tool_call"].passes, side.gates["tool_call"].n) == (40, N)
    assert side.errors == N - 40 and not_kept(done.verdict) and "hung" in done.verdict.sentence
    finding = next(f for f in done.aggregates.confounds if f.code == "hung")
    assert finding.backends == ["a"] and "19 requests after it count as failed" in finding.message
    assert bench.aggregate(tmp_path).served["a"].gates == side.gates
    again = measure(tmp_path, right, right, concurrency=1)  # a resumed run sends them again
    assert again.aggregates.served["a"].errors == 0 and again.verdict.outcome == "keeps"


def test_a_budget_that_ends_between_answers_is_not_a_hang(tmp_path):
    slow = lambda body: words("Yes.", first_s=0.1)  # noqa: E731
    done = measure(tmp_path, slow, slow, budget_s=2.0, concurrency=1)
    assert done.ended.unasked > 0 and done.aggregates.served["a"].errors == 0
    assert not any(f.code == "hung" for f in done.aggregates.confounds)


# ---- row 8, 12, 13: the stored run and the new one


def watch(tmp_path, before, after, cases=None, changed=None):
    measure(tmp_path / "before", before, right, cases)
    measure(tmp_path / "after", after, right, changed or cases)
    return bench.regression(tmp_path / "before", tmp_path / "after")


def test_the_same_ids_with_other_prompts_are_refused(tmp_path):
    with pytest.raises(
        UsageError, match="share no backend, workload and prompt; 60 ids have another content"
    ):
        watch(tmp_path, right, right, calls(), calls(text="Look up entry {}"))


def test_changed_prompts_are_left_out(tmp_path):
    changed = calls()
    for case in list(changed.cases)[:5]:
        object.__setattr__(case, "messages", tuple(ask(f"Something else {case.id}")))
    result = watch(
        tmp_path,
        right,
        lambda b: silent(b) if "else" in str(b["messages"]) else right(b),
        calls(),
        changed,
    )
    assert len(result.left_out) == 5 and not result.gates_lost and not result.silent


def test_a_run_of_an_older_version_is_compared_by_its_stored_prompts(tmp_path):
    """Its records have no digest of their prompts; inputs.json has the prompts."""
    measure(tmp_path / "before", right, right)
    for cases, name in ((calls(), "same"), (calls(text="Look up entry {}"), "other")):
        measure(
            tmp_path / name,
            lambda body: silent(body) if number(body) < 12 else right(body),
            right,
            cases,
        )
    records = [json.loads(line) for line in (tmp_path / "before/records.jsonl").open()]
    for record in records:
        del record["prompt_sha256"]
    (tmp_path / "before/records.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    result = bench.regression(tmp_path / "before", tmp_path / "same")
    assert [lost.pair.lost for lost in result.gates_lost] == [12] and result.outcome == "loses"
    with pytest.raises(UsageError, match="60 ids have another content"):
        bench.regression(tmp_path / "before", tmp_path / "other")


@pytest.mark.parametrize("answer", [broken, moved])
def test_a_new_run_without_an_answer_loses(tmp_path, answer):
    result = watch(tmp_path, right, answer)
    assert result.lost and result.outcome == "loses" and result.silent == ["a"]
    assert {lost.gate for lost in result.gates_lost} >= {"tool_call", "non_empty"}
    assert any("failed every request" in line for line in bench.losses(result))


def test_redirects_are_errors(tmp_path):
    done = measure(tmp_path, moved, right)
    side = done.aggregates.served["a"]
    assert side.errors == N and side.gates["tool_call"].passes == 0 and not_kept(done.verdict)


def test_one_prompt_under_sixty_ids_counts_once(tmp_path):
    done = measure(tmp_path, right, right, calls(text="Find the note"))
    assert done.aggregates.served["a"].gates["tool_call"].n == 1
    assert (
        done.aggregates.served["a"].paired["tool_call"].n == 1 and done.verdict.outcome != "keeps"
    )
    records = [r for r in schema_records(tmp_path) if r.backend == "a"]
    assert len(records) == N and len(checks_by_prompt(records, {"calls"})) == 1


def schema_records(folder):
    from annie_quant.bench.run_folder import read_records

    return [r for r in read_records(folder / "records.jsonl") if not r.warmup]


# ---- row 10


def test_a_confound_is_not_kept(tmp_path):
    """Equal answers under two chat templates: the sentence stated CONFOUNDED, the exit code was 0."""
    meta = {"n_params": 1e9}
    with (
        FakeServer(right, model_meta=meta) as a,
        FakeServer(right, model_meta={"n_params": 2e9}) as b,
    ):
        sides = [bench.Backend("a", a.url), bench.Backend("b", b.url)]
        done = bench.run(
            sides,
            [calls()],
            tmp_path,
            warmup=0,
            runs=1,
            concurrency=N,
            with_memory=False,
            reference="b",
        )
    assert not_kept(done.verdict) and done.verdict.sentence.startswith(
        "CONFOUNDED (different models)"
    )


def test_two_sides_that_max_tokens_cuts_keep_nothing(tmp_path):
    def cut(body):
        return words("And so it goes on and on", finish="length")

    done = measure(
        tmp_path,
        cut,
        cut,
        workload("say", [{"id": f"{i}", "messages": ask(f"Say {i}")} for i in range(N)]),
    )
    assert not_kept(done.verdict) and "cut answers" in done.verdict.sentence


# ---- roles


def worse(body):
    """Two thirds of the calls."""
    return silent(body) if number(body) % 3 == 0 else right(body)


def command(tmp_path, a, b, *options):
    (tmp_path / "w.json").write_text(
        json.dumps(
            {
                "name": "calls",
                "max_tokens": 50,
                "system": "You are Annie.",
                "tools": TOOLS,
                "gates": ["tool_call"],
                "cases": [
                    {
                        "id": f"c{i}",
                        "messages": ask(f"Find note {i}"),
                        "expect": {"tool": "search_memory"},
                    }
                    for i in range(120)
                ],
            }
        )
    )
    with FakeServer(a) as left, FakeServer(b) as right_:
        names = (
            ("nvfp4-old", "nvfp4-new") if not options or options[0] != "--names" else options[1:3]
        )
        arguments = [
            "bench",
            "--backend-a",
            names[0],
            left.url,
            "--backend-b",
            names[1],
            right_.url,
            "--runs",
            "1",
        ]
        arguments += [
            "--warmup",
            "0",
            "--n",
            "0",
            "--concurrency",
            "60",
            "--workloads",
            str(tmp_path / "w.json"),
            "--json",
        ]
        rest = options[3:] if options and options[0] == "--names" else options
        return CliRunner().invoke(cli, [*arguments, "--output", str(tmp_path / "run"), *rest])


def test_a_build_that_lost_a_third_of_the_calls_exits_1(tmp_path):
    """With two NVFP4 sides the better one became the candidate."""
    done = command(tmp_path, right, worse)
    result = json.loads(done.stdout)
    assert (
        done.exit_code == 1 and result["candidate"] == "nvfp4-new" and result["outcome"] == "loses"
    )
    assert (
        "does not call the right tool (40 more of 120 prompts)" in result["sentence"]
        and "tool calls loses: 40 lost and 0 won of 120" in result["reasons"][0]
        and "--candidate" in result["caveats"][0]
    )


def test_the_stated_roles_are_stored_and_decide(tmp_path):
    done = command(tmp_path, worse, right, "--candidate", "nvfp4-new", "--incumbent", "nvfp4-old")
    assert done.exit_code == 0
    run = json.loads((tmp_path / "run/run.json").read_text())
    assert run["aggregates"]["roles"] == {
        "candidate": "nvfp4-new", "reference": None, "incumbent": "nvfp4-old", "assumed": False,
    }  # fmt: skip
    # the other way round, from the same answers
    done = CliRunner().invoke(cli, ["report", str(tmp_path / "run"), "--candidate", "nvfp4-old"])
    assert done.exit_code == 0
    run = json.loads((tmp_path / "run/run.json").read_text())
    assert (run["verdict"]["candidate"], run["verdict"]["outcome"]) == ("nvfp4-old", "loses")
    assert run["aggregates"]["served"]["nvfp4-old"]["paired"]["tool_call"]["lost"] == 40


def test_a_name_has_no_meaning(tmp_path):
    """A side named bf16 is not the reference, and one named q4 is not the incumbent."""
    done = command(tmp_path, worse, right, "--names", "bf16", "q4", "--candidate", "bf16")
    assert json.loads(done.stdout)["candidate"] == "bf16" and done.exit_code == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--candidate", "nvfp4"), "--candidate nvfp4: no side has this name"),
        (("--reference", "bf16"), "--reference bf16: no side has this name"),
        (
            ("--candidate", "nvfp4-new", "--reference", "nvfp4-new"),
            "nvfp4-new: it is the candidate already",
        ),
        (("--names", "a", "a"), "two backends have the same name: a, a"),
    ],
)
def test_a_wrong_role_is_one_line(tmp_path, options, message):
    done = command(tmp_path, right, right, *options)
    assert isinstance(done.exception, UsageError) and message in str(done.exception)
    assert not (tmp_path / "run/records.jsonl").exists()


@pytest.mark.parametrize(
    ("sides", "stated", "expected"),
    [
        ({"a": "NVFP4", "b": "Q4_K"}, {}, ("a", None, "b", False)),
        ({"a": "NVFP4", "b": "BF16"}, {}, ("a", "b", None, False)),
        ({"a": "BF16", "b": "NVFP4"}, {}, ("b", "a", None, False)),
        ({"a": "NVFP4", "b": "NVFP4"}, {}, ("b", None, "a", False)),
        ({"a": "", "b": ""}, {}, ("a", None, "b", True)),
        ({"a": "", "b": ""}, {"incumbent": "a"}, ("b", None, "a", False)),
        ({"a": "", "b": "", "c": ""}, {"reference": "a"}, ("b", "a", "c", True)),
        ({"a": "BF16"}, {}, ("a", None, None, False)),
        ({"bf16": "NVFP4", "nvfp4": "BF16"}, {}, ("bf16", "nvfp4", None, False)),
    ],
)
def test_roles_follow_from_what_is_stated_then_from_the_formats(sides, stated, expected):
    from annie_quant.judge import decision

    roles = decision.assign(list(sides), sides, Roles(**stated))
    candidate, reference, incumbent, assumed = expected
    assert (roles.candidate, roles.reference, roles.incumbent) == (candidate, reference, incumbent)
    assert roles.assumed == (assumed and reference is None)


def test_the_format_is_that_of_the_file_behind_a_local_server(tmp_path):
    """A model folder in bf16 behind a server under any name is the reference."""
    import numpy as np
    from safetensors.numpy import save_file

    from annie_quant.bench import backend, weight_format

    (tmp_path / "config.json").write_text("{}")
    save_file({"w": np.zeros((8, 8), np.float16)}, tmp_path / "model.safetensors")
    local = "http://127.0.0.1:8000"
    assert backend.served_format(local, {}, {"root": str(tmp_path)}) == "F16"
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_algo": "NVFP4"}}')
    assert backend.served_format(local, {}, {"root": str(tmp_path)}) == "NVFP4"
    assert backend.served_format("http://10.0.0.1:8000", {}, {"root": str(tmp_path)}) is None
    assert backend.served_format(local, {"model_path": str(tmp_path / "none.gguf")}, {}) is None
    assert (
        weight_format.most([("F32", 10), ("BF16", 1000)]) == "BF16"
        and weight_format.most([("BF16", 1000), ("Q4_K", 10)]) == "Q4_K"
    )


def test_a_verdict_changes_no_counts():
    served = {"a": ServedSide(), "b": ServedSide()}
    aggregates = Aggregates(served=served)
    before = documents.encode(aggregates)
    judge.verdict(aggregates, "a", reference="b")
    assert documents.encode(aggregates) == before


# ---- memory


def test_a_measured_peak_wins_over_five_requests():
    """120 GB at the peak passed a budget of 110 GB, by the 12 GB that five requests took."""
    from annie_quant.report.checklist import checklist

    side = ServedSide(
        memory_bytes=MemoryBytes(idle=10**10, one=11 * 10**9, five=12 * 10**9, peak=120 * 10**9)
    )
    aggregates = Aggregates(served={"a": side})
    item = next(
        i for i in checklist(aggregates, "a", None, [], ()) if i.item == "fits the memory budget"
    )
    assert item.verdict == "fail" and "120 GB" in item.evidence
