"""The arguments that torch's loader does not have, checked at construction."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler

from unbroken import options
from unbroken.epochs import epoch_holders
from unbroken.options import check_options, distributed_rank, say_once
from unbroken.ordering import WatchedBatchSampler
from unbroken.sampling import Share

DEFAULTS: dict[str, Any] = {
    "batch_sampler": None, "batch_size": 1, "shuffle": None, "num_workers": 0, "dataset": range(4),
    "sampler": None, "generator": None, "snapshot_every_n_steps": None, "seed": None, "seed_by": "batch",
    "lanes": None, "dp_rank": None, "dp_world_size": None, "group": None, "mesh": None, "resume": "checked",
    "save_prefetched": False, "worker_restarts": 3, "at_end": "stop", "in_order": True,
    "lineage": False, "on_timeout": "raise", "on_error": "raise", "max_skipped": None, "max_prefetch_bytes": None,
    "timeout": 0, "multiprocessing_context": None, "worker_init_fn": None,
}  # fmt: skip


def checked(**given: Any) -> options.Options:
    return check_options({**DEFAULTS, **given})


def mesh(ndim: int = 1, rank: int = 1, size: int = 4) -> Any:
    names = ("dp", "tp")[:ndim]
    return SimpleNamespace(
        ndim=ndim, mesh_dim_names=names, get_local_rank=lambda: rank, size=lambda: size, get_group=lambda: GROUP
    )


GROUP = SimpleNamespace(rank=lambda: 1, size=lambda: 4)
ONE = SimpleNamespace(rank=lambda: 0, size=lambda: 1)


def test_the_defaults_ask_for_nothing() -> None:
    found = checked()
    assert (found.seed, found.lanes, found.share, found.sharded, found.seeded) == (None, None, Share(), False, False)
    assert (found.seed_by, found.resume, found.capture_every) == ("batch", "checked", None)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"at_end": "drop"}, ValueError, "at_end must be one of 'stop', 'pad', 'repeat', but got at_end='drop'."),
        ({"group": "dp"}, TypeError, "group must be a process group of torch.distributed that this process is in, but"),
        ({"group": -100}, TypeError, "group must be a process group of torch.distributed that this process is in, but"),
        (
            {"group": GROUP, "dp_rank": 1, "dp_world_size": 2},
            ValueError,
            "In the group this is rank 1 of 4, but it was",
        ),
        ({"group": GROUP, "mesh": mesh(rank=2)}, ValueError, "In the group this is rank 1 of 4, but it was said to be"),
        ({"at_end": "pad", "dp_rank": 0, "dp_world_size": 2}, ValueError, 'at_end="pad" on 2 ranks needs to know when'),
        ({"seed_by": "rows"}, ValueError, "seed_by must be one of 'batch', 'sample', but got seed_by='rows'."),
        ({"resume": True}, ValueError, "resume must be one of 'checked', 'trust', 'replay', but got resume=True."),
        ({"snapshot_every_n_steps": 0}, ValueError, "snapshot_every_n_steps must be at least 1, but got"),
        ({"snapshot_every_n_steps": 1.0}, TypeError, "snapshot_every_n_steps must be a whole number, but got"),
        ({"snapshot_every_n_steps": True}, TypeError, "snapshot_every_n_steps must be a whole number, but got"),
        ({"worker_restarts": -1}, ValueError, "worker_restarts must be at least 0, but got worker_restarts=-1."),
        ({"max_prefetch_bytes": 9, "save_prefetched": True}, ValueError, "max_prefetch_bytes does not go with save_"),
        ({"max_prefetch_bytes": 0}, ValueError, "max_prefetch_bytes must be at least 1, but got max_prefetch_bytes=0."),
        ({"max_prefetch_bytes": 1e9}, TypeError, "max_prefetch_bytes must be a whole number, but got max_prefetch_"),
        ({"worker_restarts": "3"}, TypeError, "worker_restarts must be a whole number, but got worker_restarts='3'."),
        ({"lanes": 0}, ValueError, "lanes must be at least 1, but got lanes=0."),
        ({"lanes": 2.5}, TypeError, "lanes must be a whole number, but got lanes=2.5."),
        ({"seed": "7"}, TypeError, "seed must be a whole number, but got seed='7'."),
        ({"seed": 1.0}, TypeError, "seed must be a whole number, but got seed=1.0."),
        ({"seed": True}, TypeError, "seed must be a whole number, but got seed=True."),
        ({"seed": 1, "generator": torch.Generator()}, ValueError, "seed and generator both say where random numbers"),
        ({"dp_rank": 1}, ValueError, "dp_rank and dp_world_size go together, but got dp_rank=1, dp_world_size=None."),
        ({"dp_world_size": 2}, ValueError, "dp_rank and dp_world_size go together, but got dp_rank=None, dp_world_s"),
        ({"dp_rank": 2, "dp_world_size": 2}, ValueError, "dp_rank must be below dp_world_size, but got dp_rank=2, dp_"),
        ({"dp_rank": -1, "dp_world_size": 2}, ValueError, "dp_rank must be at least 0, but got dp_rank=-1."),
        ({"dp_rank": 0, "dp_world_size": 0}, ValueError, "dp_world_size must be at least 1, but got dp_world_size=0."),
        ({"dp_rank": 0.0, "dp_world_size": 2}, TypeError, "dp_rank must be a whole number, but got dp_rank=0.0."),
        (
            {"mesh": mesh(), "dp_rank": 0, "dp_world_size": 2},
            ValueError,
            "mesh and dp_rank/dp_world_size both name the",
        ),
        (
            {"mesh": mesh(ndim=2)},
            ValueError,
            "mesh must have one dimension, the data-parallel one, but has ('dp', 'tp')",
        ),
    ],
)
def test_a_wrong_argument_is_refused_with_what_was_found_and_what_is_expected(
    given: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        checked(**given)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63, 2**64 - 1])
def test_any_whole_number_is_a_seed(seed: int) -> None:
    found = checked(seed=seed)
    assert found.seed == seed
    assert found.seeded


def test_ranks_are_seeded_alike_even_without_a_seed() -> None:
    found = checked(dp_rank=1, dp_world_size=2)
    assert (found.share, found.sharded, found.seeded, found.seed) == (Share(1, 2), True, True, None)


def test_a_mesh_of_one_dimension_names_the_rank() -> None:
    found = checked(mesh=mesh(rank=3, size=8))
    assert (found.share, found.sharded) == (Share(3, 8), True)


@pytest.mark.parametrize(
    ("given", "group"),
    [
        ({"group": GROUP}, GROUP),
        ({"group": GROUP, "dp_rank": 1, "dp_world_size": 4}, GROUP),
        ({"mesh": mesh()}, GROUP),
        ({"mesh": mesh(rank=0, size=1)}, None),
    ],
    ids=["group", "ranks too", "mesh", "mesh of one"],
)
def test_a_group_names_the_rank_and_a_mesh_brings_its_own(given: dict[str, Any], group: Any) -> None:
    found = checked(**given)
    assert (found.share, found.sharded) == (Share(1, 4) if group else Share(0, 1), True)
    assert found.group is group


def test_a_group_of_the_same_ranks_may_take_the_place_of_the_mesh_s() -> None:
    """One of gloo, say, where that of the mesh would send its votes through the accelerator."""
    other = SimpleNamespace(rank=lambda: 1, size=lambda: 4)
    assert checked(mesh=mesh(), group=other).group is other


@pytest.mark.parametrize("at_end", ["stop", "pad", "repeat"])
def test_ranks_end_alone_where_there_is_nobody_to_agree_with(at_end: str) -> None:
    assert checked(at_end=at_end, group=GROUP).ends == at_end
    alone = "repeat" if at_end == "repeat" else "alone"  # for which nobody has to agree
    assert checked(at_end=at_end).ends == alone
    assert checked(at_end=at_end, group=ONE).ends == alone
    assert checked(at_end=at_end, dp_rank=0, dp_world_size=1).ends == alone
    if at_end != "pad":
        assert checked(at_end=at_end, dp_rank=0, dp_world_size=2).ends == alone


# A DistributedSampler


def sampler(rank: int = 1, world: int = 4) -> DistributedSampler[int]:
    return DistributedSampler(range(8), world, rank)


@pytest.mark.parametrize(
    "given",
    [{"sampler": sampler()}, {"batch_sampler": BatchSampler(sampler(), 2, False)}],
    ids=["sampler", "in a batch sampler"],
)
def test_the_rank_of_a_distributed_sampler_is_adopted(given: dict[str, Any]) -> None:
    """Case 19."""
    found = checked(**given)
    assert (found.share, found.sharded) == (Share(1, 4), True)


@pytest.mark.parametrize(
    "given",
    [{"sampler": sampler()}, {"batch_sampler": BatchSampler(sampler(), 2, False)}],
    ids=["sampler", "in a batch sampler"],
)
@pytest.mark.parametrize("other", [{"dp_rank": 1, "dp_world_size": 2}, {"mesh": mesh(rank=0)}], ids=["dp", "mesh"])
def test_a_distributed_sampler_of_another_rank_is_refused(given: dict[str, Any], other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"is for rank 1 of 4, but dp_rank=. and dp_world_size=. were given"):
        checked(**given, **other)


def test_a_distributed_sampler_of_the_same_rank_is_no_contradiction() -> None:
    assert checked(sampler=sampler(), dp_rank=1, dp_world_size=4).share == Share(1, 4)
    assert checked(sampler=sampler(), group=GROUP).share == Share(1, 4)


def test_a_distributed_sampler_of_another_rank_than_the_group_s_is_refused() -> None:
    with pytest.raises(ValueError, match="In the group this is rank 1 of 4, but it was said to be dp rank 2 of 4"):
        checked(sampler=sampler(rank=2), group=GROUP)


def test_a_sampler_that_shares_out_rows_in_its_own_way_has_no_group() -> None:
    class Own(DistributedSampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(ValueError, match="shares out the rows itself"):
        checked(sampler=Own(range(8), 4, 1), group=GROUP)


# What is said once


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(options, "_said", set())
    yield


def test_what_is_no_fault_is_said_once_through_the_logger(caplog: pytest.LogCaptureFixture) -> None:
    for text in ("one", "other", "one"):
        say_once(text)
    assert [(r.name, r.levelno, r.getMessage()) for r in caplog.records] == [
        ("unbroken", logging.WARNING, "one"),
        ("unbroken", logging.WARNING, "other"),
    ]


def test_a_text_with_percent_signs_is_said_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    say_once("100 % of %s")
    assert caplog.messages == ["100 % of %s"]


# Ranks and epochs of others


def test_without_torch_distributed_there_is_one_rank() -> None:
    assert distributed_rank() == (0, 1)


def test_the_rank_is_torchs_where_it_is_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"is_available": True, "is_initialized": True, "get_rank": 3, "get_world_size": 8}.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    assert distributed_rank() == (3, 8)


class Counts:
    epoch = 2

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_objects_that_count_epochs_are_found_by_what_they_are() -> None:
    outer, inner, dataset = Counts(), Counts(), Counts()
    outer.sampler = inner  # type: ignore[attr-defined]

    def found(**parts: Any) -> dict[str, Any]:
        return epoch_holders(SimpleNamespace(**{"sampler": None, "batch_sampler": None, "dataset": None, **parts}))

    assert found() == {}
    assert found(dataset=dataset) == {"dataset": dataset}
    assert found(sampler=inner)["sampler"] is inner
    assert found(batch_sampler=SimpleNamespace(sampler=inner))["sampler"] is inner


@pytest.mark.parametrize("epoch", [None, "0", 1.0, True])
def test_an_epoch_that_is_no_whole_number_is_not_ours_to_keep(epoch: Any) -> None:
    holder = Counts()
    holder.epoch = epoch
    assert epoch_holders(SimpleNamespace(sampler=None, batch_sampler=None, dataset=holder)) == {}


# The batch sampler that is watched


def test_a_watched_batch_sampler_is_torchs_and_warns_when_it_is_iterated() -> None:
    watched = WatchedBatchSampler(SequentialSampler(range(5)), 2, False)
    assert isinstance(watched, BatchSampler)
    assert (len(watched), watched.batch_size, watched.drop_last) == (3, 2, False)
    with pytest.warns(UserWarning, match=r"is iterated by something else: has a trainer rebuilt the\s+loader"):
        batches = list(watched)
    assert batches == [[0, 1], [2, 3], [4]]
