"""Pictures of simulated plans; one file per form."""

from evenstep.extras.planning.draw.svg import draw_svg
from evenstep.extras.planning.draw.text import draw_text
from evenstep.extras.planning.draw.trace import draw_trace

__all__ = ["draw_svg", "draw_text", "draw_trace"]
