"""S3 and what speaks its protocol: conditional puts, and large objects in parts.

s3fs gives the client (credentials, endpoint, connections); which requests are made is decided
here. `S3Store.put_new` ends in one request with ``If-None-Match: *``, a PutObject or the
CompleteMultipartUpload of a large object: the service takes it for one writer, answers 412 to
every other, and shows nothing of an object before. A service that ignores the header lets a
second writer win; ``moc doctor --run`` finds that out.

The client's own tries are switched off. It would try a put again whose answer was lost, and take
the 412 that its own first try caused for another writer: who tries again must know that
(`moc.store.wrap.RetryingStore`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, islice
from typing import Any

import fsspec
from fsspec.asyn import sync

from moc.errors import KeyExists, StoreError
from moc.store.base import Chunk, Names, check_key, check_prefix, in_blocks, is_temporary
from moc.store.remote import FsspecStore
from moc.store.retry import Retries

__all__ = ["S3Store"]

_PART_BYTES = 16 << 20
"""S3 wants 5 MiB or more, but for the last."""

_MOST_PARTS = 10_000
_Sent = list[dict[str, Any]]
_AT_ONCE = 4
"""Parts on their way at the same time. A writer holds that many, and one more."""

_TAKEN = ("PreconditionFailed", "412")
_BEYOND_END = ("InvalidRange", "416")


class S3Store(FsspecStore):
    """A prefix of a bucket. Settings are those of s3fs and boto; see docs/storage.md.

    Args:
        url: such as ``s3://bucket/runs/my-moe``.

    Attributes:
        part_bytes: larger objects go in parts of it; more where 10,000 would not do.

    Raises:
        ConfigError: s3fs is not installed.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._bucket, _, folder = self._root.partition("/")
        self._prefix = f"{folder}/" if folder else ""
        self.part_bytes = _PART_BYTES
        self._retries = Retries()

    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """See `Store.get`. One request."""
        name = self._name(key)
        if nbytes == 0:
            self.size(key)
            return b""
        wanted = {}
        if offset or nbytes is not None:
            end = "" if nbytes is None else offset + nbytes - 1
            wanted["Range"] = f"bytes={offset}-{end}"
        with self._reading(key):
            try:
                return bytes(sync(self._fs.loop, self._download, name, wanted))
            except OSError as error:
                if _code(error) not in _BEYOND_END:
                    raise
                return b""

    def put_new(self, key: str, chunks: Iterable[Chunk]) -> int:
        """See `Store.put_new`. An error of ``chunks`` itself passes through unchanged."""
        name = self._name(key)
        if self.exists(key):  # before any chunk is made
            raise KeyExists(f"{self.url}: {key} exists", key=key)
        size = sum(memoryview(c).nbytes for c in chunks) if isinstance(chunks, Sequence) else 0
        blocks = in_blocks(chunks, max(self.part_bytes, -(-size // _MOST_PARTS)))
        first, second = next(blocks, b""), next(blocks, None)
        if second is not None:
            return self._put_parts(key, name, chain([first, second], blocks))
        with self._errors("write", key):
            self._call("put_object", Key=name, Body=first, IfNoneMatch="*")
        return len(first)

    def put(self, key: str, data: Chunk) -> None:
        """See `Store.put`."""
        name = self._name(key)
        with self._errors("write", key):
            self._call("put_object", Key=name, Body=bytes(data))

    def list(self, prefix: str = "") -> Names:
        """See `Store.list`. One request for 1000 keys."""
        keys = self._pages(prefix, "")
        return sorted(key for key in keys if not is_temporary(key.rsplit("/", 1)[-1]))

    def children(self, prefix: str = "") -> Names:
        """See `Store.children`. One request for 1000 names."""
        skip = len(self._folder_name(prefix)) - len(self._prefix)
        names = {name[skip:].rstrip("/") for name in self._pages(prefix, "/")}
        return sorted(name for name in names if name and not is_temporary(name))

    def size(self, key: str) -> int:
        """See `Store.size`. One request."""
        name = self._name(key)
        with self._reading(key):
            return int(self._call("head_object", Key=name)["ContentLength"])

    def delete(self, key: str) -> None:
        """See `Store.delete`. One request; S3 does not say whether the key was there."""
        name = self._name(key)
        with self._errors("delete", key), suppress(FileNotFoundError):
            self._call("delete_object", Key=name)

    def _open(self) -> str:
        """No connection and no thread yet: who opens a store may be about to fork."""
        fsspec.get_filesystem_class("s3")
        root = self.url.partition("://")[2].rstrip("/")
        if not root or root.startswith("/"):
            raise ValueError("it names no bucket")
        return root

    def _connect(self) -> tuple[Any, str]:
        options = dict(fsspec.config.conf.get("s3", {}).get("config_kwargs", {}))
        options["retries"] = {"total_max_attempts": 1}
        # An instance that others share would pass our settings on to them.
        fs, root = fsspec.url_to_fs(
            self.url, use_listings_cache=False, skip_instance_cache=True, config_kwargs=options
        )
        fs.retries = 1
        return fs, root

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self._fs.call_s3(method, Bucket=self._bucket, **arguments)
        return answer

    async def _download(self, name: str, wanted: dict[str, str]) -> bytes:
        fs = self._fs
        answer = await fs._call_s3("get_object", Bucket=self._bucket, Key=name, **wanted)
        async with answer["Body"] as body:
            data: bytes = await body.read()
        return data

    def _put_parts(self, key: str, name: str, blocks: Iterator[bytes]) -> int:
        """Upload in parts; nothing is visible, and nothing stays, unless it succeeds."""
        with self._errors("write", key):
            upload = self._call("create_multipart_upload", Key=name)["UploadId"]
        try:
            done: _Sent = []
            nbytes = 0
            while batch := [*islice(blocks, _AT_ONCE)]:
                send = partial(self._send, key, name, upload, len(done) + 1, batch)
                done += self._retries.run(send)
                nbytes += sum(map(len, batch))
            with self._errors("write", key):
                self._call(
                    "complete_multipart_upload",
                    Key=name,
                    UploadId=upload,
                    MultipartUpload={"Parts": done},
                    IfNoneMatch="*",
                )
        except BaseException:
            # Parts that stay cost money and show nowhere; a rule of the bucket can end them.
            with suppress(StoreError), self._errors("clean up after", key):
                self._call("abort_multipart_upload", Key=name, UploadId=upload)
            raise
        return nbytes

    def _send(self, key: str, name: str, upload: str, first: int, batch: Sequence[bytes]) -> _Sent:
        async def send() -> list[Any]:
            calls = (
                self._fs._call_s3(
                    "upload_part",
                    Bucket=self._bucket,
                    Key=name,
                    UploadId=upload,
                    PartNumber=number,
                    Body=block,
                )
                for number, block in enumerate(batch, first)
            )
            # All have ended before any is sent again, or the upload aborted.
            return await asyncio.gather(*calls, return_exceptions=True)

        with self._errors("write", key):
            answers = sync(self._fs.loop, send)
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer
        return [{"PartNumber": n, "ETag": a["ETag"]} for n, a in enumerate(answers, first)]

    def _pages(self, prefix: str, delimiter: str) -> Iterator[str]:
        """Keys (and with a delimiter, folders with their slash) below a folder."""
        wanted: dict[str, Any] = {"Prefix": self._folder_name(prefix), "Delimiter": delimiter}
        skip = len(self._prefix)
        more = True
        while more:
            with self._errors("list", prefix):
                page = self._call("list_objects_v2", **wanted)
            yield from (found["Prefix"][skip:] for found in page.get("CommonPrefixes", []))
            yield from (found["Key"][skip:] for found in page.get("Contents", []))
            more = page.get("IsTruncated", False)
            wanted["ContinuationToken"] = page.get("NextContinuationToken", "")

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _folder_name(self, prefix: str) -> str:
        folder = check_prefix(prefix)
        return f"{self._prefix}{folder}/" if folder else self._prefix

    @contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        with super()._errors(verb, key):
            try:
                yield
            except OSError as error:
                # s3fs knows it only where the answer repeats the condition, as AWS does.
                if _code(error) in _TAKEN:
                    raise FileExistsError(str(error)) from error
                raise


def _code(error: OSError) -> str:
    """The service's own word for an error that s3fs translated."""
    response = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))
