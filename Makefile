# Every target sets itself up: a machine with Python is all it needs.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# What checks archives as an index does; its needs are none of ours.
TWINE  := .venv-release/bin/twine
# Minutes that `make soak` takes.
SOAK   ?= 5
# Tests start hundreds of processes. Without bytecode each compiles what it imports: 1.7 s of CPU time, not 0.5.
export PYTHONDONTWRITEBYTECODE :=

# What shows on the servers of another version of vLLM that the adapter works there.
OLDEST_SERVERS := $(addprefix e2e/real_engines/test_,predictions.py serving.py greedy_output.py)

# What only real SGLang servers can show: what its adapter does. The rest is the gateway's, which vLLM's run covers.
SGLANG_ADAPTER := $(addprefix e2e/real_engines/test_,reported_state.py predictions.py eviction_news.py greedy_output.py \
	levers.py slo_order.py other_engines.py wrong_tokenizer.py two_gateways.py)

# Three processes: tests wait a third of their time. One file to one process: its tests share the fixtures' servers.
E2E := -n 3 --dist loadfile --ignore e2e/faults --ignore e2e/clients --ignore e2e/monitoring \
	--ignore e2e/llamacpp --ignore e2e/postgresql --ignore e2e/release --ignore e2e/site

# Semantic variables, programs and uploads, as clients see them.
PROGRAMS := $(addprefix e2e/test_,semantic_variables.py semantic_client.py native_steps.py later_objectives.py \
	unstreamed_answers.py routes_beside_chat.py background_responses.py killed_responses.py)

.PHONY: setup demo compare lint types test check unit coverage imports e2e e2e-faults e2e-clients e2e-monitoring e2e-oncall \
	e2e-postgresql soak mission e2e-vllm e2e-vllm-oldest e2e-vllm-versions e2e-sglang e2e-sglang-versions e2e-sglang-adapter \
	e2e-llamacpp environments results results-long site dist packages release nightly clean

# Most modules of what is installed are never imported, so none is compiled before it is.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable '.[dev]' --constraint constraints.txt
	touch $@

setup: $(STAMP)

demo: setup
	$(BIN)/plait demo $(DEMO)

compare: setup
	$(BIN)/plait demo --compare

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

unit: setup
	$(BIN)/python -m pytest tests -n auto

# Before a commit: the types are checked beside the tests.
check: setup
	$(MAKE) --jobs 2 --output-sync=target lint types unit

e2e: setup
	$(BIN)/python -m pytest e2e $(E2E)

# Engines that fail, and clients that misbehave, in every known way: some minutes, because hangs take their time.
e2e-faults: setup
	$(BIN)/python -m pytest e2e/faults -n 2 --dist loadfile

# Released clients, each in an environment of its kind, which is built when it is not there yet. nginx is fetched, too.
e2e-clients: setup
	$(BIN)/python -m e2e.clients.environment
	$(BIN)/python -m e2e.clients.nginx
	$(BIN)/python -m pytest e2e/clients

# The dashboard on a real Prometheus, which is fetched with apt-get when it is not there yet.
e2e-monitoring: setup
	$(BIN)/python -m e2e.monitoring.prometheus
	$(BIN)/python -m pytest e2e/monitoring

# The situations of docs/oncall.md, on embedded engines: ten minutes. Three of them are in `make e2e`.
e2e-oncall: setup
	$(BIN)/python -m e2e.oncall

# Gateways that share a store, on a real PostgreSQL, which is installed with apt-get when it is not there yet. Then what
# programs may expect, with each request sent to a random one of three gateways.
e2e-postgresql: setup
	$(BIN)/python -m e2e.postgresql.server
	PLAIT_TEST_GATEWAYS=3 $(BIN)/python -m pytest e2e/postgresql $(PROGRAMS) -n 2 --dist loadfile

# Engines that fail and clients that misbehave, all at the same time, beside well-behaved ones.
soak: setup
	$(BIN)/python -m benchmarks soak --minutes $(SOAK)

# What is claimed of the gateway, in virtual time: a part of each experiment, some minutes.
mission: setup
	$(BIN)/python -m benchmarks mission --quick

# docs/results.md and README's table, from reports that take half an hour on two cores and from stored ones.
results: setup
	$(BIN)/python -m benchmarks results --run

# The reports that take hours. What was cut off goes on from .cache/results.
results-long: setup
	$(BIN)/python -m benchmarks results --run-long

# Two real vLLM servers on the CPU; builds their environment when it is not there yet.
e2e-vllm: setup
	$(BIN)/python -m e2e.vllm.environment
	.venv-vllm/bin/python -m pytest -c e2e/real_schedulers/pytest.ini e2e/real_schedulers
	PLAIT_ENGINE_KIND=vllm PLAIT_ENGINE_PYTHON=.venv-vllm/bin/python $(BIN)/python -m pytest e2e/real_engines

# The oldest vLLM that Plait supports; builds its environment (Python 3.12) when it is not there yet.
e2e-vllm-oldest: setup
	$(BIN)/python -m e2e.vllm.environment oldest
	.venv-vllm-oldest/bin/python -m pytest -c e2e/real_schedulers/pytest.ini e2e/real_schedulers
	PLAIT_ENGINE_KIND=vllm PLAIT_ENGINE_PYTHON=.venv-vllm-oldest/bin/python $(BIN)/python -m pytest $(OLDEST_SERVERS)

# The scheduler tests on the sources of each minor version and of the newest, in the oldest's environment.
e2e-vllm-versions: setup
	$(BIN)/python -m e2e.real_schedulers.versions vllm

# The same suites on real SGLang, without MetaGPT's 25 prompts: its CPU path takes four minutes for them.
e2e-sglang: setup
	$(BIN)/python -m e2e.sglang.environment
	.venv-sglang/bin/python -m pytest -c e2e/real_schedulers/pytest.ini e2e/real_schedulers
	PLAIT_ENGINE_KIND=sglang PLAIT_ENGINE_PYTHON=.venv-sglang/bin/python $(BIN)/python -m pytest e2e/real_engines \
		--ignore e2e/real_engines/test_metagpt.py

# The scheduler tests on the sources of older versions, in the newest's environment.
e2e-sglang-versions: setup
	$(BIN)/python -m e2e.real_schedulers.versions sglang

e2e-sglang-adapter: setup
	$(BIN)/python -m e2e.sglang.environment
	.venv-sglang/bin/python -m pytest -c e2e/real_schedulers/pytest.ini e2e/real_schedulers
	PLAIT_ENGINE_KIND=sglang PLAIT_ENGINE_PYTHON=.venv-sglang/bin/python $(BIN)/python -m pytest $(SGLANG_ADAPTER)

# A real llama.cpp server, without an adapter; builds its environment when it is not there yet.
e2e-llamacpp: setup
	$(BIN)/python -m e2e.llamacpp.environment
	$(BIN)/python -m pytest e2e/llamacpp

# The environments of real engines and released clients, without a test.
environments: setup
	$(BIN)/python -m e2e.vllm.environment
	$(BIN)/python -m e2e.clients.environment
	$(BIN)/python -m e2e.sglang.environment

$(TWINE): Makefile
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install --quiet --disable-pip-version-check --no-compile twine==7.0.0
	touch $@

# The pages as a site in build/site. A link that leads nowhere is an error, and so is what a browser would load from
# another host.
site: setup
	$(BIN)/python -m docs.site
	$(BIN)/python -m pytest e2e/site

# The archives of a release.
dist: setup $(TWINE)
	rm -rf dist
	$(BIN)/python -m hatchling build
	$(TWINE) check --strict dist/*

# The archives, and what a program needs that calls a gateway.
packages: dist
	$(BIN)/python -m pytest e2e/release

# A release, checked: each kind of installation in a new environment, the adapter in vLLM's.
release: dist
	$(BIN)/python -m e2e.vllm.environment
	PLAIT_NIGHTLY=1 $(BIN)/python -m pytest e2e/release

# The fast tests with their branch coverage, which has a floor.
coverage: setup
	$(BIN)/python -m pytest tests -n auto --cov

# Every module can be imported, by this version of Python too.
imports: setup
	$(BIN)/python -m tests.import_all

test: check
	$(BIN)/python -m pytest benchmarks e2e $(E2E)

# Everything, the comparisons and the clients included that `.ci/run` leaves out; new examples for property tests.
nightly: export PLAIT_NIGHTLY = 1
nightly: test
	$(MAKE) e2e-faults soak e2e-oncall e2e-monitoring e2e-postgresql e2e-vllm e2e-vllm-oldest e2e-vllm-versions e2e-clients \
		e2e-sglang e2e-sglang-versions e2e-llamacpp release
	$(BIN)/python -m benchmarks exact_tokens --prompts 1000000
	$(BIN)/python -m benchmarks mission
	$(BIN)/python -m benchmarks margins
	$(BIN)/python -m benchmarks tiers --json docs/results/tiers.json
	$(MAKE) results-long

clean:
	rm -rf $(VENV) .venv-* e2e/clients/*/node_modules .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
