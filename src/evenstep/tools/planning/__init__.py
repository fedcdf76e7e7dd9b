"""Pipeline plans before they run: measured, balanced, simulated, drawn, and written down."""
