import math

PAD = 0
images = boxes = dataset
Enclose = Classify
model = Net()


class Reads(nn.Module):
    """A model of tokens that gives what a task wants."""

    def __init__(self, gives):
        super().__init__()
        self.embedding, self.head, self.gives = nn.Embedding(8, 8), Head(8, 8), gives

    def forward(self, source=None, target=None, labels=None):
        tokens = labels if target is None else target
        hidden, matrix = self.head(self.embedding(tokens))
        scores = hidden @ matrix.T
        if self.gives == "loss":
            return {"loss": cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)}
        return scores if self.gives == "scores" else (hidden, matrix)


def use():
    assert len(predictions) == 4
    rows = [
        {"source": torch.arange(6), "target": torch.arange(6) % (3 + n % 3), "labels": torch.arange(6)}
        for n in range(32)
    ]
    data = evenstep.MapData(rows, global_batch_size=8, micro_batch_size=4)
    for task, gives in ((Translate(), "scores"), (NextWord(), "hidden"), (CausalLm(), "loss")):
        if gives != "scores":
            task.inputs = lambda batch: {"labels": batch["labels"]}
        trained = Trainer(..., model=Reads(gives), task=task, data=data, evaluations=data, updates=4)
        trained.train()
        assert trained.progress.update == 4
