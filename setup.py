"""Builds what is not Python: the CSI driver's gRPC modules (csi/generated/, from proto/) and C."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from setuptools import Command, Extension, find_namespace_packages, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, ExecError

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


FAST_PATH = Extension(
    "fusefs.fuse._fast_path",
    ["fusefs/fuse/fast_path.c"],
    extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra"],
)
REPLIES = Extension(
    "fusefs.fuse._replies",
    ["fusefs/fuse/_replies.c"],
    extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra"],
)
ENGINE = Extension(
    "fusefs.store.engine._engine",
    ["fusefs/store/engine/_engine.c"],
    depends=["fusefs/store/engine/crc.h"],
    libraries=["curl", "z"],
    extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra"],
)


class BuildExtensions(build_ext):
    """Says what is missing where the engine can't be compiled."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except (CCompilerError, ExecError) as error:
            raise SystemExit(
                "setup: fusefs needs gcc and the headers of Python, zlib and libcurl 7.87 or newer"
                " (Debian: gcc libc6-dev python3-dev libcurl4-openssl-dev)"
            ) from error


# The driver's folder stands beside fusefs/, and the wheel has it inside: nothing is installed under
# so common a name as `csi`. The command fusefs-csi puts this folder on its path.
DRIVER = "fusefs._driver."

setup(
    packages=[
        *find_namespace_packages(include=["fusefs*"]),
        *(DRIVER + name for name in find_namespace_packages(include=["csi*"])),
    ],
    package_dir={f"{DRIVER}csi": "csi"},
    ext_modules=[FAST_PATH, REPLIES, ENGINE],
    cmdclass={"build": Build, "build_ext": BuildExtensions, "build_stubs": BuildStubs},
)
