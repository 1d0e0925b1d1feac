"""What a planted fault is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent.parent


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One fault.

    Attributes:
        name: for reports and ``--only``.
        file: the path of the file below ``specdist/``.
        old, new: text that is in the file exactly once, and its replacement.
        tests: what pytest is to run, in this order, until one fails: those that ought to notice the fault,
            the cheapest first.
        is_dangerous: it would silently bias or lose output; planted in every run of the test suite.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    is_dangerous: bool = False

    @property
    def path(self) -> Path:
        """Relative to the root of a copy."""
        return Path("specdist") / self.file

    def planted(self, source: str) -> str:
        """The file's text with the fault. Raises ValueError unless the text to replace is there exactly once."""
        count = source.count(self.old)
        if count != 1:
            raise ValueError(
                f"mutant {self.name}: its text stands {count} times in {self.path}, not once: write it anew"
            )
        return source.replace(self.old, self.new)
