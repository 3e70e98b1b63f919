"""Each benchmark runs, with `--fast`, and keeps what it measured; `check.py` tells targets met from targets missed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import run_scripts

BENCH = Path(__file__).parent.parent / "bench"
SCRIPTS = sorted(p.stem for p in BENCH.glob("*.py") if not p.stem.startswith("_") and p.stem != "check")
sys.path.append(str(BENCH))  # they import what they share as scripts do
check = pytest.importorskip("check", reason="the bench extra is not installed")


def python(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(BENCH.parent), str(BENCH))), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error::UserWarning", *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)


@pytest.fixture(scope="module")
def fast_results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Where the results of all scripts are, run with `--fast`, and what each printed."""
    folder = tmp_path_factory.mktemp("results")
    return folder, run_scripts((BENCH / f"{script}.py" for script in SCRIPTS), "--fast --results .", folder)


@pytest.mark.parametrize("script", SCRIPTS)
def test_benchmark(script: str, fast_results: tuple[Path, dict[str, str]]) -> None:
    folder, printed = fast_results
    file = folder / f"{script}.json"
    assert file.exists(), printed[script]
    results = json.loads(file.read_text())
    rows = {(work, way): row for work, ways in results["sections"].items() for way, row in ways.items()}
    assert rows
    errors = {at: row["error"] for at, row in rows.items() if "error" in row}
    plain = {work: error for (work, way), error in errors.items() if way == "no remat"}  # a warning of torch (2.14.1)
    assert {at: e for at, e in errors.items() if at[1].startswith("remat") and e != plain.get(at[0])} == {}
    assert set(check.TARGETS.get(script, {})) <= set(results["ratios"]), "each target has its ratio"
    assert results["title"].split()[0] in file.with_suffix(".txt").read_text()
    assert file.with_suffix(".png").stat().st_size > 0


def test_what_is_measured_is_kept_when_the_gpu_benchmark_is_terminated(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(BENCH.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCH / "gpu.py"), "--fast", "--rounds", "1", "--results", str(tmp_path)]
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if line == "gpu: grad\n")  # the second table is begun
        process.terminate()
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert results["sections"][".backward()"]["remat"]["seconds"]
    assert "per-sample gradients" not in results["sections"]


def test_make_bench_runs_every_script_that_needs_no_gpu() -> None:
    [line] = [s for s in (BENCH.parent / "Makefile").read_text().splitlines() if s.startswith("BENCHMARKS :=")]
    assert sorted(line.split()[2:]) == sorted(set(SCRIPTS) - {"gpu"})


def test_architectures_of_transformers() -> None:
    pytest.importorskip("transformers")
    names = "falcon", "mobilevit", "olmo_hybrid"  # a product changed in place, BatchNorm, a dict that makes its values
    done = python(BENCH / "peers" / "architectures.py", *names)
    assert "3 architectures of 3" in done.stdout, done.stdout + done.stderr
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines()]
    found = [(way, [int(n) for n in counts]) for _, way, *counts in filter(None, rows) if way.startswith("remat")]
    assert len(found) == 11
    assert [(way, counts) for way, counts in found if counts[1:3] != [0, 0]] == [], done.stdout
    assert all(counts[0] == 3 for _, counts in found[:5]), done.stdout  # of `.backward()`


def made_up(folder: Path, script: str = "", ratio: str = "", value: float | None = 0.0) -> Path:
    """Results that meet every target exactly, but for one."""
    for name, targets in check.TARGETS.items():
        (folder / f"{name}.json").write_text(
            json.dumps({"ratios": targets | ({ratio: value} if name == script else {})})
        )
    return folder


def test_check_of_targets_met(tmp_path: Path) -> None:
    done = python(BENCH / "check.py", made_up(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MISSED" not in done.stdout


EVERY_TARGET = [(script, ratio) for script, targets in check.TARGETS.items() for ratio in targets]


@pytest.mark.parametrize(("script", "ratio"), [EVERY_TARGET[0], EVERY_TARGET[-1]])
def test_check_of_a_target_missed(script: str, ratio: str, tmp_path: Path) -> None:
    above = check.TARGETS[script][ratio] + 0.001
    done = python(BENCH / "check.py", made_up(tmp_path, script, ratio, above))
    assert done.returncode == 1
    assert [ratio in line for line in done.stdout.splitlines() if "MISSED" in line] == [True]


def test_check_of_results_that_are_not_there(tmp_path: Path) -> None:
    made_up(tmp_path)
    (tmp_path / "gpu.json").unlink()  # not every machine has one
    assert python(BENCH / "check.py", tmp_path).returncode == 0
    (tmp_path / "tiny.json").write_text(json.dumps({"ratios": {}}))
    (tmp_path / "chain.json").unlink()
    done = python(BENCH / "check.py", tmp_path)
    assert done.returncode == 1
    missing = len(check.TARGETS["tiny"]) + len(check.TARGETS["chain"])
    assert done.stdout.count("MISSED") == missing
    assert f"0 of {len(EVERY_TARGET) - len(check.TARGETS['gpu'])} missed, {missing} missing" in done.stdout


def test_a_ratio_to_what_is_not_installed_is_no_miss() -> None:
    [verdict] = [v for v in check.verdicts("random_draws", {"uniform: peak / result": None}) if v.value is None]
    assert not verdict.missed
    assert verdict.cells[2] == "not measured"
