# `make test` and `make demo` need Python >= 3.11, a C compiler, and the network the first time.

PYTHON ?= python3
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO := build/demo
SITE := build/site

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# products of small matrices: threads of numpy's library would mostly wait
export OPENBLAS_NUM_THREADS ?= 1
# tests start many processes, each of which would compile the package's sources again
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv demo lint quick test test-all test-oracles test-rtl test-docs fuzz prove sbom site clean
.DELETE_ON_ERROR:

help:
	@echo 'make venv    create $(VENV) with Dovetail and everything its tests need'
	@echo 'make demo    compile a small network for NE16 and run it on the simulated chip'
	@echo 'make lint    format, ruff, mypy, sizes of the code and sentences of the pages'
	@echo 'make quick   a compile and run of each kind, and what holds for all modules: at most a minute'
	@echo 'make test    lint, then the tests on $(JOBS) processes (JOBS=n)'
	@echo 'make test-all    lint beside these tests and those below in one go, which takes less than one after the other'
	@echo 'make test-oracles  random models and published networks against other runtimes'
	@echo 'make test-rtl   those that build Verilog'
	@echo 'make test-docs  those that execute and build the documentation'
	@echo 'make fuzz    random models, targets, policies and options for SECONDS (600), in build/fuzz: goes on where it stopped'
	@echo 'make prove   that every number called exact is the one that is meant, and that wrong ones are found'
	@echo 'make sbom    what is installed as a bill of materials in CycloneDX form, build/sbom.json'
	@echo 'make site    the documentation as HTML, in $(SITE)'
	@echo 'make clean   remove $(VENV), build/ and caches'

venv: $(INSTALLED)

$(INSTALLED): pyproject.toml
	@command -v '$(PYTHON)' >/dev/null || { \
	  echo "'$(PYTHON)' was not found: install Python >= 3.11, or say which: make PYTHON=python3.12" >&2; exit 1; }
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Dovetail needs Python >= 3.11, this is $$('$(PYTHON)' -V 2>&1): make PYTHON=python3.12" >&2; exit 1; }
	@'$(PYTHON)' -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot create virtual environments (on Debian or Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@echo 'Installing Dovetail and its tools into $(VENV) (a few minutes the first time)'
	@'$(PYTHON)' -m venv '$(VENV)'
	@{ command -v uv >/dev/null && uv pip install -q --python '$(BIN)/python' -e '.[all,test,dev]'; } || \
	  '$(BIN)/python' -m pip install -q --no-compile -e '.[all,test,dev]'
	@'$(BIN)/python' -m compileall -qq -j 0 -x '/site-packages/.*/tests?/' '$(VENV)/lib' || true
	@touch '$@'

demo: $(INSTALLED)
	@mkdir -p '$(DEMO)'
	$(BIN)/dovetail zoo digits -o $(DEMO)/digits.onnx
	$(BIN)/dovetail compile $(DEMO)/digits.onnx --target ne16 -o $(DEMO)/digits_ne16 --force
	$(BIN)/dovetail run $(DEMO)/digits_ne16

lint: $(INSTALLED)
	$(BIN)/ruff format --check dovetail tests scripts
	$(BIN)/ruff check dovetail tests scripts
	$(BIN)/mypy
	$(BIN)/python scripts/house.py --hold
	$(BIN)/python scripts/english.py --hold

PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -q

quick: $(INSTALLED)
	$(BIN)/ruff check dovetail tests scripts
	$(PYTEST) -m quick

test: lint
	$(PYTEST) -m 'not oracles and not rtl and not docs'

# Lint is one process, and tests often wait: beside each other they fill the time.
test-all: $(INSTALLED)
	@mkdir -p build
	@$(MAKE) lint > build/lint.log 2>&1 & \
	$(PYTEST); tested=$$?; wait $$!; linted=$$?; cat build/lint.log; exit $$((tested + linted))

test-oracles: $(INSTALLED)
	$(PYTEST) -m oracles

test-rtl: $(INSTALLED)
	$(PYTEST) -m rtl

test-docs: $(INSTALLED)
	$(PYTEST) -m docs

SECONDS ?= 600

fuzz: $(INSTALLED)
	$(BIN)/python scripts/fuzz.py build/fuzz --seconds $(SECONDS) --jobs $(JOBS)

prove: $(INSTALLED)
	$(BIN)/python scripts/prove.py
	$(BIN)/python scripts/prove.py --wrong

sbom: $(INSTALLED)
	@mkdir -p build
	$(BIN)/python -m venv build/sbom_tool && build/sbom_tool/bin/pip install -q cyclonedx-bom
	build/sbom_tool/bin/cyclonedx-py environment $(BIN)/python --output-file build/sbom.json

site: $(INSTALLED)
	$(BIN)/python -m sphinx -W --keep-going -n -q -b html docs $(SITE)

clean:
	rm -rf '$(VENV)' build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find dovetail tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
