from evenstep import Writer


class Loki(Writer):
    def __init__(self, url: str):
        self.url = url

    def write(self, records): ...
