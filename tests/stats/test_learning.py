"""What was learned on the way, in words."""

from specdist.stats.learning import learned
from specdist.stats.shard import Stats


def test_a_run_that_learned_says_what() -> None:
    assert learned(Stats()) is None
    stats = Stats(adapt_ns=2_500_000_000, num_adapt_steps=12, num_adapt_switches=1)
    assert learned(stats) == "12 steps in 2.5 s of idle time, a new draft once"
    stats.num_adapt_judged, stats.num_adapt_by_draft, stats.num_adapt_by_copy = 200, 90, 100
    words = learned(stats)
    assert words is not None
    assert words.endswith("; of the tokens compared the draft drafts 45.0%, the copy 50.0%")
