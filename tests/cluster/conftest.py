"""Ray on this machine: two cores, no dashboard, nothing sent anywhere. Without Ray nothing here is collected."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest

from nextscale.cluster.environment import prepare

collect_ignore_glob = [] if importlib.util.find_spec("ray") else ["test_*.py"]
prepare()
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONPATH"] = os.path.dirname(__file__) + os.pathsep + os.path.dirname(os.path.dirname(__file__))


@pytest.fixture(scope="module")
def two_cores() -> Iterator[None]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=10**8, log_to_driver=False)
    yield
    ray.shutdown()
