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

# One file of calls, and one of what the gateway knows of the engine: whether an engine and its adapter work at all.
SMOKE := $(addprefix e2e/real_engines/test_,predictions.py serving.py)

# The suites of real engines in parts of at most five minutes.
REAL_1 := $(addprefix e2e/real_engines/test_,accounts.py agents.py client_gone.py eviction_news.py first_minute.py full_fleet.py hit_ends.py \
	greedy_output.py held_sessions.py)
REAL_2 := $(addprefix e2e/real_engines/test_,killed_gateway.py later_objectives.py levers.py other_engines.py package.py \
	placement_value.py predictions.py ranks.py)
REAL_3 := $(addprefix e2e/real_engines/test_,placed_ranks.py rendered_fields.py reported_state.py routes.py serving.py \
	slo_order.py tiers.py traces.py two_gateways.py wrong_tokenizer.py)

# One process a core.
JOBS := -n auto
# One more than cores: these wait a third of their time. One file to one process: its tests share the fixtures' servers.
E2E := -n $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1) --dist loadfile --ignore e2e/faults --ignore e2e/clients --ignore e2e/monitoring \
	--ignore e2e/llamacpp --ignore e2e/postgresql --ignore e2e/release --ignore e2e/site

VLLM   := PLAIT_ENGINE_KIND=vllm PLAIT_ENGINE_PYTHON=.venv-vllm/bin/python $(BIN)/python -m pytest
SGLANG := PLAIT_ENGINE_KIND=sglang PLAIT_ENGINE_PYTHON=.venv-sglang/bin/python $(BIN)/python -m pytest

# Semantic variables, programs and uploads, as clients see them.
PROGRAMS := $(addprefix e2e/test_,semantic_variables.py semantic_client.py native_steps.py later_objectives.py \
	unstreamed_answers.py routes_beside_chat.py background_responses.py killed_responses.py acknowledged_responses.py)

.PHONY: setup demo compare lint types test check coverage coverage-policy coverage-backends coverage-gateway imports weight \
	e2e e2e-faults e2e-clients conversations e2e-monitoring e2e-oncall e2e-postgresql soak mission vllm-environment \
	sglang-environment clients-environment environments vllm-schedulers sglang-schedulers vllm-smoke sglang-smoke e2e-vllm e2e-vllm-oldest \
	e2e-vllm-versions e2e-sglang e2e-sglang-versions e2e-llamacpp results results-long site dist packages release nightly \
	nightly-parts clean

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

test: setup
	$(BIN)/python -m pytest tests $(JOBS)

# Before a commit: the types are checked beside the tests.
check: setup
	$(MAKE) --jobs 2 --output-sync=target lint types test

# Real clients against real servers with embedded engines, and experiments in virtual time.
e2e: setup
	$(BIN)/python -m pytest benchmarks e2e $(E2E)

# Engines that fail, and clients that misbehave, in every known way: some minutes, because hangs take their time.
e2e-faults: setup
	$(BIN)/python -m pytest e2e/faults -n 2 --dist loadfile

# Released clients, each in an environment of its kind, which is built when it is not there yet. nginx is fetched, too.
e2e-clients: clients-environment
	$(BIN)/python -m e2e.clients.nginx
	$(BIN)/python -m pytest e2e/clients

# The table of conversations in docs/clients.md: all of them, also those that a nightly part has.
conversations: clients-environment
	-PLAIT_NIGHTLY=1 $(BIN)/python -m pytest e2e/clients/test_conversations.py -n 2
	$(BIN)/python -m e2e.clients.conversations

# The dashboard on a real Prometheus, which is fetched with apt-get when it is not there yet.
e2e-monitoring: setup
	$(BIN)/python -m e2e.monitoring.prometheus
	$(BIN)/python -m pytest e2e/monitoring

# The situations of docs/oncall.md, on embedded engines: ten minutes. Five of them are in `make e2e`.
e2e-oncall: setup
	$(BIN)/python -m e2e.oncall

# Gateways that share a store, on a real PostgreSQL and behind PgBouncer, which apt-get installs if need be. Then what
# programs may expect, with each request sent to a random one of three gateways.
e2e-postgresql: setup
	$(BIN)/python -m e2e.postgresql.server
	PLAIT_TEST_GATEWAYS=3 $(BIN)/python -m pytest e2e/postgresql $(PROGRAMS) -n 2 --dist loadfile

# Engines that fail and clients that misbehave, all at the same time, beside well-behaved ones.
soak: setup
	$(BIN)/python -m benchmarks soak --minutes $(SOAK)

# What is claimed of the gateway, in virtual time: a part of each experiment, some minutes. With TURN, not all of them.
mission: setup
	$(BIN)/python -m benchmarks mission --quick $(if $(TURN),--turn $(TURN))

# docs/results.md and README's table, from reports that take half an hour on two cores and from stored ones.
results: setup
	$(BIN)/python -m benchmarks results --run

# The reports that take hours, which no run of `.ci/run` repeats. What was cut off goes on from .cache/results.
results-long: setup
	$(BIN)/python -m benchmarks results --run-long

# Two real vLLM servers on the CPU; builds their environment when it is not there yet.
e2e-vllm: vllm-schedulers
	$(VLLM) e2e/real_engines

vllm-smoke: vllm-schedulers
	$(VLLM) $(SMOKE)

vllm-1 vllm-2 vllm-3: vllm-%: vllm-environment
	$(VLLM) $(REAL_$*)

vllm-schedulers: vllm-environment
	.venv-vllm/bin/python -m pytest -c e2e/real_schedulers/pytest.ini e2e/real_schedulers

# The oldest vLLM that Plait supports; builds its environment (Python 3.12) when it is not there yet.
e2e-vllm-oldest: setup
	$(BIN)/python -m e2e.vllm.environment oldest
	.venv-vllm-oldest/bin/python -m pytest -c e2e/real_schedulers/pytest.ini e2e/real_schedulers
	PLAIT_ENGINE_KIND=vllm PLAIT_ENGINE_PYTHON=.venv-vllm-oldest/bin/python $(BIN)/python -m pytest $(OLDEST_SERVERS)

# The scheduler tests on the sources of each minor version and of the newest, in the oldest's environment.
e2e-vllm-versions: setup
	$(BIN)/python -m e2e.real_schedulers.versions vllm

# The same suites on real SGLang, without MetaGPT's 25 prompts: its CPU path takes four minutes for them.
e2e-sglang: sglang-schedulers
	$(SGLANG) e2e/real_engines --ignore e2e/real_engines/test_metagpt.py

sglang-smoke: sglang-schedulers
	$(SGLANG) $(SMOKE)

sglang-1 sglang-2 sglang-3: sglang-%: sglang-environment
	$(SGLANG) $(REAL_$*)

sglang-schedulers: sglang-environment
	.venv-sglang/bin/python -m pytest -c e2e/real_schedulers/pytest.ini e2e/real_schedulers

# The scheduler tests on the sources of older versions, in the newest's environment.
e2e-sglang-versions: setup
	$(BIN)/python -m e2e.real_schedulers.versions sglang

# A real llama.cpp server, without an adapter; builds its environment when it is not there yet.
e2e-llamacpp: setup
	$(BIN)/python -m e2e.llamacpp.environment
	$(BIN)/python -m pytest e2e/llamacpp

# The environments of real engines and released clients, without a test.
environments: vllm-environment clients-environment sglang-environment

vllm-environment sglang-environment clients-environment: %-environment: setup
	$(BIN)/python -m e2e.$*.environment

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

# The archives, what a program needs that calls a gateway, and the pages' blocks with what their pages install.
packages: dist
	$(BIN)/python -m pytest e2e/release

# A release, checked: each kind of installation in a new environment, also those of the pages, the adapter in vLLM's.
release: dist
	$(BIN)/python -m e2e.vllm.environment
	PLAIT_NIGHTLY=1 $(BIN)/python -m pytest e2e/release

# The fast tests with their branch coverage, which has a floor: a quarter of an hour.
coverage: setup
	$(BIN)/python -m pytest tests $(JOBS) --cov

# A package by the tests that mirror it alone, which is less.
coverage-policy: setup
	$(BIN)/python -m pytest tests/policy $(JOBS) --cov=policy --cov-fail-under=94

coverage-backends: setup
	$(BIN)/python -m pytest tests/backends tests/lab $(JOBS) --cov=backends --cov=lab --cov-fail-under=95

coverage-gateway: setup
	$(BIN)/python -m pytest tests/gateway tests/client $(JOBS) --cov=gateway --cov=client --cov-fail-under=95

# Every module can be imported, by this version of Python too.
imports: setup
	$(BIN)/python -m tests.import_all

# How much there is: lines, Python calls of a plain chat, modules of a gateway.
weight: setup
	$(BIN)/python -m benchmarks weight

# What `.ci/run` leaves out, in parts of at most five minutes on two cores. It takes one part each time, in turn.
PARTS := test-3.12 test-3.13 properties coverage-policy coverage-backends coverage-gateway soak oncall-engines silent-workers \
	costly-requests oncall-calls oncall-gateways oncall-quiet killed-gateways killed-responses damaged-stores guests postgresql-outages \
	benchmark-tools generated-requests conversations vllm-1 vllm-2 vllm-3 vllm-metagpt vllm-oldest vllm-versions sglang-1 sglang-2 sglang-3 \
	sglang-versions llamacpp release pages exact-tokens $(addprefix mission-,agents-a agents-b promises tenants order programs-others \
	programs-busy-200 programs-busy-2000 programs-busy-6000 prefixes room preble scheduler documents gateways unnamed ranks-sessions \
	ranks-tools comparison estimates-sessions estimates-documents windows) margins tiers as-run vllm-estimates vllm-estimates-placed sglang-estimates \
	placement accounts batches

# All of them, or `make nightly PARTS="soak release"`.
nightly:
	.ci/nightly $(PARTS)

nightly-parts:
	@echo $(PARTS)

nightly-%: export PLAIT_NIGHTLY = 1

nightly-test-%:
	env -u PLAIT_NIGHTLY $(MAKE) test PYTHON="$$(.ci/python $*)" VENV=.venv-$*

# New examples of property tests, three times as many; the same ones for a commit, so that a failure can be had again.
nightly-properties: setup
	$(BIN)/python -m pytest tests -m hypothesis $(JOBS) --hypothesis-seed=$(shell git rev-list --count HEAD)

nightly-coverage-%: setup
	env -u PLAIT_NIGHTLY $(MAKE) coverage-$*

nightly-soak:
	$(MAKE) soak SOAK=4

nightly-oncall-engines: setup
	$(BIN)/python -m e2e.oncall hit_rate_fallen engine_slow engine_stuck engine_wrong engines_out

nightly-oncall-calls: setup
	$(BIN)/python -m e2e.oncall tenant_floods everything_queues slos_missed requests_break_engines program_hangs

nightly-oncall-gateways: setup
	$(BIN)/python -m e2e.oncall memory_grows gateway_dies gateways_apart store_down rolling_update reload_refused

nightly-oncall-quiet: setup
	$(BIN)/python -m e2e.oncall healthy idle --quiet-s 200

nightly-killed-gateways: setup
	$(BIN)/python -m pytest e2e/test_killed_gateway.py -m nightly

nightly-killed-responses: setup
	$(BIN)/python -m pytest e2e/test_killed_responses.py e2e/test_acknowledged_responses.py -m nightly

nightly-guests: setup
	$(BIN)/python -m pytest e2e/test_kernel.py -m nightly -n 2

nightly-damaged-stores: setup
	$(BIN)/python -m pytest e2e/faults/test_damaged_stores.py -m nightly -n 2

nightly-costly-requests: setup
	$(BIN)/python -m pytest e2e/faults/test_costly_requests.py

nightly-silent-workers: setup
	$(BIN)/python -m pytest e2e/test_silent_workers.py e2e/faults/test_some_hang.py -m nightly -n 2

nightly-postgresql-outages: setup
	$(BIN)/python -m e2e.postgresql.server
	PLAIT_TEST_GATEWAYS=3 $(BIN)/python -m pytest e2e/postgresql -m nightly -n 2 --ignore e2e/postgresql/test_accounts.py

nightly-accounts: setup
	$(BIN)/python -m e2e.postgresql.server
	$(BIN)/python -m pytest e2e/test_accounts.py e2e/postgresql/test_accounts.py -m nightly

nightly-batches: setup
	$(BIN)/python -m e2e.postgresql.server
	$(BIN)/python -m pytest e2e/test_batches.py -m nightly
	$(BIN)/python -m benchmarks batches --kills 2 --lines 8000

nightly-benchmark-tools: clients-environment
	$(BIN)/python -m pytest e2e/clients/test_benchmark_tools.py e2e/clients/test_jdk.py

nightly-generated-requests: clients-environment
	$(BIN)/python -m pytest e2e/clients/test_openapi.py -m nightly -n 2

nightly-conversations: clients-environment
	$(BIN)/python -m pytest e2e/clients/test_conversations.py e2e/clients/test_page.py -m nightly -n 2

nightly-vllm-1 nightly-vllm-2 nightly-vllm-3: nightly-%: %

nightly-vllm-estimates: vllm-environment
	$(VLLM) e2e/real_engines/test_estimates.py -k "not placement"

nightly-sglang-estimates: sglang-environment
	$(SGLANG) e2e/real_engines/test_estimates.py -k "not placement"

nightly-vllm-estimates-placed: vllm-environment
	$(VLLM) e2e/real_engines/test_estimates.py -k placement

nightly-vllm-metagpt: vllm-environment
	$(VLLM) e2e/real_engines/test_metagpt.py

nightly-vllm-oldest: e2e-vllm-oldest

nightly-vllm-versions: e2e-vllm-versions

nightly-sglang-1 nightly-sglang-2 nightly-sglang-3: nightly-%: %

nightly-sglang-versions: e2e-sglang-versions

nightly-llamacpp: e2e-llamacpp

nightly-release: dist
	$(BIN)/python -m e2e.vllm.environment
	$(BIN)/python -m pytest e2e/release --ignore e2e/release/test_pages.py

nightly-pages: dist
	$(BIN)/python -m pytest e2e/release/test_pages.py

nightly-exact-tokens: setup
	$(BIN)/python -m benchmarks exact_tokens --prompts 300000

nightly-mission-%: setup
	$(BIN)/python -m benchmarks mission --only $*

nightly-margins: setup
	$(BIN)/python -m benchmarks margins --quick

nightly-placement: setup
	$(BIN)/python -m benchmarks placement --held --only "games 20" --policies smg lmetric

nightly-as-run: setup
	$(BIN)/python -m benchmarks as_run

nightly-tiers: setup
	$(BIN)/python -m benchmarks tiers --quick

clean:
	rm -rf $(VENV) .venv-* e2e/clients/*/node_modules .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
