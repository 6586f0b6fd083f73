"""Makes .venv: what pgcdc needs to run, or with `dev` also what tests, lint, benchmarks and the documentation need.

    python tools/set_up.py [dev]

uv installs the packages (the one on the PATH, else one from PyPI in .venv), pip does if uv cannot be had or fails. The C
compiler works while packages are downloaded. What is installed already is not fetched again, so a repetition works offline.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
EXTRAS = {"run": ["playground", "webhook"], "dev": ["playground", "webhook", "dev", "bench", "docs"]}
NOTE_S = 10.0
_STARTED = time.monotonic()


def main(arguments: list[str]) -> int:
    kind = arguments[0] if arguments else "run"
    fresh = not PYTHON.exists()
    if fresh:
        say("Setting up .venv: about 20 s if the packages are cached, else one to three minutes (500 MB, mostly Spark)")
    found = usable_uv(shutil.which("uv"))
    if fresh and not make_environment(found):
        return 2
    installer = Installer(found or usable_uv(VENV / "bin" / "uv") or add_uv())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    build_tools = project["build-system"]["requires"]
    packages = [*project["project"]["dependencies"]]
    for extra in EXTRAS[kind]:
        packages += project["project"]["optional-dependencies"][extra]
    if not installer.install("build tools", build_tools):
        return 1
    with tempfile.TemporaryFile() as log:
        # Beside the download. A module that cannot be compiled is left out: each has one in Python beside it.
        compiler = subprocess.Popen(
            [PYTHON, "setup.py", "-q", "build_ext", "--inplace"], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            if not installer.install(f"{len(packages)} packages and what they need", packages):
                return 1
            if compiler.poll() is None:
                say(f"Compiling {len(compiled_modules())} modules")
            compiler.wait()
        finally:
            compiler.kill()
            compiler.wait()
        if compiler.returncode or not all(module.exists() for module in compiled_modules()):
            log.seek(0)
            say("Not everything was compiled, so pgcdc is slower. The compiler said:")
            sys.stderr.write(log.read().decode(errors="replace")[-4000:])
    os.environ["PGCDC_COMPILED"] = "1"  # setup.py: that part is done
    if not installer.install("pgcdc itself", ["--no-deps", "--no-build-isolation", "--editable", str(ROOT)]):
        return 1
    say("Installed. Try: .venv/bin/pgcdc --help")
    return 0


class Installer:
    """Installs packages into .venv: by uv while that works, then by pip."""

    def __init__(self, uv: Path | None) -> None:
        self.uv = uv

    def install(self, what: str, arguments: list[str]) -> bool:
        say(f"Installing {what} with {'uv' if self.uv else 'pip'}")
        if self.uv:
            command = [str(self.uv), "pip", "install", "--python", str(PYTHON), *arguments]
            # First what the cache has, without asking the index: under a second. Some mirrors let nothing be cached, and
            # uv would then download and build Spark again each time.
            if not subprocess.run([*command, "--offline"], cwd=ROOT, capture_output=True, check=False).returncode:
                return True
            # uv draws its progress on a terminal; elsewhere we say that it is alive.
            if run_with_notes(command if sys.stderr.isatty() else [*command, "--quiet"]):
                return True
            say("uv could not do it: trying pip, which takes longer")
            self.uv = None
        if subprocess.run([PYTHON, "-m", "pip", "--version"], capture_output=True, check=False).returncode:
            subprocess.run([PYTHON, "-m", "ensurepip", "--upgrade"], stdout=subprocess.DEVNULL, check=False)
        quiet = ["--disable-pip-version-check", "--quiet"]
        return run_with_notes([str(PYTHON), "-m", "pip", "install", *quiet, *arguments])


def make_environment(uv: Path | None) -> bool:
    """An empty .venv with pip in it."""
    if uv:
        command: list[str | Path] = [uv, "venv", "--quiet", "--clear", "--seed", "--python", sys.executable, VENV]
        if subprocess.run(command, check=False).returncode == 0:
            return True
    if subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=False).returncode:
        print("Cannot create .venv: on Debian run apt install python3-venv", file=sys.stderr)
        return False
    return True


def add_uv() -> Path | None:
    """uv from PyPI, in .venv: its few seconds are won back several times over."""
    say("Installing uv")
    command: list[str | Path] = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "uv"]
    subprocess.run(command, stderr=subprocess.DEVNULL, check=False)
    return usable_uv(VENV / "bin" / "uv")


def usable_uv(path: str | Path | None) -> Path | None:
    """`path` if it runs. A name on the PATH may be a shim for a Python that has no uv."""
    if path is None or not Path(path).exists():
        return None
    answer = subprocess.run([path, "--version"], capture_output=True, check=False)
    return None if answer.returncode else Path(path)


def compiled_modules() -> list[Path]:
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    return [source.with_name(source.stem + suffix) for source in (ROOT / "src").rglob("*.pyx")]


def run_with_notes(command: list[str]) -> bool:
    """Run it, with a line every ten seconds where no progress is drawn."""
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        while True:
            try:
                return process.wait(NOTE_S) == 0
            except subprocess.TimeoutExpired:
                if not sys.stderr.isatty():
                    say("... still at it")
    finally:
        process.kill()
        process.wait()


def say(text: str) -> None:
    print(f"[{time.monotonic() - _STARTED:3.0f} s] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main(sys.argv[1:]))
