"""What happens to a gradient: apply it, follow it with an average, set its learning rate."""

from evenstep.optim.multi import MultiOptimizer

__all__ = ["MultiOptimizer"]
