# make run       the main job, on what bcnet carries with it
# make test      the tests; those whose packages are missing are skipped, and the end says which
# make test-all  all tests, with every optional package: only what needs a GPU is left out
# All need only Python 3.11 or newer, git and make; they create .venv when it is missing or outdated.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
EXTRAS := dev,onnx,parquet,report
# Kernels are tested in Triton's interpreter. A torch for CUDA brings the Triton it needs; any other gets this one.
TRITON := 3.9.0
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: run test test-all lint wheel docs constraints clean

run: $(VENV)/.installed
	$(BIN)/bcnet run

test: $(VENV)/.installed
	$(PYTEST)

test-all: $(VENV)/.installed-all
	$(PYTEST)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The wheel as users get it, in an environment and a folder of its own: nothing is there but what the wheel asks for.
wheel: $(VENV)/.installed
	rm -rf build/wheel && mkdir -p build/wheel/elsewhere
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/python -m pip install --quiet --constraint constraints.txt "$$(ls build/wheel/*.whl)[report]"
	cd build/wheel/elsewhere && \
	../venv/bin/python -c 'import bcnet; assert "/build/wheel/venv/" in bcnet.__file__, bcnet.__file__' && \
	../venv/bin/bcnet run --recipe digits --effort quick --compare none --out run && test -s run/report.html
	rm -rf build/wheel/venv

docs: $(VENV)/.installed-docs
	$(BIN)/mkdocs build --strict

# Resolve everything anew and pin it: run this to take newer versions of what bcnet stands on.
constraints:
	rm -rf build/resolve
	$(PYTHON) -m venv build/resolve
	build/resolve/bin/python -m pip install --quiet torch==2.13.0 '.[dev,all,rivals,docs]'
	echo '# The exact versions that the tests run with; made by `make constraints`.' > constraints.txt
	build/resolve/bin/python -m pip freeze --exclude bcnet | sed 's/+cpu$$//' >> constraints.txt

clean:
	rm -rf $(VENV) build dist site .pytest_cache .hypothesis .mypy_cache .ruff_cache

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("bcnet needs Python 3.11 or newer: make PYTHON=/path/to/python" if sys.version_info < (3, 11) else 0)'
	@echo "Installing bcnet into $(VENV); the first time this takes some minutes."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

$(VENV)/.installed-all: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,all,rivals]'
	$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install --quiet triton==$(TRITON)
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $@
