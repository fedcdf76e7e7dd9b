"""What no run needs: planning of pipelines and the report. The core never imports it; see `evenstep.plugins`."""
