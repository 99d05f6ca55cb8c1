# The menu. Every target makes .venv and installs into it when needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The exact solver that the planner is measured against; its pins are not ours.
EXACT := $(VENV)/exact/.ready
# Tests of these markers compare times or use an accelerator: they have the machine to themselves.
ALONE := gpu or timed
ALONE_FILES = $(shell grep -rlE "mark\.(gpu|timed)" tests --include=test_*.py)
# Keep bytecode, whatever the environment says: without it each rank compiles us when it starts.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test check size bench campaign mutants reference install clean

help:
	@echo "make demo      train the embedded default with 1 and with 4 workers, end with a report"
	@echo "make test      checks (format, lint, types, packages), then every test"
	@echo "make check     format, lint, types, imports between packages"
	@echo "make size      the tail of the tree: longest functions, files, constructors, suppressions"
	@echo "make mutants   plant known bugs one by one, see the tests catch each"
	@echo "make bench     step time against tuned DDP in a cluster in a box (root)"
	@echo "make campaign  the long fault campaigns; records go to benchmarks/records"

$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (a minute or two, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,vision,tensorboard,wandb,mlflow]'
	@touch $@

$(EXACT): constraints-exact.txt | $(READY)
	@test -x $(VENV)/exact/bin/python || $(PYTHON) -m venv $(VENV)/exact
	@$(VENV)/exact/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-exact.txt ortools
	@touch $@

install: $(READY)

demo: $(READY)
	$(BIN)/stretto demo

check: $(READY)
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo 2>/dev/null || $(BIN)/lint-imports

# Both parts run, whatever the first one finds; either fails the target. In the first part tests
# share the cores, so torch has one thread in each process, and time limits are doubled. Tests of a
# file stay together, because they share fixtures.
test:
	@$(MAKE) --no-print-directory --jobs 2 check $(EXACT)
	@failed=0; \
	echo "tests beside each other"; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --durations=10 -m "not ($(ALONE))" \
	  -n 3 --dist loadfile --no-loadscope-reorder --timeout=240 || failed=1; \
	echo "tests that compare times, one after another"; \
	$(BIN)/python -m pytest --durations=10 -m "$(ALONE)" $(ALONE_FILES) || failed=1; \
	if [ $$failed = 1 ]; then echo "make test: a part failed, see its summary above"; fi; \
	exit $$failed

size: $(READY)
	@$(BIN)/python tools/size.py

mutants: $(READY)
	$(BIN)/python tools/mutants.py

reference: $(READY)
	$(BIN)/python tools/reference.py

bench: $(READY)
	$(BIN)/python benchmarks/step.py

campaign: $(READY) $(EXACT)
	$(BIN)/python benchmarks/campaign.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache runs
