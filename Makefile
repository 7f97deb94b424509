# Everything runs in .venv, which is made on first use. `make PYTHON=python3.12 ...` picks the interpreter.
PYTHON ?= python3
ARGS ?=
# Of the whole suite, slow tests are left to test-slow; of a part that ARGS picks they run, too.
WHOLE = $(if $(ARGS),,-m 'not slow or slow(short=True) and not slow(short=False)')
# COVERAGE=1 asks for every line of compression/ and protocols/, which the tests that
# tests/conftest.py names have to reach. It takes a quarter more time, so CI asks for it.
COVERED = $(if $(COVERAGE),--cov --cov-report=term-missing:skip-covered --cov-fail-under=100)
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-browser check format soak docs reference dist sbom rehearsal constraints clean

# Tests start processes by the hundred; each would compile all of its modules anew.
unexport PYTHONDONTWRITEBYTECODE

help:
	@echo "make demo         a federated run on this machine; options in ARGS, e.g. ARGS='--rounds 10'"
	@echo "make test         the tests; COVERAGE=1: every line of compression/ and protocols/ must be reached"
	@echo "make test-slow    the tests that take longer: whole processes, crashes, more examples"
	@echo "make test-browser the console in Chromium, where there is one"
	@echo "make check        ruff, mypy --strict, import-linter"
	@echo "make format       let ruff put the code in order"
	@echo "make soak         the long fuzz and crash runs"
	@echo "make docs         this documentation as pages for a browser: by MkDocs in build/site, by Zensical in build/zensical"
	@echo "make reference    renew the pages of docs/reference that the code determines"
	@echo "make dist         wheel and sdist in dist/, each installed into a fresh environment"
	@echo "make sbom         bills of materials (CycloneDX) of what a device and a server install, in build/sbom"
	@echo "make rehearsal    a release: build, install, upgrade a server and devices at work"
	@echo "make constraints  renew constraints.txt with the newest versions that fit together"
	@echo "make clean        remove the environment and everything built"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "fedpress needs Python 3.11 or newer; try make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# A stamp says that .venv holds these extras at the versions of these two files.
# Flower and Ray are left out, half a gigabyte, and PEFT, 170 MB that take 20 s to install; their tests are skipped.
$(VENV)/demo.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e '.[demo,torch]'
	@touch $@

# The kernels are compiled here once, where each of the processes that run tests would do it.
$(VENV)/test.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e '.[server,postgres,s3,otel,torch,demo,fast,dev]'
	$(BIN)/python -c 'from fedpress_compression import kernels; kernels.warm_up()'
	@touch $@

# Triton, a gigabyte, for the slow tests alone: they run its kernels under its interpreter, without a GPU.
$(VENV)/gpu.stamp: $(VENV)/test.stamp
	$(PIP_INSTALL) -e '.[gpu]'
	@touch $@

$(VENV)/docs.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e '.[docs]'
	@touch $@

demo: $(VENV)/demo.stamp
	$(BIN)/fedpress demo $(ARGS)

# More processes than cores: some tests wait.
test: $(VENV)/test.stamp
	$(BIN)/python -m pytest -n 3 $(COVERED) $(WHOLE) $(ARGS)

test-slow: $(VENV)/gpu.stamp
	FEDPRESS_SLOW=1 $(BIN)/python -m pytest -n 4 -m slow $(ARGS)

check: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# Chromium itself is the machine's: `apt-get install chromium`.
$(VENV)/browser.stamp: $(VENV)/test.stamp
	$(PIP_INSTALL) -e '.[browser]'
	@touch $@

test-browser: $(VENV)/browser.stamp
	$(BIN)/python -m pytest tests/browser $(ARGS)

docs: $(VENV)/docs.stamp
	$(BIN)/mkdocs build --strict $(ARGS)
	$(BIN)/zensical build --config-file zensical.yml --clean --strict

reference: $(VENV)/test.stamp
	$(BIN)/python -m tests.tools.reference

format: $(VENV)/test.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The long runs are few and use both cores themselves, so no xdist and no time limit.
soak: $(VENV)/test.stamp
	FEDPRESS_SOAK=1 $(BIN)/python -m pytest -m soak --timeout=0 $(ARGS)

dist: $(VENV)/test.stamp
	.ci/package

sbom: dist
	.ci/sbom dist build/sbom

rehearsal: $(VENV)/test.stamp
	$(BIN)/python .ci/rehearse $(ARGS)

# Two keep their pins. torch: other versions bring gigabytes of GPU libraries. click: from 8.5 on it
# warns about what typer 0.20 does, and Flower allows no newer typer.
constraints:
	rm -rf build/constraints
	$(PYTHON) -m venv build/constraints
	grep -E '^(torch|click)==' constraints.txt > build/constraints/pins.txt
	build/constraints/bin/python -m pip install --quiet -c build/constraints/pins.txt -e '.[all,callbacks,docs,browser,gpu,dev]'
	build/constraints/bin/python -m pip check
	{ grep '^#' constraints.txt; build/constraints/bin/python -m pip freeze --exclude-editable \
	  | sed 's/+cpu$$//'; } > build/constraints/new.txt
	mv build/constraints/new.txt constraints.txt
	rm -rf build/constraints

clean:
	rm -rf $(VENV) build dist .coverage .coverage.* .cache htmlcov .hypothesis .pytest_cache .mypy_cache \
	  .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
