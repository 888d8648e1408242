"""When requests go to the cluster cache, and for how long their answers are waited for."""

import pytest

from fusefs.cluster_cache import policy
from fusefs.cluster_cache.policy import Breaker, Deadline, Sampling


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_deadline_is_three_means_within_its_bounds() -> None:
    deadline = Deadline()
    assert deadline.wait_s == policy.MOST_S
    deadline.note_first_byte(0.03)
    assert deadline.wait_s == pytest.approx(0.09)
    for _ in range(200):
        deadline.note_first_byte(0.001)
    assert deadline.wait_s == policy.LEAST_S
    for _ in range(200):
        deadline.note_first_byte(2.0)
    assert deadline.wait_s == policy.MOST_S


def test_late_answers_lengthen_the_deadline_while_all_are_slow() -> None:
    deadline = Deadline()
    deadline.note_late(9.0)
    assert deadline.wait_s == policy.MOST_S, "nothing is known yet"
    deadline.note_first_byte(0.02)
    for _ in range(50):
        deadline.note_late(0.09)
    assert deadline.wait_s > 0.2
    for _ in range(300):
        deadline.note_first_byte(0.005)
        deadline.note_first_byte(0.005)
        deadline.note_late(0.09)
    assert deadline.wait_s < 0.06, "one of three servers that hangs lengthens nothing"


def test_useless_answers_open_the_breaker_only_where_nothing_else_comes() -> None:
    breaker = Breaker(Time())
    for _ in range(30):  # one of three volumes is lost
        breaker.note_failure(policy.USELESS)
        breaker.note_success()
        breaker.note_success()
    for _ in range(11):
        breaker.note_failure(policy.USELESS)
    assert breaker.is_closed
    breaker.note_failure(policy.USELESS)
    assert not breaker.is_closed


def test_while_nothing_is_found_some_lookups_are_made_and_all_after_a_hit() -> None:
    time = Time()
    sampling = Sampling(time)

    def made(count: int) -> int:
        looked = 0
        for _ in range(count):
            if sampling.wants_lookup():
                looked += 1
                sampling.note_miss()
        return looked

    assert made(policy.MISSES) == policy.MISSES
    assert made(10 * policy.SAMPLE) == 10
    time.now += policy.SAMPLE_EVERY_S
    assert sampling.wants_lookup()
    sampling.note_hit()
    assert made(policy.MISSES) == policy.MISSES
