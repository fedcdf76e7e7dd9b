Trainer(..., folder="runs/first", updates=1).train()


def squared(output, wanted):
    return (output - wanted).square().sum()


def use():
    assert len(report.loaded) == 2
    pairs = [(torch.randn(16), torch.randn(4)) for _ in range(16)]
    data = evenstep.MapData(pairs, global_batch_size=8, micro_batch_size=4)
    taught = Trainer(..., task=MeanTeacher(), model=Net(), data=data, updates=2, train=Training(ema=Ema(decay=0.9)))
    taught.train()
    assert taught.progress.update == 2
