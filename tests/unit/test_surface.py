"""What users may rely on. A change here is a change for them: say so in CHANGELOG.md."""

from __future__ import annotations

import subprocess
import sys

import pytest

import moc

PUBLIC = [
    "CheckpointManager",
    "Event",
    "ExpertRule",
    "Layout",
    "MocError",
    "Policy",
    "Preempted",
    "RestoreReport",
    "__version__",
    "init_process_group",
]


def test_public_names_are_frozen() -> None:
    assert moc.__all__ == PUBLIC
    assert set(PUBLIC) <= set(dir(moc))


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(moc, name) is getattr(moc, name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        moc.nothing  # noqa: B018


@pytest.mark.parametrize(
    "module",
    [
        "moc",
        "moc.cli.main",
        "moc.cli.report",
        "moc.metrics",
        "moc.persist.agent",
        "moc.recover",
        "moc.store",
    ],
)
def test_importing_it_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
