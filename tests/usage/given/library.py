dataset = dataset * 2


def use():
    assert trainer.progress.update == 160
