"""The memory tier: files on tmpfs that outlive the trainer, each one a safetensors file.

The snapshot is the file: a copy writes straight into it, a seal beside it makes it valid, and
after a crash anybody on the node can open it. Whoever writes or reads a buffer holds a POSIX
record lock on it (not flock, which forked workers inherit), so the kernel frees it at any death.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import re
import shutil
import struct
from pathlib import Path

import msgspec

from moc.core.manifest import (
    DigestFile,
    Seal,
    decode_json,
    digests_path,
    encode_json,
    seal_path,
)
from moc.core.piece import PieceRecord
from moc.core.versions import Timeline, Version
from moc.errors import ConfigError, DamagedError, SaveError

__all__ = [
    "DEFAULT_MEMORY_DIR",
    "Buffer",
    "BufferPool",
    "RunFolder",
    "is_dangling",
    "lock_holders",
    "node_key",
    "read_seals",
    "remove_dead",
    "remove_folder",
    "remove_forgotten",
    "run_folders",
    "run_memory",
]

log = logging.getLogger(__name__)

DEFAULT_MEMORY_DIR = Path("/dev/shm")

_RUN_FOLDER = re.compile(r"moc-[0-9a-f]{16}")
_PRIVATE = "moc-buffer"
_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux
_MADV_POPULATE_WRITE = 23  # Linux 5.14; without it the first copy takes the page faults


def run_memory(memory_dir: Path, run_id: str) -> Path:
    """Folder of a run's buffers on this node."""
    return memory_dir / f"moc-{run_id}"


def node_key(memory_dir: Path) -> str:
    """What two processes share only if they see the same memory tier.

    Raises:
        ConfigError: the directory cannot be made or written.
    """
    try:
        memory_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = memory_dir.stat()
        if not os.access(memory_dir, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "not readable and writable", str(memory_dir))
    except OSError as error:
        raise ConfigError(
            f"memory_dir={str(memory_dir)!r} cannot be used: {error.strerror}; name a writable "
            "directory on tmpfs (MOC_MEMORY_DIR or memory_dir=)"
        ) from error
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = os.uname().nodename
    return f"{boot}:{facts.st_dev}:{facts.st_ino}"


class RunFolder(msgspec.Struct, frozen=True):
    """A run's folder in the memory tier.

    Attributes:
        path: of the folder.
        touched: seconds since 1970, of the youngest thing in it.
        nbytes: memory that it takes.
        is_locked: a process writes or reads a buffer.
    """

    path: Path
    touched: float
    nbytes: int
    is_locked: bool


class Buffer:
    """One buffer of one writer. Only its trainer writes; one descriptor per process."""

    def __init__(self, path: Path) -> None:
        """Open what is there; create nothing and write nothing."""
        self.path = path
        self.is_private = False
        self._descriptor = -1
        self.mapped: mmap.mmap | None = None
        self.seal: Seal | None = None

    @property
    def name(self) -> str:
        """File name."""
        return self.path.name

    @property
    def number(self) -> int:
        """Among the buffers of its writer, from 0."""
        return int(self.path.stem.rpartition("-")[2])

    @property
    def version(self) -> Version | None:
        """What it holds; None where it holds nothing valid."""
        return self.seal.version if self.seal else None

    @property
    def experts(self) -> frozenset[tuple[int, int]]:
        """(MoE layer, expert) pairs that it holds."""
        pairs = self.seal.expert_pieces if self.seal else []
        return frozenset((layer, expert) for layer, expert, _ in pairs)

    def acquire(self, nbytes: int) -> memoryview:
        """Make it ours to overwrite: unsealed, locked, at least so large, mapped, pre-faulted.

        Returns:
            All of its bytes.

        Raises:
            BlockingIOError: another process reads it.
            SaveError: there is no room in memory.
        """
        if self._descriptor >= 0 and not self.path.exists():
            self.close()  # somebody has wiped the directory: what was in it is lost, not the run
        if self._descriptor < 0:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.is_private and not (self.path.is_file() and not self.path.is_symlink()):
                self._make_private()
            else:
                if is_dangling(self.path):
                    self.path.unlink()
                self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.unseal()
        if self.is_private and self.path.stat().st_size < nbytes and not self.path.is_symlink():
            self.close()  # too small a file of an earlier attempt, on a tmpfs that has no room
            self.path.unlink()
            self._make_private()
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        size = os.fstat(self._descriptor).st_size
        if size < nbytes or self.mapped is None:
            self._map(max(size, nbytes))
        assert self.mapped is not None
        return memoryview(self.mapped)

    def _make_private(self) -> None:
        """Memory of this process under the buffer's name: who opens that opens the memory.

        It is gone when the last process that has it open is gone.
        """
        self._descriptor = os.memfd_create(_PRIVATE)
        temp = f"{self.path}.{os.getpid()}.tmp"
        os.symlink(f"/proc/{os.getpid()}/fd/{self._descriptor}", temp)
        os.replace(temp, self.path)

    def release(self) -> None:
        """Drop the lock: from now on anybody may read."""
        if self._descriptor >= 0:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def put_seal(self, seal: Seal) -> None:
        """Make the contents valid."""
        target = seal_path(str(self.path))
        temp = f"{target}.{os.getpid()}.tmp"
        with open(temp, "wb") as file:
            file.write(encode_json(seal))
        os.replace(temp, target)
        # Records stay on disk; in memory only the facts that choosing a victim needs.
        self.seal = msgspec.structs.replace(seal, pieces=[])

    def unseal(self) -> None:
        """Declare the contents invalid, before anything is overwritten."""
        for path in (seal_path(str(self.path)), digests_path(str(self.path))):
            Path(path).unlink(missing_ok=True)
        self.seal = None

    def close(self) -> None:
        """Unmap and close; the file stays."""
        if self.mapped is not None:
            try:
                self.mapped.close()
            except BufferError:  # a tensor over the mapping lives; it goes with the process
                log.debug("%s is still mapped", self.path)
            self.mapped = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _map(self, nbytes: int) -> None:
        try:
            # Not ftruncate: beyond a full tmpfs that succeeds, and the first touch is SIGBUS.
            os.posix_fallocate(self._descriptor, 0, nbytes)
        except OSError as error:
            raise SaveError(
                f"no room for a buffer of {nbytes} bytes in {self.path.parent}: {error.strerror}; "
                "use fewer buffers (Policy(buffers=3)), a smaller k_snapshot, or a larger tmpfs",
                path=str(self.path),
            ) from error
        old = self.mapped
        self.mapped = mmap.mmap(self._descriptor, nbytes)
        if old is not None:
            try:
                old.close()
            except BufferError:
                log.debug("%s is still mapped in its smaller form", self.path)
        try:
            self.mapped.madvise(_MADV_POPULATE_WRITE)
        except OSError:
            log.debug("cannot pre-fault %s", self.path)


class BufferPool:
    """The buffers of one writer rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Look at what is there; nothing is created or written before the first save."""
        self.folder = folder
        self.rank = rank
        self.buffers: list[Buffer] = []

    def tidy(self) -> None:
        """Remove what a writer that died was about to rename. Before the helper starts."""
        for path in self.folder.glob(f"{self.rank:05d}-*.tmp"):
            path.unlink(missing_ok=True)

    def open(self, count: int, *, private: bool = False) -> None:
        """Have so many buffers; sealed ones of earlier attempts count, in excess or not.

        Args:
            count: how many.
            private: new ones are memory of this process, not files on tmpfs.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        names = {self.folder / f"{self.rank:05d}-{i}.safetensors" for i in range(count)}
        names |= set(self.folder.glob(f"{self.rank:05d}-*.safetensors"))
        known = {b.path for b in self.buffers}
        for path in sorted(names - known):
            buffer = Buffer(path)
            buffer.seal = _seal_facts(path)
            self.buffers.append(buffer)
        for buffer in self.buffers:
            buffer.is_private = private

    def allocate(self, nbytes: int) -> None:
        """Make room in buffers that hold nothing yet, so that no save pays for page faults.

        Raises:
            SaveError: there is no room in memory.
        """
        for buffer in self.buffers:
            if buffer.seal is None:
                with contextlib.suppress(BlockingIOError):  # an orphan reads it: later, then
                    buffer.acquire(nbytes)
                    buffer.release()

    def close(self) -> None:
        """Close every buffer; the files stay."""
        for buffer in self.buffers:
            buffer.close()


def lock_holders(folder: Path) -> list[int]:
    """Processes that hold a lock on one of a run's buffers (`F_GETLK`).

    To be called before this process opens any: closing a descriptor drops a process's locks.
    """
    holders = []
    for path in sorted(folder.glob("*.safetensors")):
        if is_dangling(path):
            continue
        descriptor = os.open(path, os.O_RDWR)
        try:
            query = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = struct.unpack(
                _FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, query)
            )
            if kind != fcntl.F_UNLCK:
                holders.append(int(pid))
        finally:
            os.close(descriptor)
    return holders


def read_seals(folder: Path) -> list[Seal]:
    """Seals of all buffers of a run on this node, with digests where the helper made them.

    A seal that cannot be read is none: it is removed before the buffer is overwritten.
    """
    seals = []
    for path in sorted(folder.glob("*.safetensors")):
        if is_dangling(path):
            continue
        try:
            seal = decode_json(Path(seal_path(str(path))).read_bytes(), Seal, str(path))
        except (OSError, DamagedError):
            continue
        try:
            noted = decode_json(Path(digests_path(str(path))).read_bytes(), DigestFile, str(path))
        except (OSError, DamagedError):
            noted = None
        if noted is not None and noted.version == seal.version:
            seal = msgspec.structs.replace(
                seal,
                pieces=[
                    PieceRecord(r.piece, r.file, r.offset, digest)
                    for r, digest in zip(seal.pieces, noted.digests, strict=True)
                ],
            )
        seals.append(seal)
    return seals


def remove_dead(folder: Path, timeline: Timeline) -> int:
    """Unseal buffers whose version is off the live history; returns how many.

    No later inventory may take them for the step of the same number that is reached again.
    """
    removed = 0
    for path in sorted(folder.glob("*.safetensors")):
        seal = _seal_facts(path)
        if seal is not None and not timeline.is_live(seal.version):
            buffer = Buffer(path)
            buffer.unseal()
            removed += 1
    return removed


def remove_forgotten(memory_dir: Path, run_id: str, older_than: float) -> list[Path]:
    """Remove other runs' folders that nobody has locked or touched for long.

    Args:
        memory_dir: directory of the memory tier.
        run_id: of the run that stays in any case.
        older_than: seconds since 1970; a folder with anything younger stays.
    """
    mine = run_memory(memory_dir, run_id)
    return [
        folder.path
        for folder in run_folders(memory_dir, besides=mine)
        if folder.touched < older_than
        and not folder.is_locked
        and remove_folder(folder.path) is None
    ]


def run_folders(memory_dir: Path, *, besides: Path | None = None) -> list[RunFolder]:
    """Runs' folders in a memory directory, by name; those of other users are left out.

    Args:
        memory_dir: directory of the memory tier.
        besides: a folder that is not looked into: its locks may be this process's own.
    """
    found = []
    for folder in sorted(memory_dir.glob("moc-*")):
        if folder == besides or not _RUN_FOLDER.fullmatch(folder.name) or folder.is_symlink():
            continue
        try:
            facts = [path.lstat() for path in (folder, *folder.iterdir())]
            touched = max(fact.st_mtime for fact in facts)
            nbytes = sum(fact.st_blocks * 512 for fact in facts)
            found.append(RunFolder(folder, touched, nbytes, bool(lock_holders(folder))))
        except OSError as error:  # another user's, or another process is faster
            log.debug("leaving %s: %s", folder, error)
    return found


def remove_folder(folder: Path) -> OSError | None:
    """Remove a run's folder; returns what was in the way."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        log.debug("leaving %s: %s", folder, error)
        return error
    return None


def is_dangling(path: Path) -> bool:
    """Whether a buffer was private memory of a process that is gone.

    Its process id and descriptor may be another's by now, so the name of the memory is looked at.
    """
    if not path.is_symlink():
        return False
    try:
        return not os.readlink(os.readlink(path)).startswith(f"/memfd:{_PRIVATE}")
    except OSError:
        return True


def _seal_facts(buffer: Path) -> Seal | None:
    if is_dangling(buffer):
        return None
    path = seal_path(str(buffer))
    try:
        return msgspec.structs.replace(decode_json(Path(path).read_bytes(), Seal, path), pieces=[])
    except (OSError, DamagedError):
        return None
