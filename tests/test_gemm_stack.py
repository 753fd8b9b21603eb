"""The judge of other people's FP4 kernels, with right, planted-wrong and failing ones in NumPy; no GPU."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from annie_quant.errors import EnvironmentFault, UsageError
from annie_quant.gemm import container, known, oracle, stack


def product(case, a=None, w=None, sa=None, sw=None):
    left = oracle.dequantize(case.a if a is None else a, case.a_scale if sa is None else sa)
    right = oracle.dequantize(case.w if w is None else w, case.w_scale if sw is None else sw)
    import ml_dtypes

    return ((left.astype(np.float32) @ right.astype(np.float32).T) * np.float32(case.alpha)).astype(ml_dtypes.bfloat16)


def swap(codes):
    return (codes >> 4) | (codes << 4)


def drop_tail(case):
    out = product(case)
    out[-1, -1] = 0
    return out


PLANTED = {
    "swapped nibbles": lambda c: product(c, w=swap(c.w)),
    "both swapped but one row": lambda c: product(c, w=np.concatenate([swap(c.w[:1]), c.w[1:]])),
    "swizzled scales read as linear": lambda c: product(
        c, sw=stack.swizzled(c.w_scale)[: c.w_scale.shape[0], : c.w_scale.shape[1]]
    ),
    "a neighbour's scale": lambda c: product(c, sw=np.roll(c.w_scale, 1, 1)),
    "alpha forgotten": lambda c: product(c) / c.alpha,
    "one element lost": drop_tail,
    "not a number": lambda c: product(c) * np.nan,
}


def test_a_right_kernel_passes():
    assert stack.judge("right", product)["verdict"] == "right"


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_faults_are_called_wrong_and_given_a_remedy(fault):
    row = stack.judge(fault, PLANTED[fault])
    assert row["verdict"] == "wrong"
    assert row["worst"] > 1
    assert "backend" in row["remedy"]


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("CUDA error: no kernel image is available for execution on the device", "121a"),
        ("CUDA error: an illegal instruction was encountered", "38423"),
        ("This kernel only supports sm120.", "sm120_family"),
        ("ptxas fatal : Value 'sm_121a' is not defined for option 'gpu-name'", "TRITON_PTXAS_PATH"),
    ],
)
def test_known_failures_are_named(message, remedy):
    def call(case):
        raise RuntimeError(message)

    row = stack.judge("broken", call)
    assert row["verdict"] == "failed"
    assert remedy in row["remedy"]
    assert known.recognise("something else entirely") is None


def test_missing_stacks_are_said_and_unknown_ones_refused():
    found = stack.examine("flashinfer")
    assert [r["verdict"] for r in found["backends"]] == ["missing"] or found["backends"]
    with pytest.raises(UsageError, match="no stack called"):
        stack.examine("nonsense")


def test_swizzle_is_the_stated_formula():
    scales = np.random.default_rng(0).integers(1, 127, (200, 9), dtype=np.uint8)
    flat = stack.swizzled(scales).reshape(-1)
    tiles = 3
    for m in range(200):
        for k in range(9):
            at = ((m // 128) * tiles + k // 4) * 512 + (m % 32) * 16 + (m % 128) // 32 * 4 + k % 4
            assert flat[at] == scales[m, k]
    assert flat.size == 256 * 12
    assert (flat == 0).sum() == 256 * 12 - 200 * 9


def test_the_container_command_is_a_list_without_a_shell():
    assert container.command("vllm/vllm-openai:v0.20", "docker", running=False) == [
        "docker", "run", "--rm", "-i", "--gpus", "all", "--entrypoint", "python3", "vllm/vllm-openai:v0.20", "-",
    ]  # fmt: skip
    assert container.command("my; rm -rf /", "docker", running=True)[3] == "my; rm -rf /"
    for name in ("", "--privileged"):
        with pytest.raises(UsageError, match="names no container"):
            container.command(name, "docker", running=False)
    with pytest.raises(UsageError, match="no stack called"):
        container.plan("image", "nonsense")


def test_the_script_that_travels_runs_where_nothing_is_installed(tmp_path):
    """Python alone in an empty folder, as in a container: the examination runs and its last line is the result."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.append({np_folder()!r}); exec(sys.stdin.read())"],
        input=container.script("flashinfer"), capture_output=True, text=True, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["backends"][0]["backend"].startswith("flashinfer")


def np_folder():
    return str(Path(np.__file__).parents[1])


FAKE = """#!{python}
import json, sys
if sys.argv[1] == "container":
    print("true" if sys.argv[-1] == "alive" else "")
elif "broken" in sys.argv:
    sys.exit("RuntimeError: no kernel image is available for execution on the device")
else:
    print("noise of an import")
    said = {{"argv": sys.argv[1:], "script": len(sys.stdin.read()), "wrong": False}}
    print(json.dumps(said))
"""


def test_a_running_container_is_entered_and_an_image_started(tmp_path, monkeypatch):
    docker = tmp_path / "docker"
    docker.write_text(FAKE.format(python=sys.executable))
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    alive = container.examine("alive", "torch")
    assert alive["argv"] == ["exec", "-i", "alive", "python3", "-"]
    assert alive["script"] > 10_000
    assert container.examine("some/image:1", "all")["argv"][:2] == ["run", "--rm"]
    with pytest.raises(EnvironmentFault, match="no kernel image") as caught:
        container.examine("broken", "vllm")
    assert "121a" in caught.value.hint
