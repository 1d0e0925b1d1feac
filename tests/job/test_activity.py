"""A start that takes its time says what it does."""

import logging

import pytest

from specdist.job.ranks.activity import Activity, PhaseLog


def test_what_takes_longer_than_a_second_is_logged_and_again_when_its_time_has_doubled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = 100.0
    activity = Activity()
    phases = PhaseLog(activity, lambda: now_s)

    def lines_during(phase: str, seconds: float, *, has_progress: bool = False) -> list[str]:
        nonlocal now_s
        activity.begin(phase, has_progress=has_progress)
        caplog.clear()
        end_s = now_s + seconds
        while now_s < end_s:
            phases.look()
            now_s += 0.25
        return caplog.messages

    with caplog.at_level(logging.INFO):
        assert lines_during("checking the models", 1.0) == []
        assert lines_during("loading the target", 5.0) == [
            f"loading the target ({seconds} s so far)" for seconds in ("1.0", "2.0", "4.0")
        ]
        assert lines_during("loading the draft", 1.5) == ["loading the draft (1.0 s so far)"]
        assert lines_during("generating", 60.0, has_progress=True) == []
