"""Streams and devices of the GEMM package, with a recording stand-in for annie_quant._gemm: no GPU is needed."""

import pytest

from annie_quant.core.errors import EnvironmentFault, UsageError
from annie_quant.gemm import arrays, ops
from annie_quant.gemm.plans import SkinnyPlan


class Recorder:
    """Device memory is a counter; every call is recorded as (name, arguments)."""

    class CudaError(RuntimeError):
        pass

    def __init__(self):
        self.calls, self.device, self.next, self.fail_malloc = [], 0, 4096, False
        self.major = 9

    def __getattr__(self, name):
        return lambda *args: self.calls.append((name, args))

    def use_device(self, device):
        before, self.device = self.device, device
        return before

    def malloc(self, size):
        if self.fail_malloc:
            raise self.CudaError("out of memory", 2)
        self.next += 4096
        return self.next

    def pointer_device(self, ptr):
        return self.device

    def device_count(self):
        return 2

    def limits(self):
        return 132, 232448, self.major, True, False

    def plan(self, m, n, k, path):
        return "skinny", (2, 1, 1, 2)

    def repack(self, *args):
        return None

    def packed_bytes(self, n, k):
        return n * k

    def of(self, name):
        return [args for called, args in self.calls if called == name]


@pytest.fixture
def recorder(monkeypatch):
    result = Recorder()
    for module in (arrays, ops):
        monkeypatch.setattr(module, "native", lambda: result)
    return result


def array_on(stream, ptr=65536, shape=(2, 64)):
    """An array whose last write is on this stream."""
    return arrays.View(ptr, shape, (shape[1], 1), "bfloat16", 0, None, stream)


def weight(n=32, k=64):
    return ops.Weight(
        arrays.DeviceArray((n, k // 2), "uint8"), arrays.DeviceArray((n, k // 16), "uint8"), 1.0
    )


def test_a_gpu_before_clusters_is_refused_by_name(recorder):
    recorder.major = 8
    with pytest.raises(EnvironmentFault, match=r"compute capability 8\.x; the kernels need 9\.0"):
        weight()


def test_the_device_is_restored_when_an_allocation_fails(recorder):
    recorder.fail_malloc = True
    with pytest.raises(recorder.CudaError):
        arrays.DeviceArray((4,), "uint8", device=1)
    assert recorder.device == 0
    recorder.fail_malloc = False
    arrays.DeviceArray((4,), "uint8", device=1)
    assert recorder.device == 0


def test_fill_and_host_follow_the_stream_that_wrote(recorder):
    out = arrays.DeviceArray((2, 32), "bfloat16")
    assert out.stream is None
    ops.w4a16(array_on(None), weight(), out, stream=77)
    assert out.stream == 77
    out.fill(0)
    out.host()
    assert recorder.of("fill")[-1][3] == 77
    assert recorder.of("copy")[-1][3] == 77
    assert recorder.of("stream_sync")[-1] == (77,)


def test_every_operation_records_where_it_wrote(recorder):
    x = arrays.DeviceArray((2, 64), "bfloat16")
    codes, scales = arrays.DeviceArray((2, 32), "uint8"), arrays.DeviceArray((2, 4), "uint8")
    assert ops.w4a16(x, weight(), stream=5).stream == 5
    assert ops.w4a4(codes, scales, 1.0, codes, scales, 1.0, stream=6).stream == 6
    assert ops.fake_quant(x, 1.0, stream=8).stream == 8
    assert ops.fake_quant(x, 1.0).stream == 0


@pytest.mark.parametrize(
    ("announced", "waits"), [(None, []), (0, [(9, 0)]), (33, [(9, 33)]), (9, [])]
)
def test_a_launch_waits_for_the_stream_of_an_array(recorder, announced, waits):
    layer = weight()
    ops.w4a16(array_on(announced), layer, arrays.DeviceArray((2, 32), "bfloat16"), stream=9)
    assert recorder.of("stream_after") == waits
    assert recorder.of("w4a16")[-1][-1] == 9


def test_a_launch_without_a_stream_is_on_that_of_its_first_array(recorder):
    out = arrays.DeviceArray((2, 32), "bfloat16")
    out.stream = 44
    ops.w4a16(array_on(33), weight(), out)
    assert recorder.of("w4a16")[-1][-1] == 33
    assert recorder.of("stream_after") == [(33, 44)]


def test_a_call_has_no_memory_of_its_own_in_python(recorder):
    """The workspace is allocated per launch in C; 0.1 kept one per stream, which two threads shared."""
    layer, x = weight(), array_on(None)
    allocated = recorder.next
    out = arrays.DeviceArray((2, 32), "bfloat16")
    for _ in range(3):
        ops.w4a16(x, layer, out, stream=3, plan=SkinnyPlan(2, 1, 1, 2))
    assert recorder.next == allocated + 4096  # the output alone
    assert all(args[5:7] == (0, 0) for args in recorder.of("w4a16"))


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), 1e300, 1e-60])
def test_a_tensor_scale_must_be_positive_and_finite_in_float32(value):
    with pytest.raises(UsageError, match="float32"):
        ops._positive(value, "tensor_scale")


def at(ptr, shape, dtype="bfloat16"):
    return arrays.View(ptr, shape, (*shape[1:], 1), dtype, 0, None)


@pytest.mark.parametrize("shift", [-124, 0, 4, 252])
def test_an_array_that_is_written_must_not_overlap_an_operand(recorder, shift):
    """x: 256 bytes at 65536; out: 128 bytes."""
    x, near = at(65536, (2, 64)), at(65536 + shift, (2, 32))
    with pytest.raises(UsageError, match="out and x overlap"):
        ops.w4a16(x, weight(), near)
    for ptr in (65536 - 128, 65536 + 256):
        ops.w4a16(x, weight(), at(ptr, (2, 32)))
    packed = weight()
    with pytest.raises(UsageError, match="out and weight overlap"):
        ops.w4a16(x, packed, at(packed.packed.ptr, (2, 32)))
    with pytest.raises(UsageError, match="workspace and x overlap"):
        ops.w4a16(x, weight(), workspace=at(65536 + 240, (64,), "uint8"))
    assert len(recorder.of("w4a16")) == 2


def test_fake_quant_may_write_in_place_but_not_to_a_shifted_place(recorder):
    ops.fake_quant(at(65536, (2, 64)), 1.0, at(65536, (2, 64)))
    with pytest.raises(UsageError, match="out and x overlap"):
        ops.fake_quant(at(65536, (2, 64)), 1.0, at(65536 + 16, (2, 64)))
    assert len(recorder.of("fake_quant")) == 1
