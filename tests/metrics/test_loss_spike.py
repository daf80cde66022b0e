"""A loss spike is the change of the mean loss over a round of sites."""

from moefold.train.sites.outer_evaluation import LossSpike


def test_spike_is_the_change_of_the_mean_loss_by_a_round():
    spike = LossSpike(gap=3)
    for loss in (9.0, 4.0, 3.0, 2.0):
        spike.add(loss)
    spike.mark()
    assert spike.last is None
    for loss in (5.0, 4.0):
        spike.add(loss)
        assert spike.last is None
    spike.add(3.0)
    assert spike.last == 4.0 - 3.0
    spike.add(1.0)
    assert spike.last == 4.0 - 3.0


def test_rounds_with_too_few_steps_before_them_have_none():
    spike = LossSpike(gap=20)
    for loss in (1.0, 2.0, 3.0, 4.0):
        spike.add(loss)
    spike.mark()
    for _ in range(6):
        spike.add(1.0)
    assert spike.last is None
    spike.mark()
    for _ in range(5):
        spike.add(2.0)
    assert spike.last == 1.0
