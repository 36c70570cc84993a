# make train   train a small ResNet on two processes
# make test    run the tests (eight minutes on two cores): every unit, each promise once on ddp and Horovod, one start
#              of each launcher
# make test-all  make test, then what it leaves out (a quarter of an hour more): more worlds, recipes and faults under
#              more launchers, loops of other libraries
# make test-oldest  run the contract, the launchers, the recipes and what uses other libraries with the lowest versions
#              that pyproject.toml allows (a few minutes, without Horovod's build), or the highest: RESOLUTION=highest
# make test-gpu  run the tests that need a GPU
# make check   check style, types, the documentation site, Dockerfiles, and the released packages
# make soak    run every fault under every launcher, kills at random moments, and what make test-all leaves out: most
#              benchmarks' short forms, more worlds, ten times the examples of Hypothesis (about half an hour), and
#              a hundred starts and ends under each launcher (another two hours on two cores). Write tests/faults/results.md
# make coverage  measure what make test covers, in a third more time; print the total, and the files below 90 %
# make bench   measure speed beside hand-written loops and other frameworks, into benchmarks/results/ and docs/figures/
# make lint    check style and types only (.pre-commit-config.yaml has the list)
# make hooks   have git check what is committed, too
# make dist    build what is released of the last commit, wheel and sdist, into dist/
# make test-dist  make dist, then install the wheel in an empty environment, once with the lowest and once with the highest
#              versions of what it needs, and do the tutorial there (several GB, a few minutes, and Horovod's build)
# make docs    build the documentation into site/
# make clean   remove the virtual environments and what tools left (not runs/)
#
# Settings: PYTHON makes the virtual environment VENV; WORKERS is the number of processes that run tests (many wait);
# ARGS is added to the command of the recipe, of pytest, of each benchmark (--short, say) or of the build; BENCHMARKS are
# the scripts of make bench. make test-oldest makes the environment OLDEST, and installs WITH in it, too, such as
# torch==2.13.0. make dist and make test-dist fail if the tag TAG is given and is not the version's.

PYTHON ?= python3
VENV ?= .venv
OLDEST ?= .venv-oldest
RESOLUTION ?= lowest-direct
WITH ?=
WORKERS ?= 3
ARGS ?=
TAG ?=
BENCHMARKS ?= benchmarks/*.py

BIN := $(abspath $(VENV))/bin
# Not exported by the target: what makes the environment would look for Python in it, too.
IN_OLDEST := PATH="$(abspath $(OLDEST))/bin:$$PATH"
# -qq leaves pip's errors only.
PIP_INSTALL := -m pip install -qq --disable-pip-version-check --root-user-action=ignore
# What a test or a launcher starts is looked for in the environment first.
export PATH := $(BIN):$(PATH)
# The tests start a thousand processes, and each would compile the package.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help train test test-all test-oldest test-gpu test-dist check soak coverage bench lint hooks dist docs clean
.NOTPARALLEL:

help:
	@sed -n '/^$$/q; s/^# \{0,1\}//p' Makefile

# With its own address given, torchrun works where the host's name does not resolve.
train: $(VENV)/.has-recipes
	$(BIN)/torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 recipes/resnet.py $(ARGS)

test: $(VENV)/.has-test
	@.ci/install-system-parts
	@$(BIN)/unitrain install-horovod || echo "Horovod could not be installed: its tests will be skipped." >&2
	$(BIN)/pytest -n $(WORKERS) --max-worker-restart 0 --cpu-seconds=build/cpu-seconds/test.tsv $(ARGS)

test-all: test
	$(BIN)/pytest -n $(WORKERS) --max-worker-restart 0 --cpu-seconds=build/cpu-seconds/test-all.tsv \
		-m "all and not soak and not check" $(ARGS)

# What is old warns of what is deprecated.
test-oldest: $(OLDEST)/.has-oldest
	@$(IN_OLDEST) unitrain install-horovod || echo "Horovod could not be installed: its tests will be skipped." >&2
	$(IN_OLDEST) pytest -n $(WORKERS) --max-worker-restart 0 \
		-W default::DeprecationWarning -W default::PendingDeprecationWarning \
		tests/contract tests/launch/test_launchers.py tests/recipes tests/features/test_trackers.py \
		tests/features/metrics_endpoint tests/checkpoint/store/test_remote.py $(ARGS)

test-gpu: $(VENV)/.has-test
	$(BIN)/pytest -m gpu $(ARGS)

check: $(VENV)/.has-test
	$(BIN)/pytest -n $(WORKERS) --max-worker-restart 0 -m "check and not soak" $(ARGS)

soak: $(VENV)/.has-test
	@$(BIN)/unitrain install-horovod
	rm -f ends.jsonl
	TESTS_ENDS=$(CURDIR)/ends.jsonl $(BIN)/pytest tests/faults -m "soak or not soak" $(ARGS)
	$(BIN)/python tests/faults/support/report.py ends.jsonl > tests/faults/results.md
	$(BIN)/pytest tests --ignore tests/faults -m "soak or all" $(ARGS)
	$(BIN)/pytest tests -m "hypothesis and not soak" --hypothesis-profile soak $(ARGS)

# Without what bounds a time, which takes longer when every line is counted.
coverage: $(VENV)/.has-test
	@.ci/install-system-parts
	@$(BIN)/unitrain install-horovod
	rm -rf build/coverage
	mkdir -p build/coverage
	-$(BIN)/coverage run $(BIN)/pytest -n $(WORKERS) --max-worker-restart 0 -m "not soak and not check and not all and not alone" $(ARGS)
	$(BIN)/coverage combine --quiet
	@$(BIN)/coverage report | awk 'NR <= 2 || /^TOTAL/ || int($$NF) < 90'

bench: $(VENV)/.has-bench
	@$(BIN)/unitrain install-horovod || echo "Horovod could not be installed: it will not be measured." >&2
	@set -e; for script in $(BENCHMARKS); do echo "== $$script" >&2; $(BIN)/python $$script $(ARGS); done
	$(BIN)/python benchmarks/shared/figures.py

lint: $(VENV)/.has-test
	$(BIN)/pre-commit run --all-files $(ARGS)

# git may run the hooks where the environment is not active, and they find their tools on the path.
hooks: $(VENV)/.has-test
	$(BIN)/pre-commit install
	@sed -i '/^# end templated/a export PATH="$(BIN):$$PATH"' "$$(git rev-parse --git-path hooks)/pre-commit"

# Of an export, so that nothing lying about in the checkout gets in.
dist: $(VENV)/.has-test
	@[ -z "$(TAG)" ] || { grep -qx 'version = "$(TAG:v%=%)"' pyproject.toml && \
		grep -q '^## $(TAG:v%=%) - [0-9]' CHANGELOG.md; } || { \
		echo "$(TAG) must be a v and the version in pyproject.toml, which CHANGELOG.md must have with a date." >&2; exit 1; }
	rm -rf dist
	@set -e; export=$$(mktemp -d); trap 'rm -rf "$$export"' EXIT; git archive HEAD | tar -x -C "$$export"; \
	$(BIN)/pyproject-build --outdir dist $(ARGS) "$$export"
	$(BIN)/twine check --strict dist/*

test-dist: dist
	@set -e; for resolution in lowest-direct highest; do \
		$(BIN)/python .ci/try_wheel.py dist/*.whl --python $(PYTHON) --resolution $$resolution; done

docs: $(VENV)/.has-docs
	$(BIN)/mkdocs build

clean:
	rm -rf $(VENV) $(OLDEST) build dist site unitrain.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# uv, since pip installs the newest only. The lowest version that can be installed under a newer Python is one with a wheel.
$(OLDEST)/.has-oldest: pyproject.toml
	@echo "Installing the versions that $(RESOLUTION) chooses into $(OLDEST); torch is several GB …"
	@$(PYTHON) -m venv --clear $(OLDEST)
	@$(OLDEST)/bin/python $(PIP_INSTALL) uv
	@$(OLDEST)/bin/uv pip install --quiet --python $(OLDEST) --resolution $(RESOLUTION) --only-binary :all: --editable '.[oldest]' $(WITH)
	@touch $@

# A stamp for each extra that is installed: only a changed pyproject.toml installs it again.
$(VENV)/.has-%: pyproject.toml | $(BIN)/python
	@echo "Installing unitrain[$*] into $(VENV); the first time with torch, which is several GB …"
	@$(BIN)/python $(PIP_INSTALL) --editable '.[$*]'
	@touch $@
