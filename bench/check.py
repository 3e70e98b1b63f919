"""Compare the ratios in results/ with their targets: python bench/check.py [results]. Exits with 1 on a miss."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

# Each script's ratios, and how great each may be. They are ratios of what was measured in one process, never seconds.
TARGETS: dict[str, dict[str, float]] = {
    "tiny": {
        f"{function}, {ratio}": target
        for function, of_torch in {"tanh(x @ w)": 0.9, "sin(x)": 0.9, "two linear layers": 1.0}.items()
        for ratio, target in {
            ".backward(): remat adds / torch adds": of_torch,
            "grad: remat adds / torch adds to .backward()": 1.3,
            "vmap(grad): remat / no remat": 2.1,
        }.items()
    },
    "blocks": {
        f".backward(), {kind}: remat / torch": 0.9
        for kind in ("a closure", "with a dataclass of settings", "with a try", "with a dict store", "with a module")
    }
    | {
        "the dearest kind of function / a closure": 1.1,
        "grad: remat / no remat": 2.2,
        "vmap(grad): remat / no remat": 2.0,
        "jvp(grad): remat / no remat": 1.5,
        "grad(grad): remat / no remat": 2.0,
        "one of 800 modules: remat / torch": 1.0,
        "a nest of 60: remat / torch": 3.0,
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
        "grad, dots_saveable: time / no remat": 1.0,
        "grad, dots_saveable: peak / no remat": 0.8,
        "grad, everything_saveable: time / no remat": 1.0,
        "grad, everything_saveable: peak / no remat": 0.8,
    }
    | {
        f"{work}{policy}: {ratio}": target
        for work in ("per-sample gradients", "Hessian-vector product")
        for policy in ("", ", dots_saveable", ", everything_saveable")
        for ratio, target in {"time / no remat": 1.2, "peak / no remat": 0.8}.items()
    },
    "chain": {
        f"{setting}: {ratio}": target
        for setting in (".backward()", "grad")
        for ratio, target in {
            "peak / (boundaries + one segment)": 1.1,
            "left to gc / peak": 0.0,
            "time per step / that at a quarter of the steps": 1.2,
        }.items()
    },
    "halving": {
        f"{setting}: {ratio}": 1.0
        for setting in (".backward()", "grad")
        for ratio in ("peak / (log2(n) + 4) activations", "forward ops / (n (log2(n) + 1))")
    },
    "loops": {
        f"{setting}, checkpoints={k}: {ratio}": 1.0
        for setting, ks in {".backward()": (140, 38), "grad": (38,), "vmap(grad)": (38,)}.items()
        for k in ks
        for ratio in ("peak / (k + 3 carries + one step)", "runs / (revolve + 1)")
    }
    | {f"checkpoints={k}: time / the schedule's arithmetic": 1.3 for k in ("k", "few")},
    "policies": {
        f"{setting}: {ratio}": target
        for setting in (".backward()", "grad")
        for ratio, target in {
            "everything_saveable, peak / no remat": 1.05,
            "everything_saveable, FLOPs / no remat": 1.0,
            "dots_saveable, FLOPs / no remat": 1.0,
        }.items()
    },
    "frontier": {"time / torch's selective, at its peaks": 1.0},
    "compat_call": {
        f"{function}: checkpoint adds / torch adds": 0.5
        for function in (
            *("tanh(x @ w)", "sin(x)", "two linear layers"),
            *("a TransformerEncoderLayer", "a linear layer with BatchNorm", "attention with rotary embeddings"),
            *("tanh(x @ w), with an append", "a TransformerEncoderLayer, with an append"),
            *("a linear layer with BatchNorm, with an append", "attention with rotary embeddings, with an append"),
        )
    },
    "random_draws": {
        "uniform / torch.rand": 2.5,
        "uniform / jitted jax.random.uniform": 1.0,
        "normal / torch.randn": 4.0,
        "uniform: peak / result": 4.0,
        "normal: peak / result": 4.0,
    },
    "gpu": {"offloading: time / the same policy with saving": 1.1},
}
OPTIONAL = {"gpu"}  # not every machine can run these


@dataclass(frozen=True)
class Verdict:
    """How a ratio meets its target. A value of None is one that the script says it could not measure."""

    script: str
    ratio: str
    value: float | str | None
    target: float

    @property
    def missed(self) -> bool:
        return self.is_missing or (self.value is not None and self.value > self.target)

    @property
    def is_missing(self) -> bool:
        """Whether the results are those of another version of the script, or of something that failed."""
        return isinstance(self.value, str)

    @property
    def cells(self) -> tuple[str, str, str]:
        """Value, target and whether it is met."""
        value = "" if self.value is None else self.value if isinstance(self.value, str) else f"{self.value:.3f}"
        return (
            value,
            f"<= {self.target:g}",
            "not measured" if self.value is None else "MISSED" if self.missed else "met",
        )


def verdicts(script: str, ratios: Mapping[str, float | None]) -> Iterator[Verdict]:
    """How a script's ratios meet their targets. A ratio that is not there is a miss."""
    for name, target in TARGETS.get(script, {}).items():
        yield Verdict(script, name, ratios.get(name, "missing"), target)


def table_of(found: list[Verdict], title: str) -> Table:
    table = Table("", "ratio", "value", "target", "", title=title)
    for verdict in found:
        table.add_row(verdict.script, verdict.ratio, *verdict.cells, style="red" if verdict.missed else "")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("results", type=Path, nargs="?", default=Path(__file__).parent / "results")
    folder: Path = parser.parse_args().results
    found: list[Verdict] = []
    for script in TARGETS:
        file = folder / f"{script}.json"
        if file.exists() or script not in OPTIONAL:
            found += verdicts(script, json.loads(file.read_text())["ratios"] if file.exists() else {})
    missing = sum(verdict.is_missing for verdict in found)
    title = f"{sum(v.missed for v in found) - missing} of {len(found)} missed" + f", {missing} missing" * bool(missing)
    Console(width=120).print(table_of(found, title))
    sys.exit(any(verdict.missed for verdict in found))


if __name__ == "__main__":
    main()
