# make setup   the virtual environment in .venv, the system packages it needs, the gRPC modules
# make demo    mount a real S3 server's bucket and read it, in under two minutes
# make test    style, types and tests
# make lint    style, types and imports alone
# make storm   daemons killed, stopped and upgraded by the hundred, property tests with a thousand
#              examples: for ten minutes and more
# make test-ceph  the tests that use a server, against Ceph's gateway (ceph-mon, ceph-osd, radosgw)
# make share   manual pages and shell completions, in build/share
# make deb     a Debian package, in build/
# make test-deb   that package in a fresh Debian: installed, upgraded under load, removed
# make test-cluster-cache  a cluster cache whose parts fail, each in turn: ten minutes
# make test-fsspec  pandas, pyarrow, datasets, webdataset and zarr through fusefs:// (they are
#              installed in .venv), and torch where it is there
# make docs    the documents as a site, in build/site; strict: no dead link, no missing page
# make test-docs  that site in headless Chromium
# make test-cluster  a real Kubernetes on this machine (root): Kubernetes' own storage suite, csi-sanity and
#              scenarios of ours as pods. KUBERNETES=1.31 for the oldest one; KUBECONFIG=… for a cluster
#              that exists (see tests/cluster/__main__.py); ARGUMENTS="--only scenarios" for a part
# make sbom    what the image has of Python, as CycloneDX, in build/sbom.json
# make test-wheel  the wheel in a fresh virtual environment, from the package index
# make scale   a bucket of 50 million objects in one mount, and a thousand nodes (simulated)
# make bench   the measurements against the bare disk and other mounts
# make clean   removes what these have made

SHELL := /bin/bash
BIN := .venv/bin
STAMP := .venv/.set-up
# With a path on record, not a module that finds the packages and is imported at each start.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	--config-settings editable_mode=compat
SOURCES := setup.py fusefs csi tests examples packaging $(wildcard bench)

.PHONY: setup share deb test-deb test-wheel test-cluster test-cluster-cache test-fsspec sbom docs test-docs demo test tests test-ceph lint storm scale bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml setup.py $(wildcard fusefs/fuse/*.c) $(wildcard fusefs/store/engine/*.[ch]) $(wildcard proto/*.proto) .ci/system-packages .ci/prometheus
	.ci/system-packages
	test -x $(BIN)/python || "$$(.ci/system-packages --python)" -m venv .venv
	$(INSTALL) -e '.[dev]'
	.ci/prometheus $(BIN)
	$(BIN)/fusefs --version
	touch $@

share: $(STAMP)
	$(BIN)/python packaging/make_docs.py build/share

deb: $(STAMP)
	.ci/system-packages --deb
	$(BIN)/python packaging/deb/build.py

test-deb: $(STAMP)
	.ci/system-packages --deb
	$(BIN)/python -m pytest -s tests/packaging/debian/in_chroot.py

docs: $(STAMP)
	$(INSTALL) -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file packaging/site/mkdocs.yml

test-docs: docs
	.ci/system-packages --docs
	$(BIN)/python -m pytest tests/packaging/site/in_browser.py

SBOM := build/sbom.json
sbom: $(STAMP)
	mkdir -p $(dir $(SBOM))
	$(BIN)/cyclonedx-py requirements --output-reproducible --no-validate --pyproject pyproject.toml \
		--output-file $(SBOM) image/requirements.txt

test-wheel: $(STAMP)
	$(BIN)/python -m pytest tests/packaging/in_venv.py

test-cluster: $(STAMP)
	.ci/system-packages --cluster
	$(BIN)/python -m tests.cluster $(KUBERNETES:%=--kubernetes %) $(ARGUMENTS)

test-cluster-cache: $(STAMP)
	$(BIN)/python -m pytest -rP tests/mounted/cluster_cache/whole_cluster.py

test-fsspec: $(STAMP)
	$(INSTALL) -e '.[test-fsspec]'
	$(BIN)/python -m pytest tests/mounted/fsspec/libraries.py

demo: $(STAMP)
	$(BIN)/python -m examples.demo

# A test that hangs fails; where no signal ends its wait, the run ends with what it waits for.
TEST_LIMITS := --timeout 240 -o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true --max-worker-restart 0

# Most of the tests' time is waiting, so more run at once than there are processors, and lint beside
# them. In the order of their folders, so that the units come last: a file that takes minutes would
# have the others wait.
test: $(STAMP)
	$(MAKE) --no-print-directory -j2 lint tests

# In a new clone, each worker would compile all tests: 17 s of CPU in place of 6.
tests: $(STAMP)
	[ -d tests/__pycache__ ] || $(BIN)/python -m pytest --collect-only --quiet > /dev/null || true
	MAKEFLAGS= $(BIN)/python -m pytest -rs -n 5 --dist loadfile --no-loadscope-reorder $(TEST_LIMITS)

# Each process has a cluster of its own, with everything in memory.
test-ceph: $(STAMP)
	$(BIN)/python -m pytest --store ceph -n 2 --dist loadfile

lint: $(STAMP)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy --strict fusefs csi
	$(BIN)/lint-imports

storm: $(STAMP)
	$(BIN)/python -m pytest -m "storm or hypothesis" --hypothesis-profile storm

scale: $(STAMP)
	$(INSTALL) -e '.[draw]'
	mkdir -p bench/results
	$(BIN)/python -m bench.scale.objects --out bench/results/objects.json
	$(BIN)/python -m bench.scale.nodes --out bench/results/nodes.json
	$(BIN)/python -m bench draw bench/results/nodes.json

bench: $(STAMP)
	$(INSTALL) -e '.[bench]'
	$(BIN)/python -m bench

clean:
	rm -rf .venv build dist *.egg-info csi/generated/*_pb2* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
