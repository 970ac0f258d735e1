# Every target sets up what it needs; a new user types `make demo` and `make test`.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUN_DIR ?= runs
GPU_VENV ?= .venv-gpu
GPU_PYTHON ?= $(GPU_VENV)/bin/python
ECOSYSTEM_VENV ?= .venv-ecosystem
REPOSITORY_URL ?= $(shell git config --get remote.origin.url)
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help demo test browser check slow fuzz kills faults ecosystem outside versions wheel bench gpu-setup gpu gpu-evidence families docs \
	docs-cli docs-operators pictures smollm2 clean

help: ## list the targets
	@grep -E '^[a-z0-9_-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/'

# torch first: the exact pin takes a CPU build where one is at hand, and pip then leaves it alone.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "relinear needs Python 3.11; set PYTHON=/path/to/python3.11"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(STAMP) ## compare operators on the standard library's source text; ends with a table and a report
	$(BIN)/relinear compare --recipe quick --out $(RUN_DIR)/demo  # a run a core, each with one thread

test: $(STAMP) ## the fast tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal  # a process a core, a thread a process; a file stays in one

browser: $(STAMP) ## the tests of report pages in a browser: Chromium of the system, or one that is fetched
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[browser]"
	command -v chromium >/dev/null || command -v google-chrome >/dev/null || $(BIN)/python -m playwright install chromium
	$(BIN)/python -m pytest tests/test_pages.py

check: $(STAMP) ## ruff, mypy and the limit of lines of code
	$(BIN)/ruff check src tests tools examples results docs/site.py docs/make
	$(BIN)/ruff format --check src tests tools examples results docs/site.py docs/make
	$(BIN)/mypy
	$(BIN)/python tools/lines.py

slow: $(STAMP) ## the tests that take minutes
	$(BIN)/python -m pytest -m slow

fuzz: $(STAMP) ## 100,000 damaged files and arguments; counts by kind and outcome in runs/fuzz.json
	cd tests && OMP_NUM_THREADS=1 $(abspath $(BIN))/python -m fuzz.run --cases 100000 --out $(abspath $(RUN_DIR))/fuzz.json

kills: $(STAMP) ## 400 kills at seeded moments; every work must go on to the same bits; counts in runs/kills*.json
	cd tests && OMP_NUM_THREADS=1 $(abspath $(BIN))/python -m kills.run --kills 200 --out $(abspath $(RUN_DIR))/kills.json
	cd tests && OMP_NUM_THREADS=1 $(abspath $(BIN))/python -m kills.run --kills 200 --work compressions --out $(abspath $(RUN_DIR))/kills_compress.json

faults: $(STAMP) ## full and failing disks at every call of every command, in hours; counts in runs/faults.json
	cd tests && OMP_NUM_THREADS=1 $(abspath $(BIN))/python -m faults.run --processes 2 --out $(abspath $(RUN_DIR))/faults.json

outside: $(STAMP) ## transformers' and PEFT's own tests on models with operators: docs/ecosystem.md; QUICK=1: a few families
	cd tests && $(abspath $(BIN))/python -m outside.run $(if $(QUICK),--quick) --out $(abspath $(RUN_DIR))/outside.json

# environments of their own, so that what other programs ask for does not move the pinned one
ecosystem: ## lm-eval, TRL, PEFT, torchao, Trainer, pipeline and torch.export on a checkpoint: docs/ecosystem.md
	test -x $(ECOSYSTEM_VENV)/bin/python || $(PYTHON) -m venv $(ECOSYSTEM_VENV)
	$(ECOSYSTEM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(ECOSYSTEM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[ecosystem]" pytest pytest-timeout
	OMP_NUM_THREADS=1 $(ECOSYSTEM_VENV)/bin/python -m pytest -m "slow or not slow" tests/test_ecosystem.py
	OMP_NUM_THREADS=1 $(ECOSYSTEM_VENV)/bin/python results/ecosystem/outside_programs.py --out results/ecosystem

versions: ## the lowest torch and transformers that are allowed, the pinned and the newest: a table in results/ecosystem
	$(PYTHON) tests/versions.py

wheel: $(STAMP) ## build the wheel, install it into an empty environment, run README's first example there
	$(BIN)/python tools/wheel.py

bench: $(STAMP) ## operators against dense nn.Linear on this machine
	$(BIN)/relinear bench --out $(RUN_DIR)/bench

# an environment of its own: the pinned torch as a CUDA build, from pip's index or from GPU_INDEX
gpu-setup: ## make the environment of `make gpu`, on the machine with the GPU or for it
	test -x $(GPU_VENV)/bin/python || $(PYTHON) -m venv $(GPU_VENV)
	$(GPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(if $(GPU_INDEX),--index-url $(GPU_INDEX)) "$$(grep '^torch==' constraints.txt)"
	$(GPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@$(GPU_VENV)/bin/python -c "import torch; assert torch.version.cuda, 'this torch has no CUDA: set GPU_INDEX to an index that has it'"

ifdef REHEARSE
gpu: $(STAMP) ## kernels against torch.compile, and models, on an NVIDIA GPU in nine minutes; REHEARSE=1: on a CPU, tiny
	OMP_NUM_THREADS=1 $(BIN)/python tools/gpu.py --rehearse --minutes 10 --out $(RUN_DIR)/gpu-rehearsal
else
gpu:
	@command -v $(GPU_PYTHON) >/dev/null || { echo "make gpu-setup first, or set GPU_PYTHON to a Python that has relinear's packages"; exit 2; }
	PYTHONPATH=src $(GPU_PYTHON) tools/gpu.py --minutes 8.5
endif

ifdef REHEARSE
gpu-evidence: $(STAMP) ## the plans that take a GPU, as a queue in calls of nine minutes; REHEARSE=1: on a CPU, tiny
	OMP_NUM_THREADS=1 $(BIN)/python tools/gpu_evidence.py --rehearse README.md --out $(RUN_DIR)/gpu-evidence-rehearsal
else
gpu-evidence:
	@command -v $(GPU_PYTHON) >/dev/null || { echo "make gpu-setup first, or set GPU_PYTHON to a Python that has relinear's packages"; exit 2; }
	PYTHONPATH=src $(GPU_PYTHON) tools/gpu_evidence.py --minutes 8.5 --out $(RUN_DIR)/gpu-evidence
endif

families: $(STAMP) ## every operator in tiny models of every family, anew: docs/families.md
	OMP_NUM_THREADS=1 $(BIN)/python tests/families.py --out docs/families.md --json results/families.json

docs: $(STAMP) ## the pages and the reference of the API as a site, strictly: site/index.html
	REPOSITORY_URL=$(REPOSITORY_URL) NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-cli: $(STAMP) ## the page of all commands, anew: docs/cli.md
	$(BIN)/python docs/make/commands.py

docs-operators: $(STAMP) ## what the docs say of results, anew: measurements and settings of every operator, docs/claims.md
	$(BIN)/python docs/make

pictures: ## the demo's report as README shows it, anew, after `make demo`: docs/pictures/demo-light.png and -dark.png
	$(BIN)/python docs/make/screenshot.py $(RUN_DIR)/demo/report.html

smollm2: $(STAMP) ## fetch a real pretrained model (SmolLM2-135M-Instruct, 98 MB) into models/smollm2
	$(BIN)/python tools/smollm2.py --out models/smollm2

clean: ## remove the environment and every run
	rm -rf $(VENV) $(ECOSYSTEM_VENV) .venv-versions .outside $(RUN_DIR) site
