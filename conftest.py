"""What pytest must not import here: modules that derive classes from those of an extra that is not installed."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("torchao") else ["src/evenstep/precision/float8_linear.py"]
