"""Bytes by key: local folders and object stores. No torch."""

from __future__ import annotations

import os

from moc.errors import ConfigError
from moc.store.base import Store
from moc.store.local import LocalStore
from moc.store.wrap import RetryingStore

__all__ = ["LocalStore", "RetryingStore", "Store", "open_patiently", "open_store"]


def open_store(url: str | os.PathLike[str]) -> Store:
    """The store of a run. Nothing is written, and no folder is made.

    Args:
        url: a folder, ``file:///folder`` (taken letter by letter, without %-escapes), or a URL
            of fsspec such as ``s3://bucket/runs/my-moe``.

    Raises:
        ConfigError: no store for such a scheme; says which there are.
    """
    text = os.fspath(url)
    if not text:
        raise ConfigError(
            f"directory={text!r}: an empty path names no run directory; give a folder or a URL"
        )
    if "://" not in text:
        return LocalStore(text)
    if text.startswith("file://"):
        path = text.removeprefix("file://")
        if not path.startswith("/"):
            raise ConfigError(f"{text}: file:// takes an absolute path, file:///folder")
        return LocalStore(path)
    # Here, because fsspec costs 0.2 s.
    if text.startswith(("s3://", "s3a://")):
        from moc.store.s3 import S3Store

        return S3Store(text)
    from moc.store.remote import FsspecStore

    return FsspecStore(text)


def open_patiently(url: str | os.PathLike[str]) -> Store:
    """The store of a run, to read it: a service gets several tries, a folder answers at once."""
    store = open_store(url)
    return store if isinstance(store, LocalStore) else RetryingStore(store)
