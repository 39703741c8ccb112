"""Real text without a download: the Python standard library that every interpreter ships.

Written once to one file, which the ranks then map. Imports no torch. The text differs between
Python versions, so losses of different machines may; those of two runs on one machine do not.
"""

from __future__ import annotations

import math
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Split", "split_windows", "standard_library_files", "write_corpus"]

_SUFFIXES = (".py", ".txt", ".rst", ".md")
_SKIPPED = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}
_HELD_OUT_EVERY = 16
_BLOCK_WINDOWS = 64


def standard_library_files(root: Path | None = None) -> Iterator[Path]:
    """Its sources and texts in a fixed order, tests left out."""
    root = root or Path(sysconfig.get_path("stdlib"))
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in _SKIPPED)
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(_SUFFIXES))


def write_corpus(target: Path, data: Path | None = None) -> int:
    """Put the standard library, or the bytes of ``data``, into ``target``.

    Returns:
        Bytes written.

    Raises:
        ValueError: there is nothing to read.
    """
    files = [data] if data else list(standard_library_files())
    written = 0
    temporary = target.with_suffix(".tmp")
    with temporary.open("wb") as out:
        for path in files:
            written += out.write(path.read_bytes())
    if not written:
        temporary.unlink()
        where = data or f"the standard library at {sysconfig.get_path('stdlib')}"
        raise ValueError(f"no text found in {where}; name a file with --data FILE")
    temporary.replace(target)
    return written


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Which windows of the text are for training and which are held out.

    Every 16th block of windows is held out, so that both halves see every kind of file.

    Attributes:
        train: windows for training.
        validation: windows held out.
        block: windows per block.
        stride: step between windows that training visits one after the other; it has no common
            divisor with ``train``, so an epoch visits each window once, spread over the text.
    """

    train: int
    validation: int
    block: int
    stride: int

    def train_window(self, sample: int, seed: int) -> int:
        """Place in the text of the n-th training sample of all ranks together."""
        visited = (sample * self.stride + seed * 2_654_435_761) % self.train
        block, offset = divmod(visited, self.block)
        return (block + block // (_HELD_OUT_EVERY - 1)) * self.block + offset

    def validation_window(self, sample: int) -> int:
        """Place in the text of the n-th held-out sample, spread over the text."""
        spread = (sample * self._validation_stride()) % self.validation
        block, offset = divmod(spread, self.block)
        return (_HELD_OUT_EVERY * block + _HELD_OUT_EVERY - 1) * self.block + offset

    def _validation_stride(self) -> int:
        return _coprime_stride(self.validation)


def split_windows(nbytes: int, window: int) -> Split:
    """Divide a text of so many bytes into windows, every 16th block of them held out.

    Raises:
        ValueError: the text is too short to be divided.
    """
    windows = nbytes // window
    block = max(1, min(_BLOCK_WINDOWS, windows // (4 * _HELD_OUT_EVERY)))
    groups, rest = divmod(windows // block, _HELD_OUT_EVERY)
    if not groups:
        raise ValueError(
            f"the text has {nbytes} bytes; at least {window * _HELD_OUT_EVERY} are needed"
        )
    train = (groups * (_HELD_OUT_EVERY - 1) + rest) * block
    return Split(train=train, validation=groups * block, block=block, stride=_coprime_stride(train))


def _coprime_stride(count: int) -> int:
    """The number nearest above count / golden ratio that shares no divisor with ``count``."""
    stride = max(1, round(count * 0.618_033_988_75))
    while math.gcd(stride, count) != 1:
        stride += 1
    return stride
