"""`nextscale serve --replicas`: Ray Serve on this machine, started and ended with the command."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from nextscale.cluster.environment import LOOPBACK, prepare
from nextscale.errors import NextscaleError
from nextscale.serve import proxy
from nextscale.serve.server import STOPPED, listen
from nextscale.serve.setup import ServeOptions

OBJECT_STORE = 10**8  # bytes: answers pass through it one by one


def serve_replicas(
    options: ServeOptions,
    replicas: int | str,
    host: str,
    port: int,
    *,
    grace: float = 30.0,
    log_level: str = "warning",
    say: Callable[[str], None] = print,
) -> None:
    """Serve copies of the models until a signal comes. Everything is checked before Ray is started."""
    resolved = options.resolved()
    have = {"CPU": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1}
    have["GPU"] = torch.cuda.device_count()
    sharing = scaling(replicas, resolved, have)
    with listen(host, port) as taken:
        port = taken.getsockname()[1]
    os.environ.setdefault(proxy.VARIABLE, proxy.PATH)
    if options.api_key is not None:
        os.environ["NEXTSCALE_API_KEY"] = options.api_key  # no config shows it
    prepare()
    import ray
    from ray import serve

    from nextscale.serve.ray import NAME, deployment, ongoing

    level = logging.ERROR if log_level == "warning" else getattr(logging, log_level.upper())  # Ray warns of much
    ray.init(
        address="local",
        num_cpus=have["CPU"],
        include_dashboard=False,
        object_store_memory=OBJECT_STORE,
        logging_level=level,
        _node_ip_address=LOOPBACK,
    )
    logging.getLogger("ray.serve").setLevel(level)
    stop = Stop()
    try:
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        say(f"warming up; soon at {url}")
        logs = {"log_level": level, "enable_access_log": level <= logging.INFO}
        serve.start(http_options={"host": host, "port": port}, logging_config=logs)
        made = deployment.options(
            **sharing,
            max_ongoing_requests=ongoing(resolved.max_queue, resolved.max_batch or 1),
            graceful_shutdown_timeout_s=grace,
            logging_config=logs,
            user_config=as_config(options),
        )
        serve.run(made.bind(), name=NAME, route_prefix="/")
        stop.is_loading = False
        say(f"ready at {url}")
        stop.asked.wait()
        say(f"shutting down, for at most {grace:g} s; again to stop now")
        serve.delete(NAME)
        serve.shutdown()
    except StopLoading:
        say("stopped while loading")
    finally:
        stop.is_loading = False
        ray.shutdown()  # and with it all processes, whatever they do


def scaling(replicas: int | str, options: ServeOptions, have: Mapping[str, float]) -> dict[str, Any]:
    """How many replicas, and what each takes: a GPU, or its share of the cores."""
    on_gpu = str(options.device).startswith("cuda")
    there = int(have.get("GPU" if on_gpu else "CPU", 0))
    least = replicas if isinstance(replicas, int) else 1
    if least > there:
        raise NextscaleError(
            f"--replicas {least} needs as many {'GPUs' if on_gpu else 'cores'}; this machine has {there}"
        )
    takes = {"num_cpus": 1, "num_gpus": 1} if on_gpu else {"num_cpus": there // least if least > 1 else 1}
    if isinstance(replicas, int):
        return {"num_replicas": replicas, "ray_actor_options": takes}
    target = 2 * (options.max_batch or 1)
    auto = {"min_replicas": 1, "max_replicas": there, "target_ongoing_requests": target}
    return {"num_replicas": None, "autoscaling_config": auto, "ray_actor_options": takes}


def as_config(options: ServeOptions) -> dict[str, Any]:
    """The options as `user_config`, without those left out and the key."""
    given = {name: value for name, value in dataclasses.asdict(options).items() if value not in (None, ())}
    given.pop("api_key", None)
    models = [str(Path(m).absolute()) if Path(m).exists() else m for m in options.model]
    origins = list(options.cors_origin)
    return {**given, **({"model": models} if models else {}), **({"cors_origin": origins} if origins else {})}


class StopLoading(BaseException):
    """No error, so that nobody on the way takes it for one."""


class Stop:
    """The first signal asks to stop, which nobody has to wait for while the models are loaded; the second ends the
    process at once."""

    def __init__(self) -> None:
        self.asked, self.is_loading = threading.Event(), True
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, *given: Any) -> None:
        if self.asked.is_set():
            os.write(2, b"stopped\n")
            os._exit(STOPPED)
        self.asked.set()
        if self.is_loading:
            raise StopLoading
