"""Adapters to other libraries: models of `transformers`, modules of Lightning. The core never imports them."""
