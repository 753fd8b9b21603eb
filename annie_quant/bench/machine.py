"""The state of this machine during a benchmark: a probe between requests, clocks, temperature, and limits that the driver reports.

The probe is a fixed product of an NVFP4 matrix and a vector. It runs on the GPU of a server on this machine, else on the processor,
while no request is in flight, so it disturbs none, and takes milliseconds every EVERY_S seconds. On a GPU our W4A16 kernel computes
it, from memory and in a CUDA graph of about GRAPH_MS: longer than the slice of time after which a GPU turns to another process, so
that such a process shows in each graph.

The state of a run is the median of its samples. A span in which the median of WINDOW samples in a row is further from it than
MIN_CHANGE, and than QUIET times the usual deviation of such medians, is another state; so is a limit that the driver does not
report in most of the run. Requests in such spans are marked invalid and measured again.

A GPU that is slow all the time is another matter: what its probe reads is compared with the healthy rate of its name, as `doctor`
does, at the start and the end of the run and before each side's requests.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import statistics
import time
import timeit
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from annie_quant import documents, nvfp4
from annie_quant.bench.findings import finding
from annie_quant.checkpoint.decode_speed import gpu_name, healthy_device, is_unhealthy
from annie_quant.core.errors import AnnieError
from annie_quant.core.host import machine_state
from annie_quant.core.resume import JsonLines, read_lines
from annie_quant.documents import Confound, MachineSpan, MachineState, RequestRecord
from annie_quant.gemm.arrays import DeviceArray, native, to_device
from annie_quant.gemm.ops import Weight, w4a16
from annie_quant.judge.statistics import median_interval

_T = TypeVar("_T")

# ---- the probe

CPU_SHAPE = (2048, 4096)  # 4.7 MB
GPU_SHAPE = (16384, 8192)  # 75 MB: more than the caches of a GB10 (24 MB) and of an H100 (50 MB)
REPEATS = 5  # of a sample, which is the fastest one: a process that takes the core for a moment is not a state
GRAPH_MS = 10.0
MAX_PRODUCTS = 4096


def new_probe(on_gpu: bool) -> GpuProbe | CpuProbe:
    """Return a probe of the GPU, or of the processor where our kernel cannot run."""
    if on_gpu:
        with contextlib.suppress(AnnieError, RuntimeError):
            return GpuProbe()
    return CpuProbe()


def _weight(shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return codes and block scales of a matrix, uint8."""
    rows, columns = shape
    codes = np.arange(rows * columns // 2, dtype=np.uint32).astype(np.uint8)
    return codes.reshape(rows, -1), np.full((rows, columns // 16), 0x38, np.uint8)


class CpuProbe:
    """The codec's product on one core. name: the same on machines whose times can be compared."""

    def __init__(self) -> None:
        codes, scales = _weight(CPU_SHAPE)
        self._weight = nvfp4.Tensor(
            codes,
            scales.view(nvfp4.E4M3),
            np.float32(1),
            CPU_SHAPE,
            16,
        )
        self._x = np.ones((1, CPU_SHAPE[1]), np.float32)
        self.name = f"NVFP4 product {CPU_SHAPE[0]} x {CPU_SHAPE[1]} on the processor"
        self.time_ms()

    def time_ms(self) -> float:
        """Return the time of one product."""
        product = partial(nvfp4.gemv, self._x, self._weight)
        return 1e3 * min(timeit.repeat(product, number=1, repeat=REPEATS))


class GpuProbe:
    """Our kernel's product on the current GPU. It holds 75 MB there, besides the process's context."""

    def __init__(self) -> None:
        codes, scales = _weight(GPU_SHAPE)
        self._weight = Weight(to_device(codes), to_device(scales), 1.0)
        self._x = to_device(np.ones((1, GPU_SHAPE[1]), np.float16))
        self._out = DeviceArray((1, GPU_SHAPE[0]), "float16")
        self._workspace = DeviceArray((max(1, self._weight.workspace_bytes(1)),), "uint8")
        self._stream = native().stream_new()
        self._products = 1
        self._graph = self._captured(1)
        self._products = max(1, min(MAX_PRODUCTS, round(GRAPH_MS / self.time_ms())))
        native().graph_free(self._graph)
        self._graph = self._captured(self._products)
        self.name = f"NVFP4 product {GPU_SHAPE[0]} x {GPU_SHAPE[1]} on the GPU"
        self.gpu = gpu_name() or ""

    def _captured(self, products: int) -> int:
        native().capture_begin(self._stream)
        for _ in range(products):
            w4a16(
                self._x,
                self._weight,
                self._out,
                workspace=self._workspace,
                stream=self._stream,
            )
        graph: int = native().capture_end(self._stream)
        return graph

    def time_ms(self) -> float:
        """Return the time of one product. Raises RuntimeError where the GPU fails."""
        times = [native().graph_time(self._graph, self._stream) for _ in range(REPEATS)]
        return min(times) / self._products

    def read_bytes_s(self, time_ms: float) -> float:
        """Return how many bytes of codes and block scales per second a product of this time reads."""
        rows, columns = GPU_SHAPE
        return rows * columns * 9 / 16 / (time_ms / 1e3)


SAMPLES_FILE = "machine.jsonl"
EVERY_S = 2.0
WINDOW = 9
MIN_SAMPLES = 3 * WINDOW
MIN_CHANGE = 0.08
QUIET = 5.0
PROBE_BINS = 24  # for the interval of the probe's median: neighbouring samples are alike
PASSES = 2  # how often marked requests are measured again
EDGE_SAMPLES = 3  # at the start and at the end of a run


class Sample(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line of machine.jsonl.

    probe: what was timed. took_s: the time that the whole sample took.
    gpu, read_bytes_s: name of the GPU and the rate of its probe; "" and None where the processor is probed.
    """

    time_unix_s: float
    probe: str = ""
    probe_ms: float = 0.0
    took_s: float = 0.0
    clock_mhz: float | None = None
    temperature_c: float | None = None
    throttle: str | None = None
    gpu: str = ""
    read_bytes_s: float | None = None


# ---- samples


class Monitor:
    """Samples the machine at most every EVERY_S seconds, when it is called.

    restart: drop the samples of an earlier run.
    on_gpu: probe the GPU where there is one.
    """

    def __init__(self, folder: Path, restart: bool = False, on_gpu: bool = False) -> None:
        self.log = JsonLines(folder / SAMPLES_FILE, restart=restart)
        self.samples = self.log.values(_decode)
        self._probe: GpuProbe | CpuProbe | None = None
        self._on_gpu = on_gpu
        self._next_s = 0.0

    def sample(self) -> None:
        """Take a sample if the last one is old enough."""
        start = time.monotonic()
        if start < self._next_s:
            return
        self._probe = self._probe or new_probe(self._on_gpu)
        try:
            probe_ms = self._probe.time_ms()
        except RuntimeError:  # the GPU failed: the server's answers will report it
            self._probe = CpuProbe()
            probe_ms = self._probe.time_ms()
        sample = Sample(
            time_unix_s=time.time(),
            probe=self._probe.name,
            probe_ms=probe_ms,
        )
        if isinstance(self._probe, GpuProbe):
            sample.gpu = self._probe.gpu
            sample.read_bytes_s = self._probe.read_bytes_s(probe_ms)
        # After the probe: a processor that was idle has a low clock.
        sample.clock_mhz, sample.temperature_c, sample.throttle = machine_state()
        end = time.monotonic()
        sample.took_s = end - start
        self._next_s = end + EVERY_S
        self.log.append(documents.encode(sample))
        self.samples.append(sample)


def read_samples(folder: Path) -> list[Sample]:
    """Return the samples of a run directory; [] where it has none."""
    path = folder / SAMPLES_FILE
    if not path.is_file():
        return []
    return read_lines(path, _decode)


def _decode(line: bytes, where: str) -> Sample:
    return documents.decode(Sample, line, where)


# ---- another state


def unsteady(samples: Sequence[Sample]) -> list[MachineSpan]:
    """Return the spans in which the machine was in another state than in most of the run, in order."""
    if not samples:
        return []
    probe = _most_common([s.probe for s in samples])
    probe_times = [(s.time_unix_s, s.probe_ms) for s in samples if s.probe == probe and s.probe_ms]
    clocks = [(s.time_unix_s, s.clock_mhz) for s in samples if s.clock_mhz]
    spans = [
        *_changes(probe_times, "the probe took {:.0%} longer", "the probe took {:.0%} less"),
        *_changes(clocks, "the clock was {:.0%} higher", "the clock was {:.0%} lower"),
        *_limits(samples),
    ]
    return sorted(spans, key=lambda span: span.start_unix_s)


def _most_common(values: Sequence[_T]) -> _T:
    return Counter(values).most_common(1)[0][0]


def _changes(rows: Sequence[tuple[float, float]], more: str, less: str) -> list[MachineSpan]:
    """Return the spans in which a figure differs from most of the run.

    rows: (time, figure).
    more, less: the causes of a larger and of a smaller figure, with a place for the change.
    """
    if len(rows) < MIN_SAMPLES:
        return []
    times, figures = zip(*rows, strict=True)
    logs = np.log(figures)
    medians, limit = _medians(logs)
    spans = []
    for first, end in _runs(np.abs(medians) > limit):
        last = end + WINDOW - 2
        change = math.expm1(float(np.median(logs[first : last + 1]) - np.median(logs)))
        cause = (less if change < 0 else more).format(abs(change))
        spans.append(_span(times, first, last, cause))
    return spans


def _medians(logs: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Return (medians of WINDOW values in a row less that of all, how far such a median may be from 0).

    The usual deviation is that of the medians, or that which the differences of neighbours give: few windows may all be alike.
    """
    windows = np.lib.stride_tricks.sliding_window_view(logs, WINDOW)
    medians = np.median(windows, axis=1) - np.median(logs)
    neighbours = np.median(np.abs(np.diff(logs))) / math.sqrt(2) * 1.2533 / math.sqrt(WINDOW)
    usual = 1.4826 * max(float(np.median(np.abs(medians))), float(neighbours))
    return medians, max(math.log1p(MIN_CHANGE), QUIET * usual)


def _limits(samples: Sequence[Sample]) -> list[MachineSpan]:
    """Return the spans in which the driver reports a limit that it does not report in most of the run."""
    usual = _most_common([s.throttle for s in samples])
    times = [s.time_unix_s for s in samples]
    is_new = np.array([s.throttle is not None and s.throttle != usual for s in samples])
    spans = []
    for first, end in _runs(is_new):
        cause = f"the driver reported {samples[first].throttle}"
        spans.append(_span(times, first, end - 1, cause))
    return spans


def _runs(flags: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return (first, end) of each run of true flags."""
    edges = np.flatnonzero(np.diff(flags.astype(int), prepend=0, append=0)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _span(times: Sequence[float], first: int, last: int, cause: str) -> MachineSpan:
    """Return the time from the sample before `first` to the one after `last`."""
    start = times[max(0, first - 1)]
    end = times[min(last + 1, len(times) - 1)]
    return MachineSpan(
        start_unix_s=start,
        end_unix_s=end,
        cause=cause,
    )


# ---- a slow GPU


def gpu_health(
    samples: Sequence[Sample], records: Iterable[RequestRecord]
) -> tuple[str, list[str]]:
    """Return (what the GPU reads compared with a healthy one, or why that is not checked; parts of the run in which it is slow)."""
    probed = [s for s in samples if s.read_bytes_s]
    if not probed:
        return "not checked: no GPU was probed", []
    gpu = probed[-1].gpu
    healthy = healthy_device(gpu)
    if healthy is None:
        return f"not checked: healthy values of {gpu or 'this GPU'} are not known", []
    rates = {}
    slow_clocks = []
    slow_parts = []
    for part, rows in _parts(probed, records).items():
        rates[part] = statistics.median(s.read_bytes_s or 0.0 for s in rows)
        clocks = [s.clock_mhz for s in rows if s.clock_mhz]
        clock_mhz = statistics.median(clocks) if clocks else None
        if is_unhealthy(healthy, rates[part], clock_mhz):
            slow_parts.append(part)
            slow_clocks += clocks
    lowest_gb_s = min(rates[part] for part in slow_parts or rates) / 1e9
    clock = f" at {min(slow_clocks):.0f} MHz" if slow_clocks else ""
    speed = (
        f"{gpu} reads {lowest_gb_s:,.0f} GB/s{clock}, {healthy.read_bytes_s / 1e9:,.0f} are healthy"
    )
    return speed, slow_parts


def _parts(
    samples: Sequence[Sample], records: Iterable[RequestRecord]
) -> dict[str, Sequence[Sample]]:
    """Return the samples of a run's start, of its end, and those before each side's requests."""
    parts: dict[str, Sequence[Sample]] = {
        "at the start": samples[:EDGE_SAMPLES],
        "at the end": samples[-EDGE_SAMPLES:],
    }
    starts = [
        (record.timings.started_unix_s, record.backend)
        for record in records
        if record.timings.started_unix_s is not None
    ]
    starts.sort()
    before: dict[str, list[Sample]] = {}
    for sample in samples:
        index = bisect.bisect_left(starts, (sample.time_unix_s, ""))
        if index < len(starts):
            _, backend = starts[index]
            before.setdefault(f"before requests to {backend}", []).append(sample)
    return parts | before


# ---- requests


def mark_invalid(
    records: Iterable[RequestRecord], spans: Sequence[MachineSpan]
) -> list[RequestRecord]:
    """Set `invalid` of each record, and return those whose time overlaps with a span."""
    invalid = []
    for record in records:
        start = record.timings.started_unix_s
        record.load.invalid = None
        if start is None:
            continue
        end = start + (record.timings.e2e_ms or 0.0) / 1e3
        for span in spans:
            if start <= span.end_unix_s and end >= span.start_unix_s:
                record.load.invalid = span.cause
                invalid.append(record)
                break
    return invalid


def summarize(samples: Sequence[Sample], records: Sequence[RequestRecord]) -> MachineState | None:
    """Return the machine's state over a run; None without samples. records: all measured ones, those measured again too."""
    if not samples:
        return None
    values = [s.probe_ms for s in samples]
    # Neighbouring samples are alike, so the interval is that of the medians of bins.
    bins = np.array_split(np.array(values), min(PROBE_BINS, len(values)))
    low, high = median_interval([float(np.median(part)) for part in bins])
    last = {r.id: r for r in records}
    gpu_speed, slow_parts = gpu_health(samples, records)
    return MachineState(
        probe=samples[-1].probe,
        samples=len(samples),
        probe_ms=statistics.median(values),
        low=low,
        high=high,
        spans=unsteady(samples),
        marked=sum(r.load.invalid is not None for r in records),
        left=sum(r.load.invalid is not None for r in last.values()),
        gpu_speed=gpu_speed,
        slow_parts=slow_parts,
    )


def findings(state: MachineState | None, requests: int, backends: Sequence[str]) -> list[Confound]:
    """Return what the machine's state limits. requests: measured ones that count."""
    if state is None:
        return []
    return [*_slow_gpu(state, backends), *_unsteady(state, requests, backends)]


def _slow_gpu(state: MachineState, backends: Sequence[str]) -> list[Confound]:
    if not state.slow_parts:
        return []
    parts = ", ".join(state.slow_parts)
    return [finding("machine_slow", *backends, speed=state.gpu_speed, parts=parts)]


def _unsteady(state: MachineState, requests: int, backends: Sequence[str]) -> list[Confound]:
    if not state.marked:
        return []
    causes = "; ".join(dict.fromkeys(span.cause for span in state.spans))[:300]
    if state.left:
        figures = {"causes": causes, "left": state.left, "of": requests}
        return [finding("machine_unsettled", *backends, **figures)]
    seconds = 0.0
    end = 0.0
    for span in state.spans:  # in order of their start; they may overlap
        seconds += max(0.0, span.end_unix_s - max(span.start_unix_s, end))
        end = max(end, span.end_unix_s)
    figures = {"causes": causes, "seconds": seconds, "marked": state.marked}
    return [finding("machine_unsteady", *backends, **figures)]


def unequal(stored: MachineState | None, new: MachineState | None) -> str:
    """Return how this machine differs from that of a stored run by the probe, "" where it does not or both are not known."""
    if stored is None or new is None or stored.probe != new.probe:
        return ""
    if not (stored.low and stored.high and new.low and new.high):
        return ""
    low = new.low / stored.high - 1
    high = new.high / stored.low - 1
    if low <= MIN_CHANGE / 4 and high >= -MIN_CHANGE / 4:
        return ""
    change = new.probe_ms / stored.probe_ms - 1
    return (
        f"the machines are not equal: the probe takes {new.probe_ms:.3g} ms here, {stored.probe_ms:.3g} ms in the stored run "
        f"({change:+.1%} [{low:+.1%}, {high:+.1%}])"
    )
