"""Citations, and the papers of speculative decoding itself. A policy's own papers are in its file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Reference:
    """``arxiv`` is the identifier; ``venue``, where else the paper has appeared."""

    authors: str
    year: int
    title: str
    arxiv: str
    venue: str | None = None

    def short(self) -> str:
        """A short form for tables."""
        names = self.authors.split(", ")
        return f"{names[0]} {self.year}" if len(names) == 1 else f"{names[0]} et al. {self.year}"

    def markdown(self) -> str:
        """One line."""
        venue = f"{self.venue}; " if self.venue else ""
        link = f"[arXiv:{self.arxiv}](https://arxiv.org/abs/{self.arxiv})"
        return f"{self.authors} ({self.year}). *{self.title}*. {venue}{link}"


LEVIATHAN_2023 = Reference(
    authors="Leviathan, Kalman, Matias",
    year=2023,
    title="Fast Inference from Transformers via Speculative Decoding",
    venue="ICML 2023",
    arxiv="2211.17192",
)
CHEN_2023 = Reference(
    authors="Chen, Borgeaud, Irving, Lespiau, Sifre, Jumper",
    year=2023,
    title="Accelerating Large Language Model Decoding with Speculative Sampling",
    arxiv="2302.01318",
)
DALIRI_2024 = Reference(
    authors="Daliri, Musco, Suresh",
    year=2024,
    title="Coupling without Communication and Drafter-Invariant Speculative Decoding",
    arxiv="2408.07978",
)
# The papers of every run with a draft, and in addition of each --acceptance.
OF_SPECULATION = (LEVIATHAN_2023, CHEN_2023)
OF_ACCEPTANCE: dict[str, tuple[Reference, ...]] = {"rejection": (), "gumbel": (DALIRI_2024,)}
