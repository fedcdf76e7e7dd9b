Trainer(..., folder="runs/first", updates=1).train()


def use():
    assert len(report.loaded) == 14 and scores.shape == (1, 4)
