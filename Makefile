# make cpu     install PyTorch without CUDA, once and first; without it pip takes the usual build (about 5 GB on Linux)
# make demo    set up, then train, attack and print a table of what leaked
# make test    set up, then run the tests, a process a core (PYTEST_ARGS="-m slow tests/fl" is passed on; "-n 0": one process)
# make nightly set up, then run the slow tests, and make up files for an hour (see docs/security.md)
# make federations  run the tests that need Flower or NVFlare, in an environment of their own: their pins clash with .venv's
# make executors  run the tests that need submitit, Dask or Ray, in an environment of their own
# make check   lint, formatting, types and which way imports point
# make docs    run the tutorials and build the site into build/site, strictly; open build/site/index.html
# make clean   remove caches and builds; the environment and results stay

PY ?= python3
BIN := .venv/bin
TORCH_CPU := https://download.pytorch.org/whl/cpu
FEDERATIONS := 'flwr[simulation]==1.42.0' 'nvflare==2.9.*'
FEDERATION_TESTS := tests/federations $(wildcard tests/eval/federations/test_flower*.py) \
  $(wildcard tests/hyperleak/test_flower.py tests/hyperleak/test_nvflare.py) \
  'tests/test_docs.py::test_python_blocks_run[docs/how-to/audit-in-flower.md]'
EXECUTORS := 'submitit==1.5.4' 'distributed==2026.8.0' 'ray==2.60.0'
export OMP_NUM_THREADS ?= 1

.PHONY: cpu demo test nightly federations executors check docs clean
.DEFAULT_GOAL := demo

demo: .venv/ok
	$(BIN)/hyperleak run configs/quickstart.yaml --out results/quickstart

cpu:
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PY) -m venv .venv
	@index=; if $(BIN)/python -c 'import urllib.request as r; r.urlopen("$(TORCH_CPU)/torch/", timeout=10)' 2>/dev/null; then \
	  index='--extra-index-url $(TORCH_CPU)'; \
	else \
	  echo '$(TORCH_CPU) is out of reach from here. Installing the usual build: about 5 GB on Linux.'; \
	fi; \
	$(BIN)/python -m pip install torch torchvision -c constraints.txt $$index

test: .venv/ok
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal $(PYTEST_ARGS)

nightly: .venv/ok
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal -m "slow and not gpu and not download" $(PYTEST_ARGS)
	$(BIN)/python -m pytest -n 0 tests/fuzz --hypothesis-profile nightly $(PYTEST_ARGS)

federations: .venv-federations/ok
	.venv-federations/bin/python -m pytest -n 0 -m "not gpu and not download" -W "ignore::DeprecationWarning:typer" \
	  $(FEDERATION_TESTS) $(PYTEST_ARGS)

executors: .venv-executors/ok
	.venv-executors/bin/python -m pytest -n 0 -m "not gpu and not download" tests/executors $(PYTEST_ARGS)

check: .venv/ok
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: .venv/ok
	@$(BIN)/python -c 'import ipykernel, jupytext, material, mkdocstrings_handlers.python, nbclient, pandas' 2>/dev/null || \
	  $(BIN)/python -m pip install -q -e '.[dev,docs]' -c constraints.txt
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find attacks benchmarks defenses eval fl tests -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment that is there already is kept, and so is a torch installed in it.
.venv/ok: pyproject.toml constraints.txt
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hyperleak needs Python >= 3.11, found %s; try: make PY=python3.12" % sys.version.split()[0])'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PY) -m venv .venv
	@$(BIN)/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' || { \
	  echo 'Installing into .venv. On Linux this downloads about 5 GB, most of it the CUDA build of torch.'; \
	  echo 'For a small CPU build: Ctrl-C, then: make cpu'; }
	$(BIN)/python -m pip install -q -e '.[dev]' -c constraints.txt
	@touch $@

# It sees what .venv has (torch, above all), and holds what Flower and NVFlare want otherwise.
.venv-federations/ok: .venv/ok
	$(BIN)/python -m venv .venv-federations
	$(BIN)/python -c 'import site; print("import site; site.addsitedir(%r)" % site.getsitepackages()[0])' > \
	  "$$(.venv-federations/bin/python -c 'import site; print(site.getsitepackages()[0])')/beside.pth"
	.venv-federations/bin/python -m pip install -q $(FEDERATIONS)
	@touch $@

.venv-executors/ok: .venv/ok
	$(BIN)/python -m venv .venv-executors
	$(BIN)/python -c 'import site; print("import site; site.addsitedir(%r)" % site.getsitepackages()[0])' > \
	  "$$(.venv-executors/bin/python -c 'import site; print(site.getsitepackages()[0])')/beside.pth"
	.venv-executors/bin/python -m pip install -q $(EXECUTORS) -c constraints.txt
	@touch $@
