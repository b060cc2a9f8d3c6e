# Two commands do everything on a bare machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: demo serve test lint format test-gpu test-kernels test-compile test-hostile test-browser test-ray test-docker test-score test-defaults results docs bench-load clean

# The stamp is newer than what it was made from, or the environment is made again.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,text,plot,eval,tune,serve]'
	touch $@

demo: $(VENV)/.ready
	$(BIN)/nextscale compare "two foxes above a blue heart" --seed 7 --method nova --out demo.png

# The server of the embedded model: http://127.0.0.1:8000
serve: $(VENV)/.ready
	$(BIN)/nextscale serve

# Two processes with a thread each take two thirds of the time of one with two.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal --ignore tests/browser --ignore tests/cluster

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# On a machine with a GPU whose python3 already has the dependencies (no virtual environment is made).
test-gpu:
	PYTHONPATH=$(CURDIR)/src OMP_NUM_THREADS=2 $(PYTHON) -m pytest -m "gpu or not gpu" -n auto --maxprocesses 8 --dist worksteal

# Triton's kernels without a GPU. Triton lies apart: a CPU build of torch comes without it.
test-kernels: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --target $(VENV)/triton triton
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 PYTHONPATH=$(VENV)/triton $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal tests/kernels/test_interpreted*.py

# The same kernels compiled for Hopper, without a GPU: what the interpreter takes and the compiler does not.
test-compile: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --target $(VENV)/triton triton
	OMP_NUM_THREADS=1 PYTHONPATH=$(VENV)/triton:tests $(BIN)/python -m pytest -p support.compile_only -n auto --maxprocesses 8 \
		--dist worksteal tests/kernels/test_interpreted_[a-z]*.py

# Many bad arguments, configs, weights and prompts: no traceback, no hang, nothing executed, nothing half-written.
test-hostile: $(VENV)/.ready
	$(BIN)/python tests/hostile

# The page of the server in Debian's chromium, or in that of NEXTSCALE_CHROMIUM=PATH; skipped, with the reason, where
# there is none and it cannot be installed. NEXTSCALE_SCREENSHOTS=FOLDER keeps screenshots of it.
test-browser: $(VENV)/.ready
	@if [ -z "$$NEXTSCALE_CHROMIUM" ] && ! command -v chromium >/dev/null && command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		echo "installing Debian's package chromium"; \
		{ apt-get update -qq && apt-get install -qq --no-install-recommends chromium; } >/dev/null 2>&1 || echo "that failed"; \
	fi
	@echo "installing playwright, which drives it, into $(VENV)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt playwright
	$(BIN)/python -m pytest -rs tests/browser

# Workers and replicas on Ray: kills in the middle, resuming, rolling updates. Nothing leaves the machine.
test-ray: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	OMP_NUM_THREADS=1 NEXTSCALE_NO_SKIPS=1 $(BIN)/python -m pytest tests/cluster

# The Dockerfile's steps one by one, in a new environment, without Docker; where there is Docker, both images.
test-docker: $(VENV)/.ready
	$(BIN)/python tests/serve/dockerfile.py

# The scorers of other packages (extras `score` and `reward`), in an environment of their own (6 GB). They bring
# torchvision, which a CPU build of torch does not fit: "===" takes the one that an index lists without a suffix.
$(VENV)-score/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-score
	$(VENV)-score/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		"$$(sed -n 's/^torch==/torch===/p' constraints.txt)" -e '.[dev,text,eval,score,reward]'
	touch $@

test-score: $(VENV)-score/.ready
	NEXTSCALE_NO_SKIPS=1 $(VENV)-score/bin/python -m pytest tests/research/test_score.py  # a skipped test fails

# The site of docs/, in site/. The API reference is read from the source, which is not imported.
$(VENV)/.docs: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# Images of whoever chooses a method and nothing else: are they near the plain ones? Without names: all methods.
test-defaults: $(VENV)/.ready
	$(BIN)/python benchmarks/defaults.py auto nova "NOVA()" taper

# Everything in the documents that was measured on the embedded model, anew. On a machine with a GPU whose python3 has
# the dependencies: PYTHONPATH=src python3 benchmarks/results.py
results: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train]'
	$(BIN)/python benchmarks/results.py

bench-load: $(VENV)/.ready
	$(BIN)/python benchmarks/loading.py

clean:
	rm -rf $(VENV) $(VENV)-score .pytest_cache .mypy_cache .ruff_cache build site src/*.egg-info demo.png
