# Everything runs in a virtual environment of its own, made from a bare Python >= 3.11.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Compiled files are kept, whatever the shell says: tests start many processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test thorough quick check coverage wheel oldest format bench gpu docs clean

demo: .venv/ready-demo
	$(BIN)/thrifty demo

test: .venv/ready-test
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

# The whole suite with many more random cases, more than twice the time.
thorough: export THRIFTY_THOROUGH := 1
thorough: test

# The files whose tests are all fast, a quarter of the cases, without the doctests.
quick: .venv/ready-test
	$(BIN)/python -m pytest tests -m 'not slow' --numprocesses 2 --dist loadfile --quiet

check: .venv/ready-test
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check

# Branch coverage of all processes; scripts/measured keeps what workers that are killed have measured.
# Measuring doubles the time of a test, so tests that run what others run, too, are left out.
coverage: REPEATING := tests/docs tests/examples tests/graph/test_uncompiled.py \
	tests/pack/identity/test_mutations.py tests/test_how_to.py tests/test_typing.py
coverage: export PYTHONPATH := $(CURDIR)/scripts/measured
coverage: .venv/ready-test
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -p save_at_end --numprocesses 3 --dist loadfile --no-loadscope-reorder \
		--hypothesis-profile few $(addprefix --ignore=,$(REPEATING))
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

wheel:
	PYTHON="$(PYTHON)" scripts/check_wheel

oldest:
	PYTHON="$(PYTHON)" scripts/check_oldest

format: .venv/ready-test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/ready-bench
	$(BIN)/python -m bench.bench_trust
	$(BIN)/python -m bench.bench_plan
	$(BIN)/python -m bench.bench_store
	$(BIN)/python -m bench.bench_agents
	$(BIN)/python -m bench.bench_sharing
	$(BIN)/python -m bench.bench_pack
	$(BIN)/python -m bench.bench_pack_hyperband
	$(BIN)/python -m bench.bench_bandits
	$(BIN)/python -m bench.bench_search --standard
	$(BIN)/python -m bench.bench_schedules
	$(BIN)/python -m bench.bench_rex
	$(BIN)/python -m bench.bench_ladder
	$(BIN)/python -m bench.bench_finetune
	$(BIN)/python -m bench.bench_graph
	$(BIN)/python -m bench.bench_cloud
	$(BIN)/python -m bench.bench_gyro
	$(BIN)/python -m bench.bench_hetero
	$(BIN)/python -m bench.bench_cluster
	$(BIN)/python -m bench.bench_dashboard

# With the PyTorch of PYTHON, which must see a GPU: the environment above has the build for CPUs.
gpu:
	$(PYTHON) scripts/gpu.py $(STEPS)

docs: .venv/ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv demo build dist site

# torch first and by itself, so that nothing else chooses its build
.venv/ready-torch: constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) torch
	touch $@

.venv/ready-demo: .venv/ready-torch pyproject.toml
	$(INSTALL) --editable '.[demo,plots,web]'
	touch $@

.venv/ready-test: .venv/ready-torch pyproject.toml
	$(INSTALL) --editable '.[test,check]'
	touch $@ .venv/ready-demo

.venv/ready-docs: .venv/ready-demo
	$(INSTALL) --editable '.[docs]'
	touch $@

.venv/ready-bench: .venv/ready-test
	$(INSTALL) --editable '.[bench]'
	touch $@
