"""lhc, tagc and tagc2 as arithmetic: nothing is lost, bytes are as computed, overload is handled."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tagc.codec.hashing import plan_layout
from tests.compressors.simulate import adapt, integer_gradients, make_compressors, run_step, total_residual


@settings(max_examples=40, deadline=None)
@given(
    ranks=st.integers(2, 4),
    numel=st.sampled_from([1, 31, 33, 257, 5003]),
    sparsity=st.sampled_from([0.0, 0.5, 0.8, 0.99]),
    ratio=st.sampled_from([0.7, 2.0, 6.0]),
    threshold=st.sampled_from(["exact", "sampled", "lognormal"]),
    seed=st.integers(0, 1000),
)
def test_what_is_applied_plus_what_is_kept_is_the_gradient(ranks, numel, sparsity, ratio, threshold, seed):
    """Over three steps, at any load: applied sums + residuals = all gradients. Integers, so the equality is exact."""
    compressors = make_compressors("tagc", ranks, numel, sparsity=sparsity, ratio=ratio, threshold=threshold)
    applied, produced = torch.zeros(ranks, numel), torch.zeros(ranks, numel)
    for step in range(3):
        gradients = integer_gradients(ranks, numel, seed + step)
        sums, _ = run_step(compressors, gradients, step)
        applied, produced = applied + sums, produced + gradients.sum(dim=0)
        assert torch.equal(applied + total_residual(compressors), produced)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sparsity_zero_is_the_dense_sum(ranks):
    compressors = make_compressors("tagc", ranks, 30_001, sparsity=0.0, ratio=0.6)
    gradients = integer_gradients(ranks, 30_001)
    sums, _ = run_step(compressors, gradients, 0)
    assert torch.equal(sums, gradients.sum(dim=0))
    assert not total_residual(compressors).any()


def test_each_rank_keeps_exactly_what_it_does_not_send():
    compressors = make_compressors("tagc", 2, 5003, sparsity=0.8, threshold="exact")
    gradients = integer_gradients(2, 5003)
    run_step(compressors, gradients, 0)
    for rank, compressor in enumerate(compressors):
        residual = torch.cat(list(compressor.residuals().values()), dim=1)
        sent = residual != gradients[rank]
        assert torch.equal(residual[sent], torch.zeros(int(sent.sum())))
        assert abs(sent.float().mean().item() - 0.2) < 0.01


def test_residuals_go_by_parameter_name():
    compressors = make_compressors("tagc", 2, 300, sparsity=0.99)
    gradients = torch.ones(2, 2, 300)
    gradients[..., 200:] = 5.0  # of the second parameter, which is sent
    gradients[..., 203:] = 0.0
    run_step(compressors, gradients, 0)
    residuals = compressors[0].residuals()
    assert {name: tuple(part.shape) for name, part in residuals.items()} == {"first": (2, 200), "second": (2, 100)}
    assert residuals["first"].eq(1).all()
    assert residuals["second"].eq(0).all()


def test_the_residual_comes_back_with_the_next_gradient_and_decays():
    for decay in (1.0, 0.5):
        compressors = make_compressors("tagc", 2, 5003, residual_decay=decay, threshold="exact")
        gradients = integer_gradients(2, 5003)
        run_step(compressors, gradients, 0)
        before = total_residual(compressors)
        sums, _ = run_step(compressors, torch.zeros_like(gradients), 1)
        torch.testing.assert_close(sums + total_residual(compressors), decay * before)


def test_without_error_feedback_the_rest_is_dropped_but_returns_are_not():
    compressors = make_compressors("tagc", 2, 5003, error_feedback=False, threshold="exact")
    run_step(compressors, integer_gradients(2, 5003), 0)
    assert not total_residual(compressors).any()
    overloaded = make_compressors("tagc", 2, 5003, error_feedback=False, sparsity=0.0, ratio=3.0)
    gradients = integer_gradients(2, 5003)
    sums, _ = run_step(overloaded, gradients, 0)
    assert total_residual(overloaded).any()
    assert torch.equal(sums + total_residual(overloaded), gradients.sum(dim=0))


def test_the_owner_s_values_never_travel():
    compressors = make_compressors("tagc", 3, 5003)
    payload = compressors[1].encode(integer_gradients(3, 5003)[1], 0)
    for part in payload.parts:
        assert not part.tensor[1].any()
        assert part.tensor[0].any()
        assert part.tensor[2].any()


def test_estimates_apply_something_for_every_position():
    compressors = make_compressors("lhc", 2, 5003, sparsity=0.0, ratio=3.0, estimate_unresolved=True)
    gradients = integer_gradients(2, 5003)
    sums, _ = run_step(compressors, gradients, 0)
    assert compressors[0].payload.stats.unresolved.item() > 1000
    assert compressors[0].unresolved_positions(compressors[0].payload) is None
    assert not total_residual(compressors).any()
    assert (sums != 0).float().mean() > 0.99


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sent_bytes_equal_the_closed_form(ranks, dtype):
    numel, ratio = 5003, 2.0
    compressors = make_compressors("tagc2", ranks, numel, value_dtype=dtype, ratio=ratio, warmup_steps=1)
    item = 4 if dtype == "float32" else 2
    cells = 3 * math.ceil(numel / (3 * ratio))  # one lane: the shard is small
    expected = [
        (ranks - 1) * numel * item,
        (ranks - 1) * (cells * item + math.ceil(numel / 8)),
    ]
    for step, nbytes in enumerate(expected):
        assert sum(compressors[0].expected_bytes(step).values()) == nbytes
        assert run_step(compressors, integer_gradients(ranks, numel), step)[1] == nbytes


def test_bf16_cells_round_but_conserve_on_average():
    compressors = make_compressors("tagc2", 2, 50_021, value_dtype="bfloat16", sparsity=0.8)
    exact = make_compressors("tagc", 2, 50_021, value_dtype="float32", sparsity=0.8)
    gradients = torch.randn(2, 2, 50_021, generator=torch.Generator().manual_seed(0))
    rounded, reference = run_step(compressors, gradients, 0)[0], run_step(exact, gradients, 0)[0]
    assert torch.equal(rounded != 0, reference != 0)
    error = (rounded - reference).norm() / reference.norm()
    assert 1e-4 < error < 5e-3


def test_a_dense_bf16_step_keeps_its_rounding_in_the_residual():
    compressors = make_compressors("tagc2", 2, 5003, value_dtype="bfloat16", warmup_steps=1)
    gradients = torch.randn(2, 2, 5003)
    sums, _ = run_step(compressors, gradients, 0)
    assert total_residual(compressors).any()
    torch.testing.assert_close(sums + total_residual(compressors), gradients.sum(dim=0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_constant_gradients_are_conserved(value):
    """All zero: nothing to send. All equal: no threshold separates them, so the sketch overloads and returns."""
    compressors = make_compressors("tagc", 2, 5003)
    gradients = torch.full((2, 2, 5003), value)
    sums, _ = run_step(compressors, gradients, 0)
    assert torch.equal(sums + total_residual(compressors), gradients.sum(dim=0))


class TestFallback:
    """When a bucket goes dense, and when it comes back."""

    def test_larger_than_dense_is_never_sketched(self):
        compressor = make_compressors("tagc", 2, 5003, ratio=1.0, dense_fallback=True)[0]
        assert compressor.is_dense(0)
        assert compressor.is_dense(10**9)
        assert "compressor.ratio" in compressor.explain_dense()

    @pytest.mark.parametrize("name", ["lhc", "tagc", "tagc2"])
    @pytest.mark.parametrize("adaptive_ratio", [False, True])
    def test_at_sparsity_0_the_size_is_the_reason(self, name, adaptive_ratio):
        settings = {"ratio": 1.0, "dense_fallback": True, "adaptive_ratio": adaptive_ratio}
        compressor = make_compressors(name, 2, 5003, sparsity=0.0, **settings)[0]
        cells = 3 * math.ceil(5003 / 3)
        reason = compressor.explain_dense()
        assert f"message would be larger ({4 * cells + math.ceil(5003 / 8)} against {4 * 5003} bytes)" in reason
        assert "max_load" not in reason

    def test_hopeless_union_is_never_sketched(self):
        compressor = make_compressors("tagc", 8, 5003, sparsity=0.8, ratio=2.0, dense_fallback=True)[0]
        assert compressor.is_dense(10**9)
        assert "compressor.sparsity" in compressor.explain_dense()

    def test_the_papers_setting_is_sketched(self):
        compressor = make_compressors("tagc", 2, 5003, dense_fallback=True)[0]
        assert not compressor.is_dense(0)
        assert compressor.explain_dense() is None

    def test_measured_overload_goes_dense_and_retries(self):
        compressor = make_compressors("tagc", 2, 5003, dense_fallback=True, retry_steps=3)[0]
        cells = compressor.layout.sketch_numel
        assert adapt(compressor, 0, densest=1000, peers_union=0.7 * cells) is None
        assert not compressor.is_dense(1)
        message = adapt(compressor, 1, densest=1000, peers_union=0.8 * cells)
        assert "0.80" in message
        assert "compressor.max_load" in message
        assert [compressor.is_dense(step) for step in (2, 3, 4, 5)] == [True, True, True, False]
        for step in (2, 3, 4):
            assert adapt(compressor, step, densest=5003, peers_union=math.nan) is None
        assert not compressor.is_dense(5)

    def test_lhc_looks_before_it_sketches(self):
        sparse, dense = (make_compressors("lhc", 2, 5003, sparsity=0.0, dense_fallback=True)[0] for _ in range(2))
        for compressor in (sparse, dense):
            assert compressor.is_dense(0)
        assert adapt(sparse, 0, densest=1000, peers_union=math.nan) is None
        assert not sparse.is_dense(1)
        assert adapt(dense, 0, densest=4000, peers_union=math.nan) is not None
        assert dense.is_dense(1)
        assert adapt(dense, 50, densest=4000, peers_union=math.nan) is None, "a failed retry is not news"
        assert dense.is_dense(51)

    def test_lhc_looks_on_the_last_warm_up_step(self):
        compressor = make_compressors("lhc", 2, 5003, sparsity=0.0, dense_fallback=True, warmup_steps=3)[0]
        for step in (0, 1):
            assert adapt(compressor, step, densest=4000, peers_union=math.nan) is None
        assert adapt(compressor, 2, densest=4000, peers_union=math.nan) is not None
        assert compressor.is_dense(3)

    def test_warm_up_is_dense_and_not_an_overload(self):
        compressor = make_compressors("tagc", 2, 5003, dense_fallback=True, warmup_steps=2)[0]
        for step in (0, 1):
            assert compressor.is_dense(step)
            assert adapt(compressor, step, densest=5003, peers_union=math.nan) is None
        assert not compressor.is_dense(2)


class TestAdaptiveRatio:
    """The sketch's size follows the union of the peers."""

    @pytest.mark.parametrize(("ranks", "density"), [(2, 0.2), (4, 0.2), (8, 0.05)])
    def test_the_load_stays_under_its_limit_and_nothing_is_lost(self, ranks, density):
        numel = 20_011
        compressors = make_compressors(
            "tagc2", ranks, numel, adaptive_ratio=True, max_load=0.65, sparsity=1 - density, dense_fallback=True
        )
        applied, produced = torch.zeros(ranks, numel), torch.zeros(ranks, numel)
        for step in range(5):
            gradients = integer_gradients(ranks, numel, step)
            sums, nbytes = run_step(compressors, gradients, step)
            assert nbytes == sum(compressors[0].expected_bytes(step).values())
            applied, produced = applied + sums, produced + gradients.sum(dim=0)
            assert torch.equal(applied + total_residual(compressors), produced)
            load = max(c.payload.stats.peers_union.item() for c in compressors) / compressors[0].layout.sketch_numel
            assert load <= 0.65
            assert load > 0.5, "room to spare costs bytes"
            self.adapt_all(compressors, step)

    def test_correlated_ranks_get_a_smaller_sketch(self):
        """All ranks choose the same positions: the union is the density, not what independence predicts."""
        compressors = make_compressors("tagc2", 4, 20_011, adaptive_ratio=True, max_load=0.65, dense_fallback=True)
        gradients = integer_gradients(1, 20_011)[0].expand(4, 4, -1)
        sizes = []
        for step in range(3):
            run_step(compressors, gradients, step)
            self.adapt_all(compressors, step)
            sizes.append(compressors[0].layout.sketch_numel)
        assert sizes[-1] < 0.6 * make_compressors("tagc2", 4, 20_011, adaptive_ratio=True)[0].layout.sketch_numel
        assert compressors[0].payload.stats.unresolved.item() == 0

    def test_an_overload_grows_the_sketch_at_once_and_returns(self):
        compressors = make_compressors("tagc2", 3, 20_011, adaptive_ratio=True, max_load=0.65, sparsity=0.95)
        for compressor in compressors:
            compressor.layout = plan_layout(20_011, 16.0)
        gradients = integer_gradients(3, 20_011)
        sums, _ = run_step(compressors, gradients, 0)
        assert compressors[0].payload.stats.unresolved.item() > 0
        assert torch.equal(sums + total_residual(compressors), gradients.sum(dim=0))
        self.adapt_all(compressors, 0)
        run_step(compressors, gradients, 1)
        assert compressors[0].payload.stats.unresolved.item() == 0

    def test_a_union_that_needs_more_than_dense_goes_dense(self):
        compressor = make_compressors(
            "tagc2", 8, 20_011, adaptive_ratio=True, max_load=0.65, value_dtype="bfloat16", dense_fallback=True
        )[0]
        assert compressor.is_dense(10**9)
        assert "compressor.sparsity" in compressor.explain_dense()

    @staticmethod
    def adapt_all(compressors, step):
        densest = max(c.payload.stats.densest.item() for c in compressors)
        peers_union = max(c.payload.stats.peers_union.item() for c in compressors)
        messages = {adapt(c, step, densest=densest, peers_union=peers_union) for c in compressors}
        assert messages == {None}
