# Every target sets up what it needs in .venv, so that each works on a fresh clone. `make help` lists them.
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTHON ?=
GPU_PYTHON ?= python3
FAMILIES := qwen2_5_vl qwen3_5

.DEFAULT_GOAL := help
.PHONY: help parity test check gpu bench examples clean

help: ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

parity: $(VENV)/.run ## the main job on the CPU: CP=1 against CP=2, 3 and 4 on real images; writes parity.html
	$(BIN)/vlm-cp parity --cp 2 --json parity.json --html parity.html
	$(BIN)/vlm-cp parity --cp 3
	$(BIN)/vlm-cp parity --cp 4
	for family in $(FAMILIES); do $(BIN)/vlm-cp parity --family $$family --cp 2 || exit 1; done
	@echo "open parity.html to see which rank owned what"

test: $(VENV)/.test ## all tests that need no GPU, two at a time
	$(BIN)/python -m pytest -q -n 2 --dist worksteal --durations 10

check: $(VENV)/.check ## format, lint, types and import arrows
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -q tests/test_layers.py

gpu: ## parity rows and tests on 2 GPUs; GPU_PYTHON must have Transformer Engine (vlm-cp doctor --engine bridge)
	$(GPU_PYTHON) tests/gpu/run.py
	PYTHONPATH=.:hooks:tests $(GPU_PYTHON) -m pytest -q -W default tests/gpu --ignore tests/gpu/test_parity.py

bench: $(VENV)/.test ## what can be measured without a GPU; writes benchmarks/results
	$(BIN)/python -m benchmarks.parity
	$(BIN)/python -m benchmarks.floor
	PYTHONPATH=tests $(BIN)/python -m benchmarks.run --case mrope
	$(BIN)/python -m benchmarks.plots

examples: $(VENV)/.test ## the small trainer, CP=1 and CP=2 (20 minutes on two cores)
	$(BIN)/python examples/train_sft.py --out examples/results

clean: ## remove the environment and what was written
	rm -rf $(VENV) build dist parity.html parity.json

$(VENV)/.run: pyproject.toml constraints.txt
	@python=$$(PYTHON="$(PYTHON)" sh .ci/find-python) && "$$python" -m venv $(VENV)
	$(PIP) install -q --upgrade pip
	$(PIP) install -q -c constraints.txt -e '.[report]'
	touch $@

$(VENV)/.test: $(VENV)/.run
	$(PIP) install -q -c constraints.txt --group test
	$(PIP) install -q -c constraints.txt --no-deps megatron-core megatron-bridge
	touch $@

$(VENV)/.check: $(VENV)/.test
	$(PIP) install -q -c constraints.txt --group check
	touch $@
