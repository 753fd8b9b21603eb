"""Shards of the output as tasks on a Ray cluster: every machine sees the same folders, each makes whole shards.

A task names its shard and plans anew from the job, so nothing but a few settings travels. A worker that dies loses the
shard it was at, and Ray gives that task to another.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from annie_quant.errors import AnnieError, EnvironmentFault, need
from annie_quant.quantize.job import Job
from annie_quant.quantize.meter import Meter

RETRIES = 5  # of a shard whose worker died
CONNECT_S = 5.0
MakeShard = Callable[[Job, str], None]


def make(job: Job, shards: dict[str, int], meter: Meter, make_shard: MakeShard) -> None:
    """make_shard(job, name) for the named shards (name → bytes of source) on the cluster at job.options["ray"]; "local"
    starts one."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = need("ray", "ray")
    address = job.options["ray"]
    joined = not ray.is_initialized()
    if joined:
        try:
            answers(address)
            ray.init(address=None if address == "local" else address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, ValueError, RuntimeError) as error:
            raise EnvironmentFault(
                f"no Ray cluster at {address}: {(str(error) or type(error).__name__).splitlines()[0][:120]}",
                "start one with `ray start --head`, or use --ray local",
            ) from None
    options = {k: v if k != "input_scales" or not v else str(Path(v).resolve()) for k, v in job.options.items()}
    there = replace(job, model=job.model.resolve(), output=job.output.resolve(), options=options)
    task = ray.remote(max_retries=RETRIES)(make_one)
    waiting = {task.remote(make_shard, there, name): size for name, size in shards.items()}
    try:
        while waiting:
            done, _ = ray.wait(list(waiting))
            for one in done:
                ray.get(one)
                meter.add(waiting.pop(one))
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        raise (
            cause
            if isinstance(cause, AnnieError | OSError)
            else EnvironmentFault(f"a Ray worker failed: {type(cause).__name__}: {str(cause).splitlines()[0][:120]}")
        ) from None
    except ray.exceptions.RayError as error:
        raise EnvironmentFault(
            f"Ray: {str(error).splitlines()[0][:160]}", "run the same command again: finished shards are kept"
        ) from None
    finally:
        for one in waiting:
            ray.cancel(one)
        if joined:
            ray.shutdown()


def answers(address: str) -> None:
    """Raises OSError where HOST:PORT does not listen; Ray itself would wait for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()


def make_one(make_shard: MakeShard, job: Job, name: str) -> None:
    """One shard, in a worker."""
    if not job.output.is_dir():
        raise EnvironmentFault(f"{job.output}: not seen by this worker", "give folders that every machine shares")
    make_shard(job, name)
