"""Each example runs, with `--fast`, as a user would run it, and draws its picture."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import run_scripts

ROOT = Path(__file__).parent.parent
PICTURES = {
    "gpt": "gpt.png",
    "influence": "influence.png",
    "long_sequence": "long_sequence.png",
    "maml": "maml.png",
    "per_sample_gradients": "memory.png",
    "pinn": "pinn.png",
}


def test_every_example_is_run() -> None:
    examples = {file.stem for file in (ROOT / "examples").glob("[!_]*.py")}
    # `make wheel` runs the one about curvature: its library brings torchvision, which Transformers would import.
    assert {*PICTURES, "fsdp_transformer", "curvature"} == examples


@pytest.fixture(scope="module")
def fast_examples(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Where the pictures of all examples are, run with `--fast`, and what each printed."""
    folder = tmp_path_factory.mktemp("examples")
    return folder, run_scripts((ROOT / "examples" / f"{example}.py" for example in PICTURES), "--fast", folder)


@pytest.mark.parametrize(("example", "picture"), PICTURES.items())
def test_example(example: str, picture: str, fast_examples: tuple[Path, dict[str, str]]) -> None:
    folder, printed = fast_examples
    assert (folder / picture).exists(), printed[example]
    assert (folder / picture).stat().st_size > 0
    assert "peak memory" in printed[example], "show the memory with and without remat"
    assert "Traceback" not in printed[example]


def test_fsdp_example(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    where = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command = [*torchrun, *where, str(ROOT / "examples" / "fsdp_transformer.py"), "--fast"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::UserWarning"}
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = [line.split("│")[1:-1] for line in run.stdout.splitlines() if line.startswith("│")]
    (none, *first), (full, *second), (selective, *third) = ([cell.strip() for cell in row] for row in rows)
    assert (none, full, selective) == ("none", "full", "selective")
    assert first[:2] == second[:2] == third[:2]  # the losses
    least, medium, most = (float(peak.removesuffix(" MiB")) for peak in (second[2], third[2], first[2]))
    assert least < medium < most


def printed(notebook: Path) -> list[str]:
    """The lines that the cells have printed. The kernel may send a line in parts."""
    cells = json.loads(notebook.read_text())["cells"]
    texts = ((text for out in cell.get("outputs", ()) for text in out.get("text", ())) for cell in cells)
    return [line for text in texts for line in "".join(text).splitlines()]


def test_tutorial(tmp_path: Path) -> None:
    """The saved notebook runs, and takes the memory that it shows."""
    source = ROOT / "examples" / "tutorial.ipynb"
    shutil.copy(source, tmp_path)
    execute = [sys.executable, "-c", "from nbclient.cli import main; main()", "--inplace", "tutorial.ipynb"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(execute, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    shown, now = ([line for line in printed(file) if "MiB" in line] for file in (source, tmp_path / source.name))
    assert len(shown) > 5
    assert now == shown, "run the notebook again, and save it"
