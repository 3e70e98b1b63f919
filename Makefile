# `make demo` and `make test` are all a newcomer needs: each sets up its own environment, with Python and make alone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check
N ?= 20000

# On Linux, PyPI's torch brings several GB of CUDA packages. `make test CPU_ONLY=1` takes one that brings none.
ifdef CPU_ONLY
export PIP_EXTRA_INDEX_URL ?= https://download.pytorch.org/whl/cpu
endif
BENCHMARKS := tiny blocks transformer chain halving loops policies frontier random_draws compat_call hugging_face memory compiled

.PHONY: demo test fuzz test-torch lint docs bench clean

demo: $(VENV)/ready  ## private training, with and without remat: under two minutes
	OMP_WAIT_POLICY=passive $(BIN)/python examples/per_sample_gradients.py  # no spinning: fast on a busy machine too

test: $(VENV)/ready  ## the whole test suite, with the examples in the docstrings
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2  # a core for each

fuzz: $(VENV)/ready  ## random programs under random transforms: make fuzz N=20000
	REMAT_FUZZ_EXAMPLES=$(N) $(BIN)/python -m pytest tests/test_fuzz.py

lint: $(VENV)/ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

docs: $(VENV)/ready-docs  ## the site, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # mkdocs is kept below 2

bench: $(VENV)/ready-peers  ## every benchmark in turn, then how the targets are met: under 15 minutes on 2 cores
	set -e; for name in $(BENCHMARKS); do $(BIN)/python bench/$$name.py; done
	$(BIN)/python bench/check.py

# Each stamp is renewed when what it installs may have changed.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e ".[test,lint,examples,bench]"
	touch $@

$(VENV)/ready-docs: $(VENV)/ready
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e ".[docs]"
	touch $@

$(VENV)/ready-peers: $(VENV)/ready
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e ".[peers]"
	touch $@

# Another torch, in an environment of its own: make test-torch VERSION=2.11.0
OTHER := .venv-torch-$(VERSION)
test-torch: $(OTHER)/ready
	$(OTHER)/bin/python -m pytest

$(OTHER)/ready: pyproject.toml constraints.txt
	$(if $(VERSION),,$(error test-torch: say which torch, as in `make test-torch VERSION=2.11.0`))
	$(PYTHON) -m venv $(OTHER)
	sed 's/^torch==.*/torch==$(VERSION)/' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python $(PIP_INSTALL) -c $(OTHER)/constraints.txt -e ".[test,examples]"
	touch $@

clean:
	rm -rf .venv* build dist site *.egg-info .cache .hypothesis .pytest_cache .mypy_cache .ruff_cache memory.png
