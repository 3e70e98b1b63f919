"""Each benchmark runs, with `--fast`, and keeps what it measured; `check.py` tells targets met from targets missed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"
SCRIPTS = sorted(p.stem for p in BENCH.glob("*.py") if not p.stem.startswith("_") and p.stem != "check")
sys.path.append(str(BENCH))  # they import what they share as scripts do
check = pytest.importorskip("check", reason="the bench extra is not installed")


def run(script: str, *arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error::UserWarning", str(BENCH / f"{script}.py"), *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": str(BENCH.parent), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("script", SCRIPTS)
def test_benchmark(script: str, tmp_path: Path) -> None:
    done = run(script, "--fast", "--results", tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / f"{script}.json").read_text())
    rows = {(s, way): row for s, ways in results["sections"].items() for way, row in ways.items()}
    failed = {at: row["error"] for at, row in rows.items() if at[1].startswith("remat") and "error" in row}
    assert rows
    assert failed == {}
    assert set(check.TARGETS.get(script, {})) <= set(results["ratios"]), "each target has its ratio"
    assert results["title"].split()[0] in (tmp_path / f"{script}.txt").read_text()
    assert (tmp_path / f"{script}.png").stat().st_size > 0


def test_make_bench_runs_every_script_that_needs_no_gpu() -> None:
    [line] = [s for s in (BENCH.parent / "Makefile").read_text().splitlines() if s.startswith("BENCHMARKS :=")]
    assert sorted(line.split()[2:]) == sorted(set(SCRIPTS) - {"gpu"})


def made_up(folder: Path, script: str = "", ratio: str = "", value: float | None = 0.0) -> Path:
    """Results that meet every target exactly, but for one."""
    for name, targets in check.TARGETS.items():
        (folder / f"{name}.json").write_text(
            json.dumps({"ratios": targets | ({ratio: value} if name == script else {})})
        )
    return folder


def test_check_of_targets_met(tmp_path: Path) -> None:
    done = run("check", made_up(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MISSED" not in done.stdout


EVERY_TARGET = [(script, ratio) for script, targets in check.TARGETS.items() for ratio in targets]


@pytest.mark.parametrize(("script", "ratio"), [EVERY_TARGET[0], EVERY_TARGET[-1]])
def test_check_of_a_target_missed(script: str, ratio: str, tmp_path: Path) -> None:
    above = check.TARGETS[script][ratio] + 0.001
    done = run("check", made_up(tmp_path, script, ratio, above), cwd=tmp_path)
    assert done.returncode == 1
    assert [ratio in line for line in done.stdout.splitlines() if "MISSED" in line] == [True]


def test_check_of_results_that_are_not_there(tmp_path: Path) -> None:
    made_up(tmp_path)
    (tmp_path / "gpu.json").unlink()  # not every machine has one
    assert run("check", tmp_path, cwd=tmp_path).returncode == 0
    (tmp_path / "tiny.json").write_text(json.dumps({"ratios": {}}))
    (tmp_path / "chain.json").unlink()
    done = run("check", tmp_path, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.count("MISSED") == len(check.TARGETS["tiny"]) + len(check.TARGETS["chain"])


def test_a_ratio_to_what_is_not_installed_is_no_miss() -> None:
    [verdict] = [v for v in check.verdicts("random_draws", {"uniform: peak / result": None}) if v.value is None]
    assert not verdict.missed
    assert verdict.cells[2] == "not measured"
