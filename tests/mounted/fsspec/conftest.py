"""fsspec's own tests of wildcards, one of six of them: `make storm` runs all 96.

They are of code that fsspec itself has, and took a twentieth of the time of all tests.
"""

import pytest

ONE_OF = 6


@pytest.hookimpl(tryfirst=True)  # before those of `make storm` are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wildcards = [one for one in items if "glob_edge_cases" in one.name]
    for number, item in enumerate(wildcards):
        if number % ONE_OF:
            item.add_marker(pytest.mark.storm)
