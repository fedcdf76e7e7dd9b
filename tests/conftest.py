"""What holds for all tests."""

from hypothesis import settings

# How long an example takes depends on what else the machine does; what a test may take in all is pytest's timeout.
settings.register_profile("evenstep", deadline=None)
settings.load_profile("evenstep")
