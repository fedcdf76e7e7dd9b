held_out = torch.randn(8, 16), torch.arange(8) % 4


def microbatches():
    return [(torch.randn(4, 16), torch.arange(4) % 4) for _ in range(2)]
