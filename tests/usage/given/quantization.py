class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.out = nn.Linear(width, width)

    def forward(self, x):
        return self.out(x)


model = Net(width=64)
for block in model.blocks:
    block.attention = Attention(64)
