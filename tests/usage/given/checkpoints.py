Trainer(..., folder="runs/first", updates=2).train()
trainer = Trainer(..., folder="runs/first", updates=4, train=evenstep.Training(clip_norm=1.0))
folder, update, group = "runs/library", 1, evenstep.parallel.Group()
live_weight = torch.zeros(192, 768)
state = {"model": {"weight": torch.randn(192, 768)}}


def use():
    assert trainer.progress.update == 2
    assert torch.equal(weight, state["model"]["weight"])
    assert torch.equal(rows, weight[128:])
