"""NOVA's first question: when has the entropy stopped growing? Plain numbers on the host, one object per image."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Growth:
    """Mean entropies of the scales 1, 2, ... as they become known."""

    t_est: int
    alpha: float
    entropy: dict[int, float] = field(default_factory=dict)
    star: int | None = None  # the scale of inflection; reduction is active from the next one on
    reason: str = "never"

    def add(self, t: int, entropy: float) -> None:
        self.entropy[t] = entropy
        if self.star is not None or t <= self.t_est:
            return
        smoothed, eta = self.smoothed(t), self.eta
        if eta is None or smoothed is None:
            return
        if eta <= 0:  # nothing to fall below: start as early as the rule allows
            self.star, self.reason = t, "flat_start"
        elif smoothed <= self.alpha * eta:
            self.star, self.reason = t, "inflection"

    def growth(self, t: int) -> float | None:
        if t not in self.entropy or t - 1 not in self.entropy:
            return None
        return self.entropy[t] - self.entropy[t - 1]

    def smoothed(self, t: int) -> float | None:
        now, before = self.growth(t), self.growth(t - 1)
        return None if t <= self.t_est or now is None or before is None else (now + before) / 2

    @property
    def eta(self) -> float | None:
        """Mean growth of the first scales."""
        early = [self.growth(t) for t in range(2, self.t_est + 1)]
        known = [g for g in early if g is not None]
        return sum(known) / len(known) if known and len(known) == len(early) else None

    def latest(self, before: int) -> float | None:
        """The last growth known when scale `before` starts."""
        return next((g for t in range(before - 1, 1, -1) if (g := self.growth(t)) is not None), None)
