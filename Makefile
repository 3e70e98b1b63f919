# A newcomer needs only `make demo` and `make test`: each installs what it needs in .venv, with Python and make alone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check
N ?= 20000

# On Linux, PyPI's torch brings several GB of CUDA packages. `make test CPU_ONLY=1` takes one that brings none.
ifdef CPU_ONLY
export PIP_EXTRA_INDEX_URL ?= https://download.pytorch.org/whl/cpu
endif
BENCHMARKS := tiny blocks transformer chain halving loops policies frontier random_draws compat_call hugging_face memory compiled import_time

.PHONY: help demo test fuzz soak test-torch lint docs wheel bench environment clean

help:  ## list the targets
	@echo "usage: make TARGET, with Python 3.11 or later; CPU_ONLY=1 takes a torch without CUDA packages"
	@sed -nE 's/^([a-z-]+):[^#]*##  *(.*)/  \1|\2/p' Makefile | column -t -s '|'

# The demo prints this first.
define SAY_DEMO
The demo: a small language model is trained with clipped, noisy per-sample gradients. Then the
memory and the time of one step are measured with and without remat. That takes one to three
minutes, after torch, matplotlib and rich are installed in .venv, the first time. No root, no
data to download, no GPU. The only new files are memory.png and per_sample_gradients.png.
endef
export SAY_DEMO

demo: say-demo $(VENV)/ready-demo  ## per-sample gradients with and without remat: one to three minutes
	@# no spinning: fast on a busy machine too
	@OMP_WAIT_POLICY=passive $(BIN)/python examples/per_sample_gradients.py

.PHONY: say-demo
say-demo:
	@echo "$$SAY_DEMO"

test: $(VENV)/ready-test  ## all tests, with the examples in docstrings and pages: about ten minutes on 2 cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2  # a core for each

fuzz: $(VENV)/ready-test  ## random programs under random transforms: make fuzz N=20000
	REMAT_FUZZ_EXAMPLES=$(N) $(BIN)/python -m pytest tests/test_fuzz.py

soak: $(VENV)/ready-test  ## 1,000 training steps of each kind leave nothing, 1,800 exceptions leave torch as it was
	REMAT_SOAK_STEPS=1000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_soak.py

lint: $(VENV)/ready-test $(VENV)/ready-lint  ## ruff, mypy and pyright: under a minute
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python

# What the site and the README on PyPI link to: the clone's origin, where that is on the web.
docs wheel: export REPOSITORY ?= $(shell git remote get-url origin 2>/dev/null | sed -nE 's|^git@([^:]+):|https://\1/|; s|//[^/]*@|//|; s|\.git$$||; /^https:/p')
docs: export EDIT_URI = $(if $(REPOSITORY),$(REPOSITORY)/edit/main/docs/)

docs: $(VENV)/ready-docs  ## the site, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # mkdocs is kept below 2

wheel:  ## the wheel, into dist/; checks it, and runs the README and the curvature example with it
	rm -rf dist build
	$(PYTHON) -m venv build/tools
	build/tools/bin/python $(PIP_INSTALL) -c constraints.txt build twine
	build/tools/bin/python -m build
	build/tools/bin/twine check --strict dist/*
	$(PYTHON) -m venv build/fresh
	build/fresh/bin/python $(PIP_INSTALL) --no-compile -c constraints.txt dist/*.whl
	cd build && fresh/bin/python -I ../tests/run_readme.py ../README.md
	build/fresh/bin/python $(PIP_INSTALL) --no-compile -c constraints.txt "$$(echo dist/*.whl)[curvature]"
	cd build && fresh/bin/python ../examples/curvature.py --fast

bench: $(VENV)/ready-bench  ## every benchmark, then the check of the targets: under 12 minutes on 2 quiet cores
	set -e; for name in $(BENCHMARKS); do $(BIN)/python bench/$$name.py; done
	$(BIN)/python bench/check.py

# For `make -j`: one pip at a time.
environment:  ## install all that the tests, lint and docs need
	$(MAKE) --jobs=1 $(VENV)/ready-test $(VENV)/ready-lint $(VENV)/ready-docs

# ready-EXTRA marks an extra of pyproject.toml as installed, until the files that pin its packages change.
$(VENV)/ready-%: pyproject.toml constraints.txt
	@echo "installing the extra '$*' in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e ".[$*]"
	@touch $@

# Another torch, in an environment of its own: make test-torch VERSION=2.14.1
OTHER := .venv-torch-$(VERSION)
test-torch: $(OTHER)/ready  ## the tests on another torch: make test-torch VERSION=2.14.1
	$(OTHER)/bin/python -m pytest

$(OTHER)/ready: pyproject.toml constraints.txt
	$(if $(VERSION),,$(error test-torch: say which torch, as in `make test-torch VERSION=2.14.1`))
	$(PYTHON) -m venv $(OTHER)
	sed 's/^torch==.*/torch==$(VERSION)/' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python $(PIP_INSTALL) -c $(OTHER)/constraints.txt -e ".[test]"
	touch $@

clean:  ## remove all that these targets have made
	rm -rf .venv* build dist site *.egg-info .cache .hypothesis .pytest_cache .mypy_cache .ruff_cache *.png
