"""``moc doctor``: look at this machine before the first step, and say what to mend.

Every check that touches something takes back what it made: a small folder in the memory
directory and, only where ``--run`` names one, a small object in the run directory.
"""

from __future__ import annotations

import argparse
import fcntl
import mmap
import multiprocessing
import os
import platform
import re
import resource
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec

from moc import knobs
from moc.cli import draw
from moc.errors import KeyExists, MocError, StoreError
from moc.store import LocalStore, Store, open_store

__all__ = ["Check", "add_arguments", "run"]

_MEMORY_DIR = "/dev/shm"
_SMALL_BYTES = 1 << 30  # Docker gives /dev/shm 64 MB
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_OLDEST_TORCH = (2, 6)
_PROBE = b"moc doctor\n"
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


class Check(msgspec.Struct, frozen=True):
    """One thing that was looked at.

    Attributes:
        name: what.
        status: ``fail`` where training with MoC cannot work or is not safe.
        found: how it is.
        remedy: what to do; advice even where all is well, or empty.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    remedy: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``moc doctor``."""
    parser.add_argument(
        "--memory-dir",
        metavar="D",
        help=f"directory of the memory tier (default: MOC_MEMORY_DIR, else {_MEMORY_DIR})",
    )
    parser.add_argument(
        "--run",
        metavar="RUN",
        help="also check the store: writes and deletes small objects, and in S3 one of 16 MiB",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def run(args: argparse.Namespace) -> int:
    """Check this machine.

    Returns:
        1 where a check failed, else 0; warnings do not count.

    Raises:
        ConfigError: ``--run`` has an unknown scheme.
    """
    store = open_store(args.run) if args.run is not None else None
    memory_dir = Path(args.memory_dir or knobs.memory_dir() or _MEMORY_DIR).absolute()
    checks = [
        _memory_kind(memory_dir),
        _memory_room(memory_dir),
        _memory_limit(memory_dir),
        _memory_write(memory_dir),
        _memlock(),
        _umask(),
        _kernel(),
        _start_method(),
        _torch(),
        _helper(),
        _rendezvous(),
        *([_store(store)] if store is not None else []),
    ]
    ok = all(check.status != "fail" for check in checks)
    if args.json:
        draw.put_json({"ok": ok, "checks": [msgspec.to_builtins(check) for check in checks]})
    else:
        _draw(checks)
    return 0 if ok else 1


# ---------------------------------------------------------------------- memory tier


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def _memory_kind(memory_dir: Path) -> Check:
    name = "memory tier"
    if memory_dir.exists() and not memory_dir.is_dir():
        return Check(name, "fail", f"{memory_dir} is no directory", "name another: --memory-dir")
    there = _existing(memory_dir)
    kind = _mount_kind(there)
    found = f"{memory_dir} is on {kind}"
    if there != memory_dir:
        found += f" (not there yet, would be made in {there})"
    if kind in ("tmpfs", "ramfs"):
        return Check(name, "ok", found)
    return Check(
        name,
        "warn",
        found,
        "snapshots are quick only in memory: use a directory on tmpfs (MOC_MEMORY_DIR or "
        "memory_dir=), such as /dev/shm",
    )


def _mount_kind(path: Path) -> str:
    """Type of the file system, by the longest mount point above the path; the last one counts."""
    best, kind = -1, "an unknown file system"
    real = os.path.realpath(path)
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return kind
    for line in lines:
        left, _, right = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), left.split(" ")[4])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:
            best, kind = len(point), right.split(" ")[0]
    return kind


def _memory_room(memory_dir: Path) -> Check:
    name = "memory room"
    facts = os.statvfs(_existing(memory_dir))
    free, total = facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize
    found = f"{draw.size(free)} free of {draw.size(total)}"
    if free >= _SMALL_BYTES:
        return Check(name, "ok", found)
    return Check(
        name,
        "warn",
        found,
        "each rank needs about its share of parameters and optimizer state per buffer; enlarge it "
        f"(docker run --shm-size=64g, or mount -o remount,size=64g {_MEMORY_DIR})",
    )


def _memory_limit(memory_dir: Path) -> Check:
    """Pages of a tmpfs count as memory of the container, which may be smaller than the tmpfs."""
    name = "memory limit"
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        text = "max"
    if not text.isdigit():
        return Check(name, "ok", "no limit of a container's own")
    facts = os.statvfs(_existing(memory_dir))
    limit, free = int(text), facts.f_bavail * facts.f_frsize
    found = f"{draw.size(limit)} for everything in this container, buffers included"
    if limit >= free:
        return Check(name, "ok", found)
    return Check(
        name,
        "warn",
        found,
        f"it allows less than the {draw.size(free)} free there: set memory_bytes=",
    )


def _memory_write(memory_dir: Path) -> Check:
    """Do what a buffer needs: a private folder, reserved pages, a mapping, a record lock."""
    name = "memory write"
    there = _existing(memory_dir)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="moc-doctor-", dir=there) as folder,
            open(Path(folder) / "probe", "w+b") as file,
        ):
            os.posix_fallocate(file.fileno(), 0, mmap.PAGESIZE)
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with mmap.mmap(file.fileno(), mmap.PAGESIZE) as mapped:
                mapped[:1] = b"x"
    except OSError as error:
        return Check(
            name,
            "fail",
            f"cannot write to {there}: {error.strerror or error}",
            "name a directory that this user may write to: MOC_MEMORY_DIR or memory_dir=",
        )
    mode = there.stat().st_mode & 0o7777
    found = f"works; mode {mode:04o}, buffers get 0700"
    if mode & 0o002 and not mode & 0o1000:
        return Check(
            name,
            "warn",
            found,
            f"anybody may rename or delete what lies in {there}: chmod +t, or one's own directory",
        )
    return Check(name, "ok", found)


# ---------------------------------------------------------------------- process and kernel


def _memlock() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check("memlock", "ok", "unlimited")
    found = f"{draw.size(soft)} may be locked"
    if Path("/sys/class/infiniband").is_dir():
        return Check(
            "memlock",
            "warn",
            found,
            "NCCL over InfiniBand registers memory: ulimit -l unlimited (docker run "
            "--ulimit memlock=-1)",
        )
    return Check("memlock", "ok", f"{found}; no InfiniBand here that would need more")


def _umask() -> Check:
    mask = os.umask(0)
    os.umask(mask)
    found = f"{mask:04o}: files of the run get mode {0o666 & ~mask:04o}"
    if not mask & 0o002:
        return Check("umask", "warn", found, "anybody may change checkpoints: umask 002 or 022")
    if mask & 0o700:
        return Check("umask", "fail", found, "the owner cannot use them: umask 022")
    return Check("umask", "ok", found, "umask 002 shares a run with the group" * (mask == 0o077))


def _kernel() -> Check:
    found = f"{platform.system()} {platform.release()}"
    if sys.platform != "linux":
        return Check("kernel", "fail", found, "MoC's memory tier needs Linux")
    try:
        with mmap.mmap(-1, mmap.PAGESIZE) as mapped:
            mapped.madvise(_MADV_POPULATE_WRITE)
    except OSError:
        return Check(
            "kernel",
            "warn",
            f"{found}, without MADV_POPULATE_WRITE",
            "works; the first snapshot into each buffer is slower (needs Linux 5.14)",
        )
    return Check("kernel", "ok", f"{found}, with MADV_POPULATE_WRITE")


def _start_method() -> Check:
    method = multiprocessing.get_all_start_methods()[0]
    found = f"{method}, for worker processes (Python {platform.python_version()})"
    if method == "fork":
        return Check(
            "start method",
            "ok",
            found,
            "start DataLoader workers as you like: the locks on buffers are not inherited",
        )
    return Check("start method", "ok", found)


def _torch() -> Check:
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return Check("torch", "fail", "not installed", "pip install torch")
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if numbers < _OLDEST_TORCH:
        return Check("torch", "fail", version, "MoC needs torch 2.6 or newer")
    return Check("torch", "ok", version)


def _helper() -> Check:
    """The helper process persists snapshots; it is a Python of its own."""
    name = "helper process"
    began = knobs.monotonic()
    try:
        subprocess.run(
            [sys.executable, "-c", "import moc.persist.agent"],
            check=True,
            capture_output=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return Check(
            name,
            "fail",
            f"{sys.executable} cannot start one: {error}",
            "install moc-system for this interpreter",
        )
    return Check(name, "ok", f"starts in {knobs.monotonic() - began:.2f} s")


def _rendezvous() -> Check:
    if knobs.child_environment().get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1":
        return Check("rendezvous", "ok", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is set")
    return Check(
        "rendezvous",
        "ok",
        "restarted ranks get the store that holds the dead ranks' addresses",
        "call moc.init_process_group(...) in place of torch.distributed's, or restarts by torchrun "
        "hang (pytorch#135712, pytorch#167288)",
    )


# ---------------------------------------------------------------------- store


def _store(store: Store) -> Check:
    """Put an object, put it again, read it, list it, delete it."""
    made = _folders_to_make(store)
    key = f"doctor-{secrets.token_hex(8)}.probe"
    try:
        try:
            return _probe_store(store, key)
        finally:
            with suppress(StoreError):
                store.delete(key)
            for folder in made:
                with suppress(OSError):
                    folder.rmdir()
    except MocError as error:
        return Check(
            "store",
            "fail",
            f"{store.url}: {error}",
            "see to write access and free space, or name another run directory",
        )


def _probe_store(store: Store, key: str) -> Check:
    began = knobs.monotonic()
    store.put_new(key, [_PROBE])
    secs = knobs.monotonic() - began
    if store.get(key) != _PROBE:
        return Check(
            "store",
            "fail",
            f"{store.url}: what was written cannot be read at once",
            "MoC needs a store that gives an object as soon as its put returns",
        )
    is_listed = key in store.children()
    with suppress(KeyExists):
        store.put_new(key, [b"another\n"])
        return _written_twice(store, "a key")
    store.delete(key)
    # Large objects take another way into an object store.
    for nbytes in sorted({1, getattr(store, "part_bytes", 0) + 1}):
        if not _is_refused_at_the_end(store, key, nbytes):
            return _written_twice(store, f"a key of {draw.size(nbytes)}")
        store.delete(key)
    found = f"{store.url}: write-once holds; a small object takes {1000 * secs:.0f} ms"
    if isinstance(store, LocalStore):
        facts = os.statvfs(store.root)
        found += f"; {draw.size(facts.f_bavail * facts.f_frsize)} free"
        if not _has_links(store.root):
            return Check(
                "store",
                "warn",
                found,
                "no hard links on this file system: write-once holds among processes of one "
                "machine only",
            )
    if not is_listed:
        return Check(
            "store",
            "warn",
            f"{found}; a new object is not listed at once",
            "MoC finds commits by their keys; `moc ls` may show other leftovers late",
        )
    return Check("store", "ok", found)


def _is_refused_at_the_end(store: Store, key: str, nbytes: int) -> bool:
    """Whether a key that is taken while its bytes are on the way stays as it is."""

    def chunks() -> Iterator[bytes]:
        yield bytes(nbytes)
        open_store(store.url).put_new(key, [_PROBE])

    with suppress(KeyExists):
        store.put_new(key, chunks())
        return False
    return store.get(key) == _PROBE


def _written_twice(store: Store, what: str) -> Check:
    return Check(
        "store",
        "fail",
        f"{store.url}: {what} could be written twice",
        "MoC needs conditional puts, else two jobs that start in one directory at the same moment "
        "do not notice each other: use another store, or see to it that only one job ever runs",
    )


def _has_links(folder: Path) -> bool:
    with tempfile.NamedTemporaryFile(prefix=".moc-doctor-", suffix=".tmp", dir=folder) as file:
        other = Path(f"{file.name}.link.tmp")
        try:
            os.link(file.name, other)
        except OSError:
            return False
        os.unlink(other)
        return True


def _folders_to_make(store: Store) -> list[Path]:
    """Folders that the probe will make, deepest first."""
    if not isinstance(store, LocalStore):
        return []
    return [folder for folder in (store.root, *store.root.parents) if not folder.exists()]


# ---------------------------------------------------------------------- for people


def _draw(checks: list[Check]) -> None:
    from rich.text import Text

    console = draw.console()
    for check in checks:
        status = Text(f"{check.status:<5}", style=_STYLES[check.status])
        line = Text.assemble(status, (f"{check.name:<15}", "bold"), draw.printable(check.found))
        console.print(line, soft_wrap=True)
        if check.remedy:
            console.print(f"{'':20}-> {check.remedy}", soft_wrap=True, style="dim")
    counts = {s: sum(c.status == s for c in checks) for s in _STYLES}
    parts = [f"{number} {status}" for status, number in counts.items() if number]
    console.print(", ".join(parts), style="bold")
