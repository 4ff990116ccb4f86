# Two commands for a newcomer: `make demo` and `make test`. Both build .venv when it is missing.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/.ready

MOONCAKE := .venv/mooncake
WITH_MOONCAKE := PYTHONPATH=$(CURDIR)/$(MOONCAKE) LD_LIBRARY_PATH=$(CURDIR)/$(MOONCAKE)/lib

.PHONY: demo test long pd observe load fuzz every-release reproduce lint clean help

help:
	@echo "make demo   the real SGLang server with HiSparse on this CPU, with and without the plugin"
	@echo "make test   lint, types and all tests that need no GPU"
	@echo "make long   tests that start many servers, which 'make test' leaves out: load, two ranks, speculation of 0.5.23, the table of examples; ten minutes"
	@echo "make pd   RELEASE=0.5.12: prefill and decode on two real servers on this CPU, KV by Mooncake over loopback; four minutes"
	@echo "make observe   metrics and explorer on the real servers of three releases; ten minutes"
	@echo "make load   SECONDS=120 RELEASE=0.5.12: clients that stream, abort and disconnect against the real server on this CPU"
	@echo "make every-release   tests/speculative, and tests/lifecycle with the state machine and the unchanged releases, of which 'make test' plays some, on all (40 minutes)"
	@echo "make fuzz   SECONDS=60 RELEASE='0.5.12 0.5.23' SEED=0: any sequence of events on the real scheduler; all releases if none is named"
	@echo "make speculative   SGLang's own speculation on the real server of 0.5.23, by both ways to swap in; four minutes"
	@echo "make reproduce   PATCH=0.5.23/staging-memory: what a patch repairs, on that release without it and with it; a minute"
	@echo "make lint   ruff and mypy alone"

demo: $(READY)
	$(BIN)/sglang-hisparse demo

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not gpu and not long" --durations=15 $(ARGS)

long: $(READY) $(MOONCAKE)/.ready
	$(WITH_MOONCAKE) OWN_DRAFT_TOKENS=3,4 $(BIN)/python -m pytest -n 2 -m long $(ARGS)

pd: $(READY) $(MOONCAKE)/.ready
	$(WITH_MOONCAKE) $(BIN)/sglang-hisparse demo --pd --release $(or $(RELEASE),0.5.12) $(ARGS)

observe: $(READY)
	OBSERVE_RELEASES=0.5.10.post1,0.5.12,0.5.23 $(BIN)/python -m pytest tests/observe/test_watched.py $(ARGS)

load: $(READY)
	$(BIN)/sglang-hisparse demo --load $(or $(SECONDS),120) --seed $(or $(SEED),0) --release $(or $(RELEASE),0.5.12) $(ARGS)

every-release: $(READY)
	EVERY_RELEASE=1 $(BIN)/python -m pytest -n 2 --dist loadgroup tests/lifecycle tests/speculative $(ARGS)

fuzz: $(READY)
	PYTHONPATH=tests $(BIN)/python -m lifecycle.fuzz $(if $(RELEASE),--release $(RELEASE)) --seconds $(or $(SECONDS),60) --seed $(or $(SEED),0) $(ARGS)

speculative: $(READY)
	OWN_DRAFT_TOKENS=3,4 $(BIN)/python -m pytest tests/e2e/test_speculative.py -k own_way $(ARGS)

reproduce: $(READY)
	PYTHONPATH=tests $(BIN)/python -m lifecycle.reproduce $(PATCH)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv build dist

# Beside the environment, not in it: SGLang imports Mooncake in every server that could.
$(MOONCAKE)/.ready: requirements/mooncake.sh $(READY)
	rm -rf $(MOONCAKE) && sh requirements/mooncake.sh $(CURDIR)/$(MOONCAKE) $(CURDIR)/$(BIN)/python
	touch $@

# About 2.5 GB. torchvision comes without its dependencies, which would replace a CPU build of torch by a CUDA one.
$(READY): requirements/cpu.txt pyproject.toml hatch_build.py
	@echo "Setting up .venv (a few minutes, once)"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements/cpu.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps torchvision==0.28.0
	$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[test]"
	touch $@
