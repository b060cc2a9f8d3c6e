# Two commands do everything on a bare machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: demo test lint format test-gpu test-kernels bench-load clean

# The stamp is newer than what it was made from, or the environment is made again.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,text,calibrate,plot,eval,tune]'
	touch $@

demo: $(VENV)/.ready
	$(BIN)/nextscale compare "two foxes above a blue heart" --seed 7 --method nova --preset balanced --out demo.png

# Two processes with a thread each take two thirds of the time of one with two.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# On a machine with a GPU whose python3 already has the dependencies (no virtual environment is made).
test-gpu:
	PYTHONPATH=$(CURDIR)/src $(PYTHON) -m pytest -m "gpu or not gpu"

# Triton's kernels without a GPU. Triton lies apart: a CPU build of torch comes without it.
test-kernels: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --target $(VENV)/triton triton
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 PYTHONPATH=$(VENV)/triton $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal tests/test_interpreted*.py

bench-load: $(VENV)/.ready
	$(BIN)/python benchmarks/loading.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build src/*.egg-info demo.png
