from torch.nn.functional import cross_entropy

import evenstep


class Classify(evenstep.Task):
    def loss(self, output, batch):
        right = (output.argmax(-1) == batch[1]).sum()
        return evenstep.Loss(
            cross_entropy(output, batch[1], reduction="sum"), metrics={"accuracy": (right, len(output))}
        )
