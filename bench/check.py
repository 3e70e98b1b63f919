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

# Each script's ratios, and how great each may be: ratios of what was measured in one process. A few promises are in
# seconds; their rows say so, and hold for the machine of the results.
TARGETS: dict[str, dict[str, float]] = {
    "tiny": {
        f"{function}, {ratio}": target
        for function, of_torch in {"tanh(x @ w)": 0.9, "sin(x)": 0.9, "two linear layers": 1.0}.items()
        for ratio, target in {
            ".backward(): remat adds / torch adds": of_torch,
            "grad: remat adds / torch adds to .backward()": 1.3,
            "vmap(grad): remat / no remat": 2.1,
        }.items()
    }
    | {
        f"{function}, call, {setting}: remat adds, in µs": target
        for function in ("tanh(x @ w)", "a module of 12 parameters")
        for setting, target in {"no_grad": 2.0, "nothing requires grad": 6.0}.items()
    },
    "import_time": {"import remat after import torch, in s": 0.15},
    "blocks": {
        f".backward(), {kind}: remat / torch": 0.9
        for kind in (
            *("a closure", "with a dataclass of settings", "with a try", "with a dict store", "with a module"),
            "with in-place ops",
        )
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
        f"{way}: {ratio} / torch's .backward()": 1.0
        for way in ("grad(remat)", ".backward() of remat")
        for ratio in ("peak", "time", "FLOPs")
    }
    | {
        "grad, dots_saveable: time / no remat": 1.1,
        "grad, everything_saveable: time / no remat": 0.97,
        "grad, everything_saveable: peak / no remat": 0.48,
    }
    | {
        f"{work}{ratio} / no remat": target
        for work in ("per-sample gradients", "Hessian-vector product")
        for ratio, target in {
            ": time ÷ FLOPs": 1.08,  # without a policy, more products are computed
            ": peak": 0.8,
            ", dots_saveable: time": 1.1,
            ", everything_saveable: time": 1.1,
        }.items()
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
    }
    | {
        f"{way}, {ratio}": target
        for way in ("remat", "remat.checkpoint")
        for ratio, target in {
            "an op of the forward: adds / torch's selective adds": 1.0,
            "an op of the rerun: adds / torch's selective adds": 1.0,
            "an op of the forward: adds, in µs": 9.0,
            "an op of the rerun: adds, in µs": 6.0,
        }.items()
    },
    "frontier": {"time / torch's selective, at its peaks": 1.0},
    "compat_call": {
        f"{function}, {variant}: remat adds / torch adds": target
        for function, of_torch in {
            "tanh(x @ w)": 0.9,
            "sin(x)": 0.9,
            "tanh(x @ w), with an append": 0.9,
            "two linear layers": 1.0,
            "a TransformerEncoderLayer": 1.0,
            "a linear layer with BatchNorm": 1.0,
            "attention with rotary embeddings": 1.0,
        }.items()
        for variant, target in {"non-reentrant": of_torch, "reentrant": 1.2, "selective": 1.0}.items()
    },
    "random_draws": {
        "uniform / torch.rand": 2.5,
        "uniform / jitted jax.random.uniform": 1.0,
        "normal / torch.randn": 4.0,
        "uniform: peak / result": 4.0,
        "normal: peak / result": 4.0,
    },
    "hugging_face": {
        f"{model}, width {width}: {ratio} / torch's": 1.0
        for model in ("GPT-2", "Llama")
        for width in (32, 256)
        for ratio in ("time", "peak")
    },
    "memory": {
        f"{transform}: peak / torch's .backward()": 1.0 for transform in (".backward()", "grad", "vmap(grad), a sample")
    },
    "compiled": {
        f"{transform}: {ratio}": 1.0
        for transform in ("grad", "vmap(grad)")
        for ratio in (
            "peak beyond the gradients / torch's checkpoint, .backward()",
            "time / torch's checkpoint, .backward()",
            "saving dots: products / no remat",
        )
    },
    "gpu": {
        "offloading: time / the same policy with saving": 1.1,
        "random draws: bits that differ from the CPU's": 0.0,
    },
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
