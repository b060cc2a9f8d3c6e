"""The engine on graphs, emulated: after its warm-up it captures nothing, whatever guided images clients ask for."""

from __future__ import annotations

import copy
import math
import random

from support.emulated_graphs import EmulatedGraphs
from support.prompts import AnyText

from nextscale.pipeline import Pipeline
from nextscale.serve.engine import Engine, Limits
from nextscale.serve.jobs import ALL, Event, Failed, Finished, ImageJob
from nextscale.serve.served_model import ServedModel


def test_requests_of_any_kind_capture_nothing(infinity: Pipeline) -> None:
    pipe = copy.copy(infinity)
    pipe.executor, pipe.text_encoder = EmulatedGraphs(), AnyText(pipe)
    model = ServedModel(pipe, method="nova:t_est=2;alpha=10")
    model.warm_sizes = sorted(model.sizes, key=math.prod)[:2]
    engine, chance, events = Engine([model], Limits(max_batch=2, max_queue=200)), random.Random(0), list[Event]()
    engine.start(wait=True)
    captured, images = pipe.captured, 0
    assert captured
    for number in range(40):
        job = ImageJob(
            model.name,
            "red fox " * chance.randint(1, 4),
            tuple(range(number, number + chance.randint(1, 3))),
            chance.choice(["none", model.method, "nova:t_est=2;alpha=5"]),
            *reversed(chance.choice(model.warm_sizes)),
            negative_prompt=chance.choice([None, "blue"]),
            guidance_scale=chance.choice([None, 2.0, 7.5]),
            previews=chance.choice([0, 2, ALL]),
        )
        images += len(job.seeds)
        engine.submit(job, events.append)
    engine.drain(60)
    assert not [event for event in events if isinstance(event, Failed)]
    assert sum(isinstance(event, Finished) for event in events) == images
    assert pipe.captured == captured
