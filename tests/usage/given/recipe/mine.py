from evenstep import Hook, Writer


class Loki(Writer):
    def __init__(self, url: str):
        self.url = url

    def write(self, records): ...


class Notify(Hook):
    def __init__(self, below: float):
        self.below = below
