"""A folder as a store: whole files or none, durable when a call returns, each key written once.

A file is written under a temporary name in its own folder, synced, and then *linked* to its
name: of two writers one gets the name and the other `KeyExists`, where a rename would let the
second replace the first. Then every folder that got a new name is synced, up to the root of the
store. A crash leaves at most a temporary file, which no listing shows.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moc.errors import ConfigError, KeyExists, KeyMissing, StoreError, StoreRefused
from moc.store.base import Chunk, Names, check_key, check_prefix, is_temporary

__all__ = ["LocalStore"]

_ATTEMPTS = 20
"""Tries against folders that come and go: a writer makes one while a deleter removes it."""

_WRITE_OUT_BYTES = 8 << 20
"""How much is written before the disk is told to begin with it."""

_SYNC_FILE_RANGE_WRITE = 2
_libc = ctypes.CDLL(None)

_MISSING = (FileNotFoundError, NotADirectoryError)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class LocalStore:
    """Files below one folder, which the first write makes. Reading needs no write access.

    Files get mode 0666 and folders 0777 less the umask, as any program's would. Where the file
    system has no hard links (FAT, some FUSE mounts), a lock in the folder makes writers of one
    key take turns, and the name is taken by a rename; such a lock holds among the processes that
    share a kernel, and its file has a temporary name.

    Args:
        root: the folder.

    Attributes:
        root: the folder, absolute.
        url: the same as text.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.abspath(os.path.expanduser(root)))
        self.url = str(self.root)
        self._synced: set[Path] = set()  # folders whose own name is known to be durable

    def check(self, *, write: bool) -> None:
        """See that the folder can be used, or made; writes nothing.

        Args:
            write: whether it is to be written, too.

        Raises:
            ConfigError: it is a file, or this user may not.
        """
        folder = self.root
        while not os.path.lexists(folder):  # also where a file, or no permission, is in the way
            folder = folder.parent
        there = folder == self.root
        if not folder.is_dir():
            raise ConfigError(
                f"run directory {self.root}: {folder} is no folder; name a folder, or one to make"
            )
        for mode, verb in ((os.R_OK | os.X_OK, "read"), (os.W_OK | os.X_OK, "write")):
            asked = write if verb == "write" else there
            if asked and not os.access(folder, mode):
                raise ConfigError(
                    f"run directory {self.root}: user {os.getuid()} may not {verb} {folder}; "
                    "change its owner or mode, or name another directory"
                )

    def path(self, key: str) -> Path:
        """Where a key's file is, or would be."""
        return self.root / check_key(key)

    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """See `Store.get`."""
        with self._reading(key), open(self.path(key), "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            end = size if nbytes is None else min(size, offset + nbytes)
            parts = []
            while offset < end:
                part = os.pread(file.fileno(), end - offset, offset)
                if not part:
                    break
                parts.append(part)
                offset += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def put_new(self, key: str, chunks: Iterable[Chunk]) -> int:
        """See `Store.put_new`. An error of ``chunks`` itself passes through unchanged."""
        if self.exists(key):  # before any chunk is made
            self._sync_names(key, self.path(key).parent)
            raise KeyExists(f"{self.path(key)} exists", key=key)
        return self._write(key, chunks, _take_name)

    def put(self, key: str, data: Chunk) -> None:
        """See `Store.put`."""
        self._write(key, [data], os.replace)

    def list(self, prefix: str = "") -> Names:
        """See `Store.list`."""
        keys: Names = []
        folders = [check_prefix(prefix)]
        while folders:
            folder = folders.pop()
            for entry in self._scan(folder):
                key = f"{folder}/{entry.name}" if folder else entry.name
                (folders if entry.is_dir() else keys).append(key)
        return sorted(keys)

    def children(self, prefix: str = "") -> Names:
        """See `Store.children`. Also shows a folder in which no file is finished yet."""
        return sorted(entry.name for entry in self._scan(check_prefix(prefix)))

    def exists(self, key: str) -> bool:
        """See `Store.exists`. What cannot be looked at is an error, not a missing key."""
        try:
            self.size(key)
        except KeyMissing:
            return False
        return True

    def size(self, key: str) -> int:
        """See `Store.size`."""
        with self._reading(key):
            status = os.stat(self.path(key))
        if stat.S_ISDIR(status.st_mode):
            raise KeyMissing(f"{self.path(key)} is a folder", key=key)
        return status.st_size

    def delete(self, key: str) -> None:
        """See `Store.delete`. Folders that this empties go too, but not the root."""
        path = self.path(key)
        with self._errors("delete", key), suppress(*_MISSING, IsADirectoryError):
            os.unlink(path)
            for folder in path.parents:
                if folder == self.root or not _remove_empty(folder):
                    _sync_folder(folder)
                    break
                self._synced.discard(folder)

    def tidy(self) -> int:
        """See `Store.tidy`: temporary files, and folders that held nothing else."""
        removed = 0
        with self._errors("tidy", ""):
            for folder, _, names in os.walk(self.root, topdown=False):
                for name in filter(is_temporary, names):
                    with suppress(*_MISSING):
                        os.unlink(os.path.join(folder, name))
                        removed += 1
                if removed and Path(folder) != self.root:
                    _remove_empty(Path(folder))
        return removed

    def _write(
        self, key: str, chunks: Iterable[Chunk], publish: Callable[[Path, Path], None]
    ) -> int:
        """Write a temporary file, let ``publish`` give it its name, make both durable."""
        path = self.path(key)
        written = 0
        with self._errors("write", key):
            descriptor, temporary = self._create(path.parent)
        try:
            try:
                sent = 0
                for chunk in chunks:
                    with self._errors("write", key, needed=written + memoryview(chunk).nbytes):
                        for nbytes in _write_chunk(descriptor, chunk):
                            written += nbytes
                            if written - sent >= _WRITE_OUT_BYTES:
                                _write_out(descriptor, sent, written - sent)
                                sent = written
                with self._errors("sync", key):
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            try:
                with self._errors("name", key):
                    publish(temporary, path)
            except _Taken:
                self._sync_names(key, path.parent)
                raise KeyExists(f"{path} exists", key=key) from None
        finally:
            with suppress(OSError):  # a leftover is harmless, and no listing shows it
                os.unlink(temporary)
        self._sync_names(key, path.parent)
        return written

    def _sync_names(self, key: str, folder: Path) -> None:
        """Also before `KeyExists`: whoever put the key may have died, or failed, before its name
        was durable, and a retry takes it for its own where the bytes are the same.
        """
        with self._errors("sync the folders of", key):
            self._sync(folder)

    def _create(self, folder: Path) -> tuple[int, Path]:
        """Open a new temporary file, and make its folder if need be."""
        temporary = folder / f".{os.getpid()}-{secrets.token_hex(8)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        for _ in range(_ATTEMPTS):
            with suppress(FileNotFoundError):
                return os.open(temporary, flags, 0o666), temporary
            self._make(folder)
        raise FileNotFoundError(errno.ENOENT, f"{folder} vanishes as often as it is made")

    def _make(self, folder: Path) -> None:
        """Make a folder and those above it; another process may be doing or undoing the same."""
        try:
            os.mkdir(folder)
        except FileExistsError:
            if not folder.is_dir():
                raise
        except FileNotFoundError:
            self._make(folder.parent)
            with suppress(FileExistsError, FileNotFoundError):
                os.mkdir(folder)
        self._synced.discard(folder)
        if folder in self.root.parents:
            with suppress(PermissionError):  # to enter a folder is not to read it
                _sync_folder(folder.parent)

    def _sync(self, folder: Path) -> None:
        """Make the names in a folder durable, and the names of the folders that lead to it.

        A folder that another process has just made may not be durable yet: so each store object
        syncs every folder's parent once, whoever made it.
        """
        _sync_folder(folder)
        while folder not in self._synced:
            with suppress(*([PermissionError] if folder == self.root else [])):
                _sync_folder(folder.parent)
            self._synced.add(folder)
            if folder != self.root:
                folder = folder.parent

    def _scan(self, folder: str) -> builtins.list[os.DirEntry[str]]:
        with (
            self._errors("list", folder),
            suppress(*_MISSING),
            os.scandir(self.root / folder) as it,
        ):
            return [entry for entry in it if not is_temporary(entry.name)]
        return []

    @contextmanager
    def _reading(self, key: str) -> Iterator[None]:
        """Errors of an operation on a key that should be there."""
        with self._errors("read", key):
            try:
                yield
            except (*_MISSING, IsADirectoryError) as error:
                raise KeyMissing(f"no {self.root / key}: {error.strerror}", key=key) from error

    @contextmanager
    def _errors(self, verb: str, key: str, *, needed: int = 0) -> Iterator[None]:
        """Turn errors of the system into ours, with key, path and the system's own words."""
        path = self.root / key
        try:
            yield
        except OSError as error:
            text = f"cannot {verb} {key!r} at {path}: {error.strerror or error}"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                text += f" (needs {needed:,} bytes or more; {_room(self.root)})"
            kind = StoreRefused if error.errno in _REFUSED else StoreError
            raise kind(text, key=key) from error


class _Taken(Exception):
    """The name belongs to another file."""


def _take_name(temporary: Path, path: Path) -> None:
    """Give a file its name.

    Raises:
        _Taken: another file has it. What the system says is not enough: NFS may send a link twice
            and hear of its own first one.
    """
    try:
        os.link(temporary, path)
    except FileExistsError:
        if not os.path.lexists(path):
            raise
        if not os.path.samestat(os.lstat(temporary), os.lstat(path)):
            raise _Taken from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with _folder_lock(path.parent):
            if os.path.lexists(path):
                raise _Taken from None
            os.rename(temporary, path)


def _write_chunk(descriptor: int, chunk: Chunk) -> Iterator[int]:
    """Write all of a chunk, however short the single writes; gives the length of each."""
    with memoryview(chunk) as view:
        if not view.nbytes:
            return  # an empty view cannot be cast
        with view.cast("B") as data:
            done = 0
            while done < len(data):
                with data[done : done + _WRITE_OUT_BYTES] as part:
                    nbytes = os.write(descriptor, part)
                done += nbytes
                yield nbytes


def _write_out(descriptor: int, start: int, nbytes: int) -> None:
    """Let the disk begin with bytes that are written, so that fsync finds most of them done.

    A file of 192 MB was durable in 0.65 of the time that one write and fsync took. What this call
    returns means nothing: it neither promises nor reports what fsync does, nor hides an error.
    """
    begin = getattr(_libc, "sync_file_range", None)
    if begin is not None:
        begin(descriptor, ctypes.c_int64(start), ctypes.c_int64(nbytes), _SYNC_FILE_RANGE_WRITE)


def _room(folder: Path) -> str:
    try:
        status = os.statvfs(folder)
    except OSError as error:
        return f"free space unknown: {error.strerror}"
    return f"{status.f_bavail * status.f_frsize:,} bytes free"


def _remove_empty(folder: Path) -> bool:
    """Remove a folder if it is empty. Whoever else is at it may win: that is no error."""
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def _sync_folder(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # removed since: nothing in it is left to keep
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some FUSE and CIFS mounts cannot sync a folder
            raise
    finally:
        os.close(descriptor)


@contextmanager
def _folder_lock(folder: Path) -> Iterator[None]:
    """Let one writer at a time into a folder; the kernel frees the lock of one that dies."""
    path = folder / ".lock.tmp"
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Its last holder removed the file while this one waited: then it locks nothing.
            if not _is_file_at(descriptor, path):
                continue
            try:
                yield
            finally:
                os.unlink(path)
            return
        finally:
            os.close(descriptor)


def _is_file_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
