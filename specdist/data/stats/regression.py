"""The least-squares fit T = t_draft N_draft + t_target N_target (SpecDec++, sections 3.2 and 5.2), from
integers that add up."""

from __future__ import annotations

from dataclasses import dataclass

from specdist.data.stats.fields import stat

NS_PER_S = 1_000_000_000
# Two regressors are told apart if the squared sine of the angle between them exceeds this.
INDEPENDENT = 1e-3


@dataclass
class CostSums:
    """Sums over observations of a time T with D passes of the draft and V of the target."""

    num: int = stat("regression of time T on the numbers of passes, over completions: number of completions")
    t: int = stat("sum of T, the nanoseconds of drafting and verification while a completion was running")
    tt: int = stat("sum of T²")
    dd: int = stat("sum of D², D being the draft passes in that time")
    dv: int = stat("sum of D V, V being the target passes in that time")
    vv: int = stat("sum of V²")
    dt: int = stat("sum of D T")
    vt: int = stat("sum of V T")

    def observe(self, *, time_ns: int, num_draft_passes: int, num_target_passes: int) -> None:
        self.num += 1
        self.t += time_ns
        self.tt += time_ns * time_ns
        self.dd += num_draft_passes * num_draft_passes
        self.dv += num_draft_passes * num_target_passes
        self.vv += num_target_passes * num_target_passes
        self.dt += num_draft_passes * time_ns
        self.vt += num_target_passes * time_ns

    def fit(self) -> dict[str, float] | None:
        """``t_draft_s``, ``t_target_s`` and R²; None if the passes do not determine both, or explain nothing.

        With a fixed draft length N_draft is almost a multiple of N_target, and the solution is arbitrary.
        """
        determinant = self.dd * self.vv - self.dv**2
        if self.num < 3 or determinant <= INDEPENDENT * self.dd * self.vv:
            return None
        t_draft = (self.dt * self.vv - self.vt * self.dv) / determinant
        t_target = (self.vt * self.dd - self.dt * self.dv) / determinant
        found = self._result(t_draft, t_target)
        # There is no constant term: a fit may be worse than the mean of the times.
        is_sound = min(t_draft, t_target) >= 0 and found is not None and found["r_squared"] > 0
        return found if is_sound else None

    def explained_by(self, t_draft_ns: float, t_target_ns: float) -> dict[str, float] | None:
        """R² of given costs per pass, such as those measured directly."""
        return self._result(t_draft_ns, t_target_ns) if self.num >= 3 else None

    def _result(self, t_draft: float, t_target: float) -> dict[str, float] | None:
        total = self.tt - self.t**2 / self.num
        if total <= 0:
            return None
        unexplained = (
            self.tt
            - 2 * (t_draft * self.dt + t_target * self.vt)
            + t_draft**2 * self.dd
            + 2 * t_draft * t_target * self.dv
            + t_target**2 * self.vv
        )
        return {
            "t_draft_s": t_draft / NS_PER_S,
            "t_target_s": t_target / NS_PER_S,
            "r_squared": 1 - unexplained / total,
        }
