"""All that an update computes as one compiled graph: the function, its graphs, and the update around them."""
