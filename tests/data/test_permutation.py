import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffllm.data.samples import permute

SEEDS = st.integers(min_value=0, max_value=2**63)
EPOCHS = st.integers(min_value=0, max_value=2**31)


@given(n=st.integers(min_value=1, max_value=5000), seed=SEEDS, epoch=EPOCHS)
def test_is_a_bijection(n: int, seed: int, epoch: int) -> None:
    assert sorted(permute(np.arange(n), n, seed, epoch).tolist()) == list(range(n))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 65_536, 65_537])
def test_is_a_bijection_around_powers_of_the_domain(n: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(n), n, 7, 1)), np.arange(n))


@given(n=st.integers(min_value=1, max_value=2**40), seed=SEEDS, data=st.data())
def test_an_element_does_not_depend_on_what_it_is_asked_with(
    n: int, seed: int, data: st.DataObject
) -> None:
    indices = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=8))
    together = permute(np.array(indices), n, seed, 0)
    alone = [permute(np.array([index]), n, seed, 0)[0] for index in indices]
    assert together.tolist() == alone
    assert ((together >= 0) & (together < n)).all()


@given(n=st.integers(min_value=200, max_value=5000), seed=SEEDS, epoch=EPOCHS)
def test_differs_between_epochs_and_seeds(n: int, seed: int, epoch: int) -> None:
    order = permute(np.arange(n), n, seed, epoch)
    for other in (
        permute(np.arange(n), n, seed, epoch + 1),
        permute(np.arange(n), n, seed + 1, epoch),
    ):
        # Two random permutations agree in one place on average.
        assert (order == other).sum() < 20


@pytest.mark.parametrize("n", [1000, 4096, 10_007])
def test_looks_shuffled(n: int) -> None:
    order = permute(np.arange(n), n, 3, 2)
    bound = 5 / np.sqrt(n)
    assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < bound
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < bound
    assert (order == np.arange(n)).sum() < 10


def test_small_sets_reach_every_order() -> None:
    orders = {tuple(permute(np.arange(4), 4, seed, 0).tolist()) for seed in range(500)}
    assert len(orders) == 24


def test_the_order_is_part_of_the_checkpoint_format() -> None:
    """A change here would silently change what a resumed run reads."""
    assert permute(np.arange(10), 10, 0, 0).tolist() == [8, 1, 5, 2, 6, 7, 4, 3, 9, 0]
    large = permute(np.arange(3), 10**12, 1234, 5)
    assert large.tolist() == [767138975145, 822644210034, 182445646350]
