Trainer(..., folder="runs/first", updates=2).train()
trainer = Trainer(..., folder="runs/first", updates=4, train=evenstep.Training(clip_norm=1.0))


def use():
    assert trainer.progress.update == 2
