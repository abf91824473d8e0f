"""GaLore's and APOLLO's AdamW against their packages, and which weights they project."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from prepared import run_step
from small_graphs import Builder
from test_optimizers import SCALAR, place

from staticmem.devices.kernels import KernelWorkspaces
from staticmem.eager.context import Eager
from staticmem.eager.reasons import Reason
from staticmem.engine import optimizers
from staticmem.errors import UsageError
from staticmem.ir import dtypes
from staticmem.ir.graph import Graph
from staticmem.ops.linear import SVD
from staticmem.passes.requested.parameters import projected_weights, weights_of_linear
from staticmem.scenario.optimizers import APOLLO, GALORE, REFUSED, LowRank, low_rank_of
from staticmem.scenario.request import Request, request_of
from staticmem.scenario.step import Scenario

DATA = json.loads((Path(__file__).parents[1] / "data" / "measured" / "low-rank.json").read_text())
SHAPES = tuple(map(tuple, DATA["shapes"]))
CASES: list[dict[str, Any]] = DATA["cases"]
IDS = [f"{case['optimizer']} {case['args']} {case['dtype']}" for case in CASES]


def made(case: dict[str, Any]) -> tuple[Eager, Any]:
    """The optimizer of a case, over parameters of `SHAPES`."""
    e = Eager()
    e.trace.begin("setup")
    asked = low_rank_of(case["optimizer"], case["args"], ("all-linear",))
    parameters = place(e, SHAPES, dtypes.parse(case["dtype"]) or dtypes.float32)
    targets = {id(parameters[k]) for k in DATA["projected"]}
    return e, optimizers.make(
        e, Scenario(mode="train", optimizer=case["optimizer"], low_rank=asked), parameters, targets
    )


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_step_makes_what_the_package_makes(case: dict[str, Any]) -> None:
    """A new projection is counted until the function that makes it returns: from then on it takes the place of the old
    one."""
    e, optimizer = made(case)
    first = len(e.trace.buffers)
    e.trace.begin("optimizer")
    optimizer.step()
    buffers = [b for b in e.trace.buffers[first:] if b.nbytes > SCALAR]
    assert all(b.died is not None for b in buffers)
    steps = [
        [b.nbytes, sum(o.nbytes for o in buffers if o.born <= b.born and (o.died is None or o.died > b.born))]
        for b in buffers
    ]
    assert steps == case["steps"]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_states_are_those_of_the_package(case: dict[str, Any]) -> None:
    e, optimizer = made(case)
    optimizer.make_state()
    found: list[dict[str, int]] = [{} for _ in SHAPES]
    for hold in e.trace.holds:
        if hold.kind is Reason.OPTIMIZER:
            buffer = e.trace.buffers[hold.buffer]
            states = found[int(hold.who[1:])]
            key = buffer.name.split(".")[-1]
            states[key] = states.get(key, 0) + buffer.nbytes
    assert found == case["states"]


def test_offloaded_states_leave_nothing() -> None:
    e = Eager()
    e.trace.begin("setup")
    scenario = Scenario(mode="train", optimizer=GALORE, low_rank=LowRank(("x",)), offload_optimizer=True)
    parameters = place(e, SHAPES)
    optimizer = optimizers.make(e, scenario, parameters, {id(parameters[0])})
    before = len(e.trace.buffers)
    optimizer.make_state()
    optimizer.step()
    assert len(e.trace.buffers) == before


# -- which weights -------------------------------------------------------------------------------------------------


def network() -> Graph:
    """An embedding tied to the head, an attention and an MLP of nn.Linear, and a module of its own with a product."""
    b = Builder()
    ids = b.input("ids", 4, 8, dtype=dtypes.int64)
    table = b.parameter("embed.weight", 50, 16)
    b.within("embed:torch.nn.modules.sparse.Embedding")
    x = b.call("embedding", table, ids)
    for path in ("layers.0.attn.q", "layers.0.mlp.up"):
        b.within(f"{path.rpartition('.')[0]}:my.Part", f"{path}:torch.nn.modules.linear.Linear")
        x = b.call("linear", x, b.parameter(f"{path}.weight", 16, 16), b.parameter(f"{path}.bias", 16))
    b.within("own:my.Gate")
    x = b.call("linear", x, b.parameter("own.weight", 16, 16))
    b.within("head:torch.nn.modules.linear.Linear")
    return b.graph(b.call("linear", x, table, name="logits"))


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        (("all-linear",), {"layers.0.attn.q", "layers.0.mlp.up"}),
        (("all_linear",), {"layers.0.attn.q", "layers.0.mlp.up"}),
        (("attn",), {"layers.0.attn.q"}), (("attn", "mlp"), {"layers.0.attn.q", "layers.0.mlp.up"}),
        ((r".*\.up",), {"layers.0.mlp.up"}), (("layers.0.mlp.up",), {"layers.0.mlp.up"}),
    ],
)  # fmt: skip
def test_targets(targets: tuple[str, ...], found: set[str]) -> None:
    assert projected_weights(network(), LowRank(targets)) == {f"{path}.weight" for path in found}


def test_a_tied_head_and_own_modules_are_no_linear_layers() -> None:
    assert set(weights_of_linear(network()).values()) == {"layers.0.attn.q", "layers.0.mlp.up"}


@pytest.mark.parametrize(("targets", "code"), [(("nope",), "SM161"), (("embed",), "SM161"), (("(",), "SM162")])
def test_targets_that_are_none(targets: tuple[str, ...], code: str) -> None:
    with pytest.raises(UsageError) as caught:
        projected_weights(network(), LowRank(targets))
    assert caught.value.code == code


def test_a_step_of_a_model_says_what_is_projected() -> None:
    asked = low_rank_of(GALORE, "rank=4,update_proj_gap=51", ("mlp",))
    result = run_step(network(), Scenario(mode="train", optimizer=GALORE, low_rank=asked))
    text = next(note.text for note in result.notes if note.code == "SM217")
    assert text.startswith("gradients of 1 weight of linear layers")
    assert "rank 4" in text
    assert "every 51st" in text
    # U, the singular values and Vh of 16 x 16, the diagonal of 4 x 4, and U's part times it
    assert f"{4 * (2 * 256 + 16 + 16 + 64) / 1024:.2f} KiB" in text
    states = {b.name: b.shape for b in result.trace.buffers if b.category == "optimizer_state"}
    assert states["layers.0.mlp.up.weight.exp_avg"] == (16, 4)
    assert states["layers.0.mlp.up.weight.ortho_matrix"] == (16, 16)  # a view of all of Vh
    assert states["layers.0.attn.q.weight.exp_avg"] == (16, 16)


def test_the_decomposition_copies_the_matrix_on_the_card() -> None:
    asked = low_rank_of(GALORE, "", ("mlp",))
    result = run_step(network(), Scenario(mode="train", optimizer=GALORE, low_rank=asked))
    trace = result.trace
    (kernel,) = [k for k, kernel in enumerate(trace.kernels) if kernel.name == SVD]
    (copy,) = KernelWorkspaces(trace).workspaces(kernel)
    assert copy.nbytes == 16 * 16 * 4


# -- what is asked -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["galore_adamw", "apollo_adamw"])
def test_words_of_transformers(name: str) -> None:
    asked = request_of(
        {"optimizer": name, "optim_target_modules": "attn", "optim_args": {"rank": 64, "update_proj_gap": 100}}
    )
    scenario, _ = asked.scenario()
    assert scenario.low_rank is not None
    assert (scenario.low_rank.targets, scenario.low_rank.rank, scenario.low_rank.gap) == (("attn",), 64, 100)
    assert scenario.low_rank.svd == (name == "galore_adamw")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ({"optimizer": GALORE}, "does not know which weights"),
        ({"optimizer": GALORE, "optim_args": "rank=0"}, "rank=0"),
        ({"optimizer": GALORE, "optim_args": "proj=svd"}, "no option of galore-adamw"),
        ({"optimizer": GALORE, "optim_args": "proj_type=up"}, "proj_type=up"),
        ({"optimizer": GALORE, "optim_args": "scale=much"}, "scale=much"),
        ({"optimizer": APOLLO, "optim_args": "proj_type=left"}, "proj_type=left"),
        ({"optimizer": APOLLO, "optim_args": "proj_type=full,scale_type=tensor"}, "proj_type=full"),
        ({"optimizer": "adamw"}, "does not apply to adamw"),
        ({"optimizer": GALORE, "optimizer_impl": "fused"}, "no fused implementation"),
        ({"optimizer": GALORE, "lora": "r=8,targets=q"}, "cannot be combined"),
        ({"optimizer": APOLLO, "parallel": "fsdp", "devices": 2}, "cannot be combined"),
        *(({"optimizer": name}, "is not covered") for name in REFUSED),
    ],
)  # fmt: skip
def test_what_is_refused(words: dict[str, Any], what: str) -> None:
    targets = () if what == "does not know which weights" else ("all-linear",)
    with pytest.raises(UsageError, match=what):
        Request(optim_target_modules=targets, **words).scenario()


def test_an_inference_has_none_of_it() -> None:
    """They are options of the optimizer, so an inference does not have them."""
    scenario, _ = Request(mode="infer", optimizer=GALORE, optim_target_modules="attn").scenario()
    assert scenario.low_rank is None


def test_a_random_projection_is_not_recomputed_from_singular_values() -> None:
    asked = low_rank_of(APOLLO, "rank=4", ("mlp",))
    result = run_step(network(), Scenario(mode="train", optimizer=APOLLO, low_rank=asked))
    assert not any(kernel.name == SVD for kernel in result.trace.kernels)
    states = {b.name: b.shape for b in result.trace.buffers if b.category == "optimizer_state"}
    assert states["layers.0.mlp.up.weight.ortho_matrix"] == (4, 16)
    assert states["layers.0.mlp.up.weight.scaled_grad"] == ()
