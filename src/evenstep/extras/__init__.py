"""What not every run needs, one package per purpose. The core never imports it; see `evenstep.lazy`."""
