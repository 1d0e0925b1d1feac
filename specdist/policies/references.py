"""The papers whose methods this project implements, for the README and for the card of a run's folder."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Reference:
    """``arxiv`` is the identifier; ``venue`` where a paper has appeared elsewhere, too."""

    authors: str
    year: int
    title: str
    arxiv: str
    venue: str | None = None

    def markdown(self) -> str:
        """One line."""
        venue = f"{self.venue}; " if self.venue else ""
        link = f"[arXiv:{self.arxiv}](https://arxiv.org/abs/{self.arxiv})"
        return f"{self.authors} ({self.year}). *{self.title}*. {venue}{link}"


REFERENCES = {
    "leviathan2023": Reference(
        authors="Leviathan, Kalman, Matias",
        year=2023,
        title="Fast Inference from Transformers via Speculative Decoding",
        venue="ICML 2023",
        arxiv="2211.17192",
    ),
    "chen2023": Reference(
        authors="Chen, Borgeaud, Irving, Lespiau, Sifre, Jumper",
        year=2023,
        title="Accelerating Large Language Model Decoding with Speculative Sampling",
        arxiv="2302.01318",
    ),
    "mamou2024": Reference(
        authors="Mamou, Pereg, Korat, Berchansky, Timor, Wasserblat, Schwartz",
        year=2024,
        title="Dynamic Speculation Lookahead Accelerates Speculative Decoding of Large Language Models",
        arxiv="2405.04304",
    ),
    "huang2024": Reference(
        authors="Huang, Guo, Wang",
        year=2024,
        title="SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths",
        arxiv="2405.19715",
    ),
    "zhang2024": Reference(
        authors="Zhang, Xu, Liang, Chen, He, Wang, Tu",
        year=2024,
        title="Draft Model Knows When to Stop: A Self-Verification Length Policy for Speculative Decoding",
        arxiv="2411.18462",
    ),
    "agrawal2024": Reference(
        authors="Agrawal, Jeon, Lee",
        year=2024,
        title="AdaEDL: Early Draft Stopping for Speculative Decoding of Large Language Models via an "
        "Entropy-based Lower Bound on Token Acceptance Probability",
        arxiv="2410.18351",
    ),
    "gautam2025": Reference(
        authors="Gautam, Shrestha, Reddy",
        year=2025,
        title="Token-Driven GammaTune: Adaptive Calibration for Enhanced Speculative Decoding",
        arxiv="2504.00030",
    ),
    "zhong2025": Reference(
        authors="Zhong, Teku, Tandon",
        year=2025,
        title="Speeding up Speculative Decoding via Sequential Approximate Verification (SPRINTER)",
        arxiv="2502.04557",
    ),
    "liu2024": Reference(
        authors="Liu, Park, Hu, Kwon, Li, Zhang, Du, Mo, You, Cheung, Deng, Stoica, Zhang",
        year=2024,
        title="TurboSpec: Closed-loop Speculation Control System for Optimizing LLM Serving Goodput (first "
        "published as SmartSpec: Optimizing Speculative Decoding for Serving Large Language Models Using "
        "Goodput)",
        arxiv="2406.14066",
    ),
    "daliri2024": Reference(
        authors="Daliri, Musco, Suresh",
        year=2024,
        title="Coupling without Communication and Drafter-Invariant Speculative Decoding",
        arxiv="2408.07978",
    ),
}
OF_SPECULATION = ("leviathan2023", "chen2023")
OF_POLICY = {
    "fixed": (),
    "hf_heuristic": (),
    "confidence": ("mamou2024",),
    "svip": ("zhang2024",),
    "adaedl": ("agrawal2024",),
    "gammatune": ("gautam2025",),
    "gammatune_plus": ("gautam2025",),
    "specdecpp": ("huang2024",),
    "sprinter": ("zhong2025",),
    "goodput": ("liu2024",),
    "none": (),
}
OF_ACCEPTANCE: dict[str, tuple[str, ...]] = {"rejection": (), "gumbel": ("daliri2024",)}


def references_of(*, policy: str, acceptance: str) -> list[Reference]:
    """What a run's methods are from; nothing where the target is alone."""
    if policy == "none":
        return []
    return [REFERENCES[key] for key in (*OF_SPECULATION, *OF_POLICY[policy], *OF_ACCEPTANCE[acceptance])]
