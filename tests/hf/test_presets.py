"""The presets against small random models of the installed Transformers; nothing is downloaded.

Expected names are written out here, and what the routers did is read from the arguments of the
experts' own `forward`: nothing is compared with what the library says of itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tests.support.job import assert_equal, same_bytes
from tests.support.tiny import Managers, adamw, state_of, stored, version_of, whole
from torch import Tensor, nn

import moc
from moc.errors import ExpertRuleError, MismatchError
from moc.persist.commit import load_manifest
from moc.state.experts import PRESETS, build_expert_map, dry_run_table
from moc.state.routers import TokenCounter
from moc.store.local import LocalStore

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers: Any = pytest.importorskip(
    "transformers",
    minversion="5.0",
    reason="needs the extra `hf` (transformers 5.0 or newer): make test-hf",
)
transformers.utils.logging.disable_progress_bar()  # its thread would stay; later tests fork

pytestmark = pytest.mark.hf

EXPERTS, TOP_K, DIM, WIDTH, LAYERS = 6, 2, 16, 24, 3
BATCH, LENGTH = 2, 10
MOMENTS = ("exp_avg", "exp_avg_sq")
BIAS = "model.layers.{}.mlp.gate.e_score_correction_bias"

GATED = {"gate_up_proj": (2 * WIDTH, DIM), "down_proj": (DIM, WIDTH)}
"""Parameters of most expert banks: shape of one expert by name."""


@dataclass(frozen=True)
class Family:
    """One architecture: how to make a small model of it, and what is to be found there."""

    name: str
    options: Mapping[str, Any]
    moe: tuple[int, ...] = (0, 1, 2)
    bank: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: GATED)
    dense: tuple[str, ...] = ("gate.weight",)
    """What else lies in a MoE module."""
    files: str | None = "mlp.experts.{}.{}_proj.weight"
    """Names of one expert in files that `save_pretrained` writes; None where they are stacked."""

    def make(self, seed: int = 0, **more: Any) -> nn.Module:
        config = getattr(transformers, f"{self.name}Config")(
            vocab_size=64,
            hidden_size=DIM,
            intermediate_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
            num_experts_per_tok=TOP_K,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            **self.options,
            **more,
        )
        torch.manual_seed(seed)
        model: nn.Module = getattr(transformers, f"{self.name}ForCausalLM")(config)
        return model.train()

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(f"model.layers.{layer}.mlp" for layer in self.moe)

    @property
    def routed(self) -> dict[str, tuple[int, ...]]:
        """Shape of one expert's row by the name of the stacked parameter."""
        return {f"{at}.experts.{p}": row for at in self.layers for p, row in self.bank.items()}


FAMILIES = [
    Family(
        "Mixtral", {"num_local_experts": EXPERTS}, files="block_sparse_moe.experts.{}.w{}.weight"
    ),
    Family(
        "Qwen3Moe",
        {
            **{"num_experts": EXPERTS, "moe_intermediate_size": WIDTH, "head_dim": 8},
            **{"mlp_only_layers": [1], "tie_word_embeddings": True},
        },
        moe=(0, 2),
    ),
    Family("Olmoe", {"num_experts": EXPERTS}),
    Family(
        "DeepseekV3",
        {
            **{"n_routed_experts": EXPERTS, "moe_intermediate_size": WIDTH},
            **{"n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
            **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4},
            **{"v_head_dim": 8},
        },
        moe=(1, 2),
        dense=(
            *("gate.weight", "gate.e_score_correction_bias"),
            *(f"shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")),
        ),
    ),
    Family(
        "GptOss",
        {"num_local_experts": EXPERTS, "head_dim": 8, "sliding_window": 8},
        bank={
            **{"gate_up_proj": (DIM, 2 * WIDTH), "gate_up_proj_bias": (2 * WIDTH,)},
            **{"down_proj": (WIDTH, DIM), "down_proj_bias": (DIM,)},
        },
        dense=("router.weight", "router.bias"),
        files=None,
    ),
]

each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small only wait for a pool of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(param.shape) for name, param in model.named_parameters()}


def tokens_of(step: int) -> Tensor:
    return torch.randint(
        3, 64, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1000 + step)
    )


def train(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """One optimizer step; correction biases move as their training recipe moves them."""
    optimizer.zero_grad()
    ids = tokens_of(step)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.add_(torch.linspace(-1, 1, EXPERTS, dtype=buffer.dtype) * 1e-3 * step)


class Witness:
    """Sees what the experts are given: the indices of every call, by layer."""

    def __init__(self, model: nn.Module, layers: tuple[str, ...]) -> None:
        self._calls: list[list[Tensor]] = [[] for _ in layers]
        for calls, layer in zip(self._calls, layers, strict=True):
            bank: Any = model.get_submodule(f"{layer}.experts")
            bank.forward = self._seen(bank.forward, calls)

    @staticmethod
    def _seen(forward: Callable[..., Any], calls: list[Tensor]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            (indices,) = (
                value
                for value in (*args, *kwargs.values())
                if isinstance(value, Tensor) and value.dtype == torch.int64
            )
            calls.append(indices.detach().clone())
            return forward(*args, **kwargs)

        return wrapped

    def calls(self) -> int:
        return sum(map(len, self._calls))

    def take(self) -> Tensor:
        """Counts [layers, experts] since the last time."""
        counts = torch.stack(
            [torch.bincount(torch.cat(calls).flatten(), minlength=EXPERTS) for calls in self._calls]
        )
        for calls in self._calls:
            calls.clear()
        return counts


# ------------------------------------------------------------------------------------------ names


@each_family
@pytest.mark.parametrize("rules", ["auto", "transformers"])
def test_exactly_the_routed_experts_are_recognised(family: Family, rules: str) -> None:
    model = family.make()
    shapes = shapes_of(model)
    found = build_expert_map(shapes, rules)
    assert found.layers == family.layers
    assert found.experts == (EXPERTS,) * len(family.layers)
    assert {fqn: shapes[fqn][1:] for fqn in found.entries} == family.routed
    for fqn, entry in found.entries.items():
        assert (entry.stacked, entry.first, entry.count, entry.expert) == (True, 0, EXPERTS, None)
        assert fqn.startswith(f"{found.layers[entry.layer]}.experts.")
        assert found.global_fqn(fqn) == fqn
    for layer in family.layers:
        there = set(model.get_submodule(layer).state_dict()) - {f"experts.{p}" for p in family.bank}
        assert there == set(family.dense)
    assert not [row for row in dry_run_table(found, shapes) if "if these are routed" in row[1]]


@each_family
def test_half_the_experts_on_the_second_of_two_ranks(family: Family) -> None:
    shapes = shapes_of(family.make())
    half = {n: (s[0] // 2, *s[1:]) if n in family.routed else s for n, s in shapes.items()}
    found = build_expert_map(half, "auto", ep_rank=1, ep_size=2)
    assert found.experts == (EXPERTS,) * len(family.layers)
    assert set(found.entries) == set(family.routed)
    assert {(e.first, e.count) for e in found.entries.values()} == {(EXPERTS // 2, EXPERTS // 2)}


@each_family
@pytest.mark.parametrize("preset", sorted(set(PRESETS) - {"transformers"}))
def test_presets_of_other_layouts_match_nothing(family: Family, preset: str) -> None:
    with pytest.raises(ExpertRuleError, match="no parameter is a routed expert"):
        build_expert_map(shapes_of(family.make()), preset)


@each_family
def test_names_of_one_module_per_expert(family: Family, tmp_path: Path) -> None:
    """Files keep the names that these models' parameters had before they were stacked."""
    model: Any = family.make()
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        shapes = {
            name: tuple(file.get_slice(name).get_shape())
            for name in file.keys()  # noqa: SIM118 - no mapping
        }
    if family.files is None:
        assert set(build_expert_map(shapes, "transformers").entries) == set(family.routed)
        return
    parts = (1, 2, 3) if "w{}" in family.files else ("gate", "up", "down")
    names = {
        f"model.layers.{layer}.{family.files.format(expert, part)}": (number, expert)
        for number, layer in enumerate(family.moe)
        for expert in range(EXPERTS)
        for part in parts
    }
    for rules in ("auto", "modules"):
        found = build_expert_map(shapes, rules)
        assert found.experts == (EXPERTS,) * len(family.moe)
        assert {fqn: (e.layer, e.expert) for fqn, e in found.entries.items()} == names
        assert not any(entry.stacked for entry in found.entries.values())
        assert [fqn for fqn in found.entries if "shared" in fqn] == []
    with pytest.raises(ExpertRuleError, match="no parameter is a routed expert"):
        build_expert_map(shapes, "transformers")


# ----------------------------------------------------------------------------------------- tokens


@each_family
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "ac", "ac-reentrant"])
def test_every_token_counts_top_k_times(family: Family, reentrant: bool | None) -> None:
    model: Any = family.make()
    if reentrant is not None:
        renamed = getattr(model, "activation_checkpointing_enable", None)
        (renamed or model.gradient_checkpointing_enable)({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    counter = TokenCounter(model, family.layers, (EXPERTS,) * len(family.layers))
    witness = Witness(model, family.layers)
    expected = torch.zeros(len(family.layers), EXPERTS, dtype=torch.int64)
    for step in (1, 2):
        ids = tokens_of(step)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        assert witness.calls() == len(family.layers)
        now = witness.take()
        assert now.sum(1).tolist() == [BATCH * LENGTH * TOP_K] * len(family.layers)
        expected += now
        loss.backward()
        assert witness.calls() == (0 if reentrant is None else len(family.layers))
        if reentrant is not None:
            witness.take()
        assert torch.equal(counter.counts(), expected)
    model.eval()
    with torch.no_grad():
        model(input_ids=tokens_of(3), use_cache=False)
    assert torch.equal(counter.counts(), expected)
    assert counter.missing == ()
    counter.close()


# --------------------------------------------------------------------------------- save, restore


def made(family: Family, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """A model whose correction biases, where it has them, stay float32 as in published runs."""
    model = family.make(seed).to(dtype)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = buffer.data.float()
    return model


def expert_rows(family: Family, state: dict[str, Tensor]) -> Iterator[tuple[str, int, Tensor]]:
    """Weights and moments: (name, MoE layer, tensor with a row per expert)."""
    for number, layer in enumerate(family.layers):
        for part in family.bank:
            for suffix in ("", *(f"/{moment}" for moment in MOMENTS)):
                name = f"{layer}.experts.{part}{suffix}"
                yield name, number, state[name]


CASES = [(family, torch.float32) for family in FAMILIES]
CASES += [
    (family, torch.bfloat16) for family in FAMILIES if family.name in ("DeepseekV3", "GptOss")
]


@pytest.mark.parametrize(
    ("family", "dtype"), CASES, ids=[f"{family.name}-{str(d)[6:]}" for family, d in CASES]
)
def test_one_expert_per_save(managers: Managers, family: Family, dtype: torch.dtype) -> None:
    last, count = 4, len(family.layers)
    model = made(family, dtype)
    optimizer = adamw(model)
    witness = Witness(model, family.layers)
    policy = moc.Policy(
        snapshot_every=1, persist_every=1, k_snapshot=1, k_persist=1, keep_latest_k=None
    )
    states: dict[int, dict[str, Tensor]] = {}
    routed = {0: torch.zeros(count, EXPERTS, dtype=torch.int64)}
    with managers(model, optimizer, policy=policy) as manager:
        for step in range(1, last + 1):
            train(model, optimizer, step)
            states[step] = state_of(model, optimizer)
            routed[step] = routed[step - 1] + witness.take()
            manager.step(step)
            manager.wait()
    assert routed[last].sum() == last * count * BATCH * LENGTH * TOP_K

    # what the files hold
    one = sum(map(nbytes_of_rows(dtype), family.routed.values()))
    for step in range(1, last + 1):
        check_files(managers.run, step, one if step > 1 else one * EXPERTS, dtype)
    manifest = load_manifest(LocalStore(managers.run), version_of(managers.run, last))
    assert manifest.head.layers == list(family.layers)
    assert manifest.head.routed == routed[last].tolist()
    ages = [[version.step for version in row] for row in manifest.versions]
    assert [sorted(row) for row in ages] == [[1] * (EXPERTS - 3) + [2, 3, 4]] * count
    pieces = stored(managers.run, last)
    check_pieces(family, pieces, states, ages)
    biases = [BIAS.format(layer) for layer in family.moe if family.name == "DeepseekV3"]
    for name in biases:
        kept = whole(pieces, name, "buffer")
        assert kept.dtype == torch.float32
        assert same_bytes(kept, states[last][name])
        assert kept.abs().sum() > 0

    # what comes back
    again = made(family, dtype, seed=1)
    fresh = adamw(again)
    report = managers(
        again, fresh, policy=policy, memory_dir=managers.memory_dir / "another"
    ).restore()
    assert report is not None
    assert report.step == last
    assert report.stale_experts == count * (EXPERTS - 1)
    assert report.lost_tokens == sum(
        int(routed[last][layer, expert] - routed[ages[layer][expert]][layer, expert])
        for layer in range(count)
        for expert in range(EXPERTS)
    )
    expected = dict(states[last])
    for name, layer, now in expert_rows(family, expected):
        expected[name] = torch.stack(
            [
                rescaled(states[ages[layer][e]][name][e], name, ages[layer][e], last, optimizer)
                for e in range(len(now))
            ]
        )
    back = state_of(again, fresh)
    assert_equal(back, expected)
    assert all(back[name].dtype == torch.float32 for name in biases)
    train(again, fresh, last + 1)


def nbytes_of_rows(dtype: torch.dtype) -> Callable[[tuple[int, ...]], int]:
    """Bytes of one expert's weight and moments, by the shape of its row."""
    return lambda row: torch.Size(row).numel() * dtype.itemsize * (1 + len(MOMENTS))


def check_files(run: Path, step: int, expert_bytes: int, dtype: torch.dtype) -> None:
    """The step's own files have these bytes of experts, and none that no piece accounts for."""
    manifest = load_manifest(LocalStore(run), version_of(run, step))
    found = 0
    for index, info in enumerate(manifest.files):
        if not info.key.startswith(f"step-{step:08d}-"):
            continue
        pieces = [r.piece for r in (*manifest.dense, *manifest.experts) if r.file == index]
        rows = [p for p in pieces if p.is_expert and p.part in ("weight", *MOMENTS)]
        found += sum(piece.nbytes for piece in rows)
        assert {piece.dtype for piece in rows} <= {"F32" if dtype == torch.float32 else "BF16"}
        with (run / info.key).open("rb") as file:
            head = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(head))
        padding = sum(
            entry["data_offsets"][1] - entry["data_offsets"][0]
            for name, entry in header.items()
            if name.startswith("__pad__")
        )
        whole_bytes = 8 + head + padding + sum(piece.nbytes for piece in pieces)
        assert (run / info.key).stat().st_size == info.nbytes == whole_bytes
    assert found == expert_bytes


def check_pieces(
    family: Family,
    pieces: dict[str, Tensor],
    states: dict[int, dict[str, Tensor]],
    ages: list[list[int]],
) -> None:
    """Every value is there: experts row by row of their own step, everything else of the last."""
    newest = states[max(states)]
    seen = set()
    for name, value in pieces.items():
        fqn, part, box = name.split("|")
        offsets, sizes = ([int(n) for n in side.split(",") if n] for side in box.split(":"))
        key = fqn if part in ("weight", "buffer") else f"{fqn}/{part}"
        if key not in newest:
            assert ".experts." not in fqn or part == "step@expert", name
            continue
        seen.add(key)
        step = max(states)
        if fqn in family.routed and part != "step":
            assert (sizes[0], *sizes[1:]) == (1, *family.routed[fqn]), name
            layer = [fqn.startswith(f"{at}.") for at in family.layers].index(True)
            step = ages[layer][offsets[0]]
        was = states[step][key][tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
        assert same_bytes(value, was), name
    tied = {"lm_head.weight"} if dict(family.options).get("tie_word_embeddings") else set()
    assert newest.keys() - seen == tied


def rescaled(
    row: Tensor, name: str, step: int, shared: int, optimizer: torch.optim.Optimizer
) -> Tensor:
    """Weights as they were; moments fitted to the `step` that a stacked parameter shares."""
    _, _, moment = name.partition("/")
    if not moment or step == shared:
        return row
    beta = optimizer.param_groups[0]["betas"][MOMENTS.index(moment)]
    return row.clone().mul_((1 - beta**shared) / (1 - beta**step))


def test_a_correction_bias_of_another_dtype_is_refused(managers: Managers) -> None:
    family = next(family for family in FAMILIES if family.name == "DeepseekV3")
    model = made(family, torch.bfloat16)
    optimizer = adamw(model)
    with managers(model, optimizer) as manager:
        train(model, optimizer, 1)
        manager.step(1)
    again = family.make(1).to(torch.bfloat16)
    with pytest.raises(MismatchError, match=r"e_score_correction_bias"):
        managers(again, adamw(again)).restore()
