"""What a run's seed fixes, in the words of help, start, card, report and manuals."""

from __future__ import annotations

# What the seed fixes, by the class that :func:`specdist.job.run.manifest.reproducibility` decides.
SEED_FIXES = {
    "tokens": "The seed fixes the tokens, up to floating point, whatever the batch, the shards or a restart.",
    "distribution": "The seed fixes the distribution but not the tokens: they depend on the rest of "
    "the batch, by block lengths or by what is rounded to 8 bits.",
}
# The same rule for people.
WHEN_TOKENS = (
    "With --temperature 0, --acceptance gumbel or --overlap asynchronous a seed fixes the tokens. Else it "
    "does with policies other than goodput, if there is no draft on a rank of its own with --overlap auto; "
    "otherwise, as by default, it fixes the distribution alone. So it does where inputs or a cache are "
    "rounded to 8 bits: the target's always, a draft's with rejection."
)
TOKENS_ROUND = (
    "On a GPU, and in half precision, rounding depends on the number of tokens in a pass, and can decide "
    "between two tokens that are nearly equally likely."
)


def seed_fixes(reproducibility: str, *, is_up_to_rounding: bool) -> str:
    """What the seed fixes, for people. Both arguments are as in the manifest."""
    rounds = reproducibility == "tokens" and is_up_to_rounding
    return SEED_FIXES[reproducibility] + (f" {TOKENS_ROUND}" if rounds else "")
