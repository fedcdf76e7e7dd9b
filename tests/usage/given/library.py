dataset = dataset * 2
held_out_data = evenstep.MapData(held_out, global_batch_size=8, shuffle=False)


def use():
    assert result.update == 160
