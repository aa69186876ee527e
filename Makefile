# Each target sets up what it needs first; everything that is set up lives in .venv.
#   make demo ARGS="--q-len 17"      make test ARGS="-k siblings -x"      make PYTHON=python3.12 test

# The interpreter for a new .venv; tools/setup.sh takes python3 where none is named.
PYTHON ?=
ARGS ?=
# Of `make e2e`: GPUs, a rank on each; and an interpreter that has SGLang, instead of .venv/e2e.
TP ?= 1
E2E_PYTHON ?=
# Of `make sanitize`: an interpreter that has torch, cupy and pytest, instead of .venv.
SANITIZE_PYTHON ?=
BIN := .venv/bin
# The release whose CUDA side fits the torch in .venv.
GPU_SGLANG = $(CURDIR)/.venv/sglang-0.5.23
# What git knows or would take: not what it ignores.
SOURCES = $(shell git ls-files --cached --others --exclude-standard $(1))
SHELL_FILES = .ci/run $(call SOURCES,'*.sh')
CUDA_FILES = $(call SOURCES,'kernels/*.cu' 'kernels/*.cuh' 'kernels/*.h' 'kernels/*.cpp' 'tools/*.cpp')

# What the operator writes behind `make deploy`. Nothing in it is expanded, by make or by a shell: each value goes, as it
# was written, into an environment variable, and only from make's command line (csh and others export a HOST).
override DEPLOY_WORDS = HOST HOSTS UNIT MODE PREFIX TIMEOUT DRY_RUN FORCE
unexport $(DEPLOY_WORDS)
$(foreach word,$(DEPLOY_WORDS),$(if $(filter command,$(firstword $(origin $(word)))),\
    $(eval override export DEPLOY_$(word) := $$(value $(word))),$(eval override export DEPLOY_$(word) :=)))
# Names on the command line that nobody has a use for: DRYRUN=1 must not be a deployment.
override export DEPLOY_UNKNOWN := $(strip $(foreach word,$(filter-out $(DEPLOY_WORDS) PYTHON ARGS CXX,$(.VARIABLES)),\
    $(if $(filter command,$(firstword $(origin $(word)))),$(word))))
DEPLOY = @PYTHON="$(PYTHON)" deploy/setup.sh && .venv/deploy/bin/python -m deploy

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-gpu fuzz sanitize soak test-deploy e2e bench compat figures deploy status logs rollback undeploy lint format clean

help: ## this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: ## make .venv, or finish it
	@PYTHON="$(PYTHON)" tools/setup.sh

demo: setup ## the main job: SGLang's real Triton backend, patched, on the reference case
	@$(BIN)/python -m kdtree_patch demo $(ARGS)

test: setup ## the whole CPU test suite
	$(BIN)/python -m pytest -n auto $(ARGS)

test-gpu: setup ## the GPU test suite (one NVIDIA GPU)
	PYTHONPATH=$(GPU_SGLANG) $(BIN)/python -m pytest -m gpu $(ARGS)

fuzz: setup ## a thousand calls at random, others each time (one NVIDIA GPU)
	PYTHONPATH=$(GPU_SGLANG) $(BIN)/python -m pytest -m gpu tests/gpu/test_fuzz.py --hypothesis-profile=night $(ARGS)

soak: setup ## 200,000 calls of changing shapes (one NVIDIA GPU)
	PYTHONPATH=$(GPU_SGLANG) $(BIN)/python -m pytest -m soak -s $(ARGS)

sanitize: ## the kernels under compute-sanitizer's four tools (one NVIDIA GPU)
	$(if $(SANITIZE_PYTHON),,@PYTHON="$(PYTHON)" tools/setup.sh)
	$(or $(SANITIZE_PYTHON),$(BIN)/python) -m tests.sanitize $(ARGS)

test-deploy: setup ## the deploy tests, against a real sshd and a real systemd (root, Debian)
	@PYTHON="$(PYTHON)" deploy/setup.sh
	$(BIN)/python -m pytest -m deploy -n 2 $(ARGS)

e2e: ## the real SGLang server, stock and patched (one NVIDIA GPU with 140 GB; TP=2: two)
	$(if $(E2E_PYTHON),,@PYTHON="$(PYTHON)" tools/e2e.sh)
	$(or $(E2E_PYTHON),.venv/e2e/bin/python) -m tests.e2e --tp $(TP) $(ARGS)

deploy: ## onto a host over ssh: HOST=root@h1 UNIT=sglang [DRY_RUN=1], and what README.md lists
	$(DEPLOY) deploy

status: ## what runs there: HOST=… UNIT=…
	$(DEPLOY) status

logs: ## its [kdtree] lines: HOST=… UNIT=…
	$(DEPLOY) logs

rollback: ## back to the release and mode before: HOST=… UNIT=…
	$(DEPLOY) rollback

undeploy: ## the unit as it was before the first deployment: HOST=… UNIT=…
	$(DEPLOY) undeploy

bench: setup ## times the kernel and SGLang's own (one NVIDIA GPU)
	PYTHONPATH=$(GPU_SGLANG) $(BIN)/python -m kdtree_patch bench $(ARGS)

compat: setup ## which releases of SGLang the contract lets us serve, into the table of README.md (network)
	@$(BIN)/python -m tools.compat $(ARGS)

figures: setup ## draws docs/figures and fills tables of the documents, from docs/results and the sources
	@$(BIN)/python -m tools.figures

lint: setup ## ruff, mypy, shellcheck, clang-format
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/shellcheck $(SHELL_FILES)
	$(if $(CUDA_FILES),$(BIN)/clang-format --dry-run -Werror $(CUDA_FILES))

format: setup ## let ruff and clang-format rewrite the sources
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format
	$(if $(CUDA_FILES),$(BIN)/clang-format -i $(CUDA_FILES))

clean: ## remove what tests and linters leave behind; .venv stays
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
