def use():
    assert len(found.rates) > 10 and found.suggestion is not None
