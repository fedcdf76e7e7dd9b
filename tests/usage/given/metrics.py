PAD = 0
