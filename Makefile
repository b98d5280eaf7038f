# Slipstream's entry points; each does its own set-up first.
#
#   make train    train on Fashion-MNIST with 4 ranks      (RECIPE=digits, ARGS="--set train.epochs=3")
#   make test     lint, then the whole test suite          (ARGS="-k name")
#   make lint     ruff, mypy --strict, import-linter
#   make bench    every benchmark, renews docs/benchmarks.md    (ARGS=--quick: a look that renews nothing)
#   make setup    the environment alone                    (VENV=path, PYTHON=interpreter)
#   make clean    remove caches; make distclean: the environment too

VENV ?= .venv
RECIPE ?= fashion
ARGS ?=
RUN = $(VENV)/bin/python -m

.PHONY: help setup train test lint bench clean distclean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   //p' Makefile

setup:
	@scripts/setup "$(VENV)"

train: setup
	@$(VENV)/bin/slipstream train $(RECIPE) --nodes 2 --per-node 2 $(ARGS)

test: lint
	@$(RUN) pytest $(ARGS)

lint: setup
	@$(RUN) ruff check --quiet .
	@$(RUN) ruff format --check --quiet .
	@$(RUN) mypy
	@$(VENV)/bin/lint-imports --no-cache

bench: setup
	@$(VENV)/bin/python benchmarks/renew.py $(ARGS)

clean:
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis dist
	@find src tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	@rm -rf .venv
