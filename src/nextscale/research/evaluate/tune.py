"""The fastest setting of a method whose measured loss stays within a budget, found by search (optuna).

The search is seeded and images are kept in the folder, so a search that was stopped goes on where it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nextscale.errors import NextscaleError, choices
from nextscale.io.reading import read_json
from nextscale.methods import Method, get_method
from nextscale.methods.base import SCHEMA
from nextscale.methods.naming import PLAIN
from nextscale.research.evaluate.bench import Bench
from nextscale.research.evaluate.report import EvaluationReport
from nextscale.research.evaluate.statistics import ConfidenceInterval
from nextscale.research.prompt_checks import skipped

SPACES = Path(__file__).parent / "spaces.json"
LOSSES = {  # what can be lost, and how it is read off a row
    "scenes": "score of the plain images - score",
    "ssim": "1 - SSIM to the plain images",
    "perceptual": "perceptual distance to the plain images",
}
PENALTY = 1000.0  # the objective of a setting that loses too much: worse than any cost


@dataclass(frozen=True)
class Trial:
    method: Method
    cost: float
    losses: dict[str, float]
    row: dict[str, Any]

    def excess(self, budget: dict[str, float]) -> float:
        """By how much it loses too much, in budgets; 0 = within."""
        return max(max(self.losses[k] - most, 0.0) / max(most, 1e-6) for k, most in budget.items())


def read_budget(entries: list[str]) -> dict[str, float]:
    """`scenes=0.01` and the like."""
    budget = {}
    for entry in entries:
        name, equals, number = entry.partition("=")
        if name not in LOSSES or not equals:
            raise NextscaleError(f"--max-drop {entry!r} is not of the form name=number; names: {choices(LOSSES)}")
        try:
            budget[name] = float(number)
        except ValueError:
            raise NextscaleError(f"--max-drop {entry!r}: {number!r} is not a number") from None
        if not 0 <= budget[name] < float("inf"):
            raise NextscaleError(f"--max-drop {entry!r}: the number must be 0 or more")
    if not budget:
        raise NextscaleError("say with --max-drop how much may be lost, e.g. --max-drop scenes=0.01")
    return budget


def read_space(name: str, path: Path | None = None) -> dict[str, Any]:
    """Fields to search: a list of values, or {"low", "high"} with "step" or "log"."""
    get_method(name)
    content = read_json(path or SPACES, "a search space")
    space = content.get(name) if isinstance(content, dict) else None
    if not isinstance(space, dict) or not space:
        known = choices(content) if isinstance(content, dict) else "none"
        raise NextscaleError(f"{path or 'nextscale'} has no search space of {name}; it has: {known}")
    for field, values in space.items():
        _check_values(f"{path or 'nextscale'}, {name}.{field}", values)
    return space


def _check_values(where: str, values: Any) -> None:
    """Before a search trips over them."""
    if values == []:
        raise NextscaleError(f"{where}: the list of values is empty")
    if not isinstance(values, dict):
        return
    numbers = [values.get(k, 1) for k in ("low", "high", "step")]
    known = {"low", "high"} <= set(values) <= {"low", "high", "step", "log"}
    if not known or not all(isinstance(n, (int, float)) and not isinstance(n, bool) for n in numbers):
        raise NextscaleError(f'{where}: a range has the numbers "low" and "high", and perhaps "step" or "log"')
    low, high, step = numbers
    if not low <= high or step <= 0 or (values.get("log") and low <= 0):
        raise NextscaleError(f"{where}: low must be at most high, step above 0, and low above 0 for log")


def suggest(trial: Any, cls: type[Method], space: dict[str, Any]) -> Method:
    fields = {}
    for name, values in space.items():
        if isinstance(values, list):
            fields[name] = trial.suggest_categorical(name, values)
        elif isinstance(values, dict) and isinstance(values.get("low"), int) and not values.get("log"):
            fields[name] = trial.suggest_int(name, values["low"], values["high"], step=values.get("step", 1))
        elif isinstance(values, dict) and {"low", "high"} <= set(values):
            fields[name] = round(
                trial.suggest_float(name, values["low"], values["high"], log=values.get("log", False)), 4
            )
        else:
            fields[name] = values  # a fixed value
    return cls.from_fields(fields)


def tune(
    bench: Bench,
    name: str,
    budget: dict[str, float],
    space: dict[str, Any],
    trials: int,
    cost: str,
    show: bool | None = None,
) -> tuple[Trial, list[Trial]]:
    """The cheapest trial within the budget, and all of them."""
    try:
        import optuna
    except ImportError:
        raise NextscaleError("tune needs optuna: pip install 'nextscale[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if "perceptual" in budget and not bench.with_features:
        raise NextscaleError("the perceptual distance needs the extra eval: pip install 'nextscale[eval]'")
    cls, done = get_method(name), list[Trial]()

    def objective(trial: Any) -> float:
        method = suggest(trial, cls, space)
        same = next((t for t in done if t.method == method), None)
        found = same or measure(bench, method, cost, show)
        done.append(found)
        excess = found.excess(budget)
        return found.cost if not excess else PENALTY * (1 + excess)

    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0, n_startup_trials=min(10, trials)))
    study.optimize(objective, n_trials=trials)
    within = [t for t in done if not t.excess(budget)]
    if not within:
        near = min(done, key=lambda t: t.excess(budget))
        lost = ", ".join(f"{k} {v:.4f}" for k, v in near.losses.items() if k in budget)
        raise NextscaleError(f"none of {trials} settings of {name} stayed within the budget; the nearest lost {lost}")
    return min(within, key=lambda t: t.cost), done


def measure(bench: Bench, method: Method, cost: str, show: bool | None) -> Trial:
    report = EvaluationReport(bench.items, bench.run({PLAIN: None, "tried": method}, show=show), cost)
    row = report.row("tried", {})
    values = {k: v.value for k, v in row.values.items() if isinstance(v, ConfidenceInterval)}
    losses = {"scenes": -values["scenes change"], "ssim": 1 - values["ssim"]}
    if "perceptual" in values:
        losses["perceptual"] = values["perceptual"]
    return Trial(method, report.mean_of("tried", cost), losses, row.flat())


def as_preset(best: Trial, bench: Bench, budget: dict[str, float], cost: str, trials: int) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "name": best.method.name,
        "measured_on": bench.pipe.spec.name,
        "pictures": len(bench.items),
        "skipped": skipped(bench.skipped),
        "device": bench.pipe.device.type,
        "budget": budget,
        "trials": trials,
        "cost": {cost: best.cost},
        "losses": best.losses,
        "speed": best.row["speed"],
        "fields": best.method.to_dict()["fields"],
    }
