"""The expert map: known layouts, what is no expert, global ids, refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moc.errors import ConfigError, ExpertRuleError, LayoutError
from moc.state.experts import (
    ExpertRule,
    build_expert_map,
    dry_run_table,
    merge_layers,
)

MODULES = {
    "model.layers.{}.block_sparse_moe": "experts.{}.w1.weight",
    "model.layers.{}.mlp": "experts.{}.gate_proj.weight",
    "h.{}.moe.deepspeed_moe": "experts.deepspeed_experts.{}.fc1.weight",
    "decoder.layers.{}.mlp": "experts.local_experts.{}.linear_fc1.weight",
    "decoder.layers.{}.mlp ": "experts.linear_fc2.weight{}",
}

STACKED = {
    "model.layers.{}.mlp": ("experts.gate_up_proj", "experts.down_proj"),
    "gpt_oss.layers.{}.mlp": ("experts.gate_up_proj", "experts.gate_up_proj_bias"),
    "layers.{}.moe": ("experts.w1", "experts.w2", "experts.w3"),
    "layers.{}.moe ": (
        "routed_experts.inner_experts.w1_EFD",
        "routed_experts.inner_experts.w2_EDF",
    ),
    "blocks.{}.moe": ("experts.w1", "experts.w2"),
}

NOT_EXPERTS = (
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.1.mlp.gate.weight",
    "model.layers.1.mlp.router.weight",
    "model.layers.1.mlp.router.expert_bias",
    "model.layers.1.mlp.gate.e_score_correction_bias",
    "model.layers.1.mlp.shared_experts.gate_proj.weight",
    "model.layers.1.mlp.shared_experts.0.w",
    "model.layers.1.mlp.shared_experts.experts.0.w",
    "model.layers.1.mlp.shared_expert.up_proj.weight",
    "model.layers.1.mlp.shared_expert_gate.weight",
    "model.layers.1.mlp.tokens_per_expert",
    "model.layers.1.mlp.experts_mask",
    "model.expertise.0.weight",
    "layers.1.moe.shared_experts.w1.weight",
    "decoder.layers.1.mlp.experts.weight1",
    "my_experts.0.weight",
)


@pytest.mark.parametrize(("layer", "rest"), [(k.strip(), v) for k, v in MODULES.items()])
def test_one_module_per_expert_is_recognised(layer: str, rest: str) -> None:
    shapes = {
        f"{layer.format(number)}.{rest.format(expert)}": (4, 2)
        for number in (10, 2)
        for expert in range(3)
    }
    found = build_expert_map(shapes)
    assert found.layers == (layer.format(2), layer.format(10))
    assert found.experts == (3, 3)
    assert found.entries.keys() == shapes.keys()
    entry = found.entries[f"{layer.format(10)}.{rest.format(2)}"]
    assert (entry.layer, entry.stacked, entry.first, entry.count, entry.expert) == (
        1,
        False,
        2,
        1,
        2,
    )


@pytest.mark.parametrize(("layer", "rests"), [(k.strip(), v) for k, v in STACKED.items()])
def test_stacked_experts_are_recognised(layer: str, rests: tuple[str, ...]) -> None:
    shapes = {f"{layer.format(1)}.{rest}": (8, 16, 4) for rest in rests}
    found = build_expert_map(shapes, ep_rank=2, ep_size=4)
    assert found.layers == (layer.format(1),)
    assert found.experts == (32,)
    for fqn in shapes:
        entry = found.entries[fqn]
        assert (entry.stacked, entry.first, entry.count, entry.expert) == (True, 16, 8, None)
        assert found.global_fqn(fqn) == fqn


def test_a_name_with_expert_in_it_is_not_enough() -> None:
    found = build_expert_map(dict.fromkeys(NOT_EXPERTS, (4, 4)))
    assert not found.layers
    assert not found.entries


def test_dense_model_and_no_rules() -> None:
    assert build_expert_map({"fc.weight": (2, 2)}).layers == ()
    assert build_expert_map({"experts.0.w": (2, 2)}, None).entries == {}


@given(
    count=st.integers(1, 5),
    ep_size=st.integers(1, 6),
    rest=st.sampled_from(sorted(MODULES.values())),
    already_global=st.booleans(),
)
def test_ranks_together_hold_every_expert_once(
    count: int, ep_size: int, rest: str, already_global: bool
) -> None:
    names = []
    for rank in range(ep_size):
        start = rank * count if already_global else 0
        shapes = {f"moe.{rest.format(start + i)}": (2,) for i in range(count)}
        found = build_expert_map(shapes, ep_rank=rank, ep_size=ep_size)
        assert found.experts == (count * ep_size,)
        names += [found.global_fqn(fqn) for fqn in shapes]
    assert names == [f"moe.{rest.format(e)}" for e in range(count * ep_size)]


def test_global_name_of_a_root_level_expert() -> None:
    shapes = {f"experts.{i}.w1": (2,) for i in range(4)}
    found = build_expert_map(shapes, ep_rank=1, ep_size=2)
    assert found.layers == ("",)
    assert found.global_fqn("experts.0.w1") == "experts.4.w1"
    assert found.global_fqn("head.weight") == "head.weight"


@pytest.mark.parametrize("indices", [(0, 2), (1, 2), (4, 6)])
def test_gaps_between_local_experts_are_refused(indices: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="contiguous"):
        build_expert_map({f"m.experts.{i}.w": (2,) for i in indices}, ep_rank=0, ep_size=4)


def test_tensors_of_a_layer_must_agree() -> None:
    with pytest.raises(LayoutError, match=r"4 by m\.experts\.w1, 8 by m\.experts\.w2"):
        build_expert_map({"m.experts.w1": (4, 2, 2), "m.experts.w2": (8, 2, 2)})
    with pytest.raises(LayoutError, match="ep_rank 2"):
        build_expert_map({}, ep_rank=2, ep_size=2)


def test_own_rules() -> None:
    rule = ExpertRule(r"(?P<layer>net\.\d+)\.bank\.e(?P<expert>\d+)\..*")
    found = build_expert_map({"net.0.bank.e0.w": (2,), "net.0.bank.e1.w": (2,)}, [rule], 1, 2)
    assert found.global_fqn("net.0.bank.e1.w") == "net.0.bank.e3.w"
    with pytest.raises(ExpertRuleError, match=r"a\.weight, b\.weight"):
        build_expert_map({"a.weight": (1,), "b.weight": (1,)}, [rule])
    assert build_expert_map({"a.weight": (1,)}, [rule], required=False).entries == {}
    with pytest.raises(ExpertRuleError, match="shared expert"):
        build_expert_map(
            {"m.shared_experts.0.w": (1,)},
            [ExpertRule(r"(?P<layer>\w+)\.\w+\.(?P<expert>\d+)\.w")],
        )
    with pytest.raises(ExpertRuleError, match="reads expert '00'"):
        build_expert_map({"net.0.bank.e00.w": (1,)}, [rule])
    with pytest.raises(ExpertRuleError, match="holds no experts"):
        build_expert_map({"m.scale": ()}, [ExpertRule(r"(?P<layer>m)\.scale")])


def test_presets_by_name() -> None:
    assert build_expert_map({"m.experts.0.w": (1,)}, "modules").experts == (1,)
    with pytest.raises(ExpertRuleError, match="no parameter"):
        build_expert_map({"m.experts.0.w": (1,)}, "megatron")
    with pytest.raises(ExpertRuleError, match="there are auto, modules"):
        build_expert_map({}, "mixtral-9000")


@pytest.mark.parametrize("pattern", [r"experts\.(?P<expert>\d+)", r"(?P<layer>"])
def test_useless_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(ExpertRuleError, match="expert rule"):
        ExpertRule(pattern)


def test_only_dim_0_can_be_cut() -> None:
    with pytest.raises(ConfigError, match="dim 1"):
        ExpertRule(r"(?P<layer>.*)\.w", dim=1)


@given(st.lists(st.integers(0, 300), unique=True), st.randoms())
def test_layers_come_in_natural_order(numbers: list[int], random: object) -> None:
    names = [f"model.layers.{n}.moe" for n in numbers]
    random.shuffle(names)  # type: ignore[attr-defined]
    assert merge_layers(names + names) == tuple(f"model.layers.{n}.moe" for n in sorted(numbers))


@given(st.lists(st.text(alphabet="ab.01٣", max_size=6)))
def test_any_names_can_be_ordered(names: list[str]) -> None:
    assert merge_layers(names) == merge_layers(reversed(names))
    assert set(merge_layers(names)) == set(names)


def test_numbers_among_all_layers_of_the_job() -> None:
    here = build_expert_map({"layers.10.moe.experts.w1": (4, 2, 2)})
    whole = here.among({"layers.10.moe": 4, "layers.2.moe": 8})
    assert whole.layers == ("layers.2.moe", "layers.10.moe")
    assert whole.experts == (8, 4)
    assert whole.entries["layers.10.moe.experts.w1"].layer == 1
    with pytest.raises(LayoutError, match="4 experts on this rank and 8"):
        here.among({"layers.10.moe": 8})


def test_dry_run_says_what_was_recognised() -> None:
    shapes = {"embed.weight": (8, 4)}
    for layer in range(2):
        shapes[f"layers.{layer}.mlp.gate.weight"] = (4, 4)
        for expert in range(4):
            shapes[f"layers.{layer}.mlp.experts.{expert}.w1.weight"] = (2, 2)
    shapes["layers.0.mlp.experts.scale"] = (4,)
    shapes |= {f"d.0.mlp.experts.linear_fc1.weight{i}": (2, 2) for i in range(2)}
    shapes["t.0.moe.experts.w1"] = (8, 2, 2)
    assert dry_run_table(build_expert_map(shapes), shapes) == [
        ("embed.weight", "dense"),
        ("layers.*.mlp.gate.weight", "dense"),
        (
            "layers.*.mlp.experts.*.w1.weight",
            "expert of layer layers.*.mlp, 4 experts, one module each, 2 layers",
        ),
        (
            "layers.*.mlp.experts.scale",
            "dense (if these are routed experts, give a rule for them)",
        ),
        (
            "d.*.mlp.experts.linear_fc1.weight*",
            "expert of layer d.*.mlp, 2 experts, one module each",
        ),
        ("t.*.moe.experts.w1", "expert of layer t.*.moe, 8 experts, stacked"),
    ]
