"""The same global batches for any number of ranks, exact resume, nothing repeated within an epoch."""

import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tagc.data import Tokens, TrainLoader, validation_batch
from tagc.data.loader import permute_indices
from tagc.errors import UserError
from tests.data.conftest import write_raw


@pytest.fixture(scope="module")
def make_tokens(tmp_path_factory):
    """Tokens ``0 .. n-1``, so that a row's first token is its position."""

    def make(count: int, fingerprint: str = "") -> Tokens:
        return Tokens([write_raw(tmp_path_factory.mktemp("tokens") / "train.bin", range(count))], fingerprint)

    return make


def take(loader: TrainLoader, steps: int):
    return list(itertools.islice(loader, steps))


@given(size=st.integers(1, 700), keys=st.lists(st.integers(0, 2**64 - 1), min_size=4, max_size=6))
def test_permutation_is_a_bijection(size, keys):
    result = permute_indices(np.arange(size), size, np.array(keys, dtype=np.uint64))
    assert sorted(result.tolist()) == list(range(size))


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("count", [10, 1000])  # 10: one batch covers several epochs
def test_same_global_batch_at_any_ranks(make_tokens, count, steps):
    tokens, runs = make_tokens(count), {}
    for ranks in (1, 2, 3, 4):
        parts = [take(TrainLoader(tokens, 4, 12, rank, ranks, seed=3), steps)[-1] for rank in range(ranks)]
        runs[ranks] = tuple(torch.cat([batch[i] for batch, _ in parts]) for i in (0, 1))
        assert all(state == parts[0][1] for _, state in parts)
        assert parts[0][0][0].shape == (12 // ranks, 4)
    for ranks in (2, 3, 4):
        assert torch.equal(runs[ranks][0], runs[1][0])
        assert torch.equal(runs[ranks][1], runs[1][1])


def test_targets_are_the_next_tokens(make_tokens):
    ((inputs, targets), _), *_ = take(TrainLoader(make_tokens(500), 8, 6, 0, 1, seed=0), 1)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous() and targets.is_contiguous()
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs - inputs[:, :1], torch.arange(8).expand(6, 8))


@pytest.mark.parametrize(("count", "context"), [(500, 8), (17, 8), (9, 8), (40, 1), (25, 8)])
def test_epochs_visit_every_window_once(make_tokens, count, context):
    loader = TrainLoader(make_tokens(count), context, 1, 0, 1, seed=5)
    epochs = []
    for _ in range(3):
        starts = [int(batch[0][0, 0]) for batch, _ in take(loader, loader.windows)]
        assert np.diff(sorted(starts)).tolist() == [context] * (loader.windows - 1)
        epochs.append(starts)
    if loader.windows > 8:
        assert epochs[0] != epochs[1] != epochs[2]
        assert epochs[0] != sorted(epochs[0])
    missed = (count - 1) // context - loader.windows
    assert missed <= 1  # the price of an offset that differs per epoch


def test_offset_moves_between_epochs(make_tokens):
    loader = TrainLoader(make_tokens(500), 8, 1, 0, 1, seed=5)
    offsets = {min(int(b[0][0, 0]) for b, _ in take(loader, loader.windows)) for _ in range(20)}
    assert len(offsets) > 4 and max(offsets) < 8


def test_order_looks_random(make_tokens):
    """No correlation between neighbours in the order (0.12 is 3 standard deviations at 598 windows)."""
    loader = TrainLoader(make_tokens(3000), 5, 598, 0, 1, seed=1)
    assert loader.windows == 598
    starts = take(loader, 1)[0][0][0][:, 0].double()
    assert abs(np.corrcoef(starts[:-1], starts[1:])[0, 1]) < 0.12
    assert abs(np.corrcoef(starts, np.arange(len(starts)))[0, 1]) < 0.12


def test_seeds_differ_and_repeat(make_tokens):
    tokens = make_tokens(2000)
    first = [take(TrainLoader(tokens, 8, 4, 0, 1, seed), 1)[0][0][0] for seed in (0, 1, 2**63, 0)]
    assert torch.equal(first[0], first[3])
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[0], first[2])


@pytest.mark.parametrize("new_ranks", [1, 3])
def test_resume_is_exact(make_tokens, new_ranks):
    tokens = make_tokens(300)
    whole = take(TrainLoader(tokens, 8, 6, 0, 1, seed=1), 20)
    state = json.loads(json.dumps(whole[11][1]))
    parts = []
    for rank in range(new_ranks):
        loader = TrainLoader(tokens, 8, 6, rank, new_ranks, seed=1)
        loader.load_state(state)
        parts.append(take(loader, 8))
    for step in range(8):
        assert torch.equal(torch.cat([part[step][0][0] for part in parts]), whole[12 + step][0][0])
        assert parts[0][step][1] == whole[12 + step][1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 2}, "seed=2"),
        ({"context": 4}, "context=4"),
        ({"global_batch": 5}, "global_batch=5"),
        ({"fingerprint": "other"}, "fingerprint='other'"),
        ({"tokens": 1}, "tokens=1"),
        ({"surplus": 1}, "surplus=1"),
        ({"step": -1}, "damaged"),
        ({"step": "3"}, "damaged"),
        ({"step": True}, "damaged"),
    ],
)
def test_foreign_state_is_refused(make_tokens, change, message):
    loader = TrainLoader(make_tokens(300, "print"), 8, 6, 0, 1, seed=1)
    _, state = take(loader, 1)[0]
    with pytest.raises(UserError, match=message):
        loader.load_state({**state, **change})
    with pytest.raises(UserError, match="damaged"):
        loader.load_state([])
    assert take(loader, 1)[0][1]["step"] == 2  # a refused state changes nothing


def test_context_longer_than_the_data(make_tokens):
    tokens = make_tokens(8)
    with pytest.raises(UserError, match=r"model\.context=8 .*train\.bin holds 8 tokens"):
        TrainLoader(tokens, 8, 2, 0, 1, seed=0)
    assert take(TrainLoader(tokens, 7, 2, 0, 1, seed=0), 1)[0][0][0].tolist() == [list(range(7))] * 2


@pytest.mark.parametrize(("global_batch", "rank", "ranks"), [(5, 0, 2), (4, 2, 2), (4, -1, 2)])
def test_ranks_that_cannot_share(make_tokens, global_batch, rank, ranks):
    with pytest.raises(UserError, match=r"trainer\.global_batch"):
        TrainLoader(make_tokens(100), 8, global_batch, rank, ranks, seed=0)


@given(context=st.integers(1, 12), sequences=st.integers(1, 70), extra=st.integers(0, 50))
def test_validation_is_spread_without_overlap(make_tokens_cached, context, sequences, extra):
    tokens = make_tokens_cached(sequences * context + 1 + extra)
    inputs, targets = validation_batch(tokens, context, sequences)
    starts = inputs[:, 0].numpy()
    assert inputs.shape == targets.shape == (sequences, context)
    assert torch.equal(targets, inputs + 1)
    assert (np.diff(starts) >= context).all() and starts[0] == 0
    if sequences > 1:
        assert targets[-1, -1] == len(tokens) - 1  # up to the very end
        assert np.ptp(np.diff(starts)) <= 1
    again = validation_batch(tokens, context, sequences)
    assert torch.equal(again[0], inputs)


@pytest.fixture(scope="module")
def make_tokens_cached(make_tokens):
    """As make_tokens, one file per length: hypothesis asks often."""
    made = {}

    def make(count: int) -> Tokens:
        if count not in made:
            made[count] = make_tokens(count)
        return made[count]

    return make


def test_validation_data_too_short(make_tokens):
    with pytest.raises(UserError, match=r"data\.val_sequences=4 of model\.context=8 need 33 .*holds 32"):
        validation_batch(make_tokens(32), 8, 4)
    assert validation_batch(make_tokens(33), 8, 4)[0].shape == (4, 8)
