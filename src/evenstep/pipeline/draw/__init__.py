"""Pictures of simulated plans; one file per form."""

from evenstep.pipeline.draw.svg import draw_svg
from evenstep.pipeline.draw.text import Piece, draw_text
from evenstep.pipeline.draw.trace import draw_trace

__all__ = ["Piece", "draw_svg", "draw_text", "draw_trace"]
