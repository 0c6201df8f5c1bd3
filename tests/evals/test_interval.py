import numpy as np
import pytest

from quest_jax.evals.interval import bootstrap, share


def test_the_interval_covers_the_mean_as_often_as_it_says():
    draw = np.random.default_rng(0)
    inside = 0
    for i in range(200):
        low, high = bootstrap((draw.random(40) < 0.7).astype(float).tolist(), seed=i)[1:]
        inside += low <= 0.7 <= high
    assert 0.88 <= inside / 200 <= 0.99


def test_questions_of_one_text_are_no_independent_samples():
    values, groups = [1.0] * 10 + [0.0] * 10, [0] * 10 + [1] * 10
    apart, together = bootstrap(values), bootstrap(values, groups)
    assert apart.mean == together.mean == 0.5
    assert together.low == 0 and together.high == 1 and apart.low > 0.2


def test_texts_of_different_sizes_weigh_by_their_questions():
    assert bootstrap([1.0, 0.0, 0.0, 0.0], [0, 1, 1, 1]).mean == 0.25
    assert str(bootstrap([0.5, 0.5])) == "0.500 [0.500, 0.500]"
    assert bootstrap([1.0, 0.0] * 9, seed=1) == bootstrap([1.0, 0.0] * 9, seed=1)


@pytest.mark.parametrize(("values", "groups"), [([], None), ([1.0], [0, 1])])
def test_what_has_no_mean_is_refused(values, groups):
    with pytest.raises(ValueError, match="bootstrap: expected"):
        bootstrap(values, groups)


def test_all_alike_is_no_certainty():
    """The ends are where the binomial tail is 2.5 %."""
    right, wrong = share([1.0] * 12), share([0.0] * 12)
    assert right.low**12 == pytest.approx(0.025) and (right.mean, right.high) == (1, 1)
    assert (wrong.mean, wrong.low, wrong.high) == (0, 0, pytest.approx(1 - right.low))
    assert share([1.0, 0.0, 0.5]) == bootstrap([1.0, 0.0, 0.5])


def test_all_alike_in_part_is_no_certainty_either():
    """At the ends of the interval all cases alike have a probability of 2.5 %, whatever the others may score."""
    one, many = share([0.25]), share([0.25] * 40)
    assert (one.mean, one.low, one.high) == pytest.approx((0.25, 0.25 * 0.025, 1 - 0.75 * 0.025))
    assert 0.2 < many.low < 0.25 < many.high < 0.35
