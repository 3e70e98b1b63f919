"""Compare the ratios in results/ with their targets: python bench/check.py [results]. Exits with 1 on a miss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

# Each script's ratios, and how great each may be.
TARGETS: dict[str, dict[str, float]] = {
    "tiny": {
        ".backward(): remat adds / torch adds": 0.5,
        "grad: remat adds / torch adds to .backward()": 1.0,
        "vmap(grad): remat / no remat": 2.0,
    },
    "transformer": {
        "grad(remat): peak / torch's .backward()": 1.0,
        "grad(remat): time / torch's .backward()": 1.0,
        "grad(remat): time / grad without remat": 1.0,
        "grad(remat): FLOPs / torch's .backward()": 1.0,
        ".backward() of remat: peak / torch's .backward()": 1.0,
        ".backward() of remat: time / torch's .backward()": 1.0,
        ".backward() of remat: time / grad without remat": 1.0,
        ".backward() of remat: FLOPs / torch's .backward()": 1.0,
        "per-sample gradients: time / no remat": 1.2,
        "per-sample gradients: peak / no remat": 0.8,
        "Hessian-vector product: time / no remat": 1.2,
        "Hessian-vector product: peak / no remat": 0.8,
    },
}


@dataclass(frozen=True)
class Verdict:
    script: str
    ratio: str
    value: float | None  # None: not measured
    target: float

    @property
    def missed(self) -> bool:
        return self.value is None or self.value > self.target

    @property
    def text(self) -> str:
        value = "not measured" if self.value is None else f"{self.value:.3f}, {'MISSED' if self.missed else 'met'}"
        return f"{self.ratio} <= {self.target}: {value}"


def verdicts(script: str, ratios: Mapping[str, float | None]) -> Iterator[Verdict]:
    """How a script's ratios meet their targets."""
    for name, target in TARGETS.get(script, {}).items():
        yield Verdict(script, name, ratios.get(name), target)
