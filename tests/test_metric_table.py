"""The table of metrics: every name has one row, and what is made of the rows follows them."""

import pytest
from wandb_file import examples

from diffllm.metrics.metric import Curve, Heatmap, Layers
from diffllm.metrics.sinks import Sinks
from diffllm.metrics.table import METRICS, SECTIONS, metric_of

NAMES = [metric.name for metric in METRICS]


def has_whole(metric):
    """Whether there is a metric of all that this one tells apart: eval/loss, of eval/loss/*."""
    return metric.name.endswith("/*") and metric.quantity in NAMES


def test_names_and_quantities_are_told_apart():
    quantities = [metric.quantity for metric in METRICS if not has_whole(metric)]
    assert len(set(NAMES)) == len(NAMES)
    assert len(set(quantities)) == len(quantities)


def test_a_full_name_has_the_row_whose_pattern_covers_it():
    for metric in METRICS:
        for name in examples(metric.name):
            assert metric_of(name) is metric
            assert [other for other in METRICS if other.covers(name)] == [metric]
        if not has_whole(metric):
            assert metric_of(metric.quantity) is metric


def test_every_row_says_what_it_is_and_where_it_is_shown():
    for metric in METRICS:
        assert metric.section in SECTIONS
        assert metric.meaning
        assert metric.meaning[-1] not in ".:"
        assert not metric.plots or metric.section.report, metric.name
        layered = metric.name.endswith("/*") and metric.name != "grad_norm/*"
        for plot in metric.plots:
            assert layered or not isinstance(plot, Layers | Heatmap)
            if isinstance(plot, Curve) and plot.spikes:
                metric_of(plot.spikes[0])
        if metric.probe:
            assert metric.combine
        column = metric.column
        if column and column.second:
            assert metric_of(column.second).column


@pytest.mark.parametrize("name", ["train/los", "hidden_top2/layer_00", "attn_entropy_2/layer_01"])
def test_a_name_without_a_row_is_not_written(name):
    with pytest.raises(KeyError, match=r"no row in diffllm/metrics/table\.py"):
        metric_of(name)
    sinks = Sinks(None, None)
    with pytest.raises(KeyError, match="no row"):
        sinks.write(1, 64, {name: 0.5})
