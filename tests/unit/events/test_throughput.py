from evenstep.events.metrics.derived import Throughput
from evenstep.events.metrics.series import Record


def test_a_loss_that_another_rank_has_put_counts_for_its_own_window() -> None:
    """Where the first rank has no micro-batch of an update, or none of the losses, they come behind what it has put."""
    throughput = Throughput(["train/loss"], "tokens")
    end, loss = (2, "perf/update_s", 0.5, 1.0), (2, "train/loss", 3.0, 30.0)
    first = [Record(1, "train/loss", 2.0, 20.0), Record(*end), Record(*loss)]
    assert [(record.update, record.name, record.value) for record in throughput(first)] == [
        (2, "progress/tokens", 50.0),
        (2, "perf/tokens_per_s", 50.0),
    ]
    assert throughput([Record(3, "perf/update_s", 0.5, 1.0), Record(3, "train/loss", 1.0, 10.0)])[0].value == 60.0
