from fake_group import Fake

from evenstep.pipeline import Action, Op

device = "cpu"


def Block(width):
    return nn.Linear(width, width)


encoder, block_0, block_1, scores = (
    nn.Linear(16, 16),
    nn.Bilinear(16, 16, 16),
    nn.Bilinear(16, 16, 16),
    nn.Linear(16, 4),
)
embedding = nn.Linear(8, 16)
test = [{"ids": torch.tensor(number), "x": torch.randn(16)} for number in range(128)]


class Mesh:
    """Two ranks of a pipeline, as one process that holds all stages."""

    @staticmethod
    def of(world, pipeline):
        assert (world.ranks, pipeline) == (2, 2)
        return evenstep.Mesh()


class Task(evenstep.Task):
    def inputs(self, batch):
        return batch["x"]


def Processes(device):
    """One of two processes, whose peer is made up."""
    return Fake(0, 2)


def my_order(layout, microbatches):
    return tuple(
        tuple(Action(op, stage, each) for each in microbatches for op in (Op.FORWARD, Op.BACKWARD))
        for stage in range(layout.stages)
    )


def use():
    assert tuple(" ".join(map(str, rank)) for rank in order) == ("0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")
