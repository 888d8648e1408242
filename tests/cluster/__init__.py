"""A real Kubernetes on this machine, and its own suites against the driver: `make test-cluster`.

build.py compiles Kubernetes' programs and the sidecars from Go modules, images.py makes the
images, node.py runs nodes in namespaces of their own, suites.py runs the suites and reads their
reports, scenarios.py is the driver's own tests as pods, and __main__.py has the order of all that.
versions.toml is the only place with versions.
"""
