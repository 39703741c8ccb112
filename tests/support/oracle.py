"""What a restore must give, worked out from the files alone, with nothing but ``json``.

It shares no line with the library's ladder: it reads attempts, manifests, receipts and seals as
they lie on disk, and says which step is the newest whole one, and which version each expert has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Version = tuple[int, int]
"""(step, attempt)."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What can be restored at best.

    Attributes:
        version: newest whole version on the live history.
        committed: whether it is in storage.
        experts: newest whole version of every (layer, expert) that is not newer.
    """

    version: Version
    committed: bool
    experts: dict[tuple[int, int], Version]


class Files:
    """What lies in the run directory and in the memory tiers now."""

    def __init__(self, run_dir: Path, memory: Iterable[Path]) -> None:
        records = sorted(run_dir.glob("attempts/*.json"))
        self.attempts = list(_read(records))
        self.manifests: dict[Version, dict[str, Any]] = {}
        self.receipts: dict[Version, dict[int, dict[str, Any]]] = {}
        for folder in run_dir.glob("step-*"):
            step, attempt = re.fullmatch(r"step-(\d{8,})-a(\d{4,})", folder.name).groups()
            version = (int(step), int(attempt))
            for manifest in _read([folder / "manifest.json"]):
                self.manifests[version] = manifest
            self.receipts[version] = {r["rank"]: r for r in _read(folder.glob("rank-*.receipt"))}
        self.seals: dict[Version, dict[int, dict[str, Any]]] = {}
        for node in memory:
            for seal in _read(node.glob("moc-*/*.seal")):
                self.seals.setdefault(tuple(seal["version"]), {})[seal["rank"]] = seal

    def is_live(self, version: Version) -> bool:
        """Whether no attempt after the version's own went back to before it."""
        step, attempt = version
        numbers = [a["attempt"] for a in self.attempts]
        later = [a["resumed_step"] for a in self.attempts if a["attempt"] > attempt]
        return attempt in numbers and all(step <= resumed for resumed in later)

    def committed(self) -> dict[Version, dict[tuple[int, int], Version]]:
        """Live versions that are in storage, or that any start can finish; their experts."""
        found = {
            version: {
                (layer, expert): tuple(v)
                for layer, row in enumerate(manifest["versions"])
                for expert, v in enumerate(row)
            }
            for version, manifest in self.manifests.items()
            if self.is_live(version)
        }
        for version, receipts in sorted(self.receipts.items()):
            if version in found or not self.is_live(version) or 0 not in receipts:
                continue
            head = receipts[0]["head"]
            base = tuple(head["base"]) if head["base"] else None
            complete = sorted(receipts) == list(range(receipts[0]["world_size"]))
            if complete and (base is None or base in found):
                experts = dict(found[base]) if base else {}
                for layer, ids in enumerate(head["saved"]):
                    experts |= {(layer, expert): version for expert in ids}
                found[version] = experts
        return found

    def sealed(self) -> list[Version]:
        """Live versions that every rank of their world has sealed."""
        return sorted(
            version
            for version, seals in self.seals.items()
            if self.is_live(version)
            and sorted(seals) == list(range(next(iter(seals.values()))["world_size"]))
        )

    def experts_in_memory(self, version: Version) -> set[tuple[int, int]]:
        """Experts that the sealed buffers of a version hold whole, over all ranks."""
        needed: dict[tuple[int, int], int] = {}
        held: dict[tuple[int, int], set[str]] = {}
        for seal in self.seals[version].values():
            for layer, expert, count in seal["expert_pieces"]:
                needed[layer, expert] = count
            for piece, *_ in seal["pieces"]:
                fqn, part, box, layer, expert = *piece[:3], *piece[4:6]
                if layer >= 0:
                    held.setdefault((layer, expert), set()).add(f"{fqn} {part} {box}")
        return {key for key, count in needed.items() if len(held.get(key, ())) == count}

    def best(self, step: int | None = None) -> Expected | None:
        """The newest whole version (of a step, if given), and its experts; None for nothing."""
        committed, sealed = self.committed(), self.sealed()
        whole = sorted({*committed, *sealed})
        for version in reversed([v for v in whole if step in (None, v[0])]):
            experts: dict[tuple[int, int], Version] = {}
            for older, held in committed.items():
                if older <= version:
                    for key, made in held.items():
                        experts[key] = max(experts.get(key, made), made)
            for older in self.seals:
                if older <= version and self.is_live(older):
                    for key in self.experts_in_memory(older):
                        experts[key] = max(experts.get(key, older), older)
            layers = self._layers(version, committed)
            if experts.keys() == layers:
                return Expected(version=version, committed=version in committed, experts=experts)
        return None

    def _layers(self, version: Version, committed: Iterable[Version]) -> set[tuple[int, int]]:
        if version in self.manifests:
            routed = self.manifests[version]["head"]["routed"]
        elif version in committed:
            routed = self.receipts[version][0]["head"]["routed"]
        else:
            routed = next(iter(self.seals[version].values()))["head"]["routed"]
        return {(layer, e) for layer, row in enumerate(routed) for e in range(len(row))}


def _read(paths: Iterable[Path]) -> Iterator[Any]:
    """What is in files; one that a helper still at work has deleted is none."""
    for path in paths:
        with suppress(FileNotFoundError):
            yield json.loads(path.read_bytes())
