"""The expert map: which parameters are routed experts, of which MoE layer, with which ids.

A name that merely contains "expert" decides nothing: shared experts, gates, routers, their biases
and counters are dense, and dense state is saved in full every time. So an expert is only what a
rule matches, and a rule is explicit: one pattern per layout, presets for the known layouts.
`dry_run_table` prints what was recognised.

This file knows names and shapes only; it reads no tensor and no rank.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from moc.errors import ConfigError, ExpertRuleError, LayoutError

__all__ = [
    "PRESETS",
    "ExpertMap",
    "ExpertParam",
    "ExpertRule",
    "build_expert_map",
    "dry_run_table",
    "merge_layers",
]

_SHOWN = 6
"""How many names an error message lists."""

_NUMBER = re.compile(r"[0-9]+")


class ExpertRule(msgspec.Struct, frozen=True):
    """How the routed experts of one layout are named.

    Attributes:
        pattern: regular expression that must match a whole parameter name. Its group ``layer``
            is the text that identifies the MoE layer, as a rule the path of the MoE module (the
            router is searched below it). Its group ``expert``, where there is one, is the index
            of the expert, one module per expert; without it the tensor stacks all local experts.
        dim: along which dimension a stacked tensor holds its experts; only 0.

    Raises:
        ConfigError: the pattern is no regular expression or lacks the group ``layer``, or ``dim``
            is not 0.
    """

    pattern: str
    dim: int = 0

    def __post_init__(self) -> None:
        try:
            groups = re.compile(self.pattern).groupindex
        except (re.error, TypeError) as error:
            raise ExpertRuleError(
                f"expert rule {self.pattern!r}: {error}; give a regular expression"
            ) from error
        if "layer" not in groups:
            raise ExpertRuleError(
                f"expert rule {self.pattern!r} has no group (?P<layer>...); put it around the path "
                "of the MoE module"
            )
        if self.dim != 0:
            raise ConfigError(
                f"expert rule {self.pattern!r}: experts along dim {self.dim}; only dim 0 can be cut"
                " into experts; transpose the parameter"
            )


_LAYER = r"(?:(?P<layer>.+)\.)?"
_INDEX = r"(?P<expert>[0-9]+)"

PRESETS: dict[str, tuple[ExpertRule, ...]] = {
    # One module per expert: Mixtral, Qwen, DeepSeek, OLMoE and most code written by hand.
    "modules": (ExpertRule(rf"{_LAYER}experts\.{_INDEX}\..+"),),
    "deepspeed": (ExpertRule(rf"{_LAYER}experts\.deepspeed_experts\.{_INDEX}\..+"),),
    "megatron": (
        ExpertRule(rf"{_LAYER}experts\.local_experts\.{_INDEX}\..+"),
        ExpertRule(rf"{_LAYER}experts\.linear_fc[12]\.(?:weight|bias){_INDEX}"),
    ),
    # Stacked: transformers 5 and GPT-OSS, torchtitan before and after its `routed_experts`.
    "transformers": (
        ExpertRule(rf"{_LAYER}experts\.(?:gate_up_proj|gate_proj|up_proj|down_proj)(?:_bias)?"),
    ),
    "torchtitan": (
        ExpertRule(rf"{_LAYER}routed_experts\.inner_experts\.[A-Za-z]\w*"),
        ExpertRule(rf"{_LAYER}experts\.(?:w[123]|mlp[12]_(?:weight|bias))(?:_[A-Z]+)?"),
    ),
}
"""Rules by layout. ``"auto"`` tries all, in this order; the first that matches a name wins."""


class ExpertParam(msgspec.Struct, frozen=True):
    """What a parameter holds of the routed experts.

    Attributes:
        layer: number of its MoE layer in the map's ``layers``.
        stacked: whether its rows are experts; otherwise it belongs to one expert.
        first: global id of the first expert in it.
        count: how many experts are in it.
        expert: global id of the one expert it belongs to, None for a stacked tensor.
    """

    layer: int
    stacked: bool
    first: int
    count: int
    expert: int | None = None


class ExpertMap(msgspec.Struct, frozen=True):
    """Every routed expert among this rank's parameters.

    Attributes:
        layers: names of the MoE layers, in natural order.
        experts: number of experts of each layer, over all expert-parallel ranks.
        entries: what each expert parameter holds, by its local name.
        spans: where a per-module expert's index stands in its name, by local name.
    """

    layers: tuple[str, ...] = ()
    experts: tuple[int, ...] = ()
    entries: dict[str, ExpertParam] = {}
    spans: dict[str, tuple[int, int]] = {}

    def global_fqn(self, fqn: str) -> str:
        """The name with its expert's global id; any other name as it is."""
        if fqn not in self.spans:
            return fqn
        start, end = self.spans[fqn]
        return f"{fqn[:start]}{self.entries[fqn].first}{fqn[end:]}"

    def among(self, experts: Mapping[str, int]) -> ExpertMap:
        """The same parameters, with layer numbers of the whole job.

        Args:
            experts: number of experts by layer name, gathered from all ranks.

        Raises:
            LayoutError: a layer of this rank is missing there, or has another number of experts.
        """
        for name, count in zip(self.layers, self.experts, strict=True):
            if experts.get(name) != count:
                raise LayoutError(
                    f"MoE layer {name!r} has {count} experts on this rank and"
                    f" {experts.get(name, 'none')} on another"
                )
        layers = merge_layers(experts)
        number = [layers.index(name) for name in self.layers]
        return ExpertMap(
            layers,
            tuple(experts[name] for name in layers),
            {
                fqn: msgspec.structs.replace(entry, layer=number[entry.layer])
                for fqn, entry in self.entries.items()
            },
            self.spans,
        )

    def without(self, layers: Collection[int]) -> ExpertMap:
        """The map without some layers, by number; what they hold counts as dense."""
        kept = [number for number in range(len(self.layers)) if number not in layers]
        entries = {
            fqn: msgspec.structs.replace(entry, layer=kept.index(entry.layer))
            for fqn, entry in self.entries.items()
            if entry.layer not in layers
        }
        return ExpertMap(
            tuple(self.layers[number] for number in kept),
            tuple(self.experts[number] for number in kept),
            entries,
            {fqn: span for fqn, span in self.spans.items() if fqn in entries},
        )


class _Match(msgspec.Struct, frozen=True):
    """A name that a rule matched; ``index`` is None for a stacked tensor."""

    fqn: str
    layer: str
    index: int | None
    span: tuple[int, int]


def build_expert_map(
    shapes: Mapping[str, tuple[int, ...]],
    rules: str | Sequence[ExpertRule] | None = "auto",
    ep_rank: int = 0,
    ep_size: int = 1,
    *,
    required: bool = True,
) -> ExpertMap:
    """Find the routed experts among parameters.

    Every expert-parallel rank names its own experts 0, 1, 2 ...; experts are spread contiguously,
    so the global id is ``ep_rank * local_count + local index``, and a layer has
    ``ep_size * local_count`` experts. Indices that are global already (a rank that holds only
    modules 4 to 7) are recognised and kept.

    Args:
        shapes: local shape by canonical name, parameters only. A tensor that knows its own global
            shape (DTensor) comes with that one, in a call of its own with ``ep_size=1``.
        rules: ``"auto"`` for all presets, the name of a preset, rules of your own of which the
            first that matches a name counts, or None for a model without experts.
        ep_rank: position of this rank in its expert-parallel group.
        ep_size: size of that group.
        required: whether rules other than ``"auto"`` must match something; False for a pipeline
            stage that may have no MoE layer.

    Raises:
        ExpertRuleError: rules that were asked for match nothing, or a rule of your own matches a
            shared expert or a tensor that cannot hold experts.
        LayoutError: local experts have gaps, or tensors of a layer disagree on their number.
    """
    if not 0 <= ep_rank < ep_size:
        raise LayoutError(f"ep_rank {ep_rank} is not in a group of {ep_size}")
    if rules is None:
        return ExpertMap()
    preset = isinstance(rules, str)
    resolved = _resolve(rules)
    matches = _match_all(shapes, resolved, skip_shared=preset)
    if not matches and rules != "auto" and required:
        raise ExpertRuleError(
            f"no parameter is a routed expert by {[rule.pattern for rule in resolved]};"
            f" parameters are {_some(shapes)}; change the rule, or give experts=None for a model"
            " without experts"
        )
    by_layer: dict[str, list[_Match]] = {}
    for match in matches:
        by_layer.setdefault(match.layer, []).append(match)
    layers = merge_layers(by_layer)
    experts: list[int] = []
    entries: dict[str, ExpertParam] = {}
    spans: dict[str, tuple[int, int]] = {}
    for number, layer in enumerate(layers):
        count, base = _count_local(layer, by_layer[layer], shapes, ep_rank)
        first = ep_rank * count
        experts.append(ep_size * count)
        for match in by_layer[layer]:
            if match.index is None:
                entries[match.fqn] = ExpertParam(number, True, first, count)
            else:
                expert = first + match.index - base
                entries[match.fqn] = ExpertParam(number, False, expert, 1, expert)
                spans[match.fqn] = match.span
    return ExpertMap(layers, tuple(experts), entries, spans)


def _resolve(rules: str | Sequence[ExpertRule]) -> tuple[ExpertRule, ...]:
    if not isinstance(rules, str):
        told = "give 'auto', a preset, a list of moc.ExpertRule, or None"
        if not isinstance(rules, Iterable):
            raise ExpertRuleError(f"experts={rules!r}: {told}")
        for rule in rules:
            if not isinstance(rule, ExpertRule):
                raise ExpertRuleError(f"experts: {rule!r} is no rule; {told}")
        return tuple(rules)
    if rules == "auto":
        return tuple(rule for preset in PRESETS.values() for rule in preset)
    if rules not in PRESETS:
        raise ExpertRuleError(f"no expert preset {rules!r}; there are auto, {', '.join(PRESETS)}")
    return PRESETS[rules]


def _match_all(
    names: Iterable[str], rules: Sequence[ExpertRule], *, skip_shared: bool
) -> list[_Match]:
    compiled = [(rule, re.compile(rule.pattern)) for rule in rules]
    found = []
    for fqn in names:
        for rule, pattern in compiled:
            match = pattern.fullmatch(fqn)
            if match is None:
                continue
            if any(segment.startswith("shared_expert") for segment in fqn.split(".")):
                if skip_shared:
                    break
                raise ExpertRuleError(
                    f"expert rule {rule.pattern!r} matches {fqn}, which is a shared expert: those"
                    " see every token and are dense; let the rule match routed experts only"
                )
            index, span = None, (0, 0)
            if "expert" in pattern.groupindex:
                text, span = match["expert"], match.span("expert")
                if text is None or not _NUMBER.fullmatch(text) or str(int(text)) != text:
                    raise ExpertRuleError(
                        f"expert rule {rule.pattern!r} reads expert {text!r} from {fqn}; an index"
                        " is a plain number, so let the group match one"
                    )
                index = int(text)
            found.append(_Match(fqn, match["layer"] or "", index, span))
            break
    return found


def _count_local(
    layer: str, matches: Sequence[_Match], shapes: Mapping[str, tuple[int, ...]], ep_rank: int
) -> tuple[int, int]:
    """Number of experts of one layer on this rank, and the index of the first one."""
    counts: dict[int, str] = {}
    for match in matches:
        if match.index is None:
            shape = shapes[match.fqn]
            if not shape or shape[0] == 0:
                raise ExpertRuleError(
                    f"{match.fqn} of shape {shape} holds no experts along dim 0; let the rule leave"
                    " it out"
                )
            counts.setdefault(shape[0], match.fqn)
    base = 0
    indices = sorted({m.index for m in matches if m.index is not None})
    if indices:
        count = len(indices)
        base = ep_rank * count if indices[0] == ep_rank * count else 0
        if indices != list(range(base, base + count)):
            raise LayoutError(
                f"MoE layer {layer!r}: local experts {_some(indices)} are not 0 to {count - 1};"
                " experts of a rank must be contiguous, so number them so, or check the ep group"
            )
        counts.setdefault(count, next(m.fqn for m in matches if m.index is not None))
    if len(counts) > 1:
        told = ", ".join(f"{count} by {fqn}" for count, fqn in sorted(counts.items()))
        raise LayoutError(
            f"MoE layer {layer!r}: tensors disagree on the local experts: {told};"
            " let the rule leave out what is no expert"
        )
    return next(iter(counts)), base


def merge_layers(names: Iterable[str]) -> tuple[str, ...]:
    """Distinct names in natural order: numbers in them compare as numbers, ties as text."""

    def key(name: str) -> tuple[list[str | int], str]:
        parts: list[str | int] = []
        last = 0
        for number in _NUMBER.finditer(name):  # text and number alternate: comparable by position
            parts += [name[last : number.start()], int(number[0])]
            last = number.end()
        return [*parts, name[last:]], name

    return tuple(sorted(set(names), key=key))


def dry_run_table(
    experts: ExpertMap, shapes: Mapping[str, tuple[int, ...]]
) -> list[tuple[str, str]]:
    """What was recognised, one row per kind of parameter: (name with ``*`` for indices, verdict).

    Args:
        experts: the map that was built.
        shapes: the names it was built from, in model order.
    """
    rows: dict[tuple[str, str], set[int]] = {}
    for fqn in shapes:
        entry = experts.entries.get(fqn)
        if entry is None:
            told = "dense"
            if "experts" in fqn.split("."):
                told = "dense (if these are routed experts, give a rule for them)"
            rows.setdefault((_starred(fqn), told), set())
            continue
        start, end = experts.spans.get(fqn, (0, 0))
        layer = _starred(experts.layers[entry.layer])
        told = f"expert of layer {layer}, {experts.experts[entry.layer]} experts, "
        told += "stacked" if entry.stacked else "one module each"
        name = f"{fqn[:start]}*{fqn[end:]}" if end else fqn
        rows.setdefault((_starred(name), told), set()).add(entry.layer)
    return [
        (name, f"{told}, {len(layers)} layers" if len(layers) > 1 else told)
        for (name, told), layers in rows.items()
    ]


def _starred(name: str) -> str:
    return ".".join("*" if _NUMBER.fullmatch(part) else part for part in name.split("."))


def _some(values: Iterable[object]) -> str:
    listed = list(values)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(map(str, listed[:_SHOWN])) + more
