"""Write the shards of the output as tasks on a Ray cluster. Every machine has the same folders; a task writes one shard.

A task gets the job and the name of its shard and makes the plan itself, so only a few settings travel. A worker that dies
loses its current shard, and Ray gives that task to another one.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from annie_quant.checkpoint.writer import ShardPlan
from annie_quant.core.errors import AnnieError, EnvironmentFault, need
from annie_quant.core.progress import ByteProgress
from annie_quant.quantize.job import Job

RETRIES = 5  # of a shard whose worker died
CONNECT_S = 5.0
WriteShard = Callable[[Job, str], None]


def write_shards(job: Job, write_shard: WriteShard, shards: list[ShardPlan], progress: ByteProgress) -> None:
    """Call write_shard(job, name) for every shard on the cluster at job.options["ray"]; "local" starts one."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = need("ray", "ray")
    address = job.options["ray"]
    started = not ray.is_initialized()
    if started:
        try:
            connect(address)
            ray.init(address=None if address == "local" else address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, ValueError, RuntimeError) as error:
            raise EnvironmentFault(
                f"no Ray cluster at {address}: {(str(error) or type(error).__name__).splitlines()[0][:120]}",
                "start one with `ray start --head`, or use --ray local",
            ) from None
    options = {k: v if k != "input_scales" or not v else str(Path(v).resolve()) for k, v in job.options.items()}
    absolute = replace(job, model=job.model.resolve(), output=job.output.resolve(), options=options)
    task = ray.remote(max_retries=RETRIES)(run_task)
    waiting = {task.remote(write_shard, absolute, shard.name): shard.work_bytes for shard in shards}
    try:
        while waiting:
            done, _ = ray.wait(list(waiting))
            for one in done:
                ray.get(one)
                progress.add(waiting.pop(one))
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
        if started:
            ray.shutdown()


def connect(address: str) -> None:
    """Raise OSError where HOST:PORT does not listen; Ray itself would wait for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()


def run_task(write_shard: WriteShard, job: Job, name: str) -> None:
    """Write one shard, in a worker."""
    if not job.output.is_dir():
        raise EnvironmentFault(
            f"{job.output}: this worker does not have that folder", "give folders that every machine shares"
        )
    write_shard(job, name)
