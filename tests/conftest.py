"""Fixtures that several test files share."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.job import Spec


@pytest.fixture
def memory_dir() -> Iterator[Path]:
    """A directory on tmpfs, gone after the test."""
    path = Path(tempfile.mkdtemp(prefix="moc-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bytes to learn."""
    path = tmp_path_factory.mktemp("text") / "text.bin"
    path.write_bytes(bytes((i * i + i // 7) % 251 for i in range(40_000)))
    return path


@pytest.fixture
def spec(tmp_path: Path, memory_dir: Path, text: Path) -> Callable[..., Spec]:
    """Makes a `Spec` of this test: fresh directories, two virtual nodes."""

    def make(**options: Any) -> Spec:
        nodes = options.pop("nodes", 2)
        memory = tuple(memory_dir / f"node{i}" for i in range(nodes))
        return Spec(run_dir=tmp_path / "run", memory=memory, text=text, **options)

    return make
