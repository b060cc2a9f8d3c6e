"""The queue alone, with a clock made of numbers."""

from __future__ import annotations

import random

from nextscale.serve.batching import BatchQueue


def queue(*items: tuple[str, float], batch_wait: float = 0.0, age_limit: float = 2.0) -> BatchQueue[str]:
    """Items such as "a1": the letter is the key."""
    made = BatchQueue[str](batch_wait, age_limit)
    for item, since in items:
        made.add(item, item[0], since)
    return made


def test_the_oldest_leads_and_others_of_its_kind_join() -> None:
    q = queue(("a1", 0), ("b1", 0), ("a2", 0), ("b2", 0), ("a3", 0))
    assert q.next_batch(0, lambda item: 2) == (["a1", "a2"], None)
    assert q.next_batch(0, lambda item: 2) == (["b1", "b2"], None)
    assert q.next_batch(0, lambda item: 2) == (["a3"], None)
    assert q.next_batch(0, lambda item: 2) == ([], None)


def test_nobody_is_passed_for_longer_than_the_age_limit() -> None:
    items = ("a1", 0), ("b1", 0), ("a2", 1)
    assert queue(*items, age_limit=2).next_batch(1.9, lambda item: 4)[0] == ["a1", "a2"]
    assert queue(*items, age_limit=2).next_batch(2.0, lambda item: 4)[0] == ["a1"]


def test_a_batch_waits_for_others_until_it_is_full_or_old() -> None:
    q = queue(("a1", 10.0), batch_wait=0.5)
    assert q.next_batch(10.0, lambda item: 2) == ([], 0.5)
    assert q.next_batch(10.25, lambda item: 2) == ([], 0.25)
    assert len(q) == 1
    q.add("a2", "a", 10.3)
    assert q.next_batch(10.3, lambda item: 2) == (["a1", "a2"], None)
    assert queue(("a1", 10.0), batch_wait=0.5).next_batch(10.5, lambda item: 2) == (["a1"], None)
    assert queue(("a1", 10.0), batch_wait=0.5).next_batch(10.0, lambda item: 1) == (["a1"], None)


def test_who_leaves_is_gone() -> None:
    q = queue(("a1", 0), ("b1", 0), ("a2", 0))
    assert q.remove(lambda item: item[0] == "a") == ["a1", "a2"]
    assert q.next_batch(0, lambda item: 4) == (["b1"], None)


def test_every_item_is_served_once_and_none_starves() -> None:
    rng = random.Random(3)
    q, now, added, served, waited = BatchQueue[str](0.01, 0.5), 0.0, [], [], dict[str, float]()
    for step in range(2000):
        if rng.random() < 0.8:
            added.append(f"{rng.choice('abc')}{step}")
            q.add(added[-1], added[-1][0], now)
            waited[added[-1]] = now
        batch, wait = q.next_batch(now, lambda item: 4)
        assert len({item[0] for item in batch}) <= 1
        assert len(batch) <= 4
        served += batch
        for item in batch:
            waited[item] = now - waited[item]
        now += 0.1 if batch else wait or 0.01
    while len(q):
        now += 0.1
        served += q.next_batch(now, lambda item: 4)[0]
    assert sorted(served) == sorted(added)
    assert max(waited[item] for item in added[:1900]) < 5
