"""Launches on a CUDA GPU: threads that share a stream, first calls inside a CUDA graph, streams, errors, refused plans."""

import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest
from gemm_module import count_devices
from paths import ROOT

from annie_quant.core.errors import UsageError
from annie_quant.gemm.arrays import View, native

gemm = pytest.importorskip("annie_quant.gemm")
COUNT = count_devices()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(COUNT == 0, reason="needs a CUDA GPU and annie_quant._gemm"),
]
HOPPER = COUNT > 0 and native().device_info(0)["major"] == 9
hopper = pytest.mark.skipif(not HOPPER, reason="wgmma, the path with a workspace, is Hopper's")
BF16 = np.dtype(ml_dtypes.bfloat16)
PERMUTED = gemm.WgmmaPlan(
    32, 256, 4, 1, 2, 0, 1
)  # two kernels, with the activations between them in the workspace
STREAM_K = gemm.WgmmaPlan(32, 256, 6, 1, 3, 4, 1)  # three kernels
IN_LAUNCH = gemm.WgmmaPlan(
    32, 256, 6, 1, 3, 4, 1, 1
)  # two, with the flags of the blocks in the workspace


@pytest.fixture
def stream():
    handle = native().stream_new()
    yield handle
    native().stream_sync(handle)
    native().stream_free(handle)


def layer(n=1024, k=1024, seed=0):
    codes, scales = gemm.oracle.random_weight(n, k, seed)
    return gemm.Weight(gemm.to_device(codes), gemm.to_device(scales), 0.0173), codes, scales


def activations(m, k, seed):
    return (np.random.default_rng(seed).standard_normal((m, k)) * 2).astype(BF16)


def is_right(out, x, codes, scales):
    exact, magnitude = gemm.oracle.linear(x, gemm.oracle.dequantize(codes, scales, 0.0173))
    return (
        gemm.oracle.worst(
            out, exact, gemm.oracle.bound(exact, magnitude, x.shape[1], out.dtype.name)
        )
        <= 1
    )


def busy(stream, milliseconds=20):
    """Put work of about this duration on a stream."""
    buffer = gemm.DeviceArray((1 << 30,), "uint8")
    for _ in range(
        milliseconds * 4
    ):  # a quarter of a millisecond each on an H200, longer elsewhere
        native().fill(buffer.ptr, 0, buffer.nbytes, stream)
    return buffer  # freeing it waits for the device, so the caller keeps them


def wrong_products(plan, threads, rounds, streams, workspace=None):
    """Multiply in several threads; return how many results differ from the one that was checked with the oracle."""
    weight, codes, scales = layer()
    xs = [activations(32, 1024, i) for i in range(threads)]
    expected = []
    for x in xs:
        result = gemm.w4a16(
            gemm.to_device(x), weight, gemm.DeviceArray((32, 1024), "float32"), plan=plan
        ).host()
        assert is_right(result, x, codes, scales)
        expected.append(result)
    wrong, start = [0] * threads, threading.Barrier(threads)

    def multiply(i):
        x, batch = gemm.to_device(xs[i]), 50
        outs = [gemm.DeviceArray((32, 1024), "float32") for _ in range(batch)]
        start.wait()
        for _ in range(rounds // batch):
            for out in outs:
                gemm.w4a16(
                    x, weight, out, plan=plan, stream=streams[i % len(streams)], workspace=workspace
                )
            wrong[i] += sum(bool((out.host() != expected[i]).any()) for out in outs)

    workers = [threading.Thread(target=multiply, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(wrong)


@hopper
@pytest.mark.parametrize("plan", [PERMUTED, STREAM_K, IN_LAUNCH])
def test_threads_on_one_stream_do_not_multiply_each_others_activations(plan, stream):
    assert wrong_products(plan, 4, 500, [stream]) == 0


@hopper
def test_blocks_that_wait_for_others_end_on_four_streams():
    """Each block adds or waits for parts of its product, while the other streams' blocks are resident."""
    streams = [native().stream_new() for _ in range(4)]
    try:
        assert wrong_products(IN_LAUNCH._replace(blocks=32), 4, 500, streams) == 0
    finally:
        for handle in streams:
            native().stream_free(handle)


@hopper
def test_one_buffer_per_stream_as_in_0_1_mixes_the_threads_activations(stream):
    """The negative control of the test above: version 0.1 gave all launches of one stream the same workspace."""
    weight, *_ = layer()
    workspace = gemm.DeviceArray((weight.workspace_bytes(32, PERMUTED),), "uint8")
    assert wrong_products(PERMUTED, 4, 5000, [stream], workspace) > 0


@hopper
def test_threads_with_different_plans_do_not_change_each_others_shared_memory():
    """Version 0.1 set a kernel's limit of shared memory to that of its plan before each launch."""
    weight, codes, scales = layer()
    x = activations(32, 1024, 0)
    device_x, failed = gemm.to_device(x), []
    start = threading.Barrier(4)

    def multiply(stages):
        out = gemm.DeviceArray((32, 1024), "float32")
        handle = native().stream_new()
        start.wait()
        try:
            for _ in range(2000):
                gemm.w4a16(
                    device_x, weight, out, plan=PERMUTED._replace(stages=stages), stream=handle
                )
            if not is_right(out.host(), x, codes, scales):
                failed.append(stages)
        except Exception as error:
            failed.append(error)
        native().stream_sync(handle)
        native().stream_free(handle)

    workers = [threading.Thread(target=multiply, args=(s,)) for s in (2, 3, 6, 8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert failed == []


FIRST_CALL = """
import numpy as np, sys
from ml_dtypes import bfloat16
import annie_quant.gemm as gemm
from annie_quant.gemm.arrays import native
module, kind = native(), sys.argv[1]
codes, scales = gemm.oracle.random_weight(512, 1024, 1)
c, s = gemm.to_device(codes), gemm.to_device(scales)
weight = gemm.Weight(c, s, 1.0)
m = {"skinny": 5, "tiled": 40, "wgmma": 64, "stream_k": 64, "pdl": 64}.get(kind, 16)
x = (np.random.default_rng(2).standard_normal((m, 1024))).astype(bfloat16)
xd, stream = gemm.to_device(x), module.stream_new()
plan = gemm.WgmmaPlan(64, 256, 6, 1, 2, 2, 1) if kind in ("stream_k", "pdl") else None
path = kind if kind in ("skinny", "tiled", "wgmma") else "auto"
def product(on):
    if kind == "w4a4":
        return gemm.w4a4(c, s, 1.0, c, s, 1.0, stream=on)
    if kind == "fake_quant":
        return gemm.fake_quant(xd, 0.01, stream=on)
    return gemm.w4a16(xd, weight, path=path, plan=plan, pdl=kind == "pdl", stream=on)
module.capture_begin(stream)
captured = product(stream)
graph = module.capture_end(stream)
for _ in range(3):
    captured.fill(0xFF)
    module.graph_time(graph, stream)
    got = captured.host()
    expected = product(0).host()
    assert (got.view(np.uint8) == expected.view(np.uint8)).all(), kind
    assert np.isfinite(got.astype(np.float32)).all()
print("equal")
"""


@pytest.mark.parametrize(
    "kind", ["skinny", "tiled", "wgmma", "stream_k", "pdl", "w4a4", "fake_quant"]
)
def test_the_first_call_of_a_process_can_be_captured(kind):
    """No allocation, no synchronisation and no query in a launch that a capture refuses."""
    if kind in ("wgmma", "stream_k", "pdl") and not HOPPER:
        pytest.skip("wgmma is Hopper's")
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL, kind],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "equal\n", done.stderr[-2000:]


def test_host_waits_for_the_stream_that_wrote(stream):
    weight, codes, scales = layer()
    x = activations(8, 1024, 3)
    device_x = gemm.to_device(x)
    out = gemm.DeviceArray((8, 1024), "float32").fill(0xFF)
    out.host()
    keep = busy(stream)
    gemm.w4a16(device_x, weight, out, stream=stream)
    assert is_right(out.host(), x, codes, scales)
    keep = busy(stream)  # noqa: F841
    gemm.w4a16(device_x, weight, out, stream=stream)
    out.fill(0)
    assert (out.host() == 0).all()


def test_a_launch_waits_for_the_stream_that_an_array_announces(stream):
    weight, codes, scales = layer()
    x = activations(8, 1024, 4)
    source, target = gemm.to_device(x), gemm.to_device(np.zeros_like(x))
    late = View(target.ptr, target.shape, (1024, 1), target.dtype, target.device, target, stream)
    other = native().stream_new()
    keep = busy(stream)  # noqa: F841
    native().copy(
        target.ptr, source.ptr, target.nbytes, stream
    )  # late: a launch that does not wait reads zeros
    out = gemm.DeviceArray((8, 1024), "float32")
    gemm.w4a16(late, weight, out, stream=other)
    assert is_right(out.host(), x, codes, scales)
    native().stream_free(other)


def test_a_failed_allocation_does_not_fail_the_next_launch():
    weight, codes, scales = layer()
    x = activations(8, 1024, 5)
    for _ in range(3):
        with pytest.raises(native().CudaError, match="memory"):
            gemm.DeviceArray((1 << 50,), "uint8")
        assert is_right(gemm.w4a16(gemm.to_device(x), weight).host(), x, codes, scales)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (gemm.SkinnyPlan(0, 1, 1, 2), "blocks"),
        (gemm.SkinnyPlan(33, 1, 1, 2), "blocks is larger"),
        (gemm.SkinnyPlan(32, 1, 5, 2), "warp_stages"),
        (gemm.TiledPlan(48, 1, 2), "tile_tokens"),
        (gemm.TiledPlan(64, 1, 200), "stages"),
        (gemm.WgmmaPlan(32, 256, 4, 1, 40, 0, 1), "stages|wgmma"),
        (gemm.WgmmaPlan(32, 256, 4, 2, 2, 1, 1), "cluster_size 2|wgmma"),
    ],
)
def test_a_bad_plan_is_refused_and_nothing_is_written(plan, message):
    weight, *_ = layer()
    out = gemm.DeviceArray((8, 1024), "float32").fill(0x42)
    with pytest.raises(UsageError, match=message):
        gemm.w4a16(gemm.to_device(activations(8, 1024, 7)), weight, out, plan=plan)
    assert (out.host().view(np.uint8) == 0x42).all()


@hopper
def test_a_small_workspace_is_refused():
    weight, *_ = layer()
    size = weight.workspace_bytes(32, PERMUTED)
    x = gemm.to_device(activations(32, 1024, 8))
    gemm.w4a16(x, weight, plan=PERMUTED, workspace=gemm.DeviceArray((size,), "uint8"))
    with pytest.raises((UsageError, native().CudaError), match="workspace"):
        gemm.w4a16(x, weight, plan=PERMUTED, workspace=gemm.DeviceArray((size - 16,), "uint8"))
