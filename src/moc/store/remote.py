"""Object stores through fsspec, and what they cannot promise.

There is no temporary name and no link here: one put of the whole object is the commit. Whether
a put is atomic and durable when it returns is the service's promise (S3, GCS and Azure give it).
Whether `FsspecStore.put_new` is exclusive is too: it asks for it (``mode="create"``), gcsfs makes
that a conditional put, others merely look first, so that of two writers at the same moment the
second may win unseen. MoC does not rest on it alone: keys of a step carry the attempt, and a run
has one coordinator. S3 has a store of its own, `moc.store.s3`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import fsspec

from moc.errors import ConfigError, KeyExists, KeyMissing, StoreError, StoreRefused
from moc.store.base import Chunk, Names, check_key, check_prefix, is_temporary

__all__ = ["FsspecStore"]

_SPOOL_BYTES = 64 << 20
"""Objects beyond this go through a temporary file, and from there in parts."""


class FsspecStore:
    """A folder of any file system that fsspec knows. Options come from fsspec's own config.

    Args:
        url: such as ``s3://bucket/runs/my-moe``.

    Raises:
        ConfigError: fsspec knows no such scheme, or lacks the package for it.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._systems: dict[int, Any] = {}
        try:
            self._root = self._open()
        except (ImportError, ValueError) as error:
            scheme = url.split("://", 1)[0]
            raise ConfigError(
                f"no store for {scheme}:// ({url}): {error}. Give a folder, file://, or a scheme "
                "of fsspec whose package is installed (s3: s3fs, gs: gcsfs, az: adlfs)"
            ) from error

    def _open(self) -> str:
        """Where the url lies in its file system."""
        self._systems[os.getpid()], root = self._connect()
        return root.rstrip("/")

    def _connect(self) -> tuple[Any, str]:
        """A file system, and where the url lies in it."""
        # A listing that fsspec remembers does not show what other ranks wrote since.
        fs, root = fsspec.url_to_fs(self.url, use_listings_cache=False)
        return fs, root

    @property
    def _fs(self) -> Any:
        """A forked child makes its own: connections, and the thread behind them, stay behind.

        The parent's is kept, untouched: the end of it would talk to a thread that is not there.
        """
        fs = self._systems.get(os.getpid())
        if fs is None:
            fs = self._systems[os.getpid()] = self._connect()[0]
        return fs

    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """See `Store.get`."""
        path = self._path(key)
        with self._reading(key):
            if not offset and nbytes is None:
                return bytes(self._fs.cat_file(path))
            # Services refuse ranges that begin beyond the end, or are empty.
            size = self.size(key)
            end = size if nbytes is None else min(size, offset + nbytes)
            return bytes(self._fs.cat_file(path, start=offset, end=end)) if offset < end else b""

    def put_new(self, key: str, chunks: Iterable[Chunk]) -> int:
        """See `Store.put_new`, and this module for how exclusive it is."""
        path = self._path(key)
        if self.exists(key):
            raise KeyExists(f"{self.url}: {key} exists", key=key)
        with tempfile.SpooledTemporaryFile(_SPOOL_BYTES) as file:
            # All chunks are there before the put starts: fsspec commits half an object
            # when a file that it writes is closed by an error.
            for chunk in chunks:
                with self._errors("spool", key):
                    file.write(chunk)
            nbytes = file.tell()
            with self._errors("write", key):
                if nbytes <= _SPOOL_BYTES:
                    file.seek(0)
                    self._fs.pipe_file(path, file.read(), mode="create")
                else:
                    file.flush()
                    self._fs.put_file(f"/proc/self/fd/{file.fileno()}", path, mode="create")
        return nbytes

    def put(self, key: str, data: Chunk) -> None:
        """See `Store.put`."""
        path = self._path(key)
        with self._errors("write", key):
            self._fs.pipe_file(path, bytes(data))

    def list(self, prefix: str = "") -> Names:
        """See `Store.list`."""
        folder = self._folder(prefix)
        with self._errors("list", prefix), suppress(FileNotFoundError):
            keys = self._keys(self._fs.find(folder), folder)
            return [key for key in keys if not is_temporary(key.rsplit("/", 1)[-1])]
        return []

    def children(self, prefix: str = "") -> Names:
        """See `Store.children`."""
        folder = self._folder(prefix)
        with self._errors("list", prefix), suppress(FileNotFoundError, NotADirectoryError):
            keys = self._keys(self._fs.ls(folder, detail=False), folder)
            names = (key.rsplit("/", 1)[-1] for key in keys)
            return [name for name in names if not is_temporary(name)]
        return []

    def exists(self, key: str) -> bool:
        """See `Store.exists`."""
        try:
            self.size(key)
        except KeyMissing:
            return False
        return True

    def size(self, key: str) -> int:
        """See `Store.size`."""
        path = self._path(key)
        with self._reading(key):
            info: dict[str, Any] = self._fs.info(path)
        if info["type"] != "file":
            raise KeyMissing(f"{self.url}: {key} is a folder", key=key)
        return int(info["size"])

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        if self.exists(key):
            with self._errors("delete", key), suppress(FileNotFoundError):
                self._fs.rm_file(self._path(key))

    def tidy(self) -> int:
        """See `Store.tidy`."""
        return 0

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def _folder(self, prefix: str) -> str:
        folder = check_prefix(prefix)
        return f"{self._root}/{folder}" if folder else self._root

    def _keys(self, paths: Iterable[str], folder: str) -> Names:
        """Keys of the paths below a folder; find and ls of a *file* give the file itself."""
        skip = len(self._root) + 1
        stripped = (path.rstrip("/") for path in paths)
        return sorted(path[skip:] for path in stripped if path.startswith(folder + "/"))

    @contextmanager
    def _reading(self, key: str) -> Iterator[None]:
        """Errors of an operation on a key that should be there."""
        with self._errors("read", key):
            try:
                yield
            except (FileNotFoundError, IsADirectoryError) as error:
                raise KeyMissing(f"{self.url}: no {key}", key=key) from error

    @contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        """Turn whatever the service's package raises into ours."""
        try:
            yield
        except StoreError:
            raise
        except FileExistsError as error:
            raise KeyExists(f"{self.url}: {key} exists", key=key) from error
        except PermissionError as error:
            raise StoreRefused(
                f"not permitted to {verb} {key!r} in {self.url}: {error}", key=key
            ) from error
        except Exception as error:  # each package has errors of its own, and not all are OSErrors
            raise StoreError(f"cannot {verb} {key!r} in {self.url}: {error}", key=key) from error
