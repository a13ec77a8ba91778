"""The largest chunk that keeps a mixed step below its limit."""

from __future__ import annotations

import pytest

from compiled_engine.step_times import StepTimes

# 1 ms plus 2 us a token
BASE = {n: 1e-3 + 2e-6 * n for n in (32, 256, 1024, 4096, 8192)}


def test_step_times_most_tokens_shrinks_with_context():
    times = StepTimes(10e-3, BASE, 1e-9)
    assert times.most_tokens(0) == 1024  # 9 ms are planned: 4096 tokens take 9.2 ms
    assert times.most_tokens(10_000) == 256
    assert times.most_tokens(100_000_000) == 32  # nothing fits: the smallest step still goes on


def test_step_times_learn_up_at_once_and_down_slowly():
    times = StepTimes(10e-3, BASE, 1e-9)
    before = times.estimate(1024, 50_000)
    for _ in range(100):
        times.learn(1024, 50_000, BASE[1024] + 2e-9 * 1024 * 50_000)
    slow = times.estimate(1024, 50_000)
    assert slow == pytest.approx(BASE[1024] + 2e-9 * 1024 * 50_000)
    times.learn(1024, 50_000, BASE[1024] + 1e-9 * 1024 * 50_000)
    assert before < times.estimate(1024, 50_000) < slow
    for _ in range(100):
        times.learn(1024, 50_000, BASE[1024] + 1e-9 * 1024 * 50_000)
    assert times.estimate(1024, 50_000) == pytest.approx(before, rel=0.01)


def test_step_times_one_slow_step_does_not_decide():
    """A pause of the host looks like a slow step; it must not shrink chunks for good."""
    times = StepTimes(10e-3, BASE, 1e-9)
    times.learn(1024, 50_000, 5.0)
    assert times.most_tokens(0) == 1024
    for _ in range(60):
        times.learn(1024, 50_000, BASE[1024] + 1e-9 * 1024 * 50_000)
    assert times.estimate(1024, 50_000) == pytest.approx(BASE[1024] + 51.2e-3, rel=0.1)


def test_step_times_ignore_what_says_nothing():
    times = StepTimes(10e-3, BASE, 1e-9)
    before = times.estimate(1024, 50_000)
    times.learn(1024, 100, 1.0)  # hardly any context
    times.learn(77, 50_000, 1.0)  # a size that was never measured
    assert times.estimate(1024, 50_000) == before
