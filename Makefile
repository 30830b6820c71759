# Rocket. `make` prints what there is.
SHELL := /bin/bash
.DEFAULT_GOAL := help

# -trimpath keeps the builder's folders out of the binary.
GO       ?= go
BUILDFLAGS := -trimpath
BIN      := bin/rocket
TIMEOUT  ?= 9m
RACE_TIMEOUT ?= 15m
ARGS     ?=

# go-nvml binds functions that its own header calls deprecated: a page of warnings about somebody else's code.
export CGO_CFLAGS := -O2 -g -Wno-deprecated-declarations

.PHONY: help setup run build test race lint bench soak web browser clean

help: ## print this
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## install what is missing (PostgreSQL's programs; Go and gcc are asked for)
	@bash internal/setup/setup.sh

run: setup build ## set up, build and serve the nano model; ARGS="--listen 127.0.0.1:9000" adds flags
	@exec $(BIN) serve $(ARGS)

build: ## build bin/rocket
	@mkdir -p bin
	$(GO) build $(BUILDFLAGS) -o $(BIN) ./cmd/rocket

test: setup ## every test on real Postgres and the real engine (under 10 minutes on 2 cores)
	$(GO) test -timeout $(TIMEOUT) ./...

# kernels and engine/model are left out: their concurrency is in C, which the detector does not see, and they would
# take most of the time; and what works on one goroutine for long: replay, and the comparison of quantised models.
race: setup ## the short tests under the race detector
	$(GO) test -race -short -timeout $(RACE_TIMEOUT) $$($(GO) list ./... | grep -v -e '^rocket/kernels' -e '^rocket/engine/model' -e '^rocket/engine/verify' -e '^rocket/internal/replay')

lint: ## gofmt, go vet, staticcheck, import direction, package comments
	@out=$$(gofmt -l $$(git ls-files '*.go')); if [ -n "$$out" ]; then echo "gofmt -w these files:"; echo "$$out"; exit 1; fi
	$(GO) vet ./...
	$(GO) tool staticcheck ./...
	$(GO) test -count=1 ./internal/lint

bench: build ## fork cost, batch ladder and roofline on the nano model, as JSON lines
	$(BIN) bench fork --json
	$(BIN) bench ladder --json
	$(BIN) bench roofline --json

soak: setup build ## kill servers 60 times under load and check that nothing acknowledged is lost or has happened twice (about 6 minutes)
	@$(BIN) soak $(ARGS)

web: ## rebuild web/dist from web/src (needs Node 20 or newer), after type check and unit tests
	cd web && npm ci --no-audit --no-fund && npm run check && npm test && npm run build

browser: build ## drive the dashboard in Chromium against a real server (needs Node 20 or newer)
	@bash internal/setup/setup.sh --browser
	cd web && npm ci --no-audit --no-fund && npm run check && npm test && npm run e2e

clean: ## remove what the build made (never data directories, never web/dist)
	rm -rf bin web/node_modules web/e2e/shots
