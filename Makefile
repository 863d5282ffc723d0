.DELETE_ON_ERROR:
.PHONY: train test soak fuzz lint bench clean

PYTHON ?= python3.12
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# mypy finds packages by path and knows nothing of setuptools' package-dir: it is shown the tree as an installation lays it out.
TYPED := build/typed/mcore_dsa

export OMP_NUM_THREADS := 1
# Megatron compiles its small fusions with torch.compile, which takes minutes on a CPU and needs a C++ compiler.
test soak fuzz train: export TORCHDYNAMO_DISABLE := 1

train: $(INSTALLED)
	SKYRL_DSA_INDEXER_TP_SHARD=1 $(BIN)/python -m mcore_dsa.train.launch --standalone --nproc-per-node 2 \
		-m mcore_dsa.train --config configs/tiny_tp2.yaml $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

# ARGS="--minutes 60 --seed 7 -- tests/test_kpool.py"
soak: $(INSTALLED)
	$(BIN)/python tests/soak.py $(ARGS)

# ARGS="--cases 5000 --seed 3 --target records"
fuzz: $(INSTALLED)
	$(BIN)/python tests/fuzz.py $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf $(TYPED)
	mkdir -p $(TYPED)
	ln -s $(CURDIR)/mcore_dsa/* $(CURDIR)/patches $(TYPED)
	$(BIN)/mypy $(TYPED)

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache

$(INSTALLED): requirements.txt pyproject.toml
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --requirement requirements.txt
	$(BIN)/python -m pip install --no-deps --no-build-isolation --editable .
	touch $@
