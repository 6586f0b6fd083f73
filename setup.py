"""Builds what is optionally compiled (decoder, JSON renderer, COPY splitter), and the types of `pgcdc.adapters`.
All else is in pyproject.toml.

Without Cython or without a compiler the package is complete: each compiled module has one
in Python beside it that does the same.
"""

from __future__ import annotations

import os
import subprocess
import sys

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

# The C compiler takes longer than all else: one for each module at a time.
JOBS = os.cpu_count() or 1


def compiled_modules() -> list[Extension]:
    """The extensions to build: none without Cython, or when tools/set_up.py has built them in place."""
    if os.environ.get("PGCDC_COMPILED"):
        return []
    try:
        from Cython.Build import cythonize
    except ImportError:
        return []
    extensions = [
        Extension(
            f"pgcdc.{name.replace('/', '.')}",
            [f"src/pgcdc/{name}.pyx"],
            # Without debug information the compiler is done sooner; only the decoder gains from more than -O2.
            extra_compile_args=[] if sys.platform == "win32" else ["-O3" if name.endswith("_rows") else "-O2", "-g0"],
        )
        for name in (
            "source/postgres/snapshot/_copy",
            "source/postgres/wire/_rows",
            "event/_lines",
        )
    ]
    # The C file goes to build/, so that the source tree holds only what people write.
    modules: list[Extension] = cythonize(extensions, build_dir="build", nthreads=JOBS)
    for module in modules:
        # A compiler that is missing or fails is a warning. Set here, because cythonize makes new objects without it.
        module.optional = True
    return modules


class BuildPython(build_py):
    """Also makes adapters.pyi, if what adapters need is installed. Without it their functions take any keyword."""

    def run(self) -> None:
        command = [sys.executable, "tools/adapter_reference.py", "--stub"]
        if subprocess.run(
            command, env={**os.environ, "PYTHONPATH": "src"}, check=False, capture_output=True
        ).returncode:
            print("adapters.pyi was not made: install pgcdc's dependencies, and build without isolation")
        super().run()


setup(ext_modules=compiled_modules(), options={"build_ext": {"parallel": JOBS}}, cmdclass={"build_py": BuildPython})
