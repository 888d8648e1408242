"""Makes the CSI driver's gRPC modules, csi/generated/, from proto/ when the package is built."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from setuptools import Command, Extension, setup
from setuptools.command.build import build

ROOT = Path(__file__).parent
PROTOS = ROOT / "proto"
# Relative, for protoc writes this path into the modules' imports.
PACKAGE = Path("csi/generated")


class BuildStubs(Command):
    """A step of `build`, as setuptools' SubCommand protocol describes it."""

    description = "make the gRPC modules from proto/"
    user_options: ClassVar[list[tuple[str, str, str]]] = []
    editable_mode = False
    build_lib: str | None = None

    def initialize_options(self) -> None:
        pass

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self) -> None:
        from grpc_tools import protoc

        arguments = [
            "protoc",
            f"-I{PACKAGE}={PROTOS}",
            f"-I{protoc.__file__.removesuffix('protoc.py')}_proto",
            *(f"--{kind}_out={ROOT}" for kind in ("python", "pyi", "grpc_python")),
            *(f"{PACKAGE}/{name}" for name in self._protos()),
        ]
        if protoc.main(arguments) != 0:
            raise SystemExit("setup: protoc failed")

    def _protos(self) -> list[str]:
        return sorted(path.name for path in PROTOS.glob("*.proto"))

    def get_source_files(self) -> list[str]:
        return [f"proto/{name}" for name in self._protos()]

    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class Build(build):
    # Before build_py, which copies what it finds.
    sub_commands: ClassVar = [("build_stubs", None), *build.sub_commands]


# Without a compiler the package is built without it: Python then answers every request.
FAST_PATH = Extension(
    "fusefs.fuse._fast_path",
    ["fusefs/fuse/fast_path.c"],
    extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra"],
    optional=True,
)

setup(ext_modules=[FAST_PATH], cmdclass={"build": Build, "build_stubs": BuildStubs})
